//! Register-only loops of the instructions that multiply: `smlal`, `sdot`, `smmla`.

use std::arch::aarch64::*;
use std::hint::black_box;

use super::sets::{self, Dotprod, Neon, Set};
use crate::kernels::Isa;

/// Independent sums: as many as hide the latency of the instruction at four a cycle.
const SUMS: usize = 16;

/// Runs `dot` on each of the sums, `$steps` times.
macro_rules! rounds {
    ($steps:expr, $zero:expr, $dot:expr) => {{
        let (codes, activations) = ([1u8; 16], [1i8; 16]);
        let mut sums = [$zero; SUMS];
        let y = vld1q_s8(black_box(activations.as_ptr()));
        for _ in 0..$steps {
            // Loaded anew each round, or the product would be computed once for all rounds.
            let u = vld1q_u8(black_box(codes.as_ptr()));
            for sum in &mut sums {
                *sum = $dot(*sum, u, y);
            }
        }
        black_box(sums);
    }};
}

#[target_feature(enable = "neon")]
unsafe fn neon(steps: usize) {
    // SAFETY: NEON is enabled here; the arrays hold a whole vector.
    unsafe { rounds!(steps, Neon::sum(), Neon::sum_dot) }
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn dotprod(steps: usize) {
    // SAFETY: as above.
    unsafe { rounds!(steps, Dotprod::sum(), Dotprod::sum_dot) }
}

#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn i8mm(steps: usize) {
    // SAFETY: as above.
    unsafe { rounds!(steps, vdupq_n_s32(0), sets::smmla) }
}

/// As [`crate::kernels::peak::run`], for a set that this CPU has.
pub fn run(isa: Isa, steps: usize) -> Option<u64> {
    // Multiply-accumulates of a vector of 16 codes: a 2x8 by 8x2 product makes 32.
    let (run, macs): (unsafe fn(usize), _) = match isa {
        Isa::Neon => (neon, 16),
        Isa::Dotprod if super::dotprod() => (dotprod, 16),
        Isa::I8mm if super::i8mm() => (i8mm, 32),
        _ => return None,
    };
    // SAFETY: the set was detected.
    unsafe { run(steps) };
    Some((steps * SUMS * macs) as u64)
}
