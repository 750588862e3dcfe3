//! F32, Q8_0 and Q4_0: exact sums, bits, errors, allocations, and time a weight. Claims J01 to J06 and J09.

mod alloc;
mod dot;

use std::cell::RefCell;
use std::hint::black_box;
use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::{Block, BlockQ4_0, BlockQ8_0, Format, Layout};
use common::kernels::{self, Activations, Form, Isa, Kernel, MatrixRef};
use common::lab::{self, Experiment, Key, Metric, Row};
use common::runtime::gguf::Gguf;
use common::runtime::pool::Pool;
use common::runtime::stack;
use dot::Dot;
use rand::RngExt;
use shared::decode;
use shared::dense::{self, Copies, FORMATS};

#[global_allocator]
static COUNTING: alloc::Counting = alloc::Counting;

/// Rows that source J checks.
const ROWS: usize = 130;
const QUANTIZED: [Format; 2] = [Format::Q8_0, Format::Q4_0];

fn main() -> ExitCode {
    let claims = &["J01", "J02", "J03", "J04", "J05", "J06", "J09"];
    lab::run("exp-10-quantized-kernels", claims, |exp| {
        for format in FORMATS {
            let best = decode::best(format, "stock")?;
            exp.kernel_chosen(format.name(), &best.name(), "the best instruction set here");
        }
        exactness(exp)?;
        widened(exp)?;
        refusals(exp);
        allocations(exp)?;
        dots(exp)?;
        rates(exp)
    })
}

fn kernels_of(format: Format) -> impl Iterator<Item = &'static Kernel> {
    kernels::named(format)
        .into_iter()
        .filter(move |k| k.layout() == Layout::Stock(format))
}

fn floats(rng: &mut impl RngExt, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Whole rows in a format.
struct Case {
    source: String,
    format: Format,
    cols: usize,
    bytes: Vec<u8>,
}

/// Random blocks, quantized random weights, and the model's weights as floats, quantized.
fn cases(exp: &mut Experiment) -> Result<Vec<Case>> {
    const COLS: usize = 4096;
    let mut cases = Vec::new();
    let weights = floats(&mut exp.rng("weights"), ROWS * COLS);
    let path = exp.model()?;
    let file = Gguf::open(&path)?;
    for format in QUANTIZED {
        let bytes = dense::quantize(format, COLS, &weights)?;
        cases.push(Case {
            source: "quantized".into(),
            format,
            cols: COLS,
            bytes,
        });
        // Any code, and scales of any sign from 2^-3 to 2^1: a sign, an exponent, ten bits.
        let rng = &mut exp.rng("blocks");
        let mut bytes = vec![0; format.matrix_bytes(ROWS, COLS)?];
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            rng.fill(&mut *block);
            let d: u16 = rng.random_range(0x3000..0x4000) | u16::from(rng.random::<bool>()) << 15;
            block[..2].copy_from_slice(&d.to_le_bytes());
        }
        cases.push(Case {
            source: "blocks".into(),
            format,
            cols: COLS,
            bytes,
        });
        for tensor in file
            .tensors()
            .iter()
            .filter(|t| t.format.is_ternary())
            .take(40)
        {
            let (rows, cols) = (tensor.rows().min(ROWS), tensor.cols());
            let mut weights = vec![0.0; rows * cols];
            let stock = &file.data(tensor)[..tensor.format.matrix_bytes(rows, cols)?];
            tensor.format.dequantize(stock, &mut weights)?;
            let bytes = dense::quantize(format, cols, &weights)?;
            cases.push(Case {
                source: "model".into(),
                format,
                cols,
                bytes,
            });
        }
    }
    Ok(cases)
}

/// One row by one token, computed here and not by a kernel.
struct Expected {
    /// f32, with the two scales in the format's own order, and in the other's.
    own: f32,
    other: f32,
    /// f64: exact integer sums of blocks times scales; dequantized weights by dequantized activations; the sum of |w x|.
    sums: f64,
    dequantized: f64,
    magnitude: f64,
}

fn expected(format: Format, row: &[u8], x: &[BlockQ8_0]) -> Expected {
    let mut e = Expected {
        own: 0.0,
        other: 0.0,
        sums: 0.0,
        dequantized: 0.0,
        magnitude: 0.0,
    };
    for (bytes, x) in row.chunks_exact(format.block_bytes()).zip(x) {
        let (d, codes, values): (f32, [i32; 32], [f32; 32]) = if format == Format::Q8_0 {
            let block: BlockQ8_0 = bytemuck::pod_read_unaligned(bytes);
            (
                { block.d }.to_f32(),
                { block.qs }.map(i32::from),
                block.dequantize(),
            )
        } else {
            let block: BlockQ4_0 = bytemuck::pod_read_unaligned(bytes);
            (
                { block.d }.to_f32(),
                block.codes().map(|u| i32::from(u) - 8),
                block.dequantize(),
            )
        };
        let (dx, qx) = ({ x.d }.to_f32(), { x.qs });
        let sum: i32 = codes.iter().zip(qx).map(|(w, x)| w * i32::from(x)).sum();
        let (scales_first, left_to_right) = (sum as f32 * (d * dx), sum as f32 * d * dx);
        let (own, other) = match format {
            Format::Q8_0 => (scales_first, left_to_right),
            _ => (left_to_right, scales_first),
        };
        e.own += own;
        e.other += other;
        e.sums += f64::from(sum) * f64::from(d) * f64::from(dx);
        for (w, x) in values.iter().zip(x.dequantize()) {
            let product = f64::from(*w) * f64::from(x);
            e.dequantized += product;
            e.magnitude += product.abs();
        }
    }
    e
}

/// J01 and J02: every kernel of Q8_0 and Q4_0 against the two orders written out here, and F32 against f64.
fn exactness(exp: &mut Experiment) -> Result<()> {
    exp.progress("bits and errors");
    let (mut same, mut compared, mut apart) = (true, 0, 0f64);
    let mut key = None;
    let cases = cases(exp)?;
    for source in ["quantized", "blocks", "model"] {
        for format in QUANTIZED {
            let of = |c: &&Case| c.source == source && c.format == format;
            let kernels: Vec<_> = kernels_of(format).collect();
            let mut equal = vec![0; kernels.len()];
            let (mut rows, mut orders_differ, mut exact, mut rounded) = (0, 0, 0f64, 0f64);
            for case in cases.iter().filter(of) {
                let x = floats(&mut exp.rng("activations"), case.cols);
                let blocks: Vec<_> = x.as_chunks().0.iter().map(BlockQ8_0::quantize).collect();
                let x = Activations::of(Form::Q8_0, case.cols, &x)?;
                let by_row: Vec<_> = case
                    .bytes
                    .chunks_exact(format.row_bytes(case.cols)?)
                    .map(|row| expected(format, row, &blocks))
                    .collect();
                for (kernel, equal) in kernels.iter().zip(&mut equal) {
                    let mut out = vec![f32::NAN; by_row.len()];
                    let w = MatrixRef::new(kernel.layout(), by_row.len(), case.cols, &case.bytes)?;
                    kernel.multiply(&w, &x, &mut out)?;
                    let pairs = out.iter().zip(&by_row);
                    *equal += pairs
                        .filter(|(y, e)| y.to_bits() == e.own.to_bits())
                        .count();
                }
                rows += by_row.len();
                for e in &by_row {
                    orders_differ += usize::from(e.own.to_bits() != e.other.to_bits());
                    apart = apart.max((e.sums - e.dequantized).abs());
                    exact = exact.max((e.sums - e.dequantized).abs() / e.magnitude);
                    rounded = rounded.max((f64::from(e.own) - e.dequantized).abs() / e.magnitude);
                }
            }
            let row = |variant: &str, isa: &str, claim: &str| {
                let row = Row::new(variant, isa).claim(claim);
                row.params([("format", format.name()), ("weights", source)])
                    .param("rows", rows)
            };
            for (kernel, equal) in kernels.iter().zip(equal) {
                same &= equal == rows;
                compared += rows;
                let row = row("rows-with-the-same-bits", kernel.isa().name(), "J02");
                key = Some(exp.row(row.exact(Metric::Count, equal))?);
            }
            exp.row(
                row("rows-that-the-other-order-changes", "", "J02")
                    .exact(Metric::Count, orders_differ),
            )?;
            exp.row(row("f64-sums", "", "J01").exact(Metric::RelativeError, exact))?;
            let j01 = exp.row(row("f32-sums", "", "J01").exact(Metric::RelativeError, rounded))?;
            let reason = format!(
                "in double the two differ by {apart:.1e} at most, absolute; in f32 a kernel's sums are as far off as this row says"
            );
            exp.verdict("J01", apart < 5e-7, reason, &j01)?;
        }
    }
    exp.must_hold(
        "every kernel of Q8_0 and Q4_0 gives the bits of its own order of the scales",
        same,
    );
    let worst = float_errors(exp)?;
    let reason = format!(
        "{compared} rows of Q8_0 and Q4_0, every kernel; F32 stays within {worst:.1e} of the sum of |w x|"
    );
    exp.verdict(
        "J02",
        same && worst <= 1e-6,
        reason,
        &key.context("no kernel")?,
    )
}

/// The largest error of F32 kernels and dot products over the sum of |w x|, against f64.
fn float_errors(exp: &mut Experiment) -> Result<f64> {
    let mut worst = 0f64;
    for cols in [4096, 4100] {
        let (w, x) = (
            floats(&mut exp.rng("w"), ROWS * cols),
            floats(&mut exp.rng("x"), cols),
        );
        let error = |row: usize, y: f32| {
            let products = w[row * cols..][..cols]
                .iter()
                .zip(&x)
                .map(|(w, x)| f64::from(*w) * f64::from(*x));
            let (sum, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
            (f64::from(y) - sum).abs() / magnitude
        };
        let bytes = dense::quantize(Format::F32, cols, &w)?;
        let activations = Activations::of(Form::F32, cols, &x)?;
        for kernel in kernels_of(Format::F32) {
            let mut out = vec![f32::NAN; ROWS];
            kernel.multiply(
                &MatrixRef::new(kernel.layout(), ROWS, cols, &bytes)?,
                &activations,
                &mut out,
            )?;
            let most = out
                .iter()
                .enumerate()
                .map(|(r, y)| error(r, *y))
                .fold(0.0, f64::max);
            let row = Row::new("kernel", kernel.isa().name()).claim("J02");
            let row = row.params([("format", "F32")]).param("cols", cols);
            exp.row(row.exact(Metric::RelativeError, most))?;
            worst = worst.max(most);
        }
        for way in dot::all() {
            let dots = (0..ROWS).map(|r| error(r, way.dot(&w[r * cols..][..cols], &x)));
            let most = dots.fold(0.0, f64::max);
            exp.row(
                dot_row(&way, cols)
                    .claim("J02")
                    .exact(Metric::RelativeError, most),
            )?;
            worst = worst.max(most);
        }
    }
    Ok(worst)
}

/// J09: Q8_0 weights widened to float, by float activations, in two orders of addition.
fn widened(exp: &mut Experiment) -> Result<()> {
    const COLS: usize = 4096;
    let weights = floats(&mut exp.rng("weights"), ROWS * COLS);
    let bytes = dense::quantize(Format::Q8_0, COLS, &weights)?;
    let x = floats(&mut exp.rng("activations"), COLS);
    let mut w = vec![0.0; ROWS * COLS];
    Format::Q8_0.dequantize(&bytes, &mut w)?;
    let lanes = dot::all().pop().context("no way to multiply")?;
    let (mut differ, mut worst) = (0, 0f64);
    for w in w.chunks_exact(COLS) {
        let found = [dot::scalar(w, &x), lanes.dot(w, &x)];
        differ += usize::from(found[0].to_bits() != found[1].to_bits());
        let products = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        let (sum, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
        for y in found {
            worst = worst.max((f64::from(y) - sum).abs() / magnitude);
        }
    }
    let row = |variant: &str| {
        Row::new(variant, "")
            .claim("J09")
            .params([("format", "Q8_0 by F32")])
            .param("rows", ROWS)
    };
    exp.row(row("rows-that-two-orders-change").exact(Metric::Count, differ))?;
    let key = exp.row(row("widened").exact(Metric::RelativeError, worst))?;
    let reason = format!(
        "two orders of addition differ in {differ} of {ROWS} rows, by {worst:.1e} of the sum of |w x| at most"
    );
    exp.verdict("J09", differ > 0 && worst < 1e-6, reason, &key)
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

fn dot_row(way: &Dot, cols: usize) -> Row {
    Row::new("dot", way.isa.name())
        .params([
            ("format", "F32".to_string()),
            ("cols", cols.to_string()),
            ("accumulators", way.accumulators.to_string()),
        ])
        .params([("multiply", way.multiply), ("tail", way.tail)])
}

/// J05: F32 dot products from the first-level cache, and one product that fma rounds once.
fn dots(exp: &mut Experiment) -> Result<()> {
    exp.progress("F32 dot products");
    let ways = dot::all();
    let name = |way: &Dot, cols: usize| {
        format!(
            "{} {} {} {} {cols}",
            way.isa, way.accumulators, way.multiply, way.tail
        )
    };
    let (w, x) = (
        floats(&mut exp.rng("w"), 4100),
        floats(&mut exp.rng("x"), 4100),
    );
    let mut race = exp.race();
    for cols in [4096, 4100] {
        for way in &ways {
            let (w, x) = (&w[..cols], &x[..cols]);
            race.add(name(way, cols), move || {
                black_box(way.dot(black_box(w), black_box(x)));
            });
        }
    }
    let times = race.run()?;
    drop(race);
    for cols in [4096, 4100] {
        for way in &ways {
            let time = times.rate(&name(way, cols), Metric::TimePerWeight, cols as f64);
            exp.row(
                dot_row(way, cols)
                    .claim("J05")
                    .metric(Metric::TimePerWeight, time),
            )?;
        }
    }
    let mut faster = true;
    let mut told = String::new();
    let mut key: Option<Key> = None;
    for four in ways
        .iter()
        .filter(|w| (w.accumulators, w.multiply, w.tail) == (4, "fma", "mask"))
    {
        let same = |w: &&Dot| (w.isa, w.multiply, w.tail) == (four.isa, "fma", "mask");
        let Some(one) = ways.iter().filter(same).find(|w| w.accumulators == 1) else {
            continue;
        };
        let gain = times.speedup(&name(four, 4096), &name(one, 4096));
        let row = dot_row(four, 4096)
            .claim("J05")
            .baseline(format!("one-accumulator {}", four.isa));
        key = Some(exp.row(row.metric(Metric::Speedup, gain))?);
        faster &= gain.low > 1.0;
        told += &format!(
            "four accumulators {:.1}x one on {}; ",
            gain.median, four.isa
        );
    }
    // (1 + 2^-23)^2 = 1 + 2^-22 + 2^-46, and the last term is what a product rounded to f32 loses.
    let (a, b) = (
        black_box(1.0 + f32::EPSILON),
        black_box(-1.0 - 2.0 * f32::EPSILON),
    );
    let (fused, apart) = (a.mul_add(a, b), black_box(a * a) + b);
    for (variant, value) in [("fma", fused), ("mul-add", apart)] {
        let row = Row::new(variant, "")
            .claim("J05")
            .params([("of", "(1 + 2^-23)^2 - (1 + 2^-22)")]);
        exp.row(
            row.param("what", "result")
                .exact(Metric::RelativeError, value),
        )?;
    }
    let once = fused == 2f32.powi(-46) && apart == 0.0;
    match key {
        Some(key) => exp.verdict(
            "J05",
            faster && once,
            format!("{told}fma leaves {fused:e}, mul and add {apart}"),
            &key,
        ),
        None => exp.not_testable("J05", "no vector instructions here"),
    }
}

/// J03 and J04: a stack of 24 matrices, as the source has it, by threads.
fn rates(exp: &mut Experiment) -> Result<()> {
    let stacks = FORMATS.map(|format| Copies::new(exp, format));
    let stacks = stacks.into_iter().collect::<Result<Vec<_>>>()?;
    for threads in exp.thread_counts() {
        exp.progress(format!("stacks, {threads} threads"));
        let pool = &Pool::new(threads)?;
        let mut runs: Vec<(&Copies, &'static Kernel)> = Vec::new();
        for stack in &stacks {
            let best = decode::best(stack.format, "stock")?;
            let scalar = kernels_of(stack.format).find(|k| k.isa() == Isa::Scalar && threads == 1);
            runs.extend(scalar.filter(|&k| k != best).map(|k| (stack, k)));
            runs.push((stack, best));
        }
        let name = |format: Format, isa: Isa| format!("{format} {isa}");
        let failure = RefCell::new(None);
        let mut race = exp.race();
        for &(stack, kernel) in &runs {
            let x = stack::random_activations(kernel.form(), stack.cols, 1, exp.flags().seed)?;
            let (mut out, failure) = (vec![0.0; stack.rows], &failure);
            race.add(name(stack.format, kernel.isa()), move || {
                if let Err(error) = stack::multiply(pool, kernel, &stack.next(), &x, &mut out) {
                    failure.replace(Some(error));
                }
            });
        }
        let times = race.run()?;
        drop(race);
        if let Some(error) = failure.take() {
            return Err(error);
        }
        let mut a_weight = Vec::new();
        let mut gains = Vec::new();
        for &(stack, kernel) in &runs {
            let (format, isa) = (stack.format, kernel.isa());
            let row = |claim: &str| {
                let row = Row::new(format.name(), isa.name())
                    .claim(claim)
                    .threads(threads);
                row.params([
                    ("rows", stack.rows),
                    ("cols", stack.cols),
                    ("copies", stack.copies()),
                ])
            };
            let weights = (stack.rows * stack.cols) as f64;
            let time = times.rate(&name(format, isa), Metric::TimePerWeight, weights);
            let key = exp.row(row("J03").metric(Metric::TimePerWeight, time))?;
            let rate = times.rate(&name(format, isa), Metric::Bandwidth, stack.bytes() as f64);
            exp.row(row("J03").metric(Metric::Bandwidth, rate))?;
            if isa == Isa::Scalar {
                continue;
            }
            a_weight.push((format, time.median, rate.median, key));
            if threads == 1 {
                let gain = times.speedup(&name(format, isa), &name(format, Isa::Scalar));
                let row = row("J04").baseline(name(format, Isa::Scalar));
                gains.push((format, gain, exp.row(row.metric(Metric::Speedup, gain))?));
            }
        }
        if threads == 1 {
            judge(exp, &a_weight, &gains)?;
        }
    }
    for claim in ["J03", "J04"] {
        if !exp.thread_counts().contains(&1) {
            exp.not_testable(
                claim,
                "the claim is about one thread, which --threads leaves out",
            )?;
        }
    }
    Ok(())
}

/// The verdicts on one thread.
fn judge(
    exp: &mut Experiment,
    a_weight: &[(Format, f64, f64, Key)],
    gains: &[(Format, lab::Stat, Key)],
) -> Result<()> {
    let by_time = |a: &&(Format, f64, f64, Key), b: &&(Format, f64, f64, Key)| a.1.total_cmp(&b.1);
    let (Some(fast), Some(slow)) = (
        a_weight.iter().min_by(by_time),
        a_weight.iter().max_by(by_time),
    ) else {
        exp.not_testable("J03", "no vector kernel here")?;
        return exp.not_testable("J04", "no vector kernel here");
    };
    if exp.quick() {
        exp.not_testable("J03", "a quick run does not read from DRAM")?;
    } else {
        let told: Vec<_> = a_weight
            .iter()
            .map(|(f, ns, gb, _)| format!("{f} {ns:.3} ns, {gb:.1} GB/s"))
            .collect();
        // The source's 0.34 to 0.44 ns are 1.3.
        let reason = format!(
            "{}: {:.1} times from the fastest to the slowest, 1.5 at most",
            told.join("; "),
            slow.1 / fast.1
        );
        exp.verdict("J03", slow.1 <= 1.5 * fast.1, reason, &slow.3)?;
    }
    let quantized: Vec<_> = gains.iter().filter(|g| g.0 != Format::F32).collect();
    let Some((_, _, key)) = quantized.first() else {
        return exp.not_testable("J04", "no vector kernel here");
    };
    let told: Vec<_> = quantized
        .iter()
        .map(|(f, gain, _)| format!("{f} {:.1}x", gain.median))
        .collect();
    exp.verdict(
        "J04",
        quantized.iter().all(|g| g.1.low > 1.0),
        told.join(", "),
        key,
    )
}

#[cfg(test)]
mod tests {
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
