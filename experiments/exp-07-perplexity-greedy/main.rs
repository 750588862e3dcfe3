//! The same text from every kernel: perplexity by chunk and greedy ids, both packings, one and all threads; and what 8-bit activations
//! cost against dense weights.

mod task;

use std::fmt::Display;
use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::Format;
use common::kernels::{self, Isa};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::gguf::{self, Gguf};
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use shared::decode;
use task::{Answer, Task};

const NAME: &str = "exp-07-perplexity-greedy";

fn main() -> ExitCode {
    lab::run(NAME, &["L19", "L20"], body)
}

fn body(exp: &mut Experiment) -> Result<()> {
    let mut files = vec![exp.model()?];
    if exp.flags().model.is_none() {
        files.push(exp.repo_file("models/tern-nano-ptq1_0.gguf")?);
    }
    let first = Gguf::open(&files[0])?;
    let task = Task::new(exp, &first)?;
    let mut baseline: Option<(Answer, String)> = None;
    let (mut nll_equal, mut ids_equal) = (true, true);
    for file in &files {
        let gguf = Gguf::open(file)?;
        let format = weights_of(&gguf);
        for kernel in kernels::named(format) {
            let mut of_format = gguf.tensors().iter().filter(|t| t.format == format);
            if !of_format.any(|t| kernel.takes(format, t.cols())) {
                continue;
            }
            // The scalar references are slow, and held to the stock one by the tests of the kernels.
            if kernel.isa() == Isa::Scalar && kernel.layout().tile_rows() > 1 {
                continue;
            }
            for threads in exp.thread_counts() {
                exp.progress(format!("{} on {threads} threads", kernel.name()));
                let pool = Pool::new(threads)?;
                let options = Options {
                    kernel: kernel.name().parse()?,
                    size: None,
                };
                let (_, model) = Model::open(file, &options, &pool)?;
                let answer = Answer::of(&model, &pool, &task)?;
                let row = || task.row(kernel, threads);
                let Some((stock, name)) = &baseline else {
                    chunks(exp, &answer, &row)?;
                    baseline = Some((answer, decode::baseline(kernel)));
                    continue;
                };
                let row = |claim: &str, of: &str| {
                    let row = row().claim(claim).baseline(name);
                    row.param("packing", format).param("of", of)
                };
                let equal = answer.nll == stock.nll;
                let key = exp.row(row("L19", "nll").exact(Metric::Equal, equal))?;
                nll_equal &= equal;
                let reason = format!(
                    "nll of {} chunks, every kernel of both packings, bit for bit",
                    stock.nll.len()
                );
                exp.verdict("L19", nll_equal, reason, &key)?;
                let differ = answer.differing(stock);
                let row = row("L20", "differing ids");
                let key = exp.row(row.exact(Metric::Count, differ))?;
                ids_equal &= differ == 0;
                let reason = format!(
                    "greedy ids of {} prompts, every kernel of both packings",
                    stock.ids.len()
                );
                exp.verdict("L20", ids_equal, reason, &key)?;
            }
        }
        exp.kernel_chosen(format.name(), "each in turn", "they are compared");
    }
    exp.must_hold("nll is the same for every kernel and packing", nll_equal);
    exp.must_hold(
        "greedy ids are the same for every kernel and packing",
        ids_equal,
    );
    if let Some((stock, name)) = &baseline {
        dense(exp, &first, &task, stock, name)?;
    }
    Ok(())
}

/// The format of the weights that kernels differ in.
fn weights_of(gguf: &Gguf) -> Format {
    let formats = gguf.tensors().iter().map(|t| t.format);
    formats
        .max_by_key(|f| f.is_ternary())
        .unwrap_or(Format::F32)
}

/// nll of each chunk, from the first kernel: the others have the same.
fn chunks(exp: &mut Experiment, answer: &Answer, row: &dyn Fn() -> Row) -> Result<()> {
    let row = |chunk: &dyn Display| row().claim("L19").param("chunk", chunk);
    for (i, &nll) in answer.nll.iter().enumerate() {
        exp.row(row(&(i + 1)).exact(Metric::Nll, nll))?;
    }
    let mean = answer.mean();
    exp.row(row(&"all").exact(Metric::Nll, mean))?;
    exp.row(row(&"all").exact(Metric::Perplexity, mean.exp()))?;
    Ok(())
}

/// What 8-bit activations cost: the same weights, dense in F32, with float activations.
fn dense(exp: &mut Experiment, file: &Gguf, task: &Task, stock: &Answer, name: &str) -> Result<()> {
    // A dense file of a large model is larger than it is worth.
    if file.file_bytes() > 64 << 20 {
        exp.refused(
            "f32",
            "",
            "the dense form of this model is too large to compare with",
        );
        return Ok(());
    }
    exp.progress("dense F32");
    let folder = tempfile::tempdir().context("a folder for the dense file")?;
    let path = folder.path().join("dense.gguf");
    gguf::convert(file, &path, Format::F32, |_| {})?;
    let threads = exp.all_threads();
    let pool = Pool::new(threads)?;
    let (_, model) = Model::open(&path, &Options::default(), &pool)?;
    let answer = Answer::of(&model, &pool, task)?;
    let Some((_, kernel)) = model.kernels().next() else {
        return Ok(());
    };
    let row = || task.row(kernel, threads);
    chunks(exp, &answer, &row)?;
    let row = |of: &str| row().baseline(name).param("of", of);
    let difference = answer.mean() - stock.mean();
    exp.row(row("nll difference").exact(Metric::Nll, difference))?;
    let chunks = answer.nll.iter().zip(&stock.nll);
    let largest = chunks.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    exp.row(row("largest nll difference of a chunk").exact(Metric::Nll, largest))?;
    let differ = answer.differing(stock);
    exp.row(row("differing ids").exact(Metric::Count, differ))?;
    if let Some(margin) = answer.margin(stock, &model, &pool, task)? {
        exp.row(row("margin at the first differing id").exact(Metric::Nll, margin))?;
    }
    Ok(())
}
