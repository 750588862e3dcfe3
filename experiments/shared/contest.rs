//! Races of kernels that are not among `common`'s: anything that can be called, next to a plain read of memory.

use anyhow::Result;
use common::lab::{Experiment, Key, Metric, Row, Times};
use common::runtime::pool::Pool;

use crate::decode::Wall;

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

impl Entry<'_> {
    /// Its name in [`Times`] and in a baseline column.
    pub fn name(&self) -> String {
        name(self.variant, self.isa)
    }
}

/// `variant isa`.
pub fn name(variant: &str, isa: &str) -> String {
    format!("{variant} {isa}")
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
