//! Base-3 packing: five ternary digits a byte (ggml's TQ1_0, from compilade's "ternary packing").
//!
//! Five digits, most significant first, make a number q below 243. The byte stores q/243 as a
//! fraction of 256, rounded up, so that a digit is had by multiplying, not dividing.

use anyhow::Result;

use super::check_codes;

/// The byte of five digits, most significant first: ceil(q * 256 / 243).
pub const fn encode(digits: [u8; 5]) -> u8 {
    let mut q = 0u16;
    let mut n = 0;
    while n < 5 {
        q = q * 3 + digits[n] as u16;
        n += 1;
    }
    (q * 256).div_ceil(243) as u8
}

/// Digit `n` (0 is the most significant) of a stored byte.
pub const fn digit(byte: u8, n: usize) -> u8 {
    const POW3: [u8; 5] = [1, 3, 9, 27, 81];
    ((byte.wrapping_mul(POW3[n]) as u16 * 3) >> 8) as u8
}

/// A run of bytes in a block: `bytes` bytes of `digits` digits each. With c bytes, byte m holds
/// elements m, m+c, m+2c, ... of the run, most significant first.
pub(super) struct Stage {
    pub bytes: usize,
    pub digits: usize,
}

/// Calls `f(byte index, digit, k)` for each weight of a block.
fn places(stages: &[Stage], mut f: impl FnMut(usize, usize, usize)) {
    let (mut at, mut k) = (0, 0);
    for stage in stages {
        for n in 0..stage.digits {
            for m in 0..stage.bytes {
                f(at + m, n, k);
                k += 1;
            }
        }
        at += stage.bytes;
    }
}

pub(super) fn unpack<const N: usize>(stages: &[Stage], bytes: &[u8]) -> [u8; N] {
    let mut codes = [0; N];
    places(stages, |b, n, k| codes[k] = digit(bytes[b], n));
    codes
}

pub(super) fn pack<const B: usize>(name: &str, stages: &[Stage], codes: &[u8]) -> Result<[u8; B]> {
    check_codes(name, codes, 2)?;
    let mut digits = [[0; 5]; B];
    places(stages, |b, n, k| digits[b][n] = codes[k]);
    Ok(digits.map(encode))
}
