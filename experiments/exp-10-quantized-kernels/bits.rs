//! Bits of the quantized kernels, and the errors of all. Claims J01, J02 and J09.

use anyhow::{Context, Result};
use common::formats::{Block, BlockQ4_0, BlockQ8_0, Format};
use common::kernels::dots;
use common::kernels::{Activations, Form, MatrixRef};
use common::lab::{Experiment, Metric, Row};
use common::runtime::gguf::Gguf;
use rand::RngExt;
use shared::dense;

use crate::{QUANTIZED, floats, kernels_of};

/// Rows that source J checks.
const ROWS: usize = 130;
const COLS: usize = 4096;

/// Whole rows in a format.
struct Case {
    source: &'static str,
    format: Format,
    cols: usize,
    bytes: Vec<u8>,
}

/// Random blocks, quantized random weights, and the model's weights as floats, quantized.
fn cases(exp: &mut Experiment) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let weights = floats(&mut exp.rng("weights"), ROWS * COLS);
    let file = Gguf::open(&exp.model()?)?;
    for format in QUANTIZED {
        let mut add = |source, cols, bytes| {
            cases.push(Case {
                source,
                format,
                cols,
                bytes,
            });
        };
        add("quantized", COLS, dense::quantize(format, COLS, &weights)?);
        // Any code, and scales of any sign from 2^-3 to 2^1: a sign, an exponent, ten bits.
        let rng = &mut exp.rng("blocks");
        let mut bytes = vec![0; format.matrix_bytes(ROWS, COLS)?];
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            rng.fill(&mut *block);
            let d: u16 = rng.random_range(0x3000..0x4000) | u16::from(rng.random::<bool>()) << 15;
            block[..2].copy_from_slice(&d.to_le_bytes());
        }
        add("blocks", COLS, bytes);
        let ternary = file.tensors().iter().filter(|t| t.format.is_ternary());
        for tensor in ternary.take(40) {
            let (rows, cols) = (tensor.rows().min(ROWS), tensor.cols());
            let mut weights = vec![0.0; rows * cols];
            let stock = &file.data(tensor)[..tensor.format.matrix_bytes(rows, cols)?];
            tensor.format.dequantize(stock, &mut weights)?;
            add("model", cols, dense::quantize(format, cols, &weights)?);
        }
    }
    Ok(cases)
}

/// A dot product in f64.
struct Exact {
    dot: f64,
    /// The sum of |w x|.
    magnitude: f64,
}

impl Exact {
    fn of(w: &[f32], x: &[f32]) -> Exact {
        let products = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        let (dot, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
        Exact { dot, magnitude }
    }

    /// How far off a result is, over the magnitude.
    fn error(&self, y: impl Into<f64>) -> f64 {
        (y.into() - self.dot).abs() / self.magnitude
    }
}

/// One row by one token, computed here and not by a kernel.
struct Expected {
    /// f32, with the two scales in the format's own order, and in the other's.
    own: f32,
    other: f32,
    /// f64: exact integer sums of blocks times scales.
    sums: f64,
    /// Dequantized weights by dequantized activations.
    exact: Exact,
}

fn expected(format: Format, row: &[u8], x: &[BlockQ8_0]) -> Result<Expected> {
    let mut w = vec![0.0; 32 * x.len()];
    format.dequantize(row, &mut w)?;
    let dequantized: Vec<f32> = x.iter().flat_map(|x| x.dequantize()).collect();
    let mut e = Expected {
        own: 0.0,
        other: 0.0,
        sums: 0.0,
        exact: Exact::of(&w, &dequantized),
    };
    for (bytes, x) in row.chunks_exact(format.block_bytes()).zip(x) {
        let (d, codes) = if format == Format::Q8_0 {
            let block: BlockQ8_0 = bytemuck::pod_read_unaligned(bytes);
            ({ block.d }.to_f32(), { block.qs }.map(i32::from))
        } else {
            let block: BlockQ4_0 = bytemuck::pod_read_unaligned(bytes);
            let codes = block.codes().map(|u| i32::from(u) - 8);
            ({ block.d }.to_f32(), codes)
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
    }
    Ok(e)
}

/// J01 and J02: every kernel of Q8_0 and Q4_0 against the two orders written out here, and F32 against f64.
pub fn quantized(exp: &mut Experiment) -> Result<()> {
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
                let by_row = case.bytes.chunks_exact(format.row_bytes(case.cols)?);
                let by_row = by_row.map(|row| expected(format, row, &blocks));
                let by_row = by_row.collect::<Result<Vec<_>>>()?;
                for (kernel, equal) in kernels.iter().zip(&mut equal) {
                    let mut out = vec![f32::NAN; by_row.len()];
                    let w = MatrixRef::new(kernel.layout(), by_row.len(), case.cols, &case.bytes)?;
                    kernel.multiply(&w, &x, &mut out)?;
                    let pairs = out.iter().zip(&by_row);
                    let same = pairs.filter(|(y, e)| y.to_bits() == e.own.to_bits());
                    *equal += same.count();
                }
                rows += by_row.len();
                for e in &by_row {
                    orders_differ += usize::from(e.own.to_bits() != e.other.to_bits());
                    apart = apart.max((e.sums - e.exact.dot).abs());
                    exact = exact.max(e.exact.error(e.sums));
                    rounded = rounded.max(e.exact.error(e.own));
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
            let other = row("rows-that-the-other-order-changes", "", "J02");
            exp.row(other.exact(Metric::Count, orders_differ))?;
            exp.row(row("f64-sums", "", "J01").exact(Metric::RelativeError, exact))?;
            let j01 = exp.row(row("f32-sums", "", "J01").exact(Metric::RelativeError, rounded))?;
            let reason = format!(
                "in double the two differ by {apart:.1e} at most, absolute; in f32 a kernel's sums are as far off as this row says"
            );
            exp.verdict("J01", apart < 5e-7, reason, &j01)?;
        }
    }
    let what = "every kernel of Q8_0 and Q4_0 gives the bits of its own order of the scales";
    exp.must_hold(what, same);
    let worst = float_errors(exp)?;
    let reason = format!(
        "{compared} rows of Q8_0 and Q4_0, every kernel; F32 stays within {worst:.1e} of the sum of |w x|"
    );
    let holds = same && worst <= 1e-6;
    exp.verdict("J02", holds, reason, &key.context("no kernel")?)
}

/// The largest error of F32 kernels and dot products over the sum of |w x|, against f64.
fn float_errors(exp: &mut Experiment) -> Result<f64> {
    let mut worst = 0f64;
    for cols in [COLS, COLS + 4] {
        let w = floats(&mut exp.rng("w"), ROWS * cols);
        let x = floats(&mut exp.rng("x"), cols);
        let rows = || w.chunks_exact(cols);
        let exact: Vec<_> = rows().map(|w| Exact::of(w, &x)).collect();
        let mut most = |found: &[f32]| {
            let errors = exact.iter().zip(found).map(|(exact, y)| exact.error(*y));
            let most = errors.fold(0.0, f64::max);
            worst = worst.max(most);
            most
        };
        let bytes = dense::quantize(Format::F32, cols, &w)?;
        let activations = Activations::of(Form::F32, cols, &x)?;
        for kernel in kernels_of(Format::F32) {
            let mut out = vec![f32::NAN; ROWS];
            let w = MatrixRef::new(kernel.layout(), ROWS, cols, &bytes)?;
            kernel.multiply(&w, &activations, &mut out)?;
            let row = Row::new("kernel", kernel.isa().name()).claim("J02");
            let row = row.params([("format", "F32")]).param("cols", cols);
            exp.row(row.exact(Metric::RelativeError, most(&out)))?;
        }
        for way in dots::all() {
            let out: Vec<f32> = rows().map(|w| way.dot(w, &x)).collect();
            let row = crate::dots::row(&way, cols).claim("J02");
            exp.row(row.exact(Metric::RelativeError, most(&out)))?;
        }
    }
    Ok(worst)
}

/// J09: Q8_0 weights widened to float, by float activations, in two orders of addition.
pub fn widened(exp: &mut Experiment) -> Result<()> {
    let weights = floats(&mut exp.rng("weights"), ROWS * COLS);
    let bytes = dense::quantize(Format::Q8_0, COLS, &weights)?;
    let x = floats(&mut exp.rng("activations"), COLS);
    let mut w = vec![0.0; ROWS * COLS];
    Format::Q8_0.dequantize(&bytes, &mut w)?;
    let lanes = dots::all().pop().context("no way to multiply")?;
    let (mut differ, mut worst) = (0, 0f64);
    for w in w.chunks_exact(COLS) {
        let found = [dots::scalar(w, &x), lanes.dot(w, &x)];
        differ += usize::from(found[0].to_bits() != found[1].to_bits());
        let exact = Exact::of(w, &x);
        worst = found
            .into_iter()
            .map(|y| exact.error(y))
            .fold(worst, f64::max);
    }
    let row = |variant: &str| {
        let row = Row::new(variant, "").claim("J09");
        row.params([("format", "Q8_0 by F32")]).param("rows", ROWS)
    };
    exp.row(row("rows-that-two-orders-change").exact(Metric::Count, differ))?;
    let key = exp.row(row("widened").exact(Metric::RelativeError, worst))?;
    let reason = format!(
        "two orders of addition differ in {differ} of {ROWS} rows, by {worst:.1e} of the sum of |w x| at most"
    );
    exp.verdict("J09", differ > 0 && worst < 1e-6, reason, &key)
}
