//! `tern compare`: results of several machines, or of several runs, side by side.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use common::lab::Folder;
use common::lab::compare::{Comparison, How, Joined, Ratio, Threads, compare};
use common::lab::table::{self, Style, StyleFlags};

/// Results of two or more machines, or runs, side by side.
///
/// Rows are joined on experiment, variant, baseline's variant, metric and params, taking on each
/// machine its best instruction set, at one thread and at the machine's all-threads count.
#[derive(clap::Args)]
pub struct Args {
    /// Names under results/, or folders; ratios are against the first.
    #[arg(value_name = "FOLDER", num_args = 2.., required = true)]
    folders: Vec<PathBuf>,
    /// Join on the whole key: isa, threads and baseline too.
    #[arg(long)]
    exact: bool,
    /// Ratios closer to 1 than this many percent are noise, as are those whose intervals overlap.
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, value_parser = percent)]
    threshold: f64,
    /// Only this experiment, such as exp-03.
    #[arg(long, value_name = "EXP")]
    experiment: Option<String>,
    #[command(flatten)]
    style: StyleFlags,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..1000.0).contains(&value) => Ok(value),
        _ => Err("expected a percentage".into()),
    }
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let mut folders = Vec::new();
    let mut selected = args.experiment.is_none();
    for path in &args.folders {
        let mut folder = Folder::open(path)?;
        if let Some(experiment) = &args.experiment {
            let wanted = |name: &str| name.starts_with(experiment.as_str());
            folder.runs.retain(|r| wanted(&r.meta.experiment));
            folder.findings.retain(|f| wanted(&f.experiment));
            selected |= !folder.runs.is_empty();
        }
        folders.push(folder);
    }
    if let Some(experiment) = args.experiment.as_ref().filter(|_| !selected) {
        bail!("--experiment {experiment}: none of the folders has it, expected one such as exp-03");
    }
    let how = How {
        exact: args.exact,
        threshold_percent: args.threshold,
    };
    let found = compare(&folders, how);
    let names = names(&folders);
    match args.style.style() {
        Style::Csv => write_csv(&found, &names, out)?,
        style => write_text(&found, &folders, &names, style, out)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Folder names, or whole paths where two are called the same.
fn names(folders: &[Folder]) -> Vec<String> {
    folders
        .iter()
        .map(|f| {
            let alike = folders.iter().filter(|other| other.name == f.name).count();
            if alike > 1 {
                f.path.display().to_string()
            } else {
                f.name.clone()
            }
        })
        .collect()
}

fn write_text(
    found: &Comparison,
    folders: &[Folder],
    names: &[String],
    style: Style,
    out: &mut dyn Write,
) -> Result<()> {
    for (letter, (name, folder)) in letters().zip(names.iter().zip(folders)) {
        writeln!(
            out,
            "{letter}: {name}: {}, {} threads, {} experiments, {} verdicts",
            table::printable(&folder.machine.cpu),
            folder.machine.threads,
            folder.runs.len(),
            folder.findings.len()
        )?;
    }
    let letter = |i: usize| letters().nth(i).unwrap_or('?').to_string();

    writeln!(out)?;
    if found.verdicts.is_empty() {
        writeln!(out, "No claim that both have tested came out differently.")?;
    } else {
        let mut header = vec!["verdicts that differ".to_string()];
        header.extend((0..names.len()).map(letter));
        let rows = found.verdicts.iter().map(|d| {
            let mut row = vec![d.claim.clone()];
            row.extend(
                d.verdicts
                    .iter()
                    .map(|v| v.map_or("-", |v| v.name()).into()),
            );
            row
        });
        write!(out, "{}", table::render(&header, rows, style)?)?;
    }

    writeln!(out)?;
    if found.joined.is_empty() {
        writeln!(out, "No row that all of them have.")?;
    } else {
        let mut header: Vec<String> = ["exp", "variant", "metric", "params", "threads"]
            .map(String::from)
            .to_vec();
        header.extend((0..names.len()).map(letter));
        header.push("unit".into());
        header.extend((1..names.len()).map(|i| format!("{}/A", letter(i))));
        let rows = found.joined.iter().map(|j| {
            let mut row = vec![
                j.subject.experiment.get(4..6).unwrap_or("?").to_string(),
                variant(j),
                j.subject.metric.into(),
                j.subject.params.clone(),
                threads(j),
            ];
            row.extend(j.records.iter().map(|r| {
                let isa = if r.isa.is_empty() || j.subject.isa.is_some() {
                    String::new()
                } else {
                    format!(" ({})", r.isa)
                };
                table::short(r.value) + &isa
            }));
            row.push(j.subject.metric().map_or("", |m| m.unit()).into());
            row.extend(j.ratios.iter().map(ratio));
            row
        });
        write!(out, "{}", table::render(&header, rows, style)?)?;
        if found
            .joined
            .iter()
            .any(|j| j.ratios.iter().any(|r| r.noise))
        {
            writeln!(
                out,
                "~ within noise: the intervals overlap, or the ratio is within the threshold"
            )?;
        }
    }

    if !found.missing.is_empty() {
        writeln!(out)?;
        let header = ["missing from", "exp", "rows", "why"].map(String::from);
        let rows = found.missing.iter().map(|m| {
            vec![
                letter(m.folder),
                m.experiment.get(4..6).unwrap_or("?").into(),
                m.rows.to_string(),
                m.why.clone(),
            ]
        });
        write!(out, "{}", table::render(&header, rows, style)?)?;
    }
    if !found.besides.is_empty() {
        writeln!(out, "\nwhat differs besides the machine")?;
        for line in &found.besides {
            let bullet = if style == Style::Markdown { "* " } else { "  " };
            writeln!(out, "{bullet}{}", table::printable(line))?;
        }
    }
    Ok(())
}

fn letters() -> impl Iterator<Item = char> {
    'A'..='Z'
}

fn variant(joined: &Joined) -> String {
    let subject = &joined.subject;
    let mut name = subject.variant.clone();
    if let Some(isa) = subject.isa.as_ref().filter(|isa| !isa.is_empty()) {
        name += &format!(" {isa}");
    }
    if !subject.baseline.is_empty() {
        name += &format!(" vs {}", subject.baseline);
    }
    name
}

fn threads(joined: &Joined) -> String {
    match joined.subject.threads {
        Threads::Count(n) => n.to_string(),
        Threads::All => {
            let counts: Vec<String> = joined
                .records
                .iter()
                .map(|r| r.threads.to_string())
                .collect();
            format!("all: {}", counts.join(", "))
        }
    }
}

fn ratio(ratio: &Ratio) -> String {
    let Some(value) = ratio.value else {
        return "-".into();
    };
    let mark = if ratio.noise { "~" } else { "" };
    match ratio.interval {
        Some((low, high)) => format!("{mark}{value:.2} [{low:.2}, {high:.2}]"),
        None => format!("{mark}{value:.2}"),
    }
}

fn write_csv(found: &Comparison, names: &[String], out: &mut dyn Write) -> Result<()> {
    let mut header: Vec<String> = [
        "experiment",
        "variant",
        "baseline",
        "metric",
        "unit",
        "params",
    ]
    .map(String::from)
    .to_vec();
    for name in names {
        for field in ["isa", "threads", "value", "low", "high"] {
            header.push(format!("{name}: {field}"));
        }
    }
    for name in &names[1..] {
        for field in ["ratio", "ratio low", "ratio high", "noise"] {
            header.push(format!("{name}: {field}"));
        }
    }
    let number = |value: Option<f64>| value.map(|v| v.to_string()).unwrap_or_default();
    let rows = found.joined.iter().map(|j| {
        let subject = &j.subject;
        let mut row = vec![
            subject.experiment.clone(),
            subject.variant.clone(),
            subject.baseline.clone(),
            subject.metric.to_string(),
            subject.metric().map_or("", |m| m.unit()).to_string(),
            subject.params.clone(),
        ];
        for r in &j.records {
            row.extend([
                r.isa.clone(),
                r.threads.to_string(),
                r.value.to_string(),
                number(r.interval.map(|i| i.low)),
                number(r.interval.map(|i| i.high)),
            ]);
        }
        for r in &j.ratios {
            row.extend([
                number(r.value),
                number(r.interval.map(|i| i.0)),
                number(r.interval.map(|i| i.1)),
                u8::from(r.noise).to_string(),
            ]);
        }
        row
    });
    write!(out, "{}", table::render(&header, rows, Style::Csv)?)?;
    Ok(())
}
