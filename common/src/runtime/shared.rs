//! One slice, many writers.

use std::ops::Range;

/// A slice that threads write disjoint parts of.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a, T> {
    base: *mut T,
    len: usize,
    owner: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the parts are handed out by `part` alone, whose contract keeps them disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared {
            base: slice.as_mut_ptr(),
            len: slice.len(),
            owner: std::marker::PhantomData,
        }
    }

    /// A part.
    ///
    /// # Safety
    /// As long as the part lives, no other part that overlaps it does.
    ///
    /// # Panics
    /// If the range is outside the slice.
    #[allow(clippy::mut_from_ref)] // the contract
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of {}",
            self.len
        );
        // SAFETY: inside the slice, and disjoint from other parts by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(range.start), range.len()) }
    }
}
