//! A whole model, from the products of one token to prompt and reply: what the runtime adds, and where a token's time goes.

mod cases;
mod parts;
mod race;
mod side;
mod token;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cases::{Case, Own};
use common::formats::Layout;
use common::kernels::{Choice, Kernel};
use common::lab::{self, Experiment, Metric, Row, Stat};
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use parts::per_second;
use rand::RngExt;
use token::{BATCH, Bench, Wall};

/// Tokens decoded after a prompt.
const DECODE: usize = 32;

fn main() -> ExitCode {
    lab::run_with::<Own>("exp-08-end-to-end", &["L21", "L22", "L23"], |exp, own| {
        let pool = Pool::new(exp.all_threads())?;
        let cases = cases::all(exp, own)?;
        for case in &cases {
            // One model in memory at a time.
            let [stock, best] = LAYOUTS.map(|layout| measure(exp, &pool, case, layout));
            compare(exp, case, &stock?, &best?, pool.threads())?;
        }
        side::by_side(exp, &pool, &cases)
    })
}

/// The layouts of a model that are compared.
const LAYOUTS: [&str; 2] = ["stock", "repacked"];

fn options(layout: &str) -> Result<Options> {
    Ok(Options {
        kernel: match layout {
            "repacked" => Choice::default(),
            name => name.parse()?,
        },
        size: Some(token::SIZE),
    })
}

/// The long prompt, of random tokens.
fn prompt(exp: &Experiment, model: &Model) -> Vec<u32> {
    let mut rng = exp.rng("prompt");
    let vocabulary = model.vocabulary() as u32;
    (0..8 * BATCH)
        .map(|_| rng.random_range(0..vocabulary))
        .collect()
}

/// A model in one layout.
struct Subject<'a> {
    case: &'a Case,
    model: &'a Model,
    kernel: &'static Kernel,
    pool: &'a Pool,
}

impl Subject<'_> {
    fn row(&self, phase: &str) -> Row {
        let (variant, isa) = (self.kernel.layout().name(), self.kernel.isa().name());
        self.case.row(variant, isa, self.pool.threads(), phase)
    }
}

/// What was measured of it.
struct Measured {
    kernel: &'static Kernel,
    ids: Vec<u32>,
    prefill: Stat,
    decode: Stat,
}

fn measure(exp: &mut Experiment, pool: &Pool, case: &Case, layout: &str) -> Result<Measured> {
    case.progress(exp, "loading");
    let start = Instant::now();
    let model = &case.weights.load(&options(layout)?, pool)?;
    let loaded = start.elapsed();
    let kernel = case.kernel(model)?;
    let buffer = model.buffer().context("the weights were read")?;
    if let Some(given) = buffer.huge_pages_given() {
        exp.huge_pages(given > buffer.len() / 2);
    }
    let what = format!("{}, {layout}", case.format);
    exp.kernel_chosen(&what, &kernel.name(), "the best of this CPU");
    let prompt = prompt(exp, model);
    let mut wall = Wall::new(model, pool)?;
    let mut bench = Bench::new(model, pool, &prompt)?;

    let subject = Subject {
        case,
        model,
        kernel,
        pool,
    };
    let variant = kernel.layout().name();
    let row = |phase: &str| subject.row(phase);
    let load = Stat::of(&[loaded.as_secs_f64() * 1e3]);
    exp.row(row("load").metric(Metric::Time, load))?;

    case.progress(exp, &format!("prefill of {BATCH}, {variant}"));
    let start = Instant::now();
    let mut passes = vec![];
    while passes.len() < 3 && start.elapsed() < Duration::from_secs(20) {
        passes.extend(bench.prefill(BATCH)?);
    }
    let prefill = per_second(BATCH as f64, passes.iter().map(|s| s.total));
    let of_batch = row("prefill").claim("L22").param("batch", BATCH);
    exp.row(of_batch.metric(Metric::TokensPerS, prefill))?;

    case.progress(exp, &format!("decode of {DECODE}, {variant}"));
    let (mut ids, mut tokens, mut walls) = (vec![], vec![], vec![]);
    for _ in 0..DECODE {
        let (id, spent) = bench.decode()?;
        ids.push(id);
        tokens.push(spent);
        walls.push(wall.read() / wall.bytes() as f64);
    }
    let decode = per_second(1.0, tokens.iter().map(|s| s.total));
    let claimed = row("decode").claim("L22");
    exp.row(claimed.metric(Metric::TokensPerS, decode))?;
    parts::breakdown(exp, &|| row("decode"), &tokens)?;
    parts::ceiling(exp, &subject, &tokens, &walls)?;
    if layout == "repacked" {
        race::run(exp, &subject, &mut wall, &mut bench)?;
        case.progress(exp, &format!("prefill of 512, {variant}"));
        parts::long_prompt(exp, &subject, &mut bench)?;
    }
    Ok(Measured {
        kernel,
        ids,
        prefill,
        decode,
    })
}

/// Repacked against stock weights: the same text, and how much faster, as far as two models measured one after the other tell.
fn compare(
    exp: &mut Experiment,
    case: &Case,
    stock: &Measured,
    best: &Measured,
    threads: usize,
) -> Result<()> {
    ensure!(!stock.ids.is_empty(), "nothing was decoded");
    let format = case.format;
    let what = format!("{format}: stock and repacked weights give the same tokens");
    exp.must_hold(what, stock.ids == best.ids);
    let (variant, isa) = (best.kernel.layout().name(), best.kernel.isa().name());
    if matches!(best.kernel.layout(), Layout::Stock(_)) {
        exp.refused("repacked", isa, "no repacked layout for this CPU");
    }
    // Not interleaved: intervals of both sides, end against end.
    let ratio = |a: Stat, b: Stat| Stat {
        median: a.median / b.median,
        low: a.low / b.high,
        high: a.high / b.low,
        n: a.n.min(b.n),
    };
    let baseline = format!("stock {}", stock.kernel.isa());
    let row = |phase| {
        let row = case.row(variant, isa, threads, phase).claim("L22");
        row.baseline(&baseline)
    };
    let of_batch = row("prefill").param("batch", BATCH);
    exp.row(of_batch.metric(Metric::Speedup, ratio(best.prefill, stock.prefill)))?;
    exp.row(row("decode").metric(Metric::Speedup, ratio(best.decode, stock.decode)))?;
    Ok(())
}
