//! Vectors of bytes, one code a byte: what the row-wise kernels need of an instruction set.

// Every method is a few instructions under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

/// A vector of codes, and how to multiply it by as many activations.
///
/// The base-3 methods rest on `floor(3 v / 256) == (v >= 86) + (v >= 171)` for a byte v: a digit is two comparisons, and the
/// next one stands in 3 v mod 256. Where comparisons are signed, v is kept with its top bit flipped, which multiplication by an
/// odd number preserves.
///
/// # Safety
/// Every method needs the instruction set of its implementor, `p` good for the bytes of the block or run it names, `y` for a
/// whole vector. Methods are inlined into a function that enables the set.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Bytes: Copy {
    /// Codes in a vector.
    const BYTES: usize;
    /// 64, 128 and 256 codes in the order of k.
    type Run64: IntoIterator<Item = Self> + Copy;
    /// See [`Bytes::Run64`].
    type Run128: IntoIterator<Item = Self> + Copy;
    /// See [`Bytes::Run64`].
    type Run256: IntoIterator<Item = Self> + Copy;
    /// The growing sum of one block.
    type Sum: Copy;

    unsafe fn zero() -> Self;
    /// A sum that starts from `offset`.
    unsafe fn start(offset: i32) -> Self::Sum;
    unsafe fn dot(acc: Self::Sum, u: Self, y: *const i8) -> Self::Sum;
    /// Lanes of 32 bits that add up to the sum.
    unsafe fn end(acc: Self::Sum) -> Self;
    /// The sums of the 32-bit lanes of each vector.
    unsafe fn reduce(v: [Self; 8]) -> [f32; 8];

    /// 64 consecutive codes, four a byte, lowest bits first.
    unsafe fn crumbs_64(p: *const u8) -> Self::Run64;
    /// 128 consecutive codes.
    unsafe fn crumbs_128(p: *const u8) -> Self::Run128;
    /// 128 codes where byte m holds codes m, m + 32, m + 64, m + 96.
    unsafe fn strided_128(p: *const u8) -> Self::Run128;
    /// A block of PTQ1_0.
    unsafe fn ptq1_0(p: *const u8) -> Self::Run128;
    /// A block of TQ1_0.
    unsafe fn tq1_0(p: *const u8) -> Self::Run256;

    #[inline(always)]
    unsafe fn f16(p: *const u8) -> f32 {
        let bits = p.cast::<u16>().read_unaligned();
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// Powers of three, one after another: (exponent, bytes).
const fn powers<const BYTES: usize>(runs: &[(u32, usize)]) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    let (mut at, mut run) = (0, 0);
    while run < runs.len() {
        let (power, n) = runs[run];
        let end = at + n;
        while at < end {
            out[at] = 3u8.pow(power);
            at += 1;
        }
        run += 1;
    }
    assert!(at == BYTES);
    out
}

/// A constant vector of bytes.
macro_rules! constant {
    ($load:ident, $bytes:expr) => {{
        const BYTES: &[u8] = &$bytes;
        $load(BYTES.as_ptr().cast())
    }};
}

mod ymm {
    use super::*;

    #[inline(always)]
    unsafe fn load16(p: *const u8) -> __m256i {
        _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()))
    }

    /// Moves the four codes of each of eight bytes to bytes of their own.
    #[inline(always)]
    unsafe fn spread(p: *const u8) -> __m256i {
        let v = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        let v = _mm256_or_si256(v, _mm256_slli_epi32::<12>(v));
        let v = _mm256_or_si256(v, _mm256_slli_epi32::<6>(v));
        _mm256_and_si256(v, _mm256_set1_epi8(3))
    }

    #[inline(always)]
    pub unsafe fn crumbs_64(p: *const u8) -> [__m256i; 2] {
        [spread(p), spread(p.add(8))]
    }

    #[inline(always)]
    pub unsafe fn crumbs_128(p: *const u8) -> [__m256i; 4] {
        [
            spread(p),
            spread(p.add(8)),
            spread(p.add(16)),
            spread(p.add(24)),
        ]
    }

    #[inline(always)]
    pub unsafe fn strided_128(p: *const u8) -> [__m256i; 4] {
        let v = _mm256_loadu_si256(p.cast());
        let slots = [
            v,
            _mm256_srli_epi16::<2>(v),
            _mm256_srli_epi16::<4>(v),
            _mm256_srli_epi16::<6>(v),
        ];
        slots.map(|v| _mm256_and_si256(v, _mm256_set1_epi8(3)))
    }

    /// The most significant digit of each byte, whose top bit is flipped: 85 and 170 become -43 and 42.
    #[inline(always)]
    unsafe fn digit(v: __m256i) -> __m256i {
        let one = _mm256_cmpgt_epi8(v, _mm256_set1_epi8(-43));
        let two = _mm256_cmpgt_epi8(v, _mm256_set1_epi8(42));
        _mm256_abs_epi8(_mm256_add_epi8(one, two))
    }

    #[inline(always)]
    unsafe fn flip(v: __m256i) -> __m256i {
        _mm256_xor_si256(v, _mm256_set1_epi8(-128))
    }

    #[inline(always)]
    unsafe fn triple(v: __m256i) -> __m256i {
        _mm256_add_epi8(v, _mm256_add_epi8(v, v))
    }

    /// Times 3 in the bytes of `mask`.
    #[inline(always)]
    unsafe fn triple_some(v: __m256i, mask: __m256i) -> __m256i {
        _mm256_add_epi8(v, _mm256_and_si256(_mm256_add_epi8(v, v), mask))
    }

    /// Times a byte each, equal in both bytes of a 16-bit lane.
    #[inline(always)]
    unsafe fn times(v: __m256i, by: __m256i) -> __m256i {
        let low = _mm256_set1_epi16(0xff);
        let by = _mm256_and_si256(by, low);
        let even = _mm256_and_si256(_mm256_mullo_epi16(v, by), low);
        let odd = _mm256_mullo_epi16(_mm256_andnot_si256(low, v), by);
        _mm256_or_si256(even, odd)
    }

    const HIGH: [u8; 32] = {
        let mut mask = [0; 32];
        let mut i = 16;
        while i < 32 {
            mask[i] = 0xff;
            i += 1;
        }
        mask
    };

    #[inline(always)]
    pub unsafe fn ptq1_0(p: *const u8) -> [__m256i; 4] {
        // Stages of 16 and 8 bytes, then qh of 2: digits of a stage follow each other.
        let first = flip(load16(p));
        // From byte 12, a whole load ends with the block: the second stage stands at 4, qh at 12.
        let rest = flip(load16(p.add(12)));
        let y0 = triple_some(first, constant!(loadu, HIGH));
        let y1 = triple(triple(y0));
        #[rustfmt::skip]
        const ORDER: [u8; 32] = [
            4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11,
            4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 12, 13, 12, 13, 12, 13,
        ];
        let rest = _mm256_shuffle_epi8(rest, constant!(loadu, ORDER));
        let second = _mm256_permute2x128_si256::<0x20>(first, rest);
        let y2 = times(
            second,
            constant!(loadu, powers::<32>(&[(4, 16), (0, 8), (1, 8)])),
        );
        let y3 = times(
            rest,
            constant!(
                loadu,
                powers::<32>(&[(2, 8), (3, 8), (4, 8), (0, 2), (1, 2), (2, 2), (3, 2)])
            ),
        );
        [digit(y0), digit(y1), digit(y2), digit(y3)]
    }

    #[inline(always)]
    pub unsafe fn tq1_0(p: *const u8) -> [__m256i; 8] {
        // Stages of 32 and 16 bytes, then qh of 4.
        let y0 = flip(loadu(p.cast()));
        let y1 = triple(y0);
        let y2 = triple(y1);
        let y3 = triple(y2);
        let y4 = triple(y3);
        let second = flip(load16(p.add(32)));
        let y5 = triple_some(second, constant!(loadu, HIGH));
        let y6 = triple(triple(y5));
        let qh = flip(_mm256_set1_epi32(p.add(48).cast::<i32>().read_unaligned()));
        let y7 = times(
            _mm256_blend_epi32::<0xf0>(second, qh),
            constant!(
                loadu,
                powers::<32>(&[(4, 16), (0, 4), (1, 4), (2, 4), (3, 4)])
            ),
        );
        [
            digit(y0),
            digit(y1),
            digit(y2),
            digit(y3),
            digit(y4),
            digit(y5),
            digit(y6),
            digit(y7),
        ]
    }

    #[inline(always)]
    unsafe fn loadu(p: *const __m256i) -> __m256i {
        _mm256_loadu_si256(p)
    }

    #[inline(always)]
    pub unsafe fn reduce([a, b, c, d, e, f, g, h]: [__m256i; 8]) -> [f32; 8] {
        let four = |a, b, c, d| _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let (low, high) = (four(a, b, c, d), four(e, f, g, h));
        let sums = _mm256_add_epi32(
            _mm256_permute2x128_si256::<0x20>(low, high),
            _mm256_permute2x128_si256::<0x31>(low, high),
        );
        let mut out = [0.0; 8];
        _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtepi32_ps(sums));
        out
    }
}

/// The methods that 256-bit vectors share.
macro_rules! common256 {
    ($name:ident) => {
        const BYTES: usize = 32;
        type Run64 = [Self; 2];
        type Run128 = [Self; 4];
        type Run256 = [Self; 8];
        #[inline(always)]
        unsafe fn zero() -> Self {
            $name(_mm256_setzero_si256())
        }
        #[inline(always)]
        unsafe fn reduce(v: [Self; 8]) -> [f32; 8] {
            ymm::reduce(v.map(|v| v.0))
        }
        #[inline(always)]
        unsafe fn crumbs_64(p: *const u8) -> [Self; 2] {
            ymm::crumbs_64(p).map($name)
        }
        #[inline(always)]
        unsafe fn crumbs_128(p: *const u8) -> [Self; 4] {
            ymm::crumbs_128(p).map($name)
        }
        #[inline(always)]
        unsafe fn strided_128(p: *const u8) -> [Self; 4] {
            ymm::strided_128(p).map($name)
        }
        #[inline(always)]
        unsafe fn ptq1_0(p: *const u8) -> [Self; 4] {
            ymm::ptq1_0(p).map($name)
        }
        #[inline(always)]
        unsafe fn tq1_0(p: *const u8) -> [Self; 8] {
            ymm::tq1_0(p).map($name)
        }
    };
}

/// The dot product of the sets that have `vpdpbusd`: the sum is the vector itself.
macro_rules! dot_product {
    ($name:ident, $dot:ident, $load:ident, $widen:ident) => {
        type Sum = Self;
        #[inline(always)]
        unsafe fn start(offset: i32) -> Self {
            $name($widen(_mm_cvtsi32_si128(offset)))
        }
        #[inline(always)]
        unsafe fn dot(acc: Self, u: Self, y: *const i8) -> Self {
            $name($dot(acc.0, u.0, $load(y.cast())))
        }
        #[inline(always)]
        unsafe fn end(acc: Self) -> Self {
            acc
        }
    };
}

/// AVX2 alone, which sums pairs of products in 16 bits: a block of 256 adds at most 8 * 2 * 3 * 127 to a lane.
#[derive(Clone, Copy)]
pub struct Avx2(__m256i);

// SAFETY: each method is made of instructions of the set, as the trait asks.
unsafe impl Bytes for Avx2 {
    common256!(Avx2);
    /// Pairs of products in 16 bits, and the start.
    type Sum = (__m256i, __m256i);
    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sum {
        let offset = _mm256_zextsi128_si256(_mm_cvtsi32_si128(offset));
        (_mm256_setzero_si256(), offset)
    }
    #[inline(always)]
    unsafe fn dot((acc, offset): Self::Sum, u: Self, y: *const i8) -> Self::Sum {
        let products = _mm256_maddubs_epi16(u.0, _mm256_loadu_si256(y.cast()));
        (_mm256_add_epi16(acc, products), offset)
    }
    #[inline(always)]
    unsafe fn end((acc, offset): Self::Sum) -> Self {
        let sums = _mm256_madd_epi16(acc, _mm256_set1_epi16(1));
        Avx2(_mm256_add_epi32(sums, offset))
    }
}

/// AVX-VNNI in VEX encoding.
#[derive(Clone, Copy)]
pub struct AvxVnni(__m256i);

// SAFETY: as above.
unsafe impl Bytes for AvxVnni {
    common256!(AvxVnni);
    dot_product!(
        AvxVnni,
        _mm256_dpbusd_avx_epi32,
        _mm256_loadu_si256,
        _mm256_zextsi128_si256
    );
}

/// AVX-512VL and VNNI: the same in EVEX encoding.
#[derive(Clone, Copy)]
pub struct Avx512Vl(__m256i);

// SAFETY: as above.
unsafe impl Bytes for Avx512Vl {
    common256!(Avx512Vl);
    dot_product!(
        Avx512Vl,
        _mm256_dpbusd_epi32,
        _mm256_loadu_si256,
        _mm256_zextsi128_si256
    );
}

mod zmm {
    use super::*;

    /// Moves the four codes of each of sixteen bytes to bytes of their own.
    #[inline(always)]
    pub unsafe fn spread(p: *const u8) -> __m512i {
        let v = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        let v = _mm512_or_si512(v, _mm512_slli_epi32::<12>(v));
        let v = _mm512_or_si512(v, _mm512_slli_epi32::<6>(v));
        _mm512_and_si512(v, _mm512_set1_epi8(3))
    }

    #[inline(always)]
    pub unsafe fn strided_128(p: *const u8) -> [__m512i; 2] {
        let v = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()));
        let counts = |low, high| _mm512_set_epi64(high, high, high, high, low, low, low, low);
        [counts(0, 2), counts(4, 6)]
            .map(|counts| _mm512_and_si512(_mm512_srlv_epi64(v, counts), _mm512_set1_epi8(3)))
    }

    /// The most significant digit of each byte.
    #[inline(always)]
    unsafe fn digit(v: __m512i) -> __m512i {
        let one = _mm512_set1_epi8(1);
        let ge_86 = _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8(86));
        let ge_171 = _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8(171u8 as i8));
        let digit = _mm512_maskz_mov_epi8(ge_86, one);
        _mm512_mask_add_epi8(digit, ge_171, digit, one)
    }

    #[inline(always)]
    unsafe fn triple(v: __m512i) -> __m512i {
        _mm512_add_epi8(v, _mm512_add_epi8(v, v))
    }

    /// Times a byte each, equal in both bytes of a 16-bit lane.
    #[inline(always)]
    unsafe fn times(v: __m512i, by: __m512i) -> __m512i {
        let low = _mm512_set1_epi16(0xff);
        let by = _mm512_and_si512(by, low);
        let even = _mm512_and_si512(_mm512_mullo_epi16(v, by), low);
        let odd = _mm512_mullo_epi16(_mm512_andnot_si512(low, v), by);
        _mm512_or_si512(even, odd)
    }

    #[inline(always)]
    pub unsafe fn ptq1_0(p: *const u8) -> [__m512i; 2] {
        let first = _mm512_broadcast_i32x4(_mm_loadu_si128(p.cast()));
        // From byte 12, a whole load ends with the block: the second stage stands at 4, qh at 12.
        let rest = _mm_loadu_si128(p.add(12).cast());
        let rest = _mm512_mask_broadcast_i32x4(first, 0xfff0, rest);
        #[rustfmt::skip]
        const ORDER: [u8; 64] = [
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
            4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11,
            4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11,
            4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 12, 13, 12, 13, 12, 13,
        ];
        let rest = _mm512_shuffle_epi8(rest, constant!(loadu, ORDER));
        let y0 = times(
            first,
            constant!(loadu, powers::<64>(&[(0, 16), (1, 16), (2, 16), (3, 16)])),
        );
        let y1 = times(
            rest,
            constant!(
                loadu,
                powers::<64>(&[
                    (4, 16),
                    (0, 8),
                    (1, 8),
                    (2, 8),
                    (3, 8),
                    (4, 8),
                    (0, 2),
                    (1, 2),
                    (2, 2),
                    (3, 2)
                ])
            ),
        );
        [digit(y0), digit(y1)]
    }

    #[inline(always)]
    pub unsafe fn tq1_0(p: *const u8) -> [__m512i; 4] {
        let first = _mm256_loadu_si256(p.cast());
        let both = _mm512_broadcast_i64x4(first);
        let second = _mm_loadu_si128(p.add(32).cast());
        let qh = p.add(48).cast::<i32>().read_unaligned();
        let y0 = _mm512_add_epi8(both, _mm512_maskz_add_epi8(!0 << 32, both, both));
        let y1 = triple(triple(y0));
        let y2 = times(
            _mm512_mask_broadcast_i32x4(both, 0xff00, second),
            constant!(loadu, powers::<64>(&[(4, 32), (0, 16), (1, 16)])),
        );
        let y3 = times(
            _mm512_mask_set1_epi32(_mm512_broadcast_i32x4(second), 0xf000, qh),
            constant!(
                loadu,
                powers::<64>(&[(2, 16), (3, 16), (4, 16), (0, 4), (1, 4), (2, 4), (3, 4)])
            ),
        );
        [digit(y0), digit(y1), digit(y2), digit(y3)]
    }

    #[inline(always)]
    pub unsafe fn loadu(p: *const __m512i) -> __m512i {
        _mm512_loadu_si512(p)
    }

    /// Each step adds the halves of two vectors and keeps them in one.
    #[inline(always)]
    pub unsafe fn reduce([a, b, c, d, e, f, g, h]: [__m512i; 8]) -> [f32; 8] {
        let halves = |a, b| {
            _mm512_add_epi32(
                _mm512_shuffle_i64x2::<0x44>(a, b),
                _mm512_shuffle_i64x2::<0xee>(a, b),
            )
        };
        let (ae, bf, cg, dh) = (halves(a, e), halves(b, f), halves(c, g), halves(d, h));
        let words =
            |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (x, y) = (words(ae, bf), words(cg, dh));
        let lanes = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
        // Lanes 0 and 1 hold parts of the first four sums, lanes 2 and 3 of the last.
        let low = _mm512_shuffle_i64x2::<0b10_00_10_00>(lanes, lanes);
        let high = _mm512_shuffle_i64x2::<0b11_01_11_01>(lanes, lanes);
        let sums = _mm256_add_epi32(_mm512_castsi512_si256(low), _mm512_castsi512_si256(high));
        let mut out = [0.0; 8];
        _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtepi32_ps(sums));
        out
    }
}

/// AVX-512 F, BW, DQ and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512(__m512i);

// SAFETY: as above.
unsafe impl Bytes for Avx512 {
    const BYTES: usize = 64;
    type Run64 = [Self; 1];
    type Run128 = [Self; 2];
    type Run256 = [Self; 4];
    dot_product!(
        Avx512,
        _mm512_dpbusd_epi32,
        _mm512_loadu_si512,
        _mm512_zextsi128_si512
    );
    #[inline(always)]
    unsafe fn zero() -> Self {
        Avx512(_mm512_setzero_si512())
    }
    #[inline(always)]
    unsafe fn reduce(v: [Self; 8]) -> [f32; 8] {
        zmm::reduce(v.map(|v| v.0))
    }
    #[inline(always)]
    unsafe fn crumbs_64(p: *const u8) -> [Self; 1] {
        [Avx512(zmm::spread(p))]
    }
    #[inline(always)]
    unsafe fn crumbs_128(p: *const u8) -> [Self; 2] {
        [Avx512(zmm::spread(p)), Avx512(zmm::spread(p.add(16)))]
    }
    #[inline(always)]
    unsafe fn strided_128(p: *const u8) -> [Self; 2] {
        zmm::strided_128(p).map(Avx512)
    }
    #[inline(always)]
    unsafe fn ptq1_0(p: *const u8) -> [Self; 2] {
        zmm::ptq1_0(p).map(Avx512)
    }
    #[inline(always)]
    unsafe fn tq1_0(p: *const u8) -> [Self; 4] {
        zmm::tq1_0(p).map(Avx512)
    }
}
