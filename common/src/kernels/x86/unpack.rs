//! Five trits a byte in AVX2 and AVX-512: see `kernels/unpack.rs`.

// Every method is an instruction or a few under the one contract of the trait.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::avx512_vbmi;
use crate::kernels::Isa;
use crate::kernels::unpack::{BLOCK, Methods, Run, SLOTS, Trits, Vector, blocks, vectorized};

vectorized!(compiled_avx2, "avx2");
vectorized!(compiled_avx512, "avx512f,avx512bw,avx512vl");

static AVX2: [(&str, Run); 2] = [("multiply", multiply_avx2), ("thresholds", thresholds_avx2)];

/// The table last: it needs VBMI.
static AVX512: [(&str, Run); 3] = [
    ("multiply", multiply_avx512),
    ("thresholds", thresholds_avx512),
    ("table", table_avx512),
];

/// The ways of both sets.
pub fn methods() -> [Methods; 4] {
    let set = |isa, code, methods| Methods { isa, code, methods };
    let avx512 = if avx512_vbmi() {
        &AVX512[..]
    } else {
        &AVX512[..2]
    };
    [
        set(Isa::Avx2, "compiler", &compiled_avx2::METHODS[..]),
        set(Isa::Avx512Vnni, "compiler", &compiled_avx512::METHODS),
        set(Isa::Avx2, "intrinsics", &AVX2),
        set(Isa::Avx512Vnni, "intrinsics", avx512),
    ]
}

/// The methods that differ in nothing but the names of their intrinsics.
macro_rules! plain {
    ($width:literal, $load:ident, $store:ident, $add:ident, $splat16:ident, $dot:ident, $and:ident, $or:ident, $shr16:ident) => {
        const WIDTH: usize = $width;
        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            $load(from.cast())
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            $store(to.cast(), self)
        }
        #[inline(always)]
        unsafe fn tripled(self) -> Self {
            $add($add(self, self), self)
        }
        /// Even and odd bytes times 3, each in its pair's 16 bits: the digit stands in the upper byte.
        #[inline(always)]
        unsafe fn multiply(self) -> Self {
            let even = $dot(self, $splat16(0x0003));
            let odd = $dot(self, $splat16(0x0300));
            $or($shr16::<8>(even), $and(odd, $splat16(0x0300)))
        }
    };
}

// SAFETY: each method is made of instructions of the set, as the trait asks; loads and stores are unaligned.
unsafe impl Vector for __m256i {
    plain!(
        32,
        _mm256_loadu_si256,
        _mm256_storeu_si256,
        _mm256_add_epi8,
        _mm256_set1_epi16,
        _mm256_maddubs_epi16,
        _mm256_and_si256,
        _mm256_or_si256,
        _mm256_srli_epi16
    );
    /// Saturating subtraction leaves 0 below a threshold; there is no unsigned comparison.
    #[inline(always)]
    unsafe fn thresholds(self) -> Self {
        let one = _mm256_set1_epi8(1);
        let low = _mm256_subs_epu8(self, _mm256_set1_epi8(85));
        let high = _mm256_subs_epu8(self, _mm256_set1_epi8(170u8 as i8));
        _mm256_add_epi8(_mm256_min_epu8(low, one), _mm256_min_epu8(high, one))
    }
}

// SAFETY: as above.
unsafe impl Vector for __m512i {
    plain!(
        64,
        _mm512_loadu_si512,
        _mm512_storeu_si512,
        _mm512_add_epi8,
        _mm512_set1_epi16,
        _mm512_maddubs_epi16,
        _mm512_and_si512,
        _mm512_or_si512,
        _mm512_srli_epi16
    );
    #[inline(always)]
    unsafe fn thresholds(self) -> Self {
        let one = _mm512_set1_epi8(1);
        let low = _mm512_cmpge_epu8_mask(self, _mm512_set1_epi8(86));
        let high = _mm512_cmpge_epu8_mask(self, _mm512_set1_epi8(171u8 as i8));
        let digit = _mm512_maskz_mov_epi8(low, one);
        _mm512_mask_add_epi8(digit, high, digit, one)
    }
}

macro_rules! instances {
    ($enable:literal, $($name:ident = $v:ty, $multiply:literal;)*) => {$(
        #[target_feature(enable = $enable)]
        unsafe fn $name(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
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
unsafe fn table_avx512(bytes: &[[u8; BLOCK]], out: &mut [Trits]) {
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
