//! The flags every experiment takes.

use std::path::PathBuf;

use super::machine;
use crate::runtime::pool::MAX_THREADS;

/// Flags every experiment takes.
#[derive(clap::Args, Clone, Debug)]
pub struct Flags {
    /// Seconds instead of minutes: small shapes, few rounds; rows go to target/quick.
    #[arg(long)]
    pub quick: bool,
    /// Thread counts [default: 1 and all that affinity and quota allow].
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = thread_count)]
    pub threads: Vec<usize>,
    /// Folder for the files [default: results/<machine>].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Name of the machine's folder [default: from CPU model and core count].
    #[arg(long, value_name = "NAME", value_parser = machine::checked_name)]
    pub machine: Option<String>,
    /// Seed of every random input.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Rounds of each comparison [default: 15, 5 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: Option<u32>,
    /// Model file, where one is used [default: the one in the repo].
    #[arg(long, value_name = "FILE.gguf")]
    pub model: Option<PathBuf>,
}

fn thread_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MAX_THREADS).contains(&n) => Ok(n),
        _ => Err(format!("expected a count from 1 to {MAX_THREADS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        flags: Flags,
    }

    fn parse(args: &[&str]) -> Result<Flags, String> {
        let args = ["exp"].iter().chain(args);
        Cli::try_parse_from(args)
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
    }
}
