//! Mask-slot on the wide-row layout: each 32-bit lane is one row, so a dot instruction sums rows without a horizontal add, and
//! activations are broadcast four at a time without a shuffle.
//!
//! Loops over vectors are plain: closures handed to array methods are not inlined where the instruction set is enabled.
//!
//! One source for 512-bit vectors (16 rows) and 256-bit ones (8 rows; AVX2, and both encodings of AVX-VNNI), and for scales
//! that serve 64, 128 or 256 columns.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::f16;

use super::lanes::Lanes;
use super::{FAR, NEAR, prefetch};
use crate::formats::layout;
use crate::kernels::{Group, MatrixRef, Out, TILE};

/// Tokens whose slots stay masked; above, shifting a slot down once is cheaper than an accumulator a slot.
const MASKED: usize = 4;

/// Groups of tokens that share one shifting of the slots.
const PASS: usize = 4;

/// The most columns in a block.
const MOST: usize = 640;

/// How the codes of one block of a tile are stored, and what a vector of them takes to multiply.
///
/// # Safety
/// As [`Lanes`]; `codes` points to a whole block.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Codes<V: Lanes> {
    /// Columns that share a scale.
    const GROUP: usize;
    /// Groups of a block: those whose codes share bytes, one unless said.
    const GROUPS: usize = 1;
    /// Bytes of the codes of a block of a tile.
    const BYTES: usize;
    /// Whether each vector of codes holds four slots of two bits, which a shift and a mask unpack.
    const SLOTS: bool = false;
    /// Blocks whose codes, then scales, stand together.
    const UNIT: usize;

    /// Accumulators of one token in decode.
    type Acc: Copy;

    /// Accumulators that sum to `offset(g)` in group g.
    unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc;
    /// Adds the dots of a block with `T` tokens, `y[k / 4][token][k % 4]`. Asks for the codes that come [`FAR`] and [`NEAR`] bytes later
    /// on the way: between the dots, where requests that find no room delay them least.
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        acc: [Self::Acc; T],
    ) -> [Self::Acc; T];
    /// The sums of the rows in a group.
    unsafe fn finish(acc: Self::Acc, group: usize) -> V;

    /// Hands out each vector of codes as bytes 0 to 3, and its place k / 4.
    unsafe fn unpack(codes: *const u8, put: impl FnMut(usize, V));
}

/// Two bits a code, scales over `G` columns.
pub struct TwoBit<const G: usize>;

// SAFETY: reads `BYTES` bytes of codes, `G * T` of activations.
unsafe impl<V: Lanes, const G: usize> Codes<V> for TwoBit<G> {
    const GROUP: usize = G;
    const BYTES: usize = G / 16 * V::BYTES;
    const SLOTS: bool = true;
    const UNIT: usize = layout::UNIT;
    type Acc = V::Slots;

    #[inline(always)]
    unsafe fn start(offset: impl Fn(usize) -> i32) -> V::Slots {
        // SAFETY: the contract of the trait.
        unsafe { V::slots(offset(0)) }
    }

    #[inline(always)]
    unsafe fn finish(acc: V::Slots, _: usize) -> V {
        // SAFETY: the contract of the trait.
        unsafe { V::slots_sum(acc) }
    }

    #[inline(always)]
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        mut acc: [V::Slots; T],
    ) -> [V::Slots; T] {
        for c in 0..G / 16 {
            // SAFETY: word c is inside the block; its 16 activations a token are inside the group.
            unsafe {
                let codes = codes.add(c * V::BYTES);
                prefetch_word::<V>(codes, c);
                let u = V::load(codes).mask();
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc = V::slots_dot(*acc, u, y.add(16 * c * T + 4 * t), 4 * T);
                }
                if c % 4 == 3 {
                    for acc in &mut acc {
                        *acc = V::slots_fold(*acc);
                    }
                }
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, V)) {
        for c in 0..G / 16 {
            // SAFETY: word c is inside the block.
            let slots = unsafe { V::load(codes.add(c * V::BYTES)).shift() };
            for (s, u) in slots.into_iter().enumerate() {
                put(4 * c + s, u);
            }
        }
    }
}

/// Where a register tile of `R` row vectors takes the codes of its columns from.
///
/// # Safety
/// `at` is called with a word of 16 columns inside the group, and one of its four slots.
#[allow(clippy::missing_safety_doc)] // one contract, above
unsafe trait Source<V, const R: usize>: Copy {
    unsafe fn at(self, word: usize, slot: usize) -> [V; R];
}

/// Unpacked before, for many tokens.
// SAFETY: indexing checks.
unsafe impl<V: Lanes, const R: usize> Source<V, R> for &[[V; R]] {
    #[inline(always)]
    unsafe fn at(self, word: usize, slot: usize) -> [V; R] {
        self[4 * word + slot]
    }
}

/// The codes of each tile as they are stored, in slots of two bits.
#[derive(Clone, Copy)]
struct Direct<const R: usize>([*const u8; R]);

// SAFETY: reads words of the block whose codes these are.
unsafe impl<V: Lanes, const R: usize> Source<V, R> for Direct<R> {
    #[inline(always)]
    unsafe fn at(self, word: usize, slot: usize) -> [V; R] {
        // SAFETY: the contract of the trait.
        unsafe {
            let mut u = [V::splat(0); R];
            for (u, codes) in u.iter_mut().zip(self.0) {
                *u = V::load(codes.add(word * V::BYTES)).shift()[slot];
            }
            u
        }
    }
}

/// The tiles `tiles` of `w` for every token of `x`.
///
/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `V`; the layout of `w` is that of `C`.
#[inline(always)]
pub unsafe fn run<V: Lanes, C: Codes<V>>(
    w: &MatrixRef,
    x: &[Group],
    tiles: Range<usize>,
    out: Out,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match x {
            [x] if x.width() <= MASKED => match x.width() {
                1 => decode::<V, C, 1>(w, x, tiles, out),
                2 => decode::<V, C, 2>(w, x, tiles, out),
                3 => decode::<V, C, 3>(w, x, tiles, out),
                _ => decode::<V, C, 4>(w, x, tiles, out),
            },
            _ => {
                for tile in tiles.clone().step_by(2) {
                    for (pass, x) in x.chunks(PASS).enumerate() {
                        if tile + 1 < tiles.end {
                            prefill::<V, C, 2>(w, x, tile, pass * PASS, out);
                        } else {
                            prefill::<V, C, 1>(w, x, tile, pass * PASS, out);
                        }
                    }
                }
            }
        }
    }
}

/// Codes and scales of a block of a tile.
///
/// # Safety
/// The block is inside `w`.
#[inline(always)]
unsafe fn block_of<V: Lanes, C: Codes<V>>(
    w: &MatrixRef,
    tile: usize,
    b: usize,
) -> (*const u8, *const f16) {
    let blocks = w.cols / (C::GROUP * C::GROUPS);
    let bytes = (C::BYTES, 2 * V::ROWS * C::GROUPS);
    let (codes, scales) = layout::wide_block(C::UNIT, blocks, bytes, b);
    // SAFETY: the caller's contract.
    unsafe {
        let tile = w
            .parts
            .codes
            .as_ptr()
            .add(tile * blocks * (bytes.0 + bytes.1));
        (tile.add(codes), tile.add(scales).cast())
    }
}

/// One to four tokens: bytes of codes are the cost, so each vector is read once and its slots are masked, not shifted.
#[inline(always)]
unsafe fn decode<V: Lanes, C: Codes<V>, const T: usize>(
    w: &MatrixRef,
    x: &Group,
    tiles: Range<usize>,
    out: Out,
) {
    let (scales, offsets) = (x.scales().as_ptr(), x.offsets(C::GROUP).as_ptr());
    for tile in tiles {
        // SAFETY: the caller's contract; activations are padded to whole blocks of 256.
        unsafe {
            let mut y = x.packed().as_ptr();
            let mut acc = [V::zero_f(); T];
            for b in 0..w.cols / (C::GROUP * C::GROUPS) {
                let (codes, d) = block_of::<V, C>(w, tile, b);
                let offset = |t: usize| move |g| *offsets.add((b * C::GROUPS + g) * T + t);
                let mut sums = [C::start(offset(0)); T];
                for (t, sum) in sums.iter_mut().enumerate().skip(1) {
                    *sum = C::start(offset(t));
                }
                let sums = C::dots::<T>(codes, y, sums);
                for g in 0..C::GROUPS {
                    let d = d.add(g * V::ROWS);
                    if (g * 2 * V::ROWS).is_multiple_of(64) {
                        prefetch(d.cast(), FAR, NEAR);
                    }
                    let dw = V::load_f16(d);
                    for t in 0..T {
                        let dy = (b * C::GROUPS + g) * C::GROUP / 256 * T + t;
                        let dy = V::splat_f(*scales.add(dy));
                        acc[t] = V::fma(C::finish(sums[t], g).to_f(), V::mul(dw, dy), acc[t]);
                    }
                }
                y = y.add(C::GROUP * C::GROUPS * T);
            }
            for (t, acc) in acc.into_iter().enumerate().take(x.tokens()) {
                V::store_f(out.at(t, tile * V::ROWS), acc);
            }
        }
    }
}

/// Any number of tokens, `R` tiles of rows: multiplies are the cost, so the codes of a block are unpacked once for all
/// tokens of a pass (or where they are used, if that is cheaper), and a register tile of `R` row vectors by up to `V::TOKENS` tokens reuses both its operands.
#[inline(always)]
unsafe fn prefill<V: Lanes, C: Codes<V>, const R: usize>(
    w: &MatrixRef,
    x: &[Group],
    tile: usize,
    first: usize,
    out: Out,
) {
    // SAFETY: the caller's contract, as in `decode`.
    unsafe {
        let mut acc = [[[V::zero_f(); R]; TILE]; PASS];
        let mut u = [const { MaybeUninit::<[V; R]>::uninit() }; MOST / 4];
        let (mut codes, mut d) = ([std::ptr::null(); R], [std::ptr::null(); R]);
        // Two register tiles unpack twice for less than it costs to store what is unpacked; where masks do not compete with
        // dots, so does any number.
        let few = x.len() == 1 && x[0].width() <= 2 * V::TOKENS;
        let direct = C::SLOTS && (few || V::BYTES == 64 && super::half_width());
        for block in 0..w.cols / (C::GROUP * C::GROUPS) {
            for r in 0..R {
                (codes[r], d[r]) = block_of::<V, C>(w, tile + r, block);
                for line in (0..C::BYTES).step_by(64) {
                    prefetch(codes[r].wrapping_add(line), FAR, NEAR);
                }
                if !direct {
                    C::unpack(codes[r], |j, v| {
                        u[j].as_mut_ptr().cast::<V>().add(r).write(v)
                    });
                }
            }
            for g in 0..C::GROUPS {
                let b = block * C::GROUPS + g;
                let mut dw = [V::zero_f(); R];
                for (dw, d) in dw.iter_mut().zip(d) {
                    *dw = V::load_f16(d.add(g * V::ROWS));
                }
                let u = &u[g * (C::GROUP / 4)..][..C::GROUP / 4];
                for (x, acc) in x.iter().zip(&mut acc) {
                    if direct {
                        columns::<V, C, R>(Direct(codes), x, b, dw, acc);
                    } else {
                        columns::<V, C, R>(u.assume_init_ref(), x, b, dw, acc);
                    }
                }
            }
        }
        for (g, (x, acc)) in x.iter().zip(&acc).enumerate() {
            for (t, acc) in acc[..x.tokens()].iter().enumerate() {
                for (r, &acc) in acc.iter().enumerate() {
                    V::store_f(out.at((first + g) * TILE + t, (tile + r) * V::ROWS), acc);
                }
            }
        }
    }
}

/// The `b`th columns that share a scale, for all tokens of a group.
#[inline(always)]
unsafe fn columns<V: Lanes, C: Codes<V>, const R: usize>(
    u: impl Source<V, R>,
    x: &Group,
    b: usize,
    dw: [V::F; R],
    acc: &mut [[V::F; R]; TILE],
) {
    let acc = &mut acc[..x.width()];
    let parts = x.width().div_ceil(const { tokens::<V>(R) });
    let size = x.width().div_ceil(parts);
    for (part, acc) in acc.chunks_mut(size).enumerate() {
        let at = part * size;
        // SAFETY: the caller's contract.
        unsafe {
            match acc.len() {
                1 => register_tile::<V, C, R, 1>(u, x, b, at, dw, acc),
                2 => register_tile::<V, C, R, 2>(u, x, b, at, dw, acc),
                3 => register_tile::<V, C, R, 3>(u, x, b, at, dw, acc),
                4 => register_tile::<V, C, R, 4>(u, x, b, at, dw, acc),
                6 if const { tokens::<V>(R) >= 6 } => {
                    register_tile::<V, C, R, 6>(u, x, b, at, dw, acc)
                }
                8 if const { tokens::<V>(R) >= 8 } => {
                    register_tile::<V, C, R, 8>(u, x, b, at, dw, acc)
                }
                n => unreachable!("no register tile of {n} tokens"),
            }
        }
    }
}

/// Tokens of a register tile: a lone row vector, at the end of a matrix, is not worth code of its own for more than four.
const fn tokens<V: Lanes>(row_vectors: usize) -> usize {
    if row_vectors == 1 && V::TOKENS > 4 {
        4
    } else {
        V::TOKENS
    }
}

/// The sums of the `b`th columns that share a scale for tokens `at .. at + T` of a group, added to their results by the float rule.
#[inline(always)]
unsafe fn register_tile<V: Lanes, C: Codes<V>, const R: usize, const T: usize>(
    u: impl Source<V, R>,
    x: &Group,
    b: usize,
    at: usize,
    dw: [V::F; R],
    acc: &mut [[V::F; R]],
) {
    let width = x.width();
    // SAFETY: the caller's contract; `acc` is a slice.
    unsafe {
        let offsets = x.offsets(C::GROUP).as_ptr().add(b * width + at);
        let scales = x.scales().as_ptr().add(b * C::GROUP / 256 * width + at);
        let mut y = x.packed().as_ptr().add(b * C::GROUP * width + 4 * at);
        let mut total = [[V::splat(0); R]; T];
        for (t, total) in total.iter_mut().enumerate() {
            *total = [V::splat(*offsets.add(t)); R];
        }
        for run in (0..C::GROUP / 16).step_by(8) {
            let mut sum = [[V::sum_start(total[0][0]); R]; T];
            for t in 0..T {
                for r in 0..R {
                    sum[t][r] = V::sum_start(total[t][r]);
                }
            }
            for word in run..(C::GROUP / 16).min(run + 8) {
                for slot in 0..4 {
                    let u = u.at(word, slot);
                    for (t, sum) in sum.iter_mut().enumerate() {
                        let y = V::broadcast(y.add(4 * t));
                        for r in 0..R {
                            sum[r] = V::sum_dot(sum[r], u[r], y);
                        }
                    }
                    y = y.add(4 * width);
                }
            }
            for t in 0..T {
                for r in 0..R {
                    total[t][r] = V::sum_end(total[t][r], sum[t][r]);
                }
            }
        }
        for t in 0..T {
            let dy = V::splat_f(*scales.add(t));
            for r in 0..R {
                acc[t][r] = V::fma(total[t][r].to_f(), V::mul(dw[r], dy), acc[t][r]);
            }
        }
    }
}

/// Asks for the codes after vector `c` of a block, once a cache line.
#[inline(always)]
pub fn prefetch_word<V: Lanes>(codes: *const u8, c: usize) {
    if (c * V::BYTES).is_multiple_of(64) {
        prefetch(codes, FAR, NEAR);
    }
}
