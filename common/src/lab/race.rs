//! Variants timed against each other in interleaved rounds.

use std::ops::Index;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Metric;
use super::progress::Progress;
use super::stat::Stat;

/// What is timed: a call that lab times, or a call that times itself.
enum Work<'a> {
    Timed(Box<dyn FnMut() -> Result<()> + 'a>),
    TimesItself(Box<dyn FnMut() -> Result<Duration> + 'a>),
}

struct Variant<'a> {
    name: String,
    work: Work<'a>,
    /// Calls in one sample, chosen during the warm-up.
    calls: u32,
}

/// Variants that are compared: they run interleaved, A B A B, so that a machine whose speed drifts
/// moves all of them.
///
/// Work that every variant shares mutably (a pool, an output buffer) goes into a `RefCell`.
pub struct Race<'a> {
    variants: Vec<Variant<'a>>,
    rounds: usize,
    sample: Duration,
    warm_up: Duration,
    halfway: Option<Box<dyn FnOnce() + 'a>>,
    progress: Progress,
}

impl<'a> Race<'a> {
    /// A race outside of an experiment, with samples as long as a full run's.
    pub fn of(rounds: usize) -> Self {
        Race::new(rounds.max(1), false, Progress::silent())
    }

    pub(super) fn new(rounds: usize, quick: bool, progress: Progress) -> Self {
        let (sample, warm_up) = if quick { (1, 2) } else { (5, 60) };
        Race {
            variants: Vec::new(),
            rounds,
            sample: Duration::from_millis(sample),
            warm_up: Duration::from_millis(warm_up),
            halfway: None,
            progress,
        }
    }

    /// Adds a variant. One call is one unit of work; it is repeated within a sample until the
    /// sample is long enough to time. Pass results through [`std::hint::black_box`].
    ///
    /// # Panics
    /// When the name is taken.
    pub fn add(&mut self, name: impl Into<String>, mut work: impl FnMut() + 'a) -> &mut Self {
        self.try_add(name, move || {
            work();
            Ok(())
        })
    }

    /// Like [`add`](Self::add) for work that can fail, which ends the race.
    ///
    /// # Panics
    /// When the name is taken.
    pub fn try_add(
        &mut self,
        name: impl Into<String>,
        work: impl FnMut() -> Result<()> + 'a,
    ) -> &mut Self {
        self.push(name.into(), Work::Timed(Box::new(work)))
    }

    /// Adds a variant that returns the time its own work took, so that preparation (a state put
    /// back, a child process started) stays outside. Called once a round.
    ///
    /// # Panics
    /// When the name is taken.
    pub fn add_timed(
        &mut self,
        name: impl Into<String>,
        work: impl FnMut() -> Result<Duration> + 'a,
    ) -> &mut Self {
        self.push(name.into(), Work::TimesItself(Box::new(work)))
    }

    fn push(&mut self, name: String, work: Work<'a>) -> &mut Self {
        assert!(
            self.variants.iter().all(|v| v.name != name),
            "race: two variants named {name:?}"
        );
        self.variants.push(Variant {
            name,
            work,
            calls: 1,
        });
        self
    }

    /// Shortest duration of a sample (default 5 ms, 1 ms with `--quick`). Calls that take longer
    /// are timed one by one.
    pub fn sample(&mut self, shortest: Duration) -> &mut Self {
        self.sample = shortest;
        self
    }

    /// Time each variant runs before the first round (default 60 ms, 2 ms with `--quick`); at
    /// least one call.
    pub fn warm_up(&mut self, time: Duration) -> &mut Self {
        self.warm_up = time;
        self
    }

    /// Number of rounds, in place of the default that `--rounds` sets.
    pub fn rounds(&mut self, rounds: usize) -> &mut Self {
        self.rounds = rounds.max(1);
        self
    }

    /// What happens before the round in the middle: a load that is switched on, to see what it does.
    pub fn halfway(&mut self, event: impl FnOnce() + 'a) -> &mut Self {
        self.halfway = Some(Box::new(event));
        self
    }

    /// Warms up, then runs the rounds. Round r starts with variant r modulo their count, so that
    /// no variant is always first.
    ///
    /// # Errors
    /// What a variant's work returned, with the variant's name.
    pub fn run(&mut self) -> Result<Times> {
        for variant in &mut self.variants {
            variant.warm_up(self.warm_up, self.sample)?;
        }
        let mut seconds = vec![Vec::with_capacity(self.rounds); self.variants.len()];
        for round in 0..self.rounds {
            self.progress.step(round, self.rounds);
            if round == self.rounds / 2
                && let Some(event) = self.halfway.take()
            {
                event();
            }
            for i in order(round, self.variants.len()) {
                seconds[i].push(self.variants[i].sample()?);
            }
        }
        self.progress.step(self.rounds, self.rounds);
        let series = self.variants.iter().zip(seconds);
        Ok(Times {
            series: series
                .map(|(variant, seconds)| Series {
                    name: variant.name.clone(),
                    calls: variant.calls,
                    seconds,
                })
                .collect(),
        })
    }
}

/// The order of `variants` in a round: rotated by one from round to round.
fn order(round: usize, variants: usize) -> impl Iterator<Item = usize> {
    (0..variants).map(move |i| (round + i) % variants)
}

impl Variant<'_> {
    fn warm_up(&mut self, time: Duration, sample: Duration) -> Result<()> {
        let start = Instant::now();
        let mut best = f64::INFINITY;
        loop {
            best = best.min(self.sample()?);
            let long_enough = sample.as_secs_f64() / best.max(1e-9);
            if matches!(self.work, Work::Timed(_)) {
                // At most doubled a step: the first calls are the slowest and the least telling.
                self.calls = (long_enough.ceil().min(1e9) as u32).clamp(1, self.calls * 2);
            }
            let settled =
                f64::from(self.calls) >= long_enough || matches!(self.work, Work::TimesItself(_));
            if settled && start.elapsed() >= time {
                return Ok(());
            }
        }
    }

    /// Seconds a call, over one sample.
    fn sample(&mut self) -> Result<f64> {
        match &mut self.work {
            Work::Timed(work) => {
                let start = Instant::now();
                for _ in 0..self.calls {
                    work().with_context(|| self.name.clone())?;
                }
                Ok(start.elapsed().as_secs_f64() / f64::from(self.calls))
            }
            Work::TimesItself(work) => {
                let time = work().with_context(|| self.name.clone())?;
                Ok(time.as_secs_f64())
            }
        }
    }
}

/// The samples of one variant.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The variant's name.
    pub name: String,
    /// Calls averaged within a sample.
    pub calls: u32,
    /// Seconds a call, one sample a round, in order of rounds.
    pub seconds: Vec<f64>,
}

/// The samples of a race, by variant.
///
/// Methods that take a variant's name panic when the race had no such variant.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// In the order in which the variants were added.
    pub series: Vec<Series>,
}

impl Index<&str> for Times {
    type Output = Series;

    fn index(&self, name: &str) -> &Series {
        self.series
            .iter()
            .find(|s| s.name == name)
            .unwrap_or_else(|| panic!("race: no variant named {name:?}"))
    }
}

impl Times {
    /// The statistic of `name` in the metric's own unit, where one call does `units` of work: for
    /// a rate, weights, bytes, multiply-accumulates or tokens a call; for a time, what it is
    /// counted by (1 for milliseconds a call, the number of weights for nanoseconds a weight).
    ///
    /// # Panics
    /// When the metric is neither a rate nor a time.
    pub fn rate(&self, name: &str, metric: Metric, units: f64) -> Stat {
        let of = metric.of_seconds();
        let of = of.unwrap_or_else(|| panic!("race: {} is no rate and no time", metric.name()));
        let samples: Vec<f64> = self[name].seconds.iter().map(|&s| of(s, units)).collect();
        Stat::of(&samples)
    }

    /// How many times faster a call of `variant` is than one of `baseline`: the median of the
    /// ratios taken round by round.
    pub fn speedup(&self, variant: &str, baseline: &str) -> Stat {
        let pairs = self[variant].seconds.iter().zip(&self[baseline].seconds);
        let ratios: Vec<f64> = pairs.map(|(v, b)| b / v).collect();
        Stat::of(&ratios)
    }

    /// Like [`speedup`](Self::speedup) where one call of `variant` does `variant_units` of work and one
    /// of `baseline` does `baseline_units`: how many times more work a second.
    pub fn speedup_per_unit(
        &self,
        (variant, variant_units): (&str, f64),
        (baseline, baseline_units): (&str, f64),
    ) -> Stat {
        self.speedup(variant, baseline)
            .scaled(variant_units / baseline_units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn race<'a>(rounds: usize) -> Race<'a> {
        Race::new(rounds, true, Progress::silent())
    }

    #[test]
    fn rounds_are_interleaved_and_each_starts_with_another_variant() {
        let log = RefCell::new(String::new());
        let mut race = race(4);
        race.warm_up(Duration::ZERO);
        for name in ["a", "b", "c"] {
            let log = &log;
            race.add_timed(name, move || {
                log.borrow_mut().push_str(name);
                Ok(Duration::from_millis(1))
            });
        }
        let times = race.run().unwrap();
        // One call each to warm up, then four rounds.
        assert_eq!(
            *log.borrow(),
            "abc".to_owned() + "abc" + "bca" + "cab" + "abc"
        );
        assert_eq!(times["b"].seconds, [0.001; 4]);
    }

    #[test]
    fn a_speedup_is_taken_round_by_round() {
        // Both slow down tenfold halfway; each round's ratio is 2.
        let drifting = |scale: f64| {
            let mut round = 0;
            move || {
                round += 1;
                let drift = if round > 5 { 10.0 } else { 1.0 };
                Ok(Duration::from_secs_f64(scale * drift))
            }
        };
        let mut race = race(9);
        race.warm_up(Duration::ZERO);
        race.add_timed("fast", drifting(0.001));
        race.add_timed("slow", drifting(0.002));
        let times = race.run().unwrap();
        let speedup = times.speedup("fast", "slow");
        assert_eq!((speedup.low, speedup.median, speedup.high), (2.0, 2.0, 2.0));
        let per_unit = times.speedup_per_unit(("fast", 3.0), ("slow", 1.0));
        assert_eq!(per_unit.median, 6.0);
    }

    #[test]
    fn rates_come_in_the_unit_of_their_metric() {
        let times = Times {
            series: vec![Series {
                name: "x".into(),
                calls: 1,
                seconds: vec![0.5],
            }],
        };
        assert_eq!(times.rate("x", Metric::WeightsPerS, 1e9).median, 2.0);
        assert_eq!(times.rate("x", Metric::TokensPerS, 3.0).median, 6.0);
        assert_eq!(times.rate("x", Metric::Time, 1.0).median, 500.0);
        assert_eq!(times.rate("x", Metric::TimePerWeight, 1e9).median, 0.5);
    }

    #[test]
    fn halfway_comes_once_before_the_middle_round() {
        let log = RefCell::new(String::new());
        let mut race = race(5);
        race.warm_up(Duration::ZERO);
        race.add_timed("a", || {
            log.borrow_mut().push('a');
            Ok(Duration::ZERO)
        });
        race.halfway(|| log.borrow_mut().push('!'));
        race.run().unwrap();
        assert_eq!(*log.borrow(), "aaa!aaa");
    }

    #[test]
    fn short_work_is_repeated_within_a_sample() {
        let mut race = race(3);
        race.add("short", || {
            std::hint::black_box(0);
        });
        assert!(race.run().unwrap()["short"].calls > 1000);
    }

    #[test]
    fn a_failing_variant_ends_the_race_by_name() {
        let mut timed = race(3);
        timed.add_timed("child", || anyhow::bail!("no such program"));
        let mut tried = race(3);
        tried.try_add("child", || anyhow::bail!("no such program"));
        for race in [&mut timed, &mut tried] {
            let error = race.run().unwrap_err();
            assert_eq!(format!("{error:#}"), "child: no such program");
        }
    }
}
