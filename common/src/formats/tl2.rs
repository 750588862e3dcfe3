//! TL2: an index of four bits and a sign for three weights, 5 bits for 3 (bitnet.cpp).
//!
//! Weights (a, b, c) make v = 9a + 3b + c; the index is |v|, 0 to 13, the sign bit is v < 0. A
//! kernel looks |v| up in a table of 14 sums of three activations and negates where the bit is set.
//! Columns past the last multiple of 96 are pairs, as in [`super::tl1`].
//!
//! The bytes are those that bitnet.cpp's packer writes for tiles of 32 rows: first
//! `triples[tile][byte][32]`, the triple of weights 6c.. in the high half of byte c, the next in
//! the low half, lanes as in TL1; then `signs[tile][word j][lane 16]`, 16 bits a lane for triples
//! 8j to 8j+7: bit 15 - 2t is triple t of row `lane`, bit 14 - 2t that of row `lane + 16`; then the
//! pairs.

use super::codes::{Codes, collect};
use super::tl1::{BLOCK_COLS, TILE_ROWS, code_in_pairs, lane, pack_pairs};

/// Columns of triples come in multiples of this.
pub const TRIPLE_COLS: usize = 96;

/// Of `cols` columns those that are triples; the rest, padded, are pairs.
pub const fn triple_cols(cols: usize) -> usize {
    cols.next_multiple_of(BLOCK_COLS) / TRIPLE_COLS * TRIPLE_COLS
}

/// A matrix of triples and pairs, with one scale.
#[derive(Clone, Debug)]
pub struct Tl2 {
    rows: usize,
    cols: usize,
    scale: f32,
    triples: Vec<u8>,
    signs: Vec<u8>,
    pairs: Vec<u8>,
}

impl Tl2 {
    /// Any shape: rows and columns are padded with zero weights.
    pub fn pack(codes: &Codes, scale: f32) -> Self {
        let (rows, cols) = (codes.rows(), codes.cols());
        let (mut triples, mut signs, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        let padded = cols.next_multiple_of(BLOCK_COLS);
        let split = triple_cols(cols);
        let value = |r, t: usize| {
            let w = |i| i32::from(codes.at(r, 3 * t + i)) - 1;
            9 * w(0) + 3 * w(1) + w(2)
        };
        for tile in (0..rows).step_by(TILE_ROWS) {
            for t in (0..split / 3).step_by(2) {
                triples.extend((0..TILE_ROWS).map(|p| {
                    let index = |t| value(tile + lane(p), t).unsigned_abs() as u8;
                    index(t) << 4 | index(t + 1)
                }));
            }
            for t in (0..split / 3).step_by(8) {
                for l in 0..16 {
                    let bits = (0..16).fold(0u16, |bits, i| {
                        bits << 1 | u16::from(value(tile + l + i % 2 * 16, t + i / 2) < 0)
                    });
                    signs.extend(bits.to_le_bytes());
                }
            }
        }
        pack_pairs(codes, split, padded, &mut pairs);
        Self {
            rows,
            cols,
            scale,
            triples,
            signs,
            pairs,
        }
    }

    /// Rows, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights a row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Weights a row, with padding.
    pub fn padded_cols(&self) -> usize {
        self.cols.next_multiple_of(BLOCK_COLS)
    }

    /// Columns that are triples; those from here to `padded_cols` are pairs.
    pub fn triple_cols(&self) -> usize {
        triple_cols(self.cols)
    }

    /// The scale of the tensor.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Indices of triples, `[tile][triple_cols / 6][32]`.
    pub fn triples(&self) -> &[u8] {
        &self.triples
    }

    /// Signs of triples, `[tile][triple_cols / 24][16]` of two bytes.
    pub fn signs(&self) -> &[u8] {
        &self.signs
    }

    /// Indices of pairs, `[tile][(padded_cols - triple_cols) / 4][32]`.
    pub fn pairs(&self) -> &[u8] {
        &self.pairs
    }

    /// The codes, without padding.
    pub fn codes(&self) -> Vec<u8> {
        let split = self.triple_cols();
        collect(self.rows, self.cols, |r, k| {
            if k >= split {
                return code_in_pairs(&self.pairs, self.padded_cols() - split, r, k - split);
            }
            let (tile, row, t) = (r / TILE_ROWS, r % TILE_ROWS, k / 3);
            let byte = self.triples[(tile * (split / 6) + t / 2) * TILE_ROWS + lane(row)];
            let index = i32::from(byte >> (4 - t % 2 * 4) & 15);
            let word = ((tile * (split / 24) + t / 8) * 16 + row % 16) * 2;
            let bits = u16::from_le_bytes([self.signs[word], self.signs[word + 1]]);
            let negative = bits >> (15 - 2 * (t % 8) - row / 16) & 1 == 1;
            // 13 + v counts in base 3 from (-1, -1, -1).
            let digits = if negative { 13 - index } else { 13 + index };
            (digits / [9, 3, 1][k % 3] % 3) as u8
        })
    }
}
