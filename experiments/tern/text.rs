//! What the commands that take text share: where it comes from, and the model that reads it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use common::kernels::Choice;
use common::lab;
use common::runtime::gguf::Gguf;
use common::runtime::model::{GgufSource, Model, Options};
use common::runtime::nano;
use common::runtime::pool::{self, Pool};
use common::runtime::session::Size;
use common::runtime::tokenizer::Tokenizer;
use shared::weights::{Spec, Weights};

/// Tokens of a prefill batch.
pub const BATCH: usize = 64;

/// Of the weights of synthetic models.
const SEED: u64 = 1;

/// The most context that is taken without asking.
const DEFAULT_CONTEXT: usize = 4096;

/// Text, from the command line or from a file.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub struct Text {
    /// The text itself.
    #[arg(long, allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file of UTF-8 text.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

impl Text {
    pub fn read(&self) -> Result<String> {
        match (&self.prompt, &self.file) {
            (Some(prompt), _) => Ok(prompt.clone()),
            (None, Some(file)) => read_text(file),
            (None, None) => Ok(String::new()), // clap asks for one of them
        }
    }

    /// Whether it stood on the command line.
    pub fn is_typed(&self) -> bool {
        self.prompt.is_some()
    }

    /// Where it comes from, for error lines: the flag, or the file.
    pub fn name(&self) -> String {
        match &self.file {
            Some(file) => file.display().to_string(),
            None => "--prompt".into(),
        }
    }
}

/// A whole file of valid UTF-8.
pub fn read_text(file: &Path) -> Result<String> {
    let shown = file.display();
    let metadata = fs::metadata(file).with_context(|| format!("{shown}: cannot read"))?;
    ensure!(
        metadata.is_file(),
        "{shown}: not a regular file, expected one of UTF-8 text"
    );
    let bytes = fs::read(file).with_context(|| format!("{shown}: cannot read"))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow!(
            "{shown}: byte {:#04x} at {at}, expected UTF-8 text",
            error.as_bytes()[at]
        )
    })
}

/// The model and what runs it.
#[derive(clap::Args)]
pub struct Engine {
    /// GGUF file [default: the small model that is built in]
    #[arg(long, value_name = "FILE.gguf")]
    pub model: Option<PathBuf>,
    /// Random weights of that shape instead: 27b, 8b, 1b, or as in 27b/ptq1_0
    #[arg(long, value_name = "SHAPE[/FORMAT]", conflicts_with = "model")]
    synthetic: Option<Spec>,
    /// Threads [default: what affinity and quota allow]
    #[arg(long, value_parser = lab::number(1..=pool::MAX_THREADS))]
    threads: Option<usize>,
    /// Layout, instruction set, or both as layout/isa [default: the fastest]
    #[arg(long, visible_alias = "layout", value_name = "LAYOUT/ISA")]
    kernel: Option<String>,
    /// Leaves the weights where the file is mapped instead of reading them to memory of their own; with --kernel stock.
    #[arg(long, requires = "model")]
    mmap: bool,
}

impl Engine {
    pub fn pool(&self) -> Result<Pool> {
        Pool::new(self.threads.unwrap_or_else(pool::default_threads))
    }

    /// The file alone, without its tensors.
    pub fn gguf(&self) -> Result<Arc<Gguf>> {
        match self.synthetic {
            Some(spec) => Ok(Arc::clone(spec.make(SEED)?.gguf())),
            None => gguf(self.model.as_deref()).map(Arc::new),
        }
    }

    /// Loads the model for a session of this size, and says on standard error which kernels run it.
    pub fn load(&self, gguf: &Arc<Gguf>, size: Size, pool: &Pool) -> Result<Model> {
        let kernel: Choice = match &self.kernel {
            Some(name) => name.parse()?,
            None => Choice::default(),
        };
        let options = Options {
            kernel,
            size: Some(size),
        };
        let model = match &self.model {
            None if let Some(spec) = self.synthetic => {
                Weights::Random(spec.make(SEED)?).load(&options, pool)?
            }
            Some(_) if self.mmap => Model::mapped(gguf, &options, pool)?,
            Some(path) => Model::load(gguf, &GgufSource::open(gguf, path)?, &options, pool)?,
            None => Model::load(gguf, &**gguf, &options, pool)?,
        };
        let mut err = io::stderr().lock();
        let kernels: Vec<String> = model
            .kernels()
            .map(|(format, kernel)| format!("{format} by {}", kernel.name()))
            .collect();
        // Nobody reads it where this fails.
        let _ = writeln!(
            err,
            "{}: {} on {} threads",
            model.name(),
            kernels.join(", "),
            pool.threads()
        );
        if let Some(warning) = model.unrotated_warning() {
            let _ = writeln!(err, "warning: {warning}");
        }
        Ok(model)
    }
}

/// A file, or the built-in model where there is none.
pub fn gguf(path: Option<&Path>) -> Result<Gguf> {
    match path {
        Some(path) => Gguf::open(path),
        None => Gguf::from_bytes("tern-nano-pq2_0.gguf", nano::PQ2_0),
    }
}

/// `--ctx`, or the smaller of 4096 and what the file was made for.
pub fn context(ctx: Option<usize>, gguf: &Gguf) -> Result<usize> {
    let made_for = match gguf.get("qwen35.context_length") {
        Some(value) => value.usize()?,
        None => DEFAULT_CONTEXT,
    };
    Ok(ctx.unwrap_or(made_for.min(DEFAULT_CONTEXT)))
}

/// The ids of a prompt that is to be continued: at least one, and no more than the context takes.
pub fn prompt_ids(
    tokenizer: &Tokenizer,
    text: &str,
    name: &str,
    context: usize,
) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text);
    ensure!(
        !ids.is_empty(),
        "{name}: the text is empty, expected at least one token"
    );
    ensure!(
        ids.len() <= context,
        "{name}: the text has {} tokens, expected at most the context of {context} (--ctx)",
        ids.len()
    );
    Ok(ids)
}

/// Ids in a line.
pub fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}
