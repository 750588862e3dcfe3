//! Matrix times vector on BITCOS: one token, each instruction set against a scalar reference.
//!
//! Every kernel follows the float rule of `common::kernels`: for each group of 128 weights, in order of k,
//! `acc = fma(f32(integer sum), dw * dy, acc)`, from 0. So it gives the bits that the two-bit and base-3 kernels give for the
//! same codes.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use common::formats::bitcos::{Bitcos, GROUP, SLACK};
use common::kernels::{Activations, Form, Group, Isa};
use common::runtime::memory::AlignedBuf;
use common::runtime::pool::{Chunks, Pool};
use half::f16;

/// Rows that x86 kernels take at once: their sums leave the vectors together.
pub const TILE: usize = 4;

/// A BITCOS matrix on memory of its own, aligned and on huge pages where the system gives them.
pub struct Packed {
    rows: usize,
    cols: usize,
    presence: AlignedBuf,
    signs: AlignedBuf,
    row_starts: AlignedBuf,
    scales: AlignedBuf,
}

impl Packed {
    /// The rows of `some`, repeated until there are `rows`.
    ///
    /// # Errors
    /// No rows, more than 4 GiB of signs, memory that the system refuses.
    pub fn repeated(some: &Bitcos, rows: usize) -> Result<Self> {
        ensure!(rows > 0, "bitcos: no rows");
        let stream = &some.signs()[..some.signs().len() - SLACK];
        let (times, rest) = (rows / some.rows(), rows % some.rows());
        let last = some.row_starts().get(rest).map_or(0, |&at| at as usize);
        let signs = times * stream.len() + last;
        ensure!(
            u32::try_from(signs).is_ok(),
            "bitcos: {signs} bytes of signs, expected at most 4 GiB"
        );
        let fill = |of: &[u8], len: usize| -> Result<AlignedBuf> {
            let mut to = AlignedBuf::new(len)?;
            for to in to.chunks_mut(of.len().max(1)) {
                to.copy_from_slice(&of[..to.len()]);
            }
            Ok(to)
        };
        let of_rows = |part: usize| part / some.rows() * rows;
        let presence: &[u8] = bytemuck::cast_slice(some.presence());
        let scales: &[u8] = bytemuck::cast_slice(some.scales());
        let mut padded = AlignedBuf::new(signs + SLACK)?;
        for to in padded[..signs].chunks_mut(stream.len().max(1)) {
            to.copy_from_slice(&stream[..to.len()]);
        }
        let mut row_starts = AlignedBuf::new(4 * rows)?;
        for (r, to) in row_starts.chunks_exact_mut(4).enumerate() {
            let at = r / some.rows() * stream.len() + some.row_starts()[r % some.rows()] as usize;
            to.copy_from_slice(&(at as u32).to_ne_bytes());
        }
        Ok(Packed {
            rows,
            cols: some.cols(),
            presence: fill(presence, of_rows(presence.len()))?,
            signs: padded,
            row_starts,
            scales: fill(scales, of_rows(scales.len()))?,
        })
    }

    /// The same matrix in another place.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub fn copy(&self) -> Result<Self> {
        Ok(Packed {
            rows: self.rows,
            cols: self.cols,
            presence: AlignedBuf::copy_of(&self.presence)?,
            signs: AlignedBuf::copy_of(&self.signs)?,
            row_starts: AlignedBuf::copy_of(&self.row_starts)?,
            scales: AlignedBuf::copy_of(&self.scales)?,
        })
    }

    /// Bytes that one product streams.
    pub fn bytes(&self) -> usize {
        let parts = [&self.presence, &self.signs, &self.row_starts, &self.scales];
        parts.iter().map(|p| p.len()).sum::<usize>() - SLACK
    }

    /// Weights, without padding.
    pub fn weights(&self) -> usize {
        self.rows * self.cols
    }

    /// Groups of a row.
    fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// `[row][group][2]`.
    fn presence(&self) -> &[u64] {
        bytemuck::cast_slice(&self.presence)
    }

    fn row_starts(&self) -> &[u32] {
        bytemuck::cast_slice(&self.row_starts)
    }

    /// `[row][group]`.
    fn scales(&self) -> &[f16] {
        bytemuck::cast_slice(&self.scales)
    }
}

/// Multiplies `rows` of the matrix by the first token.
///
/// # Safety
/// The CPU has the instruction set; the rows are inside the matrix and `out`; the token has the matrix's columns.
type RowsFn = unsafe fn(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]);

/// A kernel for one instruction set.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The instruction set.
    pub isa: Isa,
    rows: RowsFn,
}

/// The kernels that this CPU can run, the scalar reference first, the fastest last.
pub fn kernels() -> Vec<Kernel> {
    let scalar: RowsFn = scalar;
    let mut kernels = vec![(Isa::Scalar, scalar)];
    #[cfg(target_arch = "x86_64")]
    kernels.extend(x86::kernels());
    #[cfg(target_arch = "aarch64")]
    kernels.push((Isa::Neon, arm::rows));
    let kernels = kernels.into_iter();
    kernels.map(|(isa, rows)| Kernel { isa, rows }).collect()
}

impl Kernel {
    /// `out[row] = w[row] . x`, as bits of f32, with all threads of the pool.
    ///
    /// # Errors
    /// Activations that are not one token of the matrix's columns in [`Form::Q8K`], an output of another length.
    pub fn multiply(
        &self,
        pool: &Pool,
        w: &Packed,
        x: &Activations,
        out: &[AtomicU32],
    ) -> Result<()> {
        ensure!(
            x.form() == Form::Q8K && x.tokens() == 1 && x.cols() == w.cols,
            "bitcos: {} tokens of {} {:?}, expected 1 of {} Q8K",
            x.tokens(),
            x.cols(),
            x.form(),
            w.cols
        );
        ensure!(
            out.len() == w.rows,
            "bitcos: output of {}, expected {} rows",
            out.len(),
            w.rows
        );
        let x = &x.groups()[0];
        let chunks = Chunks {
            size: ((512 << 10) * w.rows / w.bytes())
                .next_multiple_of(64)
                .max(64),
            multiple: TILE,
        };
        pool.chunks_by(w.rows, chunks, |_, rows| {
            // SAFETY: `kernels` gives only what this CPU has; shapes were checked above; `Packed` holds whole rows, and its
            // signs as many bits as its bitmap has ones, since they were packed together.
            unsafe { (self.rows)(w, x, rows, out) }
        });
        Ok(())
    }
}

fn store(out: &[AtomicU32], row: usize, value: f32) {
    out[row].store(value.to_bits(), Relaxed);
}

/// The reference: a weight at a time.
fn scalar(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
    let groups = w.groups();
    for row in rows {
        let mut bit = w.row_starts()[row] as usize * 8;
        let mut acc = 0f32;
        for g in 0..groups {
            let mut sum = 0;
            for (i, &y) in x.row(0)[g * GROUP..][..GROUP].iter().enumerate() {
                let word = w.presence()[(row * groups + g) * 2 + i / 64];
                if word >> (i % 64) & 1 == 1 {
                    let negative = w.signs[bit / 8] >> (bit % 8) & 1 == 1;
                    sum += if negative { -i32::from(y) } else { y.into() };
                    bit += 1;
                }
            }
            let dy = x.scales()[g / 2 * x.width()];
            acc = (sum as f32).mul_add(w.scales()[row * groups + g].to_f32() * dy, acc);
        }
        store(out, row, acc);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    pub fn kernels() -> Vec<(Isa, RowsFn)> {
        let bits = is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt");
        let counts = is_x86_feature_detected!("avx512vpopcntdq");
        let all: [(Isa, RowsFn, bool); 2] = [
            (Isa::Avx2, avx2, bits),
            (Isa::Avx512Vnni, avx512, bits && counts),
        ];
        let usable = all.into_iter().filter(|k| k.2 && k.0.available());
        usable.map(|(isa, rows, _)| (isa, rows)).collect()
    }

    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt")]
    unsafe fn avx2(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
        // SAFETY: the contract of `RowsFn`; the instruction set is enabled here.
        unsafe { tiles::<Avx2>(w, x, rows, out) }
    }

    #[target_feature(
        enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vpopcntdq"
    )]
    unsafe fn avx512(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
        // SAFETY: the contract of `RowsFn`; the instruction set is enabled here.
        unsafe { tiles::<Avx512>(w, x, rows, out) }
    }

    /// The integer sums of groups: first in parts, a row at a time, then of four rows together.
    ///
    /// # Safety
    /// The CPU has the instruction set and it is enabled in the caller; the row has 128 more weights, and its signs [`SLACK`]
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
        fn tile(w: &Packed, tile: [usize; TILE], ahead: usize) -> [Cursor; TILE] {
            let (starts, presence) = (w.row_starts(), w.presence());
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
        /// BMI2; the row has 64 more weights, and their signs are followed by [`SLACK`] bytes. With `DENSE` false at most 57 of
        /// them are not zero.
        #[inline(always)]
        unsafe fn next<const DENSE: bool>(&mut self) -> (u64, u64) {
            // SAFETY: the caller's contract: a word of signs is read from within the row, and a byte after it.
            unsafe {
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
        // SAFETY: the caller's contract; SSE2 is part of the target.
        unsafe {
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
    }

    /// # Safety
    /// `some` scales at `p`, at most 4.
    #[cold]
    #[inline(never)]
    unsafe fn last_scales(p: *const f16, some: usize) -> __m128i {
        let mut four = [f16::ZERO; 4];
        // SAFETY: the caller's contract.
        unsafe {
            four[..some].copy_from_slice(std::slice::from_raw_parts(p, some));
            _mm_cvtsi64_si128(bytemuck::cast(four))
        }
    }

    struct Avx512;

    // SAFETY: reads two words of the bitmap, the signs of their ones and 128 activations.
    unsafe impl Sums for Avx512 {
        type Parts = __m512i;

        #[inline(always)]
        unsafe fn none() -> __m512i {
            // SAFETY: the contract of the trait.
            unsafe { _mm512_setzero_si512() }
        }

        #[inline(always)]
        unsafe fn dense(words: *const u64) -> bool {
            // SAFETY: the contract of the trait.
            unsafe {
                // A load with a mask that the compiler does not know: of a plain one it would take the words for scalar use
                // out of the vector, which costs more than to load them again.
                let words = _mm512_maskz_loadu_epi64(std::hint::black_box(0xff), words.cast());
                let ones = _mm512_popcnt_epi64(words);
                _mm512_cmpgt_epu64_mask(ones, _mm512_set1_epi64(57)) != 0
            }
        }

        #[inline(always)]
        unsafe fn parts<const DENSE: bool>(row: &mut Cursor, y: *const i8) -> __m512i {
            // SAFETY: the contract of the trait.
            unsafe {
                let mut dot = _mm512_setzero_si512();
                for half in 0..2 {
                    let (present, negative) = row.next::<DENSE>();
                    let v = _mm512_maskz_loadu_epi8(present, y.add(64 * half));
                    let v = _mm512_mask_sub_epi8(v, negative, _mm512_setzero_si512(), v);
                    dot = _mm512_dpbusd_epi32(dot, _mm512_set1_epi8(1), v);
                }
                dot
            }
        }

        #[inline(always)]
        unsafe fn sums([a, b, c, d]: [__m512i; TILE]) -> __m128i {
            // SAFETY: the contract of the trait.
            unsafe {
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
    }

    struct Avx2;

    // SAFETY: reads two words of the bitmap, the signs of their ones and 128 activations.
    unsafe impl Sums for Avx2 {
        type Parts = __m256i;

        #[inline(always)]
        unsafe fn none() -> __m256i {
            // SAFETY: the contract of the trait.
            unsafe { _mm256_setzero_si256() }
        }

        #[inline(always)]
        unsafe fn dense(_: *const u64) -> bool {
            // Spreading bits to bytes takes far longer than the test for each word.
            true
        }

        #[inline(always)]
        unsafe fn parts<const DENSE: bool>(row: &mut Cursor, y: *const i8) -> __m256i {
            // SAFETY: the contract of the trait.
            unsafe {
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
        }

        #[inline(always)]
        unsafe fn sums([a, b, c, d]: [__m256i; TILE]) -> __m128i {
            // SAFETY: the contract of the trait.
            unsafe {
                let sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
                let high = _mm256_extracti128_si256(sums, 1);
                _mm_add_epi32(_mm256_castsi256_si128(sums), high)
            }
        }
    }

    /// Rows four at a time, 512 columns at a time.
    ///
    /// # Safety
    /// As [`RowsFn`], with the instruction set enabled in the caller.
    #[inline(always)]
    unsafe fn tiles<S: Sums>(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
        let (groups, ahead) = (w.groups(), ahead(w.groups()));
        let (y, dw, dy, width) = (x.row(0), w.scales(), x.scales(), x.width());
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
        // SAFETY: the caller's contract.
        unsafe {
            let place = _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3,
                3, 3, 3, 3,
            );
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), place);
            _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit)
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::*;

    /// For each byte of a bitmap and each of its weights, which of the byte's ones it is; 255 where the weight is zero. Arm has
    /// no `pdep`; a byte lookup with these places does the same for eight weights, and gives 0 for 255.
    static PLACES: [[u8; 8]; 256] = {
        let mut places = [[255; 8]; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut i, mut ones) = (0, 0);
            while i < 8 {
                if byte >> i & 1 == 1 {
                    places[byte][i] = ones;
                    ones += 1;
                }
                i += 1;
            }
            byte += 1;
        }
        places
    };

    /// # Safety
    /// As [`RowsFn`].
    pub unsafe fn rows(w: &Packed, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
        let groups = w.groups();
        for row in rows {
            let mut bit = w.row_starts()[row] as usize * 8;
            let mut acc = 0f32;
            for g in 0..groups {
                let words = &w.presence()[(row * groups + g) * 2..][..2];
                let y = &x.row(0)[g * GROUP..][..GROUP];
                // SAFETY: NEON is part of the target; the slices are whole groups, and signs are read within their slack.
                let sum = unsafe { group(words, &w.signs, &mut bit, y) };
                let dy = x.scales()[g / 2 * x.width()];
                acc = (sum as f32).mul_add(w.scales()[row * groups + g].to_f32() * dy, acc);
            }
            store(out, row, acc);
        }
    }

    /// # Safety
    /// 128 weights and activations; their signs start at `bit` and two bytes can be read past the last.
    #[target_feature(enable = "neon")]
    unsafe fn group(words: &[u64], signs: &[u8], bit: &mut usize, y: &[i8]) -> i32 {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = vcreate_u8(0x8040_2010_0804_0201);
            let mut sum = vdupq_n_s16(0);
            for (i, y) in y.chunks_exact(8).enumerate() {
                let present = (words[i / 8] >> (i % 8 * 8)) as u8;
                let two = signs.as_ptr().add(*bit / 8).cast::<u16>().read_unaligned();
                let negative = vtst_u8(vdup_n_u8((two >> (*bit % 8)) as u8), bits);
                let signs = vorr_s8(vreinterpret_s8_u8(negative), vdup_n_s8(1));
                let places = vld1_u8(PLACES[usize::from(present)].as_ptr());
                let w = vtbl1_s8(signs, vreinterpret_s8_u8(places));
                sum = vmlal_s8(sum, w, vld1_s8(y.as_ptr()));
                *bit += present.count_ones() as usize;
            }
            vaddlvq_s16(sum)
        }
    }
}

#[cfg(test)]
mod tests {
    use common::formats::{Codes, Format};
    use common::kernels::{Choice, MatrixRef};
    use common::runtime::stack;

    use super::*;

    fn product(kernel: &Kernel, w: &Packed, x: &Activations, threads: usize) -> Vec<u32> {
        let out: Vec<AtomicU32> = (0..w.rows).map(|_| AtomicU32::new(u32::MAX)).collect();
        let pool = Pool::new(threads).unwrap();
        kernel.multiply(&pool, w, x, &out).unwrap();
        out.into_iter().map(AtomicU32::into_inner).collect()
    }

    /// One token of these codes; every block has scale 1/2.
    fn token(cols: usize, y: impl Fn(usize) -> i8) -> Activations {
        let mut x = Activations::new(Form::Q8K, cols, 1);
        let padded = cols.next_multiple_of(256);
        let codes: Vec<i8> = (0..padded)
            .map(|k| if k < cols { y(k) } else { 0 })
            .collect();
        x.set_codes(&codes, &vec![0.5; padded / 256]).unwrap();
        x
    }

    #[test]
    fn every_kernel_gives_the_bits_of_other_formats() {
        for (rows, cols, zeros) in [
            (1, 128, 0.3),
            (2, 384, 0.0),
            (7, 640, 0.515),
            (66, 512, 1.0),
            (135, 1152, 0.7),
        ] {
            let stock = stack::random_stock(Format::Pq2_0, rows, cols, zeros, 5).unwrap();
            let mut codes = vec![0; rows * cols];
            let mut scales = vec![f16::ZERO; rows * cols / GROUP];
            Format::Pq2_0
                .unpack(&stock, &mut codes, &mut scales)
                .unwrap();
            let codes = Codes::new(&codes, rows, cols).unwrap();
            let packed = Bitcos::pack(&codes, &scales).unwrap();
            let w = Packed::repeated(&packed, rows).unwrap();
            let x = stack::random_activations(Form::Q8K, cols, 1, 3).unwrap();
            let kernel = "stock/scalar".parse::<Choice>().unwrap();
            let kernel = kernel.kernel(Format::Pq2_0).unwrap();
            let stock = MatrixRef::new(kernel.layout(), rows, cols, &stock).unwrap();
            let mut expected = vec![0.0; rows];
            kernel.multiply(&stock, &x, &mut expected).unwrap();
            let expected: Vec<u32> = expected.iter().map(|v| v.to_bits()).collect();
            for kernel in kernels() {
                for threads in [1, 3] {
                    let found = product(&kernel, &w, &x, threads);
                    assert_eq!(found, expected, "{} {rows} x {cols}", kernel.isa);
                }
            }
        }
    }

    #[test]
    fn extremes_and_widths_that_are_no_whole_group_give_the_integer_sums() {
        for (rows, cols) in [(1, 1), (3, 100), (5, 129), (4, 1000)] {
            for (name, at) in [
                ("all +1", (|_| 2) as fn(usize) -> u8),
                ("all -1", |_| 0),
                ("all 0", |_| 1),
                ("mixed", |i| (i * i % 7 % 3) as u8),
            ] {
                let codes: Vec<u8> = (0..rows * cols).map(at).collect();
                let of = Codes::new(&codes, rows, cols).unwrap();
                let scales = vec![f16::from_f32(2.0); rows * cols.div_ceil(GROUP)];
                let packed = Bitcos::pack(&of, &scales).unwrap();
                let w = Packed::repeated(&packed, rows).unwrap();
                for y in [
                    (|_| 127) as fn(usize) -> i8,
                    |_| -127,
                    |k| {
                        if k % 3 == 0 { 127 } else { -127 }
                    },
                ] {
                    let x = token(cols, y);
                    let expected: Vec<u32> = codes
                        .chunks(cols)
                        .map(|row| {
                            let terms = row.iter().enumerate();
                            let sum: i32 = terms
                                .map(|(k, &u)| (i32::from(u) - 1) * i32::from(y(k)))
                                .sum();
                            (sum as f32).to_bits()
                        })
                        .collect();
                    for kernel in kernels() {
                        let found = product(&kernel, &w, &x, 1);
                        // -0 where a row sums to nothing is 0 all the same.
                        let found: Vec<u32> = found
                            .iter()
                            .map(|&v| (f32::from_bits(v) + 0.0).to_bits())
                            .collect();
                        assert_eq!(found, expected, "{} {rows} x {cols} {name}", kernel.isa);
                    }
                }
            }
        }
    }

    #[test]
    fn rows_repeat_and_copies_are_equal() {
        let codes: Vec<u8> = (0..3 * 300).map(|i| (i * 31 % 11 % 3) as u8).collect();
        let scales: Vec<f16> = (1..10).map(|i| f16::from_f32(i as f32)).collect();
        let packed = Bitcos::pack(&Codes::new(&codes, 3, 300).unwrap(), &scales).unwrap();
        let x = token(300, |k| (k % 127) as i8 - 63);
        let few = Packed::repeated(&packed, 3).unwrap();
        let many = Packed::repeated(&packed, 8).unwrap().copy().unwrap();
        for kernel in kernels() {
            let few = product(&kernel, &few, &x, 1);
            let many = product(&kernel, &many, &x, 2);
            assert_eq!(many, [&few[..], &few, &few[..2]].concat());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let codes = Codes::new(&[2; 128], 1, 128).unwrap();
        let packed = Bitcos::pack(&codes, &[f16::ONE]).unwrap();
        let w = Packed::repeated(&packed, 2).unwrap();
        let pool = Pool::new(1).unwrap();
        let out = [AtomicU32::new(0), AtomicU32::new(0)];
        let kernel = kernels()[0];
        let refused = |x: &Activations, out: &[AtomicU32], words: &str| {
            let error = kernel.multiply(&pool, &w, x, out).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        refused(&token(256, |_| 1), &out, "expected 1 of 128");
        refused(&token(128, |_| 1), &out[..1], "expected 2 rows");
        let two = stack::random_activations(Form::Q8K, 128, 2, 1).unwrap();
        refused(&two, &out, "2 tokens");
        assert!(Packed::repeated(&packed, 0).is_err());
    }
}
