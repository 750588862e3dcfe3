//! Every kernel of this CPU on one matrix that stays in the caches: decode of one token, prefill of 64.
//!
//! `cargo bench -p common -- wide-row` runs those whose name has it. For figures to publish, run the experiments: they interleave
//! what they compare.

use std::hint::black_box;
use std::time::Duration;

use common::formats::Format;
use common::kernels::{self, Activations, Form, Isa, Kernel, MatrixRef};
use common::runtime::stack;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const ROWS: usize = 1024;
/// A multiple of 640, which one layout asks for.
const COLS: usize = 5120;

/// A matrix of any format, in the kernel's layout.
fn weights(kernel: &Kernel) -> Vec<u8> {
    let format = kernel.layout().source();
    let mut bytes = if format.is_ternary() {
        stack::random_stock(format, ROWS, COLS, stack::ZEROS, 1).expect("a shape that fits")
    } else {
        // Small normal numbers in every float format; time does not depend on them.
        vec![0x3c; format.matrix_bytes(ROWS, COLS).expect("a shape that fits")]
    };
    let repacked = kernel.layout().repack_in_place(&mut bytes, ROWS, COLS);
    let len = repacked.expect("a shape that fits").len();
    bytes.truncate(len);
    bytes
}

fn bench(c: &mut Criterion, group: &str, kernels: &[&Kernel], tokens: usize) {
    let mut group = c.benchmark_group(group);
    group.throughput(Throughput::Elements((ROWS * COLS * tokens) as u64));
    for kernel in kernels {
        group.bench_function(kernel.name(), |b| {
            let bytes = weights(kernel);
            let w = MatrixRef::new(kernel.layout(), ROWS, COLS, &bytes).expect("a checked shape");
            let x: Activations =
                stack::random_activations(kernel.form(), COLS, tokens, 2).expect("whole rows");
            let mut out = vec![0f32; ROWS * tokens];
            b.iter(|| kernel.multiply(black_box(&w), &x, black_box(&mut out)));
        });
    }
}

fn all(c: &mut Criterion) {
    let mut kernels: Vec<&Kernel> = Format::ALL.into_iter().flat_map(kernels::named).collect();
    bench(c, "gemv", &kernels, 1);
    // The scalar reference and floats have no prefill of their own.
    kernels.retain(|k| k.isa() != Isa::Scalar && k.form() != Form::F32);
    bench(c, "gemm64", &kernels, 64);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20);
    targets = all
}
criterion_main!(benches);
