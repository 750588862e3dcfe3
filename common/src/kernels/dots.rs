//! F32 dot products in one accumulator or four, fused or not, the tail by a loop or by a mask: what a kernel can choose from, each
//! choice with bits of its own. What the runtime multiplies by is in `float`.

use super::Isa;

/// A dot product of two vectors of one length.
pub struct Dot {
    /// Its instruction set.
    pub isa: Isa,
    /// Vector accumulators: 1 or 4.
    pub accumulators: usize,
    /// `fma` or `mul-add`.
    pub multiply: &'static str,
    /// What is left of the last vector: `loop` or `mask`.
    pub tail: &'static str,
    pub(super) run: unsafe fn(&[f32], &[f32]) -> f32,
}

impl Dot {
    /// The product.
    ///
    /// # Panics
    /// Lengths that differ.
    #[inline]
    pub fn dot(&self, w: &[f32], x: &[f32]) -> f32 {
        assert_eq!(w.len(), x.len(), "a dot product of two lengths");
        // SAFETY: `all` lists what this CPU can run; the lengths are one.
        unsafe { (self.run)(w, x) }
    }
}

/// One product after the other, as a compiler must leave it: float addition is not associative.
pub fn scalar(w: &[f32], x: &[f32]) -> f32 {
    w.iter().zip(x).fold(0.0, |sum, (w, x)| sum + w * x)
}

/// Every way that runs on this CPU.
pub fn all() -> Vec<Dot> {
    let mut all = vec![Dot {
        isa: Isa::Scalar,
        accumulators: 1,
        multiply: "mul-add",
        tail: "loop",
        run: |w, x| scalar(w, x),
    }];
    #[cfg(target_arch = "x86_64")]
    {
        all.extend(super::x86::dots::avx2());
        all.extend(super::x86::dots::avx512());
    }
    #[cfg(target_arch = "aarch64")]
    all.extend(super::arm::dots::neon());
    all.retain(|dot| dot.isa.available());
    all
}

/// Floats in a register.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and pointers good for a whole vector (`n` floats for `load_first`).
/// Methods are inlined into a function that enables the set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) unsafe trait Lanes: Copy {
    /// Floats of it.
    const WIDTH: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `n` from memory, zeros in the others; nothing past them is read.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    unsafe fn fma(self, x: Self, sum: Self) -> Self;
    unsafe fn mul(self, x: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn to_array(self) -> [f32; 16];
}

/// # Safety
/// This CPU has the instructions of `V`; `w` and `x` have one length.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) unsafe fn dot<V: Lanes, const N: usize, const FMA: bool, const MASK: bool>(
    w: &[f32],
    x: &[f32],
) -> f32 {
    let (len, w, x) = (w.len(), w.as_ptr(), x.as_ptr());
    // SAFETY: the instructions are there; every load is inside the vectors, as the conditions of the loops say.
    unsafe {
        let step = |w: V, x: V, sum: V| {
            if FMA {
                w.fma(x, sum)
            } else {
                w.mul(x).add(sum)
            }
        };
        let mut sums = [V::zero(); N];
        let mut k = 0;
        while k + N * V::WIDTH <= len {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = k + i * V::WIDTH;
                *sum = step(V::load(w.add(at)), V::load(x.add(at)), *sum);
            }
            k += N * V::WIDTH;
        }
        while k + V::WIDTH <= len {
            sums[0] = step(V::load(w.add(k)), V::load(x.add(k)), sums[0]);
            k += V::WIDTH;
        }
        let mut rest = 0.0;
        if MASK && k < len {
            let n = len - k;
            sums[0] = step(
                V::load_first(w.add(k), n),
                V::load_first(x.add(k), n),
                sums[0],
            );
        } else {
            for k in k..len {
                let (w, x) = (*w.add(k), *x.add(k));
                rest = if FMA {
                    w.mul_add(x, rest)
                } else {
                    w * x + rest
                };
            }
        }
        let mut sum = sums[0];
        for other in &sums[1..] {
            sum = sum.add(*other);
        }
        sum.to_array()[..V::WIDTH].iter().fold(rest, |a, b| a + b)
    }
}

/// Every way of one instruction set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! ways {
    ($all:ident, $isa:expr, $v:ty, $enable:literal) => {
        pub fn $all() -> Vec<Dot> {
            let mut all = Vec::new();
            ways!(@one all, $isa, $v, $enable, 1, true, true);
            ways!(@one all, $isa, $v, $enable, 1, true, false);
            ways!(@one all, $isa, $v, $enable, 1, false, true);
            ways!(@one all, $isa, $v, $enable, 1, false, false);
            ways!(@one all, $isa, $v, $enable, 4, true, true);
            ways!(@one all, $isa, $v, $enable, 4, true, false);
            ways!(@one all, $isa, $v, $enable, 4, false, true);
            ways!(@one all, $isa, $v, $enable, 4, false, false);
            all
        }
    };
    (@one $list:ident, $isa:expr, $v:ty, $enable:literal, $n:literal, $fma:literal, $mask:literal) => {{
        #[target_feature(enable = $enable)]
        unsafe fn run(w: &[f32], x: &[f32]) -> f32 {
            // SAFETY: the caller's contract; the instructions are enabled here.
            unsafe { dot::<$v, $n, $fma, $mask>(w, x) }
        }
        $list.push(Dot {
            isa: $isa,
            accumulators: $n,
            multiply: if $fma { "fma" } else { "mul-add" },
            tail: if $mask { "mask" } else { "loop" },
            run,
        });
    }};
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use ways;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_dot_product_of_whole_numbers_at_any_length() {
        for len in [0, 1, 3, 4, 15, 16, 17, 64, 65, 100] {
            // Small whole numbers: exact in any order; what lies behind the end would show.
            let w: Vec<f32> = (0..len + 16).map(|k| (k % 7) as f32 - 3.0).collect();
            let x: Vec<f32> = (0..len + 16).map(|k| (k % 5) as f32 + 1.0).collect();
            let (w, x) = (&w[..len], &x[..len]);
            for way in all() {
                assert_eq!(
                    way.dot(w, x),
                    scalar(w, x),
                    "{len}: {} {} {} {}",
                    way.isa,
                    way.accumulators,
                    way.multiply,
                    way.tail
                );
            }
        }
    }
}
