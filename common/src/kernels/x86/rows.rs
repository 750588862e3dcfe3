//! One row at a time on stock blocks: every code is moved to a byte of its own, in the order of k, and meets activations in
//! their natural order. The baseline that the interleaved layouts are compared with.
//!
//! The sums of eight blocks are reduced together; each then takes its fused multiply-add in block order.

use std::ops::Range;

use super::bytes::{self, Bytes};
use super::{FAR, NEAR, instances, prefetch};
use crate::formats::Format;
use crate::kernels::{Group, Isa, Kernel, Layout, MatrixRef, Out, TILE};

/// Blocks whose sums are reduced together.
const BATCH: usize = 8;

/// A stock block: how its codes become bytes, and where its scale stands.
pub trait Block {
    /// Weights in it.
    const WEIGHTS: usize;
    /// Bytes it takes.
    const BYTES: usize;
    /// Where its scale stands, in bytes.
    const SCALE: usize;

    /// Adds the dot product of the block's codes with the activations at `y`.
    ///
    /// # Safety
    /// `p` is good for a block, `y` for its weights; the instruction set of `V`.
    unsafe fn dot<V: Bytes>(acc: V::Sum, p: *const u8, y: *const i8) -> V::Sum;
}

/// The dots of consecutive codes.
#[inline(always)]
unsafe fn dots<V: Bytes>(acc: V::Sum, u: impl IntoIterator<Item = V>, y: *const i8) -> V::Sum {
    let mut acc = acc;
    for (i, u) in u.into_iter().enumerate() {
        // SAFETY: the caller's contract: there are activations for every code.
        acc = unsafe { V::dot(acc, u, y.add(i * V::BYTES)) };
    }
    acc
}

/// Defines the blocks whose unpacking is one method of [`Bytes`] for each run of codes.
macro_rules! block {
    ($(#[$doc:meta])* $name:ident, $weights:literal, $bytes:literal, $scale:literal, |$p:ident| [$($codes:expr),*]) => {
        $(#[$doc])*
        pub struct $name;
        impl Block for $name {
            const WEIGHTS: usize = $weights;
            const BYTES: usize = $bytes;
            const SCALE: usize = $scale;
            #[inline(always)]
            unsafe fn dot<V: Bytes>(acc: V::Sum, $p: *const u8, y: *const i8) -> V::Sum {
                let mut at = 0;
                let mut acc = acc;
                $(
                    // SAFETY: the caller's contract; the codes are those of this block.
                    unsafe {
                        let codes = $codes;
                        let n = codes.into_iter().count();
                        acc = dots::<V>(acc, codes, y.add(at));
                        at += n * V::BYTES;
                    }
                )*
                debug_assert_eq!(at, $weights);
                acc
            }
        }
    };
}

block! {
    /// PQ2_0: consecutive codes.
    Pq2_0, 128, 34, 0, |p| [V::crumbs_128(p.add(2))]
}
block! {
    /// Q2_0: consecutive codes.
    Q2_0, 64, 18, 0, |p| [V::crumbs_64(p.add(2))]
}
block! {
    /// TQ2_0: a byte holds codes 32 apart.
    Tq2_0, 256, 66, 64, |p| [V::strided_128(p), V::strided_128(p.add(32))]
}
block! {
    /// PTQ1_0: base 3.
    Ptq1_0, 128, 28, 26, |p| [V::ptq1_0(p)]
}
block! {
    /// TQ1_0: base 3.
    Tq1_0, 256, 54, 52, |p| [V::tq1_0(p)]
}

/// The rows `rows` of `w`, one at a time, for every token of `x`, one at a time.
///
/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `V`; the blocks of `w` are `B`.
#[inline(always)]
pub unsafe fn run<V: Bytes, B: Block>(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    let blocks = w.cols / B::WEIGHTS;
    for row in rows {
        // SAFETY: the caller's contract: the row is inside the matrix.
        let codes = unsafe { w.bytes.as_ptr().add(row * blocks * B::BYTES) };
        for (g, x) in x.iter().enumerate() {
            for token in 0..x.tokens() {
                // SAFETY: the caller's contract; activations are padded to whole blocks of 256.
                unsafe {
                    *out.at(g * TILE + token, row) = dot_row::<V, B>(codes, blocks, x, token);
                }
            }
        }
    }
}

/// A row and a token on their way through the blocks.
#[derive(Clone, Copy)]
struct Operands {
    codes: *const u8,
    y: *const i8,
    offsets: *const i32,
    scales: *const f32,
    /// From a block's offset or scale to the next one's.
    width: usize,
}

/// # Safety
/// `codes` is good for `blocks` blocks, `x` for their columns and for `token`.
#[inline(always)]
unsafe fn dot_row<V: Bytes, B: Block>(
    codes: *const u8,
    blocks: usize,
    x: &Group,
    token: usize,
) -> f32 {
    let operands = Operands {
        codes,
        y: x.row(token).as_ptr(),
        offsets: x.offsets(B::WEIGHTS)[token..].as_ptr(),
        scales: x.scales()[token..].as_ptr(),
        width: x.width(),
    };
    let mut acc = 0f32;
    let mut b = 0;
    // SAFETY: the caller's contract.
    unsafe {
        while b + BATCH <= blocks {
            for line in (0..BATCH * B::BYTES).step_by(64) {
                prefetch(codes.wrapping_add(b * B::BYTES + line), FAR, NEAR);
            }
            acc = batch::<V, B>(operands, b, acc);
            b += BATCH;
        }
        if b < blocks {
            acc = rest::<V, B>(operands, b, blocks - b, acc);
        }
    }
    acc
}

/// Lanes that add up to the sum of block `b`.
///
/// # Safety
/// As [`dot_row`].
#[inline(always)]
unsafe fn block_sum<V: Bytes, B: Block>(x: Operands, b: usize) -> V {
    // SAFETY: the caller's contract.
    unsafe {
        let start = V::start(*x.offsets.add(b * x.width));
        let codes = x.codes.add(b * B::BYTES);
        V::end(B::dot::<V>(start, codes, x.y.add(b * B::WEIGHTS)))
    }
}

/// Adds [`BATCH`] blocks from `first` on.
///
/// # Safety
/// As [`dot_row`].
#[inline(always)]
unsafe fn batch<V: Bytes, B: Block>(x: Operands, first: usize, acc: f32) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        // Written out, so that no compiler makes a loop of it and the sums stay in registers.
        let sum = [
            block_sum::<V, B>(x, first),
            block_sum::<V, B>(x, first + 1),
            block_sum::<V, B>(x, first + 2),
            block_sum::<V, B>(x, first + 3),
            block_sum::<V, B>(x, first + 4),
            block_sum::<V, B>(x, first + 5),
            block_sum::<V, B>(x, first + 6),
            block_sum::<V, B>(x, first + 7),
        ];
        add_blocks::<V, B>(x, first, BATCH, V::reduce(sum), acc)
    }
}

/// Adds the last `n` blocks, fewer than [`BATCH`].
///
/// # Safety
/// As [`dot_row`].
#[inline(always)]
unsafe fn rest<V: Bytes, B: Block>(x: Operands, first: usize, n: usize, acc: f32) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let sums = [
            some::<V, B>(x, first, 0, n),
            some::<V, B>(x, first, 1, n),
            some::<V, B>(x, first, 2, n),
            some::<V, B>(x, first, 3, n),
            some::<V, B>(x, first, 4, n),
            some::<V, B>(x, first, 5, n),
            some::<V, B>(x, first, 6, n),
            V::zero(),
        ];
        add_blocks::<V, B>(x, first, n, V::reduce(sums), acc)
    }
}

/// The sum of block `i` of `n`, zero past them. No closure: that would be compiled without the instruction set.
///
/// # Safety
/// As [`dot_row`].
#[inline(always)]
unsafe fn some<V: Bytes, B: Block>(x: Operands, first: usize, i: usize, n: usize) -> V {
    // SAFETY: the caller's contract.
    unsafe {
        if i < n {
            block_sum::<V, B>(x, first + i)
        } else {
            V::zero()
        }
    }
}

/// The float rule over `n` blocks.
///
/// # Safety
/// As [`dot_row`].
#[inline(always)]
unsafe fn add_blocks<V: Bytes, B: Block>(
    x: Operands,
    first: usize,
    n: usize,
    sums: [f32; BATCH],
    acc: f32,
) -> f32 {
    let mut acc = acc;
    for (b, sum) in (first..).zip(sums).take(n) {
        // SAFETY: the caller's contract.
        unsafe {
            let dw = V::f16(x.codes.add(b * B::BYTES + B::SCALE));
            let dy = *x.scales.add(b * B::WEIGHTS / 256 * x.width);
            acc = sum.mul_add(dw * dy, acc);
        }
    }
    acc
}

/// The kernels of a set, slowest first.
macro_rules! kernels {
    ($table:ident = $isa:ident $usable:ident $vector:ident $enable:literal:
     $tq1_0:ident $ptq1_0:ident $q2_0:ident $tq2_0:ident $pq2_0:ident) => {
        instances! {$enable,
            $tq1_0 = run::<bytes::$vector, Tq1_0>;
            $ptq1_0 = run::<bytes::$vector, Ptq1_0>;
            $q2_0 = run::<bytes::$vector, Q2_0>;
            $tq2_0 = run::<bytes::$vector, Tq2_0>;
            $pq2_0 = run::<bytes::$vector, Pq2_0>;
        }
        /// Stock formats, a row at a time.
        pub const $table: [Kernel; 5] = {
            const fn stock(format: Format, tiles: super::TilesFn) -> Kernel {
                Kernel::ternary(Layout::Stock(format), Isa::$isa, super::$usable, tiles)
            }
            [
                stock(Format::Tq1_0, $tq1_0),
                stock(Format::Ptq1_0, $ptq1_0),
                stock(Format::Q2_0, $q2_0),
                stock(Format::Tq2_0, $tq2_0),
                stock(Format::Pq2_0, $pq2_0),
            ]
        };
    };
}

kernels!(AVX2 = Avx2 avx2 Avx2 "avx2,fma,f16c":
    tq1_0_avx2 ptq1_0_avx2 q2_0_avx2 tq2_0_avx2 pq2_0_avx2);
kernels!(VEX = AvxVnni avx_vnni AvxVnni "avx2,fma,f16c,avxvnni":
    tq1_0_vex ptq1_0_vex q2_0_vex tq2_0_vex pq2_0_vex);
kernels!(EVEX = AvxVnni avx512 Avx512Vl "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni":
    tq1_0_evex ptq1_0_evex q2_0_evex tq2_0_evex pq2_0_evex);
kernels!(AVX512 = Avx512Vnni avx512 Avx512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni":
    tq1_0_avx512 ptq1_0_avx512 q2_0_avx512 tq2_0_avx512 pq2_0_avx512);
