//! Matrices to measure kernels on: random ternary weights, as many copies as it takes to leave the caches.

use std::hint::black_box;
use std::sync::Mutex;

use anyhow::{Result, ensure};
use half::f16;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::bandwidth::beyond;
use super::memory::AlignedBuf;
use super::pool::{Chunks, Pool};
use super::products::{Job, Schedule};
use crate::formats::Format;
use crate::kernels::{Activations, Form, Kernel, MatrixRef};

/// `out[token][row] = w[row] . x[token]` with all threads of the pool.
///
/// # Errors
/// As [`Kernel::multiply`].
pub fn multiply(
    pool: &Pool,
    kernel: &'static Kernel,
    w: &MatrixRef,
    x: &Activations,
    out: &mut [f32],
) -> Result<()> {
    ensure!(
        !x.groups().is_empty() && w.rows() > 0,
        "{}: nothing to multiply",
        kernel.name()
    );
    let mut job = Job::default();
    job.add(kernel, *w, x, out)?;
    job.run(pool, Schedule::Dynamic);
    Ok(())
}

/// Stock bytes of random ternary weights, a share `zeros` of them 0, with scales between 1/2 and 1.
///
/// # Errors
/// A format that is not ternary, a shape that does not fit it.
pub fn random_stock(
    format: Format,
    rows: usize,
    cols: usize,
    zeros: f64,
    seed: u64,
) -> Result<Vec<u8>> {
    ensure!(format.is_ternary(), "{format}: not a ternary format");
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    // Some rows of random codes, repeated: time does not depend on the weights, and drawing them all takes longer than measuring.
    let drawn = rows.min(64);
    let codes: Vec<u8> = (0..drawn * cols)
        .map(|_| {
            if rng.random_bool(zeros) {
                1
            } else {
                2 * u8::from(rng.random::<bool>())
            }
        })
        .collect();
    let scales: Vec<f16> = (0..codes.len() / format.block_weights())
        .map(|_| f16::from_f32(rng.random_range(0.5..1.0)))
        .collect();
    let mut some = vec![0; format.matrix_bytes(drawn, cols)?];
    format.pack(&codes, &scales, &mut some)?;
    let row_bytes = format.row_bytes(cols)?;
    Ok(some
        .iter()
        .copied()
        .cycle()
        .take(rows * row_bytes)
        .collect())
}

/// Zero share of trained checkpoints of this family.
pub const ZEROS: f64 = 0.328;

/// Copies of one matrix in one layout, multiplied in turn.
pub struct Stack {
    kernel: &'static Kernel,
    rows: usize,
    cols: usize,
    copies: Vec<AlignedBuf>,
    next: usize,
}

impl Stack {
    /// `copies` of the matrix that `stock` holds, repacked for `kernel`.
    ///
    /// # Errors
    /// A shape that does not fit, memory that the system refuses.
    pub fn new(
        kernel: &'static Kernel,
        stock: &[u8],
        rows: usize,
        cols: usize,
        copies: usize,
    ) -> Result<Self> {
        ensure!(copies > 0, "{}: no copies to measure", kernel.name());
        let mut stock = AlignedBuf::copy_of(stock)?;
        let first = kernel.layout().repack_in_place(&mut stock, rows, cols)?;
        MatrixRef::new(kernel.layout(), rows, cols, first)?;
        let mut all = vec![];
        while all.len() < copies {
            all.push(AlignedBuf::copy_of(first)?);
        }
        Ok(Stack {
            kernel,
            rows,
            cols,
            copies: all,
            next: 0,
        })
    }

    /// Copies of `bytes` each that together are half of what is [`beyond`] the last-level cache, as is the buffer that plain reads
    /// are measured on in the same race; fewer if the `memory` that may be used does not hold them.
    pub fn copies_for_dram(bytes: usize, last_level_cache: u64, memory: u64) -> usize {
        let want = (beyond(last_level_cache) / 2).min(memory);
        usize::try_from(want.div_ceil(bytes.max(1) as u64))
            .unwrap_or(1)
            .max(1)
    }

    /// The kernel that multiplies it.
    pub fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Bytes of one matrix: what one product streams.
    pub fn bytes(&self) -> usize {
        self.copies[0].len()
    }

    /// Weights of one matrix.
    pub fn weights(&self) -> usize {
        self.rows * self.cols
    }

    /// Whether huge pages were given for all of it, where the system says.
    pub fn on_huge_pages(&self) -> Option<bool> {
        self.copies.iter().try_fold(true, |all, c| {
            Some(all && c.huge_pages_given()? >= c.len() / 2)
        })
    }

    /// Multiplies the next copy.
    ///
    /// # Errors
    /// As [`multiply`].
    pub fn multiply(&mut self, pool: &Pool, x: &Activations, out: &mut [f32]) -> Result<()> {
        self.next = (self.next + 1) % self.copies.len();
        let w = MatrixRef::new(
            self.kernel.layout(),
            self.rows,
            self.cols,
            &self.copies[self.next],
        )?;
        multiply(pool, self.kernel, &w, x, out)
    }

    /// [`Stack::APART`] products of the first copy for each thread, each by one thread: the arithmetic that they can do together on
    /// what each has in its own cache. A thread takes its share, then what is left of another's, as it takes the rows of a matrix that
    /// they share. `outs` holds an output for each product.
    ///
    /// # Errors
    /// As [`multiply`]; too few outputs.
    pub fn multiply_apart(
        &self,
        pool: &Pool,
        x: &Activations,
        outs: &[Mutex<Vec<f32>>],
    ) -> Result<()> {
        let products = Self::APART * pool.threads();
        ensure!(
            outs.len() >= products,
            "{} outputs for {products} products",
            outs.len()
        );
        let w = MatrixRef::new(self.kernel.layout(), self.rows, self.cols, &self.copies[0])?;
        let failure = Mutex::new(None);
        let one = Chunks {
            size: 1,
            multiple: 1,
        };
        pool.chunks_by(products, one, |_, range| {
            for out in &outs[range] {
                let mut out = out.lock().unwrap_or_else(|e| e.into_inner());
                if let Err(error) = self.kernel.multiply(black_box(&w), x, &mut out) {
                    *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
                    return;
                }
            }
        });
        let failure = failure.into_inner().unwrap_or_else(|e| e.into_inner());
        failure.map_or(Ok(()), Err)
    }

    /// Products a thread in [`Stack::multiply_apart`].
    pub const APART: usize = 16;
}

/// Random activations of `tokens` tokens, in the form a kernel takes.
///
/// # Errors
/// As [`Activations::of`].
pub fn random_activations(
    form: Form,
    cols: usize,
    tokens: usize,
    seed: u64,
) -> Result<Activations> {
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    let x: Vec<f32> = (0..cols * tokens)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    Activations::of(form, cols, &x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    #[test]
    fn threads_and_copies_give_the_bits_of_one_call() {
        let (rows, cols) = (200, 256);
        let stock = random_stock(Format::Pq2_0, rows, cols, ZEROS, 1).unwrap();
        let x = random_activations(Form::Q8K, cols, 5, 2).unwrap();
        let mut expected = vec![0.0; rows * 5];
        let kernel = kernels::Choice::default().kernel(Format::Pq2_0).unwrap();
        let mut bytes = stock.clone();
        kernel
            .layout()
            .repack_in_place(&mut bytes, rows, cols)
            .unwrap();
        let w = MatrixRef::new(kernel.layout(), rows, cols, &bytes).unwrap();
        kernel.multiply(&w, &x, &mut expected).unwrap();
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            for kernel in kernels::available().filter(|k| k.layout().source() == Format::Pq2_0) {
                let mut stack = Stack::new(kernel, &stock, rows, cols, 2).unwrap();
                for _ in 0..2 {
                    let mut out = vec![0.0; rows * 5];
                    stack.multiply(&pool, &x, &mut out).unwrap();
                    assert_eq!(out, expected, "{} with {threads} threads", kernel.name());
                }
                let outs: Vec<_> = (0..threads * Stack::APART)
                    .map(|_| Mutex::new(vec![0.0; rows * 5]))
                    .collect();
                stack.multiply_apart(&pool, &x, &outs).unwrap();
                for out in outs {
                    assert_eq!(out.into_inner().unwrap(), expected, "{}", kernel.name());
                }
            }
        }
    }

    #[test]
    fn a_stack_for_dram_is_six_caches_or_what_memory_holds() {
        assert_eq!(Stack::copies_for_dram(100 << 20, 300 << 20, u64::MAX), 20);
        assert_eq!(Stack::copies_for_dram(100 << 20, 300 << 20, 200 << 20), 2);
        assert_eq!(Stack::copies_for_dram(1 << 30, 1 << 20, u64::MAX), 1);
    }
}
