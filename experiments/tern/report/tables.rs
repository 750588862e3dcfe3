//! Markdown tables: the question of a page first, then the rows that bear on it.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use common::lab::table::{printable, short};
use common::lab::{Claim, Finding, Folder, Held, ISAS, Metric, Record, Run};

use super::plots::Plot;

/// Lines of a table of rows; what is beyond stays in the CSV.
const LINES: usize = 16;

/// Where a text's links lead.
pub struct Links {
    /// From the text to the folder of rows, with a slash at its end, or empty.
    pub rows: String,
    /// From the text to the experiments, likewise; without it, experiments are named and not linked.
    pub pages: Option<String>,
}

impl Links {
    /// A plot as an image.
    pub fn image(&self, plot: &Plot) -> String {
        format!("![{}]({}{})\n", plot.alt, self.rows, plot.path())
    }
}

/// One line on the machine.
pub fn machine(folder: &Folder) -> String {
    let facts = &folder.machine;
    let mut line = format!(
        "{}: {}, {} cores, {} threads",
        escape(&folder.name),
        escape(&facts.cpu),
        facts.cores,
        facts.threads
    );
    if !facts.os.is_empty() {
        line += &format!(", {}", escape(&facts.os));
    }
    let commits: BTreeSet<String> = folder.runs.iter().map(commit).collect();
    if !commits.is_empty() {
        let word = if commits.len() == 1 {
            "commit"
        } else {
            "commits"
        };
        let commits: Vec<String> = commits.into_iter().collect();
        line += &format!("; {word} {}", commits.join(", "));
    }
    line + ".\n"
}

/// The commit of a run, in short.
pub fn commit(run: &Run) -> String {
    let dirty = if run.meta.dirty { " (changed)" } else { "" };
    format!("{:.12}{dirty}", run.meta.commit)
}

/// Every claim of the ledger and how it came out.
pub fn verdicts(ledger: &[Claim], folder: &Folder, links: &Links) -> String {
    let mut counts = [0; 4];
    let mut rows = Vec::new();
    for claim in ledger {
        let finding = folder.findings.iter().find(|f| f.claim == claim.id);
        let verdict = finding.map_or("not run", |f| f.verdict.name());
        if let Some(i) = VERDICTS.iter().position(|v| *v == verdict) {
            counts[i] += 1;
        }
        let short_name = claim.experiment.get(..6).unwrap_or(&claim.experiment);
        let experiment = match &links.pages {
            Some(pages) => format!("[{short_name}]({pages}{}/README.md)", claim.experiment),
            None => short_name.into(),
        };
        rows.push(vec![
            claim.id.clone(),
            escape(&claim.claim),
            escape(&claim.published),
            finding.map(|f| measured(folder, f)).unwrap_or_default(),
            verdict.into(),
            experiment,
        ]);
    }
    let summary: Vec<String> = VERDICTS
        .iter()
        .zip(counts)
        .map(|(verdict, count)| format!("{count} {verdict}"))
        .collect();
    let header = ["", "claim", "published", "measured here", "verdict", "by"];
    let table = table(&header, rows);
    format!(
        "{} claims: {}.\n\n{table}",
        ledger.len(),
        summary.join(", ")
    )
}

const VERDICTS: [&str; 4] = [
    "reproduced",
    "not reproduced",
    "not testable here",
    "not run",
];

/// An experiment on a machine: its verdicts, the plots given, and the rows that say most.
pub fn experiment(
    folder: &Folder,
    name: &str,
    ledger: &[Claim],
    plots: &[&Plot],
    links: &Links,
) -> String {
    let Some(run) = folder.run(name) else {
        let recipe = name.get(..6).unwrap_or(name);
        let machine = escape(&folder.name);
        return format!(
            "No rows of this experiment on {machine} yet: `just {recipe}` writes them.\n"
        );
    };
    let meta = &run.meta;
    let quick = if meta.quick { "; a quick run" } else { "" };
    let mut text = format!(
        "{}, {}; commit {}, {} rounds{quick}. A value is a median, with its 95% interval in brackets.\n\n",
        escape(&folder.name),
        escape(&folder.machine.cpu),
        commit(run),
        meta.rounds,
    );
    let mut findings: Vec<&Finding> = meta.verdicts.iter().collect();
    findings.sort_by_key(|f| ledger.iter().position(|c| c.id == f.claim));
    let verdicts: Vec<Vec<String>> = findings
        .into_iter()
        .map(|f| {
            let claim = ledger.iter().find(|c| c.id == f.claim);
            vec![
                f.claim.clone(),
                f.verdict.name().into(),
                claim.map(|c| escape(&c.published)).unwrap_or_default(),
                measured(folder, f),
                escape(&f.reason),
            ]
        })
        .collect();
    if !verdicts.is_empty() {
        text += &table(
            &["claim", "verdict", "published", "measured here", "because"],
            verdicts,
        );
        text += "\n";
    }
    for plot in plots {
        text += &format!("{}\n", links.image(plot));
    }
    text += &rows(folder, run, links);
    for held in meta.must_hold.iter().filter(|h| !h.held) {
        text += &format!("\n* **Does not hold**: {}", escape(&held.what));
    }
    for (what, times) in kinds(meta.must_hold.iter().filter(|h| h.held)) {
        let times = match times {
            1 => String::new(),
            times => format!(" ({times} cases)"),
        };
        text += &format!("\n* Holds{times}: {}", escape(&what));
    }
    for refusal in &meta.refused {
        let what = format!("{} {}", refusal.variant, refusal.isa);
        text += &format!(
            "\n* Refused: {}: {}",
            escape(what.trim()),
            escape(&refusal.why)
        );
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

/// What holds, with the number of cases: where more than three differ in less than half of their words, one line for all,
/// with `...` for those words.
fn kinds<'a>(held: impl Iterator<Item = &'a Held>) -> Vec<(String, usize)> {
    let mut kinds: Vec<Vec<&str>> = Vec::new();
    for held in held {
        let alike = |kind: &Vec<&'a str>| {
            let words = |text: &'a str| text.split(' ');
            let pairs = || words(kind[0]).zip(words(&held.what));
            let same = pairs().filter(|(a, b)| a == b).count();
            words(kind[0]).count() == words(&held.what).count() && same * 2 > pairs().count()
        };
        match kinds.iter_mut().find(|kind| alike(kind)) {
            Some(kind) => kind.push(&held.what),
            None => kinds.push(vec![&held.what]),
        }
    }
    let mut lines = Vec::new();
    for kind in kinds {
        if kind.len() <= 3 {
            lines.extend(kind.iter().map(|what| (what.to_string(), 1)));
            continue;
        }
        let words = kind[0].split(' ').enumerate().map(|(i, word)| {
            if kind.iter().all(|what| what.split(' ').nth(i) == Some(word)) {
                return word.to_string();
            }
            let end = word.trim_start_matches(|c| c != ',' && c != ':');
            format!("...{end}")
        });
        lines.push((words.collect::<Vec<_>>().join(" "), kind.len()));
    }
    lines
}

/// Rows about one thing: the same variant, instruction set, threads and parameters.
struct Group<'a> {
    records: Vec<&'a Record>,
}

impl<'a> Group<'a> {
    fn first(&self) -> &'a Record {
        self.records[0]
    }

    /// How soon it is wanted, least first: what a verdict rests on; what that was compared with, by each
    /// variant's best instruction set; other ratios, with the threads that say most before others; other measurements;
    /// counts. On a page without verdicts, decode of one thread from cache stands in for what verdicts rest on.
    fn rank(&self, run: &Run, groups: &[Group], all_threads: usize) -> u32 {
        let verdict_on = |group: &Group| {
            let mut keys = group.records.iter().map(|r| r.key().to_string());
            keys.any(|key| run.meta.verdicts.iter().any(|v| v.key == key))
        };
        if verdict_on(self) {
            return 0;
        }
        let (first, measured) = (
            self.first(),
            self.records.iter().any(|r| r.interval.is_some()),
        );
        let beside =
            |other: &Record| other.threads == first.threads && other.params == first.params;
        let strength = |r: &Record| ISAS.iter().position(|isa| *isa == r.isa);
        let best = groups.iter().map(Group::first).all(|other| {
            !beside(other) || other.variant != first.variant || strength(other) <= strength(first)
        });
        let ratio = self.records.iter().any(|r| !r.baseline.is_empty());
        // From cache, one thread shows the kernel; elsewhere all of them show the machine.
        let has = |pair: &str| first.params.split(';').any(|p| p == pair);
        let from_cache = has("from=cache") && has("batch=1");
        let telling = first.threads == if from_cache { 1 } else { all_threads };
        let near = if run.meta.verdicts.is_empty() {
            from_cache && telling && best
        } else {
            groups.iter().any(|g| verdict_on(g) && beside(g.first()))
        };
        match (near && measured, ratio, telling, best) {
            (true, _, _, true) => 1,
            (true, ..) => 2,
            (_, true, true, true) => 3,
            (_, true, true, false) => 4,
            (_, true, false, _) => 5,
            _ if measured && telling && best => 6,
            _ if measured => 7,
            _ => 8,
        }
    }

    fn ratios(&self) -> usize {
        let ratios = self.records.iter().filter(|r| !r.baseline.is_empty());
        ratios.count()
    }
}

/// The rows that say most, one line for each group of them.
fn rows(folder: &Folder, run: &Run, links: &Links) -> String {
    let mut groups: Vec<Group> = Vec::new();
    for record in &run.records {
        let about = |r: &Record| {
            (r.variant == record.variant && r.isa == record.isa)
                && (r.threads == record.threads && r.params == record.params)
        };
        match groups.iter_mut().find(|g| about(g.first())) {
            Some(group) => group.records.push(record),
            None => groups.push(Group {
                records: vec![record],
            }),
        }
    }
    let threads = folder.machine.threads;
    let ranks: Vec<u32> = groups
        .iter()
        .map(|g| g.rank(run, &groups, threads))
        .collect();
    // On a page without verdicts every kind of work gets a line before any gets two, first what is compared with most.
    let turn = |i: usize| {
        let before = |j: &usize| {
            (ranks[*j] == ranks[i] && groups[*j].first().params == groups[i].first().params)
                && (Reverse(groups[*j].ratios()), *j) < (Reverse(groups[i].ratios()), i)
        };
        if ranks[i] != 3 || !run.meta.verdicts.is_empty() {
            0
        } else {
            (0..groups.len()).filter(before).count()
        }
    };
    let mut order: Vec<(u32, usize, usize)> =
        (0..groups.len()).map(|i| (ranks[i], turn(i), i)).collect();
    order.sort_unstable();
    let mut shown: Vec<usize> = order.iter().take(LINES).map(|(.., i)| *i).collect();
    shown.sort_unstable();

    let cells: Vec<Vec<String>> = shown
        .iter()
        .map(|&i| {
            let group = &groups[i];
            let first = group.first();
            let part = |ratio: bool| {
                let of = group
                    .records
                    .iter()
                    .filter(|r| r.baseline.is_empty() != ratio);
                of.map(|r| value(r)).collect::<Vec<_>>().join("<br>")
            };
            vec![
                escape(&first.variant),
                first.isa.clone(),
                first.threads.to_string(),
                escape(&first.params.replace(';', ", ").replace('=', " ")),
                part(false),
                part(true),
            ]
        })
        .collect();
    let header = ["variant", "isa", "threads", "params", "measured", "against"];
    let table = table(&header, cells);
    let count: usize = shown.iter().map(|&i| groups[i].records.len()).sum();
    let name = &run.meta.experiment;
    let csv = format!("[{name}.csv]({}{name}.csv)", links.rows);
    let total = run.records.len();
    if count == total {
        format!("{table}\nAll rows of {csv}.\n")
    } else {
        format!("{table}\n{count} of {total} rows; the others are in {csv}.\n")
    }
}

/// What a verdict rests on, with its interval.
fn measured(folder: &Folder, finding: &Finding) -> String {
    folder.record(&finding.key).map(value).unwrap_or_default()
}

/// A row's value with its unit, its interval, and what it is against.
pub fn value(record: &Record) -> String {
    let unit = match record.metric.unit() {
        "" if record.metric == Metric::Count => String::new(),
        // Another plain number says what it is.
        "" => format!(" {}", record.metric.name().replace('_', " ")),
        unit @ ("x" | "%") => unit.into(),
        unit => format!(" {unit}"),
    };
    let mut text = format!("{}{unit}", short(record.value));
    if record.metric == Metric::Equal {
        text = if record.value == 1.0 {
            "equal"
        } else {
            "not equal"
        }
        .into();
    }
    if let Some(ends) = &record.interval {
        text += &format!(" \\[{}, {}\\]", short(ends.low), short(ends.high));
    }
    if !record.baseline.is_empty() {
        let of = if record.metric == Metric::Share {
            "of"
        } else {
            "against"
        };
        text += &format!(" {of} {}", escape(&record.baseline));
    }
    text
}

/// A Markdown table without the columns that are empty in every row.
fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let kept: Vec<usize> = (0..header.len())
        .filter(|&i| rows.iter().any(|row| !row[i].is_empty()))
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells: Vec<&str> = cells.collect();
        format!("| {} |\n", cells.join(" | "))
    };
    let mut text = line(&mut kept.iter().map(|&i| header[i]));
    text += &format!("|{}\n", "---|".repeat(kept.len()));
    for row in &rows {
        text += &line(&mut kept.iter().map(|&i| row[i].as_str()));
    }
    text
}

/// Text that Markdown shows as it is, on one line.
pub fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in printable(text).chars() {
        if r"\|*`<>[]".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
