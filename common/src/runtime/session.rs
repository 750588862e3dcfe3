//! The forward pass: tokens in, logits out, the state moved on.
//!
//! A batch of any width gives the same bits as its tokens one by one, on any number of threads: every output is computed by one
//! thread in a fixed order. All work of some size runs on the pool; what a single token needs between two matrices (norms, Hadamard
//! transforms, quantizing) is less than a barrier costs and runs on the calling thread while the others wait for the next matrix.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Result, bail, ensure};

use super::attention;
use super::deltanet::{self, Inputs as HeadInputs, Keep, Normalize, STRIP, Steps as Replay};
use super::hadamard;
use super::hyper::Hyper;
use super::math::{self, Simd};
use super::model::{Delta, Full, Linear, Mixer, Model};
use super::pool::{Chunks, Pool};
use super::products::{Job, Schedule};
use super::shared::Shared;
use super::state::{self, HISTORY, Snapshot, State};
use crate::kernels::activations::fill;
use crate::kernels::{self, Activations};

/// Tokens that a delta-rule head takes at once, so that they stay in the second cache.
const CHUNK: usize = 32;

/// The most tokens that can be proposed at once.
pub const MAX_PROPOSALS: usize = CHUNK;

/// Tokens whose logits are computed at once.
pub const LOGITS: usize = 16;

/// What the time of a pass goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each name is its own documentation
pub enum Kind {
    Embedding,
    Norm,
    Hadamard,
    Quantize,
    Matmul,
    Delta,
    Attention,
    Elementwise,
    Barrier,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Embedding,
        Kind::Norm,
        Kind::Hadamard,
        Kind::Quantize,
        Kind::Matmul,
        Kind::Delta,
        Kind::Attention,
        Kind::Elementwise,
        Kind::Barrier,
    ];

    /// A name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Embedding => "embedding",
            Kind::Norm => "norm",
            Kind::Hadamard => "hadamard",
            Kind::Quantize => "quantize",
            Kind::Matmul => "matmul",
            Kind::Delta => "state update",
            Kind::Attention => "attention",
            Kind::Elementwise => "elementwise",
            Kind::Barrier => "barriers",
        }
    }
}

/// Seconds on the calling thread by [`Kind`]; its waits for the other threads at the end of a job count as barriers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Profile([f64; Kind::ALL.len()]);

impl Profile {
    /// Seconds of a kind.
    pub fn seconds(&self, kind: Kind) -> f64 {
        self.0[kind as usize]
    }
}

/// How large a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens of context.
    pub context: usize,
    /// Tokens that a pass takes at most.
    pub batch: usize,
    /// Of which that many can be proposed.
    pub proposals: usize,
}

impl Size {
    /// Bytes that a session takes besides the weights, up to what is lost to rounding; `None` past the end of usize.
    pub fn bytes(self, h: &Hyper, vocabulary: usize) -> Option<usize> {
        let values = [
            5 * h.embedding,
            5 * h.feed_forward,
            2 * h.channels(),
            5 * h.inner(),
            4 * h.heads * h.head_dim,
            2 * h.kv_heads * h.head_dim,
        ];
        let a_token = values
            .iter()
            .try_fold(0usize, |sum, &n| sum.checked_add(n))?;
        let work = self
            .batch
            .checked_mul(a_token)?
            .checked_add(LOGITS.checked_mul(vocabulary)?)?;
        State::bytes(h, self.context, self.proposals)?.checked_add(work.checked_mul(4)?)
    }
}

/// A model at work on one sequence.
pub struct Session<'a> {
    model: &'a Model,
    pool: &'a Pool,
    simd: Simd,
    state: State,
    work: Work,
    batch: usize,
    profile: Option<Profile>,
}

/// Buffers, allocated once.
struct Work {
    /// Quantized inputs, one for each of [`Model::inputs`].
    activations: Vec<Activations>,
    /// The residual stream, `[token][E]`.
    h: Vec<f32>,
    /// Normed or projected, `[token][E]`.
    x: Vec<f32>,
    /// The first projection: `[token][channels]`, or query and gate.
    first: Vec<f32>,
    /// The gate of linear attention.
    second: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    alpha: Vec<f32>,
    beta: Vec<f32>,
    /// What the output projection takes.
    mixed: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    logits: Vec<f32>,
    /// Cosines and sines, `[token][R]`.
    angles: Vec<f32>,
    /// Of each thread.
    scratch: Vec<f32>,
    scratch_each: usize,
    /// Tokens of the last pass.
    tokens: usize,
}

/// How a pass treats the state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Advance,
    Propose,
}

impl<'a> Session<'a> {
    /// An empty sequence.
    ///
    /// # Errors
    /// A count that is 0 or too large; memory that the system does not give.
    pub fn new(model: &'a Model, pool: &'a Pool, size: Size) -> Result<Self> {
        let Size {
            context,
            batch,
            proposals,
        } = size;
        ensure!(
            (1..=1 << 24).contains(&context),
            "context: {context} tokens, expected 1 to {}",
            1 << 24
        );
        ensure!(
            (1..=4096).contains(&batch),
            "batch: {batch} tokens, expected 1 to 4096"
        );
        ensure!(
            proposals <= MAX_PROPOSALS,
            "draft: {proposals} tokens at once, expected at most {MAX_PROPOSALS}"
        );
        let batch = batch.max(proposals).min(context);
        let h = model.hyper();
        let full = h.full_layers() > 0;
        let (qg, kv) = (2 * h.heads * h.head_dim, h.kv_heads * h.head_dim);
        // A delta head: q, k, v, corrections, read values (CHUNK of S each), decay and beta, a strip; or the scores of a group of heads.
        let delta = CHUNK * (5 * h.state_size + 2) + STRIP * h.state_size;
        let scores = h.heads / h.kv_heads * context.next_multiple_of(attention::TILE);
        let scratch_each = delta
            .max(if full { scores } else { 0 })
            .next_multiple_of(STRIP);
        let values = |n: usize| vec![0.0; batch * n];
        let work = Work {
            activations: model
                .inputs
                .iter()
                .map(|i| Activations::new(i.form, i.cols, batch.max(LOGITS)))
                .collect(),
            h: values(h.embedding),
            x: vec![0.0; batch.max(LOGITS) * h.embedding],
            first: values(h.channels().max(if full { qg } else { 0 })),
            second: values(h.inner()),
            keys: values(if full { kv } else { 0 }),
            values: values(if full { kv } else { 0 }),
            alpha: values(h.value_heads),
            beta: values(h.value_heads),
            mixed: values(h.inner().max(if full { qg / 2 } else { 0 })),
            gate: values(h.feed_forward),
            up: values(h.feed_forward),
            logits: vec![0.0; LOGITS.min(batch) * model.vocabulary()],
            angles: values(h.rope_dims),
            scratch: vec![0.0; pool.threads() * scratch_each],
            scratch_each,
            tokens: 0,
        };
        Ok(Session {
            model,
            pool,
            simd: Simd::best(),
            state: State::new(h, context, proposals)?,
            work,
            batch,
            profile: None,
        })
    }

    /// Runs the float loops with other vector instructions; the bits stay the same.
    pub fn set_simd(&mut self, simd: Simd) {
        self.simd = simd;
    }

    /// Starts to count where time goes, or stops; returns what was counted.
    ///
    /// # Panics
    /// If the pool is at work elsewhere.
    pub fn profile(&mut self, on: bool) -> Profile {
        self.pool.time_barriers(on);
        std::mem::replace(&mut self.profile, on.then(Profile::default)).unwrap_or_default()
    }

    /// The model.
    pub fn model(&self) -> &'a Model {
        self.model
    }

    /// Tokens consumed: what was advanced, and what was accepted.
    pub fn tokens(&self) -> &[u32] {
        self.state.tokens()
    }

    /// Tokens there is room for.
    pub fn context(&self) -> usize {
        self.state.context()
    }

    /// Tokens a pass takes at most.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.state.reset();
        self.work.tokens = 0;
    }

    /// Consumes tokens, any number that the context has room for, in batches. The logits of the last batch can be asked for.
    ///
    /// # Errors
    /// More tokens than there is room for, an unknown token, proposed tokens that were neither accepted nor dropped. The state is then
    /// as before.
    pub fn advance(&mut self, tokens: &[u32]) -> Result<()> {
        self.check(tokens)?;
        for tokens in tokens.chunks(self.batch) {
            self.pass(tokens, Mode::Advance)?;
            self.state.tokens.extend(tokens);
        }
        Ok(())
    }

    /// Runs tokens without moving the state: their logits can be asked for, then [`Session::accept`] says how many count.
    ///
    /// # Errors
    /// As [`Session::advance`], or more tokens than can be proposed.
    pub fn propose(&mut self, tokens: &[u32]) -> Result<()> {
        self.check(tokens)?;
        let room = self.state.shape.proposals;
        ensure!(
            tokens.len() <= room,
            "draft: {} tokens proposed, expected at most {room}",
            tokens.len()
        );
        self.pass(tokens, Mode::Propose)?;
        self.state.steps.proposed.extend(tokens);
        Ok(())
    }

    /// Takes the first `n` proposed tokens as consumed and drops the others.
    ///
    /// # Errors
    /// If fewer were proposed.
    pub fn accept(&mut self, n: usize) -> Result<()> {
        self.state.accept(n)
    }

    /// The logits after some tokens of the last pass, at most [`LOGITS`]: `[token][vocabulary]`.
    ///
    /// # Errors
    /// A range that the last pass does not have; logits that are not finite, which come of weights that are not.
    pub fn logits(&mut self, tokens: Range<usize>) -> Result<&mut [f32]> {
        ensure!(
            tokens.start <= tokens.end
                && tokens.end <= self.work.tokens
                && tokens.len() <= LOGITS.min(self.batch),
            "logits: tokens {tokens:?} of a pass of {}, expected at most {LOGITS}",
            self.work.tokens
        );
        let (model, n) = (self.model, tokens.len());
        let e = model.hyper.embedding;
        self.stage(Kind::Norm, |s| {
            for (x, h) in s
                .work
                .x
                .chunks_exact_mut(e)
                .zip(s.work.h[tokens.start * e..tokens.end * e].chunks_exact(e))
            {
                math::rms_norm(s.simd, h, &model.output_norm, model.hyper.eps, x);
            }
        });
        self.prepare(&model.head_inputs, Buffer::X, n)?;
        self.multiply(&[(&model.head, Buffer::Logits)], n)?;
        let logits = &mut self.work.logits[..n * model.vocabulary()];
        if let Some(found) = logits.iter().find(|x| !x.is_finite()) {
            bail!(
                "{}: logits: found {found}, expected finite numbers, as finite weights give",
                model.name()
            );
        }
        Ok(logits)
    }

    /// The logits after the last token.
    ///
    /// # Errors
    /// If there was no pass yet.
    pub fn last_logits(&mut self) -> Result<&mut [f32]> {
        let n = self.work.tokens;
        ensure!(n > 0, "logits: no token was run");
        self.logits(n - 1..n)
    }

    /// A copy of the state, to come back to.
    ///
    /// # Errors
    /// Proposed tokens that were neither accepted nor dropped.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.settle()?;
        Ok(self.state.snapshot())
    }

    /// Goes back to a snapshot of this sequence, whatever came after it.
    ///
    /// # Errors
    /// A snapshot of another text or model.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.work.tokens = 0;
        self.state.restore(snapshot)
    }

    /// SHA-256 over all that the next token depends on.
    ///
    /// # Errors
    /// Proposed tokens that were neither accepted nor dropped.
    pub fn state_hash(&mut self) -> Result<String> {
        self.settle()?;
        Ok(self.state.hash())
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let (used, room) = (self.state.tokens.len(), self.state.context());
        ensure!(
            self.state.steps.proposed.is_empty(),
            "draft: proposed tokens were neither accepted nor dropped"
        );
        ensure!(
            tokens.len() <= room - used,
            "context: {used} and {} more tokens, expected at most {room}",
            tokens.len()
        );
        match tokens
            .iter()
            .find(|&&t| t as usize >= self.model.vocabulary())
        {
            Some(token) => bail!(
                "token {token}: expected one below {}",
                self.model.vocabulary()
            ),
            None => Ok(()),
        }
    }

    /// Applies what was accepted to the recurrent states.
    fn settle(&mut self) -> Result<()> {
        self.check(&[])?;
        if self.state.steps.accepted > 0 {
            let layers = self.model.layers.iter();
            let deltas = layers.filter_map(|layer| match &layer.mixer {
                Mixer::Delta(delta) => Some(delta),
                Mixer::Full(_) => None,
            });
            for (index, delta) in deltas.enumerate() {
                self.delta_heads(delta, index, 0, Mode::Advance);
            }
            self.state.steps.accepted = 0;
        }
        Ok(())
    }

    fn stage<T>(&mut self, kind: Kind, f: impl FnOnce(&mut Self) -> T) -> T {
        if self.profile.is_none() {
            return f(self);
        }
        let waited = |s: &Self| s.pool.barrier_time().caller_ns;
        let (before, start) = (waited(self), Instant::now());
        let result = f(self);
        let (all, barrier) = (start.elapsed().as_secs_f64(), waited(self) - before);
        if let Some(profile) = &mut self.profile {
            let barrier = barrier as f64 / 1e9;
            profile.0[kind as usize] += all - barrier;
            profile.0[Kind::Barrier as usize] += barrier;
        }
        result
    }

    fn pass(&mut self, tokens: &[u32], mode: Mode) -> Result<()> {
        let (model, n) = (self.model, tokens.len());
        let h = &model.hyper;
        self.work.tokens = 0;
        self.stage(Kind::Embedding, |s| s.embed(tokens))?;
        let position = self.state.tokens.len();
        self.stage(Kind::Attention, |s| {
            let angles = s.work.angles.chunks_exact_mut(h.rope_dims);
            for (t, angles) in angles.take(n).enumerate() {
                attention::rope_angles(&model.frequencies, position + t, angles);
            }
        });
        let (mut full_index, mut delta_index) = (0, 0);
        for layer in &model.layers {
            self.norm(&layer.attn_norm, n);
            self.prepare(&layer.inputs[0], Buffer::X, n)?;
            let output = match &layer.mixer {
                Mixer::Full(full) => {
                    self.full(full, full_index, n)?;
                    full_index += 1;
                    &full.output
                }
                Mixer::Delta(delta) => {
                    self.delta(delta, delta_index, n, mode)?;
                    delta_index += 1;
                    &delta.output
                }
            };
            self.prepare(&layer.inputs[1], Buffer::Mixed, n)?;
            self.multiply(&[(output, Buffer::X)], n)?;
            self.residual(n);
            self.norm(&layer.post_norm, n);
            self.prepare(&layer.inputs[2], Buffer::X, n)?;
            self.multiply(&[(&layer.gate, Buffer::Gate), (&layer.up, Buffer::Up)], n)?;
            self.stage(Kind::Elementwise, |s| {
                let (f, simd, up) = (h.feed_forward, s.simd, &s.work.up);
                each_token(s.pool, &mut s.work.gate, f, n, |t, gate| {
                    math::swiglu(simd, gate, &up[t * f..][..f])
                });
            });
            self.prepare(&layer.inputs[3], Buffer::Gate, n)?;
            self.multiply(&[(&layer.down, Buffer::X)], n)?;
            self.residual(n);
        }
        self.state.steps.accepted = 0;
        self.work.tokens = n;
        Ok(())
    }

    fn embed(&mut self, tokens: &[u32]) -> Result<()> {
        let model = self.model;
        let e = model.hyper.embedding;
        for (&token, h) in tokens.iter().zip(self.work.h.chunks_exact_mut(e)) {
            model.embedding_row(token, h)?;
            if let Some(rotation) = model.rotation.as_ref().filter(|r| r.rotates_embedding()) {
                hadamard::rotate_back(self.simd, h, rotation.signs(e), rotation.block);
            }
        }
        Ok(())
    }

    /// x = RMS(h, w).
    fn norm(&mut self, w: &[f32], n: usize) {
        let (e, eps) = (self.model.hyper.embedding, self.model.hyper.eps);
        self.stage(Kind::Norm, |s| {
            let (simd, h) = (s.simd, &s.work.h);
            each_token(s.pool, &mut s.work.x, e, n, |t, x| {
                math::rms_norm(simd, &h[t * e..][..e], w, eps, x)
            });
        });
    }

    /// h += x.
    fn residual(&mut self, n: usize) {
        let e = self.model.hyper.embedding;
        self.stage(Kind::Elementwise, |s| {
            math::add(s.simd, &mut s.work.h[..n * e], &s.work.x[..n * e])
        });
    }

    /// Fills the activations of `inputs` from a buffer, which is rotated in place where they want it so.
    fn prepare(&mut self, inputs: &[usize], from: Buffer, n: usize) -> Result<()> {
        let model = self.model;
        for rotated in [false, true] {
            let mut done = false;
            for &i in inputs
                .iter()
                .filter(|&&i| model.inputs[i].rotated == rotated)
            {
                let cols = model.inputs[i].cols;
                if let (true, false, Some(rotation)) = (rotated, done, &model.rotation) {
                    self.stage(Kind::Hadamard, |s| {
                        let (simd, signs, block) = (s.simd, rotation.signs(cols), rotation.block);
                        let x = s.work.buffer(from);
                        each_token(s.pool, x, cols, n, |_, x| {
                            hadamard::rotate(simd, x, signs, block)
                        });
                    });
                    done = true;
                }
                self.stage(Kind::Quantize, |s| s.quantize(i, from, n * cols))?;
            }
        }
        Ok(())
    }

    fn quantize(&mut self, input: usize, from: Buffer, len: usize) -> Result<()> {
        let Work {
            activations,
            x,
            mixed,
            gate,
            ..
        } = &mut self.work;
        let x = match from {
            Buffer::Mixed => mixed,
            Buffer::Gate => gate,
            _ => x,
        };
        let parts = activations[input].split(&x[..len])?;
        if len <= kernels::TILE * self.model.inputs[input].cols {
            parts.for_each(fill);
            return Ok(());
        }
        let parts = Mutex::new(parts);
        // The lock guards an iterator, which a panic elsewhere leaves whole.
        let next = || parts.lock().unwrap_or_else(|e| e.into_inner()).next();
        self.pool.run(|_| {
            while let Some(part) = next() {
                fill(part);
            }
        });
        Ok(())
    }

    /// Multiplies matrices by their activations, all in one job.
    fn multiply(&mut self, parts: &[(&Linear, Buffer)], n: usize) -> Result<()> {
        self.stage(Kind::Matmul, |s| {
            let mut job = Job::default();
            let mut buffers = s.work.outputs();
            for (linear, buffer) in parts {
                let out = buffers.take(*buffer, n * linear.rows());
                let x = &buffers.activations[linear.input];
                job.add(linear.kernel, s.model.matrix(linear), x, out)?;
            }
            job.run(s.pool, Schedule::Dynamic);
            Ok(())
        })
    }

    fn full(&mut self, full: &Full, index: usize, n: usize) -> Result<()> {
        let model = self.model;
        let h = model.hyper();
        let (d, group) = (h.head_dim, h.heads / h.kv_heads);
        let kv = h.kv_heads * d;
        self.multiply(
            &[
                (&full.q, Buffer::First),
                (&full.k, Buffer::Keys),
                (&full.v, Buffer::Values),
            ],
            n,
        )?;
        self.stage(Kind::Attention, |s| {
            let (simd, position, shape) = (s.simd, s.state.tokens.len(), s.state.shape);
            let (head_keys, head_values) = (shape.head_keys(), shape.head_values());
            let layer = index * h.kv_heads;
            let angles = &s.work.angles;
            let (keys, values) = (
                Shared::new(&mut s.state.keys),
                Shared::new(&mut s.state.values),
            );
            let (k, v) = (Shared::new(&mut s.work.keys), &s.work.values);
            s.pool
                .chunks(if n >= 8 { h.kv_heads } else { 1 }, 1, |jobs| {
                    let heads = if n >= 8 { jobs } else { 0..h.kv_heads };
                    for head in heads {
                        // SAFETY: parts of one head, which belongs to this job alone.
                        let (keys, values) = unsafe {
                            (
                                keys.part(
                                    (layer + head) * head_keys..(layer + head + 1) * head_keys,
                                ),
                                values.part(
                                    (layer + head) * head_values..(layer + head + 1) * head_values,
                                ),
                            )
                        };
                        for t in 0..n {
                            let at = t * kv + head * d..t * kv + head * d + d;
                            values[(position + t) * d..][..d].copy_from_slice(&v[at.clone()]);
                            // SAFETY: as above.
                            let k = unsafe { k.part(at) };
                            let angles = &angles[t * h.rope_dims..][..h.rope_dims];
                            attention::norm_and_rope(simd, k, &full.k_norm, h.eps, angles, 1.0);
                            attention::store_key(keys, position + t, k);
                        }
                    }
                });
            let (keys, values) = (&s.state.keys, &s.state.values);
            let (first, mixed) = (
                Shared::new(&mut s.work.first),
                Shared::new(&mut s.work.mixed),
            );
            let (scratch, scratch_each) = (Shared::new(&mut s.work.scratch), s.work.scratch_each);
            let factor = 1.0 / (d as f32).sqrt();
            // A token's heads that share keys go together, except where that makes too few jobs.
            let together = if n == 1 { 1 } else { group };
            let jobs = n * h.heads / together;
            s.pool.chunks_by(
                jobs,
                Chunks {
                    size: 1,
                    multiple: 1,
                },
                |worker, range| {
                    // SAFETY: the part of this thread.
                    let scores =
                        unsafe { scratch.part(worker * scratch_each..(worker + 1) * scratch_each) };
                    for job in range {
                        let (t, head) = (job * together / h.heads, job * together % h.heads);
                        let at = (t * h.heads + head) * d;
                        // SAFETY: heads of this job alone.
                        let (queries, out) = unsafe {
                            (
                                first.part(2 * at..2 * (at + together * d)),
                                mixed.part(at..at + together * d),
                            )
                        };
                        let angles = &angles[t * h.rope_dims..][..h.rope_dims];
                        for query in queries.chunks_exact_mut(2 * d) {
                            attention::norm_and_rope(
                                simd,
                                &mut query[..d],
                                &full.q_norm,
                                h.eps,
                                angles,
                                factor,
                            );
                        }
                        let kv_head = layer + head / group;
                        let (keys, values) = (
                            &keys[kv_head * head_keys..],
                            &values[kv_head * head_values..],
                        );
                        attention::attend(
                            simd,
                            keys,
                            values,
                            d,
                            position + t + 1,
                            queries,
                            2 * d,
                            scores,
                            out,
                        );
                        for (out, query) in out.chunks_exact_mut(d).zip(queries.chunks_exact(2 * d))
                        {
                            attention::gate(simd, out, &query[d..]);
                        }
                    }
                },
            );
        });
        Ok(())
    }

    fn delta(&mut self, delta: &Delta, index: usize, n: usize, mode: Mode) -> Result<()> {
        let parts = [
            (&delta.qkv, Buffer::First),
            (&delta.gate, Buffer::Second),
            (&delta.alpha, Buffer::Alpha),
            (&delta.beta, Buffer::Beta),
        ];
        self.multiply(&parts, n)?;
        self.delta_heads(delta, index, n, mode);
        self.stage(Kind::Delta, |s| {
            let channels = s.state.shape.channels;
            let inputs = &s.work.first[..n * channels];
            match mode {
                Mode::Advance => {
                    let history =
                        &mut s.state.history[index * HISTORY * channels..][..HISTORY * channels];
                    state::extend_history(history, inputs);
                }
                Mode::Propose => {
                    let at = index * s.state.shape.proposals * channels;
                    s.state.steps.inputs[at..][..n * channels].copy_from_slice(inputs);
                }
            }
        });
        Ok(())
    }

    /// Convolution, delta rule, norm and gate of every value head; with no tokens, only what was accepted is applied.
    fn delta_heads(&mut self, delta: &Delta, index: usize, n: usize, mode: Mode) {
        self.stage(Kind::Delta, |s| {
            let simd = s.simd;
            let h = s.model.hyper();
            let (size, heads, channels, inner) =
                (h.state_size, h.value_heads, h.channels(), h.inner());
            let proposals = s.state.shape.proposals;
            let accepted = s.state.steps.accepted;
            let history = &s.state.history[index * HISTORY * channels..][..HISTORY * channels];
            let recurrent = Shared::new(bytemuck::cast_slice_mut(&mut s.state.recurrent));
            let steps = &mut s.state.steps;
            let (step_k, step_d, step_decay) = (
                Shared::new(&mut steps.k),
                Shared::new(&mut steps.d),
                Shared::new(&mut steps.decay),
            );
            let (scratch, scratch_each) = (Shared::new(&mut s.work.scratch), s.work.scratch_each);
            let mixed = Shared::new(&mut s.work.mixed);
            let (x, z, alpha, beta) = (&s.work.first, &s.work.second, &s.work.alpha, &s.work.beta);
            s.pool.chunks_by(
                heads,
                Chunks {
                    size: 1,
                    multiple: 1,
                },
                |worker, range| {
                    // SAFETY: the part of this thread.
                    let scratch =
                        unsafe { scratch.part(worker * scratch_each..(worker + 1) * scratch_each) };
                    let (q, rest) = scratch.split_at_mut(CHUNK * size);
                    let (k, rest) = rest.split_at_mut(CHUNK * size);
                    let (v, rest) = rest.split_at_mut(CHUNK * size);
                    let (d, rest) = rest.split_at_mut(CHUNK * size);
                    let (o, rest) = rest.split_at_mut(CHUNK * size);
                    let (decays, rest) = rest.split_at_mut(CHUNK);
                    let (rates, rest) = rest.split_at_mut(CHUNK);
                    let copy = &mut rest[..STRIP * size];
                    for head in range {
                        let key_head = head % h.key_heads;
                        let slices = [key_head, h.key_heads + key_head, 2 * h.key_heads + head];
                        let at = index * heads + head;
                        // SAFETY: parts of one head, which belongs to this job alone.
                        let (m, step_k, step_d, step_decay) = unsafe {
                            (
                                recurrent.part(at * size * size..(at + 1) * size * size),
                                step_k.part(at * proposals * size..(at + 1) * proposals * size),
                                step_d.part(at * proposals * size..(at + 1) * proposals * size),
                                step_decay.part(at * proposals..(at + 1) * proposals),
                            )
                        };
                        // The place of the head in what the output projection takes.
                        let slot = if delta.grouped {
                            key_head * (heads / h.key_heads) + head / h.key_heads
                        } else {
                            head
                        };
                        let mut replay = Replay {
                            k: &step_k[..accepted * size],
                            d: &step_d[..accepted * size],
                            decay: &step_decay[..accepted],
                        };
                        if n == 0 {
                            let none = HeadInputs {
                                k: &[],
                                q: &[],
                                v: &[],
                                decay: &[],
                                beta: &[],
                            };
                            deltanet::run(simd, m, size, replay, none, Keep::All, &mut [], &mut []);
                        }
                        for start in (0..n).step_by(CHUNK) {
                            let tokens = CHUNK.min(n - start);
                            let (decays, rates) = (&mut decays[..tokens], &mut rates[..tokens]);
                            for t in 0..tokens {
                                decays[t] = alpha[(start + t) * heads + head];
                                rates[t] = beta[(start + t) * heads + head];
                            }
                            deltanet::gates(simd, decays, rates, delta.a[head], delta.dt[head]);
                            let unit = |factor| Some(Normalize { eps: h.eps, factor });
                            let factor = 1.0 / (size as f32).sqrt();
                            let of = [
                                (&mut *q, unit(factor)),
                                (&mut *k, unit(1.0)),
                                (&mut *v, None),
                            ];
                            for ((out, normalize), slice) in of.into_iter().zip(slices) {
                                let taps = &delta.taps[slice * deltanet::TAPS * size..]
                                    [..deltanet::TAPS * size];
                                let out = &mut out[..tokens * size];
                                deltanet::convolve(
                                    simd,
                                    history,
                                    x,
                                    channels,
                                    slice * size,
                                    taps,
                                    start,
                                    normalize,
                                    out,
                                );
                            }
                            let inputs = HeadInputs {
                                k: &k[..tokens * size],
                                q: &q[..tokens * size],
                                v: &v[..tokens * size],
                                decay: decays,
                                beta: rates,
                            };
                            let keep = match mode {
                                Mode::Advance => Keep::All,
                                Mode::Propose => Keep::Nothing(copy),
                            };
                            deltanet::run(simd, m, size, replay, inputs, keep, d, o);
                            replay = Replay::default();
                            for (t, o) in o.chunks_exact_mut(size).take(tokens).enumerate() {
                                let row = (start + t) * inner;
                                let gate = &z[row + head * size..][..size];
                                deltanet::norm_and_gate(simd, o, &delta.norm, h.eps, gate);
                                // SAFETY: the head's own slot.
                                unsafe { mixed.part(row + slot * size..row + (slot + 1) * size) }
                                    .copy_from_slice(o);
                            }
                            if mode == Mode::Propose {
                                step_k[..tokens * size].copy_from_slice(inputs.k);
                                step_d[..tokens * size].copy_from_slice(&d[..tokens * size]);
                                step_decay[..tokens].copy_from_slice(decays);
                            }
                        }
                    }
                },
            );
        });
    }
}

/// Names of the buffers that matrices read from and write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffer {
    X,
    First,
    Second,
    Keys,
    Values,
    Alpha,
    Beta,
    Mixed,
    Gate,
    Up,
    Logits,
}

/// The buffers that matrices write to, each to be taken once, and what they read.
struct Outputs<'a> {
    activations: &'a [Activations],
    buffers: [(Buffer, Option<&'a mut [f32]>); 11],
}

impl<'a> Outputs<'a> {
    fn take(&mut self, buffer: Buffer, len: usize) -> &'a mut [f32] {
        let found = self.buffers.iter_mut().find(|(b, _)| *b == buffer);
        let slice = found
            .and_then(|(_, s)| s.take())
            .expect("a buffer that no other matrix of the job writes");
        &mut slice[..len]
    }
}

impl Work {
    fn outputs(&mut self) -> Outputs<'_> {
        Outputs {
            activations: &self.activations,
            buffers: [
                (Buffer::X, Some(&mut self.x)),
                (Buffer::First, Some(&mut self.first)),
                (Buffer::Second, Some(&mut self.second)),
                (Buffer::Keys, Some(&mut self.keys)),
                (Buffer::Values, Some(&mut self.values)),
                (Buffer::Alpha, Some(&mut self.alpha)),
                (Buffer::Beta, Some(&mut self.beta)),
                (Buffer::Mixed, Some(&mut self.mixed)),
                (Buffer::Gate, Some(&mut self.gate)),
                (Buffer::Up, Some(&mut self.up)),
                (Buffer::Logits, Some(&mut self.logits)),
            ],
        }
    }

    fn buffer(&mut self, buffer: Buffer) -> &mut [f32] {
        match buffer {
            Buffer::Mixed => &mut self.mixed,
            Buffer::Gate => &mut self.gate,
            _ => &mut self.x,
        }
    }
}

/// Calls `f` on the first `n` rows of `x`, on all threads where there are more than one.
fn each_token(
    pool: &Pool,
    x: &mut [f32],
    cols: usize,
    n: usize,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    let x = Shared::new(&mut x[..n * cols]);
    pool.chunks(n, 1, |range| {
        for t in range {
            // SAFETY: one row, of this job alone.
            f(t, unsafe { x.part(t * cols..(t + 1) * cols) });
        }
    });
}
