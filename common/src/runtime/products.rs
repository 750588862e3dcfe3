//! Matrices times activations on all threads of a pool: several matrices in one job, their rows shared out by a schedule.

use anyhow::{Context, Result};

use super::pool::{Chunks, Pool};
use crate::kernels::{Activations, Kernel, MatrixRef, Out};

/// Matrices of one job.
const MOST: usize = 4;

/// The unit in which rows of several matrices are counted together: 16 is a multiple of the rows of every tile.
const UNIT: usize = 16;

/// Units of a small chunk: 64 rows, as source J divides them.
const SMALL: usize = 64 / UNIT;

/// Bytes of a large chunk: at its ends the prefetches of decode run some kilobytes into another thread's rows, 6% of a chunk of 64
/// rows and 1% of this.
const LARGE: usize = 512 << 10;

/// How the rows of a job are shared out. The results are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Chunks of 64 rows, to whichever thread is free.
    Dynamic,
    /// One slice a thread, the same in every call.
    Static,
    /// As `Dynamic`, in chunks of half a megabyte while there is much to do and of 64 rows at the end, so that a thread that is
    /// held up keeps the others waiting for 64 rows at most.
    Guided,
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
    bytes: usize,
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
        self.bytes += matrix.bytes().len();
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
        let large = Large::of(self.units, self.bytes, pool.threads());
        let chunks = large.chunks + (self.units - large.chunks * large.units).div_ceil(SMALL);
        match schedule {
            Schedule::Static => pool.slices(self.units, 1, |_, r| rows(r.start, r.end)),
            Schedule::Guided if chunks >= 4 * pool.threads() => {
                let one = Chunks {
                    size: 1,
                    multiple: 1,
                };
                let start = |chunk: usize| large.start(chunk).min(self.units);
                pool.chunks_by(chunks, one, |_, r| rows(start(r.start), start(r.end)));
            }
            Schedule::Dynamic | Schedule::Guided => {
                pool.chunks(self.units, SMALL, |r| rows(r.start, r.end));
            }
        }
    }
}

/// The large chunks of a job, which come first.
struct Large {
    chunks: usize,
    /// Of one of them.
    units: usize,
}

impl Large {
    /// All that fit but one a thread: so much is left for small chunks.
    fn of(units: usize, bytes: usize, threads: usize) -> Large {
        let unit = bytes.div_ceil(units.max(1)).max(1);
        let large = (LARGE / unit).next_multiple_of(SMALL).max(SMALL);
        Large {
            chunks: (units / large).saturating_sub(threads),
            units: large,
        }
    }

    /// The first unit of a chunk.
    fn start(&self, chunk: usize) -> usize {
        let large = chunk.min(self.chunks);
        large * self.units + (chunk - large) * SMALL
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
        // Of 8200 rows, 2.2 MB, some are in large chunks; 40 are no whole number of units.
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
            for schedule in [Schedule::Dynamic, Schedule::Static, Schedule::Guided] {
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
    fn guided_chunks_cover_every_unit_once() {
        for (units, bytes, threads) in [(1, 1, 1), (640, 10 << 20, 2), (77, 50 << 20, 3), (5, 0, 9)]
        {
            let large = Large::of(units, bytes, threads);
            assert!(large.start(large.chunks) <= units);
            let chunks = large.chunks + (units - large.chunks * large.units).div_ceil(SMALL);
            let starts: Vec<usize> = (0..=chunks).map(|c| large.start(c)).collect();
            assert!(starts.windows(2).all(|s| s[0] < s[1]));
            assert!(starts[0] == 0 && starts[chunks] >= units && starts[chunks] < units + SMALL);
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
