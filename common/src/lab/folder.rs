//! A results folder, read whole.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::ledger::{self, Finding};
use super::machine::Machine;
use super::meta::Meta;
use super::row::{self, Record};
use super::{files, source};

/// Results are small; a file larger than this is something else.
const LIMIT: u64 = 64 << 20;

/// The results of one machine, or of one run of several experiments.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Last part of the path: the machine's name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// `machine.json`.
    pub machine: Machine,
    /// The experiments, in order of name.
    pub runs: Vec<Run>,
    /// `claims.csv`.
    pub findings: Vec<Finding>,
}

/// One experiment's files.
#[derive(Clone, Debug)]
pub struct Run {
    /// The `.json`.
    pub meta: Meta,
    /// The `.csv`.
    pub records: Vec<Record>,
}

impl Folder {
    /// Reads a folder, given as a path or as a name under `results/`.
    ///
    /// # Errors
    /// One that names the file, row and field; also when a CSV is not the one its `.json` names.
    pub fn open(name_or_path: &Path) -> Result<Folder> {
        let path = locate(name_or_path)?;
        let canonical = path.canonicalize().unwrap_or_else(|_| path.clone());
        let name = canonical.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy().into_owned();
        let machine_path = path.join("machine.json");
        let machine = serde_json::from_slice(&files::read(&machine_path, LIMIT)?)
            .with_context(|| machine_path.display().to_string())?;
        let mut runs = Vec::new();
        for meta in Meta::all_in(&path)? {
            let records = read_csv_of(&path, &meta)?;
            runs.push(Run { meta, records });
        }
        let findings = ledger::read_findings(&path.join("claims.csv"))?;
        Ok(Folder {
            name,
            path,
            machine,
            runs,
            findings,
        })
    }

    /// The run of an experiment, by its full name or by `exp-NN`.
    pub fn run(&self, experiment: &str) -> Option<&Run> {
        self.runs.iter().find(|run| {
            let name = run.meta.experiment.as_str();
            name == experiment
                || name
                    .strip_prefix(experiment)
                    .is_some_and(|rest| rest.starts_with('-'))
        })
    }

    /// Every row.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.runs.iter().flat_map(|run| &run.records)
    }

    /// The row of a key in its text form.
    pub fn record(&self, key: &str) -> Option<&Record> {
        self.records().find(|r| r.key().to_string() == key)
    }
}

fn locate(name_or_path: &Path) -> Result<PathBuf> {
    if name_or_path.is_dir() {
        return Ok(name_or_path.to_path_buf());
    }
    let results = source::root().join("results");
    let named = results.join(name_or_path);
    if name_or_path.components().count() == 1 && named.is_dir() {
        return Ok(named);
    }
    bail!(
        "{}: no such folder, and none of that name under results (there: {})",
        name_or_path.display(),
        machines()?.join(", ")
    )
}

/// Names of the folders under `results/`.
///
/// # Errors
/// When `results` cannot be read.
pub fn machines() -> Result<Vec<String>> {
    let results = source::root().join("results");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&results).with_context(|| results.display().to_string())? {
        let entry = entry?;
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn read_csv_of(folder: &Path, meta: &Meta) -> Result<Vec<Record>> {
    let path = folder.join(format!("{}.csv", meta.experiment));
    let name = || path.display().to_string();
    let bytes = files::read(&path, LIMIT)?;
    let records = row::read_csv(&bytes).with_context(name)?;
    let found = files::sha256(&bytes);
    ensure!(
        found == meta.csv_sha256,
        "{}: sha256: found {found:.12}..., expected {:.12}... as {}.json says",
        name(),
        meta.csv_sha256,
        meta.experiment
    );
    for (i, record) in records.iter().enumerate() {
        ensure!(
            record.experiment == meta.experiment,
            "{}: row {}: experiment: found {:?}, expected {:?}",
            name(),
            i + 1,
            record.experiment,
            meta.experiment
        );
        ensure!(
            record.quick == meta.quick,
            "{}: row {}: quick: found {}, but the run was {}quick",
            name(),
            i + 1,
            u8::from(record.quick),
            if meta.quick { "" } else { "not " }
        );
    }
    Ok(records)
}
