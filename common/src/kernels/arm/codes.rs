//! How each layout is decoded: to sums of a block in a few instructions, or to codes 0 to 3 for a register tile.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use half::f16;

use super::sets::{Set, token_of};
use crate::formats::{layout, wide_b3};
use crate::kernels::MatrixRef;

/// A layout. Rows are taken by units of four or eight, in fours: vectors with a row a lane.
///
/// # Safety
/// Methods need the instruction set of their parameter `I`, and are inlined into a function that enables it; `w` has this layout
/// and rows `row` to `end`, a unit starts at a tile; blocks are inside the row; each `y` is good for the columns of a block.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Codes {
    /// Columns that share a scale.
    const GROUP: usize;
    /// Fours of rows in a unit, 1 or 2; arrays of two fours leave the second unused.
    const FOURS: usize;
    /// Where the rows of a unit are.
    type Unit: Copy;

    unsafe fn unit(w: &MatrixRef, row: usize, end: usize) -> Self::Unit;
    unsafe fn scales(unit: Self::Unit, b: usize) -> [float32x4_t; 2];
    /// Sums of codes times activations over block `b`, for decode.
    unsafe fn sums<I: Set, const T: usize>(
        unit: Self::Unit,
        b: usize,
        y: [*const i8; T],
    ) -> [[int32x4_t; T]; 2];
}

/// A layout in tiles, made for more than a row at a time.
///
/// # Safety
/// As [`Codes`].
#[allow(clippy::missing_safety_doc)] // above
pub unsafe trait Tiled: Codes {
    /// The codes of block `b` for [`Set::tile`], `u[step][four][2]` with `fours` fours a step.
    unsafe fn unpack<I: Set>(unit: Self::Unit, b: usize, u: *mut uint8x16_t, fours: usize);
}

#[inline(always)]
fn zero() -> int32x4_t {
    // SAFETY: NEON is part of every aarch64 target that has std.
    unsafe { vdupq_n_s32(0) }
}

/// Four scales from memory.
///
/// # Safety
/// `p` is good for eight bytes.
#[inline(always)]
unsafe fn load_f16(p: *const f16) -> float32x4_t {
    let v: float32x4_t;
    // SAFETY: the caller's contract; a baseline instruction on a register (its intrinsic is newer than the compiler we ask for).
    unsafe {
        let half = vld1_u16(p.cast());
        asm!("fcvtl {v:v}.4s, {half:v}.4h", v = lateout(vreg) v, half = in(vreg) half, options(pure, nomem, nostack, preserves_flags));
    }
    v
}

/// The sums of the lanes of four vectors.
#[inline(always)]
unsafe fn across(v: [int32x4_t; 4]) -> int32x4_t {
    // SAFETY: baseline.
    unsafe { vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])) }
}

/// Stores four rows by eight columns, given as two pairs of rows, in the form that `I` multiplies.
#[inline(always)]
unsafe fn put_pairs<I: Set>(u: *mut uint8x16_t, [p, q]: [uint8x16_t; 2]) {
    // SAFETY: baseline; `u` is good for two vectors by the caller's contract.
    unsafe {
        let [a, b] = if I::PAIRS {
            [p, q]
        } else {
            let (p, q) = (vreinterpretq_u32_u8(p), vreinterpretq_u32_u8(q));
            [vuzp1q_u32(p, q), vuzp2q_u32(p, q)].map(|v| vreinterpretq_u8_u32(v))
        };
        *u = a;
        *u.add(1) = b;
    }
}

/// Stores four rows by eight columns, given as columns 0 to 3 and 4 to 7, in the form that `I` multiplies.
#[inline(always)]
unsafe fn put_quads<I: Set>(u: *mut uint8x16_t, [p, q]: [uint8x16_t; 2]) {
    // SAFETY: baseline; `u` is good for two vectors by the caller's contract.
    unsafe {
        let [a, b] = if I::PAIRS {
            let (p, q) = (vreinterpretq_u32_u8(p), vreinterpretq_u32_u8(q));
            [vzip1q_u32(p, q), vzip2q_u32(p, q)].map(|v| vreinterpretq_u8_u32(v))
        } else {
            [p, q]
        };
        *u = a;
        *u.add(1) = b;
    }
}

/// Stores 16 columns of each of four rows.
#[inline(always)]
unsafe fn put_rows<I: Set>(u: *mut uint8x16_t, fours: usize, rows: [uint8x16_t; 4]) {
    // SAFETY: baseline; `u` is good for two steps by the caller's contract.
    unsafe {
        let [a, b, c, d] = rows.map(|v| vreinterpretq_u64_u8(v));
        let low = [vzip1q_u64(a, b), vzip1q_u64(c, d)];
        let high = [vzip2q_u64(a, b), vzip2q_u64(c, d)];
        put_pairs::<I>(u, low.map(|v| vreinterpretq_u8_u64(v)));
        put_pairs::<I>(u.add(2 * fours), high.map(|v| vreinterpretq_u8_u64(v)));
    }
}

/// The four slots of a vector of codes, each as a byte 0 to 3.
#[inline(always)]
unsafe fn shift(v: uint8x16_t) -> [uint8x16_t; 4] {
    // SAFETY: baseline.
    unsafe {
        let three = vdupq_n_u8(3);
        [
            vandq_u8(v, three),
            vandq_u8(vshrq_n_u8::<2>(v), three),
            vandq_u8(vshrq_n_u8::<4>(v), three),
            vshrq_n_u8::<6>(v),
        ]
    }
}

/// Blocks as a file stores them, decoded to vectors of 16 consecutive weights.
///
/// # Safety
/// `unpack` and `scale` read the `BYTES` bytes of one block.
#[allow(clippy::missing_safety_doc)] // one contract for both, above
pub unsafe trait Block {
    const WEIGHTS: usize;
    const BYTES: usize;
    const SCALE: usize;
    /// `WEIGHTS / 16` vectors, in order of k.
    unsafe fn unpack(p: *const u8) -> [uint8x16_t; 16];
}

/// A stock layout: four rows at a time, each unpacked as a row alone would be.
pub struct Stock<B>(PhantomData<B>);

// SAFETY: reads whole blocks of rows `row .. end`; rows past the last repeat it.
unsafe impl<B: Block> Codes for Stock<B> {
    const GROUP: usize = B::WEIGHTS;
    const FOURS: usize = 1;
    type Unit = [*const u8; 4];

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize, end: usize) -> [*const u8; 4] {
        let bytes = w.cols / B::WEIGHTS * B::BYTES;
        std::array::from_fn(|r| w.bytes[(row + r).min(end - 1) * bytes..].as_ptr())
    }
    #[inline(always)]
    unsafe fn scales(unit: [*const u8; 4], b: usize) -> [float32x4_t; 2] {
        // SAFETY: the scale is inside the block.
        let d = unit.map(|p| unsafe {
            p.add(b * B::BYTES + B::SCALE)
                .cast::<f16>()
                .read_unaligned()
        });
        // SAFETY: `d` is four scales.
        [unsafe { load_f16(d.as_ptr()) }; 2]
    }
    #[inline(always)]
    unsafe fn sums<I: Set, const T: usize>(
        unit: [*const u8; 4],
        b: usize,
        y: [*const i8; T],
    ) -> [[int32x4_t; T]; 2] {
        let mut rows = [[zero(); 4]; T];
        // SAFETY: the contract of the trait.
        unsafe {
            for (r, p) in unit.into_iter().enumerate() {
                let u = B::unpack(p.add(b * B::BYTES));
                for (y, rows) in y.into_iter().zip(&mut rows) {
                    let mut sum = I::sum();
                    for (n, &u) in u[..B::WEIGHTS / 16].iter().enumerate() {
                        sum = I::sum_dot(sum, u, vld1q_s8(y.add(16 * n)));
                    }
                    rows[r] = I::sum_end(sum);
                }
            }
            [rows.map(|v| across(v)); 2]
        }
    }
}

/// Two-bit codes in order of k, as PQ2_0 and Q2_0 store them: `W` weights after a scale.
pub struct InOrder<const W: usize>;

// SAFETY: reads `W / 4` bytes after the scale.
unsafe impl<const W: usize> Block for InOrder<W> {
    const WEIGHTS: usize = W;
    const BYTES: usize = 2 + W / 4;
    const SCALE: usize = 0;

    #[inline(always)]
    unsafe fn unpack(p: *const u8) -> [uint8x16_t; 16] {
        // SAFETY: the contract of the trait.
        unsafe {
            let mut out = [vdupq_n_u8(0); 16];
            for (g, out) in out[..W / 16].chunks_exact_mut(4).enumerate() {
                let [s0, s1, s2, s3] = shift(vld1q_u8(p.add(2 + 16 * g)));
                let zip =
                    |a, b| [vzip1q_u8(a, b), vzip2q_u8(a, b)].map(|v| vreinterpretq_u16_u8(v));
                for (out, (a, b)) in out
                    .chunks_exact_mut(2)
                    .zip(zip(s0, s1).into_iter().zip(zip(s2, s3)))
                {
                    out[0] = vreinterpretq_u8_u16(vzip1q_u16(a, b));
                    out[1] = vreinterpretq_u8_u16(vzip2q_u16(a, b));
                }
            }
            out
        }
    }
}

/// TQ2_0: slots 32 weights apart.
pub struct Tq2;

// SAFETY: reads 64 bytes.
unsafe impl Block for Tq2 {
    const WEIGHTS: usize = 256;
    const BYTES: usize = 66;
    const SCALE: usize = 64;

    #[inline(always)]
    unsafe fn unpack(p: *const u8) -> [uint8x16_t; 16] {
        // SAFETY: the contract of the trait.
        unsafe {
            let mut out = [vdupq_n_u8(0); 16];
            for half in 0..2 {
                for part in 0..2 {
                    let slots = shift(vld1q_u8(p.add(32 * half + 16 * part)));
                    for (s, u) in slots.into_iter().enumerate() {
                        out[8 * half + 2 * s + part] = u;
                    }
                }
            }
            out
        }
    }
}

/// The first digit of each byte: `floor(3 v / 256)` is `(v >= 86) + (v >= 171)`.
#[inline(always)]
unsafe fn digit(v: uint8x16_t) -> uint8x16_t {
    // SAFETY: baseline.
    unsafe {
        // A comparison that holds is -1.
        let both = vaddq_u8(vcgeq_u8(v, vdupq_n_u8(86)), vcgeq_u8(v, vdupq_n_u8(171)));
        vreinterpretq_u8_s8(vnegq_s8(vreinterpretq_s8_u8(both)))
    }
}

/// All five digits of each byte, the most significant first.
#[inline(always)]
unsafe fn digits(v: uint8x16_t) -> [uint8x16_t; 5] {
    // SAFETY: baseline.
    unsafe { [1, 3, 9, 27, 81].map(|power| digit(vmulq_u8(v, vdupq_n_u8(power)))) }
}

/// PTQ1_0: five digits of 16 bytes, five of 8, four of 2.
pub struct Ptq1;

// SAFETY: reads 26 bytes.
unsafe impl Block for Ptq1 {
    const WEIGHTS: usize = 128;
    const BYTES: usize = 28;
    const SCALE: usize = 26;

    #[inline(always)]
    unsafe fn unpack(p: *const u8) -> [uint8x16_t; 16] {
        const POWERS: [u8; 8] = [1, 1, 3, 3, 9, 9, 27, 27];
        // SAFETY: the contract of the trait.
        unsafe {
            let mut out = [vdupq_n_u8(0); 16];
            out[..5].copy_from_slice(&digits(vld1q_u8(p)));
            let eight = vld1_u8(p.add(16));
            let last = vreinterpret_u8_u16(vdup_n_u16(p.add(24).cast::<u16>().read_unaligned()));
            let by = |a, b| vcombine_u8(vmul_u8(eight, vdup_n_u8(a)), vmul_u8(eight, vdup_n_u8(b)));
            out[5] = digit(by(1, 3));
            out[6] = digit(by(9, 27));
            let fifth = vmul_u8(eight, vdup_n_u8(81));
            out[7] = digit(vcombine_u8(fifth, vmul_u8(last, vld1_u8(POWERS.as_ptr()))));
            out
        }
    }
}

/// TQ1_0: five digits of 32 bytes, five of 16, four of 4.
pub struct Tq1;

// SAFETY: reads 52 bytes.
unsafe impl Block for Tq1 {
    const WEIGHTS: usize = 256;
    const BYTES: usize = 54;
    const SCALE: usize = 52;

    #[inline(always)]
    unsafe fn unpack(p: *const u8) -> [uint8x16_t; 16] {
        const POWERS: [u8; 16] = [1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27];
        // SAFETY: the contract of the trait.
        unsafe {
            let mut out = [vdupq_n_u8(0); 16];
            let (low, high) = (digits(vld1q_u8(p)), digits(vld1q_u8(p.add(16))));
            for n in 0..5 {
                out[2 * n] = low[n];
                out[2 * n + 1] = high[n];
            }
            out[10..15].copy_from_slice(&digits(vld1q_u8(p.add(32))));
            let last = vreinterpretq_u8_u32(vdupq_n_u32(p.add(48).cast::<u32>().read_unaligned()));
            out[15] = digit(vmulq_u8(last, vld1q_u8(POWERS.as_ptr())));
            out
        }
    }
}

/// How a vector of masked slots meets its activations, and lanes become rows.
///
/// # Safety
/// As [`Codes`]; `p` points to the codes of a block of a unit.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Slotted {
    /// Columns that share a scale.
    const GROUP: usize;
    /// Fours of rows in a unit.
    const FOURS: usize;
    /// Accumulators of a unit.
    const VECTORS: usize;
    /// Vectors of codes of an accumulator in a block.
    const CHUNKS: usize;
    /// Whether a vector holds two rows by eight columns a slot.
    const PAIRS: bool = false;
    /// The activations of a chunk.
    type Y: Copy;
    /// Where the rows of a unit are.
    type Unit: Copy;

    unsafe fn unit(w: &MatrixRef, row: usize) -> Self::Unit;
    unsafe fn scales(unit: Self::Unit, b: usize) -> [float32x4_t; 2];
    unsafe fn codes(unit: Self::Unit, b: usize) -> *const u8;
    /// Vector `v` of chunk `c`.
    unsafe fn vector(p: *const u8, v: usize, c: usize) -> uint8x16_t;
    unsafe fn y(y: *const i8, c: usize) -> Self::Y;
    unsafe fn dot<I: Set>(acc: I::Slots, u: [uint8x16_t; 4], y: Self::Y) -> I::Slots;
    /// Fours of rows from the sums of the vectors.
    unsafe fn rows(v: [int32x4_t; 4]) -> [int32x4_t; 2];
    unsafe fn unpack<I: Set>(p: *const u8, u: *mut uint8x16_t, fours: usize);
}

/// Four dots of whole vectors.
#[inline(always)]
unsafe fn dot_each<I: Set>(acc: I::Slots, u: [uint8x16_t; 4], y: [int8x16_t; 4]) -> I::Slots {
    // SAFETY: the caller's contract.
    unsafe {
        let acc = I::slots_dot::<0>(acc, u[0], y[0]);
        let acc = I::slots_dot::<1>(acc, u[1], y[1]);
        let acc = I::slots_dot::<2>(acc, u[2], y[2]);
        I::slots_dot::<3>(acc, u[3], y[3])
    }
}

/// Mask-slot decode of a layout.
pub struct MaskSlot<L>(PhantomData<L>);

// SAFETY: passes the contract on.
unsafe impl<L: Slotted> Codes for MaskSlot<L> {
    const GROUP: usize = L::GROUP;
    const FOURS: usize = L::FOURS;
    type Unit = L::Unit;

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize, _: usize) -> L::Unit {
        // SAFETY: the contract of the trait.
        unsafe { L::unit(w, row) }
    }
    #[inline(always)]
    unsafe fn scales(unit: L::Unit, b: usize) -> [float32x4_t; 2] {
        // SAFETY: the contract of the trait.
        unsafe { L::scales(unit, b) }
    }

    /// One token keeps the accumulators of the whole unit in registers; more go vector by vector.
    #[inline(always)]
    unsafe fn sums<I: Set, const T: usize>(
        unit: L::Unit,
        b: usize,
        y: [*const i8; T],
    ) -> [[int32x4_t; T]; 2] {
        let mut sums = [[zero(); 4]; T];
        // SAFETY: the contract of the trait.
        unsafe {
            let p = L::codes(unit, b);
            if T == 1 {
                let mut acc = [I::slots(); 4];
                for c in 0..L::CHUNKS {
                    let y = L::y(y[0], c);
                    for (v, acc) in acc[..L::VECTORS].iter_mut().enumerate() {
                        *acc = L::dot::<I>(*acc, I::mask(L::vector(p, v, c)), y);
                    }
                    if c % 4 == 3 {
                        acc = acc.map(|acc| I::slots_fold(acc));
                    }
                }
                sums[0] = acc.map(|acc| I::slots_sum(acc));
            } else if I::MATRIX && L::PAIRS {
                return pairs::<I, L, T>(p, y);
            } else {
                for v in 0..L::VECTORS {
                    let mut acc = [I::slots(); T];
                    for c in 0..L::CHUNKS {
                        let u = I::mask(L::vector(p, v, c));
                        for (acc, y) in acc.iter_mut().zip(y) {
                            *acc = L::dot::<I>(*acc, u, L::y(y, c));
                        }
                        if c % 4 == 3 {
                            acc = acc.map(|acc| I::slots_fold(acc));
                        }
                    }
                    for (sums, acc) in sums.iter_mut().zip(acc) {
                        sums[v] = I::slots_sum(acc);
                    }
                }
            }
            let rows = sums.map(|v| L::rows(v));
            std::array::from_fn(|f| rows.map(|rows| rows[f]))
        }
    }
}

// SAFETY: passes the contract on.
unsafe impl<L: Slotted> Tiled for MaskSlot<L> {
    #[inline(always)]
    unsafe fn unpack<I: Set>(unit: L::Unit, b: usize, u: *mut uint8x16_t, fours: usize) {
        // SAFETY: the contract of the trait.
        unsafe { L::unpack::<I>(L::codes(unit, b), u, fours) }
    }
}

/// Masked slots of row pairs by token pairs, without a shuffle.
#[inline(always)]
unsafe fn pairs<I: Set, L: Slotted, const T: usize>(
    p: *const u8,
    y: [*const i8; T],
) -> [[int32x4_t; T]; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        // [token pair][row pair]
        let mut acc = [[I::slots(); 2]; 2];
        for c in 0..L::CHUNKS {
            let u = [I::mask(L::vector(p, 0, c)), I::mask(L::vector(p, 1, c))];
            for (t, acc) in acc[..T.div_ceil(2)].iter_mut().enumerate() {
                let (first, second) = (y[2 * t].add(32 * c), y[(2 * t + 1).min(T - 1)].add(32 * c));
                let y: [int8x16_t; 4] = std::array::from_fn(|s| {
                    vcombine_s8(vld1_s8(first.add(8 * s)), vld1_s8(second.add(8 * s)))
                });
                for (acc, u) in acc.iter_mut().zip(u) {
                    *acc = I::slots_pair::<0>(*acc, u[0], y[0]);
                    *acc = I::slots_pair::<1>(*acc, u[1], y[1]);
                    *acc = I::slots_pair::<2>(*acc, u[2], y[2]);
                    *acc = I::slots_pair::<3>(*acc, u[3], y[3]);
                }
            }
        }
        let sums = acc.map(|acc| acc.map(|acc| I::slots_sum(acc)));
        [std::array::from_fn(|t| token_of(sums[t / 2], t)); 2]
    }
}

/// Four-row tiles of PQ2_0: four scales, then 128 bytes of codes.
#[inline(always)]
unsafe fn four_row_tile(w: &MatrixRef, row: usize) -> *const u8 {
    // SAFETY: the row is inside the tiled part.
    unsafe { w.parts.codes.as_ptr().add(row * (w.cols / 128) * 34) }
}

/// A slot of a vector: 16 consecutive weights of one row.
pub struct Slot16;

// SAFETY: reads the 136 bytes of a block of a tile.
unsafe impl Slotted for Slot16 {
    const GROUP: usize = 128;
    const FOURS: usize = 1;
    const VECTORS: usize = 4;
    const CHUNKS: usize = 2;
    type Y = [int8x16_t; 4];
    type Unit = *const u8;

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize) -> *const u8 {
        // SAFETY: the contract of the trait.
        unsafe { four_row_tile(w, row) }
    }
    #[inline(always)]
    unsafe fn scales(unit: *const u8, b: usize) -> [float32x4_t; 2] {
        // SAFETY: the contract of the trait.
        [unsafe { load_f16(unit.add(136 * b).cast()) }; 2]
    }
    #[inline(always)]
    unsafe fn codes(unit: *const u8, b: usize) -> *const u8 {
        // SAFETY: the contract of the trait.
        unsafe { unit.add(136 * b + 8) }
    }
    #[inline(always)]
    unsafe fn vector(p: *const u8, v: usize, c: usize) -> uint8x16_t {
        // SAFETY: the contract of the trait.
        unsafe { vld1q_u8(p.add(64 * c + 16 * v)) }
    }
    #[inline(always)]
    unsafe fn y(y: *const i8, c: usize) -> [int8x16_t; 4] {
        // SAFETY: the contract of the trait.
        unsafe { std::array::from_fn(|s| vld1q_s8(y.add(64 * c + 16 * s))) }
    }
    #[inline(always)]
    unsafe fn dot<I: Set>(acc: I::Slots, u: [uint8x16_t; 4], y: [int8x16_t; 4]) -> I::Slots {
        // SAFETY: the contract of the trait.
        unsafe { dot_each::<I>(acc, u, y) }
    }
    #[inline(always)]
    unsafe fn rows(v: [int32x4_t; 4]) -> [int32x4_t; 2] {
        // SAFETY: baseline.
        [unsafe { across(v) }; 2]
    }
    #[inline(always)]
    unsafe fn unpack<I: Set>(p: *const u8, u: *mut uint8x16_t, fours: usize) {
        for c in 0..2 {
            // SAFETY: the contract of the trait.
            unsafe {
                let rows: [[uint8x16_t; 4]; 4] =
                    std::array::from_fn(|r| shift(Self::vector(p, r, c)));
                for s in 0..4 {
                    put_rows::<I>(
                        u.add((16 * c + 4 * s) * fours),
                        fours,
                        rows.map(|row| row[s]),
                    );
                }
            }
        }
    }
}

/// A slot of a vector: eight consecutive weights of each row of a pair.
pub struct RowPair;

// SAFETY: reads the 136 bytes of a block of a tile.
unsafe impl Slotted for RowPair {
    const GROUP: usize = 128;
    const FOURS: usize = 1;
    const VECTORS: usize = 2;
    const CHUNKS: usize = 4;
    const PAIRS: bool = true;
    type Y = [int8x16_t; 4];
    type Unit = *const u8;

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize) -> *const u8 {
        // SAFETY: the contract of the trait.
        unsafe { four_row_tile(w, row) }
    }
    #[inline(always)]
    unsafe fn scales(unit: *const u8, b: usize) -> [float32x4_t; 2] {
        // SAFETY: the contract of the trait.
        [unsafe { load_f16(unit.add(136 * b).cast()) }; 2]
    }
    #[inline(always)]
    unsafe fn codes(unit: *const u8, b: usize) -> *const u8 {
        // SAFETY: the contract of the trait.
        unsafe { unit.add(136 * b + 8) }
    }
    #[inline(always)]
    unsafe fn vector(p: *const u8, v: usize, c: usize) -> uint8x16_t {
        // SAFETY: the contract of the trait.
        unsafe { vld1q_u8(p.add(64 * v + 16 * c)) }
    }
    #[inline(always)]
    unsafe fn y(y: *const i8, c: usize) -> [int8x16_t; 4] {
        // SAFETY: the contract of the trait.
        unsafe {
            std::array::from_fn(|s| {
                let both = vld1q_dup_s64(y.add(32 * c + 8 * s).cast());
                vreinterpretq_s8_s64(both)
            })
        }
    }
    #[inline(always)]
    unsafe fn dot<I: Set>(acc: I::Slots, u: [uint8x16_t; 4], y: [int8x16_t; 4]) -> I::Slots {
        // SAFETY: the contract of the trait.
        unsafe { dot_each::<I>(acc, u, y) }
    }
    #[inline(always)]
    unsafe fn rows(v: [int32x4_t; 4]) -> [int32x4_t; 2] {
        // SAFETY: baseline.
        [unsafe { vpaddq_s32(v[0], v[1]) }; 2]
    }
    #[inline(always)]
    unsafe fn unpack<I: Set>(p: *const u8, u: *mut uint8x16_t, fours: usize) {
        for c in 0..4 {
            // SAFETY: the contract of the trait.
            unsafe {
                let (low, high) = (shift(Self::vector(p, 0, c)), shift(Self::vector(p, 1, c)));
                for s in 0..4 {
                    put_pairs::<I>(u.add(2 * (4 * c + s) * fours), [low[s], high[s]]);
                }
            }
        }
    }
}

/// A slot of a vector: four consecutive weights of each of four rows. A scale serves `G` columns.
pub struct Wide<const G: usize>;

/// An eight-row tile and the blocks of its rows.
type WideTile = (*const u8, usize);

/// Bytes of the scales of a block of a tile.
const SCALES: usize = 16;

/// # Safety
/// The row starts a tile of `w`, whose codes take `bytes` bytes a block.
#[inline(always)]
unsafe fn wide_tile(w: &MatrixRef, row: usize, group: usize, bytes: usize) -> WideTile {
    let blocks = w.cols / group;
    let tile = row / 8 * blocks * (bytes + SCALES);
    // SAFETY: the caller's contract.
    (unsafe { w.parts.codes.as_ptr().add(tile) }, blocks)
}

/// # Safety
/// `p` is good for 16 bytes.
#[inline(always)]
unsafe fn wide_scales(p: *const u8) -> [float32x4_t; 2] {
    let d = p.cast::<f16>();
    // SAFETY: the caller's contract.
    unsafe { [load_f16(d), load_f16(d.add(4))] }
}

impl<const G: usize> Wide<G> {
    /// Where block `b` has its codes and its scales.
    #[inline(always)]
    fn at(blocks: usize, b: usize) -> (usize, usize) {
        layout::wide_block(layout::UNIT, blocks, (2 * G, SCALES), b)
    }
}

// SAFETY: reads `2 * G` bytes of codes and 16 of scales.
unsafe impl<const G: usize> Slotted for Wide<G> {
    const GROUP: usize = G;
    const FOURS: usize = 2;
    const VECTORS: usize = 2;
    const CHUNKS: usize = G / 16;
    type Y = int8x16_t;
    type Unit = WideTile;

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize) -> WideTile {
        // SAFETY: the contract of the trait.
        unsafe { wide_tile(w, row, G, 2 * G) }
    }
    #[inline(always)]
    unsafe fn scales((tile, blocks): WideTile, b: usize) -> [float32x4_t; 2] {
        // SAFETY: the contract of the trait.
        unsafe { wide_scales(tile.add(Self::at(blocks, b).1)) }
    }
    #[inline(always)]
    unsafe fn codes((tile, blocks): WideTile, b: usize) -> *const u8 {
        // SAFETY: the contract of the trait.
        unsafe { tile.add(Self::at(blocks, b).0) }
    }
    #[inline(always)]
    unsafe fn vector(p: *const u8, v: usize, c: usize) -> uint8x16_t {
        // SAFETY: the contract of the trait.
        unsafe { vld1q_u8(p.add(32 * c + 16 * v)) }
    }
    #[inline(always)]
    unsafe fn y(y: *const i8, c: usize) -> int8x16_t {
        // SAFETY: the contract of the trait.
        unsafe { vld1q_s8(y.add(16 * c)) }
    }
    #[inline(always)]
    unsafe fn dot<I: Set>(acc: I::Slots, u: [uint8x16_t; 4], y: int8x16_t) -> I::Slots {
        // SAFETY: the contract of the trait.
        unsafe {
            let acc = I::slots_lane::<0>(acc, u[0], y);
            let acc = I::slots_lane::<1>(acc, u[1], y);
            let acc = I::slots_lane::<2>(acc, u[2], y);
            I::slots_lane::<3>(acc, u[3], y)
        }
    }
    #[inline(always)]
    unsafe fn rows(v: [int32x4_t; 4]) -> [int32x4_t; 2] {
        [v[0], v[1]]
    }
    #[inline(always)]
    unsafe fn unpack<I: Set>(p: *const u8, u: *mut uint8x16_t, fours: usize) {
        for c in 0..G / 16 {
            for v in 0..2 {
                // SAFETY: the contract of the trait.
                unsafe {
                    let [s0, s1, s2, s3] = shift(Self::vector(p, v, c));
                    let u = u.add(2 * (2 * c * fours + v));
                    put_quads::<I>(u, [s0, s1]);
                    put_quads::<I>(u.add(2 * fours), [s2, s3]);
                }
            }
        }
    }
}

/// Base-3 codes of eight rows, four consecutive weights of a row a digit: see [`crate::formats::wide_b3`].
pub struct WideB3;

impl WideB3 {
    /// Where block `b` has its codes and its scales.
    #[inline(always)]
    fn at(blocks: usize, b: usize) -> (usize, usize) {
        let bytes = (8 * wide_b3::BYTES, SCALES);
        layout::wide_block(wide_b3::UNIT, blocks, bytes, b)
    }

    /// Four rows by 128 columns, four columns a vector.
    #[inline(always)]
    unsafe fn quads(p: *const u8, f: usize) -> [uint8x16_t; 32] {
        // SAFETY: the caller's contract: `p` is good for the 208 bytes of a block of a tile.
        unsafe {
            let mut out = [vdupq_n_u8(0); 32];
            for (c, out) in out[..30].chunks_exact_mut(5).enumerate() {
                let mut rest = vld1q_u8(p.add(32 * c + 16 * f));
                for (s, power) in [(4, 81), (3, 27), (2, 9), (1, 3)] {
                    // A comparison that holds is -1.
                    let both = vaddq_u8(
                        vcgeq_u8(rest, vdupq_n_u8(power)),
                        vcgeq_u8(rest, vdupq_n_u8(2 * power)),
                    );
                    out[s] = vreinterpretq_u8_s8(vnegq_s8(vreinterpretq_s8_u8(both)));
                    rest = vmlaq_u8(rest, both, vdupq_n_u8(power));
                }
                out[0] = rest;
            }
            let last = vmovl_u16(vld1_u16(p.add(192 + 8 * f).cast()));
            let last = vreinterpretq_u8_u32(vorrq_u32(last, vshlq_n_u32::<12>(last)));
            out[30] = vandq_u8(last, vdupq_n_u8(3));
            out[31] = vandq_u8(vshrq_n_u8::<2>(last), vdupq_n_u8(3));
            out
        }
    }
}

// SAFETY: reads 208 bytes of codes and 16 of scales.
unsafe impl Codes for WideB3 {
    const GROUP: usize = 128;
    const FOURS: usize = 2;
    type Unit = WideTile;

    #[inline(always)]
    unsafe fn unit(w: &MatrixRef, row: usize, _: usize) -> WideTile {
        // SAFETY: the contract of the trait.
        unsafe { wide_tile(w, row, 128, 8 * wide_b3::BYTES) }
    }
    #[inline(always)]
    unsafe fn scales((tile, blocks): WideTile, b: usize) -> [float32x4_t; 2] {
        // SAFETY: the contract of the trait.
        unsafe { wide_scales(tile.add(Self::at(blocks, b).1)) }
    }
    #[inline(always)]
    unsafe fn sums<I: Set, const T: usize>(
        (tile, blocks): WideTile,
        b: usize,
        y: [*const i8; T],
    ) -> [[int32x4_t; T]; 2] {
        let mut sums = [[zero(); T]; 2];
        for (f, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the contract of the trait.
            unsafe {
                let u = Self::quads(tile.add(Self::at(blocks, b).0), f);
                for (sums, y) in sums.iter_mut().zip(y) {
                    let mut sum = I::sum();
                    for (n, u) in u.chunks_exact(4).enumerate() {
                        let y = vld1q_s8(y.add(16 * n));
                        sum = I::sum_lane::<0>(sum, u[0], y);
                        sum = I::sum_lane::<1>(sum, u[1], y);
                        sum = I::sum_lane::<2>(sum, u[2], y);
                        sum = I::sum_lane::<3>(sum, u[3], y);
                    }
                    *sums = I::sum_end(sum);
                }
            }
        }
        sums
    }
}

// SAFETY: reads 208 bytes of codes.
unsafe impl Tiled for WideB3 {
    #[inline(always)]
    unsafe fn unpack<I: Set>((tile, blocks): WideTile, b: usize, u: *mut uint8x16_t, fours: usize) {
        for f in 0..2 {
            // SAFETY: the contract of the trait.
            unsafe {
                let quads = Self::quads(tile.add(Self::at(blocks, b).0), f);
                for (step, pair) in quads.chunks_exact(2).enumerate() {
                    put_quads::<I>(u.add(2 * (step * fours + f)), [pair[0], pair[1]]);
                }
            }
        }
    }
}
