//! Zero density: a bitmap of the weights that are not zero and their signs, against two bits and base 3. Claims B01 to B03.

mod sizes;
mod speed;

use std::process::ExitCode;

use common::formats::{BlockTrits160, Format};
use common::kernels::bitcos;
use common::lab::{self, Experiment};
use rand::seq::SliceRandom;
use shared::decode::At;

/// Zero shares where speed is taken: a third, two of trained models and one far above.
const SHARES: [f64; 4] = [0.33, 0.42, 0.515, 0.7];

/// Bits a weight of codes alone: PTQ1_0's 26 bytes of 128, and five trits a byte.
const PTQ1_0: f64 = (8 * (Format::Ptq1_0.block_bytes() - 2)) as f64 / 128.0;
const TRITS: f64 = (8 * (size_of::<BlockTrits160>() - 2)) as f64 / 160.0;

fn main() -> ExitCode {
    lab::run("exp-13-zero-density", &["B01", "B02", "B03"], |exp| {
        let kernel = *bitcos::kernels().last().expect("the scalar reference");
        let why = "the best instruction set here";
        exp.kernel_chosen("bitcos", kernel.isa.name(), why);
        sizes::packed(exp)?;
        sizes::model(exp)?;
        let (at, shares) = match exp.quick() {
            true => (At::new(1024, 2048, "cache"), &SHARES[2..3]),
            false => (At::new(32768, 8192, "dram"), &SHARES[..]),
        };
        let mut rates = Vec::new();
        for &zeros in shares {
            speed::race(exp, kernel, zeros, &at, &mut rates)?;
        }
        speed::verdict(exp, kernel, &rates)
    })
}

/// Codes of which exactly that share, to the nearest, is zero, and the rest half and half.
fn codes(exp: &Experiment, rows: usize, cols: usize, zeros: f64) -> Vec<u8> {
    let n = rows * cols;
    let none = (n as f64 * zeros).round() as usize;
    let mut codes: Vec<u8> = (0..n)
        .map(|i| if i < none { 1 } else { 2 * (i % 2) as u8 })
        .collect();
    codes.shuffle(&mut exp.rng("codes"));
    codes
}
