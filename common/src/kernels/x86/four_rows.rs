//! Mask-slot on tiles of four rows: `row-pair`, and `slot16` before it.
//!
//! Decode, of up to three tokens, reads each vector of codes once and masks its slots where they stand. Prefill wants one operand
//! whatever the layout: lanes of 16 bytes that hold eight consecutive weights of two rows, which eight activations, repeated,
//! multiply. Row pairs are stored so; `slot16` zips its rows first.
//!
//! Loops rather than closures: inside a closure that is not inlined the instruction set is not enabled.

use std::arch::x86_64::{
    __m128, __m128i, _mm_add_epi32, _mm_cvtepi32_ps, _mm_cvtph_ps, _mm_cvtsi32_si128, _mm_fmadd_ps,
    _mm_loadl_epi64, _mm_mul_ps, _mm_set1_epi32, _mm_set1_ps, _mm_setzero_ps, _mm_sra_epi32,
    _mm_storeu_ps,
};
use std::array::from_fn;
use std::ops::Range;

use super::quads::{self, Quads};
use super::{FAR, NEAR, instances, prefetch};
use crate::kernels::{Group, Isa, Kernel, Layout, MatrixRef, Out, TILE};

/// Rows of a tile.
const ROWS: usize = 4;

/// Weights of a row in a block.
const WEIGHTS: usize = 128;

/// Bytes of a block: four scales, then the codes.
const BLOCK: usize = 136;

/// Where the codes of a block start.
const CODES: usize = 8;

/// Groups that share one unpacking of the weights.
const PASS: usize = 4;

/// Operands of a block: 8 columns each.
const OPERANDS: usize = WEIGHTS / 8;

/// One of the two layouts.
pub trait Tiles {
    /// `T` tokens of one group that is as wide.
    ///
    /// # Safety
    /// As [`crate::kernels::TilesFn`], for the instruction set of `V`; `H` is `4 / V::LANES`.
    unsafe fn decode<V: Quads, const H: usize, const T: usize>(
        w: &MatrixRef,
        x: &Group,
        tiles: Range<usize>,
        out: Out,
    );

    /// The codes of a block in `V::LANES / 2` tiles as operands: a lane holds a pair of rows, operand g their columns 8g ..
    ///
    /// # Safety
    /// The pointers are good for a block; the instruction set of `V`.
    unsafe fn operands<V: Quads>(blocks: [*const u8; 2]) -> [V; OPERANDS];
}

/// The tiles `tiles` of `w` for every token of `x`.
///
/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `V`; the layout is `L`, and `H` is `4 / V::LANES`.
#[inline(always)]
pub unsafe fn run<V: Quads, L: Tiles, const H: usize>(
    w: &MatrixRef,
    x: &[Group],
    tiles: Range<usize>,
    out: Out,
) {
    const { assert!(H * V::LANES == 4) };
    // SAFETY: the caller's contract.
    unsafe {
        match x {
            [x] if x.width() == 1 => L::decode::<V, H, 1>(w, x, tiles, out),
            [x] if x.width() == 2 => L::decode::<V, H, 2>(w, x, tiles, out),
            [x] if x.width() == 3 => L::decode::<V, H, 3>(w, x, tiles, out),
            _ => {
                for tile in tiles.clone().step_by(V::LANES) {
                    for (pass, x) in x.chunks(PASS).enumerate() {
                        prefill::<V, L>(w, x, tile, tiles.end, pass * PASS, out);
                    }
                }
            }
        }
    }
}

/// The first block of a tile.
#[inline(always)]
fn tile_of(w: &MatrixRef, tile: usize) -> *const u8 {
    w.parts.codes[tile * (w.cols / WEIGHTS) * BLOCK..].as_ptr()
}

/// Adds a block to the results of four rows by the float rule. `sums` are shifted up by `V::SHIFT`.
///
/// # Safety
/// `block` is good for a block, `offset` and `scale` for a number; the instruction set of `V`.
#[inline(always)]
unsafe fn add_block<V: Quads>(
    acc: __m128,
    sums: __m128i,
    block: *const u8,
    offset: *const i32,
    scale: *const f32,
) -> __m128 {
    // SAFETY: the caller's contract.
    unsafe {
        let sums = _mm_sra_epi32(sums, _mm_cvtsi32_si128(V::SHIFT));
        let sums = _mm_add_epi32(sums, _mm_set1_epi32(*offset));
        let dw = _mm_cvtph_ps(_mm_loadl_epi64(block.cast()));
        _mm_fmadd_ps(
            _mm_cvtepi32_ps(sums),
            _mm_mul_ps(dw, _mm_set1_ps(*scale)),
            acc,
        )
    }
}

/// Asks for the lines of a block `far` and `near` bytes ahead.
#[inline(always)]
fn prefetch_block(block: *const u8, far: usize, near: usize) {
    for line in [0, 64, 128] {
        prefetch(block.wrapping_add(line), far, near);
    }
}

/// 16 consecutive weights of a row a slot; four rows take turns.
pub struct Slot16;

impl Tiles for Slot16 {
    #[inline(always)]
    unsafe fn decode<V: Quads, const H: usize, const T: usize>(
        w: &MatrixRef,
        x: &Group,
        tiles: Range<usize>,
        out: Out,
    ) {
        let (scales, offsets) = (x.scales().as_ptr(), x.offsets(WEIGHTS).as_ptr());
        for tile in tiles {
            // SAFETY: the caller's contract; activations are padded to whole blocks of 256.
            unsafe {
                let mut acc = [_mm_setzero_ps(); T];
                let (mut block, y) = (tile_of(w, tile), x.row(0).as_ptr());
                for b in 0..w.cols / WEIGHTS {
                    prefetch_block(block, FAR, NEAR);
                    let mut slots = [[V::slots(); H]; T];
                    for run in 0..2 {
                        let mut ys = [[V::zero(); 4]; T];
                        for (t, ys) in ys.iter_mut().enumerate() {
                            let y = y.add(t * x.padded() + b * WEIGHTS + 64 * run);
                            *ys = from_fn(|s| V::broadcast_16(y.add(16 * s)));
                        }
                        for h in 0..H {
                            let u = V::load(block.add(CODES + 64 * run + 16 * V::LANES * h)).mask();
                            for (slots, y) in slots.iter_mut().zip(ys) {
                                slots[h] = V::slots_dot(slots[h], u, y);
                            }
                        }
                    }
                    for t in 0..T {
                        let mut parts = [V::zero(); H];
                        for (part, &slots) in parts.iter_mut().zip(&slots[t]) {
                            *part = V::slots_sum(slots);
                        }
                        let sums = V::row_sums(&parts);
                        let (offset, scale) = (offsets.add(b * T + t), scales.add(b / 2 * T + t));
                        acc[t] = add_block::<V>(acc[t], sums, block, offset, scale);
                    }
                    block = block.add(BLOCK);
                }
                for (t, acc) in acc.into_iter().enumerate() {
                    _mm_storeu_ps(out.at(t, tile * ROWS), acc);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn operands<V: Quads>(blocks: [*const u8; 2]) -> [V; OPERANDS] {
        // SAFETY: the caller's contract: inside a block.
        unsafe {
            let mut u = [V::zero(); OPERANDS];
            for run in 0..2 {
                let row = |r: usize| blocks.map(|p| p.add(CODES + 64 * run + 16 * r));
                let ([a0, b0], [a1, b1], [a2, b2], [a3, b3]) = (row(0), row(1), row(2), row(3));
                let zipped = V::zip(V::gather([a0, a2, b0, b2]), V::gather([a1, a3, b1, b3]));
                for (half, zipped) in zipped.into_iter().enumerate() {
                    for (s, slot) in zipped.shift().into_iter().enumerate() {
                        u[8 * run + 2 * s + half] = slot;
                    }
                }
            }
            u
        }
    }
}

/// 8 consecutive weights of a row a slot; two rows take turns.
pub struct RowPair;

impl RowPair {
    /// `N` tiles at once: the activations are shuffled once for all.
    ///
    /// # Safety
    /// As [`Tiles::decode`].
    #[inline(always)]
    unsafe fn decode_some<V: Quads, const H: usize, const N: usize, const T: usize>(
        w: &MatrixRef,
        x: &Group,
        tile: usize,
        out: Out,
    ) {
        let (scales, offsets) = (x.scales().as_ptr(), x.offsets(WEIGHTS).as_ptr());
        // SAFETY: the caller's contract; activations are padded to whole blocks of 256.
        unsafe {
            let mut acc = [[_mm_setzero_ps(); T]; N];
            let mut blocks: [*const u8; N] = from_fn(|n| tile_of(w, tile + n));
            let y = x.row(0).as_ptr();
            let tile_bytes = w.cols / WEIGHTS * BLOCK;
            for b in 0..w.cols / WEIGHTS {
                // What comes after these tiles is the next N.
                let jump = |ahead: usize| match b * BLOCK + ahead < tile_bytes {
                    true => ahead,
                    false => ahead + (N - 1) * tile_bytes,
                };
                let mut slots = [[[V::slots(); 2]; T]; N];
                for part in 0..H {
                    let mut ys = [[V::zero(); 4]; T];
                    for (t, ys) in ys.iter_mut().enumerate() {
                        *ys = V::pair_activations(y.add(t * x.padded() + b * WEIGHTS), part);
                    }
                    for (block, slots) in blocks.iter().zip(&mut slots) {
                        for pair in 0..2 {
                            let at = CODES + 64 * pair + 16 * V::LANES * part;
                            let u = V::load(block.add(at)).mask();
                            for (slots, y) in slots.iter_mut().zip(ys) {
                                slots[pair] = V::slots_dot(slots[pair], u, y);
                            }
                        }
                    }
                }
                for n in 0..N {
                    prefetch_block(blocks[n], jump(FAR), jump(NEAR));
                    for t in 0..T {
                        let [p, q] = slots[n][t];
                        let sums = V::pair_sums(V::slots_sum(p), V::slots_sum(q));
                        let (offset, scale) = (offsets.add(b * T + t), scales.add(b / 2 * T + t));
                        acc[n][t] = add_block::<V>(acc[n][t], sums, blocks[n], offset, scale);
                    }
                    blocks[n] = blocks[n].add(BLOCK);
                }
            }
            for (n, acc) in acc.into_iter().enumerate() {
                for (t, acc) in acc.into_iter().enumerate() {
                    _mm_storeu_ps(out.at(t, (tile + n) * ROWS), acc);
                }
            }
        }
    }
}

impl Tiles for RowPair {
    #[inline(always)]
    unsafe fn decode<V: Quads, const H: usize, const T: usize>(
        w: &MatrixRef,
        x: &Group,
        tiles: Range<usize>,
        out: Out,
    ) {
        let mut tile = tiles.start;
        // SAFETY: the caller's contract.
        unsafe {
            // Several tokens share the masks instead, and fill the registers.
            while T == 1 && V::TILES == 2 && tile + 1 < tiles.end {
                Self::decode_some::<V, H, 2, T>(w, x, tile, out);
                tile += 2;
            }
            while tile < tiles.end {
                Self::decode_some::<V, H, 1, T>(w, x, tile, out);
                tile += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn operands<V: Quads>([a, b]: [*const u8; 2]) -> [V; OPERANDS] {
        // SAFETY: the caller's contract: inside a block.
        unsafe {
            let mut u = [V::zero(); OPERANDS];
            for word in 0..4 {
                let at = CODES + 16 * word;
                let pairs = V::gather([a.add(at), a.add(at + 64), b.add(at), b.add(at + 64)]);
                for (s, slot) in pairs.shift().into_iter().enumerate() {
                    u[4 * word + s] = slot;
                }
            }
            u
        }
    }
}

/// Vectors of rows in a register tile.
const R: usize = 2;

/// `V::LANES` tiles from `tile` on, those before `end`, for the tokens of up to [`PASS`] groups. A block's codes are shifted down
/// once for all of them.
///
/// # Safety
/// As [`crate::kernels::TilesFn`], for the instruction set of `V`; `tile < end`.
#[inline(always)]
unsafe fn prefill<V: Quads, L: Tiles>(
    w: &MatrixRef,
    x: &[Group],
    tile: usize,
    end: usize,
    first: usize,
    out: Out,
) {
    let per = V::LANES / 2;
    // Past the end, the last tile again: its results are computed and not stored.
    let tile_at = |r: usize, i: usize| tile_of(w, (tile + r * per + i % per).min(end - 1));
    let tiles: [[*const u8; 2]; R] = from_fn(|r| from_fn(|i| tile_at(r, i)));
    // SAFETY: the caller's contract; activations are padded to whole blocks of 256.
    unsafe {
        let mut acc = [[[V::zero_f(); R]; TILE / 2]; PASS];
        for b in 0..w.cols / WEIGHTS {
            let mut u = [[V::zero(); OPERANDS]; R];
            let mut dw = [V::zero_f(); R];
            for r in 0..R {
                let [p, q] = tiles[r];
                let blocks = [p.add(b * BLOCK), q.add(b * BLOCK)];
                u[r] = L::operands::<V>(blocks);
                dw[r] = V::pair_scales(blocks);
            }
            for (x, acc) in x.iter().zip(&mut acc) {
                let mut at = 0;
                while at < x.width() {
                    let acc = &mut acc[at / 2..];
                    at += match x.width() - at {
                        1 | 2 => register_tile::<V, 2>(&u, dw, x, b, at, acc),
                        8.. if V::TOKENS == 8 => register_tile::<V, 8>(&u, dw, x, b, at, acc),
                        _ => register_tile::<V, 4>(&u, dw, x, b, at, acc),
                    };
                }
            }
        }
        let mut rows = [0f32; 16];
        for (g, (x, acc)) in x.iter().zip(&acc).enumerate() {
            for (pair, acc) in acc.iter().enumerate().take(x.tokens().div_ceil(2)) {
                for (r, &acc) in acc.iter().enumerate() {
                    V::store_f(rows.as_mut_ptr(), acc);
                    let from = tile + r * per;
                    let here = end.saturating_sub(from).min(per) * ROWS;
                    for (i, &v) in rows[..2 * here].iter().enumerate() {
                        // A lane holds two rows for a token, then for the next.
                        let (token, row) = (2 * pair + i / 2 % 2, i / 4 * 2 + i % 2);
                        if token < x.tokens() {
                            *out.at((first + g) * TILE + token, from * ROWS + row) = v;
                        }
                    }
                }
            }
        }
    }
}

/// The sums of one block for tokens `at .. at + T` of a group, added to their results by the float rule. Past the last token,
/// the last again. Returns `T`.
///
/// # Safety
/// As [`prefill`]; `acc` holds `T / 2` pairs of tokens.
#[inline(always)]
unsafe fn register_tile<V: Quads, const T: usize>(
    u: &[[V; OPERANDS]; R],
    dw: [V::F; R],
    x: &Group,
    b: usize,
    at: usize,
    acc: &mut [[V::F; R]],
) -> usize {
    let width = x.width();
    let (scales, offsets) = (x.scales().as_ptr(), x.offsets(WEIGHTS).as_ptr());
    let token = |t: usize| (at + t).min(width - 1);
    // SAFETY: the caller's contract: the block and the token are inside the group.
    let (offsets, scales, y): ([i32; T], [f32; T], [*const i8; T]) = unsafe {
        (
            from_fn(|t| *offsets.add(b * width + token(t))),
            from_fn(|t| *scales.add(b / 2 * width + token(t))),
            from_fn(|t| x.row(0).as_ptr().add(token(t) * x.padded() + b * WEIGHTS)),
        )
    };
    // SAFETY: the caller's contract; everything else is inside its slice.
    unsafe {
        let mut sums = [[V::zero(); R]; T];
        for g in 0..OPERANDS {
            for (sums, y) in sums.iter_mut().zip(y) {
                let y = V::broadcast_8(y.add(8 * g));
                for (sum, u) in sums.iter_mut().zip(u) {
                    *sum = V::dot(*sum, u[g], y);
                }
            }
        }
        for (pair, acc) in acc.iter_mut().enumerate().take(T / 2) {
            let t = 2 * pair;
            let offset = V::twice(offsets[t..][..2].as_ptr());
            let dy = V::twice_f(scales[t..][..2].as_ptr());
            for r in 0..R {
                let sum = V::add(V::merge(sums[t][r], sums[t + 1][r]), offset);
                acc[r] = V::fma(sum.to_f(), V::mul(dw[r], dy), acc[r]);
            }
        }
    }
    T
}

/// The kernels of a set, slowest first.
macro_rules! kernels {
    ($table:ident = $isa:ident $usable:ident $vector:ident $parts:literal $enable:literal: $slot16:ident $row_pair:ident) => {
        instances! {$enable,
            $slot16 = run::<quads::$vector, Slot16, $parts>;
            $row_pair = run::<quads::$vector, RowPair, $parts>;
        }
        /// PQ2_0 in tiles of four rows.
        pub const $table: [Kernel; 2] = [
            Kernel::ternary(Layout::Slot16, Isa::$isa, super::$usable, $slot16),
            Kernel::ternary(Layout::RowPair, Isa::$isa, super::$usable, $row_pair),
        ];
    };
}

kernels!(AVX2 = Avx2 avx2 Avx2 2 "avx2,fma,f16c": slot16_avx2 row_pair_avx2);
kernels!(VEX = AvxVnni avx_vnni AvxVnni 2 "avx2,fma,f16c,avxvnni": slot16_vex row_pair_vex);
kernels!(EVEX = AvxVnni avx512 Avx512Vl 2 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni":
    slot16_evex row_pair_evex);
kernels!(AVX512 = Avx512Vnni avx512 Avx512 1 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni":
    slot16_avx512 row_pair_avx512);
