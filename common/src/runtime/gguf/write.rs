//! The writer: header first, then tensor data as the caller produces it, so that a file far larger
//! than memory can be written.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};

use super::value::{Kind, Scalar, Value};
use super::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, Gguf, MAGIC, MAX_ALIGNMENT, MAX_ARRAY, MAX_DIMS,
    MAX_KEY_NAME, MAX_KEYS, MAX_TENSOR_NAME, MAX_TENSORS, Shown, VERSION, align_up,
};
use crate::formats::Format;

/// Collects keys and tensor infos, then writes a file. Keys and tensors keep the order in which
/// they were added.
#[derive(Debug, Default)]
pub struct Writer {
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<Planned>,
    alignment: Option<u64>,
}

/// A tensor that the file will hold.
#[derive(Debug)]
struct Planned {
    name: String,
    dims: Vec<usize>,
    format: Format,
    bytes: u64,
}

/// Temporary files that are being written.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A temporary file, for as long as it is written.
struct Unfinished(PathBuf);

impl Unfinished {
    fn new(path: &Path) -> Self {
        unfinished().push(path.into());
        Unfinished(path.into())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        unfinished().retain(|path| *path != self.0);
    }
}

/// Removes the temporary files of [`Writer::write`], for a program that is about to end.
pub fn remove_unfinished() {
    for path in unfinished().drain(..) {
        let _ = std::fs::remove_file(path); // there is nobody to tell
    }
}

impl Writer {
    /// A file with no keys and no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key. `general.alignment` (a u32) also sets the alignment.
    ///
    /// # Errors
    /// A name that is empty, too long or already there; an alignment that is no power of two.
    pub fn set<T: Scalar>(&mut self, key: &str, value: T) -> Result<()> {
        let mut bytes = Vec::new();
        put_kind(&mut bytes, T::KIND);
        value.put(&mut bytes);
        self.add(key, bytes)
    }

    /// Adds a key with a string.
    ///
    /// # Errors
    /// As [`Writer::set`].
    pub fn set_str(&mut self, key: &str, value: &str) -> Result<()> {
        let mut bytes = Vec::new();
        put_kind(&mut bytes, Kind::String);
        put_str(&mut bytes, value.as_bytes());
        self.add(key, bytes)
    }

    /// Adds a key with an array.
    ///
    /// # Errors
    /// As [`Writer::set`].
    pub fn set_array<T: Scalar>(&mut self, key: &str, values: &[T]) -> Result<()> {
        let mut bytes = array_head(T::KIND, values.len());
        for value in values {
            value.put(&mut bytes);
        }
        self.add(key, bytes)
    }

    /// Adds a key with an array of strings.
    ///
    /// # Errors
    /// As [`Writer::set`].
    pub fn set_strs<S: AsRef<[u8]>>(&mut self, key: &str, values: &[S]) -> Result<()> {
        let mut bytes = array_head(Kind::String, values.len());
        for value in values {
            put_str(&mut bytes, value.as_ref());
        }
        self.add(key, bytes)
    }

    /// Adds a key of another file, byte for byte.
    ///
    /// # Errors
    /// As [`Writer::set`].
    pub fn copy(&mut self, value: &Value<'_>) -> Result<()> {
        let mut bytes = match value.kind {
            Kind::Array => array_head(value.element, value.len),
            kind => {
                let mut bytes = Vec::new();
                put_kind(&mut bytes, kind);
                bytes
            }
        };
        bytes.extend_from_slice(value.bytes);
        self.add(value.key, bytes)
    }

    fn add(&mut self, key: &str, value: Vec<u8>) -> Result<()> {
        let shown = Shown(key);
        ensure!(
            (1..=MAX_KEY_NAME).contains(&(key.len() as u64)),
            "key {shown}: a name of {} bytes, expected 1 to {MAX_KEY_NAME}",
            key.len()
        );
        ensure!(
            self.keys.iter().all(|(name, _)| name != key),
            "key {shown} comes twice"
        );
        ensure!(
            (self.keys.len() as u64) < MAX_KEYS,
            "key {shown}: expected at most {MAX_KEYS} keys"
        );
        let array = (Kind::Array as u32).to_le_bytes();
        if let Some(rest) = value.strip_prefix(&array)
            && let Some((len, _)) = rest[4..].split_first_chunk()
        {
            let len = u64::from_le_bytes(*len);
            ensure!(
                len <= MAX_ARRAY,
                "key {shown}: {len} values, expected at most {MAX_ARRAY}"
            );
        }
        if key == ALIGNMENT_KEY {
            let n: u64 = match value.split_first_chunk::<4>() {
                Some((kind, n)) if u32::from_le_bytes(*kind) == Kind::U32 as u32 => {
                    u32::from_le_bytes(n.try_into()?).into()
                }
                _ => 0,
            };
            ensure!(
                n.is_power_of_two() && n <= MAX_ALIGNMENT,
                "key {ALIGNMENT_KEY}: expected a u32, a power of two up to {MAX_ALIGNMENT}"
            );
            self.alignment = Some(n);
        }
        self.keys.push((key.to_owned(), value));
        Ok(())
    }

    /// Adds a tensor: dimensions fastest first. Its data is asked for when the file is written.
    ///
    /// # Errors
    /// A name that is empty or too long; dimensions that are not 1 to 4 positive numbers, that do
    /// not fit the format, or that overflow.
    pub fn tensor(&mut self, name: &str, dims: &[usize], format: Format) -> Result<()> {
        let shown = Shown(name);
        ensure!(
            (1..=MAX_TENSOR_NAME).contains(&(name.len() as u64)),
            "tensor {shown}: a name of {} bytes, expected 1 to {MAX_TENSOR_NAME}",
            name.len()
        );
        ensure!(
            (1..=MAX_DIMS).contains(&dims.len()) && !dims.contains(&0),
            "tensor {shown}: dimensions {dims:?}, expected 1 to {MAX_DIMS}, none of them 0"
        );
        ensure!(
            (self.tensors.len() as u64) < MAX_TENSORS,
            "tensor {shown}: expected at most {MAX_TENSORS} tensors"
        );
        let rows = dims[1..]
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(d))
            .with_context(|| format!("tensor {shown}: dimensions {dims:?} overflow"))?;
        let bytes = format
            .matrix_bytes(rows, dims[0])
            .with_context(|| format!("tensor {shown}"))?;
        self.tensors.push(Planned {
            name: name.to_owned(),
            dims: dims.to_vec(),
            format,
            bytes: bytes as u64,
        });
        Ok(())
    }

    /// Writes the file to a temporary one beside it and renames that: at `path` stands the whole
    /// file or what was there before. `data` is called once a tensor, in order, with its index, and
    /// must write exactly the tensor's bytes.
    ///
    /// # Errors
    /// Something at `path` that is no regular file, what the system reports, what `data` reports, data of the
    /// wrong length, a tensor name that comes twice.
    pub fn write(
        &self,
        path: &Path,
        data: impl FnMut(usize, &mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let shown = path.display();
        // A rename would replace a link: what it leads to is meant.
        let target;
        let path = if path.is_symlink() {
            target = std::fs::canonicalize(path)
                .with_context(|| format!("{shown}: cannot follow the link"))?;
            &target
        } else {
            path
        };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // A rename would replace a device or a pipe as it does a file.
        if let Ok(there) = std::fs::metadata(path) {
            ensure!(
                there.is_file(),
                "{shown}: cannot be replaced: is {}, expected a regular file",
                if there.is_dir() {
                    "a folder"
                } else {
                    "a device or pipe"
                }
            );
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tern-").suffix(".tmp");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any new file: the default of temporary files is private.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let temporary = builder
            .tempfile_in(folder)
            .with_context(|| format!("{shown}: cannot create"))?;
        let _unfinished = Unfinished::new(temporary.path());
        let mut out = BufWriter::with_capacity(1 << 20, temporary);
        self.write_to(&mut out, data)
            .with_context(|| format!("{shown}: cannot write"))?;
        let temporary = out
            .into_inner()
            .map_err(|error| error.into_error())
            .with_context(|| format!("{shown}: cannot write"))?;
        let synced = temporary.as_file().sync_all();
        synced.with_context(|| format!("{shown}: cannot write"))?;
        temporary
            .persist(path)
            .map_err(|e| e.error)
            .with_context(|| format!("{shown}: cannot replace"))?;
        Ok(())
    }

    /// Writes the file's bytes in order. See [`Writer::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write_to(
        &self,
        out: &mut dyn Write,
        mut data: impl FnMut(usize, &mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let alignment = self.alignment.unwrap_or(DEFAULT_ALIGNMENT);
        let header = self.header(alignment)?;
        out.write_all(&header)?;
        pad(out, header.len() as u64, alignment)?;
        for (i, tensor) in self.tensors.iter().enumerate() {
            let (name, expected) = (Shown(&tensor.name), tensor.bytes);
            let mut counted = Counted { out, written: 0 };
            data(i, &mut counted).with_context(|| format!("tensor {name}"))?;
            let written = counted.written;
            ensure!(
                written == expected,
                "tensor {name}: {written} bytes of data, expected {expected}"
            );
            pad(out, written, alignment)?;
        }
        Ok(())
    }

    /// The file that [`Writer::write`] would write, without the data of its tensors; `file` is its name in error lines.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn describe(&self, file: &str) -> Result<Gguf> {
        let alignment = self.alignment.unwrap_or(DEFAULT_ALIGNMENT);
        let header = self.header(alignment)?;
        let mut end = Some(header.len() as u64);
        for bytes in [0].into_iter().chain(self.tensors.iter().map(|t| t.bytes)) {
            end = end
                .and_then(|end| end.checked_add(bytes))
                .and_then(|end| align_up(end, alignment));
        }
        let end = end.with_context(|| format!("{file}: the file overflows"))?;
        Gguf::of_header(file, header, end)
    }

    fn header(&self, alignment: u64) -> Result<Vec<u8>> {
        let mut names: Vec<&str> = self.tensors.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        for pair in names.windows(2) {
            let name = Shown(pair[0]);
            ensure!(pair[0] != pair[1], "tensor {name} comes twice");
        }
        let mut out = MAGIC.to_vec();
        VERSION.put(&mut out);
        (self.tensors.len() as u64).put(&mut out);
        (self.keys.len() as u64).put(&mut out);
        for (name, value) in &self.keys {
            put_str(&mut out, name.as_bytes());
            out.extend_from_slice(value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_str(&mut out, tensor.name.as_bytes());
            (tensor.dims.len() as u32).put(&mut out);
            for &d in &tensor.dims {
                (d as u64).put(&mut out);
            }
            tensor.format.ggml_id().put(&mut out);
            offset.put(&mut out);
            offset = offset
                .checked_add(tensor.bytes)
                .and_then(|n| align_up(n, alignment))
                .with_context(|| format!("tensor {}: the file overflows", Shown(&tensor.name)))?;
        }
        Ok(out)
    }
}

fn put_kind(out: &mut Vec<u8>, kind: Kind) {
    (kind as u32).put(out);
}

fn put_str(out: &mut Vec<u8>, text: &[u8]) {
    (text.len() as u64).put(out);
    out.extend_from_slice(text);
}

fn array_head(element: Kind, len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    put_kind(&mut out, Kind::Array);
    put_kind(&mut out, element);
    (len as u64).put(&mut out);
    out
}

/// Zeros from byte `at` to the next multiple of `alignment`.
fn pad(out: &mut dyn Write, at: u64, alignment: u64) -> io::Result<()> {
    let n = at.next_multiple_of(alignment) - at;
    io::copy(&mut io::Read::take(io::repeat(0), n), out).map(|_| ())
}

/// Counts what passes through.
struct Counted<'a> {
    out: &'a mut dyn Write,
    written: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
