//! GGUF, the container format of ggml's models: keys, tensor infos, aligned tensor data.
//!
//! Layout, all little-endian (`docs/gguf.md` of ggml): magic `GGUF`, u32 version, u64 tensor count,
//! u64 key count; each key a string (u64 length, bytes), a u32 value type and a value; each tensor
//! info a string, u32 number of dimensions, u64 dimensions (fastest first), u32 type id and u64
//! offset into the data section, which starts at the next multiple of `general.alignment`.
//!
//! The reader trusts none of it: every count is held against the bytes that are left before
//! anything is allocated, and values are decoded only when asked for.

mod convert;
mod memory;
mod read;
mod rotation;
mod survey;
mod types;
mod value;
mod write;

pub use convert::convert;
pub use memory::Memory;
pub use read::{Gguf, Tensor};
pub use rotation::Rotation;
pub use survey::Survey;
pub use value::{Kind, Scalar, Value};
pub use write::{Writer, remove_unfinished};

use std::fmt;

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
const DEFAULT_ALIGNMENT: u64 = 32;
/// Large enough for huge pages.
const MAX_ALIGNMENT: u64 = 1 << 21;
const ALIGNMENT_KEY: &str = "general.alignment";

/// Far above any real file (hundreds of tensors, dozens of keys); with the limit on names it bounds
/// what a hostile header can make us allocate.
const MAX_TENSORS: u64 = 1 << 16;
const MAX_KEYS: u64 = 1 << 16;
/// The limit in GGUF's description.
const MAX_KEY_NAME: u64 = 65_535;
/// ggml stops at 63 bytes, some forks at 127.
const MAX_TENSOR_NAME: u64 = 127;
/// Elements of an array; the largest vocabularies have a sixteenth of that.
const MAX_ARRAY: u64 = 1 << 22;
const MAX_DIMS: usize = 4;

/// The next multiple of `alignment`, a power of two; `None` past the end of u64.
fn align_up(n: u64, alignment: u64) -> Option<u64> {
    Some(n.checked_add(alignment - 1)? & !(alignment - 1))
}

/// A name from a file, fit for an error line: escaped, and cut after 60 characters.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(60) {
            write!(f, "{}", c.escape_debug())?;
        }
        match chars.next() {
            None => Ok(()),
            Some(_) => f.write_str("..."),
        }
    }
}

#[cfg(test)]
mod tests;
