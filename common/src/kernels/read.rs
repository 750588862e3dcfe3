//! Reading memory as fast as it goes: the kernel that the memory wall is measured with.
//!
//! A sum of all bytes as 64-bit words: one load and one add a vector, so that every byte must be loaded and
//! memory is the only thing in the way. How the loads are laid out in time is a [`Form`], since that is what
//! decides how much of a memory's bandwidth one core can ask for.

use super::Isa;

/// In which order one thread reads its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Name in result rows.
    pub name: &'static str,
    /// Places read in turn, 256 bytes at each; the bytes are cut into so many equal parts. Hardware prefetchers follow
    /// one page at a time, so several pages at once keep more of them busy.
    pub streams: usize,
    /// How far ahead a software prefetch runs, in bytes; 0 for none.
    pub ahead: usize,
    /// How far ahead another one runs, into the second-level cache; 0 for none.
    pub far: usize,
}

/// How far ahead of the dot products decode asks for codes, in bytes: into the second-level cache, which has room for many
/// requests to memory at once, then into the first. Measured from DRAM against one distance and against streaming hints.
pub const FAR: usize = 16 << 10;
/// The second of the two.
pub const NEAR: usize = 4 << 10;

impl Form {
    /// One place after the other, hardware prefetch alone.
    pub const PLAIN: Form = Form {
        name: "plain",
        streams: 1,
        ahead: 0,
        far: 0,
    };

    /// As decode on wide rows reads its weights: one place after the other, and on x86-64 both prefetches.
    pub const DECODE: Form = Form {
        name: "decode",
        streams: 1,
        ahead: if cfg!(target_arch = "x86_64") {
            NEAR
        } else {
            0
        },
        far: if cfg!(target_arch = "x86_64") { FAR } else { 0 },
    };

    /// Every form that the wall is sought with.
    pub const ALL: [Form; 6] = [
        Form::PLAIN,
        Form {
            name: "streams-2",
            streams: 2,
            ahead: 0,
            far: 0,
        },
        Form {
            name: "streams-4",
            streams: 4,
            ahead: 0,
            far: 0,
        },
        Form {
            name: "streams-8",
            streams: 8,
            ahead: 0,
            far: 0,
        },
        Form {
            name: "prefetch",
            streams: 1,
            ahead: 4096,
            far: 0,
        },
        Form {
            name: "streams-4-prefetch",
            streams: 4,
            ahead: 1024,
            far: 0,
        },
    ];
}

/// Bytes read at one place before the next.
const STEP: usize = 256;

/// The instruction set that [`sum`] uses here.
pub fn isa() -> Isa {
    let widest = [Isa::Avx512Vnni, Isa::Avx2, Isa::Neon];
    widest
        .into_iter()
        .find(|isa| isa.available())
        .unwrap_or(Isa::Scalar)
}

/// Reads every byte once: the wrapping sum of all 8-byte little-endian words, the last one filled up with zeros.
pub fn sum(bytes: &[u8], form: Form) -> u64 {
    sum_with(isa(), bytes, form)
}

/// [`sum`] with the vectors of one instruction set, portable Rust if the CPU does not have it.
fn sum_with(isa: Isa, bytes: &[u8], form: Form) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512Vnni && isa.available() {
        // SAFETY: the CPU has AVX-512, as just asked.
        return unsafe { x86::sum_avx512(bytes, form) };
    } else if isa == Isa::Avx2 && isa.available() {
        // SAFETY: the CPU has AVX2, as just asked.
        return unsafe { x86::sum_avx2(bytes, form) };
    }
    let _ = isa;
    // SAFETY: arrays of integers need no instruction set.
    unsafe { dispatch::<[u64; 8]>(bytes, form) }
}

/// Eight running sums.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and is inlined into a function that enables it.
unsafe trait Sums: Copy {
    unsafe fn zero() -> Self;
    /// Adds the eight words of a line.
    unsafe fn add(self, line: &[u8; 64]) -> Self;
    unsafe fn words(self) -> [u64; 8];
}

// SAFETY: needs nothing. On Arm the compiler makes NEON of it, on x86-64 SSE2.
unsafe impl Sums for [u64; 8] {
    #[inline(always)]
    unsafe fn zero() -> Self {
        [0; 8]
    }
    #[inline(always)]
    unsafe fn add(mut self, line: &[u8; 64]) -> Self {
        for (sum, word) in self.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
        self
    }
    #[inline(always)]
    unsafe fn words(self) -> [u64; 8] {
        self
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Form, Sums, dispatch};

    // SAFETY: needs AVX-512 F; a line is 64 bytes, and loads may be unaligned.
    unsafe impl Sums for __m512i {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            unsafe { _mm512_setzero_si512() }
        }
        #[inline(always)]
        unsafe fn add(self, line: &[u8; 64]) -> Self {
            // SAFETY: as above.
            unsafe { _mm512_add_epi64(self, _mm512_loadu_si512(line.as_ptr().cast())) }
        }
        #[inline(always)]
        unsafe fn words(self) -> [u64; 8] {
            let mut words = [0; 8];
            // SAFETY: as above; room for 64 bytes.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), self) };
            words
        }
    }

    // SAFETY: needs AVX2; a line is twice 32 bytes, and loads may be unaligned.
    unsafe impl Sums for [__m256i; 2] {
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as above.
            unsafe { [_mm256_setzero_si256(); 2] }
        }
        #[inline(always)]
        unsafe fn add(self, line: &[u8; 64]) -> Self {
            let p: *const __m256i = line.as_ptr().cast();
            // SAFETY: as above.
            unsafe {
                [
                    _mm256_add_epi64(self[0], _mm256_loadu_si256(p)),
                    _mm256_add_epi64(self[1], _mm256_loadu_si256(p.add(1))),
                ]
            }
        }
        #[inline(always)]
        unsafe fn words(self) -> [u64; 8] {
            bytemuck::cast(self)
        }
    }

    #[target_feature(enable = "avx512f")]
    pub fn sum_avx512(bytes: &[u8], form: Form) -> u64 {
        // SAFETY: enabled here.
        unsafe { dispatch::<__m512i>(bytes, form) }
    }

    #[target_feature(enable = "avx2")]
    pub fn sum_avx2(bytes: &[u8], form: Form) -> u64 {
        // SAFETY: enabled here.
        unsafe { dispatch::<[__m256i; 2]>(bytes, form) }
    }
}

#[inline(always)]
unsafe fn dispatch<V: Sums>(bytes: &[u8], form: Form) -> u64 {
    // SAFETY: the caller's instruction set is that of V.
    unsafe {
        match (form.streams, form.ahead) {
            (..=1, 0) => body::<V, 1, false>(bytes, form),
            (2, 0) => body::<V, 2, false>(bytes, form),
            (3 | 4, 0) => body::<V, 4, false>(bytes, form),
            (_, 0) => body::<V, 8, false>(bytes, form),
            (..=1, _) => body::<V, 1, true>(bytes, form),
            (2, _) => body::<V, 2, true>(bytes, form),
            (3 | 4, _) => body::<V, 4, true>(bytes, form),
            (_, _) => body::<V, 8, true>(bytes, form),
        }
    }
}

#[inline(always)]
unsafe fn body<V: Sums, const STREAMS: usize, const PREFETCH: bool>(
    bytes: &[u8],
    form: Form,
) -> u64 {
    let steps = bytes.len() / (STREAMS * STEP);
    let (whole, mut rest) = bytes.split_at(STREAMS * steps * STEP);
    let whole = whole.as_chunks::<STEP>().0;
    // SAFETY: the caller's instruction set is that of V.
    let mut sums = [unsafe { V::zero() }; STEP / 64];
    for i in 0..steps {
        for stream in 0..STREAMS {
            let step = &whole[stream * steps + i];
            if PREFETCH {
                for line in 0..STEP / 64 {
                    let line = step.as_ptr().wrapping_add(64 * line);
                    if form.far > 0 {
                        prefetch_line::<false>(line.wrapping_add(form.far));
                    }
                    prefetch_line::<true>(line.wrapping_add(form.ahead));
                }
            }
            for (sum, line) in sums.iter_mut().zip(step.as_chunks::<64>().0) {
                // SAFETY: as above.
                *sum = unsafe { sum.add(line) };
            }
        }
    }
    let mut total = 0_u64;
    for sum in sums {
        // SAFETY: as above.
        for word in unsafe { sum.words() } {
            total = total.wrapping_add(word);
        }
    }
    while !rest.is_empty() {
        let (word, more) = rest.split_at(rest.len().min(8));
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        total = total.wrapping_add(u64::from_le_bytes(padded));
        rest = more;
    }
    total
}

/// Asks for a line of 64 bytes, into the first-level cache or the second; any address will do.
#[inline(always)]
fn prefetch_line<const FIRST: bool>(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which never faults and changes no value.
        unsafe {
            if FIRST {
                _mm_prefetch::<_MM_HINT_T0>(line.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T1>(line.cast());
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        // SAFETY: a hint, which never faults and changes no value.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) line, options(nostack, readonly, preserves_flags));
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::test_support::GuardedBuf;

    fn naive(bytes: &[u8]) -> u64 {
        let word = |part: &[u8]| part.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
        bytes
            .chunks(8)
            .fold(0, |n, part| n.wrapping_add(word(part)))
    }

    #[test]
    fn every_form_reads_every_byte_once() {
        let bytes: Vec<u8> = (0..20_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let lengths = [0, 1, 7, 8, 9, 255, 256, 511, 2048, 2049, 4095, 19_999];
        for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512Vnni, Isa::Neon] {
            for form in Form::ALL.into_iter().chain([Form::DECODE]) {
                for (len, slack) in lengths.into_iter().flat_map(|n| [(n, 0), (n, 1), (n, 32)]) {
                    let buf = GuardedBuf::copy_of(&bytes[..len], slack);
                    let expected = naive(&buf);
                    assert_eq!(sum_with(isa, &buf, form), expected, "{isa} {form:?} {len}");
                }
            }
        }
    }

    #[test]
    fn each_byte_counts() {
        let mut buf = GuardedBuf::new(1000, 3);
        for form in Form::ALL {
            for i in 0..buf.len() {
                buf[i] = 1;
                assert_eq!(sum(&buf, form), 1 << (8 * (i % 8)), "{form:?} byte {i}");
                buf[i] = 0;
            }
        }
    }
}
