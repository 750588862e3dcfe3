//! The roofline of this machine: what each layout and instruction set does from cache, what memory lets it do, what it
//! does from DRAM, and which one wins.

use std::cell::RefCell;
use std::process::ExitCode;

use anyhow::Result;
use common::formats::Format;
use common::kernels::{Form, Isa, Kernel};
use common::lab::{self, Experiment, Metric, Row, Stat};
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};
use shared::decode::{self, At, Wall};

/// Half of a second-level cache of 2 MB, so that arithmetic is all that counts.
const CACHE: (usize, usize) = (1024, 4096);
const DRAM: (usize, usize) = (32768, 8192);
const PREFILL: usize = 64;

fn main() -> ExitCode {
    lab::run("exp-15-roofline", &[], |exp| {
        let isas: Vec<Isa> = Isa::ALL
            .into_iter()
            .filter(|i| *i != Isa::Scalar && i.available())
            .collect();
        let kernels: Vec<_> = isas.into_iter().flat_map(layouts).collect();
        let cache = from_cache(exp, &kernels)?;
        prefill(exp, &kernels)?;
        let decode = if exp.quick() {
            vec![]
        } else {
            from_dram(exp, &kernels, &cache)?
        };
        winners(exp, &decode)
    })
}

/// The kernels of a set, one a layout.
fn layouts(isa: Isa) -> Vec<&'static Kernel> {
    let two_bit = decode::kernels_of(Format::Pq2_0, &["stock", "slot16", "row-pair", "wide-row"]);
    let base3 = decode::kernels_of(Format::Ptq1_0, &["ptq1_0", "wide-row-b3"]);
    two_bit
        .into_iter()
        .chain(base3)
        .filter(|k| k.isa() == isa)
        .collect()
}

/// Gw/s of each kernel from cache, by thread count: threads that share a core, or its power, do less than each alone.
fn from_cache(exp: &mut Experiment, kernels: &[&'static Kernel]) -> Result<Vec<Vec<f64>>> {
    let at = At::new(CACHE.0, CACHE.1, "cache");
    let mut stacks = decode::stacks(exp, kernels, &at)?;
    let mut rates = Vec::new();
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let raced = decode::race(exp, &pool, &mut stacks, None, &at, &|_, _| vec![])?;
        let rate = |s: &Stack| {
            let (name, weights) = (s.kernel().name(), s.weights() as f64);
            raced.times.rate(&name, Metric::WeightsPerS, weights).median
        };
        rates.push(stacks.iter().map(rate).collect());
    }
    Ok(rates)
}

/// GMAC/s of each kernel on 64 tokens.
fn prefill(exp: &mut Experiment, kernels: &[&'static Kernel]) -> Result<()> {
    let (rows, cols) = CACHE;
    let at = At::new(rows, cols, "cache");
    let x = stack::random_activations(Form::Q8K, cols, PREFILL, exp.flags().seed)?;
    let mut stacks = decode::stacks(exp, kernels, &at)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let out = RefCell::new(vec![0f32; rows * PREFILL]);
        let mut race = exp.race();
        for stack in &mut stacks {
            let (pool, x, out) = (&pool, &x, &out);
            race.add(stack.kernel().name(), move || {
                stack
                    .multiply(pool, x, &mut out.borrow_mut())
                    .expect("a shape that was checked");
            });
        }
        let times = race.run()?;
        drop(race);
        for stack in &stacks {
            let (variant, isa) = decode::names(stack.kernel());
            let macs = (stack.weights() * PREFILL) as f64;
            let stat = times.rate(&stack.kernel().name(), Metric::MacPerS, macs);
            let params = [("rows", rows), ("cols", cols), ("batch", PREFILL)];
            exp.row(
                Row::new(variant, isa)
                    .metric(Metric::MacPerS, stat)
                    .threads(threads)
                    .params(params)
                    .param("from", "cache"),
            )?;
        }
    }
    Ok(())
}

/// A decode rate from DRAM.
struct Decode {
    kernel: &'static Kernel,
    threads: usize,
    rate: Stat,
}

/// The share of plain reads from which on a layout counts as at the wall, in %.
const AT_WALL: f64 = 90.0;

/// What memory allows and what each kernel does, on one race a thread count; and the prediction beside it: the lesser of what
/// the threads do from cache and of the wall over the bytes a weight takes.
fn from_dram(
    exp: &mut Experiment,
    kernels: &[&'static Kernel],
    cache: &[Vec<f64>],
) -> Result<Vec<Decode>> {
    let mut found = Vec::new();
    let at = At::new(DRAM.0, DRAM.1, "dram");
    let mut stacks = decode::stacks(exp, kernels, &at)?;
    let mut meets = vec![None; stacks.len()];
    for (threads, cache) in exp.thread_counts().into_iter().zip(cache) {
        let pool = Pool::new(threads)?;
        let wall = Wall::new(&pool, exp)?;
        let raced = decode::race(exp, &pool, &mut stacks, Some(&wall), &at, &|_, _| vec![])?;
        let found_at = stacks.iter().zip(cache).zip(&raced.shares).zip(&mut meets);
        for (((stack, &cache), (share, _)), meets) in found_at {
            if *share >= AT_WALL {
                meets.get_or_insert(threads);
            }
            let kernel = stack.kernel();
            let (variant, isa) = decode::names(kernel);
            let rate =
                raced
                    .times
                    .rate(&kernel.name(), Metric::WeightsPerS, stack.weights() as f64);
            // Share of the wall of the same rounds, so that a drifting memory moves both.
            let at_wall = rate.median / (share / 100.0);
            let predicted = at_wall.min(cache);
            let row = || {
                Row::new(variant, isa).threads(threads).params([
                    ("rows", at.rows),
                    ("cols", at.cols),
                    ("batch", 1),
                ])
            };
            exp.row(
                row()
                    .exact(Metric::WeightsPerS, predicted)
                    .param("from", "predicted"),
            )?;
            let measured = rate.scaled(100.0 / predicted);
            exp.row(
                row()
                    .metric(Metric::Share, measured)
                    .baseline("predicted")
                    .param("from", "dram"),
            )?;
            found.push(Decode {
                kernel,
                threads,
                rate,
            });
        }
        for base3 in stacks
            .iter()
            .filter(|s| s.kernel().layout().name() == "wide-row-b3")
        {
            let same_set = |s: &&Stack| s.kernel().isa() == base3.kernel().isa();
            let Some(two_bit) = stacks
                .iter()
                .filter(same_set)
                .find(|s| s.kernel().layout().name() == "wide-row")
            else {
                continue;
            };
            let ratio = raced
                .times
                .speedup(&base3.kernel().name(), &two_bit.kernel().name());
            let row = at.row("wide-row-b3", base3.kernel().isa().name(), threads);
            exp.row(
                row.metric(Metric::Speedup, ratio)
                    .baseline(decode::baseline(two_bit.kernel())),
            )?;
        }
    }
    for (stack, threads) in stacks.iter().zip(meets) {
        if let Some(threads) = threads {
            let (variant, isa) = decode::names(stack.kernel());
            let row = at
                .row(variant, isa, threads)
                .param("of", "threads at the wall");
            exp.row(row.exact(Metric::Count, threads))?;
        }
    }
    Ok(found)
}

/// The fastest decode from DRAM at each thread count.
fn winners(exp: &mut Experiment, found: &[Decode]) -> Result<()> {
    for threads in exp.thread_counts() {
        let best = found
            .iter()
            .filter(|d| d.threads == threads)
            .max_by(|a, b| a.rate.median.total_cmp(&b.rate.median));
        if let Some(best) = best {
            let why = format!(
                "decodes fastest from DRAM with {threads} threads: {:.1} Gw/s",
                best.rate.median
            );
            exp.kernel_chosen(
                &format!("decode, {threads} threads"),
                &best.kernel.name(),
                &why,
            );
        }
    }
    Ok(())
}
