//! `tern lab-check`: whether the lab tells a difference where there is none.

use std::hint::{black_box, spin_loop};
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use anyhow::Result;
use common::lab::{self, Race, available_threads};

/// Measures one closure under two names, many times over: the speedup's interval must hold 1 in at least
/// 18 of 20 runs, on an idle machine and when a load is switched on halfway through each run.
#[derive(clap::Args)]
pub struct Args {
    /// Runs of each kind.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = lab::number::<u32>(1..=1000))]
    runs: u32,
}

/// Rounds of a run: those an experiment makes by default.
const ROUNDS: usize = 15;

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let needed = (args.runs * 18).div_ceil(20);
    let mut passed = true;
    for loaded in [false, true] {
        let mut held = 0;
        for _ in 0..args.runs {
            held += u32::from(one_run(loaded)?);
        }
        let load = if loaded {
            "load from halfway"
        } else {
            "no load of ours"
        };
        writeln!(
            out,
            "one closure under two names, {load}: 1 within the interval in {held} of {} runs, at least {needed} expected",
            args.runs
        )?;
        out.flush()?;
        passed &= held >= needed;
    }
    Ok(ExitCode::from(u8::from(!passed)))
}

/// Whether the interval of A against A holds 1.
fn one_run(loaded: bool) -> Result<bool> {
    let data: Vec<u64> = (0..32_768).collect();
    let work = || {
        black_box(
            black_box(&data)
                .iter()
                .fold(0_u64, |h, x| h.rotate_left(5) ^ x),
        );
    };
    let stop = AtomicBool::new(false);
    let times = thread::scope(|scope| {
        let mut race = Race::of(ROUNDS);
        race.add("a", work).add("a again", work);
        if loaded {
            race.halfway(|| {
                for _ in 0..available_threads() {
                    scope.spawn(|| {
                        while !stop.load(Relaxed) {
                            spin_loop();
                        }
                    });
                }
            });
        }
        let times = race.run();
        stop.store(true, Relaxed);
        times
    })?;
    Ok(times.speedup("a", "a again").holds(1.0))
}
