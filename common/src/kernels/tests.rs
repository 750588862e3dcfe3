//! Every kernel this machine can run, against the reference, bit for bit.

use half::f16;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::formats::BlockQ8K;

/// Stock bytes of a ternary matrix.
fn stock(format: Format, codes: &[u8], scales: &[f16], rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = vec![0; format.matrix_bytes(rows, cols).unwrap()];
    format.pack(codes, scales, &mut bytes).unwrap();
    bytes
}

/// Emulated CPUs are slow: there, `just test-arm` asks for every `step`th shape alone, of every kernel.
fn thinned<T>(shapes: impl Iterator<Item = T>, step: usize) -> impl Iterator<Item = T> {
    let emulated = std::env::var_os("TERN_EMULATED").is_some();
    shapes.step_by(if emulated { step } else { 1 })
}

/// The kernels of a format that take rows of `cols` weights.
fn taking(format: Format, cols: usize) -> impl Iterator<Item = &'static Kernel> {
    available().filter(move |k| k.takes(format, cols))
}

/// These, but for the reference.
fn fast(format: Format, cols: usize) -> impl Iterator<Item = &'static Kernel> {
    taking(format, cols).filter(move |k| *k != reference_of(format))
}

fn reference_of(format: Format) -> &'static Kernel {
    all()
        .find(|k| k.layout == Layout::Stock(format) && k.isa == Isa::Scalar)
        .unwrap()
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// What the kernel makes of stock bytes.
fn multiply(kernel: &Kernel, stock: &[u8], rows: usize, x: &Activations) -> Vec<f32> {
    let mut bytes = stock.to_vec();
    let bytes = kernel.layout.repack_in_place(&mut bytes, rows, x.cols());
    let w = MatrixRef::new(kernel.layout, rows, x.cols(), bytes.unwrap()).unwrap();
    let mut out = vec![f32::NAN; rows * x.tokens()];
    kernel.multiply(&w, x, &mut out).unwrap();
    assert!(
        !out.iter().any(|v| v.is_nan()),
        "{}: rows left out",
        kernel.name()
    );
    out
}

const TERNARY: [Format; 5] = [
    Format::Pq2_0,
    Format::Ptq1_0,
    Format::Q2_0,
    Format::Tq2_0,
    Format::Tq1_0,
];

/// Codes that the format can store.
fn codes_of(format: Format) -> u8 {
    if matches!(format, Format::Ptq1_0 | Format::Tq1_0) {
        3
    } else {
        4
    }
}

fn check(format: Format, rows: usize, cols: usize, codes: &[u8], scales: &[f16], x: &Activations) {
    let bytes = stock(format, codes, scales, rows, cols);
    let expected = multiply(reference_of(format), &bytes, rows, x);
    for kernel in fast(format, cols) {
        let found = multiply(kernel, &bytes, rows, x);
        assert_eq!(
            bits(&found),
            bits(&expected),
            "{} {rows}x{cols}, {} tokens",
            kernel.name(),
            x.tokens()
        );
    }
}

fn random_scales(rng: &mut StdRng, n: usize) -> Vec<f16> {
    let edge = [0.0, 6e-8, 65504.0, -65504.0, 1.0].map(f16::from_f32);
    (0..n)
        .map(|_| {
            if rng.random_bool(0.2) {
                edge[rng.random_range(0..edge.len())]
            } else {
                f16::from_f32(rng.random())
            }
        })
        .collect()
}

fn random_activations(rng: &mut StdRng, cols: usize, tokens: usize) -> Activations {
    let x: Vec<f32> = (0..cols * tokens)
        .map(|_| rng.random_range(-3.0f32..3.0).powi(3))
        .collect();
    Activations::of(Form::Q8K, cols, &x).unwrap()
}

#[test]
fn every_kernel_equals_the_reference_on_every_shape() {
    let rng = &mut StdRng::seed_from_u64(1);
    for format in TERNARY {
        for cols in [128, 256, 384, 640, 1024, 1920]
            .into_iter()
            .filter(|c| c % format.block_weights() == 0)
        {
            for rows in thinned((1..=33).chain([48, 64]), 5) {
                for tokens in [1, 2 + rng.random_range(0..18)] {
                    let codes: Vec<u8> = (0..rows * cols)
                        .map(|_| rng.random_range(0..codes_of(format)))
                        .collect();
                    let scales = random_scales(rng, rows * cols / format.block_weights());
                    check(
                        format,
                        rows,
                        cols,
                        &codes,
                        &scales,
                        &random_activations(rng, cols, tokens),
                    );
                }
            }
        }
    }
}

#[test]
fn every_batch_width_gives_the_bits_of_one_token_at_a_time() {
    let rng = &mut StdRng::seed_from_u64(2);
    let (rows, cols) = (35, 1280);
    for format in TERNARY {
        let codes: Vec<u8> = (0..rows * cols)
            .map(|_| rng.random_range(0..codes_of(format)))
            .collect();
        let scales = random_scales(rng, rows * cols / format.block_weights());
        let bytes = stock(format, &codes, &scales, rows, cols);
        for tokens in thinned((1..=33).chain([64, 65, 81]), 5) {
            let x: Vec<f32> = (0..cols * tokens)
                .map(|_| rng.random_range(-1.0..1.0))
                .collect();
            let batch = Activations::of(Form::Q8K, cols, &x).unwrap();
            for kernel in taking(format, cols) {
                let found = multiply(kernel, &bytes, rows, &batch);
                for (x, found) in x.chunks(cols).zip(found.chunks(rows)) {
                    let one = Activations::of(Form::Q8K, cols, x).unwrap();
                    let expected = multiply(kernel, &bytes, rows, &one);
                    assert_eq!(
                        bits(found),
                        bits(&expected),
                        "{} {tokens} tokens",
                        kernel.name()
                    );
                }
            }
        }
    }
}

/// Scales of 1 on both sides make the f32 result the exact integer sum.
#[test]
fn integer_sums_are_exact_at_the_extremes() {
    let (rows, cols) = (33, 1280);
    for format in TERNARY {
        let scales = vec![f16::ONE; rows * cols / format.block_weights()];
        for u in 0..codes_of(format) {
            for q in thinned([-127i8, -1, 0, 1, 127].into_iter(), 2) {
                for tokens in [1, 3, 16] {
                    let mut x = Activations::new(Form::Q8K, cols, tokens);
                    x.set_codes(&vec![q; cols * tokens], &vec![1.0; cols / 256 * tokens])
                        .unwrap();
                    let bytes = stock(format, &vec![u; rows * cols], &scales, rows, cols);
                    let expected = (i32::from(u) - 1) * i32::from(q) * cols as i32;
                    for kernel in taking(format, cols) {
                        let found = multiply(kernel, &bytes, rows, &x);
                        assert!(
                            found.iter().all(|&v| v == expected as f32),
                            "{} code {u} activation {q}: found {found:?}, expected {expected}",
                            kernel.name()
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn activations_are_what_q8_k_quantizes() {
    let rng = &mut StdRng::seed_from_u64(3);
    for round in 0..200 {
        let mut x: [f32; 256] = std::array::from_fn(|_| rng.random_range(-2.0..2.0));
        match round {
            0 => x = [0.0; 256],
            1 => x[7] = f32::NAN,
            2 => x[7] = f32::INFINITY,
            3 => x = x.map(|v| v * 1e-38),
            4 => x = x.map(|v| (v * 4.0).round() / 2.0),
            _ => {}
        }
        let block = BlockQ8K::quantize(&x);
        let batch: Vec<f32> = [x, x, x].concat();
        let a = Activations::of(Form::Q8K, 256, &batch).unwrap();
        let group = &a.groups()[0];
        for t in 0..3 {
            assert_eq!(group.row(t), block.qs, "round {round}");
            assert_eq!(
                group.scales()[t].to_bits(),
                block.d.to_bits(),
                "round {round}"
            );
            let sum: i32 = block.bsums.iter().map(|&s| i32::from(s)).sum();
            assert_eq!(group.offsets(256)[t], -sum);
        }
    }
}

/// Blocks of any bits, so codes of -128 too, and scales that are not NaN.
#[test]
fn q8_0_and_q4_0_give_the_bits_of_their_own_order_of_scales() {
    let rng = &mut StdRng::seed_from_u64(5);
    for format in [Format::Q8_0, Format::Q4_0] {
        for cols in (1..=20).map(|blocks| 32 * blocks).chain([1024, 1056]) {
            for tokens in [1, 2, 3, 17] {
                let rows = rng.random_range(1..6);
                let mut bytes = vec![0; format.matrix_bytes(rows, cols).unwrap()];
                rng.fill(&mut bytes[..]);
                let size = format.block_bytes();
                let scales = random_scales(rng, bytes.len() / size);
                for (block, d) in bytes.chunks_mut(size).zip(scales) {
                    block[..2].copy_from_slice(&d.to_le_bytes());
                }
                if cols == 64 {
                    bytes.iter_mut().for_each(|b| *b = 0x80);
                }
                let x: Vec<f32> = (0..cols * tokens)
                    .map(|_| rng.random_range(-3.0f32..3.0).powi(3))
                    .collect();
                let x = Activations::of(Form::Q8_0, cols, &x).unwrap();
                let expected = multiply(reference_of(format), &bytes, rows, &x);
                for kernel in fast(format, cols) {
                    assert_eq!(
                        bits(&multiply(kernel, &bytes, rows, &x)),
                        bits(&expected),
                        "{} {rows}x{cols}, {tokens} tokens",
                        kernel.name()
                    );
                }
            }
        }
    }
}

/// Weights that end at an unreadable page and start at any byte: nothing is read past them, whatever the build, and no address
/// is taken to be aligned. Results end at such a page too.
#[cfg(unix)]
#[test]
fn nothing_is_read_past_the_weights() {
    use crate::test_support::GuardedBuf;
    let rng = &mut StdRng::seed_from_u64(6);
    let quantized = [Format::Q8_0, Format::Q4_0];
    for format in TERNARY.into_iter().chain(quantized) {
        for cols in [128, 384, 512, 640]
            .into_iter()
            .filter(|c| c % format.block_weights() == 0)
        {
            for (case, rows) in [1, 4, 7, 8, 19, 35].into_iter().enumerate() {
                let mut bytes = vec![0; format.matrix_bytes(rows, cols).unwrap()];
                if format.is_ternary() {
                    let codes: Vec<u8> = (0..rows * cols)
                        .map(|_| rng.random_range(0..codes_of(format)))
                        .collect();
                    let scales = random_scales(rng, rows * cols / format.block_weights());
                    bytes = stock(format, &codes, &scales, rows, cols);
                } else {
                    bytes.fill(0x3c);
                }
                for tokens in [1, 3, 17] {
                    let x: Vec<f32> = (0..cols * tokens)
                        .map(|_| rng.random_range(-1.0..1.0))
                        .collect();
                    let form = reference_of(format).form;
                    let x = Activations::of(form, cols, &x).unwrap();
                    let expected = bits(&multiply(reference_of(format), &bytes, rows, &x));
                    for slack in [0, 1, 2, 3, 17, 32, 63]
                        .into_iter()
                        .skip(case % 2)
                        .step_by(2)
                    {
                        for kernel in taking(format, cols) {
                            let mut bytes = bytes.clone();
                            let bytes = kernel.layout.repack_in_place(&mut bytes, rows, cols);
                            let guarded = GuardedBuf::copy_of(bytes.unwrap(), slack);
                            let w = MatrixRef::new(kernel.layout, rows, cols, &guarded).unwrap();
                            let mut out = GuardedBuf::new(4 * rows * tokens, 0);
                            let out: &mut [f32] = bytemuck::cast_slice_mut(&mut out);
                            kernel.multiply(&w, &x, out).unwrap();
                            assert_eq!(
                                bits(out),
                                expected,
                                "{} {rows}x{cols}, {tokens} tokens, {slack} bytes before the page",
                                kernel.name()
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn float_kernels_agree_on_every_bit() {
    let rng = &mut StdRng::seed_from_u64(4);
    for format in [Format::F32, Format::F16, Format::Bf16] {
        for cols in [1, 31, 32, 100, 256] {
            let rows = 5;
            let mut bytes: Vec<u8> = (0..format.matrix_bytes(rows, cols).unwrap())
                .map(|_| rng.random())
                .collect();
            let mut plain = vec![0.0; rows * cols];
            // Keep exponents finite and tame: any bits in the low bytes, a small top byte.
            let size = format.block_bytes();
            bytes
                .iter_mut()
                .skip(size - 1)
                .step_by(size)
                .for_each(|b| *b = b.wrapping_rem(8) + 0x36);
            format.dequantize(&bytes, &mut plain).unwrap();
            let x: Vec<f32> = (0..3 * cols).map(|_| rng.random_range(-1.0..1.0)).collect();
            let x = Activations::of(Form::F32, cols, &x).unwrap();
            let f32_bytes: &[u8] = bytemuck::cast_slice(&plain);
            let expected = multiply(reference_of(Format::F32), f32_bytes, rows, &x);
            for kernel in available().filter(|k| k.layout == Layout::Stock(format)) {
                assert_eq!(
                    bits(&multiply(kernel, &bytes, rows, &x)),
                    bits(&expected),
                    "{} {cols}",
                    kernel.name()
                );
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let kernel = Choice::default().kernel(Format::Pq2_0).unwrap();
    let bytes = vec![0; Format::Pq2_0.matrix_bytes(32, 256).unwrap()];
    let w = MatrixRef::new(kernel.layout, 32, 256, &bytes).unwrap();
    let x = Activations::of(Form::Q8K, 256, &[1.0; 512]).unwrap();
    let mut out = vec![0.0; 64];
    assert!(
        kernel.multiply(&w, &x, &mut out[..63]).is_err(),
        "short output"
    );
    assert!(
        kernel
            .multiply(
                &w,
                &Activations::of(Form::Q8K, 128, &[1.0; 128]).unwrap(),
                &mut out
            )
            .is_err(),
        "columns"
    );
    assert!(
        kernel
            .multiply(
                &w,
                &Activations::of(Form::F32, 256, &[1.0; 256]).unwrap(),
                &mut out
            )
            .is_err(),
        "form"
    );
    assert!(
        MatrixRef::new(kernel.layout, 32, 256, &bytes[1..]).is_err(),
        "bytes"
    );
    let other = reference_of(Format::Pq2_0);
    assert!(
        other.multiply(&w, &x, &mut out).is_err() || kernel.layout == other.layout,
        "layout"
    );
    assert!("row-pare".parse::<Choice>().is_err());
    // Rows of any width: the default never is the layout that takes some alone, which a name gives where it fits.
    let five: Choice = "wide-row-b3x5".parse().unwrap();
    for (cols, name) in [(5120, "wide-row-b3x5"), (17408, "wide-row-b3")] {
        let kernel = five
            .kernel_of(Format::Ptq1_0, cols)
            .or_else(|_| five.kernel_or_below(Format::Ptq1_0, cols));
        // On Arm the scalar reference alone has it.
        if cfg!(target_arch = "x86_64") {
            assert_eq!(kernel.unwrap().layout.name(), name);
        }
        let default = Choice::default().kernel_of(Format::Ptq1_0, cols).unwrap();
        assert_ne!(default.layout.name(), "wide-row-b3x5");
    }
    assert!("neon/avx2".parse::<Choice>().is_err() || cfg!(not(target_arch = "x86_64")));
}
