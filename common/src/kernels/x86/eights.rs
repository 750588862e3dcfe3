//! `Q8_0` and `Q4_0` weights by `Q8_0` activations, one row at a time: eight blocks of 32 at once, whose sums are exact, and whose
//! products with the two scales are added one by one in the order of the blocks, unfused, as ggml's scalar code does.

// Every function is a few instructions under one contract: the instruction set, and pointers good for eight blocks. Loops, not
// closures: one that is not inlined lacks the instruction set, and calls every intrinsic.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use super::instances;
use crate::formats::Format;
use crate::kernels::{Form, Group, Isa, Kernel, Layout, MatrixRef, Out, TILE, TilesFn};

/// Weights of a block.
const WEIGHTS: usize = 32;

/// Blocks at once.
const BATCH: usize = 8;

/// A block of 32 weights that starts with its scale.
///
/// # Safety
/// Every method needs AVX2, `p` good for a block, `y` for 32 activations from -127 to 127.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
unsafe trait Block {
    /// Bytes it takes.
    const BYTES: usize;
    /// What its codes are moved up by to be unsigned.
    const OFFSET: u8;
    /// The codes, moved up.
    unsafe fn unsigned(p: *const u8) -> __m256i;
    /// 32-bit lanes that add up to the dot product, by AVX2 alone.
    unsafe fn lanes(p: *const u8, y: *const i8) -> __m256i;
    /// Sums times scales, in ggml's order.
    unsafe fn scale(sums: __m256, dw: __m256, dx: __m256) -> __m256;
}

struct Q8_0;

// SAFETY: reads the 34 bytes of a block, 32 activations.
unsafe impl Block for Q8_0 {
    const BYTES: usize = 34;
    const OFFSET: u8 = 128;
    #[inline(always)]
    unsafe fn unsigned(p: *const u8) -> __m256i {
        _mm256_xor_si256(_mm256_loadu_si256(p.add(2).cast()), _mm256_set1_epi8(-128))
    }
    /// `|w| (y sign(w))`: two products are at most 2 * 128 * 127, which 16 bits hold.
    #[inline(always)]
    unsafe fn lanes(p: *const u8, y: *const i8) -> __m256i {
        let (w, y) = (
            _mm256_loadu_si256(p.add(2).cast()),
            _mm256_loadu_si256(y.cast()),
        );
        let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
        _mm256_madd_epi16(products, _mm256_set1_epi16(1))
    }
    /// `sum * (dw * dx)`.
    #[inline(always)]
    unsafe fn scale(sums: __m256, dw: __m256, dx: __m256) -> __m256 {
        _mm256_mul_ps(sums, _mm256_mul_ps(dw, dx))
    }
}

struct Q4_0;

// SAFETY: reads the 18 bytes of a block, 32 activations.
unsafe impl Block for Q4_0 {
    const BYTES: usize = 18;
    const OFFSET: u8 = 8;
    #[inline(always)]
    unsafe fn unsigned(p: *const u8) -> __m256i {
        let v = _mm_loadu_si128(p.add(2).cast());
        let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(v), _mm_srli_epi16::<4>(v));
        _mm256_and_si256(both, _mm256_set1_epi8(15))
    }
    #[inline(always)]
    unsafe fn lanes(p: *const u8, y: *const i8) -> __m256i {
        let y = _mm256_loadu_si256(y.cast());
        let products = _mm256_maddubs_epi16(Self::unsigned(p), y);
        let offset = _mm256_maddubs_epi16(_mm256_set1_epi8(Self::OFFSET as i8), y);
        _mm256_madd_epi16(_mm256_sub_epi16(products, offset), _mm256_set1_epi16(1))
    }
    /// `(sum * dw) * dx`.
    #[inline(always)]
    unsafe fn scale(sums: __m256, dw: __m256, dx: __m256) -> __m256 {
        _mm256_mul_ps(_mm256_mul_ps(sums, dw), dx)
    }
}

/// The exact sums of eight blocks.
///
/// # Safety
/// The instruction set of the implementor; `p` good for eight blocks, `y` for their activations.
#[allow(clippy::missing_safety_doc)] // as above
unsafe trait Sums {
    unsafe fn sums<B: Block>(p: *const u8, y: *const i8) -> __m256i;
}

struct Avx2;

// SAFETY: AVX2 alone.
unsafe impl Sums for Avx2 {
    #[inline(always)]
    unsafe fn sums<B: Block>(p: *const u8, y: *const i8) -> __m256i {
        let mut lanes = [_mm256_setzero_si256(); BATCH];
        for (b, lanes) in lanes.iter_mut().enumerate() {
            *lanes = B::lanes(p.add(b * B::BYTES), y.add(b * WEIGHTS));
        }
        let [a, b, c, d, e, f, g, h] = lanes;
        let low = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let high = _mm256_hadd_epi32(_mm256_hadd_epi32(e, f), _mm256_hadd_epi32(g, h));
        _mm256_add_epi32(
            _mm256_permute2x128_si256::<0x20>(low, high),
            _mm256_permute2x128_si256::<0x31>(low, high),
        )
    }
}

struct Avx512;

// SAFETY: AVX-512 F, BW, VL and VNNI.
unsafe impl Sums for Avx512 {
    /// Two blocks a vector.
    #[inline(always)]
    unsafe fn sums<B: Block>(p: *const u8, y: *const i8) -> __m256i {
        let mut pairs = [_mm512_setzero_si512(); BATCH / 2];
        for (i, pair) in pairs.iter_mut().enumerate() {
            *pair = pair_lanes::<B>(p.add(2 * i * B::BYTES), y.add(2 * i * WEIGHTS));
        }
        let (a, b) = (halved(pairs[0], pairs[1]), halved(pairs[2], pairs[3]));
        let lanes = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        // Lanes 0 and 1 hold halves of the sums of blocks 0, 2, 4, 6; lanes 2 and 3 of 1, 3, 5, 7.
        let swapped = _mm512_shuffle_i64x2::<0b10_11_00_01>(lanes, lanes);
        let order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 11, 3, 10, 2, 9, 1, 8, 0);
        let sums = _mm512_permutexvar_epi32(order, _mm512_add_epi32(lanes, swapped));
        _mm512_castsi512_si256(sums)
    }
}

/// The 32-bit lanes of two blocks: `dot(w + offset, y) - dot(offset, y)`, both with unsigned weights.
///
/// # Safety
/// As [`Sums`], for two blocks.
#[inline(always)]
unsafe fn pair_lanes<B: Block>(p: *const u8, y: *const i8) -> __m512i {
    let w = _mm512_castsi256_si512(B::unsigned(p));
    let w = _mm512_inserti64x4::<1>(w, B::unsigned(p.add(B::BYTES)));
    let y = _mm512_loadu_si512(y.cast());
    let zero = _mm512_setzero_si512();
    let offset = _mm512_set1_epi8(B::OFFSET as i8);
    _mm512_sub_epi32(
        _mm512_dpbusd_epi32(zero, w, y),
        _mm512_dpbusd_epi32(zero, offset, y),
    )
}

/// Pairs of 32-bit lanes of both, added.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn halved(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
}

/// The products of eight blocks with their scales.
#[inline(always)]
unsafe fn products<S: Sums, B: Block>(
    p: *const u8,
    y: *const i8,
    dx: *const f32,
    width: usize,
) -> [f32; BATCH] {
    let dw: [i16; BATCH] = from_fn(|b| p.add(b * B::BYTES).cast::<i16>().read_unaligned());
    let dw = _mm256_cvtph_ps(_mm_loadu_si128(dw.as_ptr().cast()));
    let dx = if width == 1 {
        _mm256_loadu_ps(dx)
    } else {
        let dx: [f32; BATCH] = from_fn(|b| *dx.add(b * width));
        _mm256_loadu_ps(dx.as_ptr())
    };
    let sums = _mm256_cvtepi32_ps(S::sums::<B>(p, y));
    let mut out = [0.0; BATCH];
    _mm256_storeu_ps(out.as_mut_ptr(), B::scale(sums, dw, dx));
    out
}

/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `S`; the blocks of `w` are `B`.
#[inline(always)]
unsafe fn run<S: Sums, B: Block>(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    let blocks = w.cols / WEIGHTS;
    for row in rows {
        let codes = w.bytes.as_ptr().add(row * blocks * B::BYTES);
        for (g, x) in x.iter().enumerate() {
            for token in 0..x.tokens() {
                *out.at(g * TILE + token, row) = dot_row::<S, B>(codes, blocks, x, token);
            }
        }
    }
}

/// # Safety
/// `codes` is good for `blocks` blocks, `x` for their columns and for `token`.
#[inline(always)]
unsafe fn dot_row<S: Sums, B: Block>(
    codes: *const u8,
    blocks: usize,
    x: &Group,
    token: usize,
) -> f32 {
    let (y, width) = (x.row(token).as_ptr(), x.width());
    let dx = x.scales()[token..].as_ptr();
    let mut acc = 0f32;
    let mut b = 0;
    while b + BATCH <= blocks {
        let p = codes.add(b * B::BYTES);
        let products = products::<S, B>(p, y.add(b * WEIGHTS), dx.add(b * width), width);
        acc = products.into_iter().fold(acc, |acc, p| acc + p);
        b += BATCH;
    }
    let n = blocks - b;
    if n > 0 {
        // Fewer than eight: in a copy that zeros fill.
        let mut last = ([0u8; BATCH * 34], [0i8; BATCH * WEIGHTS], [0f32; BATCH]);
        codes
            .add(b * B::BYTES)
            .copy_to_nonoverlapping(last.0.as_mut_ptr(), n * B::BYTES);
        y.add(b * WEIGHTS)
            .copy_to_nonoverlapping(last.1.as_mut_ptr(), n * WEIGHTS);
        for (i, d) in last.2.iter_mut().enumerate().take(n) {
            *d = *dx.add((b + i) * width);
        }
        let products = products::<S, B>(last.0.as_ptr(), last.1.as_ptr(), last.2.as_ptr(), 1);
        acc = products.into_iter().take(n).fold(acc, |acc, p| acc + p);
    }
    acc
}

instances! {"avx2,fma,f16c",
    q8_0_avx2 = run::<Avx2, Q8_0>;
    q4_0_avx2 = run::<Avx2, Q4_0>;
}

instances! {"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    q8_0_avx512 = run::<Avx512, Q8_0>;
    q4_0_avx512 = run::<Avx512, Q4_0>;
}

const fn kernel(format: Format, isa: Isa, usable: fn() -> bool, tiles: TilesFn) -> Kernel {
    Kernel {
        layout: Layout::Stock(format),
        isa,
        form: Form::Q8_0,
        usable,
        tiles,
    }
}

/// Slowest first.
pub static KERNELS: [Kernel; 4] = [
    kernel(Format::Q8_0, Isa::Avx2, super::avx2, q8_0_avx2),
    kernel(Format::Q4_0, Isa::Avx2, super::avx2, q4_0_avx2),
    kernel(Format::Q8_0, Isa::Avx512Vnni, super::avx512, q8_0_avx512),
    kernel(Format::Q4_0, Isa::Avx512Vnni, super::avx512, q4_0_avx512),
];
