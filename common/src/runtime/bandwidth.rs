//! The memory wall: how fast a pool's threads can read, whatever they do with what they read.
//!
//! Experiments that state a share of the wall take it in their own session: [`Reader::fastest`] picks the way to read
//! that is best here, and [`Reader::read`] is a variant in their race, next to the kernels.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use anyhow::Result;

use super::memory::{self, AlignedBuf};
use super::pool::{Chunks, Pool, slice};
use crate::kernels::read::{self, Form};

/// A way for all threads together to read a buffer once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// How a thread reads its part.
    pub form: Form,
    /// Bytes of the chunks that threads take from one counter; `None` for one slice a thread.
    pub chunk: Option<usize>,
}

impl Reader {
    /// As decode reads: chunks of about the bytes that 64 rows of 8192 weights take.
    pub const DECODE: Reader = Reader {
        form: Form::DECODE,
        chunk: Some(128 << 10),
    };

    /// Every way that is tried for the wall.
    pub fn all() -> Vec<Reader> {
        let slices = Form::ALL.map(|form| Reader { form, chunk: None });
        let chunks = Form::ALL.map(|form| Reader {
            form,
            chunk: Some(64 << 10),
        });
        slices.into_iter().chain(chunks).collect()
    }

    /// `streams-4` for slices, `streams-4-64k` for chunks of 64 KB.
    pub fn name(&self) -> String {
        match self.chunk {
            None => self.form.name.into(),
            Some(bytes) => format!("{}-{}k", self.form.name, bytes >> 10),
        }
    }

    /// Reads every byte once with every thread of the pool. The sum, that of [`read::sum`], is there to be used, so that no
    /// load can be left out.
    pub fn read(&self, pool: &Pool, bytes: &[u8]) -> u64 {
        self.read_again(pool, bytes, 1)
    }

    /// As [`Reader::read`] with every part read `times` times by its thread, without a barrier in between: for
    /// buffers that are read faster than threads meet.
    pub fn read_again(&self, pool: &Pool, bytes: &[u8], times: usize) -> u64 {
        let total = AtomicU64::new(0);
        let part = |range: std::ops::Range<usize>| {
            let mut sum = 0_u64;
            for _ in 0..times {
                let part = std::hint::black_box(&bytes[range.clone()]);
                sum = sum.wrapping_add(read::sum(part, self.form));
            }
            total.fetch_add(sum, Relaxed); // wraps, as sums do
        };
        match self.chunk {
            None => pool.slices(bytes.len(), 64, |_, range| part(range)),
            Some(size) => {
                let chunks = Chunks { size, multiple: 64 };
                pool.chunks_by(bytes.len(), chunks, |_, range| part(range));
            }
        }
        total.into_inner()
    }

    /// The fastest of [`Reader::all`] on this buffer, by the median of `rounds` interleaved passes after one to warm
    /// up, and its rate in GB/s.
    pub fn fastest(pool: &Pool, bytes: &[u8], rounds: usize) -> (Reader, f64) {
        let readers = Self::all();
        let mut seconds = vec![Vec::new(); readers.len()];
        for round in 0..=rounds.max(1) {
            for (reader, seconds) in readers.iter().zip(&mut seconds) {
                let start = Instant::now();
                std::hint::black_box(reader.read(pool, bytes));
                if round > 0 {
                    seconds.push(start.elapsed().as_secs_f64());
                }
            }
        }
        let median = |seconds: &mut Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        };
        let medians = seconds.iter_mut().map(median);
        let best = readers.into_iter().zip(medians);
        let (reader, time) = best
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .expect("there are ways to read");
        (reader, bytes.len() as f64 / time / 1e9)
    }
}

/// A buffer to read: on huge pages where they are given, and touched by the threads that own its slices.
///
/// # Errors
/// The system refuses that much memory.
pub fn buffer(pool: &Pool, len: usize) -> Result<AlignedBuf> {
    let mut buf = AlignedBuf::new(len)?;
    let mut rest = &mut *buf;
    let mut parts = Vec::new();
    for worker in 0..pool.threads() {
        let size = slice(len, 64, worker, pool.threads()).len();
        let (part, more) = rest.split_at_mut(size);
        parts.push(Mutex::new(part));
        rest = more;
    }
    pool.run(|worker| {
        let mut part = parts[worker].lock().unwrap_or_else(|e| e.into_inner());
        // Not zeros, which a hypervisor might share between pages.
        for (i, line) in part.chunks_mut(64).enumerate() {
            line.fill((i % 251) as u8 + 1);
        }
    });
    drop(parts);
    Ok(buf)
}

/// How large a buffer must be to be read from DRAM: [`beyond`] the largest cache, less where half the available memory is less.
pub fn dram_set(largest_cache: u64) -> usize {
    let half = memory::available_memory().map_or(u64::MAX, |bytes| bytes / 2);
    usize::try_from(beyond(largest_cache).min(half)).unwrap_or(usize::MAX) & !63
}

/// 13 times the largest cache, between 1 and 4 GB. A virtual machine's cache is shared with neighbours, so that even a set of a few
/// times its size would be read in part from a cache that others leave idle.
pub fn beyond(largest_cache: u64) -> u64 {
    largest_cache.saturating_mul(13).clamp(1 << 30, 4 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reader_reads_all_of_the_buffer() {
        let pool = Pool::new(3).unwrap();
        for len in [0, 8, 64, 100_000, 1 << 20] {
            let mut buf = buffer(&pool, len).unwrap();
            for readers in [Reader::all(), Reader::all()] {
                let expected = read::sum(&buf, Form::PLAIN);
                for reader in readers {
                    assert_eq!(
                        reader.read(&pool, &buf),
                        expected,
                        "{} {len}",
                        reader.name()
                    );
                    assert_eq!(
                        reader.read_again(&pool, &buf, 5),
                        expected.wrapping_mul(5),
                        "{} {len}",
                        reader.name()
                    );
                }
                if let Some(last) = buf.last_mut() {
                    *last = 0; // and once more with another sum
                }
            }
        }
    }

    #[test]
    fn names_differ() {
        let mut names: Vec<String> = Reader::all().iter().map(Reader::name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), Reader::all().len());
        assert!(names.contains(&"streams-4-64k".into()));
    }

    #[test]
    fn the_fastest_is_one_of_them() {
        let pool = Pool::new(2).unwrap();
        let buf = buffer(&pool, 1 << 18).unwrap();
        let (reader, rate) = Reader::fastest(&pool, &buf, 3);
        assert!(Reader::all().contains(&reader));
        assert!(rate.is_finite() && rate > 0.0);
    }

    #[test]
    fn the_dram_set_is_bounded() {
        assert!(dram_set(0) <= 1 << 30);
        assert!(dram_set(u64::MAX) <= 4 << 30);
        assert_eq!(dram_set(100 << 20) % 64, 0);
    }
}
