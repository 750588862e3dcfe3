//! F32 dot products in AVX2 and AVX-512: see `kernels/dots.rs`.

// Every method is an instruction or two under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use crate::kernels::Isa;
use crate::kernels::dots::{Dot, Lanes, dot, ways};

/// The methods that differ in nothing but the names of their intrinsics.
macro_rules! plain {
    ($width:literal, $zero:ident, $load:ident, $fma:ident, $mul:ident, $add:ident, $store:ident) => {
        const WIDTH: usize = $width;
        #[inline(always)]
        unsafe fn zero() -> Self {
            $zero()
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            $load(from)
        }
        #[inline(always)]
        unsafe fn fma(self, x: Self, sum: Self) -> Self {
            $fma(self, x, sum)
        }
        #[inline(always)]
        unsafe fn mul(self, x: Self) -> Self {
            $mul(self, x)
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            $add(self, other)
        }
        #[inline(always)]
        unsafe fn to_array(self) -> [f32; 16] {
            let mut all = [0.0; 16];
            $store(all.as_mut_ptr(), self);
            all
        }
    };
}

// SAFETY: each method is made of instructions of the set, as the trait asks.
unsafe impl Lanes for __m256 {
    plain!(
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_fmadd_ps,
        _mm256_mul_ps,
        _mm256_add_ps,
        _mm256_storeu_ps
    );
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane))
    }
}

// SAFETY: as above.
unsafe impl Lanes for __m512 {
    plain!(
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_fmadd_ps,
        _mm512_mul_ps,
        _mm512_add_ps,
        _mm512_storeu_ps
    );
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from)
    }
}

ways!(avx2, Isa::Avx2, __m256, "avx2,fma");
ways!(avx512, Isa::Avx512Vnni, __m512, "avx512f,fma");
