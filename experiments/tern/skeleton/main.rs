//! NAME: CLAIM
//!
//! This skeleton compares two ways to sum; put your variants in their place.

use std::hint::black_box;
use std::process::ExitCode;

use common::lab::{self, Metric, Row};

fn main() -> ExitCode {
    lab::run("NAME", &["ID"], |exp| {
        let count: u32 = if exp.quick() { 1 << 12 } else { 1 << 20 };
        let data: Vec<i32> = (0..count as i32).collect();
        let one = |data: &[i32]| data.iter().fold(0_i64, |sum, x| sum + i64::from(*x));
        let four = |data: &[i32]| {
            let mut sums = [0_i64; 4];
            for (i, x) in data.iter().enumerate() {
                sums[i % 4] += i64::from(*x);
            }
            sums.iter().sum::<i64>()
        };
        // What must be equal on every machine; where it is not, the exit code is 1.
        exp.must_hold("both sums are the same", one(&data) == four(&data));

        exp.progress("summing");
        let mut race = exp.race();
        race.add("one-sum", || {
            black_box(one(black_box(&data)));
        });
        race.add("four-sums", || {
            black_box(four(black_box(&data)));
        });
        let times = race.run()?;

        let bytes = f64::from(count) * 4.0;
        for variant in ["one-sum", "four-sums"] {
            let rate = times.rate(variant, Metric::Bandwidth, bytes);
            let row = Row::new(variant, "").claim("ID");
            exp.row(row.metric(Metric::Bandwidth, rate).param("count", count))?;
        }
        let speedup = times.speedup("four-sums", "one-sum");
        let row = Row::new("four-sums", "").claim("ID").baseline("one-sum");
        let key = exp.row(row.metric(Metric::Speedup, speedup).param("count", count))?;
        let reason = "reproduced where the whole interval lies above 1";
        exp.verdict("ID", speedup.low > 1.0, reason, &key)
    })
}
