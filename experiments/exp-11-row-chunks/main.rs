//! Rows divided among threads: chunks of 64 from one counter, equal parts, fixed slices. Claims J07 and J08.

use std::cell::RefCell;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common::formats::Format;
use common::kernels::{Activations, Kernel, MatrixRef, Out};
use common::lab::{self, Experiment, Key, Metric, Row};
use common::runtime::bandwidth::Reader;
use common::runtime::pool::{Chunks, Pool};
use common::runtime::stack;
use shared::decode;
use shared::dense::{self, Copies};

/// Rows of a chunk, as source J divides them.
const CHUNK: usize = 64;

fn main() -> ExitCode {
    lab::run("exp-11-row-chunks", &["J07", "J08"], |exp| {
        same_bits(exp)?;
        let stacks = [Format::F32, Format::Q8_0]
            .into_iter()
            .map(|format| Stack::new(exp, format))
            .collect::<Result<Vec<_>>>()?;
        bandwidth(exp, &stacks)?;
        loaded(exp, &stacks)
    })
}

/// How rows are divided.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// 64 rows at a time from an atomic counter; equal parts if that makes fewer than four chunks a thread.
    Chunks,
    /// As many at a time, a share of them for each thread, next to each other; a thread that is done takes from the others' ends.
    Shares,
    /// One part a thread; a thread that comes late leaves its part to another.
    Parts,
    /// One part a thread, always the same.
    Slices,
}

const WAYS: [(&str, Way); 4] = [
    ("chunks-64", Way::Chunks),
    ("shares-64", Way::Shares),
    ("equal-parts", Way::Parts),
    ("static-slices", Way::Slices),
];

/// Calls `body` for ranges that together are the rows, each a multiple of `tile` but the last.
fn divide(pool: &Pool, way: Way, rows: usize, tile: usize, body: impl Fn(Range<usize>) + Sync) {
    let threads = pool.threads();
    let equal = rows.div_ceil(threads).next_multiple_of(tile);
    let size = match way {
        Way::Chunks => {
            let chunk = CHUNK.next_multiple_of(tile);
            let many = rows.div_ceil(chunk) >= 4 * threads;
            let size = if many { chunk } else { equal };
            let next = AtomicUsize::new(0);
            // One item a thread: what a late thread would do is taken over, and by then there is nothing left.
            return pool.chunks(threads, 1, |_| {
                loop {
                    let start = next.fetch_add(size, Relaxed);
                    if start >= rows {
                        break;
                    }
                    body(start..rows.min(start + size));
                }
            });
        }
        Way::Shares => CHUNK,
        Way::Parts => equal,
        Way::Slices => return pool.slices(rows, tile, |_, range| body(range)),
    };
    let chunks = Chunks {
        size,
        multiple: tile,
    };
    pool.chunks_by(rows, chunks, |_, range| body(range));
}

/// The product with one token; gives the number of ranges.
fn multiply(
    pool: &Pool,
    way: Way,
    kernel: &Kernel,
    w: &MatrixRef,
    x: &Activations,
    out: &mut [f32],
) -> Result<usize> {
    let parts = AtomicUsize::new(0);
    let out = Out::new(out, x.tokens(), w.rows())?;
    // Refuses what does not fit here; the ranges below then do not fail.
    // SAFETY: an empty range writes nothing.
    unsafe { kernel.multiply_rows(w, x, 0..0, out)? };
    divide(pool, way, w.rows(), kernel.layout().tile_rows(), |rows| {
        parts.fetch_add(1, Relaxed);
        // SAFETY: the ranges of a job are disjoint, and so are their rows.
        unsafe { kernel.multiply_rows(w, x, rows, out) }.expect("a shape that was checked");
    });
    Ok(parts.into_inner())
}

/// J07: every way, thread count and odd number of rows against the kernel called once; and the number of parts.
fn same_bits(exp: &mut Experiment) -> Result<()> {
    const COLS: usize = 512;
    let mut last: Option<(Key, bool)> = None;
    let mut cases = 0;
    let mut all = true;
    for format in [Format::F32, Format::Q8_0, Format::Q4_0, Format::Pq2_0] {
        let layout = if format.is_ternary() { "" } else { "stock" };
        let kernel = match layout {
            "" => common::kernels::Choice::default().kernel(format)?,
            _ => decode::best(format, layout)?,
        };
        exp.kernel_chosen(format.name(), &kernel.name(), "the fastest here");
        let x = stack::random_activations(kernel.form(), COLS, 1, exp.flags().seed)?;
        for rows in [1, 63, 257, 1001, 4097] {
            let mut bytes = match format {
                Format::Pq2_0 => stack::random_stock(format, rows, COLS, stack::ZEROS, 1)?,
                _ => dense::random(format, rows, COLS, &mut exp.rng("bits"))?,
            };
            kernel.layout().repack_in_place(&mut bytes, rows, COLS)?;
            let w = MatrixRef::new(kernel.layout(), rows, COLS, &bytes)?;
            let mut expected = vec![0.0; rows];
            kernel.multiply(&w, &x, &mut expected)?;
            let expected: Vec<u32> = expected.iter().map(|y| y.to_bits()).collect();
            for threads in [1, 2, 4, 8] {
                let pool = Pool::new(threads)?;
                let mut same = true;
                for (name, way) in WAYS {
                    let mut out = vec![f32::NAN; rows];
                    let parts = multiply(&pool, way, kernel, &w, &x, &mut out)?;
                    same &= out.iter().map(|y| y.to_bits()).eq(expected.iter().copied());
                    cases += 1;
                    let chunks = rows.div_ceil(CHUNK);
                    let right = match way {
                        Way::Chunks | Way::Shares if chunks >= 4 * threads => parts == chunks,
                        _ => parts <= threads,
                    };
                    exp.must_hold(format!("{name}: parts as many as they are to be"), right);
                    if format == Format::F32 && way == Way::Chunks {
                        let row = Row::new(name, "").claim("J07").threads(threads);
                        let row = row.params([("rows", rows)]).param("what", "parts");
                        exp.row(row.exact(Metric::Count, parts))?;
                    }
                }
                all &= same;
                let row = Row::new("every-way", kernel.isa().name()).threads(threads);
                let row = row
                    .claim("J07")
                    .params([("rows", rows)])
                    .param("format", format);
                last = Some((exp.row(row.exact(Metric::Equal, same))?, same));
            }
        }
    }
    exp.must_hold("every way gives the bits of one call", all);
    let (key, _) = last.context("nothing compared")?;
    let reason =
        format!("{cases} products at 1, 2, 4 and 8 threads, odd numbers of rows among them");
    exp.verdict("J07", all, reason, &key)
}

/// Copies of a matrix and what they are multiplied with.
struct Stack {
    copies: Copies,
    kernel: &'static Kernel,
    x: Activations,
    out: RefCell<Vec<f32>>,
}

impl Stack {
    fn new(exp: &mut Experiment, format: Format) -> Result<Stack> {
        let copies = Copies::new(exp, format)?;
        let kernel = decode::best(format, "stock")?;
        let x = stack::random_activations(kernel.form(), copies.cols, 1, exp.flags().seed)?;
        let out = RefCell::new(vec![0.0; copies.rows]);
        Ok(Stack {
            copies,
            kernel,
            x,
            out,
        })
    }

    fn multiply(&self, pool: &Pool, way: Way) {
        let w = self.copies.next();
        let out = &mut self.out.borrow_mut();
        multiply(pool, way, self.kernel, &w, &self.x, out).expect("shapes that fit");
    }

    fn row(&self, variant: &str, threads: usize) -> Row {
        let isa = if variant == "read" {
            ""
        } else {
            self.kernel.isa().name()
        };
        Row::new(variant, isa)
            .threads(threads)
            .params([("rows", self.copies.rows), ("cols", self.copies.cols)])
            .param("copies", self.copies.copies())
            .param("format", self.copies.format)
    }
}

/// J08: bytes a second by threads, next to plain reads of the same copies.
fn bandwidth(exp: &mut Experiment, stacks: &[Stack]) -> Result<()> {
    let counts = exp.thread_counts();
    let pools = counts.iter().map(|&threads| Pool::new(threads));
    let pools = pools.collect::<Result<Vec<_>>>()?;
    for stack in stacks {
        exp.progress(format!("{} by threads", stack.copies.format));
        let mut race = exp.race();
        for pool in &pools {
            for (name, way) in WAYS {
                race.add(format!("{name} {}", pool.threads()), move || {
                    stack.multiply(pool, way);
                });
            }
            let (reader, _) = Reader::fastest(pool, stack.copies.next().bytes(), 1);
            race.add(format!("read {}", pool.threads()), move || {
                std::hint::black_box(reader.read(pool, stack.copies.next().bytes()));
            });
        }
        let times = race.run()?;
        drop(race);
        let bytes = stack.copies.bytes() as f64;
        for &threads in &counts {
            for name in WAYS.map(|(name, _)| name).into_iter().chain(["read"]) {
                let rate = times.rate(&format!("{name} {threads}"), Metric::Bandwidth, bytes);
                let row = stack.row(name, threads).claim("J08");
                exp.row(row.metric(Metric::Bandwidth, rate))?;
            }
        }
        let mut grows = true;
        let mut told = Vec::new();
        let mut last = None;
        for pair in counts.windows(2) {
            let [fewer, more] = pair else { continue };
            let chunks = |threads| format!("chunks-64 {threads}");
            let growth = times.speedup(&chunks(more), &chunks(fewer));
            let row = stack.row("chunks-64", *more).claim("J08");
            let row = row.baseline(format!("{fewer} threads"));
            last = Some(exp.row(row.metric(Metric::Speedup, growth))?);
            let share = times.speedup(
                &chunks(fewer),
                &format!("read {}", counts[counts.len() - 1]),
            );
            grows &= growth.low > 1.0 || share.median >= 0.9;
            told.push(format!(
                "{:.2}x from {fewer} to {more} threads ({fewer} reach {:.0}% of the memory wall)",
                growth.median,
                100.0 * share.median
            ));
        }
        match last {
            _ if stack.copies.format != Format::F32 => {}
            _ if exp.quick() => exp.not_testable("J08", "a quick run does not read from DRAM")?,
            Some(key) => exp.verdict("J08", grows, format!("F32: {}", told.join(", ")), &key)?,
            None => exp.not_testable("J08", "one thread count: nothing to compare")?,
        }
    }
    Ok(())
}

/// Each way with all threads, while a thread of our own spins and while none does, interleaved.
fn loaded(exp: &mut Experiment, stacks: &[Stack]) -> Result<()> {
    let threads = exp.all_threads();
    let pool = Pool::new(threads)?;
    let (on, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                if on.load(Relaxed) {
                    std::hint::spin_loop();
                } else {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let outcome = stacks
            .iter()
            .try_for_each(|stack| race_loaded(exp, stack, &pool, &on));
        stop.store(true, Relaxed);
        outcome
    })
}

fn race_loaded(exp: &mut Experiment, stack: &Stack, pool: &Pool, on: &AtomicBool) -> Result<()> {
    const LOADS: [&str; 2] = ["idle", "spinning"];
    let calls: u32 = if exp.quick() { 2 } else { 4 };
    exp.progress(format!("{} with a loaded core", stack.copies.format));
    let mut race = exp.race();
    for load in LOADS {
        for (name, way) in WAYS {
            race.add_timed(format!("{name} {load}"), move || {
                on.store(load == "spinning", Relaxed);
                // Until the spinning thread runs, or sleeps.
                thread::sleep(Duration::from_millis(3));
                stack.multiply(pool, way);
                let start = Instant::now();
                for _ in 0..calls {
                    stack.multiply(pool, way);
                }
                let time = start.elapsed() / calls;
                on.store(false, Relaxed);
                Ok(time)
            });
        }
    }
    let times = race.run()?;
    drop(race);
    let isa = stack.kernel.isa();
    let name = |way: &str, load: &str| format!("{way} {load}");
    for load in LOADS {
        for (way, _) in WAYS {
            let row = || {
                stack
                    .row(way, pool.threads())
                    .claim("J07")
                    .param("core", load)
            };
            let time = times.rate(&name(way, load), Metric::Time, 1.0);
            exp.row(row().metric(Metric::Time, time))?;
            if way != "static-slices" {
                let speedup = times.speedup(&name(way, load), &name("static-slices", load));
                let row = row().baseline(format!("static-slices {isa}"));
                exp.row(row.metric(Metric::Speedup, speedup))?;
            }
        }
    }
    Ok(())
}
