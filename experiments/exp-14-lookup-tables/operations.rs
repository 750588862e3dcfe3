//! Vector instructions of the loops, counted in the code that runs. Claim B04.

use anyhow::Result;
use common::kernels::census;
use common::kernels::lookup::{Kernel, Way};
use common::lab::{Experiment, Metric, Row};
use shared::contest;

use crate::rivals;

/// Vector operations for 64 weights and one token, by way; the last is mask-slot with the same instruction set.
pub type Operations = Vec<(String, f64)>;

/// Counts the vector instructions of each loop in the code that runs.
pub fn count(exp: &mut Experiment, kernel: Kernel) -> Result<Operations> {
    let ways = Way::ALL.map(|way| {
        // A lookup of 32 bytes gives one byte of two for two or three weights of 32 rows.
        let times = if way == Way::Tl2 { 1.5 } else { 1.0 };
        (way.name(), kernel.isa, kernel.census(way), times)
    });
    let rivals = rivals(kernel.isa).into_iter().map(|rival| {
        let (variant, isa) = (rival.layout().name(), rival.isa());
        (variant, isa, census::census(rival), 1.0)
    });
    let mut found = Operations::new();
    for (variant, isa, census, times) in ways.into_iter().chain(rivals) {
        let census = match census {
            Ok(census) => census,
            Err(error) => {
                exp.refused(variant, isa.name(), format!("{error:#}"));
                continue;
            }
        };
        let per_64 = |n: usize| census.per_64_weights(n) / times;
        for (ops, count) in [
            ("multiply-or-look-up", census.dots),
            ("unpack", census.unpack),
            ("other", census.other),
            ("load", census.loads),
        ] {
            let row = Row::new(variant, isa.name()).claim("B04").param("ops", ops);
            exp.row(row.param("weights", 64).exact(Metric::Count, per_64(count)))?;
        }
        let vector = census.dots + census.unpack + census.other;
        found.push((contest::name(variant, isa.name()), per_64(vector)));
    }
    Ok(found)
}
