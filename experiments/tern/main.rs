//! The `tern` tool: one file a command, each thin over `common`.
//!
//! Exit code 0 when the command did its work, 1 when an equality that must hold does not, 2 for bad
//! flags or bad input, with one line on standard error.

mod advise;
mod cite;
mod claims;
mod compare;
mod convert;
mod generate;
mod inspect;
mod lab_check;
mod new_experiment;
mod perplexity;
mod report;
mod synthetic;
mod text;
mod tokenize;
mod verify;

use std::io::{self, BufWriter, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use common::lab;

/// Ternary language models on ordinary CPUs, measured.
#[derive(Parser)]
#[command(name = "tern", version, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(generate::Args),
    Perplexity(perplexity::Args),
    Tokenize(tokenize::Args),
    Inspect(inspect::Args),
    Convert(convert::Args),
    Synthetic(synthetic::Args),
    Advise(advise::Args),
    Compare(compare::Args),
    Claims(claims::Args),
    Cite(cite::Args),
    Report(report::Args),
    Verify(verify::Args),
    LabCheck(lab_check::Args),
    NewExperiment(new_experiment::Args),
}

/// What every command is: arguments in, text out. Results go to `out` (never `println!`, which
/// panics when the reader of a pipe has gone), progress to standard error.
fn run(command: Command, out: &mut dyn Write) -> Result<ExitCode> {
    match command {
        Command::Generate(args) => generate::run(&args, out),
        Command::Perplexity(args) => perplexity::run(&args, out),
        Command::Tokenize(args) => tokenize::run(&args, out),
        Command::Inspect(args) => inspect::run(&args, out),
        Command::Convert(args) => convert::run(&args, out),
        Command::Synthetic(args) => synthetic::run(&args, out),
        Command::Advise(args) => advise::run(&args, out),
        Command::Compare(args) => compare::run(&args, out),
        Command::Claims(args) => claims::run(&args, out),
        Command::Cite(args) => cite::run(&args, out),
        Command::Report(args) => report::run(&args, out),
        Command::Verify(args) => verify::run(&args, out),
        Command::LabCheck(args) => lab_check::run(&args, out),
        Command::NewExperiment(args) => new_experiment::run(&args, out),
    }
}

fn main() -> ExitCode {
    let command = lab::taking_negative_numbers(Cli::command());
    let parsed = command
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return lab::refuse_flags("tern", &error),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = run(cli.command, &mut out).and_then(|code| {
        out.flush()?;
        Ok(code)
    });
    match outcome {
        Ok(code) => code,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // What was computed before the error is still worth reading; the error itself is
            // reported whether or not this succeeds.
            let _ = out.flush();
            lab::complain("tern", &format!("{error:#}"))
        }
    }
}

/// The reader of our output stopped reading (`tern inspect FILE | head`): nothing is wrong.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
