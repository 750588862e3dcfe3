//! bitnet.cpp's three ways to multiply ternary weights: I2_S multiplies and adds; TL1 and TL2 look sums of activations up.
//!
//! A token is quantized to bytes with one scale, a tensor has one scale, and a result is `f32(integer sum) * (dw * dy)`. Sums are
//! exact, so every kernel gives the bits of the reference. Rows and columns are padded with zero weights when a matrix is packed.
//!
//! A table holds, for the activations of two or three neighbouring columns, the sums and differences that their weights can ask
//! for, as 16-bit numbers split into a table of low and one of high bytes; the packed weights are the index. One lookup in each
//! and an interleave give 16-bit values for 32 rows, which are added up in 16 bits and widened before they could overflow.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use common::formats::{Codes, I2S, Tl1, Tl2, i2_s, tl1};
use common::kernels::Isa;
use common::runtime::memory::AlignedBuf;
use common::runtime::pool::{Chunks, Pool};

/// Columns of pairs that are added in 16 bits: 128 sums of at most 2 x 127.
const PAIR_COLS: usize = 256;
/// Columns of triples that are added in 16 bits: 64 sums of at most 3 x 127.
const TRIPLE_COLS: usize = 192;
/// Tiles of 32 rows that share the tables of a block while they are in the first-level cache.
const TILES: usize = 8;
/// Groups of I2_S that are added in 16 bits: 16 x 4 sums of at most 2 x 2 x 127. (bitnet.cpp adds 32, which can overflow.)
pub const GROUPS: usize = 16;

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Two-bit codes, multiplied.
    I2S,
    /// Pairs of weights.
    Tl1,
    /// Triples of weights with a sign, and pairs for the columns that are left.
    Tl2,
}

impl Way {
    /// As result rows name it.
    pub const fn name(self) -> &'static str {
        match self {
            Way::I2S => "i2_s",
            Way::Tl1 => "tl1",
            Way::Tl2 => "tl2",
        }
    }
}

/// A matrix in one of the formats, its rows repeated as often as asked.
pub struct Packed {
    way: Way,
    rows: usize,
    cols: usize,
    scale: f32,
    /// Columns of triples.
    split: usize,
    triples: AlignedBuf,
    signs: AlignedBuf,
    /// Pairs, or the codes of I2_S.
    pairs: AlignedBuf,
}

impl Packed {
    /// Packs `codes`, repeated until there are `rows` rows.
    ///
    /// # Errors
    /// Rows that are to be repeated and are no whole tiles, memory that the system refuses.
    pub fn new(way: Way, codes: &Codes, scale: f32, rows: usize) -> Result<Self> {
        let tile = match way {
            Way::I2S => 1,
            _ => tl1::TILE_ROWS,
        };
        ensure!(
            rows == codes.rows() || rows > codes.rows() && codes.rows().is_multiple_of(tile),
            "{}: {} rows cannot be repeated to {rows}, expected tiles of {tile}",
            way.name(),
            codes.rows()
        );
        let (of, to) = (codes.rows().div_ceil(tile), rows.div_ceil(tile));
        let repeat = |part: &[u8]| -> Result<AlignedBuf> {
            let mut buf = AlignedBuf::new(part.len() / of * to)?;
            for to in buf.chunks_mut(part.len().max(1)) {
                to.copy_from_slice(&part[..to.len()]);
            }
            Ok(buf)
        };
        let (split, triples, signs, pairs) = match way {
            Way::I2S => {
                let packed = I2S::pack(codes, scale, i2_s::GROUP_X86)?;
                (0, repeat(&[])?, repeat(&[])?, repeat(packed.packed())?)
            }
            Way::Tl1 => {
                let packed = Tl1::pack(codes, scale);
                (0, repeat(&[])?, repeat(&[])?, repeat(packed.pairs())?)
            }
            Way::Tl2 => {
                let packed = Tl2::pack(codes, scale);
                let (triples, signs) = (repeat(packed.triples())?, repeat(packed.signs())?);
                (
                    packed.triple_cols(),
                    triples,
                    signs,
                    repeat(packed.pairs())?,
                )
            }
        };
        let cols = codes.cols();
        Ok(Packed {
            way,
            rows,
            cols,
            scale,
            split,
            triples,
            signs,
            pairs,
        })
    }

    /// The same matrix in another place.
    ///
    /// # Errors
    /// Memory that the system refuses.
    pub fn copy(&self) -> Result<Self> {
        Ok(Packed {
            triples: AlignedBuf::copy_of(&self.triples)?,
            signs: AlignedBuf::copy_of(&self.signs)?,
            pairs: AlignedBuf::copy_of(&self.pairs)?,
            ..*self
        })
    }

    /// Bytes that one product streams.
    pub fn bytes(&self) -> usize {
        self.triples.len() + self.signs.len() + self.pairs.len()
    }
}

/// Tokens as bytes, and the tables made of them.
pub struct Tokens {
    cols: usize,
    tokens: usize,
    padded: usize,
    codes: Vec<i8>,
    sums: Vec<i32>,
    scales: Vec<f32>,
    /// `[token][column / 2][low and high][16]`, from column `split` on.
    pairs: Vec<u8>,
    /// `[token][column / 3][low and high][16]`, up to column `split`.
    triples: Vec<u8>,
    split: usize,
}

impl Tokens {
    /// Tokens of `codes.len() / cols` given as bytes, -127 to 127, with a scale each.
    ///
    /// # Errors
    /// Lengths that do not fit together, no tokens, a code of -128.
    pub fn new(codes: &[i8], scales: &[f32], cols: usize) -> Result<Self> {
        let tokens = scales.len();
        ensure!(
            cols > 0 && tokens > 0 && Some(codes.len()) == tokens.checked_mul(cols),
            "tokens: {} codes and {tokens} scales, expected rows of {cols}",
            codes.len()
        );
        ensure!(
            !codes.contains(&-128),
            "tokens: code -128, expected -127 to 127"
        );
        let padded = cols.next_multiple_of(i2_s::GROUP_X86);
        let mut all = vec![0; tokens * padded];
        for (to, from) in all.chunks_mut(padded).zip(codes.chunks(cols)) {
            to[..cols].copy_from_slice(from);
        }
        let sum = |row: &[i8]| row.iter().map(|&y| i32::from(y)).sum();
        Ok(Tokens {
            cols,
            tokens,
            padded,
            sums: all.chunks(padded).map(sum).collect(),
            codes: all,
            scales: scales.to_vec(),
            pairs: Vec::new(),
            triples: Vec::new(),
            split: 0,
        })
    }

    /// Quantizes each row of `x` to its largest magnitude.
    ///
    /// # Errors
    /// As [`Tokens::new`]; a value that is not finite.
    pub fn quantize(x: &[f32], cols: usize) -> Result<Self> {
        let mut codes = Vec::with_capacity(x.len());
        let mut scales = Vec::new();
        for row in x.chunks(cols.max(1)) {
            let amax = row.iter().fold(0f32, |m, v| m.max(v.abs()));
            ensure!(
                row.iter().all(|v| v.is_finite()),
                "tokens: a value that is not finite"
            );
            let id = if amax > 0.0 { 127.0 / amax } else { 0.0 };
            codes.extend(
                row.iter()
                    .map(|v| (v * id).round_ties_even().clamp(-127.0, 127.0) as i8),
            );
            scales.push(amax / 127.0);
        }
        Tokens::new(&codes, &scales, cols)
    }

    /// The codes of a token, with padding.
    pub fn row(&self, token: usize) -> &[i8] {
        &self.codes[token * self.padded..][..self.padded]
    }

    /// Makes the tables for a matrix's format: part of the work of every product with new activations.
    pub fn tables(&mut self, w: &Packed) {
        self.pairs.clear();
        self.triples.clear();
        self.split = w.split;
        if w.way == Way::I2S {
            return;
        }
        let end = w.cols.next_multiple_of(tl1::BLOCK_COLS);
        for token in self.codes.chunks(self.padded) {
            for y in token[..w.split].chunks_exact(3) {
                let [a, b, c] = [0, 1, 2].map(|i| i16::from(y[i]));
                // Entry 9a' + 3b' + c' from (0, 0, 0) up: the triples whose first weight that is not zero is +1.
                let table = [
                    0,
                    c,
                    b - c,
                    b,
                    b + c,
                    a - b - c,
                    a - b,
                    a - b + c,
                    a - c,
                    a,
                    a + c,
                    a + b - c,
                    a + b,
                    a + b + c,
                    0,
                    0,
                ];
                split(table, &mut self.triples);
            }
            for y in token[w.split..end].chunks_exact(2) {
                let [a, b] = [0, 1].map(|i| i16::from(y[i]));
                let table = [
                    -a - b,
                    -a,
                    b - a,
                    -b,
                    0,
                    b,
                    a - b,
                    a,
                    a + b,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                ];
                split(table, &mut self.pairs);
            }
        }
    }
}

/// Appends the low bytes, then the high bytes.
fn split(table: [i16; 16], to: &mut Vec<u8>) {
    to.extend(table.map(|v| v as u8));
    to.extend(table.map(|v| (v >> 8) as u8));
}

/// The sums of some tiles: what the instruction sets differ in.
///
/// # Safety
/// The CPU has the instruction set; see the kernels.
type BlockFn = unsafe fn(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]);
type RowFn = unsafe fn(weights: &[u8], y: &[i8]) -> i32;

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The instruction set.
    pub isa: Isa,
    /// A block of columns of a tile of 32 rows, looked up in the tables of pairs, and added to the sums.
    pairs: BlockFn,
    /// The same of triples and their signs.
    triples: BlockFn,
    /// `u . y` of a row of I2_S, where u is the code.
    i2_s: RowFn,
}

/// The kernels that this CPU can run, the scalar reference first.
pub fn kernels() -> Vec<Kernel> {
    let scalar = Kernel {
        isa: Isa::Scalar,
        pairs: scalar::pairs,
        triples: scalar::triples,
        i2_s: scalar::i2_s,
    };
    let mut kernels = vec![scalar];
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx2.available() {
        kernels.push(Kernel {
            isa: Isa::Avx2,
            pairs: x86::pairs,
            triples: x86::triples,
            i2_s: x86::i2_s,
        });
    }
    #[cfg(target_arch = "aarch64")]
    kernels.push(Kernel {
        isa: Isa::Neon,
        pairs: arm::pairs,
        triples: arm::triples,
        i2_s: arm::i2_s,
    });
    kernels
}

impl Kernel {
    /// Where the code that does a format's work starts: a function of this process.
    pub fn code(&self, way: Way) -> *const u8 {
        match way {
            Way::I2S => self.i2_s as *const u8,
            Way::Tl1 => self.pairs as *const u8,
            Way::Tl2 => self.triples as *const u8,
        }
    }

    /// `out[token][row] = w[row] . x[token]`, as bits of f32, with all threads of the pool.
    ///
    /// # Errors
    /// Columns that differ, tables of another format, an output of another length.
    pub fn multiply(&self, pool: &Pool, w: &Packed, x: &Tokens, out: &[AtomicU32]) -> Result<()> {
        let name = w.way.name();
        ensure!(
            w.cols == x.cols,
            "{name}: {} columns of weights, {} of activations",
            w.cols,
            x.cols
        );
        ensure!(
            x.tokens.checked_mul(w.rows) == Some(out.len()),
            "{name}: output of {}, expected {} tokens of {} rows",
            out.len(),
            x.tokens,
            w.rows
        );
        let end = w.cols.next_multiple_of(tl1::BLOCK_COLS);
        let tables = (w.split / 3 * 32, (end - w.split) / 2 * 32);
        ensure!(
            w.way == Way::I2S
                || (x.triples.len(), x.pairs.len()) == (x.tokens * tables.0, x.tokens * tables.1),
            "{name}: the tables of the activations are not for this matrix"
        );
        let height = TILES * tl1::TILE_ROWS;
        let chunks = Chunks {
            size: ((512 << 10) * w.rows / w.bytes()).next_multiple_of(height),
            multiple: height,
        };
        pool.chunks_by(w.rows, chunks, |_, rows| match w.way {
            Way::I2S => self.multiply_add(w, x, rows, out),
            _ => {
                for first in rows.clone().step_by(height) {
                    self.look_up(w, x, first..rows.end.min(first + height), out);
                }
            }
        });
        Ok(())
    }

    fn multiply_add(&self, w: &Packed, x: &Tokens, rows: Range<usize>, out: &[AtomicU32]) {
        let bytes = x.padded / 4;
        for row in rows {
            let weights = &w.pairs[row * bytes..][..bytes];
            for token in 0..x.tokens {
                // SAFETY: this CPU has the set, or `kernels` would not give it; a whole row and its activations.
                let sum = unsafe { (self.i2_s)(weights, x.row(token)) } - x.sums[token];
                store(out, w, x, token, row, sum);
            }
        }
    }

    /// At most [`TILES`] tiles: a block of columns at a time, all tiles on the tables of a token while these are near.
    fn look_up(&self, w: &Packed, x: &Tokens, rows: Range<usize>, out: &[AtomicU32]) {
        let tiles = rows.start / 32..rows.end.div_ceil(32);
        let mut sums = vec![[[0i32; 32]; TILES]; x.tokens];
        let end = w.cols.next_multiple_of(tl1::BLOCK_COLS);
        let widths = (w.split, end - w.split);
        for from in (0..widths.0).step_by(TRIPLE_COLS) {
            let cols = from..widths.0.min(from + TRIPLE_COLS);
            for (token, sums) in sums.iter_mut().enumerate() {
                let tables = &x.triples[token * widths.0 / 3 * 32..];
                let tables = &tables[cols.start / 3 * 32..cols.end / 3 * 32];
                for (tile, sums) in tiles.clone().zip(sums) {
                    let weights =
                        part(&w.triples, tile, widths.0 / 6, cols.start / 6..cols.end / 6);
                    let signs = part(
                        &w.signs,
                        tile,
                        widths.0 / 24,
                        cols.start / 24..cols.end / 24,
                    );
                    // SAFETY: this CPU has the set, or `kernels` would not give it; the parts of one block.
                    unsafe { (self.triples)(weights, signs, tables, sums) }
                }
            }
        }
        for from in (0..widths.1).step_by(PAIR_COLS) {
            let cols = from..widths.1.min(from + PAIR_COLS);
            for (token, sums) in sums.iter_mut().enumerate() {
                let tables = &x.pairs[token * widths.1 / 2 * 32..];
                let tables = &tables[cols.start / 2 * 32..cols.end / 2 * 32];
                for (tile, sums) in tiles.clone().zip(sums) {
                    let weights = part(&w.pairs, tile, widths.1 / 4, cols.start / 4..cols.end / 4);
                    // SAFETY: as above.
                    unsafe { (self.pairs)(weights, &[], tables, sums) }
                }
            }
        }
        for (token, sums) in sums.iter().enumerate() {
            for (row, &sum) in rows.clone().zip(sums.as_flattened()) {
                store(out, w, x, token, row, sum);
            }
        }
    }
}

/// The 32-byte columns `cols` of a tile of `width` such columns.
fn part(of: &[u8], tile: usize, width: usize, cols: Range<usize>) -> &[u8] {
    &of[(tile * width + cols.start) * 32..(tile * width + cols.end) * 32]
}

fn store(out: &[AtomicU32], w: &Packed, x: &Tokens, token: usize, row: usize, sum: i32) {
    let value = sum as f32 * (w.scale * x.scales[token]);
    out[token * w.rows + row].store(value.to_bits(), Relaxed);
}

mod scalar {
    use common::formats::tl1::lane;

    use super::i2_s::GROUP_X86;

    /// The entry of a table for the index in a nibble.
    fn entry(tables: &[u8], at: usize, index: u8) -> i32 {
        let at = at * 32 + usize::from(index);
        i32::from(i16::from_le_bytes([tables[at], tables[at + 16]]))
    }

    pub fn pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        for (c, column) in weights.chunks_exact(32).enumerate() {
            for (row, sum) in sums.iter_mut().enumerate() {
                let byte = column[lane(row)];
                *sum += entry(tables, 2 * c, byte >> 4) + entry(tables, 2 * c + 1, byte & 15);
            }
        }
    }

    pub fn triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        for (c, column) in weights.chunks_exact(32).enumerate() {
            for (row, sum) in sums.iter_mut().enumerate() {
                let word = c / 4 * 32 + row % 16 * 2;
                let word = u16::from_le_bytes([signs[word], signs[word + 1]]);
                for (half, index) in [column[lane(row)] >> 4, column[lane(row)] & 15]
                    .into_iter()
                    .enumerate()
                {
                    let bit = 15 - 2 * (c % 4 * 2 + half) - row / 16;
                    let value = entry(tables, 2 * c + half, index);
                    *sum += if word >> bit & 1 == 1 { -value } else { value };
                }
            }
        }
    }

    pub fn i2_s(weights: &[u8], y: &[i8]) -> i32 {
        let groups = weights.chunks_exact(32).zip(y.chunks_exact(GROUP_X86));
        let sum = |(bytes, y): (&[u8], &[i8])| {
            let codes = y.iter().enumerate();
            codes
                .map(|(k, &y)| i32::from(bytes[k % 32] >> (6 - k / 32 * 2) & 3) * i32::from(y))
                .sum::<i32>()
        };
        groups.map(sum).sum()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::GROUPS;

    /// A 16-byte table in both halves.
    ///
    /// # Safety
    /// AVX2; 16 bytes at `p`.
    #[inline(always)]
    unsafe fn table(p: *const u8) -> __m256i {
        // SAFETY: the caller's contract.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast())) }
    }

    /// Rows 0 to 15 and 16 to 31 of what two tables give for 32 indices.
    ///
    /// # Safety
    /// AVX2; 32 bytes of tables at `p`.
    #[inline(always)]
    unsafe fn look_up(p: *const u8, index: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's contract.
        unsafe {
            let low = _mm256_shuffle_epi8(table(p), index);
            let high = _mm256_shuffle_epi8(table(p.add(16)), index);
            [
                _mm256_unpacklo_epi8(low, high),
                _mm256_unpackhi_epi8(low, high),
            ]
        }
    }

    /// Widens 32 sums of 16 bits and adds them.
    ///
    /// # Safety
    /// AVX2.
    #[inline(always)]
    unsafe fn widen(acc: [__m256i; 2], sums: &mut [i32; 32]) {
        for (acc, sums) in acc.into_iter().zip(sums.as_chunks_mut::<16>().0) {
            // SAFETY: the caller's contract; 16 numbers.
            unsafe {
                let halves = [
                    _mm256_castsi256_si128(acc),
                    _mm256_extracti128_si256(acc, 1),
                ];
                for (half, sums) in halves.into_iter().zip(sums.as_chunks_mut::<8>().0) {
                    let at: *mut __m256i = sums.as_mut_ptr().cast();
                    let sum = _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_cvtepi16_epi32(half));
                    _mm256_storeu_si256(at, sum);
                }
            }
        }
    }

    /// # Safety
    /// AVX2. Columns of 32 bytes, and 64 bytes of tables for each.
    #[target_feature(enable = "avx2")]
    pub unsafe fn pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        // SAFETY: the caller's contract.
        unsafe {
            let nibble = _mm256_set1_epi8(15);
            let mut acc = [_mm256_setzero_si256(); 2];
            for (column, tables) in weights.chunks_exact(32).zip(tables.chunks_exact(64)) {
                let v = _mm256_loadu_si256(column.as_ptr().cast());
                let first = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
                let first = look_up(tables.as_ptr(), first);
                let second = look_up(tables.as_ptr().add(32), _mm256_and_si256(v, nibble));
                for i in 0..2 {
                    acc[i] = _mm256_add_epi16(acc[i], first[i]);
                    acc[i] = _mm256_add_epi16(acc[i], second[i]);
                }
            }
            widen(acc, sums);
        }
    }

    /// # Safety
    /// AVX2. Columns of 32 bytes, four to a sign vector, and 64 bytes of tables for each.
    #[target_feature(enable = "avx2")]
    pub unsafe fn triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        // SAFETY: the caller's contract.
        unsafe {
            let nibble = _mm256_set1_epi8(15);
            let mut acc = [_mm256_setzero_si256(); 2];
            let words = weights
                .chunks_exact(4 * 32)
                .zip(tables.chunks_exact(4 * 64));
            for ((columns, tables), sign) in words.zip(signs.chunks_exact(32)) {
                let mut sign = _mm256_loadu_si256(sign.as_ptr().cast());
                for c in 0..4 {
                    let v = _mm256_loadu_si256(columns.as_ptr().add(32 * c).cast());
                    let first = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
                    let second = _mm256_and_si256(v, nibble);
                    let tables = tables.as_ptr().add(64 * c);
                    for sums in [look_up(tables, first), look_up(tables.add(32), second)] {
                        for (acc, v) in acc.iter_mut().zip(sums) {
                            // Each sign in its turn is the top bit: -1 where it is set, and (v + -1) ^ -1 is -v.
                            let negative = _mm256_srai_epi16(sign, 15);
                            sign = _mm256_add_epi16(sign, sign);
                            let v = _mm256_xor_si256(_mm256_add_epi16(v, negative), negative);
                            *acc = _mm256_add_epi16(*acc, v);
                        }
                    }
                }
            }
            widen(acc, sums);
        }
    }

    /// # Safety
    /// AVX2. Groups of 32 bytes, and 128 activations for each.
    #[target_feature(enable = "avx2")]
    pub unsafe fn i2_s(weights: &[u8], y: &[i8]) -> i32 {
        // SAFETY: the caller's contract.
        unsafe {
            let mask = _mm256_set1_epi8(3);
            let mut total = _mm256_setzero_si256();
            for (weights, y) in weights.chunks(32 * GROUPS).zip(y.chunks(128 * GROUPS)) {
                let mut acc = _mm256_setzero_si256();
                for (bytes, y) in weights.chunks_exact(32).zip(y.chunks_exact(128)) {
                    let v = _mm256_loadu_si256(bytes.as_ptr().cast());
                    let slots = [
                        _mm256_srli_epi16(v, 6),
                        _mm256_srli_epi16(v, 4),
                        _mm256_srli_epi16(v, 2),
                        v,
                    ];
                    for (s, slot) in slots.into_iter().enumerate() {
                        let y = _mm256_loadu_si256(y.as_ptr().add(32 * s).cast());
                        let products = _mm256_maddubs_epi16(_mm256_and_si256(slot, mask), y);
                        acc = _mm256_add_epi16(acc, products);
                    }
                }
                total = _mm256_add_epi32(total, _mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
            }
            let mut lanes = [0i32; 8];
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), total);
            lanes.iter().sum()
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::GROUPS;

    /// The rows of each eight bytes of a column, in the order in which they stand.
    const ROWS: [usize; 4] = [0, 16, 8, 24];

    /// What two tables give for 16 indices.
    #[target_feature(enable = "neon")]
    unsafe fn look_up(tables: &[u8], index: uint8x16_t) -> [int16x8_t; 2] {
        // SAFETY: the slice is checked; NEON is part of the target.
        unsafe {
            let low = vqtbl1q_u8(vld1q_u8(tables[..16].as_ptr()), index);
            let high = vqtbl1q_u8(vld1q_u8(tables[16..32].as_ptr()), index);
            [
                vreinterpretq_s16_u8(vzip1q_u8(low, high)),
                vreinterpretq_s16_u8(vzip2q_u8(low, high)),
            ]
        }
    }

    #[target_feature(enable = "neon")]
    unsafe fn widen(acc: [int16x8_t; 4], sums: &mut [i32; 32]) {
        for (acc, row) in acc.into_iter().zip(ROWS) {
            let mut lanes = [0i16; 8];
            // SAFETY: eight numbers; NEON is part of the target.
            unsafe { vst1q_s16(lanes.as_mut_ptr(), acc) };
            for (sum, lane) in sums[row..].iter_mut().zip(lanes) {
                *sum += i32::from(lane);
            }
        }
    }

    /// # Safety
    /// Columns of 32 bytes, and 64 bytes of tables for each.
    #[target_feature(enable = "neon")]
    pub unsafe fn pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        // SAFETY: slices are checked; NEON is part of the target.
        unsafe {
            let mut acc = [vdupq_n_s16(0); 4];
            for (column, tables) in weights.chunks_exact(32).zip(tables.chunks_exact(64)) {
                for (half, acc) in acc.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let v = vld1q_u8(column[16 * half..].as_ptr());
                    let first = look_up(tables, vshrq_n_u8(v, 4));
                    let second = look_up(&tables[32..], vandq_u8(v, vdupq_n_u8(15)));
                    for i in 0..2 {
                        acc[i] = vaddq_s16(acc[i], vaddq_s16(first[i], second[i]));
                    }
                }
            }
            widen(acc, sums);
        }
    }

    /// # Safety
    /// Columns of 32 bytes, four to 32 bytes of signs, and 64 bytes of tables for each.
    #[target_feature(enable = "neon")]
    pub unsafe fn triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
        // SAFETY: slices are checked; NEON is part of the target.
        unsafe {
            let mut acc = [vdupq_n_s16(0); 4];
            let words = weights
                .chunks_exact(4 * 32)
                .zip(tables.chunks_exact(4 * 64));
            for ((columns, tables), signs) in words.zip(signs.chunks_exact(32)) {
                let signs = [0, 16].map(|at| vld1q_s16(signs[at..].as_ptr().cast()));
                for c in 0..4 {
                    for (half, index) in [4, 0].into_iter().enumerate() {
                        let tables = &tables[64 * c + 32 * half..];
                        for (eights, acc) in acc.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                            let v = vld1q_u8(columns[32 * c + 16 * eights..].as_ptr());
                            let v = vandq_u8(vshlq_u8(v, vdupq_n_s8(-index)), vdupq_n_u8(15));
                            for (i, v) in look_up(tables, v).into_iter().enumerate() {
                                // Bytes 0 to 15 of a column are rows 0 to 7 and 16 to 23, the others 8 to 15 and 24 to 31.
                                let shift = vdupq_n_s16((4 * c + 2 * half + i) as i16);
                                let sign = vshrq_n_s16(vshlq_s16(signs[eights], shift), 15);
                                let v = veorq_s16(vaddq_s16(v, sign), sign);
                                acc[i] = vaddq_s16(acc[i], v);
                            }
                        }
                    }
                }
            }
            widen(acc, sums);
        }
    }

    /// # Safety
    /// Groups of 32 bytes, and 128 activations for each.
    #[target_feature(enable = "neon")]
    pub unsafe fn i2_s(weights: &[u8], y: &[i8]) -> i32 {
        // SAFETY: slices are checked; NEON is part of the target.
        unsafe {
            let mut total = 0;
            for (weights, y) in weights.chunks(32 * GROUPS).zip(y.chunks(128 * GROUPS)) {
                let mut acc = [vdupq_n_s16(0); 2];
                for (bytes, y) in weights.chunks_exact(32).zip(y.chunks_exact(128)) {
                    for half in 0..2 {
                        let v = vld1q_u8(bytes[16 * half..].as_ptr());
                        for slot in 0..4 {
                            let u = vshlq_u8(v, vdupq_n_s8(2 * slot as i8 - 6));
                            let u = vreinterpretq_s8_u8(vandq_u8(u, vdupq_n_u8(3)));
                            let y = vld1q_s8(y[32 * slot + 16 * half..].as_ptr());
                            acc[0] = vmlal_s8(acc[0], vget_low_s8(u), vget_low_s8(y));
                            acc[1] = vmlal_high_s8(acc[1], u, y);
                        }
                    }
                }
                total += vaddlvq_s16(acc[0]) + vaddlvq_s16(acc[1]);
            }
            total
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAYS: [Way; 3] = [Way::I2S, Way::Tl1, Way::Tl2];

    fn product(kernel: &Kernel, w: &Packed, x: &Tokens, threads: usize) -> Vec<f32> {
        let out: Vec<AtomicU32> = (0..w.rows * x.tokens)
            .map(|_| AtomicU32::new(u32::MAX))
            .collect();
        kernel
            .multiply(&Pool::new(threads).unwrap(), w, x, &out)
            .unwrap();
        out.into_iter()
            .map(|v| f32::from_bits(v.into_inner()))
            .collect()
    }

    /// Every instruction set, one and three threads, against a dot product of the codes.
    fn check(rows: usize, cols: usize, w: &[u8], y: &[i8]) {
        let codes = Codes::new(w, rows, cols).unwrap();
        let expected: Vec<f32> = y
            .chunks(cols)
            .flat_map(|y| {
                w.chunks(cols).map(move |w| {
                    let terms = w.iter().zip(y);
                    terms
                        .map(|(&u, &y)| (i32::from(u) - 1) * i32::from(y))
                        .sum::<i32>() as f32
                })
            })
            .collect();
        for way in WAYS {
            let packed = Packed::new(way, &codes, 1.0, rows).unwrap();
            let mut x = Tokens::new(y, &vec![1.0; y.len() / cols], cols).unwrap();
            x.tables(&packed);
            for kernel in kernels() {
                for threads in [1, 3] {
                    let found = product(&kernel, &packed, &x, threads);
                    assert_eq!(
                        found,
                        expected,
                        "{} {} {rows} x {cols}",
                        way.name(),
                        kernel.isa
                    );
                }
            }
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        let cols = 8192 + 96 + 5;
        for u in [0, 1, 2] {
            for y in [127, -127] {
                check(3, cols, &vec![u; 3 * cols], &vec![y; cols]);
            }
        }
    }

    #[test]
    fn awkward_shapes_give_the_reference_sums() {
        for (rows, cols, tokens) in [
            (1, 1, 1),
            (1, 95, 2),
            (33, 97, 1),
            (70, 290, 3),
            (258, 224, 1),
        ] {
            let w: Vec<u8> = (0..rows * cols).map(|i| (i * i % 11 % 3) as u8).collect();
            let y: Vec<i8> = (0..tokens * cols).map(|i| (i * 89 % 255) as i8).collect();
            let y: Vec<i8> = y.iter().map(|&y| y.max(-127)).collect();
            check(rows, cols, &w, &y);
        }
    }

    #[test]
    fn tables_hold_every_sum() {
        let codes: Vec<u8> = (0..27 * 96)
            .map(|i| [i / 96 / 9, i / 96 / 3 % 3, i / 96 % 3][i % 3] as u8)
            .collect();
        let y: Vec<i8> = (0..96).map(|k| [100, 27, -9][k % 3]).collect();
        check(27, 96, &codes, &y);
    }

    #[test]
    fn repeated_rows_give_repeated_results() {
        let w: Vec<u8> = (0..64 * 130).map(|i| (i * 7 % 5 % 3) as u8).collect();
        let codes = Codes::new(&w, 64, 130).unwrap();
        for way in WAYS {
            let few = Packed::new(way, &codes, 0.5, 64).unwrap();
            let many = Packed::new(way, &codes, 0.5, 150).unwrap().copy().unwrap();
            let mut x = Tokens::quantize(&[0.25; 130], 130).unwrap();
            x.tables(&few);
            for kernel in kernels() {
                let few = product(&kernel, &few, &x, 1);
                let many = product(&kernel, &many, &x, 2);
                assert_eq!(many, [&few[..], &few, &few[..22]].concat());
            }
        }
    }

    #[test]
    fn quantized_tokens_are_within_half_a_step() {
        let x: Vec<f32> = (0..200).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let tokens = Tokens::quantize(&x, 100).unwrap();
        for (t, x) in x.chunks(100).enumerate() {
            for (&q, x) in tokens.row(t).iter().zip(x) {
                let step = tokens.scales[t];
                assert!((f32::from(q) * step - x).abs() <= step * 0.5001);
            }
        }
        assert!(Tokens::quantize(&[f32::NAN], 1).is_err());
        assert_eq!(Tokens::quantize(&[0.0; 4], 4).unwrap().scales, [0.0]);
    }
}
