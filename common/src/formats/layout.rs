//! How a whole matrix lies in memory: as the file stores it, or interleaved by rows for a kernel.
//!
//! A repacked matrix takes the bytes of its source, or fewer, and is repacked in place. Rows past the
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
//! 256 columns of 16 rows in PQ2_0 so are 16 cache lines of codes and one of scales. The base-3 wide-row layouts share tiles and tail;
//! [`wide_b3`] has their codes. One has units of one block, 7 lines, and the bytes of PTQ1_0; the other takes 1.4% fewer, for rows of a
//! multiple of 640 weights.

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
    /// As [`Layout::WideB3`], five groups of 128 weights together in 1.6 bits a code: rows are multiples of 640 weights.
    WideB3x5 {
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
    /// Stock blocks of a row whose codes share bytes: a block of the tile.
    groups: usize,
    /// Bytes of a row's codes in a block of the tile.
    code_bytes: usize,
    /// Base-3 codes, placed and coded by [`wide_b3`] instead.
    base3: Option<TileRows>,
}

/// Bytes that a matrix takes.
struct Sizes {
    /// A stock row.
    stock_row: usize,
    /// The matrix in the stock format.
    stock: usize,
    /// Full tiles, 0 of a stock layout.
    tiles: usize,
    /// The stock rows of a tile; 0 where there is none.
    stock_tile: usize,
    /// A tile.
    tile: usize,
    /// The matrix in the layout: tiles, then stock rows.
    bytes: usize,
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
            Layout::WideB3x5 { .. } => "wide-row-b3x5",
        }
    }

    /// The format that the matrix has before it is repacked, and that its tail rows keep.
    pub const fn source(self) -> Format {
        match self {
            Layout::Stock(format) | Layout::Wide2 { source: format, .. } => format,
            Layout::Slot16 | Layout::RowPair => Format::Pq2_0,
            Layout::WideB3 { .. } | Layout::WideB3x5 { .. } => Format::Ptq1_0,
        }
    }

    /// The weights that a row is a multiple of.
    pub const fn block_weights(self) -> usize {
        let groups = match self {
            Layout::WideB3x5 { .. } => wide_b3::FIVE,
            _ => 1,
        };
        groups * self.source().block_weights()
    }

    /// Bytes of a matrix in this layout: those of its source, but in `wide-row-b3x5`.
    ///
    /// # Errors
    /// A row that is no multiple of [`Layout::block_weights`], a matrix that is too large, a source that is not two-bit.
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Result<usize> {
        Ok(self.sizes(rows, cols)?.bytes)
    }

    /// Rows in a tile; 1 for a stock layout.
    pub const fn tile_rows(self) -> usize {
        match self {
            Layout::Stock(_) => 1,
            Layout::Slot16 | Layout::RowPair => 4,
            Layout::Wide2 { rows, .. } | Layout::WideB3 { rows } | Layout::WideB3x5 { rows } => {
                rows as usize
            }
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
            Layout::WideB3x5 { .. } => (rows, 1, Some(wide_b3::FIVE_UNIT)),
        };
        let base3 = match self {
            Layout::WideB3 { rows } | Layout::WideB3x5 { rows } => Some(rows),
            _ => None,
        };
        let (groups, code_bytes) = match self {
            Layout::WideB3x5 { .. } => (wide_b3::FIVE, wide_b3::FIVE_BYTES),
            _ => (1, self.source().block_bytes() - 2),
        };
        Some(Tiling {
            rows,
            interleave,
            stride,
            unit,
            groups,
            code_bytes,
            base3,
        })
    }

    /// What a matrix of this shape takes.
    fn sizes(self, rows: usize, cols: usize) -> Result<Sizes> {
        let (name, source) = (self.name(), self.source());
        ensure!(
            matches!(
                self,
                Layout::Stock(_) | Layout::WideB3 { .. } | Layout::WideB3x5 { .. }
            ) || matches!(source, Format::Q2_0 | Format::Pq2_0 | Format::Tq2_0),
            "{name}: made from a two-bit format, found {source}"
        );
        ensure!(
            cols > 0,
            "{name}: rows of 0 weights, expected at least a block"
        );
        let block = self.block_weights();
        // A row that is no whole number of stock blocks is refused below, in the words of the format.
        ensure!(
            cols.is_multiple_of(block) || block == source.block_weights(),
            "{name}: rows of {cols} weights, expected a multiple of {block}"
        );
        let stock_row = source.row_bytes(cols)?;
        let stock = source.matrix_bytes(rows, cols)?;
        let mut sizes = Sizes {
            stock_row,
            stock,
            tiles: 0,
            stock_tile: 0,
            tile: 0,
            bytes: stock,
        };
        // With a tile of rows, what it takes is no more than the matrix, whose bytes are a number.
        if let Some(tiling) = self.tiling().filter(|t| rows >= t.rows) {
            sizes.tiles = rows / tiling.rows;
            sizes.stock_tile = tiling.rows * stock_row;
            let block_bytes = tiling.code_bytes + 2 * tiling.groups;
            sizes.tile = tiling.rows * (cols / block) * block_bytes;
            sizes.bytes = sizes.tiles * sizes.tile + rows % tiling.rows * stock_row;
        }
        Ok(sizes)
    }

    /// Refuses `len` bytes where a matrix takes `expected`.
    fn check(self, len: usize, expected: usize, rows: usize, cols: usize) -> Result<()> {
        ensure!(
            len == expected,
            "{}: {rows} rows of {cols} weights take {expected} bytes, found {len}",
            self.name()
        );
        Ok(())
    }

    /// The tiles and the tail of a matrix in this layout.
    ///
    /// # Errors
    /// A length that does not fit the shape, as of [`Layout::matrix_bytes`].
    pub fn parts(self, bytes: &[u8], rows: usize, cols: usize) -> Result<Parts<'_>> {
        let sizes = self.sizes(rows, cols)?;
        self.check(bytes.len(), sizes.bytes, rows, cols)?;
        let (codes, tail) = bytes.split_at(sizes.tiles * sizes.tile);
        Ok(Parts {
            tiles: sizes.tiles,
            codes,
            tail,
        })
    }

    /// Turns stock bytes into this layout, in place, and returns the matrix: all of them, or the front where it takes fewer. Takes a
    /// tile of temporary memory.
    ///
    /// # Errors
    /// A length that does not fit the shape, a source that is not two-bit.
    pub fn repack_in_place(self, bytes: &mut [u8], rows: usize, cols: usize) -> Result<&mut [u8]> {
        let sizes = self.sizes(rows, cols)?;
        self.check(bytes.len(), sizes.stock, rows, cols)?;
        let Some(tiling) = self.tiling() else {
            return Ok(bytes);
        };
        let source = self.source();
        let plan = Plan::new(source, tiling, &sizes);
        let mut tile = vec![0; plan.stock_tile];
        for t in 0..plan.tiles {
            // A tile is no longer than its stock rows, so it ends before the next ones start.
            tile.copy_from_slice(&bytes[t * plan.stock_tile..][..plan.stock_tile]);
            if tiling.unit.is_some() {
                let place = t * plan.tile_bytes..(t + 1) * plan.tile_bytes;
                self.wide_tiles(plan.blocks, &tile, &mut bytes[place]);
                continue;
            }
            for at in plan.blocks_of(t) {
                let (d, qs) = split_block(source, &tile[at.stock..][..plan.block_bytes]);
                bytes[at.scale..][..2].copy_from_slice(d);
                plan.put(qs, &at, bytes);
            }
        }
        bytes.copy_within(plan.tiles * plan.stock_tile.., sizes.tiles * sizes.tile);
        Ok(&mut bytes[..sizes.bytes])
    }

    /// Repacks whole tiles from the stock rows in `stock` to `tiles`. What [`Layout::repack_in_place`] does, for rows that are read a few
    /// at a time.
    ///
    /// # Errors
    /// As there; stock rows that are no whole tiles; a place of another length than the tiles have.
    pub fn repack_tiles(self, cols: usize, stock: &[u8], tiles: &mut [u8]) -> Result<()> {
        let row_bytes = self.source().row_bytes(cols)?;
        let rows = stock.len().checked_div(row_bytes).unwrap_or(0);
        let sizes = self.sizes(rows, cols)?;
        self.check(stock.len(), sizes.stock, rows, cols)?;
        let name = self.name();
        let height = self.tile_rows();
        ensure!(
            rows.is_multiple_of(height),
            "{name}: {rows} rows, expected whole tiles of {height}"
        );
        ensure!(
            tiles.len() == sizes.bytes,
            "{name}: a place of {} bytes, expected {}",
            tiles.len(),
            sizes.bytes
        );
        if self.tiling().is_some_and(|t| t.unit.is_some()) {
            self.wide_tiles(cols / self.source().block_weights(), stock, tiles);
            return Ok(());
        }
        tiles.copy_from_slice(stock);
        self.repack_in_place(tiles, rows, cols)?;
        Ok(())
    }

    /// The tiles of a wide layout, of rows of `blocks` stock blocks.
    fn wide_tiles(self, blocks: usize, stock: &[u8], tiles: &mut [u8]) {
        match self {
            Layout::Wide2 { source, rows } => repack::wide2(source, rows, blocks, stock, tiles),
            Layout::WideB3 { rows } => repack::wide_b3(rows, blocks, stock, tiles),
            Layout::WideB3x5 { rows } => repack::wide_b3x5(rows, blocks, stock, tiles),
            _ => unreachable!("not a wide layout"),
        }
    }

    /// The inverse of [`Layout::repack_in_place`]: `bytes` has the length of the stock matrix, with that of the layout in front.
    ///
    /// # Errors
    /// As there.
    pub fn restore_in_place(self, bytes: &mut [u8], rows: usize, cols: usize) -> Result<()> {
        let sizes = self.sizes(rows, cols)?;
        self.check(bytes.len(), sizes.stock, rows, cols)?;
        let Some(tiling) = self.tiling() else {
            return Ok(());
        };
        let source = self.source();
        let plan = Plan::new(source, tiling, &sizes);
        bytes.copy_within(
            plan.tiles * plan.tile_bytes..sizes.bytes,
            plan.tiles * plan.stock_tile,
        );
        let mut tile = vec![0; plan.stock_tile];
        // From the last: stock rows start no earlier than their tile.
        for t in (0..plan.tiles).rev() {
            for at in plan.blocks_of(t) {
                let block = &mut tile[at.stock..][..plan.block_bytes];
                let (d, qs) = split_block_mut(source, block);
                d.copy_from_slice(&bytes[at.scale..][..2]);
                plan.get(source, bytes, &at, qs);
            }
            bytes[t * plan.stock_tile..][..plan.stock_tile].copy_from_slice(&tile);
        }
        Ok(())
    }

    /// Access to single blocks where they stand.
    ///
    /// # Errors
    /// A length that does not fit the shape.
    pub fn reader(self, bytes: &[u8], rows: usize, cols: usize) -> Result<BlockReader<'_>> {
        let sizes = self.sizes(rows, cols)?;
        self.check(bytes.len(), sizes.bytes, rows, cols)?;
        let source = self.source();
        let plan = self
            .tiling()
            .map(|tiling| Plan::new(source, tiling, &sizes));
        let tiled = sizes.tiles * self.tile_rows();
        Ok(BlockReader {
            source,
            bytes,
            row_bytes: sizes.stock_row,
            tiled,
            tail: sizes.tiles * sizes.tile,
            plan,
        })
    }

    /// The codes and the scales of a matrix in this layout, for tests and inspection.
    ///
    /// # Errors
    /// A length that does not fit the shape, a format that is not ternary.
    pub fn unpack(self, bytes: &[u8], rows: usize, cols: usize) -> Result<Unpacked> {
        let sizes = self.sizes(rows, cols)?;
        self.check(bytes.len(), sizes.bytes, rows, cols)?;
        let mut stock = bytes.to_vec();
        stock.resize(sizes.stock, 0);
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
    /// Bytes of a stock row.
    row_bytes: usize,
    /// Rows in tiles, and where those past them start.
    tiled: usize,
    tail: usize,
    plan: Option<Plan>,
}

impl BlockReader<'_> {
    /// The scale of block `block` of row `row`; its codes go to the front of `codes`.
    ///
    /// # Panics
    /// If the block is outside the matrix, `codes` is shorter than a block, or the format is not ternary.
    pub fn read(&self, row: usize, block: usize, codes: &mut [u8]) -> f16 {
        let codes = &mut codes[..self.source.block_weights()];
        let tiled = self.plan.as_ref().filter(|_| row < self.tiled);
        let Some(plan) = tiled else {
            let size = self.source.block_bytes();
            let start = self.tail + (row - self.tiled) * self.row_bytes;
            let stock = &self.bytes[start + block * size..][..size];
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
    /// Stock blocks in a row.
    blocks: usize,
    block_bytes: usize,
    row_bytes: usize,
    /// Bytes of the stock rows of a tile.
    stock_tile: usize,
    tile_bytes: usize,
    /// For each word of a block of one row: its place after the row's first word, and the first
    /// byte, in the order of k, that enters it.
    words: Vec<(usize, usize)>,
}

/// Where a stock block of one row stands: in the copy of its stock tile, its scale, its first word; and which it is of those that share
/// bytes.
struct At {
    row: usize,
    group: usize,
    stock: usize,
    scale: usize,
    codes: usize,
}

impl Plan {
    fn new(source: Format, tiling: Tiling, sizes: &Sizes) -> Self {
        let Tiling {
            interleave, stride, ..
        } = tiling;
        let place = |w| (w / stride * interleave * stride + w % stride) * 4;
        let words = 0..source.block_weights() / 16;
        Plan {
            tiling,
            tiles: sizes.tiles,
            blocks: sizes.stock_row / source.block_bytes(),
            block_bytes: source.block_bytes(),
            row_bytes: sizes.stock_row,
            stock_tile: sizes.stock_tile,
            tile_bytes: sizes.tile,
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

    /// Stock block `b` of row `r` of tile `t`.
    fn place(&self, t: usize, b: usize, r: usize) -> At {
        let Tiling {
            rows,
            interleave,
            stride,
            unit,
            groups,
            code_bytes,
            base3,
        } = self.tiling;
        let scale_bytes = 2;
        let group = b % groups;
        let (codes, scales) = match unit {
            Some(unit) => {
                let bytes = (rows * code_bytes, groups * rows * scale_bytes);
                let (codes, scales) = wide_block(unit, self.blocks / groups, bytes, b / groups);
                (codes, scales + group * rows * scale_bytes)
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
            group,
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
            let n = rows as usize;
            let codes: [u8; 128] = if self.tiling.groups == 1 {
                let byte = |j| bytes[at.codes + wide_b3::place(n, at.row, j)];
                wide_b3::unpack(rows, &std::array::from_fn(byte))
            } else {
                let byte = |k| bytes[at.codes + wide_b3::place_in_words(n, at.row, k)];
                std::array::from_fn(|k| wide_b3::decode(rows, byte(k))[at.group])
            };
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
