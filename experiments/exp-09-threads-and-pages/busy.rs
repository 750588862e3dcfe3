//! A process that wants a core, and threads that do not give theirs.

use std::io::Read;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result};
use common::runtime::pool::Pool;
use thread_priority::{ThreadPriority, set_current_thread_priority};

/// Tells this program that it is the neighbour.
const ASKED: &str = "TERN_BUSY_NEIGHBOUR";

pub fn is_asked() -> bool {
    std::env::var_os(ASKED).is_some()
}

/// Keeps a core busy until standard input ends, which it does with the experiment at the latest.
pub fn spin() -> ExitCode {
    std::thread::spawn(|| {
        // Whatever ends the read ends the process.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    loop {
        std::hint::spin_loop();
    }
}

/// A busy process.
pub struct Neighbour(Child);

impl Neighbour {
    /// Starts it, and gives the system a moment to place it.
    pub fn start() -> Result<Self> {
        let program = std::env::current_exe().context("this program's path")?;
        let child = Command::new(program)
            .env(ASKED, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("a busy process: cannot start")?;
        std::thread::sleep(Duration::from_millis(50));
        Ok(Neighbour(child))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It leaves at the end of its input; nothing is lost if it left before.
        let _ = self.0.wait();
    }
}

/// Raises the priority of all threads of a pool as far as it goes, or says why the system refuses.
pub fn raise(pool: &Pool) -> Result<(), String> {
    set(pool, ThreadPriority::Max)
}

/// Back to normal.
pub fn restore(pool: &Pool) -> Result<(), String> {
    // The middle of the crate's scale of 0 to 99: nice 0, normal priority.
    let middle = thread_priority::ThreadPriorityValue::try_from(52)?;
    set(pool, ThreadPriority::Crossplatform(middle))
}

fn set(pool: &Pool, priority: ThreadPriority) -> Result<(), String> {
    let refused = Mutex::new(None);
    pool.run(|_| {
        if let Err(error) = set_current_thread_priority(priority) {
            *refused.lock().unwrap_or_else(|e| e.into_inner()) = Some(format!("{error:?}"));
        }
    });
    refused
        .into_inner()
        .unwrap_or_else(|e| e.into_inner())
        .map_or(Ok(()), Err)
}
