//! TL1: an index of four bits for two weights, to look up a sum of activations (bitnet.cpp).
//!
//! The index of weights (a, b) is 3a + b + 4, 0 to 8. A kernel makes, for each pair of activations,
//! the table of its nine sums and differences, and adds table entries: the tables hold
//! *activations*, the packed *weights* index them.
//!
//! The byte order is that of bitnet.cpp's x86 packer (its pairs, with tiles of 32 rows):
//! `[tile][byte c][row 32]`, byte c holding the pair of weights 4c, 4c+1 in its high half and the
//! pair 4c+2, 4c+3 in its low half. Within the 32 bytes the second and third eight rows change
//! places, so that interleaving the bytes of a 256-bit vector gives rows 0 to 15, then 16 to 31.

use super::codes::{Codes, collect};

/// Rows in a tile; rows are padded to a multiple.
pub const TILE_ROWS: usize = 32;
/// Columns are padded to a multiple.
pub const BLOCK_COLS: usize = 32;

/// The place of a row within the 32 bytes of its tile (its own inverse).
pub const fn lane(row: usize) -> usize {
    match row / 8 {
        1 => row + 8,
        2 => row - 8,
        _ => row,
    }
}

/// Appends the pairs of columns `from..to` (a multiple of 4 wide), all tiles.
pub(super) fn pack_pairs(codes: &Codes, from: usize, to: usize, out: &mut Vec<u8>) {
    for tile in 0..codes.rows().div_ceil(TILE_ROWS) {
        for k in (from..to).step_by(4) {
            out.extend((0..TILE_ROWS).map(|p| {
                let index = |k| {
                    3 * codes.at(tile * TILE_ROWS + lane(p), k)
                        + codes.at(tile * TILE_ROWS + lane(p), k + 1)
                };
                index(k) << 4 | index(k + 2)
            }));
        }
    }
}

/// The code of column k (counted from the first pair) of row r, of `width` columns of pairs.
pub(super) fn code_in_pairs(pairs: &[u8], width: usize, r: usize, k: usize) -> u8 {
    let byte = (r / TILE_ROWS * (width / 4) + k / 4) * TILE_ROWS + lane(r % TILE_ROWS);
    let index = pairs[byte] >> (4 - k % 4 / 2 * 4) & 15;
    [index / 3, index % 3][k % 2]
}

/// A matrix of pairs, with one scale.
#[derive(Clone, Debug)]
pub struct Tl1 {
    rows: usize,
    cols: usize,
    scale: f32,
    pairs: Vec<u8>,
}

impl Tl1 {
    /// Any shape: rows and columns are padded with zero weights.
    pub fn pack(codes: &Codes, scale: f32) -> Self {
        let (rows, cols) = (codes.rows(), codes.cols());
        let mut pairs = Vec::new();
        pack_pairs(codes, 0, cols.next_multiple_of(BLOCK_COLS), &mut pairs);
        Self {
            rows,
            cols,
            scale,
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

    /// The scale of the tensor.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The indices, `[tile][padded_cols / 4][32]`.
    pub fn pairs(&self) -> &[u8] {
        &self.pairs
    }

    /// The codes, without padding.
    pub fn codes(&self) -> Vec<u8> {
        let width = self.padded_cols();
        collect(self.rows, self.cols, |r, k| {
            code_in_pairs(&self.pairs, width, r, k)
        })
    }
}
