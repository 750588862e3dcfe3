//! Values of GGUF keys: decoded when asked for, with errors that say what was found.

use std::fmt;

use anyhow::{Result, anyhow, bail};

use super::Shown;

/// The type of a value. The discriminants are the ids in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each name is its own documentation
#[repr(u32)]
pub enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::String,
        Kind::Array,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    /// The kind of a type id.
    pub fn from_id(id: u32) -> Option<Kind> {
        Self::ALL.get(id as usize).copied()
    }

    /// Bytes of one value; `None` for strings and arrays, whose length stands in the file.
    pub const fn bytes(self) -> Option<usize> {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => Some(1),
            Kind::U16 | Kind::I16 => Some(2),
            Kind::U32 | Kind::I32 | Kind::F32 => Some(4),
            Kind::U64 | Kind::I64 | Kind::F64 => Some(8),
            Kind::String | Kind::Array => None,
        }
    }

    /// Lower-case name, `u32`.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::U8 => "u8",
            Kind::I8 => "i8",
            Kind::U16 => "u16",
            Kind::I16 => "i16",
            Kind::U32 => "u32",
            Kind::I32 => "i32",
            Kind::F32 => "f32",
            Kind::Bool => "bool",
            Kind::String => "string",
            Kind::Array => "array",
            Kind::U64 => "u64",
            Kind::I64 => "i64",
            Kind::F64 => "f64",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that is one GGUF scalar.
pub trait Scalar: Copy {
    /// Its kind in a file.
    const KIND: Kind;
    /// Appends the little-endian bytes.
    fn put(self, out: &mut Vec<u8>);
}

macro_rules! scalar {
    ($($type:ty: $kind:ident),*) => {$(
        impl Scalar for $type {
            const KIND: Kind = Kind::$kind;
            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
scalar!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, f32: F32, u64: U64, i64: I64, f64: F64);

impl Scalar for bool {
    const KIND: Kind = Kind::Bool;
    fn put(self, out: &mut Vec<u8>) {
        out.push(self.into());
    }
}

/// The value of a key, still in the file's bytes. What an accessor returns is converted where
/// nothing is lost: any integer type that holds the number will do for [`Value::u32`].
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pub(super) file: &'a str,
    pub(super) key: &'a str,
    pub(super) kind: Kind,
    /// Of an array, what it holds; else the same as `kind`.
    pub(super) element: Kind,
    /// Elements; 1 unless an array.
    pub(super) len: usize,
    /// The elements, checked when the file was opened.
    pub(super) bytes: &'a [u8],
}

impl<'a> Value<'a> {
    /// Name of the key.
    pub fn key(&self) -> &'a str {
        self.key
    }

    /// The kind of value, [`Kind::Array`] for any array.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What an array holds; the kind itself of any other value.
    pub fn element(&self) -> Kind {
        self.element
    }

    /// Elements of an array; 1 for any other value.
    #[allow(clippy::len_without_is_empty)] // only arrays can be empty; len says enough
    pub fn len(&self) -> usize {
        self.len
    }

    /// The type in words: `u32`, `array of string`.
    pub fn type_name(&self) -> String {
        match self.kind {
            Kind::Array => format!("array of {}", self.element),
            kind => kind.to_string(),
        }
    }

    /// A `u32`, from any integer that fits.
    ///
    /// # Errors
    /// Another type, or a number out of range. As all errors of this type, one line that names file,
    /// key, what was found and what was expected.
    pub fn u32(&self) -> Result<u32> {
        self.integer("u32")
    }

    /// A `u64`, from any integer that fits.
    ///
    /// # Errors
    /// As [`Value::u32`].
    pub fn u64(&self) -> Result<u64> {
        self.integer("u64")
    }

    /// An `i64`, from any integer that fits.
    ///
    /// # Errors
    /// As [`Value::u32`].
    pub fn i64(&self) -> Result<i64> {
        self.integer("i64")
    }

    /// A count or size, from any integer that fits.
    ///
    /// # Errors
    /// As [`Value::u32`].
    pub fn usize(&self) -> Result<usize> {
        self.integer("usize")
    }

    /// A finite `f32`, from either float type.
    ///
    /// # Errors
    /// Another type; NaN, infinity or a number beyond f32.
    pub fn f32(&self) -> Result<f32> {
        match self.scalar("f32").map(|value| value.float_at(0))? {
            Some(x) if (x as f32).is_finite() => Ok(x as f32),
            Some(x) => Err(self.unexpected(&format!("{x}"), "a finite f32")),
            None => Err(self.wrong_type("f32")),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// Another type.
    pub fn bool(&self) -> Result<bool> {
        match self.kind {
            Kind::Bool => Ok(self.bytes[0] != 0),
            _ => Err(self.wrong_type("bool")),
        }
    }

    /// A string of valid UTF-8.
    ///
    /// # Errors
    /// Another type, or other bytes.
    pub fn str(&self) -> Result<&'a str> {
        if self.kind != Kind::String {
            return Err(self.wrong_type("string"));
        }
        self.utf8(&self.bytes[8..])
    }

    /// The strings of an array, as they are.
    ///
    /// # Errors
    /// Another type.
    pub fn byte_strings(&self) -> Result<impl ExactSizeIterator<Item = &'a [u8]> + use<'a>> {
        match (self.kind, self.element) {
            (Kind::Array, Kind::String) => Ok(Strings {
                rest: self.bytes,
                left: self.len,
            }),
            _ => Err(self.wrong_type("array of string")),
        }
    }

    /// The strings of an array, all valid UTF-8.
    ///
    /// # Errors
    /// Another type, or other bytes.
    pub fn strs(&self) -> Result<Vec<&'a str>> {
        self.byte_strings()?.map(|bytes| self.utf8(bytes)).collect()
    }

    /// An array of integers that all fit u32.
    ///
    /// # Errors
    /// Another type, or a number out of range.
    pub fn u32s(&self) -> Result<Vec<u32>> {
        self.integers("u32")
    }

    /// An array of integers that all fit i32.
    ///
    /// # Errors
    /// Another type, or a number out of range.
    pub fn i32s(&self) -> Result<Vec<i32>> {
        self.integers("i32")
    }

    /// An array of integers that all fit usize.
    ///
    /// # Errors
    /// Another type, or a number out of range.
    pub fn usizes(&self) -> Result<Vec<usize>> {
        self.integers("usize")
    }

    /// An array of numbers of any type, rounded to f32. Not checked for NaN or infinity.
    ///
    /// # Errors
    /// Another type.
    pub fn f32s(&self) -> Result<Vec<f32>> {
        let number = |i| {
            let integer = self.integer_at(i).map(|n| n as f32);
            integer.or_else(|| self.float_at(i).map(|x| x as f32))
        };
        match self.kind {
            Kind::Array => (0..self.len).map(number).collect::<Option<Vec<f32>>>(),
            _ => None,
        }
        .ok_or_else(|| self.wrong_type("array of numbers"))
    }

    /// The value as text for people: strings quoted and escaped, arrays and strings cut after about
    /// `limit` characters.
    pub fn display(&self, limit: usize) -> String {
        let one = |i: usize| match (self.integer_at(i), self.float_at(i)) {
            (Some(n), _) => n.to_string(),
            (_, Some(x)) => x.to_string(),
            _ => (self.bytes.get(i) == Some(&1)).to_string(), // only booleans are left
        };
        let quote = |bytes: &[u8]| {
            let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * limit)]);
            let mut cut: String = text.chars().take(limit).flat_map(escaped).collect();
            if text.chars().count() > limit || bytes.len() > 4 * limit {
                cut.push_str("...");
            }
            format!("\"{cut}\"")
        };
        if let Ok(text) = self.byte_strings() {
            return shortened(text.map(quote), self.len, limit);
        }
        match self.kind {
            Kind::Array => shortened((0..self.len).map(one), self.len, limit),
            Kind::String => quote(&self.bytes[8..]),
            Kind::F32 => self
                .float_at(0)
                .map_or_else(String::new, |x| (x as f32).to_string()),
            _ => one(0),
        }
    }

    fn scalar(&self, expected: &str) -> Result<&Self> {
        match self.kind {
            Kind::Array | Kind::String => Err(self.wrong_type(expected)),
            _ => Ok(self),
        }
    }

    fn integer<T: TryFrom<i128>>(&self, expected: &str) -> Result<T> {
        match self.scalar(expected)?.integer_at(0) {
            Some(n) => T::try_from(n).map_err(|_| self.unexpected(&n.to_string(), expected)),
            None => Err(self.wrong_type(expected)),
        }
    }

    fn integers<T: TryFrom<i128>>(&self, expected: &str) -> Result<Vec<T>> {
        if self.kind != Kind::Array {
            return Err(self.wrong_type(&format!("array of {expected}")));
        }
        (0..self.len)
            .map(|i| match self.integer_at(i) {
                Some(n) => {
                    T::try_from(n).map_err(|_| self.unexpected(&format!("{n} at {i}"), expected))
                }
                None => Err(self.wrong_type(&format!("array of {expected}"))),
            })
            .collect()
    }

    /// Element `i` as an integer, if it is of an integer type.
    fn integer_at(&self, i: usize) -> Option<i128> {
        Some(match self.element {
            Kind::U8 => u8::from_le_bytes(self.chunk(i)?).into(),
            Kind::I8 => i8::from_le_bytes(self.chunk(i)?).into(),
            Kind::U16 => u16::from_le_bytes(self.chunk(i)?).into(),
            Kind::I16 => i16::from_le_bytes(self.chunk(i)?).into(),
            Kind::U32 => u32::from_le_bytes(self.chunk(i)?).into(),
            Kind::I32 => i32::from_le_bytes(self.chunk(i)?).into(),
            Kind::U64 => u64::from_le_bytes(self.chunk(i)?).into(),
            Kind::I64 => i64::from_le_bytes(self.chunk(i)?).into(),
            Kind::F32 | Kind::F64 | Kind::Bool | Kind::String | Kind::Array => return None,
        })
    }

    /// Element `i` as a float, if it is of a float type.
    fn float_at(&self, i: usize) -> Option<f64> {
        match self.element {
            Kind::F32 => Some(f32::from_le_bytes(self.chunk(i)?).into()),
            Kind::F64 => Some(f64::from_le_bytes(self.chunk(i)?)),
            _ => None,
        }
    }

    fn chunk<const N: usize>(&self, i: usize) -> Option<[u8; N]> {
        self.bytes.as_chunks().0.get(i).copied()
    }

    fn utf8(&self, bytes: &'a [u8]) -> Result<&'a str> {
        std::str::from_utf8(bytes).map_err(|error| {
            let at = error.valid_up_to();
            self.unexpected(&format!("byte {:#04x} at {at}", bytes[at]), "valid UTF-8")
        })
    }

    fn wrong_type(&self, expected: &str) -> anyhow::Error {
        self.unexpected(&self.type_name(), expected)
    }

    /// An error line of this module's form, for a caller that expected something narrower.
    pub fn unexpected(&self, found: &str, expected: &str) -> anyhow::Error {
        let (file, key) = (self.file, Shown(self.key));
        anyhow!("{file}: key {key}: found {found}, expected {expected}")
    }

    /// The string, held against the one that is known.
    ///
    /// # Errors
    /// Another string, or another type.
    pub fn expect_str(&self, expected: &str) -> Result<()> {
        match self.str()? {
            found if found == expected => Ok(()),
            _ => bail!(self.unexpected(&self.display(60), &format!("{expected:?}"))),
        }
    }
}

/// As inside double quotes, where an apostrophe needs no escape.
fn escaped(c: char) -> Vec<char> {
    match c {
        '\'' => vec![c],
        c => c.escape_debug().collect(),
    }
}

/// `[a, b, c, ... 2048 in all]`: as many items as fit `limit` characters.
fn shortened(items: impl Iterator<Item = String>, len: usize, limit: usize) -> String {
    let mut text = String::from("[");
    for (i, item) in items.enumerate() {
        if text.len() + item.len() > limit && i > 0 {
            return format!("{text}, ... {len} in all]");
        }
        if i > 0 {
            text.push_str(", ");
        }
        text.push_str(&item);
    }
    text + "]"
}

/// Walks strings whose lengths were checked when the file was opened.
struct Strings<'a> {
    rest: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        let (length, rest) = self.rest.split_first_chunk()?;
        let (text, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        self.rest = rest;
        Some(text)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Strings<'_> {}
