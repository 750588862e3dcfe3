//! Batches that are no multiple of the tile: one zero-padded tile against one matvec a column, at widths 1 to 17; and the integer
//! oracle that proves every kernel at such widths. Claims L14 and L15.

use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use common::formats::{Format, Layout};
use common::kernels::{self, Activations, Form, Isa, Kernel, oracle};
use common::lab::{self, Experiment, Key, Metric, Row, Stat};
use common::runtime::memory;
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};
use rand::RngExt;

/// A feed-forward matrix of the 27B, rows x columns; its copies come from DRAM.
const SHAPE: (usize, usize) = (17408, 5120);
/// A matrix that stays in a cache.
const CACHED: (usize, usize) = (2048, 2048);
const WIDTHS: [usize; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17];
const QUICK_WIDTHS: [usize; 5] = [1, 2, 3, 5, 17];

/// Cases of the oracle from the seed, after the source's.
const CASES: usize = 4000;

fn main() -> ExitCode {
    lab::run("exp-05-leftover-padding", &["L14", "L15"], run)
}

fn run(exp: &mut Experiment) -> Result<()> {
    let quick = exp.quick();
    let source = judge(exp, "source", &oracle::source_cases())?;
    let seeded = oracle::random_cases(exp.flags().seed, if quick { 100 } else { CASES });
    judge(exp, "seeded", &seeded)?;
    let (key, exact) = source.context("no kernel that takes Q8_K activations")?;
    let reason = "the 78 cases, with the kernels of the best instruction set";
    exp.verdict("L15", exact, reason, &key)?;

    let kernels = chosen()?;
    for kernel in &kernels {
        let why = "best layout of its instruction set, or the source's";
        exp.kernel_chosen(&format!("pq2_0 on {}", kernel.isa()), &kernel.name(), why);
    }
    let mut leftovers = Vec::new();
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        for from in ["dram", "cache"] {
            let shape = if quick || from == "cache" {
                CACHED
            } else {
                SHAPE
            };
            for kernel in &kernels {
                leftovers.extend(measure(exp, &pool, kernel, shape, from)?);
            }
        }
    }
    // As the source says it: batches of 2 or 3, weights from memory. The worse of the two on the kernel that runs by default.
    let best = kernels::Choice::default().kernel(Format::Pq2_0)?;
    let fits = |l: &&Leftover| (l.kernel, l.from, l.threads) == (best, "dram", exp.all_threads());
    let worst = leftovers
        .iter()
        .filter(fits)
        .min_by(|a, b| a.speedup.low.total_cmp(&b.speedup.low));
    if exp.quick() {
        return exp.not_testable("L14", "a quick run does not read from DRAM");
    }
    match worst {
        Some(l) => exp.verdict(
            "L14",
            l.speedup.low > 1.0,
            "a tile of 4 padded with zeros, at the worse of widths 2 and 3: the interval lies above 1",
            &l.key,
        ),
        None => exp.not_testable("L14", "no kernel with a tile for PQ2_0"),
    }
}

/// Runs the oracle on every kernel; returns the row that says whether the kernels of the best set are exact.
fn judge(exp: &mut Experiment, name: &str, cases: &[oracle::Case]) -> Result<Option<(Key, bool)>> {
    exp.progress(format!("oracle, {} cases: {name}", cases.len()));
    let fits = |k: &&Kernel| oracle::fits(k, cases);
    let outcomes = oracle::run(kernels::available().filter(fits), cases)?;
    let mut best = None;
    for isa in Isa::ALL {
        let of_isa: Vec<_> = outcomes.iter().filter(|o| o.kernel.isa() == isa).collect();
        let Some(most) = of_isa.iter().map(|o| o.cases).max() else {
            continue;
        };
        let exact = of_isa.iter().all(|o| o.failed == 0 && o.integers > 0);
        let row = |variant: &str| {
            Row::new(variant, isa.name())
                .claim("L15")
                .param("cases", name)
        };
        exp.row(row("oracle").exact(Metric::Count, most))?;
        let key = exp.row(row("oracle").exact(Metric::Equal, u8::from(exact)))?;
        best = Some((key, exact));
        for outcome in &of_isa {
            // One kernel in two encodings of its instructions makes one row.
            let same: Vec<_> = of_isa
                .iter()
                .filter(|o| o.kernel == outcome.kernel)
                .collect();
            if std::ptr::eq(*same[0], *outcome) {
                let layout = outcome.kernel.layout();
                let integers: usize = same.iter().map(|o| o.integers).sum();
                let row = row(layout.name()).param("tile", layout.tile_rows());
                exp.row(row.exact(Metric::Count, integers))?;
            }
            let first = outcome.first.as_deref().unwrap_or("exact");
            let what = format!("oracle, {name}: {}: {first}", outcome.kernel.name());
            exp.must_hold(what, outcome.failed == 0 && outcome.integers > 0);
        }
    }
    Ok(best)
}

/// The best kernel of each instruction set, and the source's layout on the best set.
fn chosen() -> Result<Vec<&'static Kernel>> {
    let all = kernels::named(Format::Pq2_0);
    let tiled = |k: &&&Kernel| k.isa() != Isa::Scalar && k.layout().tile_rows() > 1;
    let mut chosen: Vec<&Kernel> = Vec::new();
    for &kernel in all.iter().filter(tiled) {
        match chosen.iter_mut().find(|k| k.isa() == kernel.isa()) {
            Some(of_isa) => *of_isa = kernel,
            None => chosen.push(kernel),
        }
    }
    let source = all
        .iter()
        .rfind(|k| k.layout() == Layout::RowPair && k.isa() != Isa::Scalar);
    chosen.extend(source.filter(|k| !chosen.contains(k)));
    Ok(chosen)
}

/// Times faster than one column after the other, at width 2 or 3 in a padded tile of 4.
struct Leftover {
    kernel: &'static Kernel,
    from: &'static str,
    threads: usize,
    speedup: Stat,
    key: Key,
}

/// The ways to multiply a batch: the activations, and the calls it takes.
const WAYS: [(&str, Option<usize>); 4] = [
    // The library's own choice: the narrowest register tile that holds the batch.
    ("narrow-tile", None),
    ("padded-4", Some(4)),
    ("padded-16", Some(16)),
    ("per-column", Some(1)),
];

fn measure(
    exp: &mut Experiment,
    pool: &Pool,
    kernel: &'static Kernel,
    shape: (usize, usize),
    from: &'static str,
) -> Result<Vec<Leftover>> {
    let ((rows, cols), threads, seed) = (shape, pool.threads(), exp.flags().seed);
    exp.progress(format!(
        "{}: {rows}x{cols} from {from}, {threads} threads",
        kernel.name()
    ));
    let stock = stack::random_stock(Format::Pq2_0, rows, cols, stack::ZEROS, seed)?;
    let memory = memory::available_memory().unwrap_or(4 << 30) / 2;
    let copies = if from == "dram" {
        Stack::copies_for_dram(stock.len(), exp.last_level_cache(), memory)
    } else {
        1
    };
    let weights = RefCell::new(Stack::new(kernel, &stock, rows, cols, copies)?);
    let out = RefCell::new(vec![0f32; rows * 32]);
    let widths = if exp.quick() {
        &QUICK_WIDTHS[..]
    } else {
        &WIDTHS[..]
    };
    let mut race = exp.race();
    race.warm_up(Duration::ZERO).rounds(exp.rounds().min(9));
    let mut same = true;
    let mut rng = exp.rng("activations");
    for &width in widths {
        let mut values: Vec<f32> = (0..cols * width)
            .map(|_| rng.random_range(-1.0..1.0))
            .collect();
        let batch = Activations::of(Form::Q8K, cols, &values)?;
        weights
            .borrow_mut()
            .multiply(pool, &batch, &mut out.borrow_mut())?;
        let expected = out.borrow()[..rows * width].to_vec();
        for (way, tile) in WAYS {
            let calls = if way == "per-column" { width } else { 1 };
            let tokens = tile.map_or(width, |tile| width.next_multiple_of(tile));
            values.resize(cols * tokens, 0.0);
            let batches: Vec<_> = values
                .chunks(cols * tokens / calls)
                .map(|x| Activations::of(Form::Q8K, cols, x))
                .collect::<Result<_>>()?;
            let (weights, out) = (&weights, &out);
            let work = move || {
                let (mut weights, mut out) = (weights.borrow_mut(), out.borrow_mut());
                for (x, out) in batches.iter().zip(out.chunks_mut(rows * tokens / calls)) {
                    weights
                        .multiply(pool, x, out)
                        .expect("a shape that worked before");
                }
            };
            work();
            same &= out.borrow()[..rows * width] == expected;
            race.add(format!("{way}/{width}"), work);
        }
    }
    exp.must_hold(
        format!(
            "{}: a column's result does not depend on its batch, {from}, {threads} threads",
            kernel.name()
        ),
        same,
    );
    let times = race.run()?;

    let bytes = weights.borrow().bytes();
    let mut leftovers = Vec::new();
    for &width in widths {
        for (way, _) in WAYS {
            let name = format!("{way}/{width}");
            let row = |variant: &str| {
                Row::new(variant, kernel.isa().name())
                    .claim("L14")
                    .threads(threads)
                    .params([
                        ("layout", kernel.layout().name().to_owned()),
                        ("rows", rows.to_string()),
                        ("cols", cols.to_string()),
                        ("batch", width.to_string()),
                        ("from", from.to_owned()),
                    ])
            };
            exp.row(row(way).metric(Metric::Time, times.rate(&name, Metric::Time, 1.0)))?;
            // Every call reads all codes and scales once.
            let calls = if way == "per-column" { width } else { 1 };
            exp.row(row(way).exact(Metric::Bytes, calls * bytes))?;
            if way != "per-column" {
                let speedup = times.speedup(&name, &format!("per-column/{width}"));
                let baseline = format!("per-column {}", kernel.isa());
                let key = exp.row(row(way).metric(Metric::Speedup, speedup).baseline(baseline))?;
                if way == "padded-4" && matches!(width, 2 | 3) {
                    leftovers.push(Leftover {
                        kernel,
                        from,
                        threads,
                        speedup,
                        key,
                    });
                }
            }
        }
        // What a batch costs against one column, as a speedup of the one: at most 1.25 for 3 where decode is memory bound.
        let cost = times.speedup("narrow-tile/1", &format!("narrow-tile/{width}"));
        if width > 1 {
            exp.row(
                Row::new("one-column", kernel.isa().name())
                    .metric(Metric::Speedup, cost)
                    .baseline(format!("narrow-tile {}", kernel.isa()))
                    .threads(threads)
                    .params([
                        ("layout", kernel.layout().name().to_owned()),
                        ("rows", rows.to_string()),
                        ("cols", cols.to_string()),
                        ("batch", width.to_string()),
                        ("from", from.to_owned()),
                    ]),
            )?;
        }
    }
    Ok(leftovers)
}
