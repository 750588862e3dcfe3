//! The pool allocates nothing a call. Alone in its file, since it counts every allocation of the process.

#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::runtime::pool::{Chunks, Pool};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.load(Relaxed);
    f();
    ALLOCATIONS.load(Relaxed) - before
}

#[test]
fn a_call_allocates_nothing() {
    let pool = Pool::new(4).unwrap();
    let sum = AtomicUsize::new(0);
    let jobs = |n: usize| {
        for _ in 0..n {
            pool.run(|w| {
                sum.fetch_add(w, Relaxed);
            });
            pool.chunks(100, 3, |range| {
                sum.fetch_add(range.len(), Relaxed);
            });
            pool.chunks_by(
                100,
                Chunks {
                    size: 8,
                    multiple: 4,
                },
                |_, range| {
                    sum.fetch_add(range.len(), Relaxed);
                },
            );
            pool.slices(100, 4, |_, range| {
                sum.fetch_add(range.len(), Relaxed);
            });
        }
    };
    jobs(10); // locks and thread-locals that are made on first use
    std::thread::sleep(std::time::Duration::from_millis(5)); // workers asleep: waking them is counted too
    assert_eq!(allocations(|| jobs(100)), 0);
    assert!(allocations(|| drop(std::hint::black_box(Box::new(1)))) > 0);
    assert_eq!(sum.into_inner(), 110 * (6 + 300));
}
