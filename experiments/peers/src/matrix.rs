//! One ternary matrix in every format that either side multiplies, and our side of the product.

use anyhow::{Context, Result, ensure};
use common::formats::{BlockQ4_0, BlockQ8_0, Format};
use common::kernels::{self, Activations, Kernel, MatrixRef};
use common::runtime::memory::AlignedBuf;
use common::runtime::pool::Pool;
use common::runtime::stack;
use half::f16;
use rand::RngExt;

/// Ternary weights: codes u = w + 1 and a scale for each run of 256, which every format can store exactly. Some rows are drawn, the
/// rest repeats them: time does not depend on the weights.
pub struct Ternary {
    /// Outputs.
    pub rows: usize,
    /// Inputs, a multiple of 256.
    pub cols: usize,
    /// `[row][col]` of the rows that were drawn.
    codes: Vec<u8>,
    /// `[row][col / 256]` of the same.
    scales: Vec<f16>,
}

/// Weights that share a scale.
const RUN: usize = 256;

impl Ternary {
    /// Codes and scales from random numbers.
    pub fn random(rows: usize, cols: usize, rng: &mut impl RngExt) -> Self {
        let drawn = rows.min(64) * cols;
        Ternary {
            rows,
            cols,
            codes: (0..drawn).map(|_| rng.random_range(0..3)).collect(),
            scales: (0..drawn / RUN)
                .map(|_| f16::from_f32(rng.random_range(0.01..0.03)))
                .collect(),
        }
    }

    /// The bytes of the matrix in a format.
    ///
    /// # Errors
    /// A format that cannot hold them.
    pub fn pack(&self, format: Format) -> Result<Vec<u8>> {
        let mut bytes = vec![0; format.matrix_bytes(self.codes.len() / self.cols, self.cols)?];
        let scale = |block: usize, weights: usize| self.scales[block * weights / RUN];
        match format {
            Format::Q4_0 => {
                let blocks: &mut [BlockQ4_0] = bytemuck::cast_slice_mut(&mut bytes);
                for (b, (to, u)) in blocks.iter_mut().zip(self.codes.as_chunks().0).enumerate() {
                    *to = BlockQ4_0::pack(scale(b, 32), &u.map(|u| u + 7)); // code 8 is 0
                }
            }
            Format::Q8_0 => {
                let blocks: &mut [BlockQ8_0] = bytemuck::cast_slice_mut(&mut bytes);
                for (b, (to, u)) in blocks.iter_mut().zip(self.codes.as_chunks().0).enumerate() {
                    *to = BlockQ8_0 {
                        d: scale(b, 32),
                        qs: u.map(|u| u as i8 - 1),
                    };
                }
            }
            _ => {
                let n = format.block_weights();
                let scales: Vec<f16> = (0..self.codes.len() / n).map(|b| scale(b, n)).collect();
                format.pack(&self.codes, &scales, &mut bytes)?;
            }
        }
        let all = format.matrix_bytes(self.rows, self.cols)?;
        Ok(bytes.iter().copied().cycle().take(all).collect())
    }

    /// The first `rows` products with f32 activations, `[token][cols]`, in f64; `[token][row]`.
    ///
    /// # Errors
    /// More rows than were drawn.
    pub fn exact(&self, x: &[f32], rows: usize) -> Result<Vec<f64>> {
        ensure!(
            rows * self.cols <= self.codes.len(),
            "exact: {rows} rows of the {} that were drawn",
            self.codes.len() / self.cols
        );
        let mut out = Vec::new();
        for x in x.chunks_exact(self.cols) {
            for r in 0..rows {
                let codes = &self.codes[r * self.cols..][..self.cols];
                let scales = &self.scales[r * self.cols / RUN..];
                let terms = codes.iter().zip(x).enumerate().map(|(k, (&u, &x))| {
                    (f64::from(u) - 1.0) * f64::from(x) * f64::from(scales[k / RUN].to_f32())
                });
                out.push(terms.sum());
            }
        }
        Ok(out)
    }
}

/// Our side of a product: repacked weights, the best kernel, activations that are quantized in every run.
pub struct Ours {
    kernel: &'static Kernel,
    rows: usize,
    cols: usize,
    bytes: AlignedBuf,
    x: Vec<f32>,
    quantized: Activations,
    /// `[token][rows]`.
    pub out: Vec<f32>,
}

impl Ours {
    /// Weights stored in `format`, times `tokens` columns.
    ///
    /// # Errors
    /// If no kernel of this CPU takes them.
    pub fn new(w: &Ternary, format: Format, x: &[f32]) -> Result<Self> {
        let kernel = kernels::Choice::default().kernel(format)?;
        let mut bytes = AlignedBuf::copy_of(&w.pack(format)?)?;
        kernel
            .layout()
            .repack_in_place(&mut bytes, w.rows, w.cols)?;
        let tokens = x.len() / w.cols;
        Ok(Ours {
            kernel,
            rows: w.rows,
            cols: w.cols,
            bytes,
            x: x.to_vec(),
            quantized: Activations::new(kernel.form(), w.cols, tokens),
            out: vec![0.0; tokens * w.rows],
        })
    }

    /// The kernel it takes.
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Quantizes the activations and multiplies.
    ///
    /// # Errors
    /// As the kernel.
    pub fn run(&mut self, pool: &Pool) -> Result<()> {
        self.quantized.set(&self.x)?;
        let w = MatrixRef::new(self.kernel.layout(), self.rows, self.cols, &self.bytes)?;
        stack::multiply(pool, self.kernel, &w, &self.quantized, &mut self.out)
    }
}

/// The largest error of `got`, `[token][rows]`, against `exact`, `[token][some rows]`, as a part of the RMS of the exact values.
pub fn error(got: &[f32], rows: usize, exact: &[f64], some: usize) -> Result<f64> {
    let rms = (exact.iter().map(|v| v * v).sum::<f64>() / exact.len() as f64).sqrt();
    let pairs = got
        .chunks_exact(rows)
        .zip(exact.chunks_exact(some))
        .flat_map(|(got, exact)| got.iter().zip(exact));
    let worst = pairs
        .map(|(&got, &exact)| (f64::from(got) - exact).abs())
        .fold(
            0.0,
            |a: f64, b| if b.is_nan() { f64::INFINITY } else { a.max(b) },
        );
    (rms > 0.0)
        .then(|| worst / rms)
        .context("error: nothing to compare with")
}
