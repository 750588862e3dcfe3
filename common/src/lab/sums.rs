//! `SHA256SUMS`: what the files of a results folder held when they were written, as `sha256sum -c` reads it.
//!
//! An experiment and `tern report` each renew the lines of what they write and leave the others, so that a file
//! that was changed in between stays found out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::files;

/// Name of the file.
pub const SUMS: &str = "SHA256SUMS";

/// Results are small; a file larger than this is something else.
const LIMIT: u64 = 64 << 20;

/// Hashes by path from the folder, with `/`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums(BTreeMap<String, String>);

impl Sums {
    /// Reads a folder's; `None` where there is no such file.
    ///
    /// # Errors
    /// One that names the file; also when it is not byte for byte what [`Sums::to_bytes`] writes.
    pub fn read(folder: &Path) -> Result<Option<Sums>> {
        let path = folder.join(SUMS);
        let Some(bytes) = files::read_if_there(&path, LIMIT)? else {
            return Ok(None);
        };
        let mut sums = Sums::default();
        for line in String::from_utf8_lossy(&bytes).lines() {
            if let Some((hash, name)) = line.split_once("  ") {
                sums.0.insert(name.into(), hash.into());
            }
        }
        let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        let whole = |hash: &String| hash.len() == 64 && hash.bytes().all(hex);
        ensure!(
            sums.to_bytes() == bytes && sums.0.values().all(whole),
            "{}: found other text, expected sorted lines of a sha256, two spaces and a name",
            path.display()
        );
        Ok(Some(sums))
    }

    /// Reads a folder's, or hashes the results there where it has none yet.
    ///
    /// # Errors
    /// As [`Sums::read`]; also a result that cannot be read.
    pub fn of(folder: &Path) -> Result<Sums> {
        if let Some(sums) = Sums::read(folder)? {
            return Ok(sums);
        }
        let mut sums = Sums::default();
        for name in list(folder)?.results {
            sums.set(&name, &files::read(&folder.join(&name), LIMIT)?);
        }
        Ok(sums)
    }

    /// Notes what a file holds.
    pub fn set(&mut self, name: &str, bytes: &[u8]) {
        self.0.insert(name.into(), files::sha256(bytes));
    }

    /// Keeps the lines of the names that `keep` says yes to.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| keep(name));
    }

    /// The file's content.
    pub fn to_bytes(&self) -> Vec<u8> {
        let lines = self
            .0
            .iter()
            .map(|(name, hash)| format!("{hash}  {name}\n"));
        lines.collect::<String>().into_bytes()
    }

    /// What is not as it was written: files that are changed, gone, or not listed, of those that `of` says yes to.
    pub fn wrong(&self, folder: &Path, of: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let there = list(folder)?.results;
        let names: BTreeSet<&String> = self.0.keys().chain(&there).collect();
        let mut wrong = Vec::new();
        for name in names.into_iter().filter(|name| of(name)) {
            let Some(expected) = self.0.get(name) else {
                wrong.push(format!("{name}: not in {SUMS}"));
                continue;
            };
            match files::read_if_there(&folder.join(name), LIMIT)?.map(|b| files::sha256(&b)) {
                None => wrong.push(format!("{name}: in {SUMS}, and not there")),
                Some(found) if found != *expected => wrong.push(format!(
                    "{name}: sha256: found {found:.12}..., expected {expected:.12}... as {SUMS} says"
                )),
                Some(_) => {}
            }
        }
        Ok(wrong)
    }
}

/// The files of a results folder.
pub struct List {
    /// What experiments and the report write, and a folder's own README.md, as paths from the folder.
    pub results: BTreeSet<String>,
    /// Anything else.
    pub strays: BTreeSet<String>,
}

/// Whether an experiment writes a file of that name, so that nothing else may.
pub fn is_measured(name: &str) -> bool {
    let of_experiment = name.ends_with(".csv") || name.ends_with(".json");
    (name.starts_with("exp-") && of_experiment) || name == "machine.json" || name == "claims.csv"
}

/// Lists a results folder.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(folder: &Path) -> Result<List> {
    let (mut results, mut strays) = (BTreeSet::new(), BTreeSet::new());
    for below in ["", "plots/"] {
        let place = folder.join(below);
        let shown = || place.display().to_string();
        if !below.is_empty() && !place.is_dir() {
            continue;
        }
        for entry in fs::read_dir(&place).with_context(shown)? {
            let entry = entry.with_context(shown)?;
            let name = format!("{below}{}", entry.file_name().to_string_lossy());
            // What a link leads to may change without the folder.
            let file = entry.file_type().with_context(shown)?.is_file();
            let known = match below {
                "" => is_measured(&name) || name == "README.md" || name == "report.md",
                _ => name.ends_with(".svg"),
            };
            if file && known {
                results.insert(name);
            } else if name != SUMS && name != "plots" {
                strays.insert(name);
            }
        }
    }
    Ok(List { results, strays })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_changed_gone_or_new_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        fs::create_dir(folder.join("plots")).unwrap();
        for name in ["machine.json", "exp-01-x.csv", "plots/a.svg", "note.txt"] {
            fs::write(folder.join(name), name).unwrap();
        }
        assert_eq!(Sums::read(folder).unwrap(), None);
        let sums = Sums::of(folder).unwrap();
        fs::write(folder.join(SUMS), sums.to_bytes()).unwrap();
        assert_eq!(Sums::read(folder).unwrap(), Some(sums.clone()));
        assert_eq!(sums.0.len(), 3, "note.txt is no result");
        assert_eq!(list(folder).unwrap().strays, ["note.txt".into()].into());
        let wrong = |of: fn(&str) -> bool| sums.wrong(folder, of).unwrap();
        assert_eq!(wrong(|_| true), Vec::<String>::new());

        fs::write(folder.join("exp-01-x.csv"), "exp-01-y.csv").unwrap();
        fs::remove_file(folder.join("plots/a.svg")).unwrap();
        fs::write(folder.join("claims.csv"), "").unwrap();
        let found = wrong(|_| true);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], "claims.csv: not in SHA256SUMS");
        assert!(found[1].starts_with("exp-01-x.csv: sha256: found "));
        assert_eq!(found[2], "plots/a.svg: in SHA256SUMS, and not there");
        assert_eq!(wrong(is_measured).len(), 2);
    }

    #[test]
    fn any_byte_of_the_file_itself_is_found() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("machine.json"), "{}").unwrap();
        fs::write(dir.path().join("report.md"), "text").unwrap();
        let good = Sums::of(dir.path()).unwrap().to_bytes();
        for at in 0..good.len() {
            for byte in [good[at] ^ 1, good[at] ^ 0x20] {
                let mut bad = good.clone();
                bad[at] = byte;
                fs::write(dir.path().join(SUMS), bad).unwrap();
                let wrong = match Sums::read(dir.path()) {
                    Ok(sums) => sums.unwrap().wrong(dir.path(), |_| true).unwrap(),
                    Err(error) => vec![error.to_string()],
                };
                assert!(!wrong.is_empty(), "byte {at}");
            }
        }
    }
}
