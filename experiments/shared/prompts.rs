//! The prompts in `models/`, and how far apart two texts are.

use anyhow::{Context, Result};
use common::lab::{self, Experiment};
use serde::Deserialize;

/// A prompt, and how much is to follow it.
#[derive(Deserialize)]
pub struct Prompt {
    /// `code`, `edit` or `prose`.
    pub kind: String,
    /// Its text.
    pub prompt: String,
    /// Tokens to generate.
    pub n: usize,
}

/// Those of the repo. Announces the file.
///
/// # Errors
/// A file that cannot be read, or is no list of prompts.
pub fn read(exp: &mut Experiment) -> Result<Vec<Prompt>> {
    let file = exp.repo_file("models/prompts.json")?;
    serde_json::from_slice(&lab::read(&file, 1 << 20)?).context("prompts.json")
}

/// Places where one text has another token than the other, or where only one has a token.
pub fn differing(a: &[u32], b: &[u32]) -> usize {
    let places = 0..a.len().max(b.len());
    places.filter(|&i| a.get(i) != b.get(i)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_text_lacks_differs_too() {
        assert_eq!(differing(&[1, 2, 3], &[1, 2, 3]), 0);
        assert_eq!(differing(&[1, 2, 3], &[1, 9]), 2);
        assert_eq!(differing(&[], &[4]), 1);
    }
}
