//! PQ2_0: two-bit codes, a scale for 128 weights (GGUF type 142).

use anyhow::Result;
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{Ternary, crumbs};

/// 128 weights in 34 bytes; code k stands in slot k%4 of byte k/4.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockPq2_0 {
    /// Scale.
    pub d: f16,
    /// Codes, four a byte.
    pub qs: [u8; 32],
}

const _: () = assert!(size_of::<BlockPq2_0>() == 34 && align_of::<BlockPq2_0>() == 1);

impl Ternary<128> for BlockPq2_0 {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; 128] {
        crumbs::unpack(&self.qs)
    }

    fn pack(d: f16, codes: &[u8; 128]) -> Result<Self> {
        let qs = crumbs::pack("pq2_0", codes)?;
        Ok(Self { d, qs })
    }
}
