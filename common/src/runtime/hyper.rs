//! The hyper-parameters of a `qwen35` file. None of it is trusted.

use anyhow::{Result, ensure};

use super::deltanet::{STRIP, TAPS};
use super::gguf::Gguf;

/// The architecture that this runtime runs.
pub const ARCHITECTURE: &str = "qwen35";

/// Hyper-parameters, checked: no count is 0, and what must divide divides.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyper {
    /// Layers that run: blocks without the trailing ones for multi-token prediction.
    pub layers: usize,
    /// E, values of the residual stream.
    pub embedding: usize,
    /// F, values between the feed-forward projections.
    pub feed_forward: usize,
    /// Query heads of full attention.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// D, values a head; a multiple of 16.
    pub head_dim: usize,
    /// R, values of a head that rotary positions turn; even, at most D.
    pub rope_dims: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Added to mean squares before the root.
    pub eps: f32,
    /// S, values a head of linear attention; a multiple of 16.
    pub state_size: usize,
    /// Hk, key heads of linear attention.
    pub key_heads: usize,
    /// Hv, value heads; a multiple of Hk.
    pub value_heads: usize,
    /// Every layer of this number, counted from 1, is full attention.
    pub interval: usize,
    /// Tokens the model was made for, if the file says.
    pub context: Option<usize>,
}

/// Far above any model; keeps sums of sizes small.
const MAX_COUNT: usize = 1 << 24;

impl Hyper {
    /// Reads and checks the keys of a file.
    ///
    /// # Errors
    /// One line that names the file, the key, what was found and what was expected.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        gguf.key("general.architecture")?.expect_str(ARCHITECTURE)?;
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        // A count that must be there, from 1.
        let count = |name: &str| -> Result<usize> {
            let value = gguf.key(&key(name))?;
            let n = value.usize()?;
            ensure!(
                (1..=MAX_COUNT).contains(&n),
                value.unexpected(&n.to_string(), &format!("1 to {MAX_COUNT}"))
            );
            Ok(n)
        };
        let refusal = |name: &str, found: usize, expected: String| match gguf.key(&key(name)) {
            Ok(value) => value.unexpected(&found.to_string(), &expected),
            Err(error) => error,
        };
        let multiple = |name: &str, of: usize| -> Result<usize> {
            let n = count(name)?;
            ensure!(
                n.is_multiple_of(of),
                refusal(name, n, format!("a multiple of {of}"))
            );
            Ok(n)
        };

        let blocks = count("block_count")?;
        let predicting = match gguf.get(&key("nextn_predict_layers")) {
            Some(value) => value.usize()?,
            None => 0,
        };
        if predicting >= blocks {
            return Err(refusal(
                "nextn_predict_layers",
                predicting,
                format!("fewer than the {blocks} blocks"),
            ));
        }
        let kv_heads = count("attention.head_count_kv")?;
        let heads = multiple("attention.head_count", kv_heads)?;
        let head_dim = multiple("attention.key_length", STRIP)?;
        if let Some(value) = gguf.get(&key("attention.value_length")) {
            let n = value.usize()?;
            ensure!(
                n == head_dim,
                value.unexpected(&n.to_string(), &format!("the key length, {head_dim}"))
            );
        }
        let rope_dims = multiple("rope.dimension_count", 2)?;
        if rope_dims > head_dim {
            return Err(refusal(
                "rope.dimension_count",
                rope_dims,
                format!("at most the head's {head_dim}"),
            ));
        }
        let float = |name: &str, low: f32, high: f32| -> Result<f32> {
            let value = gguf.key(&key(name))?;
            let x = value.f32()?;
            ensure!(
                (low..=high).contains(&x),
                value.unexpected(&x.to_string(), &format!("{low} to {high}"))
            );
            Ok(x)
        };
        let taps = count("ssm.conv_kernel")?;
        if taps != TAPS {
            return Err(refusal("ssm.conv_kernel", taps, format!("{TAPS}")));
        }
        let state_size = multiple("ssm.state_size", STRIP)?;
        let key_heads = count("ssm.group_count")?;
        let value_heads = multiple("ssm.time_step_rank", key_heads)?;
        let inner = count("ssm.inner_size")?;
        if value_heads.checked_mul(state_size) != Some(inner) {
            return Err(refusal(
                "ssm.inner_size",
                inner,
                format!("{value_heads} heads of {state_size}"),
            ));
        }
        let interval = match gguf.get(&key("full_attention_interval")) {
            Some(_) => count("full_attention_interval")?,
            None => 4,
        };
        let context = match gguf.get(&key("context_length")) {
            Some(_) => Some(count("context_length")?),
            None => None,
        };
        Ok(Hyper {
            layers: blocks - predicting,
            embedding: count("embedding_length")?,
            feed_forward: count("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            rope_dims,
            rope_base: float("rope.freq_base", 1.0, 1e12)?,
            eps: float("attention.layer_norm_rms_epsilon", 1e-12, 0.1)?,
            state_size,
            key_heads,
            value_heads,
            interval,
            context,
        })
    }

    /// Whether layer `i` is full attention; the others are linear.
    pub fn is_full(&self, i: usize) -> bool {
        (i + 1).is_multiple_of(self.interval)
    }

    /// Layers of full attention.
    pub fn full_layers(&self) -> usize {
        self.layers / self.interval
    }

    /// Layers of linear attention.
    pub fn linear_layers(&self) -> usize {
        self.layers - self.full_layers()
    }

    /// Bytes of what the linear layers remember, f32: their states, and the last inputs of their convolutions. A token reads and
    /// writes all of it.
    pub fn state_bytes(&self) -> usize {
        let layer =
            self.value_heads * self.state_size * self.state_size + (TAPS - 1) * self.channels();
        self.linear_layers() * layer * size_of::<f32>()
    }

    /// Channels of a linear layer's convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.state_size
    }

    /// Hv S, what a linear layer gives to its output projection.
    pub fn inner(&self) -> usize {
        self.value_heads * self.state_size
    }
}

/// The embedding, and the head where there is no other.
pub const EMBEDDING: &str = "token_embd.weight";
