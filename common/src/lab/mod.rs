//! Measuring: interleaved rounds, statistics, machine facts, result rows, claims.
//!
//! An experiment hands its body to [`run`] (or [`run_with`] when it has flags of its own), and
//! closures to a [`Race`]:
//!
//! ```no_run
//! use common::lab::{self, Metric, Row};
//!
//! fn main() -> std::process::ExitCode {
//!     lab::run("exp-03-mask-slot", &["L10"], |exp| {
//!         for threads in exp.thread_counts() {
//!             exp.progress(format!("decode, {threads} threads"));
//!             let mut race = exp.race();
//!             race.add("stock", || { /* one gemv */ });
//!             race.add("row-pair", || { /* one gemv */ });
//!             let t = race.run()?;
//!             let weights = 4096.0 * 4096.0;
//!             for name in ["stock", "row-pair"] {
//!                 exp.row(
//!                     Row::new(name, "avx2")
//!                         .claim("L10")
//!                         .metric(Metric::WeightsPerS, t.rate(name, Metric::WeightsPerS, weights))
//!                         .threads(threads)
//!                         .params([("rows", 4096), ("cols", 4096)])
//!                         .param("from", "cache"),
//!                 )?;
//!             }
//!             let faster = t.speedup("row-pair", "stock");
//!             let key = exp.row(
//!                 Row::new("row-pair", "avx2")
//!                     .claim("L10")
//!                     .metric(Metric::Speedup, faster)
//!                     .baseline("stock avx2")
//!                     .threads(threads)
//!                     .params([("rows", 4096), ("cols", 4096)])
//!                     .param("from", "cache"),
//!             )?;
//!             exp.verdict("L10", faster.low > 1.0, "the interval lies above 1", &key)?;
//!         }
//!         exp.must_hold("row-pair gives the bits of stock", true);
//!         Ok(())
//!     })
//! }
//! ```

pub mod compare;
mod experiment;
mod files;
mod flags;
mod folder;
mod ledger;
mod machine;
mod meta;
mod progress;
mod race;
mod row;
mod source;
mod stat;
pub mod sums;
pub mod table;
pub mod verify;

pub use experiment::{Experiment, complain, one_line, refuse_flags, run, run_with};
pub use files::{read, sha256, sha256_file, write_all, write_files};
pub use flags::{Flags, number, taking_negative_numbers};
pub use folder::{Folder, Run, machines};
pub use ledger::{
    Claim, Finding, Verdict, read_findings, read_ledger, write_findings, write_ledger,
};
pub use machine::{Cache, CoreClass, HugePages, Machine, Rustc, available_threads, checked_name};
pub use meta::{Held, Input, Kernel, Meta, Refusal, SCHEMA};
pub use race::{Race, Series, Times};
pub use row::{
    COLUMNS, ExactValue, ISAS, Interval, Key, Metric, Record, Row, read_csv, split_params,
    write_csv,
};
pub use source::{Commit, commit, root};
pub use stat::Stat;
