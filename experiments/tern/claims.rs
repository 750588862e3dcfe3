//! `tern claims`: every claim of the ledger, as published and as it came out.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use common::lab::table::{self, Style, StyleFlags};
use common::lab::{self, Claim, Finding, Folder, Machine};

/// Every claim: as published, as measured on a machine, the verdict, and the row that says so.
#[derive(clap::Args)]
pub struct Args {
    /// Name under results/, or a folder [default: this machine].
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Shorten no column.
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    style: StyleFlags,
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let ledger = lab::read_ledger(&lab::root().join("results/claims.csv"))?;
    let folder = match &args.folder {
        Some(path) => Folder::open(path)?,
        None => Folder::open(Machine::here().slug().as_ref())?,
    };
    let style = args.style.style();
    let shortened = !args.full && style == Style::Plain;
    if style != Style::Csv {
        writeln!(out, "{}: {}\n", folder.name, folder.machine.cpu)?;
    }
    let header = ["claim", "verdict", "published", "measured", "row", "says"];
    let rows = ledger.iter().map(|claim| {
        let finding = folder.findings.iter().find(|f| f.claim == claim.id);
        row(claim, finding, style, shortened)
    });
    write!(out, "{}", table::render(&header, rows, style)?)?;
    if style != Style::Csv {
        writeln!(out, "\n{}", summary(&ledger, &folder.findings))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn row(claim: &Claim, finding: Option<&Finding>, style: Style, shortened: bool) -> Vec<String> {
    let short = |text: &str, columns: usize| {
        if shortened {
            table::ellipsis(text, columns)
        } else {
            text.to_string()
        }
    };
    let measured = match (finding, style) {
        (Some(f), Style::Csv) => f.measured.map(|v| v.to_string()).unwrap_or_default(),
        (Some(f), _) => table::measured(f),
        (None, _) => String::new(),
    };
    vec![
        claim.id.clone(),
        finding.map_or("not run", |f| f.verdict.name()).into(),
        short(&claim.published, 40),
        measured,
        short(finding.map_or("", |f| &f.key), 60),
        short(&claim.claim, 50),
    ]
}

fn summary(ledger: &[Claim], findings: &[Finding]) -> String {
    let count = |name: &str| {
        let of = ledger.iter().filter(|c| {
            let finding = findings.iter().find(|f| f.claim == c.id);
            finding.map_or("not run", |f| f.verdict.name()) == name
        });
        format!("{} {name}", of.count())
    };
    let verdicts = [
        "reproduced",
        "not reproduced",
        "not testable here",
        "not run",
    ];
    format!(
        "{} claims: {}",
        ledger.len(),
        verdicts.map(count).join(", ")
    )
}
