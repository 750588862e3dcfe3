//! The 1.75-bit format against the stock 2-bit format: do bytes or instructions decide?

use anyhow::Result;
use common::formats::{Format, base3};
use common::kernels::{Choice, Isa, Kernel};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::pool::Pool;
use shared::decode::{self, At, Wall};

fn main() -> std::process::ExitCode {
    lab::run(
        "exp-02-ptq1_0-vs-pq2_0",
        &["L03", "L04", "L05", "L06"],
        |exp| {
            thresholds(exp)?;
            decode::announce(exp, Format::Ptq1_0)?;
            decode::announce(exp, Format::Pq2_0)?;
            for size in if exp.quick() {
                &[2048][..]
            } else {
                &[2048, 4096]
            } {
                race(exp, &At::new(*size, *size, "cache"))?;
            }
            if exp.quick() {
                for claim in ["L04", "L05", "L06"] {
                    exp.not_testable(claim, "a quick run does not read from DRAM")?;
                }
                return Ok(());
            }
            race(exp, &At::new(32768, 8192, "dram"))
        },
    )
}

/// L03: the digit of a base-3 byte from two comparisons, for every byte.
fn thresholds(exp: &mut Experiment) -> Result<()> {
    let by_thresholds = |v: u8| u8::from(v >= 86) + u8::from(v >= 171);
    let equal = (0..=255)
        .filter(|&v| base3::digit(v, 0) == by_thresholds(v))
        .count();
    exp.must_hold("a digit of base 3 is two comparisons", equal == 256);
    let row = Row::new("two-thresholds", "")
        .claim("L03")
        .exact(Metric::Count, equal);
    let key = exp.row(row)?;
    exp.verdict(
        "L03",
        equal == 256,
        format!("equal for {equal} of 256 bytes"),
        &key,
    )
}

/// The scalar loop and the best kernels of both formats, as stored; then both in wide rows.
fn kernels() -> Result<[&'static Kernel; 5]> {
    let scalar: Choice = "ptq1_0/scalar".parse()?;
    Ok([
        scalar.kernel(Format::Ptq1_0)?,
        decode::best(Format::Ptq1_0, "ptq1_0")?,
        decode::best(Format::Pq2_0, "stock")?,
        decode::best(Format::Ptq1_0, "wide-row-b3")?,
        decode::best(Format::Pq2_0, "wide-row")?,
    ])
}

fn race(exp: &mut Experiment, at: &At) -> Result<()> {
    let [scalar, ptq1, pq2, wide_ptq1, wide_pq2] = kernels()?;
    let kernels = [scalar, ptq1, pq2, wide_ptq1, wide_pq2];
    let dram = at.from == "dram";
    let simd = ptq1.isa() != Isa::Scalar;
    let stacks = &mut decode::stacks(exp, if simd { &kernels } else { &kernels[1..] }, at)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = dram.then(|| Wall::new(&pool, exp)).transpose()?;
        let claims = |variant: &str, metric| match (variant, metric) {
            ("ptq1_0", Metric::WeightsPerS) if dram => vec!["L04", "L05"],
            ("stock", Metric::WeightsPerS) if dram => vec!["L05"],
            ("ptq1_0", Metric::Bandwidth | Metric::Share) if dram => vec!["L06"],
            _ => vec![],
        };
        let raced = decode::race(exp, &pool, stacks, wall.as_ref(), at, &claims)?;
        let mut faster = |a: &Kernel, b: &Kernel, claim: Option<&str>| {
            let claim = claim.filter(|_| dram);
            let claims = Vec::from_iter(claim);
            let (stat, key) = decode::faster(exp, &raced, at, (a, b), threads, &claims)?;
            match claim.filter(|_| threads == exp.all_threads()) {
                None => Ok(()),
                Some(claim) => {
                    let (low, high) = (stat.low, stat.high);
                    let reason =
                        format!("{low:.2} to {high:.2} times as fast; from DRAM, all threads");
                    exp.verdict(claim, low > 1.0, reason, &key)
                }
            }
        };
        if simd {
            faster(ptq1, scalar, Some("L04"))?;
        }
        faster(pq2, ptq1, Some("L05"))?;
        faster(wide_ptq1, ptq1, None)?;
        faster(wide_ptq1, wide_pq2, None)?;
        let ptq1_at = usize::from(simd);
        if let Some((share, key)) = raced.shares.get(ptq1_at)
            && threads == exp.all_threads()
        {
            let reason =
                format!("{share:.0}% of what plain reads reach; idle is taken as below 50%");
            exp.verdict("L06", *share < 50.0, reason, key)?;
        }
        if !simd && dram {
            exp.not_testable("L04", "this CPU has no SIMD kernel for ptq1_0")?;
        }
    }
    Ok(())
}
