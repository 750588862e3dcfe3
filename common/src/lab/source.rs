//! Where the source is, and which commit of it a binary was built from.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The commit a binary was built from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// 40 hex digits, `unknown`, or `published` for figures taken from a publication.
    pub commit: String,
    /// The source differed from that commit, or the binary may be older than the source.
    pub dirty: bool,
}

/// Root of the source tree this library was built from, or the current folder where that is gone.
pub fn root() -> PathBuf {
    let built_from = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    match built_from {
        Some(root) if root.join("Cargo.toml").is_file() => root.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Asks git, when the program runs, for the commit of the tree the program was built from.
///
/// A commit noted at build time would go stale: committing changes no source file, so cargo
/// builds nothing anew. Asking at run time is right as long as the binary is newer than its source,
/// which `cargo run` sees to; for a binary started by hand the file list that cargo leaves beside
/// it is checked, and a binary that is older than a source file counts as dirty. Results and pages do
/// not enter a binary, so changes in them do not make it dirty.
pub fn commit() -> Commit {
    let root = root();
    let Some(commit) = git(&root, &["rev-parse", "HEAD"]) else {
        return Commit {
            commit: "unknown".into(),
            dirty: true,
        };
    };
    let changed = git(
        &root,
        &[
            "status",
            "--porcelain",
            "--",
            ".",
            ":(exclude)results",
            ":(exclude,glob)**/*.md",
            ":(exclude,glob)**/*.svg",
        ],
    );
    Commit {
        commit: commit.trim().into(),
        dirty: changed.is_none_or(|files| !files.trim().is_empty()) || older_than_source(),
    }
}

fn git(root: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(args)
        .output()
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8(output.stdout).ok())?
}

/// Whether a source file changed after this program was built, by cargo's list of them.
fn older_than_source() -> bool {
    let Ok(program) = std::env::current_exe() else {
        return true;
    };
    let modified = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let (Some(built), Ok(list)) = (
        modified(&program),
        fs::read_to_string(program.with_extension("d")),
    ) else {
        return true;
    };
    sources(&list).any(|source| modified(&source).is_none_or(|changed| changed > built))
}

/// The files after the colon of a makefile rule, where a space within a name is written `\ `.
fn sources(list: &str) -> impl Iterator<Item = PathBuf> {
    let files = list.split_once(": ").map_or("", |(_, files)| files);
    let files = files.lines().next().unwrap_or_default();
    files
        .replace("\\ ", "\0")
        .split_whitespace()
        .map(|name| PathBuf::from(name.replace('\0', " ")))
        .collect::<Vec<_>>()
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_lists_of_sources() {
        let found: Vec<_> = sources("t/exp: a/b.rs c\\ d/e.rs\n\nother: x\n").collect();
        assert_eq!(found, [PathBuf::from("a/b.rs"), PathBuf::from("c d/e.rs")]);
        assert_eq!(sources("").count(), 0);
    }

    #[test]
    fn a_folder_without_a_repository_has_no_commit() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(git(dir.path(), &["rev-parse", "HEAD"]), None);
    }
}
