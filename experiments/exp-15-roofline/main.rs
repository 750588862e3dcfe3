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
use shared::decode::{self, At, Raced, Wall};

const DRAM: (usize, usize) = (32768, 8192);
/// About half a second-level cache of 1 MB, so that arithmetic is all that counts; rows of the same length, so that what a row costs
/// beside its weights is the same.
const CACHE: (usize, usize) = (256, 8192);
/// Both for rows of a multiple of 640 weights, which `wide-row-b3x5` asks for: the width of the 27B.
const DRAM_640: (usize, usize) = (49152, 5120);
const CACHE_640: (usize, usize) = (512, 5120);
/// Tokens of a prefill, and a shape that leaves room for them in that cache.
const PREFILL: usize = 64;
const PREFILL_CACHE: (usize, usize) = (512, 4096);

fn main() -> ExitCode {
    lab::run("exp-15-roofline", &[], |exp| {
        let isas: Vec<Isa> = Isa::ALL
            .into_iter()
            .filter(|i| *i != Isa::Scalar && i.available())
            .collect();
        let kernels: Vec<_> = isas.into_iter().flat_map(layouts).collect();
        let base3 = decode::kernels_of(Format::Ptq1_0, &["wide-row-b3", "wide-row-b3x5"]);
        let mut found = prefill(exp, &kernels, PREFILL_CACHE)?;
        found.extend(prefill(exp, &base3, CACHE_640)?);
        winners(exp, "prefill", &found)?;
        let places = vec![
            Place::new(exp, &kernels, CACHE, DRAM)?,
            Place::new(exp, &base3, CACHE_640, DRAM_640)?,
        ];
        let found = decode_rates(exp, places)?;
        winners(exp, "decode", &found)
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

/// GMAC/s of each kernel on 64 tokens.
fn prefill(
    exp: &mut Experiment,
    kernels: &[&'static Kernel],
    (rows, cols): (usize, usize),
) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    let at = At::new(rows, cols, "cache");
    let x = stack::random_activations(Form::Q8K, cols, PREFILL, exp.flags().seed)?;
    let mut stacks = decode::stacks(exp, kernels, &at)?;
    for threads in exp.thread_curve() {
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
            let row = Row::new(variant, isa)
                .metric(Metric::MacPerS, stat)
                .threads(threads)
                .params(params)
                .param("from", "cache");
            exp.row(row.clone())?;
            found.push(Found {
                row,
                threads,
                rate: stat.median,
            });
        }
    }
    Ok(found)
}

/// The row of a rate.
struct Found {
    row: Row,
    threads: usize,
    rate: f64,
}

/// The share of plain reads from which on a layout counts as at the wall, in %.
const AT_WALL: f64 = 90.0;

/// Matrices of one width for each of some kernels, in cache and in DRAM. A quick run stays in cache.
struct Place {
    near: At,
    far: At,
    cached: Vec<Stack>,
    stacks: Vec<Stack>,
    /// The threads with which each kernel meets the wall.
    meets: Vec<Option<usize>>,
}

impl Place {
    fn new(
        exp: &mut Experiment,
        kernels: &[&'static Kernel],
        near: (usize, usize),
        far: (usize, usize),
    ) -> Result<Place> {
        let near = At::new(near.0, near.1, "cache");
        let far = At::new(far.0, far.1, "dram");
        let cached = decode::stacks(exp, kernels, &near)?;
        let stacks = if exp.quick() {
            vec![]
        } else {
            decode::stacks(exp, kernels, &far)?
        };
        Ok(Place {
            near,
            far,
            cached,
            meets: vec![None; stacks.len()],
            stacks,
        })
    }
}

/// What each kernel does from cache and from DRAM, and what plain reads of memory do, in the same rounds; and the prediction beside
/// it: the lesser of the rate from cache, and of what is read in the order of decode over the bytes that a weight takes.
fn decode_rates(exp: &mut Experiment, mut places: Vec<Place>) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for threads in exp.thread_curve() {
        let pool = Pool::new(threads)?;
        if exp.quick() {
            for place in &mut places {
                let Place { near, cached, .. } = place;
                decode::race(exp, &pool, cached, None, near, &|_, _| vec![])?;
            }
            continue;
        }
        let wall = Wall::new(&pool, exp)?.and_as_decode();
        let mut both: Vec<(&At, &mut [Stack])> = Vec::new();
        for place in &mut places {
            both.push((&place.near, &mut place.cached[..]));
            both.push((&place.far, &mut place.stacks[..]));
        }
        let raced = decode::race_together(exp, &pool, &mut both, Some(&wall), &|_, _| vec![])?;
        let mut shares = raced.shares.iter().map(|(share, _)| *share);
        for place in &mut places {
            for meets in &mut place.meets {
                if shares.next().is_some_and(|share| share >= AT_WALL) {
                    meets.get_or_insert(threads);
                }
            }
            found.extend(predict(exp, &raced, &wall, place, threads)?);
            for (faster, than) in [
                ("wide-row-b3", "wide-row"),
                ("wide-row-b3x5", "wide-row-b3"),
            ] {
                let of_layout = |name: &'static str| {
                    let kernels = place.stacks.iter().map(Stack::kernel);
                    kernels.filter(move |k| k.layout().name() == name)
                };
                for kernel in of_layout(faster) {
                    if let Some(than) = of_layout(than).find(|k| k.isa() == kernel.isa()) {
                        decode::faster(exp, &raced, &place.far, (kernel, than), threads, &[])?;
                    }
                }
            }
        }
    }
    for place in &places {
        for (stack, threads) in place.stacks.iter().zip(&place.meets) {
            if let Some(threads) = *threads {
                let (variant, isa) = decode::names(stack.kernel());
                let row = place.far.row(variant, isa, threads);
                let row = row.param("of", "threads at the wall");
                exp.row(row.exact(Metric::Count, threads))?;
            }
        }
    }
    Ok(found)
}

/// The prediction for each kernel of a place, and the share of it that was measured.
fn predict(
    exp: &mut Experiment,
    raced: &Raced,
    wall: &Wall,
    place: &Place,
    threads: usize,
) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    let (near, far) = (&place.near, &place.far);
    for (stack, cached) in place.stacks.iter().zip(&place.cached) {
        let kernel = stack.kernel();
        let (variant, isa) = decode::names(kernel);
        // Round by round, so that a machine that drifts moves both sides: seconds a weight of arithmetic, and of reading it.
        let seconds = |name: &str, units: f64| {
            let seconds = raced.times[name].seconds.iter();
            seconds.map(|s| s / units).collect::<Vec<_>>()
        };
        let weights = stack.weights() as f64;
        let weights_read = wall.bytes() as f64 / stack.bytes() as f64 * weights;
        let from_cache = (near.products(threads) * cached.weights()) as f64;
        let limits = seconds(&near.run(kernel), from_cache)
            .into_iter()
            .zip(seconds("read-as-decode", weights_read));
        let limits: Vec<f64> = limits.map(|(a, b)| a.max(b)).collect();
        let predicted: Vec<f64> = limits.iter().map(|s| 1e-9 / s).collect();
        let shares = limits.iter().zip(seconds(&far.run(kernel), weights));
        let shares: Vec<f64> = shares.map(|(limit, s)| 100.0 * limit / s).collect();
        let row = |metric, stat: Stat, from| {
            let row = Row::new(variant, isa).threads(threads).params([
                ("rows", far.rows),
                ("cols", far.cols),
                ("batch", 1),
            ]);
            row.metric(metric, stat).param("from", from)
        };
        exp.row(row(Metric::WeightsPerS, Stat::of(&predicted), "predicted"))?;
        exp.row(row(Metric::Share, Stat::of(&shares), "dram").baseline("predicted"))?;
        let rate = raced
            .times
            .rate(&far.run(kernel), Metric::WeightsPerS, weights);
        found.push(Found {
            row: far
                .row(variant, isa, threads)
                .metric(Metric::WeightsPerS, rate),
            threads,
            rate: rate.median,
        });
    }
    Ok(found)
}

/// The fastest layout and instruction set at each thread count.
fn winners(exp: &mut Experiment, phase: &str, found: &[Found]) -> Result<()> {
    for threads in exp.thread_curve() {
        let of_threads = found.iter().filter(|f| f.threads == threads);
        if let Some(best) = of_threads.max_by(|a, b| a.rate.total_cmp(&b.rate)) {
            exp.row(best.row.clone().param("of", format!("fastest {phase}")))?;
        }
    }
    Ok(())
}
