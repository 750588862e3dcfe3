//! Every kernel of this CPU against the scalar reference, bit for bit, on weights that a format can store.
#![no_main]

use arbitrary::Arbitrary;
use common::formats::{Format, Layout};
use common::kernels::{self, Activations, Isa, MatrixRef};
use half::f16;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    format: u8,
    rows: u8,
    cols: u8,
    tokens: u8,
    codes: Vec<u8>,
    scales: Vec<i8>,
    x: Vec<i8>,
}

fuzz_target!(|input: Input| {
    let ternary: Vec<Format> = Format::ALL.into_iter().filter(|f| f.is_ternary()).collect();
    let format = ternary[input.format as usize % ternary.len()];
    let (rows, tokens) = (input.rows as usize % 36 + 1, input.tokens as usize % 19 + 1);
    let blocks = input.cols as usize % 11 + 1;
    let cols = blocks * format.block_weights();
    let nth = |of: &[i8], i: usize| of.get(i % of.len().max(1)).copied().unwrap_or(1);
    // Base 3 has no code 3.
    let codes = match format {
        Format::Ptq1_0 | Format::Tq1_0 => 3,
        _ => 4,
    };
    let codes: Vec<u8> = (0..rows * cols)
        .map(|i| {
            input
                .codes
                .get(i % input.codes.len().max(1))
                .copied()
                .unwrap_or(0)
                % codes
        })
        .collect();
    let scales: Vec<f16> = (0..rows * blocks)
        .map(|i| f16::from_f32(f32::from(nth(&input.scales, i)) / 64.0))
        .collect();
    let x: Vec<f32> = (0..tokens * cols)
        .map(|i| f32::from(nth(&input.x, i)) / 16.0)
        .collect();
    let mut stock = vec![0; format.matrix_bytes(rows, cols).unwrap()];
    format.pack(&codes, &scales, &mut stock).unwrap();

    let run = |kernel: &kernels::Kernel| {
        let mut bytes = stock.clone();
        let bytes = kernel.layout().repack_in_place(&mut bytes, rows, cols);
        let w = MatrixRef::new(kernel.layout(), rows, cols, bytes.unwrap()).unwrap();
        let x = Activations::of(kernel.form(), cols, &x).unwrap();
        let mut out = vec![f32::NAN; rows * tokens];
        kernel.multiply(&w, &x, &mut out).unwrap();
        out.iter().map(|v| v.to_bits()).collect::<Vec<u32>>()
    };
    let stock_layout = Layout::Stock(format);
    let reference = kernels::available()
        .find(|k| k.layout() == stock_layout && k.isa() == Isa::Scalar)
        .expect("a scalar kernel for every format");
    let expected = run(reference);
    for kernel in kernels::available().filter(|k| k.takes(format, cols)) {
        if kernel.form() == reference.form() {
            assert!(
                run(kernel) == expected,
                "{} differs: {rows} x {cols}, {tokens} tokens",
                kernel.name()
            );
        }
    }
});
