//! The next token from logits: greedy, or drawn at a temperature from the likeliest.

use anyhow::{Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::math::{self, Simd};

/// How to draw. Temperature 0 is greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it.
    pub temperature: f32,
    /// Only that many of the likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability.
    pub top_p: f32,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
        }
    }
}

/// Draws tokens; one random number a token, none when greedy.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: StdRng,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler with buffers for `vocabulary` tokens.
    ///
    /// # Errors
    /// A temperature or a probability out of range.
    pub fn new(sampling: Sampling, vocabulary: usize) -> Result<Self> {
        let Sampling {
            temperature, top_p, ..
        } = sampling;
        ensure!(
            (0.0..=100.0).contains(&temperature),
            "--temp {temperature}: expected 0 to 100"
        );
        ensure!(
            top_p > 0.0 && top_p <= 1.0,
            "--top-p {top_p}: expected above 0, to 1"
        );
        let room = if temperature > 0.0 { vocabulary } else { 0 };
        Ok(Sampler {
            sampling,
            random: StdRng::seed_from_u64(sampling.seed),
            candidates: Vec::with_capacity(room),
        })
    }

    /// The next token.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let Sampling {
            temperature,
            top_k,
            top_p,
            ..
        } = self.sampling;
        if temperature == 0.0 {
            return greedy(logits);
        }
        let likeliest = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        self.candidates.clear();
        self.candidates
            .extend(logits.iter().zip(0..).map(|(&x, id)| (x, id)));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, likeliest);
            self.candidates.truncate(top_k);
        }
        self.candidates.sort_unstable_by(likeliest);
        let max = self.candidates[0].0;
        let mut total = 0.0;
        for (x, _) in &mut self.candidates {
            let mut p = [(*x - max) / temperature];
            math::exp_each(Simd::best(), &mut p);
            *x = p[0];
            total += f64::from(*x);
        }
        // The shortest prefix that reaches top_p, then a draw from it.
        let mut reached = 0.0;
        let kept = self.candidates.iter().position(|(p, _)| {
            reached += f64::from(*p);
            reached >= f64::from(top_p) * total
        });
        let kept = kept.map_or(self.candidates.len(), |i| i + 1);
        let mut left = self.random.random::<f64>() * reached;
        for (p, id) in &self.candidates[..kept] {
            left -= f64::from(*p);
            if left < 0.0 {
                return *id;
            }
        }
        self.candidates[kept - 1].1
    }
}

/// The token of the largest logit, the first of equals.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (&x, id) in logits.iter().zip(0..) {
        if x > best.0 {
            best = (x, id);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling, logits.len()).unwrap();
        (0..n).map(|_| sampler.sample(logits)).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(greedy(&[0.0, 3.0, -1.0, 3.0]), 1);
        assert_eq!(greedy(&[f32::NAN, -5.0]), 1);
        assert_eq!(draws(Sampling::default(), &[0.0, 1.0], 3), [1, 1, 1]);
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 5f32.ln()];
        let sampling = Sampling {
            temperature: 1.0,
            seed: 7,
            ..Sampling::default()
        };
        let ids = draws(sampling, &logits, 8000);
        for (id, share) in [(0, 0.125), (1, 0.25), (2, 0.0), (3, 0.625)] {
            let found = ids.iter().filter(|&&i| i == id).count() as f64 / 8000.0;
            assert!((found - share).abs() < 0.02, "{id}: {found} {share}");
        }
        assert_eq!(ids, draws(sampling, &logits, 8000));
        assert_ne!(
            ids,
            draws(
                Sampling {
                    seed: 8,
                    ..sampling
                },
                &logits,
                8000
            )
        );
    }

    #[test]
    fn the_tail_is_cut() {
        let logits = [0.0, 2f32.ln(), -3.0, 5f32.ln()];
        let sampling = Sampling {
            temperature: 1.0,
            ..Sampling::default()
        };
        let all_of = |sampling, allowed: &[u32]| {
            draws(sampling, &logits, 500)
                .iter()
                .all(|i| allowed.contains(i))
        };
        assert!(all_of(
            Sampling {
                top_k: 1,
                ..sampling
            },
            &[3]
        ));
        assert!(all_of(
            Sampling {
                top_k: 2,
                ..sampling
            },
            &[1, 3]
        ));
        assert!(all_of(
            Sampling {
                top_p: 0.5,
                ..sampling
            },
            &[3]
        ));
        assert!(all_of(
            Sampling {
                top_p: 0.8,
                ..sampling
            },
            &[1, 3]
        ));
        assert!(!all_of(
            Sampling {
                top_p: 0.8,
                ..sampling
            },
            &[3]
        ));
        for (temperature, top_p) in [(-1.0, 1.0), (f32::NAN, 1.0), (1.0, 0.0), (1.0, 1.5)] {
            assert!(
                Sampler::new(
                    Sampling {
                        temperature,
                        top_p,
                        ..sampling
                    },
                    4
                )
                .is_err()
            );
        }
    }
}
