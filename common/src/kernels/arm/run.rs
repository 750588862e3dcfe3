//! Decode and prefill, over any layout and instruction set.

use std::arch::aarch64::*;
use std::ops::Range;

use super::codes::{Codes, Tiled};
use super::sets::Set;
use crate::kernels::{Group, MatrixRef, Out, TILE};

/// Tokens that are multiplied straight from a block; above, unpacking it once for all is cheaper.
const STREAMED: usize = 4;

/// Groups that share one unpacking of a block.
const PASS: usize = 4;

/// Fours of rows whose unpacked blocks share a pass: the activations of a block come from the first cache for all of them.
const FOURS: usize = 8;

/// The most steps of eight columns in a block.
const STEPS: usize = 256 / 8;

/// The tiles `tiles` of `w` for every token of `x`.
///
/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set `I`; the layout of `w` is that of `C`.
#[inline(always)]
pub unsafe fn run<I: Set, C: Tiled>(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
    let height = w.layout.tile_rows();
    let rows = tiles.start * height..tiles.end * height;
    // SAFETY: the caller's contract.
    unsafe {
        match x {
            [x] if x.width() <= STREAMED => match x.width() {
                1 => decode::<I, C, 1>(w, x, 0, rows, out, 0),
                2 => decode::<I, C, 2>(w, x, 0, rows, out, 0),
                3 => decode::<I, C, 3>(w, x, 0, rows, out, 0),
                _ => decode::<I, C, 4>(w, x, 0, rows, out, 0),
            },
            _ => {
                for start in rows.clone().step_by(4 * FOURS) {
                    for (pass, x) in x.chunks(PASS).enumerate() {
                        let rows = start..rows.end.min(start + 4 * FOURS);
                        prefill::<I, C>(w, x, rows, pass * PASS * TILE, out);
                    }
                }
            }
        }
    }
}

/// As [`run`], one token after the other: what a file's own layout is made for.
///
/// # Safety
/// As [`run`].
#[inline(always)]
pub unsafe fn run_stock<I: Set, C: Codes>(
    w: &MatrixRef,
    x: &[Group],
    rows: Range<usize>,
    out: Out,
) {
    for start in rows.clone().step_by(4 * FOURS) {
        let rows = start..rows.end.min(start + 4 * FOURS);
        for (g, x) in x.iter().enumerate() {
            for t in 0..x.tokens() {
                // SAFETY: the caller's contract.
                unsafe { decode::<I, C, 1>(w, x, t, rows.clone(), out, g * TILE) }
            }
        }
    }
}

/// Stores up to four rows of a token, those below `end`.
///
/// # Safety
/// Token and rows are inside `out` and belong to this thread.
#[inline(always)]
unsafe fn store(out: Out, token: usize, row: usize, end: usize, v: float32x4_t) {
    // SAFETY: the caller's contract.
    unsafe {
        let p = out.at(token, row);
        if end - row >= 4 {
            vst1q_f32(p, v);
        } else {
            let mut lanes = [0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), v);
            for (r, v) in lanes[..end - row].iter().enumerate() {
                *p.add(r) = *v;
            }
        }
    }
}

/// The float rule: `sum` and the offset of the codes, times both scales, added with one rounding.
#[inline(always)]
unsafe fn accumulate(
    acc: float32x4_t,
    sum: int32x4_t,
    offset: *const i32,
    dw: float32x4_t,
    dy: *const f32,
) -> float32x4_t {
    // SAFETY: baseline; the caller's pointers are good for one value.
    unsafe {
        let sum = vcvtq_f32_s32(vaddq_s32(sum, vld1q_dup_s32(offset)));
        vfmaq_f32(acc, sum, vmulq_f32(dw, vld1q_dup_f32(dy)))
    }
}

/// Tokens `from .. from + T` of a group, `group` tokens after the first: bytes of codes are the cost, so a block is read once and
/// its slots are masked, not shifted.
#[inline(always)]
unsafe fn decode<I: Set, C: Codes, const T: usize>(
    w: &MatrixRef,
    x: &Group,
    from: usize,
    rows: Range<usize>,
    out: Out,
    group: usize,
) {
    let (width, tokens) = (x.width(), T.min(x.tokens() - from));
    for row in rows.clone().step_by(4 * C::FOURS) {
        // SAFETY: the caller's contract; activations are padded to whole blocks of 256 and to `from + T` tokens.
        unsafe {
            let scales = x.scales().as_ptr().add(from);
            let offsets = x.offsets(C::GROUP).as_ptr().add(from);
            let unit = C::unit(w, row, rows.end);
            let y: [*const i8; T] = std::array::from_fn(|t| x.row(from + t).as_ptr());
            let mut acc = [[vdupq_n_f32(0.0); T]; 2];
            for b in 0..w.cols / C::GROUP {
                let sums = C::sums::<I, T>(unit, b, y.map(|y| y.add(b * C::GROUP)));
                let dw = C::scales(unit, b);
                for f in 0..C::FOURS {
                    for t in 0..T {
                        let dy = scales.add(b * C::GROUP / 256 * width + t);
                        let offset = offsets.add(b * width + t);
                        acc[f][t] = accumulate(acc[f][t], sums[f][t], offset, dw[f], dy);
                    }
                }
            }
            for (f, acc) in acc[..C::FOURS].iter().enumerate() {
                for (t, &acc) in acc[..tokens].iter().enumerate() {
                    store(out, group + from + t, row + 4 * f, rows.end, acc);
                }
            }
        }
    }
}

/// Any number of tokens: multiplies are the cost, so the codes of a block are unpacked once for all tokens of a pass.
///
/// `first` is the first token.
#[inline(always)]
unsafe fn prefill<I: Set, C: Tiled>(
    w: &MatrixRef,
    x: &[Group],
    rows: Range<usize>,
    first: usize,
    out: Out,
) {
    // SAFETY: the caller's contract, as in `decode`.
    unsafe {
        let fours = rows.len().div_ceil(4);
        let mut acc = [[vdupq_n_f32(0.0); PASS * TILE]; FOURS];
        let mut u = [vdupq_n_u8(0); STEPS * FOURS * 2];
        for b in 0..w.cols / C::GROUP {
            let mut dw = [vdupq_n_f32(0.0); FOURS];
            for f in (0..fours).step_by(C::FOURS) {
                let unit = C::unit(w, rows.start + 4 * f, rows.end);
                C::unpack::<I>(unit, b, u[2 * f..].as_mut_ptr(), fours);
                dw[f..f + C::FOURS].copy_from_slice(&C::scales(unit, b)[..C::FOURS]);
            }
            for f in (0..fours).step_by(2) {
                for (g, x) in x.iter().enumerate() {
                    let step = Step {
                        u: u[2 * f..].as_ptr(),
                        fours,
                        x,
                        b,
                        group: C::GROUP,
                        dw: dw[f..].as_ptr(),
                        acc: acc[f..].as_mut_ptr().cast::<float32x4_t>().add(g * TILE),
                    };
                    if f + 1 < fours {
                        group::<I, 2>(step);
                    } else {
                        group::<I, 1>(step);
                    }
                }
            }
        }
        for (f, acc) in acc[..fours].iter().enumerate() {
            for (g, x) in x.iter().enumerate() {
                for t in g * TILE..g * TILE + x.tokens() {
                    store(out, first + t, rows.start + 4 * f, rows.end, acc[t]);
                }
            }
        }
    }
}

/// One block of `F` fours for a group of tokens, in register tiles.
#[inline(always)]
unsafe fn group<I: Set, const F: usize>(at: Step) {
    let size = at.x.width().div_ceil(at.x.width().div_ceil(I::TOKENS));
    for t in (0..at.x.width()).step_by(size) {
        // SAFETY: the caller's contract.
        unsafe {
            match size {
                1 => I::register_tile::<F, 1>(at, t),
                2 => I::register_tile::<F, 2>(at, t),
                3 => I::register_tile::<F, 3>(at, t),
                4 => I::register_tile::<F, 4>(at, t),
                6 => I::register_tile::<F, 6>(at, t),
                8 => I::register_tile::<F, 8>(at, t),
                n => unreachable!("no register tile of {n} tokens"),
            }
        }
    }
}

/// One block of some fours of rows and one group of tokens.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// Unpacked codes, `[step of 8 columns][four][2]`.
    u: *const uint8x16_t,
    /// Fours a step.
    fours: usize,
    /// Activations.
    x: &'a Group,
    /// The block, of `group` columns.
    b: usize,
    group: usize,
    /// A scale of each four.
    dw: *const float32x4_t,
    /// `[four][token of the pass]`, from the first token of the group.
    acc: *mut float32x4_t,
}

/// `F` fours by the tokens `t .. t + T` of a group.
///
/// # Safety
/// Every pointer is good for its extent; the CPU has the instruction set of `I`.
#[inline(always)]
pub unsafe fn register_tile<I: Set, const F: usize, const T: usize>(at: Step, t: usize) {
    let (b, width) = (at.b, at.x.width());
    // SAFETY: the caller's contract; widths are multiples of their register tiles.
    unsafe {
        let y = at.x.packed().as_ptr().add(b * at.group * width + 8 * t);
        let offsets = at.x.offsets(at.group).as_ptr().add(b * width + t);
        let scales = at.x.scales().as_ptr().add(b * at.group / 256 * width + t);
        let sums = I::tile::<F, T>(at.u, at.fours, y, width, at.group / 8);
        for f in 0..F {
            let dw = *at.dw.add(f);
            for i in 0..T {
                let acc = at.acc.add(f * PASS * TILE + t + i);
                *acc = accumulate(*acc, sums[f][i], offsets.add(i), dw, scales.add(i));
            }
        }
    }
}
