//! The sizes of the models that are measured without their files: the 27B, and two smaller ones of the same family.

use anyhow::Result;

use crate::formats::Format;

/// Sizes of a hybrid model: one layer in `interval` has full attention, the others linear attention. The letters are
/// those of its published description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// `27b`, as `--synthetic` takes it.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Every layer of this number, counted from 1, has full attention.
    pub interval: usize,
    /// E, values of the residual stream.
    pub embedding: usize,
    /// F, values between the feed-forward projections.
    pub feed_forward: usize,
    /// Query heads of full attention.
    pub heads: usize,
    /// Its key/value heads.
    pub kv_heads: usize,
    /// D, values of such a head.
    pub head_dim: usize,
    /// R, values of a head that rotary positions turn.
    pub rope_dims: usize,
    /// Hk, key heads of linear attention.
    pub key_heads: usize,
    /// Hv, its value heads.
    pub value_heads: usize,
    /// S, values of such a head.
    pub state_size: usize,
    /// Taps of the convolution.
    pub conv_taps: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Values that the Hadamard transform mixes.
    pub hadamard: usize,
}

/// The 27B that the sources measured.
pub const SHAPE_27B: Shape = Shape {
    name: "27b",
    layers: 64,
    interval: 4,
    embedding: 5120,
    feed_forward: 17408,
    heads: 24,
    kv_heads: 4,
    head_dim: 256,
    rope_dims: 64,
    key_heads: 16,
    value_heads: 48,
    state_size: 128,
    conv_taps: 4,
    vocabulary: 248_320,
    hadamard: 1024,
};

/// A synthetic 8B of the same family.
pub const SHAPE_8B: Shape = Shape {
    name: "8b",
    layers: 32,
    embedding: 4096,
    feed_forward: 12288,
    heads: 16,
    value_heads: 32,
    vocabulary: 65536,
    ..SHAPE_27B
};

/// A synthetic 1B of the same family.
pub const SHAPE_1B: Shape = Shape {
    name: "1b",
    layers: 16,
    embedding: 2048,
    feed_forward: 6144,
    heads: 8,
    kv_heads: 2,
    value_heads: 16,
    vocabulary: 32768,
    ..SHAPE_27B
};

/// A weight matrix that one token streams through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Its layer, `None` for the head.
    pub layer: Option<usize>,
    /// Its name within the layer, without `.weight`: `ffn_gate`.
    pub name: &'static str,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

impl Matrix {
    /// Weights.
    pub fn weights(&self) -> u64 {
        self.rows as u64 * self.cols as u64
    }

    /// The tensor's name in a file: `blk.3.ffn_gate.weight`.
    pub fn tensor(&self) -> String {
        match self.layer {
            Some(layer) => format!("blk.{layer}.{}.weight", self.name),
            None => format!("{}.weight", self.name),
        }
    }
}

impl Shape {
    /// Every shape, largest first.
    pub const ALL: [Shape; 3] = [SHAPE_27B, SHAPE_8B, SHAPE_1B];

    /// The shape of that name.
    pub fn from_name(name: &str) -> Option<Shape> {
        Self::ALL.into_iter().find(|shape| shape.name == name)
    }

    /// Whether `layer`, counted from 0, has full attention.
    pub fn is_full(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.interval)
    }

    /// Layers of linear attention.
    pub fn linear_layers(&self) -> usize {
        self.layers - self.layers / self.interval
    }

    /// Channels of the convolution: q, k and v of linear attention.
    pub fn conv_channels(&self) -> usize {
        (2 * self.key_heads + self.value_heads) * self.state_size
    }

    /// The matrices of a layer, in the order in which a token meets them.
    pub fn layer(&self, layer: usize) -> Vec<Matrix> {
        let (e, f) = (self.embedding, self.feed_forward);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let v = self.value_heads * self.state_size;
        let mixer: &[_] = if self.is_full(layer) {
            &[
                ("attn_q", 2 * q, e),
                ("attn_k", kv, e),
                ("attn_v", kv, e),
                ("attn_output", e, q),
            ]
        } else {
            &[
                ("attn_qkv", self.conv_channels(), e),
                ("attn_gate", v, e),
                ("ssm_out", e, v),
            ]
        };
        let feed_forward = [("ffn_gate", f, e), ("ffn_up", f, e), ("ffn_down", e, f)];
        let all = mixer.iter().chain(&feed_forward);
        all.map(|&(name, rows, cols)| Matrix {
            layer: Some(layer),
            name,
            rows,
            cols,
        })
        .collect()
    }

    /// The head, `vocabulary` x E.
    pub fn head(&self) -> Matrix {
        Matrix {
            layer: None,
            name: "output",
            rows: self.vocabulary,
            cols: self.embedding,
        }
    }

    /// Every matrix that one token streams, in order, the head last.
    pub fn matrices(&self) -> Vec<Matrix> {
        let layers = (0..self.layers).flat_map(|layer| self.layer(layer));
        layers.chain([self.head()]).collect()
    }

    /// Weights streamed a token.
    pub fn weights(&self) -> u64 {
        self.matrices().iter().map(Matrix::weights).sum()
    }

    /// Bytes of weights streamed a token.
    ///
    /// # Errors
    /// A format whose block does not divide a width.
    pub fn weight_bytes(&self, format: Format) -> Result<u64> {
        let bytes = |m: &Matrix| Ok(format.matrix_bytes(m.rows, m.cols)? as u64);
        self.matrices().iter().map(bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_27b_has_the_published_sizes() {
        let shape = Shape::from_name("27b").unwrap();
        let matrices = shape.matrices();
        assert_eq!(matrices.len(), 401);
        assert_eq!(shape.weights(), 25_598_361_600);
        assert_eq!(shape.weight_bytes(Format::Pq2_0).unwrap(), 6_799_564_800);
        assert_eq!(shape.weight_bytes(Format::Ptq1_0).unwrap(), 5_599_641_600);
        assert_eq!(shape.conv_channels(), 10240);
        assert_eq!(matrices[0].tensor(), "blk.0.attn_qkv.weight");
        assert_eq!((matrices[0].rows, matrices[0].cols), (10240, 5120));
        let q = matrices.iter().find(|m| m.name == "attn_q").unwrap();
        assert_eq!((q.layer, q.rows, q.cols), (Some(3), 12288, 5120));
        let k = matrices.iter().find(|m| m.name == "attn_k").unwrap();
        assert_eq!((k.rows, k.cols), (1024, 5120));
        assert_eq!(matrices[400].tensor(), "output.weight");
    }

    #[test]
    fn every_shape_is_consistent() {
        for shape in Shape::ALL {
            assert_eq!(Shape::from_name(shape.name), Some(shape));
            assert!(shape.value_heads.is_multiple_of(shape.key_heads));
            assert!(shape.heads.is_multiple_of(shape.kv_heads));
            for m in shape.matrices() {
                assert!(m.cols.is_multiple_of(shape.hadamard), "{m:?}");
                assert!(m.rows.is_multiple_of(16), "{m:?}");
            }
        }
        assert_eq!(Shape::from_name("70b"), None);
    }
}
