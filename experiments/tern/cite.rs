//! `tern cite`: a line for a write-up.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use common::lab::{self, Finding, Folder, Machine, Run, table};

/// A line for a write-up for each claim of an experiment: the value with its interval, the machine, the
/// commit, the file and its hash.
#[derive(clap::Args)]
pub struct Args {
    /// An experiment, such as exp-04, or a claim, such as L12.
    #[arg(value_name = "EXP|CLAIM")]
    what: String,
    /// Name under results/, or a folder [default: this machine].
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let ledger = lab::read_ledger(&lab::root().join("results/claims.csv"))?;
    let folder = match &args.folder {
        Some(path) => Folder::open(path)?,
        None => Folder::open(Machine::here().slug().as_ref())?,
    };
    let run = folder.run(&args.what);
    let experiment = run.map(|run| run.meta.experiment.as_str());
    let cited: Vec<&Finding> = folder
        .findings
        .iter()
        .filter(|f| f.claim == args.what || Some(f.experiment.as_str()) == experiment)
        .collect();
    ensure!(
        !cited.is_empty(),
        "{}: {} has no verdict of that experiment or claim",
        args.what,
        folder.path.display()
    );
    for finding in cited {
        let run = folder
            .run(&finding.experiment)
            .with_context(|| format!("{}: not in {}", finding.experiment, folder.path.display()))?;
        let claim = ledger.iter().find(|c| c.id == finding.claim);
        let says = claim.map_or("", |c| c.claim.as_str());
        writeln!(out, "{}", line(&folder, run, finding, says))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn line(folder: &Folder, run: &Run, finding: &Finding, says: &str) -> String {
    let mut value = String::from("no figure");
    if let Some(record) = folder.record(&finding.key) {
        value = format!("{} {}", table::short(record.value), record.metric.unit())
            .trim_end()
            .to_string();
        if let Some(i) = record.interval {
            value += &format!(
                " (95% interval {}, {} rounds)",
                table::interval(record),
                i.n
            );
        }
        value += &format!(", {} {}", record.variant, record.isa);
        if !record.baseline.is_empty() {
            value = format!("{} against {}", value.trim_end(), record.baseline);
        }
        value = format!(
            "{}, {} threads, {}",
            value.trim_end(),
            record.threads,
            record.params
        );
    }
    let meta = &run.meta;
    let root = lab::root();
    let path = folder.path.strip_prefix(&root).unwrap_or(&folder.path);
    table::printable(&format!(
        "{} ({says}): {}: {value}; {}, {}; commit {}{}, {}/{}.csv, sha256 {}",
        finding.claim,
        finding.verdict.name(),
        folder.machine.cpu,
        folder.name,
        meta.commit,
        if meta.dirty { " (dirty)" } else { "" },
        path.display(),
        meta.experiment,
        meta.csv_sha256
    ))
}
