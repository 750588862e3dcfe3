//! Two-bit codes ("crumbs"), four a byte, slot s in bits 2s and 2s+1.

use anyhow::Result;

use super::check_codes;

/// Transposes a 4x4 matrix of crumbs: slot i of byte s changes places with slot s of byte i.
///
/// Every two-bit layout here differs from the stock order by this step alone: which four bytes
/// enter it, and where the result stands.
#[inline(always)]
pub const fn transpose(x: u32) -> u32 {
    let t = (x ^ (x >> 6)) & 0x00CC_00CC;
    let x = x ^ t ^ (t << 6);
    let t = (x ^ (x >> 12)) & 0x0000_F0F0;
    x ^ t ^ (t << 12)
}

/// Bytes of a strided order from the order of k.
///
/// In the order of k, crumb k stands in slot k%4 of byte k/4. In the strided order, in each run of
/// 16 * `stride` weights, byte m holds weights m, m + 4*stride, m + 8*stride, m + 12*stride. Gives
/// the four bytes of a word of the strided order; `first` is the word's [`first`] byte.
pub(super) fn gather(ordered: &[u8], stride: usize, first: usize) -> [u8; 4] {
    let bytes = std::array::from_fn(|s| ordered[first + s * stride]);
    transpose(u32::from_le_bytes(bytes)).to_le_bytes()
}

/// The inverse of [`gather`]: puts four bytes of the strided order back in the order of k.
pub(super) fn scatter(strided: [u8; 4], stride: usize, first: usize, ordered: &mut [u8]) {
    let bytes = transpose(u32::from_le_bytes(strided)).to_le_bytes();
    for (s, byte) in bytes.into_iter().enumerate() {
        ordered[first + s * stride] = byte;
    }
}

/// The first of the four bytes, `stride` apart, that enter a word of the strided order.
pub(super) fn first(stride: usize, word: usize) -> usize {
    word / stride * 4 * stride + word % stride
}

/// Codes in the order of k.
pub(super) fn unpack<const N: usize>(qs: &[u8]) -> [u8; N] {
    std::array::from_fn(|k| qs[k / 4] >> (2 * (k % 4)) & 3)
}

/// The inverse of [`unpack`]; refuses codes above 3.
pub(super) fn pack<const B: usize>(name: &str, codes: &[u8]) -> Result<[u8; B]> {
    check_codes(name, codes, 3)?;
    let u = |j: usize| codes[j];
    Ok(std::array::from_fn(|b| {
        u(4 * b) | u(4 * b + 1) << 2 | u(4 * b + 2) << 4 | u(4 * b + 3) << 6
    }))
}
