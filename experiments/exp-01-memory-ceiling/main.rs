//! Read bandwidth by thread count and working set, and the decode ceiling it sets. Claims L01 and L02.

use std::hint::black_box;
use std::process::ExitCode;

use anyhow::Result;
use common::formats::Format;
use common::kernels::read;
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::bandwidth::{self, Reader};
use common::runtime::pool::Pool;
use common::runtime::shapes::{SHAPE_1B, SHAPE_27B, Shape};

fn main() -> ExitCode {
    lab::run("exp-01-memory-ceiling", &["L01", "L02"], run)
}

fn run(exp: &mut Experiment) -> Result<()> {
    let pools = exp
        .thread_curve()
        .into_iter()
        .map(Pool::new)
        .collect::<Result<Vec<Pool>>>()?;
    let all = pools.last().expect("there is always one thread");
    let largest = if exp.quick() {
        64 << 20
    } else {
        bandwidth::dram_set(exp.last_level_cache())
    };
    exp.kernel_chosen("bytes", read::isa().name(), "the widest loads of this CPU");
    exp.progress(format!("taking {} MB", largest >> 20));
    let buf = bandwidth::buffer(all, largest)?;
    if let Some(given) = buf.huge_pages_given() {
        exp.huge_pages(given > largest / 2);
    }

    let mut best = Vec::new();
    for pool in &pools {
        for bytes in sets(largest) {
            let reader = curve(exp, pool, &buf[..bytes], bytes == largest)?;
            if bytes == largest {
                best.push(reader);
            }
        }
    }
    wall(exp, &pools, &best, &buf)?;
    ceiling(exp, all, best[best.len() - 1], &buf)
}

/// 16 KB, 64 KB ... and the largest.
fn sets(largest: usize) -> Vec<usize> {
    let steps = (7..).map(|i| 1 << (2 * i)).take_while(|&n| n < largest);
    steps.chain([largest]).collect()
}

/// Races ways to read one set: all of them on the largest, where the best is the wall, a few on the way there.
fn curve(exp: &mut Experiment, pool: &Pool, set: &[u8], largest: bool) -> Result<Reader> {
    let mut readers = Reader::all();
    if !largest {
        readers.retain(|r| {
            r.chunk.is_none() && ["plain", "streams-4", "prefetch"].contains(&r.form.name)
        });
    }
    let size = format!("{} KB", set.len() >> 10);
    exp.progress(format!("{size}, {} threads", pool.threads()));
    // Small sets are read often enough between two barriers that the barrier does not count.
    let times = ((16 << 20) * pool.threads() / set.len()).max(1);
    let mut race = exp.race();
    for &reader in &readers {
        race.add(reader.name(), move || {
            black_box(reader.read_again(pool, set, times));
        });
    }
    if largest {
        race.rounds(exp.rounds().div_ceil(2));
    }
    let t = race.run()?;
    let bytes = (set.len() * times) as f64;
    let rate = |reader: &Reader| t.rate(&reader.name(), Metric::Bandwidth, bytes);
    for reader in &readers {
        exp.row(
            Row::new(reader.name(), read::isa().name())
                .claim("L01")
                .metric(Metric::Bandwidth, rate(reader))
                .threads(pool.threads())
                .param("bytes", set.len()),
        )?;
    }
    let by_rate = |a: &Reader, b: &Reader| rate(a).median.total_cmp(&rate(b).median);
    Ok(readers
        .into_iter()
        .max_by(by_rate)
        .expect("some way to read"))
}

/// The best way of every thread count once more, in one race, so that a drift of the machine does not look like growth.
fn wall(exp: &mut Experiment, pools: &[Pool], best: &[Reader], buf: &[u8]) -> Result<()> {
    exp.progress("the wall, by threads");
    let mut race = exp.race();
    let name = |pool: &Pool| pool.threads().to_string();
    for (pool, &reader) in pools.iter().zip(best) {
        race.add(name(pool), move || {
            black_box(reader.read(pool, buf));
        });
    }
    let t = race.run()?;
    for pool in pools {
        exp.row(
            Row::new("wall", read::isa().name())
                .claim("L01")
                .claim("L02")
                .metric(
                    Metric::Bandwidth,
                    t.rate(&name(pool), Metric::Bandwidth, buf.len() as f64),
                )
                .threads(pool.threads())
                .param("bytes", buf.len()),
        )?;
    }
    // Growth from half of the threads (or the count below) to all of them.
    let Some(half) = pools.len().checked_sub(2) else {
        return exp.not_testable("L01", "one thread has nothing to grow from");
    };
    let all = &pools[pools.len() - 1];
    let growth = t.speedup(&name(all), &name(&pools[half]));
    let key = exp.row(
        Row::new("wall", read::isa().name())
            .claim("L01")
            .metric(Metric::Speedup, growth)
            .baseline(format!(
                "wall-{}-threads {}",
                pools[half].threads(),
                read::isa().name()
            ))
            .threads(all.threads())
            .param("bytes", buf.len()),
    )?;
    let cores = exp.machine().threads;
    if all.threads() < 8 || cores < 8 {
        return exp.not_testable(
            "L01",
            format!(
                "the claim is about half of 8 threads, {cores} here; {} threads read {:.2} times what {} read",
                all.threads(),
                growth.median,
                pools[half].threads()
            ),
        );
    }
    exp.verdict(
        "L01",
        growth.high < 1.1,
        format!(
            "{} threads read {:.2} times what {} read, stopped growing means below 1.1",
            all.threads(),
            growth.median,
            pools[half].threads()
        ),
        &key,
    )
}

/// Tokens a second that the wall allows, and what is left of them when a token's matrices are read one after the other.
fn ceiling(exp: &mut Experiment, pool: &Pool, reader: Reader, buf: &[u8]) -> Result<()> {
    let shape = if exp.quick() { SHAPE_1B } else { SHAPE_27B };
    let weights = shape.weights() as f64;
    let formats = [Format::Pq2_0, Format::Ptq1_0];
    exp.progress(format!("one token of the {}", shape.name));
    let mut race = exp.race();
    race.rounds(exp.rounds().div_ceil(2));
    race.add("wall", || {
        black_box(reader.read(pool, buf));
    });
    for format in formats {
        let sizes = sizes(&shape, format)?;
        race.add(format.name(), move || {
            token(pool, reader, buf, &sizes);
        });
    }
    let t = race.run()?;

    let packings = formats.map(|f| {
        (
            f.name(),
            8.0 * f.block_bytes() as f64 / f.block_weights() as f64,
        )
    });
    for (name, bits) in packings
        .into_iter()
        .chain([("1.6-bit", 1.6), ("1.485-bit", 1.485)])
    {
        let tokens = buf.len() as f64 / (weights * bits / 8.0);
        exp.row(
            Row::new(format!("ceiling-{name}"), read::isa().name())
                .claim("L02")
                .metric(
                    Metric::TokensPerS,
                    t.rate("wall", Metric::TokensPerS, tokens),
                )
                .threads(pool.threads())
                .params([("model", shape.name.into()), ("bits", bits.to_string())]),
        )?;
    }
    for (format, (name, bits)) in formats.into_iter().zip(packings) {
        let row = || {
            Row::new(format!("read-{name}"), read::isa().name())
                .claim("L02")
                .threads(pool.threads())
                .params([("model", shape.name.into()), ("bits", bits.to_string())])
        };
        exp.row(row().metric(Metric::TokensPerS, t.rate(name, Metric::TokensPerS, 1.0)))?;
        let bytes = shape.weight_bytes(format)? as f64;
        let share = t.speedup_per_unit((name, bytes), ("wall", buf.len() as f64));
        let share = share.scaled(100.0);
        let key = exp.row(
            row()
                .metric(Metric::Share, share)
                .baseline(format!("ceiling-{name} {}", read::isa().name())),
        )?;
        if format == Format::Pq2_0 {
            exp.verdict(
                "L02",
                share.low <= 105.0 && share.high >= 95.0,
                format!(
                    "reading the {:.2} GB of a token, matrix by matrix, reaches {:.1}% of bandwidth / bytes; within 5% counts as equal",
                    bytes / 1e9,
                    share.median
                ),
                &key,
            )?;
        }
    }
    Ok(())
}

/// Bytes of every matrix that a token streams.
fn sizes(shape: &Shape, format: Format) -> Result<Vec<usize>> {
    let matrices = shape.matrices();
    matrices
        .iter()
        .map(|m| format.matrix_bytes(m.rows, m.cols))
        .collect()
}

/// Reads as many bytes as every matrix has, one job a matrix, round and round through the buffer.
fn token(pool: &Pool, reader: Reader, buf: &[u8], sizes: &[usize]) {
    let mut at = 0;
    for &size in sizes {
        let mut left = size;
        while left > 0 {
            let part = left.min(buf.len() - at);
            black_box(reader.read(pool, &buf[at..at + part]));
            (left, at) = (left - part, (at + part) % buf.len());
        }
    }
}
