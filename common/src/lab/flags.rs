//! The flags every experiment takes.

use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::path::PathBuf;
use std::str::FromStr;

use clap::Command;

use super::machine;
use crate::runtime::pool::MAX_THREADS;

/// Flags every experiment takes.
#[derive(clap::Args, Clone, Debug)]
pub struct Flags {
    /// Seconds instead of minutes: small shapes, few rounds; rows go to target/quick.
    #[arg(long)]
    pub quick: bool,
    /// Thread counts [default: 1 and all that affinity and quota allow].
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = number(1..=MAX_THREADS))]
    pub threads: Vec<usize>,
    /// Folder for the files [default: results/<machine>].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Name of the machine's folder [default: from CPU model and core count].
    #[arg(long, value_name = "NAME", value_parser = machine::checked_name)]
    pub machine: Option<String>,
    /// Seed of every random input.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u64>(0..))]
    pub seed: u64,
    /// Rounds of each comparison [default: 15, 5 with --quick].
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=10_000))]
    pub rounds: Option<u32>,
    /// Model file, where one is used [default: the one in the repo].
    #[arg(long, value_name = "FILE.gguf")]
    pub model: Option<PathBuf>,
}

/// A parser of numbers in a range, whose refusal says what was expected.
pub fn number<T>(
    range: impl RangeBounds<T> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display,
{
    move |text| {
        if let Ok(n) = text.parse()
            && range.contains(&n)
        {
            return Ok(n);
        }
        let whole = if "0.5".parse::<T>().is_ok() {
            ""
        } else {
            "whole "
        };
        let bounds = match (range.start_bound(), range.end_bound()) {
            (Bound::Included(low), Bound::Included(high)) => format!(" from {low} to {high}"),
            (Bound::Included(low), _) => format!(", at least {low}"),
            _ => String::new(),
        };
        Err(format!("expected a {whole}number{bounds}"))
    }
}

/// The same command, where every flag takes a negative number as its value, so that what refuses it names the flag.
pub fn taking_negative_numbers(command: Command) -> Command {
    command
        .mut_args(|arg| {
            let takes = arg.get_action().takes_values();
            arg.allow_negative_numbers(takes)
        })
        .mut_subcommands(taking_negative_numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches, Parser};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(args: &[&str]) -> Result<Flags, String> {
        let args = ["exp"].iter().chain(args);
        taking_negative_numbers(Cli::command())
            .try_get_matches_from(args)
            .and_then(|matches| Cli::from_arg_matches(&matches))
            .map(|cli| cli.flags)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn thread_lists_and_defaults() {
        let flags = parse(&["--threads", "1,2,4", "--rounds", "3"]).unwrap();
        assert_eq!(flags.threads, [1, 2, 4]);
        assert_eq!((flags.seed, flags.rounds), (1, Some(3)));
        assert!(parse(&[]).unwrap().threads.is_empty());
    }

    #[test]
    fn bad_flags_are_refused() {
        for bad in [
            &["--threads", "0"][..],
            &["--threads", "1,"],
            &["--threads", "99999"],
            &["--rounds", "0"],
            &["--machine", "../up"],
            &["--seed", "-1"],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        let error = parse(&["--threads", "-1"]).unwrap_err();
        assert!(error.contains("'-1' for '--threads"), "{error}");
        assert!(
            error.contains("expected a whole number from 1 to 1024"),
            "{error}"
        );
    }

    #[test]
    fn numbers_are_whole_or_not_as_their_type() {
        assert_eq!(number(0..)("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(number(0.0..=1.0f32)("0.5"), Ok(0.5));
        let refused = |found: Result<f32, String>| found.unwrap_err();
        for bad in ["NaN", "-1", "x", "", "1.5"] {
            assert_eq!(
                refused(number(0.0..=1.0)(bad)),
                "expected a number from 0 to 1"
            );
        }
        let of_count: Result<usize, String> = number(1..)("0.5");
        assert_eq!(of_count.unwrap_err(), "expected a whole number, at least 1");
    }
}
