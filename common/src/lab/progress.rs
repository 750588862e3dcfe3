//! Progress on standard error: a spinner on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Cheap to clone; every clone shows the same line.
#[derive(Clone)]
pub(super) struct Progress(Arc<State>);

struct State {
    bar: Option<ProgressBar>,
    plain: bool,
    label: Mutex<(String, Instant)>,
}

/// Without a terminal, steps within one label are reported no more often than this.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

impl Progress {
    pub fn new() -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        let plain = bar.is_none();
        Self::with(bar, plain)
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self::with(None, false)
    }

    fn with(bar: Option<ProgressBar>, plain: bool) -> Self {
        let label = Mutex::new((String::new(), Instant::now()));
        Progress(Arc::new(State { bar, plain, label }))
    }

    /// What is being done now.
    pub fn label(&self, text: String) {
        if let Some(bar) = &self.0.bar {
            bar.set_message(text.clone());
        } else if self.0.plain {
            say(&text);
        }
        if let Ok(mut label) = self.0.label.lock() {
            *label = (text, Instant::now());
        }
    }

    /// `done` of `total` steps of what the label says.
    pub fn step(&self, done: usize, total: usize) {
        let Ok(mut label) = self.0.label.lock() else {
            return; // a thread that panicked while printing; progress is not worth another panic
        };
        let line = format!("{}: round {done} of {total}", label.0);
        if let Some(bar) = &self.0.bar {
            bar.set_message(line);
        } else if self.0.plain && label.1.elapsed() >= PLAIN_INTERVAL {
            label.1 = Instant::now();
            say(&line);
        }
    }

    /// Runs `print` with the spinner out of the way.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.0.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Removes the spinner.
    pub fn finish(&self) {
        if let Some(bar) = &self.0.bar {
            bar.finish_and_clear();
        }
    }
}

fn say(line: &str) {
    let _ = writeln!(stderr(), "  .. {line}"); // nobody is left to tell when this fails
}
