//! Matrix times vector on BITCOS: one token, each instruction set against a scalar reference.
//!
//! Every kernel follows the float rule of [`kernels`](super), with a scale for each group of 128 weights. So it gives the bits
//! that the two-bit and base-3 kernels give for the same codes.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use half::f16;

use super::{Activations, Form, Group, Isa};
use crate::formats::bitcos::{GROUP, SLACK};

/// Rows that x86 kernels take at once: their sums leave the vectors together.
pub const TILE: usize = 4;

/// A BITCOS matrix over its parts.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[row][group][2]`.
    pub(super) presence: &'a [u64],
    /// Of each row as many bits as its bitmap has ones, and [`SLACK`] bytes after the last.
    pub(super) signs: &'a [u8],
    pub(super) row_starts: &'a [u32],
    /// `[row][group]`.
    pub(super) scales: &'a [f16],
}

impl<'a> Matrix<'a> {
    /// A matrix over the parts of a [`Bitcos`](crate::formats::Bitcos), wherever they stand.
    ///
    /// # Errors
    /// Parts that do not fit the shape, a row whose signs are not all there or without [`SLACK`] bytes after them.
    pub fn new(
        rows: usize,
        cols: usize,
        presence: &'a [u64],
        signs: &'a [u8],
        row_starts: &'a [u32],
        scales: &'a [f16],
    ) -> Result<Self> {
        let groups = cols.div_ceil(GROUP);
        ensure!(
            rows > 0
                && cols > 0
                && rows.checked_mul(groups) == Some(scales.len())
                && scales.len().checked_mul(2) == Some(presence.len())
                && rows == row_starts.len(),
            "bitcos: {rows} rows of {cols} weights, found {} words of bitmap, {} row starts and {} scales",
            presence.len(),
            row_starts.len(),
            scales.len()
        );
        for (r, (words, &start)) in presence
            .chunks_exact(2 * groups)
            .zip(row_starts)
            .enumerate()
        {
            let ones: usize = words.iter().map(|w| w.count_ones() as usize).sum();
            ensure!(
                start as usize + ones.div_ceil(8) + SLACK <= signs.len(),
                "bitcos: row {r} has {ones} signs from byte {start} on, found {} bytes, expected {SLACK} after them",
                signs.len()
            );
        }
        Ok(Matrix {
            rows,
            cols,
            presence,
            signs,
            row_starts,
            scales,
        })
    }

    /// Bytes that one product streams.
    pub fn bytes(&self) -> usize {
        let parts = size_of_val(self.presence) + size_of_val(self.scales);
        parts + size_of_val(self.row_starts) + self.signs.len() - SLACK
    }

    /// Groups of a row.
    pub(super) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }
}

/// Multiplies `rows` of the matrix by the first token.
///
/// # Safety
/// The CPU has the instruction set; the rows are inside the matrix and `out`; the token has the matrix's columns.
pub(super) type RowsFn = unsafe fn(w: &Matrix, x: &Group, rows: Range<usize>, out: &[AtomicU32]);

/// A kernel for one instruction set.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The instruction set.
    pub isa: Isa,
    pub(super) rows: RowsFn,
}

/// The kernels that this CPU can run, the scalar reference first, the fastest last.
pub fn kernels() -> Vec<Kernel> {
    let (isa, rows) = (Isa::Scalar, scalar as RowsFn);
    let kernels = [Kernel { isa, rows }].into_iter();
    #[cfg(target_arch = "x86_64")]
    let kernels = kernels.chain(super::x86::bitcos::kernels());
    #[cfg(target_arch = "aarch64")]
    let kernels = kernels.chain([super::arm::bitcos::KERNEL]);
    kernels.collect()
}

impl Kernel {
    /// `out[row] = w[row] . x`, as bits of f32, for some of the rows, on this thread. `out` is that of all rows.
    ///
    /// # Errors
    /// Activations that are not one token of the matrix's columns in [`Form::Q8K`], an output of another length, rows outside it.
    pub fn multiply(
        &self,
        w: &Matrix,
        x: &Activations,
        rows: Range<usize>,
        out: &[AtomicU32],
    ) -> Result<()> {
        ensure!(
            x.form() == Form::Q8K && x.tokens() == 1 && x.cols() == w.cols,
            "bitcos: {} tokens of {} {:?}, expected 1 of {} Q8K",
            x.tokens(),
            x.cols(),
            x.form(),
            w.cols
        );
        ensure!(
            out.len() == w.rows && rows.start <= rows.end && rows.end <= w.rows,
            "bitcos: rows {rows:?} to an output of {}, expected {} rows",
            out.len(),
            w.rows
        );
        // SAFETY: `kernels` gives only what this CPU has; shapes were checked here, and the matrix when it was made.
        unsafe { (self.rows)(w, &x.groups()[0], rows, out) };
        Ok(())
    }
}

pub(super) fn store(out: &[AtomicU32], row: usize, value: f32) {
    out[row].store(value.to_bits(), Relaxed);
}

/// A row at a time, a group at a time: `sum` takes the two words of its bitmap, moves on by its signs and gives its integer sum.
#[inline(always)]
pub(super) fn by_groups(
    w: &Matrix,
    x: &Group,
    rows: Range<usize>,
    out: &[AtomicU32],
    sum: impl Fn(&[u64], &mut usize, &[i8]) -> i32,
) {
    let groups = w.groups();
    for row in rows {
        let mut bit = w.row_starts[row] as usize * 8;
        let mut acc = 0f32;
        for g in 0..groups {
            let words = &w.presence[(row * groups + g) * 2..][..2];
            let sum = sum(words, &mut bit, &x.row(0)[g * GROUP..][..GROUP]);
            let dy = x.scales()[g / 2 * x.width()];
            acc = (sum as f32).mul_add(w.scales[row * groups + g].to_f32() * dy, acc);
        }
        store(out, row, acc);
    }
}

/// The reference: a weight at a time.
fn scalar(w: &Matrix, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
    by_groups(w, x, rows, out, |words, bit, y| {
        let mut sum = 0;
        for (i, &y) in y.iter().enumerate() {
            if words[i / 64] >> (i % 64) & 1 == 1 {
                let negative = w.signs[*bit / 8] >> (*bit % 8) & 1 == 1;
                sum += if negative { -i32::from(y) } else { y.into() };
                *bit += 1;
            }
        }
        sum
    });
}

#[cfg(test)]
mod tests {
    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::formats::{Bitcos, Codes, Format};
    use crate::kernels::{Choice, MatrixRef};

    fn over(packed: &Bitcos) -> Matrix<'_> {
        let (presence, signs) = (packed.presence(), packed.signs());
        let (starts, scales) = (packed.row_starts(), packed.scales());
        Matrix::new(
            packed.rows(),
            packed.cols(),
            presence,
            signs,
            starts,
            scales,
        )
        .unwrap()
    }

    /// The rows in so many ranges.
    fn product(kernel: &Kernel, w: &Matrix, x: &Activations, ranges: usize) -> Vec<u32> {
        let out: Vec<AtomicU32> = (0..w.rows).map(|_| AtomicU32::new(u32::MAX)).collect();
        let some = w.rows.div_ceil(ranges);
        for first in (0..w.rows).step_by(some) {
            let rows = first..w.rows.min(first + some);
            kernel.multiply(w, x, rows, &out).unwrap();
        }
        out.into_iter().map(AtomicU32::into_inner).collect()
    }

    /// One token of these codes; every block has scale 1/2.
    fn token(cols: usize, y: impl Fn(usize) -> i8) -> Activations {
        let mut x = Activations::new(Form::Q8K, cols, 1);
        let padded = cols.next_multiple_of(256);
        let codes: Vec<i8> = (0..padded)
            .map(|k| if k < cols { y(k) } else { 0 })
            .collect();
        x.set_codes(&codes, &vec![0.5; padded / 256]).unwrap();
        x
    }

    #[test]
    fn every_kernel_gives_the_bits_of_other_formats() {
        for (rows, cols, zeros) in [
            (1, 128, 0.3),
            (2, 384, 0.0),
            (7, 640, 0.515),
            (66, 512, 1.0),
            (135, 1152, 0.7),
        ] {
            let rng = &mut ChaCha8Rng::seed_from_u64(5);
            let codes: Vec<u8> = (0..rows * cols)
                .map(|_| match rng.random_bool(zeros) {
                    true => 1,
                    false => 2 * u8::from(rng.random::<bool>()),
                })
                .collect();
            let scales: Vec<f16> = (0..codes.len() / GROUP)
                .map(|_| f16::from_f32(rng.random_range(0.5..1.0)))
                .collect();
            let x: Vec<f32> = (0..cols).map(|_| rng.random_range(-1.0..1.0)).collect();
            let x = Activations::of(Form::Q8K, cols, &x).unwrap();
            let mut stock = vec![0; Format::Pq2_0.matrix_bytes(rows, cols).unwrap()];
            Format::Pq2_0.pack(&codes, &scales, &mut stock).unwrap();
            let codes = Codes::new(&codes, rows, cols).unwrap();
            let packed = Bitcos::pack(&codes, &scales).unwrap();
            let w = over(&packed);
            let kernel = "stock/scalar".parse::<Choice>().unwrap();
            let kernel = kernel.kernel(Format::Pq2_0).unwrap();
            let stock = MatrixRef::new(kernel.layout(), rows, cols, &stock).unwrap();
            let mut expected = vec![0.0; rows];
            kernel.multiply(&stock, &x, &mut expected).unwrap();
            let expected: Vec<u32> = expected.iter().map(|v| v.to_bits()).collect();
            for kernel in kernels() {
                for ranges in [1, 3] {
                    let found = product(&kernel, &w, &x, ranges);
                    assert_eq!(found, expected, "{} {rows} x {cols}", kernel.isa);
                }
            }
        }
    }

    #[test]
    fn extremes_and_widths_that_are_no_whole_group_give_the_integer_sums() {
        for (rows, cols) in [(1, 1), (3, 100), (5, 129), (4, 1000)] {
            for (name, at) in [
                ("all +1", (|_| 2) as fn(usize) -> u8),
                ("all -1", |_| 0),
                ("all 0", |_| 1),
                ("mixed", |i| (i * i % 7 % 3) as u8),
            ] {
                let codes: Vec<u8> = (0..rows * cols).map(at).collect();
                let of = Codes::new(&codes, rows, cols).unwrap();
                let scales = vec![f16::from_f32(2.0); rows * cols.div_ceil(GROUP)];
                let packed = Bitcos::pack(&of, &scales).unwrap();
                let w = over(&packed);
                for y in [
                    (|_| 127) as fn(usize) -> i8,
                    |_| -127,
                    |k| {
                        if k % 3 == 0 { 127 } else { -127 }
                    },
                ] {
                    let x = token(cols, y);
                    let expected: Vec<u32> = codes
                        .chunks(cols)
                        .map(|row| {
                            let terms = row.iter().enumerate();
                            let sum: i32 = terms
                                .map(|(k, &u)| (i32::from(u) - 1) * i32::from(y(k)))
                                .sum();
                            (sum as f32).to_bits()
                        })
                        .collect();
                    for kernel in kernels() {
                        let found = product(&kernel, &w, &x, 1);
                        // -0 where a row sums to nothing is 0 all the same.
                        let found: Vec<u32> = found
                            .iter()
                            .map(|&v| (f32::from_bits(v) + 0.0).to_bits())
                            .collect();
                        assert_eq!(found, expected, "{} {rows} x {cols} {name}", kernel.isa);
                    }
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let codes = Codes::new(&[2; 256], 2, 128).unwrap();
        let packed = Bitcos::pack(&codes, &[f16::ONE; 2]).unwrap();
        let w = over(&packed);
        let out = [AtomicU32::new(0), AtomicU32::new(0)];
        let refused = |x: &Activations, rows: Range<usize>, out: &[AtomicU32], words: &str| {
            let error = kernels()[0].multiply(&w, x, rows, out).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        };
        refused(&token(256, |_| 1), 0..2, &out, "expected 1 of 128");
        refused(&token(128, |_| 1), 0..2, &out[..1], "expected 2 rows");
        refused(&token(128, |_| 1), 1..3, &out, "rows 1..3");
        let two = Activations::of(Form::Q8K, 128, &[1.0; 256]).unwrap();
        refused(&two, 0..2, &out, "2 tokens");

        let (presence, signs, scales) = (packed.presence(), packed.signs(), packed.scales());
        let refused = |rows, presence, signs, starts: &[u32], words: &str| {
            let error = Matrix::new(rows, 128, presence, signs, starts, scales).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        };
        refused(3, presence, signs, &[0, 16], "3 rows of 128");
        refused(2, &presence[1..], signs, &[0, 16], "3 words of bitmap");
        refused(2, presence, signs, &[0], "1 row starts");
        refused(
            2,
            presence,
            signs,
            &[0, 17],
            "row 1 has 128 signs from byte 17",
        );
        refused(2, presence, &signs[1..], &[0, 16], "found 47 bytes");
    }
}
