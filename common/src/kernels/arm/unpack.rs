//! Five trits a byte in NEON: see `kernels/unpack.rs`.

// Every method is an instruction or a few under the one contract of the trait; every aarch64 target here has NEON.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;

use crate::kernels::Isa;
use crate::kernels::unpack::{BLOCK, Methods, SLOTS, Trits, Vector, blocks};

/// The ways of NEON.
pub const METHODS: Methods = Methods {
    isa: Isa::Neon,
    code: "intrinsics",
    methods: &[
        ("multiply", multiply),
        ("thresholds", thresholds),
        ("table", table),
    ],
};

// SAFETY: each method is made of instructions of NEON, as the trait asks.
unsafe impl Vector for uint8x16_t {
    const WIDTH: usize = 16;
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        vld1q_u8(from)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        vst1q_u8(to, self)
    }
    #[inline(always)]
    unsafe fn tripled(self) -> Self {
        vmulq_u8(self, vdupq_n_u8(3))
    }
    /// The two halves widened, times 3, and narrowed to their upper bytes.
    #[inline(always)]
    unsafe fn multiply(self) -> Self {
        let low = vmull_u8(vget_low_u8(self), vdup_n_u8(3));
        vshrn_high_n_u16::<8>(vshrn_n_u16::<8>(low), vmull_high_u8(self, vdupq_n_u8(3)))
    }
    /// A comparison gives -1.
    #[inline(always)]
    unsafe fn thresholds(self) -> Self {
        let low = vcgeq_u8(self, vdupq_n_u8(86));
        let high = vcgeq_u8(self, vdupq_n_u8(171));
        vsubq_u8(vdupq_n_u8(0), vaddq_u8(low, high))
    }
}

unsafe fn multiply(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
    // SAFETY: NEON is there.
    unsafe { blocks::<uint8x16_t, true>(bytes, out) }
}

unsafe fn thresholds(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
    // SAFETY: NEON is there.
    unsafe { blocks::<uint8x16_t, false>(bytes, out) }
}

/// A lookup of 64 entries gives 0 for every other index, so four of them make one of 256.
#[inline(always)]
fn lookup(table: &[uint8x16x4_t; 4], index: uint8x16_t) -> uint8x16_t {
    let quarter = |i: usize| {
        // SAFETY: NEON is there.
        unsafe { vqtbl4q_u8(table[i], vsubq_u8(index, vdupq_n_u8(64 * i as u8))) }
    };
    // SAFETY: NEON is there.
    unsafe {
        vorrq_u8(
            vorrq_u8(quarter(0), quarter(1)),
            vorrq_u8(quarter(2), quarter(3)),
        )
    }
}

unsafe fn table(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
    let load = |table: &[u8; 256], at: usize| {
        // SAFETY: the slice is 64 bytes.
        unsafe { vld1q_u8_x4(table[at..at + 64].as_ptr()) }
    };
    let [slots, last] = SLOTS
        .each_ref()
        .map(|t| [0, 64, 128, 192].map(|at| load(t, at)));
    for (bytes, out) in bytes.iter().zip(out) {
        for at in (0..BLOCK).step_by(16) {
            // SAFETY: 16 bytes at a multiple of 16 below 64.
            unsafe {
                let v = vld1q_u8(bytes.as_ptr().add(at));
                let mut four = lookup(&slots, v);
                for digits in &mut out[..4] {
                    vst1q_u8(digits.as_mut_ptr().add(at), vandq_u8(four, vdupq_n_u8(3)));
                    four = vshrq_n_u8::<2>(four);
                }
                vst1q_u8(out[4].as_mut_ptr().add(at), lookup(&last, v));
            }
        }
    }
}
