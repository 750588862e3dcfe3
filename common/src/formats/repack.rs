//! The wide layouts, made a tile at a time as fast as memory gives the stock rows: what loading a model spends its time on.
//!
//! The words of all rows of a block are coded side by side in small arrays, in loops that the compiler turns into vectors, and
//! then change rows for columns. [`super::layout`] describes the result; its block-by-block code is what the tests hold this to.

use super::layout::UNIT;
use super::{Format, TileRows, tq2_0};
use super::{crumbs, wide_b3};
use crate::widened::widened;

/// Where a block of a two-bit format has its codes and its scale: (bytes, codes from, scale from).
const fn parts(format: Format) -> (usize, usize, usize) {
    match format {
        Format::Tq2_0 => (66, 0, 64),
        Format::Q2_0 => (18, 2, 0),
        _ => (34, 2, 0),
    }
}

widened! {
/// Two-bit codes and scales of whole tiles of `rows` rows of `blocks` blocks, from their stock rows.
pub(super) fn wide2(source: Format, rows: TileRows, blocks: usize, stock: &[u8], tiles: &mut [u8]) {
    match (rows, source) {
        (TileRows::R8, Format::Q2_0) => wide2_of::<8, 4>(source, blocks, stock, tiles),
        (TileRows::R8, Format::Tq2_0) => wide2_of::<8, 16>(source, blocks, stock, tiles),
        (TileRows::R8, _) => wide2_of::<8, 8>(source, blocks, stock, tiles),
        (TileRows::R16, Format::Q2_0) => wide2_of::<16, 4>(source, blocks, stock, tiles),
        (TileRows::R16, Format::Tq2_0) => wide2_of::<16, 16>(source, blocks, stock, tiles),
        (TileRows::R16, _) => wide2_of::<16, 8>(source, blocks, stock, tiles),
    }
}

/// Base-3 codes of whole tiles, as [`wide2`].
pub(super) fn wide_b3(rows: TileRows, blocks: usize, stock: &[u8], tiles: &mut [u8]) {
    match rows {
        TileRows::R8 => wide_b3_of::<8>(encode8, blocks, stock, tiles),
        TileRows::R16 => wide_b3_of::<16>(encode16, blocks, stock, tiles),
    }
}

/// The same, five blocks of each row together.
pub(super) fn wide_b3x5(rows: TileRows, blocks: usize, stock: &[u8], tiles: &mut [u8]) {
    match rows {
        TileRows::R8 => wide_b3x5_of::<8>(encode8, blocks, stock, tiles),
        TileRows::R16 => wide_b3x5_of::<16>(encode16, blocks, stock, tiles),
    }
}
}

/// The places of the codes and of the scales of each block of a tile, which take so many bytes.
#[inline(always)]
fn blocks_of<const UNIT: usize>(
    tile: &mut [u8],
    codes: usize,
    scales: usize,
) -> impl Iterator<Item = (&mut [u8], &mut [u8])> {
    let units = tile.chunks_mut(UNIT * (codes + scales));
    units.flat_map(move |unit| {
        let blocks = unit.len() / (codes + scales);
        let (c, s) = unit.split_at_mut(blocks * codes);
        c.chunks_exact_mut(codes).zip(s.chunks_exact_mut(scales))
    })
}

#[inline(always)]
fn wide2_of<const R: usize, const WORDS: usize>(
    source: Format,
    blocks: usize,
    stock: &[u8],
    tiles: &mut [u8],
) {
    let (bytes, codes_at, scale_at) = parts(source);
    let row_bytes = blocks * bytes;
    let outputs = tiles.chunks_exact_mut(R * row_bytes);
    for (tile, output) in stock.chunks_exact(R * row_bytes).zip(outputs) {
        let blocks = blocks_of::<UNIT>(output, R * WORDS * 4, R * 2);
        for (b, (codes, scales)) in blocks.enumerate() {
            let mut words = [[0u32; WORDS]; R];
            for (r, words) in words.iter_mut().enumerate() {
                let block = &tile[r * row_bytes + b * bytes..][..bytes];
                scales[2 * r..2 * r + 2].copy_from_slice(&block[scale_at..scale_at + 2]);
                let mut qs = &block[codes_at..codes_at + 4 * WORDS];
                let mut ordered = [0; 64];
                if source == Format::Tq2_0 {
                    tq2_0::to_order_of_k(qs, &mut ordered);
                    qs = &ordered;
                }
                for (word, qs) in words.iter_mut().zip(qs.as_chunks().0) {
                    *word = crumbs::transpose(u32::from_le_bytes(*qs));
                }
            }
            for (w, column) in codes.chunks_exact_mut(R * 4).enumerate() {
                for (to, words) in column.as_chunks_mut().0.iter_mut().zip(&words) {
                    *to = words[w].to_le_bytes();
                }
            }
        }
    }
}

/// Bytes of a PTQ1_0 block: 24 of five digits, 2 of four, the scale.
const BLOCK: usize = 28;
const FIVES: usize = 24;

/// Four bytes at once of [`wide_b3::encode`] for [`TileRows::R8`]: no byte carries into the next, since the largest is 242.
#[inline(always)]
fn encode8(t: [u32; 5]) -> u32 {
    t[0] + 3 * t[1] + 9 * t[2] + 27 * t[3] + 81 * t[4]
}

/// The same for [`TileRows::R16`].
#[inline(always)]
fn encode16(t: [u32; 5]) -> u32 {
    let r = t[0] + 3 * t[1] + 9 * t[2] + 27 * t[3];
    // r is at most 80: bit 6 says whether it is 64 or more.
    let high = (r >> 6 & 0x0101_0101) * 0xff;
    let below = 64 * t[4] + r;
    // Only of those: below 64 it would carry into the next byte.
    let above = 0xc0c0_c0c0 + 3 * (r & high & 0x1f1f_1f1f) + t[4];
    (below & !high) | (above & high)
}

/// Block `b` of `R` stock rows as fours of weights, [four][row] in order of k but for the last eight, which are the digits of two
/// bytes, [digit][byte][row]: 120 + 2n + h. The scales go to `scales`.
#[inline(always)]
fn digits_of<const R: usize>(
    tile: &[u8],
    row_bytes: usize,
    b: usize,
    scales: &mut [u8],
) -> ([[u32; R]; 5 * (FIVES / 4)], [[[u8; R]; 2]; 5]) {
    // Words of four bytes, [word][row]: four of the stage of 16 bytes, two of that of 8; then the bytes of four digits.
    let mut v = [[0u32; R]; FIVES / 4];
    let mut last = [[0u8; R]; 2];
    for r in 0..R {
        let block = &tile[r * row_bytes + b * BLOCK..][..BLOCK];
        for (v, four) in v.iter_mut().zip(block.as_chunks().0) {
            v[r] = u32::from_le_bytes(*four);
        }
        (last[0][r], last[1][r]) = (block[FIVES], block[FIVES + 1]);
        scales[2 * r..2 * r + 2].copy_from_slice(&block[FIVES + 2..]);
    }
    // Digit n of word j is four 4n + j of the first stage, 20 + 2n + j - 4 of the second.
    let mut fours = [[0u32; R]; 5 * (FIVES / 4)];
    let mut ends = [[[0u8; R]; 2]; 5];
    for (n, ends) in ends.iter_mut().enumerate() {
        for (j, v) in v.iter_mut().enumerate() {
            let four = if j < 4 { 4 * n + j } else { 16 + 2 * n + j };
            digit(
                bytemuck::cast_slice_mut(v),
                bytemuck::cast_slice_mut(&mut fours[four]),
            );
        }
        digit(last.as_flattened_mut(), ends.as_flattened_mut());
    }
    (fours, ends)
}

/// A column of words, one a row, from five fours of each.
#[inline(always)]
fn encode_column<const R: usize>(
    encode: impl Fn([u32; 5]) -> u32,
    column: &mut [u8],
    fours: [&[u32; R]; 5],
) {
    for (r, to) in column.as_chunks_mut().0.iter_mut().enumerate() {
        *to = encode([
            fours[0][r],
            fours[1][r],
            fours[2][r],
            fours[3][r],
            fours[4][r],
        ])
        .to_le_bytes();
    }
}

#[inline(always)]
fn wide_b3_of<const R: usize>(
    encode: impl Fn([u32; 5]) -> u32,
    blocks: usize,
    stock: &[u8],
    tiles: &mut [u8],
) {
    let row_bytes = blocks * BLOCK;
    let outputs = tiles.chunks_exact_mut(R * row_bytes);
    for (tile, output) in stock.chunks_exact(R * row_bytes).zip(outputs) {
        let blocks = blocks_of::<{ wide_b3::UNIT }>(output, R * wide_b3::BYTES, R * 2);
        for (b, (codes, scales)) in blocks.enumerate() {
            let (fours, ends) = digits_of::<R>(tile, row_bytes, b, scales);
            let (words, tail) = codes.split_at_mut(R * FIVES);
            for (column, five) in words.chunks_exact_mut(R * 4).zip(fours.as_chunks::<5>().0) {
                encode_column(&encode, column, five.each_ref());
            }
            for (r, to) in tail.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                for (h, to) in to.iter_mut().enumerate() {
                    let t = |n: usize| ends[n][h][r];
                    *to = t(0) | t(2) << 2 | t(1) << 4 | t(3) << 6;
                }
            }
        }
    }
}

#[inline(always)]
fn wide_b3x5_of<const R: usize>(
    encode: impl Fn([u32; 5]) -> u32,
    blocks: usize,
    stock: &[u8],
    tiles: &mut [u8],
) {
    use wide_b3::{FIVE, FIVE_BYTES, FIVE_UNIT};
    let row_bytes = blocks * BLOCK;
    let (code_bytes, scale_bytes) = (R * FIVE_BYTES, R * 2 * FIVE);
    let outputs = tiles.chunks_exact_mut(blocks / FIVE * (code_bytes + scale_bytes));
    for (tile, output) in stock.chunks_exact(R * row_bytes).zip(outputs) {
        let blocks = blocks_of::<FIVE_UNIT>(output, code_bytes, scale_bytes);
        for (b, (codes, scales)) in blocks.enumerate() {
            // All the fours of each group.
            let mut groups = [[[0u32; R]; 32]; FIVE];
            let scales = scales.chunks_exact_mut(R * 2);
            for (g, (group, scales)) in groups.iter_mut().zip(scales).enumerate() {
                let (fours, ends) = digits_of::<R>(tile, row_bytes, FIVE * b + g, scales);
                let (first, last) = group.split_at_mut(fours.len());
                first.copy_from_slice(&fours);
                for (last, n) in last.iter_mut().zip([0, 2]) {
                    for (r, last) in last.iter_mut().enumerate() {
                        let four = [
                            ends[n][0][r],
                            ends[n][1][r],
                            ends[n + 1][0][r],
                            ends[n + 1][1][r],
                        ];
                        *last = u32::from_le_bytes(four);
                    }
                }
            }
            for (c, column) in codes.chunks_exact_mut(R * 4).enumerate() {
                encode_column(&encode, column, groups.each_ref().map(|g| &g[c]));
            }
        }
    }
}

/// The most significant base-3 digit of each byte; v -> 3v mod 256 brings up the next.
#[inline(always)]
fn digit(v: &mut [u8], digits: &mut [u8]) {
    for (v, digit) in v.iter_mut().zip(digits) {
        *digit = u8::from(*v >= 86) + u8::from(*v >= 171);
        *v = v.wrapping_add(*v).wrapping_add(*v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bytes_at_once_are_four_bytes() {
        let five = |n: u32| [n % 3, n / 3 % 3, n / 9 % 3, n / 27 % 3, n / 81];
        for n in 0..243u32 {
            // Neighbours that differ, so that a carry would show.
            let bytes = [n, (n + 81) % 243, (n * 7) % 243, 242 - n].map(five);
            let t = std::array::from_fn(|s| u32::from_le_bytes(bytes.map(|t| t[s] as u8)));
            for (rows, found) in [(TileRows::R8, encode8(t)), (TileRows::R16, encode16(t))] {
                let wanted = bytes.map(|t| wide_b3::encode(rows, t.map(|t| t as u8)));
                assert_eq!(found.to_le_bytes(), wanted, "{rows:?} {n}");
            }
        }
    }
}
