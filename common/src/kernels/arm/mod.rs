//! Arm: plain NEON, FEAT_DotProd (`sdot`) and FEAT_I8MM (`usdot`, `usmmla`, `smmla`).
//!
//! Checked under emulation, where time means nothing; which layout should win is decided by counting instructions, see
//! [`KERNELS`].

pub(super) mod bitcos;
mod codes;
pub(super) mod dots;
mod fours;
pub(super) mod lookup;
pub(super) mod peak;
mod run;
mod sets;
pub(super) mod unpack;

use std::arch::is_aarch64_feature_detected;
use std::ops::Range;

use super::{Group, Isa, Kernel, MatrixRef, Out, TilesFn};
use crate::formats::{Format, Layout, TileRows};
use codes::{InOrder, MaskSlot, Ptq1, RowPair, Slot16, Stock, Tq1, Tq2, Wide, WideB3};
use sets::{Dotprod, I8mm, Neon};

/// Whether this CPU has `sdot`.
pub(super) fn dotprod() -> bool {
    is_aarch64_feature_detected!("dotprod")
}

/// Whether this CPU has the 8-bit matrix products; the kernels use `sdot` too.
pub(super) fn i8mm() -> bool {
    dotprod() && is_aarch64_feature_detected!("i8mm")
}

/// The kernels of an instruction set: each layout's source inlined into a function that enables the set.
macro_rules! kernels {
    ($module:ident, $set:ident, $enable:literal, $isa:expr, $usable:path) => {
        mod $module {
            use super::*;

            macro_rules! kernel {
                ($layout:expr, $run:ident, $codes:ty) => {{
                    #[target_feature(enable = $enable)]
                    unsafe fn tiles(w: &MatrixRef, x: &[Group], tiles: Range<usize>, out: Out) {
                        // SAFETY: the contract of `TilesFn`; the instruction set is enabled here.
                        unsafe { run::$run::<$set, $codes>(w, x, tiles, out) }
                    }
                    Kernel::ternary($layout, $isa, $usable, tiles as TilesFn)
                }};
            }

            pub static KERNELS: [Kernel; 11] = [
                kernel!(Layout::Stock(Format::Tq1_0), run_stock, Stock<Tq1>),
                kernel!(Layout::Stock(Format::Tq2_0), run_stock, Stock<Tq2>),
                kernel!(Layout::Stock(Format::Q2_0), run_stock, Stock<InOrder<64>>),
                kernel!(Layout::Stock(Format::Ptq1_0), run_stock, Stock<Ptq1>),
                kernel!(Layout::Stock(Format::Pq2_0), run_stock, Stock<InOrder<128>>),
                kernel!(Layout::WideB3 { rows: TileRows::R8 }, run, WideB3),
                kernel!(Layout::Slot16, run, MaskSlot<Slot16>),
                kernel!(Layout::RowPair, run, MaskSlot<RowPair>),
                kernel!(wide(Format::Q2_0), run, MaskSlot<Wide<64>>),
                kernel!(wide(Format::Pq2_0), run, MaskSlot<Wide<128>>),
                kernel!(wide(Format::Tq2_0), run, MaskSlot<Wide<256>>),
            ];
        }
    };
}

/// Eight rows are two vectors.
const fn wide(source: Format) -> Layout {
    Layout::Wide2 {
        source,
        rows: TileRows::R8,
    }
}

kernels!(neon, Neon, "neon", Isa::Neon, crate::kernels::always);
kernels!(with_dotprod, Dotprod, "neon,dotprod", Isa::Dotprod, dotprod);
kernels!(with_i8mm, I8mm, "neon,dotprod,i8mm", Isa::I8mm, i8mm);

/// All of them, slowest first.
pub(super) static KERNELS: &[&[Kernel]] = &[
    &fours::KERNELS,
    &neon::KERNELS,
    &with_dotprod::KERNELS,
    &with_i8mm::KERNELS,
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::kernels::{Form, all, available, oracle};

    /// The sets that `TERN_EXPECT_ISA` names (`just test-arm` knows its emulated cores), else those that were detected.
    fn expected_sets() -> Vec<Isa> {
        let arm = [Isa::Neon, Isa::Dotprod, Isa::I8mm];
        match std::env::var("TERN_EXPECT_ISA") {
            Ok(names) => arm
                .into_iter()
                .filter(|isa| names.split(',').any(|n| n == isa.name()))
                .collect(),
            Err(_) => arm.into_iter().filter(|isa| isa.available()).collect(),
        }
    }

    /// Every kernel of every expected set is offered on this core, no other is, and the oracle reaches each.
    #[test]
    fn every_kernel_of_this_core_runs() {
        let sets = expected_sets();
        let ternary = |k: &&Kernel| k.form() == Form::Q8K && k.isa() != Isa::Scalar;
        let expected: HashSet<_> = all()
            .filter(ternary)
            .filter(|k| sets.contains(&k.isa()))
            .map(Kernel::name)
            .collect();
        let outcomes = oracle::run(available().filter(ternary), &oracle::source_cases()).unwrap();
        for o in &outcomes {
            println!(
                "{:<28}{:>4} cases, {:>3} refused, {:>6} integers, {} wrong",
                o.kernel.name(),
                o.cases,
                o.refused,
                o.integers,
                o.wrong
            );
        }
        let ran: HashSet<_> = outcomes
            .iter()
            .filter(|o| o.integers > 0 && o.failed == 0)
            .map(|o| o.kernel.name())
            .collect();
        assert_eq!(ran, expected);
        assert_eq!(expected.len(), 11 * sets.len());
    }
}
