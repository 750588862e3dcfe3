//! Our kernels and llama.cpp's on the same weights, threads and shapes, interleaved in one process.

mod model;
mod synthetic;

use std::cell::RefCell;
use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::Format;
use common::lab::{self, Experiment, Metric, Race, Row};
use common::runtime::bandwidth::{self, Reader};
use common::runtime::pool::Pool;
use peers::ggml::{self, Cpu, Product};
use peers::matrix::{self, Ours, Ternary};
use rand::Rng;

/// What ggml multiplies; the weights are the same ternary matrix in each.
const THEIRS: [Format; 5] = [
    Format::Tq2_0,
    Format::Tq1_0,
    Format::Q4_0,
    Format::Q8_0,
    Format::Q2_0,
];
/// All but the last, which is a scalar loop on x86.
const FAST: &[Format] = THEIRS.split_at(4).0;
const SCALAR: &[Format] = THEIRS.split_at(4).1;
/// What we multiply.
const OURS: [Format; 3] = [Format::Pq2_0, Format::Ptq1_0, Format::Tq2_0];

/// Rows that are compared with the product in f64.
const CHECKED_ROWS: usize = 64;
/// Eight-bit activations are off by at most 1/2 step of 1/127 of the largest in a block, which for normal activations puts the
/// largest of some thousand errors near 3% of the RMS of the products.
const ROUNDING: f64 = 0.06;

struct Case {
    rows: usize,
    cols: usize,
    tokens: usize,
    from: &'static str,
    /// Products in a timed call, so that starting a graph does not count.
    repeat: usize,
    /// ggml's formats that take part.
    theirs: &'static [Format],
}

fn cases(exp: &Experiment) -> Vec<Case> {
    let case = |rows, cols, tokens, from, repeat, theirs| Case {
        rows,
        cols,
        tokens,
        from,
        repeat,
        theirs,
    };
    if exp.quick() {
        return vec![
            case(256, 1024, 1, "cache", 4, &THEIRS[..]),
            case(256, 512, 64, "", 1, FAST),
            case(64, 512, 64, "", 1, SCALAR),
        ];
    }
    // Eight times the largest cache at TQ2_0's 2.06 bits, within 2 GB.
    let bytes = (8 * exp.last_level_cache()).clamp(256 << 20, 2 << 30) as usize;
    let rows = (bytes * 8 / 2 / 8192).next_multiple_of(1024);
    vec![
        case(2048, 2048, 1, "cache", 16, &THEIRS[..]),
        case(rows, 8192, 1, "dram", 1, &THEIRS[..2]),
        case(17408, 5120, 64, "", 1, FAST),
        // Seconds a call for the large matrix.
        case(2048, 5120, 64, "", 1, SCALAR),
    ]
}

fn main() -> ExitCode {
    lab::run("exp-16-peers", &[], |exp| {
        ggml::check_build()?;
        for case in cases(exp) {
            let mut rng = exp.rng("weights");
            let w = Ternary::random(case.rows, case.cols, &mut rng);
            let mut rng = exp.rng("activations");
            let x: Vec<f32> = (0..case.tokens * case.cols)
                .map(|_| normal(&mut rng))
                .collect();
            for threads in exp.thread_counts() {
                compare(exp, &case, &w, &x, threads)?;
            }
        }
        let folder = tempfile::tempdir().context("a folder for models")?;
        model::compare(exp, folder.path())?;
        synthetic::compare(exp, folder.path())
    })
}

/// Nearly normal: the sum of twelve uniform numbers.
fn normal(rng: &mut impl Rng) -> f32 {
    (0..12)
        .map(|_| rng.next_u32() as f32 / u32::MAX as f32)
        .sum::<f32>()
        - 6.0
}

fn compare(
    exp: &mut Experiment,
    case: &Case,
    w: &Ternary,
    x: &[f32],
    threads: usize,
) -> Result<()> {
    let shape = format!(
        "{}x{}, {} columns, {threads} threads",
        case.rows, case.cols, case.tokens
    );
    exp.progress(format!("packing {shape}"));
    let checked = CHECKED_ROWS.min(case.rows);
    let exact = w.exact(x, checked)?;
    let cpu = Cpu::new(threads)?;
    let pool = Pool::new(threads)?;

    let mut theirs = Vec::new();
    for &format in case.theirs {
        let mut product = Product::new(
            &cpu,
            format,
            (case.rows, case.cols),
            case.tokens,
            case.repeat,
            &w.pack(format)?,
        )?;
        product.set(x)?;
        product.run()?;
        let error = matrix::error(&product.output(), case.rows, &exact, checked)?;
        let name = format!("ggml-{format}");
        exp.kernel_chosen(&name, product.buffer(), "ggml's buffer type");
        theirs.push((name, RefCell::new(product), error));
    }
    let mut ours = Vec::new();
    for format in OURS {
        let mut product = match Ours::new(w, format, x) {
            Ok(product) => product,
            Err(why) => {
                exp.refused(format.name(), "", format!("{why:#}"));
                continue;
            }
        };
        product.run(&pool)?;
        exp.kernel_chosen(format.name(), &product.kernel().name(), "best on this CPU");
        let error = matrix::error(&product.out, case.rows, &exact, checked)?;
        let name = format!("{}-{format}", product.kernel().layout().name());
        ours.push((
            name,
            product.kernel().isa().name(),
            RefCell::new(product),
            error,
        ));
    }

    let wall = match case.from {
        "dram" => Some(bandwidth::buffer(
            &pool,
            bandwidth::dram_set(exp.last_level_cache()) / 2,
        )?),
        _ => None,
    };
    exp.progress(shape);
    let mut race = exp.race();
    for (name, product, _) in &theirs {
        race.add(name, || product.borrow_mut().run().expect("ran before"));
    }
    for (name, _, product, _) in &ours {
        race.add(name, || {
            (0..case.repeat).for_each(|_| product.borrow_mut().run(&pool).expect("ran before"))
        });
    }
    if let Some(bytes) = &wall {
        let (reader, _) = Reader::fastest(&pool, bytes, 2);
        let pool = &pool;
        race.add("read", move || {
            std::hint::black_box(reader.read(pool, bytes));
        });
    }
    let times = Race::run(&mut race)?;
    drop(race);

    let names = theirs.iter().zip(case.theirs);
    let names = names.map(|((name, _, error), format)| (name, "", *error, *format));
    let names = names.chain(ours.iter().map(|(name, isa, product, error)| {
        let format = product.borrow().kernel().layout().source();
        (name, *isa, *error, format)
    }));
    let params = |row: Row| {
        let row = row.threads(threads).params([
            ("rows", case.rows),
            ("cols", case.cols),
            ("batch", case.tokens),
        ]);
        if case.from.is_empty() {
            row
        } else {
            row.param("from", case.from)
        }
    };
    let (metric, units) = match case.tokens {
        1 => (Metric::WeightsPerS, 1.0),
        tokens => (Metric::MacPerS, tokens as f64),
    };
    let units = units * (case.rows * case.cols * case.repeat) as f64;
    for (name, isa, error, format) in names {
        exp.row(params(
            Row::new(name, isa).metric(metric, times.rate(name, metric, units)),
        ))?;
        if let Some(wall) = &wall {
            let bytes = case.repeat * format.matrix_bytes(case.rows, case.cols)?;
            let share = times.speedup_per_unit((name, bytes as f64), ("read", wall.len() as f64));
            let row = Row::new(name, isa).metric(Metric::Share, share.scaled(100.0));
            exp.row(params(row.baseline("read")))?;
        }
        exp.row(params(
            Row::new(name, isa).exact(Metric::RelativeError, error),
        ))?;
        exp.must_hold(
            format!(
                "{name} agrees with the product in f64 within the rounding of 8-bit activations"
            ),
            error < ROUNDING,
        );
    }
    if let Some(wall) = &wall {
        let rate = times.rate("read", Metric::Bandwidth, wall.len() as f64);
        exp.row(params(Row::new("read", "").metric(Metric::Bandwidth, rate)))?;
    }
    for (name, isa, ..) in &ours {
        for (peer, ..) in &theirs {
            exp.row(params(
                Row::new(name, *isa)
                    .metric(Metric::Speedup, times.speedup(name, peer))
                    .baseline(peer),
            ))?;
        }
    }
    Ok(())
}
