//! Ternary codes of a whole matrix, one a byte: what the whole-matrix formats pack and give back.

use anyhow::{Result, bail, ensure};

/// `rows * cols` codes 0 to 2, row after row. Past its edges it reads as code 1, weight 0, which is
/// how formats with tiles pad a shape, once, when they pack it.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    codes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Codes<'a> {
    /// # Errors
    /// An empty matrix, a length that does not fit the shape, a code above 2.
    pub fn new(codes: &'a [u8], rows: usize, cols: usize) -> Result<Self> {
        ensure!(
            rows > 0 && cols > 0,
            "codes: {rows} rows of {cols} weights, expected at least one of each"
        );
        ensure!(
            rows.checked_mul(cols) == Some(codes.len()),
            "codes: {rows} rows of {cols} weights, found {} codes",
            codes.len()
        );
        if let Some(at) = codes.iter().position(|&u| u > 2) {
            let (r, k) = (at / cols, at % cols);
            bail!(
                "codes: code {} in row {r} at {k}, expected 0 to 2",
                codes[at]
            );
        }
        Ok(Self { codes, rows, cols })
    }

    /// Rows, without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights a row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The code of weight k of row r; 1 past the edges.
    pub fn at(&self, r: usize, k: usize) -> u8 {
        if r < self.rows && k < self.cols {
            self.codes[r * self.cols + k]
        } else {
            1
        }
    }

    /// Checks that there is one scale for each group of a row.
    pub(super) fn check_scales(&self, name: &str, group: usize, scales: usize) -> Result<()> {
        let expected = self.rows * self.cols.div_ceil(group);
        ensure!(
            scales == expected,
            "{name}: {} rows of {} weights take {expected} scales, found {scales}",
            self.rows,
            self.cols
        );
        Ok(())
    }
}

/// All codes of a matrix from a function of row and k.
pub(super) fn collect(rows: usize, cols: usize, at: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    (0..rows * cols).map(|i| at(i / cols, i % cols)).collect()
}
