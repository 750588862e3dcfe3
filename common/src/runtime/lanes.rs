//! Sixteen floats at a time, in whatever vectors the CPU has. Each operation rounds each lane exactly once, so that all
//! implementations give the same bits.
//!
//! A value of a type that needs an instruction set is made only inside a function that [`vectorized!`](super::math::vectorized)
//! compiled for it, after the CPU was asked.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Lanes in a vector.
pub(super) const LANES: usize = 16;

/// A vector of sixteen floats.
pub(super) trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    fn load(x: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// self * factor + term, rounded once.
    fn fma(self, factor: Self, term: Self) -> Self;
    /// Lane l takes lane l ^ STRIDE, for 1, 2, 4 or 8.
    fn swap<const STRIDE: usize>(self) -> Self;

    /// The sum of the lanes, by halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut x = [0.0; LANES];
        self.store(&mut x);
        let mut half = LANES / 2;
        while half > 0 {
            for l in 0..half {
                x[l] += x[l + half];
            }
            half /= 2;
        }
        x[0]
    }
}

/// Plain Rust, for every machine.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (out, other) in out.iter_mut().zip(other.0) {
            *out = f(*out, other);
        }
        Portable(out)
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Portable([x; LANES])
    }
    #[inline(always)]
    fn load(x: &[f32; LANES]) -> Self {
        Portable(*x)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        let mut out = term.0;
        for (l, out) in out.iter_mut().enumerate() {
            *out = self.0[l].mul_add(factor.0[l], *out);
        }
        Portable(out)
    }
    #[inline(always)]
    fn swap<const STRIDE: usize>(self) -> Self {
        let mut out = self.0;
        for (l, out) in out.iter_mut().enumerate() {
            *out = self.0[l ^ STRIDE];
        }
        Portable(out)
    }
}

/// `N` registers of an instruction set, by the names of its intrinsics.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! registers {
    ($(#[$doc:meta])* $name:ident: [$register:ty; $n:literal],
     $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $mul:ident, |$a:ident, $b:ident, $c:ident| $fma:expr,
     |$v:ident| $($stride:literal: $swap:expr),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name([$register; $n]);

        impl Lanes for $name {
            #[inline(always)]
            fn splat(x: f32) -> Self {
                // SAFETY: the module's rule: the CPU has the instruction set.
                unsafe { $name([$splat(x); $n]) }
            }
            #[inline(always)]
            fn load(x: &[f32; LANES]) -> Self {
                let x = x.as_ptr();
                // SAFETY: as in `splat`; the registers cover exactly the sixteen values.
                unsafe { $name(std::array::from_fn(|i| $load(x.add(i * (LANES / $n))))) }
            }
            #[inline(always)]
            fn store(self, to: &mut [f32; LANES]) {
                let to = to.as_mut_ptr();
                for (i, x) in self.0.into_iter().enumerate() {
                    // SAFETY: as in `load`.
                    unsafe { $store(to.add(i * (LANES / $n)), x) };
                }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: as in `splat`.
                unsafe { $name(std::array::from_fn(|i| $add(self.0[i], other.0[i]))) }
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                // SAFETY: as in `splat`.
                unsafe { $name(std::array::from_fn(|i| $sub(self.0[i], other.0[i]))) }
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                // SAFETY: as in `splat`.
                unsafe { $name(std::array::from_fn(|i| $mul(self.0[i], other.0[i]))) }
            }
            #[inline(always)]
            fn fma(self, factor: Self, term: Self) -> Self {
                $name(std::array::from_fn(|i| {
                    let ($a, $b, $c) = (self.0[i], factor.0[i], term.0[i]);
                    // SAFETY: as in `splat`.
                    unsafe { $fma }
                }))
            }
            #[inline(always)]
            fn swap<const STRIDE: usize>(self) -> Self {
                let mut out = self;
                for (i, out) in out.0.iter_mut().enumerate() {
                    let $v = self.0[i ^ (STRIDE / (LANES / $n))];
                    // SAFETY: as in `splat`.
                    *out = unsafe {
                        match STRIDE {
                            $($stride => $swap,)+
                            _ => $v,
                        }
                    };
                }
                out
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
registers!(
    /// AVX2 and FMA.
    Avx2: [__m256; 2],
    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps,
    |a, b, c| _mm256_fmadd_ps(a, b, c),
    |v| 1: _mm256_permute_ps::<0xb1>(v), 2: _mm256_permute_ps::<0x4e>(v), 4: _mm256_permute2f128_ps::<1>(v, v)
);
#[cfg(target_arch = "x86_64")]
registers!(
    /// AVX-512 F.
    Avx512: [__m512; 1],
    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps,
    |a, b, c| _mm512_fmadd_ps(a, b, c),
    |v| 1: _mm512_permute_ps::<0xb1>(v), 2: _mm512_permute_ps::<0x4e>(v),
        4: _mm512_shuffle_f32x4::<0xb1>(v, v), 8: _mm512_shuffle_f32x4::<0x4e>(v, v)
);
#[cfg(target_arch = "aarch64")]
registers!(
    /// Neon, which every 64-bit Arm has.
    Neon: [float32x4_t; 4],
    vdupq_n_f32, vld1q_f32, vst1q_f32, vaddq_f32, vsubq_f32, vmulq_f32,
    |a, b, c| vfmaq_f32(c, a, b),
    |v| 1: vrev64q_f32(v), 2: vextq_f32::<2>(v, v)
);
