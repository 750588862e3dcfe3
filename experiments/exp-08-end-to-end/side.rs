//! The first layers of the model, in every packing and layout at once, side by side in memory: ratios that hold on a machine that drifts
//! while whole models take turns.

use std::time::Duration;

use anyhow::Result;
use common::kernels::Kernel;
use common::lab::{Experiment, Key, Metric, Row, Stat};
use common::runtime::model::Model;
use common::runtime::pool::Pool;

use crate::cases::Case;
use crate::token::{BATCH, Bench};
use crate::{LAYOUTS, options, prompt};

/// Both kinds of attention in their proportion, and far more than a cache holds.
const LAYERS: usize = 8;

/// Rounds of prefill, which takes stock weights seconds.
const PREFILLS: usize = 5;

/// A model cut short.
struct Cut<'c> {
    case: &'c Case,
    kernel: &'static Kernel,
    model: Model,
}

impl Cut<'_> {
    /// What a race calls it.
    fn name(&self) -> String {
        format!("{} {}", self.case.format, self.kernel.name())
    }

    /// What a row calls it as a baseline.
    fn baseline(&self) -> String {
        format!("{} {}", self.kernel.layout().name(), self.kernel.isa())
    }

    fn row(&self, phase: &str, threads: usize) -> Row {
        let (layout, isa) = (self.kernel.layout().name(), self.kernel.isa().name());
        let row = self.case.row(layout, isa, threads, phase);
        let row = row.param("layers", self.model.hyper().layers);
        match phase {
            "prefill" => row.param("batch", BATCH),
            _ => row,
        }
    }
}

/// Repacked against stock weights of each format, L22, and the best of each format against the first's.
pub fn by_side(exp: &mut Experiment, pool: &Pool, cases: &[Case]) -> Result<()> {
    let mut cuts = vec![];
    for case in cases {
        for layout in LAYOUTS {
            case.progress(exp, &format!("{LAYERS} layers, {layout}"));
            let model = case.weights.load_first(LAYERS, &options(layout)?, pool)?;
            let kernel = case.kernel(&model)?;
            cuts.push(Cut {
                case,
                kernel,
                model,
            });
        }
    }
    let prompt = prompt(exp, &cuts[0].model);
    let mut claimed = vec![];
    for phase in ["decode", "prefill"] {
        let mut race = exp.race();
        if phase == "prefill" {
            race.rounds(exp.rounds().min(PREFILLS));
        }
        for cut in &cuts {
            let mut bench = Bench::new(&cut.model, pool, &prompt)?;
            bench.prefill(BATCH)?;
            race.add_timed(cut.name(), move || {
                let seconds = match phase {
                    "decode" => bench.decode()?.1.total,
                    _ => bench.prefill(BATCH)?.iter().map(|pass| pass.total).sum(),
                };
                Ok(Duration::from_secs_f64(seconds))
            });
        }
        exp.progress(format!("{phase} of {LAYERS} layers, side by side"));
        let times = race.run()?;
        drop(race);
        for cut in &cuts {
            let time = times.rate(&cut.name(), Metric::Time, 1.0);
            exp.row(cut.row(phase, pool.threads()).metric(Metric::Time, time))?;
        }
        let first = &cuts[1];
        for [stock, best] in cuts.as_chunks().0 {
            for (other, claim) in [(stock, Some("L22")), (first, None)] {
                if best.kernel == other.kernel {
                    continue; // itself, or a CPU without a repacked layout
                }
                let faster = times.speedup(&best.name(), &other.name());
                let row = best.row(phase, pool.threads()).baseline(other.baseline());
                let row = claim.into_iter().fold(row, Row::claim);
                let key = exp.row(row.metric(Metric::Speedup, faster))?;
                if claim.is_some() && best.case.is_claimed(exp) {
                    claimed.push((faster, key));
                }
            }
        }
    }
    verdict(exp, &claimed)
}

fn verdict(exp: &mut Experiment, claimed: &[(Stat, Key)]) -> Result<()> {
    if exp.quick() {
        return exp.not_testable("L22", "a quick run's model stays in the cache");
    }
    let [(decode, _), (prefill, key)] = claimed else {
        return exp.not_testable("L22", "no repacked layout for this CPU");
    };
    let reason = format!(
        "side by side on {LAYERS} layers, repacked: prefill of {BATCH} {:.2} times as fast (the source: 3.8), decode {:.2} times (1.5)",
        prefill.median, decode.median
    );
    exp.verdict("L22", decode.low > 1.0 && prefill.low > 1.0, reason, key)
}
