//! The fast Walsh-Hadamard transform that rotates activations into the basis of the stored weights.
//!
//! H\[r\]\[c\] = (-1)^popcount(r & c) / sqrt(n): normalized Sylvester order, its own inverse. The stages run from the largest
//! stride down, always in this order, so that the bits do not depend on the vector width.

use super::math::vectorized;

/// Strides below this are done inside one array of that many values.
const INNER: usize = 16;

/// The transform of one block, a power of two long, without the factor.
#[inline(always)]
fn butterflies(x: &mut [f32]) {
    let mut stride = x.len() / 2;
    while stride >= INNER {
        for pair in x.chunks_exact_mut(2 * stride) {
            let (a, b) = pair.split_at_mut(stride);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride /= 2;
    }
    let (chunks, rest) = x.as_chunks_mut::<INNER>();
    for chunk in chunks {
        inner::<8>(chunk);
        inner::<4>(chunk);
        inner::<2>(chunk);
        inner::<1>(chunk);
    }
    // A block shorter than `INNER`: the whole of it.
    while stride > 0 && !rest.is_empty() {
        for pair in rest.chunks_exact_mut(2 * stride) {
            let (a, b) = pair.split_at_mut(stride);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride /= 2;
    }
}

/// One stage within a vector: each place gets its partner plus or minus itself.
#[inline(always)]
fn inner<const STRIDE: usize>(x: &mut [f32; INNER]) {
    let mut partner = [0f32; INNER];
    let mut signed = [0f32; INNER];
    for l in 0..INNER {
        partner[l] = x[l ^ STRIDE];
        signed[l] = if l & STRIDE == 0 { x[l] } else { -x[l] };
    }
    for l in 0..INNER {
        x[l] = partner[l] + signed[l];
    }
}

vectorized! {
    /// x = H (s * x), block by block; `signs` (+-1, empty for none) has the length of `x`, a whole number of blocks, and
    /// `block` is a power of two.
    pub fn rotate<V>(x: &mut [f32], signs: &[f32], block: usize) {
        for (x, s) in x.iter_mut().zip(signs) {
            *x *= s;
        }
        let factor = 1.0 / (block as f32).sqrt();
        for x in x.chunks_exact_mut(block) {
            butterflies(x);
            for x in x {
                *x *= factor;
            }
        }
    }

    /// x = s * (H x), block by block: the inverse of [`rotate`].
    pub fn rotate_back<V>(x: &mut [f32], signs: &[f32], block: usize) {
        let factor = 1.0 / (block as f32).sqrt();
        for x in x.chunks_exact_mut(block) {
            butterflies(x);
            for x in x {
                *x *= factor;
            }
        }
        for (x, s) in x.iter_mut().zip(signs) {
            *x *= s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::math::Simd;

    /// Pseudo-random values in [-1, 1).
    fn values(n: usize) -> Vec<f32> {
        let mut x = 12345u32;
        let next = |_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(next).collect()
    }

    #[test]
    fn it_is_the_matrix_of_the_definition() {
        for block in [1usize, 2, 4, 8, 16, 32, 128, 256, 1024] {
            let x = values(2 * block);
            let signs: Vec<f32> = values(2 * block).iter().map(|v| v.signum()).collect();
            let mut y = x.clone();
            rotate(Simd::best(), &mut y, &signs, block);
            for (i, y) in y.iter().enumerate() {
                let (b, r) = (i / block * block, i % block);
                let wanted: f64 = (0..block)
                    .map(|c| {
                        let h = if (r & c).count_ones() % 2 == 0 {
                            1.0
                        } else {
                            -1.0
                        };
                        h * f64::from(signs[b + c] * x[b + c])
                    })
                    .sum::<f64>()
                    / (block as f64).sqrt();
                assert!(
                    (f64::from(*y) - wanted).abs() < 1e-5,
                    "block {block}, value {i}: {y} {wanted}"
                );
            }
        }
    }

    #[test]
    fn back_and_forth_is_the_identity_up_to_rounding() {
        let (x, signs) = (
            values(1024),
            values(1024).iter().map(|v| v.signum()).collect::<Vec<_>>(),
        );
        let mut y = x.clone();
        rotate(Simd::best(), &mut y, &signs, 256);
        rotate_back(Simd::best(), &mut y, &signs, 256);
        assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-5));
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        for block in [4, 16, 128, 1024] {
            let run = |simd| {
                let mut x = values(2048);
                rotate(simd, &mut x, &[], block);
                x
            };
            let wanted = run(Simd::available()[0]);
            for simd in Simd::available() {
                assert_eq!(run(simd), wanted, "{simd}, block {block}");
            }
        }
    }
}
