//! The multiply peak: what the dot instruction of a set does when nothing else is asked of the core.

use super::Isa;

/// Runs the dot product of a set `steps` times on registers alone, and returns the multiply-accumulates done; `None` where this
/// CPU or this crate has no such loop.
///
/// * `avx512-vnni`, `avx-vnni`: `vpdpbusd`, on independent accumulators.
/// * `avx2`: `vpmaddubsw` and the 16-bit addition that keeps its sums.
/// * `neon`: `smlal` on both halves of a vector; `dotprod`: `sdot`; `i8mm`: `smmla`.
pub fn run(isa: Isa, steps: usize) -> Option<u64> {
    if !isa.available() {
        return None;
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => super::x86::peak::run(isa, steps),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dotprod | Isa::I8mm => super::arm::peak::run(isa, steps),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_grow_with_the_steps() {
        for isa in Isa::ALL {
            if let (Some(one), Some(two)) = (run(isa, 100), run(isa, 200)) {
                assert!(one > 0 && two == 2 * one, "{isa}: {one} and {two}");
            }
        }
    }
}
