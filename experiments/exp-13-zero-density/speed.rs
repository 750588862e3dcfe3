//! Gw/s of BITCOS against the kernels for two bits and base 3. Claim B03.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::Result;
use bytemuck::cast_slice;
use common::formats::bitcos::{Bitcos, GROUP, SLACK};
use common::formats::{Codes, Format};
use common::kernels::bitcos::{Kernel, Matrix, TILE};
use common::kernels::{Form, Isa};
use common::lab::{Experiment, Key, Metric, Row, Stat};
use common::runtime::pool::Pool;
use common::runtime::stack;
use half::f16;
use shared::contest::{self, Entry};
use shared::decode::{self, At};

use crate::{PTQ1_0, SHARES, codes};

/// Gw/s of BITCOS and of one other kernel, in the same race.
pub struct Rate {
    zeros: f64,
    threads: usize,
    other: String,
    bitcos: f64,
    theirs: f64,
    speedup: Stat,
    key: Key,
    share: Option<f64>,
}

/// Rows that are drawn; those of a matrix are these over and over.
const DRAWN: usize = 64;

/// The parts of a matrix whose rows are those of `some`, so many times: bitmap, signs, row starts and scales.
fn repeated(some: &Bitcos, times: usize) -> [Vec<u8>; 4] {
    let stream = &some.signs()[..some.signs().len() - SLACK];
    let starts = (0..times).flat_map(|i| {
        let at = move |&at| (i * stream.len()) as u32 + at;
        some.row_starts().iter().map(at)
    });
    [
        cast_slice(some.presence()).repeat(times),
        [&stream.repeat(times)[..], &[0; SLACK]].concat(),
        starts.flat_map(u32::to_ne_bytes).collect(),
        cast_slice(some.scales()).repeat(times),
    ]
}

/// BITCOS and the kernels for PQ2_0 and PTQ1_0 on the same codes, at each thread count.
pub fn race(
    exp: &mut Experiment,
    kernel: Kernel,
    zeros: f64,
    at: &At,
    rates: &mut Vec<Rate>,
) -> Result<()> {
    let (rows, cols) = (at.rows, at.cols);
    exp.progress(format!("{rows} x {cols}, {zeros} zeros"));
    let copies = contest::copies(exp, at, 5);
    let codes = codes(exp, DRAWN, cols, zeros);
    let scales = vec![f16::from_f32(0.75); codes.len() / GROUP];
    let some = Bitcos::pack(&Codes::new(&codes, DRAWN, cols)?, &scales)?;
    let parts = repeated(&some, rows / DRAWN);
    let held = contest::aligned(&parts, copies(parts.iter().map(Vec::len).sum()))?;
    let matrices = held.iter().map(|[presence, signs, starts, scales]| {
        let (presence, starts) = (cast_slice(presence), cast_slice(starts));
        Matrix::new(rows, cols, presence, signs, starts, cast_slice(scales))
    });
    let matrices: Vec<Matrix> = matrices.collect::<Result<_>>()?;
    let mut stacks = Vec::new();
    for (format, layout) in [
        (Format::Pq2_0, "stock"),
        (Format::Pq2_0, "wide-row"),
        (Format::Ptq1_0, "stock"),
        (Format::Ptq1_0, "wide-row-b3"),
    ] {
        match decode::best(format, layout) {
            Ok(other) => stacks.push(contest::stack(other, &codes, &scales, at, &copies)?),
            Err(error) => exp.refused(layout, "", format!("{error:#}")),
        }
    }
    let x = stack::random_activations(Form::Q8K, cols, 1, exp.flags().seed)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = contest::wall(exp, &pool, at)?;
        let out: Vec<AtomicU32> = (0..rows).map(|_| AtomicU32::new(0)).collect();
        let mut outs = vec![vec![0f32; rows]; stacks.len()];
        let (weights, bytes, mut next) = ((rows * cols) as f64, matrices[0].bytes(), 0);
        let mut entries = vec![Entry {
            variant: "bitcos",
            isa: kernel.isa.name(),
            weights,
            bytes: bytes as f64,
            call: Box::new(|| {
                next = (next + 1) % matrices.len();
                contest::by_rows(&pool, rows, bytes, TILE, |rows| {
                    kernel.multiply(&matrices[next], &x, rows, &out)
                })
            }),
        }];
        for (stack, out) in stacks.iter_mut().zip(&mut outs) {
            entries.push(Entry::of_stack(stack, &pool, &x, out));
        }
        let names: Vec<String> = entries.iter().map(Entry::name).collect();
        let row = |variant: &str, isa: &str| {
            let row = at.row(variant, isa, threads).param("zeros", zeros);
            row.claim("B03")
        };
        let wall = wall.as_ref().map(|wall| (&pool, wall));
        let (times, shares) = contest::run(exp, &mut entries, wall, Metric::WeightsPerS, &row)?;
        drop(entries);
        let bits: Vec<u32> = out.iter().map(|v| v.load(Relaxed)).collect();
        let same = |other: &Vec<f32>| other.iter().zip(&bits).all(|(v, b)| v.to_bits() == *b);
        exp.must_hold(
            "bitcos gives the bits of PQ2_0 and PTQ1_0",
            outs.iter().all(same),
        );

        let share = shares.first().map(|s| s.0);
        let rate = |name: &str| times.rate(name, Metric::WeightsPerS, weights).median;
        for other in &names[1..] {
            let speedup = times.speedup(&names[0], other);
            let row = row("bitcos", kernel.isa.name()).baseline(other);
            let key = exp.row(row.metric(Metric::Speedup, speedup))?;
            rates.push(Rate {
                zeros,
                threads,
                bitcos: rate(&names[0]),
                theirs: rate(other),
                other: other.clone(),
                speedup,
                key,
                share,
            });
        }
    }
    Ok(())
}

/// B03, and the zero shares where BITCOS begins to be the faster: measured, between the shares it was measured at, and by the
/// bytes that each streams.
pub fn verdict(exp: &mut Experiment, kernel: Kernel, rates: &[Rate]) -> Result<()> {
    let all: Vec<&Rate> = rates
        .iter()
        .filter(|r| r.threads == exp.all_threads())
        .collect();
    if exp.quick() || kernel.isa == Isa::Scalar {
        let reason = match exp.quick() {
            true => "a quick run does not read from DRAM",
            false => "no kernel but the scalar reference here",
        };
        return exp.not_testable("B03", reason);
    }
    let others = all.iter().filter(|r| r.zeros == SHARES[0]);
    let others: Vec<&str> = others.map(|r| &r.other[..]).collect();
    for other in &others {
        let of: Vec<&&Rate> = all.iter().filter(|r| r.other == **other).collect();
        let ahead = |r: &Rate| r.bitcos / r.theirs - 1.0;
        let crossing = of.windows(2).find_map(|pair| {
            let (a, b) = (ahead(pair[0]), ahead(pair[1]));
            let step = pair[1].zeros - pair[0].zeros;
            (a < 0.0 && b >= 0.0).then(|| pair[0].zeros - a / (b - a) * step)
        });
        let row = |method: &str| {
            let row = Row::new("bitcos", kernel.isa.name()).claim("B03");
            row.baseline(*other)
                .threads(exp.all_threads())
                .param("faster_above", method)
        };
        let bits = if other.contains("b3") || other.contains("ptq1_0") {
            PTQ1_0
        } else {
            2.0
        };
        let rows = [
            (row("bytes"), Some(2.0 - bits)),
            (row("measured"), crossing),
        ];
        for (row, share) in rows {
            if let Some(share) = share {
                exp.row(row.exact(Metric::Share, 100.0 * share))?;
            }
        }
    }
    let real: Vec<&&Rate> = all.iter().filter(|r| r.zeros == 0.515).collect();
    let stock = real.iter().filter(|r| !r.other.contains("wide-row"));
    let least = stock.min_by(|a, b| a.speedup.median.total_cmp(&b.speedup.median));
    let Some(least) = least else {
        return exp.not_testable("B03", "no stock kernel here to compare with");
    };
    let listed: Vec<String> = real
        .iter()
        .map(|r| format!("{:.2} times {}", r.speedup.median, r.other))
        .collect();
    let reason = format!(
        "at 51.5% zeros, all threads, from DRAM: {}; {:.0}% of plain reads; judged against the formats as files store them",
        listed.join(", "),
        least.share.unwrap_or(0.0)
    );
    exp.verdict("B03", least.speedup.low > 1.0, reason, &least.key)
}
