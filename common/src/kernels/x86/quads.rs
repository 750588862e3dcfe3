//! Vectors of 16-byte lanes: what the kernels on tiles of four rows need of an instruction set.

// Every method is a few instructions under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

/// A vector of codes or activations, two or four lanes of 16 bytes.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and pointers good for what it reads: a whole vector, or the
/// bytes that its name gives. Methods are inlined into a function that enables the set.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Quads: Copy {
    /// Lanes of 16 bytes.
    const LANES: usize;
    /// Tiles of row pairs that decode together, to share their activations.
    const TILES: usize;
    /// Tokens of a register tile with two vectors of rows.
    const TOKENS: usize;
    /// What decode multiplies a sum by, as a shift.
    const SHIFT: i32;
    /// Floats, four a lane.
    type F: Copy;
    /// Accumulators in decode, good for 128 columns, where slots are masked and not shifted.
    type Slots: Copy;

    unsafe fn zero() -> Self;
    unsafe fn load(p: *const u8) -> Self;

    /// The slots of a vector of codes, masked where they stand.
    unsafe fn mask(self) -> [Self; 4];
    unsafe fn slots() -> Self::Slots;
    /// Adds the dots of four masked slots with their activations.
    unsafe fn slots_dot(acc: Self::Slots, u: [Self; 4], y: [Self; 4]) -> Self::Slots;
    /// The sums of a 32-bit lane, shifted up by `SHIFT`.
    unsafe fn slots_sum(acc: Self::Slots) -> Self;
    /// 16 bytes, repeated.
    unsafe fn broadcast_16(p: *const i8) -> Self;
    /// The activations of a row pair's words `part * LANES ..`: for each slot, a lane repeats its word's 8 bytes.
    unsafe fn pair_activations(y: *const i8, part: usize) -> [Self; 4];
    /// Sums of four rows, one a lane, in as many vectors as that takes.
    unsafe fn row_sums(v: &[Self]) -> __m128i;
    /// Sums of four rows, two a vector, one in each half of every lane.
    unsafe fn pair_sums(a: Self, b: Self) -> __m128i;

    /// A lane from each pointer, of which the first `LANES` are used.
    unsafe fn gather(p: [*const u8; 4]) -> Self;
    /// The slots of a vector of codes, each as a byte 0 to 3.
    unsafe fn shift(self) -> [Self; 4];
    /// The low halves of each lane of both, and the high halves.
    unsafe fn zip(a: Self, b: Self) -> [Self; 2];
    /// 8 bytes, repeated.
    unsafe fn broadcast_8(p: *const i8) -> Self;
    /// Adds a dot of shifted slots, of at most 128 columns before `merge`.
    unsafe fn dot(acc: Self, u: Self, y: Self) -> Self;
    /// In each lane: the sum of the two halves of `a`, then of `b`.
    unsafe fn merge(a: Self, b: Self) -> Self;
    unsafe fn add(a: Self, b: Self) -> Self;
    /// In each lane: the first of two numbers twice, then the second twice.
    unsafe fn twice(p: *const i32) -> Self;
    /// As [`Quads::twice`].
    unsafe fn twice_f(p: *const f32) -> Self::F;
    /// Four f16 from each pointer, of which the first `LANES / 2` are used; in each lane a pair, repeated.
    unsafe fn pair_scales(p: [*const u8; 2]) -> Self::F;
    unsafe fn zero_f() -> Self::F;
    unsafe fn to_f(self) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn store_f(p: *mut f32, v: Self::F);
}

/// The slots of sets that have `vpdpbusd`: an accumulator each, `a3 + 4 (a2 + 4 (a1 + 4 a0)) = 64 dot(u, y)`.
macro_rules! dot_product {
    ($name:ident, $dot:ident, $splat8:ident, $and:ident, $add:ident, $shl:ident) => {
        const SHIFT: i32 = 6;
        type Slots = [Self; 4];
        #[inline(always)]
        unsafe fn mask(self) -> [Self; 4] {
            let and = |m: u8| $name($and(self.0, $splat8(m as i8)));
            [and(0x03), and(0x0c), and(0x30), and(0xc0)]
        }
        #[inline(always)]
        unsafe fn slots() -> [Self; 4] {
            [Self::zero(); 4]
        }
        #[inline(always)]
        unsafe fn slots_dot(acc: [Self; 4], u: [Self; 4], y: [Self; 4]) -> [Self; 4] {
            std::array::from_fn(|s| $name($dot(acc[s].0, u[s].0, y[s].0)))
        }
        #[inline(always)]
        unsafe fn slots_sum([a0, a1, a2, a3]: [Self; 4]) -> Self {
            let s = $add($shl::<2>(a0.0), a1.0);
            let s = $add($shl::<2>(s), a2.0);
            $name($add($shl::<2>(s), a3.0))
        }
        #[inline(always)]
        unsafe fn dot(acc: Self, u: Self, y: Self) -> Self {
            $name($dot(acc.0, u.0, y.0))
        }
        #[inline(always)]
        unsafe fn merge(a: Self, b: Self) -> Self {
            Self::merge_32(a, b)
        }
    };
}

/// What 256-bit vectors share.
macro_rules! common256 {
    ($name:ident) => {
        const LANES: usize = 2;
        type F = __m256;
        #[inline(always)]
        unsafe fn zero() -> Self {
            $name(_mm256_setzero_si256())
        }
        #[inline(always)]
        unsafe fn load(p: *const u8) -> Self {
            $name(_mm256_loadu_si256(p.cast()))
        }
        #[inline(always)]
        unsafe fn broadcast_16(p: *const i8) -> Self {
            $name(_mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())))
        }
        #[inline(always)]
        unsafe fn pair_activations(y: *const i8, part: usize) -> [Self; 4] {
            let y = y.add(64 * part).cast::<u8>();
            let halves = |at: usize| Self::gather([y.add(at), y.add(at + 32), y, y]).0;
            let (low, high) = (halves(0), halves(16));
            [
                $name(_mm256_unpacklo_epi64(low, low)),
                $name(_mm256_unpackhi_epi64(low, low)),
                $name(_mm256_unpacklo_epi64(high, high)),
                $name(_mm256_unpackhi_epi64(high, high)),
            ]
        }
        #[inline(always)]
        unsafe fn row_sums(v: &[Self]) -> __m128i {
            let pairs = _mm256_hadd_epi32(v[0].0, v[1].0);
            let rows = _mm256_hadd_epi32(pairs, pairs);
            _mm_unpacklo_epi32(
                _mm256_castsi256_si128(rows),
                _mm256_extracti128_si256::<1>(rows),
            )
        }
        #[inline(always)]
        unsafe fn pair_sums(a: Self, b: Self) -> __m128i {
            let rows = _mm256_hadd_epi32(a.0, b.0);
            _mm_add_epi32(
                _mm256_castsi256_si128(rows),
                _mm256_extracti128_si256::<1>(rows),
            )
        }
        #[inline(always)]
        unsafe fn gather(p: [*const u8; 4]) -> Self {
            let lane = |i: usize| _mm_loadu_si128(p[i].cast());
            $name(_mm256_inserti128_si256::<1>(
                _mm256_castsi128_si256(lane(0)),
                lane(1),
            ))
        }
        #[inline(always)]
        unsafe fn shift(self) -> [Self; 4] {
            let three = _mm256_set1_epi8(3);
            let v = self.0;
            [
                $name(_mm256_and_si256(v, three)),
                $name(_mm256_and_si256(_mm256_srli_epi16::<2>(v), three)),
                $name(_mm256_and_si256(_mm256_srli_epi16::<4>(v), three)),
                $name(_mm256_and_si256(_mm256_srli_epi16::<6>(v), three)),
            ]
        }
        #[inline(always)]
        unsafe fn zip(a: Self, b: Self) -> [Self; 2] {
            [
                $name(_mm256_unpacklo_epi64(a.0, b.0)),
                $name(_mm256_unpackhi_epi64(a.0, b.0)),
            ]
        }
        #[inline(always)]
        unsafe fn broadcast_8(p: *const i8) -> Self {
            $name(_mm256_set1_epi64x(p.cast::<i64>().read_unaligned()))
        }
        #[inline(always)]
        unsafe fn add(a: Self, b: Self) -> Self {
            $name(_mm256_add_epi32(a.0, b.0))
        }
        #[inline(always)]
        unsafe fn twice(p: *const i32) -> Self {
            let pair = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
            $name(_mm256_shuffle_epi32::<0x50>(pair))
        }
        #[inline(always)]
        unsafe fn twice_f(p: *const f32) -> __m256 {
            _mm256_castsi256_ps(Self::twice(p.cast()).0)
        }
        #[inline(always)]
        unsafe fn pair_scales([p, _]: [*const u8; 2]) -> __m256 {
            let d = _mm_castps_pd(_mm_cvtph_ps(_mm_loadl_epi64(p.cast())));
            let d = _mm256_castpd128_pd256(d);
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b01_01_00_00>(d))
        }
        #[inline(always)]
        unsafe fn zero_f() -> __m256 {
            _mm256_setzero_ps()
        }
        #[inline(always)]
        unsafe fn to_f(self) -> __m256 {
            _mm256_cvtepi32_ps(self.0)
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            _mm256_mul_ps(a, b)
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            _mm256_fmadd_ps(a, b, c)
        }
        #[inline(always)]
        unsafe fn store_f(p: *mut f32, v: __m256) {
            _mm256_storeu_ps(p, v)
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
            _mm256_slli_epi32
        );
    };
}

macro_rules! merge256 {
    ($name:ident) => {
        impl $name {
            #[inline(always)]
            unsafe fn merge_32(a: Self, b: Self) -> Self {
                $name(_mm256_hadd_epi32(a.0, b.0))
            }
        }
    };
}

/// AVX-VNNI in VEX encoding.
#[derive(Clone, Copy)]
pub struct AvxVnni(__m256i);
merge256!(AvxVnni);

// SAFETY: each method is made of instructions of the set, as the trait asks.
unsafe impl Quads for AvxVnni {
    const TILES: usize = 1;
    const TOKENS: usize = 4;
    common256!(AvxVnni);
    dot_product256!(AvxVnni, _mm256_dpbusd_avx_epi32);
}

/// AVX-512VL and VNNI: the same in EVEX encoding, with twice the registers.
#[derive(Clone, Copy)]
pub struct Avx512Vl(__m256i);
merge256!(Avx512Vl);

// SAFETY: as above.
unsafe impl Quads for Avx512Vl {
    const TILES: usize = 2;
    const TOKENS: usize = 8;
    common256!(Avx512Vl);
    dot_product256!(Avx512Vl, _mm256_dpbusd_epi32);
}

/// AVX2 alone, which sums pairs of products in 16 bits and saturates on two products of code 3 in slot 3: the upper slots are
/// shifted down by four first.
///
/// 16 bits hold 128 columns, for any codes and activations: in decode a lane adds four products of 4u twice over,
/// 4 * 2 * 12 * 127 = 12,192; in prefill 16 of u, 16 * 2 * 3 * 127 = 12,192.
#[derive(Clone, Copy)]
pub struct Avx2(__m256i);
merge256!(Avx2);

// SAFETY: as above.
unsafe impl Quads for Avx2 {
    const TILES: usize = 2;
    const TOKENS: usize = 4;
    const SHIFT: i32 = 2;
    common256!(Avx2);
    /// Dots of slots 0 and 2 (as u), of slots 1 and 3 (as 4u).
    type Slots = [__m256i; 2];

    #[inline(always)]
    unsafe fn mask(self) -> [Self; 4] {
        let high = _mm256_srli_epi16::<4>(self.0);
        let (ones, fours) = (_mm256_set1_epi8(0x03), _mm256_set1_epi8(0x0c));
        [
            Avx2(_mm256_and_si256(self.0, ones)),
            Avx2(_mm256_and_si256(self.0, fours)),
            Avx2(_mm256_and_si256(high, ones)),
            Avx2(_mm256_and_si256(high, fours)),
        ]
    }
    #[inline(always)]
    unsafe fn slots() -> [__m256i; 2] {
        [_mm256_setzero_si256(); 2]
    }
    #[inline(always)]
    unsafe fn slots_dot([ones, fours]: [__m256i; 2], u: [Self; 4], y: [Self; 4]) -> [__m256i; 2] {
        let dot = |s: usize| _mm256_maddubs_epi16(u[s].0, y[s].0);
        [
            _mm256_add_epi16(ones, _mm256_add_epi16(dot(0), dot(2))),
            _mm256_add_epi16(fours, _mm256_add_epi16(dot(1), dot(3))),
        ]
    }
    #[inline(always)]
    unsafe fn slots_sum([ones, fours]: [__m256i; 2]) -> Self {
        Avx2(_mm256_add_epi32(
            _mm256_madd_epi16(ones, _mm256_set1_epi16(4)),
            _mm256_madd_epi16(fours, _mm256_set1_epi16(1)),
        ))
    }
    #[inline(always)]
    unsafe fn dot(acc: Self, u: Self, y: Self) -> Self {
        Avx2(_mm256_add_epi16(acc.0, _mm256_maddubs_epi16(u.0, y.0)))
    }
    #[inline(always)]
    unsafe fn merge(a: Self, b: Self) -> Self {
        let widen = |v: Self| Avx2(_mm256_madd_epi16(v.0, _mm256_set1_epi16(1)));
        Self::merge_32(widen(a), widen(b))
    }
}

/// AVX-512 F, BW, DQ and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512(__m512i);

impl Avx512 {
    #[inline(always)]
    unsafe fn merge_32(a: Self, b: Self) -> Self {
        let (a, b) = (_mm512_castsi512_ps(a.0), _mm512_castsi512_ps(b.0));
        let even = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b));
        let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0xdd>(a, b));
        Avx512(_mm512_add_epi32(even, odd))
    }
}

// SAFETY: as above.
unsafe impl Quads for Avx512 {
    const LANES: usize = 4;
    const TILES: usize = 2;
    const TOKENS: usize = 8;
    type F = __m512;
    dot_product!(
        Avx512,
        _mm512_dpbusd_epi32,
        _mm512_set1_epi8,
        _mm512_and_si512,
        _mm512_add_epi32,
        _mm512_slli_epi32
    );
    #[inline(always)]
    unsafe fn zero() -> Self {
        Avx512(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        Avx512(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn broadcast_16(p: *const i8) -> Self {
        Avx512(_mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn pair_activations(y: *const i8, _: usize) -> [Self; 4] {
        let (low, high) = (Self::load(y.cast()), Self::load(y.cast::<u8>().add(64)));
        let slot = |s: i64| {
            let order = _mm512_set_epi64(12 + s, 12 + s, 8 + s, 8 + s, 4 + s, 4 + s, s, s);
            Avx512(_mm512_permutex2var_epi64(low.0, order, high.0))
        };
        [slot(0), slot(1), slot(2), slot(3)]
    }
    #[inline(always)]
    unsafe fn row_sums(v: &[Self]) -> __m128i {
        let v = v[0].0;
        let v = _mm512_add_epi32(v, _mm512_shuffle_epi32::<0b10_11_00_01>(v));
        let v = _mm512_add_epi32(v, _mm512_shuffle_epi32::<0b01_00_11_10>(v));
        let order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, v))
    }
    #[inline(always)]
    unsafe fn pair_sums(a: Self, b: Self) -> __m128i {
        let rows = Self::merge_32(a, b).0;
        let rows = _mm256_add_epi32(
            _mm512_castsi512_si256(rows),
            _mm512_extracti64x4_epi64::<1>(rows),
        );
        _mm_add_epi32(
            _mm256_castsi256_si128(rows),
            _mm256_extracti128_si256::<1>(rows),
        )
    }
    #[inline(always)]
    unsafe fn gather(p: [*const u8; 4]) -> Self {
        let lane = |i: usize| _mm_loadu_si128(p[i].cast());
        let v = _mm512_castsi128_si512(lane(0));
        let v = _mm512_inserti32x4::<1>(v, lane(1));
        let v = _mm512_inserti32x4::<2>(v, lane(2));
        Avx512(_mm512_inserti32x4::<3>(v, lane(3)))
    }
    #[inline(always)]
    unsafe fn shift(self) -> [Self; 4] {
        let three = _mm512_set1_epi8(3);
        let v = self.0;
        [
            Avx512(_mm512_and_si512(v, three)),
            Avx512(_mm512_and_si512(_mm512_srli_epi16::<2>(v), three)),
            Avx512(_mm512_and_si512(_mm512_srli_epi16::<4>(v), three)),
            Avx512(_mm512_and_si512(_mm512_srli_epi16::<6>(v), three)),
        ]
    }
    #[inline(always)]
    unsafe fn zip(a: Self, b: Self) -> [Self; 2] {
        [
            Avx512(_mm512_unpacklo_epi64(a.0, b.0)),
            Avx512(_mm512_unpackhi_epi64(a.0, b.0)),
        ]
    }
    #[inline(always)]
    unsafe fn broadcast_8(p: *const i8) -> Self {
        Avx512(_mm512_set1_epi64(p.cast::<i64>().read_unaligned()))
    }
    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        Avx512(_mm512_add_epi32(a.0, b.0))
    }
    #[inline(always)]
    unsafe fn twice(p: *const i32) -> Self {
        let pair = _mm512_set1_epi64(p.cast::<i64>().read_unaligned());
        Avx512(_mm512_shuffle_epi32::<0x50>(pair))
    }
    #[inline(always)]
    unsafe fn twice_f(p: *const f32) -> __m512 {
        _mm512_castsi512_ps(Self::twice(p.cast()).0)
    }
    #[inline(always)]
    unsafe fn pair_scales([p, q]: [*const u8; 2]) -> __m512 {
        let halves = _mm_unpacklo_epi64(_mm_loadl_epi64(p.cast()), _mm_loadl_epi64(q.cast()));
        let d = _mm512_castps256_ps512(_mm256_cvtph_ps(halves));
        let order = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
        _mm512_castpd_ps(_mm512_permutexvar_pd(order, _mm512_castps_pd(d)))
    }
    #[inline(always)]
    unsafe fn zero_f() -> __m512 {
        _mm512_setzero_ps()
    }
    #[inline(always)]
    unsafe fn to_f(self) -> __m512 {
        _mm512_cvtepi32_ps(self.0)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn store_f(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v)
    }
}
