//! Result rows: what a measurement is, and the CSV form external tools read.

use std::collections::HashMap;
use std::fmt::Display;

use anyhow::{Context, Result, bail, ensure};

use super::stat::Stat;

/// Columns of an experiment's CSV, in order.
pub const COLUMNS: [&str; 14] = [
    "experiment",
    "claim",
    "variant",
    "isa",
    "baseline",
    "metric",
    "unit",
    "value",
    "low",
    "high",
    "n",
    "threads",
    "params",
    "quick",
];

/// Instruction sets a row may name, weakest first within a family; empty where none matters.
pub const ISAS: [&str; 7] = [
    "scalar",
    "avx2",
    "avx-vnni",
    "avx512-vnni",
    "neon",
    "dotprod",
    "i8mm",
];

/// What a row's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Metric {
    /// Weights processed, Gw/s.
    WeightsPerS,
    /// Bytes moved, GB/s (1e9).
    Bandwidth,
    /// Multiply-accumulates, GMAC/s.
    MacPerS,
    /// Tokens, tok/s.
    TokensPerS,
    /// Trits unpacked, Gtrit/s.
    TritsPerS,
    /// Milliseconds.
    Time,
    /// Nanoseconds a weight.
    TimePerWeight,
    /// Times faster than the baseline.
    Speedup,
    /// Part of a whole, in percent.
    Share,
    /// A count.
    Count,
    /// A size or an amount moved, in bytes.
    Bytes,
    /// Bits a weight.
    BitsPerWeight,
    /// 1 where two things are equal, else 0.
    Equal,
    /// Mean negative log likelihood a token, in nat.
    Nll,
    /// Exponential of the nll.
    Perplexity,
    /// Error relative to what the experiment's page says.
    RelativeError,
    /// Difference of two logits: how safe a greedy choice is.
    Margin,
}

impl Metric {
    /// Every metric.
    pub const ALL: [Metric; 17] = [
        Metric::WeightsPerS,
        Metric::Bandwidth,
        Metric::MacPerS,
        Metric::TokensPerS,
        Metric::TritsPerS,
        Metric::Time,
        Metric::TimePerWeight,
        Metric::Speedup,
        Metric::Share,
        Metric::Count,
        Metric::Bytes,
        Metric::BitsPerWeight,
        Metric::Equal,
        Metric::Nll,
        Metric::Perplexity,
        Metric::RelativeError,
        Metric::Margin,
    ];

    /// Name in the CSV.
    pub fn name(self) -> &'static str {
        self.facts().0
    }

    /// Unit in the CSV; empty for plain numbers.
    pub fn unit(self) -> &'static str {
        self.facts().1
    }

    fn facts(self) -> (&'static str, &'static str) {
        match self {
            Metric::WeightsPerS => ("weights_per_s", "Gw/s"),
            Metric::Bandwidth => ("bandwidth", "GB/s"),
            Metric::MacPerS => ("mac_per_s", "GMAC/s"),
            Metric::TokensPerS => ("tokens_per_s", "tok/s"),
            Metric::TritsPerS => ("trits_per_s", "Gtrit/s"),
            Metric::Time => ("time", "ms"),
            Metric::TimePerWeight => ("time_per_weight", "ns"),
            Metric::Speedup => ("speedup", "x"),
            Metric::Share => ("share", "%"),
            Metric::Count => ("count", ""),
            Metric::Bytes => ("bytes", "B"),
            Metric::BitsPerWeight => ("bits_per_weight", "bit"),
            Metric::Equal => ("equal", ""),
            Metric::Nll => ("nll", "nat"),
            Metric::Perplexity => ("perplexity", ""),
            Metric::RelativeError => ("relative_error", ""),
            Metric::Margin => ("margin", ""),
        }
    }

    /// The metric of that name.
    pub fn from_name(name: &str) -> Option<Metric> {
        Metric::ALL.into_iter().find(|m| m.name() == name)
    }

    /// Whether a larger value is the better one. An equality counts as better when smaller, so
    /// that choosing the best of several never hides one that failed.
    pub fn larger_is_better(self) -> bool {
        matches!(
            self,
            Metric::WeightsPerS
                | Metric::Bandwidth
                | Metric::MacPerS
                | Metric::TokensPerS
                | Metric::TritsPerS
                | Metric::Speedup
                | Metric::Share
                | Metric::Margin
        )
    }

    /// For rates and times, how (seconds, units of work) become this metric.
    pub(super) fn of_seconds(self) -> Option<fn(f64, f64) -> f64> {
        match self {
            Metric::WeightsPerS | Metric::Bandwidth | Metric::MacPerS | Metric::TritsPerS => {
                Some(|seconds, units| units / seconds / 1e9)
            }
            Metric::TokensPerS => Some(|seconds, units| units / seconds),
            Metric::Time => Some(|seconds, units| seconds / units * 1e3),
            Metric::TimePerWeight => Some(|seconds, units| seconds / units * 1e9),
            _ => None,
        }
    }
}

/// Ends of a 95% interval and the number of rounds behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Rounds.
    pub n: usize,
}

/// A row on its way into an experiment; see [`Experiment::row`](super::Experiment::row).
#[derive(Clone, Debug)]
#[must_use = "a row counts once it is given to the experiment"]
pub struct Row {
    variant: String,
    isa: String,
    claims: Vec<String>,
    baseline: String,
    value: Option<(Metric, f64, Option<Interval>)>,
    threads: usize,
    pub(super) params: Vec<(String, String)>,
}

impl Row {
    /// A row about `variant` (the layout or method: `stock`, `slot16`, `row-pair`, `wide-row`,
    /// `ptq1_0`...) on `isa` (one of [`ISAS`], or empty). One thread unless said otherwise.
    pub fn new(variant: impl Into<String>, isa: impl Into<String>) -> Row {
        Row {
            variant: variant.into(),
            isa: isa.into(),
            claims: Vec::new(),
            baseline: String::new(),
            value: None,
            threads: 1,
            params: Vec::new(),
        }
    }

    /// A claim the row bears on; may be given several times.
    pub fn claim(mut self, id: impl Into<String>) -> Row {
        self.claims.push(id.into());
        self
    }

    /// A measured value, in the metric's unit.
    pub fn metric(mut self, metric: Metric, stat: Stat) -> Row {
        let interval = Interval {
            low: stat.low,
            high: stat.high,
            n: stat.n,
        };
        self.value = Some((metric, stat.median, Some(interval)));
        self
    }

    /// An exact value, without interval: a count, a size, an equality, a computed figure.
    pub fn exact(mut self, metric: Metric, value: impl ExactValue) -> Row {
        self.value = Some((metric, value.to_f64(), None));
        self
    }

    /// What a ratio compares with, as `variant isa`.
    pub fn baseline(mut self, baseline: impl Into<String>) -> Row {
        self.baseline = baseline.into();
        self
    }

    /// Threads that did the work.
    pub fn threads(mut self, threads: usize) -> Row {
        self.threads = threads;
        self
    }

    /// One parameter. Lab keeps the keys of an experiment's rows in one fixed order, that in which
    /// the experiment first used them.
    pub fn param(mut self, key: impl Into<String>, value: impl Display) -> Row {
        self.params.push((key.into(), value.to_string()));
        self
    }

    /// Several parameters.
    pub fn params<K: Into<String>, V: Display>(
        mut self,
        params: impl IntoIterator<Item = (K, V)>,
    ) -> Row {
        for (key, value) in params {
            self = self.param(key, value);
        }
        self
    }

    /// The record this row makes, or what is wrong with it.
    pub(super) fn into_record(self, experiment: &str, quick: bool) -> Result<Record> {
        let what = format!("row {} {}", self.variant, self.isa);
        let (metric, value, interval) = self.value.with_context(|| {
            format!("{what}: no value; Row::metric or Row::exact must be called")
        })?;
        let record = Record {
            experiment: experiment.into(),
            claim: self.claims.join(";"),
            variant: self.variant,
            isa: self.isa,
            baseline: self.baseline,
            metric,
            value,
            interval,
            threads: self.threads,
            params: join_params(&self.params).context(what.clone())?,
            quick,
        };
        record.check().context(what)?;
        Ok(record)
    }
}

/// Numbers that [`Row::exact`] takes. Integers must be below 2^53, where f64 is exact.
pub trait ExactValue {
    /// As the CSV's number.
    fn to_f64(&self) -> f64;
}

macro_rules! exact_value {
    ($($t:ty),*) => {$(
        impl ExactValue for $t {
            fn to_f64(&self) -> f64 {
                *self as f64
            }
        }
    )*};
}
exact_value!(f64, f32, u8, u16, u32, u64, usize, i32, i64);

impl ExactValue for bool {
    fn to_f64(&self) -> f64 {
        f64::from(u8::from(*self))
    }
}

/// `key=value;key=value`. `%` and `;` in values are percent-encoded, so that the pairs read back.
fn join_params(params: &[(String, String)]) -> Result<String> {
    let mut joined = String::new();
    for (i, (key, value)) in params.iter().enumerate() {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        ensure!(
            !key.is_empty() && key.chars().all(plain),
            "params: key {key:?}, expected letters a-z, digits and _"
        );
        ensure!(
            params[..i].iter().all(|(k, _)| k != key),
            "params: key {key:?} given twice"
        );
        if i > 0 {
            joined.push(';');
        }
        let value = value.replace('%', "%25").replace(';', "%3B");
        joined.push_str(&format!("{key}={value}"));
    }
    Ok(joined)
}

/// The pairs of a `params` field.
///
/// # Errors
/// A pair without `=`.
pub fn split_params(params: &str) -> Result<Vec<(String, String)>> {
    let pairs = params.split(';').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair
                .split_once('=')
                .with_context(|| format!("params: found {pair:?}, expected key=value"))?;
            Ok((
                key.to_string(),
                value.replace("%3B", ";").replace("%25", "%"),
            ))
        })
        .collect()
}

/// What makes a row unique within a results folder.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Experiment, e.g. `exp-03-mask-slot`.
    pub experiment: String,
    /// Layout or method.
    pub variant: String,
    /// Instruction set, or empty.
    pub isa: String,
    /// What a ratio compares with, or empty.
    pub baseline: String,
    /// The metric's name.
    pub metric: String,
    /// Threads.
    pub threads: usize,
    /// Parameters as in the CSV.
    pub params: String,
}

impl std::fmt::Display for Key {
    /// Seven fields joined by `|`; `%` and `|` within a field are percent-encoded.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let encode = |s: &str| s.replace('%', "%25").replace('|', "%7C");
        write!(
            f,
            "{}|{}|{}|{}|{}|{}|{}",
            encode(&self.experiment),
            encode(&self.variant),
            encode(&self.isa),
            encode(&self.baseline),
            encode(&self.metric),
            self.threads,
            encode(&self.params)
        )
    }
}

/// A row as the CSV holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Experiment, e.g. `exp-03-mask-slot`.
    pub experiment: String,
    /// Claims it bears on, joined by `;`.
    pub claim: String,
    /// Layout or method.
    pub variant: String,
    /// Instruction set, or empty.
    pub isa: String,
    /// What a ratio compares with, as `variant isa`, or empty.
    pub baseline: String,
    /// What the value is.
    pub metric: Metric,
    /// Median of the rounds, or the exact value.
    pub value: f64,
    /// Absent for exact values and published figures.
    pub interval: Option<Interval>,
    /// Threads, at least 1.
    pub threads: usize,
    /// `key=value;key=value`.
    pub params: String,
    /// Measured with `--quick`.
    pub quick: bool,
}

impl Record {
    /// The row's key.
    pub fn key(&self) -> Key {
        Key {
            experiment: self.experiment.clone(),
            variant: self.variant.clone(),
            isa: self.isa.clone(),
            baseline: self.baseline.clone(),
            metric: self.metric.name().into(),
            threads: self.threads,
            params: self.params.clone(),
        }
    }

    /// The baseline as (variant, isa).
    pub fn baseline_parts(&self) -> (&str, &str) {
        match self.baseline.rsplit_once(' ') {
            Some((variant, isa)) if ISAS.contains(&isa) => (variant, isa),
            _ => (&self.baseline, ""),
        }
    }

    /// The claims it bears on.
    pub fn claims(&self) -> impl Iterator<Item = &str> {
        self.claim.split(';').filter(|id| !id.is_empty())
    }

    /// Checks what the schema asks of one row.
    fn check(&self) -> Result<()> {
        ensure!(!self.variant.is_empty(), "variant: empty, expected a name");
        ensure!(
            self.isa.is_empty() || ISAS.contains(&self.isa.as_str()),
            "isa: found {:?}, expected one of {} or empty",
            self.isa,
            ISAS.join(", ")
        );
        for id in self.claim.split(';') {
            let shaped = match id.as_bytes() {
                [source, number @ ..] => {
                    source.is_ascii_uppercase()
                        && number.len() == 2
                        && number.iter().all(u8::is_ascii_digit)
                }
                [] => false,
            };
            ensure!(
                self.claim.is_empty() || shaped,
                "claim: found {id:?}, expected an id such as L07"
            );
        }
        ensure!(
            self.metric != Metric::Speedup || !self.baseline.is_empty(),
            "baseline: empty, expected what the speedup compares with"
        );
        ensure!(self.threads >= 1, "threads: found 0, expected at least 1");
        let number = |name: &str, value: f64| {
            ensure!(
                value.is_finite(),
                "{name}: found {value}, expected a finite number"
            );
            Ok(())
        };
        number("value", self.value)?;
        if let Some(Interval { low, high, n }) = self.interval {
            number("low", low)?;
            number("high", high)?;
            ensure!(n >= 1, "n: found 0, expected at least 1");
            ensure!(
                low <= self.value && self.value <= high,
                "value: found {} outside [{low}, {high}], expected low <= value <= high",
                self.value
            );
        }
        ensure!(
            self.metric != Metric::Equal || self.value == 0.0 || self.value == 1.0,
            "value: found {}, expected 1 or 0 for equal",
            self.value
        );
        ensure!(
            join_params(&split_params(&self.params)?)? == self.params,
            "params: found {:?}, expected key=value joined by ';'",
            self.params
        );
        Ok(())
    }

    fn fields(&self) -> [String; 14] {
        let text = |f: fn(&Interval) -> String| self.interval.as_ref().map(f).unwrap_or_default();
        [
            self.experiment.clone(),
            self.claim.clone(),
            self.variant.clone(),
            self.isa.clone(),
            self.baseline.clone(),
            self.metric.name().into(),
            self.metric.unit().into(),
            // The shortest decimal that reads back as the same f64, never an exponent.
            self.value.to_string(),
            text(|i| i.low.to_string()),
            text(|i| i.high.to_string()),
            text(|i| i.n.to_string()),
            self.threads.to_string(),
            self.params.clone(),
            u8::from(self.quick).to_string(),
        ]
    }

    fn from_fields(fields: &csv::StringRecord) -> Result<Record> {
        let field = |column: usize| fields.get(column).unwrap_or_default();
        let number = |column: usize| -> Result<f64> {
            let text = field(column);
            let plain = text
                .bytes()
                .all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b));
            match text.parse() {
                Ok(value) if plain => Ok(value),
                _ => bail!("{}: found {text:?}, expected a number", COLUMNS[column]),
            }
        };
        let count = |column: usize| -> Result<usize> {
            let text = field(column);
            text.parse()
                .ok()
                .with_context(|| format!("{}: found {text:?}, expected a count", COLUMNS[column]))
        };
        let metric = Metric::from_name(field(5)).with_context(|| {
            format!(
                "metric: found {:?}, which this version does not know",
                field(5)
            )
        })?;
        ensure!(
            field(6) == metric.unit(),
            "unit: found {:?}, expected {:?} for {}",
            field(6),
            metric.unit(),
            metric.name()
        );
        let empty = (8..=10).filter(|&c| field(c).is_empty()).count();
        ensure!(
            empty == 0 || empty == 3,
            "low, high, n: {empty} of 3 empty, expected all or none"
        );
        let interval = (empty == 0)
            .then(|| -> Result<Interval> {
                Ok(Interval {
                    low: number(8)?,
                    high: number(9)?,
                    n: count(10)?,
                })
            })
            .transpose()?;
        let record = Record {
            experiment: field(0).into(),
            claim: field(1).into(),
            variant: field(2).into(),
            isa: field(3).into(),
            baseline: field(4).into(),
            metric,
            value: number(7)?,
            interval,
            threads: count(11)?,
            params: field(12).into(),
            quick: match field(13) {
                "0" => false,
                "1" => true,
                other => bail!("quick: found {other:?}, expected 0 or 1"),
            },
        };
        record.check()?;
        Ok(record)
    }
}

/// Checks what the schema asks of rows together: keys are unique.
pub(super) fn check_unique<'a>(records: impl IntoIterator<Item = &'a Record>) -> Result<()> {
    let mut seen = HashMap::new();
    for (i, record) in records.into_iter().enumerate() {
        if let Some(first) = seen.insert(record.key(), i) {
            bail!(
                "key: rows {} and {} are both {}",
                first + 1,
                i + 1,
                record.key()
            );
        }
    }
    Ok(())
}

/// The CSV of `records`, header first.
pub fn write_csv(records: &[Record]) -> Result<Vec<u8>> {
    check_unique(records)?;
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(COLUMNS)?;
    for record in records {
        writer.write_record(record.fields())?;
    }
    Ok(writer.into_inner()?)
}

/// The records of a CSV, every one checked against the schema.
///
/// # Errors
/// The first thing that is wrong, with the row's number (the header is row 0).
pub fn read_csv(bytes: &[u8]) -> Result<Vec<Record>> {
    let mut reader = csv::Reader::from_reader(bytes);
    let header = reader.headers().map_err(csv_error)?;
    check_header(header, &COLUMNS)?;
    let mut records = Vec::new();
    for (i, fields) in reader.records().enumerate() {
        let row = || format!("row {}", i + 1);
        let fields = fields.map_err(csv_error).with_context(row)?;
        records.push(Record::from_fields(&fields).with_context(row)?);
    }
    check_unique(&records)?;
    Ok(records)
}

/// The header must be exactly `expected`.
pub(super) fn check_header(header: &csv::StringRecord, expected: &[&str]) -> Result<()> {
    ensure!(
        header.iter().eq(expected.iter().copied()),
        "header: found {:?}, expected {:?} (a file of another version?)",
        header.iter().collect::<Vec<_>>().join(","),
        expected.join(",")
    );
    Ok(())
}

/// The csv crate's message without its own position prefix, which counts differently.
pub(super) fn csv_error(error: csv::Error) -> anyhow::Error {
    match error.kind() {
        csv::ErrorKind::Utf8 { err, .. } => anyhow::anyhow!("not UTF-8: {err}"),
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => anyhow::anyhow!("found {len} fields, expected {expected_len}"),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row::new("row-pair", "avx2")
            .claim("L10")
            .claim("L11")
            .metric(
                Metric::WeightsPerS,
                Stat {
                    median: 100.1,
                    low: 99.0 / 7.0,
                    high: 1e300,
                    n: 15,
                },
            )
            .threads(2)
            .params([("rows", "4096"), ("from", "cache")])
    }

    fn record() -> Record {
        row().into_record("exp-03-mask-slot", false).unwrap()
    }

    fn refused(row: Row) -> String {
        format!(
            "{:#}",
            row.into_record("exp-03-mask-slot", false).unwrap_err()
        )
    }

    #[test]
    fn the_csv_is_what_the_contract_says() {
        let mut record = record();
        record.interval = Some(Interval {
            low: 99.5,
            high: 101.0,
            n: 15,
        });
        let text = String::from_utf8(write_csv(&[record]).unwrap()).unwrap();
        assert_eq!(
            text,
            "experiment,claim,variant,isa,baseline,metric,unit,value,low,high,n,threads,params,quick\n\
             exp-03-mask-slot,L10;L11,row-pair,avx2,,weights_per_s,Gw/s,100.1,99.5,101,15,2,rows=4096;from=cache,0\n"
        );
    }

    #[test]
    fn any_text_and_any_number_read_back_exactly() {
        let mut records = Vec::new();
        for (i, nasty) in [
            "a,b",
            "\"",
            "a\"\"b",
            "\n",
            "\r\n",
            "\r",
            "\0",
            " x ",
            "é\u{2028}",
            "#",
        ]
        .into_iter()
        .enumerate()
        {
            let mut r = record();
            r.variant = nasty.into();
            r.baseline = format!("{nasty} avx2");
            r.params = join_params(&[("t".into(), format!("{nasty};%3B=%"))]).unwrap();
            r.value = [0.1 + 0.2, f64::MIN_POSITIVE, -0.0, 5e-324, f64::MAX][i % 5];
            r.interval = (i % 2 == 0).then_some(Interval {
                low: -f64::MAX,
                high: f64::MAX,
                n: usize::MAX,
            });
            records.push(r);
        }
        let bytes = write_csv(&records).unwrap();
        let back = read_csv(&bytes).unwrap();
        assert_eq!(back, records);
        for (a, b) in back.iter().zip(&records) {
            assert_eq!(a.value.to_bits(), b.value.to_bits());
        }
        assert_eq!(back[0].baseline_parts(), ("a,b", "avx2"));
        assert_eq!(split_params(&back[0].params).unwrap()[0].1, "a,b;%3B=%");
    }

    #[test]
    fn rows_outside_the_schema_are_refused_by_field() {
        let stat = |median, low, high| Stat {
            median,
            low,
            high,
            n: 3,
        };
        let refuse = |row: Row, field: &str| {
            let message = refused(row);
            assert!(message.contains(field), "{message}");
        };
        refuse(
            row().metric(Metric::Time, stat(f64::NAN, 1.0, 2.0)),
            "value",
        );
        refuse(
            row().metric(Metric::Time, stat(1.0, 1.0, f64::INFINITY)),
            "high",
        );
        refuse(
            row().metric(Metric::Time, stat(3.0, 1.0, 2.0)),
            "low <= value",
        );
        refuse(
            row().metric(Metric::Speedup, stat(1.0, 1.0, 2.0)),
            "baseline",
        );
        refuse(row().exact(Metric::Equal, 2), "1 or 0");
        refuse(row().threads(0), "threads");
        refuse(row().claim("x99"), "claim");
        refuse(row().claim("L7"), "claim");
        refuse(row().claim(""), "claim");
        refuse(row().param("rows", 1), "twice");
        refuse(row().param("Rows", 1), "params");
        refuse(Row::new("stock", "sse9").exact(Metric::Count, 1), "isa");
        refuse(Row::new("", "").exact(Metric::Count, 1), "variant");
        refuse(Row::new("stock", ""), "no value");
    }

    #[test]
    fn a_key_names_one_row() {
        let error = write_csv(&[record(), record()]).unwrap_err();
        assert!(format!("{error:#}").contains("rows 1 and 2"), "{error:#}");
        let other = row().threads(3).into_record("exp-03-mask-slot", false);
        assert!(write_csv(&[record(), other.unwrap()]).is_ok());
    }

    #[test]
    fn files_of_other_versions_and_broken_ones_are_refused_with_the_place() {
        let good = String::from_utf8(write_csv(&[record()]).unwrap()).unwrap();
        for (from, to, expected) in [
            ("quick\n", "quick,more\n", "another version"),
            ("experiment,", "Experiment,", "another version"),
            (
                "weights_per_s",
                "furlongs",
                "row 1: metric: found \"furlongs\"",
            ),
            ("Gw/s", "w/s", "row 1: unit"),
            ("100.1", "100,1", "found 15 fields, expected 14"),
            ("100.1", "NaN", "row 1: value"),
            ("100.1", "inf", "row 1: value"),
            ("100.1", "1e999", "row 1: value"),
            ("100.1", "", "row 1: value"),
            (",15,", ",,", "1 of 3 empty"),
            (",2,rows", ",-2,rows", "row 1: threads"),
            (",0\n", ",2\n", "row 1: quick"),
            ("avx2", "avx9", "row 1: isa"),
            ("rows=", "Rows=", "row 1: params: key \"Rows\""),
            ("from=", "rows=", "row 1: params: key \"rows\" given twice"),
            (";from", ";;from", "row 1: params: found"),
        ] {
            assert!(good.contains(from), "{from}");
            let bad = good.replacen(from, to, 1);
            let message = format!("{:#}", read_csv(bad.as_bytes()).unwrap_err());
            assert!(message.contains(expected), "{from} -> {to}: {message}");
        }
        assert!(read_csv(b"").is_err());
        assert!(read_csv(b"\xff\xfe").is_err());
        let mut bad = good.into_bytes();
        let at = bad.len() - 20;
        bad[at] = 0xff;
        let message = format!("{:#}", read_csv(&bad).unwrap_err());
        assert!(message.contains("row 1: not UTF-8"), "{message}");
    }

    #[test]
    fn every_metric_has_its_own_name() {
        for (i, metric) in Metric::ALL.into_iter().enumerate() {
            assert_eq!(Metric::from_name(metric.name()), Some(metric));
            assert_eq!(Metric::ALL.iter().position(|m| *m == metric), Some(i));
        }
    }

    #[test]
    fn keys_print_without_ambiguity() {
        let mut key = record().key();
        assert_eq!(
            key.to_string(),
            "exp-03-mask-slot|row-pair|avx2||weights_per_s|2|rows=4096;from=cache"
        );
        key.variant = "a|b%".into();
        assert!(key.to_string().contains("|a%7Cb%25|"));
    }
}
