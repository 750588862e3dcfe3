//! Five trits a byte, unpacked by division, multiplication, thresholds and tables; a byte at a time, as the compiler vectorizes
//! it, and written in vector instructions.

use std::hint::black_box;

use common::formats::base3;
use common::kernels::Isa;

/// Bytes of a block.
pub const BLOCK: usize = 64;
/// The trits of a block: `[digit][byte]`, the most significant first.
pub type Trits = [[u8; BLOCK]; 5];
/// Unpacks each block into that of the same number; needs its instruction set.
type Run = unsafe fn(&[[u8; BLOCK]], &mut [Trits]);

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
    pub fn unpack(&self, bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
        // SAFETY: `variants` lists what this CPU can run.
        unsafe { (self.run)(bytes, out) }
    }
}

/// Every way that runs on this CPU.
pub fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    let mut add = |isa: Isa, code, methods: &[(&'static str, Run)]| {
        for &(method, run) in methods.iter().filter(|_| isa.available()) {
            let stored = if method.starts_with("divide") {
                Stored::Number
            } else {
                Stored::Fraction
            };
            all.push(Variant {
                method,
                isa,
                code,
                stored,
                run,
            });
        }
    };
    add(
        Isa::Scalar,
        "byte",
        &[
            ("divide", |b, out| divide(b, out)),
            ("divide-by-3", |b, out| each::<true>(b, out, by_3)),
            ("multiply", |b, out| each::<true>(b, out, multiply)),
            ("thresholds", |b, out| each::<true>(b, out, thresholds)),
            ("table", |b, out| {
                each::<true>(b, out, |b| TABLE[usize::from(b)])
            }),
        ],
    );
    // On Arm the compiler may use NEON without being asked.
    let plain = if cfg!(target_arch = "aarch64") {
        Isa::Neon
    } else {
        Isa::Scalar
    };
    add(plain, "compiler", &compiled::METHODS);
    #[cfg(target_arch = "x86_64")]
    {
        add(Isa::Avx2, "compiler", &x86::compiled_avx2::METHODS);
        add(Isa::Avx512Vnni, "compiler", &x86::compiled_avx512::METHODS);
        add(
            Isa::Avx2,
            "intrinsics",
            &[
                ("multiply", x86::multiply_avx2),
                ("thresholds", x86::thresholds_avx2),
            ],
        );
        let methods: &[_] = &[
            ("multiply", x86::multiply_avx512 as _),
            ("thresholds", x86::thresholds_avx512 as _),
            ("table", x86::table_avx512 as _),
        ];
        let with_table = if is_x86_feature_detected!("avx512vbmi") {
            3
        } else {
            2
        };
        add(Isa::Avx512Vnni, "intrinsics", &methods[..with_table]);
    }
    #[cfg(target_arch = "aarch64")]
    add(
        Isa::Neon,
        "intrinsics",
        &[
            ("multiply", arm::multiply),
            ("thresholds", arm::thresholds),
            ("table", arm::table),
        ],
    );
    all
}

/// Digits of each byte, by one function; `ALONE` keeps the compiler from taking several bytes at once.
#[inline(always)]
fn each<const ALONE: bool>(
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
fn by_3(mut q: u8) -> [u8; 5] {
    let mut digits = [0; 5];
    for digit in digits.iter_mut().rev() {
        (*digit, q) = (q % 3, q / 3);
    }
    digits
}

/// A byte is a fraction of 256: three times it has its first digit above the point, and the rest below.
#[inline(always)]
fn multiply(mut byte: u8) -> [u8; 5] {
    std::array::from_fn(|_| {
        let digit = ((u16::from(byte) * 3) >> 8) as u8;
        byte = byte.wrapping_mul(3);
        digit
    })
}

/// The same digits without a multiplication: where the fraction reaches 1/3 and 2/3.
#[inline(always)]
fn thresholds(mut byte: u8) -> [u8; 5] {
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
static SLOTS: [[u8; 256]; 2] = {
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
macro_rules! compiled {
    ($name:ident $(, $enable:meta)?) => {
        pub mod $name {
            use super::*;
            $(#[$enable])?
            unsafe fn divide(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, by_3)
            }
            $(#[$enable])?
            unsafe fn multiply(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, |b| super::multiply(b))
            }
            $(#[$enable])?
            unsafe fn thresholds(b: &[[u8; BLOCK]], out: &mut [Trits]) {
                each::<false>(b, out, |b| super::thresholds(b))
            }
            pub const METHODS: [(&str, Run); 3] =
                [("divide-by-3", divide), ("multiply", multiply), ("thresholds", thresholds)];
        }
    };
}
compiled!(compiled);

/// Bytes in a register, and what the methods do to them.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
trait Vector: Copy {
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
unsafe fn blocks<V: Vector, const MULTIPLY: bool>(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    compiled!(compiled_avx2, target_feature(enable = "avx2"));
    compiled!(
        compiled_avx512,
        target_feature(enable = "avx512f,avx512bw,avx512vl")
    );

    // SAFETY, for both: a caller has AVX2 and AVX-512 F and BW, and pointers to WIDTH bytes; unaligned loads and stores.
    impl Vector for __m256i {
        const WIDTH: usize = 32;
        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: above.
            unsafe { _mm256_loadu_si256(from.cast()) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: above.
            unsafe { _mm256_storeu_si256(to.cast(), self) }
        }
        #[inline(always)]
        unsafe fn tripled(self) -> Self {
            // SAFETY: above.
            unsafe { _mm256_add_epi8(_mm256_add_epi8(self, self), self) }
        }
        #[inline(always)]
        unsafe fn multiply(self) -> Self {
            // Even and odd bytes times 3, each in its pair's 16 bits: the digit stands in the upper byte.
            // SAFETY: above.
            unsafe {
                let even = _mm256_maddubs_epi16(self, _mm256_set1_epi16(0x0003));
                let odd = _mm256_maddubs_epi16(self, _mm256_set1_epi16(0x0300));
                let odd = _mm256_and_si256(odd, _mm256_set1_epi16(0x0300));
                _mm256_or_si256(_mm256_srli_epi16::<8>(even), odd)
            }
        }
        #[inline(always)]
        unsafe fn thresholds(self) -> Self {
            // Saturating subtraction leaves 0 below a threshold; there is no unsigned comparison.
            // SAFETY: above.
            unsafe {
                let one = _mm256_set1_epi8(1);
                let reaches = |least: u8| {
                    _mm256_min_epu8(
                        _mm256_subs_epu8(self, _mm256_set1_epi8((least - 1) as i8)),
                        one,
                    )
                };
                _mm256_add_epi8(reaches(86), reaches(171))
            }
        }
    }

    impl Vector for __m512i {
        const WIDTH: usize = 64;
        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: above.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: above.
            unsafe { _mm512_storeu_si512(to.cast(), self) }
        }
        #[inline(always)]
        unsafe fn tripled(self) -> Self {
            // SAFETY: above.
            unsafe { _mm512_add_epi8(_mm512_add_epi8(self, self), self) }
        }
        #[inline(always)]
        unsafe fn multiply(self) -> Self {
            // SAFETY: above.
            unsafe {
                let even = _mm512_maddubs_epi16(self, _mm512_set1_epi16(0x0003));
                let odd = _mm512_maddubs_epi16(self, _mm512_set1_epi16(0x0300));
                let odd = _mm512_and_si512(odd, _mm512_set1_epi16(0x0300));
                _mm512_or_si512(_mm512_srli_epi16::<8>(even), odd)
            }
        }
        #[inline(always)]
        unsafe fn thresholds(self) -> Self {
            // SAFETY: above.
            unsafe {
                let one = _mm512_set1_epi8(1);
                let low = _mm512_cmpge_epu8_mask(self, _mm512_set1_epi8(86));
                let high = _mm512_cmpge_epu8_mask(self, _mm512_set1_epi8(171u8 as i8));
                let digit = _mm512_maskz_mov_epi8(low, one);
                _mm512_mask_add_epi8(digit, high, digit, one)
            }
        }
    }

    macro_rules! instances {
        ($enable:literal, $($name:ident = $v:ty, $multiply:literal;)*) => {$(
            #[target_feature(enable = $enable)]
            pub unsafe fn $name(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
                // SAFETY: enabled here, and the caller has it.
                unsafe { blocks::<$v, $multiply>(bytes, out) }
            }
        )*};
    }
    instances!("avx2", multiply_avx2 = __m256i, true; thresholds_avx2 = __m256i, false;);
    instances!("avx512f,avx512bw", multiply_avx512 = __m512i, true; thresholds_avx512 = __m512i, false;);

    /// A table of 256 bytes in four registers: two lookups of seven bits, and the eighth chooses.
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn lookup(table: &[__m512i; 4], index: __m512i) -> __m512i {
        let low = _mm512_permutex2var_epi8(table[0], index, table[1]);
        let high = _mm512_permutex2var_epi8(table[2], index, table[3]);
        _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub unsafe fn table_avx512(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
        let load = |table: &[u8; 256], at: usize| {
            // SAFETY: the slice is 64 bytes.
            unsafe { _mm512_loadu_si512(table[at..at + 64].as_ptr().cast()) }
        };
        let [slots, last] = SLOTS
            .each_ref()
            .map(|t| [0, 64, 128, 192].map(|at| load(t, at)));
        let mask = _mm512_set1_epi8(3);
        for (bytes, out) in bytes.iter().zip(out) {
            // SAFETY: blocks and rows of trits are 64 bytes.
            unsafe {
                let v = _mm512_loadu_si512(bytes.as_ptr().cast());
                let mut four = lookup(&slots, v);
                for digits in &mut out[..4] {
                    _mm512_storeu_si512(digits.as_mut_ptr().cast(), _mm512_and_si512(four, mask));
                    four = _mm512_srli_epi16::<2>(four);
                }
                _mm512_storeu_si512(out[4].as_mut_ptr().cast(), lookup(&last, v));
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::*;

    // SAFETY: every aarch64 target here has NEON; a caller's pointers are to 16 bytes.
    impl Vector for uint8x16_t {
        const WIDTH: usize = 16;
        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: above.
            unsafe { vld1q_u8(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: above.
            unsafe { vst1q_u8(to, self) }
        }
        #[inline(always)]
        unsafe fn tripled(self) -> Self {
            // SAFETY: above.
            unsafe { vmulq_u8(self, vdupq_n_u8(3)) }
        }
        #[inline(always)]
        unsafe fn multiply(self) -> Self {
            // The two halves widened, times 3, and narrowed to their upper bytes.
            // SAFETY: above.
            unsafe {
                let low = vmull_u8(vget_low_u8(self), vdup_n_u8(3));
                vshrn_high_n_u16::<8>(vshrn_n_u16::<8>(low), vmull_high_u8(self, vdupq_n_u8(3)))
            }
        }
        #[inline(always)]
        unsafe fn thresholds(self) -> Self {
            // A comparison gives -1.
            // SAFETY: above.
            unsafe {
                let low = vcgeq_u8(self, vdupq_n_u8(86));
                let high = vcgeq_u8(self, vdupq_n_u8(171));
                vsubq_u8(vdupq_n_u8(0), vaddq_u8(low, high))
            }
        }
    }

    pub unsafe fn multiply(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
        // SAFETY: NEON is there.
        unsafe { blocks::<uint8x16_t, true>(bytes, out) }
    }

    pub unsafe fn thresholds(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
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

    pub unsafe fn table(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
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
