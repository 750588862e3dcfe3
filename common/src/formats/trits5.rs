//! Five trits a byte and nothing else: 1.6 bits a weight, and a scale for a group of 5B weights.
//!
//! PTQ1_0 spends 1.625 bits on codes because 128 is no multiple of 5. Here the group is: 160
//! weights in 32 bytes, 320 in 64, 640 in 128.

use anyhow::{Result, ensure};
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{
    Ternary,
    base3::{self, Stage},
    codes::Codes,
};

/// N = 5 * B weights in B + 2 bytes; byte m holds weights m, m + B, ... m + 4B.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockTrits5<const N: usize, const B: usize> {
    /// Codes, five a byte.
    pub qs: [u8; B],
    /// Scale.
    pub d: f16,
}

/// 160 weights in 34 bytes.
pub type BlockTrits160 = BlockTrits5<160, 32>;
/// 640 weights in 130 bytes: 1.625 bits a weight, scale included.
pub type BlockTrits640 = BlockTrits5<640, 128>;

const _: () = assert!(size_of::<BlockTrits160>() == 34 && size_of::<BlockTrits640>() == 130);

impl<const N: usize, const B: usize> BlockTrits5<N, B> {
    const STAGE: [Stage; 1] = {
        assert!(N == 5 * B, "five trits a byte");
        [Stage {
            bytes: B,
            digits: 5,
        }]
    };

    /// The blocks of a matrix, `[row][block]`; rows are padded with zero weights to whole blocks.
    ///
    /// # Errors
    /// A number of scales other than one for each block.
    pub fn pack_matrix(codes: &Codes, scales: &[f16]) -> Result<Vec<Self>> {
        codes.check_scales("trits5", N, scales.len())?;
        let blocks = codes.cols().div_ceil(N);
        scales
            .iter()
            .enumerate()
            .map(|(i, &d)| {
                let block = std::array::from_fn(|j| codes.at(i / blocks, i % blocks * N + j));
                Self::pack(d, &block)
            })
            .collect()
    }

    /// The codes of a matrix of `cols` weights a row, without padding.
    ///
    /// # Errors
    /// A number of blocks that is not that of whole rows.
    pub fn unpack_matrix(blocks: &[Self], cols: usize) -> Result<Vec<u8>> {
        let a_row = cols.div_ceil(N);
        ensure!(
            a_row > 0 && blocks.len().is_multiple_of(a_row),
            "trits5: a row of {cols} weights takes {a_row} blocks, found {}",
            blocks.len()
        );
        let row = |row: &[Self]| {
            let codes: Vec<u8> = row.iter().flat_map(|b| b.codes()).collect();
            codes.into_iter().take(cols)
        };
        Ok(blocks.chunks_exact(a_row).flat_map(row).collect())
    }
}

impl<const N: usize, const B: usize> Ternary<N> for BlockTrits5<N, B> {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; N] {
        base3::unpack(&Self::STAGE, &bytemuck::bytes_of(self)[..B])
    }

    fn pack(d: f16, codes: &[u8; N]) -> Result<Self> {
        let qs = base3::pack("trits5", &Self::STAGE, codes)?;
        Ok(Self { qs, d })
    }
}
