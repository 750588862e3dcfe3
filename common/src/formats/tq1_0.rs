//! TQ1_0: base-3 codes, a scale for 256 weights (llama.cpp, type 34).

use anyhow::Result;
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{
    Ternary,
    base3::{self, Stage},
};

/// 256 weights in 54 bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockTq1_0 {
    /// Bytes of five digits: a stage of 32 bytes, then one of 16.
    pub qs: [u8; 48],
    /// Bytes of four digits, shifted up by one power of three.
    pub qh: [u8; 4],
    /// Scale.
    pub d: f16,
}

const _: () = assert!(size_of::<BlockTq1_0>() == 54 && align_of::<BlockTq1_0>() == 1);

const STAGES: [Stage; 3] = [
    Stage {
        bytes: 32,
        digits: 5,
    },
    Stage {
        bytes: 16,
        digits: 5,
    },
    Stage {
        bytes: 4,
        digits: 4,
    },
];

impl Ternary<256> for BlockTq1_0 {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; 256] {
        base3::unpack(&STAGES, &bytemuck::bytes_of(self)[..52])
    }

    fn pack(d: f16, codes: &[u8; 256]) -> Result<Self> {
        let bytes: [u8; 52] = base3::pack("tq1_0", &STAGES, codes)?;
        Ok(Self {
            qs: std::array::from_fn(|j| bytes[j]),
            qh: std::array::from_fn(|j| bytes[48 + j]),
            d,
        })
    }
}
