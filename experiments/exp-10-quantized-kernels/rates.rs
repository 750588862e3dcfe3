//! Time a weight of the three formats, from memory, and of SIMD against scalar. Claims J03 and J04.

use anyhow::Result;
use common::formats::Format;
use common::kernels::{Isa, Kernel};
use common::lab::{Experiment, Key, Metric, Row, Stat};
use common::runtime::pool::Pool;
use common::runtime::stack;
use shared::decode;
use shared::dense::{Copies, FORMATS};

use crate::kernels_of;

/// A format's best kernel on one thread.
struct Best {
    format: Format,
    /// Nanoseconds a weight, GB/s, and the row of the first.
    time: f64,
    rate: f64,
    row: Key,
    /// Against the scalar kernel.
    gain: Stat,
    gain_row: Key,
}

/// A stack of 24 matrices, as the source has it, by threads.
pub fn race(exp: &mut Experiment) -> Result<()> {
    let stacks = FORMATS.map(|format| Copies::new(exp, format));
    let stacks = stacks.into_iter().collect::<Result<Vec<_>>>()?;
    for threads in exp.thread_counts() {
        let all = by_threads(exp, &stacks, threads)?;
        if threads == 1 {
            judge(exp, &all)?;
        }
    }
    for claim in ["J03", "J04"] {
        if !exp.thread_counts().contains(&1) {
            let why = "the claim is about one thread, which --threads leaves out";
            exp.not_testable(claim, why)?;
        }
    }
    Ok(())
}

/// The best kernel of each stack, on one thread next to the scalar one.
fn by_threads(exp: &mut Experiment, stacks: &[Copies], threads: usize) -> Result<Vec<Best>> {
    exp.progress(format!("stacks, {threads} threads"));
    let pool = &Pool::new(threads)?;
    let mut runs: Vec<(&Copies, &'static Kernel)> = Vec::new();
    for stack in stacks {
        let best = decode::best(stack.format, "stock")?;
        let scalar = kernels_of(stack.format).find(|k| k.isa() == Isa::Scalar && threads == 1);
        runs.extend(scalar.filter(|&k| k != best).map(|k| (stack, k)));
        runs.push((stack, best));
    }
    let name = |format: Format, isa: Isa| format!("{format} {isa}");
    let mut race = exp.race();
    for &(stack, kernel) in &runs {
        let x = stack::random_activations(kernel.form(), stack.cols, 1, exp.flags().seed)?;
        let mut out = vec![0.0; stack.rows];
        race.try_add(name(stack.format, kernel.isa()), move || {
            stack::multiply(pool, kernel, &stack.next(), &x, &mut out)
        });
    }
    let times = race.run()?;
    drop(race);
    let mut best = Vec::new();
    for &(stack, kernel) in &runs {
        let (format, isa) = (stack.format, kernel.isa());
        let row = |claim: &str| {
            let row = Row::new(format.name(), isa.name()).claim(claim);
            row.threads(threads)
                .params([("rows", stack.rows), ("cols", stack.cols)])
                .param("copies", stack.copies())
        };
        let run = name(format, isa);
        let weights = (stack.rows * stack.cols) as f64;
        let time = times.rate(&run, Metric::TimePerWeight, weights);
        let key = exp.row(row("J03").metric(Metric::TimePerWeight, time))?;
        let rate = times.rate(&run, Metric::Bandwidth, stack.bytes() as f64);
        exp.row(row("J03").metric(Metric::Bandwidth, rate))?;
        if isa == Isa::Scalar || threads > 1 {
            continue;
        }
        let scalar = name(format, Isa::Scalar);
        let gain = times.speedup(&run, &scalar);
        let row = row("J04").baseline(scalar).metric(Metric::Speedup, gain);
        best.push(Best {
            format,
            time: time.median,
            rate: rate.median,
            row: key,
            gain,
            gain_row: exp.row(row)?,
        });
    }
    Ok(best)
}

/// The verdicts on one thread.
fn judge(exp: &mut Experiment, all: &[Best]) -> Result<()> {
    let by_time = |a: &&Best, b: &&Best| a.time.total_cmp(&b.time);
    let fast = all.iter().min_by(by_time);
    let slow = all.iter().max_by(by_time);
    match (fast, slow) {
        (Some(fast), Some(slow)) if !exp.quick() => {
            let told = |b: &Best| format!("{} {:.3} ns, {:.1} GB/s", b.format, b.time, b.rate);
            let told: Vec<_> = all.iter().map(told).collect();
            // The source's 0.34 to 0.44 ns are 1.3.
            let reason = format!(
                "{}: {:.1} times from the fastest to the slowest, 1.5 at most",
                told.join("; "),
                slow.time / fast.time
            );
            exp.verdict("J03", slow.time <= 1.5 * fast.time, reason, &slow.row)?;
        }
        (Some(_), _) => exp.not_testable("J03", "a quick run does not read from DRAM")?,
        _ => exp.not_testable("J03", "no vector kernel here")?,
    }
    let quantized: Vec<_> = all.iter().filter(|b| b.format != Format::F32).collect();
    let Some(first) = quantized.first() else {
        return exp.not_testable("J04", "no vector kernel here");
    };
    let told = quantized
        .iter()
        .map(|b| format!("{} {:.1}x", b.format, b.gain.median));
    let told: Vec<_> = told.collect();
    let faster = quantized.iter().all(|b| b.gain.low > 1.0);
    exp.verdict("J04", faster, told.join(", "), &first.gain_row)
}
