//! Traps around a kernel: threads started in the timed loop, cores that are not one's own, mapped files.

mod busy;
mod pages;

use std::cell::RefCell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common::formats::Format;
use common::lab::{self, Experiment, Key, Metric, Row, Stat, Times};
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use common::runtime::sampler;
use common::runtime::session::{Kind, Session, Size};
use common::runtime::shapes::SHAPE_1B;
use common::runtime::stack;
use shared::decode::{self, At};
use shared::replay::{Replay, WAYS};
use shared::weights::{Spec, Weights};

const NAME: &str = "exp-09-threads-and-pages";

fn main() -> ExitCode {
    if busy::is_asked() {
        return busy::spin();
    }
    lab::run(NAME, &["L24", "L25", "L26"], |exp| {
        decode::announce(exp, Format::Pq2_0)?;
        spawned(exp)?;
        preempted(exp)?;
        pages::embedding(exp)
    })
}

/// `--model`, or the small model with `--quick`, or a synthetic 1b; and its name.
fn weights(exp: &mut Experiment, format: Format) -> Result<(String, Weights)> {
    let path = match &exp.flags().model {
        Some(_) => exp.model()?,
        None if exp.quick() => exp.repo_file(&format!("models/tern-nano-{format}.gguf"))?,
        None => {
            let shape = SHAPE_1B;
            let made = Spec { shape, format }.make(exp.flags().seed)?;
            return Ok((shape.name.into(), Weights::Random(made)));
        }
    };
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok((name.into_owned(), Weights::open(&path)?))
}

/// L24: the same product on a pool that stands, and on threads that are started for it and joined.
fn spawned(exp: &mut Experiment) -> Result<()> {
    let threads = exp.all_threads();
    let pool = Pool::new(threads)?;
    let places = if exp.quick() {
        vec![At::new(2048, 2048, "cache")]
    } else {
        vec![At::new(5120, 5120, "cache"), At::new(32768, 8192, "dram")]
    };
    let kernel = *decode::kernels_of(Format::Pq2_0, &["wide-row", "row-pair", "stock"])
        .last()
        .context("no kernel but the scalar reference")?;
    for at in &places {
        let stacks = decode::stacks(exp, &[kernel], at)?;
        let stack = RefCell::new(stacks.into_iter().next().context("one stack")?);
        let x = stack::random_activations(kernel.form(), at.cols, 1, exp.flags().seed)?;
        let out = RefCell::new(vec![0f32; at.rows]);
        let multiply = |pool: &Pool| {
            let (stack, out) = (&mut *stack.borrow_mut(), &mut *out.borrow_mut());
            stack.multiply(pool, &x, out)
        };
        exp.progress(format!("{} x {} from {}", at.rows, at.cols, at.from));
        let mut race = exp.race();
        race.try_add("pool", || multiply(&pool));
        race.try_add("spawn", || multiply(&Pool::new(threads)?));
        let times = race.run()?;
        drop(race);
        let isa = kernel.isa().name();
        let weights = (at.rows * at.cols) as f64;
        for name in ["spawn", "pool"] {
            let rate = times.rate(name, Metric::WeightsPerS, weights);
            exp.row(
                at.row(name, isa, threads)
                    .claim("L24")
                    .metric(Metric::WeightsPerS, rate),
            )?;
        }
        let speedup = times.speedup("pool", "spawn");
        let row = at
            .row("pool", isa, threads)
            .claim("L24")
            .baseline(format!("spawn {isa}"));
        let key = exp.row(row.metric(Metric::Speedup, speedup))?;
        if at.from == "dram" || exp.quick() {
            let reason = format!(
                "{} x {}: {:.3} times as fast on a standing pool (the source: 1.39 with 8 threads)",
                at.rows, at.cols, speedup.median
            );
            exp.verdict("L24", speedup.low > 1.0, reason, &key)?;
        }
    }
    Ok(())
}

/// A token's time, and what of it went to products and to waiting at barriers, seconds.
#[derive(Clone, Copy)]
struct Spent {
    total: f64,
    matmul: f64,
    barriers: f64,
}

/// Decodes some tokens from an empty state.
fn tokens(session: &mut Session, n: usize) -> Result<Spent> {
    session.reset();
    session.advance(&[1])?;
    session.profile(true);
    let start = Instant::now();
    for _ in 0..n {
        let id = sampler::greedy(session.last_logits()?);
        session.advance(&[id])?;
    }
    let total = start.elapsed().as_secs_f64();
    let profile = session.profile(false);
    Ok(Spent {
        total,
        matmul: profile.seconds(Kind::Matmul),
        barriers: profile.seconds(Kind::Barrier),
    })
}

/// L25: decode on cores that another process wants too, at normal and at raised priority; static slices beside it, which wait for
/// every thread at every barrier, and twice as many threads as cores.
fn preempted(exp: &mut Experiment) -> Result<()> {
    let (name, weights) = weights(exp, Format::Ptq1_0)?;
    let threads = exp.all_threads();
    let (pool, crowd) = (Pool::new(threads)?, Pool::new(2 * threads)?);
    let size = Size {
        context: 64,
        batch: 1,
        proposals: 0,
    };
    let options = Options {
        size: Some(size),
        ..Options::default()
    };
    exp.progress(format!("{name}: loading"));
    let model = weights.load(&options, &pool)?;
    let bench = Bench {
        n: if exp.quick() { 2 } else { 8 },
        session: RefCell::new(Session::new(&model, &pool, size)?),
        crowd: RefCell::new(Session::new(&model, &crowd, size)?),
        replay: RefCell::new(Replay::new(&model, 1, exp.flags().seed)?),
        pool: &pool,
        can_raise: busy::raise(&pool).and(busy::restore(&pool)).err(),
        name,
        model: &model,
    };
    bench.run(exp, "none")?;
    let neighbour = busy::Neighbour::start()?;
    let [normal, raised] = bench.run(exp, "busy-process")?;
    drop(neighbour);
    let Some((speedup, key, barriers)) = raised else {
        let why = bench.can_raise.unwrap_or_default();
        return exp.not_testable(
            "L25",
            format!("the system refuses a raised priority: {why}"),
        );
    };
    let reason = format!(
        "beside a busy process: {:.2} times as fast at raised priority (the source: 1.58); {:.0}% of a token at barriers, {barriers:.0}% when raised",
        speedup.median,
        normal.map_or(0.0, |n| n.2),
    );
    exp.verdict("L25", speedup.low > 1.0, reason, &key)
}

/// A speedup, its row, and the share of time at barriers.
type Raised = Option<(Stat, Key, f64)>;

struct Bench<'a> {
    name: String,
    n: usize,
    model: &'a Model,
    pool: &'a Pool,
    session: RefCell<Session<'a>>,
    crowd: RefCell<Session<'a>>,
    replay: RefCell<Replay<'a>>,
    /// Why priorities cannot be raised here.
    can_raise: Option<String>,
}

impl Bench<'_> {
    fn row(&self, variant: &str, threads: usize, load: &str) -> Row {
        let isa = self
            .model
            .kernels()
            .last()
            .map_or("", |(_, k)| k.isa().name());
        Row::new(variant, isa)
            .threads(threads)
            .params([("model", self.name.as_str()), ("load", load)])
    }

    /// Every variant beside the same load; gives normal and raised priority.
    fn run(&self, exp: &mut Experiment, load: &str) -> Result<[Raised; 2]> {
        exp.progress(format!("{}: decode, load {load}", self.name));
        let spent = RefCell::new([vec![], vec![], vec![]]);
        let decode = |which: usize, session: &RefCell<Session>| -> Result<Duration> {
            let s = tokens(&mut session.borrow_mut(), self.n)?;
            spent.borrow_mut()[which].push(s);
            Ok(Duration::from_secs_f64(s.total))
        };
        let replay = |i: usize| -> Result<Duration> {
            let start = Instant::now();
            self.replay.borrow_mut().run(self.pool, WAYS[i])?;
            Ok(start.elapsed())
        };
        let mut race = exp.race();
        race.add_timed("normal-priority", || decode(0, &self.session));
        if self.can_raise.is_none() {
            race.add_timed("raised-priority", || {
                busy::raise(self.pool).map_err(anyhow::Error::msg)?;
                let time = decode(1, &self.session);
                busy::restore(self.pool).map_err(anyhow::Error::msg)?;
                time
            });
        }
        race.add_timed("twice-the-threads", || decode(2, &self.crowd));
        race.add_timed("static", || replay(2));
        race.add_timed("shares", || replay(3));
        let times = race.run()?;
        drop(race);
        let spent = spent.into_inner();
        let threads = self.pool.threads();
        let shares = [
            ("normal-priority", threads),
            ("raised-priority", threads),
            ("twice-the-threads", 2 * threads),
        ];
        let mut barriers = [0.0; 3];
        for (i, (name, threads)) in shares.into_iter().enumerate() {
            if spent[i].is_empty() {
                continue;
            }
            barriers[i] = self.decoded(exp, &times, name, threads, load, &spent[i])?;
        }
        for name in ["static", "shares"] {
            let row = self
                .row(name, threads, load)
                .claim("L25")
                .param("phase", "replay");
            exp.row(row.metric(Metric::Time, times.rate(name, Metric::Time, 1.0)))?;
        }
        let against = |variant: &str, baseline: &str, phase: &str| {
            let crowd = variant == "twice-the-threads";
            let threads = if crowd { 2 * threads } else { threads };
            let row = self
                .row(variant, threads, load)
                .claim("L25")
                .param("phase", phase);
            let isa = self
                .model
                .kernels()
                .last()
                .map_or("", |(_, k)| k.isa().name());
            let speedup = times.speedup(variant, baseline);
            (
                speedup,
                row.baseline(format!("{baseline} {isa}"))
                    .metric(Metric::Speedup, speedup),
            )
        };
        exp.row(against("shares", "static", "replay").1)?;
        let (speedup, row) = against("twice-the-threads", "normal-priority", "decode");
        let key = exp.row(row)?;
        let normal = Some((speedup, key, barriers[0]));
        if self.can_raise.is_some() {
            return Ok([normal, None]);
        }
        let (speedup, row) = against("raised-priority", "normal-priority", "decode");
        let key = exp.row(row)?;
        Ok([normal, Some((speedup, key, barriers[1]))])
    }

    /// Rows of a variant that decodes; gives the share of barriers.
    fn decoded(
        &self,
        exp: &mut Experiment,
        times: &Times,
        name: &str,
        threads: usize,
        load: &str,
        spent: &[Spent],
    ) -> Result<f64> {
        // The last samples are those of the race; those before warmed up.
        let spent = &spent[spent.len() - times[name].seconds.len()..];
        let row = || {
            self.row(name, threads, load)
                .claim("L25")
                .param("phase", "decode")
        };
        let rate = times.rate(name, Metric::TokensPerS, self.n as f64);
        exp.row(row().metric(Metric::TokensPerS, rate))?;
        let share = |f: fn(&Spent) -> f64| {
            let shares: Vec<f64> = spent.iter().map(|s| 100.0 * f(s) / s.total).collect();
            Stat::of(&shares)
        };
        let (matmul, barriers) = (share(|s| s.matmul), share(|s| s.barriers));
        exp.row(row().param("part", "matmul").metric(Metric::Share, matmul))?;
        exp.row(
            row()
                .param("part", "barriers")
                .metric(Metric::Share, barriers),
        )?;
        Ok(barriers.median)
    }
}
