//! `tern advise`: which file, layout and threads suit this machine, what to expect of them, and how far that is from its limits.
//!
//! Nothing is looked up: reads, the multiply peak, every layout and a model are measured, interleaved. The model is a part of the 27B,
//! random weights in a few of its layers; the time of its layers is multiplied, that of the head is taken as it is.

use std::cell::RefCell;
use std::hint::black_box;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use common::formats::Format;
use common::kernels::{self, Choice, Isa, Kernel, peak};
use common::lab::table::{Style, render, short};
use common::lab::{Machine, Metric, Race};
use common::runtime::bandwidth::{self, Reader};
use common::runtime::memory;
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use common::runtime::sampler;
use common::runtime::session::{Session, Size};
use common::runtime::shapes::{SHAPE_27B, Shape};
use common::runtime::stack::{self, Stack};
use common::runtime::synthetic::Synthetic;
use shared::weights::Weights;

/// Measures this machine for a minute, and says which file, layout and number of threads suit it.
#[derive(clap::Args)]
pub struct Args {
    /// GGUF file that it is to run [default: the 27B, from random weights]
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
}

/// Layers of the part of the 27B: two of each four are enough to leave the caches of a laptop, and take a few seconds to make.
const LAYERS: usize = 8;
/// Tokens of a prompt and of a reply.
const PROMPT: usize = 64;
const REPLY: usize = 10;
const SIZE: Size = Size {
    context: 2 * PROMPT + REPLY,
    batch: PROMPT,
    proposals: 0,
};
/// What the matrices of a race take at most, together.
const RACE_BYTES: u64 = 4 << 30;

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let machine = Machine::here();
    let all = machine.threads;
    writeln!(out, "{}, {all} threads", machine.cpu)?;
    let counts: Vec<usize> = [1, all / 2, all]
        .into_iter()
        .filter(|&n| n > 0)
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .collect();
    let pools = counts.iter().map(|&n| Pool::new(n));
    let pools: Vec<Pool> = pools.collect::<Result<_>>()?;
    let limits = pools.iter().map(Limits::of).collect::<Result<Vec<_>>>()?;
    for (pool, limit) in pools.iter().zip(&limits) {
        writeln!(
            out,
            "reads at {} GB/s, multiplies at {} GMAC/s with {} threads",
            short(limit.bytes / 1e9),
            short(limit.macs / 1e9),
            pool.threads()
        )?;
    }
    out.flush()?;

    let candidates = candidates(args)?;
    let formats: Vec<Format> = candidates.iter().map(|c| c.format).collect();
    writeln!(out)?;
    let best = layouts(&machine, &pools[pools.len() - 1], &formats, out)?;
    out.flush()?;
    let mut plans = Vec::new();
    for (candidate, kernel) in candidates.iter().zip(&best) {
        let options = Options {
            kernel: kernel.name().parse()?,
            size: Some(SIZE),
        };
        let model = candidate.weights.load(&options, &pools[pools.len() - 1])?;
        let measured = measure(&model, &pools)?;
        for ((pool, limit), [prompt, reply]) in pools.iter().zip(&limits).zip(measured) {
            plans.push(candidate.plan(&model, kernel, pool, limit, prompt, reply));
        }
    }
    advise(&plans, out)
}

/// What a pool's threads can do at most, a second.
struct Limits {
    bytes: f64,
    macs: f64,
}

impl Limits {
    fn of(pool: &Pool) -> Result<Limits> {
        let cache = Machine::here().caches.iter().map(|c| c.bytes).max();
        let buffer = bandwidth::buffer(pool, bandwidth::dram_set(cache.unwrap_or(0)) / 2)?;
        let (_, rate) = Reader::fastest(pool, &buffer, 3);
        const STEPS: usize = 500_000;
        let isa = Isa::ALL.into_iter().rev();
        let isa = isa.clone().find(|&isa| peak::run(isa, 1).is_some());
        let done = isa.and_then(|isa| peak::run(isa, STEPS)).unwrap_or(0);
        let all = done as f64 * pool.threads() as f64;
        let mut macs = 0f64;
        for _ in 0..5 {
            let start = Instant::now();
            pool.run(|_| {
                black_box(isa.and_then(|isa| peak::run(isa, STEPS)));
            });
            macs = macs.max(all / start.elapsed().as_secs_f64());
        }
        Ok(Limits {
            bytes: rate * 1e9,
            macs,
        })
    }
}

/// A file that could be run.
struct Candidate {
    name: String,
    format: Format,
    weights: Weights,
    /// The whole model for a part of it: its layers, and those of the part.
    whole: Option<Shape>,
}

fn candidates(args: &Args) -> Result<Vec<Candidate>> {
    if let Some(path) = &args.model {
        let weights = Weights::open(path)?;
        let tensors = weights.gguf().tensors().iter();
        let largest = tensors
            .filter(|t| t.format.is_ternary())
            .max_by_key(|t| t.bytes);
        let format = largest.with_context(|| format!("{}: no ternary tensor", path.display()))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        return Ok(vec![Candidate {
            name: name.into(),
            format: format.format,
            weights,
            whole: None,
        }]);
    }
    let part = Shape {
        layers: LAYERS,
        ..SHAPE_27B
    };
    let of = |format: Format| {
        Ok(Candidate {
            name: format!("27B in {format}"),
            format,
            weights: Weights::Random(Synthetic::new(&part, format, 1)?),
            whole: Some(SHAPE_27B),
        })
    };
    [Format::Pq2_0, Format::Ptq1_0]
        .into_iter()
        .map(of)
        .collect()
}

/// Races every layout of the formats, each with the best instruction set, on a matrix of the 27B from DRAM; the fastest of each format.
fn layouts(
    machine: &Machine,
    pool: &Pool,
    formats: &[Format],
    out: &mut dyn Write,
) -> Result<Vec<&'static Kernel>> {
    let (rows, cols) = (SHAPE_27B.feed_forward, SHAPE_27B.embedding);
    let mut kernels: Vec<&'static Kernel> = Vec::new();
    for kernel in formats.iter().flat_map(|&f| kernels::named(f)) {
        match kernels
            .iter_mut()
            .find(|k| k.layout().name() == kernel.layout().name())
        {
            Some(slower) => *slower = kernel,
            None => kernels.push(kernel),
        }
    }
    let cache = machine.caches.iter().map(|c| c.bytes).max().unwrap_or(0);
    let free = memory::available_memory().unwrap_or(RACE_BYTES) / 2;
    let budget = RACE_BYTES.min(free) / kernels.len().max(1) as u64;
    let mut stacks = Vec::new();
    for kernel in kernels {
        let stock = stack::random_stock(kernel.layout().source(), rows, cols, stack::ZEROS, 1)?;
        let copies = Stack::copies_for_dram(stock.len(), cache, budget);
        stacks.push(RefCell::new(Stack::new(
            kernel, &stock, rows, cols, copies,
        )?));
    }
    let output = RefCell::new(vec![0f32; rows]);
    let mut race = Race::of(9);
    for stack in &stacks {
        let kernel = stack.borrow().kernel();
        let x = stack::random_activations(kernel.form(), cols, 1, 1)?;
        let output = &output;
        race.add(kernel.name(), move || {
            let mut stack = stack.borrow_mut();
            let result = stack.multiply(pool, &x, &mut output.borrow_mut());
            result.expect("a shape that fits");
        });
    }
    let times = race.run()?;
    drop(race);
    let rate = |stack: &RefCell<Stack>, metric, units: fn(&Stack) -> usize| {
        let stack = stack.borrow();
        let name = stack.kernel().name();
        times.rate(&name, metric, units(&stack) as f64).median
    };
    let mut rows = Vec::new();
    for stack in &stacks {
        let kernel = stack.borrow().kernel();
        rows.push(vec![
            kernel.layout().source().to_string(),
            kernel.name(),
            short(rate(stack, Metric::WeightsPerS, Stack::weights)),
            short(rate(stack, Metric::Bandwidth, Stack::bytes)),
        ]);
    }
    let header = ["format", "layout", "Gw/s", "GB/s"];
    write!(out, "{}", render(&header, rows, Style::Plain)?)?;
    let mut best = Vec::new();
    for &format in formats {
        let of = stacks
            .iter()
            .filter(|s| s.borrow().kernel().layout().source() == format);
        let fastest = of.max_by(|a, b| {
            let rate = |s| rate(s, Metric::WeightsPerS, Stack::weights);
            rate(a).total_cmp(&rate(b))
        });
        let fastest = fastest.with_context(|| format!("{format}: no kernel"))?;
        best.push(fastest.borrow().kernel());
    }
    Ok(best)
}

/// Seconds of a pass: its layers, and the head with the choice of a token.
#[derive(Clone, Copy)]
struct Seconds {
    layers: f64,
    head: f64,
}

/// A prompt and a token of a reply with each pool, interleaved; medians.
fn measure(model: &Model, pools: &[Pool]) -> Result<Vec<[Seconds; 2]>> {
    let sessions = pools.iter().map(|pool| Session::new(model, pool, SIZE));
    let mut sessions: Vec<Session> = sessions.collect::<Result<_>>()?;
    let vocabulary = model.vocabulary() as u32;
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| i * 7919 % vocabulary).collect();
    let mut spent = vec![[const { Vec::new() }; 2]; pools.len()];
    for _ in 0..2 {
        for (session, spent) in sessions.iter_mut().zip(&mut spent) {
            session.reset();
            spent[0].push(pass(session, &prompt)?.1);
        }
    }
    let mut tokens = vec![prompt[0]; pools.len()];
    for _ in 0..REPLY {
        for ((session, spent), token) in sessions.iter_mut().zip(&mut spent).zip(&mut tokens) {
            let (next, seconds) = pass(session, &[*token])?;
            *token = next;
            spent[1].push(seconds);
        }
    }
    let median = |times: &Vec<Seconds>| {
        let of = |part: fn(&Seconds) -> f64| {
            let mut part: Vec<f64> = times.iter().map(part).collect();
            part.sort_by(f64::total_cmp);
            part[part.len() / 2]
        };
        Seconds {
            layers: of(|s| s.layers),
            head: of(|s| s.head),
        }
    };
    Ok(spent.iter().map(|s| s.each_ref().map(median)).collect())
}

/// Consumes tokens; the greedy next one, and the time it took.
fn pass(session: &mut Session, tokens: &[u32]) -> Result<(u32, Seconds)> {
    let start = Instant::now();
    session.advance(tokens)?;
    let layers = start.elapsed().as_secs_f64();
    let next = sampler::greedy(session.last_logits()?);
    let head = start.elapsed().as_secs_f64() - layers;
    Ok((next, Seconds { layers, head }))
}

/// What to expect of a file, a layout and a number of threads.
struct Plan {
    name: String,
    file_bytes: f64,
    kernel: &'static Kernel,
    threads: usize,
    /// Tokens a second, and at most.
    prefill: f64,
    most_prefill: f64,
    decode: f64,
    most_decode: f64,
}

impl Candidate {
    fn plan(
        &self,
        model: &Model,
        kernel: &'static Kernel,
        pool: &Pool,
        limit: &Limits,
        prompt: Seconds,
        reply: Seconds,
    ) -> Plan {
        let layers = model.hyper().layers;
        let times = self.whole.map_or(1.0, |s| s.layers as f64 / layers as f64);
        // The head is the last product.
        let products = model.products();
        let sum = |of: &dyn Fn(&kernels::MatrixRef) -> usize| {
            let all: Vec<f64> = products
                .iter()
                .map(|group| group.iter().map(|(_, m)| of(m) as f64).sum())
                .collect();
            let (head, layers) = all.split_last().expect("a model has a head");
            (layers.iter().sum::<f64>() * times, *head)
        };
        let h = model.hyper();
        let state = 2 * h.state_bytes();
        let (bytes, head) = sum(&|m| m.bytes().len());
        let (weights, _) = sum(&|m| m.rows() * m.cols());
        // The embedding is a second table of the head's size.
        let file_bytes = match self.whole {
            Some(_) => bytes + 2.0 * head,
            None => self.weights.gguf().file_bytes() as f64,
        };
        Plan {
            name: self.name.clone(),
            file_bytes,
            kernel,
            threads: pool.threads(),
            prefill: PROMPT as f64 / (prompt.layers * times),
            most_prefill: limit.macs / weights,
            decode: 1.0 / (reply.layers * times + reply.head),
            most_decode: limit.bytes / (bytes + head + state as f64 * times),
        }
    }
}

fn advise(plans: &[Plan], out: &mut dyn Write) -> Result<ExitCode> {
    let rows = plans.iter().map(|p| {
        let of = |rate: f64, most: f64| {
            let share = if most > 0.0 {
                format!(" ({:.0}%)", 100.0 * rate / most)
            } else {
                String::new()
            };
            format!("{}{share}", short(rate))
        };
        vec![
            p.name.clone(),
            p.kernel.name(),
            p.threads.to_string(),
            of(p.decode, p.most_decode),
            of(p.prefill, p.most_prefill),
        ]
    });
    let header = [
        "model",
        "layout",
        "threads",
        "decode tok/s (of limit)",
        "prefill tok/s (of limit)",
    ];
    write!(out, "\n{}", render(&header, rows, Style::Plain)?)?;
    let best = plans.iter().max_by(|a, b| a.decode.total_cmp(&b.decode));
    let best = best.context("nothing was measured")?;
    let default = Choice::default().kernel(best.kernel.layout().source())?;
    writeln!(
        out,
        "\nRun the {} ({:.1} GB) on {} threads in layout {}: about {} tokens a second, and prompts at {}.",
        best.name,
        best.file_bytes / 1e9,
        best.threads,
        best.kernel.layout().name(),
        short(best.decode),
        short(best.prefill),
    )?;
    writeln!(
        out,
        "Decode reaches {:.0}% of what reads of memory allow, prefill {:.0}% of what multiplies allow.",
        100.0 * best.decode / best.most_decode,
        100.0 * best.prefill / best.most_prefill
    )?;
    if default.layout() == best.kernel.layout() {
        writeln!(out, "tern takes that layout by itself.")?;
    } else {
        writeln!(
            out,
            "tern takes {} by itself: pass --kernel {}.",
            default.name(),
            best.kernel.name()
        )?;
    }
    Ok(ExitCode::SUCCESS)
}
