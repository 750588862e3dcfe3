//! Where the time of a token and of a pass goes, and the ceiling.

use std::time::Instant;

use anyhow::Result;
use common::lab::{Experiment, Metric, Row, Stat};
use common::runtime::hyper::Hyper;
use shared::replay::{Replay, WAYS};

use crate::token::{BATCH, Bench, Spent};
use crate::{DECODE, Subject};

/// Units a second, of times in seconds.
pub fn per_second(units: f64, seconds: impl Iterator<Item = f64>) -> Stat {
    of(seconds.map(|s| units / s))
}

fn of(samples: impl Iterator<Item = f64>) -> Stat {
    Stat::of(&samples.collect::<Vec<_>>())
}

/// Milliseconds of a token or a pass by part, and how much of the total they add up to.
pub fn breakdown(exp: &mut Experiment, row: &dyn Fn() -> Row, tokens: &[Spent]) -> Result<()> {
    let parts: Vec<Vec<_>> = tokens.iter().map(|t| t.parts().collect()).collect();
    let row = |part: &str| row().param("part", part);
    for (i, (name, _)) in parts[0].iter().enumerate() {
        let times = of(parts.iter().map(|p| p[i].1 * 1e3));
        exp.row(row(&name.replace(' ', "-")).metric(Metric::Time, times))?;
    }
    let total = of(tokens.iter().map(|t| t.total * 1e3));
    exp.row(row("total").metric(Metric::Time, total))?;
    let sums = tokens
        .iter()
        .map(|t| 100.0 * t.parts().map(|p| p.1).sum::<f64>() / t.total);
    let sums = of(sums);
    exp.row(row("sum").metric(Metric::Share, sums))?;
    if (sums.median - 100.0).abs() > 3.0 {
        let sum = sums.median;
        exp.say(&format!("the parts of a token add up to {sum:.1}% of it"));
    }
    Ok(())
}

/// Bytes that a token must move, and the share of the wall at which it does; `walls` are seconds a byte, read after each token.
pub fn ceiling(
    exp: &mut Experiment,
    subject: &Subject,
    tokens: &[Spent],
    walls: &[f64],
) -> Result<()> {
    let products = subject.model.products();
    let matrices = products.iter().flatten();
    let weights: usize = matrices.map(|(_, m)| m.bytes().len()).sum();
    let h: &Hyper = subject.model.hyper();
    // Read and written.
    let state = 2 * h.state_bytes();
    // Halfway through: every position before is read, one is written.
    let position = 2 * 4 * h.kv_heads * h.head_dim * h.full_layers();
    let kv = position * (BATCH + DECODE / 2 + 1);
    let row = || subject.row("decode");
    for (part, bytes) in [("weights", weights), ("state", state), ("kv", kv)] {
        exp.row(row().param("part", part).exact(Metric::Bytes, bytes))?;
    }
    let bytes = (weights + state + kv) as f64;
    let read = per_second(1e-9, walls.iter().copied());
    exp.row(row().param("part", "wall").metric(Metric::Bandwidth, read))?;
    let pairs = tokens.iter().zip(walls);
    let share = of(pairs.map(|(t, wall)| 100.0 * bytes * wall / t.total));
    exp.row(row().baseline("read").metric(Metric::Share, share))?;
    Ok(())
}

/// A prompt of 512 in passes of [`BATCH`], where a pass's time goes, and what its products take alone.
pub fn long_prompt(exp: &mut Experiment, subject: &Subject, bench: &mut Bench) -> Result<()> {
    let passes = bench.prefill(8 * BATCH)?;
    let row = |phase| subject.row(phase).param("batch", 8 * BATCH);
    let seconds = || passes.iter().map(|s| s.total);
    let rate = per_second(BATCH as f64, seconds());
    exp.row(row("prefill").metric(Metric::TokensPerS, rate))?;
    breakdown(exp, &|| row("prefill"), &passes)?;
    let mut replay = Replay::new(subject.model, BATCH, exp.flags().seed)?;
    let macs = replay.weights() as f64 / 1e9;
    exp.row(row("prefill").metric(Metric::MacPerS, rate.scaled(macs)))?;
    let mut alone = vec![];
    for _ in 0..3 {
        let start = Instant::now();
        replay.run(subject.pool, WAYS[3])?;
        alone.push(start.elapsed().as_secs_f64());
    }
    let rate = per_second(BATCH as f64, alone.iter().copied());
    exp.row(row("replay").metric(Metric::MacPerS, rate.scaled(macs)))?;
    let products = Stat::of(&alone).median;
    let share = of(seconds().map(|s| 100.0 * products / s));
    let row = row("prefill").baseline(WAYS[3].0);
    exp.row(row.metric(Metric::Share, share))?;
    Ok(())
}
