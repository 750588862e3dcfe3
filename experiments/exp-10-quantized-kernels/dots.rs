//! F32 dot products from the first-level cache, and one product that fma rounds once. Claim J05.

use std::hint::black_box;

use anyhow::Result;
use common::kernels::dots::{self, Dot};
use common::lab::{Experiment, Metric, Row};

use crate::floats;

/// A row of a way to multiply.
pub fn row(way: &Dot, cols: usize) -> Row {
    Row::new("dot", way.isa.name())
        .params([("format", "F32")])
        .params([("cols", cols), ("accumulators", way.accumulators)])
        .params([("multiply", way.multiply), ("tail", way.tail)])
}

/// Its name in a race.
fn name(way: &Dot, cols: usize) -> String {
    let Dot {
        isa,
        accumulators,
        multiply,
        tail,
        ..
    } = way;
    format!("{isa} {accumulators} {multiply} {tail} {cols}")
}

/// J05: every way on whole vectors and on some that are not.
pub fn race(exp: &mut Experiment) -> Result<()> {
    exp.progress("F32 dot products");
    let ways = dots::all();
    let w = floats(&mut exp.rng("w"), 4100);
    let x = floats(&mut exp.rng("x"), 4100);
    let mut race = exp.race();
    for cols in [4096, 4100] {
        for way in &ways {
            let (w, x) = (&w[..cols], &x[..cols]);
            race.add(name(way, cols), move || {
                black_box(way.dot(black_box(w), black_box(x)));
            });
        }
    }
    let times = race.run()?;
    drop(race);
    for cols in [4096, 4100] {
        for way in &ways {
            let time = times.rate(&name(way, cols), Metric::TimePerWeight, cols as f64);
            let row = row(way, cols).claim("J05");
            exp.row(row.metric(Metric::TimePerWeight, time))?;
        }
    }
    let mut faster = true;
    let mut told = String::new();
    let mut key = None;
    let whole = |w: &&Dot| (w.multiply, w.tail) == ("fma", "mask");
    for four in ways.iter().filter(whole).filter(|w| w.accumulators == 4) {
        let same = |w: &&Dot| w.isa == four.isa && w.accumulators == 1;
        let Some(one) = ways.iter().filter(whole).find(same) else {
            continue;
        };
        let gain = times.speedup(&name(four, 4096), &name(one, 4096));
        let row = row(four, 4096).claim("J05");
        let row = row.baseline(format!("one-accumulator {}", four.isa));
        key = Some(exp.row(row.metric(Metric::Speedup, gain))?);
        faster &= gain.low > 1.0;
        told += &format!(
            "four accumulators {:.1}x one on {}; ",
            gain.median, four.isa
        );
    }
    // (1 + 2^-23)^2 = 1 + 2^-22 + 2^-46, and the last term is what a product rounded to f32 loses.
    let a = black_box(1.0 + f32::EPSILON);
    let b = black_box(-1.0 - 2.0 * f32::EPSILON);
    let (fused, apart) = (a.mul_add(a, b), black_box(a * a) + b);
    for (variant, value) in [("fma", fused), ("mul-add", apart)] {
        let row = Row::new(variant, "").claim("J05");
        let row = row.params([("of", "(1 + 2^-23)^2 - (1 + 2^-22)"), ("what", "result")]);
        exp.row(row.exact(Metric::RelativeError, value))?;
    }
    let once = fused == 2f32.powi(-46) && apart == 0.0;
    let Some(key) = key else {
        return exp.not_testable("J05", "no vector instructions here");
    };
    let reason = format!("{told}fma leaves {fused:e}, mul and add {apart}");
    exp.verdict("J05", faster && once, reason, &key)
}
