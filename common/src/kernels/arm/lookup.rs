//! Sums of activations looked up in NEON: see `kernels/lookup.rs`.

// Slices are checked, and every aarch64 target here has NEON.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;

use crate::kernels::Isa;
use crate::kernels::lookup::{GROUPS, Kernel};

/// The kernels of NEON.
pub const KERNEL: Kernel = Kernel {
    isa: Isa::Neon,
    pairs,
    triples,
    i2_s,
};

/// The rows of each eight bytes of a column, in the order in which they stand.
const ROWS: [usize; 4] = [0, 16, 8, 24];

/// What two tables give for 16 indices.
#[inline(always)]
unsafe fn look_up(tables: &[u8], index: uint8x16_t) -> [int16x8_t; 2] {
    let low = vqtbl1q_u8(vld1q_u8(tables[..16].as_ptr()), index);
    let high = vqtbl1q_u8(vld1q_u8(tables[16..32].as_ptr()), index);
    [
        vreinterpretq_s16_u8(vzip1q_u8(low, high)),
        vreinterpretq_s16_u8(vzip2q_u8(low, high)),
    ]
}

#[inline(always)]
unsafe fn widen(acc: [int16x8_t; 4], sums: &mut [i32; 32]) {
    for (acc, row) in acc.into_iter().zip(ROWS) {
        let mut lanes = [0i16; 8];
        vst1q_s16(lanes.as_mut_ptr(), acc);
        for (sum, lane) in sums[row..].iter_mut().zip(lanes) {
            *sum += i32::from(lane);
        }
    }
}

/// # Safety
/// Columns of 32 bytes, and 64 bytes of tables for each.
unsafe fn pairs(weights: &[u8], _: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
    let mut acc = [vdupq_n_s16(0); 4];
    for (column, tables) in weights.chunks_exact(32).zip(tables.chunks_exact(64)) {
        for (half, acc) in acc.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let v = vld1q_u8(column[16 * half..].as_ptr());
            let first = look_up(tables, vshrq_n_u8(v, 4));
            let second = look_up(&tables[32..], vandq_u8(v, vdupq_n_u8(15)));
            for i in 0..2 {
                acc[i] = vaddq_s16(acc[i], vaddq_s16(first[i], second[i]));
            }
        }
    }
    widen(acc, sums);
}

/// # Safety
/// Columns of 32 bytes, four to 32 bytes of signs, and 64 bytes of tables for each.
unsafe fn triples(weights: &[u8], signs: &[u8], tables: &[u8], sums: &mut [i32; 32]) {
    let mut acc = [vdupq_n_s16(0); 4];
    let words = weights
        .chunks_exact(4 * 32)
        .zip(tables.chunks_exact(4 * 64));
    for ((columns, tables), signs) in words.zip(signs.chunks_exact(32)) {
        let signs = [0, 16].map(|at| vld1q_s16(signs[at..].as_ptr().cast()));
        for c in 0..4 {
            for (half, index) in [4, 0].into_iter().enumerate() {
                let tables = &tables[64 * c + 32 * half..];
                for (eights, acc) in acc.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    let v = vld1q_u8(columns[32 * c + 16 * eights..].as_ptr());
                    let v = vandq_u8(vshlq_u8(v, vdupq_n_s8(-index)), vdupq_n_u8(15));
                    for (i, v) in look_up(tables, v).into_iter().enumerate() {
                        // Bytes 0 to 15 of a column are rows 0 to 7 and 16 to 23, the others 8 to 15 and 24 to 31.
                        let shift = vdupq_n_s16((4 * c + 2 * half + i) as i16);
                        let sign = vshrq_n_s16(vshlq_s16(signs[eights], shift), 15);
                        let v = veorq_s16(vaddq_s16(v, sign), sign);
                        acc[i] = vaddq_s16(acc[i], v);
                    }
                }
            }
        }
    }
    widen(acc, sums);
}

/// # Safety
/// Groups of 32 bytes, and 128 activations for each.
unsafe fn i2_s(weights: &[u8], y: &[i8]) -> i32 {
    let mut total = 0;
    for (weights, y) in weights.chunks(32 * GROUPS).zip(y.chunks(128 * GROUPS)) {
        let mut acc = [vdupq_n_s16(0); 2];
        for (bytes, y) in weights.chunks_exact(32).zip(y.chunks_exact(128)) {
            for half in 0..2 {
                let v = vld1q_u8(bytes[16 * half..].as_ptr());
                for slot in 0..4 {
                    let u = vshlq_u8(v, vdupq_n_s8(2 * slot as i8 - 6));
                    let u = vreinterpretq_s8_u8(vandq_u8(u, vdupq_n_u8(3)));
                    let y = vld1q_s8(y[32 * slot + 16 * half..].as_ptr());
                    acc[0] = vmlal_s8(acc[0], vget_low_s8(u), vget_low_s8(y));
                    acc[1] = vmlal_high_s8(acc[1], u, y);
                }
            }
        }
        total += vaddlvq_s16(acc[0]) + vaddlvq_s16(acc[1]);
    }
    total
}
