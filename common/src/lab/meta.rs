//! What lies beside an experiment's CSV: where its numbers come from.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::files;
use super::ledger::Finding;

/// Version of the files this program writes and reads.
pub const SCHEMA: u32 = 1;

/// The `.json` beside an experiment's CSV.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// Commit of the source, `unknown`, or `published`.
    pub commit: String,
    /// The source differed from the commit.
    pub dirty: bool,
    /// When the files were written, UTC.
    pub date: String,
    /// Run with `--quick`.
    pub quick: bool,
    /// Flags on the command line.
    pub flags: BTreeMap<String, Value>,
    /// Seed of random inputs.
    pub seed: u64,
    /// Rounds of comparisons.
    pub rounds: usize,
    /// Thread counts measured at.
    pub threads: Vec<usize>,
    /// Kernel chosen for each format.
    pub kernels: BTreeMap<String, Kernel>,
    /// Files read, by base name.
    pub inputs: BTreeMap<String, Input>,
    /// Variants that could not run.
    pub refused: Vec<Refusal>,
    /// Equalities that must hold on every machine.
    pub must_hold: Vec<Held>,
    /// The experiment's part of `claims.csv`.
    pub verdicts: Vec<Finding>,
    /// SHA-256 of the CSV.
    pub csv_sha256: String,
}

/// A kernel and why it was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its name, such as `wide-row/avx512-vnni`.
    pub kernel: String,
    /// Why.
    pub why: String,
}

/// A file read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Base name.
    pub file: String,
    /// SHA-256 of its content.
    pub sha256: String,
    /// Size.
    pub bytes: u64,
}

/// A variant that could not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Layout or method.
    pub variant: String,
    /// Instruction set, or empty.
    pub isa: String,
    /// Why it could not.
    pub why: String,
}

/// An equality that must hold, and whether it did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// What is equal to what.
    pub what: String,
    /// Whether it is.
    pub held: bool,
}

impl Meta {
    /// Reads one.
    ///
    /// # Errors
    /// One that names the file; also for another schema version.
    pub fn read(path: &Path) -> Result<Meta> {
        let name = || path.display().to_string();
        let bytes = files::read(path, 16 << 20)?;
        // The version first: another version's fields would only confuse.
        let any: Value = serde_json::from_slice(&bytes).with_context(name)?;
        let schema = &any["schema"];
        ensure!(
            *schema == SCHEMA,
            "{}: schema: found {schema}, expected {SCHEMA} (a file of another version)",
            name()
        );
        serde_json::from_value(any).with_context(name)
    }

    /// Reads that of every experiment in a folder, in order of name; none where there is no folder.
    ///
    /// # Errors
    /// One that names the file.
    pub fn all_in(folder: &Path) -> Result<Vec<Meta>> {
        let entries = match fs::read_dir(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| folder.display().to_string())?,
        };
        let mut paths = Vec::new();
        for entry in entries {
            let name = entry
                .with_context(|| folder.display().to_string())?
                .file_name();
            let name = name.to_string_lossy();
            if name.starts_with("exp-") && name.ends_with(".json") {
                paths.push(folder.join(&*name));
            }
        }
        paths.sort();
        paths.iter().map(|path| Meta::read(path)).collect()
    }
}
