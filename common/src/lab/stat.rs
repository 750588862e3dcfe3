//! Medians with 95% bootstrap intervals.

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

/// Resamples drawn for an interval.
const RESAMPLES: usize = 10_000;

/// Resamples left out at each end: 2.5% of them, less three standard errors of that count, so that
/// the luck of the resampling never makes an interval narrower than the ideal one.
const TAIL: usize = 250 - 47;

/// The median of `n` samples and its 95% bootstrap interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stat {
    /// Median.
    pub median: f64,
    /// Lower end of the interval; at most `median`.
    pub low: f64,
    /// Upper end of the interval; at least `median`.
    pub high: f64,
    /// Number of samples.
    pub n: usize,
}

impl Stat {
    /// Median and percentile-bootstrap interval of `samples`. The resampling is seeded with a
    /// constant, so the same samples give the same interval on every machine. No sample, or one
    /// that is not a number, gives NaN throughout, which the row writer refuses.
    pub fn of(samples: &[f64]) -> Stat {
        let n = samples.len();
        if n == 0 || samples.iter().any(|s| s.is_nan()) {
            return Stat {
                median: f64::NAN,
                low: f64::NAN,
                high: f64::NAN,
                n,
            };
        }
        let mut sorted = samples.to_vec();
        let median = median_of(&mut sorted);
        let mut rng = ChaCha8Rng::seed_from_u64(0x7e57_ab1e);
        let mut draw = vec![0.0; n];
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                draw.fill_with(|| sorted[rng.random_range(0..n)]);
                median_of(&mut draw)
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        Stat {
            median,
            low: medians[TAIL].min(median),
            high: medians[RESAMPLES - 1 - TAIL].max(median),
            n,
        }
    }

    /// The same statistic in another unit: every field times `factor`, which must be positive.
    #[must_use]
    pub fn scaled(self, factor: f64) -> Stat {
        Stat {
            median: self.median * factor,
            low: self.low * factor,
            high: self.high * factor,
            n: self.n,
        }
    }

    /// Whether the interval holds `value`.
    pub fn holds(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }
}

/// The median: the middle sample, or the mean of the two in the middle. Sorts its argument.
fn median_of(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    if samples.len() % 2 == 1 {
        samples[middle]
    } else {
        0.5 * (samples[middle - 1] + samples[middle])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Stat::of(&[3.0, 1.0, 2.0]).median, 2.0);
        assert_eq!(Stat::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        let one = Stat::of(&[7.0]);
        assert_eq!((one.low, one.median, one.high, one.n), (7.0, 7.0, 7.0, 1));
    }

    #[test]
    fn the_same_samples_give_the_same_interval_in_any_order() {
        let samples: Vec<f64> = (0..15).map(|i| f64::from(i * 7 % 15)).collect();
        let mut turned = samples.clone();
        turned.rotate_left(4);
        assert_eq!(Stat::of(&samples), Stat::of(&turned));
    }

    #[test]
    fn the_interval_of_fifteen_ordered_samples_is_the_fourth_to_the_twelfth() {
        // The bootstrap median of 15 samples falls below the 4th smallest with probability 0.42%
        // and on or below it with 2.55% (binomial tails), so the 2.5% quantile is the 4th.
        let samples: Vec<f64> = (1..=15).map(f64::from).collect();
        let stat = Stat::of(&samples);
        assert_eq!((stat.low, stat.median, stat.high), (4.0, 8.0, 12.0));
    }

    #[test]
    fn the_interval_covers_the_true_median_about_19_times_in_20() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        // 96.5% for the 4th to the 12th of 15: 193 of 200, give or take 3.
        let covered = (0..200)
            .filter(|_| {
                // Skewed like timings: a floor plus a squared uniform; true median 1 + 0.25.
                let samples: Vec<f64> =
                    (0..15).map(|_| 1.0 + rng.random::<f64>().powi(2)).collect();
                Stat::of(&samples).holds(1.25)
            })
            .count();
        assert!((185..=199).contains(&covered), "{covered} of 200");
    }

    #[test]
    fn no_samples_and_nan_samples_are_nan() {
        assert!(Stat::of(&[]).median.is_nan());
        assert!(Stat::of(&[1.0, f64::NAN]).low.is_nan());
    }
}
