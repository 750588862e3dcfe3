//! How a whole matrix lies in memory: as the file stores it, or interleaved by rows for a kernel.
//!
//! A repacked matrix takes exactly the bytes of its source and is repacked in place. Rows past the
//! last full tile keep their stock blocks at the end: `[tiles][tail rows]`.
//!
//! The interleaved layouts are one family. Each moves four bytes of a row (16 weights) at a time
//! through [`crumbs::transpose`], with three parameters:
//!
//! * `stride`: in each run of 16*stride weights of a row, byte m holds weights m, m+4*stride,
//!   m+8*stride, m+12*stride in slots 0 to 3; a run takes 4*stride bytes;
//! * `interleave`: that many rows take turns, a run each;
//! * `unit`: the scales of a block, `d[row]`, lead its codes; or in each unit of that many blocks the codes of all come first, then
//!   the scales of all, so that both stay aligned and a tile is one stream.
//!
//! | layout | rows a tile | interleave | stride | unit |
//! |---|---|---|---|---|
//! | slot16 | 4 | 4 | 4 | none |
//! | row-pair | 4 | 2 | 2 | none |
//! | wide-row | 8 or 16 | all | 1 | 2 |
//!
//! 256 columns of 16 rows in PQ2_0 so are 16 cache lines of codes and one of scales. The base-3 wide-row layout shares tiles and tail
//! and has units of one block, 7 lines; [`wide_b3`] has its codes.

use anyhow::{Result, ensure};
use half::f16;

use super::{BlockPtq1_0, Format, Ternary, crumbs, repack, tq2_0, wide_b3};

/// Rows in a tile of a wide layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TileRows {
    /// Eight 32-bit lanes: 256-bit vectors.
    R8 = 8,
    /// Sixteen 32-bit lanes: 512-bit vectors.
    R16 = 16,
}

/// How a matrix lies in memory. See the [module documentation](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Layout {
    /// As the file stores it.
    Stock(Format),
    /// PQ2_0 in tiles of four rows, 16 consecutive weights of a row a slot.
    Slot16,
    /// PQ2_0 in tiles of four rows, 8 consecutive weights of a row a slot, rows in pairs.
    RowPair,
    /// Two-bit codes in tiles of 8 or 16 rows: a 32-bit lane holds 16 weights of a row, 4 a slot.
    Wide2 {
        /// The two-bit format it is made from: Q2_0, PQ2_0 or TQ2_0.
        source: Format,
        /// Rows in a tile.
        rows: TileRows,
    },
    /// PTQ1_0 in tiles of 8 or 16 rows, base-3 codes for wide vectors: see [`wide_b3`].
    WideB3 {
        /// Rows in a tile.
        rows: TileRows,
    },
}

/// The parameters of an interleaved layout.
#[derive(Clone, Copy)]
struct Tiling {
    rows: usize,
    interleave: usize,
    stride: usize,
    unit: Option<usize>,
    /// Base-3 codes, placed and coded by [`wide_b3`] instead.
    base3: Option<TileRows>,
}

/// Blocks of a wide two-bit tile whose codes, then scales, stand together.
pub const UNIT: usize = 2;

/// Where block `b` of the `blocks` of a wide tile has its codes and its scales, in bytes from the start of the tile, where a block takes
/// `codes` and `scales` bytes of the tile, and `unit` of them stand together; fewer at the end.
#[inline(always)]
pub const fn wide_block(
    unit: usize,
    blocks: usize,
    (codes, scales): (usize, usize),
    b: usize,
) -> (usize, usize) {
    let first = b - b % unit;
    let left = blocks - first;
    let together = if left < unit { left } else { unit };
    let start = first * (codes + scales);
    let within = b - first;
    (
        start + within * codes,
        start + together * codes + within * scales,
    )
}

/// A matrix split into what its kernels take.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Full tiles.
    pub tiles: usize,
    /// The tiles: codes and scales.
    pub codes: &'a [u8],
    /// Stock rows past the last full tile (all rows of a stock layout).
    pub tail: &'a [u8],
}

/// Two-bit codes and their scales, one by one.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpacked {
    /// `rows * cols` codes, row after row.
    pub codes: Vec<u8>,
    /// Bits of a scale for each block, row after row.
    pub scales: Vec<u16>,
}

impl Layout {
    /// The name in result rows: `stock` for PQ2_0 as stored, else the format or the layout.
    /// 8 and 16 rows share a name: it is the same layout at another vector width.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Stock(Format::Pq2_0) => "stock",
            Layout::Stock(format) => format.name(),
            Layout::Slot16 => "slot16",
            Layout::RowPair => "row-pair",
            Layout::Wide2 {
                source: Format::Q2_0,
                ..
            } => "wide-row-q2_0",
            Layout::Wide2 {
                source: Format::Tq2_0,
                ..
            } => "wide-row-tq2_0",
            Layout::Wide2 { .. } => "wide-row",
            Layout::WideB3 { .. } => "wide-row-b3",
        }
    }

    /// The format that the matrix has before it is repacked, and that its tail rows keep.
    pub const fn source(self) -> Format {
        match self {
            Layout::Stock(format) | Layout::Wide2 { source: format, .. } => format,
            Layout::Slot16 | Layout::RowPair => Format::Pq2_0,
            Layout::WideB3 { .. } => Format::Ptq1_0,
        }
    }

    /// Rows in a tile; 1 for a stock layout.
    pub const fn tile_rows(self) -> usize {
        match self {
            Layout::Stock(_) => 1,
            Layout::Slot16 | Layout::RowPair => 4,
            Layout::Wide2 { rows, .. } | Layout::WideB3 { rows } => rows as usize,
        }
    }

    const fn tiling(self) -> Option<Tiling> {
        let rows = self.tile_rows();
        let (interleave, stride, unit) = match self {
            Layout::Stock(_) => return None,
            Layout::Slot16 => (4, 4, None),
            Layout::RowPair => (2, 2, None),
            Layout::Wide2 { .. } => (rows, 1, Some(UNIT)),
            Layout::WideB3 { .. } => (rows, 1, Some(wide_b3::UNIT)),
        };
        let base3 = match self {
            Layout::WideB3 { rows } => Some(rows),
            _ => None,
        };
        Some(Tiling {
            rows,
            interleave,
            stride,
            unit,
            base3,
        })
    }

    /// Checks that `len` bytes are this matrix, and returns the bytes of a stock row.
    fn check(self, len: usize, rows: usize, cols: usize) -> Result<usize> {
        let source = self.source();
        ensure!(
            matches!(self, Layout::Stock(_) | Layout::WideB3 { .. })
                || matches!(source, Format::Q2_0 | Format::Pq2_0 | Format::Tq2_0),
            "{}: made from a two-bit format, found {source}",
            self.name()
        );
        ensure!(
            cols > 0,
            "{}: rows of 0 weights, expected at least a block",
            self.name()
        );
        let expected = source.matrix_bytes(rows, cols)?;
        ensure!(
            len == expected,
            "{}: {rows} rows of {cols} weights take {expected} bytes, found {len}",
            self.name()
        );
        source.row_bytes(cols)
    }

    /// The tiles and the tail of a matrix in this layout.
    ///
    /// # Errors
    /// A length that does not fit the shape.
    pub fn parts(self, bytes: &[u8], rows: usize, cols: usize) -> Result<Parts<'_>> {
        let row_bytes = self.check(bytes.len(), rows, cols)?;
        let Some(tiling) = self.tiling() else {
            return Ok(Parts {
                tiles: 0,
                codes: &[],
                tail: bytes,
            });
        };
        let tiles = rows / tiling.rows;
        let (codes, tail) = bytes.split_at(tiles * tiling.rows * row_bytes);
        Ok(Parts { tiles, codes, tail })
    }

    /// Turns stock bytes into this layout, in place. Takes a tile of temporary memory.
    ///
    /// # Errors
    /// A length that does not fit the shape, a source that is not two-bit.
    pub fn repack_in_place(self, bytes: &mut [u8], rows: usize, cols: usize) -> Result<()> {
        let row_bytes = self.check(bytes.len(), rows, cols)?;
        let Some(tiling) = self.tiling() else {
            return Ok(());
        };
        let source = self.source();
        let plan = Plan::new(source, tiling, rows, row_bytes);
        let mut tile = vec![0; plan.tile_bytes];
        for t in 0..plan.tiles {
            let place = t * plan.tile_bytes..(t + 1) * plan.tile_bytes;
            tile.copy_from_slice(&bytes[place.clone()]);
            if tiling.unit.is_some() {
                self.wide_tiles(plan.blocks, &tile, &mut bytes[place]);
                continue;
            }
            for at in plan.blocks_of(t) {
                let (d, qs) = split_block(source, &tile[at.stock..][..plan.block_bytes]);
                bytes[at.scale..][..2].copy_from_slice(d);
                plan.put(qs, &at, bytes);
            }
        }
        Ok(())
    }

    /// Repacks whole tiles from the stock rows in `stock` to `tiles`, as many bytes. What [`Layout::repack_in_place`] does, for rows
    /// that are read a few at a time.
    ///
    /// # Errors
    /// As there; stock rows that are no whole tiles; lengths that differ.
    pub fn repack_tiles(self, cols: usize, stock: &[u8], tiles: &mut [u8]) -> Result<()> {
        let row_bytes = self.source().row_bytes(cols)?;
        let rows = stock.len().checked_div(row_bytes).unwrap_or(0);
        self.check(stock.len(), rows, cols)?;
        let name = self.name();
        let height = self.tile_rows();
        ensure!(
            rows.is_multiple_of(height),
            "{name}: {rows} rows, expected whole tiles of {height}"
        );
        ensure!(
            tiles.len() == stock.len(),
            "{name}: a place of {} bytes, expected {}",
            tiles.len(),
            stock.len()
        );
        if self.tiling().is_some_and(|t| t.unit.is_some()) {
            self.wide_tiles(cols / self.source().block_weights(), stock, tiles);
            return Ok(());
        }
        tiles.copy_from_slice(stock);
        self.repack_in_place(tiles, rows, cols)
    }

    /// The tiles of a wide layout.
    fn wide_tiles(self, blocks: usize, stock: &[u8], tiles: &mut [u8]) {
        match self {
            Layout::Wide2 { source, rows } => repack::wide2(source, rows, blocks, stock, tiles),
            Layout::WideB3 { rows } => repack::wide_b3(rows, blocks, stock, tiles),
            _ => unreachable!("not a wide layout"),
        }
    }

    /// The inverse of [`Layout::repack_in_place`].
    ///
    /// # Errors
    /// As there.
    pub fn restore_in_place(self, bytes: &mut [u8], rows: usize, cols: usize) -> Result<()> {
        let row_bytes = self.check(bytes.len(), rows, cols)?;
        let Some(tiling) = self.tiling() else {
            return Ok(());
        };
        let source = self.source();
        let plan = Plan::new(source, tiling, rows, row_bytes);
        let mut tile = vec![0; plan.tile_bytes];
        for t in 0..plan.tiles {
            for at in plan.blocks_of(t) {
                let block = &mut tile[at.stock..][..plan.block_bytes];
                let (d, qs) = split_block_mut(source, block);
                d.copy_from_slice(&bytes[at.scale..][..2]);
                plan.get(source, bytes, &at, qs);
            }
            bytes[t * plan.tile_bytes..][..plan.tile_bytes].copy_from_slice(&tile);
        }
        Ok(())
    }

    /// Access to single blocks where they stand.
    ///
    /// # Errors
    /// A length that does not fit the shape.
    pub fn reader(self, bytes: &[u8], rows: usize, cols: usize) -> Result<BlockReader<'_>> {
        let row_bytes = self.check(bytes.len(), rows, cols)?;
        let source = self.source();
        let plan = self
            .tiling()
            .map(|tiling| Plan::new(source, tiling, rows, row_bytes));
        Ok(BlockReader {
            source,
            bytes,
            row_bytes,
            plan,
        })
    }

    /// The codes and the scales of a matrix in this layout, for tests and inspection.
    ///
    /// # Errors
    /// A length that does not fit the shape, a format that is not ternary.
    pub fn unpack(self, bytes: &[u8], rows: usize, cols: usize) -> Result<Unpacked> {
        self.check(bytes.len(), rows, cols)?;
        let mut stock = bytes.to_vec();
        self.restore_in_place(&mut stock, rows, cols)?;
        let source = self.source();
        let mut codes = vec![0; rows * cols];
        let mut scales = vec![f16::ZERO; codes.len() / source.block_weights()];
        source.unpack(&stock, &mut codes, &mut scales)?;
        let scales = scales.into_iter().map(f16::to_bits).collect();
        Ok(Unpacked { codes, scales })
    }
}

/// Reads single blocks of a matrix in any layout.
pub struct BlockReader<'a> {
    source: Format,
    bytes: &'a [u8],
    row_bytes: usize,
    plan: Option<Plan>,
}

impl BlockReader<'_> {
    /// The scale of block `block` of row `row`; its codes go to the front of `codes`.
    ///
    /// # Panics
    /// If the block is outside the matrix, `codes` is shorter than a block, or the format is not ternary.
    pub fn read(&self, row: usize, block: usize, codes: &mut [u8]) -> f16 {
        let codes = &mut codes[..self.source.block_weights()];
        let tiled = self.plan.as_ref().filter(|p| row < p.tiles * p.tiling.rows);
        let Some(plan) = tiled else {
            let size = self.source.block_bytes();
            let stock = &self.bytes[row * self.row_bytes + block * size..][..size];
            let mut scale = [f16::ZERO];
            self.source
                .unpack(stock, codes, &mut scale)
                .expect("one block of a ternary format");
            return scale[0];
        };
        let rows = plan.tiling.rows;
        let at = plan.place(row / rows, block, row % rows);
        let mut block = [0; 66];
        let stock = &mut block[..plan.block_bytes];
        plan.get(
            self.source,
            self.bytes,
            &at,
            split_block_mut(self.source, stock).1,
        );
        self.source
            .unpack(stock, codes, &mut [f16::ZERO])
            .expect("one block of a ternary format");
        f16::from_le_bytes([self.bytes[at.scale], self.bytes[at.scale + 1]])
    }
}

/// Where everything of an interleaved matrix stands.
struct Plan {
    tiling: Tiling,
    tiles: usize,
    /// Blocks in a row.
    blocks: usize,
    block_bytes: usize,
    row_bytes: usize,
    tile_bytes: usize,
    /// For each word of a block of one row: its place after the row's first word, and the first
    /// byte, in the order of k, that enters it.
    words: Vec<(usize, usize)>,
}

/// Where a block of one row stands: in the copy of its stock tile, its scale, its first word.
struct At {
    row: usize,
    stock: usize,
    scale: usize,
    codes: usize,
}

impl Plan {
    fn new(source: Format, tiling: Tiling, rows: usize, row_bytes: usize) -> Self {
        let Tiling {
            interleave, stride, ..
        } = tiling;
        let place = |w| (w / stride * interleave * stride + w % stride) * 4;
        let words = 0..source.block_weights() / 16;
        Plan {
            tiling,
            tiles: rows / tiling.rows,
            blocks: row_bytes / source.block_bytes(),
            block_bytes: source.block_bytes(),
            row_bytes,
            tile_bytes: tiling.rows * row_bytes,
            words: words
                .map(|w| (place(w), crumbs::first(stride, w)))
                .collect(),
        }
    }

    /// Every block of every row of tile `t`.
    fn blocks_of(&self, t: usize) -> impl Iterator<Item = At> {
        let rows = self.tiling.rows;
        (0..self.blocks * rows).map(move |i| self.place(t, i / rows, i % rows))
    }

    /// Block `b` of row `r` of tile `t`.
    fn place(&self, t: usize, b: usize, r: usize) -> At {
        let Tiling {
            rows,
            interleave,
            stride,
            unit,
            base3,
        } = self.tiling;
        let (code_bytes, scale_bytes) = (self.block_bytes - 2, 2);
        let (codes, scales) = match unit {
            Some(unit) => {
                let bytes = (rows * code_bytes, rows * scale_bytes);
                wide_block(unit, self.blocks, bytes, b)
            }
            None => {
                let lead = b * rows * self.block_bytes;
                (lead + rows * scale_bytes, lead)
            }
        };
        let turn = match base3 {
            Some(_) => 0,
            None => r / interleave * interleave * code_bytes + r % interleave * stride * 4,
        };
        let tile = t * self.tile_bytes;
        At {
            row: r,
            stock: r * self.row_bytes + b * self.block_bytes,
            scale: tile + scales + r * scale_bytes,
            codes: tile + codes + turn,
        }
    }

    /// Puts the codes of a stock PQ2_0 block in their places.
    fn put(&self, qs: &[u8], at: &At, bytes: &mut [u8]) {
        for &(word, first) in &self.words {
            let four = crumbs::gather(qs, self.tiling.stride, first);
            bytes[at.codes + word..][..4].copy_from_slice(&four);
        }
    }

    /// The inverse of [`Plan::put`].
    fn get(&self, source: Format, bytes: &[u8], at: &At, qs: &mut [u8]) {
        if let Some(rows) = self.tiling.base3 {
            let place = |j| bytes[at.codes + wide_b3::place(rows as usize, at.row, j)];
            let codes = wide_b3::unpack(rows, &std::array::from_fn(place));
            let block = BlockPtq1_0::pack(f16::ZERO, &codes.map(|u| u.min(2)));
            let block = block.expect("codes of base 3");
            qs.copy_from_slice(&bytemuck::bytes_of(&block)[..wide_b3::BYTES]);
            return;
        }
        let mut ordered = [0; 64];
        for &(word, first) in &self.words {
            let four = std::array::from_fn(|i| bytes[at.codes + word + i]);
            crumbs::scatter(four, self.tiling.stride, first, &mut ordered);
        }
        match source {
            Format::Tq2_0 => tq2_0::from_order_of_k(&ordered, qs),
            _ => qs.copy_from_slice(&ordered[..qs.len()]),
        }
    }
}

/// (scale, codes) of a block that a layout is made from.
fn split_block(source: Format, block: &[u8]) -> (&[u8], &[u8]) {
    match source {
        Format::Tq2_0 | Format::Ptq1_0 => {
            let (qs, d) = block.split_at(block.len() - 2);
            (d, qs)
        }
        _ => block.split_at(2),
    }
}

fn split_block_mut(source: Format, block: &mut [u8]) -> (&mut [u8], &mut [u8]) {
    match source {
        Format::Tq2_0 | Format::Ptq1_0 => {
            let (qs, d) = block.split_at_mut(block.len() - 2);
            (d, qs)
        }
        _ => block.split_at_mut(2),
    }
}
