//! `tern new-experiment`: a working skeleton for a claim of one's own.

use std::fs;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use common::lab::{self, Claim};

/// Adds an experiment that builds and runs: its folder, its binary, and its claim in the ledger.
#[derive(clap::Args)]
pub struct Args {
    /// Words joined by hyphens, such as row-major-tiles.
    #[arg(value_name = "SLUG", value_parser = slug)]
    slug: String,
    /// The claim in short.
    #[arg(long, default_value = "four sums in turn are faster than one", value_parser = line)]
    claim: String,
    /// The figure its source published.
    #[arg(long, default_value = "no figure", value_parser = line)]
    published: String,
    /// The letter of its source in the ledger.
    #[arg(long, default_value = "U", value_parser = source)]
    source: String,
}

fn slug(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let edges = text.starts_with('-') || text.ends_with('-') || text.contains("--");
    if text.is_empty() || text.len() > 40 || edges || !text.chars().all(plain) {
        return Err("expected up to 40 of a-z, 0-9, '_' and '-' between words".into());
    }
    Ok(text.into())
}

fn line(text: &str) -> Result<String, String> {
    if text.trim().is_empty() || text.chars().any(char::is_control) {
        return Err("expected a line of text".into());
    }
    Ok(text.into())
}

fn source(text: &str) -> Result<String, String> {
    match text.as_bytes() {
        [letter] if letter.is_ascii_uppercase() => Ok(text.into()),
        _ => Err("expected one capital letter".into()),
    }
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let root = lab::root();
    let results = root.join("results");
    let mut ledger = lab::verify::check_ledger(&results)?;
    let manifest_path = root.join("experiments/Cargo.toml");
    let manifest =
        fs::read_to_string(&manifest_path).with_context(|| manifest_path.display().to_string())?;

    let taken = |n: u32| {
        let prefix = format!("exp-{n:02}-");
        manifest.contains(&format!("\"{prefix}"))
            || ledger.iter().any(|c| c.experiment.starts_with(&prefix))
    };
    // The first 17 numbers are spoken for.
    let number = (18..100)
        .find(|n| !taken(*n))
        .context("no number left below 100")?;
    let name = format!("exp-{number:02}-{}", args.slug);
    let free = |n: &u32| {
        ledger
            .iter()
            .all(|c| c.id != format!("{}{n:02}", args.source))
    };
    let id = (1..100)
        .find(free)
        .context("no claim number left below 100")?;
    let id = format!("{}{id:02}", args.source);

    let folder = root.join("experiments").join(&name);
    ensure!(
        !folder.exists(),
        "{}: is there already, expected a new name",
        folder.display()
    );
    let fill = |skeleton: &str| {
        let filled = skeleton.replace("NAME", &name).replace("ID", &id);
        filled
            .replace("CLAIM", &args.claim)
            .replace("PUBLISHED", &args.published)
            .into_bytes()
    };
    lab::write_all(
        &folder,
        &[
            ("main.rs".into(), fill(include_str!("skeleton/main.rs"))),
            ("README.md".into(), fill(include_str!("skeleton/README.md"))),
        ],
    )?;
    let manifest = format!(
        "{}\n\n[[bin]]\nname = \"{name}\"\npath = \"{name}/main.rs\"\n",
        manifest.trim_end()
    );
    lab::write_all(
        &root.join("experiments"),
        &[("Cargo.toml".into(), manifest.into_bytes())],
    )?;
    ledger.push(Claim {
        id: id.clone(),
        experiment: name.clone(),
        claim: args.claim.clone(),
        published: args.published.clone(),
        source: args.source.clone(),
    });
    lab::write_ledger(&results, &ledger)?;
    writeln!(
        out,
        "experiments/{name}: edit main.rs and README.md; claim {id} is in results/claims.csv\n\
         run it: just exp {name} --quick"
    )?;
    Ok(ExitCode::SUCCESS)
}
