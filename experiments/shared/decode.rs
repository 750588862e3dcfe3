//! Races of decode kernels: one token, each kernel on matrices of its own layout, next to a plain read of memory.

use std::sync::Mutex;

use anyhow::{Result, ensure};
use common::formats::{Format, Layout};
use common::kernels::{self, Activations, Choice, Form, Isa, Kernel, MatrixRef};
use common::lab::{Experiment, Key, Metric, Row, Stat, Times};
use common::runtime::bandwidth::{self, Reader};
use common::runtime::memory::{self, AlignedBuf};
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};

/// The kernels of these layouts, of every instruction set of this CPU that is not scalar; slowest set first.
pub fn kernels_of(format: Format, layouts: &[&str]) -> Vec<&'static Kernel> {
    let mut kernels = kernels::named(format);
    kernels.retain(|k| k.isa() != Isa::Scalar && layouts.contains(&k.layout().name()));
    kernels
}

/// The fastest kernel of a layout here.
///
/// # Errors
/// If there is none.
pub fn best(format: Format, layout: &str) -> Result<&'static Kernel> {
    layout.parse::<Choice>()?.kernel(format)
}

/// The name that rows give a kernel's variant, and its instruction set.
pub fn names(kernel: &Kernel) -> (&'static str, &'static str) {
    (kernel.layout().name(), kernel.isa().name())
}

/// `variant isa`, as the baseline column names it.
pub fn baseline(kernel: &Kernel) -> String {
    let (variant, isa) = names(kernel);
    format!("{variant} {isa}")
}

/// Shape and source of a race's weights.
#[derive(Clone, Debug)]
pub struct At {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `cache` or `dram`.
    pub from: &'static str,
    /// The tensor, where the weights are those of a model.
    pub tensor: Option<String>,
}

impl At {
    /// Random weights of that shape.
    pub fn new(rows: usize, cols: usize, from: &'static str) -> At {
        let tensor = None;
        At {
            rows,
            cols,
            from,
            tensor,
        }
    }

    /// The name of a kernel's run on it, in the times of a race.
    pub fn run(&self, kernel: &Kernel) -> String {
        let At {
            rows, cols, from, ..
        } = self;
        format!("{} {rows}x{cols} from {from}", kernel.name())
    }

    /// Whether a product is one thread's: from cache, what threads can do there; a product that they share
    /// takes microseconds, and would tell how long they wait for each other.
    fn apart(&self) -> bool {
        self.from == "cache" && self.tensor.is_none()
    }

    /// Products of the matrix in one run of a race.
    pub fn products(&self, threads: usize) -> usize {
        if self.apart() {
            threads * Stack::APART
        } else {
            1
        }
    }

    /// A row with this place's parameters.
    pub fn row(&self, variant: &str, isa: &str, threads: usize) -> Row {
        let row = Row::new(variant, isa)
            .threads(threads)
            .params([("rows", self.rows), ("cols", self.cols), ("batch", 1)])
            .param("from", self.from);
        match &self.tensor {
            Some(name) => row.param("tensor", name),
            None => row,
        }
    }
}

/// The wall that kernels are held against: a buffer far larger than any cache, and the fastest way found to read it.
pub struct Wall {
    bytes: AlignedBuf,
    reader: Reader,
    /// Whether the same bytes are also read as decode reads them.
    as_decode: bool,
}

impl Wall {
    /// Fills a buffer with as many threads as the pool has, and tries the ways to read it.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub fn new(pool: &Pool, exp: &Experiment) -> Result<Wall> {
        let bytes = bandwidth::buffer(pool, bandwidth::dram_set(exp.last_level_cache()) / 2)?;
        let (reader, _) = Reader::fastest(pool, &bytes, 2);
        Ok(Wall {
            bytes,
            reader,
            as_decode: false,
        })
    }

    /// The same, and in races also the reading that decode does: its chunks, order and prefetches, without its arithmetic.
    pub fn and_as_decode(self) -> Wall {
        Wall {
            as_decode: true,
            ..self
        }
    }

    /// Reads the buffer once.
    pub fn read(&self, pool: &Pool) {
        std::hint::black_box(self.reader.read(pool, &self.bytes));
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// What a race gave: its times, and the keys of the share rows.
pub struct Raced {
    /// By [`At::run`]; `read` is the wall, `read-as-decode` what [`Wall::and_as_decode`] adds.
    pub times: Times,
    /// The share of the wall that each stack's kernel reached, in the order of the stacks from DRAM; empty without a wall.
    pub shares: Vec<(f64, Key)>,
}

/// Races the stacks' kernels on one token, and adds a row of Gw/s and one of GB/s for each, from DRAM with a wall also its share
/// of it.
///
/// # Errors
/// A shape that does not fit, a row that the schema refuses.
pub fn race(
    exp: &mut Experiment,
    pool: &Pool,
    stacks: &mut [Stack],
    wall: Option<&Wall>,
    at: &At,
    claims: &dyn Fn(&str, Metric) -> Vec<&'static str>,
) -> Result<Raced> {
    race_together(exp, pool, &mut [(at, stacks)], wall, claims)
}

/// [`race`] with stacks of several places, in the same rounds.
///
/// # Errors
/// As [`race`].
pub fn race_together(
    exp: &mut Experiment,
    pool: &Pool,
    places: &mut [(&At, &mut [Stack])],
    wall: Option<&Wall>,
    claims: &dyn Fn(&str, Metric) -> Vec<&'static str>,
) -> Result<Raced> {
    let threads = pool.threads();
    let told: Vec<_> = places
        .iter()
        .map(|(at, _)| format!("{} x {} from {}", at.rows, at.cols, at.from))
        .collect();
    exp.progress(format!("{}, {threads} threads", told.join(" and ")));
    let mut inputs = Vec::new();
    let mut outs = Vec::new();
    for (at, stacks) in &*places {
        inputs.push(stack::random_activations(
            Form::Q8K,
            at.cols,
            1,
            exp.flags().seed,
        )?);
        // One output a product and stack.
        let out = || Mutex::new(vec![0f32; at.rows]);
        let of_stack = || (0..at.products(threads)).map(|_| out()).collect();
        outs.push(stacks.iter().map(|_| of_stack()).collect::<Vec<Vec<_>>>());
    }
    let mut race = exp.race();
    for (((at, stacks), x), outs) in places.iter_mut().zip(&inputs).zip(&outs) {
        for (stack, outs) in stacks.iter_mut().zip(outs) {
            let apart = at.apart();
            race.try_add(at.run(stack.kernel()), move || {
                if apart {
                    stack.multiply_apart(pool, x, outs)
                } else {
                    let mut out = outs[0].lock().expect("no thread panics with it");
                    stack.multiply(pool, x, &mut out)
                }
            });
        }
    }
    if let Some(wall) = wall {
        race.add("read", || {
            std::hint::black_box(wall.reader.read(pool, &wall.bytes));
        });
        if wall.as_decode {
            race.add("read-as-decode", || {
                std::hint::black_box(Reader::DECODE.read(pool, &wall.bytes));
            });
        }
    }
    let times = race.run()?;
    drop(race);
    let same = |outs: Vec<Vec<Mutex<Vec<f32>>>>| {
        let outs = outs.into_iter().flatten();
        let outs = outs.map(|o| bits(&o.into_inner().expect("no thread panicked")));
        let outs: Vec<_> = outs.collect();
        outs.windows(2).all(|o| o[0] == o[1])
    };
    let all = outs.into_iter().all(same);
    exp.must_hold("every kernel gives the same bits", all);

    let row = |at: &At, variant: &str, isa: &str, metric| {
        let row = at.row(variant, isa, threads);
        claims(variant, metric).into_iter().fold(row, Row::claim)
    };
    let mut shares = Vec::new();
    for (at, stacks) in &*places {
        let wall = wall.filter(|_| at.from == "dram");
        for stack in &**stacks {
            let name = at.run(stack.kernel());
            let (variant, isa) = names(stack.kernel());
            let times_all = at.products(threads) as f64;
            let rates = [
                (Metric::WeightsPerS, times_all * stack.weights() as f64),
                (Metric::Bandwidth, times_all * stack.bytes() as f64),
            ];
            // The many tensors of a model: Gw/s alone.
            let some = if at.tensor.is_some() { 1 } else { 2 };
            for (metric, units) in rates.into_iter().take(some) {
                let stat = times.rate(&name, metric, units);
                exp.row(row(at, variant, isa, metric).metric(metric, stat))?;
            }
            if let Some(wall) = wall {
                let read = ("read", wall.bytes.len() as f64);
                let share = times
                    .speedup_per_unit((&name, stack.bytes() as f64), read)
                    .scaled(100.0);
                let row = row(at, variant, isa, Metric::Share).baseline("read");
                shares.push((share.median, exp.row(row.metric(Metric::Share, share))?));
            }
        }
        if let Some(wall) = wall {
            let ways = ["read", "read-as-decode"];
            for way in ways.into_iter().take(1 + usize::from(wall.as_decode)) {
                let rate = times.rate(way, Metric::Bandwidth, wall.bytes.len() as f64);
                exp.row(row(at, way, "", Metric::Bandwidth).metric(Metric::Bandwidth, rate))?;
            }
        }
    }
    Ok(Raced { times, shares })
}

/// Adds a row that says how many times as fast one kernel of a race was as another.
///
/// # Errors
/// A row that the schema refuses.
pub fn faster(
    exp: &mut Experiment,
    raced: &Raced,
    at: &At,
    (a, b): (&Kernel, &Kernel),
    threads: usize,
    claims: &[&str],
) -> Result<(Stat, Key)> {
    let stat = raced.times.speedup(&at.run(a), &at.run(b));
    let (variant, isa) = names(a);
    let row = at.row(variant, isa, threads).baseline(baseline(b));
    let row = claims.iter().fold(row, |row, claim| row.claim(*claim));
    Ok((stat, exp.row(row.metric(Metric::Speedup, stat))?))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Stacks of random weights for each kernel, one copy of each for `cache`, as many as leave the caches for `dram`.
///
/// # Errors
/// Memory that the system refuses.
pub fn stacks(exp: &mut Experiment, kernels: &[&'static Kernel], at: &At) -> Result<Vec<Stack>> {
    // Half of what is free, for all of them.
    let free = memory::available_memory().unwrap_or(4 << 30);
    let budget = free / 2 / kernels.len().max(1) as u64;
    let mut stacks = Vec::new();
    for &kernel in kernels {
        exp.progress(format!(
            "{}: {} x {} from {}",
            kernel.name(),
            at.rows,
            at.cols,
            at.from
        ));
        let format = kernel.layout().source();
        let stock = stack::random_stock(format, at.rows, at.cols, stack::ZEROS, exp.flags().seed)?;
        let copies = match at.from {
            "dram" if kernel.isa() != Isa::Scalar => {
                Stack::copies_for_dram(stock.len(), exp.last_level_cache(), budget)
            }
            // The scalar loop is far from any wall: two copies are as good.
            "dram" => 2,
            _ => 1,
        };
        stacks.push(Stack::new(kernel, &stock, at.rows, at.cols, copies)?);
    }
    let given: Vec<bool> = stacks.iter().filter_map(Stack::on_huge_pages).collect();
    if at.from == "dram" && !given.is_empty() {
        exp.huge_pages(given.iter().all(|&g| g));
    }
    Ok(stacks)
}

/// Whether every kernel of a format gives the bits of its scalar reference on this matrix of stock bytes.
///
/// # Errors
/// A shape that does not fit.
pub fn same_bits(
    format: Format,
    stock: &[u8],
    rows: usize,
    cols: usize,
    x: &Activations,
) -> Result<bool> {
    ensure!(x.tokens() > 0, "no tokens");
    let mut expected: Option<Vec<u32>> = None;
    let mut same = true;
    for kernel in kernels::available().filter(|k| k.takes(format, cols)) {
        let mut bytes = stock.to_vec();
        let bytes = kernel.layout().repack_in_place(&mut bytes, rows, cols)?;
        let w = MatrixRef::new(kernel.layout(), rows, cols, bytes)?;
        let mut out = vec![0.0; rows * x.tokens()];
        kernel.multiply(&w, x, &mut out)?;
        let found = bits(&out);
        same &= expected.get_or_insert_with(|| found.clone()) == &found;
    }
    Ok(same)
}

/// Announces which kernel a format takes unless another is named.
///
/// # Errors
/// If there is none.
pub fn announce(exp: &mut Experiment, format: Format) -> Result<()> {
    let kernel = Choice::default().kernel(format)?;
    let why = match kernel.layout() {
        Layout::Stock(_) => "the best instruction set here; no faster layout for it",
        _ => "the fastest layout of the best instruction set here",
    };
    exp.kernel_chosen(format.name(), &kernel.name(), why);
    Ok(())
}
