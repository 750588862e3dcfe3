//! `tern verify`: whether committed results are what experiments wrote.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use common::lab;
use common::lab::verify::{check_folder, check_ledger};

/// Checks results against the schema, the hashes beside them, machine.json and the ledger.
#[derive(clap::Args)]
pub struct Args {
    /// Folders to check [default: every one under results/].
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let results = lab::root().join("results");
    let ledger = check_ledger(&results)?;
    let folders = if args.folders.is_empty() {
        lab::machines()?.iter().map(|m| results.join(m)).collect()
    } else {
        args.folders.clone()
    };
    for folder in &folders {
        ensure!(
            folder.join("machine.json").is_file(),
            "{}: no machine.json, expected a folder of results",
            folder.display()
        );
    }
    let mut wrong = 0;
    for folder in &folders {
        let found = check_folder(folder, &ledger);
        for line in &found {
            writeln!(out, "{}", lab::table::printable(line))?;
        }
        if found.is_empty() {
            writeln!(out, "{}: as it was written", folder.display())?;
        }
        wrong += found.len();
    }
    Ok(if wrong == 0 {
        ExitCode::SUCCESS
    } else {
        writeln!(out, "{wrong} wrong")?;
        ExitCode::from(1)
    })
}
