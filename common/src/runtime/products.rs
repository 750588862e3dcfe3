//! Matrices times activations on all threads of a pool: several matrices in one job, their rows shared out by a schedule.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, Result};

use super::pool::{Chunks, Pool};
use crate::kernels::{Activations, Kernel, MatrixRef, Out};

/// Matrices of one job.
const MOST: usize = 4;

/// The unit in which rows of several matrices are counted together: 16 is a multiple of the rows of every tile.
const UNIT: usize = 16;

/// Units of a chunk: 64 rows, as source J divides them.
const CHUNK: usize = 64 / UNIT;

/// How the rows of a job are shared out. The results are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Chunks of 64 rows: an equal share of them for each thread, and what is left of a share for whichever thread is free.
    Dynamic,
    /// One slice a thread, the same in every call.
    Static,
    /// Chunks of 64 rows from one counter, as sources J and L hand them out; for comparison.
    Counter,
}

/// A matrix of a job.
struct Part<'a> {
    /// Its first unit of rows.
    first: usize,
    kernel: &'static Kernel,
    matrix: MatrixRef<'a>,
    activations: &'a Activations,
    out: Out<'a>,
}

/// Products that are computed together, with one barrier at the end. Nothing is allocated.
#[derive(Default)]
pub struct Job<'a> {
    parts: [Option<Part<'a>>; MOST],
    units: usize,
}

impl<'a> Job<'a> {
    /// Adds `out[token][row] = matrix[row] . activations[token]`.
    ///
    /// # Errors
    /// As [`Kernel::multiply`]; a fifth matrix.
    pub fn add(
        &mut self,
        kernel: &'static Kernel,
        matrix: MatrixRef<'a>,
        activations: &'a Activations,
        out: &'a mut [f32],
    ) -> Result<()> {
        let out = Out::new(out, activations.tokens(), matrix.rows())?;
        // Refuses what does not fit here; ranges of rows then do not fail.
        // SAFETY: an empty range writes nothing.
        unsafe { kernel.multiply_rows(&matrix, activations, 0..0, out)? };
        let free = self.parts.iter_mut().find(|part| part.is_none());
        let free = free.with_context(|| format!("a job of {MOST} products is full"))?;
        *free = Some(Part {
            first: self.units,
            kernel,
            matrix,
            activations,
            out,
        });
        self.units += matrix.rows().div_ceil(UNIT);
        Ok(())
    }

    /// Computes them.
    pub fn run(self, pool: &Pool, schedule: Schedule) {
        let rows = |start: usize, end: usize| {
            for part in self.parts.iter().flatten() {
                let rows = part.matrix.rows();
                let of = |unit: usize| (unit.saturating_sub(part.first) * UNIT).min(rows);
                let range = of(start)..of(end);
                if !range.is_empty() {
                    // SAFETY: ranges of units are disjoint, and so are their rows.
                    unsafe {
                        part.kernel
                            .multiply_rows(&part.matrix, part.activations, range, part.out)
                    }
                    .expect("shapes and layouts that were checked when the product was added");
                }
            }
        };
        let body = |_, units: std::ops::Range<usize>| rows(units.start, units.end);
        match schedule {
            Schedule::Static => pool.slices(self.units, 1, body),
            Schedule::Counter => {
                let next = AtomicUsize::new(0);
                pool.run(|_| {
                    loop {
                        let start = next.fetch_add(CHUNK, Relaxed);
                        if start >= self.units {
                            break;
                        }
                        rows(start, self.units.min(start + CHUNK));
                    }
                });
            }
            Schedule::Dynamic => {
                let chunks = Chunks {
                    size: CHUNK,
                    multiple: 1,
                };
                pool.chunks_by(self.units, chunks, body);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Format;
    use crate::kernels::{Choice, Form};
    use crate::runtime::stack;

    #[test]
    fn schedules_and_threads_give_the_bits_of_one_call() {
        let cols = 1024;
        let kernel = Choice::default().kernel(Format::Pq2_0).unwrap();
        let x = stack::random_activations(Form::Q8K, cols, 2, 1).unwrap();
        // 40 rows are no whole number of units.
        let matrices = [8200, 40, 16].map(|rows| {
            let mut bytes = stack::random_stock(Format::Pq2_0, rows, cols, 0.3, 2).unwrap();
            let layout = kernel.layout();
            layout.repack_in_place(&mut bytes, rows, cols).unwrap();
            (rows, bytes)
        });
        fn matrix((rows, bytes): &(usize, Vec<u8>)) -> MatrixRef<'_> {
            let layout = Choice::default().kernel(Format::Pq2_0).unwrap().layout();
            MatrixRef::new(layout, *rows, 1024, bytes).unwrap()
        }
        let expected = matrices.each_ref().map(|m| {
            let mut out = vec![0.0; 2 * m.0];
            kernel.multiply(&matrix(m), &x, &mut out).unwrap();
            out
        });
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads).unwrap();
            for schedule in [Schedule::Dynamic, Schedule::Static, Schedule::Counter] {
                let mut outs = matrices.each_ref().map(|m| vec![0.0; 2 * m.0]);
                let mut job = Job::default();
                for (m, out) in matrices.iter().zip(&mut outs) {
                    job.add(kernel, matrix(m), &x, out).unwrap();
                }
                job.run(&pool, schedule);
                assert_eq!(outs, expected, "{schedule:?} on {threads} threads");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let kernel = Choice::default().kernel(Format::Pq2_0).unwrap();
        let x = stack::random_activations(Form::Q8K, 256, 1, 1).unwrap();
        let bytes = stack::random_stock(Format::Pq2_0, 16, 128, 0.3, 2).unwrap();
        let w = MatrixRef::new(kernel.layout(), 16, 128, &bytes).unwrap();
        let mut out = [0.0; 16];
        assert!(Job::default().add(kernel, w, &x, &mut out).is_err());
    }
}
