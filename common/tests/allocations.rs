//! A token costs no allocation, on any thread, with drafts and without.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::runtime::model::Options;
use common::runtime::nano;
use common::runtime::pool::Pool;
use common::runtime::session::{Session, Size};

/// Counts what is asked for.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_token_allocates_nothing() {
    let pool = Pool::new(2).unwrap();
    for bytes in [nano::PQ2_0, nano::PTQ1_0] {
        let (_, model) = nano::load("nano", bytes, &Options::default(), &pool).unwrap();
        let mut session = Session::new(
            &model,
            &pool,
            Size {
                context: 256,
                batch: 64,
                proposals: 8,
            },
        )
        .unwrap();
        session.advance(&[5; 70]).unwrap();
        let before = COUNT.load(Ordering::Relaxed);
        let mut sum = 0.0;
        for token in 0..20 {
            session.advance(&[token]).unwrap();
            sum += session.last_logits().unwrap()[0];
            session.propose(&[1, 2, 3, token]).unwrap();
            sum += session.logits(0..4).unwrap()[7];
            session.accept(2).unwrap();
        }
        session.advance(&[9; 40]).unwrap();
        assert_eq!(COUNT.load(Ordering::Relaxed), before);
        assert!(sum.is_finite());
    }
}
