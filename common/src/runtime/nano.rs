//! The small model of the repo, its prompts and its held-out text, built into the program: everything runs without a download.

use std::path::Path;

use anyhow::Result;

use super::gguf::Gguf;
use super::model::{Model, Options};
use super::pool::Pool;

/// The weights in PQ2_0, a GGUF file.
pub static PQ2_0: &[u8] = include_bytes!("../../../models/tern-nano-pq2_0.gguf");

/// The same weights in PTQ1_0.
pub static PTQ1_0: &[u8] = include_bytes!("../../../models/tern-nano-ptq1_0.gguf");

/// Prompts, JSON: a list of `{name, kind, prompt, n}`.
pub static PROMPTS: &str = include_str!("../../../models/prompts.json");

/// Source code that the model was not trained on.
pub static EVAL_CODE: &str = include_str!("../../../models/eval-code.txt");

/// What llama.cpp computed with the dense form of the model, JSON.
pub static REFERENCE: &str = include_str!("../../../models/reference.json");

/// Loads a file, or the built-in PQ2_0 model where there is none.
///
/// # Errors
/// As [`Model::open`].
pub fn open(path: Option<&Path>, options: &Options, pool: &Pool) -> Result<(Gguf, Model)> {
    match path {
        Some(path) => Model::open(path, options, pool),
        None => load("tern-nano-pq2_0.gguf", PQ2_0, options, pool),
    }
}

/// Loads a file that is in memory.
///
/// # Errors
/// As [`Model::load`].
pub fn load(name: &str, bytes: &[u8], options: &Options, pool: &Pool) -> Result<(Gguf, Model)> {
    let gguf = Gguf::from_bytes(name, bytes)?;
    let model = Model::load(&gguf, &gguf, options, pool)?;
    Ok((gguf, model))
}
