//! Q8_K: the activations that every ternary format is multiplied by (llama.cpp, type 15).

use bytemuck::{Pod, Zeroable};

use super::{Block, q4_0::first_of_largest_magnitude};

/// 256 activations in 292 bytes, aligned to 4. An activation is `code * d`. Never read from a file.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8K {
    /// Scale.
    pub d: f32,
    /// Codes, -127 to 127.
    pub qs: [i8; 256],
    /// Sums of 16 codes each.
    pub bsums: [i16; 16],
}

const _: () = assert!(size_of::<BlockQ8K>() == 292);

impl BlockQ8K {
    /// Rounds activations as ggml's reference does: the first value of largest magnitude becomes
    /// -127, ties go to even, d is the reciprocal of the multiplier.
    ///
    /// A block of zeros, or of values so small (below 4e-37) that the multiplier would overflow,
    /// has d = 0. A block that holds a NaN or an infinity has d = NaN and codes 0, so that every
    /// result it enters is NaN.
    pub fn quantize(x: &[f32; 256]) -> Self {
        let max = first_of_largest_magnitude(x);
        let iscale = -127.0 / max;
        if !max.is_finite() {
            return Self {
                d: f32::NAN,
                ..Self::zeroed()
            };
        }
        if !iscale.is_finite() {
            return Self::zeroed();
        }
        // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits: the same on
        // every machine, and no call to a rounding function where the instruction is missing.
        let qs = x.map(|x| {
            let bits = (x * iscale + 12_582_912.0).to_bits() & 0x7F_FFFF;
            (bits as i32 - 0x40_0000).min(127) as i8
        });
        Self::pack(1.0 / iscale, &qs)
    }

    /// A block of these codes, with their sums.
    pub fn pack(d: f32, codes: &[i8; 256]) -> Self {
        let sum = |run: &[i8; 16]| run.iter().map(|&q| i16::from(q)).sum();
        let bsums = std::array::from_fn(|i| sum(&codes.as_chunks().0[i]));
        Self {
            d,
            qs: *codes,
            bsums,
        }
    }
}

impl Block<256> for BlockQ8K {
    fn dequantize(&self) -> [f32; 256] {
        self.qs.map(|q| f32::from(q) * self.d)
    }
}
