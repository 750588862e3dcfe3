//! A persistent pool of threads: one job at a time, one barrier a job, nothing allocated.
//!
//! Between jobs a worker spins for a moment, then sleeps; the caller is worker 0 and waits in the same way. [`Pool::run`]
//! makes every worker take part. [`Pool::chunks`] gives each thread an equal share of the chunks, next to each other, so that it reads
//! memory in one stream and finds in its caches what it had there in the last call; a thread that is done takes chunks from
//! the end of another's share. When all are gone the caller *closes* the job: a worker that did not come in time, because its core was busy
//! or it was still waking up, is not waited for. A preempted worker so costs the chunk it holds and no more, and cores of
//! different speed (P and E cores, or one with a busy neighbour) share the work by the speed they show, with nothing to configure.
//!
//! The protocol is one 64-bit word, the gate. Whatever two sides must agree on ("the job is open" and "I sleep",
//! "I was the last" and "the caller sleeps") are parts of that word, changed by read-modify-write, so that one
//! order of events holds for all. `just loom` explores the orders.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

#[cfg(loom)]
use loom::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::*},
    sync::{Arc, Condvar, Mutex},
    thread,
};
#[cfg(not(loom))]
use std::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering::*},
    sync::{Arc, Condvar, Mutex},
    thread,
};

/// The most threads a pool may have.
pub const MAX_THREADS: usize = 1024;

/// Threads to use unless told otherwise: what the affinity mask and, on Linux, the CPU quota of the container allow.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

// The gate, from the lowest bit: workers inside the job, flags, sleeping workers, number of the job.
const INSIDE: u64 = 0xfff;
/// A job may be entered.
const OPEN: u64 = 1 << 12;
/// Every worker must enter, and was counted as inside when the job opened.
const ALL: u64 = 1 << 13;
/// The caller sleeps until nobody is inside.
const CALLER_SLEEPS: u64 = 1 << 14;
/// The pool is being dropped.
const STOP: u64 = 1 << 15;
const SLEEPER: u64 = 1 << 16;
const SLEEPERS: u64 = 0xffff << 16;
const JOB: u64 = 1 << 32;

/// How long a worker looks for the next job, and the caller for the last worker, before it sleeps. Longer than the
/// steps between two matrices of a model take, and short enough that the system can soon move a preempted worker
/// to the core that the caller leaves.
const SPIN: Duration = Duration::from_micros(100);
/// The same with more threads than cores, where a spinning thread holds up another that has work.
const SPIN_CROWDED: Duration = Duration::from_micros(2);

/// Threads that wait for a condition on the gate.
struct Bed {
    lock: Mutex<()>,
    wake: Condvar,
}

impl Bed {
    fn new() -> Self {
        Self {
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Sleeps until `ready`. Whoever makes it so calls [`Bed::wake_all`] afterwards.
    fn until(&self, ready: impl Fn() -> bool) {
        // Nothing panics under the lock, so a poisoned one cannot happen; it guards no data anyway.
        let mut guard = self.lock.lock().unwrap_or_else(|e| e.into_inner());
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn wake_all(&self) {
        // With the lock held, a sleeper has either not checked its condition yet or already waits.
        let _guard = self.lock.lock().unwrap_or_else(|e| e.into_inner());
        self.wake.notify_all();
    }
}

/// A job as the workers see it: a closure on the caller's stack.
struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
}

/// What one thread changes often and others read, on a line of its own (two, since lines are fetched in pairs).
#[repr(align(128))]
struct Line<T>(T);

/// Chunks that are left to a thread: the first in the low half, the end in the high half.
struct Share(AtomicU64);

impl Share {
    /// Ordered by the gate.
    fn set(&self, chunks: Range<u32>) {
        let packed = u64::from(chunks.end) << 32 | u64::from(chunks.start);
        self.0.store(packed, Relaxed);
    }

    /// The first chunk for its owner, the last for anyone else.
    fn take(&self, owner: bool) -> Option<u32> {
        let mut share = self.0.load(Relaxed);
        loop {
            let (start, end) = (share as u32, (share >> 32) as u32);
            if start >= end {
                return None;
            }
            let (taken, left) = if owner {
                (start, share + 1)
            } else {
                (end - 1, share - (1 << 32))
            };
            // Nothing but the share itself is passed on here: Relaxed.
            match self.0.compare_exchange_weak(share, left, Relaxed, Relaxed) {
                Ok(_) => return Some(taken),
                Err(now) => share = now,
            }
        }
    }
}

struct Shared {
    gate: Line<AtomicU64>,
    job: AtomicPtr<Job<'static>>,
    /// The chunks that are left to each thread.
    shares: Box<[Line<Share>]>,
    workers: Bed,
    caller: Bed,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    spin: Duration,
    timed: AtomicBool,
    times: Line<Times>,
}

/// What [`BarrierTime`] is made from; all times in ns since `epoch`.
struct Times {
    epoch: Instant,
    jobs: AtomicU64,
    caller: AtomicU64,
    all: AtomicU64,
    /// Of the job that runs: workers that left, and the sum of the times at which they did.
    left: AtomicU64,
    left_at: AtomicU64,
}

/// Time lost at barriers while [`Pool::time_barriers`] was on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BarrierTime {
    /// Jobs timed.
    pub jobs: u64,
    /// From the caller having no more work until the last worker was done, ns, summed over jobs.
    pub caller_ns: u64,
    /// The same summed over every thread that took part, the caller too.
    pub threads_ns: u64,
}

impl Times {
    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn end_of_job(&self, caller_done: u64) {
        let (now, left) = (self.now(), self.left.swap(0, Relaxed));
        let waited = now.saturating_sub(caller_done);
        let workers = (now.saturating_mul(left)).saturating_sub(self.left_at.swap(0, Relaxed));
        self.jobs.fetch_add(1, Relaxed);
        self.caller.fetch_add(waited, Relaxed);
        self.all.fetch_add(waited.saturating_add(workers), Relaxed);
    }
}

/// Spins until `ready` gives something or the time is over.
fn spin<T>(time: Duration, ready: impl Fn() -> Option<T>) -> Option<T> {
    if let Some(x) = ready() {
        return Some(x);
    }
    if cfg!(loom) || time.is_zero() {
        return None;
    }
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..16 {
            std::hint::spin_loop();
            if let Some(x) = ready() {
                return Some(x);
            }
        }
    }
    None
}

impl Shared {
    /// Whether a worker that did job `seen` last has something to do: a job that is open, or leaving.
    fn news(gate: u64, seen: u64) -> bool {
        gate & STOP != 0 || (gate & OPEN != 0 && gate / JOB != seen)
    }

    /// Waits for the next job and enters it; gives its number, or `None` when the pool is dropped.
    fn enter(&self, seen: u64) -> Option<u64> {
        let gate = &self.gate.0;
        let news = || Some(gate.load(Acquire)).filter(|&g| Self::news(g, seen));
        let mut g = spin(self.spin, news).unwrap_or(0);
        loop {
            if g & STOP != 0 {
                return None;
            } else if Self::news(g, seen) {
                if g & ALL != 0 {
                    return Some(g / JOB); // counted when it opened
                }
                match gate.compare_exchange(g, g + 1, AcqRel, Acquire) {
                    Ok(_) => return Some(g / JOB),
                    Err(now) => g = now,
                }
            } else {
                // An `open` after this line sees the sleeper and wakes it; one before it is seen by `until`.
                gate.fetch_add(SLEEPER, AcqRel);
                self.workers.until(|| news().is_some());
                g = gate.fetch_sub(SLEEPER, AcqRel) - SLEEPER;
            }
        }
    }

    fn leave(&self) {
        let before = self.gate.0.fetch_sub(1, AcqRel);
        if before & INSIDE == 1 && before & CALLER_SLEEPS != 0 {
            self.caller.wake_all();
        }
    }

    /// Lets workers in: `counted` of them must come, or as many as like if 0.
    fn open(&self, counted: u64) {
        let all = if counted == 0 { 0 } else { ALL };
        // Nobody is inside and all flags but STOP are clear, so that nothing carries over.
        let before = self.gate.0.fetch_add(JOB + OPEN + all + counted, AcqRel);
        if before & SLEEPERS != 0 {
            self.workers.wake_all();
        }
    }

    /// Waits until nobody is inside.
    fn wait(&self) {
        let gate = &self.gate.0;
        let empty = || gate.load(Acquire) & INSIDE == 0;
        if spin(self.spin, || empty().then_some(())).is_some() {
            return;
        }
        // A `leave` after this line sees the flag; one before it is seen by `until`.
        gate.fetch_or(CALLER_SLEEPS, AcqRel);
        self.caller.until(empty);
        gate.fetch_and(!CALLER_SLEEPS, AcqRel);
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        while let Some(number) = self.enter(seen) {
            seen = number;
            // SAFETY: the pointer was stored before the gate opened, and this worker is inside: `Pool::broadcast`, on
            // whose stack the job is, does not return or unwind before `leave`.
            let job = unsafe { &*self.job.load(Relaxed) };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (job.body)(worker))) {
                self.keep_panic(payload);
            }
            if self.timed.load(Relaxed) {
                let times = &self.times.0;
                times.left_at.fetch_add(times.now(), Relaxed);
                times.left.fetch_add(1, Relaxed);
            }
            self.leave();
        }
    }

    /// Keeps the first payload of a job. The others are leaked: dropping one could panic again.
    fn keep_panic(&self, payload: Box<dyn Any + Send>) {
        let mut slot = self.panic.lock().unwrap_or_else(|e| e.into_inner());
        if slot.is_none() {
            *slot = Some(payload);
        } else {
            std::mem::forget(payload);
        }
    }
}

/// A fixed set of threads that run one job after another. Dropping it ends them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    busy: AtomicBool,
}

/// How [`Pool::chunks_by`] cuts up the items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Items a chunk.
    pub size: usize,
    /// Every chunk but the last starts and ends at a multiple of this (the rows of a tile); `size` is rounded up to it.
    pub multiple: usize,
}

impl Chunks {
    /// Items a part: a chunk if each thread gets four or more of them, else equal parts, one a thread.
    fn part(self, items: usize, threads: usize) -> usize {
        let multiple = self.multiple.max(1);
        let up = |n: usize| {
            n.max(1)
                .checked_next_multiple_of(multiple)
                .unwrap_or(usize::MAX)
        };
        let chunk = up(self.size);
        if items.div_ceil(chunk) >= threads.saturating_mul(4) {
            chunk
        } else {
            up(items.div_ceil(threads))
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the calling one counted: `threads - 1` are started.
    ///
    /// # Errors
    /// 0 threads, more than [`MAX_THREADS`], or more than the system starts.
    pub fn new(threads: usize) -> Result<Self> {
        ensure!(
            (1..=MAX_THREADS).contains(&threads),
            "threads: found {threads}, expected 1 to {MAX_THREADS}"
        );
        let crowded = threads > default_threads();
        let shared = Arc::new(Shared {
            gate: Line(AtomicU64::new(0)),
            job: AtomicPtr::new(std::ptr::null_mut()),
            shares: (0..threads)
                .map(|_| Line(Share(AtomicU64::new(0))))
                .collect(),
            workers: Bed::new(),
            caller: Bed::new(),
            panic: Mutex::new(None),
            spin: if crowded { SPIN_CROWDED } else { SPIN },
            timed: AtomicBool::new(false),
            times: Line(Times {
                epoch: Instant::now(),
                jobs: AtomicU64::new(0),
                caller: AtomicU64::new(0),
                all: AtomicU64::new(0),
                left: AtomicU64::new(0),
                left_at: AtomicU64::new(0),
            }),
        });
        // Made before its threads, so that those started are joined if a later one is refused.
        let mut pool = Self {
            shared,
            workers: Vec::with_capacity(threads - 1),
            busy: AtomicBool::new(false),
        };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let started = thread::Builder::new()
                .name(format!("pool-{worker}"))
                .spawn(move || shared.work(worker))
                .with_context(|| format!("threads: the system refused number {worker}"))?;
            pool.workers.push(started);
        }
        Ok(pool)
    }

    /// Threads of the pool, the calling one counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(0)` here and `body(w)` once on each other thread w, all at the same time, and returns when all are done.
    ///
    /// # Panics
    /// If a call panics, with its payload, after all others returned. If the pool is at work already: a job may not
    /// start another on its own pool, and two threads may not share one at the same time.
    pub fn run(&self, body: impl Fn(usize) + Sync) {
        self.exclusive(|| self.broadcast(true, &body));
    }

    /// Calls `body` on disjoint ranges that together are `0..items`: `chunk` items each, an equal share of them for each thread and
    /// what is left of a share for whichever thread is free; equal parts, one a thread, if that makes fewer than four chunks a thread.
    ///
    /// # Panics
    /// As [`Pool::run`]; ranges that no thread reached before may be left out then. If there are 2^32 chunks or more.
    pub fn chunks(&self, items: usize, chunk: usize, body: impl Fn(Range<usize>) + Sync) {
        let chunks = Chunks {
            size: chunk,
            multiple: 1,
        };
        self.chunks_by(items, chunks, |_, range| body(range));
    }

    /// As [`Pool::chunks`] on boundaries that are multiples of a tile; `body` also gets its thread's number, to index
    /// scratch memory with.
    ///
    /// # Panics
    /// As [`Pool::chunks`].
    pub fn chunks_by(&self, items: usize, by: Chunks, body: impl Fn(usize, Range<usize>) + Sync) {
        let part = by.part(items, self.threads());
        let parts = u32::try_from(items.div_ceil(part)).expect("fewer than 2^32 chunks");
        let shares = &self.shared.shares;
        let all = |worker: usize| {
            for turn in 0..shares.len() {
                let share = &shares[(worker + turn) % shares.len()].0;
                while let Some(i) = share.take(turn == 0) {
                    let start = i as usize * part;
                    body(worker, start..items.min(start.saturating_add(part)));
                }
            }
        };
        self.exclusive(|| {
            for (worker, share) in shares.iter().enumerate() {
                let chunks = slice(parts as usize, 1, worker, shares.len());
                share.0.set(chunks.start as u32..chunks.end as u32);
            }
            match parts {
                0 => {}
                1 => all(0),
                _ => self.broadcast(false, &all),
            }
        });
    }

    /// As [`Pool::chunks_by`] with one fixed slice for each thread, the same in every call: equal parts in multiples of
    /// `multiple`, in order. Threads past the last part are not called.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn slices(&self, items: usize, multiple: usize, body: impl Fn(usize, Range<usize>) + Sync) {
        self.run(|worker| {
            let range = slice(items, multiple, worker, self.threads());
            if !range.is_empty() {
                body(worker, range);
            }
        });
    }

    /// Starts or stops timing barriers, and forgets what was counted. Costs two clock readings a thread and job.
    ///
    /// # Panics
    /// As [`Pool::run`], when the pool is at work.
    pub fn time_barriers(&self, on: bool) {
        self.exclusive(|| {
            let times = &self.shared.times.0;
            for count in [
                &times.jobs,
                &times.caller,
                &times.all,
                &times.left,
                &times.left_at,
            ] {
                count.store(0, Relaxed);
            }
            self.shared.timed.store(on, Relaxed);
        });
    }

    /// Time lost at barriers since [`Pool::time_barriers`].
    pub fn barrier_time(&self) -> BarrierTime {
        let times = &self.shared.times.0;
        BarrierTime {
            jobs: times.jobs.load(Relaxed),
            caller_ns: times.caller.load(Relaxed),
            threads_ns: times.all.load(Relaxed),
        }
    }

    /// Runs `f` as the only job of the pool.
    fn exclusive<R>(&self, f: impl FnOnce() -> R) -> R {
        assert!(
            !self.busy.swap(true, Acquire),
            "the pool is at work: a job started another on its own pool, or two threads used it at once"
        );
        let result = catch_unwind(AssertUnwindSafe(f));
        self.busy.store(false, Release);
        result.unwrap_or_else(|payload| resume_unwind(payload))
    }

    /// Runs `body` on this thread and on the workers: all of them, or those that come before this thread is done. Called by the only
    /// job of the pool.
    fn broadcast(&self, all: bool, body: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return body(0);
        }
        let shared = &*self.shared;
        let job = Job { body };
        // The lifetime is forgotten here; SAFETY in `Shared::work` says why that is sound.
        let job = (&raw const job).cast_mut().cast::<Job<'static>>();
        shared.job.store(job, Relaxed); // ordered by the gate
        shared.open(if all { self.workers.len() as u64 } else { 0 });
        // From here to the end of `wait` nothing may unwind.
        let mine = catch_unwind(AssertUnwindSafe(|| body(0)));
        let timed = shared.timed.load(Relaxed);
        let done = if timed { shared.times.0.now() } else { 0 };
        if all {
            shared.wait();
            shared.gate.0.fetch_and(!(OPEN | ALL), AcqRel);
        } else {
            shared.gate.0.fetch_and(!OPEN, AcqRel);
            shared.wait();
        }
        if timed {
            shared.times.0.end_of_job(done);
        }
        let theirs = shared
            .panic
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .take();
        if let Some(payload) = mine.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

/// The fixed slice of `0..items` that belongs to `worker` of `threads`, see [`Pool::slices`].
pub fn slice(items: usize, multiple: usize, worker: usize, threads: usize) -> Range<usize> {
    let multiple = multiple.max(1);
    // Shares of whole tiles that differ by one at most.
    let tiles = items.div_ceil(multiple);
    let (share, more) = (tiles / threads, tiles % threads);
    let at = |w: usize| items.min((w * share + w.min(more)).saturating_mul(multiple));
    at(worker)..at(worker + 1)
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.gate.0.fetch_or(STOP, AcqRel);
        self.shared.workers.wake_all();
        for worker in self.workers.drain(..) {
            // A worker catches what its jobs throw, so that there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests;
