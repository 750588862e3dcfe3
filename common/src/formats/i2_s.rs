//! I2_S: two-bit codes, one scale a tensor (bitnet.cpp).

use anyhow::{Result, ensure};

use super::codes::{Codes, collect};

/// bitnet.cpp's group on x86. In a group of G weights, byte j holds weights j, j + G/4, j + G/2,
/// j + 3G/4, the first in its top two bits.
pub const GROUP_X86: usize = 128;
/// Its group on Arm.
pub const GROUP_ARM: usize = 64;

/// Bytes after the codes: the scale as f32, then zeros.
const TAIL: usize = 32;

/// A matrix as bitnet.cpp stores it; rows are padded to whole groups.
#[derive(Clone, Debug)]
pub struct I2S {
    rows: usize,
    cols: usize,
    group: usize,
    bytes: Vec<u8>,
}

impl I2S {
    /// # Errors
    /// A group other than [`GROUP_X86`] and [`GROUP_ARM`].
    pub fn pack(codes: &Codes, scale: f32, group: usize) -> Result<Self> {
        ensure!(
            group == GROUP_X86 || group == GROUP_ARM,
            "i2_s: a group of {group} weights, expected {GROUP_X86} or {GROUP_ARM}"
        );
        let (rows, cols) = (codes.rows(), codes.cols());
        let stride = group / 4;
        let row_bytes = cols.next_multiple_of(group) / 4;
        let mut bytes = Vec::with_capacity(rows * row_bytes + TAIL);
        for r in 0..rows {
            bytes.extend((0..row_bytes).map(|at| {
                let k = at / stride * group + at % stride;
                (0..4).fold(0, |byte, s| byte << 2 | codes.at(r, k + s * stride))
            }));
        }
        bytes.extend(scale.to_le_bytes());
        bytes.resize(rows * row_bytes + TAIL, 0);
        Ok(Self {
            rows,
            cols,
            group,
            bytes,
        })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights a row, without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Weights a row, with padding.
    pub fn padded_cols(&self) -> usize {
        self.cols.next_multiple_of(self.group)
    }

    /// The packed codes, `[row][group][byte]`.
    pub fn packed(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - TAIL]
    }

    /// The scale of the tensor.
    pub fn scale(&self) -> f32 {
        bytemuck::pod_read_unaligned(&self.bytes[self.packed().len()..][..4])
    }

    /// Codes, scale and tail, as in a file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The codes, without padding.
    pub fn codes(&self) -> Vec<u8> {
        let (group, stride) = (self.group, self.group / 4);
        let row_bytes = self.padded_cols() / 4;
        collect(self.rows, self.cols, |r, k| {
            let byte = self.bytes[r * row_bytes + k / group * stride + k % stride];
            byte >> (6 - 2 * (k % group / stride)) & 3
        })
    }
}
