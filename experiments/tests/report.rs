//! `tern report` from outside: the same bytes twice, nothing written half, one line when it cannot write.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn report(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tern"));
    command.arg("report").arg("--out").arg(folder);
    command
}

/// A copy of committed results.
fn copy(of: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../results")
        .join(of);
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".csv") || name.ends_with(".json") {
            fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
}

/// Every file below a folder, with its bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

fn refused(output: &Output, words: &str) {
    let line = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(
        line.starts_with("tern: ") && line.matches('\n').count() == 1,
        "{line}"
    );
    assert!(line.contains(words), "{line} does not contain {words}");
}

#[test]
fn the_same_rows_give_the_same_bytes() {
    let machine = "intel-xeon-processor-2c";
    let mut seen = Vec::new();
    for _ in 0..2 {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join(machine);
        fs::create_dir(&place).unwrap();
        copy(machine, &place);
        let rows = files(&place).len();
        let check = report(&place).arg("--check").output().unwrap();
        assert_eq!(check.status.code(), Some(1));
        assert_eq!(files(&place).len(), rows, "--check writes nothing");
        assert!(report(&place).output().unwrap().status.success());
        assert!(
            report(&place)
                .arg("--check")
                .output()
                .unwrap()
                .status
                .success()
        );
        let written: Vec<(PathBuf, Vec<u8>)> = files(&place)
            .into_iter()
            .map(|(path, bytes)| (path.strip_prefix(&place).unwrap().to_path_buf(), bytes))
            .collect();
        assert!(written.len() > rows);
        seen.push(written);
    }
    assert!(seen[0] == seen[1]);
    let text = |name: &str| {
        let (_, bytes) = seen[0]
            .iter()
            .find(|(path, _)| path.ends_with(name))
            .unwrap();
        String::from_utf8(bytes.clone()).unwrap()
    };
    let sums = text("SHA256SUMS");
    for (path, _) in seen[0]
        .iter()
        .filter(|(path, _)| !path.ends_with("SHA256SUMS"))
    {
        let line = format!("  {}\n", path.display());
        assert!(sums.contains(&line), "{line:?} is not in {sums}");
    }
    let whole = text("report.md");
    assert!(whole.contains("| L05 |") && whole.contains("plots/claims.svg"));
    let svg = text("claims.svg");
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("prefers-color-scheme") && svg.contains("commit "));
}

#[test]
fn rows_that_are_not_what_was_written_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    copy("snapdragon-x126100", folder.path());
    let csv = folder.path().join("exp-03-mask-slot.csv");
    let good = fs::read_to_string(&csv).unwrap();
    fs::write(
        &csv,
        good.replacen("experiment,claim", "experiment,claims", 1),
    )
    .unwrap();
    let before = files(folder.path());
    refused(
        &report(folder.path()).output().unwrap(),
        "exp-03-mask-slot.csv: header",
    );
    fs::write(&csv, good.replacen("391", "392", 1)).unwrap();
    refused(
        &report(folder.path()).output().unwrap(),
        "exp-03-mask-slot.csv: sha256",
    );
    fs::write(
        &csv,
        good.replacen("experiment,claim", "experiment,claims", 1),
    )
    .unwrap();
    assert!(files(folder.path()) == before, "nothing was written");
}

#[test]
fn the_report_vouches_for_no_file_that_was_changed() {
    let folder = tempfile::tempdir().unwrap();
    copy("snapdragon-x126100", folder.path());
    assert!(report(folder.path()).output().unwrap().status.success());
    let names = files(folder.path());
    assert!(
        names.keys().all(|path| !path.ends_with("report.md")),
        "published figures"
    );
    let machine = folder.path().join("machine.json");
    let text = fs::read_to_string(&machine).unwrap();
    fs::write(&machine, text.replacen('8', "9", 1)).unwrap();
    refused(
        &report(folder.path()).output().unwrap(),
        "machine.json: sha256: found",
    );
}

/// A shell script with a temporary file system of its own at `$1`, where the system allows that; `$0` is tern, and the
/// files of `$2` are copied there first.
#[cfg(target_os = "linux")]
fn in_a_file_system(options: &str, then: &str) -> Option<Output> {
    let mount = tempfile::tempdir().unwrap();
    let rows = tempfile::tempdir().unwrap();
    copy("intel-xeon-processor-2c", rows.path());
    let run = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-c", script, env!("CARGO_BIN_EXE_tern")]);
        command.args([mount.path(), rows.path()]).output()
    };
    let mount_it = format!("mount -t tmpfs -o {options} none \"$1\" && cp \"$2\"/* \"$1\"");
    match run(&mount_it) {
        Ok(output) if output.status.success() => Some(run(&format!("{mount_it}; {then}")).unwrap()),
        // A container may forbid it; then only its runs elsewhere test this.
        _ => None,
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_and_a_folder_that_cannot_be_written_to_lose_nothing() {
    // What the rows leave of the disk is filled; the report and its plots do not fit behind them.
    let old = "echo old >\"$1\"/report.md; dd if=/dev/zero of=\"$1\"/fill bs=4k 2>/dev/null; \
               \"$0\" report --out \"$1\"; code=$?; cat \"$1\"/report.md; ls -a \"$1\" | grep -c tmp; exit $code";
    if let Some(output) = in_a_file_system("size=4m", old) {
        refused(&output, "report.md: cannot be written: No space left");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "old\n0\n");
    }
    let read_only = "mount -o remount,ro \"$1\"; \"$0\" report --out \"$1\"";
    if let Some(output) = in_a_file_system("size=4m", read_only) {
        refused(
            &output,
            "report.md: cannot be written: Read-only file system",
        );
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_one_line() {
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tern"));
    let output = command
        .arg("claims")
        .arg("snapdragon-x126100")
        .stdout(full)
        .output();
    refused(&output.unwrap(), "No space left");
}
