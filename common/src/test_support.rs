//! For tests, of this crate and of others: memory that faults when it is read past its end.

use std::ops::{Deref, DerefMut};
use std::ptr;

/// Bytes between two unreadable pages. With `slack` 0 the last byte stands right before the second one, so that a
/// read past the end faults, in release builds too; a slack of 1 to 63 moves the buffer down by as many bytes, so
/// that it starts at any offset from a cache line.
pub struct GuardedBuf {
    map: *mut u8,
    map_len: usize,
    start: usize,
    len: usize,
    slack: usize,
}

/// What the slack after the data holds: [`GuardedBuf::intact`] looks for it.
const SLACK: u8 = 0xA5;

impl GuardedBuf {
    /// `len` bytes of 0.
    ///
    /// # Panics
    /// The system refuses the memory.
    pub fn new(len: usize, slack: usize) -> Self {
        // SAFETY: sysconf only reads a constant of the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let middle = (len + slack).max(1).next_multiple_of(page);
        let map_len = middle + 2 * page;
        // SAFETY: a new anonymous mapping, at an address that the system picks.
        let map = unsafe {
            libc::mmap(
                ptr::null_mut(),
                map_len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANON,
                -1,
                0,
            )
        };
        assert_ne!(map, libc::MAP_FAILED, "mmap of {map_len} bytes");
        let map = map.cast::<u8>();
        // SAFETY: whole pages inside the mapping just made.
        let failed = unsafe {
            libc::mprotect(
                map.add(page).cast(),
                middle,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        assert_eq!(failed, 0, "mprotect of {middle} bytes");
        let start = page + middle - len - slack;
        // SAFETY: `middle` bytes from `page` on are writable, and start + len + slack = page + middle.
        unsafe { map.add(start + len).write_bytes(SLACK, slack) };
        Self {
            map,
            map_len,
            start,
            len,
            slack,
        }
    }

    /// A copy of `bytes`.
    ///
    /// # Panics
    /// As [`GuardedBuf::new`].
    pub fn copy_of(bytes: &[u8], slack: usize) -> Self {
        let mut buf = Self::new(bytes.len(), slack);
        buf.copy_from_slice(bytes);
        buf
    }

    /// Whether nothing was written between the end and the guard page.
    pub fn intact(&self) -> bool {
        // SAFETY: the slack follows the data, inside the writable pages, and was filled in `new`.
        let slack =
            unsafe { std::slice::from_raw_parts(self.map.add(self.start + self.len), self.slack) };
        slack.iter().all(|&b| b == SLACK)
    }
}

impl Deref for GuardedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes (0 from the system), readable while `self` lives.
        unsafe { std::slice::from_raw_parts(self.map.add(self.start), self.len) }
    }
}

impl DerefMut for GuardedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, writable, and borrowed uniquely with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.map.add(self.start), self.len) }
    }
}

impl Drop for GuardedBuf {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nothing borrows any more.
        unsafe { libc::munmap(self.map.cast(), self.map_len) };
    }
}

// SAFETY: the memory belongs to this value alone, as that of a `Vec<u8>` does.
unsafe impl Send for GuardedBuf {}
// SAFETY: `&GuardedBuf` only reads.
unsafe impl Sync for GuardedBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_it_was_given_at_every_offset() {
        let bytes: Vec<u8> = (0..=255).cycle().take(4999).collect();
        for len in [0, 1, 34, 4096, 4999] {
            for slack in 0..64 {
                let mut buf = GuardedBuf::copy_of(&bytes[..len], slack);
                assert_eq!(&*buf, &bytes[..len]);
                assert_eq!((buf.as_ptr() as usize + len + slack) % 4096, 0);
                assert!(buf.intact());
                buf.fill(1);
                assert!(buf.intact());
            }
        }
    }

    /// The guard page does its work: a child process reads one byte past the end and is killed.
    #[test]
    fn a_read_past_the_end_faults() {
        let buf = GuardedBuf::new(34, 0);
        let end = buf.as_ptr_range().end;
        // SAFETY: the child makes one read and then leaves by `_exit`, without touching locks or the heap.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: not sound, on purpose: the fault is what is tested, in a process of its own.
            unsafe {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
                end.read_volatile();
                libc::_exit(0);
            }
        }
        let mut status = 0;
        // SAFETY: waits for the child just made and writes one int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status), "the read went through");
    }
}
