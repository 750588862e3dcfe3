//! TQ2_0: two-bit codes, a scale for 256 weights (llama.cpp, type 35).

use anyhow::Result;
use bytemuck::{Pod, Zeroable};
use half::f16;

use super::{Ternary, crumbs};

/// 256 weights in 66 bytes. In each half of 32 bytes, byte m holds weights m, m+32, m+64, m+96 of
/// that half's 128.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, packed)]
pub struct BlockTq2_0 {
    /// Codes, four a byte.
    pub qs: [u8; 64],
    /// Scale.
    pub d: f16,
}

const _: () = assert!(size_of::<BlockTq2_0>() == 66 && align_of::<BlockTq2_0>() == 1);

/// Words of four bytes in a half: byte m and byte m of the next weight stand 8 words apart.
const STRIDE: usize = 8;

/// The codes of a TQ2_0 block in the order of k, four a byte.
#[inline(always)]
pub(super) fn to_order_of_k(qs: &[u8], ordered: &mut [u8]) {
    for (w, word) in qs.as_chunks().0.iter().enumerate() {
        crumbs::scatter(*word, STRIDE, crumbs::first(STRIDE, w), ordered);
    }
}

/// The inverse of [`to_order_of_k`].
pub(super) fn from_order_of_k(ordered: &[u8], qs: &mut [u8]) {
    for (w, word) in qs.as_chunks_mut().0.iter_mut().enumerate() {
        *word = crumbs::gather(ordered, STRIDE, crumbs::first(STRIDE, w));
    }
}

impl Ternary<256> for BlockTq2_0 {
    fn scale(&self) -> f16 {
        self.d
    }

    fn codes(&self) -> [u8; 256] {
        let mut ordered = [0; 64];
        to_order_of_k(&self.qs, &mut ordered);
        crumbs::unpack(&ordered)
    }

    fn pack(d: f16, codes: &[u8; 256]) -> Result<Self> {
        let mut qs = [0; 64];
        from_order_of_k(&crumbs::pack::<64>("tq2_0", codes)?, &mut qs);
        Ok(Self { qs, d })
    }
}
