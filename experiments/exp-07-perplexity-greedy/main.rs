//! The same text from every kernel: perplexity by chunk and greedy ids, both packings, one and all threads; and what 8-bit activations
//! cost against dense weights.

use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::Format;
use common::kernels::{self, Isa, Kernel};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::gguf::{self, Gguf};
use common::runtime::model::{Model, Options};
use common::runtime::perplexity;
use common::runtime::pool::Pool;
use common::runtime::sampler::{Sampler, Sampling};
use common::runtime::session::{Session, Size};
use common::runtime::speculation;
use common::runtime::tokenizer::Tokenizer;
use serde::Deserialize;

const NAME: &str = "exp-07-perplexity-greedy";
/// Tokens a chunk.
const CONTEXT: usize = 128;
const SIZE: Size = Size {
    context: 512,
    batch: 64,
    proposals: 0,
};

fn main() -> ExitCode {
    lab::run(NAME, &["L19", "L20"], body)
}

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    n: usize,
}

/// What every kernel is given.
struct Task {
    text: Vec<u32>,
    prompts: Vec<(Vec<u32>, usize)>,
    /// Of the text, for rows.
    hash: String,
}

/// What a kernel makes of it.
#[derive(PartialEq)]
struct Answer {
    nll: Vec<f64>,
    ids: Vec<Vec<u32>>,
}

impl Answer {
    fn of(model: &Model, pool: &Pool, tokenizer: &Tokenizer, task: &Task) -> Result<Self> {
        let mut session = Session::new(model, pool, SIZE)?;
        let chunks = perplexity::chunks(&task.text, CONTEXT)?;
        let nll = chunks
            .map(|c| Ok(perplexity::chunk(&mut session, c)?.nll))
            .collect::<Result<_>>()?;
        let mut greedy = |(prompt, n): &(Vec<u32>, usize)| -> Result<Vec<u32>> {
            session.reset();
            session.advance(prompt)?;
            let mut sampler = Sampler::new(Sampling::default(), model.vocabulary())?;
            let mut ids = vec![];
            let each = |id| {
                ids.push(id);
                true
            };
            speculation::generate(
                &mut session,
                &mut sampler,
                *n,
                |id| tokenizer.is_end(id),
                None,
                each,
            )?;
            Ok(ids)
        };
        Ok(Answer {
            nll,
            ids: task
                .prompts
                .iter()
                .map(&mut greedy)
                .collect::<Result<_>>()?,
        })
    }

    fn mean(&self) -> f64 {
        self.nll.iter().sum::<f64>() / self.nll.len() as f64
    }

    /// Ids that differ.
    fn differing(&self, other: &Answer) -> usize {
        let pairs = self.ids.iter().zip(&other.ids);
        pairs
            .map(|(a, b)| {
                (0..a.len().max(b.len()))
                    .filter(|&i| a.get(i) != b.get(i))
                    .count()
            })
            .sum()
    }
}

fn body(exp: &mut Experiment) -> Result<()> {
    let mut files = vec![exp.model()?];
    if exp.flags().model.is_none() {
        files.push(exp.repo_file("models/tern-nano-ptq1_0.gguf")?);
    }
    let text_file = exp.repo_file("models/eval-code.txt")?;
    let text = String::from_utf8(lab::read(&text_file, 1 << 20)?).context("eval-code.txt")?;
    let prompts = exp.repo_file("models/prompts.json")?;
    let prompts: Vec<Prompt> =
        serde_json::from_slice(&lab::read(&prompts, 1 << 20)?).context("prompts.json")?;
    let first = Gguf::open(&files[0])?;
    let tokenizer = Tokenizer::from_gguf(&first)?;
    // With --quick, one chunk and two short prompts.
    let (most_chunks, most_prompts, most_ids) = if exp.quick() {
        (1, 2, 12)
    } else {
        (12, usize::MAX, usize::MAX)
    };
    let mut tokens = tokenizer.encode(&text)?;
    tokens.truncate(most_chunks * CONTEXT);
    let prompts = prompts.iter().take(most_prompts);
    let prompts = prompts
        .map(|p| Ok((tokenizer.encode(&p.prompt)?, p.n.min(most_ids))))
        .collect::<Result<_>>()?;
    let task = Task {
        text: tokens,
        prompts,
        hash: lab::sha256(text.as_bytes()),
    };

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
                let answer = Answer::of(&model, &pool, &tokenizer, &task)?;
                let Some((stock, name)) = &baseline else {
                    chunks(exp, &answer, kernel, threads, &task)?;
                    baseline = Some((
                        answer,
                        format!("{} {}", kernel.layout().name(), kernel.isa()),
                    ));
                    continue;
                };
                let row = || {
                    row(kernel, threads, &task)
                        .param("packing", format)
                        .baseline(name.clone())
                };
                let equal = answer.nll == stock.nll;
                let key = exp.row(
                    row()
                        .claim("L19")
                        .param("of", "nll")
                        .exact(Metric::Equal, equal),
                )?;
                nll_equal &= equal;
                let reason = format!(
                    "nll of {} chunks, every kernel of both packings, bit for bit",
                    stock.nll.len()
                );
                exp.verdict("L19", nll_equal, reason, &key)?;
                let differ = answer.differing(stock);
                let key = exp.row(
                    row()
                        .claim("L20")
                        .param("of", "differing ids")
                        .exact(Metric::Count, differ),
                )?;
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
        dense(exp, &first, &tokenizer, &task, stock, name)?;
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

fn row(kernel: &Kernel, threads: usize, task: &Task) -> Row {
    Row::new(kernel.layout().name(), kernel.isa().name())
        .threads(threads)
        .param("text", &task.hash[..12])
        .param("tokens", task.text.len())
        .param("ctx", CONTEXT)
}

/// nll of each chunk, from the first kernel: the others have the same.
fn chunks(
    exp: &mut Experiment,
    answer: &Answer,
    kernel: &Kernel,
    threads: usize,
    task: &Task,
) -> Result<()> {
    for (i, &nll) in answer.nll.iter().enumerate() {
        exp.row(
            row(kernel, threads, task)
                .claim("L19")
                .param("chunk", i + 1)
                .exact(Metric::Nll, nll),
        )?;
    }
    let mean = answer.mean();
    exp.row(
        row(kernel, threads, task)
            .claim("L19")
            .param("chunk", "all")
            .exact(Metric::Nll, mean),
    )?;
    exp.row(
        row(kernel, threads, task)
            .claim("L19")
            .param("chunk", "all")
            .exact(Metric::Perplexity, mean.exp()),
    )?;
    Ok(())
}

/// What 8-bit activations cost: the same weights, dense in F32, with float activations.
fn dense(
    exp: &mut Experiment,
    file: &Gguf,
    tokenizer: &Tokenizer,
    task: &Task,
    stock: &Answer,
    name: &str,
) -> Result<()> {
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
    let answer = Answer::of(&model, &pool, tokenizer, task)?;
    let Some((_, kernel)) = model.kernels().next() else {
        return Ok(());
    };
    chunks(exp, &answer, kernel, threads, task)?;
    let row = || row(kernel, threads, task).baseline(name);
    exp.row(
        row()
            .param("of", "nll difference")
            .exact(Metric::Nll, answer.mean() - stock.mean()),
    )?;
    let apart = answer
        .nll
        .iter()
        .zip(&stock.nll)
        .map(|(a, b)| (a - b).abs());
    exp.row(
        row()
            .param("of", "largest nll difference of a chunk")
            .exact(Metric::Nll, apart.fold(0.0, f64::max)),
    )?;
    exp.row(
        row()
            .param("of", "differing ids")
            .exact(Metric::Count, answer.differing(stock)),
    )?;
    if let Some(margin) = margin(&model, &pool, task, &answer, stock)? {
        exp.row(
            row()
                .param("of", "margin at the first differing id")
                .exact(Metric::Nll, margin),
        )?;
    }
    Ok(())
}

/// By how much `model` preferred its own id to that of `stock` where their texts first part, as a difference of logits.
fn margin(
    model: &Model,
    pool: &Pool,
    task: &Task,
    own: &Answer,
    stock: &Answer,
) -> Result<Option<f64>> {
    let texts = task.prompts.iter().zip(own.ids.iter().zip(&stock.ids));
    for ((prompt, _), (own, stock)) in texts {
        let pairs = own.iter().zip(stock);
        let Some(at) = pairs.clone().position(|(a, b)| a != b) else {
            continue;
        };
        let mut session = Session::new(model, pool, SIZE)?;
        session.advance(&[prompt, &own[..at]].concat())?;
        let logits = session.last_logits()?;
        let of = |ids: &[u32]| f64::from(logits[ids[at] as usize]);
        return Ok(Some(of(own) - of(stock)));
    }
    Ok(None)
}
