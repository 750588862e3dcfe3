//! Prefill on repacked layouts: multiply-accumulates a second by layout, instruction set and batch, as a share of the multiply
//! peak that a register-only loop of the same instruction reaches in the same rounds. Claims L12 and L13.

use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use common::formats::{Format, Layout};
use common::kernels::{self, Form, Isa, Kernel, peak};
use common::lab::{self, Experiment, Key, Metric, Row, Stat, Times};
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};

/// The feed-forward matrices of the 27B, rows x columns.
const SHAPES: [(usize, usize); 2] = [(17408, 5120), (5120, 17408)];
const QUICK_SHAPES: [(usize, usize); 2] = [(1088, 512), (512, 1024)];
const BATCHES: [usize; 5] = [4, 8, 16, 64, 256];

fn main() -> ExitCode {
    lab::run("exp-04-row-pair-prefill", &["L12", "L13"], run)
}

/// The decode kernel run once a token: what L13 compares the matrix kernel with.
const PER_TOKEN: &str = "row-pair-per-token";

fn run(exp: &mut Experiment) -> Result<()> {
    let kernels: Vec<&Kernel> = [Format::Pq2_0, Format::Ptq1_0]
        .into_iter()
        .flat_map(kernels::named)
        .filter(|k| k.isa() != Isa::Scalar)
        .collect();
    for format in [Format::Pq2_0, Format::Ptq1_0] {
        let best = kernels::Choice::default().kernel(format)?;
        exp.kernel_chosen(
            format.name(),
            &best.name(),
            "the fastest this CPU runs; all are measured here",
        );
    }
    let batches = if exp.quick() {
        &[4, 64][..]
    } else {
        &BATCHES[..]
    };
    let shapes = if exp.quick() { QUICK_SHAPES } else { SHAPES };
    let mut ratios = Vec::new();
    for threads in exp.thread_counts() {
        for shape in shapes {
            for &batch in batches {
                ratios.extend(measure(exp, &kernels, shape, batch, threads)?);
            }
        }
    }
    verdicts(exp, &ratios, shapes)
}

/// A ratio that a claim is about, and the row that has it.
struct Ratio {
    claim: &'static str,
    isa: Isa,
    shape: (usize, usize),
    batch: usize,
    threads: usize,
    value: Stat,
    key: Key,
}

/// On the best instruction set with all threads, at 64 tokens, on the shape where the source measured.
fn verdicts(
    exp: &mut Experiment,
    ratios: &[Ratio],
    [wide, tall]: [(usize, usize); 2],
) -> Result<()> {
    let threads = exp.all_threads();
    let find = |claim: &str, shape| {
        let fits =
            |r: &&Ratio| (r.claim, r.shape, r.batch, r.threads) == (claim, shape, 64, threads);
        ratios.iter().filter(fits).max_by_key(|r| r.isa)
    };
    match find("L12", wide) {
        Some(r) if r.isa == Isa::I8mm => {
            exp.verdict("L12", r.value.low > 1.0, "row-pair against slot16, 64 tokens: the interval lies above 1", &r.key)?;
        }
        Some(r) => exp.not_testable(
            "L12",
            format!("no 2x8 matrix instruction; with {} dots row-pair does {:.2} times the work of slot16", r.isa, r.value.median),
        )?,
        None => exp.not_testable("L12", "no SIMD kernel for both layouts")?,
    }
    match find("L13", tall) {
        Some(r) => exp.verdict(
            "L13",
            r.value.low > 1.0,
            "row-pair, 64 tokens at once against one at a time",
            &r.key,
        ),
        None => exp.not_testable("L13", "no SIMD kernel for row-pair"),
    }
}

/// One race: every kernel on one shape and batch, and the peak of every instruction set.
fn measure(
    exp: &mut Experiment,
    kernels: &[&'static Kernel],
    shape: (usize, usize),
    batch: usize,
    threads: usize,
) -> Result<Vec<Ratio>> {
    let (rows, cols) = shape;
    exp.progress(format!("{rows}x{cols}, {batch} tokens, {threads} threads"));
    let pool = Pool::new(threads)?;
    let seed = exp.flags().seed;
    let x = stack::random_activations(Form::Q8K, cols, batch, seed)?;
    let one = stack::random_activations(Form::Q8K, cols, 1, seed)?;
    let out = RefCell::new(vec![0f32; rows * batch]);
    let mut stacks = Vec::new();
    let mut same = true;
    let mut bits: Option<Vec<f32>> = None;
    for format in [Format::Pq2_0, Format::Ptq1_0] {
        let stock = stack::random_stock(format, rows, cols, stack::ZEROS, seed)?;
        for kernel in kernels.iter().filter(|k| k.takes(format, cols)) {
            // One row at a time shares nothing between tokens: at 256 it does what it does at 64, and takes minutes.
            if batch > 64 && kernel.layout().tile_rows() == 1 {
                continue;
            }
            let mut weights = Stack::new(kernel, &stock, rows, cols, 1)?;
            weights.multiply(&pool, &x, &mut out.borrow_mut())?;
            same &= *bits.get_or_insert_with(|| out.borrow().clone()) == *out.borrow();
            stacks.push(RefCell::new(weights));
        }
    }
    exp.must_hold(
        format!(
            "every kernel gives the same bits: {rows}x{cols}, {batch} tokens, {threads} threads"
        ),
        same,
    );

    let mut race = exp.race();
    // The slowest of these take a second a call: fewer rounds and no long warm-up keep the run within minutes.
    let most = match batch {
        65.. => 3,
        64 => 5,
        _ => 7,
    };
    race.warm_up(Duration::ZERO).rounds(exp.rounds().min(most));
    for weights in &stacks {
        let kernel = weights.borrow().kernel();
        let (pool, x, out) = (&pool, &x, &out);
        race.add(kernel.name(), move || {
            weights
                .borrow_mut()
                .multiply(pool, x, &mut out.borrow_mut())
                .expect("a shape that worked before");
        });
        if kernel.layout() == Layout::RowPair && batch == 64 {
            let one = &one;
            race.add(format!("{PER_TOKEN}/{}", kernel.isa()), move || {
                for out in out.borrow_mut().chunks_exact_mut(rows) {
                    weights
                        .borrow_mut()
                        .multiply(pool, one, out)
                        .expect("a shape that worked before");
                }
            });
        }
    }
    let isas: Vec<Isa> = Isa::ALL
        .into_iter()
        .filter(|&isa| peak::run(isa, 1).is_some())
        .collect();
    const STEPS: usize = 200_000;
    for &isa in &isas {
        let pool = &pool;
        race.add(format!("peak/{isa}"), move || {
            pool.run(|_| {
                peak::run(isa, STEPS);
            });
        });
    }
    let times = race.run()?;

    let params = |row: Row| {
        row.threads(threads)
            .params([("rows", rows), ("cols", cols), ("batch", batch)])
    };
    let macs = (rows * cols * batch) as f64;
    let peak_macs = |isa: Isa| peak::run(isa, STEPS).unwrap_or(0) as f64 * threads as f64;
    for &isa in &isas {
        let rate = times.rate(&format!("peak/{isa}"), Metric::MacPerS, peak_macs(isa));
        exp.row(params(
            Row::new("multiply-peak", isa.name()).metric(Metric::MacPerS, rate),
        ))?;
    }
    for name in times.series.iter().map(|s| s.name.as_str()) {
        let (variant, isa) = name.split_once('/').expect("variant/isa");
        if variant == "peak" {
            continue;
        }
        let rate = times.rate(name, Metric::MacPerS, macs);
        let claims: &[&str] = match variant {
            "slot16" | "row-pair" => &["L12", "L13"],
            _ if variant.ends_with("-per-token") => &["L13"],
            _ => &[],
        };
        let row = Row::new(variant, isa).metric(Metric::MacPerS, rate);
        exp.row(params(
            claims.iter().fold(row, |row, claim| row.claim(*claim)),
        ))?;
        if let Some(&of) = isas.iter().find(|i| i.name() == isa) {
            let share = times
                .speedup_per_unit((name, macs), (&format!("peak/{of}"), peak_macs(of)))
                .scaled(100.0);
            exp.row(params(
                Row::new(variant, isa)
                    .metric(Metric::Share, share)
                    .baseline(format!("multiply-peak {isa}")),
            ))?;
        }
        if variant != "stock"
            && times
                .series
                .iter()
                .any(|s| s.name == format!("stock/{isa}"))
        {
            speedup(exp, &times, (variant, "stock"), isa, "", &params)?;
        }
    }
    let mut ratios = Vec::new();
    for &isa in &isas {
        for (pair, claim) in [
            (("row-pair", "slot16"), "L12"),
            (("row-pair", PER_TOKEN), "L13"),
        ] {
            let runs = |v: &str| times.series.iter().any(|s| s.name == format!("{v}/{isa}"));
            if runs(pair.0) && runs(pair.1) {
                let (key, value) = speedup(exp, &times, pair, isa.name(), claim, &params)?;
                ratios.push(Ratio {
                    claim,
                    isa,
                    shape,
                    batch,
                    threads,
                    value,
                    key,
                });
            }
        }
    }
    Ok(ratios)
}

fn speedup(
    exp: &mut Experiment,
    times: &Times,
    (variant, baseline): (&str, &str),
    isa: &str,
    claim: &str,
    params: &impl Fn(Row) -> Row,
) -> Result<(Key, Stat)> {
    let ratio = times.speedup(&format!("{variant}/{isa}"), &format!("{baseline}/{isa}"));
    let row = Row::new(variant, isa)
        .claim(claim)
        .metric(Metric::Speedup, ratio)
        .baseline(format!("{baseline} {isa}"));
    Ok((exp.row(params(row))?, ratio))
}
