//! F32 dot products in NEON: see `kernels/dots.rs`.

// Every method is an instruction or two under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;

use crate::kernels::Isa;
use crate::kernels::dots::{Dot, Lanes, dot, ways};

// SAFETY: each method is made of instructions of the set, as the trait asks.
unsafe impl Lanes for float32x4_t {
    const WIDTH: usize = 4;
    #[inline(always)]
    unsafe fn zero() -> Self {
        vdupq_n_f32(0.0)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        vld1q_f32(from)
    }
    /// NEON has no masks: a copy that zeros fill.
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        let mut four = [0.0; 4];
        from.copy_to_nonoverlapping(four.as_mut_ptr(), n);
        vld1q_f32(four.as_ptr())
    }
    #[inline(always)]
    unsafe fn fma(self, x: Self, sum: Self) -> Self {
        vfmaq_f32(sum, self, x)
    }
    #[inline(always)]
    unsafe fn mul(self, x: Self) -> Self {
        vmulq_f32(self, x)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        vaddq_f32(self, other)
    }
    #[inline(always)]
    unsafe fn to_array(self) -> [f32; 16] {
        let mut all = [0.0; 16];
        vst1q_f32(all.as_mut_ptr(), self);
        all
    }
}

ways!(neon, Isa::Neon, float32x4_t, "neon");
