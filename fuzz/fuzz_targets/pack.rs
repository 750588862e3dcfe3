//! Codes and scales of any format and layout: packed, unpacked, repacked, restored.
#![no_main]

use arbitrary::Arbitrary;
use common::formats::Format;
use common::kernels;
use half::f16;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    format: u8,
    rows: u8,
    blocks: u8,
    codes: Vec<u8>,
    scales: Vec<u16>,
    /// As they are, as a matrix in stock form.
    bytes: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let ternary: Vec<Format> = Format::ALL.into_iter().filter(|f| f.is_ternary()).collect();
    let format = ternary[input.format as usize % ternary.len()];
    let (rows, blocks) = (input.rows as usize % 40 + 1, input.blocks as usize % 11 + 1);
    let cols = blocks * format.block_weights();

    // What can be stored reads back; a code that cannot is refused.
    let nth = |codes: &[u8], i: usize| codes.get(i % codes.len().max(1)).copied().unwrap_or(0);
    let codes: Vec<u8> = (0..cols).map(|i| nth(&input.codes, i) % 4).collect();
    let scales: Vec<f16> = (0..blocks)
        .map(|i| f16::from_bits(input.scales.get(i).copied().unwrap_or(0x3c00)))
        .collect();
    let mut bytes = vec![0; format.row_bytes(cols).unwrap()];
    if format.pack(&codes, &scales, &mut bytes).is_ok() {
        let (mut back, mut d) = (vec![9; cols], vec![f16::ZERO; blocks]);
        format.unpack(&bytes, &mut back, &mut d).unwrap();
        assert_eq!(back, codes);
        assert!(
            d.iter()
                .zip(&scales)
                .all(|(a, b)| a.to_bits() == b.to_bits())
        );
    } else {
        assert!(codes.contains(&3), "{format}: refused codes 0 to 2");
    }

    // Any bytes of the right length unpack, and every layout of them can be undone.
    let size = format.matrix_bytes(rows, cols).unwrap();
    let stock: Vec<u8> = (0..size).map(|i| nth(&input.bytes, i)).collect();
    let (mut codes, mut d) = (vec![0; rows * cols], vec![f16::ZERO; rows * blocks]);
    format.unpack(&stock, &mut codes, &mut d).unwrap();
    let canonical = format.pack(&codes, &d, &mut bytes_of(size)).is_ok();
    for layout in kernels::all().map(|k| k.layout()) {
        if layout.source() != format || layout.repack_in_place(&mut [], 0, cols).is_err() {
            continue;
        }
        let mut there = stock.clone();
        if canonical {
            format.pack(&codes, &d, &mut there).unwrap();
        }
        let before = there.clone();
        let repacked = layout.repack_in_place(&mut there, rows, cols).unwrap();
        let unpacked = layout.unpack(repacked, rows, cols).unwrap();
        if canonical {
            assert_eq!(unpacked.codes, codes, "{layout:?}");
        }
        layout.restore_in_place(&mut there, rows, cols).unwrap();
        if canonical {
            assert_eq!(there, before, "{layout:?}");
        }
    }
});

fn bytes_of(size: usize) -> Vec<u8> {
    vec![0; size]
}
