//! `tern inspect`: what a GGUF file holds.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

/// Prints keys, tensors, and what a run needs in memory.
#[derive(clap::Args)]
pub struct Args {
    /// GGUF file.
    #[arg(value_name = "FILE.gguf")]
    file: PathBuf,
    /// Context length, in tokens, for the memory table.
    #[arg(long)]
    ctx: Option<usize>,
}

pub fn run(args: &Args, _out: &mut dyn Write) -> Result<ExitCode> {
    bail!(
        "{}: the reader has not landed yet (--ctx {:?})",
        args.file.display(),
        args.ctx
    )
}
