//! What a run needs in memory, from the header alone.

use super::Gguf;
use crate::runtime::hyper::{EMBEDDING, Hyper};
use crate::runtime::state::HISTORY;

/// Bytes that a run of one sequence takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Tokens of context.
    pub ctx: u64,
    /// Tokens a batch of the prefill.
    pub batch: u64,
    /// Tensor data, in the file's formats; repacking takes no more.
    pub weights: u64,
    /// Keys and values of the full-attention layers, f32.
    pub kv_cache: u64,
    /// States and last convolution inputs of the linear layers, f32.
    pub recurrent: u64,
    /// Activations of a batch and the logits, f32.
    pub scratch: u64,
}

impl Memory {
    /// What `ctx` tokens take, prefilled in batches of `batch`. Sums that no machine has end at `u64::MAX`.
    pub fn of(gguf: &Gguf, hyper: &Hyper, ctx: u64, batch: u64) -> Self {
        let wide = |n: usize| n as u128;
        let (embedding, ffn) = (wide(hyper.embedding), wide(hyper.feed_forward));
        let (full, linear) = (wide(hyper.full_layers()), wide(hyper.linear_layers()));
        let (inner, channels) = (wide(hyper.inner()), wide(hyper.channels()));
        let vocabulary = gguf.find_tensor(EMBEDDING).map_or(0, |t| wide(t.rows()));
        let (ctx_, batch_) = (u128::from(ctx), u128::from(batch.min(ctx)));

        let kv = wide(2 * hyper.kv_heads * hyper.head_dim);
        let attention = wide(3 * hyper.heads * hyper.head_dim) + kv;
        let mixer = attention.max(2 * channels + 2 * inner);
        // Residual, its norm and a product's output; the widest inner activations; logits of the
        // last token.
        let activations = 3 * embedding + mixer.max(2 * ffn);
        let state = inner * wide(hyper.state_size) + wide(HISTORY) * channels;
        // The longest are products of context, layers, heads and their size, which saturate.
        let f32s = |n: u128| u64::try_from(n.saturating_mul(4)).unwrap_or(u64::MAX);
        let weights = gguf.tensors().iter().map(|t| t.bytes);
        Self {
            ctx,
            batch: batch.min(ctx),
            weights: weights.fold(0, u64::saturating_add),
            kv_cache: f32s(full.saturating_mul(ctx_).saturating_mul(kv)),
            recurrent: f32s(linear.saturating_mul(state)),
            scratch: f32s(
                batch_
                    .saturating_mul(activations)
                    .saturating_add(vocabulary),
            ),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        [self.weights, self.kv_cache, self.recurrent, self.scratch]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}
