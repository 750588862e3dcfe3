//! Vectors of 32-bit lanes, one row a lane: what the wide-row kernels need of an instruction set.

// Every method is one or a few instructions under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use half::f16;
use std::arch::x86_64::*;

/// A vector of 32-bit integers, the floats that go with it, and the two ways to sum products of bytes.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and pointers good for a whole vector (half as many bytes for
/// `load_f16`, four bytes for `broadcast`). Methods are inlined into a function that enables the set.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Lanes: Copy {
    /// Lanes: the rows of a tile.
    const ROWS: usize;
    /// Bytes of a vector.
    const BYTES: usize = 4 * Self::ROWS;
    /// Tokens that a register tile of two row vectors holds at most.
    const TOKENS: usize;
    /// Floats, one a row.
    type F: Copy;
    /// Accumulators of one token in decode, where slots are masked and not shifted.
    type Slots: Copy;
    /// Accumulator of one token in prefill, good for 128 columns.
    type Sum: Copy;

    unsafe fn splat(v: i32) -> Self;
    unsafe fn load(p: *const u8) -> Self;
    /// Four bytes, repeated.
    unsafe fn broadcast(p: *const i8) -> Self;
    unsafe fn to_f(self) -> Self::F;
    unsafe fn zero_f() -> Self::F;
    unsafe fn splat_f(v: f32) -> Self::F;
    unsafe fn load_f16(p: *const f16) -> Self::F;
    unsafe fn store_f(p: *mut f32, v: Self::F);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// The slots of a vector of codes, masked where they stand.
    unsafe fn mask(self) -> [Self; 4];
    unsafe fn slots(offset: i32) -> Self::Slots;
    /// Adds the dots of four masked slots with 16 activations at `y`, `stride` bytes between fours.
    unsafe fn slots_dot(acc: Self::Slots, u: [Self; 4], y: *const i8, stride: usize)
    -> Self::Slots;
    /// To be called after every four words.
    unsafe fn slots_fold(acc: Self::Slots) -> Self::Slots;
    unsafe fn slots_sum(acc: Self::Slots) -> Self;

    /// The slots of a vector of codes, each as a byte 0 to 3.
    unsafe fn shift(self) -> [Self; 4];
    unsafe fn sum_start(total: Self) -> Self::Sum;
    unsafe fn sum_dot(acc: Self::Sum, u: Self, y: Self) -> Self::Sum;
    unsafe fn sum_end(total: Self, acc: Self::Sum) -> Self;
}

/// The methods that differ in nothing but the names of their intrinsics.
macro_rules! plain {
    ($name:ident, $float:ty, $splat:ident, $load:ident, $cvt:ident, $zerof:ident, $splatf:ident,
     $half:ident, $loadh:ident, $storef:ident, $mul:ident, $fma:ident) => {
        type F = $float;
        #[inline(always)]
        unsafe fn splat(v: i32) -> Self {
            $name($splat(v))
        }
        #[inline(always)]
        unsafe fn load(p: *const u8) -> Self {
            $name($load(p.cast()))
        }
        #[inline(always)]
        unsafe fn broadcast(p: *const i8) -> Self {
            $name($splat(p.cast::<i32>().read_unaligned()))
        }
        #[inline(always)]
        unsafe fn to_f(self) -> $float {
            $cvt(self.0)
        }
        #[inline(always)]
        unsafe fn zero_f() -> $float {
            $zerof()
        }
        #[inline(always)]
        unsafe fn splat_f(v: f32) -> $float {
            $splatf(v)
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> $float {
            $half($loadh(p.cast()))
        }
        #[inline(always)]
        unsafe fn store_f(p: *mut f32, v: $float) {
            $storef(p, v)
        }
        #[inline(always)]
        unsafe fn mul(a: $float, b: $float) -> $float {
            $mul(a, b)
        }
        #[inline(always)]
        unsafe fn fma(a: $float, b: $float, c: $float) -> $float {
            $fma(a, b, c)
        }
    };
}

/// 256-bit vectors share everything but the dot product.
macro_rules! plain256 {
    ($name:ident) => {
        const ROWS: usize = 8;
        plain!(
            $name,
            __m256,
            _mm256_set1_epi32,
            _mm256_loadu_si256,
            _mm256_cvtepi32_ps,
            _mm256_setzero_ps,
            _mm256_set1_ps,
            _mm256_cvtph_ps,
            _mm_loadu_si128,
            _mm256_storeu_ps,
            _mm256_mul_ps,
            _mm256_fmadd_ps
        );
    };
}

/// The methods of sets that have `vpdpbusd`: an accumulator a slot, `a3 + 4 (a2 + 4 (a1 + 4 a0)) = 64 dot(u, y)`.
macro_rules! dot_product {
    ($name:ident, $dot:ident, $splat8:ident, $and:ident, $add:ident, $shl:ident, $shr:ident, $sar:ident) => {
        type Slots = [Self; 4];
        type Sum = Self;
        #[inline(always)]
        unsafe fn mask(self) -> [Self; 4] {
            [
                $name($and(self.0, $splat8(0x03))),
                $name($and(self.0, $splat8(0x0c))),
                $name($and(self.0, $splat8(0x30))),
                $name($and(self.0, $splat8(0xc0u8 as i8))),
            ]
        }
        #[inline(always)]
        unsafe fn slots(offset: i32) -> [Self; 4] {
            [
                Self::splat(offset),
                Self::splat(0),
                Self::splat(0),
                Self::splat(0),
            ]
        }
        #[inline(always)]
        unsafe fn slots_dot(
            acc: [Self; 4],
            u: [Self; 4],
            y: *const i8,
            stride: usize,
        ) -> [Self; 4] {
            [
                $name($dot(acc[0].0, u[0].0, Self::broadcast(y).0)),
                $name($dot(acc[1].0, u[1].0, Self::broadcast(y.add(stride)).0)),
                $name($dot(acc[2].0, u[2].0, Self::broadcast(y.add(2 * stride)).0)),
                $name($dot(acc[3].0, u[3].0, Self::broadcast(y.add(3 * stride)).0)),
            ]
        }
        #[inline(always)]
        unsafe fn slots_fold(acc: [Self; 4]) -> [Self; 4] {
            acc
        }
        #[inline(always)]
        unsafe fn slots_sum([a0, a1, a2, a3]: [Self; 4]) -> Self {
            let s = $add($shl::<2>(a0.0), a1.0);
            let s = $add($shl::<2>(s), a2.0);
            let s = $add($shl::<2>(s), a3.0);
            $name($sar::<6>(s))
        }
        #[inline(always)]
        unsafe fn shift(self) -> [Self; 4] {
            let v = self.0;
            let three = $splat8(3);
            [
                $name($and(v, three)),
                $name($and($shr::<2>(v), three)),
                $name($and($shr::<4>(v), three)),
                $name($and($shr::<6>(v), three)),
            ]
        }
        #[inline(always)]
        unsafe fn sum_start(total: Self) -> Self {
            total
        }
        #[inline(always)]
        unsafe fn sum_dot(acc: Self, u: Self, y: Self) -> Self {
            $name($dot(acc.0, u.0, y.0))
        }
        #[inline(always)]
        unsafe fn sum_end(_: Self, acc: Self) -> Self {
            acc
        }
    };
}

macro_rules! dot_product256 {
    ($name:ident, $dot:ident) => {
        dot_product!(
            $name,
            $dot,
            _mm256_set1_epi8,
            _mm256_and_si256,
            _mm256_add_epi32,
            _mm256_slli_epi32,
            _mm256_srli_epi32,
            _mm256_srai_epi32
        );
    };
}

/// 16 rows: AVX-512F, BW and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512(pub __m512i);

// SAFETY: each method is made of instructions of the set, as the trait asks.
unsafe impl Lanes for Avx512 {
    const ROWS: usize = 16;
    const TOKENS: usize = 8;
    plain!(
        Avx512,
        __m512,
        _mm512_set1_epi32,
        _mm512_loadu_si512,
        _mm512_cvtepi32_ps,
        _mm512_setzero_ps,
        _mm512_set1_ps,
        _mm512_cvtph_ps,
        _mm256_loadu_si256,
        _mm512_storeu_ps,
        _mm512_mul_ps,
        _mm512_fmadd_ps
    );
    dot_product!(
        Avx512,
        _mm512_dpbusd_epi32,
        _mm512_set1_epi8,
        _mm512_and_si512,
        _mm512_add_epi32,
        _mm512_slli_epi32,
        _mm512_srli_epi32,
        _mm512_srai_epi32
    );
}

/// 8 rows: AVX-VNNI, in VEX encoding.
#[derive(Clone, Copy)]
pub struct AvxVnni(pub __m256i);

// SAFETY: as above.
unsafe impl Lanes for AvxVnni {
    const TOKENS: usize = 6;
    plain256!(AvxVnni);
    dot_product256!(AvxVnni, _mm256_dpbusd_avx_epi32);
}

/// 8 rows: AVX-512VL and VNNI, the same in EVEX encoding.
#[derive(Clone, Copy)]
pub struct Avx512Vl(pub __m256i);

// SAFETY: as above.
unsafe impl Lanes for Avx512Vl {
    const TOKENS: usize = 8;
    plain256!(Avx512Vl);
    dot_product256!(Avx512Vl, _mm256_dpbusd_epi32);
}

/// 8 rows: AVX2 alone, which sums pairs of products in 16 bits.
///
/// 16 bits hold what is added before the next widening, for any codes and activations: two slots as u and 4u, four words:
/// 2 * 4 * 2 * 12 * 127 = 24,384; all slots as u, eight words: 4 * 8 * 2 * 3 * 127 = 24,384.
#[derive(Clone, Copy)]
pub struct Avx2(pub __m256i);

/// Dots of slots 0 and 2 (as u), of slots 1 and 3 (as 4u), both in 16 bits, and four times the sum of older ones.
#[derive(Clone, Copy)]
pub struct Avx2Slots {
    ones: __m256i,
    fours: __m256i,
    sum: __m256i,
}

// SAFETY: as above.
unsafe impl Lanes for Avx2 {
    const TOKENS: usize = 4;
    plain256!(Avx2);
    type Slots = Avx2Slots;
    type Sum = __m256i;

    #[inline(always)]
    unsafe fn mask(self) -> [Self; 4] {
        let high = _mm256_srli_epi32::<4>(self.0);
        let (ones, fours) = (_mm256_set1_epi8(0x03), _mm256_set1_epi8(0x0c));
        let and = |v, m| Avx2(_mm256_and_si256(v, m));
        [
            and(self.0, ones),
            and(self.0, fours),
            and(high, ones),
            and(high, fours),
        ]
    }
    #[inline(always)]
    unsafe fn slots(offset: i32) -> Avx2Slots {
        let zero = _mm256_setzero_si256();
        Avx2Slots {
            ones: zero,
            fours: zero,
            sum: _mm256_set1_epi32(4 * offset),
        }
    }
    #[inline(always)]
    unsafe fn slots_dot(acc: Avx2Slots, u: [Self; 4], y: *const i8, stride: usize) -> Avx2Slots {
        let dot = |s: usize| _mm256_maddubs_epi16(u[s].0, Self::broadcast(y.add(s * stride)).0);
        Avx2Slots {
            ones: _mm256_add_epi16(_mm256_add_epi16(acc.ones, dot(0)), dot(2)),
            fours: _mm256_add_epi16(_mm256_add_epi16(acc.fours, dot(1)), dot(3)),
            ..acc
        }
    }
    #[inline(always)]
    unsafe fn slots_fold(acc: Avx2Slots) -> Avx2Slots {
        let ones = _mm256_madd_epi16(acc.ones, _mm256_set1_epi16(4));
        let fours = _mm256_madd_epi16(acc.fours, _mm256_set1_epi16(1));
        let zero = _mm256_setzero_si256();
        Avx2Slots {
            ones: zero,
            fours: zero,
            sum: _mm256_add_epi32(acc.sum, _mm256_add_epi32(ones, fours)),
        }
    }
    #[inline(always)]
    unsafe fn slots_sum(acc: Avx2Slots) -> Self {
        Avx2(_mm256_srai_epi32::<2>(acc.sum))
    }
    #[inline(always)]
    unsafe fn shift(self) -> [Self; 4] {
        let v = self.0;
        let three = _mm256_set1_epi8(3);
        [
            Avx2(_mm256_and_si256(v, three)),
            Avx2(_mm256_and_si256(_mm256_srli_epi32::<2>(v), three)),
            Avx2(_mm256_and_si256(_mm256_srli_epi32::<4>(v), three)),
            Avx2(_mm256_and_si256(_mm256_srli_epi32::<6>(v), three)),
        ]
    }
    #[inline(always)]
    unsafe fn sum_start(_: Self) -> __m256i {
        _mm256_setzero_si256()
    }
    #[inline(always)]
    unsafe fn sum_dot(acc: __m256i, u: Self, y: Self) -> __m256i {
        _mm256_add_epi16(acc, _mm256_maddubs_epi16(u.0, y.0))
    }
    #[inline(always)]
    unsafe fn sum_end(total: Self, acc: __m256i) -> Self {
        Avx2(_mm256_add_epi32(
            total.0,
            _mm256_madd_epi16(acc, _mm256_set1_epi16(1)),
        ))
    }
}
