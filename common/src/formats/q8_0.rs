//! Q8_0: eight-bit codes, a scale for 32 weights (llama.cpp, type 8).

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{Block, q4_0::first_of_largest_magnitude};

/// 32 weights in 34 bytes. A weight is `code * d`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockQ8_0 {
    /// Scale.
    pub d: f16,
    /// Codes.
    pub qs: [i8; 32],
}

const _: () = assert!(size_of::<BlockQ8_0>() == 34 && align_of::<BlockQ8_0>() == 1);

impl BlockQ8_0 {
    /// Rounds weights or activations as ggml's reference does: halves away from zero.
    pub fn quantize(x: &[f32; 32]) -> Self {
        let d = first_of_largest_magnitude(x).abs() / 127.0;
        let id = if d != 0.0 { 1.0 / d } else { 0.0 };
        Self {
            d: f16::from_f32(d),
            qs: x.map(|x| (x * id).round() as i8),
        }
    }
}

impl Block<32> for BlockQ8_0 {
    fn dequantize(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        self.qs.map(|q| f32::from(q) * d)
    }
}
