//! The repo's model on both sides: the same greedy ids, and rates; and what times whole models.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use common::formats::Format;
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::gguf::{self, Gguf};
use common::runtime::model::{Model, Options};
use common::runtime::pool::Pool;
use common::runtime::session::{Session, Size};
use common::runtime::speculation;
use common::runtime::tokenizer::Tokenizer;
use peers::llama::Llama;
use serde_json::Value;

/// Dense on both sides, ternary on ours: libllama knows neither format.
const FORMATS: [Format; 3] = [Format::F32, Format::Pq2_0, Format::Ptq1_0];

/// Of every session.
pub const SIZE: Size = Size {
    context: 512,
    batch: 64,
    proposals: 0,
};

/// The repo's model.
pub fn compare(exp: &mut Experiment, folder: &Path) -> Result<()> {
    let source = Gguf::open(&exp.model()?)?;
    let file = |format: Format| folder.join(format!("nano-{format}.gguf"));
    for format in FORMATS {
        gguf::convert(&source, &file(format), format, |_| {})?;
    }
    same_ids(exp, &source, &file(Format::F32))?;
    let tokens = if exp.quick() { [16, 4] } else { [64, 32] };
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let llama = Llama::open(&file(Format::F32), threads, SIZE.context)?;
        let theirs = [("libllama f32".to_owned(), RefCell::new(llama))];
        let ours = FORMATS.map(|format| {
            let (_, model) = Model::open(&file(format), &Options::default(), &pool)?;
            Ok((format!("ours {format}"), model))
        });
        let ours = ours.into_iter().collect::<Result<Vec<_>>>()?;
        rates(exp, "nano", &pool, &theirs, &ours, tokens)?;
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
        let prompt = tokenizer.encode(text);
        ours.reset();
        ours.advance(&prompt)?;
        let is_end = |id| tokenizer.is_end(id);
        let (mut ids, ..) = speculation::greedy(&mut ours, n, is_end, None)?;
        ids.retain(|&id| !is_end(id));
        let wanted = theirs.greedy(&prompt, n)?;
        compared += wanted.len();
        differ += (0..ids.len().max(wanted.len()))
            .filter(|&i| ids.get(i) != wanted.get(i))
            .count();
    }
    ensure!(compared > 0, "prompts.json: nothing to compare");
    let row = || {
        Row::new("ours f32", "")
            .baseline("libllama f32")
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

/// A prefill of so many tokens and a decode of so many, all variants in turn.
pub fn rates(
    exp: &mut Experiment,
    shape: &str,
    pool: &Pool,
    theirs: &[(String, RefCell<Llama>)],
    ours: &[(String, Model)],
    tokens: [usize; 2],
) -> Result<()> {
    let threads = pool.threads();
    let sessions = ours
        .iter()
        .map(|(name, model)| Ok((name, RefCell::new(Session::new(model, pool, SIZE)?))))
        .collect::<Result<Vec<_>>>()?;
    for (phase, tokens) in ["prefill", "decode"].into_iter().zip(tokens) {
        exp.progress(format!("{shape}: {phase}, {threads} threads"));
        // A prefill takes the tokens at once, a decode one by one after a short prompt.
        let (prompt, step) = match phase {
            "prefill" => (0, tokens),
            _ => (2, 1),
        };
        let ids: Vec<u32> = (0..prompt + tokens).map(|i| i as u32 % 64 + 1).collect();
        let (prompt, ids) = ids.split_at(prompt);
        let mut race = exp.race();
        for (name, llama) in theirs {
            race.add_timed(name, move || {
                let mut llama = llama.borrow_mut();
                llama.clear();
                prompt
                    .chunks(SIZE.batch)
                    .try_for_each(|ids| llama.decode(ids, false))?;
                timed(|| {
                    ids.chunks(step)
                        .try_for_each(|ids| llama.decode(ids, false))
                })
            });
        }
        for (name, session) in &sessions {
            race.add_timed(name.as_str(), move || {
                let mut session = session.borrow_mut();
                session.reset();
                prompt
                    .chunks(SIZE.batch)
                    .try_for_each(|ids| session.advance(ids))?;
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
        let params = |row: Row| {
            row.threads(threads)
                .param("model", shape)
                .param("phase", phase)
                .param("tokens", tokens)
        };
        let peers = || theirs.iter().map(|(name, _)| name);
        for name in peers().chain(ours.iter().map(|(name, _)| name)) {
            let rate = times.rate(name, Metric::TokensPerS, tokens as f64);
            exp.row(params(Row::new(name, "").metric(Metric::TokensPerS, rate)))?;
        }
        for (name, _) in ours {
            for peer in peers() {
                let speedup = times.speedup(name, peer);
                let row = Row::new(name, "").baseline(peer);
                exp.row(params(row.metric(Metric::Speedup, speedup)))?;
            }
        }
    }
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}
