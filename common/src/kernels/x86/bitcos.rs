//! BITCOS in AVX2 and AVX-512: see `kernels/bitcos.rs`.

// Every method is a few instructions under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::atomic::AtomicU32;

use half::f16;

use crate::formats::bitcos::GROUP;
use crate::kernels::bitcos::{Kernel, Matrix, RowsFn, TILE, store};
use crate::kernels::{Group, Isa};

/// What this CPU can run.
pub fn kernels() -> impl Iterator<Item = Kernel> {
    let bits = is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt");
    let counts = is_x86_feature_detected!("avx512vpopcntdq");
    let all: [(Isa, RowsFn, bool); 2] = [
        (Isa::Avx2, avx2, bits),
        (Isa::Avx512Vnni, avx512, bits && counts),
    ];
    let usable = all.into_iter().filter(|k| k.2 && k.0.available());
    usable.map(|(isa, rows, _)| Kernel { isa, rows })
}

macro_rules! instances {
    ($enable:literal, $name:ident = $sums:ty) => {
        #[target_feature(enable = $enable)]
        unsafe fn $name(w: &Matrix, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
            // SAFETY: the contract of `RowsFn`; the instruction set is enabled here.
            unsafe { tiles::<$sums>(w, x, rows, out) }
        }
    };
}
instances!("avx2,fma,f16c,bmi1,bmi2,popcnt", avx2 = Avx2);
instances!(
    "avx2,fma,f16c,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vpopcntdq",
    avx512 = Avx512
);

/// The integer sums of groups: first in parts, a row at a time, then of four rows together.
///
/// # Safety
/// The CPU has the instruction set and it is enabled in the caller; the row has 128 more weights, and its signs `SLACK`
/// bytes after them; `y` points to 128 activations.
unsafe trait Sums {
    type Parts: Copy;
    unsafe fn none() -> Self::Parts;
    /// Whether one of the eight words has so many ones that their signs, read from a byte on, can take more than 64 bits.
    unsafe fn dense(words: *const u64) -> bool;
    /// `DENSE` may be false where none of the words is dense.
    unsafe fn parts<const DENSE: bool>(row: &mut Cursor, y: *const i8) -> Self::Parts;
    unsafe fn sums(rows: [Self::Parts; TILE]) -> __m128i;
}

/// Where a row is read, and how many bytes of signs it is to the tile that is asked for ahead.
#[derive(Clone, Copy)]
struct Cursor {
    present: *const u64,
    signs: *const u8,
    bit: usize,
    next: usize,
}

impl Cursor {
    const START: Cursor = Cursor {
        present: std::ptr::null(),
        signs: std::ptr::null(),
        bit: 0,
        next: 0,
    };

    /// Of each row of a tile.
    fn tile(w: &Matrix, tile: [usize; TILE], ahead: usize) -> [Cursor; TILE] {
        let (starts, presence) = (w.row_starts, w.presence);
        let mut cursors = [Cursor::START; TILE];
        for (row, c) in tile.into_iter().zip(&mut cursors) {
            let next = starts[(row + ahead).min(starts.len() - 1)];
            *c = Cursor {
                present: presence[row * w.groups() * 2..].as_ptr(),
                signs: w.signs.as_ptr(),
                bit: starts[row] as usize * 8,
                next: next.saturating_sub(starts[row]) as usize,
            };
        }
        cursors
    }

    /// Asks for the words of 512 weights, `words` ahead, and for their signs.
    #[inline(always)]
    fn prefetch(&self, words: usize) {
        let signs = self.signs.wrapping_add(self.bit / 8 + self.next);
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(self.present.wrapping_add(words).cast());
            _mm_prefetch::<_MM_HINT_T0>(signs.cast());
        }
    }

    /// The bitmap of the next 64 weights, and a bit for each that is negative.
    ///
    /// # Safety
    /// BMI2; the row has 64 more weights, and their signs are followed by `SLACK` bytes. With `DENSE` false at most 57 of
    /// them are not zero.
    #[inline(always)]
    unsafe fn next<const DENSE: bool>(&mut self) -> (u64, u64) {
        let present = *self.present;
        self.present = self.present.add(1);
        let at = self.signs.add(self.bit / 8);
        let shift = (self.bit % 8) as u32;
        let ones = present.count_ones();
        let mut signs = at.cast::<u64>().read_unaligned() >> shift;
        if DENSE && ones + shift > 64 {
            signs |= u64::from(*at.add(8)) << (64 - shift);
        }
        self.bit += ones as usize;
        (present, _pdep_u64(signs, present))
    }
}

/// The rows of a tile; one that is cut short repeats its last row.
fn tile(rows: &Range<usize>, first: usize) -> [usize; TILE] {
    std::array::from_fn(|i| (first + i).min(rows.end - 1))
}

/// Rows to the first tile that is at least 4 KB of bitmap away: the one that is asked for ahead.
fn ahead(groups: usize) -> usize {
    4096usize.div_ceil(TILE * 16 * groups) * TILE
}

/// Four scales of each row of a tile, as `[scale][row]`; zeros where a row has fewer.
///
/// # Safety
/// At each place as many scales as `some`, 1 to 4.
#[inline(always)]
unsafe fn scales_of(places: [*const f16; TILE], some: usize) -> [__m128i; 2] {
    let mut d = [_mm_setzero_si128(); TILE];
    for (d, p) in d.iter_mut().zip(places) {
        *d = match some {
            4 => _mm_loadu_si64(p.cast()),
            _ => last_scales(p, some),
        };
    }
    let (ab, cd) = (
        _mm_unpacklo_epi16(d[0], d[1]),
        _mm_unpacklo_epi16(d[2], d[3]),
    );
    [_mm_unpacklo_epi32(ab, cd), _mm_unpackhi_epi32(ab, cd)]
}

/// # Safety
/// `some` scales at `p`, at most 4.
#[cold]
#[inline(never)]
unsafe fn last_scales(p: *const f16, some: usize) -> __m128i {
    let mut four = [f16::ZERO; 4];
    four[..some].copy_from_slice(std::slice::from_raw_parts(p, some));
    _mm_cvtsi64_si128(bytemuck::cast(four))
}

struct Avx512;

// SAFETY: reads two words of the bitmap, the signs of their ones and 128 activations.
unsafe impl Sums for Avx512 {
    type Parts = __m512i;

    #[inline(always)]
    unsafe fn none() -> __m512i {
        _mm512_setzero_si512()
    }

    #[inline(always)]
    unsafe fn dense(words: *const u64) -> bool {
        // A load with a mask that the compiler does not know: of a plain one it would take the words for scalar use
        // out of the vector, which costs more than to load them again.
        let words = _mm512_maskz_loadu_epi64(std::hint::black_box(0xff), words.cast());
        let ones = _mm512_popcnt_epi64(words);
        _mm512_cmpgt_epu64_mask(ones, _mm512_set1_epi64(57)) != 0
    }

    #[inline(always)]
    unsafe fn parts<const DENSE: bool>(row: &mut Cursor, y: *const i8) -> __m512i {
        let mut dot = _mm512_setzero_si512();
        for half in 0..2 {
            let (present, negative) = row.next::<DENSE>();
            let v = _mm512_maskz_loadu_epi8(present, y.add(64 * half));
            let v = _mm512_mask_sub_epi8(v, negative, _mm512_setzero_si512(), v);
            dot = _mm512_dpbusd_epi32(dot, _mm512_set1_epi8(1), v);
        }
        dot
    }

    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [__m512i; TILE]) -> __m128i {
        // Sums of 8 activations, then of 16 and 32: within 16 bits.
        let ones = _mm512_set1_epi16(1);
        let ab = _mm512_madd_epi16(_mm512_packs_epi32(a, b), ones);
        let cd = _mm512_madd_epi16(_mm512_packs_epi32(c, d), ones);
        let sums = _mm512_madd_epi16(_mm512_packs_epi32(ab, cd), ones);
        let high = _mm512_extracti64x4_epi64(sums, 1);
        let sums = _mm256_add_epi32(_mm512_castsi512_si256(sums), high);
        let high = _mm256_extracti128_si256(sums, 1);
        _mm_add_epi32(_mm256_castsi256_si128(sums), high)
    }
}

struct Avx2;

// SAFETY: reads two words of the bitmap, the signs of their ones and 128 activations.
unsafe impl Sums for Avx2 {
    type Parts = __m256i;

    #[inline(always)]
    unsafe fn none() -> __m256i {
        _mm256_setzero_si256()
    }

    #[inline(always)]
    unsafe fn dense(_: *const u64) -> bool {
        // Spreading bits to bytes takes far longer than the test for each word.
        true
    }

    #[inline(always)]
    unsafe fn parts<const DENSE: bool>(row: &mut Cursor, y: *const i8) -> __m256i {
        let ones = _mm256_set1_epi8(1);
        let mut sum = _mm256_setzero_si256();
        for half in 0..2 {
            let (present, negative) = row.next::<DENSE>();
            for quarter in 0..2 {
                let y = _mm256_loadu_si256(y.add(64 * half + 32 * quarter).cast());
                let present = bytes((present >> (32 * quarter)) as u32);
                let negative = bytes((negative >> (32 * quarter)) as u32);
                let w = _mm256_or_si256(_mm256_and_si256(present, ones), negative);
                let v = _mm256_maddubs_epi16(ones, _mm256_sign_epi8(y, w));
                sum = _mm256_add_epi16(sum, v);
            }
        }
        _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
    }

    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [__m256i; TILE]) -> __m128i {
        let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        let high = _mm256_extracti128_si256(sums, 1);
        _mm_add_epi32(_mm256_castsi256_si128(sums), high)
    }
}

/// Rows four at a time, 512 columns at a time.
///
/// # Safety
/// As [`RowsFn`], with the instruction set enabled in the caller.
#[inline(always)]
unsafe fn tiles<S: Sums>(w: &Matrix, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
    let (groups, ahead) = (w.groups(), ahead(w.groups()));
    let (y, dw, dy, width) = (x.row(0), w.scales, x.scales(), x.width());
    assert!(y.len() >= groups * GROUP && dy.len() > (groups - 1) / 2 * width);
    for first in rows.clone().step_by(TILE) {
        let tile = tile(&rows, first);
        let mut cursors = Cursor::tile(w, tile, ahead);
        let mut d = tile.map(|row| dw[row * groups..].as_ptr());
        // SAFETY: the caller's contract; activations and their scales reach as far as the groups, as asserted above.
        unsafe {
            let mut acc = _mm_setzero_ps();
            let mut parts = [[S::none(); TILE]; 4];
            for from in (0..groups).step_by(4) {
                let some = 4.min(groups - from);
                let y = y.as_ptr().add(from * GROUP);
                for (r, row) in cursors.iter_mut().enumerate() {
                    row.prefetch(ahead * groups * 2);
                    let mut c = *row;
                    if some == 4 && !S::dense(c.present) {
                        for (i, parts) in parts.iter_mut().enumerate() {
                            parts[r] = S::parts::<false>(&mut c, y.add(i * GROUP));
                        }
                    } else {
                        for (i, parts) in parts[..some].iter_mut().enumerate() {
                            parts[r] = S::parts::<true>(&mut c, y.add(i * GROUP));
                        }
                    }
                    *row = c;
                }
                let [low, high] = scales_of(d, some);
                for d in &mut d {
                    *d = d.wrapping_add(4);
                }
                let dw = [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)];
                let dw: [__m128; 4] = std::mem::transmute(dw);
                for i in 0..some {
                    let dy = *dy.as_ptr().add((from + i) / 2 * width);
                    let scale = _mm_mul_ps(dw[i], _mm_set1_ps(dy));
                    acc = _mm_fmadd_ps(_mm_cvtepi32_ps(S::sums(parts[i])), scale, acc);
                }
            }
            let values: [f32; TILE] = std::mem::transmute(acc);
            for (row, value) in (first..rows.end).zip(values) {
                store(out, row, value);
            }
        }
    }
}

/// A byte of ones for each bit that is set.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn bytes(bits: u32) -> __m256i {
    let place = _mm256_setr_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3,
        3, 3,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), place);
    _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
}
