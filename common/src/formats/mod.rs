//! Block formats: what is stored, byte by byte. One file a format; pack and unpack in plain Rust.
//!
//! Blocks are `#[repr(C, packed)]`: a slice of bytes casts to a slice of blocks at any address.
//! A ternary weight `w` is the code `u = w + 1`, so -1, 0, +1 are 0, 1, 2. Two-bit formats can also
//! hold the code 3 (value +2): it is kept and reported, never masked away.

pub mod base3;
pub mod bitcos;
mod codes;
pub mod crumbs;
pub mod i2_s;
pub mod layout;
mod pq2_0;
mod ptq1_0;
mod q2_0;
mod q4_0;
mod q8_0;
mod q8_k;
mod repack;
pub mod tl1;
pub mod tl2;
mod tq1_0;
mod tq2_0;
pub mod trits5;
pub mod wide_b3;

use std::fmt;

use anyhow::{Result, bail, ensure};
use bytemuck::Pod;
use half::{bf16, f16};

pub use bitcos::Bitcos;
pub use codes::Codes;
pub use i2_s::I2S;
pub use layout::{Layout, TileRows};
pub use pq2_0::BlockPq2_0;
pub use ptq1_0::BlockPtq1_0;
pub use q2_0::BlockQ2_0;
pub use q4_0::BlockQ4_0;
pub use q8_0::BlockQ8_0;
pub use q8_k::BlockQ8K;
pub use tl1::Tl1;
pub use tl2::Tl2;
pub use tq1_0::BlockTq1_0;
pub use tq2_0::BlockTq2_0;
pub use trits5::{BlockTrits5, BlockTrits160, BlockTrits640};

/// A block of `N` weights along a row, as a file stores it.
pub trait Block<const N: usize>: Pod {
    /// The weights as numbers, in order of k.
    fn dequantize(&self) -> [f32; N];
}

/// A block of `N` codes that share one scale.
pub trait Ternary<const N: usize>: Pod {
    /// The scale `d` of the block: a weight is `(code - 1) * d`.
    fn scale(&self) -> f16;
    /// The codes in order of k; a two-bit format may hold 3.
    fn codes(&self) -> [u8; N];
    /// A block that holds exactly these codes.
    ///
    /// # Errors
    /// A code that the format cannot store: above 2 in base 3, above 3 in two bits.
    fn pack(d: f16, codes: &[u8; N]) -> Result<Self>;
}

impl<const N: usize, B: Ternary<N>> Block<N> for B {
    fn dequantize(&self) -> [f32; N] {
        let d = self.scale().to_f32();
        self.codes().map(|u| (f32::from(u) - 1.0) * d)
    }
}

/// The same weights in another ternary format of the same block size (PQ2_0 and PTQ1_0).
///
/// # Errors
/// Code 3, which base 3 cannot hold.
pub fn convert<A: Ternary<N>, B: Ternary<N>, const N: usize>(block: &A) -> Result<B> {
    B::pack(block.scale(), &block.codes())
}

/// A tensor type of a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // each name is its own documentation
pub enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q8_0,
    Tq1_0,
    Tq2_0,
    Q2_0,
    Pq2_0,
    Ptq1_0,
}

impl Format {
    /// Every format, in the order of the enum.
    pub const ALL: [Format; 10] = [
        Format::F32,
        Format::F16,
        Format::Bf16,
        Format::Q4_0,
        Format::Q8_0,
        Format::Tq1_0,
        Format::Tq2_0,
        Format::Q2_0,
        Format::Pq2_0,
        Format::Ptq1_0,
    ];

    /// (ggml type id, lower-case name, weights a block, bytes a block)
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Format::F32 => (0, "f32", 1, 4),
            Format::F16 => (1, "f16", 1, 2),
            Format::Bf16 => (30, "bf16", 1, 2),
            Format::Q4_0 => (2, "q4_0", 32, size_of::<BlockQ4_0>()),
            Format::Q8_0 => (8, "q8_0", 32, size_of::<BlockQ8_0>()),
            Format::Tq1_0 => (34, "tq1_0", 256, size_of::<BlockTq1_0>()),
            Format::Tq2_0 => (35, "tq2_0", 256, size_of::<BlockTq2_0>()),
            Format::Q2_0 => (42, "q2_0", 64, size_of::<BlockQ2_0>()),
            Format::Pq2_0 => (142, "pq2_0", 128, size_of::<BlockPq2_0>()),
            Format::Ptq1_0 => (143, "ptq1_0", 128, size_of::<BlockPtq1_0>()),
        }
    }

    /// The type id in a GGUF tensor info.
    pub const fn ggml_id(self) -> u32 {
        self.facts().0
    }

    /// The format of a type id, if it is one this crate reads. Ids collide in the wild: the caller
    /// must check that the size fits.
    pub fn from_ggml_id(id: u32) -> Option<Format> {
        Self::ALL.into_iter().find(|f| f.ggml_id() == id)
    }

    /// Lower-case name, `pq2_0`.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// The format of a lower-case name.
    pub fn from_name(name: &str) -> Option<Format> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Weights a block: the group that shares a scale.
    pub const fn block_weights(self) -> usize {
        self.facts().2
    }

    /// Bytes a block.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Whether the weights are codes -1, 0, +1 (and perhaps +2) times a scale a block.
    pub const fn is_ternary(self) -> bool {
        matches!(
            self,
            Format::Tq1_0 | Format::Tq2_0 | Format::Q2_0 | Format::Pq2_0 | Format::Ptq1_0
        )
    }

    /// Bytes of a row of `cols` weights.
    ///
    /// # Errors
    /// A length that is no multiple of the block, or too large.
    pub fn row_bytes(self, cols: usize) -> Result<usize> {
        let (_, name, weights, bytes) = self.facts();
        ensure!(
            cols.is_multiple_of(weights),
            "{name}: a row of {cols} weights is not a multiple of the block of {weights}"
        );
        match (cols / weights).checked_mul(bytes) {
            Some(n) => Ok(n),
            None => bail!("{name}: a row of {cols} weights is too large for this machine"),
        }
    }

    /// Bytes of a matrix of `rows` rows of `cols` weights.
    ///
    /// # Errors
    /// As [`Format::row_bytes`].
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Result<usize> {
        match self.row_bytes(cols)?.checked_mul(rows) {
            Some(n) => Ok(n),
            None => bail!("{self}: {rows} rows of {cols} weights are too large for this machine"),
        }
    }

    fn check(self, bytes: &[u8], weights: usize) -> Result<()> {
        let expected = self.row_bytes(weights)?;
        ensure!(
            bytes.len() == expected,
            "{self}: {weights} weights take {expected} bytes, found {}",
            bytes.len()
        );
        Ok(())
    }

    /// The weights as numbers; `out` has one place for each.
    ///
    /// # Errors
    /// Lengths that do not fit together.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        fn run<B: Block<N>, const N: usize>(bytes: &[u8], out: &mut [f32]) {
            let blocks: &[B] = bytemuck::cast_slice(bytes);
            for (block, out) in blocks.iter().zip(out.as_chunks_mut().0) {
                *out = block.dequantize();
            }
        }
        fn plain<T: Pod + Into<f32>>(bytes: &[u8], out: &mut [f32]) {
            for (x, out) in bytes.chunks_exact(size_of::<T>()).zip(out) {
                *out = bytemuck::pod_read_unaligned::<T>(x).into();
            }
        }
        self.check(bytes, out.len())?;
        match self {
            Format::F32 => plain::<f32>(bytes, out),
            Format::F16 => plain::<f16>(bytes, out),
            Format::Bf16 => plain::<bf16>(bytes, out),
            Format::Q4_0 => run::<BlockQ4_0, 32>(bytes, out),
            Format::Q8_0 => run::<BlockQ8_0, 32>(bytes, out),
            Format::Tq1_0 => run::<BlockTq1_0, 256>(bytes, out),
            Format::Tq2_0 => run::<BlockTq2_0, 256>(bytes, out),
            Format::Q2_0 => run::<BlockQ2_0, 64>(bytes, out),
            Format::Pq2_0 => run::<BlockPq2_0, 128>(bytes, out),
            Format::Ptq1_0 => run::<BlockPtq1_0, 128>(bytes, out),
        }
        Ok(())
    }

    /// The codes and block scales of ternary weights: one place in `codes` for each weight, one in
    /// `scales` for each block.
    ///
    /// # Errors
    /// Lengths that do not fit together; a format that is not ternary.
    pub fn unpack(self, bytes: &[u8], codes: &mut [u8], scales: &mut [f16]) -> Result<()> {
        fn run<B: Ternary<N>, const N: usize>(bytes: &[u8], codes: &mut [u8], d: &mut [f16]) {
            let blocks: &[B] = bytemuck::cast_slice(bytes);
            for ((block, out), d) in blocks.iter().zip(codes.as_chunks_mut().0).zip(d) {
                (*d, *out) = (block.scale(), block.codes());
            }
        }
        self.check(bytes, codes.len())?;
        self.check_scales(codes.len(), scales.len())?;
        match self {
            Format::Tq1_0 => run::<BlockTq1_0, 256>(bytes, codes, scales),
            Format::Tq2_0 => run::<BlockTq2_0, 256>(bytes, codes, scales),
            Format::Q2_0 => run::<BlockQ2_0, 64>(bytes, codes, scales),
            Format::Pq2_0 => run::<BlockPq2_0, 128>(bytes, codes, scales),
            Format::Ptq1_0 => run::<BlockPtq1_0, 128>(bytes, codes, scales),
            _ => bail!("{self}: not a ternary format"),
        }
        Ok(())
    }

    /// The inverse of [`Format::unpack`].
    ///
    /// # Errors
    /// As there; and a code that the format cannot store.
    pub fn pack(self, codes: &[u8], scales: &[f16], bytes: &mut [u8]) -> Result<()> {
        fn run<B: Ternary<N>, const N: usize>(u: &[u8], d: &[f16], bytes: &mut [u8]) -> Result<()> {
            let blocks: &mut [B] = bytemuck::cast_slice_mut(bytes);
            for ((block, u), d) in blocks.iter_mut().zip(u.as_chunks().0).zip(d) {
                *block = B::pack(*d, u)?;
            }
            Ok(())
        }
        self.check(bytes, codes.len())?;
        self.check_scales(codes.len(), scales.len())?;
        match self {
            Format::Tq1_0 => run::<BlockTq1_0, 256>(codes, scales, bytes),
            Format::Tq2_0 => run::<BlockTq2_0, 256>(codes, scales, bytes),
            Format::Q2_0 => run::<BlockQ2_0, 64>(codes, scales, bytes),
            Format::Pq2_0 => run::<BlockPq2_0, 128>(codes, scales, bytes),
            Format::Ptq1_0 => run::<BlockPtq1_0, 128>(codes, scales, bytes),
            _ => bail!("{self}: not a ternary format"),
        }
    }

    fn check_scales(self, weights: usize, scales: usize) -> Result<()> {
        let expected = weights / self.block_weights();
        ensure!(
            scales == expected,
            "{self}: {weights} weights take {expected} scales, found {scales}"
        );
        Ok(())
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Refuses codes above `max` with one line that names the place.
fn check_codes(name: &str, codes: &[u8], max: u8) -> Result<()> {
    match codes.iter().position(|&u| u > max) {
        None => Ok(()),
        Some(k) => bail!(
            "{name}: code {} at weight {k} of the block, expected 0 to {max}",
            codes[k]
        ),
    }
}

#[cfg(test)]
mod tests;
