//! An experiment from its flags to its files.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, CommandFactory, FromArgMatches, Parser};
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use serde_json::{Value, json};

use super::flags::{self, Flags};
use super::ledger::{self, Finding, Verdict};
use super::machine::{self, Machine};
use super::meta::{Held, Input, Kernel, Meta, Refusal, SCHEMA};
use super::progress::Progress;
use super::race::Race;
use super::row::{self, Key, Record, Row};
use super::sums::{SUMS, Sums};
use super::{files, source, table};
use crate::runtime::gguf::Gguf;

/// Default rounds. With 15 the bootstrap interval of a median spans the 4th to the 12th sample, which
/// covers the true median 96% of the time; with 5 it spans them all (94%).
const ROUNDS: usize = 15;
const QUICK_ROUNDS: usize = 5;

/// Files of results are small; anything larger is something else.
const LIMIT: u64 = 64 << 20;

/// An experiment that is running: what it was asked, and what it found so far.
pub struct Experiment {
    name: &'static str,
    claims: &'static [&'static str],
    flags: Flags,
    flags_given: BTreeMap<String, Value>,
    machine: Machine,
    machine_name: String,
    folder: PathBuf,
    emulated: bool,
    progress: Progress,
    records: Vec<(Row, Key)>,
    findings: Vec<Finding>,
    kernels: BTreeMap<String, Kernel>,
    inputs: BTreeMap<String, Input>,
    refused: Vec<Refusal>,
    held: Vec<Held>,
    huge_pages: Option<bool>,
}

/// Flags for an experiment that takes none of its own.
#[derive(Args)]
struct NoFlags {}

#[derive(Parser)]
struct Cli<E: Args> {
    #[command(flatten)]
    lab: Flags,
    #[command(flatten)]
    own: E,
}

/// Runs an experiment that takes the common flags: parses them, prints the header, calls `body`,
/// prints tables and verdicts, writes the files.
///
/// `name` is the experiment's folder, `claims` what it must give a verdict on. Exit code 0: it ran,
/// whatever its verdicts; 1: something that must hold on every machine did not; 2: bad flags or
/// files, with one line on standard error.
pub fn run(
    name: &'static str,
    claims: &'static [&'static str],
    body: impl FnOnce(&mut Experiment) -> Result<()>,
) -> ExitCode {
    run_with::<NoFlags>(name, claims, |experiment, _| body(experiment))
}

/// Like [`run`] for an experiment with flags of its own.
pub fn run_with<E: Args>(
    name: &'static str,
    claims: &'static [&'static str],
    body: impl FnOnce(&mut Experiment, &E) -> Result<()>,
) -> ExitCode {
    run_from::<E>(name, claims, std::env::args_os(), machine::emulated(), body)
}

fn run_from<E: Args>(
    name: &'static str,
    claims: &'static [&'static str],
    args: impl IntoIterator<Item = std::ffi::OsString>,
    emulated: bool,
    body: impl FnOnce(&mut Experiment, &E) -> Result<()>,
) -> ExitCode {
    let mut command = flags::taking_negative_numbers(Cli::<E>::command().name(name));
    let parsed = command.try_get_matches_from_mut(args).and_then(|matches| {
        let cli = Cli::<E>::from_arg_matches(&matches)?;
        Ok((cli, matches))
    });
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return refuse_flags(name, &error),
    };
    // A second interrupt, or one that comes before anything is written, loses nothing: files are
    // renamed whole. The handler is missing only where the system refuses it; then the default ends the run.
    let _ = ctrlc::set_handler(|| {
        let _lock = files::wait_for_writer();
        let _ = writeln!(
            io::stderr(),
            "\ninterrupted: earlier files are as they were"
        );
        std::process::exit(130);
    });
    let outcome = given(&command, &matches)
        .and_then(|given| Experiment::start(name, claims, cli.lab, given, emulated))
        .and_then(|mut experiment| {
            let done = body(&mut experiment, &cli.own);
            experiment.progress.finish();
            done?;
            experiment.finish()
        });
    match outcome {
        Ok(code) => code,
        Err(error) => complain(name, &format!("{error:#}")),
    }
}

/// Help and version go out whole; a bad flag becomes one line and exit code 2.
pub fn refuse_flags(program: &str, error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    ) {
        let _ = error.print(); // a closed pipe is no failure
        return ExitCode::SUCCESS;
    }
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    let line = words.join(" ");
    let line = line.strip_prefix("error: ").unwrap_or(&line);
    complain(program, &format!("{line} (see {program} --help)"))
}

/// One line on standard error, whatever the message holds, and exit code 2.
pub fn complain(program: &str, message: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "{program}: {}", one_line(message)); // nobody left to tell
    ExitCode::from(2)
}

/// A message with its control characters escaped.
pub fn one_line(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for c in message.chars() {
        if c.is_control() {
            line.extend(c.escape_debug());
        } else {
            line.push(c);
        }
    }
    line
}

impl Experiment {
    fn start(
        name: &'static str,
        claims: &'static [&'static str],
        flags: Flags,
        flags_given: BTreeMap<String, Value>,
        emulated: bool,
    ) -> Result<Experiment> {
        if let Some(model) = &flags.model {
            Gguf::open(model)?; // refused before anything is measured
        }
        let machine = Machine::here();
        let machine_name = flags.machine.clone().unwrap_or_else(|| machine.slug());
        let folder = flags.out.clone().unwrap_or_else(|| {
            let kind = if flags.quick {
                "target/quick"
            } else {
                "results"
            };
            source::root().join(kind).join(&machine_name)
        });
        let experiment = Experiment {
            name,
            claims,
            flags_given,
            flags,
            machine,
            machine_name,
            folder,
            emulated,
            progress: Progress::new(),
            records: Vec::new(),
            findings: Vec::new(),
            kernels: BTreeMap::new(),
            inputs: BTreeMap::new(),
            refused: Vec::new(),
            held: Vec::new(),
            huge_pages: None,
        };
        // What would fail at the end fails now.
        if !experiment.emulated {
            files::check_writable(&experiment.folder)?;
            experiment.check_folder()?;
        }
        let facts = &experiment.machine;
        experiment.say(&format!(
            "{name}: {}, {} cores, threads {:?} of {}{}",
            facts.cpu,
            facts.cores,
            experiment.thread_counts(),
            facts.threads,
            if cfg!(debug_assertions) {
                ", DEBUG BUILD"
            } else {
                ""
            }
        ));
        Ok(experiment)
    }

    /// The verdicts already in the folder read well, and no quick row lies beside a full one.
    fn check_folder(&self) -> Result<Vec<Finding>> {
        Sums::read(&self.folder)?;
        for meta in Meta::all_in(&self.folder)? {
            ensure!(
                meta.quick == self.flags.quick,
                "{}: holds {}, run {} --quick; expected a folder of its own for quick runs",
                self.folder.display(),
                meta.experiment,
                if meta.quick { "with" } else { "without" }
            );
        }
        let path = self.folder.join("machine.json");
        if let Some(bytes) = files::read_if_there(&path, LIMIT)? {
            let shown = path.display();
            let there: Machine =
                serde_json::from_slice(&bytes).with_context(|| shown.to_string())?;
            ensure!(
                there.cpu == self.machine.cpu,
                "{shown}: cpu: found {:?}, expected {:?}, which measures now: another machine wants another --out or --machine",
                there.cpu,
                self.machine.cpu
            );
        }
        ledger::read_findings(&self.folder.join("claims.csv"))
    }

    /// Prints a line to standard output.
    pub fn say(&self, line: &str) {
        self.progress.suspend(|| {
            let _ = writeln!(io::stdout(), "{line}"); // a closed pipe does not end a measurement
        });
    }

    /// What the run was asked.
    pub fn flags(&self) -> &Flags {
        &self.flags
    }

    /// Whether to take seconds instead of minutes.
    pub fn quick(&self) -> bool {
        self.flags.quick
    }

    /// Thread counts to measure at: those asked for, or 1 and all.
    pub fn thread_counts(&self) -> Vec<usize> {
        if !self.flags.threads.is_empty() {
            let mut counts = self.flags.threads.clone();
            counts.sort_unstable();
            counts.dedup();
            return counts;
        }
        match self.all_threads() {
            1 => vec![1],
            all => vec![1, all],
        }
    }

    /// Thread counts of a curve: those asked for, or 1, 2, 4 and so on, and all.
    pub fn thread_curve(&self) -> Vec<usize> {
        if !self.flags.threads.is_empty() {
            return self.thread_counts();
        }
        let all = self.all_threads();
        let powers = (0..).map(|i| 1 << i).take_while(|&n| n < all);
        powers.chain([all]).collect()
    }

    /// Threads that affinity and a container's quota allow, or the most that `--threads` asks for.
    pub fn all_threads(&self) -> usize {
        let asked = self.flags.threads.iter().max();
        asked.copied().unwrap_or(self.machine.threads)
    }

    /// Facts about this machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Size in bytes of the largest cache, 32 MB where the system does not tell: working sets are
    /// from DRAM when they are several times this.
    pub fn last_level_cache(&self) -> u64 {
        let sizes = self.machine.caches.iter().map(|c| c.bytes);
        sizes.max().unwrap_or(32 << 20)
    }

    /// Random numbers for the input of that name: the same for the same `--seed`, on any machine
    /// and in any order of calls.
    pub fn rng(&self, stream: &str) -> ChaCha8Rng {
        // FNV-1a; the stream only has to differ from its neighbours.
        let hash = stream.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut rng = ChaCha8Rng::seed_from_u64(self.flags.seed);
        rng.set_stream(hash);
        rng
    }

    /// Says on standard error what is being done.
    pub fn progress(&self, what: impl Into<String>) {
        self.progress.label(what.into());
    }

    /// Rounds of a comparison.
    pub fn rounds(&self) -> usize {
        let default = if self.flags.quick {
            QUICK_ROUNDS
        } else {
            ROUNDS
        };
        self.flags.rounds.map_or(default, |n| n as usize)
    }

    /// A race of variants in interleaved rounds.
    pub fn race<'a>(&self) -> Race<'a> {
        Race::new(self.rounds(), self.flags.quick, self.progress.clone())
    }

    /// Announces the kernel chosen for a format and why.
    pub fn kernel_chosen(&mut self, format: &str, kernel: &str, why: &str) {
        let chosen = Kernel {
            kernel: kernel.into(),
            why: why.into(),
        };
        if self.kernels.insert(format.into(), chosen.clone()).as_ref() != Some(&chosen) {
            self.say(&format!("kernel for {format}: {kernel} ({why})"));
        }
    }

    /// Announces a file that is read, by base name and hash.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn file_read(&mut self, path: &Path) -> Result<()> {
        self.progress(format!("hashing {}", base_name(path)));
        let input = Input::of(path)?;
        let size = input.bytes;
        self.say(&format!(
            "file read: {}, {size} bytes, sha256 {:.12}...",
            input.file, input.sha256
        ));
        self.inputs.insert(input.file.clone(), input);
        Ok(())
    }

    /// The model file: `--model`, or the small model of the repo. Announces it.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn model(&mut self) -> Result<PathBuf> {
        let repo = || source::root().join("models/tern-nano-pq2_0.gguf");
        let path = self.flags.model.clone().unwrap_or_else(repo);
        self.file_read(&path)?;
        Ok(path)
    }

    /// A file of the repo, by its path from the root. Announces it.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn repo_file(&mut self, path: &str) -> Result<PathBuf> {
        let path = source::root().join(path);
        self.file_read(&path)?;
        Ok(path)
    }

    /// Notes whether the system backed a buffer with huge pages, for `machine.json`.
    pub fn huge_pages(&mut self, given: bool) {
        self.huge_pages = Some(given);
    }

    /// Adds a row and returns its key.
    ///
    /// # Errors
    /// What the schema refuses: a number that is not finite, a key that another row has, an
    /// unknown instruction set, an interval that does not hold its value.
    pub fn row(&mut self, row: Row) -> Result<Key> {
        let record = row.clone().into_record(self.name, self.flags.quick)?;
        for id in record.claims() {
            ensure!(
                self.claims.contains(&id),
                "claim: row {} names {id}, which {} does not test",
                record.key(),
                self.name
            );
        }
        let key = record.key();
        ensure!(
            self.records.iter().all(|(_, k)| *k != key),
            "key: a second row {key}"
        );
        self.records.push((row, key.clone()));
        Ok(key)
    }

    /// A claim holds or does not, by the row of that key: its value is what was measured. A second
    /// verdict on a claim replaces the first.
    ///
    /// # Errors
    /// A claim this experiment does not test, or a key that no row has.
    pub fn verdict(
        &mut self,
        claim: &str,
        verdict: impl Into<Verdict>,
        reason: impl Into<String>,
        key: &Key,
    ) -> Result<()> {
        ensure!(
            self.records.iter().any(|(_, k)| k == key),
            "verdict on {claim}: no row {key}"
        );
        self.find(Finding {
            claim: claim.into(),
            verdict: verdict.into(),
            measured: None, // taken from the row at the end, as is the key's final form
            unit: String::new(),
            reason: reason.into(),
            experiment: self.name.into(),
            key: key.to_string(),
        })
    }

    /// This machine cannot say whether a claim holds, and why.
    ///
    /// # Errors
    /// A claim this experiment does not test.
    pub fn not_testable(&mut self, claim: &str, reason: impl Into<String>) -> Result<()> {
        self.find(Finding {
            claim: claim.into(),
            verdict: Verdict::NotTestable,
            measured: None,
            unit: String::new(),
            reason: reason.into(),
            experiment: self.name.into(),
            key: String::new(),
        })
    }

    fn find(&mut self, finding: Finding) -> Result<()> {
        ensure!(
            self.claims.contains(&finding.claim.as_str()),
            "verdict on {}: {} does not test it",
            finding.claim,
            self.name
        );
        self.findings.retain(|f| f.claim != finding.claim);
        self.findings.push(finding);
        Ok(())
    }

    /// A variant that cannot run here, and why; the others still do.
    pub fn refused(&mut self, variant: &str, isa: &str, why: impl Into<String>) {
        let refusal = Refusal {
            variant: variant.into(),
            isa: isa.into(),
            why: why.into(),
        };
        if !self.refused.contains(&refusal) {
            self.say(&format!("refused: {variant} {isa}: {}", refusal.why));
            self.refused.push(refusal);
        }
    }

    /// Whether every equality so far that [`must hold`](Self::must_hold) does.
    pub fn all_held(&self) -> bool {
        self.held.iter().all(|h| h.held)
    }

    /// An equality that must hold on every machine. Where it does not, the run ends with exit code 1,
    /// after its files are written.
    pub fn must_hold(&mut self, what: impl Into<String>, held: bool) {
        let what = what.into();
        if !held {
            self.say(&format!("DOES NOT HOLD: {what}"));
        }
        match self.held.iter_mut().find(|h| h.what == what) {
            Some(earlier) => earlier.held &= held,
            None => self.held.push(Held { what, held }),
        }
    }

    fn finish(mut self) -> Result<ExitCode> {
        let records = self.ordered_records()?;
        for finding in &mut self.findings {
            let keys = self.records.iter().map(|(_, key)| key.to_string());
            if let Some(i) = keys.into_iter().position(|key| key == finding.key) {
                finding.measured = Some(records[i].value);
                finding.unit = records[i].metric.unit().into();
                finding.key = records[i].key().to_string();
            }
        }
        self.say(table::rows(&records)?.trim_end());
        if !self.findings.is_empty() {
            self.say(table::findings(&self.findings)?.trim_end());
        }
        for held in &self.held {
            let mark = if held.held { "holds" } else { "DOES NOT HOLD" };
            self.say(&format!("{mark}: {}", held.what));
        }
        for claim in self.claims {
            ensure!(
                self.findings.iter().any(|f| f.claim == *claim),
                "claim {claim}: no verdict, expected one"
            );
        }
        if self.emulated {
            self.say("nothing written: timings under emulation are no results");
        } else {
            self.write(&records)?;
        }
        Ok(if self.all_held() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(1)
        })
    }

    /// The records, with the params of every row in one order: that in which keys first appeared.
    fn ordered_records(&self) -> Result<Vec<Record>> {
        let mut order: Vec<&str> = Vec::new();
        for (row, _) in &self.records {
            let mut place = 0;
            for (key, _) in &row.params {
                match order.iter().position(|k| k == key) {
                    Some(at) => place = place.max(at + 1),
                    None => {
                        // A new key goes where the row that brings it has it.
                        order.insert(place.min(order.len()), key);
                        place += 1;
                    }
                }
            }
        }
        let sorted = self.records.iter().map(|(row, _)| {
            let mut row = row.clone();
            row.params
                .sort_by_key(|(key, _)| order.iter().position(|k| k == key));
            row.into_record(self.name, self.flags.quick)
        });
        let records: Vec<Record> = sorted.collect::<Result<_>>()?;
        row::check_unique(&records)?;
        Ok(records)
    }

    fn write(&self, records: &[Record]) -> Result<()> {
        let csv = row::write_csv(records)?;
        let commit = source::commit();
        let meta = Meta {
            schema: SCHEMA,
            experiment: self.name.into(),
            commit: commit.commit,
            dirty: commit.dirty,
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            quick: self.flags.quick,
            flags: self.flags_given.clone(),
            seed: self.flags.seed,
            rounds: self.rounds(),
            threads: self.thread_counts(),
            kernels: self.kernels.clone(),
            inputs: self.inputs.clone(),
            refused: self.refused.clone(),
            must_hold: self.held.clone(),
            verdicts: self.findings.clone(),
            csv_sha256: files::sha256(&csv),
        };
        let _lock = files::lock_folder(&self.folder);
        let mut findings = self.check_folder()?;
        findings.retain(|f| f.experiment != self.name);
        findings.extend(self.findings.iter().cloned());
        let mut machine = self.machine.clone();
        machine.huge_pages.given = self.huge_pages.or_else(|| self.huge_pages_before());
        let mut written = vec![
            (format!("{}.csv", self.name), csv),
            (format!("{}.json", self.name), pretty(&meta)?),
            ("machine.json".into(), pretty(&machine)?),
            ("claims.csv".into(), ledger::write_findings(&findings)?),
        ];
        let mut sums = Sums::of(&self.folder)?;
        for (name, bytes) in &written {
            sums.set(name, bytes);
        }
        written.push((SUMS.into(), sums.to_bytes()));
        let written = files::write_all(&self.folder, &written)?;
        let mut line = String::from("wrote");
        for path in written {
            let here = source::root();
            let path = path.strip_prefix(&here).unwrap_or(&path);
            let _ = write!(line, " {}", path.display());
        }
        self.say(&line);
        Ok(())
    }

    /// What an earlier experiment on this machine noted, which this one did not ask.
    fn huge_pages_before(&self) -> Option<bool> {
        let path = self.folder.join("machine.json");
        let bytes = files::read_if_there(&path, LIMIT).ok()??;
        let before: Machine = serde_json::from_slice(&bytes).ok()?;
        (before.cpu == self.machine.cpu)
            .then_some(before.huge_pages.given)
            .flatten()
    }

    /// The machine's name in results.
    pub fn machine_name(&self) -> &str {
        &self.machine_name
    }
}

pub(super) fn pretty(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

fn base_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// The flags on the command line, for the record. A path becomes a base name, and a file's hash.
fn given(command: &Command, matches: &ArgMatches) -> Result<BTreeMap<String, Value>> {
    let mut flags = BTreeMap::new();
    for arg in command.get_arguments() {
        let id = arg.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let values = matches.get_raw(id).into_iter().flatten();
        let value = if arg.get_action().takes_values() {
            let values: Vec<Value> = values.map(flag_value).collect::<Result<_>>()?;
            match <[Value; 1]>::try_from(values) {
                Ok([one]) => one,
                Err(many) => Value::Array(many),
            }
        } else {
            json!(true)
        };
        let name = arg.get_long().unwrap_or(id);
        flags.insert(name.to_string(), value);
    }
    Ok(flags)
}

fn flag_value(value: &std::ffi::OsStr) -> Result<Value> {
    let path = Path::new(value);
    if path.is_file() {
        let input = Input::of(path)?;
        return Ok(json!({"file": input.file, "sha256": input.sha256}));
    }
    if path.is_absolute() || path.components().count() > 1 {
        return Ok(json!(base_name(path)));
    }
    match value.to_str() {
        Some(text) => Ok(json!(text)),
        None => bail!("flag value {value:?}: expected UTF-8"),
    }
}

impl Input {
    fn of(path: &Path) -> Result<Input> {
        let (sha256, bytes) = files::sha256_file(path).context("cannot be read")?;
        Ok(Input {
            file: base_name(path),
            sha256,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::{Metric, Stat, read_csv, read_findings};
    use std::fs;

    /// Exit codes do not compare; their debug form does.
    fn code(code: ExitCode) -> String {
        format!("{code:?}")
    }

    fn run_in(
        folder: &Path,
        name: &'static str,
        claims: &'static [&'static str],
        more: &[&str],
        body: impl FnOnce(&mut Experiment) -> Result<()>,
    ) -> String {
        let out = folder.to_str().unwrap();
        let args = [name, "--quick", "--out", out]
            .into_iter()
            .chain(more.iter().copied());
        let args = args.map(std::ffi::OsString::from);
        code(run_from::<NoFlags>(name, claims, args, false, |exp, _| {
            body(exp)
        }))
    }

    fn measured(exp: &mut Experiment) -> Result<()> {
        let stat = Stat::of(&[1.0, 2.0, 3.0]);
        let row = |variant: &str| Row::new(variant, "scalar").metric(Metric::Time, stat);
        let key = exp.row(row("a").claim("L07").params([("rows", 4), ("cols", 8)]))?;
        exp.row(row("b").param("cols", 8).param("rows", 4).param("batch", 1))?;
        exp.verdict("L07", false, "2 ms, not 1", &key)
    }

    #[test]
    fn a_run_writes_files_that_agree() {
        let dir = tempfile::tempdir().unwrap();
        let exit = run_in(dir.path(), "exp-03-x", &["L07"], &["--seed", "7"], measured);
        assert_eq!(exit, code(ExitCode::SUCCESS));
        let csv = fs::read(dir.path().join("exp-03-x.csv")).unwrap();
        let records = read_csv(&csv).unwrap();
        assert!(records[0].quick && records[0].value == 2.0);
        // One order of keys for every row, whatever order a row was given them in.
        assert_eq!(records[0].params, "rows=4;cols=8");
        assert_eq!(records[1].params, "rows=4;cols=8;batch=1");
        let meta = Meta::read(&dir.path().join("exp-03-x.json")).unwrap();
        assert_eq!(meta.csv_sha256, files::sha256(&csv));
        let given: Vec<_> = meta.flags.keys().map(String::as_str).collect();
        assert_eq!(given, ["out", "quick", "seed"]);
        assert_eq!(meta.flags["quick"], json!(true));
        assert_eq!(meta.flags["seed"], json!("7"));
        let folder = dir.path().file_name().unwrap().to_str().unwrap();
        assert_eq!(meta.flags["out"], json!(folder), "no folder above it");
        let findings = read_findings(&dir.path().join("claims.csv")).unwrap();
        assert_eq!(findings, meta.verdicts);
        assert_eq!(findings[0].key, records[0].key().to_string());
        assert_eq!(
            (findings[0].measured, &*findings[0].unit),
            (Some(2.0), "ms")
        );
        let machine = fs::read(dir.path().join("machine.json")).unwrap();
        serde_json::from_slice::<Machine>(&machine).unwrap();
        let sums = Sums::read(dir.path()).unwrap().unwrap();
        assert_eq!(sums.wrong(dir.path(), |_| true).unwrap(), [""; 0]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5);
    }

    #[test]
    fn a_file_changed_between_two_runs_stays_found_out() {
        let dir = tempfile::tempdir().unwrap();
        run_in(dir.path(), "exp-03-x", &["L07"], &[], measured);
        let json = dir.path().join("exp-03-x.json");
        let changed = fs::read_to_string(&json).unwrap().replacen("20", "21", 1);
        fs::write(&json, changed).unwrap();
        run_in(dir.path(), "exp-04-y", &[], &[], |_| Ok(()));
        let sums = Sums::read(dir.path()).unwrap().unwrap();
        let wrong = sums.wrong(dir.path(), |_| true).unwrap();
        assert!(wrong.len() == 1 && wrong[0].starts_with("exp-03-x.json: sha256"));
    }

    #[test]
    fn verdicts_of_other_experiments_stay() {
        let dir = tempfile::tempdir().unwrap();
        run_in(dir.path(), "exp-03-x", &["L07"], &[], measured);
        run_in(dir.path(), "exp-04-y", &["L12"], &[], |exp| {
            exp.not_testable("L12", "first")
        });
        run_in(dir.path(), "exp-04-y", &["L12"], &[], |exp| {
            exp.not_testable("L12", "no such instruction")
        });
        let findings = read_findings(&dir.path().join("claims.csv")).unwrap();
        let claims: Vec<_> = findings.iter().map(|f| (&*f.claim, &*f.reason)).collect();
        assert_eq!(
            claims,
            [("L07", "2 ms, not 1"), ("L12", "no such instruction")]
        );
    }

    #[test]
    fn what_must_hold_and_does_not_is_exit_code_1_with_files() {
        let dir = tempfile::tempdir().unwrap();
        let exit = run_in(dir.path(), "exp-03-x", &[], &[], |exp| {
            exp.must_hold("bits", true);
            exp.must_hold("bits", false);
            exp.must_hold("bits", true);
            Ok(())
        });
        assert_eq!(exit, code(ExitCode::from(1)));
        let meta = Meta::read(&dir.path().join("exp-03-x.json")).unwrap();
        assert!(!meta.must_hold[0].held);
    }

    #[test]
    fn what_goes_wrong_is_exit_code_2_and_leaves_the_old_files() {
        let two = code(ExitCode::from(2));
        let dir = tempfile::tempdir().unwrap();
        run_in(dir.path(), "exp-03-x", &["L07"], &[], measured);
        let csv = dir.path().join("exp-03-x.csv");
        let before = fs::read(&csv).unwrap();
        let wrong: [fn(&mut Experiment) -> Result<()>; 5] = [
            |_| bail!("bad model"),
            |exp| {
                exp.row(Row::new("a", "scalar").exact(Metric::Time, f64::NAN))
                    .map(drop)
            },
            |exp| {
                exp.row(Row::new("a", "scalar").exact(Metric::Time, 1).claim("L08"))
                    .map(drop)
            },
            |exp| {
                exp.row(Row::new("a", "").exact(Metric::Count, 1))?;
                exp.row(Row::new("a", "").exact(Metric::Count, 2)).map(drop)
            },
            |exp| exp.not_testable("L08", "not its claim"),
        ];
        for body in wrong {
            assert_eq!(run_in(dir.path(), "exp-03-x", &["L07"], &[], body), two);
        }
        for flags in [&["--threads", "0"][..], &["--model"], &["--nonsense"]] {
            assert_eq!(
                run_in(dir.path(), "exp-03-x", &["L07"], flags, measured),
                two
            );
        }
        // The rows of a folder are of one machine.
        let machine = dir.path().join("machine.json");
        let good = fs::read_to_string(&machine).unwrap();
        let mut other: Machine = serde_json::from_str(&good).unwrap();
        other.cpu += " of another machine";
        for there in [serde_json::to_string(&other).unwrap(), "{".into()] {
            fs::write(&machine, there).unwrap();
            assert_eq!(run_in(dir.path(), "exp-03-x", &["L07"], &[], measured), two);
        }
        fs::write(&machine, good).unwrap();
        assert_eq!(fs::read(&csv).unwrap(), before);
        // A claim without a verdict is a mistake in the experiment.
        assert_eq!(
            run_in(dir.path(), "exp-03-x", &["L07"], &[], |_| Ok(())),
            two
        );
    }

    #[test]
    fn files_of_another_version_stop_a_run_before_it_measures() {
        let two = code(ExitCode::from(2));
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("claims.csv", "claim,verdict\nL07,reproduced\n"),
            ("exp-01-z.json", "{\"schema\": 99}"),
            ("exp-01-z.json", "not json"),
            ("SHA256SUMS", "0  machine.json\n"),
        ] {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            let exit = run_in(dir.path(), "exp-03-x", &[], &[], |_| panic!("measured"));
            assert_eq!(exit, two);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            fs::remove_file(&path).unwrap();
        }
        fs::write(dir.path().join("file"), "").unwrap();
        let exit = run_in(&dir.path().join("file"), "exp-03-x", &[], &[], |_| {
            panic!("measured")
        });
        assert_eq!(exit, two);
    }

    #[test]
    fn a_quick_row_never_lands_beside_a_full_one() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_str().unwrap();
        let args = ["exp-04-y", "--out", out].map(std::ffi::OsString::from);
        let full = run_from::<NoFlags>("exp-04-y", &[], args, false, |_, _| Ok(()));
        assert_eq!(code(full), code(ExitCode::SUCCESS));
        let quick = run_in(dir.path(), "exp-03-x", &["L07"], &[], measured);
        assert_eq!(quick, code(ExitCode::from(2)));
    }

    #[test]
    fn under_emulation_nothing_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().to_str().unwrap();
        let args = ["exp-03-x", "--out", out].map(std::ffi::OsString::from);
        let exit = run_from::<NoFlags>("exp-03-x", &["L07"], args, true, |exp, _| measured(exp));
        assert_eq!(code(exit), code(ExitCode::SUCCESS));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn random_streams_depend_on_seed_and_name_alone() {
        use rand::Rng;
        let dir = tempfile::tempdir().unwrap();
        let mut draws = Vec::new();
        for seed in ["1", "1", "2"] {
            run_in(dir.path(), "exp-03-x", &[], &["--seed", seed], |exp| {
                draws.push(exp.rng("weights").next_u64());
                draws.push(exp.rng("inputs").next_u64());
                Ok(())
            });
        }
        assert_eq!(draws[0..2], draws[2..4]);
        assert_ne!(draws[0], draws[1]);
        assert_ne!(draws[0], draws[4]);
    }
}
