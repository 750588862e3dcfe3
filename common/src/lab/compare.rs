//! Results of several machines, or of several runs, side by side.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::folder::Folder;
use super::ledger::Verdict;
use super::machine::Rustc;
use super::meta::Meta;
use super::row::{ISAS, Metric, Record};

/// How rows of different folders are matched.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// On the whole key; otherwise on (experiment, variant, baseline's variant, metric, params) at one
    /// thread and at each machine's all-threads count, taking on each machine its best instruction set.
    pub exact: bool,
    /// Ratios closer to 1 than this many percent count as noise.
    pub threshold_percent: f64,
}

/// Threads of a joined row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Threads {
    /// That many.
    Count(usize),
    /// As many as each machine has.
    All,
}

/// What a joined row is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    /// Experiment.
    pub experiment: String,
    /// Layout or method.
    pub variant: String,
    /// Instruction set, when joined exactly.
    pub isa: Option<String>,
    /// The baseline; without its instruction set unless joined exactly.
    pub baseline: String,
    /// The metric's name.
    pub metric: &'static str,
    /// Parameters.
    pub params: String,
    /// Threads.
    pub threads: Threads,
}

/// A row with a value in every folder.
#[derive(Clone, Debug)]
pub struct Joined<'a> {
    /// What it is about.
    pub subject: Subject,
    /// One record a folder.
    pub records: Vec<&'a Record>,
    /// For every folder but the first, its value over the first's.
    pub ratios: Vec<Ratio>,
}

/// One value over another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// `None` where the first value is 0.
    pub value: Option<f64>,
    /// The widest the two intervals allow, where at least one side has an interval and all ends are
    /// positive.
    pub interval: Option<(f64, f64)>,
    /// The intervals overlap, or the ratio is within the threshold of 1.
    pub noise: bool,
}

/// A claim on which folders differ.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The claim.
    pub claim: String,
    /// One verdict a folder; `None` where its experiment has not run there.
    pub verdicts: Vec<Option<Verdict>>,
}

/// Rows that some folder lacks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Missing {
    /// Index of the folder that lacks them.
    pub folder: usize,
    /// Experiment.
    pub experiment: String,
    /// Why.
    pub why: String,
    /// How many.
    pub rows: usize,
}

/// A comparison.
#[derive(Clone, Debug)]
pub struct Comparison<'a> {
    /// Rows that every folder has.
    pub joined: Vec<Joined<'a>>,
    /// Claims whose verdicts differ.
    pub verdicts: Vec<Difference>,
    /// What is missing, from whom, why.
    pub missing: Vec<Missing>,
    /// What differs besides the machine, one line each.
    pub besides: Vec<String>,
}

/// Compares folders, the first being what the others are held against.
pub fn compare<'a>(folders: &'a [Folder], how: How) -> Comparison<'a> {
    let tables: Vec<_> = folders.iter().map(|f| subjects(f, how.exact)).collect();
    let every: BTreeSet<&Subject> = tables.iter().flat_map(|t| t.keys()).collect();
    let mut joined = Vec::new();
    let mut missing: BTreeMap<(usize, String, String), usize> = BTreeMap::new();
    // Where every machine has one thread, "all" says nothing that "one" does not.
    let single = folders.iter().all(|f| f.machine.threads == 1);
    for subject in every {
        if single && subject.threads == Threads::All {
            continue;
        }
        let records: Vec<Option<&Record>> =
            tables.iter().map(|t| t.get(subject).copied()).collect();
        if let Some(records) = records.iter().copied().collect::<Option<Vec<_>>>() {
            let ratios = records[1..]
                .iter()
                .map(|r| ratio(records[0], r, how.threshold_percent))
                .collect();
            joined.push(Joined {
                subject: subject.clone(),
                records,
                ratios,
            });
            continue;
        }
        for (i, _) in records.iter().enumerate().filter(|(_, r)| r.is_none()) {
            let why = why_missing(&folders[i], &tables[i], subject);
            *missing
                .entry((i, subject.experiment.clone(), why))
                .or_default() += 1;
        }
    }
    Comparison {
        joined,
        verdicts: verdicts(folders),
        missing: missing
            .into_iter()
            .map(|((folder, experiment, why), rows)| Missing {
                folder,
                experiment,
                why,
                rows,
            })
            .collect(),
        besides: besides(folders),
    }
}

/// The rows of a folder by what they are about. Where several rows are about the same, the best
/// instruction set is kept.
fn subjects(folder: &Folder, exact: bool) -> BTreeMap<Subject, &Record> {
    let mut subjects: BTreeMap<Subject, &Record> = BTreeMap::new();
    let all = folder.machine.threads;
    for record in folder.records() {
        let (baseline, _) = record.baseline_parts();
        let mut threads = Vec::new();
        if exact || record.threads == 1 {
            threads.push(Threads::Count(record.threads));
        }
        if !exact && record.threads == all {
            threads.push(Threads::All);
        }
        for threads in threads {
            let subject = Subject {
                experiment: record.experiment.clone(),
                variant: record.variant.clone(),
                isa: exact.then(|| record.isa.clone()),
                baseline: if exact { &record.baseline } else { baseline }.into(),
                metric: record.metric.name(),
                params: record.params.clone(),
                threads,
            };
            subjects
                .entry(subject)
                .and_modify(|best| {
                    if better(record, best) {
                        *best = record;
                    }
                })
                .or_insert(record);
        }
    }
    subjects
}

/// Whether `a` stands for its machine rather than `b`. A ratio against the row's own instruction set
/// says more than one against another, and one against a stronger set more than one against a
/// weaker; then the better value.
fn better(a: &Record, b: &Record) -> bool {
    let fairness = |r: &Record| {
        let (_, isa) = r.baseline_parts();
        (isa == r.isa, ISAS.iter().position(|i| *i == isa))
    };
    let (fair_a, fair_b) = (fairness(a), fairness(b));
    if fair_a != fair_b {
        return fair_a > fair_b;
    }
    if a.metric.larger_is_better() {
        a.value > b.value
    } else {
        a.value < b.value
    }
}

fn ratio(first: &Record, other: &Record, threshold_percent: f64) -> Ratio {
    let ends = |r: &Record| match r.interval {
        Some(i) => (i.low, i.high),
        None => (r.value, r.value),
    };
    let ((low_1, high_1), (low_2, high_2)) = (ends(first), ends(other));
    let measured = first.interval.is_some() || other.interval.is_some();
    let value = (first.value != 0.0).then(|| other.value / first.value);
    let overlap = low_1 <= high_2 && low_2 <= high_1;
    let close = value.is_some_and(|v| (v - 1.0).abs() * 100.0 < threshold_percent);
    Ratio {
        value,
        interval: (measured && low_1 > 0.0 && low_2 > 0.0)
            .then(|| (low_2 / high_1, high_2 / low_1)),
        noise: overlap || (measured && close),
    }
}

fn why_missing(folder: &Folder, rows: &BTreeMap<Subject, &Record>, subject: &Subject) -> String {
    let Some(run) = folder.run(&subject.experiment) else {
        return "not run".into();
    };
    let refusals = run.meta.refused.iter();
    if let Some(refusal) = refusals.clone().find(|r| {
        r.variant == subject.variant
            && (r.isa.is_empty() || subject.isa.as_ref().is_none_or(|isa| *isa == r.isa))
    }) {
        return format!("{} refused: {}", refusal.variant, refusal.why);
    }
    let of_variant: Vec<&Subject> = rows
        .keys()
        .filter(|s| s.experiment == subject.experiment && s.variant == subject.variant)
        .collect();
    if of_variant.is_empty() {
        return format!("no variant {}", subject.variant);
    }
    let same_metric = of_variant.iter().filter(|s| s.metric == subject.metric);
    if same_metric.clone().next().is_none() {
        return format!("{}: no {}", subject.variant, subject.metric);
    }
    if let Some(isa) = &subject.isa
        && same_metric.clone().all(|s| s.isa.as_ref() != Some(isa))
    {
        return format!("{}: not on {isa}", subject.variant);
    }
    if same_metric.clone().any(|s| s.params == subject.params) {
        return "other thread counts or baselines".into();
    }
    if run.meta.quick {
        "other shapes: run with --quick".into()
    } else {
        "other params".into()
    }
}

fn verdicts(folders: &[Folder]) -> Vec<Difference> {
    let claims: BTreeSet<&str> = folders
        .iter()
        .flat_map(|f| f.findings.iter().map(|f| f.claim.as_str()))
        .collect();
    claims
        .into_iter()
        .map(|claim| Difference {
            claim: claim.into(),
            verdicts: folders
                .iter()
                .map(|folder| {
                    let found = folder.findings.iter().find(|f| f.claim == claim);
                    found.map(|f| f.verdict)
                })
                .collect(),
        })
        // A claim that only some have tested is missing there, not different.
        .filter(|d| {
            let known: Vec<_> = d.verdicts.iter().flatten().collect();
            known.windows(2).any(|pair| pair[0] != pair[1])
        })
        .collect()
}

/// What differs in how the runs were made, by experiment; a difference that all share is one line.
fn besides(folders: &[Folder]) -> Vec<String> {
    let names: BTreeSet<&str> = folders
        .iter()
        .flat_map(|f| f.runs.iter().map(|r| r.meta.experiment.as_str()))
        .collect();
    let mut lines: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let differing = |what: &str, values: &[String]| {
        let differ = values.iter().any(|v| *v != values[0]);
        differ.then(|| format!("{what}: {}", values.join(" | ")))
    };
    let mut shared = 0;
    for name in names {
        let metas: Option<Vec<&Meta>> = folders
            .iter()
            .map(|f| f.run(name).map(|run| &run.meta))
            .collect();
        let Some(metas) = metas else { continue };
        shared += 1;
        for (what, of) in facts(&metas) {
            let values: Vec<String> = metas.iter().map(|m| shown(&of(m))).collect();
            if let Some(line) = differing(&what, &values) {
                lines.entry(line).or_default().push(name);
            }
        }
    }
    let of_compilers = ["rustc", "RUSTFLAGS"]
        .into_iter()
        .zip([(|r| &r.version) as fn(&Rustc) -> &String, |r| &r.flags]);
    let compilers = of_compilers.filter_map(|(what, of)| {
        let value = |f: &Folder| f.machine.rustc.as_ref().map(of).cloned();
        let values: Vec<String> = folders.iter().map(|f| shown(&json!(value(f)))).collect();
        differing(what, &values)
    });
    let lines = lines.into_iter().map(|(line, names)| {
        if names.len() == shared && shared > 1 {
            line
        } else {
            let short: Vec<&str> = names.iter().map(|n| n.get(..6).unwrap_or(n)).collect();
            format!("{line} ({})", short.join(", "))
        }
    });
    let mut lines: Vec<String> = lines.chain(compilers).collect();
    // Kernels are many and follow from the machine; what the user chose comes first.
    lines.sort_by_key(|line| line.starts_with("kernel for "));
    lines
}

type Fact = Box<dyn Fn(&Meta) -> Value>;

/// What may differ between runs: commit, flags, kernels, files, by name.
fn facts(metas: &[&Meta]) -> Vec<(String, Fact)> {
    let mut facts: Vec<(String, Fact)> = vec![
        ("schema".into(), Box::new(|m| json!(m.schema))),
        ("commit".into(), Box::new(|m| json!(m.commit))),
        ("dirty".into(), Box::new(|m| json!(m.dirty))),
        ("quick".into(), Box::new(|m| json!(m.quick))),
        ("seed".into(), Box::new(|m| json!(m.seed))),
        ("rounds".into(), Box::new(|m| json!(m.rounds))),
    ];
    let keys = |of: fn(&Meta) -> Vec<String>| -> BTreeSet<String> {
        metas.iter().flat_map(|m| of(m)).collect()
    };
    // These have lines of their own, or only say where the files went.
    let own = ["quick", "seed", "rounds", "out", "machine"];
    for flag in keys(|m| m.flags.keys().cloned().collect()) {
        if !own.contains(&flag.as_str()) {
            let what = format!("--{flag}");
            facts.push((what, Box::new(move |m| json!(m.flags.get(&flag)))));
        }
    }
    for format in keys(|m| m.kernels.keys().cloned().collect()) {
        let what = format!("kernel for {format}");
        facts.push((
            what,
            Box::new(move |m| json!(m.kernels.get(&format).map(|k| &k.kernel))),
        ));
    }
    for file in keys(|m| m.inputs.keys().cloned().collect()) {
        let what = format!("sha256 of {file}");
        facts.push((
            what,
            Box::new(move |m| json!(m.inputs.get(&file).map(|i| &i.sha256))),
        ));
    }
    facts
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) if text.is_empty() => "-".into(),
        // Hashes, by their first digits.
        Value::String(text) if text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit()) => {
            text[..12].into()
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

impl Subject {
    /// The metric.
    pub fn metric(&self) -> Option<Metric> {
        Metric::from_name(self.metric)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::ledger::Finding;
    use crate::lab::machine::Machine;
    use crate::lab::meta::{Input, Kernel, Refusal, SCHEMA};
    use crate::lab::row::Interval;
    use crate::lab::{Folder, folder::Run};

    fn record(variant: &str, isa: &str, threads: usize, value: f64) -> Record {
        Record {
            experiment: "exp-03-x".into(),
            claim: String::new(),
            variant: variant.into(),
            isa: isa.into(),
            baseline: String::new(),
            metric: Metric::WeightsPerS,
            value,
            interval: Some(Interval {
                low: value * 0.95,
                high: value * 1.05,
                n: 15,
            }),
            threads,
            params: "rows=4".into(),
            quick: false,
        }
    }

    fn folder(name: &str, threads: usize, records: Vec<Record>) -> Folder {
        let mut machine = Machine::here();
        machine.threads = threads;
        let meta = Meta {
            schema: SCHEMA,
            experiment: "exp-03-x".into(),
            commit: "a".repeat(40),
            dirty: false,
            date: String::new(),
            quick: false,
            flags: BTreeMap::new(),
            seed: 1,
            rounds: 15,
            threads: vec![1, threads],
            kernels: BTreeMap::new(),
            inputs: BTreeMap::new(),
            refused: Vec::new(),
            must_hold: Vec::new(),
            verdicts: Vec::new(),
            csv_sha256: String::new(),
        };
        Folder {
            name: name.into(),
            path: name.into(),
            machine,
            runs: vec![Run { meta, records }],
            findings: Vec::new(),
        }
    }

    const HOW: How = How {
        exact: false,
        threshold_percent: 2.0,
    };

    fn values(comparison: &Comparison) -> Vec<(Threads, Vec<f64>)> {
        let rows = comparison.joined.iter();
        rows.map(|j| {
            let values = j.records.iter().map(|r| r.value).collect();
            (j.subject.threads, values)
        })
        .collect()
    }

    #[test]
    fn the_best_isa_joins_at_one_thread_and_at_all() {
        let a = folder(
            "a",
            8,
            vec![
                record("stock", "neon", 1, 10.0),
                record("stock", "dotprod", 1, 30.0),
                record("stock", "dotprod", 4, 100.0),
                record("stock", "dotprod", 8, 200.0),
            ],
        );
        let b = folder(
            "b",
            2,
            vec![
                record("stock", "avx2", 1, 45.0),
                record("stock", "avx512-vnni", 1, 40.0),
                record("stock", "avx2", 2, 90.0),
            ],
        );
        let folders = [a, b];
        let joined = compare(&folders, HOW);
        assert_eq!(
            values(&joined),
            [
                (Threads::Count(1), vec![30.0, 45.0]),
                (Threads::All, vec![200.0, 90.0]),
            ]
        );
        assert!(joined.missing.is_empty(), "{:?}", joined.missing);
        let ratio = joined.joined[0].ratios[0];
        assert_eq!(ratio.value, Some(1.5));
        let (low, high) = ratio.interval.unwrap();
        assert!(
            (low - 1.5 * 0.95 / 1.05).abs() < 1e-12 && (high - 1.5 * 1.05 / 0.95).abs() < 1e-12
        );
        assert!(!ratio.noise);

        // Exactly, nothing joins: the instruction sets differ.
        let exact = compare(&folders, How { exact: true, ..HOW });
        assert!(exact.joined.is_empty());
        assert_eq!(exact.missing.iter().map(|m| m.rows).sum::<usize>(), 7);
        assert!(exact.missing.iter().any(|m| m.why == "stock: not on avx2"));
    }

    #[test]
    fn exact_joins_keep_every_isa_and_thread_count() {
        let rows = || {
            vec![
                record("stock", "avx2", 1, 45.0),
                record("stock", "scalar", 3, 4.0),
            ]
        };
        let folders = [folder("a", 2, rows()), folder("b", 2, rows())];
        let exact = compare(&folders, How { exact: true, ..HOW });
        assert_eq!(exact.joined.len(), 2);
        assert!(exact.joined.iter().all(|j| j.ratios[0].noise));
    }

    #[test]
    fn overlap_and_threshold_are_noise() {
        let with = |low: f64, value: f64, high: f64| {
            let mut r = record("stock", "avx2", 1, value);
            r.interval = Some(Interval { low, high, n: 15 });
            r
        };
        let exact = |value: f64| {
            let mut r = record("stock", "avx2", 1, value);
            r.interval = None;
            r
        };
        assert!(ratio(&with(9.0, 10.0, 11.0), &with(10.5, 12.0, 13.0), 0.0).noise);
        assert!(!ratio(&with(9.0, 10.0, 11.0), &with(11.5, 12.0, 13.0), 0.0).noise);
        assert!(ratio(&with(9.9, 10.0, 10.1), &with(10.11, 10.15, 10.2), 2.0).noise);
        assert!(!ratio(&with(9.9, 10.0, 10.1), &with(10.11, 10.15, 10.2), 1.0).noise);
        // Exact values that differ at all do differ.
        assert!(!ratio(&exact(100.0), &exact(101.0), 2.0).noise);
        assert!(ratio(&exact(100.0), &exact(100.0), 2.0).noise);
        assert_eq!(ratio(&exact(100.0), &exact(101.0), 2.0).interval, None);
        assert_eq!(ratio(&exact(0.0), &exact(1.0), 2.0).value, None);
    }

    #[test]
    fn ratios_join_on_the_baselines_variant_and_prefer_the_fair_one() {
        let speedup = |isa: &str, baseline: &str, value: f64| {
            let mut r = record("row-pair", isa, 1, value);
            r.metric = Metric::Speedup;
            r.baseline = baseline.into();
            r
        };
        let a = folder("a", 1, vec![speedup("dotprod", "stock dotprod", 1.7)]);
        let b = folder(
            "b",
            1,
            vec![
                speedup("avx2", "stock scalar", 30.0),
                speedup("avx2", "stock avx2", 2.5),
            ],
        );
        let folders = [a, b];
        let joined = compare(&folders, HOW);
        assert_eq!(values(&joined), [(Threads::Count(1), vec![1.7, 2.5])]);
    }

    #[test]
    fn what_is_missing_says_why() {
        let mut other_params = record("stock", "avx2", 1, 1.0);
        other_params.params = "rows=8".into();
        let a = folder(
            "a",
            8,
            vec![
                other_params,
                record("slot16", "avx2", 1, 1.0),
                record("wide-row", "avx2", 1, 1.0),
            ],
        );
        let mut b = folder("b", 8, vec![record("stock", "avx2", 1, 1.0)]);
        b.runs[0].meta.refused.push(Refusal {
            variant: "wide-row".into(),
            isa: String::new(),
            why: "needs a multiple of 8 rows".into(),
        });
        let mut c = folder("c", 8, Vec::new());
        c.runs.clear();
        let folders = [a, b, c];
        let missing = compare(&folders, HOW).missing;
        let why: Vec<_> = missing
            .iter()
            .map(|m| (m.folder, &*m.why, m.rows))
            .collect();
        assert_eq!(
            why,
            [
                (0, "other params", 1),
                (1, "no variant slot16", 1),
                (1, "other params", 1),
                (1, "wide-row refused: needs a multiple of 8 rows", 1),
                (2, "not run", 4),
            ]
        );
    }

    #[test]
    fn verdicts_that_differ_and_facts_that_differ() {
        let finding = |claim: &str, verdict| Finding {
            claim: claim.into(),
            verdict,
            measured: None,
            unit: String::new(),
            reason: String::new(),
            experiment: "exp-03-x".into(),
            key: String::new(),
        };
        let mut a = folder("a", 1, Vec::new());
        let mut b = folder("b", 1, Vec::new());
        a.findings = vec![
            finding("L07", Verdict::Reproduced),
            finding("L08", Verdict::Reproduced),
            finding("L09", Verdict::Reproduced),
        ];
        b.findings = vec![
            finding("L07", Verdict::NotReproduced),
            finding("L08", Verdict::Reproduced),
        ];
        let input = |digit: &str| Input {
            file: "m.gguf".into(),
            sha256: digit.repeat(64),
            bytes: 1,
        };
        a.runs[0].meta.inputs.insert("m.gguf".into(), input("1"));
        b.runs[0].meta.inputs.insert("m.gguf".into(), input("2"));
        b.runs[0].meta.commit = "b".repeat(40);
        b.runs[0].meta.dirty = true;
        let kernel = |kernel: &str| Kernel {
            kernel: kernel.into(),
            why: String::new(),
        };
        let of_a = kernel("wide-row/avx2");
        a.runs[0].meta.kernels.insert("pq2_0".into(), of_a);
        let of_b = kernel("wide-row/neon");
        b.runs[0].meta.kernels.insert("pq2_0".into(), of_b);
        for (folder, flags) in [(&mut a, ""), (&mut b, "-Copt-level=1")] {
            folder.machine.rustc.as_mut().unwrap().flags = flags.into();
        }
        b.runs[0]
            .meta
            .flags
            .insert("threads".into(), json!(["1", "4"]));
        let folders = [a, b];
        let comparison = compare(&folders, HOW);
        assert_eq!(comparison.verdicts.len(), 1);
        assert_eq!(comparison.verdicts[0].claim, "L07");
        assert_eq!(
            comparison.besides,
            [
                "--threads: - | [\"1\",\"4\"] (exp-03)",
                "commit: aaaaaaaaaaaa | bbbbbbbbbbbb (exp-03)",
                "dirty: false | true (exp-03)",
                "sha256 of m.gguf: 111111111111 | 222222222222 (exp-03)",
                "RUSTFLAGS: - | -Copt-level=1",
                "kernel for pq2_0: wide-row/avx2 | wide-row/neon (exp-03)",
            ]
        );
    }
}
