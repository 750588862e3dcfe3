//! Five trits a byte, unpacked by division, multiplication, thresholds and tables; a byte at a time, as the compiler vectorizes
//! it, and written in vector instructions.

use std::hint::black_box;

use super::Isa;
use crate::formats::base3;

/// Bytes of a block.
pub const BLOCK: usize = 64;
/// The trits of a block: `[digit][byte]`, the most significant first.
pub type Trits = [[u8; BLOCK]; 5];
/// Unpacks each block into that of the same number; needs its instruction set.
pub(super) type Run = unsafe fn(&[[u8; BLOCK]], &mut [Trits]);

/// What the bytes hold.
#[derive(Clone, Copy)]
pub enum Stored {
    /// ceil(q * 256 / 243), as TQ1_0 stores them.
    Fraction,
    /// q itself.
    Number,
}

/// A way to unpack.
pub struct Variant {
    /// `divide`, `divide-by-3`, `multiply`, `thresholds` or `table`.
    pub method: &'static str,
    /// Its instruction set; `scalar` for what every CPU of the architecture has.
    pub isa: Isa,
    /// `byte` at a time, `compiler` or `intrinsics`.
    pub code: &'static str,
    /// What it unpacks.
    pub stored: Stored,
    run: Run,
}

impl Variant {
    /// Unpacks each block into that of the same number.
    #[inline]
    pub fn unpack(&self, bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
        // SAFETY: `variants` lists what this CPU can run.
        unsafe { (self.run)(bytes, out) }
    }
}

/// The functions of an instruction set that are of one code, by method.
pub(super) struct Methods {
    pub isa: Isa,
    pub code: &'static str,
    pub methods: &'static [(&'static str, Run)],
}

const BYTE: Methods = Methods {
    isa: Isa::Scalar,
    code: "byte",
    methods: &[
        ("divide", |b, out| divide(b, out)),
        ("divide-by-3", |b, out| each::<true>(b, out, by_3)),
        ("multiply", |b, out| each::<true>(b, out, multiply)),
        ("thresholds", |b, out| each::<true>(b, out, thresholds)),
        ("table", |b, out| {
            each::<true>(b, out, |b| TABLE[usize::from(b)])
        }),
    ],
};

/// What the compiler makes of the same loops where every CPU of the architecture may be asked for vectors: on Arm, NEON.
const COMPILED: Methods = Methods {
    isa: if cfg!(target_arch = "aarch64") {
        Isa::Neon
    } else {
        Isa::Scalar
    },
    code: "compiler",
    methods: &compiled::METHODS,
};

/// Every way that runs on this CPU.
pub fn variants() -> Vec<Variant> {
    let all = [BYTE, COMPILED].into_iter();
    #[cfg(target_arch = "x86_64")]
    let all = all.chain(super::x86::unpack::methods());
    #[cfg(target_arch = "aarch64")]
    let all = all.chain([super::arm::unpack::METHODS]);
    let here = all.filter(|m| m.isa.available());
    here.flat_map(|Methods { isa, code, methods }| {
        methods.iter().map(move |&(method, run)| Variant {
            method,
            isa,
            code,
            stored: if method.starts_with("divide") {
                Stored::Number
            } else {
                Stored::Fraction
            },
            run,
        })
    })
    .collect()
}

/// Digits of each byte, by one function; `ALONE` keeps the compiler from taking several bytes at once.
#[inline(always)]
pub(super) fn each<const ALONE: bool>(
    bytes: &[[u8; BLOCK]],
    out: &mut [Trits],
    digits: impl Fn(u8) -> [u8; 5],
) {
    for (bytes, out) in bytes.iter().zip(out) {
        for m in 0..BLOCK {
            let digits = digits(if ALONE { opaque(bytes[m]) } else { bytes[m] });
            for n in 0..5 {
                out[n][m] = digits[n];
            }
        }
    }
}

/// The same byte, of which the compiler knows nothing; it stays in its register.
#[inline(always)]
fn opaque(byte: u8) -> u8 {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut wide = usize::from(byte);
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) wide, options(pure, nomem, nostack, preserves_flags))
        };
        wide as u8
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    black_box(byte)
}

/// By the division instruction: the divisor is known at run time only.
fn divide(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
    let three = black_box(3u32);
    if three != 0 {
        each::<true>(bytes, out, |byte| {
            let mut q = u32::from(byte);
            let mut digits = [0; 5];
            for digit in digits.iter_mut().rev() {
                (*digit, q) = ((q % three) as u8, q / three);
            }
            digits
        });
    }
}

/// By a constant, which the compiler turns into a multiplication and a shift of its own.
#[inline(always)]
pub(super) fn by_3(mut q: u8) -> [u8; 5] {
    let mut digits = [0; 5];
    for digit in digits.iter_mut().rev() {
        (*digit, q) = (q % 3, q / 3);
    }
    digits
}

/// A byte is a fraction of 256: three times it has its first digit above the point, and the rest below.
#[inline(always)]
pub(super) fn multiply(mut byte: u8) -> [u8; 5] {
    std::array::from_fn(|_| {
        let digit = ((u16::from(byte) * 3) >> 8) as u8;
        byte = byte.wrapping_mul(3);
        digit
    })
}

/// The same digits without a multiplication: where the fraction reaches 1/3 and 2/3.
#[inline(always)]
pub(super) fn thresholds(mut byte: u8) -> [u8; 5] {
    std::array::from_fn(|_| {
        let digit = u8::from(byte >= 86) + u8::from(byte >= 171);
        byte = byte.wrapping_add(byte).wrapping_add(byte);
        digit
    })
}

/// The digits of every byte.
static TABLE: [[u8; 5]; 256] = {
    let mut table = [[0; 5]; 256];
    let mut i = 0;
    while i < 5 * 256 {
        table[i / 5][i % 5] = base3::digit((i / 5) as u8, i % 5);
        i += 1;
    }
    table
};

/// Of every byte its first four digits in slots of two bits; and its last digit.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) static SLOTS: [[u8; 256]; 2] = {
    let mut slots = [[0; 256]; 2];
    let mut b = 0;
    while b < 256 {
        let d = TABLE[b];
        slots[0][b] = d[0] | d[1] << 2 | d[2] << 4 | d[3] << 6;
        slots[1][b] = d[4];
        b += 1;
    }
    slots
};

/// The compiler's own vectors, with the features given.
macro_rules! vectorized {
    ($name:ident $(, $enable:literal)?) => {
        mod $name {
            use crate::kernels::unpack::{self, BLOCK, Run, Trits, each};

            $(#[target_feature(enable = $enable)])?
            unsafe fn divide(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, |b| unpack::by_3(b))
            }
            $(#[target_feature(enable = $enable)])?
            unsafe fn multiply(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, |b| unpack::multiply(b))
            }
            $(#[target_feature(enable = $enable)])?
            unsafe fn thresholds(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, |b| unpack::thresholds(b))
            }
            pub const METHODS: [(&str, Run); 3] =
                [("divide-by-3", divide), ("multiply", multiply), ("thresholds", thresholds)];
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use vectorized;
vectorized!(compiled);

/// Bytes in a register, and what the methods do to them.
///
/// # Safety
/// Every method needs the instruction set of its implementor, and pointers good for a whole vector. Methods are inlined into a
/// function that enables the set.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) unsafe trait Vector: Copy {
    /// Bytes of it.
    const WIDTH: usize;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    unsafe fn tripled(self) -> Self;
    unsafe fn multiply(self) -> Self;
    unsafe fn thresholds(self) -> Self;
}

/// All digits of all blocks, each from the top of its byte.
///
/// # Safety
/// This CPU has the instructions of `V`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
pub(super) unsafe fn blocks<V: Vector, const MULTIPLY: bool>(
    bytes: &[[u8; BLOCK]],
    out: &mut [Trits],
) {
    for (bytes, out) in bytes.iter().zip(out) {
        for at in (0..BLOCK).step_by(V::WIDTH) {
            // SAFETY: a width divides a block, so that loads and stores stay inside; the instructions are there, as the caller says.
            unsafe {
                let mut v = V::load(bytes.as_ptr().add(at));
                for digits in &mut *out {
                    let digit = if MULTIPLY {
                        v.multiply()
                    } else {
                        v.thresholds()
                    };
                    digit.store(digits.as_mut_ptr().add(at));
                    v = v.tripled();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_digits_of_every_byte() {
        let fractions: [[u8; BLOCK]; 4] =
            std::array::from_fn(|i| std::array::from_fn(|m| (i * BLOCK + m) as u8));
        // Of fractions every byte has digits; of numbers only those below 243.
        let numbers = fractions.map(|block| block.map(|byte| byte.min(242)));
        for variant in variants() {
            let mut out = [[[9; BLOCK]; 5]; 4];
            let bytes = match variant.stored {
                Stored::Fraction => fractions,
                Stored::Number => numbers,
            };
            variant.unpack(&bytes, &mut out);
            for (i, byte) in bytes.as_flattened().iter().enumerate() {
                let expected: [u8; 5] = match variant.stored {
                    Stored::Fraction => std::array::from_fn(|n| base3::digit(*byte, n)),
                    Stored::Number => std::array::from_fn(|n| byte / 3u8.pow(4 - n as u32) % 3),
                };
                let found: [u8; 5] = std::array::from_fn(|n| out[i / BLOCK][n][i % BLOCK]);
                assert_eq!(
                    found, expected,
                    "{} {} {}, byte {byte}",
                    variant.method, variant.code, variant.isa
                );
            }
        }
    }
}
