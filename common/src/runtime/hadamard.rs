//! The fast Walsh-Hadamard transform that rotates activations into the basis of the stored weights.
//!
//! H\[r\]\[c\] = (-1)^popcount(r & c) / sqrt(n): normalized Sylvester order, its own inverse. The stages run from the largest
//! stride down, always in this order, so that the bits do not depend on the vector width.

use super::lanes::{LANES, Lanes};
use super::math::vectorized;

/// x = f (H x) for one block, a power of two long; f makes H normal.
#[inline(always)]
fn transform<V: Lanes>(x: &mut [f32]) {
    let factor = 1.0 / (x.len() as f32).sqrt();
    if x.len() < LANES {
        short(x, factor);
        return;
    }
    let (x, _) = x.as_chunks_mut::<LANES>();
    // In vectors.
    let mut stride = x.len() / 2;
    while stride >= 2 {
        for x in x.chunks_exact_mut(2 * stride) {
            two_stages::<V>(x);
        }
        stride /= 4;
    }
    if stride == 1 {
        for pair in x.as_chunks_mut::<2>().0 {
            let (a, b) = (V::load(&pair[0]), V::load(&pair[1]));
            a.add(b).store(&mut pair[0]);
            a.sub(b).store(&mut pair[1]);
        }
    }
    for x in x {
        let v = stage::<V, 8>(V::load(x));
        let v = stage::<V, 4>(v);
        let v = stage::<V, 2>(v);
        let v = stage::<V, 1>(v);
        v.mul(V::splat(factor)).store(x);
    }
}

/// The stages of half and of a quarter of the length of x, with one walk through memory.
#[inline(always)]
fn two_stages<V: Lanes>(x: &mut [[f32; LANES]]) {
    let (front, back) = x.split_at_mut(x.len() / 2);
    let (a, b) = front.split_at_mut(front.len() / 2);
    let (c, d) = back.split_at_mut(back.len() / 2);
    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
        let (va, vb, vc, vd) = (V::load(a), V::load(b), V::load(c), V::load(d));
        let (va, vc) = (va.add(vc), va.sub(vc));
        let (vb, vd) = (vb.add(vd), vb.sub(vd));
        va.add(vb).store(a);
        va.sub(vb).store(b);
        vc.add(vd).store(c);
        vc.sub(vd).store(d);
    }
}

/// One stage within a vector: each place gets its partner plus or minus itself.
#[inline(always)]
fn stage<V: Lanes, const STRIDE: usize>(v: V) -> V {
    let mut signs = [1.0; LANES];
    for (l, sign) in signs.iter_mut().enumerate() {
        if l & STRIDE != 0 {
            *sign = -1.0;
        }
    }
    v.fma(V::load(&signs), v.swap::<STRIDE>())
}

/// A block shorter than a vector.
fn short(x: &mut [f32], factor: f32) {
    let mut stride = x.len() / 2;
    while stride > 0 {
        for pair in x.chunks_exact_mut(2 * stride) {
            let (a, b) = pair.split_at_mut(stride);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride /= 2;
    }
    for x in x {
        *x *= factor;
    }
}

vectorized! {
    /// x = H (s * x), block by block; `signs` (+-1, empty for none) has the length of `x`, a whole number of blocks, and
    /// `block` is a power of two.
    pub fn rotate<V>(x: &mut [f32], signs: &[f32], block: usize) {
        for (x, s) in x.iter_mut().zip(signs) {
            *x *= s;
        }
        for x in x.chunks_exact_mut(block) {
            transform::<V>(x);
        }
    }

    /// x = s * (H x), block by block: the inverse of [`rotate`].
    pub fn rotate_back<V>(x: &mut [f32], signs: &[f32], block: usize) {
        for x in x.chunks_exact_mut(block) {
            transform::<V>(x);
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
