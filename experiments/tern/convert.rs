//! `tern convert`: the same model in another format.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};

/// Rewrites a GGUF file in another format.
#[derive(clap::Args)]
pub struct Args {
    /// GGUF file to read.
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// GGUF file to write.
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
}

pub fn run(args: &Args, _out: &mut dyn Write) -> Result<ExitCode> {
    bail!(
        "{}: the reader has not landed yet ({})",
        args.input.display(),
        args.output.display()
    )
}
