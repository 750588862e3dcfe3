//! Softmax attention over a key/value cache, and rotary positions.
//!
//! Keys of a head are kept in tiles of 16 positions, `[tile][dimension][16]`, so that a lane is a position and no score needs a
//! horizontal sum; values are kept `[position][dimension]`, so that a lane is a dimension. Per score the dimensions go into four
//! accumulators (dimension mod 4), added as (0 + 2) + (1 + 3); per output the positions are added in order.

use super::lanes::{LANES, Lanes};
use super::math::{self, exp, vectorized};

/// Positions in a tile of keys.
pub const TILE: usize = LANES;

type Row = [f32; LANES];

/// The frequencies of rotary positions: base^(-2i/R) for i below R/2, in double.
pub fn rope_frequencies(base: f64, dims: usize) -> Vec<f64> {
    let ln = math::ln_f64(base);
    (0..dims / 2)
        .map(|i| math::exp_f64(-ln * (2 * i) as f64 / dims as f64))
        .collect()
}

/// The cosines, then the sines, of a position's angles.
pub fn rope_angles(frequencies: &[f64], position: usize, out: &mut [f32]) {
    let (cos, sin) = out.split_at_mut(frequencies.len());
    for ((f, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let (s, c) = math::sin_cos_f64(position as f64 * f);
        (*cos, *sin) = (c as f32, s as f32);
    }
}

/// Rotates dimension i with i + R/2 (NeoX pairing) by `angles`, as [`rope_angles`] gives them; dimensions from R on stay.
#[inline(always)]
fn rope(x: &mut [f32], angles: &[f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (a, rest) = x.split_at_mut(half);
    for i in 0..half {
        let (x, y) = (a[i], rest[i]);
        a[i] = x.mul_add(cos[i], -(y * sin[i]));
        rest[i] = x.mul_add(sin[i], y * cos[i]);
    }
}

vectorized! {
    /// Norm (weight `w`), rotary position, and a factor, in place: what a query or a key goes through.
    pub fn norm_and_rope<V>(x: &mut [f32], w: &[f32], eps: f32, angles: &[f32], factor: f32) {
        math::rms_norm_in_place::<V>(x, w, eps);
        rope(x, angles);
        for x in x {
            *x *= factor;
        }
    }

    /// Attention of queries that share a key/value head. `queries` holds a head every `stride` values, `out` one every `dim`;
    /// `positions` keys and values are seen; `scores` has room for the positions, rounded up to whole tiles, for each head.
    /// `dim` is a multiple of 16.
    pub fn attend<V>(
        keys: &[f32],
        values: &[f32],
        dim: usize,
        positions: usize,
        queries: &[f32],
        stride: usize,
        scores: &mut [f32],
        out: &mut [f32],
    ) {
        let tiles = positions.div_ceil(TILE);
        let heads = out.len() / dim;
        let keys = keys.as_chunks::<LANES>().0;
        for tile in 0..tiles {
            let keys = &keys[tile * dim..][..dim];
            for head in 0..heads {
                let query = &queries[head * stride..][..dim];
                let to = &mut scores[(head * tiles + tile) * TILE..];
                score::<V>(keys, query).store(to.first_chunk_mut().expect("a tile"));
            }
        }
        for head in 0..heads {
            let scores = &mut scores[head * tiles * TILE..][..tiles * TILE];
            soften::<V>(scores, positions);
            out[head * dim..][..dim].fill(0.0);
        }
        for (block, values) in values[..positions * dim].chunks(TILE * dim).enumerate() {
            for head in 0..heads {
                let weights = &scores[(head * tiles + block) * TILE..][..TILE];
                accumulate::<V>(values, dim, weights, &mut out[head * dim..][..dim]);
            }
        }
    }

    /// `x *= sigmoid(gate)`.
    pub fn gate<V>(x: &mut [f32], gate: &[f32]) {
        for (x, g) in x.iter_mut().zip(gate) {
            *x *= math::sigmoid(*g);
        }
    }
}

/// Puts a key into the tiles of its head.
pub fn store_key(keys: &mut [f32], position: usize, key: &[f32]) {
    let tile = &mut keys[position / TILE * TILE * key.len()..];
    for (row, k) in tile.chunks_exact_mut(TILE).zip(key) {
        row[position % TILE] = *k;
    }
}

/// A query with the keys of a tile.
#[inline(always)]
fn score<V: Lanes>(keys: &[Row], query: &[f32]) -> V {
    let mut acc = [V::splat(0.0); 4];
    for (k, q) in keys.as_chunks::<4>().0.iter().zip(query.as_chunks::<4>().0) {
        for i in 0..4 {
            acc[i] = V::load(&k[i]).fma(V::splat(q[i]), acc[i]);
        }
    }
    (acc[0].add(acc[2])).add(acc[1].add(acc[3]))
}

/// Softmax in place; what stands past `positions` becomes 0.
#[inline(always)]
fn soften<V: Lanes>(scores: &mut [f32], positions: usize) {
    let (seen, rest) = scores.split_at_mut(positions);
    rest.fill(0.0);
    let max = seen
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, |m, s| if s > m { s } else { m });
    for s in &mut *seen {
        *s = exp(*s - max);
    }
    let mut sum = V::splat(0.0);
    for chunk in scores.as_chunks::<LANES>().0 {
        sum = sum.add(V::load(chunk));
    }
    let factor = 1.0 / sum.sum();
    for s in scores {
        *s *= factor;
    }
}

/// Adds the values of a block of positions, each times its weight.
#[inline(always)]
fn accumulate<V: Lanes>(values: &[f32], dim: usize, weights: &[f32], out: &mut [f32]) {
    for (c, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut acc = V::load(out);
        for (v, &w) in values.chunks_exact(dim).zip(weights) {
            acc = V::load(&v.as_chunks::<LANES>().0[c]).fma(V::splat(w), acc);
        }
        acc.store(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::math::Simd;

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        let next = |_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(next).collect()
    }

    /// Attention of two heads over `positions` keys.
    fn run(simd: Simd, dim: usize, positions: usize) -> Vec<f32> {
        let (k, v, q) = (
            values(positions * dim, 1),
            values(positions * dim, 2),
            values(4 * dim, 3),
        );
        let tiles = positions.div_ceil(TILE);
        let mut keys = vec![f32::NAN; tiles * TILE * dim];
        for (p, k) in k.chunks_exact(dim).enumerate() {
            store_key(&mut keys, p, k);
        }
        let (mut scores, mut out) = (vec![f32::NAN; 2 * tiles * TILE], vec![f32::NAN; 2 * dim]);
        attend(
            simd,
            &keys,
            &v,
            dim,
            positions,
            &q,
            2 * dim,
            &mut scores,
            &mut out,
        );
        for head in 0..2 {
            let q = &q[head * 2 * dim..][..dim];
            let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum::<f64>();
            let e: Vec<f64> = k.chunks_exact(dim).map(|k| dot(k).exp()).collect();
            for d in 0..dim {
                let wanted: f64 = e
                    .iter()
                    .zip(v[d..].iter().step_by(dim))
                    .map(|(e, v)| e * f64::from(*v))
                    .sum();
                let ours = f64::from(out[head * dim + d]);
                assert!(
                    (ours - wanted / e.iter().sum::<f64>()).abs() < 1e-5,
                    "{simd} {dim} {positions} {head} {d}"
                );
            }
        }
        out
    }

    #[test]
    fn it_is_softmax_attention_in_the_same_bits_everywhere() {
        for (dim, positions) in [(16, 1), (32, 15), (64, 16), (64, 17), (32, 100)] {
            let wanted = run(Simd::available()[0], dim, positions);
            for simd in Simd::available() {
                assert!(
                    run(simd, dim, positions) == wanted,
                    "{simd} {dim} {positions}"
                );
            }
        }
    }

    #[test]
    fn rope_turns_pairs() {
        let frequencies = rope_frequencies(10_000.0, 4);
        assert!((frequencies[1] - 0.01).abs() < 1e-15);
        let mut angles = [0.0; 4];
        rope_angles(&frequencies, 3, &mut angles);
        let mut x = [1.0, 2.0, 0.5, -1.0, 7.0];
        rope(&mut x, &angles);
        let (sin, cos) = 3f32.sin_cos();
        let (sin1, cos1) = 0.03f32.sin_cos();
        let wanted = [
            cos - 0.5 * sin,
            2.0 * cos1 + sin1,
            sin + 0.5 * cos,
            2.0 * sin1 - cos1,
            7.0,
        ];
        assert!(
            x.iter().zip(wanted).all(|(x, w)| (x - w).abs() < 1e-6),
            "{x:?} {wanted:?}"
        );
    }
}
