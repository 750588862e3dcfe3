//! Races of anything that can be called, next to a plain read of memory: kernels for formats that no model is stored in, stacks.

use std::ops::Range;
use std::sync::OnceLock;

use anyhow::Result;
use common::kernels::{Activations, Kernel};
use common::lab::{Experiment, Key, Metric, Row, Times};
use common::runtime::memory::{self, AlignedBuf};
use common::runtime::pool::{Chunks, Pool};
use common::runtime::stack::Stack;
use half::f16;

use crate::decode::{self, At, Wall};

/// One that takes part: a call does `weights` multiply-accumulates and streams `bytes`.
pub struct Entry<'a> {
    /// Variant, as rows give it.
    pub variant: &'static str,
    /// Instruction set, as rows give it.
    pub isa: &'static str,
    /// Multiply-accumulates a call.
    pub weights: f64,
    /// Bytes a call reads at least; none are reported for 0.
    pub bytes: f64,
    /// The work.
    pub call: Box<dyn FnMut() -> Result<()> + 'a>,
}

impl<'a> Entry<'a> {
    /// A stack that multiplies all tokens of `x`.
    pub fn of_stack(
        stack: &'a mut Stack,
        pool: &'a Pool,
        x: &'a Activations,
        out: &'a mut [f32],
    ) -> Entry<'a> {
        let (variant, isa) = decode::names(stack.kernel());
        Entry {
            variant,
            isa,
            weights: (stack.weights() * x.tokens()) as f64,
            bytes: stack.bytes() as f64,
            call: Box::new(move || stack.multiply(pool, x, out)),
        }
    }

    /// Its name in [`Times`] and in a baseline column.
    pub fn name(&self) -> String {
        name(self.variant, self.isa)
    }
}

/// `variant isa`.
pub fn name(variant: &str, isa: &str) -> String {
    format!("{variant} {isa}")
}

/// How many copies of one that takes so many bytes each of `matrices` in a race gets: one from cache; from DRAM as many as leave
/// the caches, all together in half of the free memory.
pub fn copies(exp: &Experiment, at: &At, matrices: u64) -> impl Fn(usize) -> usize + use<> {
    let budget = memory::available_memory().unwrap_or(4 << 30) / 2 / matrices;
    let (llc, dram) = (exp.last_level_cache(), at.from == "dram");
    move |bytes| match dram {
        true => Stack::copies_for_dram(bytes, llc, budget),
        false => 1,
    }
}

/// What a race from DRAM is held against; nothing for one from cache.
///
/// # Errors
/// As [`Wall::new`].
pub fn wall(exp: &Experiment, pool: &Pool, at: &At) -> Result<Option<Wall>> {
    (at.from == "dram")
        .then(|| Wall::new(pool, exp))
        .transpose()
}

/// Copies of a matrix's parts, each on memory of its own: aligned, and on huge pages where the system gives them.
///
/// # Errors
/// Memory that the system refuses.
pub fn aligned<const N: usize>(
    parts: &[Vec<u8>; N],
    copies: usize,
) -> Result<Vec<[AlignedBuf; N]>> {
    let mut all = Vec::new();
    for _ in 0..copies {
        let copy = parts.iter().map(|part| AlignedBuf::copy_of(part));
        let copy: Vec<_> = copy.collect::<Result<_>>()?;
        all.extend(<[AlignedBuf; N]>::try_from(copy));
    }
    Ok(all)
}

/// A stack whose rows are these codes and scales in the kernel's format, over and over.
///
/// # Errors
/// A shape that does not fit, memory that the system refuses.
pub fn stack(
    kernel: &'static Kernel,
    codes: &[u8],
    scales: &[f16],
    at: &At,
    copies: impl Fn(usize) -> usize,
) -> Result<Stack> {
    let (format, rows) = (kernel.layout().source(), codes.len() / at.cols);
    let mut few = vec![0; format.matrix_bytes(rows, at.cols)?];
    format.pack(codes, scales, &mut few)?;
    let stock = few.repeat(at.rows / rows);
    Stack::new(kernel, &stock, at.rows, at.cols, copies(stock.len()))
}

/// Has all threads of the pool multiply rows, in chunks of about 512 KiB of the `bytes` that all of them take and in multiples
/// of `multiple`.
///
/// # Errors
/// What `multiply` returned.
pub fn by_rows(
    pool: &Pool,
    rows: usize,
    bytes: usize,
    multiple: usize,
    multiply: impl Fn(Range<usize>) -> Result<()> + Sync,
) -> Result<()> {
    let size = (512 << 10) * rows / bytes.max(1);
    let failure = OnceLock::new();
    pool.chunks_by(rows, Chunks { size, multiple }, |_, rows| {
        if let Err(error) = multiply(rows) {
            failure.get_or_init(|| error);
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// Races the entries, with a wall against it too: for each a row of `metric` (Gw/s or GMAC/s) and, where bytes are given, one of
/// GB/s, and its share of the wall. `row` starts a row for a variant and an instruction set.
///
/// # Errors
/// What a call returned; a row that the schema refuses.
pub fn run(
    exp: &mut Experiment,
    entries: &mut [Entry],
    wall: Option<(&Pool, &Wall)>,
    metric: Metric,
    row: &dyn Fn(&str, &str) -> Row,
) -> Result<(Times, Vec<(f64, Key)>)> {
    let mut race = exp.race();
    for entry in &mut *entries {
        race.try_add(entry.name(), &mut entry.call);
    }
    if let Some((pool, wall)) = wall {
        race.add("read", || wall.read(pool));
    }
    let times = race.run()?;
    drop(race);
    let mut shares = Vec::new();
    for entry in &*entries {
        let (name, start) = (entry.name(), || row(entry.variant, entry.isa));
        exp.row(start().metric(metric, times.rate(&name, metric, entry.weights)))?;
        if entry.bytes > 0.0 {
            let rate = times.rate(&name, Metric::Bandwidth, entry.bytes);
            exp.row(start().metric(Metric::Bandwidth, rate))?;
        }
        if let Some((_, wall)) = wall {
            let read = ("read", wall.bytes() as f64);
            let share = times.speedup_per_unit((&name, entry.bytes), read);
            let share = share.scaled(100.0);
            let key = exp.row(start().baseline("read").metric(Metric::Share, share))?;
            shares.push((share.median, key));
        }
    }
    if let Some((_, wall)) = wall {
        let rate = times.rate("read", Metric::Bandwidth, wall.bytes() as f64);
        exp.row(row("read", "").metric(Metric::Bandwidth, rate))?;
    }
    Ok((times, shares))
}
