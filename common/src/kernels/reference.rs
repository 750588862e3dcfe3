//! The scalar truth, written to be obviously right: every other kernel must equal it bit for bit.

use std::ops::Range;

use half::f16;

use super::{Form, Group, Isa, Kernel, MatrixRef, Out};
use crate::formats::layout::BlockReader;
use crate::formats::{
    BlockPq2_0, BlockPtq1_0, BlockQ2_0, BlockQ4_0, BlockQ8_0, BlockTq1_0, BlockTq2_0, Format,
    Layout, Ternary, TileRows,
};

/// The reference for every layout.
pub static KERNELS: &[Kernel] = &[
    stock(Format::Tq1_0, ternary::<BlockTq1_0, 256>),
    stock(Format::Tq2_0, ternary::<BlockTq2_0, 256>),
    stock(Format::Q2_0, ternary::<BlockQ2_0, 64>),
    stock(Format::Pq2_0, ternary::<BlockPq2_0, 128>),
    stock(Format::Ptq1_0, ternary::<BlockPtq1_0, 128>),
    Kernel {
        layout: Layout::Stock(Format::Q8_0),
        isa: Isa::Scalar,
        form: Form::Q8_0,
        usable: super::always,
        tiles: q8_0,
    },
    Kernel {
        layout: Layout::Stock(Format::Q4_0),
        isa: Isa::Scalar,
        form: Form::Q8_0,
        usable: super::always,
        tiles: q4_0,
    },
    tiled(Layout::Slot16),
    tiled(Layout::RowPair),
    tiled(Layout::WideB3x5 { rows: TileRows::R8 }),
    tiled(Layout::WideB3x5 {
        rows: TileRows::R16,
    }),
    tiled(Layout::WideB3 { rows: TileRows::R8 }),
    tiled(Layout::WideB3 {
        rows: TileRows::R16,
    }),
    tiled(wide(Format::Q2_0, TileRows::R8)),
    tiled(wide(Format::Q2_0, TileRows::R16)),
    tiled(wide(Format::Tq2_0, TileRows::R8)),
    tiled(wide(Format::Tq2_0, TileRows::R16)),
    tiled(wide(Format::Pq2_0, TileRows::R8)),
    tiled(wide(Format::Pq2_0, TileRows::R16)),
];

const fn wide(source: Format, rows: TileRows) -> Layout {
    Layout::Wide2 { source, rows }
}

const fn stock(format: Format, tiles: super::TilesFn) -> Kernel {
    Kernel::ternary(Layout::Stock(format), Isa::Scalar, super::always, tiles)
}

const fn tiled(layout: Layout) -> Kernel {
    Kernel::ternary(layout, Isa::Scalar, super::always, any_layout)
}

/// sum of (u - 1) * y over one block.
pub fn block_sum(codes: &[u8], y: &[i8]) -> i32 {
    codes
        .iter()
        .zip(y)
        .map(|(&u, &y)| (i32::from(u) - 1) * i32::from(y))
        .sum()
}

/// The float rule over one row: `block(b)` gives the codes and the scale of block `b` of `N` weights.
fn row_dot<const N: usize>(
    x: &Group,
    token: usize,
    blocks: usize,
    mut block: impl FnMut(usize) -> ([u8; N], f16),
) -> f32 {
    let mut acc = 0f32;
    for b in 0..blocks {
        let (codes, dw) = block(b);
        let dy = x.scales()[b * N / 256 * x.width() + token];
        let sum = block_sum(&codes, &x.row(token)[b * N..][..N]);
        acc = (sum as f32).mul_add(dw.to_f32() * dy, acc);
    }
    acc
}

/// Stores what `f` makes of each row and token.
///
/// # Safety
/// As [`super::TilesFn`], with `rows` for the tiles.
unsafe fn each(x: &[Group], rows: Range<usize>, out: Out, f: impl Fn(usize, &Group, usize) -> f32) {
    for row in rows {
        for (g, group) in x.iter().enumerate() {
            for token in 0..group.tokens() {
                // SAFETY: the caller's contract: row and token are inside `out`.
                unsafe { *out.at(g * super::TILE + token, row) = f(row, group, token) };
            }
        }
    }
}

fn blocks<'a, B: bytemuck::Pod>(w: &MatrixRef<'a>, row: usize, weights: usize) -> &'a [B] {
    let n = w.cols / weights;
    &bytemuck::cast_slice(w.bytes)[row * n..][..n]
}

unsafe fn ternary<B: Ternary<N>, const N: usize>(
    w: &MatrixRef,
    x: &[Group],
    rows: Range<usize>,
    out: Out,
) {
    // SAFETY: the caller's contract.
    unsafe {
        each(x, rows, out, |row, x, token| {
            let blocks = blocks::<B>(w, row, N);
            row_dot(x, token, blocks.len(), |b| {
                (blocks[b].codes(), blocks[b].scale())
            })
        });
    }
}

unsafe fn any_layout(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
    fn load<const N: usize>(reader: &BlockReader, row: usize, block: usize) -> ([u8; N], f16) {
        let mut codes = [0; N];
        let scale = reader.read(row, block, &mut codes);
        (codes, scale)
    }
    let height = w.layout.tile_rows();
    let rows = tiles.start * height..tiles.end * height;
    let reader = w.layout.reader(w.bytes, w.rows, w.cols);
    let reader = reader.expect("a matrix was checked when it was made");
    let n = w.layout.source().block_weights();
    let blocks = w.cols / n;
    // SAFETY: the caller's contract.
    unsafe {
        each(x, rows, out, |row, x, token| match n {
            64 => row_dot::<64>(x, token, blocks, |b| load(&reader, row, b)),
            128 => row_dot::<128>(x, token, blocks, |b| load(&reader, row, b)),
            _ => row_dot::<256>(x, token, blocks, |b| load(&reader, row, b)),
        });
    }
}

/// ggml's order: `sumi * (dw * dx)`, added unfused.
unsafe fn q8_0(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    // SAFETY: the caller's contract.
    unsafe {
        each(x, rows, out, |row, x, token| {
            let mut acc = 0f32;
            for (b, block) in blocks::<BlockQ8_0>(w, row, 32).iter().enumerate() {
                let y = &x.row(token)[b * 32..][..32];
                let qs = block.qs;
                let sum: i32 = qs
                    .iter()
                    .zip(y)
                    .map(|(&w, &y)| i32::from(w) * i32::from(y))
                    .sum();
                acc += sum as f32 * ({ block.d }.to_f32() * x.scales()[b * x.width() + token]);
            }
            acc
        });
    }
}

/// ggml's order: `sumi * dw * dx` from the left, added unfused.
unsafe fn q4_0(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    // SAFETY: the caller's contract.
    unsafe {
        each(x, rows, out, |row, x, token| {
            let mut acc = 0f32;
            for (b, block) in blocks::<BlockQ4_0>(w, row, 32).iter().enumerate() {
                let y = &x.row(token)[b * 32..][..32];
                let sum: i32 = block
                    .codes()
                    .iter()
                    .zip(y)
                    .map(|(&u, &y)| (i32::from(u) - 8) * i32::from(y))
                    .sum();
                acc += sum as f32 * { block.d }.to_f32() * x.scales()[b * x.width() + token];
            }
            acc
        });
    }
}
