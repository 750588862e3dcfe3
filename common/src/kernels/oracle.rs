//! The integer oracle: every kernel against sums that are computed from the plain numbers, without tolerance.
//!
//! All scales are exactly 1, so that the f32 results are the integer sums themselves. Activations enter as f32 and are quantized
//! like any others: the first value of magnitude 127 in each block of 256 is -127, which makes the `Q8_K` scale 1 and the codes
//! the values. The first 78 cases are those of the oracle that "how i made a 27b ternary model 3.8x faster" describes.

use anyhow::{Result, ensure};
use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::{Activations, Form, Kernel, MatrixRef};
use crate::formats::Format;

/// The codes of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// 0 to 2 at random.
    Ternary,
    /// 0 to 3 at random, for formats that can store 3.
    TwoBit,
    /// One code.
    All(u8),
}

/// The activations of a case, integers from -127 to 127.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// At random.
    Random,
    /// Zero, the whole block: the scale is 0.
    Zero,
    /// One value; after a -127 that makes the scale 1, unless it is 127 or -127 itself.
    All(i8),
    /// -127 and 127 in turn.
    Turns,
}

/// A shape that must be refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refusal {
    /// Columns that are no whole number of blocks.
    PartBlock,
    /// No columns.
    NoColumns,
    /// A matrix that lacks its last byte.
    ShortMatrix,
    /// Activations of another width.
    OtherWidth,
    /// An output that lacks its last value.
    ShortOutput,
}

/// What to multiply, or what to refuse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Case {
    /// A product of `rows` x `cols` weights by `tokens` columns of activations.
    Product {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Width of the batch.
        tokens: usize,
        /// Codes.
        weights: Weights,
        /// Activations.
        values: Values,
        /// Seed of what is random.
        seed: u64,
    },
    /// A call that must fail.
    Refused(Refusal),
}

/// The source's 78 cases: 63 of 7 widths, 3 row counts and 3 inner sizes; 5 refusals; zeros, constants and extremes.
pub fn source_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |rows, cols, tokens, weights, values| {
        let seed = cases.len() as u64;
        cases.push(Case::Product {
            rows,
            cols,
            tokens,
            weights,
            values,
            seed,
        });
    };
    for tokens in [1, 2, 3, 4, 5, 7, 8] {
        for rows in [4, 8, 12] {
            for cols in [256, 512, 1024] {
                add(rows, cols, tokens, Weights::Ternary, Values::Random);
            }
        }
    }
    for (weights, values) in [
        (Weights::Ternary, Values::Zero),
        (Weights::All(1), Values::Random),
        (Weights::All(1), Values::Zero),
        (Weights::All(0), Values::Random),
        (Weights::All(2), Values::Random),
        (Weights::Ternary, Values::All(1)),
        (Weights::All(0), Values::All(127)),
        (Weights::All(2), Values::All(-127)),
        (Weights::All(2), Values::Turns),
        (Weights::All(3), Values::All(-127)),
    ] {
        add(8, 1024, 4, weights, values);
    }
    cases.extend(
        [
            Refusal::PartBlock,
            Refusal::NoColumns,
            Refusal::ShortMatrix,
            Refusal::OtherWidth,
            Refusal::ShortOutput,
        ]
        .map(Case::Refused),
    );
    cases
}

/// `n` more cases from a seed: row counts that fill, miss and overrun wide tiles, widths that are no power of two.
pub fn random_cases(seed: u64, n: usize) -> Vec<Case> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut pick = |of: &[usize]| of[rng.random_range(0..of.len())];
    (0..n)
        .map(|i| Case::Product {
            rows: pick(&[1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 31, 33, 48]),
            cols: pick(&[64, 128, 192, 256, 256, 384, 512, 640, 768, 1024]),
            tokens: pick(&[1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 18, 33]),
            weights: [Weights::Ternary, Weights::TwoBit][pick(&[0, 1])],
            values: [Values::Random, Values::Turns, Values::All(127)]
                [pick(&[0, 0, 0, 0, 0, 0, 1, 2])],
            seed: seed.wrapping_add(i as u64),
        })
        .collect()
}

/// What came of the cases with one kernel.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The kernel.
    pub kernel: &'static Kernel,
    /// Cases it took; the others have columns that are no whole blocks of its layout, or code 3 at random.
    pub cases: usize,
    /// Cases that failed.
    pub failed: usize,
    /// Integers compared.
    pub integers: usize,
    /// Integers that differ.
    pub wrong: usize,
    /// Calls refused, as they must be: wrong shapes, and code 3 for a format of three codes.
    pub refused: usize,
    /// The first failure, in words.
    pub first: Option<String>,
}

/// Whether some case has columns that the kernel's layout takes.
pub fn fits(kernel: &Kernel, cases: &[Case]) -> bool {
    cases.iter().any(|case| match *case {
        Case::Product { cols, .. } => kernel.takes(kernel.layout().source(), cols),
        Case::Refused(_) => false,
    })
}

/// Runs every case on every kernel that multiplies `Q8_K` activations.
///
/// # Errors
/// If the oracle itself cannot be set up: a scale that is not 1, a matrix that cannot be packed.
pub fn run(
    kernels: impl IntoIterator<Item = &'static Kernel>,
    cases: &[Case],
) -> Result<Vec<Outcome>> {
    let mut outcomes: Vec<_> = kernels
        .into_iter()
        .filter(|k| k.form() == Form::Q8K)
        .map(|kernel| Outcome {
            kernel,
            cases: 0,
            failed: 0,
            integers: 0,
            wrong: 0,
            refused: 0,
            first: None,
        })
        .collect();
    for case in cases {
        match *case {
            Case::Refused(refusal) => {
                for outcome in &mut outcomes {
                    outcome.cases += 1;
                    if is_refused(outcome.kernel, refusal)? {
                        outcome.refused += 1;
                    } else {
                        outcome.failed += 1;
                        outcome
                            .first
                            .get_or_insert_with(|| format!("{refusal:?} was not refused"));
                    }
                }
            }
            Case::Product { .. } => {
                let product = Product::of(case)?;
                for outcome in &mut outcomes {
                    product.judge(outcome)?;
                }
            }
        }
    }
    Ok(outcomes)
}

/// A case in numbers.
struct Product {
    case: Case,
    rows: usize,
    weights: Weights,
    codes: Vec<u8>,
    x: Activations,
    /// `[token][row]`.
    expected: Vec<i32>,
}

impl Product {
    fn of(case: &Case) -> Result<Self> {
        let Case::Product {
            rows,
            cols,
            tokens,
            weights,
            values,
            seed,
        } = *case
        else {
            unreachable!("a refusal is no product");
        };
        let rng = &mut StdRng::seed_from_u64(seed);
        let codes: Vec<u8> = (0..rows * cols)
            .map(|_| match weights {
                Weights::Ternary => rng.random_range(0..3),
                Weights::TwoBit => rng.random_range(0..4),
                Weights::All(u) => u,
            })
            .collect();
        let mut y: Vec<i32> = (0..tokens * cols)
            .map(|k| match values {
                Values::Random => rng.random_range(-127..=127),
                Values::Zero => 0,
                Values::All(v) => i32::from(v),
                Values::Turns => 254 * (k as i32 % 2) - 127,
            })
            .collect();
        if matches!(values, Values::Random | Values::All(_)) && values != Values::All(127) {
            for block in y.chunks_mut(cols).flat_map(|token| token.chunks_mut(256)) {
                let at = rng.random_range(0..block.len());
                block[at] = -127;
                for v in &mut block[..at] {
                    *v = (*v).min(126);
                }
            }
        }
        let floats: Vec<f32> = y.iter().map(|&v| v as f32).collect();
        let x = Activations::of(Form::Q8K, cols, &floats)?;
        let unit = match values {
            Values::Zero => 0.0,
            Values::All(127) => -1.0,
            _ => 1.0,
        };
        for group in x.groups() {
            for (i, &d) in group.scales().iter().enumerate() {
                let expected = if i % group.width() < group.tokens() {
                    unit
                } else {
                    0.0
                };
                ensure!(
                    d == expected,
                    "oracle: a Q8_K scale of {d}, expected {expected}"
                );
            }
        }
        let dot = |w: &[u8], y: &[i32]| -> i32 {
            w.iter().zip(y).map(|(&u, &y)| (i32::from(u) - 1) * y).sum()
        };
        let expected = y
            .chunks_exact(cols)
            .flat_map(|y| codes.chunks_exact(cols).map(move |w| dot(w, y)))
            .collect();
        Ok(Product {
            case: *case,
            rows,
            weights,
            codes,
            x,
            expected,
        })
    }

    /// Adds this case to what is known of a kernel, if its format can store it.
    fn judge(&self, outcome: &mut Outcome) -> Result<()> {
        let (kernel, rows, cols) = (outcome.kernel, self.rows, self.x.cols());
        let format = kernel.layout().source();
        let n = format.block_weights();
        let base3 = matches!(format, Format::Ptq1_0 | Format::Tq1_0);
        if !kernel.takes(format, cols) || base3 && self.weights == Weights::TwoBit {
            return Ok(());
        }
        let mut bytes = vec![0; format.matrix_bytes(rows, cols)?];
        let packed = format.pack(&self.codes, &vec![f16::ONE; rows * cols / n], &mut bytes);
        if base3 && self.weights == Weights::All(3) {
            ensure!(packed.is_err(), "oracle: {format} packed code 3");
            outcome.cases += 1;
            outcome.refused += 1;
            return Ok(());
        }
        packed?;
        let bytes = kernel.layout().repack_in_place(&mut bytes, rows, cols)?;
        let w = MatrixRef::new(kernel.layout(), rows, cols, bytes)?;
        let mut found = vec![f32::NAN; self.expected.len()];
        kernel.multiply(&w, &self.x, &mut found)?;
        outcome.cases += 1;
        outcome.integers += found.len();
        let wrong = |(found, expected): &(&f32, &i32)| f64::from(**found) != f64::from(**expected);
        let differ = found.iter().zip(&self.expected).filter(wrong).count();
        if differ > 0 {
            outcome.wrong += differ;
            outcome.failed += 1;
            outcome.first.get_or_insert_with(|| {
                let at = found
                    .iter()
                    .zip(&self.expected)
                    .position(|pair| wrong(&pair))
                    .unwrap_or(0);
                format!(
                    "{:?}: row {} of token {}: found {}, expected {}",
                    self.case,
                    at % rows,
                    at / rows,
                    found[at],
                    self.expected[at]
                )
            });
        }
        Ok(())
    }
}

/// Whether the kernel, or the matrix on the way to it, turns a wrong call down.
fn is_refused(kernel: &Kernel, refusal: Refusal) -> Result<bool> {
    let layout = kernel.layout();
    let rows = layout.tile_rows();
    let cols = layout.block_weights().next_multiple_of(256);
    let ones = |cols| Activations::of(Form::Q8K, cols, &vec![1.0; cols]);
    let x = ones(cols)?;
    let mut bytes = vec![0; layout.matrix_bytes(rows, cols)?];
    let mut out = vec![0.0; rows];
    let multiply = |bytes: &[u8], x: &Activations, out: &mut [f32]| {
        let w = MatrixRef::new(layout, rows, cols, bytes)?;
        kernel.multiply(&w, x, out)
    };
    Ok(match refusal {
        Refusal::PartBlock => MatrixRef::new(layout, rows, cols - 6, &bytes).is_err(),
        Refusal::NoColumns => MatrixRef::new(layout, rows, 0, &[]).is_err(),
        Refusal::ShortMatrix => {
            bytes.pop();
            multiply(&bytes, &x, &mut out).is_err()
        }
        Refusal::OtherWidth => multiply(&bytes, &ones(2 * cols)?, &mut out).is_err(),
        Refusal::ShortOutput => multiply(&bytes, &x, &mut out[1..]).is_err(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::available;

    fn all_exact(cases: &[Case]) {
        for o in run(available().filter(|k| fits(k, cases)), cases).unwrap() {
            let found = (o.failed, o.wrong);
            assert_eq!(found, (0, 0), "{}: {:?}", o.kernel.name(), o.first);
            assert!(o.integers > 0, "{}: no case reached it", o.kernel.name());
        }
    }

    #[test]
    fn source_cases_are_exact_on_every_kernel() {
        let cases = source_cases();
        assert_eq!(cases.len(), 78);
        all_exact(&cases);
        // The one layout that has no case here has some below.
        let mut without: Vec<_> = available().filter(|k| !fits(k, &cases)).collect();
        without.retain(|k| !fits(k, &random_cases(1, 100)));
        assert_eq!(without, [] as [&Kernel; 0]);
    }

    #[test]
    fn random_cases_are_exact_on_every_kernel() {
        let emulated = std::env::var_os("TERN_EMULATED").is_some();
        let n = if emulated { 100 } else { 400 };
        all_exact(&random_cases(1, n));
    }

    /// An oracle that cannot fail proves nothing: a kernel that reads one weight wrong is caught.
    #[test]
    fn a_wrong_sum_is_counted() {
        let kernel = available().find(|k| k.form() == Form::Q8K).unwrap();
        let case = Case::Product {
            rows: 4,
            cols: 256,
            tokens: 2,
            weights: Weights::Ternary,
            values: Values::Random,
            seed: 9,
        };
        let mut product = Product::of(&case).unwrap();
        product.expected[5] += 1;
        let mut outcomes = run([kernel], &[]).unwrap();
        product.judge(&mut outcomes[0]).unwrap();
        assert_eq!((outcomes[0].failed, outcomes[0].wrong), (1, 1));
    }
}
