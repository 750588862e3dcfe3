//! Models of full size without their files: seeded random weights in the packed form, made while they are loaded.
//!
//! Every byte is a function of the seed, the tensor's name and the byte's place in it, so that neither the number of threads nor
//! the pieces in which a tensor is read change anything, and a file written from it holds the same weights. Scales are such that a
//! product of normalized inputs is about 1, and what is added to the residual stream less the deeper the model is: activations stay
//! tame. What such a model says means nothing; what it costs is what a trained one of its shape costs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use half::{bf16, f16};

use super::gguf::{Gguf, Tensor, Writer};
use super::hyper::{ARCHITECTURE, EMBEDDING};
use super::memory::AlignedBuf;
use super::model::Source;
use super::pool::{Chunks, Pool};
use super::shapes::Shape;
use super::shared::Shared;
use super::stack::ZEROS;
use super::tokenizer::printable;
use crate::formats::{Format, base3};

/// Bits of a random number that choose a byte of codes.
const BITS: u32 = 12;
/// Bytes that a random number of 64 bits gives.
const A_WORD: usize = 5;
/// Scales that a tensor has.
const SCALES: usize = 256;
/// What a thread makes at once when a file is written.
const PIECE: usize = 1 << 20;

/// A synthetic model: its keys, and the bytes of its tensors on demand.
pub struct Synthetic {
    gguf: Arc<Gguf>,
    writer: Writer,
    seed: u64,
    layers: usize,
    /// Bytes of codes, as often as their weights are likely: four or five weights of `format`.
    codes: Vec<u8>,
    /// The same for the bytes of PTQ1_0 that hold four digits.
    short: Vec<u8>,
}

impl Synthetic {
    /// A model of this shape with its matrices in `format`, PQ2_0 or PTQ1_0.
    ///
    /// # Errors
    /// Another format; a shape that the format's blocks or the rotation do not divide, or with fewer than 257 tokens.
    pub fn new(shape: &Shape, format: Format, seed: u64) -> Result<Self> {
        let (codes, short) = match format {
            Format::Pq2_0 => (table(4, crumbs), vec![]),
            Format::Ptq1_0 => (table(5, base3::encode), table(4, base3::encode)),
            _ => bail!("{format}: not a format of synthetic models, expected pq2_0 or ptq1_0"),
        };
        let mut writer = Writer::new();
        keys(&mut writer, shape, seed)?;
        tensors(&mut writer, shape, format)?;
        let gguf = writer.describe(&format!("synthetic-{}-{format}", shape.name))?;
        Ok(Synthetic {
            gguf: Arc::new(gguf),
            writer,
            seed,
            layers: shape.layers,
            codes,
            short,
        })
    }

    /// Its keys and tensors, without their data.
    pub fn gguf(&self) -> &Arc<Gguf> {
        &self.gguf
    }

    /// Writes it as a file, some megabytes at a time; `done` is told of the bytes of tensors written.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn write(&self, path: &Path, pool: &Pool, mut done: impl FnMut(u64)) -> Result<()> {
        let mut buffer = AlignedBuf::new(4 * PIECE * pool.threads())?;
        self.writer.write(path, |i, out| {
            let tensor = &self.gguf.tensors()[i];
            let (mut at, end) = (0, usize::try_from(tensor.bytes)?);
            while at < end {
                let len = buffer.len().min(end - at);
                let part = &mut buffer[..len];
                let shared = Shared::new(part);
                let chunks = Chunks {
                    size: PIECE,
                    multiple: 1,
                };
                pool.chunks_by(len, chunks, |_, range| {
                    // SAFETY: the ranges of a job are disjoint.
                    self.fill(tensor, at + range.start, unsafe { shared.part(range) });
                });
                out.write_all(part)?;
                done(len as u64);
                at += len;
            }
            Ok(())
        })
    }

    /// The bytes of a tensor from `at` on.
    fn fill(&self, tensor: &Tensor, at: usize, to: &mut [u8]) {
        let key = hash(self.seed, tensor.name.as_bytes());
        let bytes = tensor.format.block_bytes();
        let make: &dyn Fn(u64, &mut [u8]) = if tensor.format.is_ternary() {
            let scales = scales(tensor, self.layers);
            &move |b, block: &mut [u8]| self.ternary(tensor.format, key, &scales, b, block)
        } else {
            let (centre, spread) = range(tensor);
            &move |b, block: &mut [u8]| {
                let value = centre + spread * unit(mix(key, b));
                match tensor.format {
                    Format::Bf16 => block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                    _ => block.copy_from_slice(&value.to_le_bytes()),
                }
            }
        };
        // A block that is cut at either end is made whole first.
        let mut whole = [0; 64];
        let (mut at, mut to) = (at, to);
        while !to.is_empty() {
            let (block, skip) = (at / bytes, at % bytes);
            let n = (bytes - skip).min(to.len());
            let (now, rest) = to.split_at_mut(n);
            if n == bytes {
                make(block as u64, now);
            } else {
                make(block as u64, &mut whole[..bytes]);
                now.copy_from_slice(&whole[skip..skip + n]);
            }
            (at, to) = (at + n, rest);
        }
    }

    /// Block `b` of 128 weights.
    fn ternary(&self, format: Format, key: u64, scales: &[[u8; 2]], b: u64, block: &mut [u8]) {
        let mask = (1 << BITS) - 1;
        let (d, codes) = if format == Format::Pq2_0 {
            let (d, codes) = block.split_at_mut(2);
            (d, codes)
        } else {
            let (codes, d) = block.split_at_mut(26);
            (d, codes)
        };
        let words = codes.len().div_ceil(A_WORD) as u64;
        let mut word = 0;
        for (i, bytes) in codes.chunks_mut(A_WORD).enumerate() {
            word = mix(key, b * words + i as u64);
            let mut bits = word;
            for byte in bytes {
                *byte = self.codes[(bits & mask) as usize];
                bits >>= BITS;
            }
        }
        // The last word fills one or two bytes; its upper bits are free.
        d.copy_from_slice(&scales[(word >> 56) as usize]);
        if format == Format::Ptq1_0 {
            for (i, byte) in codes[24..].iter_mut().enumerate() {
                *byte = self.short[((word >> (24 + BITS as usize * i)) & mask) as usize];
            }
        }
    }
}

impl Source for Synthetic {
    fn name(&self) -> &str {
        self.gguf.file()
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        self.gguf.find_tensor(name)
    }

    fn read(&self, tensor: &Tensor, at: usize, to: &mut [u8]) -> Result<()> {
        let end = at.checked_add(to.len());
        ensure!(
            end.is_some_and(|end| end as u64 <= tensor.bytes),
            "{}: tensor {}: bytes {at} and {} more, expected at most {}",
            self.name(),
            tensor.name,
            to.len(),
            tensor.bytes
        );
        self.fill(tensor, at, to);
        Ok(())
    }
}

/// SplitMix64's output for its state number `n` (Steele, Lea, Flood 2014), from `key`.
fn mix(key: u64, n: u64) -> u64 {
    let x = key.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A key for a name.
fn hash(seed: u64, name: &[u8]) -> u64 {
    name.iter()
        .fold(mix(seed, 0), |h, &b| mix(h ^ u64::from(b), 0))
}

/// -1 to 1.
fn unit(word: u64) -> f32 {
    (word >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn crumbs(digits: [u8; 5]) -> u8 {
    digits[0] | digits[1] << 2 | digits[2] << 4 | digits[3] << 6
}

/// Bytes of `digits` codes each, `2^BITS` of them: each as often as its weights are likely, to the nearest whole number, with
/// [`ZEROS`] for 0 and the rest shared by -1 and +1.
fn table(digits: u32, encode: impl Fn([u8; 5]) -> u8) -> Vec<u8> {
    let size = 1usize << BITS;
    let mut table = Vec::with_capacity(size);
    let mut likely = 0.0;
    for q in 0..3u32.pow(digits) {
        let mut code = [0; 5];
        for (n, code) in code.iter_mut().take(digits as usize).enumerate() {
            *code = (q / 3u32.pow(n as u32) % 3) as u8;
        }
        let of = |&u: &u8| if u == 1 { ZEROS } else { (1.0 - ZEROS) / 2.0 };
        likely += code.iter().take(digits as usize).map(of).product::<f64>();
        // Up to where the running total says, so that rounding does not add up.
        table.resize(
            ((likely * size as f64).round() as usize).min(size),
            encode(code),
        );
    }
    table
}

/// The scales of a ternary tensor, f16: [`SCALES`] of them from 3/4 to 5/4 of what makes its products about 1.
fn scales(tensor: &Tensor, layers: usize) -> Vec<[u8; 2]> {
    let width = if tensor.name == EMBEDDING {
        1
    } else {
        tensor.cols()
    };
    // Two products a layer are added to the residual stream.
    let adds = ["attn_output.", "ssm_out.", "ffn_down."];
    let share = if adds.iter().any(|kind| tensor.name.contains(kind)) {
        1.0 / (2.0 * layers as f64).sqrt()
    } else {
        1.0
    };
    let d = share / ((1.0 - ZEROS) * width as f64).sqrt();
    let scale = |i: usize| f16::from_f64(d * (0.75 + 0.5 * i as f64 / SCALES as f64));
    (0..SCALES).map(|i| scale(i).to_le_bytes()).collect()
}

/// Middle and half width of what the values of a float tensor are drawn from.
fn range(tensor: &Tensor) -> (f32, f32) {
    let name = tensor.name.as_str();
    match name {
        _ if name.ends_with("norm.weight") => (1.0, 0.1),
        // The decay of the state is exp(a softplus(x + dt)): from 0.8 to nearly 1.
        _ if name.ends_with("ssm_a") => (-1.0, 0.9),
        _ if name.ends_with("ssm_dt.bias") => (-4.0, 2.0),
        _ if name.ends_with("ssm_conv1d.weight") => (0.0, 0.8),
        _ => (0.0, 1.0 / (tensor.cols() as f32).sqrt()),
    }
}

fn keys(writer: &mut Writer, shape: &Shape, seed: u64) -> Result<()> {
    let s = shape;
    ensure!(
        s.vocabulary > 256,
        "{}: a vocabulary of {}, expected a token for each byte and more",
        s.name,
        s.vocabulary
    );
    writer.set_str("general.architecture", ARCHITECTURE)?;
    writer.set_str(
        "general.name",
        &format!("Synthetic {}, seed {seed}", s.name),
    )?;
    let count = |writer: &mut Writer, key: &str, n: usize| -> Result<()> {
        writer.set(&format!("{ARCHITECTURE}.{key}"), u32::try_from(n)?)
    };
    for (key, n) in [
        ("block_count", s.layers),
        ("context_length", 32768),
        ("embedding_length", s.embedding),
        ("feed_forward_length", s.feed_forward),
        ("attention.head_count", s.heads),
        ("attention.head_count_kv", s.kv_heads),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("rope.dimension_count", s.rope_dims),
        ("ssm.conv_kernel", s.conv_taps),
        ("ssm.state_size", s.state_size),
        ("ssm.group_count", s.key_heads),
        ("ssm.time_step_rank", s.value_heads),
        ("ssm.inner_size", s.value_heads * s.state_size),
        ("full_attention_interval", s.interval),
        ("vocab_size", s.vocabulary),
    ] {
        count(writer, key, n)?;
    }
    let pairs = i32::try_from(s.rope_dims / 2)?;
    let sections = [(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3, 0];
    writer.set_array("qwen35.rope.dimension_sections", &sections)?;
    writer.set("qwen35.rope.freq_base", 1e7f32)?;
    writer.set("qwen35.attention.layer_norm_rms_epsilon", 1e-6f32)?;

    // A token a byte, then numbered words, last the end of a text; nothing merges.
    let last = s.vocabulary - 1;
    let token = |id: usize| match id {
        0..256 => printable(id as u8).to_string(),
        _ if id == last => "<|endoftext|>".into(),
        _ => format!("{}{id}", printable(b' ')),
    };
    let tokens: Vec<String> = (0..s.vocabulary).map(token).collect();
    let mut types = vec![1i32; s.vocabulary];
    types[last] = 3;
    writer.set_str("tokenizer.ggml.model", "gpt2")?;
    writer.set_str("tokenizer.ggml.pre", "qwen35")?;
    writer.set_strs("tokenizer.ggml.tokens", &tokens)?;
    writer.set_array("tokenizer.ggml.token_type", &types)?;
    writer.set_strs::<&str>("tokenizer.ggml.merges", &[])?;
    writer.set("tokenizer.ggml.eos_token_id", u32::try_from(last)?)?;
    writer.set("tokenizer.ggml.add_bos_token", false)?;

    let matrices = s.matrices();
    let widths: BTreeSet<usize> = matrices.iter().map(|m| m.cols).collect();
    let sign = |width: usize, i: usize| {
        let word = mix(hash(seed, b"signs"), ((width as u64) << 32) + i as u64);
        if word >> 63 == 0 { 1i32 } else { -1 }
    };
    let signs = widths.iter().flat_map(|&w| (0..w).map(move |i| sign(w, i)));
    let signs: Vec<i32> = signs.collect();
    let widths = widths.iter().map(|&w| u32::try_from(w));
    let widths = widths.collect::<Result<Vec<_>, _>>()?;
    let names: Vec<String> = matrices.iter().map(|m| m.tensor()).collect();
    let key = |name: &str| format!("prism.hadamard.{name}");
    writer.set(&key("version"), 1u32)?;
    writer.set(&key("block_size"), u32::try_from(s.hadamard)?)?;
    writer.set_str(&key("transform"), "normalized-sylvester-walsh-hadamard")?;
    writer.set_str(&key("axis"), "input-last-dimension")?;
    writer.set_str(&key("sign_mode"), "explicit")?;
    writer.set_array(&key("sign_widths"), &widths)?;
    writer.set_array(&key("sign_values"), &signs)?;
    writer.set_strs(&key("weight_names"), &names)?;
    writer.set_strs(&key("inverse_weight_names"), &[EMBEDDING])?;
    writer.set(&key("gdn_v_grouped"), true)
}

fn tensors(writer: &mut Writer, s: &Shape, format: Format) -> Result<()> {
    let e = s.embedding;
    writer.tensor(EMBEDDING, &[e, s.vocabulary], format)?;
    writer.tensor("output_norm.weight", &[e], Format::F32)?;
    for m in s.matrices() {
        writer.tensor(&m.tensor(), &[m.cols, m.rows], format)?;
    }
    for layer in 0..s.layers {
        let heads = s.value_heads;
        let norms: &[(&str, &[usize], Format)] = &[
            ("attn_norm.weight", &[e], Format::F32),
            ("post_attention_norm.weight", &[e], Format::F32),
        ];
        let mixer: &[(&str, &[usize], Format)] = if s.is_full(layer) {
            &[
                ("attn_q_norm.weight", &[s.head_dim], Format::F32),
                ("attn_k_norm.weight", &[s.head_dim], Format::F32),
            ]
        } else {
            &[
                // BF16, as in the published files.
                ("ssm_alpha.weight", &[e, heads], Format::Bf16),
                ("ssm_beta.weight", &[e, heads], Format::Bf16),
                (
                    "ssm_conv1d.weight",
                    &[s.conv_taps, s.conv_channels()],
                    Format::F32,
                ),
                ("ssm_dt.bias", &[heads], Format::F32),
                ("ssm_a", &[heads], Format::F32),
                ("ssm_norm.weight", &[s.state_size], Format::F32),
            ]
        };
        for &(name, dims, format) in norms.iter().chain(mixer) {
            writer.tensor(&format!("blk.{layer}.{name}"), dims, format)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::hyper::Hyper;
    use crate::runtime::model::{Model, Options};
    use crate::runtime::session::{Session, Size};
    use crate::runtime::shapes::{SHAPE_1B, SHAPE_27B};
    use crate::runtime::tokenizer::Tokenizer;

    const SMALL: Shape = Shape {
        name: "small",
        layers: 4,
        embedding: 256,
        feed_forward: 512,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        rope_dims: 32,
        key_heads: 2,
        value_heads: 4,
        state_size: 64,
        vocabulary: 300,
        hadamard: 128,
        ..SHAPE_1B
    };

    const FORMATS: [Format; 2] = [Format::Pq2_0, Format::Ptq1_0];

    fn whole(model: &Synthetic, name: &str) -> Vec<u8> {
        let tensor = model.find(name).unwrap();
        let mut bytes = vec![0; tensor.bytes as usize];
        model.read(tensor, 0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_depend_on_neither_pieces_nor_threads() {
        let folder = tempfile::tempdir().unwrap();
        for format in FORMATS {
            let model = Synthetic::new(&SMALL, format, 1).unwrap();
            for tensor in model.gguf().tensors() {
                let expected = whole(&model, &tensor.name);
                let mut found = vec![0; expected.len()];
                for (i, piece) in found.chunks_mut(1001).enumerate() {
                    model.read(tensor, 1001 * i, piece).unwrap();
                }
                assert_eq!(found, expected, "{}", tensor.name);
                assert!(model.read(tensor, 1, &mut found).is_err());
            }
            let file = |threads: usize| {
                let path = folder.path().join(format!("{format}-{threads}"));
                let pool = Pool::new(threads).unwrap();
                model.write(&path, &pool, |_| {}).unwrap();
                std::fs::read(path).unwrap()
            };
            let one = file(1);
            assert_eq!(one, file(3));
            assert_eq!(one.len() as u64, model.gguf().file_bytes());
            let other = Synthetic::new(&SMALL, format, 2).unwrap();
            let name = "blk.0.ffn_up.weight";
            assert_ne!(whole(&model, name), whole(&other, name));
        }
    }

    #[test]
    fn zeros_are_as_in_trained_checkpoints() {
        for format in FORMATS {
            let model = Synthetic::new(&SHAPE_1B, format, 1).unwrap();
            let bytes = whole(&model, "blk.0.attn_gate.weight");
            let mut values = vec![0f32; bytes.len() / format.block_bytes() * 128];
            format.dequantize(&bytes, &mut values).unwrap();
            let share = |f: fn(&f32) -> bool| {
                values.iter().filter(|x| f(x)).count() as f64 / values.len() as f64
            };
            assert!((share(|x| *x == 0.0) - ZEROS).abs() < 1e-3, "{format}");
            assert!((share(|x| *x > 0.0) - share(|x| *x < 0.0)).abs() < 1e-3);
            // Products of normalized inputs: squares of a row sum to about 1.
            let squares: f32 = values[..2048].iter().map(|x| x * x).sum();
            assert!((0.8..1.25).contains(&squares), "{squares}");
        }
    }

    #[test]
    fn a_file_gives_the_logits_of_the_model_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        let pool = Pool::new(2).unwrap();
        let size = Size {
            context: 16,
            batch: 8,
            proposals: 0,
        };
        let logits = |model: &Model| {
            let mut session = Session::new(model, &pool, size).unwrap();
            session.advance(&[1, 299, 77, 5, 256]).unwrap();
            session.last_logits().unwrap().to_vec()
        };
        for format in FORMATS {
            let synthetic = Synthetic::new(&SMALL, format, 7).unwrap();
            synthetic.write(&path, &pool, |_| {}).unwrap();
            let options = Options::default();
            let built = Model::load(synthetic.gguf(), &synthetic, &options, &pool).unwrap();
            let (gguf, read) = Model::open(&path, &options, &pool).unwrap();
            assert!(read.unrotated_warning().is_none());
            assert_eq!(Tokenizer::from_gguf(&gguf).unwrap().len(), 300);
            let found = logits(&built);
            assert_eq!(found, logits(&read));
            let mean = found.iter().map(|x| x * x).sum::<f32>() / found.len() as f32;
            assert!((0.05..20.0).contains(&mean), "{format}: {mean}");
        }
    }

    /// The inputs of the residual are 640 wide, those of other matrices are not; the head ends in rows past the last tile.
    #[test]
    fn a_layout_for_some_widths_serves_those_alone() {
        let shape = Shape {
            embedding: 640,
            ..SMALL
        };
        let synthetic = Synthetic::new(&shape, Format::Ptq1_0, 7).unwrap();
        let pool = Pool::new(2).unwrap();
        let run = |kernel: &str| {
            let options = Options {
                kernel: kernel.parse().unwrap(),
                size: None,
            };
            let model = Model::load(synthetic.gguf(), &synthetic, &options, &pool).unwrap();
            let size = Size {
                context: 16,
                batch: 8,
                proposals: 0,
            };
            let mut session = Session::new(&model, &pool, size).unwrap();
            session.advance(&[1, 299, 77, 5, 256]).unwrap();
            session.advance(&[3]).unwrap();
            let logits = session.last_logits().unwrap().to_vec();
            let layouts: Vec<_> = model.kernels().map(|(_, k)| k.layout().name()).collect();
            let products = model.products().into_iter().flatten();
            let bytes: usize = products.map(|(_, w)| w.bytes().len()).sum();
            (logits, layouts, bytes)
        };
        let (expected, layouts, bytes) = run("ptq1_0");
        assert!(layouts.contains(&"ptq1_0"));
        let (found, layouts, fewer) = run("wide-row-b3x5");
        assert_eq!(found, expected);
        assert!(layouts.contains(&"wide-row-b3x5"));
        assert!(fewer < bytes, "{fewer} of {bytes}");
    }

    #[test]
    fn the_27b_is_described_without_its_bytes() {
        let model = Synthetic::new(&SHAPE_27B, Format::Ptq1_0, 1).unwrap();
        let gguf = model.gguf();
        let hyper = Hyper::from_gguf(gguf).unwrap();
        assert_eq!((hyper.layers, hyper.channels()), (64, 10240));
        assert!(!gguf.has_data());
        let ternary = gguf.tensors().iter().filter(|t| t.format.is_ternary());
        let weights: u64 = ternary.map(|t| t.weights() as u64).sum();
        assert_eq!(weights, SHAPE_27B.weights() + 248_320 * 5120);
        assert!(gguf.file_bytes() > 5_800_000_000);
        let tokenizer = Tokenizer::from_gguf(gguf).unwrap();
        assert_eq!(tokenizer.len(), 248_320);
        assert_eq!(tokenizer.encode("A b"), [65, 32, 98]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused =
            |shape: &Shape, format| Synthetic::new(shape, format, 1).err().unwrap().to_string();
        assert!(refused(&SMALL, Format::Tq1_0).contains("tq1_0"));
        let few = Shape {
            vocabulary: 256,
            ..SMALL
        };
        assert!(refused(&few, Format::Pq2_0).contains("vocabulary of 256"));
    }
}
