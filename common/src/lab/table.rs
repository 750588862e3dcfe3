//! Tables for people.

use comfy_table::{ContentArrangement, Table, presets};

use super::ledger::Finding;
use super::row::Record;

/// An empty table in the notebook's style, as wide as its content.
pub fn plain<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    table
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
    format!("{value:.decimals$}")
}

/// `[low, high]`, or nothing.
pub fn interval(record: &Record) -> String {
    let ends = record.interval.as_ref();
    ends.map(|i| format!("[{}, {}]", short(i.low), short(i.high)))
        .unwrap_or_default()
}

/// An experiment's rows.
pub(super) fn rows(records: &[Record]) -> String {
    let mut table = plain([
        "variant",
        "isa",
        "metric",
        "value",
        "unit",
        "95% interval",
        "threads",
        "params",
        "against",
    ]);
    for r in records {
        table.add_row([
            printable(&r.variant),
            printable(&r.isa),
            r.metric.name().into(),
            short(r.value),
            r.metric.unit().into(),
            interval(r),
            r.threads.to_string(),
            printable(&r.params),
            printable(&r.baseline),
        ]);
    }
    trimmed(&table)
}

/// Verdicts, one a line.
pub(super) fn findings(findings: &[Finding]) -> String {
    let mut table = plain(["claim", "verdict", "measured", "because"]);
    for f in findings {
        let measured = f.measured.map(|v| format!("{} {}", short(v), f.unit));
        table.add_row([
            f.claim.clone(),
            f.verdict.name().into(),
            measured.unwrap_or_default().trim_end().into(),
            printable(&f.reason),
        ]);
    }
    trimmed(&table)
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

/// The table without spaces at the ends of lines.
pub fn trimmed(table: &Table) -> String {
    table
        .lines()
        .map(|l| l.trim_end().to_string())
        .collect::<Vec<_>>()
        .join("\n")
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
            (-2.5, "-2.500"),
            (1e-9, "1.000e-9"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn control_characters_show() {
        assert_eq!(printable("a\n\0b"), "a\\n\\0b");
    }
}
