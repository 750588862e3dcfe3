//! Tables for people, and the same as CSV.

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

use super::ledger::Finding;
use super::row::{Record, split_params};

/// How a table is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Columns, for a terminal.
    #[default]
    Plain,
    /// A Markdown table.
    Markdown,
    /// CSV.
    Csv,
}

/// Flags that choose a [`Style`].
#[derive(clap::Args, Clone, Debug)]
pub struct StyleFlags {
    /// Tables in Markdown.
    #[arg(long, conflicts_with = "csv")]
    md: bool,
    /// Rows in CSV, numbers in full.
    #[arg(long)]
    csv: bool,
}

impl StyleFlags {
    /// The style chosen.
    pub fn style(&self) -> Style {
        match (self.md, self.csv) {
            (true, _) => Style::Markdown,
            (_, true) => Style::Csv,
            _ => Style::Plain,
        }
    }
}

/// A table. Plain and Markdown tables show control characters and, in Markdown, escape `|`; CSV keeps
/// every byte.
///
/// # Errors
/// When a row is not as long as the header, in CSV.
pub fn render<S: AsRef<str>>(
    header: &[S],
    rows: impl IntoIterator<Item = Vec<String>>,
    style: Style,
) -> Result<String> {
    if style == Style::Csv {
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(header.iter().map(|h| h.as_ref()))?;
        for row in rows {
            writer.write_record(row)?;
        }
        return Ok(String::from_utf8(writer.into_inner()?)?);
    }
    let cell = |text: &str| match style {
        Style::Markdown => printable(text).replace('|', "\\|"),
        _ => printable(text),
    };
    let mut table = Table::new();
    table
        .load_style(match style {
            Style::Markdown => presets::ASCII_MARKDOWN,
            _ => presets::NOTHING,
        })
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header.iter().map(|h| cell(h.as_ref())));
    for row in rows {
        table.add_row(row.iter().map(|text| cell(text)));
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    Ok(text)
}

/// A number to four significant digits, without an exponent where it reads well.
pub fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let magnitude = value.abs().log10().floor();
    if value.fract() == 0.0 && magnitude < 15.0 {
        return format!("{value}");
    }
    if !(-4.0..12.0).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let decimals = (3.0 - magnitude).max(0.0) as usize;
    let (rounded, whole) = (format!("{value:.decimals$}"), format!("{value}"));
    // 6.4 stays 6.4, not 6.400.
    if whole.len() < rounded.len() {
        whole
    } else {
        rounded
    }
}

/// `[low, high]`, or nothing.
pub fn interval(record: &Record) -> String {
    let ends = record.interval.as_ref();
    ends.map(|i| format!("[{}, {}]", short(i.low), short(i.high)))
        .unwrap_or_default()
}

/// An experiment's rows.
pub(super) fn rows(records: &[Record]) -> Result<String> {
    let header = [
        "variant",
        "isa",
        "metric",
        "value",
        "unit",
        "95% interval",
        "threads",
        "params",
        "against",
    ];
    let rows = records.iter().map(|r| {
        vec![
            r.variant.clone(),
            r.isa.clone(),
            r.metric.name().into(),
            short(r.value),
            r.metric.unit().into(),
            interval(r),
            r.threads.to_string(),
            r.params.clone(),
            r.baseline.clone(),
        ]
    });
    render(&header, rows, Style::Plain)
}

/// Verdicts, one a line.
pub(super) fn findings(findings: &[Finding]) -> Result<String> {
    let header = ["claim", "verdict", "measured", "because"];
    let rows = findings.iter().map(|f| {
        vec![
            f.claim.clone(),
            f.verdict.name().into(),
            measured(f),
            f.reason.clone(),
        ]
    });
    render(&header, rows, Style::Plain)
}

/// What was measured, with its unit, or nothing.
pub fn measured(finding: &Finding) -> String {
    let value = finding
        .measured
        .map(|v| format!("{} {}", short(v), finding.unit));
    value.unwrap_or_default().trim_end().into()
}

/// At most that many characters, the last of them `...` where some are left out.
pub fn ellipsis(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.into();
    }
    let kept: String = text.chars().take(columns.saturating_sub(3)).collect();
    kept.trim_end().to_string() + "..."
}

/// Parameters in short: names stand alone, numbers keep their key, and a shape is `32768x8192`.
pub fn params(params: &str) -> String {
    let Ok(pairs) = split_params(params) else {
        return params.into();
    };
    let rows = pairs
        .iter()
        .find(|(key, _)| key == "rows")
        .map(|(_, v)| v.clone());
    let words = pairs
        .iter()
        .filter_map(|(key, value)| match (key.as_str(), &rows) {
            ("rows", _) if pairs.iter().any(|(key, _)| key == "cols") => None,
            ("cols", Some(rows)) => Some(format!("{rows}x{value}")),
            _ if value.parse::<f64>().is_ok() => Some(format!("{key} {value}")),
            _ => Some(value.clone()),
        });
    words.collect::<Vec<_>>().join(", ")
}

/// Text with its control characters made visible.
pub fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        if c.is_control() {
            shown.extend(c.escape_debug());
        } else {
            shown.push(c);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_four_digits() {
        for (value, text) in [
            (0.0, "0"),
            (256.0, "256"),
            (1_048_576.0, "1048576"),
            (131.4567, "131.5"),
            (0.012345, "0.01235"),
            (12345.6, "12346"),
            (-2.5, "-2.5"),
            (1e-9, "1.000e-9"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn parameters_in_short() {
        for (full, text) in [
            (
                "rows=32768;cols=8192;batch=1;from=dram",
                "32768x8192, batch 1, dram",
            ),
            ("rows=4", "rows 4"),
            ("cols=4;what=ids", "cols 4, ids"),
            ("", ""),
        ] {
            assert_eq!(params(full), text);
        }
    }

    #[test]
    fn each_style_keeps_its_rows_apart() {
        let rows = || [vec!["a|b\n".to_string(), "1, 2".to_string()]];
        let text = |style| render(&["x", "y"], rows(), style).unwrap();
        assert_eq!(text(Style::Plain), " x      y\n a|b\\n  1, 2\n");
        assert_eq!(text(Style::Markdown).lines().count(), 3);
        assert!(text(Style::Markdown).contains("| a\\|b\\n |"));
        assert_eq!(text(Style::Csv), "x,y\n\"a|b\n\",\"1, 2\"\n");
    }
}
