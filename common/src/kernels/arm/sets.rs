//! The three instruction sets, as ways to sum products of bytes.
//!
//! Sums follow `sdot`: each 32-bit lane of an accumulator takes the products of its own four bytes. Plain NEON, which has no such
//! instruction, keeps products in 16 bits and is brought to the same lanes at the end.

// Every function is one or a few instructions under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::run::{self, Step};

/// An instruction set.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and is inlined into a function that enables it; a closure, which
/// nothing forces inline, must not call the dot products.
#[allow(clippy::missing_safety_doc)] // one contract for all, above
pub unsafe trait Set {
    /// Accumulators of masked slots, codes as they stand in their bytes.
    type Slots: Copy;
    /// An accumulator of codes 0 to 3, good for 256 columns.
    type Sum: Copy;
    /// Unpacked codes as two vectors of a pair of rows by eight columns; else of four rows by four columns.
    const PAIRS: bool;
    /// Whether [`Set::slots_pair`] is there.
    const MATRIX: bool = false;
    /// Tokens that a register tile of eight rows holds at most.
    const TOKENS: usize;

    unsafe fn mask(v: uint8x16_t) -> [uint8x16_t; 4];
    unsafe fn slots() -> Self::Slots;
    /// Adds the dots of slot `S`.
    unsafe fn slots_dot<const S: usize>(
        acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots;
    /// As `slots_dot`, with the four activations in lane `S` of `y` for every lane.
    unsafe fn slots_lane<const S: usize>(
        acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots;
    /// Adds the products of slot `S` of two rows and eight activations of two tokens, to lanes
    /// (row 0, token 0), (0, 1), (1, 0), (1, 1).
    unsafe fn slots_pair<const S: usize>(
        _: Self::Slots,
        _: uint8x16_t,
        _: int8x16_t,
    ) -> Self::Slots {
        unreachable!("a set without matrix products")
    }
    /// To be called after at most four vectors of codes.
    unsafe fn slots_fold(acc: Self::Slots) -> Self::Slots {
        acc
    }
    unsafe fn slots_sum(acc: Self::Slots) -> int32x4_t;

    unsafe fn sum() -> Self::Sum;
    unsafe fn sum_dot(acc: Self::Sum, u: uint8x16_t, y: int8x16_t) -> Self::Sum;
    unsafe fn sum_lane<const L: i32>(acc: Self::Sum, u: uint8x16_t, y: int8x16_t) -> Self::Sum;
    unsafe fn sum_end(acc: Self::Sum) -> int32x4_t;

    /// A register tile: the sums of `4 * F` rows, a lane each, and `T` tokens over `8 * steps` columns, at most 256.
    ///
    /// `u[step][four][2]` are unpacked codes, `fours` fours a step; `y[step][token][8]` activations, `width` tokens a step.
    unsafe fn tile<const F: usize, const T: usize>(
        u: *const uint8x16_t,
        fours: usize,
        y: *const i8,
        width: usize,
        steps: usize,
    ) -> [[int32x4_t; T]; F];

    /// [`run::register_tile`] as a function of its own, which all layouts share.
    unsafe fn register_tile<const F: usize, const T: usize>(at: Step, t: usize);
}

/// One instruction on an accumulator and two vectors of bytes.
macro_rules! instruction {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) unsafe fn $name(mut acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
            // SAFETY: registers only; the caller's function enables the instruction.
            unsafe {
                asm!($text, acc = inout(vreg) acc, u = in(vreg) u, y = in(vreg) y, options(pure, nomem, nostack, preserves_flags));
            }
            acc
        }
    };
}

/// One instruction that takes four bytes of its second vector for every lane.
macro_rules! instruction_by_lane {
    ($(#[$doc:meta])* $name:ident, $text:literal) => {
        $(#[$doc])*
        #[inline(always)]
        unsafe fn $name<const L: i32>(mut acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
            // SAFETY: registers only; the caller's function enables the instruction.
            unsafe {
                asm!($text, acc = inout(vreg) acc, u = in(vreg) u, y = in(vreg) y, l = const L, options(pure, nomem, nostack, preserves_flags));
            }
            acc
        }
    };
}

// These intrinsics are not stable in Rust.
instruction!(sdot, "sdot {acc:v}.4s, {u:v}.16b, {y:v}.16b");
instruction_by_lane!(sdot_lane, "sdot {acc:v}.4s, {u:v}.16b, {y:v}.4b[{l}]");
instruction!(usdot, "usdot {acc:v}.4s, {u:v}.16b, {y:v}.16b");
instruction_by_lane!(usdot_lane, "usdot {acc:v}.4s, {u:v}.16b, {y:v}.4b[{l}]");
instruction!(smmla, "smmla {acc:v}.4s, {u:v}.16b, {y:v}.16b");
instruction!(usmmla, "usmmla {acc:v}.4s, {u:v}.16b, {y:v}.16b");

#[inline(always)]
unsafe fn zero() -> int32x4_t {
    vdupq_n_s32(0)
}

/// The activations of `T` tokens, two a vector; the missing half of the last is zero.
#[inline(always)]
unsafe fn two_tokens_each<const T: usize>(y: *const i8) -> [int8x16_t; 4] {
    let mut v = [vdupq_n_s8(0); 4];
    for p in 0..T / 2 {
        v[p] = vld1q_s8(y.add(16 * p));
    }
    if T % 2 == 1 {
        v[T / 2] = vcombine_s8(vld1_s8(y.add(8 * (T - 1))), vdup_n_s8(0));
    }
    v
}

/// The codes of one step: two vectors for each of `F` fours.
#[inline(always)]
unsafe fn codes_of_step<const F: usize>(u: *const uint8x16_t) -> [[uint8x16_t; 2]; F] {
    std::array::from_fn(|f| [*u.add(2 * f), *u.add(2 * f + 1)])
}

/// Armv8 without dot products.
///
/// Products stay in 16 bits: slots 0 and 2 as u, slots 1 and 3 as 4u, joined as 4u before they are widened. Four vectors of codes
/// make 4 * (2 * 12 + 2 * 12) * 127 = 24,384 a lane with code 3.
pub struct Neon;

/// Products of bytes 0 to 7 and 8 to 15.
type Halves = [int16x8_t; 2];

/// See [`Neon`].
#[derive(Clone, Copy)]
pub struct NeonSlots {
    ones: Halves,
    fours: Halves,
    sum: int32x4_t,
}

#[inline(always)]
unsafe fn zero_halves() -> Halves {
    [vdupq_n_s16(0); 2]
}

#[inline(always)]
unsafe fn multiply(acc: Halves, u: uint8x16_t, y: int8x16_t) -> Halves {
    let u = vreinterpretq_s8_u8(u);
    [
        vmlal_s8(acc[0], vget_low_s8(u), vget_low_s8(y)),
        vmlal_high_s8(acc[1], u, y),
    ]
}

/// Sums of four: the lanes of `sdot`.
#[inline(always)]
unsafe fn widen([low, high]: Halves) -> int32x4_t {
    vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
}

#[inline(always)]
unsafe fn lane<const L: i32>(y: int8x16_t) -> int8x16_t {
    vreinterpretq_s8_s32(vdupq_laneq_s32::<L>(vreinterpretq_s32_s8(y)))
}

// SAFETY: baseline instructions alone.
unsafe impl Set for Neon {
    type Slots = NeonSlots;
    type Sum = Halves;
    const PAIRS: bool = true;
    const TOKENS: usize = 4;

    #[target_feature(enable = "neon")]
    unsafe fn register_tile<const F: usize, const T: usize>(at: Step, t: usize) {
        run::register_tile::<Self, F, T>(at, t)
    }
    #[inline(always)]
    unsafe fn mask(v: uint8x16_t) -> [uint8x16_t; 4] {
        let high = vshrq_n_u8::<4>(v);
        let (ones, fours) = (vdupq_n_u8(0x03), vdupq_n_u8(0x0c));
        [
            vandq_u8(v, ones),
            vandq_u8(v, fours),
            vandq_u8(high, ones),
            vandq_u8(high, fours),
        ]
    }
    #[inline(always)]
    unsafe fn slots() -> NeonSlots {
        NeonSlots {
            ones: zero_halves(),
            fours: zero_halves(),
            sum: zero(),
        }
    }
    #[inline(always)]
    unsafe fn slots_dot<const S: usize>(acc: NeonSlots, u: uint8x16_t, y: int8x16_t) -> NeonSlots {
        if S % 2 == 0 {
            NeonSlots {
                ones: multiply(acc.ones, u, y),
                ..acc
            }
        } else {
            NeonSlots {
                fours: multiply(acc.fours, u, y),
                ..acc
            }
        }
    }
    #[inline(always)]
    unsafe fn slots_lane<const S: usize>(acc: NeonSlots, u: uint8x16_t, y: int8x16_t) -> NeonSlots {
        let y = match S {
            0 => lane::<0>(y),
            1 => lane::<1>(y),
            2 => lane::<2>(y),
            _ => lane::<3>(y),
        };
        Self::slots_dot::<S>(acc, u, y)
    }
    #[inline(always)]
    unsafe fn slots_fold(acc: NeonSlots) -> NeonSlots {
        let joined =
            std::array::from_fn(|h| vaddq_s16(acc.fours[h], vshlq_n_s16::<2>(acc.ones[h])));
        NeonSlots {
            sum: vaddq_s32(acc.sum, widen(joined)),
            ..Self::slots()
        }
    }
    #[inline(always)]
    unsafe fn slots_sum(acc: NeonSlots) -> int32x4_t {
        vshrq_n_s32::<2>(Self::slots_fold(acc).sum)
    }
    #[inline(always)]
    unsafe fn sum() -> Halves {
        zero_halves()
    }
    #[inline(always)]
    unsafe fn sum_dot(acc: Halves, u: uint8x16_t, y: int8x16_t) -> Halves {
        multiply(acc, u, y)
    }
    #[inline(always)]
    unsafe fn sum_lane<const L: i32>(acc: Halves, u: uint8x16_t, y: int8x16_t) -> Halves {
        multiply(acc, u, lane::<L>(y))
    }
    #[inline(always)]
    unsafe fn sum_end(acc: Halves) -> int32x4_t {
        widen(acc)
    }

    /// Eight 16-bit lanes a row and token; 128 columns of code 3 sum to 4 * 16 * 3 * 127 = 24,384 before they are widened.
    #[inline(always)]
    unsafe fn tile<const F: usize, const T: usize>(
        u: *const uint8x16_t,
        fours: usize,
        y: *const i8,
        width: usize,
        steps: usize,
    ) -> [[int32x4_t; T]; F] {
        let mut sums = [[zero(); T]; F];
        for (f, sums) in sums.iter_mut().enumerate() {
            for run in (0..steps).step_by(16) {
                let mut acc = [[vdupq_n_s16(0); 4]; T];
                for step in run..steps.min(run + 16) {
                    let u = u.add(2 * (step * fours + f)).cast::<i8>();
                    let rows: [int8x8_t; 4] = std::array::from_fn(|r| vld1_s8(u.add(8 * r)));
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let y = vld1_s8(y.add(8 * (step * width + t)));
                        for r in 0..4 {
                            acc[r] = vmlal_s8(acc[r], rows[r], y);
                        }
                    }
                }
                for (sum, [a, b, c, d]) in sums.iter_mut().zip(acc) {
                    let rows = vpaddq_s16(vpaddq_s16(a, b), vpaddq_s16(c, d));
                    *sum = vpadalq_s16(*sum, rows);
                }
            }
        }
        sums
    }
}

/// `sdot`: FEAT_DotProd. The multiply is signed, so slot 3 is shifted down and joins slot 0.
pub struct Dotprod;

/// FEAT_I8MM: `usdot` and `usmmla` take unsigned codes, so slot 3 stays; `smmla` multiplies two rows by two tokens.
pub struct I8mm;

// SAFETY: `sdot` and baseline instructions.
unsafe impl Set for Dotprod {
    /// Slots 0 and 3 as u, slot 1 as 4u, slot 2 as 16u.
    type Slots = [int32x4_t; 3];
    type Sum = int32x4_t;
    const PAIRS: bool = false;
    const TOKENS: usize = 8;

    #[target_feature(enable = "neon,dotprod")]
    unsafe fn register_tile<const F: usize, const T: usize>(at: Step, t: usize) {
        run::register_tile::<Self, F, T>(at, t)
    }
    #[inline(always)]
    unsafe fn mask(v: uint8x16_t) -> [uint8x16_t; 4] {
        [
            vandq_u8(v, vdupq_n_u8(0x03)),
            vandq_u8(v, vdupq_n_u8(0x0c)),
            vandq_u8(v, vdupq_n_u8(0x30)),
            vshrq_n_u8::<6>(v),
        ]
    }
    #[inline(always)]
    unsafe fn slots() -> Self::Slots {
        [zero(); 3]
    }
    #[inline(always)]
    unsafe fn slots_dot<const S: usize>(
        mut acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots {
        acc[S % 3] = sdot(acc[S % 3], u, y);
        acc
    }
    #[inline(always)]
    unsafe fn slots_lane<const S: usize>(
        mut acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots {
        acc[S % 3] = match S {
            0 => sdot_lane::<0>(acc[0], u, y),
            1 => sdot_lane::<1>(acc[1], u, y),
            2 => sdot_lane::<2>(acc[2], u, y),
            _ => sdot_lane::<3>(acc[0], u, y),
        };
        acc
    }
    #[inline(always)]
    unsafe fn slots_sum([a0, a1, a2]: Self::Slots) -> int32x4_t {
        let high = vaddq_s32(a1, vshlq_n_s32::<2>(a0));
        vshrq_n_s32::<4>(vaddq_s32(a2, vshlq_n_s32::<2>(high)))
    }
    #[inline(always)]
    unsafe fn sum() -> int32x4_t {
        zero()
    }
    #[inline(always)]
    unsafe fn sum_dot(acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
        sdot(acc, u, y)
    }
    #[inline(always)]
    unsafe fn sum_lane<const L: i32>(acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
        sdot_lane::<L>(acc, u, y)
    }
    #[inline(always)]
    unsafe fn sum_end(acc: int32x4_t) -> int32x4_t {
        acc
    }

    #[inline(always)]
    unsafe fn tile<const F: usize, const T: usize>(
        u: *const uint8x16_t,
        fours: usize,
        y: *const i8,
        width: usize,
        steps: usize,
    ) -> [[int32x4_t; T]; F] {
        let mut acc = [[zero(); T]; F];
        for step in 0..steps {
            let y = two_tokens_each::<T>(y.add(8 * step * width));
            let u = codes_of_step::<F>(u.add(2 * step * fours));
            for (acc, [first, second]) in acc.iter_mut().zip(u) {
                for (acc, y) in acc.chunks_mut(2).zip(y) {
                    acc[0] = sdot_lane::<0>(acc[0], first, y);
                    if let Some(acc) = acc.get_mut(1) {
                        *acc = sdot_lane::<2>(*acc, first, y);
                    }
                }
                for (acc, y) in acc.chunks_mut(2).zip(y) {
                    acc[0] = sdot_lane::<1>(acc[0], second, y);
                    if let Some(acc) = acc.get_mut(1) {
                        *acc = sdot_lane::<3>(*acc, second, y);
                    }
                }
            }
        }
        acc
    }
}

// SAFETY: `usdot`, `usmmla`, `smmla`, `sdot` (which every core with the former has) and baseline instructions.
unsafe impl Set for I8mm {
    type Slots = [int32x4_t; 4];
    type Sum = int32x4_t;
    const PAIRS: bool = true;
    const MATRIX: bool = true;
    const TOKENS: usize = 8;

    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn register_tile<const F: usize, const T: usize>(at: Step, t: usize) {
        run::register_tile::<Self, F, T>(at, t)
    }
    #[inline(always)]
    unsafe fn mask(v: uint8x16_t) -> [uint8x16_t; 4] {
        [0x03, 0x0c, 0x30, 0xc0].map(|m| vandq_u8(v, vdupq_n_u8(m)))
    }
    #[inline(always)]
    unsafe fn slots() -> Self::Slots {
        [zero(); 4]
    }
    #[inline(always)]
    unsafe fn slots_dot<const S: usize>(
        mut acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots {
        acc[S] = usdot(acc[S], u, y);
        acc
    }
    #[inline(always)]
    unsafe fn slots_lane<const S: usize>(
        mut acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots {
        acc[S] = match S {
            0 => usdot_lane::<0>(acc[S], u, y),
            1 => usdot_lane::<1>(acc[S], u, y),
            2 => usdot_lane::<2>(acc[S], u, y),
            _ => usdot_lane::<3>(acc[S], u, y),
        };
        acc
    }
    #[inline(always)]
    unsafe fn slots_pair<const S: usize>(
        mut acc: Self::Slots,
        u: uint8x16_t,
        y: int8x16_t,
    ) -> Self::Slots {
        acc[S] = usmmla(acc[S], u, y);
        acc
    }
    #[inline(always)]
    unsafe fn slots_sum([a0, a1, a2, a3]: Self::Slots) -> int32x4_t {
        let sum = vaddq_s32(a1, vshlq_n_s32::<2>(a0));
        let sum = vaddq_s32(a2, vshlq_n_s32::<2>(sum));
        vshrq_n_s32::<6>(vaddq_s32(a3, vshlq_n_s32::<2>(sum)))
    }
    #[inline(always)]
    unsafe fn sum() -> int32x4_t {
        zero()
    }
    #[inline(always)]
    unsafe fn sum_dot(acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
        sdot(acc, u, y)
    }
    #[inline(always)]
    unsafe fn sum_lane<const L: i32>(acc: int32x4_t, u: uint8x16_t, y: int8x16_t) -> int32x4_t {
        sdot_lane::<L>(acc, u, y)
    }
    #[inline(always)]
    unsafe fn sum_end(acc: int32x4_t) -> int32x4_t {
        acc
    }

    #[inline(always)]
    unsafe fn tile<const F: usize, const T: usize>(
        u: *const uint8x16_t,
        fours: usize,
        y: *const i8,
        width: usize,
        steps: usize,
    ) -> [[int32x4_t; T]; F] {
        let pairs = T.div_ceil(2);
        let mut acc = [[[zero(); 2]; 4]; F];
        for step in 0..steps {
            let y = two_tokens_each::<T>(y.add(8 * step * width));
            let u = codes_of_step::<F>(u.add(2 * step * fours));
            for (acc, u) in acc.iter_mut().zip(u) {
                for (acc, y) in acc[..pairs].iter_mut().zip(y) {
                    *acc = [smmla(acc[0], u[0], y), smmla(acc[1], u[1], y)];
                }
            }
        }
        acc.map(|acc| std::array::from_fn(|t| token_of(acc[t / 2], t)))
    }
}

/// Four rows of the first or second (odd `t`) token, from two matrix products of two rows by two tokens.
#[inline(always)]
pub unsafe fn token_of([low, high]: [int32x4_t; 2], t: usize) -> int32x4_t {
    if t.is_multiple_of(2) {
        vuzp1q_s32(low, high)
    } else {
        vuzp2q_s32(low, high)
    }
}
