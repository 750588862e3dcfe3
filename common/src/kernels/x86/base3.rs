//! Base-3 codes of the wide-row layouts (formats/wide_b3.rs): how each vector width gets at its five weights a byte.

// Every function is a run of instructions under the contract of `Codes`.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::lanes::{Avx2, Avx512, Avx512Vl, AvxVnni, Lanes};
use super::wide::{Codes, prefetch_word};
use crate::formats::TileRows;
use crate::formats::wide_b3::{BYTES, FIVE, FIVE_BYTES, FIVE_UNIT, UNIT, decode};

/// 128 weights a block, 26 bytes a row.
pub struct Base3;

/// Five groups of 128 weights a block, 128 bytes a row.
pub struct Base3x5;

/// Words of a row in a block of [`Base3x5`], and those that one step of its decode loop takes.
const WORDS: usize = FIVE_BYTES / 4;
const STEP: usize = 4;

/// The tables of the 16-row code, by the low six bits of a byte: four slots where the byte is below 192, four slots and the fifth weight
/// (in slot 3) where it is not.
const TABLES: [[u8; 64]; 3] = {
    let mut tables = [[0; 64]; 3];
    let mut l = 0;
    while l < 64 {
        let [t0, t1, t2, t3, _] = decode(TileRows::R16, l as u8);
        tables[0][l] = t0 | t1 << 2 | t2 << 4 | t3 << 6;
        if l < 51 {
            let [t0, t1, t2, t3, t4] = decode(TileRows::R16, 192 + l as u8);
            tables[1][l] = t0 | t1 << 2 | t2 << 4 | t3 << 6;
            tables[2][l] = t4 << 6;
        }
        l += 1;
    }
    tables
};

/// Four weights in slots, and the fifth in slot 3 of the second vector.
#[inline(always)]
unsafe fn lookup(v: __m512i) -> (Avx512, __m512i) {
    let low = _mm512_loadu_si512(TABLES[0].as_ptr().cast());
    let high = _mm512_loadu_si512(TABLES[1].as_ptr().cast());
    let fifth = _mm512_loadu_si512(TABLES[2].as_ptr().cast());
    let k = _mm512_cmpge_epu8_mask(v, _mm512_set1_epi8(192u8 as i8));
    let slots = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(v, low), k, v, high);
    let t4 = _mm512_and_si512(v, _mm512_set1_epi8(192u8 as i8));
    (Avx512(slots), _mm512_mask_permutexvar_epi8(t4, k, v, fifth))
}

/// Each weight as a byte 0 to 2, in order of place.
#[inline(always)]
unsafe fn unpack512(v: Avx512) -> [Avx512; 5] {
    let (slots, fifth) = lookup(v.0);
    let [t0, t1, t2, t3] = slots.shift();
    // Slot 3 alone is set, so nothing comes in from the byte above.
    [t0, t1, t2, t3, Avx512(_mm512_srli_epi32::<6>(fifth))]
}

/// The last eight weights of each row: weight i of four in slot 0 of byte i, the next four in slot 1.
#[inline(always)]
unsafe fn last_eight512(codes: *const u8) -> __m512i {
    let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(codes.add(24 * 16).cast()));
    _mm512_or_si512(v, _mm512_slli_epi32::<12>(v))
}

// SAFETY: reads `BYTES` bytes of codes, 128 * T of activations.
unsafe impl Codes<Avx512> for Base3 {
    const GROUP: usize = 128;
    const BYTES: usize = BYTES * 16;
    const UNIT: usize = UNIT;
    type Acc = [Avx512; 4];

    #[inline(always)]
    unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc {
        Avx512::slots(offset(0))
    }

    #[inline(always)]
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        mut acc: [Self::Acc; T],
    ) -> [Self::Acc; T] {
        for c in 0..6 {
            let codes = codes.add(64 * c);
            prefetch_word::<Avx512>(codes, c);
            let (slots, fifth) = lookup(Avx512::load(codes).0);
            let slots = slots.mask();
            for (t, acc) in acc.iter_mut().enumerate() {
                let y = y.add(20 * c * T + 4 * t);
                *acc = Avx512::slots_dot(*acc, slots, y, 4 * T);
                acc[3] = Avx512::sum_dot(acc[3], Avx512(fifth), Avx512::broadcast(y.add(16 * T)));
            }
        }
        let last = last_eight512(codes);
        let u = [
            Avx512(_mm512_and_si512(last, _mm512_set1_epi8(0x03))),
            Avx512(_mm512_and_si512(last, _mm512_set1_epi8(0x0c))),
        ];
        for (t, acc) in acc.iter_mut().enumerate() {
            for s in 0..2 {
                acc[s] = Avx512::sum_dot(
                    acc[s],
                    u[s],
                    Avx512::broadcast(y.add((120 + 4 * s) * T + 4 * t)),
                );
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn finish(acc: Self::Acc, _: usize) -> Avx512 {
        Avx512::slots_sum(acc)
    }

    #[inline(always)]
    unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, Avx512)) {
        for c in 0..6 {
            let u = unpack512(Avx512::load(codes.add(64 * c)));
            for (s, u) in u.into_iter().enumerate() {
                put(5 * c + s, u);
            }
        }
        let [u, v, ..] = Avx512(last_eight512(codes)).shift();
        put(30, u);
        put(31, v);
    }
}

// SAFETY: reads `BYTES` bytes of codes, 640 * T of activations.
unsafe impl Codes<Avx512> for Base3x5 {
    const GROUP: usize = 128;
    const GROUPS: usize = FIVE;
    const BYTES: usize = FIVE_BYTES * 16;
    const UNIT: usize = FIVE_UNIT;
    /// Sums of each group: 4^s times those of slot s.
    type Acc = [Avx512; 5];

    #[inline(always)]
    unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc {
        let mut acc = [Avx512::splat(offset(0)); 5];
        for (g, acc) in acc.iter_mut().enumerate().skip(1) {
            *acc = Avx512::splat(offset(g) << (2 * g.min(3)));
        }
        acc
    }

    #[inline(always)]
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        mut acc: [Self::Acc; T],
    ) -> [Self::Acc; T] {
        for step in 0..WORDS / STEP {
            for c in step * STEP..(step + 1) * STEP {
                let codes = codes.add(64 * c);
                prefetch_word::<Avx512>(codes, c);
                let (slots, fifth) = lookup(Avx512::load(codes).0);
                let [u0, u1, u2, u3] = slots.mask();
                let u = [u0, u1, u2, u3, Avx512(fifth)];
                for (t, acc) in acc.iter_mut().enumerate() {
                    let y = y.add(4 * (c * T + t));
                    for g in 0..FIVE {
                        let y = Avx512::broadcast(y.add(128 * g * T));
                        acc[g] = Avx512::sum_dot(acc[g], u[g], y);
                    }
                }
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn finish([a0, a1, a2, a3, a4]: Self::Acc, group: usize) -> Avx512 {
        match group {
            0 => a0,
            1 => Avx512(_mm512_srai_epi32::<2>(a1.0)),
            2 => Avx512(_mm512_srai_epi32::<4>(a2.0)),
            3 => Avx512(_mm512_srai_epi32::<6>(a3.0)),
            _ => Avx512(_mm512_srai_epi32::<6>(a4.0)),
        }
    }

    #[inline(always)]
    unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, Avx512)) {
        for c in 0..WORDS {
            let u = unpack512(Avx512::load(codes.add(64 * c)));
            for (g, u) in u.into_iter().enumerate() {
                put(32 * g + c, u);
            }
        }
    }
}

/// `[t0, 3 t1, 9 t2, 27 t3, 81 t4]` of each byte: a remainder is the least of the values that multiples of the power leave, since
/// bytes wrap; what it takes away is the weight times the power.
#[inline(always)]
unsafe fn peel(v: __m256i) -> [__m256i; 5] {
    #[inline(always)]
    unsafe fn remainder(v: __m256i, power: u8) -> __m256i {
        let once = _mm256_sub_epi8(v, _mm256_set1_epi8(power as i8));
        let twice = _mm256_sub_epi8(v, _mm256_set1_epi8((2 * power) as i8));
        _mm256_min_epu8(v, _mm256_min_epu8(once, twice))
    }
    let r4 = remainder(v, 81);
    let r3 = remainder(r4, 27);
    let r2 = remainder(r3, 9);
    let r1 = remainder(r2, 3);
    [
        r1,
        _mm256_sub_epi8(r2, r1),
        _mm256_sub_epi8(r3, r2),
        _mm256_sub_epi8(r4, r3),
        _mm256_sub_epi8(v, r4),
    ]
}

/// As [`last_eight512`].
#[inline(always)]
unsafe fn last_eight256(codes: *const u8) -> __m256i {
    let v = _mm256_cvtepu16_epi32(_mm_loadu_si128(codes.add(24 * 8).cast()));
    _mm256_or_si256(v, _mm256_slli_epi32::<12>(v))
}

/// As [`unpack512`].
#[inline(always)]
unsafe fn five256(v: __m256i) -> [__m256i; 5] {
    // 3, 6 and 9, 18 and 27, 54 differ in their low four bits, all that the shuffle reads below 128; 81, 162 in their low two.
    let mut table = [0i8; 16];
    for power in [3usize, 9, 27] {
        table[power % 16] = 1;
        table[2 * power % 16] = 2;
    }
    // 6 = 54 mod 16 and is 2 for both powers.
    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
    let [t0, t1, t2, t3, t4] = peel(v);
    [
        t0,
        _mm256_shuffle_epi8(table, t1),
        _mm256_shuffle_epi8(table, t2),
        _mm256_shuffle_epi8(table, t3),
        _mm256_and_si256(t4, _mm256_set1_epi8(3)),
    ]
}

/// The weights of a block of [`Base3`].
#[inline(always)]
unsafe fn unpack256(codes: *const u8, mut put: impl FnMut(usize, __m256i)) {
    for c in 0..6 {
        let u = five256(_mm256_loadu_si256(codes.add(32 * c).cast()));
        for (s, u) in u.into_iter().enumerate() {
            put(5 * c + s, u);
        }
    }
    let last = last_eight256(codes);
    put(30, _mm256_and_si256(last, _mm256_set1_epi8(3)));
    put(
        31,
        _mm256_and_si256(_mm256_srli_epi32::<2>(last), _mm256_set1_epi8(3)),
    );
}

/// The weights of a block of [`Base3x5`].
#[inline(always)]
unsafe fn unpack256x5(codes: *const u8, mut put: impl FnMut(usize, __m256i)) {
    for c in 0..WORDS {
        let u = five256(_mm256_loadu_si256(codes.add(32 * c).cast()));
        for (g, u) in u.into_iter().enumerate() {
            put(32 * g + c, u);
        }
    }
}

/// What the sums of each group are multiplied by: dots take a weight times its power of 3.
const POWERS: [i32; 5] = [1, 3, 9, 27, 81];
/// The same for AVX2, which brings the powers down to what 16 bits hold.
const REDUCED: [i32; 5] = [1, 3, 1, 3, 1];

/// [`Base3x5`] on 256-bit vectors: all but the dots, whose sums are multiples.
macro_rules! five256 {
    ($lanes:ident, $multiples:ident, {$($dots:tt)*}) => {
        // SAFETY: as above.
        unsafe impl Codes<$lanes> for Base3x5 {
            const GROUP: usize = 128;
            const GROUPS: usize = FIVE;
            const BYTES: usize = FIVE_BYTES * 8;
            const UNIT: usize = FIVE_UNIT;
            /// Multiples of the sums of each group.
            type Acc = [$lanes; 5];

            #[inline(always)]
            unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc {
                let mut acc = [$lanes::splat(offset(0)); 5];
                for g in 1..FIVE {
                    acc[g] = $lanes::splat($multiples[g] * offset(g));
                }
                acc
            }

            $($dots)*

            /// The inverse modulo 2^32 divides a multiple.
            #[inline(always)]
            unsafe fn finish(acc: Self::Acc, group: usize) -> $lanes {
                let inverse = _mm256_set1_epi32(inverse($multiples[group]));
                $lanes(_mm256_mullo_epi32(acc[group].0, inverse))
            }

            #[inline(always)]
            unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, $lanes)) {
                unpack256x5(codes, |j, v| put(j, $lanes(v)))
            }
        }
    };
}

macro_rules! dot_product256 {
    ($lanes:ident) => {
        // SAFETY: as above.
        unsafe impl Codes<$lanes> for Base3 {
            const GROUP: usize = 128;
            const BYTES: usize = BYTES * 8;
            const UNIT: usize = UNIT;
            /// Sums of each weight times its power of 3.
            type Acc = [$lanes; 5];

            #[inline(always)]
            unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc {
                let zero = $lanes::splat(0);
                [$lanes::splat(offset(0)), zero, zero, zero, zero]
            }

            #[inline(always)]
            unsafe fn dots<const T: usize>(
                codes: *const u8,
                y: *const i8,
                mut acc: [Self::Acc; T],
            ) -> [Self::Acc; T] {
                for c in 0..6 {
                    let codes = codes.add(32 * c);
                    prefetch_word::<$lanes>(codes, c);
                    let u = peel($lanes::load(codes).0);
                    for (t, acc) in acc.iter_mut().enumerate() {
                        for s in 0..5 {
                            let y = $lanes::broadcast(y.add((20 * c + 4 * s) * T + 4 * t));
                            acc[s] = $lanes::sum_dot(acc[s], $lanes(u[s]), y);
                        }
                    }
                }
                let last = last_eight256(codes);
                let mask = _mm256_set1_epi8(3);
                let u = [
                    $lanes(_mm256_and_si256(last, mask)),
                    $lanes(_mm256_and_si256(_mm256_srli_epi32::<2>(last), mask)),
                ];
                for (t, acc) in acc.iter_mut().enumerate() {
                    for s in 0..2 {
                        let y = $lanes::broadcast(y.add((120 + 4 * s) * T + 4 * t));
                        acc[0] = $lanes::sum_dot(acc[0], u[s], y);
                    }
                }
                acc
            }

            /// 81 times the sum is a multiple of 81: the inverse of 81 modulo 2^32 divides it.
            #[inline(always)]
            unsafe fn finish([a0, a1, a2, a3, a4]: Self::Acc, _: usize) -> $lanes {
                let triple_and = |a: __m256i, b: $lanes| {
                    _mm256_add_epi32(_mm256_add_epi32(a, _mm256_slli_epi32::<1>(a)), b.0)
                };
                let sum = triple_and(triple_and(triple_and(triple_and(a0.0, a1), a2), a3), a4);
                $lanes(_mm256_mullo_epi32(sum, _mm256_set1_epi32(inverse(81))))
            }

            #[inline(always)]
            unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, $lanes)) {
                unpack256(codes, |j, v| put(j, $lanes(v)))
            }
        }

        five256!($lanes, POWERS, {
            #[inline(always)]
            unsafe fn dots<const T: usize>(
                codes: *const u8,
                y: *const i8,
                mut acc: [Self::Acc; T],
            ) -> [Self::Acc; T] {
                for step in 0..WORDS / STEP {
                    for c in step * STEP..(step + 1) * STEP {
                        let codes = codes.add(32 * c);
                        prefetch_word::<$lanes>(codes, c);
                        let u = peel($lanes::load(codes).0);
                        for (t, acc) in acc.iter_mut().enumerate() {
                            let y = y.add(4 * (c * T + t));
                            for g in 0..FIVE {
                                let y = $lanes::broadcast(y.add(128 * g * T));
                                acc[g] = $lanes::sum_dot(acc[g], $lanes(u[g]), y);
                            }
                        }
                    }
                }
                acc
            }
        });
    };
}

dot_product256!(AvxVnni);
dot_product256!(Avx512Vl);

/// The inverse of an odd number modulo 2^32, by Newton's iteration.
const fn inverse(n: i32) -> i32 {
    let mut x = n;
    let mut i = 0;
    while i < 5 {
        x = x.wrapping_mul(2i32.wrapping_sub(n.wrapping_mul(x)));
        i += 1;
    }
    x
}

/// The weights of a byte, the second and the fourth of five times 3.
#[inline(always)]
unsafe fn reduced(v: __m256i) -> [__m256i; 5] {
    let (three, seven) = (_mm256_set1_epi8(3), _mm256_set1_epi8(7));
    let [t0, t1, t2, t3, t4] = peel(v);
    // 9 and 18 are 1 and 2 modulo 4, as are 81 and 162; 27 and 54 are 3 and 6 modulo 8.
    [
        t0,
        t1,
        _mm256_and_si256(t2, three),
        _mm256_and_si256(t3, seven),
        _mm256_and_si256(t4, three),
    ]
}

/// Adds the dots with four activations in 16 bits.
#[inline(always)]
unsafe fn dot16(acc: __m256i, u: __m256i, y: *const i8) -> __m256i {
    _mm256_add_epi16(acc, _mm256_maddubs_epi16(u, Avx2::broadcast(y).0))
}

// 16 bits hold half a block: 16 words of weights as 3t, 16 * 2 * 6 * 127 = 24,384.
five256!(Avx2, REDUCED, {
    #[inline(always)]
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        mut acc: [Self::Acc; T],
    ) -> [Self::Acc; T] {
        const HALF: usize = WORDS / STEP / 2;
        for half in 0..2 {
            let mut sums = [[_mm256_setzero_si256(); FIVE]; T];
            for step in half * HALF..(half + 1) * HALF {
                for c in step * STEP..(step + 1) * STEP {
                    let codes = codes.add(32 * c);
                    prefetch_word::<Avx2>(codes, c);
                    let u = reduced(Avx2::load(codes).0);
                    for (t, sums) in sums.iter_mut().enumerate() {
                        let y = y.add(4 * (c * T + t));
                        for g in 0..FIVE {
                            sums[g] = dot16(sums[g], u[g], y.add(128 * g * T));
                        }
                    }
                }
            }
            for (acc, sums) in acc.iter_mut().zip(sums) {
                for g in 0..FIVE {
                    acc[g] = Avx2::sum_end(acc[g], sums[g]);
                }
            }
        }
        acc
    }
});

// SAFETY: as above.
unsafe impl Codes<Avx2> for Base3 {
    const GROUP: usize = 128;
    const BYTES: usize = BYTES * 8;
    const UNIT: usize = UNIT;
    /// Sums in 16 bits of the weights, and of three times the others; three times the offset.
    ///
    /// 16 bits hold a block: three weights a byte in six words and two in the last, (3 * 6 + 2) * 2 * 2 * 127 = 10,160, and two
    /// weights as 3t in six words, 2 * 6 * 2 * 6 * 127 = 18,288.
    type Acc = [__m256i; 3];

    #[inline(always)]
    unsafe fn start(offset: impl Fn(usize) -> i32) -> Self::Acc {
        [
            _mm256_setzero_si256(),
            _mm256_setzero_si256(),
            _mm256_set1_epi32(3 * offset(0)),
        ]
    }

    #[inline(always)]
    unsafe fn dots<const T: usize>(
        codes: *const u8,
        y: *const i8,
        mut acc: [Self::Acc; T],
    ) -> [Self::Acc; T] {
        for c in 0..6 {
            let codes = codes.add(32 * c);
            prefetch_word::<Avx2>(codes, c);
            let u = reduced(Avx2::load(codes).0);
            for (t, acc) in acc.iter_mut().enumerate() {
                let y = y.add(20 * c * T + 4 * t);
                for s in 0..5 {
                    acc[s % 2] = dot16(acc[s % 2], u[s], y.add(4 * s * T));
                }
            }
        }
        let last = last_eight256(codes);
        let three = _mm256_set1_epi8(3);
        let u = [
            _mm256_and_si256(last, three),
            _mm256_and_si256(_mm256_srli_epi32::<2>(last), three),
        ];
        for (t, acc) in acc.iter_mut().enumerate() {
            for (s, &u) in u.iter().enumerate() {
                acc[0] = dot16(acc[0], u, y.add((120 + 4 * s) * T + 4 * t));
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn finish([ones, threes, offset]: Self::Acc, _: usize) -> Avx2 {
        let ones = _mm256_madd_epi16(ones, _mm256_set1_epi16(3));
        let threes = _mm256_madd_epi16(threes, _mm256_set1_epi16(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(ones, threes), offset);
        Avx2(_mm256_mullo_epi32(sum, _mm256_set1_epi32(inverse(3))))
    }

    #[inline(always)]
    unsafe fn unpack(codes: *const u8, mut put: impl FnMut(usize, Avx2)) {
        unpack256(codes, |j, v| put(j, Avx2(v)))
    }
}
