//! Which format a tensor's type id means. Ids collide in the wild, so the bytes that the offsets
//! leave for a tensor decide, and what fits no reading is refused.

use anyhow::{Result, bail, ensure};

use super::Shown;
use super::read::RawTensor;
use crate::formats::Format;

/// An id that has more than one meaning.
struct Collision {
    id: u32,
    /// What this crate can read it as, most likely first.
    readings: &'static [(&'static str, Format)],
    /// What else it may be.
    other: &'static str,
}

const COLLISIONS: [Collision; 3] = [
    Collision {
        id: 42,
        readings: &[
            ("Q2_0 in blocks of 64", Format::Q2_0),
            // Files published before mainline took the id: PQ2_0's block under Q2_0's id.
            ("the older Q2_0 in blocks of 128", Format::Pq2_0),
        ],
        other: "bitnet.cpp's TL2",
    },
    Collision {
        id: 142,
        readings: &[("PQ2_0", Format::Pq2_0)],
        other: "ik_llama.cpp's retired IQ2_TN",
    },
    Collision {
        id: 143,
        readings: &[("PTQ1_0", Format::Ptq1_0)],
        other: "ik_llama.cpp's retired IQ1_TN or another project's 8-bit type",
    },
];

/// A tensor and the bytes from its offset to the next tensor or the end of the file.
pub(super) struct Placed<'a> {
    pub raw: &'a RawTensor,
    pub room: u64,
}

/// The format that type `id` has in this file, given every tensor that carries it.
///
/// # Errors
/// An id that is not read here; a collision that no reading fits.
pub(super) fn resolve(
    file: &str,
    id: u32,
    tensors: &[Placed],
    alignment: u64,
    prism_keys: bool,
) -> Result<Format> {
    let Some(collision) = COLLISIONS.iter().find(|c| c.id == id) else {
        let Some(format) = Format::from_ggml_id(id) else {
            let name = Shown(tensors.first().map_or("", |t| &t.raw.name));
            let known: Vec<String> = Format::ALL
                .iter()
                .map(|f| format!("{f} {}", f.ggml_id()))
                .collect();
            bail!(
                "{file}: tensor {name}: type id {id} is not supported, expected one of {}",
                known.join(", ")
            );
        };
        return Ok(format);
    };
    let exact = |format: Format, t: &Placed| match bytes(t.raw, format) {
        Ok(n) => n <= t.room && t.room - n < alignment,
        Err(_) => false,
    };
    for &(_, format) in collision.readings {
        if tensors.iter().all(|t| exact(format, t)) {
            return Ok(format);
        }
    }
    // The keys settle what the id means, so unused room after a tensor is no contradiction.
    if let (true, [(_, format)]) = (prism_keys, collision.readings)
        && tensors
            .iter()
            .all(|t| bytes(t.raw, *format).is_ok_and(|n| n <= t.room))
    {
        return Ok(*format);
    }
    let wrong = |t: &&Placed| !collision.readings.iter().any(|&(_, f)| exact(f, t));
    let Some(t) = tensors.iter().find(wrong).or(tensors.first()) else {
        bail!("{file}: type id {id} on no tensor");
    };
    let takes: Vec<String> = collision
        .readings
        .iter()
        .map(|&(name, format)| match bytes(t.raw, format) {
            Ok(n) => format!("{n} bytes as {name}"),
            Err(error) => format!("no whole number of blocks as {name} ({error:#})"),
        })
        .collect();
    bail!(
        "{file}: tensor {}: type id {id} takes {}, but the offsets leave it {}: the file is cut or the \
         id means {}, expected an exact fit",
        Shown(&t.raw.name),
        takes.join(" or "),
        t.room,
        collision.other
    )
}

/// Bytes of a tensor in a format.
///
/// # Errors
/// A row that is no multiple of the block, or a size beyond this machine.
pub(super) fn bytes(raw: &RawTensor, format: Format) -> Result<u64> {
    let cols = usize::try_from(raw.dims[0])?;
    let rows = usize::try_from(raw.rows)?;
    let n = format.matrix_bytes(rows, cols)?;
    ensure!(
        n <= isize::MAX as usize,
        "{format}: {rows} rows of {cols} weights are too large for this machine"
    );
    Ok(n as u64)
}
