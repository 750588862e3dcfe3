//! Q4_0: four-bit codes, a scale for 32 weights (llama.cpp, type 2).

use bytemuck::{Pod, Zeroable};
use half::f16;

use super::Block;

/// 32 weights in 18 bytes: byte j holds code j in its low half and code j+16 in its high half. A
/// weight is `(code - 8) * d`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockQ4_0 {
    /// Scale.
    pub d: f16,
    /// Codes, two a byte.
    pub qs: [u8; 16],
}

const _: () = assert!(size_of::<BlockQ4_0>() == 18 && align_of::<BlockQ4_0>() == 1);

impl BlockQ4_0 {
    /// Rounds weights as ggml's reference does: the value of largest magnitude becomes code 0.
    pub fn quantize(x: &[f32; 32]) -> Self {
        let d = first_of_largest_magnitude(x) / -8.0;
        let id = if d != 0.0 { 1.0 / d } else { 0.0 };
        let codes = x.map(|x| ((x * id + 8.5) as u8).min(15));
        Self::pack(f16::from_f32(d), &codes)
    }

    /// A block of codes 0 to 15; only the low four bits of each are stored.
    pub fn pack(d: f16, codes: &[u8; 32]) -> Self {
        let qs = std::array::from_fn(|j| codes[j] & 15 | codes[j + 16] << 4);
        Self { d, qs }
    }

    /// The codes in order of k.
    pub fn codes(&self) -> [u8; 32] {
        std::array::from_fn(|k| self.qs[k % 16] >> (k / 16 * 4) & 15)
    }
}

impl Block<32> for BlockQ4_0 {
    fn dequantize(&self) -> [f32; 32] {
        let d = self.d.to_f32();
        self.codes().map(|u| (f32::from(u) - 8.0) * d)
    }
}

/// The signed value of largest magnitude, the first one of equals; a NaN is larger than all.
///
/// Magnitudes are compared as integers, which has the order of the floats and vectorizes.
pub(super) fn first_of_largest_magnitude<const N: usize>(x: &[f32; N]) -> f32 {
    let bits = |x: f32| x.abs().to_bits();
    let max = x.iter().fold(0, |max, &x| bits(x).max(max));
    x.iter().copied().find(|&x| bits(x) == max).unwrap_or(0.0)
}
