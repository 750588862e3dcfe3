//! What a sequence leaves behind: recurrent states, convolution histories, the key/value cache.
//!
//! A batch can be *proposed*: it runs, but the state does not move. Each proposed token's correction of the recurrent state (key,
//! correction, decay), its convolution inputs and its keys and values are kept aside, and [`State::accept`] takes any number of them
//! from the front. The convolution history moves at once, the key/value cache needs no move, and the recurrent states catch up at
//! the head of the next pass over them. So a rollback costs nothing, and a step with speculation reads and writes the states once,
//! like any other.

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use super::attention::TILE;
use super::deltanet::TAPS;
use super::hyper::Hyper;
use super::memory::AlignedBuf;

/// Samples of history that the convolution keeps.
pub(super) const HISTORY: usize = TAPS - 1;

/// The state of one sequence.
pub struct State {
    pub(super) shape: Shape,
    /// M, `[linear layer][value head]` of S * S.
    pub(super) recurrent: AlignedBuf,
    /// `[linear layer][sample, oldest first][channel]`.
    pub(super) history: Vec<f32>,
    /// `[full layer][kv head][tile][dimension][16]`.
    pub(super) keys: Vec<f32>,
    /// `[full layer][kv head][position][dimension]`.
    pub(super) values: Vec<f32>,
    /// What was consumed.
    pub(super) tokens: Vec<u32>,
    pub(super) steps: Steps,
}

/// Sizes of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub context: usize,
    pub linear_layers: usize,
    pub full_layers: usize,
    pub heads: usize,
    pub size: usize,
    pub channels: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Tokens that can be proposed at once.
    pub proposals: usize,
}

/// What proposed tokens did.
pub(super) struct Steps {
    /// `[linear layer][value head][token][S]`.
    pub k: Vec<f32>,
    pub d: Vec<f32>,
    /// `[linear layer][value head][token]`.
    pub decay: Vec<f32>,
    /// `[linear layer][token][channel]`.
    pub inputs: Vec<f32>,
    /// Tokens that were proposed and not yet accepted or dropped.
    pub proposed: Vec<u32>,
    /// Tokens that were accepted and that the recurrent states do not hold yet.
    pub accepted: usize,
}

/// A copy of a state, to come back to.
#[derive(Clone)]
pub struct Snapshot {
    recurrent: Vec<u8>,
    history: Vec<f32>,
    tokens: Vec<u32>,
}

impl Shape {
    fn new(hyper: &Hyper, context: usize, proposals: usize) -> Self {
        Shape {
            context,
            linear_layers: hyper.linear_layers(),
            full_layers: hyper.full_layers(),
            heads: hyper.value_heads,
            size: hyper.state_size,
            channels: hyper.channels(),
            kv_heads: hyper.kv_heads,
            head_dim: hyper.head_dim,
            proposals,
        }
    }

    /// Values of a key/value head's keys: whole tiles.
    pub fn head_keys(&self) -> usize {
        self.context.next_multiple_of(TILE) * self.head_dim
    }

    pub fn head_values(&self) -> usize {
        self.context * self.head_dim
    }

    /// Values of: recurrent states, history, keys, values, steps. `None` past the end of usize.
    fn lengths(&self) -> Option<[usize; 5]> {
        let product = |factors: &[usize]| factors.iter().try_fold(1usize, |p, &f| p.checked_mul(f));
        let heads = product(&[self.linear_layers, self.heads])?;
        let positions = self.context.checked_next_multiple_of(TILE)?;
        let per_position = product(&[self.full_layers, self.kv_heads, self.head_dim])?;
        let steps = product(&[heads, self.proposals, self.size])?;
        Some([
            product(&[heads, self.size, self.size])?,
            product(&[self.linear_layers, HISTORY, self.channels])?,
            product(&[per_position, positions])?,
            product(&[per_position, self.context])?,
            steps,
        ])
    }
}

impl State {
    /// The empty state, with room for `context` tokens, of which `proposals` can be proposed at once.
    ///
    /// # Errors
    /// If that is more memory than the system gives.
    pub fn new(hyper: &Hyper, context: usize, proposals: usize) -> Result<Self> {
        let shape = Shape::new(hyper, context, proposals);
        let too_large =
            || format!("state: {context} tokens of context are too large for this machine");
        let [recurrent, history, keys, values, steps] = shape.lengths().with_context(too_large)?;
        let bytes = recurrent.checked_mul(4).with_context(too_large)?;
        Ok(State {
            shape,
            recurrent: AlignedBuf::new(bytes)?,
            history: zeroed(history)?,
            keys: zeroed(keys)?,
            values: zeroed(values)?,
            tokens: Vec::with_capacity(context),
            steps: Steps {
                k: zeroed(steps)?,
                d: zeroed(steps)?,
                decay: zeroed(steps / shape.size)?,
                inputs: zeroed(shape.linear_layers * proposals * shape.channels)?,
                proposed: Vec::with_capacity(proposals),
                accepted: 0,
            },
        })
    }

    /// Bytes that [`State::new`] asks for; `None` past the end of usize.
    pub fn bytes(hyper: &Hyper, context: usize, proposals: usize) -> Option<usize> {
        let [recurrent, history, keys, values, steps] =
            Shape::new(hyper, context, proposals).lengths()?;
        let parts = [recurrent, history, keys, values, steps, steps];
        parts
            .iter()
            .try_fold(0usize, |sum, n| sum.checked_add(n.checked_mul(4)?))
    }

    /// Tokens consumed.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens there is room for.
    pub fn context(&self) -> usize {
        self.shape.context
    }

    /// Takes the first `n` proposed tokens and drops the others.
    ///
    /// # Errors
    /// If fewer were proposed.
    pub(super) fn accept(&mut self, n: usize) -> Result<()> {
        let proposed = self.steps.proposed.len();
        ensure!(
            n <= proposed,
            "state: {n} tokens accepted of {proposed} proposed"
        );
        if proposed == 0 {
            return Ok(()); // earlier ones that the states do not hold yet stay accepted
        }
        let (channels, proposals) = (self.shape.channels, self.shape.proposals);
        for layer in 0..self.shape.linear_layers {
            let history = &mut self.history[layer * HISTORY * channels..][..HISTORY * channels];
            let inputs = &self.steps.inputs[layer * proposals * channels..][..n * channels];
            extend_history(history, inputs);
        }
        self.tokens.extend(&self.steps.proposed[..n]);
        self.steps.proposed.clear();
        self.steps.accepted = n;
        Ok(())
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.recurrent.fill(0);
        self.history.fill(0.0);
        self.tokens.clear();
        self.steps.proposed.clear();
        self.steps.accepted = 0;
    }

    /// A copy. The recurrent states must be up to date.
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            recurrent: self.recurrent.to_vec(),
            history: self.history.clone(),
            tokens: self.tokens.clone(),
        }
    }

    /// Goes back to a snapshot. Keys and values stay: they depend on nothing but the tokens.
    ///
    /// # Errors
    /// If the tokens of the snapshot are not the first of this state's, or the shapes differ.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        let n = snapshot.tokens.len();
        ensure!(
            self.tokens.starts_with(&snapshot.tokens),
            "state: the snapshot of {n} tokens is not of this text"
        );
        ensure!(
            snapshot.recurrent.len() == self.recurrent.len()
                && snapshot.history.len() == self.history.len(),
            "state: the snapshot is of another model"
        );
        self.recurrent.copy_from_slice(&snapshot.recurrent);
        self.history.copy_from_slice(&snapshot.history);
        self.tokens.truncate(n);
        self.steps.proposed.clear();
        self.steps.accepted = 0;
        Ok(())
    }

    /// SHA-256 over all that the next token depends on. The recurrent states must be up to date.
    pub(super) fn hash(&self) -> String {
        let mut hash = Sha256::new();
        let shape = &self.shape;
        let n = self.tokens.len();
        hash.update(bytemuck::cast_slice(&self.tokens));
        hash.update(&self.recurrent[..]);
        hash.update(bytemuck::cast_slice(&self.history));
        let (whole, rest) = (n / TILE * TILE * shape.head_dim, n % TILE);
        for keys in self.keys.chunks_exact(shape.head_keys()) {
            hash.update(bytemuck::cast_slice(&keys[..whole]));
            for row in
                keys[whole..]
                    .chunks_exact(TILE)
                    .take(if rest > 0 { shape.head_dim } else { 0 })
            {
                hash.update(bytemuck::cast_slice(&row[..rest]));
            }
        }
        for values in self.values.chunks_exact(shape.head_values()) {
            hash.update(bytemuck::cast_slice(&values[..n * shape.head_dim]));
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// The last samples of `history` and `inputs` together, into `history`. Both are `[sample][channel]`.
pub(super) fn extend_history(history: &mut [f32], inputs: &[f32]) {
    if inputs.len() >= history.len() {
        history.copy_from_slice(&inputs[inputs.len() - history.len()..]);
    } else {
        history.copy_within(inputs.len().., 0);
        let kept = history.len() - inputs.len();
        history[kept..].copy_from_slice(inputs);
    }
}

/// Zeros that take memory when they are touched.
fn zeroed(n: usize) -> Result<Vec<f32>> {
    let mut v: Vec<f32> = Vec::new();
    v.try_reserve_exact(n)
        .with_context(|| format!("state: {n} values were refused"))?;
    drop(v);
    Ok(vec![0.0; n])
}
