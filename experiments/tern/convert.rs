//! `tern convert`: the same model in another format.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use common::formats::Format;
use common::runtime::gguf::{self, Gguf};

use crate::inspect;

const TARGETS: [&str; 7] = ["pq2_0", "ptq1_0", "q2_0", "f32", "f16", "q8_0", "q4_0"];

/// Rewrites a GGUF file in another format: ternary packings exactly, or dense with the rotation
/// folded back.
#[derive(clap::Args)]
pub struct Args {
    /// GGUF file to read.
    #[arg(value_name = "IN.gguf")]
    input: PathBuf,
    /// GGUF file to write, another than IN.gguf; an old one, also where a link leads to it, is replaced once the new one is whole.
    #[arg(value_name = "OUT.gguf")]
    output: PathBuf,
    /// Format of the weights. pq2_0, ptq1_0 and q2_0 keep codes, scales and rotation as they are.
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(TARGETS).try_map(format))]
    to: Format,
}

fn format(name: String) -> Result<Format> {
    Format::from_name(&name).context("not a format")
}

/// From here on an interrupt removes what is half written before it ends the program.
pub fn clean_up_on_interrupt() -> Result<()> {
    ctrlc::set_handler(|| {
        gguf::remove_unfinished();
        let _ = writeln!(std::io::stderr(), "\ninterrupted: no file was written"); // nobody left to tell
        std::process::exit(130);
    })
    .context("Ctrl-C: cannot watch for it")
}

/// Whether two paths lead to one file, by whatever links.
fn same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    let id = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).map(|about| (about.dev(), about.ino()))
    };
    #[cfg(not(unix))]
    let id = |path: &Path| std::fs::canonicalize(path);
    matches!((id(a), id(b)), (Ok(a), Ok(b)) if a == b)
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    clean_up_on_interrupt()?;
    let file = args.output.display();
    ensure!(
        !same_file(&args.input, &args.output),
        "{file}: is the file to read, {}, expected another to write",
        args.input.display()
    );
    let input = Gguf::open(&args.input)?;
    let bar = inspect::progress(input.tensors().iter().map(|t| t.bytes).sum());
    gguf::convert(&input, &args.output, args.to, |bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let about = std::fs::metadata(&args.output).with_context(|| format!("{file}: cannot read"))?;
    let bytes = about.len();
    writeln!(out, "{file}: {}, {bytes} bytes", args.to)?;
    Ok(ExitCode::SUCCESS)
}
