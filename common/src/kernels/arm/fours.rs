//! `Q8_0` and `Q4_0` weights by `Q8_0` activations, one row at a time: four blocks of 32 at once, whose sums are exact, and whose
//! products with the two scales are added one by one in the order of the blocks, unfused, as ggml's scalar code does.

// Every function is a few instructions under one contract: the instruction set, and pointers good for the blocks it reads.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::sets::sdot;
use super::{Group, Kernel, MatrixRef, Out, TilesFn};
use crate::formats::{Format, Layout};
use crate::kernels::{Form, Isa, TILE};

/// Weights of a block.
const WEIGHTS: usize = 32;

/// Blocks at once.
const BATCH: usize = 4;

/// A block of 32 weights that starts with its scale.
///
/// # Safety
/// Every method needs NEON, and `p` good for a block.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
unsafe trait Block {
    /// Bytes it takes.
    const BYTES: usize;
    /// Its weights in order.
    unsafe fn weights(p: *const u8) -> [int8x16_t; 2];
    /// Sums times scales, in ggml's order.
    unsafe fn scale(sums: float32x4_t, dw: float32x4_t, dx: float32x4_t) -> float32x4_t;
}

struct Q8_0;

// SAFETY: reads the 34 bytes of a block.
unsafe impl Block for Q8_0 {
    const BYTES: usize = 34;
    #[inline(always)]
    unsafe fn weights(p: *const u8) -> [int8x16_t; 2] {
        [vld1q_s8(p.add(2).cast()), vld1q_s8(p.add(18).cast())]
    }
    /// `sum * (dw * dx)`.
    #[inline(always)]
    unsafe fn scale(sums: float32x4_t, dw: float32x4_t, dx: float32x4_t) -> float32x4_t {
        vmulq_f32(sums, vmulq_f32(dw, dx))
    }
}

struct Q4_0;

// SAFETY: reads the 18 bytes of a block.
unsafe impl Block for Q4_0 {
    const BYTES: usize = 18;
    #[inline(always)]
    unsafe fn weights(p: *const u8) -> [int8x16_t; 2] {
        let (v, eight) = (vld1q_u8(p.add(2)), vdupq_n_s8(8));
        let (low, high) = (vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8::<4>(v));
        [
            vsubq_s8(vreinterpretq_s8_u8(low), eight),
            vsubq_s8(vreinterpretq_s8_u8(high), eight),
        ]
    }
    /// `(sum * dw) * dx`.
    #[inline(always)]
    unsafe fn scale(sums: float32x4_t, dw: float32x4_t, dx: float32x4_t) -> float32x4_t {
        vmulq_f32(vmulq_f32(sums, dw), dx)
    }
}

/// 32-bit lanes that add up to the dot product of 16 weights from -128 and 16 activations from -127.
///
/// # Safety
/// The instruction set of the implementor.
#[allow(clippy::missing_safety_doc)] // as above
unsafe trait Dot {
    unsafe fn dot(acc: int32x4_t, w: int8x16_t, y: int8x16_t) -> int32x4_t;
}

struct Neon;

// SAFETY: NEON alone.
unsafe impl Dot for Neon {
    /// Two products are at most 2 * 128 * 127, which 16 bits hold.
    #[inline(always)]
    unsafe fn dot(acc: int32x4_t, w: int8x16_t, y: int8x16_t) -> int32x4_t {
        let products = vmull_s8(vget_low_s8(w), vget_low_s8(y));
        vpadalq_s16(acc, vmlal_high_s8(products, w, y))
    }
}

struct Dotprod;

// SAFETY: `sdot` alone.
unsafe impl Dot for Dotprod {
    #[inline(always)]
    unsafe fn dot(acc: int32x4_t, w: int8x16_t, y: int8x16_t) -> int32x4_t {
        sdot(acc, vreinterpretq_u8_s8(w), y)
    }
}

/// Four halves as floats.
///
/// # Safety
/// NEON.
#[inline(always)]
unsafe fn widen(halves: [u16; BATCH]) -> float32x4_t {
    let mut wide: float32x4_t;
    // Every 64-bit Arm has it; the intrinsic is not stable in Rust.
    asm!("fcvtl {wide:v}.4s, {h:v}.4h", wide = out(vreg) wide, h = in(vreg) vld1_u16(halves.as_ptr()),
        options(pure, nomem, nostack, preserves_flags));
    wide
}

/// The products of four blocks with their scales; `dx` holds a scale every `width` floats.
#[inline(always)]
unsafe fn products<D: Dot, B: Block>(
    p: *const u8,
    y: *const i8,
    dx: *const f32,
    width: usize,
) -> [f32; BATCH] {
    let mut dots = [vdupq_n_s32(0); BATCH];
    let (mut dw, mut scales) = ([0; BATCH], [0f32; BATCH]);
    for b in 0..BATCH {
        let (p, y) = (p.add(b * B::BYTES), y.add(b * WEIGHTS));
        let [low, high] = B::weights(p);
        dots[b] = D::dot(dots[b], low, vld1q_s8(y));
        dots[b] = D::dot(dots[b], high, vld1q_s8(y.add(16)));
        dw[b] = p.cast::<u16>().read_unaligned();
        scales[b] = *dx.add(b * width);
    }
    let sums = vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
    let scaled = B::scale(vcvtq_f32_s32(sums), widen(dw), vld1q_f32(scales.as_ptr()));
    let mut out = [0.0; BATCH];
    vst1q_f32(out.as_mut_ptr(), scaled);
    out
}

/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `D`; the blocks of `w` are `B`.
#[inline(always)]
unsafe fn run<D: Dot, B: Block>(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    let blocks = w.cols / WEIGHTS;
    for row in rows {
        let codes = w.bytes.as_ptr().add(row * blocks * B::BYTES);
        for (g, x) in x.iter().enumerate() {
            for token in 0..x.tokens() {
                *out.at(g * TILE + token, row) = dot_row::<D, B>(codes, blocks, x, token);
            }
        }
    }
}

/// # Safety
/// `codes` is good for `blocks` blocks, `x` for their columns and for `token`.
#[inline(always)]
unsafe fn dot_row<D: Dot, B: Block>(
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
        let (p, y) = (codes.add(b * B::BYTES), y.add(b * WEIGHTS));
        for product in products::<D, B>(p, y, dx.add(b * width), width) {
            acc += product;
        }
        b += BATCH;
    }
    let n = blocks - b;
    if n > 0 {
        // Fewer than four: in a copy that zeros fill.
        let mut last = ([0u8; BATCH * 34], [0i8; BATCH * WEIGHTS], [0f32; BATCH]);
        let (p, y) = (codes.add(b * B::BYTES), y.add(b * WEIGHTS));
        p.copy_to_nonoverlapping(last.0.as_mut_ptr(), n * B::BYTES);
        y.copy_to_nonoverlapping(last.1.as_mut_ptr(), n * WEIGHTS);
        for (i, d) in last.2.iter_mut().enumerate().take(n) {
            *d = *dx.add((b + i) * width);
        }
        let products = products::<D, B>(last.0.as_ptr(), last.1.as_ptr(), last.2.as_ptr(), 1);
        for product in &products[..n] {
            acc += product;
        }
    }
    acc
}

/// The kernel of a format, its source inlined into a function that enables the set.
macro_rules! kernel {
    ($format:ident, $block:ty, $dot:ty, $enable:literal, $isa:expr, $usable:path) => {{
        #[target_feature(enable = $enable)]
        unsafe fn tiles(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
            // SAFETY: the contract of `TilesFn`; the instruction set is enabled here.
            unsafe { run::<$dot, $block>(w, x, rows, out) }
        }
        Kernel {
            layout: Layout::Stock(Format::$format),
            isa: $isa,
            form: Form::Q8_0,
            usable: $usable,
            tiles: tiles as TilesFn,
        }
    }};
}

/// Slowest first.
pub static KERNELS: [Kernel; 4] = [
    kernel!(Q8_0, Q8_0, Neon, "neon", Isa::Neon, crate::kernels::always),
    kernel!(Q4_0, Q4_0, Neon, "neon", Isa::Neon, crate::kernels::always),
    kernel!(
        Q8_0,
        Q8_0,
        Dotprod,
        "neon,dotprod",
        Isa::Dotprod,
        super::dotprod
    ),
    kernel!(
        Q4_0,
        Q4_0,
        Dotprod,
        "neon,dotprod",
        Isa::Dotprod,
        super::dotprod
    ),
];
