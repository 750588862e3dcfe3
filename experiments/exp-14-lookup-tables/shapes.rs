//! Every shape computes or is refused. Claim B05.

use anyhow::Result;
use common::formats::{Codes, I2S, i2_s};
use common::kernels::lookup::{self, GROUPS, Matrix, Tokens, Way};
use common::lab::{Experiment, Metric, Row};

use crate::{SCALE, bytes, codes, floats, zeros};

/// B05: every shape computes the integer sums of the reference, or is refused with a line that says what was found.
pub fn all(exp: &mut Experiment) -> Result<()> {
    let rng = &mut exp.rng("shapes");
    let rows = [1, 2, 31, 32, 33, 64, 255, 257, 300];
    let cols = [
        1, 2, 3, 31, 32, 33, 95, 96, 97, 128, 192, 255, 257, 384, 577, 1000,
    ];
    let (mut computed, mut equal) = (0, true);
    for &rows in &rows {
        for &cols in &cols {
            let tokens = 1 + (rows + cols) % 3;
            let w = codes(rng, rows * cols);
            let y = bytes(rng, tokens * cols);
            let expected: Vec<f32> = y
                .chunks(cols)
                .flat_map(|y| {
                    w.chunks(cols)
                        .map(move |w| dot(w, y) as f32 * SCALE * SCALE)
                })
                .collect();
            let w = Codes::new(&w, rows, cols)?;
            for way in Way::ALL {
                let packed = way.pack(&w)?;
                let packed = Matrix::new(way, (rows, cols), SCALE, &packed)?;
                let mut x = Tokens::new(&y, &vec![SCALE; tokens], cols)?;
                x.tables(&packed);
                for kernel in lookup::kernels() {
                    let out = zeros(expected.len());
                    kernel.multiply(&packed, &x, 0..rows, &out)?;
                    equal &= floats(&out) == expected;
                }
                computed += 1;
            }
        }
    }
    exp.must_hold("every shape computes the reference's integer sums", equal);
    let refusals = refusals()?;
    let all = refusals.iter().all(|(words, line)| line.contains(words));
    for (_, line) in &refusals {
        exp.say(&format!("refused by name: {line}"));
    }
    exp.must_hold("what does not fit is refused by name", all);
    let row = |what: &str| Row::new("lookup", "").claim("B05").param("shapes", what);
    exp.row(row("refused").exact(Metric::Count, refusals.len()))?;
    let key = exp.row(row("computed").exact(Metric::Count, computed))?;
    let reason = format!(
        "{computed} shapes in three formats compute, {} that do not fit are refused by name; that bitnet.cpp skips them was read in its generators, not run",
        refusals.len()
    );
    exp.verdict("B05", equal && all, reason, &key)
}

/// What cannot be multiplied: the words that must be said, and the line.
fn refusals() -> Result<Vec<(&'static str, String)>> {
    fn line<T>(found: Result<T>) -> String {
        found.err().map_or(String::new(), |e| format!("{e:#}"))
    }
    let some = [1; 96];
    let codes = Codes::new(&some, 1, 96)?;
    let (tl1, tl2) = (Way::Tl1.pack(&codes)?, Way::Tl2.pack(&codes)?);
    let w = Matrix::new(Way::Tl2, (1, 96), 1.0, &tl2)?;
    let other = Matrix::new(Way::Tl1, (1, 96), 1.0, &tl1)?;
    let mut x = Tokens::new(&[1; 96], &[1.0], 96)?;
    x.tables(&other);
    let narrow = Tokens::new(&[1; 95], &[1.0], 95)?;
    let multiply = |w, x, outputs| line(lookup::kernels()[0].multiply(w, x, 0..1, &zeros(outputs)));
    let tokens = |codes: &[i8], scales: &[f32], cols| line(Tokens::new(codes, scales, cols));
    Ok(vec![
        ("0 rows", line(Codes::new(&[], 0, 96))),
        ("0 weights", line(Codes::new(&[], 1, 0))),
        ("found 95 codes", line(Codes::new(&some[..95], 1, 96))),
        ("code 3", line(Codes::new(&[3], 1, 1))),
        ("0 scales", tokens(&[], &[], 96)),
        ("expected rows of 96", tokens(&[1; 95], &[1.0], 96)),
        ("code -128", tokens(&[-128], &[1.0], 1)),
        ("95 of activations", multiply(&w, &narrow, 1)),
        ("not for this matrix", multiply(&w, &x, 1)),
        ("expected 1 tokens of 1 rows", multiply(&other, &x, 2)),
        (
            "bytes for 33 rows",
            line(Matrix::new(Way::Tl1, (33, 96), 1.0, &tl1)),
        ),
        ("a group of 100", line(I2S::pack(&codes, 1.0, 100))),
    ])
}

fn dot(w: &[u8], y: &[i8]) -> i32 {
    let terms = w.iter().zip(y);
    terms
        .map(|(&u, &y)| (i32::from(u) - 1) * i32::from(y))
        .sum()
}

/// The largest sums of 16 bits, in bitnet.cpp's I2_S, which widens after 32 groups, and here, after 16: all weights +1, all
/// activations 127.
pub fn overflow(exp: &mut Experiment) -> Result<()> {
    for (variant, groups) in [("i2_s-32-groups", 32), ("i2_s", GROUPS)] {
        // Per lane of 16 bits: two products in each of four slots a group.
        let products = groups * i2_s::GROUP_X86 / 32 * 2;
        let sum: i64 = (0..products).map(|_| 2 * 127).sum();
        let row = Row::new(variant, "").param("largest", "16-bit-sum");
        exp.row(row.exact(Metric::Count, sum))?;
    }
    Ok(())
}
