//! A whole model on both sides: the same greedy ids, and rates.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use common::formats::Format;
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::gguf::{self, Gguf};
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use common::runtime::sampler::{Sampler, Sampling};
use common::runtime::session::{Session, Size};
use common::runtime::speculation;
use common::runtime::tokenizer::Tokenizer;
use peers::llama::Llama;
use serde_json::Value;

/// Formats in which the model runs on each side: what both can read, then what only one can.
const BOTH: Format = Format::F32;
const OURS: [Format; 2] = [Format::Pq2_0, Format::Ptq1_0];

const SIZE: Size = Size {
    context: 512,
    batch: 64,
    proposals: 0,
};

/// The repo's model: dense on both sides, ternary on ours.
pub fn compare(exp: &mut Experiment) -> Result<()> {
    let source = Gguf::open(&exp.model()?)?;
    let folder = tempfile::tempdir().context("a folder for converted files")?;
    let file = |format: Format| folder.path().join(format!("{format}.gguf"));
    for format in [BOTH].iter().chain(&OURS) {
        gguf::convert(&source, &file(*format), *format, |_| {})?;
    }
    same_ids(exp, &source, &file(BOTH))?;
    for threads in exp.thread_counts() {
        rates(exp, threads, &file)?;
    }
    Ok(())
}

/// Greedy ids of the dense model, from libllama and from our runtime, on every prompt.
fn same_ids(exp: &mut Experiment, source: &Gguf, dense: &Path) -> Result<()> {
    let path = exp.repo_file("models/prompts.json")?;
    let prompts: Value = serde_json::from_slice(&lab::read(&path, 1 << 20)?)?;
    let prompts = prompts.as_array().context("prompts.json: no list")?;
    let tokenizer = Tokenizer::from_gguf(source)?;
    let threads = exp.all_threads();
    let pool = Pool::new(threads)?;
    let (_, model) = Model::open(dense, &Options::default(), &pool)?;
    let mut ours = Session::new(&model, &pool, SIZE)?;
    let mut theirs = Llama::open(dense, threads, SIZE.context)?;
    let (mut compared, mut differ) = (0_usize, 0_usize);
    for prompt in prompts {
        let text = prompt["prompt"]
            .as_str()
            .context("prompts.json: no prompt")?;
        let n = if exp.quick() { 8 } else { 64 };
        let prompt = tokenizer.encode(text)?;
        ours.reset();
        ours.advance(&prompt)?;
        let mut sampler = Sampler::new(Sampling::default(), model.vocabulary())?;
        let mut ids = vec![];
        let each = |id| {
            ids.push(id);
            true
        };
        speculation::generate(
            &mut ours,
            &mut sampler,
            n,
            |id| tokenizer.is_end(id),
            None,
            each,
        )?;
        ids.retain(|&id| !tokenizer.is_end(id));
        let wanted = theirs.greedy(&prompt, n)?;
        compared += wanted.len();
        differ += (0..ids.len().max(wanted.len()))
            .filter(|&i| ids.get(i) != wanted.get(i))
            .count();
    }
    ensure!(compared > 0, "prompts.json: nothing to compare");
    let row = || {
        Row::new("dense", "")
            .baseline("libllama ")
            .threads(threads)
            .param("prompts", prompts.len())
    };
    exp.row(row().param("of", "ids").exact(Metric::Count, compared))?;
    exp.row(
        row()
            .param("of", "differing ids")
            .exact(Metric::Count, differ),
    )?;
    exp.must_hold(
        "greedy ids of the dense model are libllama's on every prompt",
        differ == 0,
    );
    Ok(())
}

/// Prefill and decode, all variants in turn.
fn rates(
    exp: &mut Experiment,
    threads: usize,
    file: &dyn Fn(Format) -> std::path::PathBuf,
) -> Result<()> {
    let pool = Pool::new(threads)?;
    let theirs = RefCell::new(Llama::open(&file(BOTH), threads, SIZE.context)?);
    let mut models = Vec::new();
    for format in [BOTH].iter().chain(&OURS) {
        let (_, model) = Model::open(&file(*format), &Options::default(), &pool)?;
        models.push((format!("ours {format}"), model));
    }
    let sessions = models
        .iter()
        .map(|(name, model)| Ok((name, RefCell::new(Session::new(model, &pool, SIZE)?))))
        .collect::<Result<Vec<_>>>()?;
    let baseline = format!("libllama {BOTH}");
    let (prefill, decode) = if exp.quick() { (16, 4) } else { (64, 32) };
    let ids: Vec<u32> = (0..prefill.max(decode)).map(|i| i % 64 + 1).collect();

    for (what, tokens) in [("prefill", prefill), ("decode", decode)] {
        exp.progress(format!("{what}, {threads} threads"));
        let ids = &ids[..tokens as usize];
        // A prefill takes the tokens at once, a decode one by one after a short prompt.
        let step = if what == "prefill" { ids.len() } else { 1 };
        let mut race = exp.race();
        race.add_timed(baseline.as_str(), || {
            let mut llama = theirs.borrow_mut();
            llama.clear();
            if step == 1 {
                llama.decode(&ids[..4], false)?;
            }
            timed(|| {
                ids.chunks(step)
                    .try_for_each(|ids| llama.decode(ids, false))
            })
        });
        for (name, session) in &sessions {
            race.add_timed(name.as_str(), || {
                let mut session = session.borrow_mut();
                session.reset();
                if step == 1 {
                    session.advance(&ids[..4])?;
                }
                timed(|| {
                    ids.chunks(step).try_for_each(|ids| {
                        session.advance(ids)?;
                        session.last_logits().map(drop)
                    })
                })
            });
        }
        let times = race.run()?;
        drop(race);
        let row = |name: &str| {
            Row::new(name, "")
                .threads(threads)
                .param("tokens", tokens)
                .param("phase", what)
        };
        let names = sessions.iter().map(|(name, _)| name.as_str());
        for name in names.clone().chain([baseline.as_str()]) {
            let rate = times.rate(name, Metric::TokensPerS, f64::from(tokens));
            exp.row(row(name).metric(Metric::TokensPerS, rate))?;
        }
        for name in names {
            let speedup = times.speedup(name, &baseline);
            exp.row(
                row(name)
                    .baseline(&baseline)
                    .metric(Metric::Speedup, speedup),
            )?;
        }
    }
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}
