//! `tern compare`: results of several machines, or of several runs, side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use common::lab::compare::{Comparison, How, Joined, Ratio, Threads, compare};
use common::lab::table::{self, Style, StyleFlags};
use common::lab::{Folder, Metric};

/// Results of two or more machines, or runs, side by side.
///
/// Rows are joined on experiment, variant, baseline's variant, metric and params, taking on each
/// machine its best instruction set, at one thread and at the machine's all-threads count. A terminal gets a screenful:
/// where they disagree, most first; `--full`, `--md` and `--csv` hold every row.
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
    /// Every row, whatever its ratio, and why others are missing.
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    style: StyleFlags,
}

/// Lines of a screenful: verdicts, other differences, and rows; about 60 with what stands around them.
const VERDICTS: usize = 10;
const BESIDES: usize = 8;
const ROWS: usize = 22;
const COLUMNS: usize = 118;

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
        Style::Plain if !args.full => write_screen(&found, &folders, &names, out)?,
        style => write_text(&found, &folders, &names, style, out)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Folder names, or whole paths where two are called the same; one given twice is numbered.
fn names(folders: &[Folder]) -> Vec<String> {
    let named = folders.iter().enumerate().map(|(i, f)| {
        let alike = folders.iter().filter(|other| other.name == f.name).count();
        let before = folders[..i]
            .iter()
            .filter(|other| other.path == f.path)
            .count();
        match (alike, before) {
            (1, _) => f.name.clone(),
            (_, 0) => f.path.display().to_string(),
            _ => format!("{} ({})", f.path.display(), before + 1),
        }
    });
    named.collect()
}

/// Which folder each letter stands for.
fn write_legend(
    folders: &[Folder],
    names: &[String],
    style: Style,
    out: &mut dyn Write,
) -> Result<()> {
    let bullet = if style == Style::Markdown { "* " } else { "" };
    for (letter, (name, folder)) in letters().zip(names.iter().zip(folders)) {
        writeln!(
            out,
            "{bullet}{letter}: {name}: {}, {} threads, {} experiments, {} verdicts",
            table::printable(&folder.machine.cpu),
            folder.machine.threads,
            folder.runs.len(),
            folder.findings.len()
        )?;
    }
    writeln!(out)?;
    Ok(())
}

/// Claims that came out differently, with what was measured; at most `limit` of them.
fn write_verdicts(
    found: &Comparison,
    folders: &[Folder],
    limit: usize,
    style: Style,
    out: &mut dyn Write,
) -> Result<()> {
    if found.verdicts.is_empty() {
        writeln!(
            out,
            "No claim that several have tested came out differently."
        )?;
        return Ok(());
    }
    let mut header = vec![format!("{} verdicts differ", found.verdicts.len())];
    header.extend((0..folders.len()).map(letter));
    let rows = found.verdicts.iter().take(limit).map(|d| {
        let mut row = vec![d.claim.clone()];
        row.extend(folders.iter().map(|folder| {
            let finding = folder.findings.iter().find(|f| f.claim == d.claim);
            finding.map_or("-".into(), |f| match table::measured(f) {
                value if value.is_empty() => f.verdict.name().into(),
                value => format!("{}: {value}", f.verdict.name()),
            })
        }));
        row
    });
    write!(out, "{}", table::render(&header, rows, style)?)?;
    more(found.verdicts.len(), limit, out)
}

/// What differs besides the machine, at most `limit` lines.
fn write_besides(
    found: &Comparison,
    limit: usize,
    style: Style,
    out: &mut dyn Write,
) -> Result<()> {
    if found.besides.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nwhat differs besides the machine\n")?;
    for line in found.besides.iter().take(limit) {
        let line = table::printable(line);
        match style {
            Style::Markdown => writeln!(out, "* {line}")?,
            _ => writeln!(out, " {line}")?,
        }
    }
    more(found.besides.len(), limit, out)
}

fn more(of: usize, limit: usize, out: &mut dyn Write) -> Result<()> {
    if of > limit {
        writeln!(out, " and {} more: --full", of - limit)?;
    }
    Ok(())
}

/// Everything.
fn write_text(
    found: &Comparison,
    folders: &[Folder],
    names: &[String],
    style: Style,
    out: &mut dyn Write,
) -> Result<()> {
    write_legend(folders, names, style, out)?;
    write_verdicts(found, folders, usize::MAX, style, out)?;
    write_besides(found, usize::MAX, style, out)?;

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
                number(&j.subject.experiment),
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
                "\n~ within noise: the intervals overlap, or the ratio is within the threshold"
            )?;
        }
    }

    if !found.missing.is_empty() {
        writeln!(out)?;
        let header = ["missing from", "exp", "rows", "why"].map(String::from);
        let rows = found.missing.iter().map(|m| {
            vec![
                letter(m.folder),
                number(&m.experiment),
                m.rows.to_string(),
                m.why.clone(),
            ]
        });
        write!(out, "{}", table::render(&header, rows, style)?)?;
    }
    Ok(())
}

/// What fits on a screen: where they disagree, most first.
fn write_screen(
    found: &Comparison,
    folders: &[Folder],
    names: &[String],
    out: &mut dyn Write,
) -> Result<()> {
    write_legend(folders, names, Style::Plain, out)?;
    write_verdicts(found, folders, VERDICTS, Style::Plain, out)?;
    write_besides(found, BESIDES, Style::Plain, out)?;

    let mut differing: Vec<&Joined> = found.joined.iter().filter(|j| !is_noise(j)).collect();
    differing.sort_by(|a, b| distance(b).total_cmp(&distance(a)));
    writeln!(
        out,
        "\n{} rows that all have, {} of them within noise; those that differ most\n",
        found.joined.len(),
        found.joined.len() - differing.len()
    )?;
    if !differing.is_empty() {
        let mut header = ["exp", "variant", "params", "threads"]
            .map(String::from)
            .to_vec();
        header.extend((0..names.len()).map(letter));
        header.push("unit".into());
        header.extend((1..names.len()).map(|i| format!("{}/A", letter(i))));
        let rows = differing.iter().take(ROWS).map(|j| {
            let counts: Vec<String> = j.records.iter().map(|r| r.threads.to_string()).collect();
            let mut row = vec![
                number(&j.subject.experiment),
                table::ellipsis(&variant(j), 26),
                table::ellipsis(&table::params(&j.subject.params), 32),
                counts.join(", "),
            ];
            row.extend(j.records.iter().map(|r| table::short(r.value)));
            row.push(j.subject.metric().map_or("", unit_or_name).into());
            row.extend(j.ratios.iter().map(ratio));
            row
        });
        write!(out, "{}", table::render(&header, rows, Style::Plain)?)?;
        more(differing.len(), ROWS, out)?;
        for (i, name) in names.iter().enumerate() {
            let isas: BTreeSet<&str> = found
                .joined
                .iter()
                .map(|j| j.records[i].isa.as_str())
                .filter(|isa| !isa.is_empty())
                .collect();
            if !isas.is_empty() {
                let isas: Vec<&str> = isas.into_iter().collect();
                writeln!(
                    out,
                    " {} ({name}) by its best: {}",
                    letter(i),
                    isas.join(", ")
                )?;
            }
        }
    }

    for i in 0..names.len() {
        let missing = || found.missing.iter().filter(|m| m.folder == i);
        let total: usize = missing().map(|m| m.rows).sum();
        if total == 0 {
            continue;
        }
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for m in missing().filter(|m| m.why != "not run") {
            *counts.entry(number(&m.experiment)).or_default() += m.rows;
        }
        let mut parts: Vec<String> = counts
            .iter()
            .map(|(experiment, rows)| format!("{rows} of {experiment}"))
            .collect();
        let not_run: Vec<String> = missing()
            .filter(|m| m.why == "not run")
            .map(|m| number(&m.experiment))
            .collect();
        if !not_run.is_empty() {
            parts.push(format!("and has not run {}", not_run.join(", ")));
        }
        let line = format!(
            "{} lacks {total} rows: {} (why: --full)",
            letter(i),
            parts.join(", ")
        );
        writeln!(out, "\n{}", wrap(&line, COLUMNS))?;
    }
    Ok(())
}

/// Whether the ratios of a row all say nothing.
fn is_noise(joined: &Joined) -> bool {
    joined.ratios.iter().all(|r| r.noise)
}

/// How far the value furthest from the first's is from it, as a factor's logarithm.
fn distance(joined: &Joined) -> f64 {
    let of = joined
        .ratios
        .iter()
        .filter(|r| !r.noise)
        .map(|r| match r.value {
            Some(value) if value > 0.0 => value.ln().abs(),
            _ => f64::INFINITY,
        });
    of.fold(0.0, f64::max)
}

/// `exp-04-row-pair-prefill` as `04`.
fn number(experiment: &str) -> String {
    experiment.get(4..6).unwrap_or("?").to_string()
}

/// A metric's unit; a plain number's says what it is.
fn unit_or_name(metric: Metric) -> &'static str {
    match metric.unit() {
        "" => metric.name(),
        unit => unit,
    }
}

/// Text in lines of at most that many characters, where its words allow.
fn wrap(text: &str, columns: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].len() + 1 + word.len() > columns {
            lines.push(format!(" {word}"));
        } else {
            let space = if lines[last].is_empty() { "" } else { " " };
            lines[last] += &format!("{space}{word}");
        }
    }
    lines.join("\n")
}

fn letter(i: usize) -> String {
    letters().nth(i).unwrap_or('?').to_string()
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
    let number = |v: f64| match v {
        // A factor of a hundred needs no hundredths.
        v if v >= 100.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    };
    match ratio.interval {
        Some((low, high)) => format!(
            "{mark}{} [{}, {}]",
            number(value),
            number(low),
            number(high)
        ),
        None => format!("{mark}{}", number(value)),
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
