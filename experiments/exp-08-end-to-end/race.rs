//! The products of a token outside the runtime, in four ways, a token inside it and plain reads, interleaved. Claims L21 and L23.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use anyhow::Result;
use common::lab::{Experiment, Metric, Stat};
use shared::replay::{Replay, WAYS};

use crate::Subject;
use crate::token::{Bench, Wall};

/// Runs the race, and judges it where the claims are about its weights.
pub fn run(
    exp: &mut Experiment,
    subject: &Subject,
    wall: &mut Wall,
    bench: &mut Bench,
) -> Result<()> {
    let Subject {
        case, model, pool, ..
    } = *subject;
    let mut replay = Replay::new(model, 1, exp.flags().seed)?;
    let mut results = vec![];
    for way in WAYS {
        replay.run(pool, way)?;
        results.push(replay.results());
    }
    let same = results.windows(2).all(|r| r[0] == r[1]);
    exp.must_hold("every schedule gives the same bits", same);
    drop(results);
    let (products, bytes, wall_bytes) = (replay.products(), replay.bytes(), wall.bytes());
    case.progress(exp, &format!("{products} products"));
    let replay = RefCell::new(replay);
    let inside = RefCell::new(vec![]);
    let mut race = exp.race();
    for way in WAYS {
        let replay = &replay;
        race.add_timed(way.0, move || {
            let start = Instant::now();
            replay.borrow_mut().run(pool, way)?;
            Ok(start.elapsed())
        });
    }
    race.add_timed("decode", || {
        let spent = bench.decode()?.1;
        inside.borrow_mut().push(spent.matmul());
        Ok(Duration::from_secs_f64(spent.total))
    });
    race.add_timed("read", || Ok(Duration::from_secs_f64(wall.read())));
    let times = race.run()?;
    drop(race);

    let (isa, threads) = (subject.kernel.isa().name(), pool.threads());
    let row = |name: &str| case.row(name, isa, threads, "replay");
    let dynamic = format!("dynamic {isa}");
    exp.row(row("replay").exact(Metric::Count, products))?;
    let mut faster = vec![];
    for (name, ..) in WAYS {
        let claimed = match name {
            "dynamic" => row(name).claim("L21").claim("L23"),
            _ => row(name).claim("L23"),
        };
        exp.row(claimed.metric(Metric::Time, times.rate(name, Metric::Time, 1.0)))?;
        let share = times.speedup_per_unit((name, bytes as f64), ("read", wall_bytes as f64));
        let against = row(name).baseline("read");
        exp.row(against.metric(Metric::Share, share.scaled(100.0)))?;
        if name != "dynamic" {
            let gain = times.speedup(name, "dynamic");
            let row = row(name).claim("L23").baseline(&dynamic);
            faster.push((gain, exp.row(row.metric(Metric::Speedup, gain))?));
        }
    }
    let best = times.speedup("decode", "fused-shares").scaled(100.0);
    let against = row("decode").baseline(format!("fused-shares {isa}"));
    exp.row(against.metric(Metric::Share, best))?;

    let inside = inside.into_inner();
    let outside = &times["dynamic"].seconds;
    let inside = &inside[inside.len() - outside.len()..];
    let ratio: Vec<f64> = inside.iter().zip(outside).map(|(i, o)| i / o).collect();
    let ratio = Stat::of(&ratio);
    let speedup = Stat {
        median: 1.0 / ratio.median,
        low: 1.0 / ratio.high,
        high: 1.0 / ratio.low,
        n: ratio.n,
    };
    let matmul = row("decode").claim("L21").baseline(&dynamic);
    let matmul = matmul.param("part", "matmul");
    let l21 = exp.row(matmul.metric(Metric::Speedup, speedup))?;
    if !case.is_claimed(exp) {
        return Ok(());
    }
    if exp.quick() {
        exp.not_testable("L21", "a quick run's model stays in the cache")?;
        return exp.not_testable("L23", "a quick run's model stays in the cache");
    }
    let reason = format!(
        "products and barriers take {:.2} times as long inside the runtime as replayed ({products} of them; the source: 92 ms to 70); more \
         than 1.05 counts as dearer; no state is copied here",
        ratio.median
    );
    exp.verdict("L21", ratio.low > 1.05, reason, &l21)?;
    let [(fixed, _), (fused, key), ..] = &faster[..] else {
        return Ok(());
    };
    let reason = format!(
        "static slices {:.3} times as fast as dynamic chunks, fused ones {:.3} times",
        fixed.median, fused.median
    );
    let holds = fixed.low > 1.0 && fused.low > 1.0 && fused.median > fixed.median;
    exp.verdict("L23", holds, reason, key)
}
