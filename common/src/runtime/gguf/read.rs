//! The reader. See the module's notes on trust.

use std::fmt;
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use memmap2::Mmap;

use super::types::{self, Placed};
use super::value::{Kind, Value};
use super::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT, MAX_ARRAY, MAX_DIMS, MAX_KEY_NAME,
    MAX_KEYS, MAX_TENSOR_NAME, MAX_TENSORS, Shown, VERSION, align_up,
};
use crate::formats::Format;

/// An open file: its keys and tensors, checked, and its bytes.
pub struct Gguf {
    file: String,
    source: Source,
    header: Header,
    file_bytes: u64,
}

enum Source {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl Source {
    fn bytes(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }
}

/// A tensor of a file. `rows * cols` weights, rows one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, unique in the file.
    pub name: String,
    /// Dimensions, fastest first; 1 to 4 of them, none of them 0.
    pub dims: Vec<usize>,
    /// Block format of the weights.
    pub format: Format,
    /// Where its data starts in the file, in bytes from the file's start.
    pub offset: u64,
    /// Length of its data, in bytes.
    pub bytes: u64,
}

impl Tensor {
    /// Weights a row: the first dimension.
    pub fn cols(&self) -> usize {
        self.dims[0]
    }

    /// Rows: the product of all dimensions but the first.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product() // overflow was refused when the file was opened
    }

    /// Weights in all.
    pub fn weights(&self) -> usize {
        self.rows() * self.cols()
    }
}

impl Gguf {
    /// Maps a file and checks its header; tensor data is not touched.
    ///
    /// The file must not be cut short by another process while it is mapped: reading a lost page
    /// ends the process.
    ///
    /// # Errors
    /// One line that names the file, the field, what was found and what was expected.
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.display().to_string();
        // Asked before opening, since opening a pipe waits for its writer.
        let about = fs::metadata(path).with_context(|| format!("{file}: cannot read"))?;
        ensure!(
            about.is_file(),
            "{file}: not a regular file, expected a GGUF file"
        );
        let handle = File::open(path).with_context(|| format!("{file}: cannot open"))?;
        let source = if about.len() == 0 {
            Source::Memory(Vec::new()) // an empty file cannot be mapped
        } else {
            // SAFETY: the map is private and read-only. Another process that shortens the file can
            // still take pages away; that risk is documented above and is the price of mapping.
            let map =
                unsafe { Mmap::map(&handle) }.with_context(|| format!("{file}: cannot map"))?;
            Source::Mapped(map)
        };
        Self::new(file, source)
    }

    /// Reads a file that is already in memory; `file` is its name in error lines.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_bytes(file: &str, bytes: impl Into<Vec<u8>>) -> Result<Self> {
        Self::new(file.to_owned(), Source::Memory(bytes.into()))
    }

    fn new(file: String, source: Source) -> Result<Self> {
        let file_bytes = source.bytes().len() as u64;
        let header = Header::parse(&file, source.bytes(), file_bytes)?;
        Ok(Self {
            file,
            source,
            header,
            file_bytes,
        })
    }

    /// The header of a file of `file_bytes` bytes, without its tensor data.
    pub(super) fn of_header(file: &str, header: Vec<u8>, file_bytes: u64) -> Result<Self> {
        Ok(Self {
            file: file.to_owned(),
            header: Header::parse(file, &header, file_bytes)?,
            source: Source::Memory(header),
            file_bytes,
        })
    }

    /// Whether the tensors' data is there: not if only the header was made, by [`Writer::describe`](super::Writer::describe).
    pub fn has_data(&self) -> bool {
        self.file_bytes == self.source.bytes().len() as u64
    }

    /// The file's name, as error lines have it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Length of the whole file, in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The version the file declares, 2 or 3 (they differ only in v3's big-endian form).
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// What tensor offsets are multiples of, in bytes.
    pub fn alignment(&self) -> u64 {
        self.header.alignment
    }

    /// All keys, in the file's order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = Value<'_>> {
        self.header.keys.iter().map(|key| self.value(key))
    }

    /// The value of a key, if it is there.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let bytes = self.source.bytes();
        self.header.find_key(bytes, key).map(|key| self.value(key))
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// No such key.
    pub fn key(&self, key: &str) -> Result<Value<'_>> {
        self.get(key)
            .ok_or_else(|| anyhow!("{}: key {} is missing", self.file, Shown(key)))
    }

    /// [`Value::u32`] of a key that must be there.
    ///
    /// # Errors
    /// As there, or no such key.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.key(key)?.u32()
    }

    /// [`Value::usize`] of a key that must be there.
    ///
    /// # Errors
    /// As there, or no such key.
    pub fn usize(&self, key: &str) -> Result<usize> {
        self.key(key)?.usize()
    }

    /// [`Value::f32`] of a key that must be there.
    ///
    /// # Errors
    /// As there, or no such key.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.key(key)?.f32()
    }

    /// [`Value::str`] of a key that must be there.
    ///
    /// # Errors
    /// As there, or no such key.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.key(key)?.str()
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.header.tensors
    }

    /// A tensor, if it is there.
    pub fn find_tensor(&self, name: &str) -> Option<&Tensor> {
        self.header.find_tensor(name)
    }

    /// A tensor that must be there.
    ///
    /// # Errors
    /// No such tensor.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.find_tensor(name)
            .ok_or_else(|| anyhow!("{}: tensor {} is missing", self.file, Shown(name)))
    }

    /// The data of a tensor of this file.
    ///
    /// # Panics
    /// If the tensor is of another, longer file, or the file is a header alone.
    pub fn data(&self, tensor: &Tensor) -> &[u8] {
        // Both fit usize: they were held against the length of the bytes.
        let start = tensor.offset as usize;
        &self.source.bytes()[start..start + tensor.bytes as usize]
    }

    /// The whole file, or its header where that is all there is.
    pub fn bytes(&self) -> &[u8] {
        self.source.bytes()
    }

    /// Asks the system to start reading these bytes of a mapped file, where it can be asked. Past the end there is nothing to read.
    pub fn read_ahead(&self, at: u64, len: usize) {
        #[cfg(unix)]
        if let Source::Mapped(map) = &self.source
            && let Ok(at) = usize::try_from(at)
            && at < map.len()
        {
            let len = len.min(map.len() - at);
            // Only a hint.
            let _ = map.advise_range(memmap2::Advice::WillNeed, at, len);
        }
        #[cfg(not(unix))]
        let _ = (at, len);
    }

    fn value<'a>(&'a self, key: &Key) -> Value<'a> {
        let bytes = self.source.bytes();
        Value {
            file: &self.file,
            key: key.name(bytes),
            kind: key.kind,
            element: key.element,
            len: key.len,
            bytes: &bytes[key.value.clone()],
        }
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Header { keys, tensors, .. } = &self.header;
        let (keys, tensors) = (keys.len(), tensors.len());
        write!(f, "Gguf({}, {keys} keys, {tensors} tensors)", self.file)
    }
}

struct Key {
    name: Range<usize>,
    kind: Kind,
    element: Kind,
    len: usize,
    value: Range<usize>,
}

impl Key {
    fn name<'a>(&self, bytes: &'a [u8]) -> &'a str {
        // Checked when the header was parsed.
        std::str::from_utf8(&bytes[self.name.clone()]).unwrap_or_default()
    }
}

/// A tensor info as the file has it, before its type id is understood.
pub(super) struct RawTensor {
    pub name: String,
    /// Dimensions, fastest first.
    pub dims: Vec<u64>,
    /// Product of all dimensions but the first.
    pub rows: u64,
    pub id: u32,
    /// From the start of the data section.
    pub offset: u64,
}

struct Header {
    version: u32,
    alignment: u64,
    keys: Vec<Key>,
    /// Indices of `keys`, by name.
    keys_by_name: Vec<u32>,
    tensors: Vec<Tensor>,
    /// Indices of `tensors`, by name.
    tensors_by_name: Vec<u32>,
}

impl Header {
    fn parse(file: &str, bytes: &[u8], file_bytes: u64) -> Result<Self> {
        let mut cursor = Cursor { file, bytes, at: 0 };
        let magic = cursor.array::<4>(&"the magic")?;
        ensure!(
            magic == MAGIC,
            "{file}: magic is \"{}\", expected \"GGUF\"",
            magic.escape_ascii()
        );
        let version = cursor.u32(&"the version")?;
        ensure!(
            version.swap_bytes() > 3 || version == 0,
            "{file}: version is {version:#010x}: a big-endian file, expected little-endian"
        );
        ensure!(
            version == 2 || version == VERSION,
            "{file}: version is {version}, expected {VERSION}"
        );
        // A key is at least 8 + 4 + 1 bytes, a tensor info 8 + 4 + 8 + 4 + 8.
        let tensors = cursor.count("tensor", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)?;
        let keys = cursor.count("key", MAX_KEYS, 8 + 4 + 1)?;
        let keys = (0..keys)
            .map(|i| cursor.key(i))
            .collect::<Result<Vec<Key>>>()?;
        let keys_by_name = by_name(file, "key", keys.len(), |i| keys[i].name(bytes))?;
        let mut header = Self {
            version,
            alignment: DEFAULT_ALIGNMENT,
            keys,
            keys_by_name,
            tensors: Vec::new(),
            tensors_by_name: Vec::new(),
        };
        header.read_special_keys(file, bytes)?;
        let raw = (0..tensors)
            .map(|i| cursor.tensor(i))
            .collect::<Result<Vec<RawTensor>>>()?;
        header.tensors_by_name = by_name(file, "tensor", raw.len(), |i| &raw[i].name)?;
        header.place(file, bytes, cursor.at as u64, file_bytes, raw)?;
        Ok(header)
    }

    /// The keys that decide how the rest is read.
    fn read_special_keys(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        let value = |key: &str| {
            self.find_key(bytes, key).map(|key| Value {
                file,
                key: key.name(bytes),
                kind: key.kind,
                element: key.element,
                len: key.len,
                bytes: &bytes[key.value.clone()],
            })
        };
        if let Some(split) = value("split.count") {
            let count = split.u64()?;
            ensure!(
                count <= 1,
                "{file}: key split.count: found {count}, expected a file in one piece (merge the parts first)"
            );
        }
        if let Some(alignment) = value(ALIGNMENT_KEY) {
            // Only u32 is allowed, and what other readers would refuse cannot be copied either.
            ensure!(
                alignment.kind() == Kind::U32,
                alignment.unexpected(&alignment.type_name(), "u32")
            );
            let n = alignment.u64()?;
            ensure!(
                n.is_power_of_two() && n <= MAX_ALIGNMENT,
                "{file}: key {ALIGNMENT_KEY}: found {n}, expected a power of two up to {MAX_ALIGNMENT}"
            );
            self.alignment = n;
        }
        Ok(())
    }

    /// Understands type ids, and checks that every tensor lies inside the file, on its own.
    fn place(
        &mut self,
        file: &str,
        bytes: &[u8],
        end: u64,
        file_end: u64,
        raw: Vec<RawTensor>,
    ) -> Result<()> {
        let alignment = self.alignment;
        let start = align_up(end, alignment)
            .with_context(|| format!("{file}: the header ends beyond any file"))?;
        let data_bytes = file_end.saturating_sub(start);
        for t in &raw {
            let (name, offset) = (Shown(&t.name), t.offset);
            ensure!(
                offset.is_multiple_of(alignment),
                "{file}: tensor {name}: offset {offset}, expected a multiple of {alignment}"
            );
            ensure!(
                offset < data_bytes,
                "{file}: tensor {name}: offset {offset} is past the end, the file holds {data_bytes} bytes of data"
            );
        }
        let mut order: Vec<usize> = (0..raw.len()).collect();
        order.sort_by_key(|&i| raw[i].offset);
        let mut room = vec![0; raw.len()];
        for (n, &i) in order.iter().enumerate() {
            let next = order.get(n + 1).map_or(data_bytes, |&i| raw[i].offset);
            room[i] = next - raw[i].offset;
        }
        let prism_keys = self
            .keys
            .iter()
            .any(|k| k.name(bytes).starts_with("prism."));
        let mut ids: Vec<u32> = raw.iter().map(|t| t.id).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut formats = Vec::new();
        for id in ids {
            let of_id = raw.iter().zip(&room).filter(|(t, _)| t.id == id);
            let of_id: Vec<Placed> = of_id.map(|(raw, &room)| Placed { raw, room }).collect();
            let format = types::resolve(file, id, &of_id, alignment, prism_keys)?;
            formats.push((id, format));
        }
        let format = |id| formats.iter().find(|f| f.0 == id).map(|f| f.1);
        for (i, t) in raw.iter().enumerate() {
            let name = Shown(&t.name);
            // Every id was resolved above.
            let format = format(t.id).with_context(|| format!("{file}: tensor {name}"))?;
            let bytes = types::bytes(t, format)
                .map_err(|error| anyhow!("{file}: tensor {name}: {error:#}"))?;
            let left = data_bytes - t.offset;
            ensure!(
                bytes <= left,
                "{file}: tensor {name}: {bytes} bytes at offset {}, but only {left} are left",
                t.offset
            );
            ensure!(
                bytes <= room[i],
                "{file}: tensor {name}: {bytes} bytes at offset {} reach into the next tensor, expected at most {}",
                t.offset,
                room[i]
            );
        }
        self.tensors = raw
            .into_iter()
            .map(|t| {
                let format = format(t.id).context("a type id was resolved")?;
                Ok(Tensor {
                    bytes: types::bytes(&t, format)?,
                    dims: t.dims.iter().map(|&d| d as usize).collect(),
                    name: t.name,
                    format,
                    offset: start + t.offset,
                })
            })
            .collect::<Result<_>>()?;
        Ok(())
    }

    fn find_key(&self, bytes: &[u8], name: &str) -> Option<&Key> {
        let order = &self.keys_by_name;
        let at = order.binary_search_by(|&i| self.keys[i as usize].name(bytes).cmp(name));
        Some(&self.keys[order[at.ok()?] as usize])
    }

    fn find_tensor(&self, name: &str) -> Option<&Tensor> {
        let order = &self.tensors_by_name;
        let at = order.binary_search_by(|&i| self.tensors[i as usize].name.as_str().cmp(name));
        Some(&self.tensors[order[at.ok()?] as usize])
    }
}

/// Indices in the order of names.
///
/// # Errors
/// A name that comes twice.
fn by_name<'a>(
    file: &str,
    what: &str,
    len: usize,
    name: impl Fn(usize) -> &'a str,
) -> Result<Vec<u32>> {
    let mut order: Vec<u32> = (0..len as u32).collect();
    order.sort_by_key(|&i| name(i as usize));
    for pair in order.windows(2) {
        let (a, b) = (name(pair[0] as usize), name(pair[1] as usize));
        ensure!(a != b, "{file}: {what} {} comes twice", Shown(a));
    }
    Ok(order)
}

/// Reads forward through bytes that are not trusted.
struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, n: u64, what: &dyn fmt::Display) -> Result<Range<usize>> {
        let (file, at, left) = (self.file, self.at, self.left());
        ensure!(
            n <= left,
            "{file}: {what} takes {n} bytes at byte {at}, but only {left} are left"
        );
        self.at += n as usize; // at most `left`, which came from a usize
        Ok(at..self.at)
    }

    fn array<const N: usize>(&mut self, what: &dyn fmt::Display) -> Result<[u8; N]> {
        let range = self.take(N as u64, what)?;
        Ok(self.bytes[range].try_into()?)
    }

    fn u32(&mut self, what: &dyn fmt::Display) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &dyn fmt::Display) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A number of things of at least `least` bytes each.
    fn count(&mut self, what: &str, most: u64, least: u64) -> Result<u64> {
        let n = self.u64(&format_args!("the {what} count"))?;
        let most = most.min(self.left() / least);
        let (file, size) = (self.file, self.bytes.len());
        ensure!(
            n <= most,
            "{file}: {what} count is {n}, expected at most {most} in {size} bytes"
        );
        Ok(n)
    }

    fn string(&mut self, what: &dyn fmt::Display) -> Result<Range<usize>> {
        let n = self.u64(&format_args!("the length of {what}"))?;
        self.take(n, what)
    }

    /// [`Cursor::string`] for the hundreds of thousands in a vocabulary: no words for errors.
    fn skip_string(&mut self) -> Option<()> {
        let (n, rest) = self.bytes[self.at..].split_first_chunk()?;
        let n = u64::from_le_bytes(*n);
        (n <= rest.len() as u64).then(|| self.at += 8 + n as usize)
    }

    fn name(&mut self, what: &dyn fmt::Display, most: u64) -> Result<Range<usize>> {
        let range = self.string(what)?;
        let (file, n) = (self.file, range.len());
        ensure!(
            (1..=most).contains(&(n as u64)),
            "{file}: {what} is {n} bytes long, expected 1 to {most}"
        );
        if let Err(error) = std::str::from_utf8(&self.bytes[range.clone()]) {
            bail!("{file}: {what}: {error}, expected UTF-8");
        }
        Ok(range)
    }

    fn kind(&mut self, what: &dyn fmt::Display) -> Result<Kind> {
        let id = self.u32(&format_args!("the type of {what}"))?;
        let file = self.file;
        Kind::from_id(id)
            .ok_or_else(|| anyhow!("{file}: {what}: value type is {id}, expected 0 to 12"))
    }

    fn key(&mut self, i: u64) -> Result<Key> {
        let name = self.name(&format_args!("the name of key {i}"), MAX_KEY_NAME)?;
        // The same lifetime as the bytes, so that the cursor can move on.
        let bytes = self.bytes;
        let shown = Shown(std::str::from_utf8(&bytes[name.clone()])?);
        let what = &format_args!("key {shown}") as &dyn fmt::Display;
        let kind = self.kind(what)?;
        let (element, len) = match kind {
            Kind::Array => {
                let element = self.kind(what)?;
                (element, self.u64(&format_args!("the length of {what}"))?)
            }
            kind => (kind, 1),
        };
        let file = self.file;
        ensure!(
            len <= MAX_ARRAY,
            "{file}: {what}: {len} values, expected at most {MAX_ARRAY}"
        );
        let start = self.at;
        match element.bytes() {
            Some(size) => {
                let range = self.take(len * size as u64, what)?;
                if element == Kind::Bool
                    && let Some(b) = self.bytes[range].iter().find(|&&b| b > 1)
                {
                    bail!("{file}: {what}: a bool is {b}, expected 0 or 1");
                }
            }
            None if element == Kind::String => {
                for _ in 0..len {
                    if self.skip_string().is_none() {
                        self.string(what)?; // says what is wrong
                    }
                }
            }
            None => bail!("{file}: {what}: an array of arrays, expected numbers or strings"),
        }
        Ok(Key {
            name,
            kind,
            element,
            len: usize::try_from(len)?,
            value: start..self.at,
        })
    }

    fn tensor(&mut self, i: u64) -> Result<RawTensor> {
        let name = self.name(&format_args!("the name of tensor {i}"), MAX_TENSOR_NAME)?;
        let name = std::str::from_utf8(&self.bytes[name])?.to_owned();
        let (file, shown) = (self.file, Shown(&name));
        let what = &format_args!("tensor {shown}") as &dyn fmt::Display;
        let n = self.u32(&format_args!("the number of dimensions of {what}"))?;
        ensure!(
            (1..=MAX_DIMS as u32).contains(&n),
            "{file}: {what}: {n} dimensions, expected 1 to {MAX_DIMS}"
        );
        let dims = (0..n)
            .map(|_| self.u64(&format_args!("a dimension of {what}")))
            .collect::<Result<Vec<u64>>>()?;
        ensure!(
            !dims.contains(&0),
            "{file}: {what}: dimensions {dims:?}, expected none to be 0"
        );
        let product = |dims: &[u64]| dims.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let rows = match (product(&dims), product(&dims[1..])) {
            (Some(all), Some(rows)) if all <= i64::MAX as u64 => rows,
            _ => {
                bail!("{file}: {what}: dimensions {dims:?} overflow, expected a product below 2^63")
            }
        };
        Ok(RawTensor {
            rows,
            id: self.u32(&format_args!("the type of {what}"))?,
            offset: self.u64(&format_args!("the offset of {what}"))?,
            dims,
            name,
        })
    }
}
