//! Loom explores every order of small jobs; the rest runs on real threads.

#[cfg(loom)]
mod pool_loom {
    use super::super::*;
    use loom::cell::UnsafeCell;

    /// One plain cell a thread: loom reports an access that the pool does not order.
    struct Cells(Vec<UnsafeCell<usize>>);

    // SAFETY: loom fails the test if two threads reach one cell without an order between them.
    unsafe impl Sync for Cells {}

    impl Cells {
        fn new(n: usize) -> Self {
            Self((0..n).map(|_| UnsafeCell::new(0)).collect())
        }

        fn add(&self, i: usize, x: usize) {
            // SAFETY: as above.
            self.0[i].with_mut(|cell| unsafe { *cell += x });
        }

        fn take(&self) -> Vec<usize> {
            // SAFETY: as above.
            let take =
                |cell: &UnsafeCell<usize>| cell.with_mut(|x| unsafe { std::mem::take(&mut *x) });
            self.0.iter().map(take).collect()
        }
    }

    fn explore(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(f);
    }

    #[test]
    fn pool_loom_run_then_run_then_drop() {
        explore(3, || {
            let pool = Pool::new(2).unwrap();
            let cells = Cells::new(2);
            for job in 1..=2 {
                cells.add(0, 10);
                cells.add(1, 10);
                pool.run(|w| cells.add(w, job));
                assert_eq!(cells.take(), [10 + job; 2]);
            }
        });
    }

    #[test]
    fn pool_loom_chunks_then_run() {
        explore(3, || {
            let pool = Pool::new(2).unwrap();
            let cells = Cells::new(2);
            pool.chunks(2, 1, |range| cells.add(range.start, range.len()));
            assert_eq!(cells.take(), [1; 2]);
            pool.run(|w| cells.add(w, 5));
            assert_eq!(cells.take(), [5; 2]);
        });
    }

    #[test]
    fn pool_loom_chunks_twice() {
        explore(3, || {
            let pool = Pool::new(2).unwrap();
            let cells = Cells::new(2);
            for _ in 0..2 {
                pool.chunks(2, 1, |range| cells.add(range.start, range.len()));
                assert_eq!(cells.take(), [1; 2]);
            }
        });
    }

    #[test]
    fn pool_loom_run_on_three_threads() {
        explore(1, || {
            let pool = Pool::new(3).unwrap();
            let cells = Cells::new(3);
            pool.run(|w| cells.add(w, 1));
            assert_eq!(cells.take(), [1; 3]);
        });
    }

    #[test]
    fn pool_loom_chunks_on_three_threads() {
        explore(1, || {
            let pool = Pool::new(3).unwrap();
            let cells = Cells::new(3);
            pool.chunks(3, 1, |range| cells.add(range.start, 1));
            assert_eq!(cells.take(), [1; 3]);
        });
    }

    #[test]
    fn pool_loom_timed() {
        explore(2, || {
            let pool = Pool::new(2).unwrap();
            pool.time_barriers(true);
            pool.run(|_| ());
            assert_eq!(pool.barrier_time().jobs, 1);
        });
    }
}

#[cfg(not(loom))]
mod threads {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    use proptest::prelude::*;

    use super::super::*;

    fn message(payload: &(dyn Any + Send)) -> &str {
        let text = payload.downcast_ref::<&str>().copied();
        text.or(payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("?")
    }

    fn panics(f: impl FnOnce()) -> String {
        let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("no panic");
        message(&*payload).to_owned()
    }

    #[test]
    fn every_worker_once_and_at_the_same_time() {
        for threads in 1..=9 {
            let pool = Pool::new(threads).unwrap();
            let meet = Barrier::new(threads);
            for _ in 0..20 {
                let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(|w| {
                    meet.wait();
                    calls[w].fetch_add(1, Relaxed);
                });
                assert!(calls.iter().all(|n| n.load(Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_hundred_thousand_tiny_jobs() {
        let pool = Pool::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for i in 0..100_000 {
            pool.chunks(12, 1, |range| {
                sum.fetch_add(range.start, Relaxed);
            });
            if i % 16 == 0 {
                pool.run(|w| {
                    sum.fetch_add(w, Relaxed);
                });
            }
        }
        assert_eq!(sum.into_inner(), 100_000 * 66 + 6250 * 3);
    }

    /// The order of a sum in floats shows the cut, so this fails if bits depend on who computes.
    #[test]
    fn the_same_bits_for_any_thread_count() {
        let x: Vec<f32> = (0..1000_u16).map(|i| f32::from(i).sin()).collect();
        let rows = 777;
        let result = |threads: usize, chunk: usize| {
            let out: Vec<Mutex<f32>> = (0..rows).map(|_| Mutex::new(0.0)).collect();
            Pool::new(threads).unwrap().chunks(rows, chunk, |range| {
                for row in range {
                    *out[row].lock().unwrap() = x.iter().skip(row % 50).sum();
                }
            });
            let bits = |m: Mutex<f32>| m.into_inner().unwrap().to_bits();
            out.into_iter().map(bits).collect::<Vec<u32>>()
        };
        let one = result(1, 64);
        for threads in [2, 3, 4, 8] {
            assert_eq!(result(threads, 64), one, "{threads} threads");
            assert_eq!(result(threads, 5), one, "{threads} threads");
        }
    }

    fn ranges(f: impl FnOnce(&Mutex<Vec<Range<usize>>>)) -> Vec<Range<usize>> {
        let seen = Mutex::new(Vec::new());
        f(&seen);
        let mut seen = seen.into_inner().unwrap();
        seen.sort_by_key(|r| r.start);
        seen
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn ranges_cover_all_once(
            items in 0_usize..5000, size in 0_usize..300, multiple in 0_usize..20, threads in 1_usize..6
        ) {
            let pool = Pool::new(threads).unwrap();
            let by = Chunks { size, multiple };
            let chunks = ranges(|seen| {
                pool.chunks_by(items, by, |_, range| seen.lock().unwrap().push(range));
            });
            let slices = ranges(|seen| {
                pool.slices(items, multiple, |w, range| {
                    assert_eq!(range, slice(items, multiple, w, threads));
                    seen.lock().unwrap().push(range);
                });
            });
            for ranges in [&chunks, &slices] {
                let mut end = 0;
                for range in ranges {
                    prop_assert_eq!(range.start, end);
                    prop_assert!(range.end > end);
                    prop_assert!(range.end == items || range.end.is_multiple_of(multiple.max(1)));
                    end = range.end;
                }
                prop_assert_eq!(end, items);
            }
            prop_assert!(slices.len() <= threads);
            prop_assert!(chunks.len() <= threads || chunks.len() >= 4 * threads);
        }
    }

    #[test]
    fn equal_parts_below_four_chunks_a_thread() {
        let part = |items, size, multiple, threads| Chunks { size, multiple }.part(items, threads);
        assert_eq!(part(512, 64, 1, 2), 64); // 8 chunks, 4 a thread
        assert_eq!(part(448, 64, 1, 2), 224); // 7 chunks
        assert_eq!(part(449, 64, 1, 2), 64); // 8 chunks, the last of one item
        assert_eq!(part(450, 64, 16, 3), 160);
        assert_eq!(part(1 << 20, 60, 16, 3), 64);
        assert_eq!(part(5, 64, 1, 8), 1);
        assert_eq!(part(usize::MAX, 0, usize::MAX, 4), usize::MAX);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(4).unwrap();
        for bad in 0..4 {
            let done = AtomicUsize::new(0);
            let text = panics(|| {
                pool.run(|w| {
                    assert!(w != bad, "worker {w} fails");
                    done.fetch_add(1, Relaxed);
                });
            });
            assert_eq!(text, format!("worker {bad} fails"));
            assert_eq!(done.into_inner(), 3, "the others finish first");
        }
        let text = panics(|| pool.run(|w| panic!("all fail, {w} too")));
        assert_eq!(text, "all fail, 0 too");
        let text = panics(|| pool.chunks(100, 1, |range| assert!(range.start != 50, "chunk 50")));
        assert_eq!(text, "chunk 50");
        pool.run(|_| ());
        drop(pool);
    }

    #[test]
    fn a_job_inside_a_job_is_refused() {
        let pool = Pool::new(3).unwrap();
        for inner in [0, 2] {
            let text = panics(|| {
                pool.run(|w| {
                    if w == inner {
                        pool.run(|_| ());
                    }
                });
            });
            assert!(text.starts_with("the pool is at work"), "{text}");
        }
        // Another pool inside a job is fine, and so is the same one afterwards.
        let sum = AtomicUsize::new(0);
        pool.run(|w| {
            Pool::new(2).unwrap().run(|inner| {
                sum.fetch_add(10 * w + inner, Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 2 * (10 + 20) + 3);
    }

    #[test]
    fn dropped_in_any_state() {
        for pause in [0, 0, 0, 1] {
            for threads in [1, 2, 5] {
                let pool = Pool::new(threads).unwrap();
                std::thread::sleep(Duration::from_millis(pause));
                drop(pool);
                let pool = Pool::new(threads).unwrap();
                pool.chunks(threads * 4, 1, |_| ());
                drop(pool);
            }
        }
    }

    #[test]
    fn sleepers_wake_up() {
        let pool = Pool::new(4).unwrap();
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(2)); // far beyond the spin
            let sum = AtomicUsize::new(0);
            pool.run(|w| {
                if w != 0 {
                    std::thread::sleep(Duration::from_millis(1)); // the caller sleeps too
                }
                sum.fetch_add(w, Relaxed);
            });
            assert_eq!(sum.into_inner(), 6);
        }
    }

    #[test]
    fn barrier_time_counts_the_slow_worker() {
        let pool = Pool::new(3).unwrap();
        pool.run(|_| ());
        assert_eq!(pool.barrier_time(), BarrierTime::default());
        pool.time_barriers(true);
        let caller_done = AtomicBool::new(false);
        pool.run(|w| {
            if w == 0 {
                caller_done.store(true, Release);
            } else {
                while !caller_done.load(Acquire) {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let time = pool.barrier_time();
        assert_eq!(time.jobs, 1);
        assert!(time.caller_ns > 0);
        assert!(time.threads_ns >= time.caller_ns);
        pool.time_barriers(false);
        pool.run(|_| ());
        assert_eq!(pool.barrier_time(), BarrierTime::default());
    }

    #[test]
    fn bad_thread_counts_are_errors() {
        let error = |n| Pool::new(n).err().unwrap().to_string();
        assert_eq!(error(0), "threads: found 0, expected 1 to 1024");
        assert_eq!(error(100_000), "threads: found 100000, expected 1 to 1024");
    }
}
