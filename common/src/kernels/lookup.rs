//! bitnet.cpp's three ways to multiply ternary weights: I2_S multiplies and adds; TL1 and TL2 look sums of activations up.
//!
//! A token is quantized to bytes with one scale, a tensor has one scale, and a result is `f32(integer sum) * (dw * dy)`. Sums are
//! exact, so every kernel gives the bits of the reference. Rows and columns are padded with zero weights when a matrix is packed.
//!
//! A table holds, for the activations of two or three neighbouring columns, the sums and differences that their weights can ask
//! for, as 16-bit numbers split into a table of low and one of high bytes; the packed weights are the index. One lookup in each
//! and an interleave give 16-bit values for 32 rows, which are added up in 16 bits and widened before they could overflow.

use std::array::from_fn;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Context, Result, ensure};

use super::Isa;
use super::census::{self, Census};
use crate::formats::tl1::{self, TILE_ROWS, lane};
use crate::formats::{Codes, I2S, Tl1, Tl2, i2_s, tl2};

/// Columns of pairs that are added in 16 bits: 128 sums of at most 2 x 127.
const PAIR_COLS: usize = 256;
/// Columns of triples that are added in 16 bits: 64 sums of at most 3 x 127.
const TRIPLE_COLS: usize = 192;
/// Tiles of 32 rows that share the tables of a block while they are in the first-level cache.
const TILES: usize = 8;
/// Rows to multiply together, or a multiple of them: those of all tiles that share tables.
pub const ROWS: usize = TILES * TILE_ROWS;
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

/// The packed bytes of a matrix: triples, their signs, and pairs or the codes of I2_S. Whole tiles of 32 rows, and whole rows of
/// I2_S, stand one after the other in each.
pub type Parts = [Vec<u8>; 3];

impl Way {
    /// Every format.
    pub const ALL: [Way; 3] = [Way::I2S, Way::Tl1, Way::Tl2];

    /// As result rows name it.
    pub const fn name(self) -> &'static str {
        match self {
            Way::I2S => "i2_s",
            Way::Tl1 => "tl1",
            Way::Tl2 => "tl2",
        }
    }

    /// Packs a matrix.
    ///
    /// # Errors
    /// As [`I2S::pack`].
    pub fn pack(self, codes: &Codes) -> Result<Parts> {
        let none = Vec::new;
        Ok(match self {
            Way::I2S => {
                let packed = I2S::pack(codes, 1.0, i2_s::GROUP_X86)?;
                [none(), none(), packed.packed().to_vec()]
            }
            Way::Tl1 => [none(), none(), Tl1::pack(codes, 1.0).pairs().to_vec()],
            Way::Tl2 => {
                let packed = Tl2::pack(codes, 1.0);
                [packed.triples(), packed.signs(), packed.pairs()].map(<[u8]>::to_vec)
            }
        })
    }
}

/// A matrix over its packed bytes.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    way: Way,
    rows: usize,
    cols: usize,
    scale: f32,
    /// Columns of triples.
    split: usize,
    /// Columns, with padding.
    padded: usize,
    triples: &'a [u8],
    signs: &'a [u8],
    pairs: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// A matrix over [`Parts`], wherever they stand, with one scale.
    ///
    /// # Errors
    /// A length that does not fit the shape.
    pub fn new<P: Deref<Target = [u8]>>(
        way: Way,
        (rows, cols): (usize, usize),
        scale: f32,
        parts: &'a [P; 3],
    ) -> Result<Self> {
        let (name, [triples, signs, pairs]) = (way.name(), parts.each_ref().map(|p| &p[..]));
        let (multiple, height) = match way {
            Way::I2S => (i2_s::GROUP_X86, 1),
            _ => (tl1::BLOCK_COLS, TILE_ROWS),
        };
        let padded = cols.checked_next_multiple_of(multiple);
        let padded = padded.with_context(|| format!("{name}: {cols} columns"))?;
        let (split, of_pairs) = match way {
            Way::I2S => (0, padded / 4),
            Way::Tl1 => (0, padded / 4 * 32),
            Way::Tl2 => {
                let split = tl2::triple_cols(cols);
                (split, (padded - split) / 4 * 32)
            }
        };
        let units = rows.div_ceil(height);
        for (part, bytes) in [
            (triples, split / 6 * 32),
            (signs, split / 24 * 32),
            (pairs, of_pairs),
        ] {
            ensure!(
                units.checked_mul(bytes) == Some(part.len()),
                "{name}: found {} bytes for {rows} rows of {cols} weights, expected {units} times {bytes}",
                part.len()
            );
        }
        Ok(Matrix {
            way,
            rows,
            cols,
            scale,
            split,
            padded,
            triples,
            signs,
            pairs,
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
    /// `[token][column / 2][low and high][16]`, of the columns past the triples.
    pairs: Vec<u8>,
    /// `[token][column / 3][low and high][16]`.
    triples: Vec<u8>,
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

    /// Makes the tables for a matrix of as many columns: part of the work of every product with new activations.
    pub fn tables(&mut self, w: &Matrix) {
        self.pairs.clear();
        self.triples.clear();
        if w.way == Way::I2S {
            return;
        }
        // A weight of those that an index stands for, by the power of three that it counts.
        let weight = |index: usize, power: usize| (index / power % 3) as i16 - 1;
        for token in self.codes.chunks(self.padded) {
            for y in token[..w.split].chunks_exact(3) {
                let [a, b, c] = [0, 1, 2].map(|i| i16::from(y[i]));
                // From (0, 0, 0) up: the triples whose first weight that is not zero is +1.
                let sum = |i| weight(i, 9) * a + weight(i, 3) * b + weight(i, 1) * c;
                append(from_fn::<_, 14, _>(|i| sum(13 + i)), &mut self.triples);
            }
            for y in token[w.split..w.padded].chunks_exact(2) {
                let [a, b] = [0, 1].map(|i| i16::from(y[i]));
                let sum = |i| weight(i, 3) * a + weight(i, 1) * b;
                append(from_fn::<_, 9, _>(sum), &mut self.pairs);
            }
        }
    }
}

/// Appends a table of the low bytes, then one of the high bytes.
fn append<const N: usize>(sums: [i16; N], to: &mut Vec<u8>) {
    let table: [i16; 16] = from_fn(|i| sums.get(i).copied().unwrap_or(0));
    to.extend(table.map(|v| v as u8));
    to.extend(table.map(|v| (v >> 8) as u8));
}

/// Adds to the sums of a tile of 32 rows what a block of columns gives, looked up in its tables.
///
/// # Safety
/// The CPU has the instruction set.
pub(super) type BlockFn =
    unsafe fn(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]);

/// `u . y` of a row of I2_S, where u is the code.
///
/// # Safety
/// As [`BlockFn`].
pub(super) type RowFn = unsafe fn(weights: &[u8], y: &[i8]) -> i32;

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The instruction set.
    pub isa: Isa,
    /// Columns of 32 bytes, and 64 bytes of tables for each; no signs.
    pub(super) pairs: BlockFn,
    /// Columns of 32 bytes, 64 bytes of tables for each, and 32 bytes of signs for every four.
    pub(super) triples: BlockFn,
    /// Groups of 32 bytes, and 128 activations for each.
    pub(super) i2_s: RowFn,
}

/// The kernels that this CPU can run, the scalar reference first.
pub fn kernels() -> Vec<Kernel> {
    let all = [SCALAR].into_iter();
    #[cfg(target_arch = "x86_64")]
    let all = all.chain([super::x86::lookup::KERNEL]);
    #[cfg(target_arch = "aarch64")]
    let all = all.chain([super::arm::lookup::KERNEL]);
    all.filter(|k| k.isa.available()).collect()
}

impl Kernel {
    /// Counts the loop that does a format's work, by what multiplies or looks up.
    ///
    /// # Errors
    /// As [`census::census`].
    pub fn census(&self, way: Way) -> Result<Census> {
        let (code, work): (*const u8, &[&str]) = match way {
            Way::I2S => (self.i2_s as *const u8, &census::DOTS),
            Way::Tl1 => (self.pairs as *const u8, &["Vpshufb"]),
            Way::Tl2 => (self.triples as *const u8, &["Vpshufb"]),
        };
        // SAFETY: a function.
        unsafe { census::census_of(way.name(), code, work) }
    }

    /// `out[token][row] = w[row] . x[token]`, as bits of f32, for some of the rows, on this thread. `out` is that of all rows.
    ///
    /// # Errors
    /// Columns that differ, tables of another format, an output of another length, rows outside it or off the tiles.
    pub fn multiply(
        &self,
        w: &Matrix,
        x: &Tokens,
        rows: Range<usize>,
        out: &[AtomicU32],
    ) -> Result<()> {
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
        ensure!(
            rows.start <= rows.end && rows.end <= w.rows && rows.start.is_multiple_of(TILE_ROWS),
            "{name}: rows {rows:?} of {}, expected whole tiles of {TILE_ROWS}",
            w.rows
        );
        if w.way == Way::I2S {
            self.multiply_add(w, x, rows, out);
            return Ok(());
        }
        let tables = [w.split / 3, (w.padded - w.split) / 2].map(|n| x.tokens * n * 32);
        ensure!(
            [x.triples.len(), x.pairs.len()] == tables,
            "{name}: the tables of the activations are not for this matrix"
        );
        for first in rows.clone().step_by(ROWS) {
            self.look_up(w, x, first..rows.end.min(first + ROWS), out);
        }
        Ok(())
    }

    fn multiply_add(&self, w: &Matrix, x: &Tokens, rows: Range<usize>, out: &[AtomicU32]) {
        let bytes = w.padded / 4;
        for row in rows {
            let weights = &w.pairs[row * bytes..][..bytes];
            for token in 0..x.tokens {
                // SAFETY: this CPU has the set, or `kernels` would not give it.
                let sum = unsafe { (self.i2_s)(weights, x.row(token)) } - x.sums[token];
                store(out, w, x, token, row, sum);
            }
        }
    }

    /// At most [`TILES`] tiles: a block of columns at a time, all tiles on the tables of a token while these are near.
    fn look_up(&self, w: &Matrix, x: &Tokens, rows: Range<usize>, out: &[AtomicU32]) {
        let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
        let mut sums = vec![[[0i32; 32]; TILES]; x.tokens];
        let width = w.split;
        for from in (0..width).step_by(TRIPLE_COLS) {
            let cols = from..width.min(from + TRIPLE_COLS);
            for (token, sums) in sums.iter_mut().enumerate() {
                let tables = part(&x.triples, token, width, &cols, 3);
                for (tile, sums) in tiles.clone().zip(sums) {
                    let weights = part(w.triples, tile, width, &cols, 6);
                    let signs = part(w.signs, tile, width, &cols, 24);
                    // SAFETY: this CPU has the set, or `kernels` would not give it.
                    unsafe { (self.triples)(weights, signs, tables, sums) }
                }
            }
        }
        let width = w.padded - w.split;
        for from in (0..width).step_by(PAIR_COLS) {
            let cols = from..width.min(from + PAIR_COLS);
            for (token, sums) in sums.iter_mut().enumerate() {
                let tables = part(&x.pairs, token, width, &cols, 2);
                for (tile, sums) in tiles.clone().zip(sums) {
                    let weights = part(w.pairs, tile, width, &cols, 4);
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

/// Of one of several that are `width` columns wide, with 32 bytes for every `per` columns, the bytes of `cols`.
fn part<'a>(of: &'a [u8], one: usize, width: usize, cols: &Range<usize>, per: usize) -> &'a [u8] {
    let at = |col| (one * width + col) / per * 32;
    &of[at(cols.start)..at(cols.end)]
}

fn store(out: &[AtomicU32], w: &Matrix, x: &Tokens, token: usize, row: usize, sum: i32) {
    let value = sum as f32 * (w.scale * x.scales[token]);
    out[token * w.rows + row].store(value.to_bits(), Relaxed);
}

/// The reference.
const SCALAR: Kernel = Kernel {
    isa: Isa::Scalar,
    pairs: scalar_pairs,
    triples: scalar_triples,
    i2_s: scalar_i2_s,
};

/// The entry of a table for the index in a nibble.
fn entry(tables: &[u8], at: usize, index: u8) -> i32 {
    let at = at * 32 + usize::from(index);
    i32::from(i16::from_le_bytes([tables[at], tables[at + 16]]))
}

fn scalar_pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
    for (c, column) in weights.chunks_exact(32).enumerate() {
        for (row, sum) in sums.iter_mut().enumerate() {
            let byte = column[lane(row)];
            *sum += entry(tables, 2 * c, byte >> 4) + entry(tables, 2 * c + 1, byte & 15);
        }
    }
}

fn scalar_triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
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

fn scalar_i2_s(weights: &[u8], y: &[i8]) -> i32 {
    let groups = weights
        .chunks_exact(32)
        .zip(y.chunks_exact(i2_s::GROUP_X86));
    let sum = |(bytes, y): (&[u8], &[i8])| {
        let codes = y.iter().enumerate();
        codes
            .map(|(k, &y)| i32::from(bytes[k % 32] >> (6 - k / 32 * 2) & 3) * i32::from(y))
            .sum::<i32>()
    };
    groups.map(sum).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All rows together, or tile by tile.
    fn product(kernel: &Kernel, w: &Matrix, x: &Tokens, some: usize) -> Vec<f32> {
        let out: Vec<AtomicU32> = (0..w.rows * x.tokens)
            .map(|_| AtomicU32::new(u32::MAX))
            .collect();
        for first in (0..w.rows).step_by(some) {
            let rows = first..w.rows.min(first + some);
            kernel.multiply(w, x, rows, &out).unwrap();
        }
        out.into_iter()
            .map(|v| f32::from_bits(v.into_inner()))
            .collect()
    }

    /// Every instruction set, all tiles together and each by itself, against a dot product of the codes.
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
        for way in Way::ALL {
            let packed = way.pack(&codes).unwrap();
            let packed = Matrix::new(way, (rows, cols), 1.0, &packed).unwrap();
            let mut x = Tokens::new(y, &vec![1.0; y.len() / cols], cols).unwrap();
            x.tables(&packed);
            for kernel in kernels() {
                for some in [ROWS * 2, TILE_ROWS] {
                    let found = product(&kernel, &packed, &x, some);
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
        for way in Way::ALL {
            let few = way.pack(&codes).unwrap();
            let many = few.each_ref().map(|part| part.repeat(5));
            let few = Matrix::new(way, (64, 130), 0.5, &few).unwrap();
            let many = Matrix::new(way, (5 * 64, 130), 0.5, &many).unwrap();
            let mut x = Tokens::quantize(&[0.25; 130], 130).unwrap();
            x.tables(&few);
            for kernel in kernels() {
                let few = product(&kernel, &few, &x, ROWS);
                let many = product(&kernel, &many, &x, ROWS);
                assert_eq!(many, few.repeat(5));
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

    #[test]
    fn what_does_not_fit_is_refused() {
        let codes = Codes::new(&[1; 3 * 96], 3, 96).unwrap();
        let refused = |found: Result<()>, words: &str| {
            let error = found.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        for way in Way::ALL {
            let parts = way.pack(&codes).unwrap();
            let w = Matrix::new(way, (3, 96), 1.0, &parts).unwrap();
            for shape in [(33, 96), (3, 129)] {
                let found = Matrix::new(way, shape, 1.0, &parts);
                refused(found.map(drop), "bytes for");
            }
            refused(
                Matrix::new(way, (3, usize::MAX), 1.0, &parts).map(drop),
                "columns",
            );
            let out: Vec<_> = (0..3).map(AtomicU32::new).collect();
            let mut x = Tokens::new(&[1; 96], &[1.0], 96).unwrap();
            let kernel = kernels()[0];
            if way != Way::I2S {
                let found = kernel.multiply(&w, &x, 0..3, &out);
                refused(found, "not for this matrix");
            }
            x.tables(&w);
            refused(kernel.multiply(&w, &x, 0..3, &out[1..]), "output of 2");
            refused(kernel.multiply(&w, &x, 0..4, &out), "rows 0..4 of 3");
            refused(kernel.multiply(&w, &x, 1..3, &out), "rows 1..3 of 3");
            let narrow = Tokens::new(&[1; 95], &[1.0], 95).unwrap();
            refused(
                kernel.multiply(&w, &narrow, 0..3, &out),
                "95 of activations",
            );
        }
    }
}
