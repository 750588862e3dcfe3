//! What the weights of a tensor look like, without decoding them for use.

use half::{bf16, f16};

use super::{Gguf, Tensor};
use crate::formats::Format;

/// Counts over one or more tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Ternary codes in all; 0 for other formats.
    pub codes: u64,
    /// Codes of weight 0.
    pub zeros: u64,
    /// Codes 3: +2, which two bits can hold and a ternary checkpoint never does.
    pub code_3: u64,
    /// Block scales, or plain values, that are NaN or infinite.
    pub non_finite: u64,
}

impl Survey {
    /// Reads one tensor through, on all processors. Memory stays small whatever the tensor's size.
    pub fn of(gguf: &Gguf, tensor: &Tensor) -> Self {
        let bytes = gguf.data(tensor);
        let block = tensor.format.block_bytes();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        // Starting a thread costs more than reading this much.
        let share = bytes
            .len()
            .div_ceil(threads)
            .max(1 << 20)
            .next_multiple_of(block);
        std::thread::scope(|scope| {
            let parts: Vec<_> = bytes
                .chunks(share)
                .map(|part| scope.spawn(move || Self::of_blocks(tensor.format, part)))
                .collect();
            let parts = parts.into_iter().map(|part| match part.join() {
                Ok(survey) => survey,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            parts.fold(Self::default(), Self::plus)
        })
    }

    /// The counts of both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            codes: self.codes + other.codes,
            zeros: self.zeros + other.zeros,
            code_3: self.code_3 + other.code_3,
            non_finite: self.non_finite + other.non_finite,
        }
    }

    /// Share of zeros among the codes, 0 to 1; `None` without codes.
    pub fn zero_share(self) -> Option<f64> {
        (self.codes > 0).then(|| self.zeros as f64 / self.codes as f64)
    }

    /// Whole blocks of one format.
    fn of_blocks(format: Format, bytes: &[u8]) -> Self {
        let mut survey = Self::default();
        let scale = |block: &[u8]| f16::from_le_bytes([block[0], block[1]]).is_finite();
        survey.non_finite = count(match format {
            Format::F32 => bytes
                .as_chunks()
                .0
                .iter()
                .filter(|&&x| !f32::from_le_bytes(x).is_finite())
                .count(),
            Format::F16 => bytes
                .as_chunks()
                .0
                .iter()
                .filter(|&&x| !f16::from_le_bytes(x).is_finite())
                .count(),
            Format::Bf16 => bytes
                .as_chunks()
                .0
                .iter()
                .filter(|&&x| !bf16::from_le_bytes(x).is_finite())
                .count(),
            Format::Q4_0 | Format::Q8_0 => bytes
                .chunks_exact(format.block_bytes())
                .filter(|block| !scale(block))
                .count(),
            Format::Tq1_0 | Format::Tq2_0 | Format::Q2_0 | Format::Pq2_0 | Format::Ptq1_0 => 0,
        });
        if !format.is_ternary() {
            return survey;
        }
        let blocks = 64;
        let mut codes = vec![0u8; blocks * format.block_weights()];
        let mut scales = vec![f16::ZERO; blocks];
        for part in bytes.chunks(blocks * format.block_bytes()) {
            let n = part.len() / format.block_bytes();
            let (codes, scales) = (&mut codes[..n * format.block_weights()], &mut scales[..n]);
            if format.unpack(part, codes, scales).is_err() {
                continue; // only a length that does not fit: these fit
            }
            survey.codes += count(codes.len());
            survey.zeros += count(codes.iter().filter(|&&u| u == 1).count());
            survey.code_3 += count(codes.iter().filter(|&&u| u == 3).count());
            survey.non_finite += count(scales.iter().filter(|d| !d.is_finite()).count());
        }
        survey
    }
}

fn count(n: usize) -> u64 {
    n as u64
}
