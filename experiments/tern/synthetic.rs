//! `tern synthetic`: a model of full size, of random weights.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use common::lab;
use common::runtime::pool::{self, Pool};
use shared::weights::Spec;

use crate::convert::clean_up_on_interrupt;
use crate::inspect;

/// Writes a GGUF file of random ternary weights in the shape of a real model, to measure with. The same seed gives the same file.
#[derive(clap::Args)]
pub struct Args {
    /// 27b, 8b or 1b, in PQ2_0 or, as in 27b/ptq1_0, in PTQ1_0.
    #[arg(value_name = "SHAPE[/FORMAT]")]
    spec: Spec,
    /// GGUF file to write; an old one is replaced once the new one is whole.
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
    /// Seed of the weights.
    #[arg(long, default_value_t = 1, value_parser = lab::number::<u64>(0..))]
    seed: u64,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    clean_up_on_interrupt()?;
    let model = args.spec.make(args.seed)?;
    let bar = inspect::progress(model.gguf().tensors().iter().map(|t| t.bytes).sum());
    let pool = Pool::new(pool::default_threads())?;
    model.write(&args.output, &pool, |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let (file, bytes) = (args.output.display(), model.gguf().file_bytes());
    writeln!(out, "{file}: {}, {bytes} bytes", args.spec)?;
    Ok(ExitCode::SUCCESS)
}
