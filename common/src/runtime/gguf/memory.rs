//! What a run needs in memory, from the keys alone.

use anyhow::{Result, ensure};

use super::Gguf;

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
    /// The only architecture whose keys are understood.
    pub const ARCHITECTURE: &str = "qwen35";

    /// What `ctx` tokens take, prefilled in batches of `batch`. `None` for an architecture that is
    /// not known. Sums that no machine has end at `u64::MAX`.
    ///
    /// # Errors
    /// A key that is missing or of the wrong type, or an attention interval of 0.
    pub fn of(gguf: &Gguf, ctx: u64, batch: u64) -> Result<Option<Self>> {
        if gguf.str("general.architecture")? != Self::ARCHITECTURE {
            return Ok(None);
        }
        let name = |key: &str| format!("{}.{key}", Self::ARCHITECTURE);
        let get = |key: &str| gguf.u32(&name(key)).map(u128::from);
        let optional = |key: &str, default: u128| match gguf.get(&name(key)) {
            Some(value) => value.u32().map(u128::from),
            None => Ok(default),
        };
        let (embedding, ffn) = (get("embedding_length")?, get("feed_forward_length")?);
        let (heads, kv_heads) = (
            get("attention.head_count")?,
            get("attention.head_count_kv")?,
        );
        let key = get("attention.key_length")?;
        let value = optional("attention.value_length", key)?;
        let (conv, state) = (get("ssm.conv_kernel")?, get("ssm.state_size")?);
        let (key_heads, value_heads) = (get("ssm.group_count")?, get("ssm.time_step_rank")?);
        let interval = get("full_attention_interval")?;
        ensure!(
            interval > 0,
            "{}: key {}: found 0, expected at least 1",
            gguf.file(),
            name("full_attention_interval")
        );
        let layers = get("block_count")?.saturating_sub(optional("nextn_predict_layers", 0)?);
        let full = layers / interval;
        let linear = layers - full;
        let vocabulary = match gguf.find_tensor("token_embd.weight") {
            Some(tensor) => tensor.rows() as u128,
            None => 0,
        };
        let (ctx_, batch_) = (u128::from(ctx), u128::from(batch.min(ctx)));

        let kv = kv_heads * (key + value);
        let qkv = 2 * key_heads * state + value_heads * state;
        let history = conv.saturating_sub(1) * qkv;
        let attention = 2 * heads * key + kv + heads * value;
        let mixer = attention.max(2 * qkv + 2 * value_heads * state);
        // Residual, its norm and a product's output; the widest inner activations; logits of the
        // last token.
        let activations = 3 * embedding + mixer.max(2 * ffn);
        // Keys are u32, so products of three fit u128; the longer ones saturate.
        let f32s = |n: u128| u64::try_from(n.saturating_mul(4)).unwrap_or(u64::MAX);
        let weights = gguf.tensors().iter().map(|t| t.bytes);
        Ok(Some(Self {
            ctx,
            batch: batch.min(ctx),
            weights: weights.fold(0, u64::saturating_add),
            kv_cache: f32s(full.saturating_mul(ctx_).saturating_mul(kv)),
            recurrent: f32s(linear.saturating_mul(value_heads * state * state + history)),
            scratch: f32s(
                batch_
                    .saturating_mul(activations)
                    .saturating_add(vocabulary),
            ),
        }))
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        [self.weights, self.kv_cache, self.recurrent, self.scratch]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}
