//! `tern perplexity`: how well a model predicts a text.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use common::lab;
use common::runtime::model::Model;
use common::runtime::perplexity::{self, Score};
use common::runtime::session::{Session, Size};
use sha2::{Digest, Sha256};

use crate::text::{self, BATCH, Engine};

/// Prints nll and perplexity of a text by chunk: each starts from an empty state, and all its positions but the first are scored.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: Engine,
    /// A file of UTF-8 text.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens a chunk.
    #[arg(long, default_value_t = 512, value_parser = lab::number::<usize>(2..))]
    ctx: usize,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let file = args.file.display();
    let words = text::read_text(&args.file)?;
    let gguf = args.engine.gguf()?;
    let tokens = Model::check(&gguf)?.encode(&words);
    let chunks = perplexity::chunks(&tokens, args.ctx).with_context(|| format!("{file}"))?;
    let pool = args.engine.pool()?;
    let size = Size {
        context: args.ctx,
        batch: BATCH,
        proposals: 0,
    };
    let model = args.engine.load(&gguf, size, &pool)?;
    let mut session = Session::new(&model, &pool, size)?;
    let hash: String = Sha256::digest(&words)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    writeln!(
        out,
        "{file}: sha256 {hash}, {} tokens, ctx {}, {} chunks",
        tokens.len(),
        args.ctx,
        chunks.len()
    )?;
    writeln!(out, "chunk        nll  perplexity")?;
    let mut scores = Vec::with_capacity(chunks.len());
    for (i, chunk) in chunks.enumerate() {
        let score = perplexity::chunk(&mut session, chunk)?;
        scores.push(score);
        let Score { nll, perplexity } = perplexity::mean(&[score]);
        writeln!(out, "{:5}  {nll:9.6}  {perplexity:10.4}", i + 1)?;
        out.flush()?;
    }
    let Score { nll, perplexity } = perplexity::mean(&scores);
    writeln!(out, "  all  {nll:9.6}  {perplexity:10.4}")?;
    Ok(ExitCode::SUCCESS)
}
