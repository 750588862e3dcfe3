//! F32, Q8_0 and Q4_0: exact sums, bits, errors, allocations, and time a weight. Claims J01 to J06 and J09.

mod alloc;
mod bits;
mod dots;
mod rates;

use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::{Format, Layout};
use common::kernels::{self, Kernel, MatrixRef};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::pool::Pool;
use common::runtime::stack;
use rand::RngExt;
use shared::decode;
use shared::dense::{self, FORMATS};

#[global_allocator]
static COUNTING: alloc::Counting = alloc::Counting;

const QUANTIZED: [Format; 2] = [Format::Q8_0, Format::Q4_0];

fn main() -> ExitCode {
    let claims = &["J01", "J02", "J03", "J04", "J05", "J06", "J09"];
    lab::run("exp-10-quantized-kernels", claims, |exp| {
        for format in FORMATS {
            let best = decode::best(format, "stock")?;
            exp.kernel_chosen(format.name(), &best.name(), "the best instruction set here");
        }
        bits::quantized(exp)?;
        bits::widened(exp)?;
        refusals(exp);
        allocations(exp)?;
        dots::race(exp)?;
        rates::race(exp)
    })
}

/// Every kernel of a format as a file stores it, the scalar one too.
fn kernels_of(format: Format) -> impl Iterator<Item = &'static Kernel> {
    kernels::named(format)
        .into_iter()
        .filter(move |k| k.layout() == Layout::Stock(format))
}

fn floats(rng: &mut impl RngExt, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A row length that is no multiple of the block: an error that names type and length.
fn refusals(exp: &mut Experiment) {
    for format in QUANTIZED {
        let error = MatrixRef::new(Layout::Stock(format), 1, 4100, &[0; 4356]).err();
        let text = error.map(|e| e.to_string()).unwrap_or_default();
        let named = text.contains(format.name()) && text.contains("4100");
        exp.must_hold(
            format!("{format}: a row of 4100 is refused by type and length"),
            named,
        );
    }
}

/// J06: what a warm kernel asks the allocator for, all threads together.
fn allocations(exp: &mut Experiment) -> Result<()> {
    const CALLS: u64 = 20;
    let pool = Pool::new(exp.all_threads())?;
    let (mut last, mut total) = (None, 0);
    for format in FORMATS {
        let (rows, cols) = (512, 4096);
        let bytes = dense::random(format, rows, cols, &mut exp.rng("weights"))?;
        for kernel in kernels_of(format) {
            let w = MatrixRef::new(kernel.layout(), rows, cols, &bytes)?;
            let x = stack::random_activations(kernel.form(), cols, 1, exp.flags().seed)?;
            let mut out = vec![0.0; rows];
            let mut calls =
                |n| (0..n).try_for_each(|_| stack::multiply(&pool, kernel, &w, &x, &mut out));
            calls(2)?;
            let mut done = Ok(());
            let asked = alloc::bytes(&pool, || done = calls(CALLS));
            done?;
            total += asked;
            let row = Row::new("allocated", kernel.isa().name())
                .claim("J06")
                .threads(pool.threads());
            let row = row
                .params([("format", format.name())])
                .param("calls", CALLS);
            last = Some(exp.row(row.exact(Metric::Bytes, asked))?);
        }
    }
    let reason = format!("{total} bytes in {CALLS} calls of every kernel on 512 rows, F32 too");
    exp.verdict("J06", total == 0, reason, &last.context("no kernel")?)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use common::kernels::Activations;

    use super::*;

    #[test]
    fn a_warm_kernel_allocates_nothing_and_the_counter_counts() {
        let pool = Pool::new(2).unwrap();
        assert!(alloc::bytes(&pool, || drop(black_box(vec![1u8; 1000]))) >= 1000);
        for format in FORMATS {
            let bytes = vec![0; format.matrix_bytes(256, 64).unwrap()];
            for kernel in kernels_of(format) {
                let w = MatrixRef::new(kernel.layout(), 256, 64, &bytes).unwrap();
                let x = Activations::of(kernel.form(), 64, &[1.0; 64]).unwrap();
                let mut out = vec![0.0; 256];
                let mut call = || stack::multiply(&pool, kernel, &w, &x, &mut out).unwrap();
                call();
                assert_eq!(alloc::bytes(&pool, call), 0, "{}", kernel.name());
            }
        }
    }
}
