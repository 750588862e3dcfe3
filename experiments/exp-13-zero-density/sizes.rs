//! Bits a weight over zero shares, and those of a model's tensors. Claims B01 and B02.

use anyhow::{Result, ensure};
use common::formats::Codes;
use common::formats::bitcos::{Bitcos, GROUP, bits_per_weight};
use common::lab::{Experiment, Key, Metric, Row};
use common::runtime::gguf::{Gguf, Survey};
use half::f16;

use crate::{PTQ1_0, SHARES, TRITS, codes};

/// Bits a weight of bitmap and signs, and of what finds the rows, measured on packed codes.
fn measured(exp: &Experiment, zeros: f64) -> Result<(f64, f64)> {
    let (rows, cols) = (32, 8192);
    let codes = codes(exp, rows, cols, zeros);
    let scales = vec![f16::ONE; codes.len() / GROUP];
    let packed = Bitcos::pack(&Codes::new(&codes, rows, cols)?, &scales)?;
    let back = packed.codes() == codes;
    ensure!(
        back,
        "bitcos: codes are not what they were, at zeros={zeros}"
    );
    let (sizes, n) = (packed.sizes(), codes.len() as f64);
    let bits = (sizes.presence + sizes.signs) as f64 / n;
    Ok((bits, sizes.index as f64 / n))
}

/// Least bits a weight for codes of that zero share: their entropy.
fn entropy(zeros: f64) -> f64 {
    let term = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    term(zeros) + 2.0 * term((1.0 - zeros) / 2.0)
}

/// B01 and B02: bits a weight over zero shares, and where BITCOS becomes the smaller.
pub fn packed(exp: &mut Experiment) -> Result<()> {
    let tenths = (0..10).map(|i| f64::from(i) / 10.0);
    let shares = tenths.clone().chain(
        SHARES
            .into_iter()
            .filter(|s| tenths.clone().all(|t| t != *s)),
    );
    let mut equal = true;
    let mut key = None;
    for zeros in shares {
        let (bits, index) = measured(exp, zeros)?;
        // The zeros are counted out to the nearest of 2^18 weights.
        equal &= (bits - bits_per_weight(zeros)).abs() < 1e-5;
        let row = |variant: &str| Row::new(variant, "").param("zeros", zeros);
        let bits = row("bitcos")
            .claim("B01")
            .exact(Metric::BitsPerWeight, bits);
        let bits = exp.row(bits)?;
        if zeros == 0.515 {
            key = Some(bits);
        }
        for (variant, value) in [
            ("bitcos-index", index),
            ("ptq1_0", PTQ1_0),
            ("trits5", TRITS),
            ("pq2_0", 2.0),
            ("entropy", entropy(zeros)),
        ] {
            exp.row(row(variant).exact(Metric::BitsPerWeight, value))?;
        }
    }
    exp.must_hold("bitmap and signs take 2 - z bits a weight", equal);
    if let Some(key) = key {
        let reason =
            "codes with that share of zeros, packed; the models of the source are not here";
        exp.verdict("B01", equal, reason, &key)?;
    }
    // In steps of a thousandth.
    let mut crossing = |name: &str, bits: f64| -> Result<(f64, Key)> {
        let (mut low, mut high) = (0u32, 1000);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if measured(exp, f64::from(middle) / 1000.0)?.0 < bits {
                high = middle;
            } else {
                low = middle;
            }
        }
        let row = |method: &str| {
            let row = Row::new("bitcos", "").claim("B02").baseline(name);
            row.param("smaller_above", method)
        };
        exp.row(row("arithmetic").exact(Metric::Share, 100.0 * (2.0 - bits)))?;
        let found = 0.1 * f64::from(high);
        Ok((found, exp.row(row("packed").exact(Metric::Share, found))?))
    };
    let (ptq1_0, key) = crossing("ptq1_0", PTQ1_0)?;
    let (trits, _) = crossing("trits5", TRITS)?;
    let near = |found: f64, published: f64| (found - published).abs() <= 0.11;
    let reason = format!(
        "smaller than 1.625 bits from {ptq1_0:.1}% zeros, than 1.6 from {trits:.1}%, in steps of 0.1%; the source: above 37.5% and 40%"
    );
    exp.verdict("B02", near(ptq1_0, 37.5) && near(trits, 40.0), reason, &key)
}

/// The zero share of each ternary tensor of the model, and which of the two layouts with kernels is smaller for it, scales aside.
pub fn model(exp: &mut Experiment) -> Result<()> {
    let path = exp.model()?;
    let file = Gguf::open(&path)?;
    let mut counts = [("bitcos", 0u64), ("ptq1_0", 0)];
    for tensor in file.tensors().iter().filter(|t| t.format.is_ternary()) {
        let survey = Survey::of(&file, tensor);
        let Some(zeros) = survey.zero_share() else {
            continue;
        };
        let smaller = usize::from(bits_per_weight(zeros) >= PTQ1_0);
        counts[smaller].1 += 1;
        let row = Row::new(counts[smaller].0, "")
            .claim("B02")
            .param("smallest_for", &tensor.name)
            .param("cols", tensor.cols());
        exp.row(row.exact(Metric::Share, 100.0 * zeros))?;
    }
    if counts.iter().all(|c| c.1 == 0) {
        exp.refused("model", "", "no ternary tensor in it");
    }
    for (variant, count) in counts {
        let row = Row::new(variant, "").claim("B02");
        exp.row(
            row.param("smallest_for", "tensors")
                .exact(Metric::Count, count),
        )?;
    }
    Ok(())
}
