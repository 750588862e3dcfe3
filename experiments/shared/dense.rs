//! Dense matrices as ggml stores them: `F32`, and `Q8_0` and `Q4_0` quantized from it.

use std::cell::Cell;

use anyhow::{Result, bail, ensure};
use common::formats::{BlockQ4_0, BlockQ8_0, Format, Layout};
use common::kernels::MatrixRef;
use common::lab::Experiment;
use common::runtime::memory::{self, AlignedBuf};
use rand::RngExt;

/// The formats, from the most bytes a weight to the fewest.
pub const FORMATS: [Format; 3] = [Format::F32, Format::Q8_0, Format::Q4_0];

/// The bytes of rows of `cols` weights, quantized as ggml's reference does.
///
/// # Errors
/// A row that is no multiple of the format's block, weights that are not whole rows, a format that is not one of [`FORMATS`].
pub fn quantize(format: Format, cols: usize, weights: &[f32]) -> Result<Vec<u8>> {
    format.row_bytes(cols)?;
    ensure!(
        cols > 0 && weights.len().is_multiple_of(cols),
        "{format}: {} weights are no whole rows of {cols}",
        weights.len()
    );
    let blocks = weights.as_chunks::<32>().0;
    Ok(match format {
        Format::F32 => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
        Format::Q8_0 => blocks
            .iter()
            .flat_map(|block| bytes(&BlockQ8_0::quantize(block)))
            .collect(),
        Format::Q4_0 => blocks
            .iter()
            .flat_map(|block| bytes(&BlockQ4_0::quantize(block)))
            .collect(),
        _ => bail!("{format}: expected F32, Q8_0 or Q4_0"),
    })
}

fn bytes(block: &impl bytemuck::Pod) -> Vec<u8> {
    bytemuck::bytes_of(block).to_vec()
}

/// Random weights from -1 to 1. Rows past the first 64 repeat them: time does not depend on the weights.
///
/// # Errors
/// As [`quantize`].
pub fn random(format: Format, rows: usize, cols: usize, rng: &mut impl RngExt) -> Result<Vec<u8>> {
    let drawn = 64.min(rows) * cols;
    let weights: Vec<f32> = (0..drawn).map(|_| rng.random_range(-1.0..1.0)).collect();
    let some = quantize(format, cols, &weights)?;
    let len = format.matrix_bytes(rows, cols)?;
    Ok(some.iter().copied().cycle().take(len).collect())
}

/// Copies of one matrix, read in turn.
pub struct Copies {
    /// The format of all.
    pub format: Format,
    /// Rows of each.
    pub rows: usize,
    /// Weights of a row.
    pub cols: usize,
    bytes: Vec<AlignedBuf>,
    next: Cell<usize>,
}

impl Copies {
    /// The stack that source J measures on, 24 of 4096 x 4096, or as many as an eighth of the memory that is free holds; two of 512
    /// rows in a quick run.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub fn new(exp: &mut Experiment, format: Format) -> Result<Copies> {
        let (rows, cols) = (if exp.quick() { 512 } else { 4096 }, 4096);
        exp.progress(format!("{format}: copies of {rows} x {cols}"));
        let stock = random(format, rows, cols, &mut exp.rng("weights"))?;
        let most = memory::available_memory().unwrap_or(4 << 30) / 8 / stock.len() as u64;
        let copies = if exp.quick() { 2 } else { most.clamp(1, 24) };
        let bytes = (0..copies)
            .map(|_| AlignedBuf::copy_of(&stock))
            .collect::<Result<Vec<_>>>()?;
        Ok(Copies {
            format,
            rows,
            cols,
            bytes,
            next: Cell::new(0),
        })
    }

    /// How many.
    pub fn copies(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of one.
    pub fn bytes(&self) -> usize {
        self.bytes[0].len()
    }

    /// The copy whose turn it is.
    pub fn next(&self) -> MatrixRef<'_> {
        self.next.set((self.next.get() + 1) % self.bytes.len());
        let bytes = &self.bytes[self.next.get()];
        let w = MatrixRef::new(Layout::Stock(self.format), self.rows, self.cols, bytes);
        w.expect("the shape that the bytes were made for")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_is_no_multiple_of_the_block_is_refused_by_type_and_length() {
        for format in [Format::Q8_0, Format::Q4_0] {
            let error = quantize(format, 4100, &[0.0; 4100])
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(format.name()) && error.contains("4100"),
                "{error}"
            );
        }
        assert_eq!(
            quantize(Format::F32, 4100, &[0.0; 8200]).unwrap().len(),
            4 * 8200
        );
        assert!(quantize(Format::F32, 4096, &[0.0; 4100]).is_err());
    }
}
