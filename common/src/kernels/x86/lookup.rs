//! Sums of activations looked up in AVX2: see `kernels/lookup.rs`.

// Every function is written under the one contract of `lookup::Kernel`.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use crate::kernels::Isa;
use crate::kernels::lookup::{GROUPS, Kernel};

/// The kernels of AVX2.
pub const KERNEL: Kernel = Kernel {
    isa: Isa::Avx2,
    pairs,
    triples,
    i2_s,
};

/// A 16-byte table in both halves.
///
/// # Safety
/// AVX2; 16 bytes at `p`.
#[inline(always)]
unsafe fn table(p: *const u8) -> __m256i {
    _mm256_broadcastsi128_si256(_mm_loadu_si128(p.cast()))
}

/// Rows 0 to 15 and 16 to 31 of what two tables give for 32 indices.
///
/// # Safety
/// AVX2; 32 bytes of tables at `p`.
#[inline(always)]
unsafe fn look_up(p: *const u8, index: __m256i) -> [__m256i; 2] {
    let low = _mm256_shuffle_epi8(table(p), index);
    let high = _mm256_shuffle_epi8(table(p.add(16)), index);
    [
        _mm256_unpacklo_epi8(low, high),
        _mm256_unpackhi_epi8(low, high),
    ]
}

/// Widens 32 sums of 16 bits and adds them.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn widen(acc: [__m256i; 2], sums: &mut [i32; 32]) {
    for (acc, sums) in acc.into_iter().zip(sums.as_chunks_mut::<16>().0) {
        let halves = [
            _mm256_castsi256_si128(acc),
            _mm256_extracti128_si256(acc, 1),
        ];
        for (half, sums) in halves.into_iter().zip(sums.as_chunks_mut::<8>().0) {
            let at: *mut __m256i = sums.as_mut_ptr().cast();
            let sum = _mm256_add_epi32(_mm256_loadu_si256(at), _mm256_cvtepi16_epi32(half));
            _mm256_storeu_si256(at, sum);
        }
    }
}

/// # Safety
/// AVX2. Columns of 32 bytes, and 64 bytes of tables for each.
#[target_feature(enable = "avx2")]
unsafe fn pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
    let nibble = _mm256_set1_epi8(15);
    let mut acc = [_mm256_setzero_si256(); 2];
    for (column, tables) in weights.chunks_exact(32).zip(tables.chunks_exact(64)) {
        let v = _mm256_loadu_si256(column.as_ptr().cast());
        let first = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
        let first = look_up(tables.as_ptr(), first);
        let second = look_up(tables.as_ptr().add(32), _mm256_and_si256(v, nibble));
        for i in 0..2 {
            acc[i] = _mm256_add_epi16(acc[i], first[i]);
            acc[i] = _mm256_add_epi16(acc[i], second[i]);
        }
    }
    widen(acc, sums);
}

/// # Safety
/// AVX2. Columns of 32 bytes, four to a sign vector, and 64 bytes of tables for each.
#[target_feature(enable = "avx2")]
unsafe fn triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
    let nibble = _mm256_set1_epi8(15);
    let mut acc = [_mm256_setzero_si256(); 2];
    let words = weights
        .chunks_exact(4 * 32)
        .zip(tables.chunks_exact(4 * 64));
    for ((columns, tables), sign) in words.zip(signs.chunks_exact(32)) {
        let mut sign = _mm256_loadu_si256(sign.as_ptr().cast());
        for c in 0..4 {
            let v = _mm256_loadu_si256(columns.as_ptr().add(32 * c).cast());
            let first = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
            let second = _mm256_and_si256(v, nibble);
            let tables = tables.as_ptr().add(64 * c);
            for sums in [look_up(tables, first), look_up(tables.add(32), second)] {
                for (acc, v) in acc.iter_mut().zip(sums) {
                    // Each sign in its turn is the top bit: -1 where it is set, and (v + -1) ^ -1 is -v.
                    let negative = _mm256_srai_epi16(sign, 15);
                    sign = _mm256_add_epi16(sign, sign);
                    let v = _mm256_xor_si256(_mm256_add_epi16(v, negative), negative);
                    *acc = _mm256_add_epi16(*acc, v);
                }
            }
        }
    }
    widen(acc, sums);
}

/// # Safety
/// AVX2. Groups of 32 bytes, and 128 activations for each.
#[target_feature(enable = "avx2")]
unsafe fn i2_s(weights: &[u8], y: &[i8]) -> i32 {
    let mask = _mm256_set1_epi8(3);
    let mut total = _mm256_setzero_si256();
    for (weights, y) in weights.chunks(32 * GROUPS).zip(y.chunks(128 * GROUPS)) {
        let mut acc = _mm256_setzero_si256();
        for (bytes, y) in weights.chunks_exact(32).zip(y.chunks_exact(128)) {
            let v = _mm256_loadu_si256(bytes.as_ptr().cast());
            let slots = [
                _mm256_srli_epi16(v, 6),
                _mm256_srli_epi16(v, 4),
                _mm256_srli_epi16(v, 2),
                v,
            ];
            for (s, slot) in slots.into_iter().enumerate() {
                let y = _mm256_loadu_si256(y.as_ptr().add(32 * s).cast());
                let products = _mm256_maddubs_epi16(_mm256_and_si256(slot, mask), y);
                acc = _mm256_add_epi16(acc, products);
            }
        }
        total = _mm256_add_epi32(total, _mm256_madd_epi16(acc, _mm256_set1_epi16(1)));
    }
    let mut lanes = [0i32; 8];
    _mm256_storeu_si256(lanes.as_mut_ptr().cast(), total);
    lanes.iter().sum()
}
