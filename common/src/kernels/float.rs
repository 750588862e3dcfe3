//! Float weights by float activations: F32, F16 and BF16.
//!
//! The order is fixed so that every instruction set gives the same bits: lane l of 32 takes k = l, l + 32, ... by fused
//! multiply-adds; then halves of the lanes are added until one is left. Written on arrays that the compiler turns into vectors.

use std::ops::Range;

use bytemuck::Pod;

use super::{Form, Group, Isa, Kernel, MatrixRef, Out};
use crate::formats::{Format, Layout};

const LANES: usize = 32;

/// A stored number, widened exactly by operations that vectorize.
trait Widen: Pod {
    fn widen(self) -> f32;
}

/// BF16.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct Bf16([u8; 2]);

impl Widen for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(self.0)) << 16)
    }
}

/// F16.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct F16([u8; 2]);

impl Widen for F16 {
    /// Moves the exponent by a multiplication, which makes subnormals right too; infinities and NaNs get theirs by hand.
    #[inline(always)]
    fn widen(self) -> f32 {
        let h = u32::from(u16::from_le_bytes(self.0));
        let scaled = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
        let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(scaled.to_bits() | special | (h & 0x8000) << 16)
    }
}

/// F32 at any address.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct F32([u8; 4]);

impl Widen for F32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_le_bytes(self.0)
    }
}

/// The lanes of a token after `w` and `x` are added. By value, so that they stay in registers.
#[inline(always)]
fn step<T: Widen>(mut acc: [f32; LANES], w: &[T; LANES], x: &[f32; LANES]) -> [f32; LANES] {
    for l in 0..LANES {
        acc[l] = w[l].widen().mul_add(x[l], acc[l]);
    }
    acc
}

/// The start of a full set of lanes, zeros after it.
#[inline(always)]
fn padded<T: Pod>(rest: &[T]) -> [T; LANES] {
    let mut lanes = [T::zeroed(); LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

/// A row with each of `N` tokens.
#[inline(always)]
fn dots<T: Widen, const N: usize>(w: &[T], x: [&[f32]; N]) -> [f32; N] {
    let mut acc = [[0f32; LANES]; N];
    let (w, w_rest) = w.as_chunks::<LANES>();
    let x = x.map(|x| x.as_chunks::<LANES>());
    let full = x.map(|(full, _)| &full[..w.len()]);
    for (i, w) in w.iter().enumerate() {
        for t in 0..N {
            acc[t] = step(acc[t], w, &full[t][i]);
        }
    }
    if !w_rest.is_empty() {
        let w = padded(w_rest);
        for t in 0..N {
            acc[t] = step(acc[t], &w, &padded(x[t].1));
        }
    }
    acc.map(|mut acc| {
        let mut half = LANES / 2;
        while half > 0 {
            for l in 0..half {
                acc[l] += acc[l + half];
            }
            half /= 2;
        }
        acc[0]
    })
}

#[inline(always)]
fn rows<T: Widen>(w: &MatrixRef, x: &[Group], rows: Range<usize>, out: Out) {
    let weights: &[T] = bytemuck::cast_slice(w.bytes);
    for row in rows {
        let w = &weights[row * w.cols..][..w.cols];
        for (g, group) in x.iter().enumerate() {
            let mut token = 0;
            let put = |t: usize, y: f32| {
                // SAFETY: the contract of `TilesFn`, which every caller passes on: row and token are inside `out`.
                unsafe { *out.at(g * super::TILE + t, row) = y };
            };
            while token + 4 <= group.tokens() {
                let x = [0, 1, 2, 3].map(|t| group.values(token + t));
                for (t, y) in dots(w, x).into_iter().enumerate() {
                    put(token + t, y);
                }
                token += 4;
            }
            for token in token..group.tokens() {
                put(token, dots(w, [group.values(token)])[0]);
            }
        }
    }
}

macro_rules! kernels {
    ($(#[$enable:meta])? $f32:ident, $f16:ident, $bf16:ident) => {
        $(#[$enable])?
        unsafe fn $f32(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
            rows::<F32>(w, x, tiles, out)
        }
        $(#[$enable])?
        unsafe fn $f16(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
            rows::<F16>(w, x, tiles, out)
        }
        $(#[$enable])?
        unsafe fn $bf16(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
            rows::<Bf16>(w, x, tiles, out)
        }
    };
}

kernels!(f32_scalar, f16_scalar, bf16_scalar);
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx2,fma")]
    f32_avx2,
    f16_avx2,
    bf16_avx2
);
#[cfg(target_arch = "x86_64")]
kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
    f32_avx512,
    f16_avx512,
    bf16_avx512
);

const fn kernel(format: Format, isa: Isa, usable: fn() -> bool, tiles: super::TilesFn) -> Kernel {
    Kernel {
        layout: Layout::Stock(format),
        isa,
        form: Form::F32,
        usable,
        tiles,
    }
}

/// Each instruction set that vectorizes floats differently.
pub static KERNELS: &[Kernel] = &[
    kernel(Format::F32, Isa::Scalar, super::always, f32_scalar),
    kernel(Format::F16, Isa::Scalar, super::always, f16_scalar),
    kernel(Format::Bf16, Isa::Scalar, super::always, bf16_scalar),
    #[cfg(target_arch = "x86_64")]
    kernel(Format::F32, Isa::Avx2, super::x86::avx2, f32_avx2),
    #[cfg(target_arch = "x86_64")]
    kernel(Format::F16, Isa::Avx2, super::x86::avx2, f16_avx2),
    #[cfg(target_arch = "x86_64")]
    kernel(Format::Bf16, Isa::Avx2, super::x86::avx2, bf16_avx2),
    #[cfg(target_arch = "x86_64")]
    kernel(Format::F32, Isa::Avx512Vnni, super::x86::avx512, f32_avx512),
    #[cfg(target_arch = "x86_64")]
    kernel(Format::F16, Isa::Avx512Vnni, super::x86::avx512, f16_avx512),
    #[cfg(target_arch = "x86_64")]
    kernel(
        Format::Bf16,
        Isa::Avx512Vnni,
        super::x86::avx512,
        bf16_avx512,
    ),
];
