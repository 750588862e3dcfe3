//! Counts the vector instructions of a kernel's decode loop, in the compiled code of the running process.
//!
//! A decode loop is told by what it does: a backward branch over dot instructions and over what unpacks their operands, with
//! no such loop inside. Of several (a kernel may also decode two tokens at once, or the last blocks of a row) it is one over a
//! whole block at least, of these the one that unpacks most for a dot, to the nearest half, and then the one with the most dots.

use anyhow::Result;

use super::Kernel;

/// Instructions of one iteration of a decode loop for one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Dot products of bytes: `vpdpbusd`, or `vpmaddubsw` where there is none.
    pub dots: usize,
    /// What turns codes into operands: logic, shifts, byte shuffles and extensions, byte additions and comparisons. The
    /// shifts that weigh the slots of a finished block count here too.
    pub unpack: usize,
    /// The other vector arithmetic: sums across lanes, activations put in order, scales.
    pub other: usize,
    /// Reads from memory, as instructions of their own or as operands.
    pub loads: usize,
    /// Weights that the dots multiply: one a byte.
    pub weights: usize,
}

impl Census {
    /// A count scaled to 64 weights.
    pub fn per_64_weights(&self, count: usize) -> f64 {
        count as f64 * 64.0 / self.weights as f64
    }
}

/// Counts a kernel's decode loop.
///
/// # Errors
/// Where it cannot be found, or on another architecture, says so in words fit for a verdict.
pub fn census(kernel: &Kernel) -> Result<Census> {
    // SAFETY: a kernel's code is a function.
    unsafe { census_of(&kernel.name(), kernel.code(), &DOTS) }
}

/// Mnemonics of dot products, as the disassembler spells them.
pub(super) const DOTS: [&str; 2] = ["Vpdpbusd", "Vpmaddubsw"];

/// Counts a loop of any function that is told by other instructions than dots, `work`: these then count as [`Census::dots`].
///
/// # Errors
/// As [`census`].
///
/// # Safety
/// `code` is the start of a function of this process.
pub(super) unsafe fn census_of(name: &str, code: *const u8, work: &[&str]) -> Result<Census> {
    #[cfg(target_arch = "x86_64")]
    {
        x86_64::census(name, code as u64, work)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (code, work);
        anyhow::bail!("{name}: instructions are counted on x86-64 only")
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::ops::Range;

    use anyhow::{Context, Result};
    use iced_x86::{Decoder, DecoderError, DecoderOptions, FlowControl, Instruction, OpKind};

    use super::Census;

    /// Functions of more bytes than this are not looked at.
    const FUNCTION: u64 = 1 << 18;

    /// The smallest page: memory is mapped in whole ones.
    const PAGE: u64 = 4096;

    /// Weights of a block: a loop over fewer is a piece of the code for the last blocks of a row.
    const BLOCK: usize = 128;

    /// The longest instruction.
    const LONGEST: usize = 15;

    pub fn census(name: &str, code: u64, work: &[&str]) -> Result<Census> {
        let code = function(code);
        let loops = loops(&code);
        let counts = loops.iter().map(|l| count(&code[l.clone()], work));
        let counts: Vec<Census> = counts.collect();
        let decodes = |i: usize| counts[i].dots > 0 && counts[i].unpack > 0;
        let innermost = |&i: &usize| {
            let inside = |j: usize| contains(&loops[i], &loops[j]) && counts[j].dots > 0;
            decodes(i) && !(0..loops.len()).any(inside)
        };
        let unpacks = |c: &Census| (4 * c.unpack + c.dots) / (2 * c.dots);
        let found = (0..loops.len()).filter(innermost).map(|i| counts[i]);
        found
            .max_by_key(|c| (c.weights >= BLOCK, unpacks(c), c.dots))
            .with_context(|| format!("{name}: no decode loop in its code"))
    }

    fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
        outer != inner && outer.start <= inner.start && inner.end <= outer.end
    }

    /// The instruction at an address.
    fn decode(at: u64) -> Instruction {
        let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(LONGEST);
        let mut instruction = Instruction::default();
        for len in [in_page.min(LONGEST), LONGEST] {
            // SAFETY: `at` is an instruction of a mapped function, and its page is mapped to the end; past that end, only when
            // the instruction goes on there.
            let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
            let mut decoder = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE);
            instruction = decoder.decode();
            if decoder.last_error() != DecoderError::NoMoreBytes {
                break;
            }
        }
        instruction
    }

    /// The instructions of the function at an address: up to an end of flow that no branch leads past.
    fn function(start: u64) -> Vec<Instruction> {
        let mut code = Vec::new();
        let (mut at, mut furthest) = (start, start);
        while at - start < FUNCTION {
            let instruction = decode(at);
            if instruction.is_invalid() {
                break;
            }
            at = instruction.next_ip();
            if let Some(target) = branch(&instruction)
                && target < start + FUNCTION
            {
                furthest = furthest.max(target);
            }
            let ends = matches!(
                instruction.flow_control(),
                FlowControl::Return
                    | FlowControl::UnconditionalBranch
                    | FlowControl::IndirectBranch
                    | FlowControl::Interrupt
                    | FlowControl::Exception
            );
            code.push(instruction);
            if ends && at > furthest {
                break;
            }
        }
        code
    }

    /// Where a jump leads, if it says.
    fn branch(instruction: &Instruction) -> Option<u64> {
        let jumps = matches!(
            instruction.flow_control(),
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
        );
        jumps.then(|| instruction.near_branch_target())
    }

    /// Ranges of instructions that a backward branch ends.
    fn loops(code: &[Instruction]) -> Vec<Range<usize>> {
        let back = |(end, instruction): (usize, &Instruction)| {
            let target = branch(instruction).filter(|&t| t <= instruction.ip())?;
            let start = code.binary_search_by_key(&target, Instruction::ip).ok()?;
            Some(start..end + 1)
        };
        code.iter().enumerate().filter_map(back).collect()
    }

    fn count(code: &[Instruction], work: &[&str]) -> Census {
        let mut census = Census::default();
        for instruction in code {
            let name = format!("{:?}", instruction.mnemonic());
            let registers = (0..instruction.op_count())
                .filter(|&i| instruction.op_kind(i) == OpKind::Register)
                .map(|i| instruction.op_register(i));
            let vectors: Vec<_> = registers.filter(|r| r.is_vector_register()).collect();
            let Some(widest) = vectors.iter().map(|r| r.size()).max() else {
                continue;
            };
            let reads =
                (1..instruction.op_count()).any(|i| instruction.op_kind(i) == OpKind::Memory);
            census.loads += usize::from(reads);
            match kind(instruction, &name, reads, vectors.len(), work) {
                Kind::Dot => {
                    census.dots += 1;
                    census.weights += widest;
                }
                Kind::Unpack => census.unpack += 1,
                Kind::Other => census.other += 1,
                Kind::Free => {}
            }
        }
        census
    }

    enum Kind {
        Dot,
        Unpack,
        Other,
        /// Moves, loads, stores, and registers set to zero: no arithmetic.
        Free,
    }

    fn kind(
        instruction: &Instruction,
        name: &str,
        reads: bool,
        vectors: usize,
        work: &[&str],
    ) -> Kind {
        const UNPACK: [&str; 21] = [
            "Vpand",
            "Vpor",
            "Vpxor",
            "Vpternlog",
            "Vpsrl",
            "Vpsll",
            "Vpsra",
            "Vpmovzx",
            "Vpshufb",
            "Vpermb",
            "Vpermi2b",
            "Vpermt2b",
            "Vpaddb",
            "Vpsubb",
            "Vpsubus",
            "Vpcmp",
            "Vpabsb",
            "Vpminub",
            "Vpmaxub",
            "Vpmullw",
            "Vpblend",
        ];
        const MOVES: [&str; 12] = [
            "Vmovdqa",
            "Vmovdqu",
            "Vmovaps",
            "Vmovups",
            "Vmovapd",
            "Vmovupd",
            "Vmovd",
            "Vmovq",
            "Vmovss",
            "Vmovsd",
            "Vmovntdqa",
            "Vzero",
        ];
        let one_of = |names: &[&str]| names.iter().any(|n| name.starts_with(n));
        let stores = instruction.op0_kind() == OpKind::Memory;
        let zeroes = name.contains("xor")
            && instruction.op_count() == 3
            && instruction.op1_kind() == OpKind::Register
            && instruction.op2_kind() == OpKind::Register
            && instruction.op1_register() == instruction.op2_register();
        let duplicates = name.starts_with("Vmovddup");
        if work.contains(&name) {
            Kind::Dot
        } else if zeroes
            || stores
            || one_of(&MOVES) && !duplicates && (reads || vectors == 2)
            || reads && (name.contains("broadcast") || duplicates)
        {
            Kind::Free
        } else if one_of(&UNPACK) {
            Kind::Unpack
        } else {
            Kind::Other
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn counted(bytes: &[u8]) -> Census {
            let mut decoder = Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE);
            count(&decoder.iter().collect::<Vec<_>>(), &super::super::DOTS)
        }

        #[test]
        fn kinds_of_instructions() {
            #[rustfmt::skip]
            let code = [
                0x0f, 0x18, 0x8e, 0x00, 0x10, 0x00, 0x00,       // prefetcht0 [rsi + 4096]
                0xc5, 0xfe, 0x6f, 0x0e,                         // vmovdqu ymm1, [rsi]
                0xc5, 0xf5, 0xdb, 0xd0,                         // vpand ymm2, ymm1, ymm0
                0xc5, 0xed, 0x72, 0xd2, 0x02,                   // vpsrld ymm2, ymm2, 2
                0xc4, 0xe2, 0x6d, 0x04, 0x1f,                   // vpmaddubsw ymm3, ymm2, [rdi]
                0xc5, 0xdd, 0xfe, 0xe3,                         // vpaddd ymm4, ymm4, ymm3
                0xc5, 0xd5, 0xef, 0xed,                         // vpxor ymm5, ymm5, ymm5
                0x48, 0x83, 0xc6, 0x20,                         // add rsi, 32
            ];
            let expected = Census {
                dots: 1,
                unpack: 2,
                other: 1,
                loads: 2,
                weights: 32,
            };
            assert_eq!(counted(&code), expected);
        }

        #[test]
        fn a_backward_branch_makes_a_loop() {
            // 0x1000: dec eax; 0x1002: jnz 0x1000; 0x1004: ret
            let bytes = [0xff, 0xc8, 0x75, 0xfc, 0xc3];
            let mut decoder = Decoder::with_ip(64, &bytes, 0x1000, DecoderOptions::NONE);
            let code: Vec<_> = decoder.iter().collect();
            let found = loops(&code);
            assert_eq!((found.len(), &found[0]), (1, &(0..2)));
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::kernels::{self, Isa};

    /// In an optimized build. Instructions are not run, so the CPU need not have them.
    #[test]
    fn every_simd_kernel_has_a_decode_loop() {
        let ternary = |k: &&Kernel| k.layout().source().is_ternary() && k.isa() != Isa::Scalar;
        for kernel in kernels::all().filter(ternary) {
            let census = census(kernel).unwrap();
            let name = kernel.name();
            assert!(
                census.weights >= 128 && census.weights <= 4096,
                "{name}: {census:?}"
            );
            // A dot of 256 bits takes 32 weights; base 3 has five of them in a word.
            assert!(census.weights.is_multiple_of(32), "{name}: {census:?}");
            assert!(census.unpack >= census.dots / 2, "{name}: {census:?}");
            assert!(
                census.unpack + census.other <= 16 * census.dots,
                "{name}: {census:?}"
            );
        }
    }
}
