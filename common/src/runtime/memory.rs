//! Memory for weights and measurements: aligned, zeroed, on huge pages where the system gives them.

use std::io;
use std::ops::{Deref, DerefMut};

use anyhow::{Context, Result};
use memmap2::MmapMut;

/// Size and alignment of a huge page on x86-64 and on Arm with 4 KB pages.
pub const HUGE_PAGE: usize = 2 << 20;

/// A zeroed buffer of bytes that starts on a page boundary, so on a cache line too. From 2 MB up it starts on a
/// multiple of 2 MB, and on Linux huge pages are asked for. Pages take memory when they are first touched.
pub struct AlignedBuf {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// `len` bytes, all 0.
    ///
    /// # Errors
    /// The system refuses that much memory.
    pub fn new(len: usize) -> Result<Self> {
        let buf = Self::with_small_pages(len)?;
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            // A kernel without huge pages refuses; the buffer works all the same, and `huge_pages_given` tells.
            let _ = buf
                .map
                .advise_range(memmap2::Advice::HugePage, buf.start, len);
        }
        Ok(buf)
    }

    /// The same memory without asking for huge pages: what they bring is measured against this.
    ///
    /// # Errors
    /// The system refuses that much memory.
    pub fn with_small_pages(len: usize) -> Result<Self> {
        let slack = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let map = len
            .max(1)
            .checked_add(slack)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
            .and_then(MmapMut::map_anon)
            .with_context(|| format!("memory: {len} bytes were refused"))?;
        let start = if slack == 0 {
            0
        } else {
            map.as_ptr().align_offset(HUGE_PAGE)
        };
        #[cfg(target_os = "linux")]
        if slack != 0 {
            let _ = map.advise_range(memmap2::Advice::NoHugePage, start, len);
        }
        Ok(Self { map, start, len })
    }

    /// A buffer that holds a copy of `bytes`.
    ///
    /// # Errors
    /// As [`AlignedBuf::new`].
    pub fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut buf = Self::new(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }

    /// How many of the buffer's bytes stand on huge pages now: all or part of it once touched, 0 if the system gave
    /// none, `None` where it does not say (only Linux does, and per mapping: a neighbour that merged with this
    /// buffer's mapping counts in, up to the buffer's own size).
    pub fn huge_pages_given(&self) -> Option<usize> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let start = self.as_ptr() as usize;
        Some(huge_bytes(&smaps, start..start + self.len)?.min(self.len))
    }
}

/// Sum of `AnonHugePages` over the mappings in `smaps` that overlap `addresses`, in bytes.
fn huge_bytes(smaps: &str, addresses: std::ops::Range<usize>) -> Option<usize> {
    let (mut inside, mut seen, mut bytes) = (false, false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or("");
        if let Some(("AnonHugePages", "")) = first.split_once(':') {
            if inside {
                let kilobytes: usize = words.next()?.parse().ok()?;
                (seen, bytes) = (true, bytes + kilobytes * 1024);
            }
        } else if let Some((from, to)) = first.split_once('-')
            && let Ok(from) = usize::from_str_radix(from, 16)
            && let Ok(to) = usize::from_str_radix(to, 16)
        {
            inside = from < addresses.end && addresses.start < to;
        }
    }
    seen.then_some(bytes)
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map[self.start..][..self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.start..][..self.len]
    }
}

/// Bytes that can be taken now without swapping, a container's limit counted in; `None` where the system does not say.
pub fn available_memory() -> Option<u64> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    let limit = system.cgroup_limits().map_or(u64::MAX, |c| c.free_memory);
    Some(system.available_memory().min(limit)).filter(|&bytes| bytes > 0)
}

/// Page faults of this process since it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFaults {
    /// Served from memory: first touches, and mapped pages that were in the page cache.
    pub minor: u64,
    /// Served from a disk.
    pub major: u64,
}

impl PageFaults {
    /// The counts now, all threads together; `None` where the system does not say.
    pub fn now() -> Option<Self> {
        #[cfg(unix)]
        {
            let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
            // SAFETY: getrusage writes one `rusage`, which `usage` has room for.
            let failed = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
            if failed != 0 {
                return None;
            }
            // SAFETY: a struct of integers, zeroed and then filled in.
            let usage = unsafe { usage.assume_init() };
            Some(Self {
                minor: u64::try_from(usage.ru_minflt).ok()?,
                major: u64::try_from(usage.ru_majflt).ok()?,
            })
        }
        #[cfg(not(unix))]
        None
    }

    /// Faults since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            minor: self.minor.saturating_sub(earlier.minor),
            major: self.major.saturating_sub(earlier.major),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_and_aligned() {
        for len in [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut buf = AlignedBuf::new(len).unwrap();
            assert_eq!(buf.len(), len);
            assert!(buf.iter().all(|&b| b == 0));
            let align = if len < HUGE_PAGE { 64 } else { HUGE_PAGE };
            assert_eq!(buf.as_ptr().align_offset(align), 0, "{len}");
            buf.fill(7);
        }
        assert_eq!(&*AlignedBuf::copy_of(b"abc").unwrap(), b"abc");
    }

    #[test]
    fn too_much_is_an_error() {
        let error = |len| AlignedBuf::new(len).err().unwrap().to_string();
        assert!(error(usize::MAX).contains("bytes were refused"));
        assert!(error(1 << 60).contains("1152921504606846976 bytes"));
    }

    #[test]
    fn huge_pages_counted_from_smaps() {
        let smaps = "10000-20000 rw-p 0 00:00 0\nSize: 64 kB\nAnonHugePages:      4096 kB\n\
                     20000-30000 rw-p 0 00:00 0 [heap]\nAnonHugePages:  2048 kB\nVmFlags: rd wr\n\
                     30000-40000 r--p 0 00:00 0\nAnonHugePages:  8192 kB\n";
        assert_eq!(huge_bytes(smaps, 0x18000..0x28000), Some(6 << 20));
        assert_eq!(huge_bytes(smaps, 0x20000..0x30000), Some(2 << 20));
        assert_eq!(huge_bytes(smaps, 0x50000..0x60000), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn available_memory_is_told() {
        assert!(available_memory().unwrap() > 1 << 20);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn small_pages_are_small() {
        let mut buf = AlignedBuf::with_small_pages(4 * HUGE_PAGE).unwrap();
        buf.fill(1);
        assert_eq!(buf.huge_pages_given(), Some(0));
    }

    #[cfg(unix)]
    #[test]
    fn a_first_touch_faults() {
        let before = PageFaults::now().unwrap();
        let mut buf = AlignedBuf::with_small_pages(1 << 20).unwrap();
        buf.fill(1);
        assert!(PageFaults::now().unwrap().since(before).minor >= 16);
    }
}
