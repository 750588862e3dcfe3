//! Text between markers.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use common::lab;

const END: &str = "<!-- report:end -->";

/// The file at `path` with what stands between `<!-- report:begin NAME -->` and `<!-- report:end -->` replaced by
/// `content`, which ends in a newline.
///
/// # Errors
/// One that names the file and the marker: each must be there once, alone on its line, in that order.
pub fn splice(path: &Path, name: &str, content: &str, limit: u64) -> Result<String> {
    let text = String::from_utf8(lab::read(path, limit)?)
        .with_context(|| format!("{}: not UTF-8", path.display()))?;
    splice_text(&text, name, content).with_context(|| path.display().to_string())
}

fn splice_text(text: &str, name: &str, content: &str) -> Result<String> {
    let begin = format!("<!-- report:begin {name} -->");
    let mut markers = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line.contains("<!-- report:") {
            markers.push((line.trim(), at, at + line.len()));
        }
        at += line.len();
    }
    let found: Vec<&str> = markers.iter().map(|m| m.0).collect();
    // A page has one experiment, so its marker may leave the name out.
    ensure!(
        found == [begin.as_str(), END] || found == ["<!-- report:begin -->", END],
        "markers: found {:?}, expected {begin} and {END}, once each and in that order",
        found
    );
    let (before, after) = (&text[..markers[0].2], &text[markers[1].1..]);
    // A page checked out with other line ends keeps them.
    let content = if before.ends_with("\r\n") {
        content.replace('\n', "\r\n")
    } else {
        content.to_string()
    };
    Ok(format!("{before}{content}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_between_is_replaced_and_nothing_else() {
        let page = "# a\n<!-- report:begin x -->\nold\n\nold\n<!-- report:end -->\nrest";
        let new = splice_text(page, "x", "new\n").unwrap();
        assert_eq!(
            new,
            "# a\n<!-- report:begin x -->\nnew\n<!-- report:end -->\nrest"
        );
        assert_eq!(splice_text(&new, "x", "new\n").unwrap(), new);
        assert_eq!(
            splice_text(&page.replace(" x ", " "), "x", "new\n").unwrap(),
            new.replace(" x ", " ")
        );
        let dos = page.replace('\n', "\r\n");
        let new = splice_text(&dos, "x", "1\n2\n").unwrap();
        assert_eq!(new.matches('\n').count(), new.matches("\r\n").count());
    }

    #[test]
    fn markers_that_do_not_pair_up_are_refused() {
        let (begin, end) = ("<!-- report:begin x -->\n", "<!-- report:end -->\n");
        for page in [
            "no markers\n".to_string(),
            begin.into(),
            end.into(),
            format!("{end}{begin}"),
            format!("{begin}{begin}{end}"),
            format!("{begin}{end}{end}"),
            format!("{begin}{end}{begin}{end}"),
            "<!-- report:begin y -->\n<!-- report:end -->\n".into(),
            "text <!-- report:begin x -->\n<!-- report:end -->\n".into(),
        ] {
            let error = format!("{:#}", splice_text(&page, "x", "new\n").unwrap_err());
            assert!(
                error.contains("markers: found") && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
