//! Vector instructions of the loops, counted in the code that runs. Claim B04.

use anyhow::Result;
use common::kernels::Isa;
use common::kernels::census::{self, Census};
use common::kernels::lookup::{Kernel, Way};
use common::lab::{Experiment, Metric, Row};
use shared::contest;

use crate::rivals;

/// Vector operations for 64 weights and one token, by way; the last is mask-slot with the same instruction set.
pub type Operations = Vec<(String, f64)>;

/// Counts the vector instructions of each loop in the code that runs.
pub fn count(exp: &mut Experiment, kernel: Kernel) -> Result<Operations> {
    let mut found = Operations::new();
    let mut add = |exp: &mut Experiment, variant, isa: Isa, census: Result<Census>, times: f64| {
        let census = match census {
            Ok(census) => census,
            Err(error) => {
                exp.refused(variant, isa.name(), format!("{error:#}"));
                return Ok(());
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
        found.push((
            contest::name(variant, isa.name()),
            per_64(census.dots + census.unpack + census.other),
        ));
        anyhow::Ok(())
    };
    for way in Way::ALL {
        // A lookup of 32 bytes gives one byte of two for two or three weights of 32 rows.
        let (work, times): (&[&str], f64) = match way {
            Way::I2S => (&census::DOTS, 1.0),
            Way::Tl1 => (&["Vpshufb"], 1.0),
            Way::Tl2 => (&["Vpshufb"], 1.5),
        };
        // SAFETY: `code` gives the start of a function.
        let census = unsafe { census::census_of(way.name(), kernel.code(way), work) };
        add(exp, way.name(), kernel.isa, census, times)?;
    }
    for kernel in rivals(kernel.isa) {
        let (variant, isa) = (kernel.layout().name(), kernel.isa());
        add(exp, variant, isa, census::census(kernel), 1.0)?;
    }
    Ok(found)
}
