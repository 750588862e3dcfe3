//! PTQ1_0: base-3 codes, a scale for 128 weights (GGUF type 143).

use anyhow::Result;
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{
    Ternary,
    base3::{self, Stage},
};

/// 128 weights in 28 bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockPtq1_0 {
    /// Bytes of five digits: a stage of 16 bytes, then one of 8.
    pub qs: [u8; 24],
    /// Bytes of four digits, shifted up by one power of three.
    pub qh: [u8; 2],
    /// Scale.
    pub d: f16,
}

const _: () = assert!(size_of::<BlockPtq1_0>() == 28 && align_of::<BlockPtq1_0>() == 1);

const STAGES: [Stage; 3] = [
    Stage {
        bytes: 16,
        digits: 5,
    },
    Stage {
        bytes: 8,
        digits: 5,
    },
    Stage {
        bytes: 2,
        digits: 4,
    },
];

impl Ternary<128> for BlockPtq1_0 {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; 128] {
        base3::unpack(&STAGES, &bytemuck::bytes_of(self)[..26])
    }

    fn pack(d: f16, codes: &[u8; 128]) -> Result<Self> {
        let bytes: [u8; 26] = base3::pack("ptq1_0", &STAGES, codes)?;
        Ok(Self {
            qs: std::array::from_fn(|j| bytes[j]),
            qh: std::array::from_fn(|j| bytes[24 + j]),
            d,
        })
    }
}
