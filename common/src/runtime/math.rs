//! Float arithmetic that gives the same bits on every machine.
//!
//! Rust never contracts or reorders float operations, and `+ - * / sqrt` and fused multiply-add are exactly rounded
//! everywhere; so it is enough to fix the order of sums and to bring our own polynomials for exp and the like. Each function
//! is written once, in loops that the compiler turns into vectors, and instantiated for each [`Simd`] level.

use std::fmt;

use super::lanes::{LANES, Lanes};

/// Vector instructions that the float loops are compiled for. All levels give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simd(Level);

/// A level above [`Level::Portable`] is made only on a CPU that has it: the wrapper keeps it private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Simd {
    /// Every level this CPU has, slowest first.
    pub fn available() -> Vec<Simd> {
        #[allow(unused_mut)] // some machines have only this
        let mut levels = vec![Simd(Level::Portable)];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            levels.push(Simd(Level::Avx2));
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
            {
                levels.push(Simd(Level::Avx512));
            }
        }
        #[cfg(target_arch = "aarch64")]
        levels.push(Simd(Level::Neon));
        levels
    }

    /// The fastest level of this CPU.
    pub fn best() -> Simd {
        *Self::available().last().expect("the portable level")
    }

    pub(super) fn level(self) -> Level {
        self.0
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
        })
    }
}

/// Defines a function once a [`Simd`] level, generic over the vectors of the level ([`Lanes`]). What it calls must be
/// `#[inline(always)]` to be compiled for the level too.
macro_rules! vectorized {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<$v:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)] // one more than the function as written: the level
        $vis fn $name(simd: $crate::runtime::math::Simd, $($arg: $ty),*) $(-> $ret)? {
            use $crate::runtime::{lanes, math::Level};
            #[inline(always)]
            fn body<$v: lanes::Lanes>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body::<lanes::Avx2>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512vl,avx512dq,avx512bw")]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body::<lanes::Avx512>($($arg),*) }
            match simd.level() {
                Level::Portable => body::<lanes::Portable>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the level exists only where the CPU has it.
                Level::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                Level::Neon => body::<lanes::Neon>($($arg),*),
            }
        }
    )*};
}
pub(super) use vectorized;

/// Lane l of 64 takes x\[l\]^2, x\[l + 64\]^2, ...; then the lanes are added by halves.
#[inline(always)]
fn sum_of_squares<V: Lanes>(x: &[f32]) -> f32 {
    let mut acc = [V::splat(0.0); 4];
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (fours, few) = chunks.as_chunks::<4>();
    for four in fours {
        for (acc, x) in acc.iter_mut().zip(four) {
            let x = V::load(x);
            *acc = x.fma(x, *acc);
        }
    }
    for (acc, x) in acc.iter_mut().zip(few) {
        let x = V::load(x);
        *acc = x.fma(x, *acc);
    }
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let x = V::load(&last);
        acc[few.len()] = x.fma(x, acc[few.len()]);
    }
    (acc[0].add(acc[2])).add(acc[1].add(acc[3])).sum()
}

/// e^x within 2 ulp: x = n ln 2 + r, the Taylor series of e^r to r^7 (its error on |r| <= ln 2 / 2 is 5e-9), and 2^n in two
/// factors, so that results overflow to infinity and underflow through subnormals. NaN stays NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    // ln 2 in two parts; the first has 15 bits, so that n times it is exact.
    let r = n.mul_add(-0.693_145_75, x);
    let r = n.mul_add(-1.428_606_8e-6, r);
    let mut p = 1.0 / 5040.0;
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = r.mul_add(p, c);
    }
    let n = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n.wrapping_add(127) as u32) & 0xff) << 23);
    p * power(half) * power(n.wrapping_sub(half))
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x * sigmoid(x).
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + y), y = e^-|x|; ln(1 + y) = 2 atanh(s), s = y / (2 + y) <= 1/3, by its series to s^17
/// (relative error 2e-10).
#[inline(always)]
pub(super) fn softplus(x: f32) -> f32 {
    let y = exp(-x.abs());
    let s = y / (2.0 + y);
    let s2 = s * s;
    let mut p = 1.0 / 17.0;
    for c in [
        1.0 / 15.0,
        1.0 / 13.0,
        1.0 / 11.0,
        1.0 / 9.0,
        1.0 / 7.0,
        1.0 / 5.0,
        1.0 / 3.0,
        1.0,
    ] {
        p = s2.mul_add(p, c);
    }
    let positive = if x > 0.0 { x } else { 0.0 };
    (2.0 * s).mul_add(p, positive)
}

/// x / sqrt(mean(x^2) + eps) * w, in place. `x` and `w` have one length.
#[inline(always)]
pub(super) fn rms_norm_in_place<V: Lanes>(x: &mut [f32], w: &[f32], eps: f32) {
    let scale = 1.0 / (sum_of_squares::<V>(x) / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(w) {
        *x = *x * scale * w;
    }
}

/// x / sqrt(sum x^2 + eps), in place.
#[inline(always)]
pub(super) fn l2_norm_in_place<V: Lanes>(x: &mut [f32], eps: f32) {
    let scale = 1.0 / (sum_of_squares::<V>(x) + eps).sqrt();
    for x in x {
        *x *= scale;
    }
}

vectorized! {
    /// `out = x / sqrt(mean(x^2) + eps) * w`; the three have one length.
    pub fn rms_norm<V>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        out.copy_from_slice(x);
        rms_norm_in_place::<V>(out, w, eps);
    }

    /// `gate = SiLU(gate) * up`, element by element.
    pub fn swiglu<V>(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = silu(*g) * u;
        }
    }

    /// `x += y`, element by element.
    pub fn add<V>(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }

    /// e^x of each element.
    pub fn exp_each<V>(x: &mut [f32]) {
        for x in x {
            *x = exp(*x);
        }
    }

    /// 1 / (1 + e^-x) of each element.
    pub fn sigmoid_each<V>(x: &mut [f32]) {
        for x in x {
            *x = sigmoid(*x);
        }
    }

    /// ln(1 + e^x) of each element.
    pub fn softplus_each<V>(x: &mut [f32]) {
        for x in x {
            *x = softplus(*x);
        }
    }

    /// The sum of e^(x - max), accumulated in double in 8 lanes.
    pub fn sum_exp<V>(x: &[f32], max: f32) -> f64 {
        let mut acc = [0f64; 8];
        let (chunks, rest) = x.as_chunks::<8>();
        for chunk in chunks {
            for l in 0..8 {
                acc[l] += f64::from(exp(chunk[l] - max));
            }
        }
        for (acc, x) in acc.iter_mut().zip(rest) {
            *acc += f64::from(exp(x - max));
        }
        ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]))
    }
}

/// ln x for a positive normal number: x = m 2^e with m in [0.7, 1.41), and the series of 2 atanh((m - 1) / (m + 1)).
pub fn ln_f64(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut e = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m /= 2.0;
        e += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    // s^2 is below 0.03: 14 terms reach the last bit.
    let series = (0..14)
        .rev()
        .fold(0.0, |p, i| p * s * s + 1.0 / f64::from(2 * i + 1));
    2.0 * s * series + e as f64 * std::f64::consts::LN_2
}

/// e^x for |x| below 700.
pub fn exp_f64(x: f64) -> f64 {
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = x - n * std::f64::consts::LN_2;
    let series = (1..=18).rev().fold(1.0, |p, i| 1.0 + p * r / f64::from(i));
    series * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// (sin x, cos x) for |x| up to 1e8 within 1e-8: quarter turns are taken off with pi/2 in two parts.
pub fn sin_cos_f64(x: f64) -> (f64, f64) {
    /// pi/2 to 33 bits, and the rest: products with up to 20 bits are exact.
    const HIGH: f64 = f64::from_bits(0x3ff9_21fb_5440_0000);
    const LOW: f64 = 6.077_100_506_506_192e-11;
    let n = (x * std::f64::consts::FRAC_2_PI).round();
    let r = (x - n * HIGH) - n * LOW;
    let r2 = r * r;
    let tail = |first: i32| {
        (0..9).rev().fold(1.0, |p, i| {
            let d = f64::from((2 * i + 1 + first) * (2 * i + 2 + first));
            1.0 - p * r2 / d
        })
    };
    let (sin, cos) = (r * tail(1), tail(0));
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::lanes::Portable;

    fn samples() -> Vec<f32> {
        let steps = (-4000..=4000).map(|i| i as f32 * 0.026);
        steps
            .chain([
                0.0,
                -0.0,
                1e-30,
                -1e-30,
                88.7,
                89.5,
                1e9,
                -1e9,
                f32::INFINITY,
                f32::NEG_INFINITY,
            ])
            .collect()
    }

    /// (ours, wanted) agree to `ulps` units in the last place, or both are below the smallest normal number.
    fn close(ours: f32, wanted: f64, ulps: f64) -> bool {
        let rounded = wanted as f32;
        ours == rounded
            || (f64::from(ours) - wanted).abs()
                <= ulps * f64::from(rounded.abs()) * f64::from(f32::EPSILON)
            || wanted.abs() < f64::from(f32::MIN_POSITIVE)
                && f64::from(ours).abs() < 1.2 * f64::from(f32::MIN_POSITIVE)
    }

    #[test]
    fn exp_and_friends_are_accurate() {
        for x in samples() {
            let d = f64::from(x);
            assert!(
                close(exp(x), d.exp(), 2.0),
                "exp {x}: {} {}",
                exp(x),
                d.exp()
            );
            let wanted = 1.0 / (1.0 + (-d).exp());
            assert!(
                close(sigmoid(x), wanted, 3.0),
                "sigmoid {x}: {} {wanted}",
                sigmoid(x)
            );
            let wanted = if d > 30.0 { d } else { d.exp().ln_1p() };
            assert!(
                close(softplus(x), wanted, 4.0),
                "softplus {x}: {} {wanted}",
                softplus(x)
            );
        }
        assert!(
            exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && softplus(f32::NAN).is_nan()
        );
    }

    #[test]
    fn doubles_are_accurate() {
        for i in 1..2000 {
            let x = f64::from(i) * 0.37;
            assert!(
                (ln_f64(x) - x.ln()).abs() < 1e-15 * (1.0 + x.ln().abs()),
                "ln {x}"
            );
            let y = x * 0.4 - 100.0;
            assert!((exp_f64(y) / y.exp() - 1.0).abs() < 1e-13, "exp {y}");
            let z = x * 131.0;
            let (sin, cos) = sin_cos_f64(z);
            assert!(
                (sin - z.sin()).abs() < 1e-11 && (cos - z.cos()).abs() < 1e-11,
                "sin cos {z}"
            );
        }
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003)
            .map(|i| ((i * 7919) % 1000) as f32 * 0.013 - 6.5)
            .collect();
        let w: Vec<f32> = (0..1003).map(|i| 0.5 + (i % 17) as f32 * 0.1).collect();
        let run = |simd: Simd| {
            let mut out = vec![0.0; x.len()];
            rms_norm(simd, &x, &w, 1e-6, &mut out);
            let mut all = out.clone();
            swiglu(simd, &mut out, &x);
            all.extend(&out);
            for f in [exp_each, sigmoid_each, softplus_each] {
                let mut y = x.clone();
                f(simd, &mut y);
                all.extend(y);
            }
            add(simd, &mut out, &w);
            all.extend(out);
            let mut bits: Vec<u64> = all.iter().map(|v| u64::from(v.to_bits())).collect();
            bits.push(sum_exp(simd, &x, 6.5).to_bits());
            bits
        };
        let levels = Simd::available();
        let wanted = run(levels[0]);
        for &simd in &levels[1..] {
            assert!(run(simd) == wanted, "{simd}");
        }
    }

    #[test]
    fn norms_follow_their_formulas() {
        let x = [3.0, -4.0, 0.0, 0.0];
        let mut y = x;
        rms_norm_in_place::<Portable>(&mut y, &[1.0, 2.0, 1.0, 1.0], 0.0);
        assert_eq!(y, [1.2, -3.2, 0.0, 0.0]);
        let mut y = x;
        l2_norm_in_place::<Portable>(&mut y, 0.0);
        assert_eq!(y, [0.6, -0.8, 0.0, 0.0]);
    }
}
