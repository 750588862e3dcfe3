//! Lookup tables: sums of activations that weights point to, against multiplying and adding. Claims B04 and B05.

mod operations;
mod shapes;
mod speed;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use common::formats::Format;
use common::kernels::lookup::{self, Kernel, Way};
use common::kernels::{self, Choice, Isa};
use common::lab::{self, Experiment};
use common::runtime::stack;
use rand::RngExt;
use shared::contest;
use shared::decode::At;

use operations::Operations;
use speed::Rates;

/// The scale of every weight and token here: a power of two, so that results are exact whatever the order of additions.
const SCALE: f32 = 0.5;

fn main() -> ExitCode {
    lab::run("exp-14-lookup-tables", &["B04", "B05"], |exp| {
        let kernel = *lookup::kernels().last().expect("the scalar reference");
        for way in Way::ALL {
            let why = "the best instruction set here";
            exp.kernel_chosen(way.name(), kernel.isa.name(), why);
        }
        shapes::all(exp)?;
        shapes::overflow(exp)?;
        let ops = operations::count(exp, kernel)?;
        let (from, rows, cols, side, tokens) = match exp.quick() {
            true => ("cache", 512, 1152, 384, 8),
            false => ("dram", 32768, 8192, 4096, 64),
        };
        let one = speed::race(exp, kernel, &At::new(rows, cols, from), 1)?;
        let many = speed::race(exp, kernel, &At::new(side, side, "cache"), tokens)?;
        verdict(exp, kernel, ops, &one, &many)
    })
}

/// Codes with the usual share of zeros.
fn codes(rng: &mut impl RngExt, n: usize) -> Vec<u8> {
    (0..n)
        .map(|_| match rng.random_bool(stack::ZEROS) {
            true => 1,
            false => 2 * u8::from(rng.random::<bool>()),
        })
        .collect()
}

/// Tokens with the extremes among them.
fn bytes(rng: &mut impl RngExt, n: usize) -> Vec<i8> {
    (0..n).map(|_| rng.random_range(-127..=127)).collect()
}

fn zeros(n: usize) -> Vec<AtomicU32> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

fn floats(out: &[AtomicU32]) -> Vec<f32> {
    out.iter()
        .map(|v| f32::from_bits(v.load(Relaxed)))
        .collect()
}

/// Mask-slot with the instruction set of the lookups, and the best there is.
fn rivals(isa: Isa) -> Vec<&'static kernels::Kernel> {
    let of = |name: &str| name.parse::<Choice>()?.kernel(Format::Pq2_0);
    let mut rivals: Vec<_> = [format!("wide-row/{isa}"), "wide-row".into()]
        .iter()
        .filter_map(|name| of(name).ok())
        .collect();
    rivals.dedup();
    rivals
}

/// B04: whether looking up replaces multiplying to advantage.
fn verdict(
    exp: &mut Experiment,
    kernel: Kernel,
    ops: Operations,
    one: &Rates,
    many: &Rates,
) -> Result<()> {
    if kernel.isa == Isa::Scalar {
        return exp.not_testable("B04", "no vector lookups but the scalar reference here");
    }
    let best = one.iter().filter(|r| r.0.starts_with("tl"));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1));
    let rate = |of: &Rates, name: &str| of.iter().find(|r| r.0 == name).map_or(0.0, |r| r.1);
    let multiply = contest::name(Way::I2S.name(), kernel.isa.name());
    let Some((name, found, key)) = best else {
        return exp.not_testable("B04", "nothing was measured");
    };
    ensure!(rate(one, &multiply) > 0.0, "i2_s: no rate");
    let last = one.last().map_or("", |r| &r.0);
    let ops: Vec<String> = ops
        .iter()
        .map(|(name, n)| format!("{name} {n:.1}"))
        .collect();
    let reason = format!(
        "exact without a multiplication; {name} {:.2} times as fast as multiplying (i2_s) for one token and {:.2} for many, {:.2} and {:.2} times {last}; vector operations for 64 weights: {}",
        found / rate(one, &multiply),
        rate(many, name) / rate(many, &multiply),
        found / rate(one, last),
        rate(many, name) / rate(many, last),
        ops.join(", ")
    );
    exp.verdict("B04", *found >= rate(one, &multiply), reason, key)
}
