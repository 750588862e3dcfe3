//! The same model in another format: ternary packings exactly, or dense with the rotation folded
//! back, so that runtimes that know nothing of it compute the same function.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use half::f16;

use super::rotation::Rotation;
use super::{Gguf, Tensor, Writer};
use crate::formats::{BlockQ4_0, BlockQ8_0, Format};
use crate::runtime::hyper::ARCHITECTURE;

const FILE_TYPE_KEY: &str = "general.file_type";
/// Weights that are converted at a time.
const CHUNK: usize = 1 << 18;

/// `general.file_type` as llama.cpp and PrismML's fork number it. `None`: no target of
/// [`convert`].
fn file_type(format: Format) -> Option<u32> {
    match format {
        Format::F32 => Some(0),
        Format::F16 => Some(1),
        Format::Q4_0 => Some(2),
        Format::Q8_0 => Some(7),
        Format::Q2_0 => Some(41),
        Format::Pq2_0 => Some(141),
        Format::Ptq1_0 => Some(143),
        Format::Bf16 | Format::Tq1_0 | Format::Tq2_0 => None,
    }
}

/// Writes `input` to `output` with its ternary and its rotated tensors in the format `to`; every
/// other tensor and key is copied. `progress` is told the bytes of input as they are done.
///
/// * To PQ2_0, PTQ1_0 or Q2_0: codes and scales are kept bit for bit, and so is the rotation.
/// * To F32, F16, Q8_0 or Q4_0: the rotation is folded back (computed in f64, rounded once) and its
///   keys are dropped.
///
/// # Errors
/// A target that is none of these; a file with nothing to convert; code 3 into base 3; small blocks
/// with unequal scales into larger ones; values that F16 cannot hold; what reading the rotation
/// keys or writing reports.
pub fn convert(
    input: &Gguf,
    output: &Path,
    to: Format,
    mut progress: impl FnMut(u64),
) -> Result<()> {
    let file = input.file();
    let Some(file_type) = file_type(to) else {
        bail!("{file}: {to} is not a format to convert to");
    };
    let rotation = Rotation::read(input)?;
    let rotation = rotation.as_ref();
    let dense = !to.is_ternary();
    let changes = |t: &Tensor| {
        let rotated = rotation.is_some_and(|r| r.stores(&t.name));
        t.format.is_ternary() || (dense && rotated)
    };
    ensure!(
        input.tensors().iter().any(changes),
        "{file}: no ternary tensors, expected some to convert to {to}"
    );

    let mut writer = Writer::new();
    let mut typed = false;
    for value in input.keys() {
        if value.key() == FILE_TYPE_KEY {
            writer.set(FILE_TYPE_KEY, file_type)?;
            typed = true;
        } else if !(dense && value.key().starts_with("prism.hadamard.")) {
            writer.copy(&value)?;
        }
    }
    if !typed {
        writer.set(FILE_TYPE_KEY, file_type)?;
    }
    for t in input.tensors() {
        let format = if changes(t) { to } else { t.format };
        writer
            .tensor(&t.name, &t.dims, format)
            .with_context(|| file.to_owned())?;
    }
    let heads = match rotation {
        Some(r) if dense && input.tensors().iter().any(|t| r.groups_heads(&t.name)) => {
            Some(Heads::read(input)?)
        }
        _ => None,
    };
    // Whether it is the input that stops the conversion, rather than what is written.
    let mut refused = false;
    let written = writer.write(output, |i, out| {
        let t = &input.tensors()[i];
        let data = input.data(t);
        let done = if !changes(t) {
            out.write_all(data).map_err(Into::into)
        } else if dense {
            let fold = rotation.filter(|r| r.stores(&t.name)).map(|rotation| Fold {
                block: rotation.block,
                signs: rotation.signs(t.cols()),
                heads: heads.filter(|_| rotation.groups_heads(&t.name)),
            });
            to_dense(t, data, fold.as_ref(), to, out)
        } else {
            repack(t.format, data, to, out)
        };
        refused = done.as_ref().is_err_and(|error| !error.is::<io::Error>());
        progress(t.bytes);
        done
    });
    if refused {
        written.with_context(|| format!("{file} to {to}"))
    } else {
        written
    }
}

/// Codes and scales from one ternary format to another, unchanged.
fn repack(from: Format, data: &[u8], to: Format, out: &mut dyn Write) -> Result<()> {
    // A run that is a whole number of blocks in both.
    let unit = from.block_weights().max(to.block_weights());
    let run = CHUNK / unit * unit;
    let run_bytes = from.row_bytes(run)?;
    let (mut codes, mut packed) = (vec![0u8; run], vec![0u8; to.row_bytes(run)?]);
    let mut scales = vec![f16::ZERO; run / from.block_weights()];
    for (n, part) in data.chunks(run_bytes).enumerate() {
        let weights = part.len() / from.block_bytes() * from.block_weights();
        let scales = &mut scales[..weights / from.block_weights()];
        let codes = &mut codes[..weights];
        from.unpack(part, codes, scales)?;
        let at = n * run;
        let scales = regroup(scales, from, to).with_context(|| format!("from weight {at}"))?;
        let packed = &mut packed[..to.row_bytes(weights)?];
        to.pack(codes, &scales, packed)
            .with_context(|| format!("from weight {at}"))?;
        out.write_all(packed)?;
    }
    Ok(())
}

/// Scales a block of `from` as scales a block of `to`: repeated, or merged where they are equal.
fn regroup(scales: &[f16], from: Format, to: Format) -> Result<Vec<f16>> {
    let (have, want) = (from.block_weights(), to.block_weights());
    if want <= have {
        let times = have / want;
        return Ok(scales
            .iter()
            .flat_map(|&d| std::iter::repeat_n(d, times))
            .collect());
    }
    scales
        .chunks(want / have)
        .enumerate()
        .map(|(i, group)| {
            let d = group[0];
            match group.iter().find(|other| other.to_bits() != d.to_bits()) {
                None => Ok(d),
                Some(other) => bail!(
                    "block {i} of {want}: {from} scales {d} and {other}, expected equal ones for {to}"
                ),
            }
        })
        .collect()
}

/// Value heads of the linear attention, for the order of `ssm_out`'s columns.
#[derive(Clone, Copy)]
struct Heads {
    key: usize,
    value: usize,
    state: usize,
}

impl Heads {
    fn read(gguf: &Gguf) -> Result<Self> {
        let name = |key: &str| format!("{}.ssm.{key}", ARCHITECTURE);
        let (key, value) = (
            gguf.usize(&name("group_count"))?,
            gguf.usize(&name("time_step_rank"))?,
        );
        let state = gguf.usize(&name("state_size"))?;
        let file = gguf.file();
        ensure!(
            key > 0 && value.is_multiple_of(key),
            "{file}: keys ssm.group_count and ssm.time_step_rank: found {key} and {value}, expected a \
             whole number of value heads a key head"
        );
        Ok(Self { key, value, state })
    }

    /// Where the columns of tiled head `j` stand in grouped order.
    fn grouped(&self, j: usize) -> usize {
        j % self.key * (self.value / self.key) + j / self.key
    }
}

/// How one tensor's rows leave the rotated basis.
struct Fold<'a> {
    block: usize,
    signs: &'a [f32],
    /// Set if the columns are in grouped order and are to be tiled.
    heads: Option<Heads>,
}

impl Fold<'_> {
    /// w = s * (H w'), then the columns in the activation's own order.
    fn row(&self, row: &mut [f64], spare: &mut [f64]) {
        for block in row.chunks_exact_mut(self.block) {
            walsh_hadamard(block);
        }
        for (x, &s) in row.iter_mut().zip(self.signs) {
            *x *= f64::from(s);
        }
        if let Some(heads) = self.heads {
            for (j, head) in spare.chunks_exact_mut(heads.state).enumerate() {
                head.copy_from_slice(&row[heads.grouped(j) * heads.state..][..heads.state]);
            }
            row.copy_from_slice(spare);
        }
    }
}

/// x = H x, H normalized and in Sylvester's order.
fn walsh_hadamard(x: &mut [f64]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (a, b) = pair.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let factor = 1.0 / (x.len() as f64).sqrt();
    for x in x {
        *x *= factor;
    }
}

/// Rows decoded, folded back, and stored in a dense format.
fn to_dense(
    t: &Tensor,
    data: &[u8],
    fold: Option<&Fold>,
    to: Format,
    out: &mut dyn Write,
) -> Result<()> {
    let cols = t.cols();
    if let Some(heads) = fold.and_then(|f| f.heads) {
        ensure!(
            heads.value.checked_mul(heads.state) == Some(cols),
            "width {cols}, expected ssm.time_step_rank x ssm.state_size = {} x {}",
            heads.value,
            heads.state
        );
    }
    let row_bytes = t.format.row_bytes(cols)?;
    let mut row = vec![0f32; cols];
    let (mut wide, mut spare) = (vec![0f64; cols], vec![0f64; cols]);
    let mut stored = Vec::with_capacity(to.row_bytes(cols)?);
    for (r, bytes) in data.chunks(row_bytes).enumerate() {
        t.format.dequantize(bytes, &mut row)?;
        if let Some(fold) = fold {
            for (wide, &x) in wide.iter_mut().zip(&row) {
                *wide = x.into();
            }
            fold.row(&mut wide, &mut spare);
            for (x, &wide) in row.iter_mut().zip(&wide) {
                *x = wide as f32;
            }
        }
        stored.clear();
        if let Some(k) = row.iter().position(|&x| !holds(to, x)) {
            bail!(
                "row {r}, weight {k}: value {}, expected a finite number that {to} holds",
                row[k]
            );
        }
        store(&row, to, &mut stored)?;
        out.write_all(&stored)?;
    }
    Ok(())
}

/// Whether a dense format has a place for `x`: finite, and its scale no more than F16 can hold.
fn holds(to: Format, x: f32) -> bool {
    let f16_max = f16::MAX.to_f32();
    x.is_finite()
        && match to {
            Format::F16 => x.abs() <= f16_max,
            Format::Q8_0 => x.abs() <= f16_max * 127.0,
            Format::Q4_0 => x.abs() <= f16_max * 8.0,
            _ => true,
        }
}

/// Appends values in a dense format.
fn store(row: &[f32], to: Format, out: &mut Vec<u8>) -> Result<()> {
    match to {
        Format::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        Format::F16 => out.extend(row.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        Format::Q8_0 => {
            for x in row.as_chunks().0 {
                out.extend_from_slice(bytemuck::bytes_of(&BlockQ8_0::quantize(x)));
            }
        }
        Format::Q4_0 => {
            for x in row.as_chunks().0 {
                out.extend_from_slice(bytemuck::bytes_of(&BlockQ4_0::quantize(x)));
            }
        }
        _ => bail!("{to}: not a dense format to convert to"),
    }
    Ok(())
}
