//! BITCOS: a bitmap of the weights that are not zero, and a sign for each of those
//! (arXiv 2609.16338). At a zero share z it takes 2 - z bits a weight, besides scales.
//!
//! The arrangement is this project's own; any row can be found without reading those before it:
//!
//! * `presence[row][cols / 64]`, 64-bit words, bit i of word w for weight 64w + i, 1 = not zero;
//! * `signs`, a bit stream for each row, lowest bit first, one bit for each 1 in the row's bitmap, in
//!   order of k, 1 = -1; `row_starts[row]` is the byte where a row's stream starts. [`SLACK`] zero
//!   bytes follow the last row, so that a kernel may load whole words;
//! * `scales[row][cols / 128]`, f16.
//!
//! A kernel walks a row with one bit position, which moves on by the count of ones of each word.
//! The price of finding rows is 32 bits and half a byte on average a row, below 0.01 bits a weight
//! at widths in use.

use anyhow::{Context, Result};
use half::f16;

use super::codes::Codes;

/// Weights that share a scale; rows are padded to a multiple.
pub const GROUP: usize = 128;

/// Zero bytes after the sign streams.
pub const SLACK: usize = 16;

/// Bits a weight at a zero share of `z`, without scales and row starts.
pub const fn bits_per_weight(z: f64) -> f64 {
    2.0 - z
}

/// A matrix as bitmap and signs.
#[derive(Clone, Debug)]
pub struct Bitcos {
    rows: usize,
    cols: usize,
    presence: Vec<u64>,
    signs: Vec<u8>,
    row_starts: Vec<u32>,
    scales: Vec<f16>,
}

/// What a packed matrix takes, in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The bitmap: one a weight, padding included.
    pub presence: u64,
    /// Signs: one for each weight that is not zero.
    pub signs: u64,
    /// Row starts, and what rounds each row's signs up to bytes.
    pub index: u64,
    /// Scales.
    pub scales: u64,
}

impl Bitcos {
    /// Packs a matrix with a scale for each group of [`GROUP`] weights of a row.
    ///
    /// # Errors
    /// A number of scales that does not fit the shape; more than 4 GiB of signs.
    pub fn pack(codes: &Codes, scales: &[f16]) -> Result<Self> {
        let (rows, cols) = (codes.rows(), codes.cols());
        codes.check_scales("bitcos", GROUP, scales.len())?;
        let words = cols.next_multiple_of(GROUP) / 64;
        let mut presence = Vec::with_capacity(rows * words);
        let mut signs: Vec<u8> = Vec::new();
        let mut row_starts = Vec::with_capacity(rows);
        for r in 0..rows {
            row_starts.push(u32::try_from(signs.len()).context("bitcos: over 4 GiB of signs")?);
            let mut ones = 0;
            for w in 0..words {
                let mut word = 0;
                for i in 0..64 {
                    let u = codes.at(r, 64 * w + i);
                    if u != 1 {
                        word |= 1 << i;
                        if ones % 8 == 0 {
                            signs.push(0);
                        }
                        let last = signs.len() - 1;
                        signs[last] |= u8::from(u == 0) << (ones % 8);
                        ones += 1;
                    }
                }
                presence.push(word);
            }
        }
        signs.resize(signs.len() + SLACK, 0);
        Ok(Self {
            rows,
            cols,
            presence,
            signs,
            row_starts,
            scales: scales.to_vec(),
        })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights a row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Weights a row, with padding.
    pub fn padded_cols(&self) -> usize {
        self.cols.next_multiple_of(GROUP)
    }

    /// The bitmap, `[row][padded_cols / 64]`.
    pub fn presence(&self) -> &[u64] {
        &self.presence
    }

    /// The sign streams and the slack.
    pub fn signs(&self) -> &[u8] {
        &self.signs
    }

    /// The byte of [`Bitcos::signs`] where each row starts.
    pub fn row_starts(&self) -> &[u32] {
        &self.row_starts
    }

    /// The scales, `[row][padded_cols / 128]`.
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }

    /// What the matrix takes.
    pub fn sizes(&self) -> Sizes {
        let ones: u64 = self
            .presence
            .iter()
            .map(|w| u64::from(w.count_ones()))
            .sum();
        let stream = (self.signs.len() - SLACK) as u64 * 8;
        Sizes {
            presence: self.presence.len() as u64 * 64,
            signs: ones,
            index: self.rows as u64 * 32 + stream - ones,
            scales: self.scales.len() as u64 * 16,
        }
    }

    /// The codes, without padding.
    pub fn codes(&self) -> Vec<u8> {
        let words = self.padded_cols() / 64;
        let mut codes = Vec::with_capacity(self.rows * self.cols);
        for (row, &start) in self.presence.chunks_exact(words).zip(&self.row_starts) {
            let mut bit = start as usize * 8;
            codes.extend((0..self.cols).map(|k| {
                if row[k / 64] >> (k % 64) & 1 == 0 {
                    return 1;
                }
                let negative = self.signs[bit / 8] >> (bit % 8) & 1 == 1;
                bit += 1;
                if negative { 0 } else { 2 }
            }));
        }
        codes
    }
}
