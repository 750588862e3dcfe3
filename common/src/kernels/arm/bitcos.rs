//! BITCOS in NEON: see `kernels/bitcos.rs`.

// Every aarch64 target here has NEON.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::aarch64::*;
use std::ops::Range;
use std::sync::atomic::AtomicU32;

use crate::kernels::bitcos::{Kernel, Matrix, by_groups};
use crate::kernels::{Group, Isa};

/// The kernel of NEON.
pub const KERNEL: Kernel = Kernel {
    isa: Isa::Neon,
    rows,
};

/// For each byte of a bitmap and each of its weights, which of the byte's ones it is; 255 where the weight is zero. Arm has
/// no `pdep`; a byte lookup with these places does the same for eight weights, and gives 0 for 255.
static PLACES: [[u8; 8]; 256] = {
    let mut places = [[255; 8]; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut i, mut ones) = (0, 0);
        while i < 8 {
            if byte >> i & 1 == 1 {
                places[byte][i] = ones;
                ones += 1;
            }
            i += 1;
        }
        byte += 1;
    }
    places
};

/// # Safety
/// As [`RowsFn`](crate::kernels::bitcos::RowsFn).
unsafe fn rows(w: &Matrix, x: &Group, rows: Range<usize>, out: &[AtomicU32]) {
    by_groups(w, x, rows, out, |words, bit, y| {
        // SAFETY: whole groups, and signs are read within their slack.
        unsafe { group(words, w.signs, bit, y) }
    });
}

/// # Safety
/// 128 weights and activations; their signs start at `bit` and two bytes can be read past the last.
#[inline(always)]
unsafe fn group(words: &[u64], signs: &[u8], bit: &mut usize, y: &[i8]) -> i32 {
    let bits = vcreate_u8(0x8040_2010_0804_0201);
    let mut sum = vdupq_n_s16(0);
    for (i, y) in y.chunks_exact(8).enumerate() {
        let present = (words[i / 8] >> (i % 8 * 8)) as u8;
        let two = signs.as_ptr().add(*bit / 8).cast::<u16>().read_unaligned();
        let negative = vtst_u8(vdup_n_u8((two >> (*bit % 8)) as u8), bits);
        let signs = vorr_s8(vreinterpret_s8_u8(negative), vdup_n_s8(1));
        let places = vld1_u8(PLACES[usize::from(present)].as_ptr());
        let w = vtbl1_s8(signs, vreinterpret_s8_u8(places));
        sum = vmlal_s8(sum, w, vld1_s8(y.as_ptr()));
        *bit += present.count_ones() as usize;
    }
    vaddlvq_s16(sum)
}
