//! The gated delta rule: a recurrent state M (S x S a value head) instead of a key/value cache.
//!
//! A token decays the state, asks it for the value it holds for the key, corrects it by a rank-1 update and reads it with the
//! query: M *= g; d = beta (v - M^T k); M += k d^T; o = M^T q. M is kept in strips of 16 columns, `[strip][row][16]`, 8 KB each
//! at S = 128: a strip stays in the first cache while all tokens of a batch pass over it, so memory is read and written once a
//! batch.
//!
//! Sums over rows go into four accumulators a column (row mod 4), added as (0 + 2) + (1 + 3).
//!
//! A batch need not be kept: [`Keep::Nothing`] leaves M as it was, while [`Step`] records what each token did (k, d, decay). Tokens
//! that are accepted later are applied at the head of the next pass, by the same operations and so with the same bits, without a
//! pass of their own.

use super::lanes::{LANES, Lanes};
use super::math::{self, vectorized};

/// Columns in a strip.
pub const STRIP: usize = LANES;

/// What the tokens of a batch bring to a head, already convolved and normalized.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Keys, `[token][S]`.
    pub k: &'a [f32],
    /// Queries, `[token][S]`.
    pub q: &'a [f32],
    /// Values, `[token][S]`.
    pub v: &'a [f32],
    /// exp(g), the factor on the state, `[token]`.
    pub decay: &'a [f32],
    /// How much of the error is corrected, `[token]`.
    pub beta: &'a [f32],
}

/// Corrections to apply again: M = decay M + k d^T.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steps<'a> {
    /// Keys, `[step][S]`.
    pub k: &'a [f32],
    /// beta (v - M^T k), `[step][S]`.
    pub d: &'a [f32],
    /// exp(g), `[step]`.
    pub decay: &'a [f32],
}

/// What becomes of the state after a batch.
pub enum Keep<'a> {
    /// It holds the batch.
    All,
    /// It is left as before the batch, which ran on a copy of a strip at a time in this buffer of 16 S values.
    Nothing(&'a mut [f32]),
}

/// A row of a strip.
type Row = [f32; STRIP];

/// M = decay M + k d^T on a strip.
#[inline(always)]
fn correct<V: Lanes>(m: &mut [Row], k: &[f32], d: &Row, decay: f32) {
    let (d, decay) = (V::load(d), V::splat(decay));
    for (m, &k) in m.iter_mut().zip(k) {
        V::splat(k).fma(d, V::load(m).mul(decay)).store(m);
    }
}

/// (decay M)^T k on a strip.
#[inline(always)]
fn recall<V: Lanes>(m: &[Row], k: &[f32], decay: f32) -> V {
    let decay = V::splat(decay);
    let mut acc = [V::splat(0.0); 4];
    for (m, k) in m.as_chunks::<4>().0.iter().zip(k.as_chunks::<4>().0) {
        for i in 0..4 {
            acc[i] = V::load(&m[i]).mul(decay).fma(V::splat(k[i]), acc[i]);
        }
    }
    join(acc)
}

/// [`correct`], then M^T q, in one loop.
#[inline(always)]
fn correct_and_read<V: Lanes>(m: &mut [Row], k: &[f32], d: V, decay: f32, q: &[f32]) -> V {
    let decay = V::splat(decay);
    let mut acc = [V::splat(0.0); 4];
    let rows = m.as_chunks_mut::<4>().0.iter_mut();
    for ((m, k), q) in rows.zip(k.as_chunks::<4>().0).zip(q.as_chunks::<4>().0) {
        for i in 0..4 {
            let row = V::splat(k[i]).fma(d, V::load(&m[i]).mul(decay));
            row.store(&mut m[i]);
            acc[i] = row.fma(V::splat(q[i]), acc[i]);
        }
    }
    join(acc)
}

#[inline(always)]
fn join<V: Lanes>(acc: [V; 4]) -> V {
    (acc[0].add(acc[2])).add(acc[1].add(acc[3]))
}

#[inline(always)]
fn columns(x: &[f32], strip: usize) -> &Row {
    &x.as_chunks::<STRIP>().0[strip]
}

vectorized! {
    /// Runs the tokens of a batch, in order, through the state `m` of a head (S * S values), after the steps of `replay`, which are
    /// kept. `d` and `o` (`[token][S]`) get what was corrected and what was read. S is a multiple of 16.
    pub fn run<V>(m: &mut [f32], size: usize, replay: Steps, x: Inputs, keep: Keep, d: &mut [f32], o: &mut [f32]) {
        let mut keep = keep;
        let strips = m.as_chunks_mut::<STRIP>().0.chunks_exact_mut(size);
        for (strip, m) in strips.enumerate() {
            for (i, &decay) in replay.decay.iter().enumerate() {
                let at = i * size;
                correct::<V>(m, &replay.k[at..at + size], columns(&replay.d[at..], strip), decay);
            }
            let m = match &mut keep {
                Keep::All => m,
                Keep::Nothing(copy) => {
                    let copy = &mut copy.as_chunks_mut::<STRIP>().0[..size];
                    copy.copy_from_slice(m);
                    copy
                }
            };
            for (i, (&decay, &beta)) in x.decay.iter().zip(x.beta).enumerate() {
                let at = i * size;
                let (k, q) = (&x.k[at..at + size], &x.q[at..at + size]);
                let held = recall::<V>(m, k, decay);
                let v = V::load(columns(&x.v[at..], strip));
                let correction = V::splat(beta).mul(v.sub(held));
                let read = correct_and_read(m, k, correction, decay, q);
                correction.store(&mut d[at..].as_chunks_mut::<STRIP>().0[strip]);
                read.store(&mut o[at..].as_chunks_mut::<STRIP>().0[strip]);
            }
        }
    }
}

/// Taps of the causal convolution, and samples of history that it looks at besides the newest.
pub const TAPS: usize = 4;

/// How a convolved vector is normalized.
#[derive(Clone, Copy, Debug)]
pub struct Normalize {
    /// x / sqrt(sum x^2 + eps).
    pub eps: f32,
    /// A factor on the result.
    pub factor: f32,
}

vectorized! {
    /// Causal depthwise convolution over time, then SiLU, of the channels from `first` on, as many as `taps` has: sample t is
    /// `x[t * channels + channel]`, the samples before are `history[(t + 3) * channels + channel]`. `taps` is `[tap][channel]`,
    /// the newest sample last. `out` is `[token][size]`, for the tokens from `start` on.
    pub fn convolve<V>(
        history: &[f32],
        x: &[f32],
        channels: usize,
        first: usize,
        taps: &[f32],
        start: usize,
        normalize: Option<Normalize>,
        out: &mut [f32],
    ) {
        let size = taps.len() / TAPS;
        for (i, out) in out.chunks_exact_mut(size).enumerate() {
            let token = start + i;
            let sample = |tap: usize| {
                let rows = if token + tap < TAPS - 1 { history } else { x };
                let row = if token + tap < TAPS - 1 { token + tap } else { token + tap + 1 - TAPS };
                &rows[row * channels + first..][..size]
            };
            let samples: [&[f32]; TAPS] = [sample(0), sample(1), sample(2), sample(3)];
            for (i, out) in out.iter_mut().enumerate() {
                let mut acc = samples[0][i] * taps[i];
                for tap in 1..TAPS {
                    acc = samples[tap][i].mul_add(taps[tap * size + i], acc);
                }
                *out = math::silu(acc);
            }
            if let Some(Normalize { eps, factor }) = normalize {
                math::l2_norm_in_place::<V>(out, eps);
                out.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// The factor on the state, exp(a softplus(alpha + dt)) with a = -exp(A_log), and the rate sigmoid(beta), in place of alpha and beta.
    pub fn gates<V>(alpha: &mut [f32], beta: &mut [f32], a: f32, dt: f32) {
        for (alpha, beta) in alpha.iter_mut().zip(beta) {
            *alpha = math::exp(a * math::softplus(*alpha + dt));
            *beta = math::sigmoid(*beta);
        }
    }

    /// Norm, then times SiLU of the gate, in place: what a head gives to the output projection.
    pub fn norm_and_gate<V>(o: &mut [f32], w: &[f32], eps: f32, gate: &[f32]) {
        math::rms_norm_in_place::<V>(o, w, eps);
        for (o, g) in o.iter_mut().zip(gate) {
            *o *= math::silu(*g);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::math::Simd;

    struct Data {
        size: usize,
        k: Vec<f32>,
        q: Vec<f32>,
        v: Vec<f32>,
        decay: Vec<f32>,
        beta: Vec<f32>,
    }

    impl Data {
        fn new(size: usize, tokens: usize) -> Self {
            let mut x = 99u32;
            let mut next = |scale: f32| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((x >> 8) as f32 / 8_388_608.0 - 1.0) * scale
            };
            let mut vector = |n: usize, scale: f32| (0..n).map(|_| next(scale)).collect::<Vec<_>>();
            Data {
                size,
                k: vector(size * tokens, 0.2),
                q: vector(size * tokens, 0.2),
                v: vector(size * tokens, 1.0),
                decay: vector(tokens, 0.1).iter().map(|x| 0.9 + x).collect(),
                beta: vector(tokens, 0.5).iter().map(|x| 0.5 + x).collect(),
            }
        }

        fn inputs(&self, tokens: std::ops::Range<usize>) -> Inputs<'_> {
            let at = tokens.start * self.size..tokens.end * self.size;
            Inputs {
                k: &self.k[at.clone()],
                q: &self.q[at.clone()],
                v: &self.v[at],
                decay: &self.decay[tokens.clone()],
                beta: &self.beta[tokens],
            }
        }
    }

    /// Runs tokens a batch at a time; returns the state and what was read.
    fn batches(simd: Simd, data: &Data, widths: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let s = data.size;
        let (mut m, mut all, mut at) = (vec![0.0; s * s], vec![], 0);
        for &n in widths {
            let (mut d, mut o) = (vec![0.0; n * s], vec![0.0; n * s]);
            let x = data.inputs(at..at + n);
            run(
                simd,
                &mut m,
                s,
                Steps::default(),
                x,
                Keep::All,
                &mut d,
                &mut o,
            );
            all.extend(o);
            at += n;
        }
        (m, all)
    }

    #[test]
    fn it_is_the_rule_of_the_definition() {
        let (s, n) = (32, 5);
        let data = Data::new(s, n);
        let (m, o) = batches(Simd::best(), &data, &[n]);
        let mut wanted = vec![0f64; s * s];
        for t in 0..n {
            let row = |x: &[f32], i: usize| f64::from(x[t * s + i]);
            wanted
                .iter_mut()
                .for_each(|m| *m *= f64::from(data.decay[t]));
            for j in 0..s {
                let held: f64 = (0..s).map(|i| wanted[i * s + j] * row(&data.k, i)).sum();
                let d = f64::from(data.beta[t]) * (row(&data.v, j) - held);
                for i in 0..s {
                    wanted[i * s + j] += row(&data.k, i) * d;
                }
                let read: f64 = (0..s).map(|i| wanted[i * s + j] * row(&data.q, i)).sum();
                assert!((f64::from(o[t * s + j]) - read).abs() < 1e-5);
            }
        }
        for i in 0..s {
            for j in 0..s {
                let ours = m[j / STRIP * s * STRIP + i * STRIP + j % STRIP];
                assert!((f64::from(ours) - wanted[i * s + j]).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn batches_and_levels_give_the_same_bits() {
        let data = Data::new(64, 6);
        let wanted = batches(Simd::available()[0], &data, &[6]);
        for simd in Simd::available() {
            for widths in [&[1usize; 6][..], &[3, 3], &[1, 5], &[6]] {
                assert!(batches(simd, &data, widths) == wanted, "{simd} {widths:?}");
            }
        }
    }

    #[test]
    fn steps_applied_later_give_the_same_bits() {
        let (s, n) = (32, 5);
        let data = Data::new(s, n);
        let simd = Simd::best();
        for accepted in 0..n {
            let (mut m, _) = batches(simd, &data, &[1]);
            let before = m.clone();
            let (mut d, mut o) = (vec![0.0; 4 * s], vec![0.0; 4 * s]);
            let mut copy = vec![0.0; s * STRIP];
            let x = data.inputs(1..n);
            run(
                simd,
                &mut m,
                s,
                Steps::default(),
                x,
                Keep::Nothing(&mut copy),
                &mut d,
                &mut o,
            );
            assert!(m == before);
            let replay = Steps {
                k: &x.k[..accepted * s],
                d: &d[..accepted * s],
                decay: &x.decay[..accepted],
            };
            run(
                simd,
                &mut m,
                s,
                replay,
                data.inputs(0..0),
                Keep::All,
                &mut [],
                &mut [],
            );
            let (wanted, read) = batches(simd, &data, &[1 + accepted]);
            assert!(m == wanted, "{accepted} accepted");
            assert!(o[..accepted * s] == read[s..]);
        }
    }

    #[test]
    fn the_convolution_looks_back_through_history() {
        let (channels, first, size) = (5, 2, 2);
        let history: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let x: Vec<f32> = (15..40).map(|i| i as f32).collect();
        let taps = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8];
        let mut out = vec![0.0; 10];
        convolve(
            Simd::best(),
            &history,
            &x,
            channels,
            first,
            &taps,
            0,
            None,
            &mut out,
        );
        let all = [history, x].concat();
        for t in 0..5 {
            for i in 0..size {
                let z: f32 = (0..4)
                    .map(|tap| all[(t + tap) * channels + first + i] * taps[tap * size + i])
                    .sum();
                let wanted = z / (1.0 + (-z).exp());
                assert!((out[t * size + i] - wanted).abs() < 1e-4, "{t} {i}");
            }
        }
        let normalize = Some(Normalize {
            eps: 0.0,
            factor: 2.0,
        });
        convolve(
            Simd::best(),
            &all[..15],
            &all[15..],
            channels,
            first,
            &taps,
            0,
            normalize,
            &mut out,
        );
        assert!((out[0].hypot(out[1]) - 2.0).abs() < 1e-6);
    }

    #[test]
    fn gates_follow_their_formulas() {
        let (mut alpha, mut beta) = ([0.5f32], [1.0f32]);
        gates(Simd::best(), &mut alpha, &mut beta, -0.7, 0.25);
        assert!((alpha[0] - (-0.7 * 0.75f32.exp().ln_1p()).exp()).abs() < 1e-6);
        assert!((beta[0] - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
        let mut o = [3.0, -4.0];
        norm_and_gate(Simd::best(), &mut o, &[1.0, 1.0], 0.0, &[0.0, 2.0]);
        let silu = 2.0 / (1.0 + (-2f32).exp());
        let wanted = -4.0 / 12.5f32.sqrt() * silu;
        assert!(o[0] == 0.0 && (o[1] - wanted).abs() < 1e-6);
    }
}
