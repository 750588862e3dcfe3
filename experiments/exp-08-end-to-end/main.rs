//! A whole model, from the products of one token to prompt and reply: what the runtime adds, and where a token's time goes.

mod token;

use std::cell::RefCell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use common::formats::{Format, Layout};
use common::kernels::{Choice, Kernel};
use common::lab::{self, Experiment, Metric, Row, Stat};
use common::runtime::hyper::Hyper;
use common::runtime::memory;
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use common::runtime::shapes::Shape;
use rand::RngExt;
use shared::replay::{Replay, WAYS};
use shared::weights::{Spec, Weights};
use token::{BATCH, Bench, Spent, Wall};

/// Tokens decoded after a prompt.
const DECODE: usize = 32;

#[derive(clap::Args)]
struct Own {
    /// Random weights of this shape: 27b, 8b or 1b [default: the largest that fits in memory; with --quick the small model].
    #[arg(long, value_name = "SHAPE", conflicts_with = "model")]
    synthetic: Option<Spec>,
}

fn main() -> ExitCode {
    lab::run_with::<Own>("exp-08-end-to-end", &["L21", "L22", "L23"], body)
}

/// Weights in one format, and what rows call them.
struct Case {
    name: String,
    format: Format,
    weights: Weights,
}

fn cases(exp: &mut Experiment, own: &Own) -> Result<Vec<Case>> {
    let mut paths = vec![];
    if exp.flags().model.is_some() {
        paths.push(exp.model()?);
    } else if exp.quick() && own.synthetic.is_none() {
        for name in ["pq2_0", "ptq1_0"] {
            paths.push(exp.repo_file(&format!("models/tern-nano-{name}.gguf"))?);
        }
    }
    let of_file = |path: &std::path::PathBuf| {
        let weights = Weights::open(path)?;
        let tensors = weights.gguf().tensors().iter();
        let largest = tensors
            .filter(|t| t.format.is_ternary())
            .max_by_key(|t| t.bytes);
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Case {
            name: stem
                .trim_end_matches("-pq2_0")
                .trim_end_matches("-ptq1_0")
                .into(),
            format: largest
                .with_context(|| format!("{}: no ternary tensor", path.display()))?
                .format,
            weights,
        })
    };
    if !paths.is_empty() {
        return paths.iter().map(of_file).collect();
    }
    let shape = match own.synthetic {
        Some(spec) => spec.shape,
        None => fitting(exp)?,
    };
    let random = |format| {
        let weights = Weights::Random(Spec { shape, format }.make(exp.flags().seed)?);
        let name = shape.name.to_owned();
        Ok(Case {
            name,
            format,
            weights,
        })
    };
    [Format::Pq2_0, Format::Ptq1_0]
        .into_iter()
        .map(random)
        .collect()
}

/// The largest shape that fits, with a sixth to spare for the embedding, state and buffers.
fn fitting(exp: &Experiment) -> Result<Shape> {
    let free = memory::available_memory().unwrap_or(u64::MAX);
    for shape in Shape::ALL {
        if shape.weight_bytes(Format::Pq2_0)? / 6 * 7 < free {
            return Ok(shape);
        }
        exp.say(&format!(
            "the {} does not fit in {:.1} GB",
            shape.name,
            free as f64 / 1e9
        ));
    }
    Ok(common::runtime::shapes::SHAPE_1B)
}

fn body(exp: &mut Experiment, own: &Own) -> Result<()> {
    let pool = Pool::new(exp.all_threads())?;
    for case in cases(exp, own)? {
        // One model in memory at a time.
        let layouts = ["stock", ""].map(|layout| measure(exp, &pool, &case, layout));
        let [stock, best] = layouts;
        compare(exp, &case, &stock?, &best?, pool.threads())?;
    }
    Ok(())
}

/// What was measured of a model in one layout.
struct Measured {
    kernel: &'static Kernel,
    ids: Vec<u32>,
    prefill: Stat,
    decode: Stat,
}

impl Case {
    /// A row; PQ2_0, the source's format, goes without saying.
    fn row(&self, variant: &str, isa: &str, threads: usize, phase: &str) -> Row {
        let row = Row::new(variant, isa)
            .threads(threads)
            .params([("model", self.name.as_str()), ("phase", phase)]);
        match self.format {
            Format::Pq2_0 => row,
            format => row.param("format", format),
        }
    }
}

fn per_second(units: f64, seconds: impl Iterator<Item = f64>) -> Stat {
    Stat::of(&seconds.map(|s| units / s).collect::<Vec<_>>())
}

fn measure(exp: &mut Experiment, pool: &Pool, case: &Case, layout: &str) -> Result<Measured> {
    let kernel: Choice = if layout.is_empty() {
        Choice::default()
    } else {
        layout.parse()?
    };
    exp.progress(format!("{} {}: loading", case.name, case.format));
    let options = Options {
        kernel,
        size: Some(token::SIZE),
    };
    let start = Instant::now();
    let model = case.weights.load(&options, pool)?;
    let loaded = start.elapsed();
    let kernel = model.kernels().find(|(format, _)| *format == case.format);
    let kernel = kernel.context("a kernel of the format")?.1;
    let buffer = model.buffer().context("the weights were read")?;
    if let Some(given) = buffer.huge_pages_given() {
        exp.huge_pages(given > buffer.len() / 2);
    }
    let what = if layout.is_empty() {
        "repacked"
    } else {
        layout
    };
    exp.kernel_chosen(
        &format!("{}, {what}", case.format),
        &kernel.name(),
        "the best of this CPU",
    );
    let vocabulary = model.vocabulary() as u32;
    let mut rng = exp.rng("prompt");
    let prompt: Vec<u32> = (0..8 * BATCH)
        .map(|_| rng.random_range(0..vocabulary))
        .collect();
    let mut wall = Wall::new(&model, pool)?;
    let mut bench = Bench::new(&model, pool, &prompt)?;

    let (variant, isa, threads) = (kernel.layout().name(), kernel.isa().name(), pool.threads());
    let row = |phase: &str| case.row(variant, isa, threads, phase);
    let load = Stat::of(&[loaded.as_secs_f64() * 1e3]);
    exp.row(row("load").metric(Metric::Time, load))?;

    exp.progress(format!(
        "{} {}: prefill of {BATCH}, {variant}",
        case.name, case.format
    ));
    let start = Instant::now();
    let mut passes = vec![];
    while passes.len() < 3 && start.elapsed() < Duration::from_secs(20) {
        passes.extend(bench.prefill(BATCH)?);
    }
    let prefill = per_second(BATCH as f64, passes.iter().map(|s| s.total));
    let of_batch = || row("prefill").claim("L22").param("batch", BATCH);
    exp.row(of_batch().metric(Metric::TokensPerS, prefill))?;
    exp.progress(format!(
        "{} {}: decode of {DECODE}, {variant}",
        case.name, case.format
    ));
    let mut walls = vec![];
    let (mut ids, mut tokens) = (vec![], vec![]);
    for _ in 0..DECODE {
        let (id, spent) = bench.decode()?;
        ids.push(id);
        tokens.push(spent);
        walls.push(wall.read() / wall.bytes() as f64);
    }
    let decode = per_second(1.0, tokens.iter().map(|s| s.total));
    exp.row(
        row("decode")
            .claim("L22")
            .metric(Metric::TokensPerS, decode),
    )?;
    breakdown(exp, &|| row("decode"), &tokens)?;
    ceiling(exp, &|| row("decode"), &model, &tokens, &walls)?;
    if layout.is_empty() {
        race(exp, case, &model, &mut wall, &mut bench, pool)?;
        exp.progress(format!(
            "{} {}: prefill of 512, {variant}",
            case.name, case.format
        ));
        prompt_of_512(exp, &|phase| row(phase), &model, &mut bench, pool)?;
    }
    Ok(Measured {
        kernel,
        ids,
        prefill,
        decode,
    })
}

/// A long prompt in passes of [`BATCH`], where a pass's time goes, and what its products take alone.
fn prompt_of_512(
    exp: &mut Experiment,
    row: &dyn Fn(&str) -> Row,
    model: &Model,
    bench: &mut Bench,
    pool: &Pool,
) -> Result<()> {
    let passes = bench.prefill(8 * BATCH)?;
    let row = |phase| row(phase).param("batch", 8 * BATCH);
    let seconds: Vec<f64> = passes.iter().map(|s| s.total).collect();
    let rate = per_second(BATCH as f64, seconds.iter().copied());
    exp.row(row("prefill").metric(Metric::TokensPerS, rate))?;
    breakdown(exp, &|| row("prefill"), &passes)?;
    let mut replay = Replay::new(model, BATCH, exp.flags().seed)?;
    let macs = replay.weights() as f64 / 1e9;
    exp.row(row("prefill").metric(Metric::MacPerS, rate.scaled(macs)))?;
    let mut alone = vec![];
    for _ in 0..3 {
        let start = Instant::now();
        replay.run(pool, WAYS[3])?;
        alone.push(start.elapsed().as_secs_f64());
    }
    let rate = per_second(BATCH as f64, alone.iter().copied());
    exp.row(row("replay").metric(Metric::MacPerS, rate.scaled(macs)))?;
    let products = Stat::of(&alone).median;
    let shares: Vec<f64> = seconds.iter().map(|s| 100.0 * products / s).collect();
    let share = row("prefill")
        .baseline(WAYS[3].0)
        .metric(Metric::Share, Stat::of(&shares));
    exp.row(share)?;
    Ok(())
}

/// Milliseconds of a token or a pass by part, and how much of the total they add up to.
fn breakdown(exp: &mut Experiment, row: &dyn Fn() -> Row, tokens: &[Spent]) -> Result<()> {
    let parts = tokens.iter().map(|t| t.parts().collect::<Vec<_>>());
    let parts: Vec<_> = parts.collect();
    for i in 0..parts[0].len() {
        let name = parts[0][i].0.replace(' ', "-");
        let times: Vec<f64> = parts.iter().map(|p| p[i].1 * 1e3).collect();
        exp.row(
            row()
                .param("part", name)
                .metric(Metric::Time, Stat::of(&times)),
        )?;
    }
    let total: Vec<f64> = tokens.iter().map(|t| t.total * 1e3).collect();
    exp.row(
        row()
            .param("part", "total")
            .metric(Metric::Time, Stat::of(&total)),
    )?;
    let sums = tokens
        .iter()
        .map(|t| 100.0 * t.parts().map(|p| p.1).sum::<f64>() / t.total);
    let sums = Stat::of(&sums.collect::<Vec<_>>());
    exp.row(row().param("part", "sum").metric(Metric::Share, sums))?;
    if (sums.median - 100.0).abs() > 3.0 {
        exp.say(&format!(
            "the parts of a token add up to {:.1}% of it",
            sums.median
        ));
    }
    Ok(())
}

/// Bytes that a token must move, and the share of the wall at which it does.
fn ceiling(
    exp: &mut Experiment,
    row: &dyn Fn() -> Row,
    model: &Model,
    tokens: &[Spent],
    walls: &[f64],
) -> Result<()> {
    let products = model.products();
    let weights: usize = products
        .iter()
        .flatten()
        .map(|(_, m)| m.bytes().len())
        .sum();
    let h: &Hyper = model.hyper();
    // Read and written.
    let state = 2 * h.state_bytes();
    // Halfway through: every position before is read, one is written.
    let position = 2 * 4 * h.kv_heads * h.head_dim * h.full_layers();
    let kv = position * (BATCH + DECODE / 2 + 1);
    for (part, bytes) in [("weights", weights), ("state", state), ("kv", kv)] {
        exp.row(row().param("part", part).exact(Metric::Bytes, bytes))?;
    }
    let bytes = (weights + state + kv) as f64;
    let rates: Vec<f64> = walls.iter().map(|s| 1e-9 / s).collect();
    let read = Stat::of(&rates);
    exp.row(row().param("part", "wall").metric(Metric::Bandwidth, read))?;
    let shares = tokens
        .iter()
        .zip(walls)
        .map(|(t, wall)| 100.0 * bytes * wall / t.total);
    let share = Stat::of(&shares.collect::<Vec<_>>());
    exp.row(row().baseline("read").metric(Metric::Share, share))?;
    Ok(())
}

/// The products of a token outside the runtime, in four ways, a token inside it and plain reads, interleaved. L21 and L23.
fn race(
    exp: &mut Experiment,
    case: &Case,
    model: &Model,
    wall: &mut Wall,
    bench: &mut Bench,
    pool: &Pool,
) -> Result<()> {
    let mut replay = Replay::new(model, 1, exp.flags().seed)?;
    let mut results = vec![];
    for way in WAYS {
        replay.run(pool, way)?;
        results.push(replay.results());
    }
    let same = results.windows(2).all(|r| r[0] == r[1]);
    exp.must_hold("every schedule gives the same bits", same);
    drop(results);
    exp.progress(format!(
        "{} {}: {} products",
        case.name,
        case.format,
        replay.products()
    ));
    let (products, bytes, wall_bytes) = (replay.products(), replay.bytes(), wall.bytes());
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

    let kernel = model.kernels().find(|(format, _)| *format == case.format);
    let (isa, threads) = (kernel.context("a kernel")?.1.isa().name(), pool.threads());
    let row = |name: &str| case.row(name, isa, threads, "replay");
    exp.row(row("replay").exact(Metric::Count, products))?;
    let mut keys = vec![];
    for (name, ..) in WAYS {
        let claimed = |row: Row| {
            if name == "dynamic" {
                row.claim("L21").claim("L23")
            } else {
                row.claim("L23")
            }
        };
        exp.row(claimed(row(name)).metric(Metric::Time, times.rate(name, Metric::Time, 1.0)))?;
        let share = times.speedup_per_unit((name, bytes as f64), ("read", wall_bytes as f64));
        exp.row(
            row(name)
                .baseline("read")
                .metric(Metric::Share, share.scaled(100.0)),
        )?;
        if name != "dynamic" {
            let faster = times.speedup(name, "dynamic");
            let row = row(name).claim("L23").baseline(format!("dynamic {isa}"));
            keys.push((faster, exp.row(row.metric(Metric::Speedup, faster))?));
        }
    }
    let best = times.speedup("decode", "fused-shares").scaled(100.0);
    exp.row(
        row("decode")
            .baseline(format!("fused-shares {isa}"))
            .metric(Metric::Share, best),
    )?;

    let inside = inside.into_inner();
    let outside = &times["dynamic"].seconds;
    let inside = &inside[inside.len() - outside.len()..];
    let ratio: Vec<f64> = inside.iter().zip(outside).map(|(i, o)| i / o).collect();
    let ratio = Stat::of(&ratio);
    let l21 = row("decode")
        .claim("L21")
        .baseline(format!("dynamic {isa}"));
    let l21 = exp.row(l21.param("part", "matmul").metric(
        Metric::Speedup,
        Stat {
            median: 1.0 / ratio.median,
            low: 1.0 / ratio.high,
            high: 1.0 / ratio.low,
            n: ratio.n,
        },
    ))?;
    if case.format != Format::Pq2_0 && exp.flags().model.is_none() {
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
    let [(fixed, _), (fused, key), ..] = &keys[..] else {
        return Ok(());
    };
    let reason = format!(
        "static slices {:.3} times as fast as dynamic chunks, fused ones {:.3} times",
        fixed.median, fused.median
    );
    exp.verdict(
        "L23",
        fixed.low > 1.0 && fused.low > 1.0 && fused.median > fixed.median,
        reason,
        key,
    )
}

/// Repacked against stock weights: the same text, and how much faster. L22.
fn compare(
    exp: &mut Experiment,
    case: &Case,
    stock: &Measured,
    best: &Measured,
    threads: usize,
) -> Result<()> {
    ensure!(!stock.ids.is_empty(), "nothing was decoded");
    exp.must_hold(
        format!(
            "{}: stock and repacked weights give the same tokens",
            case.format
        ),
        stock.ids == best.ids,
    );
    if matches!(best.kernel.layout(), Layout::Stock(_)) {
        exp.refused(
            "repacked",
            best.kernel.isa().name(),
            "no repacked layout for this CPU",
        );
    }
    // Not interleaved: intervals of both sides, end against end.
    let ratio = |a: Stat, b: Stat| Stat {
        median: a.median / b.median,
        low: a.low / b.high,
        high: a.high / b.low,
        n: a.n.min(b.n),
    };
    let (variant, isa) = (best.kernel.layout().name(), best.kernel.isa().name());
    let baseline = format!("stock {}", stock.kernel.isa().name());
    let row = |phase| {
        case.row(variant, isa, threads, phase)
            .claim("L22")
            .baseline(&baseline)
    };
    let prefill = ratio(best.prefill, stock.prefill);
    let key = exp.row(
        row("prefill")
            .param("batch", BATCH)
            .metric(Metric::Speedup, prefill),
    )?;
    let decode = ratio(best.decode, stock.decode);
    exp.row(row("decode").metric(Metric::Speedup, decode))?;
    if case.format != Format::Pq2_0 && exp.flags().model.is_none() {
        return Ok(());
    }
    if exp.quick() {
        return exp.not_testable("L22", "a quick run's model stays in the cache");
    }
    let reason = format!(
        "repacked: prefill of {BATCH} {:.2} times as fast (the source: 3.8), decode of {DECODE} {:.2} times (1.5)",
        prefill.median, decode.median
    );
    exp.verdict("L22", prefill.low > 1.0 && decode.low > 1.0, reason, &key)
}
