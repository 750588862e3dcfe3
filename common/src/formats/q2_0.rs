//! Q2_0: two-bit codes, a scale for 64 weights (llama.cpp, type 42).

use anyhow::Result;
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{BlockPq2_0, Ternary, crumbs};

/// 64 weights in 18 bytes; code k stands in slot k%4 of byte k/4.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockQ2_0 {
    /// Scale.
    pub d: f16,
    /// Codes, four a byte.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ2_0>() == 18 && align_of::<BlockQ2_0>() == 1);

impl Ternary<64> for BlockQ2_0 {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; 64] {
        crumbs::unpack(&self.qs)
    }

    fn pack(d: f16, codes: &[u8; 64]) -> Result<Self> {
        let qs = crumbs::pack("q2_0", codes)?;
        Ok(Self { d, qs })
    }
}

impl BlockQ2_0 {
    /// The two blocks that hold the same weights as one PQ2_0 block: the scale stands twice.
    pub fn from_pq2_0(block: &BlockPq2_0) -> [Self; 2] {
        [0, 16].map(|at| Self {
            d: block.d,
            qs: std::array::from_fn(|j| block.qs[at + j]),
        })
    }
}
