//! The ledger of claims, and what a machine's runs say of each.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::files;
use super::row::{check_header, csv_error};
use super::sums::{SUMS, Sums};

/// A claim, as its source published it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Such as `L07`.
    pub id: String,
    /// Name of the experiment that tests it.
    pub experiment: String,
    /// The claim in short.
    pub claim: String,
    /// The figure its source published.
    pub published: String,
    /// Which source: L, J, P or B.
    pub source: String,
}

const LEDGER_COLUMNS: [&str; 5] = ["id", "experiment", "claim", "published", "source"];
const VERDICT_COLUMNS: [&str; 7] = [
    "claim",
    "verdict",
    "measured",
    "unit",
    "reason",
    "experiment",
    "key",
];

/// Small files only: a ledger of a thousand claims fits many times over.
const LIMIT: u64 = 16 << 20;

/// Reads the ledger, `results/claims.csv`.
///
/// # Errors
/// One that names the file, the row and the field.
pub fn read_ledger(path: &Path) -> Result<Vec<Claim>> {
    let name = || path.display().to_string();
    let bytes = files::read(path, LIMIT)?;
    let mut claims: Vec<Claim> = Vec::new();
    for (i, fields) in read_rows(&bytes, &LEDGER_COLUMNS)
        .with_context(name)?
        .into_iter()
        .enumerate()
    {
        let row = || format!("{}: row {}", path.display(), i + 1);
        let [id, experiment, claim, published, source] = fields;
        ensure!(
            claims.iter().all(|c| c.id != id),
            "{}: id: {id} given twice",
            row()
        );
        ensure!(
            id.starts_with(&source) && source.len() == 1,
            "{}: source: found {source:?}, expected the letter of {id}",
            row()
        );
        ensure!(
            experiment.starts_with("exp-"),
            "{}: experiment: found {experiment:?}, expected exp-NN-name",
            row()
        );
        claims.push(Claim {
            id,
            experiment,
            claim,
            published,
            source,
        });
    }
    Ok(claims)
}

/// Writes the ledger and the files that vouch for it: `claims.json`, whose other fields stay as they are, and
/// `SHA256SUMS`.
///
/// # Errors
/// One that names the file.
pub fn write_ledger(results: &Path, claims: &[Claim]) -> Result<()> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(LEDGER_COLUMNS)?;
    for c in claims {
        writer.write_record([&c.id, &c.experiment, &c.claim, &c.published, &c.source])?;
    }
    let csv = writer.into_inner()?;
    let beside = results.join("claims.json");
    let mut facts: serde_json::Value = serde_json::from_slice(&files::read(&beside, LIMIT)?)
        .with_context(|| beside.display().to_string())?;
    facts["csv_sha256"] = files::sha256(&csv).into();
    let mut json = serde_json::to_vec_pretty(&facts)?;
    json.push(b'\n');
    let mut sums = Sums::default();
    sums.set("claims.csv", &csv);
    sums.set("claims.json", &json);
    files::write_all(
        results,
        &[
            ("claims.csv".into(), csv),
            ("claims.json".into(), json),
            (SUMS.into(), sums.to_bytes()),
        ],
    )?;
    Ok(())
}

/// How a claim came out on a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// It holds here.
    #[serde(rename = "reproduced")]
    Reproduced,
    /// It does not: a result like the other.
    #[serde(rename = "not reproduced")]
    NotReproduced,
    /// This machine cannot say.
    #[serde(rename = "not testable here")]
    NotTestable,
}

impl Verdict {
    /// As the CSV writes it.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Reproduced => "reproduced",
            Verdict::NotReproduced => "not reproduced",
            Verdict::NotTestable => "not testable here",
        }
    }
}

impl From<bool> for Verdict {
    fn from(holds: bool) -> Verdict {
        if holds {
            Verdict::Reproduced
        } else {
            Verdict::NotReproduced
        }
    }
}

/// A row of a machine's `claims.csv`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// Such as `L07`.
    pub claim: String,
    /// How it came out.
    pub verdict: Verdict,
    /// The value of the row that says so; absent where it is not testable.
    pub measured: Option<f64>,
    /// The value's unit.
    pub unit: String,
    /// Why the verdict is what it is.
    pub reason: String,
    /// The experiment that says so.
    pub experiment: String,
    /// [`Key`](super::Key) of the row, as text; empty where there is none.
    pub key: String,
}

/// Reads a machine's `claims.csv`; none at all where there is no such file.
///
/// # Errors
/// One that names the file, the row and the field.
pub fn read_findings(path: &Path) -> Result<Vec<Finding>> {
    let Some(bytes) = files::read_if_there(path, LIMIT)? else {
        return Ok(Vec::new());
    };
    let name = || path.display().to_string();
    let mut findings: Vec<Finding> = Vec::new();
    for (i, fields) in read_rows(&bytes, &VERDICT_COLUMNS)
        .with_context(name)?
        .into_iter()
        .enumerate()
    {
        let row = || format!("{}: row {}", path.display(), i + 1);
        let [claim, verdict, measured, unit, reason, experiment, key] = fields;
        let verdict = match verdict.as_str() {
            "reproduced" => Verdict::Reproduced,
            "not reproduced" => Verdict::NotReproduced,
            "not testable here" => Verdict::NotTestable,
            other => bail!("{}: verdict: found {other:?}", row()),
        };
        let measured = match measured.as_str() {
            "" => None,
            text => match text.parse::<f64>() {
                Ok(value) if value.is_finite() => Some(value),
                _ => bail!("{}: measured: found {text:?}, expected a number", row()),
            },
        };
        ensure!(
            findings
                .iter()
                .all(|f| f.claim != claim || f.experiment != experiment),
            "{}: claim: {claim} of {experiment} given twice",
            row()
        );
        findings.push(Finding {
            claim,
            verdict,
            measured,
            unit,
            reason,
            experiment,
            key,
        });
    }
    Ok(findings)
}

/// The CSV of `findings`, in order of claim and experiment.
pub fn write_findings(findings: &[Finding]) -> Result<Vec<u8>> {
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|f| {
        // The order of the sources in the ledger.
        let source = "LJPB".find(f.claim.chars().next().unwrap_or(' '));
        (source, &f.claim, &f.experiment)
    });
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(VERDICT_COLUMNS)?;
    for f in sorted {
        writer.write_record([
            &f.claim,
            f.verdict.name(),
            &f.measured.map(|v| v.to_string()).unwrap_or_default(),
            &f.unit,
            &f.reason,
            &f.experiment,
            &f.key,
        ])?;
    }
    Ok(writer.into_inner()?)
}

fn read_rows<const N: usize>(bytes: &[u8], columns: &[&str; N]) -> Result<Vec<[String; N]>> {
    let mut reader = csv::Reader::from_reader(bytes);
    check_header(reader.headers().map_err(csv_error)?, columns)?;
    reader
        .records()
        .enumerate()
        .map(|(i, fields)| {
            let row = || format!("row {}", i + 1);
            let fields = fields.map_err(csv_error).with_context(row)?;
            Ok(std::array::from_fn(|column| {
                fields.get(column).unwrap_or_default().to_string()
            }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(claim: &str) -> Finding {
        Finding {
            claim: claim.into(),
            verdict: Verdict::NotReproduced,
            measured: Some(0.1 + 0.2),
            unit: "x".into(),
            reason: "a, \"b\"\nand c".into(),
            experiment: "exp-03-mask-slot".into(),
            key: "k|e|y".into(),
        }
    }

    #[test]
    fn findings_read_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("claims.csv");
        assert!(read_findings(&path).unwrap().is_empty());
        let mut untestable = finding("B03");
        untestable.verdict = Verdict::NotTestable;
        untestable.measured = None;
        let findings = [untestable, finding("L10")];
        std::fs::write(&path, write_findings(&findings).unwrap()).unwrap();
        let back = read_findings(&path).unwrap();
        assert_eq!(back, [findings[1].clone(), findings[0].clone()]);
    }

    #[test]
    fn the_ledger_reads_back_and_is_vouched_for() {
        let dir = tempfile::tempdir().unwrap();
        let claim = Claim {
            id: "U01".into(),
            experiment: "exp-18-x".into(),
            claim: "a, b".into(),
            published: "1.5x".into(),
            source: "U".into(),
        };
        std::fs::write(
            dir.path().join("claims.json"),
            "{\"schema\": 1, \"sources\": 2}",
        )
        .unwrap();
        write_ledger(dir.path(), std::slice::from_ref(&claim)).unwrap();
        let back = crate::lab::verify::check_ledger(dir.path()).unwrap();
        assert_eq!(back, [claim]);
        let json = std::fs::read_to_string(dir.path().join("claims.json")).unwrap();
        assert!(json.contains("\"sources\": 2"));
    }

    #[test]
    fn broken_findings_are_refused_with_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("claims.csv");
        let good = String::from_utf8(write_findings(&[finding("L10")]).unwrap()).unwrap();
        for (from, to, expected) in [
            ("verdict", "Verdict", "another version"),
            ("not reproduced", "so-so", "row 1: verdict"),
            ("0.30000000000000004", "many", "row 1: measured"),
            ("0.30000000000000004", "inf", "row 1: measured"),
            ("L10,", "L10,x,", "found 8 fields"),
        ] {
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let error = format!("{:#}", read_findings(&path).unwrap_err());
            assert!(error.contains(expected), "{error}");
            assert!(error.contains("claims.csv"), "{error}");
        }
    }
}
