//! Whether committed results are what experiments wrote.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::files;
use super::folder::{Folder, Run};
use super::ledger::{self, Claim, Verdict};
use super::meta::SCHEMA;
use super::row::{ISAS, Record, split_params};
use super::sums::{self, SUMS, Sums};

/// What is wrong with the results of a folder; empty when nothing is.
///
/// Every file is held against `SHA256SUMS` and read against the schema; every row's instruction set and threads
/// against `machine.json`; every verdict against the ledger, against its row, and against what its experiment wrote.
pub fn check_folder(path: &Path, ledger: &[Claim]) -> Vec<String> {
    let mut wrong = files_wrong(path).unwrap_or_else(|error| vec![format!("{error:#}")]);
    let folder = match Folder::open(path) {
        Ok(folder) => folder,
        Err(error) => {
            wrong.push(format!("{error:#}"));
            return wrong;
        }
    };
    let mut check = |ok: bool, what: String| {
        if !ok {
            wrong.push(format!("{}: {what}", folder.path.display()));
        }
    };
    for run in &folder.runs {
        let name = &run.meta.experiment;
        check(
            run.meta.commit == "published" || !run.meta.dirty,
            format!("{name}: measured on source that is no commit; measure again from a clean one"),
        );
        check(
            run.meta.must_hold.iter().all(|h| h.held),
            format!("{name}: an equality that must hold did not"),
        );
        for claim in claims_named(run) {
            check(
                ledger
                    .iter()
                    .any(|c| c.id == claim && c.experiment == *name),
                format!("{name}: claim {claim}: the ledger has none for this experiment"),
            );
        }
        if let Some((first, second)) = out_of_order(run) {
            check(
                false,
                format!(
                    "{name}: params: {first} before {second} in one row and after it in another"
                ),
            );
        }
        for record in &run.records {
            check(
                record.threads <= most_threads(&folder, run, record),
                format!(
                    "{}: threads: found {}, but machine.json has {}",
                    record.key(),
                    record.threads,
                    folder.machine.threads
                ),
            );
            check(
                runs_here(&folder, &record.isa) && runs_here(&folder, record.baseline_parts().1),
                format!(
                    "{}: machine.json names no such instruction set",
                    record.key()
                ),
            );
        }
    }
    // claims.csv holds what the experiments' own files hold, no more, no less.
    let mut expected: Vec<_> = folder.runs.iter().flat_map(|r| &r.meta.verdicts).collect();
    for finding in &folder.findings {
        match expected.iter().position(|f| *f == finding) {
            Some(i) => drop(expected.swap_remove(i)),
            None => check(
                false,
                format!(
                    "claims.csv: {}: is not what {} wrote",
                    finding.claim, finding.experiment
                ),
            ),
        }
        match (folder.record(&finding.key), finding.measured) {
            (Some(record), Some(measured)) => check(
                record.value == measured
                    && record.metric.unit() == finding.unit
                    && record.experiment == finding.experiment,
                format!(
                    "claims.csv: {}: measured {measured} {}, but its row holds {} {}",
                    finding.claim,
                    finding.unit,
                    record.value,
                    record.metric.unit()
                ),
            ),
            // A source may publish a claim without a figure; here only an untestable one has none.
            (None, None) if finding.key.is_empty() => {
                let run = folder.run(&finding.experiment);
                let published = run.is_some_and(|r| r.meta.commit == "published");
                check(
                    finding.verdict == Verdict::NotTestable || published,
                    format!("claims.csv: {}: no row says so", finding.claim),
                );
            }
            _ => check(
                false,
                format!("claims.csv: {}: key: no row {}", finding.claim, finding.key),
            ),
        }
    }
    for finding in expected {
        check(
            false,
            format!(
                "claims.csv: {} of {} is missing",
                finding.claim, finding.experiment
            ),
        );
    }
    wrong
}

/// Claims that an experiment's rows and verdicts name.
fn claims_named(run: &Run) -> BTreeSet<&str> {
    let rows = run.records.iter().flat_map(|r| r.claims());
    rows.chain(run.meta.verdicts.iter().map(|v| v.claim.as_str()))
        .collect()
}

/// Whether the machine has the instructions that `isa`, one of [`ISAS`], stands for.
fn runs_here(folder: &Folder, isa: &str) -> bool {
    debug_assert!(isa.is_empty() || ISAS.contains(&isa));
    let has = |name: &str| folder.machine.isa.iter().any(|i| i == name);
    match isa {
        "avx2" => has("avx2"),
        // The 256-bit form, which AVX-512VL encodes too.
        "avx-vnni" => has("avxvnni") || (has("avx512vnni") && has("avx512vl")),
        "avx512-vnni" => has("avx512vnni"),
        "neon" | "dotprod" | "i8mm" => has(isa),
        _ => true,
    }
}

/// The most threads that a row may name: some are measured on purpose with twice the machine's, or with what `--threads`
/// asked for, and a count or an equality holds with any number.
fn most_threads(folder: &Folder, run: &Run, record: &Record) -> usize {
    let all = folder.machine.threads;
    if run.meta.commit == "published" {
        return all;
    }
    match record.interval {
        Some(_) => run
            .meta
            .threads
            .iter()
            .fold(2 * all, |most, n| most.max(*n)),
        None => usize::MAX,
    }
}

/// Two keys of params that stand in either order, where there are such: an experiment keeps one.
fn out_of_order(run: &Run) -> Option<(String, String)> {
    let mut before = BTreeSet::new();
    for record in &run.records {
        let keys: Vec<String> = split_params(&record.params)
            .ok()?
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        for (i, first) in keys.iter().enumerate() {
            let pairs = keys[i + 1..]
                .iter()
                .map(|later| (first.clone(), later.clone()));
            before.extend(pairs);
        }
    }
    let both =
        |(first, second): &&(String, String)| before.contains(&(second.clone(), first.clone()));
    before.iter().find(both).cloned()
}

/// Files that are not what was written, and files that nothing writes.
fn files_wrong(path: &Path) -> Result<Vec<String>> {
    let list = sums::list(path)?;
    let mut wrong: Vec<String> = list
        .strays
        .iter()
        .map(|name| format!("{name}: neither an experiment nor the report writes such a file"))
        .collect();
    // A `.csv` without its `.json`, or the other way round.
    for name in list.results.iter().filter(|name| name.starts_with("exp-")) {
        let twin = match name.strip_suffix(".csv") {
            Some(stem) => format!("{stem}.json"),
            None => name.replace(".json", ".csv"),
        };
        if !list.results.contains(&twin) {
            wrong.push(format!("{name}: has no file beside it"));
        }
    }
    match Sums::read(path)? {
        Some(sums) => wrong.extend(sums.wrong(path, |_| true)?),
        None => wrong.push(format!("{SUMS}: missing; `just report` writes it")),
    }
    let shown = |what| format!("{}: {what}", path.display());
    Ok(wrong.into_iter().map(shown).collect())
}

/// Reads the ledger and holds it against `claims.json` and `SHA256SUMS` beside it.
///
/// # Errors
/// What is wrong, in one line.
pub fn check_ledger(results: &Path) -> Result<Vec<Claim>> {
    let path = results.join("claims.csv");
    let claims = ledger::read_ledger(&path)?;
    let beside = results.join("claims.json");
    let facts: Value = serde_json::from_slice(&files::read(&beside, 1 << 20)?)
        .with_context(|| beside.display().to_string())?;
    ensure!(
        facts["schema"] == SCHEMA,
        "{}: schema: found {}, expected {SCHEMA}",
        beside.display(),
        facts["schema"]
    );
    let found = files::sha256(&files::read(&path, 16 << 20)?);
    ensure!(
        facts["csv_sha256"] == found.as_str(),
        "{}: sha256: found {found:.12}..., claims.json says otherwise",
        path.display()
    );
    let ours = |name: &str| name == "claims.csv" || name == "claims.json";
    let sums = Sums::read(results)?.unwrap_or_default();
    if let Some(wrong) = sums.wrong(results, ours)?.first() {
        bail!(
            "{}: {wrong} (a ledger that was meant to change: sha256sum claims.csv claims.json > {SUMS})",
            results.display()
        );
    }
    Ok(claims)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::source;
    use std::fs;
    use std::path::PathBuf;

    /// A copy of the committed results, to be damaged.
    fn copy() -> (tempfile::TempDir, PathBuf, Vec<Claim>) {
        let results = source::root().join("results");
        let ledger = check_ledger(&results).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let machine = dir.path().join("snapdragon-x126100");
        fs::create_dir(&machine).unwrap();
        for entry in fs::read_dir(results.join("snapdragon-x126100")).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), machine.join(entry.file_name())).unwrap();
        }
        (dir, machine, ledger)
    }

    #[test]
    fn the_published_figures_pass() {
        let (_dir, machine, ledger) = copy();
        assert_eq!(check_folder(&machine, &ledger), Vec::<String>::new());
    }

    #[test]
    fn any_byte_of_any_file_changed_is_found_and_the_file_named() {
        let (_dir, machine, ledger) = copy();
        for entry in fs::read_dir(&machine).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let good = fs::read(&path).unwrap();
            for at in (0..good.len()).step_by(41) {
                let mut bad = good.clone();
                bad[at] = if bad[at] == b'1' { b'2' } else { b'1' };
                fs::write(&path, &bad).unwrap();
                let wrong = check_folder(&machine, &ledger);
                assert!(
                    wrong.iter().any(|line| line.contains(&name)),
                    "{name}, byte {at}: {wrong:?}"
                );
            }
            fs::write(&path, good).unwrap();
        }
    }

    #[test]
    fn any_byte_of_the_ledger_changed_is_found() {
        let results = source::root().join("results");
        let dir = tempfile::tempdir().unwrap();
        let names = ["claims.csv", "claims.json", SUMS];
        for name in names {
            fs::copy(results.join(name), dir.path().join(name)).unwrap();
        }
        check_ledger(dir.path()).unwrap();
        for name in names {
            let path = dir.path().join(name);
            let good = fs::read(&path).unwrap();
            for at in (0..good.len()).step_by(7) {
                let mut bad = good.clone();
                bad[at] = if bad[at] == b'1' { b'2' } else { b'1' };
                fs::write(&path, &bad).unwrap();
                assert!(check_ledger(dir.path()).is_err(), "{name}, byte {at}");
            }
            fs::write(&path, good).unwrap();
        }
    }

    #[test]
    fn what_hashes_do_not_tell_is_found() {
        let (_dir, machine, ledger) = copy();
        let wrong = |what: &str| {
            let found = check_folder(&machine, &ledger).join("\n");
            assert!(found.contains(what), "expected {what:?} in {found:?}");
        };
        fs::write(machine.join("notes.txt"), "").unwrap();
        wrong("notes.txt: neither an experiment nor the report writes");
        let facts = machine.join("machine.json");
        let text = fs::read_to_string(&facts).unwrap();
        fs::write(&facts, text.replace("\"threads\": 8", "\"threads\": 4")).unwrap();
        wrong("threads: found 8, but machine.json has 4");
        fs::write(&facts, text).unwrap();

        // A row whose parameters stand in another order, with every hash in place.
        let csv = machine.join("exp-03-mask-slot.csv");
        let json = machine.join("exp-03-mask-slot.json");
        let good = fs::read_to_string(&csv).unwrap();
        let bad = good.replacen("rows=32768;cols=8192", "cols=8192;rows=32768", 1);
        fs::write(&csv, &bad).unwrap();
        let [from, to] = [&good, &bad].map(|text| files::sha256(text.as_bytes()));
        let meta = fs::read_to_string(&json).unwrap().replace(&from, &to);
        fs::write(&json, meta).unwrap();
        fs::remove_file(machine.join(SUMS)).unwrap();
        wrong("SHA256SUMS: missing");
        fs::write(machine.join(SUMS), Sums::of(&machine).unwrap().to_bytes()).unwrap();
        wrong("exp-03-mask-slot: params: cols before rows in one row and after it in another");
    }

    #[test]
    fn lost_files_and_rows_are_found() {
        let (_dir, machine, ledger) = copy();
        let wrong = |what: &str| {
            let found = check_folder(&machine, &ledger).join("\n");
            assert!(found.contains(what), "expected {what:?} in {found:?}");
        };
        let claims = machine.join("claims.csv");
        let good = fs::read_to_string(&claims).unwrap();
        let without: Vec<&str> = good.lines().filter(|l| !l.starts_with("L12")).collect();
        fs::write(&claims, without.join("\n") + "\n").unwrap();
        wrong("claims.csv: L12 of exp-04-row-pair-prefill is missing");
        fs::write(&claims, good).unwrap();

        let json = machine.join("exp-04-row-pair-prefill.json");
        let kept = fs::read(&json).unwrap();
        fs::remove_file(&json).unwrap();
        wrong("exp-04-row-pair-prefill.csv: has no file beside it");
        fs::write(&json, kept).unwrap();

        let facts = machine.join("machine.json");
        let text = fs::read_to_string(&facts).unwrap();
        fs::write(&facts, text.replace("\"i8mm\",", "")).unwrap();
        wrong("machine.json names no such instruction set");
    }

    #[test]
    fn a_claim_the_ledger_lacks_is_found() {
        let (_dir, machine, mut ledger) = copy();
        ledger.retain(|c| c.id != "L12");
        let wrong = check_folder(&machine, &ledger).join("\n");
        assert!(wrong.contains("claim L12: the ledger has none"), "{wrong}");
    }
}
