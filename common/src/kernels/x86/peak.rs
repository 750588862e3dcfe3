//! Register-only loops of the dot instructions.

use std::hint::black_box;

use super::lanes::{Avx2, Avx512, Avx512Vl, AvxVnni, Lanes};
use crate::kernels::Isa;

/// Independent sums: as many as hide the latency of the instruction at two a cycle.
const SUMS: usize = 12;

/// `steps` rounds of `A` dots; with `A` different activations, so that none can be shared between sums.
///
/// # Safety
/// The instruction set of `V`.
#[inline(always)]
unsafe fn dots<V: Lanes, const A: usize>(steps: usize) -> u64 {
    let codes = [1u8; 64];
    let activations = [1i8; 64];
    // SAFETY: the caller's contract; the arrays hold a whole vector.
    unsafe {
        let y: [V; A] = std::array::from_fn(|i| {
            V::broadcast(black_box(activations.as_ptr()).add(4 * (i % 12)))
        });
        let mut sums = [V::sum_start(V::splat(0)); A];
        for _ in 0..steps {
            // Loaded anew each round, or the product would be computed once for all rounds.
            let u = V::load(black_box(codes.as_ptr()));
            for (sum, &y) in sums.iter_mut().zip(&y) {
                *sum = V::sum_dot(*sum, u, y);
            }
        }
        black_box(sums);
    }
    (steps * A * V::BYTES) as u64
}

macro_rules! instance {
    ($name:ident, $enable:literal, $lanes:ty, $sums:expr) => {
        #[target_feature(enable = $enable)]
        unsafe fn $name(steps: usize) -> u64 {
            // SAFETY: the instruction set is enabled here.
            unsafe { dots::<$lanes, { $sums }>(steps) }
        }
    };
}

// Half the registers of AVX2 hold activations, the other half 16-bit sums, which need one cycle each.
instance!(avx2, "avx2,fma,f16c", Avx2, SUMS / 2);
instance!(vex, "avx2,fma,f16c,avxvnni", AvxVnni, SUMS);
instance!(
    evex,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni",
    Avx512Vl,
    SUMS
);
instance!(
    zmm,
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni",
    Avx512,
    SUMS
);

/// See [`crate::kernels::peak::run`].
pub fn run(isa: Isa, steps: usize) -> Option<u64> {
    // SAFETY: each is called where its own instruction set was found.
    unsafe {
        match isa {
            Isa::Avx2 if super::avx2() => Some(avx2(steps)),
            Isa::AvxVnni if super::avx512() => Some(evex(steps)),
            Isa::AvxVnni if super::avx_vnni() => Some(vex(steps)),
            Isa::Avx512Vnni if super::avx512() => Some(zmm(steps)),
            _ => None,
        }
    }
}
