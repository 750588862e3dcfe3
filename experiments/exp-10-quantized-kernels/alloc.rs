//! Counts what each thread asks the allocator for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::runtime::pool::Pool;

/// The system's allocator, counting.
pub struct Counting;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator; the counter neither allocates nor has a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.with(|asked| asked.set(asked.get() + layout.size() as u64));
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Bytes that the threads of the pool ask for while `body` runs here.
pub fn bytes(pool: &Pool, body: impl FnOnce()) -> u64 {
    let asked = || {
        let sum = AtomicU64::new(0);
        pool.run(|_| {
            sum.fetch_add(ASKED.get(), Relaxed);
        });
        sum.into_inner()
    };
    let before = asked();
    body();
    asked() - before
}
