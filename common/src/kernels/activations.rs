//! Activations as the kernels read them: quantized once a batch, packed for register tiles.

use anyhow::{Result, ensure};
use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::widened::widened;

/// Tokens that one register tile holds at most.
pub const TILE: usize = 16;

/// The widths a group can have: a batch that is no multiple of [`TILE`] ends in the narrowest that holds the rest.
pub const WIDTHS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Consecutive codes of a token that stand together in [`Group::packed`]: what one lane of a register tile takes.
pub const PACK: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 };

/// What the activations of a kernel are quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Not at all: float weights take float activations.
    F32,
    /// Blocks of 32, as ggml's reference quantizes `Q8_0`: for `Q8_0` and `Q4_0` weights.
    Q8_0,
    /// Blocks of 256, as ggml quantizes `Q8_K`: for every ternary format.
    Q8K,
}

impl Form {
    /// Weights that share one activation scale; rows are padded with zeros to a multiple of it.
    pub const fn block(self) -> usize {
        match self {
            Form::F32 => 1,
            Form::Q8_0 => 32,
            Form::Q8K => 256,
        }
    }
}

/// The unit of allocation: one cache line, so that a vector load of packed activations never splits one.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([i8; 64]);

fn lines(bytes: usize) -> Vec<Line> {
    vec![Line([0; 64]); bytes.div_ceil(64)]
}

/// Up to [`TILE`] tokens of one batch. Tokens past the last are zero up to the width.
#[derive(Clone)]
pub struct Group {
    form: Form,
    cols: usize,
    padded: usize,
    tokens: usize,
    width: usize,
    values: Vec<f32>,
    rows: Vec<Line>,
    packed: Vec<Line>,
    scales: Vec<f32>,
    offsets: Vec<i32>,
}

impl Group {
    fn new(form: Form, cols: usize, capacity: usize) -> Self {
        let padded = cols.next_multiple_of(form.block());
        let width = width_for(capacity);
        let (floats, codes) = match form {
            Form::F32 => (width * cols, 0),
            _ => (0, width * padded),
        };
        Group {
            form,
            cols,
            padded,
            tokens: 0,
            width,
            values: vec![0.0; floats],
            rows: lines(codes),
            packed: lines(if width > 1 { codes } else { 0 }),
            scales: vec![
                0.0;
                if codes > 0 {
                    width * padded / form.block()
                } else {
                    0
                }
            ],
            offsets: vec![
                0;
                if form == Form::Q8K {
                    codes / 256 * 7
                } else {
                    0
                }
            ],
        }
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens held, rounded up to one of [`WIDTHS`].
    pub fn width(&self) -> usize {
        self.width
    }

    /// Codes a token: the columns rounded up to the block of the form.
    pub fn padded(&self) -> usize {
        self.padded
    }

    /// `[token][k]`: the f32 activations, in [`Form::F32`] only.
    pub fn values(&self, token: usize) -> &[f32] {
        &self.values[token * self.cols..][..self.cols]
    }

    /// `[k]`: the codes of one token in natural order.
    pub fn row(&self, token: usize) -> &[i8] {
        &bytemuck::cast_slice::<Line, i8>(&self.rows)[token * self.padded..][..self.padded]
    }

    /// `[k / PACK][token][k % PACK]`: the codes of all tokens, in the order of register tiles.
    pub fn packed(&self) -> &[i8] {
        let lines = if self.width == 1 {
            &self.rows
        } else {
            &self.packed
        };
        &bytemuck::cast_slice::<Line, i8>(lines)[..self.width * self.padded]
    }

    /// `[k / block][token]`: the scale of each block.
    pub fn scales(&self) -> &[f32] {
        &self.scales[..self.width * self.padded / self.form.block()]
    }

    /// `[k / run][token]`: minus the sum of `run` codes, what the offset of weight codes takes from a dot product; for runs of
    /// 64, 128 and 256, in [`Form::Q8K`] only.
    pub fn offsets(&self, run: usize) -> &[i32] {
        let n = self.width * self.padded / 256;
        match run {
            64 => &self.offsets[..4 * n],
            128 => &self.offsets[4 * n..6 * n],
            256 => &self.offsets[6 * n..7 * n],
            _ => panic!("offsets: runs of 64, 128 or 256, found {run}"),
        }
    }

    /// Quantizes `x`, `[token][cols]`, at most the capacity of this group.
    #[inline(always)]
    fn set(&mut self, x: &[f32]) {
        self.tokens = x.len() / self.cols;
        self.width = width_for(self.tokens);
        if self.form == Form::F32 {
            self.values[..x.len()].copy_from_slice(x);
            return;
        }
        let (padded, width, block) = (self.padded, self.width, self.form.block());
        let rows: &mut [i8] = bytemuck::cast_slice_mut(&mut self.rows);
        for token in 0..width {
            let row = &mut rows[token * padded..][..padded];
            if token >= self.tokens {
                row.fill(0);
                self.scales
                    .iter_mut()
                    .skip(token)
                    .step_by(width)
                    .take(padded / block)
                    .for_each(|d| *d = 0.0);
                continue;
            }
            let x = &x[token * self.cols..][..self.cols];
            for (b, q) in row.chunks_exact_mut(block).enumerate() {
                let x = &x[b * block..self.cols.min((b + 1) * block)];
                self.scales[b * width + token] = match self.form {
                    Form::Q8K => quantize_q8_k(x, q),
                    _ => quantize_q8_0(x, q),
                };
            }
        }
        self.finish();
    }

    fn set_codes(&mut self, codes: &[i8], scales: &[f32]) {
        self.tokens = codes.len() / self.padded;
        self.width = width_for(self.tokens);
        let rows: &mut [i8] = bytemuck::cast_slice_mut(&mut self.rows);
        rows[..codes.len()].copy_from_slice(codes);
        rows[codes.len()..].fill(0);
        let blocks = self.padded / self.form.block();
        self.scales.fill(0.0);
        for (token, scales) in scales.chunks_exact(blocks).enumerate() {
            for (b, &d) in scales.iter().enumerate() {
                self.scales[b * self.width + token] = d;
            }
        }
        self.finish();
    }

    /// Derives the packed order and the sums from the natural order.
    #[inline(always)]
    fn finish(&mut self) {
        let (padded, width) = (self.padded, self.width);
        let rows: &[[i8; PACK]] = bytemuck::cast_slice(&self.rows);
        if width > 1 {
            let packed: &mut [[i8; PACK]] = bytemuck::cast_slice_mut(&mut self.packed);
            for token in 0..width {
                let row = &rows[token * padded / PACK..][..padded / PACK];
                for (to, &from) in packed.iter_mut().skip(token).step_by(width).zip(row) {
                    *to = from;
                }
            }
        }
        if self.form == Form::Q8K {
            let rows: &[[i8; 64]] = bytemuck::cast_slice(&self.rows);
            let n = width * padded / 256;
            let (by64, rest) = self.offsets[..7 * n].split_at_mut(4 * n);
            let (by128, by256) = rest.split_at_mut(2 * n);
            for token in 0..width {
                let runs = by64.iter_mut().skip(token).step_by(width);
                for (to, codes) in runs.zip(&rows[token * padded / 64..]) {
                    *to = -codes.iter().map(|&q| i32::from(q)).sum::<i32>();
                }
            }
            pair_up(by64, by128, width);
            pair_up(by128, by256, width);
        }
    }
}

/// `[run][width]` into half as many runs.
#[inline(always)]
fn pair_up(from: &[i32], to: &mut [i32], width: usize) {
    for (from, to) in from.chunks_exact(2 * width).zip(to.chunks_exact_mut(width)) {
        for (token, to) in to.iter_mut().enumerate() {
            *to = from[token] + from[width + token];
        }
    }
}

/// The narrowest of [`WIDTHS`] that holds `tokens`.
fn width_for(tokens: usize) -> usize {
    *WIDTHS
        .iter()
        .find(|&&w| w >= tokens)
        .expect("a group holds at most TILE tokens")
}

/// The largest magnitude: compared as bits, which order as the numbers do and vectorize. NaN is the largest of all.
#[inline(always)]
fn magnitude(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff)))
}

/// The first value of that magnitude, sought in runs that vectorize.
#[inline(always)]
fn first_of(x: &[f32], magnitude: f32) -> f32 {
    for run in x.chunks(32) {
        if run
            .iter()
            .fold(false, |hit, v| hit | (v.abs() == magnitude))
        {
            let first = run.iter().copied().find(|v| v.abs() == magnitude);
            return first.unwrap_or(magnitude);
        }
    }
    magnitude
}

/// [`BlockQ8K::quantize`](crate::formats::BlockQ8K::quantize), in loops that vectorize. Returns the scale.
#[inline(always)]
fn quantize_q8_k(x: &[f32], q: &mut [i8]) -> f32 {
    let amax = magnitude(x);
    let iscale = -127.0 / first_of(x, amax);
    if !amax.is_finite() || !iscale.is_finite() {
        q.fill(0);
        return if amax.is_finite() { 0.0 } else { f32::NAN };
    }
    q[x.len()..].fill(0);
    for (q, v) in q.iter_mut().zip(x) {
        // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits.
        let bits = (iscale * v + 12_582_912.0).to_bits() & 0x7f_ffff;
        *q = (bits as i32 - 0x40_0000).min(127) as i8;
    }
    1.0 / iscale
}

/// ggml's reference for `Q8_0`: codes round half away from zero, the scale to f16. Returns the rounded scale.
#[inline(always)]
fn quantize_q8_0(x: &[f32], q: &mut [i8]) -> f32 {
    let amax = magnitude(x);
    let d = amax / 127.0;
    let id = if d == 0.0 { 0.0 } else { 1.0 / d };
    q[x.len()..].fill(0);
    for (q, v) in q.iter_mut().zip(x) {
        *q = (v * id).round() as i8;
    }
    f16::from_f32(d).to_f32()
}

/// A batch of tokens, ready for kernels that take its [`Form`]. The buffers are allocated once, for `capacity` tokens.
#[derive(Clone)]
pub struct Activations {
    form: Form,
    cols: usize,
    capacity: usize,
    tokens: usize,
    groups: Vec<Group>,
}

impl Activations {
    /// Room for `capacity` tokens of `cols` values each.
    pub fn new(form: Form, cols: usize, capacity: usize) -> Self {
        let groups = (0..capacity)
            .step_by(TILE)
            .map(|t| Group::new(form, cols, TILE.min(capacity - t)))
            .collect();
        Activations {
            form,
            cols,
            capacity,
            tokens: 0,
            groups,
        }
    }

    /// A batch of `x.len() / cols` tokens in buffers of their own.
    ///
    /// # Errors
    /// If `x` is not a whole number of rows.
    pub fn of(form: Form, cols: usize, x: &[f32]) -> Result<Self> {
        ensure!(
            cols > 0 && x.len().is_multiple_of(cols),
            "activations: {} values are not rows of {cols}",
            x.len()
        );
        let mut a = Activations::new(form, cols, x.len() / cols);
        a.set(x)?;
        Ok(a)
    }

    /// Quantizes `x`, `[token][cols]`, in place of what was held.
    ///
    /// # Errors
    /// If `x` is not a whole number of rows, or more than the capacity.
    pub fn set(&mut self, x: &[f32]) -> Result<()> {
        for (group, x) in self.split(x)? {
            fill((group, x));
        }
        Ok(())
    }

    /// The work of [`Activations::set`] as independent parts: each pair is to be handed to [`fill`].
    ///
    /// # Errors
    /// As [`Activations::set`].
    pub fn split<'a>(
        &'a mut self,
        x: &'a [f32],
    ) -> Result<impl Iterator<Item = (&'a mut Group, &'a [f32])>> {
        let tokens = x.len().checked_div(self.cols).unwrap_or(0);
        ensure!(
            tokens * self.cols == x.len() && tokens <= self.capacity,
            "activations: {} values, expected rows of {}, at most {}",
            x.len(),
            self.cols,
            self.capacity
        );
        self.tokens = tokens;
        Ok(self
            .groups
            .iter_mut()
            .zip(x.chunks((TILE * self.cols).max(1))))
    }

    /// Takes codes, `[token][padded cols]`, and scales, `[token][padded cols / block]`, as they are.
    ///
    /// # Errors
    /// If the lengths do not fit the shape, the form has no codes, or a code is -128.
    pub fn set_codes(&mut self, codes: &[i8], scales: &[f32]) -> Result<()> {
        let block = self.form.block();
        let padded = self.cols.next_multiple_of(block);
        let tokens = codes.len() / padded.max(1);
        ensure!(
            self.form != Form::F32
                && codes.len() == tokens * padded
                && scales.len() == tokens * padded / block
                && tokens <= self.capacity,
            "activations: {} codes and {} scales, expected rows of {padded}, at most {}",
            codes.len(),
            scales.len(),
            self.capacity
        );
        // Kernels negate codes within 8 bits, and bound their sums by 127.
        ensure!(
            !codes.contains(&i8::MIN),
            "activations: code -128, expected -127 to 127"
        );
        self.tokens = tokens;
        let parts = codes
            .chunks(TILE * padded)
            .zip(scales.chunks(TILE * padded / block));
        for (group, (codes, scales)) in self.groups.iter_mut().zip(parts) {
            group.set_codes(codes, scales);
        }
        Ok(())
    }

    /// What the values were quantized to.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Values a token.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens that the buffers hold at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The groups in use: all of [`TILE`] tokens but the last.
    pub fn groups(&self) -> &[Group] {
        &self.groups[..self.tokens.div_ceil(TILE)]
    }
}

widened! {
/// Quantizes one part of a batch, as [`Activations::split`] gave it.
pub fn fill(part: (&mut Group, &[f32])) {
    part.0.set(part.1);
}
}
