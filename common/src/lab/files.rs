//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

/// Held while files are put in place, so that Ctrl-C waits for a complete set.
static WRITING: Mutex<()> = Mutex::new(());

/// Waits for the writer, and keeps others from starting.
pub(super) fn wait_for_writer() -> MutexGuard<'static, ()> {
    WRITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes all of `files` into `folder`, which is created when missing; see [`write_files`].
///
/// # Errors
/// One that names the folder or file.
pub fn write_all(folder: &Path, files: &[(String, Vec<u8>)]) -> Result<Vec<PathBuf>> {
    let files: Vec<_> = files
        .iter()
        .map(|(name, bytes)| (folder.join(name), bytes.clone()))
        .collect();
    write_files(&files)?;
    Ok(files.into_iter().map(|(path, _)| path).collect())
}

/// Writes all of `files`, each into a folder that is created when missing: first every one under a
/// temporary name, to the disk, then each renamed. When one cannot be written, none is replaced.
///
/// # Errors
/// One that names the folder or file.
pub fn write_files(files: &[(PathBuf, Vec<u8>)]) -> Result<()> {
    let _lock = wait_for_writer();
    let mut ready = Vec::new();
    for (path, bytes) in files {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        make_folder(folder)?;
        // What a rename would trip over is found before the first of them.
        ensure!(
            !path.is_dir(),
            "{}: cannot be replaced: is a folder, expected a file",
            path.display()
        );
        let temporary = write_temporary(folder, bytes)
            .with_context(|| format!("{}: cannot be written", path.display()))?;
        ready.push((temporary, path));
    }
    for (temporary, path) in ready {
        temporary
            .persist(path)
            .map_err(|e| e.error)
            .with_context(|| format!("{}: cannot be replaced", path.display()))?;
    }
    Ok(())
}

fn write_temporary(folder: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tern-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // Readable by others, as any file: the default of temporary files is private.
        builder.permissions(fs::Permissions::from_mode(0o644));
    }
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    Ok(file)
}

fn make_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)
        .with_context(|| format!("{}: cannot be made a folder", folder.display()))
}

/// Checks, before hours of measuring, that files can be written into `folder`.
///
/// # Errors
/// One that names the folder.
pub(super) fn check_writable(folder: &Path) -> Result<()> {
    make_folder(folder)?;
    write_temporary(folder, b"")
        .with_context(|| format!("{}: cannot be written to", folder.display()))?;
    Ok(())
}

/// The lock of a results folder, for a read, a change and a write that belong together. Where the
/// system cannot lock a folder there is none, and two experiments at once may lose a verdict.
pub(super) fn lock_folder(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// Reads a file, at most `limit` bytes.
///
/// # Errors
/// One that names the file; also when it is larger than `limit`.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(name)?;
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .with_context(name)?;
    if bytes.len() as u64 > limit {
        bail!("{}: over {limit} bytes, expected a small file", name());
    }
    Ok(bytes)
}

/// Like [`read`], `None` when there is no such file.
pub(super) fn read_if_there(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        _ => read(path, limit).map(Some),
    }
}

/// SHA-256 in lower-case hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file's content, and its size in bytes.
///
/// # Errors
/// One that names the file.
pub fn sha256_file(path: &Path) -> Result<(String, u64)> {
    let name = || path.display().to_string();
    let mut file = File::open(path).with_context(name)?;
    let mut hasher = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        match file.read(&mut chunk).with_context(name)? {
            0 => return Ok((hex(&hasher.finalize()), size)),
            n => {
                hasher.update(&chunk[..n]);
                size += n as u64;
            }
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let file = |name: &str, text: &str| (name.to_string(), text.as_bytes().to_vec());
        write_all(&folder, &[file("x.csv", "1"), file("x.json", "2")]).unwrap();
        write_all(&folder, &[file("x.csv", "new")]).unwrap();
        assert_eq!(fs::read(folder.join("x.csv")).unwrap(), b"new");
        assert_eq!(fs::read(folder.join("x.json")).unwrap(), b"2");
        let names: Vec<_> = fs::read_dir(&folder).unwrap().collect();
        assert_eq!(names.len(), 2, "temporary files are gone: {names:?}");
    }

    #[test]
    fn when_one_file_cannot_be_written_none_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let old = dir.path().join("a.csv");
        fs::write(&old, "old").unwrap();
        fs::create_dir(dir.path().join("b.csv")).unwrap();
        fs::write(dir.path().join("c"), "a file").unwrap();
        for other in ["b.csv", "c/d.csv"] {
            let files = [
                (old.clone(), b"new".to_vec()),
                (dir.path().join(other), b"x".to_vec()),
            ];
            let error = format!("{:#}", write_files(&files).unwrap_err());
            assert!(error.contains(other.split('/').next().unwrap()), "{error}");
            assert_eq!(fs::read(&old).unwrap(), b"old");
            assert_eq!(
                fs::read_dir(&dir).unwrap().count(),
                3,
                "temporary files are gone"
            );
        }
    }

    #[test]
    fn a_folder_that_is_a_file_is_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "kept").unwrap();
        let error = format!("{:#}", check_writable(&path).unwrap_err());
        assert!(error.contains("file: cannot be made a folder"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"kept");
    }

    #[test]
    fn hashes_are_those_of_the_standard() {
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(b"abc"), abc);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        fs::write(&path, "abc").unwrap();
        assert_eq!(sha256_file(&path).unwrap(), (abc.to_string(), 3));
        assert!(read(&path, 2).is_err());
        assert_eq!(read_if_there(&dir.path().join("none"), 9).unwrap(), None);
    }
}
