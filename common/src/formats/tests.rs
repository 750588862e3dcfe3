use half::f16;
use proptest::prelude::*;

use super::*;

/// Bytes that differ from place to place and repeat late.
fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    (0..n).map(|_| next()).collect()
}

const LAYOUTS: [Layout; 8] = {
    use Format::*;
    use TileRows::*;
    const fn wide(source: Format, rows: TileRows) -> Layout {
        Layout::Wide2 { source, rows }
    }
    [
        Layout::Slot16,
        Layout::RowPair,
        wide(Pq2_0, R8),
        wide(Pq2_0, R16),
        wide(Q2_0, R8),
        wide(Q2_0, R16),
        wide(Tq2_0, R8),
        wide(Tq2_0, R16),
    ]
};

#[test]
fn ids_names_and_lengths() {
    for f in Format::ALL {
        assert_eq!(Format::from_ggml_id(f.ggml_id()), Some(f));
        assert_eq!(Format::from_name(f.name()), Some(f));
        assert_eq!(
            f.row_bytes(3 * f.block_weights()).unwrap(),
            3 * f.block_bytes()
        );
        assert!(f.matrix_bytes(usize::MAX, 256).is_err());
    }
    assert_eq!(Format::from_ggml_id(36), None);
    let e = Format::Pq2_0.row_bytes(100).unwrap_err().to_string();
    assert!(
        e.contains("pq2_0") && e.contains("100") && e.contains("128"),
        "{e}"
    );
    assert!(Format::F32.row_bytes(usize::MAX).is_err());
}

/// Each code alone in each place, then mixed, with scales of odd bits.
fn round_trip<B: Ternary<N>, const N: usize>(max: u8) {
    let d = f16::from_bits(0x7E35); // a NaN with a payload
    let mut all: Vec<[u8; N]> = (0..=max).map(|u| [u; N]).collect();
    for k in 0..N {
        for u in 0..=max {
            let mut codes = [1; N];
            codes[k] = u;
            all.push(codes);
        }
    }
    for seed in 0..50 {
        let bytes = noise(N, seed);
        all.push(std::array::from_fn(|k| bytes[k] % (max + 1)));
    }
    for codes in &all {
        let block = B::pack(d, codes).unwrap();
        assert_eq!(&block.codes(), codes);
        assert_eq!(block.scale().to_bits(), d.to_bits());
        let two = B::pack(f16::from_f32(2.0), codes).unwrap();
        let weights = codes.map(|u| 2.0 * (f32::from(u) - 1.0));
        assert_eq!(two.dequantize(), weights);
    }
    let mut codes = [0; N];
    codes[N - 1] = max + 1;
    let e = B::pack(d, &codes).err().unwrap().to_string();
    assert!(
        e.contains(&format!("code {} at weight {}", max + 1, N - 1)),
        "{e}"
    );
}

#[test]
fn every_code_round_trips() {
    round_trip::<BlockPq2_0, 128>(3);
    round_trip::<BlockQ2_0, 64>(3);
    round_trip::<BlockTq2_0, 256>(3);
    round_trip::<BlockPtq1_0, 128>(2);
    round_trip::<BlockTq1_0, 256>(2);
}

/// The same through the format chosen at run time, over two rows' worth of blocks.
#[test]
fn formats_by_value_pack_unpack_and_dequantize() {
    for (f, size) in [
        (Format::Tq1_0, 54),
        (Format::Tq2_0, 66),
        (Format::Q2_0, 18),
        (Format::Pq2_0, 34),
        (Format::Ptq1_0, 28),
    ] {
        assert!(f.is_ternary());
        let (n, blocks) = (f.block_weights(), 3);
        let codes = ternary_noise(blocks, n);
        let scales = [1.0, -0.5, 0.25].map(f16::from_f32);
        let mut bytes = vec![0; blocks * size];
        f.pack(&codes, &scales, &mut bytes).unwrap();
        let (mut u, mut d) = (vec![0; codes.len()], [f16::ZERO; 3]);
        f.unpack(&bytes, &mut u, &mut d).unwrap();
        assert_eq!((&u, d), (&codes, scales));
        let mut x = vec![0.0; codes.len()];
        f.dequantize(&bytes, &mut x).unwrap();
        for (i, x) in x.iter().enumerate() {
            assert_eq!(*x, (f32::from(codes[i]) - 1.0) * scales[i / n].to_f32());
        }
        assert!(f.pack(&codes, &scales[1..], &mut bytes).is_err());
        assert!(f.pack(&codes[1..], &scales, &mut bytes).is_err());
        assert!(f.unpack(&bytes[1..], &mut u, &mut d).is_err());
        assert!(f.dequantize(&bytes, &mut x[1..]).is_err());
        assert!(f.pack(&vec![4; codes.len()], &scales, &mut bytes).is_err());
    }
    let mut x = [0.0; 32];
    Format::Q8_0
        .dequantize(&[&[0, 0x3C][..], &[255; 32]].concat(), &mut x)
        .unwrap();
    assert_eq!(x, [-1.0; 32]);
    Format::Q4_0
        .dequantize(&[&[0, 0x3C][..], &[0x97; 16]].concat(), &mut x)
        .unwrap();
    assert_eq!((x[0], x[16]), (-1.0, 1.0));
}

/// The byte and slot or digit of single weights, from the description of each format.
#[test]
fn places_of_single_weights() {
    fn only<B: Ternary<N>, const N: usize>(k: usize, u: u8) -> Vec<u8> {
        let mut codes = [0; N];
        codes[k] = u;
        let block = B::pack(f16::ONE, &codes).unwrap();
        bytemuck::bytes_of(&block).to_vec()
    }
    let at = |bytes: &[u8]| -> Vec<(usize, u8)> {
        let set = |(j, &b): (usize, &u8)| (b != 0).then_some((j, b));
        bytes.iter().enumerate().filter_map(set).collect()
    };
    let one = (1, 0x3C); // the high byte of the scale 1.0
    assert_eq!(at(&only::<BlockPq2_0, 128>(127, 3)), [one, (33, 3 << 6)]);
    assert_eq!(at(&only::<BlockQ2_0, 64>(5, 2)), [one, (3, 2 << 2)]);
    assert_eq!(
        at(&only::<BlockTq2_0, 256>(128 + 64 + 5, 3)),
        [(37, 3 << 4), (65, 0x3C)]
    );
    let b3 = |q: u32| (q * 256).div_ceil(243) as u8;
    let ptq = |k, u| at(&only::<BlockPtq1_0, 128>(k, u));
    assert_eq!(ptq(0, 2), [(0, b3(2 * 81)), (27, 0x3C)]);
    assert_eq!(ptq(79, 1), [(15, b3(1)), (27, 0x3C)]);
    assert_eq!(ptq(80 + 8 + 3, 1), [(19, b3(27)), (27, 0x3C)]);
    assert_eq!(ptq(120 + 3, 1), [(25, b3(27)), (27, 0x3C)]);
    assert_eq!(ptq(127, 2), [(25, b3(2 * 3)), (27, 0x3C)]);
    let tq = |k, u| at(&only::<BlockTq1_0, 256>(k, u));
    assert_eq!(tq(33, 1), [(1, b3(27)), (53, 0x3C)]);
    assert_eq!(tq(160 + 17, 1), [(33, b3(27)), (53, 0x3C)]);
    assert_eq!(tq(240 + 5, 2), [(49, b3(2 * 27)), (53, 0x3C)]);
}

#[test]
fn base3_is_lossless_and_every_byte_decodes() {
    for q in 0..243u32 {
        let digits = std::array::from_fn(|n| (q / 3u32.pow(4 - n as u32) % 3) as u8);
        let byte = base3::encode(digits);
        assert_eq!(std::array::from_fn(|n| base3::digit(byte, n)), digits);
    }
    for byte in 0..=255 {
        let digits: [u8; 5] = std::array::from_fn(|n| base3::digit(byte, n));
        assert!(digits.iter().all(|&u| u < 3));
        // A byte that no packing writes still reads as some number.
        let again = base3::encode(digits);
        assert_eq!(std::array::from_fn(|n| base3::digit(again, n)), digits);
    }
}

#[test]
fn two_thresholds_make_a_digit() {
    for v in 0..256u32 {
        assert_eq!(3 * v / 256, u32::from(v >= 86) + u32::from(v >= 171));
    }
}

#[test]
fn conversions_are_exact() {
    for seed in 0..50 {
        let bytes = noise(128, seed);
        let codes: [u8; 128] = std::array::from_fn(|k| bytes[k] % 3);
        let d = f16::from_bits(u16::from_le_bytes([bytes[0], bytes[1]]));
        let two = BlockPq2_0::pack(d, &codes).unwrap();
        let three: BlockPtq1_0 = convert(&two).unwrap();
        let again: BlockPq2_0 = convert(&three).unwrap();
        assert_eq!(three.codes(), codes);
        assert_eq!(bytemuck::bytes_of(&again), bytemuck::bytes_of(&two));
        let halves = BlockQ2_0::from_pq2_0(&two);
        let joined: Vec<u8> = halves.iter().flat_map(|h| h.codes()).collect();
        assert_eq!(joined, codes);
        assert!(halves.iter().all(|h| h.scale().to_bits() == d.to_bits()));
    }
    let code3 = BlockPq2_0::pack(f16::ONE, &[3; 128]).unwrap();
    assert!(convert::<_, BlockPtq1_0, 128>(&code3).is_err());
}

#[test]
fn q4_0_and_q8_0_follow_the_reference() {
    let mut x = [0.0; 32];
    x[..5].copy_from_slice(&[-4.0, 4.0, 3.75, 0.25, -0.25]);
    let q4 = BlockQ4_0::quantize(&x); // d = 0.5: the first of the largest is -4
    assert_eq!(q4.d.to_f32_const(), 0.5);
    assert_eq!(q4.codes()[..6], [0, 15, 15, 9, 8, 8]);
    assert_eq!(q4.dequantize()[..4], [-4.0, 3.5, 3.5, 0.5]);
    assert_eq!(
        BlockQ4_0::quantize(&x.map(|x| -x)).codes()[..3],
        [0, 15, 15]
    );
    assert_eq!(BlockQ4_0::quantize(&[0.0; 32]).codes(), [8; 32]);

    x[..5].copy_from_slice(&[127.0, 2.5, -2.5, 3.5, -0.4]);
    let q8 = BlockQ8_0::quantize(&x);
    assert_eq!(q8.qs[..5], [127, 3, -3, 4, 0]);
    assert_eq!(q8.dequantize()[1], 3.0);
    assert_eq!(BlockQ8_0::quantize(&[0.0; 32]).qs, [0; 32]);
    // Not numbers, not finite: no panic.
    for bad in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE / 1e6] {
        x[7] = bad;
        BlockQ4_0::quantize(&x);
        BlockQ8_0::quantize(&x);
    }
}

#[test]
fn q8_k_follows_the_reference() {
    let mut x = [0.0; 256];
    x[..6].copy_from_slice(&[-127.0, 127.0, 2.5, 3.5, -2.5, 0.5]);
    let q = BlockQ8K::quantize(&x);
    assert_eq!((q.d, &q.qs[..6]), (1.0, &[-127, 127, 2, 4, -2, 0][..]));
    assert_eq!(q.bsums[0], 4);
    // A positive maximum turns the signs and makes d negative.
    let q = BlockQ8K::quantize(&x.map(|x| -2.0 * x));
    assert_eq!((q.d, q.qs[0]), (-2.0, -127));
    assert_eq!(q.dequantize()[..2], [254.0, -254.0]);
    assert_eq!(
        BlockQ8K::quantize(&[0.0; 256]),
        bytemuck::Zeroable::zeroed()
    );
    assert_eq!(BlockQ8K::quantize(&[1e-40; 256]).d, 0.0);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        x[200] = bad;
        let q = BlockQ8K::quantize(&x);
        assert!(q.d.is_nan() && q.qs == [0; 256]);
    }
    x[200] = f32::MAX;
    assert!(BlockQ8K::quantize(&x).qs.iter().all(|&q| q >= -127));
}

#[test]
fn plain_numbers_dequantize_at_any_address() {
    let bytes = [0xFF, 0x00, 0x00, 0xC0, 0x3F, 0x00, 0x00, 0x80, 0xBF];
    let mut out = [0.0; 2];
    Format::F32.dequantize(&bytes[1..], &mut out).unwrap();
    assert_eq!(out, [1.5, -1.0]);
    Format::F16
        .dequantize(&[0x00, 0x3E, 0x00, 0xBC], &mut out)
        .unwrap();
    assert_eq!(out, [1.5, -1.0]);
    Format::Bf16
        .dequantize(&[0xC0, 0x3F, 0x80, 0xBF], &mut out)
        .unwrap();
    assert_eq!(out, [1.5, -1.0]);
    assert!(Format::F32.dequantize(&bytes, &mut out).is_err());
    assert!(
        Format::F32
            .unpack(&bytes[1..], &mut [0; 2], &mut [f16::ZERO; 2])
            .is_err()
    );
}

/// Where the code of weight (row, k) of block b of tile t stands, from the layout's description:
/// (byte, slot), and the byte of its scale. Written apart from the code under test.
fn place(l: Layout, cols: usize, r: usize, k: usize) -> (usize, usize, usize) {
    let group = l.source().block_weights();
    let (tile, row) = (r / l.tile_rows(), r % l.tile_rows());
    let (blocks, b, k) = (cols / group, k / group, k % group);
    let four = (tile * blocks + b) * 136;
    match l {
        Layout::RowPair => {
            let (wd, s) = (k / 32, k / 8 % 4);
            let j = (row % 2) * 8 + k % 8;
            (four + 8 + row / 2 * 64 + wd * 16 + j, s, four + 2 * row)
        }
        Layout::Slot16 => {
            let byte = k / 64 * 64 + row * 16 + k % 16;
            (four + 8 + byte, k / 16 % 4, four + 2 * row)
        }
        Layout::Wide2 {
            rows: tile_rows, ..
        } => {
            let tr = tile_rows as usize;
            let (codes, scales) = (tr * group / 4, tr * 2);
            // Two blocks stand together, or one at the end.
            let unit = (tile * blocks + b / 2 * 2) * (codes + scales);
            let of_unit = if b + 1 == blocks && b % 2 == 0 { 1 } else { 2 };
            let scale = unit + of_unit * codes + b % 2 * scales + row * 2;
            let byte = unit + b % 2 * codes + (k / 16 * tr + row) * 4 + k % 4;
            (byte, k / 4 % 4, scale)
        }
        Layout::Stock(_) | Layout::WideB3 { .. } | Layout::WideB3x5 { .. } => {
            unreachable!("not two-bit interleaved")
        }
    }
}

#[test]
fn base3_repack_keeps_every_code_and_scale() {
    let b3 = [TileRows::R8, TileRows::R16].map(|rows| Layout::WideB3 { rows });
    let five = [TileRows::R8, TileRows::R16].map(|rows| Layout::WideB3x5 { rows });
    let shapes = [
        (1, 128),
        (16, 128),
        (33, 384),
        (40, 640),
        (3, 1280),
        (35, 1920),
    ];
    for (l, (rows, cols)) in b3
        .into_iter()
        .chain(five)
        .flat_map(|l| shapes.map(|shape| (l, shape)))
        .filter(|&(l, (_, cols))| cols % l.block_weights() == 0)
    {
        let f = Format::Ptq1_0;
        let codes: Vec<u8> = noise(rows * cols, 5).into_iter().map(|b| b % 3).collect();
        let scales: Vec<f16> = noise(rows * cols / 64, 6)
            .chunks(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]))
            .collect();
        let mut stock = vec![0; f.matrix_bytes(rows, cols).unwrap()];
        f.pack(&codes, &scales, &mut stock).unwrap();
        let mut buffer = stock.clone();
        let bytes = l.repack_in_place(&mut buffer, rows, cols).unwrap();
        let full = rows / l.tile_rows() * l.tile_rows();
        let saved = stock.len() - bytes.len();
        // 140 bytes of stock rows become 138.
        let expected = match l {
            Layout::WideB3x5 { .. } => full * cols / 640 * 2,
            _ => 0,
        };
        assert_eq!(saved, expected, "{l:?}");
        assert_eq!(bytes.len(), l.matrix_bytes(rows, cols).unwrap());
        assert_eq!(*bytes == stock, full == 0, "{l:?}");
        let row_bytes = f.row_bytes(cols).unwrap();
        let tiled = l.parts(bytes, rows, cols).unwrap().codes;
        assert_eq!(bytes[tiled.len()..], stock[full * row_bytes..]);
        let mut parts = vec![0; tiled.len()];
        l.repack_tiles(cols, &stock[..full * row_bytes], &mut parts)
            .unwrap();
        assert_eq!(parts, tiled);
        assert!(l.repack_tiles(cols, &stock, &mut []).is_err());
        let found = l.unpack(bytes, rows, cols).unwrap();
        assert_eq!(found.codes, codes);
        let bits: Vec<u16> = scales.iter().map(|d| d.to_bits()).collect();
        assert_eq!(found.scales, bits);
        let reader = l.reader(bytes, rows, cols).unwrap();
        for (i, codes) in codes.chunks(128).enumerate() {
            let mut one = [9; 128];
            let d = reader.read(i / (cols / 128), i % (cols / 128), &mut one);
            assert_eq!((&one[..], d.to_bits()), (codes, bits[i]), "{l:?} block {i}");
        }
        l.restore_in_place(&mut buffer, rows, cols).unwrap();
        assert_eq!(buffer, stock);
    }
}

/// Weight (r, k) of a tile and its scale, from the description.
#[test]
fn five_groups_of_128_share_bytes() {
    for tile_rows in [TileRows::R8, TileRows::R16] {
        let l = Layout::WideB3x5 { rows: tile_rows };
        // Three blocks of a row: two stand together, then one.
        let (rows, cols) = (tile_rows as usize, 3 * 640);
        let codes: Vec<u8> = noise(rows * cols, 8).into_iter().map(|b| b % 3).collect();
        let scales: Vec<f16> = (0..rows * cols / 128)
            .map(|i| f16::from_bits(i as u16))
            .collect();
        let mut stock = vec![0; Format::Ptq1_0.matrix_bytes(rows, cols).unwrap()];
        Format::Ptq1_0.pack(&codes, &scales, &mut stock).unwrap();
        let bytes = l.repack_in_place(&mut stock, rows, cols).unwrap();
        let (code_bytes, scale_bytes) = (rows * 128, rows * 10);
        for r in 0..rows {
            for k in 0..cols {
                let (block, group, k_in) = (k / 640, k % 640 / 128, k % 128);
                let unit = block / 2 * 2 * (code_bytes + scale_bytes);
                let together = if block < 2 { 2 } else { 1 };
                let word = unit + block % 2 * code_bytes + (k_in / 4 * rows + r) * 4;
                let scale =
                    unit + together * code_bytes + block % 2 * scale_bytes + (group * rows + r) * 2;
                let trits = wide_b3::decode(tile_rows, bytes[word + k_in % 4]);
                assert_eq!(trits[group], codes[r * cols + k], "{l:?} row {r} at {k}");
                let d = u16::from_le_bytes([bytes[scale], bytes[scale + 1]]);
                assert_eq!(d, scales[(r * cols + k) / 128].to_bits());
            }
        }
    }
}

#[test]
fn widths_that_are_no_multiple_of_640_are_refused() {
    let l = Layout::WideB3x5 {
        rows: TileRows::R16,
    };
    let mut stock = vec![0; Format::Ptq1_0.matrix_bytes(16, 768).unwrap()];
    let e = l.repack_in_place(&mut stock, 16, 768).unwrap_err();
    assert_eq!(
        e.to_string(),
        "wide-row-b3x5: rows of 768 weights, expected a multiple of 640"
    );
    assert!(l.parts(&stock, 16, 768).is_err() && l.reader(&stock, 16, 768).is_err());
    assert!(l.repack_tiles(768, &stock, &mut []).is_err());
    // A shape without rows takes nothing, however wide.
    let widest = usize::MAX / 640 / 8 * 640;
    assert!(
        l.repack_in_place(&mut [], 0, widest)
            .is_ok_and(|b| b.is_empty())
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn repack_keeps_every_code_and_scale(
        l in proptest::sample::select(&LAYOUTS[..]),
        rows in 1usize..=40,
        cols in proptest::sample::select(&[128usize, 256, 384, 640][..]),
        seed: u64,
    ) {
        // TQ2_0 has blocks of 256.
        let cols = cols.next_multiple_of(l.source().block_weights());
        let f = l.source();
        // Any bits: all codes, scales that are NaN, infinite, subnormal.
        let stock = noise(f.matrix_bytes(rows, cols).unwrap(), seed);
        let before = Layout::Stock(f).unpack(&stock, rows, cols).unwrap();
        let mut bytes = stock.clone();
        l.repack_in_place(&mut bytes, rows, cols).unwrap();
        let full = rows / l.tile_rows() * l.tile_rows();
        let tiled = full * f.row_bytes(cols).unwrap();
        prop_assert_eq!(&bytes[tiled..], &stock[tiled..]);
        for r in 0..full {
            for k in 0..cols {
                let (byte, slot, scale) = place(l, cols, r, k);
                prop_assert_eq!(bytes[byte] >> (2 * slot) & 3, before.codes[r * cols + k]);
                let d = u16::from_le_bytes([bytes[scale], bytes[scale + 1]]);
                prop_assert_eq!(d, before.scales[(r * cols + k) / f.block_weights()]);
            }
        }
        prop_assert_eq!(l.unpack(&bytes, rows, cols).unwrap(), before);
        let parts = l.parts(&bytes, rows, cols).unwrap();
        prop_assert_eq!(parts.tiles * l.tile_rows(), full);
        prop_assert_eq!([parts.codes, parts.tail].concat(), bytes.clone());
        prop_assert_eq!(parts.tail.len(), bytes.len() - tiled);
        // A few tiles at a time give the same.
        let mut tiles = vec![0; tiled];
        let two = 2 * l.tile_rows() * f.row_bytes(cols).unwrap();
        for (tiles, stock) in tiles.chunks_mut(two).zip(stock[..tiled].chunks(two)) {
            l.repack_tiles(cols, stock, tiles).unwrap();
        }
        prop_assert_eq!([&tiles[..], &stock[tiled..]].concat(), bytes.clone());
        l.restore_in_place(&mut bytes, rows, cols).unwrap();
        prop_assert_eq!(bytes, stock);
    }
}

#[test]
fn four_stock_blocks_make_a_tile_and_bad_lengths_are_refused() {
    assert_eq!(4 * size_of::<BlockPq2_0>(), 136);
    for l in LAYOUTS {
        let mut bytes = vec![0; 100];
        let e = l
            .repack_in_place(&mut bytes, 4, 256)
            .unwrap_err()
            .to_string();
        assert!(e.contains(l.name()) && e.contains("found 100"), "{e}");
        assert!(l.unpack(&bytes, 4, 256).is_err());
        assert!(l.parts(&bytes, 4, 100).is_err());
        assert!(l.restore_in_place(&mut bytes, usize::MAX, 256).is_err());
        l.repack_in_place(&mut [], 0, 256).unwrap();
        assert!(l.repack_in_place(&mut [], usize::MAX, 0).is_err());
    }
    let f32s = Layout::Wide2 {
        source: Format::F32,
        rows: TileRows::R8,
    };
    let e = f32s
        .repack_in_place(&mut [0; 4096], 8, 128)
        .unwrap_err()
        .to_string();
    assert!(e.contains("two-bit") && e.contains("f32"), "{e}");
}

proptest! {
    #[test]
    fn transpose_swaps_bytes_and_slots(x: u32) {
        let at = |x: u32, s: usize, i: usize| x >> (8 * s + 2 * i) & 3;
        for s in 0..4 {
            for i in 0..4 {
                prop_assert_eq!(at(crumbs::transpose(x), s, i), at(x, i, s));
            }
        }
    }
}

/// Shapes around the tiles, groups and blocks of the whole-matrix formats.
const SHAPES: [(usize, usize); 8] = [
    (1, 1),
    (1, 128),
    (2, 130),
    (31, 95),
    (32, 96),
    (33, 97),
    (40, 640),
    (65, 256),
];

fn ternary_noise(rows: usize, cols: usize) -> Vec<u8> {
    noise(rows * cols, (rows * 1000 + cols) as u64)
        .into_iter()
        .map(|b| b % 3)
        .collect()
}

fn scale_noise(n: usize) -> Vec<f16> {
    let bytes = noise(2 * n, 5);
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f16::from_le_bytes(*b))
        .collect()
}

#[test]
fn whole_matrix_formats_round_trip() {
    for (rows, cols) in SHAPES {
        let mut cases = vec![ternary_noise(rows, cols)];
        cases.extend((0..3).map(|u| vec![u; rows * cols]));
        for all in cases {
            let codes = Codes::new(&all, rows, cols).unwrap();
            for group in [i2_s::GROUP_X86, i2_s::GROUP_ARM] {
                let m = I2S::pack(&codes, 0.37, group).unwrap();
                assert_eq!((m.codes(), m.scale()), (all.clone(), 0.37));
                assert_eq!(m.packed().len(), rows * m.padded_cols() / 4);
                assert_eq!(m.bytes().len(), m.packed().len() + 32);
            }
            let tiles = rows.div_ceil(32);
            let m = Tl1::pack(&codes, 0.37);
            assert_eq!((m.codes(), m.scale()), (all.clone(), 0.37));
            assert_eq!(m.pairs().len(), tiles * 32 * m.padded_cols() / 4);
            let m = Tl2::pack(&codes, 0.37);
            assert_eq!((m.codes(), m.scale()), (all.clone(), 0.37));
            let (k3, k) = (m.triple_cols(), m.padded_cols());
            assert_eq!(
                m.triples().len() + m.signs().len(),
                tiles * 32 * k3 / 3 * 5 / 8
            );
            assert_eq!(m.pairs().len(), tiles * 32 * (k - k3) / 4);

            let scales = scale_noise(rows * cols.div_ceil(128));
            let m = Bitcos::pack(&codes, &scales).unwrap();
            assert_eq!(m.codes(), all);
            let bits = |d: &[f16]| d.iter().map(|d| d.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(m.scales()), bits(&scales));
            let ones = all.iter().filter(|&&u| u != 1).count() as u64;
            let sizes = m.sizes();
            assert_eq!(sizes.presence, (rows * m.padded_cols()) as u64);
            assert_eq!(sizes.signs, ones);
            assert!(sizes.index >= 32 * rows as u64 && sizes.index < 40 * rows as u64);
            assert!(Bitcos::pack(&codes, &scales[1..]).is_err());

            let scales = scale_noise(rows * cols.div_ceil(160));
            let blocks = BlockTrits160::pack_matrix(&codes, &scales).unwrap();
            assert_eq!(BlockTrits160::unpack_matrix(&blocks, cols).unwrap(), all);
            let kept: Vec<u16> = blocks.iter().map(|b| b.scale().to_bits()).collect();
            assert_eq!(kept, bits(&scales));
            assert!(BlockTrits160::unpack_matrix(&blocks, 0).is_err());
        }
    }
    let e = I2S::pack(&Codes::new(&[1], 1, 1).unwrap(), 1.0, 32)
        .unwrap_err()
        .to_string();
    assert!(e.contains("32") && e.contains("128"), "{e}");
}

#[test]
fn codes_refuse_what_is_not_a_ternary_matrix() {
    assert!(Codes::new(&[], 0, 4).is_err());
    assert!(Codes::new(&[], usize::MAX, 0).is_err());
    assert!(Codes::new(&[1; 4], usize::MAX, 2).is_err());
    let e = Codes::new(&[0, 1, 2, 3], 2, 2).unwrap_err().to_string();
    assert!(e.contains("code 3 in row 1 at 1"), "{e}");
}

#[test]
fn five_trits_round_trip() {
    round_trip::<BlockTrits160, 160>(2);
    round_trip::<BlockTrits640, 640>(2);
}

/// 2 - z bits a weight: exactly, when rows and signs fill whole bytes.
#[test]
fn bitcos_takes_two_minus_z_bits() {
    let (rows, cols) = (8, 1280);
    let codes: Vec<u8> = (0..rows * cols).map(|i| [1, 0, 1, 2, 1][i % 5]).collect();
    let m = Bitcos::pack(&Codes::new(&codes, rows, cols).unwrap(), &scale_noise(80)).unwrap();
    let sizes = m.sizes();
    let bits = (sizes.presence + sizes.signs) as f64 / (rows * cols) as f64;
    assert_eq!(bits, bitcos::bits_per_weight(0.6));
    assert_eq!(sizes.index, 32 * 8);
    // The first five weights are 0, -1, 0, +1, 0.
    assert_eq!(m.presence()[0] & 31, 0b01010);
    assert_eq!(m.signs()[0], 0b0101_0101);
}

/// Bytes of one small case each, from the description of the formats.
#[test]
fn places_in_whole_matrix_formats() {
    // Row 9 of 32 is +1, -1, 0, +1, 0, 0, then zeros.
    let (rows, cols) = (32, 96 + 32);
    let mut all = vec![1; rows * cols];
    all[9 * cols..][..6].copy_from_slice(&[2, 0, 1, 2, 1, 1]);
    all[9 * cols + 96..][..4].copy_from_slice(&[0, 0, 2, 2]);
    all[20 * cols + 3] = 0;
    let codes = Codes::new(&all, rows, cols).unwrap();
    let i2 = I2S::pack(&codes, 1.0, i2_s::GROUP_X86).unwrap();
    let at = 9 * 32;
    assert_eq!(
        i2.packed()[at..][..4],
        [0b10_01_01_00, 0b00_01_01_00, 0b01_01_01_10, 0b10_01_01_10]
    );
    let tl1 = Tl1::pack(&codes, 1.0);
    // Row 9 stands in byte 17 of the 32; pairs (+1, -1) and (0, +1) are 6 and 5.
    assert_eq!(tl1.pairs()[17], 6 << 4 | 5);
    let tl2 = Tl2::pack(&codes, 1.0);
    // Triples (+1, -1, 0) and (+1, 0, 0) are 6 and 9; row 20 has (-1, 0, 0) as its second.
    assert_eq!(tl2.triples()[17], 6 << 4 | 9);
    assert_eq!(tl2.triples()[lane_of(20)], 9);
    let word = |l: usize| u16::from_le_bytes([tl2.signs()[2 * l], tl2.signs()[2 * l + 1]]);
    assert_eq!((word(9), word(4)), (0, 1 << 12));
    assert_eq!(tl2.pairs()[17], 8);

    fn lane_of(row: usize) -> usize {
        [0, 2, 1, 3][row / 8] * 8 + row % 8
    }
}
