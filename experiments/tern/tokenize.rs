//! `tern tokenize`: the ids of a text.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use common::runtime::tokenizer::Tokenizer;

use crate::text::{self, Text};

/// Prints the token ids of a text, in one line.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    text: Text,
    /// GGUF file [default: the small model that is built in]
    #[arg(long, value_name = "FILE.gguf")]
    model: Option<PathBuf>,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let gguf = text::gguf(args.model.as_deref())?;
    let ids = Tokenizer::from_gguf(&gguf)?.encode(&args.text.read()?);
    writeln!(out, "{}", text::join(&ids))?;
    Ok(ExitCode::SUCCESS)
}
