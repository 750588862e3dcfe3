//! A synthetic model whose matrices are ternary on both sides.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Result;
use common::formats::Format;
use common::lab::{Experiment, Metric, Row};
use common::runtime::gguf::{Tensor, Writer};
use common::runtime::model::{Model, Options, Source};
use common::runtime::pool::Pool;
use common::runtime::session::Session;
use common::runtime::shapes::{SHAPE_1B, Shape};
use common::runtime::synthetic::Synthetic;
use half::f16;
use peers::llama::Llama;

use crate::model::{SIZE, rates};

/// What `--quick` runs in place of the 1B.
const TINY: Shape = Shape {
    name: "tiny",
    layers: 4,
    embedding: 512,
    feed_forward: 1024,
    heads: 4,
    kv_heads: 2,
    head_dim: 128,
    rope_dims: 32,
    key_heads: 4,
    value_heads: 4,
    vocabulary: 1024,
    hadamard: 256,
    ..SHAPE_1B
};

/// Both sides quantize activations to Q8_K but add up floats in another order. A last bit can move a quant by one, and that moves
/// others in every layer that follows, until the sides differ by what quantizing costs: some percent of the logits' RMS.
const ROUNDING: f64 = 0.1;

/// Rates with all threads. libllama gets files without the rotation of activations, which it does not know; one of them runs on
/// our side too, so that logits can be compared. Our other models are rotated, as published ones are, and pay for that.
pub fn compare(exp: &mut Experiment, folder: &Path) -> Result<()> {
    let shape = if exp.quick() { TINY } else { SHAPE_1B };
    let threads = exp.all_threads();
    let pool = Pool::new(threads)?;
    let seed = exp.flags().seed;
    let options = Options::default();

    exp.progress(format!("{}: writing the files", shape.name));
    let source = Synthetic::new(&shape, Format::Pq2_0, seed)?;
    let file = |format: Format| folder.join(format!("{}-{format}.gguf", shape.name));
    let mut theirs = Vec::new();
    for format in [Format::Tq2_0, Format::Tq1_0, Format::Q2_0] {
        write(&source, format, &file(format))?;
        let llama = Llama::open(&file(format), threads, SIZE.context)?;
        theirs.push((format!("libllama {format}"), RefCell::new(llama)));
    }
    let mut ours = Vec::new();
    let (_, same) = Model::open(&file(Format::Tq2_0), &options, &pool)?;
    ours.push((format!("ours {} unrotated", Format::Tq2_0), same));
    for format in [Format::Pq2_0, Format::Ptq1_0] {
        let synthetic = Synthetic::new(&shape, format, seed)?;
        let model = Model::load(synthetic.gguf(), &synthetic, &options, &pool)?;
        ours.push((format!("ours {format}"), model));
    }

    same_logits(exp, shape.name, &pool, &theirs[0], &ours[0])?;
    let (tokens, few) = match exp.quick() {
        true => ([16, 4], [8, 2]),
        false => ([64, 16], [8, 2]),
    };
    rates(exp, shape.name, &pool, &theirs[..2], &ours, tokens)?;
    // A second a token: fewer of them.
    rates(exp, shape.name, &pool, &theirs[2..], &ours, few)
}

/// The same file on both sides.
fn same_logits(
    exp: &mut Experiment,
    shape: &str,
    pool: &Pool,
    (peer, theirs): &(String, RefCell<Llama>),
    (name, ours): &(String, Model),
) -> Result<()> {
    let ids: Vec<u32> = (1..=32).collect();
    let mut session = Session::new(ours, pool, SIZE)?;
    session.advance(&ids)?;
    let mut llama = theirs.borrow_mut();
    llama.clear();
    llama.decode(&ids, false)?;
    let pairs = session.last_logits()?.iter().zip(llama.logits()?);
    let (mut difference, mut size) = (0.0, 0.0);
    for (&a, &b) in pairs {
        difference += f64::from(a - b).powi(2);
        size += f64::from(b).powi(2);
    }
    let error = (difference / size).sqrt();
    exp.row(
        Row::new(name, "")
            .baseline(peer)
            .exact(Metric::RelativeError, error)
            .threads(pool.threads())
            .param("model", shape)
            .param("of", "logits"),
    )?;
    exp.must_hold(
        "logits of the synthetic model are libllama's within the rounding of 8-bit activations",
        error < ROUNDING,
    );
    Ok(())
}

/// Writes the model with its ternary tensors in `to`, whose blocks may be longer, and without its rotation. The others become F32:
/// ggml would round activations to BF16 for a product with BF16 weights.
fn write(source: &Synthetic, to: Format, path: &Path) -> Result<()> {
    let gguf = source.gguf();
    let target = |t: &Tensor| match t.format.is_ternary() {
        true => to,
        false => Format::F32,
    };
    let mut writer = Writer::new();
    for value in gguf.keys() {
        if !value.key().starts_with("prism.") {
            writer.copy(&value)?;
        }
    }
    for t in gguf.tensors() {
        writer.tensor(&t.name, &t.dims, target(t))?;
    }
    writer.write(path, |i, out| {
        let t = &gguf.tensors()[i];
        let mut bytes = vec![0; usize::try_from(t.bytes)?];
        source.read(t, 0, &mut bytes)?;
        if t.format.is_ternary() {
            bytes = repack(t, &bytes, to)?;
        } else if t.format != Format::F32 {
            let mut values = vec![0.0_f32; t.weights()];
            t.format.dequantize(&bytes, &mut values)?;
            bytes = bytemuck::cast_slice(&values).to_vec();
        }
        Ok(out.write_all(&bytes)?)
    })
}

/// The same codes. A block that is longer than the tensor's takes the scale of the first that it covers: all are alike.
fn repack(t: &Tensor, bytes: &[u8], to: Format) -> Result<Vec<u8>> {
    let (from, weights) = (t.format, t.weights());
    let mut codes = vec![0; weights];
    let mut scales = vec![f16::ZERO; weights / from.block_weights()];
    from.unpack(bytes, &mut codes, &mut scales)?;
    let first = |block: usize| scales[block * to.block_weights() / from.block_weights()];
    let scales: Vec<f16> = (0..weights / to.block_weights()).map(first).collect();
    let mut packed = vec![0; to.matrix_bytes(t.rows(), t.cols())?];
    to.pack(&codes, &scales, &mut packed)?;
    Ok(packed)
}
