//! x86-64: AVX2, AVX-VNNI (256-bit) and AVX-512 VNNI.

mod base3;
pub(super) mod bitcos;
mod bytes;
pub(super) mod dots;
mod eights;
mod four_rows;
mod lanes;
pub(super) mod lookup;
pub(super) mod peak;
mod quads;
mod rows;
pub(super) mod unpack;
mod wide;

use std::ops::Range;
use std::sync::LazyLock;

use super::read::{FAR, NEAR};
use super::{Group, Isa, Kernel, MatrixRef, Out, TilesFn};
use crate::formats::{Format, Layout, TileRows};

/// Whether this CPU, and its operating system, have AVX2 with FMA and F16C.
pub(super) fn avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Dot products of 256 bits in VEX encoding.
pub(super) fn avx_vnni() -> bool {
    avx2() && is_x86_feature_detected!("avxvnni")
}

/// Dot products of 256 and 512 bits in EVEX encoding.
pub(super) fn avx512() -> bool {
    avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// As above, with lookups in a table of 64 bytes.
pub(super) fn avx512_vbmi() -> bool {
    avx512() && is_x86_feature_detected!("avx512vbmi")
}

/// Whether 512-bit instructions run in two halves, as on AMD's Zen 4 (family 19h): they then leave two pipes to masks and shifts
/// that do not multiply.
fn half_width() -> bool {
    use std::arch::x86_64::__cpuid;
    static HALF: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        let amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        let version = __cpuid(1).eax;
        let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
        amd.as_flattened() == b"AuthenticAMD" && family == 0x19
    });
    *HALF
}

/// One function a kernel: the generic source inlined where its instruction set is enabled.
macro_rules! instances {
    ($enable:literal, $($name:ident = $body:path;)*) => {$(
        #[target_feature(enable = $enable)]
        unsafe fn $name(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
            // SAFETY: the contract of `TilesFn`; the instruction set is enabled here.
            unsafe { $body(w, x, tiles, out) }
        }
    )*};
}
use instances;

/// Asks for the cache lines `far` and `near` bytes after `p`, wherever that is.
#[inline(always)]
fn prefetch(p: *const u8, far: usize, near: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(far).cast());
        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(near).cast());
    }
}

instances! {"avx2,fma,f16c",
    base3_avx2 = wide::run::<lanes::Avx2, base3::Base3>;
    base3x5_avx2 = wide::run::<lanes::Avx2, base3::Base3x5>;
    wide64_avx2 = wide::run::<lanes::Avx2, wide::TwoBit<64>>;
    wide128_avx2 = wide::run::<lanes::Avx2, wide::TwoBit<128>>;
    wide256_avx2 = wide::run::<lanes::Avx2, wide::TwoBit<256>>;
}

instances! {"avx2,fma,f16c,avxvnni",
    base3_vex = wide::run::<lanes::AvxVnni, base3::Base3>;
    base3x5_vex = wide::run::<lanes::AvxVnni, base3::Base3x5>;
    wide64_vex = wide::run::<lanes::AvxVnni, wide::TwoBit<64>>;
    wide128_vex = wide::run::<lanes::AvxVnni, wide::TwoBit<128>>;
    wide256_vex = wide::run::<lanes::AvxVnni, wide::TwoBit<256>>;
}

instances! {"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    base3_evex = wide::run::<lanes::Avx512Vl, base3::Base3>;
    base3x5_evex = wide::run::<lanes::Avx512Vl, base3::Base3x5>;
    wide64_evex = wide::run::<lanes::Avx512Vl, wide::TwoBit<64>>;
    wide128_evex = wide::run::<lanes::Avx512Vl, wide::TwoBit<128>>;
    wide256_evex = wide::run::<lanes::Avx512Vl, wide::TwoBit<256>>;
    wide64_avx512 = wide::run::<lanes::Avx512, wide::TwoBit<64>>;
    wide128_avx512 = wide::run::<lanes::Avx512, wide::TwoBit<128>>;
    wide256_avx512 = wide::run::<lanes::Avx512, wide::TwoBit<256>>;
}

instances! {"avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi",
    base3_avx512 = wide::run::<lanes::Avx512, base3::Base3>;
    base3x5_avx512 = wide::run::<lanes::Avx512, base3::Base3x5>;
}

/// The base-3 wide-row kernels of a set. The one that takes rows of any width comes last, and is the default: the other saves 1.4% of
/// the bytes, no more than rates differ from machine to machine.
const fn base3(
    rows: TileRows,
    isa: Isa,
    usable: fn() -> bool,
    five: TilesFn,
    one: TilesFn,
) -> [Kernel; 2] {
    [
        Kernel::ternary(Layout::WideB3x5 { rows }, isa, usable, five),
        Kernel::ternary(Layout::WideB3 { rows }, isa, usable, one),
    ]
}

/// The wide-row kernels of a set, for the two-bit formats.
const fn wide(
    rows: TileRows,
    isa: Isa,
    usable: fn() -> bool,
    g64: TilesFn,
    g128: TilesFn,
    g256: TilesFn,
) -> [Kernel; 3] {
    [
        Kernel::ternary(
            Layout::Wide2 {
                source: Format::Q2_0,
                rows,
            },
            isa,
            usable,
            g64,
        ),
        Kernel::ternary(
            Layout::Wide2 {
                source: Format::Pq2_0,
                rows,
            },
            isa,
            usable,
            g128,
        ),
        Kernel::ternary(
            Layout::Wide2 {
                source: Format::Tq2_0,
                rows,
            },
            isa,
            usable,
            g256,
        ),
    ]
}

/// All of them, slowest first.
pub(super) static KERNELS: &[&[Kernel]] = &[
    &eights::KERNELS,
    &rows::AVX2,
    &four_rows::AVX2,
    &wide(
        TileRows::R8,
        Isa::Avx2,
        avx2,
        wide64_avx2,
        wide128_avx2,
        wide256_avx2,
    ),
    &rows::VEX,
    &four_rows::VEX,
    &wide(
        TileRows::R8,
        Isa::AvxVnni,
        avx_vnni,
        wide64_vex,
        wide128_vex,
        wide256_vex,
    ),
    &rows::EVEX,
    &four_rows::EVEX,
    &wide(
        TileRows::R8,
        Isa::AvxVnni,
        avx512,
        wide64_evex,
        wide128_evex,
        wide256_evex,
    ),
    &rows::AVX512,
    &four_rows::AVX512,
    &base3(TileRows::R8, Isa::Avx2, avx2, base3x5_avx2, base3_avx2),
    &base3(TileRows::R8, Isa::AvxVnni, avx_vnni, base3x5_vex, base3_vex),
    &base3(TileRows::R8, Isa::AvxVnni, avx512, base3x5_evex, base3_evex),
    &base3(
        TileRows::R16,
        Isa::Avx512Vnni,
        avx512_vbmi,
        base3x5_avx512,
        base3_avx512,
    ),
    &wide(
        TileRows::R16,
        Isa::Avx512Vnni,
        avx512,
        wide64_avx512,
        wide128_avx512,
        wide256_avx512,
    ),
];
