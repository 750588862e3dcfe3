//! The weights of a model, loaded, checked and laid out for the kernels.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail, ensure};

use super::attention;
use super::deltanet::TAPS;
use super::gguf::{Gguf, Rotation, Tensor};
use super::hyper::{EMBEDDING, Hyper};
use super::memory::AlignedBuf;
use super::pool::{Chunks, Pool};
use super::session::Size;
use super::shared::Shared;
use super::tokenizer::Tokenizer;
use crate::formats::{Format, Layout};
use crate::kernels::{Choice, Form, Kernel, MatrixRef};

/// Where the tensors of a model come from.
pub trait Source: Sync {
    /// What to call it in error lines.
    fn name(&self) -> &str;
    /// A tensor's shape and format, if it is there.
    fn find(&self, name: &str) -> Option<&Tensor>;
    /// Reads `to.len()` bytes of a tensor, from its byte `at` on.
    ///
    /// # Errors
    /// What the system reports.
    fn read(&self, tensor: &Tensor, at: usize, to: &mut [u8]) -> Result<()>;
}

/// A GGUF file, whose tensors are read rather than mapped, so that they take memory once.
pub struct GgufSource<'a> {
    gguf: &'a Gguf,
    file: File,
}

impl<'a> GgufSource<'a> {
    /// The file that `gguf` was opened from.
    ///
    /// # Errors
    /// If it cannot be opened again.
    pub fn open(gguf: &'a Gguf, path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("{}: cannot open", path.display()))?;
        Ok(GgufSource { gguf, file })
    }
}

/// How far ahead of a read the next ones are asked for, so that the disk works while a piece is repacked.
const AHEAD: u64 = 32 << 20;

impl Source for GgufSource<'_> {
    fn name(&self) -> &str {
        self.gguf.file()
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.gguf.find_tensor(name)
    }

    fn read(&self, tensor: &Tensor, at: usize, to: &mut [u8]) -> Result<()> {
        let offset = tensor.offset + at as u64;
        self.gguf.read_ahead(offset + AHEAD, to.len());
        read_at(&self.file, offset, to).with_context(|| {
            format!(
                "{}: tensor {}: cannot read {} bytes",
                self.name(),
                tensor.name,
                to.len()
            )
        })
    }
}

#[cfg(unix)]
fn read_at(file: &File, offset: u64, to: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut offset: u64, mut to: &mut [u8]) -> std::io::Result<()> {
    while !to.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, to, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                to = &mut to[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}

/// A file already in memory.
impl Source for Gguf {
    fn name(&self) -> &str {
        self.file()
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.find_tensor(name)
    }

    fn read(&self, tensor: &Tensor, at: usize, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(&self.data(tensor)[at..at + to.len()]);
        Ok(())
    }
}

/// A file whose tensors are only looked at: all their values are 0.
struct HeaderSource<'a>(&'a Gguf);

impl Source for HeaderSource<'_> {
    fn name(&self) -> &str {
        self.0.file()
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.find_tensor(name)
    }

    fn read(&self, _: &Tensor, _: usize, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }
}

/// A matrix that activations are multiplied by.
#[derive(Debug)]
pub(super) struct Linear {
    at: Range<usize>,
    rows: usize,
    cols: usize,
    pub kernel: &'static Kernel,
    /// Which of [`Model::inputs`] it takes.
    pub input: usize,
}

impl Linear {
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// One way in which activations are handed to matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Input {
    pub cols: usize,
    pub form: Form,
    pub rotated: bool,
}

/// Matrices that take the same activations, with the distinct inputs that they need.
pub(super) type Inputs = Vec<usize>;

pub(super) struct Layer {
    pub attn_norm: Vec<f32>,
    pub mixer: Mixer,
    pub post_norm: Vec<f32>,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
    /// Of the attention's first projections, its output projection, gate and up, down.
    pub inputs: [Inputs; 4],
}

#[allow(clippy::large_enum_variant)] // one a layer
pub(super) enum Mixer {
    Full(Full),
    Delta(Delta),
}

/// Gated softmax attention.
pub(super) struct Full {
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub output: Linear,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
}

/// Gated linear attention.
pub(super) struct Delta {
    pub qkv: Linear,
    pub gate: Linear,
    pub alpha: Linear,
    pub beta: Linear,
    pub output: Linear,
    /// `[slice of S channels][tap][channel]`.
    pub taps: Vec<f32>,
    pub dt: Vec<f32>,
    pub a: Vec<f32>,
    pub norm: Vec<f32>,
    /// Whether the output projection takes value heads grouped by key head.
    pub grouped: bool,
}

struct Embedding {
    at: Range<usize>,
    layout: Layout,
}

/// A loaded model.
pub struct Model {
    name: String,
    pub(super) hyper: Hyper,
    vocabulary: usize,
    pub(super) rotation: Option<Rotation>,
    bytes: Storage,
    embedding: Embedding,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: Vec<f32>,
    pub(super) head: Linear,
    pub(super) head_inputs: Inputs,
    pub(super) inputs: Vec<Input>,
    /// Rotary frequencies.
    pub(super) frequencies: Vec<f64>,
    kernels: BTreeMap<Format, &'static Kernel>,
}

/// Where the matrices are.
enum Storage {
    /// In memory of their own, repacked.
    Read(AlignedBuf),
    /// Where the file is mapped, as it stores them.
    Mapped(Arc<Gguf>),
}

impl Storage {
    fn bytes(&self) -> &[u8] {
        match self {
            Storage::Read(bytes) => bytes,
            Storage::Mapped(gguf) => gguf.bytes(),
        }
    }
}

/// Every matrix starts on its own page.
const ALIGN: usize = 4096;

/// A tensor to be read, and what it becomes.
struct Job<'a> {
    tensor: &'a Tensor,
    at: Range<usize>,
    layout: Layout,
}

/// What a model takes from a source: all but the bytes of its matrices.
struct Plan<'a> {
    loader: Loader<'a>,
    vocabulary: usize,
    embedding: Embedding,
    head: Linear,
    output_norm: Vec<f32>,
    layers: Vec<Layer>,
}

impl<'a> Plan<'a> {
    /// Finds every tensor and checks its shape and type, and that a kernel takes it.
    fn new(
        hyper: &Hyper,
        rotation: Option<&'a Rotation>,
        source: &'a dyn Source,
        choice: &'a Choice,
        mapped: bool,
    ) -> Result<Self> {
        let file = source.name();
        let Some(table) = source.find(EMBEDDING) else {
            bail!("{file}: tensor {EMBEDDING} is missing");
        };
        let vocabulary = table.rows();
        let mut loader = Loader {
            source,
            rotation,
            choice,
            jobs: vec![],
            end: 0,
            inputs: vec![],
            kernels: BTreeMap::new(),
            chosen: false,
            mapped,
        };
        let table = loader.tensor(EMBEDDING, &[hyper.embedding, vocabulary])?;
        let (embedding, head) = if source.find("output.weight").is_some() {
            let layout = Layout::Stock(table.format);
            let embedding = Embedding {
                at: loader.place(table, layout)?,
                layout,
            };
            (
                embedding,
                loader.linear("output.weight", vocabulary, hyper.embedding)?,
            )
        } else {
            let head = loader.linear(EMBEDDING, vocabulary, hyper.embedding)?;
            (
                Embedding {
                    at: head.at.clone(),
                    layout: head.kernel.layout(),
                },
                head,
            )
        };
        let output_norm = loader.floats("output_norm.weight", &[hyper.embedding])?;
        let layers = (0..hyper.layers)
            .map(|i| loader.layer(i, hyper))
            .collect::<Result<Vec<_>>>()?;
        ensure!(
            loader.chosen,
            "{file}: no tensor has a kernel of the layout asked for"
        );
        Ok(Plan {
            loader,
            vocabulary,
            embedding,
            head,
            output_norm,
            layers,
        })
    }
}

struct Loader<'a> {
    source: &'a dyn Source,
    rotation: Option<&'a Rotation>,
    choice: &'a Choice,
    jobs: Vec<Job<'a>>,
    end: usize,
    inputs: Vec<Input>,
    kernels: BTreeMap<Format, &'static Kernel>,
    /// Whether some matrix has the layout that was asked for.
    chosen: bool,
    /// Whether matrices stay where the file is mapped.
    mapped: bool,
}

impl<'a> Loader<'a> {
    /// A tensor of exactly these dimensions, fastest first.
    fn tensor(&self, name: &str, dims: &[usize]) -> Result<&'a Tensor> {
        let file = self.source.name();
        let Some(tensor) = self.source.find(name) else {
            bail!("{file}: tensor {name} is missing, expected {dims:?}");
        };
        ensure!(
            tensor.dims == dims,
            "{file}: tensor {name}: shape {:?}, expected {dims:?}",
            tensor.dims
        );
        Ok(tensor)
    }

    /// A small tensor, as floats.
    fn floats(&self, name: &str, dims: &[usize]) -> Result<Vec<f32>> {
        let tensor = self.tensor(name, dims)?;
        ensure!(
            matches!(tensor.format, Format::F32 | Format::F16 | Format::Bf16),
            "{}: tensor {name}: type {}, expected f32, f16 or bf16",
            self.source.name(),
            tensor.format
        );
        let mut bytes = vec![0; tensor.format.matrix_bytes(tensor.rows(), tensor.cols())?];
        self.source.read(tensor, 0, &mut bytes)?;
        let mut values = vec![0.0; tensor.weights()];
        tensor.format.dequantize(&bytes, &mut values)?;
        Ok(values)
    }

    fn place(&mut self, tensor: &'a Tensor, layout: Layout) -> Result<Range<usize>> {
        let bytes = layout.matrix_bytes(tensor.rows(), tensor.cols())?;
        if self.mapped {
            let start = tensor.offset as usize; // held against the length of the file when it was opened
            return Ok(start..start + bytes);
        }
        let too_large = || {
            format!(
                "{}: tensors are too large for this machine",
                self.source.name()
            )
        };
        let start = self
            .end
            .checked_next_multiple_of(ALIGN)
            .with_context(too_large)?;
        let at = start..start.checked_add(bytes).with_context(too_large)?;
        self.end = at.end;
        self.jobs.push(Job {
            tensor,
            at: at.clone(),
            layout,
        });
        Ok(at)
    }

    /// The kernel for rows of a format: of the layout that was asked for if that takes them, else the best of the instruction set.
    fn kernel(&mut self, format: Format, cols: usize) -> Result<&'static Kernel> {
        let kernel = match self.choice.kernel_of(format, cols) {
            Ok(kernel) => {
                self.chosen = true;
                self.kernels.insert(format, kernel);
                kernel
            }
            Err(_) => {
                let kernel = self.choice.kernel_or_below(format, cols)?;
                self.kernels.entry(format).or_insert(kernel);
                kernel
            }
        };
        ensure!(
            !self.mapped || kernel.layout() == Layout::Stock(format),
            "a mapped file cannot be repacked to {}, expected --kernel stock",
            kernel.layout().name()
        );
        Ok(kernel)
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear> {
        let tensor = self.tensor(name, &[cols, rows])?;
        let kernel = self
            .kernel(tensor.format, cols)
            .with_context(|| format!("{}: tensor {name}", self.source.name()))?;
        let rotated = self
            .rotation
            .is_some_and(|r| r.rotates_input(name) || name == EMBEDDING && r.rotates_embedding());
        let input = Input {
            cols,
            form: kernel.form(),
            rotated,
        };
        let index = self
            .inputs
            .iter()
            .position(|i| *i == input)
            .unwrap_or_else(|| {
                self.inputs.push(input);
                self.inputs.len() - 1
            });
        let at = self.place(tensor, kernel.layout())?;
        Ok(Linear {
            at,
            rows,
            cols,
            kernel,
            input: index,
        })
    }

    fn full(&mut self, name: &dyn Fn(&str) -> String, h: &Hyper) -> Result<Full> {
        let (e, d) = (h.embedding, h.head_dim);
        Ok(Full {
            q: self.linear(&name("attn_q.weight"), 2 * h.heads * d, e)?,
            k: self.linear(&name("attn_k.weight"), h.kv_heads * d, e)?,
            v: self.linear(&name("attn_v.weight"), h.kv_heads * d, e)?,
            output: self.linear(&name("attn_output.weight"), e, h.heads * d)?,
            q_norm: self.floats(&name("attn_q_norm.weight"), &[d])?,
            k_norm: self.floats(&name("attn_k_norm.weight"), &[d])?,
        })
    }

    fn delta(&mut self, name: &dyn Fn(&str) -> String, h: &Hyper) -> Result<Delta> {
        let (e, s, heads) = (h.embedding, h.state_size, h.value_heads);
        let stored = self.floats(&name("ssm_conv1d.weight"), &[TAPS, h.channels()])?;
        let mut taps = Vec::with_capacity(stored.len());
        for slice in stored.chunks(TAPS * s) {
            for tap in 0..TAPS {
                taps.extend(slice.iter().skip(tap).step_by(TAPS));
            }
        }
        let output = name("ssm_out.weight");
        Ok(Delta {
            qkv: self.linear(&name("attn_qkv.weight"), h.channels(), e)?,
            gate: self.linear(&name("attn_gate.weight"), h.inner(), e)?,
            alpha: self.linear(&name("ssm_alpha.weight"), heads, e)?,
            beta: self.linear(&name("ssm_beta.weight"), heads, e)?,
            grouped: self.rotation.is_some_and(|r| r.groups_heads(&output)),
            output: self.linear(&output, e, h.inner())?,
            taps,
            dt: self.floats(&name("ssm_dt.bias"), &[heads])?,
            a: self.floats(&name("ssm_a"), &[heads])?,
            norm: self.floats(&name("ssm_norm.weight"), &[s])?,
        })
    }

    fn layer(&mut self, i: usize, h: &Hyper) -> Result<Layer> {
        let name = |kind: &str| format!("blk.{i}.{kind}");
        let (e, f) = (h.embedding, h.feed_forward);
        let attn_norm = self.floats(&name("attn_norm.weight"), &[e])?;
        let mixer = if h.is_full(i) {
            Mixer::Full(self.full(&name, h)?)
        } else {
            Mixer::Delta(self.delta(&name, h)?)
        };
        let gate = self.linear(&name("ffn_gate.weight"), f, e)?;
        let up = self.linear(&name("ffn_up.weight"), f, e)?;
        let down = self.linear(&name("ffn_down.weight"), e, f)?;
        let (first, output) = match &mixer {
            Mixer::Full(m) => (distinct(&[&m.q, &m.k, &m.v]), distinct(&[&m.output])),
            Mixer::Delta(m) => (
                distinct(&[&m.qkv, &m.gate, &m.alpha, &m.beta]),
                distinct(&[&m.output]),
            ),
        };
        Ok(Layer {
            attn_norm,
            mixer,
            post_norm: self.floats(&name("post_attention_norm.weight"), &[e])?,
            inputs: [first, output, distinct(&[&gate, &up]), distinct(&[&down])],
            gate,
            up,
            down,
        })
    }
}

fn distinct(matrices: &[&Linear]) -> Inputs {
    let mut inputs: Inputs = matrices.iter().map(|m| m.input).collect();
    inputs.sort_unstable();
    inputs.dedup();
    inputs
}

impl Model {
    /// Whether a file can be run at all, on a machine with the memory for it: its keys, its rotation, the shape and type of every
    /// tensor, and a tokenizer of the model's vocabulary, which is returned. No tensor is read.
    ///
    /// # Errors
    /// One line that names the file and the key or tensor, what was found and what was expected.
    pub fn check(gguf: &Gguf) -> Result<Tokenizer> {
        let hyper = Hyper::from_gguf(gguf)?;
        let rotation = Rotation::read(gguf)?;
        let (source, choice) = (HeaderSource(gguf), Choice::default());
        let plan = Plan::new(&hyper, rotation.as_ref(), &source, &choice, false)?;
        let tokenizer = Tokenizer::from_gguf(gguf)?;
        let tokens = gguf.key("tokenizer.ggml.tokens")?;
        ensure!(
            tokenizer.len() == plan.vocabulary,
            tokens.unexpected(
                &format!("{} tokens", tokenizer.len()),
                &format!("the {} of the model", plan.vocabulary)
            )
        );
        Ok(tokenizer)
    }

    /// Loads a GGUF file: reads the tensors and repacks them in place, on all threads of the pool, for the kernels that are asked for.
    ///
    /// # Errors
    /// One line that names the file and the key or tensor: what is missing, has another shape or type, or does not fit in memory.
    pub fn open(path: &Path, options: &Options, pool: &Pool) -> Result<(Gguf, Model)> {
        let gguf = Gguf::open(path)?;
        let model = Self::load(&gguf, &GgufSource::open(&gguf, path)?, options, pool)?;
        Ok((gguf, model))
    }

    /// A model with the keys of `gguf` and the tensors of `source`.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn load(gguf: &Gguf, source: &dyn Source, options: &Options, pool: &Pool) -> Result<Self> {
        let hyper = Hyper::from_gguf(gguf)?;
        Self::build(hyper, Rotation::read(gguf)?, source, options, pool)
    }

    /// A model whose matrices stay where the file is mapped, in its own layouts: `options` must ask for `stock`.
    ///
    /// # Errors
    /// As [`Model::open`], or another layout.
    pub fn mapped(gguf: &Arc<Gguf>, options: &Options, pool: &Pool) -> Result<Self> {
        ensure!(
            gguf.has_data(),
            "{}: a header without tensors, expected a mapped file",
            gguf.file()
        );
        let hyper = Hyper::from_gguf(gguf)?;
        Self::assemble(
            hyper,
            Rotation::read(gguf)?,
            &**gguf,
            Some(gguf),
            options,
            pool,
        )
    }

    /// A model of these hyper-parameters with the tensors of `source`.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn build(
        hyper: Hyper,
        rotation: Option<Rotation>,
        source: &dyn Source,
        options: &Options,
        pool: &Pool,
    ) -> Result<Self> {
        Self::assemble(hyper, rotation, source, None, options, pool)
    }

    fn assemble(
        hyper: Hyper,
        rotation: Option<Rotation>,
        source: &dyn Source,
        mapped: Option<&Arc<Gguf>>,
        options: &Options,
        pool: &Pool,
    ) -> Result<Self> {
        let file = source.name();
        let plan = Plan::new(
            &hyper,
            rotation.as_ref(),
            source,
            &options.kernel,
            mapped.is_some(),
        )?;
        let Plan {
            loader,
            vocabulary,
            embedding,
            head,
            output_norm,
            layers,
        } = plan;
        let Loader {
            jobs,
            end,
            inputs,
            kernels,
            ..
        } = loader;
        let needed = options
            .size
            .map_or(Some(0), |size| size.bytes(&hyper, vocabulary));
        check_memory(file, needed.and_then(|n| n.checked_add(end)))?;
        let bytes = match mapped {
            Some(gguf) => Storage::Mapped(Arc::clone(gguf)),
            None => Storage::Read(read_and_repack(source, &jobs, end, pool)?),
        };
        Ok(Model {
            name: file.to_owned(),
            frequencies: attention::rope_frequencies(f64::from(hyper.rope_base), hyper.rope_dims),
            hyper,
            vocabulary,
            rotation,
            bytes,
            embedding,
            layers,
            output_norm,
            head_inputs: vec![head.input],
            head,
            inputs,
            kernels,
        })
    }

    /// The file's name, as error lines have it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its hyper-parameters.
    pub fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    /// Tokens it knows.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The kernel of each format among its matrices: where rows of some widths take another, the one that was asked for.
    pub fn kernels(&self) -> impl Iterator<Item = (Format, &'static Kernel)> {
        self.kernels.iter().map(|(&f, &k)| (f, k))
    }

    /// The memory that the matrices were read to; `None` where they are mapped.
    pub fn buffer(&self) -> Option<&AlignedBuf> {
        match &self.bytes {
            Storage::Read(bytes) => Some(bytes),
            Storage::Mapped(_) => None,
        }
    }

    /// The matrices that a token streams, in order, the head last; those of a group take the same input.
    pub fn products(&self) -> Vec<Vec<(&'static Kernel, MatrixRef<'_>)>> {
        let mut groups: Vec<Vec<&Linear>> = vec![];
        for layer in &self.layers {
            match &layer.mixer {
                Mixer::Full(m) => groups.extend([vec![&m.q, &m.k, &m.v], vec![&m.output]]),
                Mixer::Delta(m) => {
                    groups.extend([vec![&m.qkv, &m.gate, &m.alpha, &m.beta], vec![&m.output]]);
                }
            }
            groups.extend([vec![&layer.gate, &layer.up], vec![&layer.down]]);
        }
        groups.push(vec![&self.head]);
        let product = |linear: &&Linear| (linear.kernel, self.matrix(linear));
        groups
            .iter()
            .map(|g| g.iter().map(product).collect())
            .collect()
    }

    /// Whether weights are stored as ternary codes of the rotated kind without saying so: run as stored, after a warning.
    pub fn unrotated_warning(&self) -> Option<String> {
        let rotated_kind = self
            .kernels
            .keys()
            .find(|f| matches!(f, Format::Pq2_0 | Format::Ptq1_0))?;
        self.rotation.is_none().then(|| {
            format!("{}: {rotated_kind} tensors without prism.hadamard keys: running the weights as stored", self.name)
        })
    }

    pub(super) fn matrix(&self, linear: &Linear) -> MatrixRef<'_> {
        let layout = linear.kernel.layout();
        let bytes = &self.bytes.bytes()[linear.at.clone()];
        MatrixRef::new(layout, linear.rows, linear.cols, bytes)
            .expect("a matrix that was checked when it was loaded")
    }

    /// The row of a token, E long, as stored (not rotated back).
    ///
    /// # Errors
    /// An unknown token, a row of another length.
    pub fn embedding_row(&self, token: u32, out: &mut [f32]) -> Result<()> {
        let (token, e) = (token as usize, self.hyper.embedding);
        ensure!(
            token < self.vocabulary,
            "token {token}: expected one below {}",
            self.vocabulary
        );
        ensure!(
            out.len() == e,
            "embedding: a row of {} values, expected {e}",
            out.len()
        );
        let (bytes, layout) = (
            &self.bytes.bytes()[self.embedding.at.clone()],
            self.embedding.layout,
        );
        let format = layout.source();
        let row_bytes = format.row_bytes(out.len())?;
        if let Layout::Stock(format) = layout {
            return format.dequantize(&bytes[token * row_bytes..][..row_bytes], out);
        }
        let reader = layout.reader(bytes, self.vocabulary, out.len())?;
        let mut codes = [0; 256];
        let n = format.block_weights();
        for (b, out) in out.chunks_exact_mut(n).enumerate() {
            let d = reader.read(token, b, &mut codes[..n]).to_f32();
            for (out, &u) in out.iter_mut().zip(&codes) {
                *out = (f32::from(u) - 1.0) * d;
            }
        }
        Ok(())
    }
}

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The kernels to lay the weights out for.
    pub kernel: Choice,
    /// The session that will run it: its memory is asked for together with the weights'.
    pub size: Option<Size>,
}

/// Refuses what is larger than the memory that is free now, in the machine and in the container.
fn check_memory(file: &str, needed: Option<usize>) -> Result<()> {
    let needed = needed.map_or(u64::MAX, |n| n as u64);
    let Ok(mut system) = sysinfo::System::new() else {
        return Ok(()); // a system that does not say
    };
    system.refresh_memory();
    let machine = system.available_memory();
    let available = system
        .cgroup_limits()
        .map_or(machine, |limits| machine.min(limits.free_memory));
    ensure!(
        available == 0 || needed <= available,
        "{file}: weights and state take {:.1} GB, expected at most the {:.1} GB of memory that are free",
        needed as f64 / 1e9,
        available as f64 / 1e9
    );
    Ok(())
}

/// Stock bytes that are read and repacked at once: what stays in the second-level cache.
const PIECE: usize = 512 << 10;

/// Some rows of a tensor, to be read by one thread.
struct Piece<'j> {
    job: &'j Job<'j>,
    /// Bytes of the tensor.
    stock: Range<usize>,
    /// Where they go among those of the matrix.
    place: Range<usize>,
    /// Whether they are whole tiles, or rows that stay stock.
    tiles: bool,
}

impl<'j> Job<'j> {
    /// The pieces of a tensor: whole tiles first, then the rows past them.
    fn pieces(&'j self, all: &mut Vec<Piece<'j>>) -> Result<()> {
        let (rows, cols, layout) = (self.tensor.rows(), self.tensor.cols(), self.layout);
        let tile_rows = layout.tile_rows();
        let row_bytes = layout.source().row_bytes(cols)?;
        let tiles = if tile_rows > 1 { rows / tile_rows } else { 0 };
        let (tile, tiled) = (tile_rows * row_bytes, tiles * tile_rows * row_bytes);
        let (repacked, end) = (layout.matrix_bytes(tile_rows, cols)?, rows * row_bytes);
        let whole = (PIECE / tile).max(1);
        all.extend((0..tiles).step_by(whole).map(|t| {
            let until = tiles.min(t + whole);
            Piece {
                job: self,
                stock: t * tile..until * tile,
                place: t * repacked..until * repacked,
                tiles: true,
            }
        }));
        all.extend((tiled..end).step_by(PIECE).map(|at| {
            let until = end.min(at + PIECE);
            let place = |at: usize| tiles * repacked + at - tiled;
            Piece {
                job: self,
                stock: at..until,
                place: place(at)..place(until),
                tiles: false,
            }
        }));
        Ok(())
    }
}

/// Reads every tensor to its place, laid out for its kernel: a piece at a time on each thread, repacked on the way.
fn read_and_repack(
    source: &dyn Source,
    jobs: &[Job],
    bytes: usize,
    pool: &Pool,
) -> Result<AlignedBuf> {
    let mut buffer =
        AlignedBuf::new(bytes).with_context(|| format!("{}: weights", source.name()))?;
    let mut pieces = vec![];
    for job in jobs {
        job.pieces(&mut pieces)?;
    }
    let largest = pieces
        .iter()
        .filter(|p| p.tiles)
        .map(|p| p.stock.len())
        .max()
        .unwrap_or(0);
    let mut scratch = vec![0; largest * pool.threads()];
    let (places, scratch) = (Shared::new(&mut buffer), Shared::new(&mut scratch));
    let failure = Mutex::new(None);
    let read = |piece: &Piece, scratch: &mut [u8]| -> Result<()> {
        let Piece {
            job,
            stock,
            place,
            tiles,
        } = piece;
        let place = job.at.start + place.start..job.at.start + place.end;
        // SAFETY: the places of pieces are disjoint.
        let place = unsafe { places.part(place) };
        if !tiles {
            return source.read(job.tensor, stock.start, place);
        }
        let rows = &mut scratch[..stock.len()];
        source.read(job.tensor, stock.start, rows)?;
        job.layout.repack_tiles(job.tensor.cols(), rows, place)
    };
    pool.chunks_by(
        pieces.len(),
        Chunks {
            size: 1,
            multiple: 1,
        },
        |worker, range| {
            // SAFETY: the part of this thread.
            let scratch = unsafe { scratch.part(worker * largest..(worker + 1) * largest) };
            for piece in &pieces[range] {
                if let Err(error) = read(piece, scratch) {
                    // The lock guards a plain value, so one that a panic poisoned is still good.
                    *failure.lock().unwrap_or_else(|e| e.into_inner()) = Some(error);
                    return;
                }
            }
        },
    );
    match failure.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some(error) => Err(error),
        None => Ok(buffer),
    }
}
