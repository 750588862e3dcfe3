//! The small model: against what llama.cpp computed with it, against itself in every mix of kernels, threads, batches and drafts.

use std::sync::Arc;

use serde_json::Value;

use super::gguf::{self, Gguf, Writer};
use super::math::Simd;
use super::model::{Model, Options};
use super::nano;
use super::perplexity;
use super::pool::Pool;
use super::session::{Session, Size};
use super::speculation::{self, Counts, Drafter, End, Junk, Length, Lookup, Oracle, Speculation};
use super::tokenizer::{Detokenizer, Tokenizer};
use crate::formats::Format;
use crate::kernels::{self, Choice, Isa};

fn size(context: usize, batch: usize) -> Size {
    Size {
        context,
        batch,
        proposals: 16,
    }
}

fn load(bytes: &[u8], kernel: &str, pool: &Pool) -> Model {
    let kernel: Choice = if kernel.is_empty() {
        Choice::default()
    } else {
        kernel.parse().unwrap()
    };
    nano::load("nano", bytes, &Options { kernel, size: None }, pool)
        .unwrap()
        .1
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::from_bytes("nano", nano::PQ2_0).unwrap()).unwrap()
}

fn reference() -> Value {
    serde_json::from_str(nano::REFERENCE).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as u32)
        .collect()
}

fn eval_tokens() -> Vec<u32> {
    tokenizer().encode(nano::EVAL_CODE)
}

/// Generates up to `n` ids after `prompt`, from the empty state.
fn run(
    session: &mut Session,
    prompt: &[u32],
    n: usize,
    end: &[u32],
    drafts: Option<Speculation>,
) -> (Vec<u32>, Counts, End) {
    session.reset();
    session.advance(prompt).unwrap();
    let is_end = |id| end.contains(&id);
    let (ids, counts, why) = speculation::greedy(session, n, is_end, drafts).unwrap();
    assert_eq!(counts.generated, ids.len());
    (ids, counts, why)
}

/// The state's hash of a run on these tokens, one by one, from nothing.
fn fresh_hash(model: &Model, pool: &Pool, tokens: &[u32]) -> String {
    let mut session = Session::new(
        model,
        pool,
        Size {
            context: 512,
            batch: 1,
            proposals: 0,
        },
    )
    .unwrap();
    session.advance(tokens).unwrap();
    session.state_hash().unwrap()
}

/// SHA-256 of all logits after the first 256 and the first 24 tokens of the text: the same on every machine and in every mode.
const HASHES: [(usize, &str); 2] = [
    (
        256,
        "8fd23f65ad03f4074618b8daf04ba05f6890af4dd7749b278a5dcda117fa6bd4",
    ),
    (
        24,
        "7eb199c180602715ea752f9d48ac9fd0735dc3afb1bf023b4780c39aebfd5d9b",
    ),
];

#[test]
fn one_hash_of_logits_for_every_kernel_thread_count_and_batch() {
    let tokens = eval_tokens();
    let check =
        |model: &Model, pool: &Pool, batch: usize, simd: Simd, (n, wanted): (usize, &str)| {
            let mut session = Session::new(model, pool, size(256, batch)).unwrap();
            session.set_simd(simd);
            let hash = perplexity::logits_hash(&mut session, &tokens[..n]).unwrap();
            let kernels: Vec<String> = model.kernels().map(|(_, k)| k.name()).collect();
            assert_eq!(
                hash,
                wanted,
                "{kernels:?}, {simd}, {} threads, batches of {batch}, {n} tokens",
                pool.threads()
            );
        };
    let [full, short] = HASHES;
    let pools: Vec<Pool> = (1..=4).map(|n| Pool::new(n).unwrap()).collect();
    let batches = [1, 3, 64, 256];
    for bytes in [nano::PQ2_0, nano::PTQ1_0] {
        let model = load(bytes, "", &pools[0]);
        for (i, pool) in pools.iter().enumerate() {
            for (j, batch) in batches.into_iter().enumerate() {
                // Everything with everything; under emulation, which takes minutes for that, each with one.
                if cfg!(target_arch = "x86_64") || i == j {
                    check(&model, pool, batch, Simd::best(), full);
                }
            }
        }
        for simd in Simd::available() {
            check(
                &model,
                &pools[1],
                64,
                simd,
                if simd == Simd::best() { full } else { short },
            );
        }
    }
    // Every kernel, with a thread count and a batch in turn. The scalar references take a second for a few tokens.
    // Those that take rows of some matrix.
    let nano = Gguf::from_bytes("nano", nano::PQ2_0).unwrap();
    let widths: Vec<usize> = nano.tensors().iter().map(|t| t.cols()).collect();
    let of_weights = |k: &&kernels::Kernel| {
        let format = k.layout().source();
        matches!(format, Format::Pq2_0 | Format::Ptq1_0)
            && widths.iter().any(|&cols| k.takes(format, cols))
    };
    for (i, kernel) in kernels::available().filter(of_weights).enumerate() {
        let bytes = if kernel.layout().source() == Format::Pq2_0 {
            nano::PQ2_0
        } else {
            nano::PTQ1_0
        };
        let model = load(bytes, &kernel.name(), &pools[1]);
        assert!(
            model.kernels().any(|(_, k)| k.name() == kernel.name()),
            "{}",
            kernel.name()
        );
        let tokens = if kernel.isa() == Isa::Scalar || cfg!(not(target_arch = "x86_64")) {
            short
        } else {
            full
        };
        check(
            &model,
            &pools[i % 4],
            batches[(i + i / 4) % 4],
            Simd::best(),
            tokens,
        );
    }
}

/// The model in another format.
fn converted(to: Format, pool: &Pool) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.gguf");
    gguf::convert(
        &Gguf::from_bytes("nano", nano::PQ2_0).unwrap(),
        &path,
        to,
        |_| {},
    )
    .unwrap();
    Model::open(&path, &Options::default(), pool).unwrap().1
}

#[test]
fn the_dense_model_computes_what_llama_cpp_does() {
    let pool = Pool::new(2).unwrap();
    let model = converted(Format::F32, &pool);
    assert_eq!(model.unrotated_warning(), None);
    let mut session = Session::new(&model, &pool, size(512, 64)).unwrap();
    let (tokenizer, tokens, reference) = (tokenizer(), eval_tokens(), reference());
    for entry in reference["perplexity"].as_array().unwrap() {
        let context = entry["ctx"].as_u64().unwrap() as usize;
        let wanted = entry["chunks"].as_array().unwrap();
        let chunks = perplexity::chunks(&tokens, context).unwrap();
        assert!(chunks.len() >= wanted.len() && !wanted.is_empty());
        let ours: Vec<_> = chunks
            .take(wanted.len())
            .map(|c| perplexity::chunk(&mut session, c).unwrap())
            .collect();
        for (ours, wanted) in ours.iter().zip(wanted) {
            assert!(
                (ours.nll - wanted.as_f64().unwrap()).abs() < 1e-4,
                "ctx {context}: {} {wanted}",
                ours.nll
            );
        }
        let mean = perplexity::mean(&ours);
        assert!((mean.nll - entry["nll"].as_f64().unwrap()).abs() < 1e-4);
        assert!((mean.perplexity.ln() - mean.nll).abs() < 1e-12);
    }
    let end: Vec<u32> = (0..2048).filter(|&id| tokenizer.is_end(id)).collect();
    for entry in reference["greedy"].as_array().unwrap() {
        let (prompt, wanted) = (ids(&entry["prompt_ids"]), ids(&entry["ids"]));
        let (ours, ..) = run(&mut session, &prompt, wanted.len(), &end, None);
        assert_eq!(ours, wanted, "{}", entry["name"]);
    }
}

/// Weights that are not numbers give an error, not a text.
#[test]
fn logits_that_are_not_finite_are_refused() {
    let pool = Pool::new(1).unwrap();
    for weight in [f32::NAN, f32::INFINITY] {
        let mut bytes = nano::PQ2_0.to_vec();
        let gguf = Gguf::from_bytes("nano", bytes.clone()).unwrap();
        let norm = gguf.tensor("output_norm.weight").unwrap();
        let at = norm.offset as usize;
        bytes[at..at + 4].copy_from_slice(&weight.to_le_bytes());
        let model = load(&bytes, "", &pool);
        let mut session = Session::new(&model, &pool, size(64, 8)).unwrap();
        session.advance(&[1, 2, 3]).unwrap();
        let error = session.last_logits().unwrap_err().to_string();
        assert!(error.starts_with("nano: logits: found "), "{error}");
    }
}

#[test]
fn every_format_runs() {
    let pool = Pool::new(2).unwrap();
    let tokens = &eval_tokens()[..128];
    let reference = reference()["perplexity"][0]["chunks"][0].as_f64().unwrap();
    let nll = |model: &Model| {
        let mut session = Session::new(model, &pool, size(128, 64)).unwrap();
        perplexity::chunk(&mut session, tokens).unwrap().nll
    };
    let stored = nll(&load(nano::PQ2_0, "", &pool));
    assert!((stored - reference).abs() < 0.01, "{stored} {reference}");
    // What the format itself costs, measured from the dense reference.
    for (format, most) in [
        (Format::Q2_0, 0.01),
        (Format::F16, 0.001),
        (Format::Q8_0, 0.02),
        (Format::Q4_0, 0.5),
    ] {
        let found = nll(&converted(format, &pool));
        assert!(
            (found - reference).abs() < most,
            "{format}: {found} {reference}"
        );
    }
}

#[test]
fn prompts_are_tokenized_as_llama_cpp_does() {
    let tokenizer = tokenizer();
    for entry in reference()["greedy"].as_array().unwrap() {
        let text = entry["prompt"].as_str().unwrap();
        let prompt = tokenizer.encode(text);
        assert_eq!(prompt, ids(&entry["prompt_ids"]), "{}", entry["name"]);
    }
}

#[test]
fn text_survives_tokens() {
    let tokenizer = tokenizer();
    let texts = [
        nano::EVAL_CODE,
        "",
        " ",
        "\n\n \t x",
        "don't I'LL 12345 é日本語🙂 a\u{301} \u{0}\r\n",
        "   \n   y   ",
    ];
    for text in texts {
        let ids = tokenizer.encode(text);
        assert_eq!(tokenizer.decode(&ids), text);
    }
    // Long runs, each followed by something else: the pattern takes no stack for them, and no time but theirs.
    for run in [
        " ", "\n", "\t", " \n", "a", "aB", "'s", "7", "🙂", "\u{301}", "\u{3000}", ". ",
    ] {
        let long = run.repeat(1_000_000 / run.len()) + "x" + &run.repeat(10_000);
        assert!(
            tokenizer.decode(&tokenizer.encode(&long)) == long,
            "{run:?}"
        );
    }
    let marked = tokenizer.encode("a<|im_end|>b");
    assert_eq!(marked.len(), 3);
    assert!(tokenizer.is_end(marked[1]) && !tokenizer.is_end(marked[0]));
    assert_eq!(tokenizer.decode(&marked), "ab");
}

#[test]
fn tokens_with_line_breaks_behind_them_are_found() {
    let tokenizer = tokenizer();
    let last = |text: &str| *tokenizer.encode(text).last().unwrap();
    let found = |text: &str| -> Vec<String> {
        let ids = tokenizer.with_line_breaks(last(text));
        ids.map(|id| String::from_utf8(tokenizer.bytes(id).to_vec()).unwrap())
            .collect()
    };
    assert_eq!(found("def fibonacci(n):"), ["):\n", "):\n\n"]);
    assert!(found("    def test_").is_empty() && found("<|im_end|>").is_empty());
}

#[test]
fn streamed_text_never_splits_a_character() {
    let tokenizer = tokenizer();
    let text = "é日本語🙂x";
    // One token a byte.
    let ids: Vec<u32> = text
        .bytes()
        .flat_map(|b| (0..2048).find(|&id| tokenizer.bytes(id) == [b]))
        .collect();
    let mut stream = Detokenizer::default();
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(&tokenizer, id)).collect();
    assert_eq!(
        pieces,
        [
            "", "é", "", "", "日", "", "", "本", "", "", "語", "", "", "", "🙂", "x"
        ]
    );
    // A character that breaks off, inside and at the end; a byte that no character has.
    let cut = [ids[0], ids[15], ids[2]];
    let pieces: Vec<String> = cut.iter().map(|&id| stream.push(&tokenizer, id)).collect();
    assert_eq!(pieces, ["", "\u{fffd}x", ""]);
    assert_eq!(stream.finish(), "\u{fffd}");
    let bad = (0..2048).find(|&id| tokenizer.bytes(id) == [0xff]).unwrap();
    assert_eq!(stream.push(&tokenizer, bad), "\u{fffd}");
    assert_eq!(stream.finish(), "");
}

#[test]
fn drafts_change_neither_text_nor_state() {
    let (pool, tokenizer) = (Pool::new(2).unwrap(), tokenizer());
    let model = load(nano::PQ2_0, "", &pool);
    let mut session = Session::new(&model, &pool, size(512, 64)).unwrap();
    for (name, n) in [("edit-0", 59), ("prose-0", 40), ("code-0", 40)] {
        let reference = reference();
        let entry = reference["greedy"]
            .as_array()
            .unwrap()
            .iter()
            .find(|e| e["name"] == name)
            .unwrap();
        let prompt = ids(&entry["prompt_ids"]);
        let end: Vec<u32> = (0..2048).filter(|&id| tokenizer.is_end(id)).collect();
        let (wanted, _, why) = run(&mut session, &prompt, n, &end, None);
        let hash = session.state_hash().unwrap();
        assert_eq!(
            hash,
            fresh_hash(
                &model,
                &pool,
                &[&prompt[..], &wanted[..wanted.len() - 1]].concat()
            )
        );
        let known = [&prompt[..], &wanted].concat();
        for draft in [1, 2, 3, 5, 8, 15] {
            for length in [Length::Fixed(draft), Length::Adaptive(draft)] {
                let vocabulary = model.vocabulary() as u32;
                let mut oracle = Oracle {
                    tokens: known.clone(),
                };
                let mut junk = Junk {
                    tokens: known.clone(),
                    vocabulary,
                };
                let mut lookup = Lookup::default();
                let drafters: [(&str, &mut dyn Drafter); 3] = [
                    ("oracle", &mut oracle),
                    ("junk", &mut junk),
                    ("lookup", &mut lookup),
                ];
                for (kind, drafter) in drafters {
                    let drafts = Some(Speculation { drafter, length });
                    let (ids, counts, ended) = run(&mut session, &prompt, n, &end, drafts);
                    let what = format!("{name} {kind} {length:?}");
                    assert_eq!((ids, ended), (wanted.clone(), why), "{what}");
                    assert_eq!(session.state_hash().unwrap(), hash, "{what}");
                    match kind {
                        "oracle" => assert!(
                            counts.accepted == counts.drafted && counts.drafted > 0,
                            "{what}"
                        ),
                        "junk" => assert!(counts.accepted == 0 && counts.drafted > 0, "{what}"),
                        _ => {}
                    }
                }
            }
        }
    }
}

#[test]
fn an_end_inside_a_draft_and_a_full_context_are_as_without_drafts() {
    let pool = Pool::new(2).unwrap();
    let model = load(nano::PQ2_0, "", &pool);
    let prompt = &eval_tokens()[..20];
    let mut session = Session::new(&model, &pool, size(512, 64)).unwrap();
    let (plain, ..) = run(&mut session, prompt, 30, &[], None);
    let known = [prompt, &plain].concat();
    // Any token of the text as the end of generation: it stands first, inside and last in drafts.
    for (at, &token) in plain.iter().enumerate().take(12).skip(1) {
        let end = [token];
        let (wanted, _, why) = run(&mut session, prompt, 30, &end, None);
        let hash = session.state_hash().unwrap();
        for draft in [1, 3, 4, 15] {
            let mut oracle = Oracle {
                tokens: known.clone(),
            };
            let drafts = Some(Speculation {
                drafter: &mut oracle,
                length: Length::Fixed(draft),
            });
            let (ids, _, ended) = run(&mut session, prompt, 30, &end, drafts);
            assert_eq!((&ids, ended), (&wanted, why), "end at {at}, draft {draft}");
            assert_eq!(
                session.state_hash().unwrap(),
                hash,
                "end at {at}, draft {draft}"
            );
        }
    }
    for context in 20..30 {
        let mut session = Session::new(&model, &pool, size(context, 64)).unwrap();
        let (wanted, _, why) = run(&mut session, prompt, 30, &[], None);
        assert_eq!((wanted.len(), why), (context - 20 + 1, End::Context));
        let hash = session.state_hash().unwrap();
        for draft in [1, 3, 4, 15] {
            let mut oracle = Oracle {
                tokens: known.clone(),
            };
            let drafts = Some(Speculation {
                drafter: &mut oracle,
                length: Length::Fixed(draft),
            });
            let (ids, _, ended) = run(&mut session, prompt, 30, &[], drafts);
            assert_eq!(
                (&ids, ended),
                (&wanted, why),
                "context {context}, draft {draft}"
            );
            assert_eq!(
                session.state_hash().unwrap(),
                hash,
                "context {context}, draft {draft}"
            );
        }
    }
}

/// One thing that can happen to a session.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Plain tokens.
    Plain(usize),
    /// (proposed, accepted).
    Draft(usize, usize),
}

#[test]
fn any_mix_of_steps_leaves_the_state_of_a_fresh_run() {
    use Step::{Draft, Plain};
    let pool = Pool::new(3).unwrap();
    let model = load(nano::PTQ1_0, "", &pool);
    let tokens = eval_tokens();
    let mixes: [&[Step]; 9] = [
        &[Draft(4, 2), Plain(1), Draft(3, 3), Plain(2)],
        &[Draft(1, 1), Draft(1, 1), Draft(1, 0), Draft(1, 1)],
        &[Draft(5, 0)],
        &[Draft(5, 0), Draft(5, 0), Plain(1)],
        &[Plain(7), Draft(4, 0), Draft(3, 0)],
        &[
            Plain(7),
            Draft(16, 16),
            Draft(16, 0),
            Draft(2, 1),
            Plain(40),
        ],
        &[Plain(3), Draft(8, 1), Draft(8, 2), Draft(8, 3), Draft(8, 8)],
        &[Plain(70), Draft(6, 5)],
        &[Draft(2, 1), Plain(1), Plain(1), Draft(2, 2), Plain(33)],
    ];
    let mut session = Session::new(&model, &pool, size(512, 64)).unwrap();
    for mix in mixes {
        for look in [true, false] {
            session.reset();
            let mut at = 0;
            for &step in mix {
                match step {
                    Plain(n) => {
                        session.advance(&tokens[at..at + n]).unwrap();
                        at += n;
                    }
                    Draft(n, accepted) => {
                        // The refused ones are other tokens than those that come later.
                        let mut draft = tokens[at..at + n].to_vec();
                        draft[accepted..]
                            .iter_mut()
                            .for_each(|t| *t = (*t + 1) % 2048);
                        session.propose(&draft).unwrap();
                        assert!(
                            session.advance(&tokens[..1]).is_err() && session.state_hash().is_err()
                        );
                        session.accept(accepted).unwrap();
                        at += accepted;
                    }
                }
                assert_eq!(session.tokens(), &tokens[..at]);
                if look {
                    assert_eq!(
                        session.state_hash().unwrap(),
                        fresh_hash(&model, &pool, &tokens[..at]),
                        "{mix:?} {step:?}"
                    );
                }
            }
            assert_eq!(
                session.state_hash().unwrap(),
                fresh_hash(&model, &pool, &tokens[..at]),
                "{mix:?}"
            );
        }
    }
    assert!(
        session
            .propose(&tokens[..17])
            .unwrap_err()
            .to_string()
            .contains("at most 16")
    );
}

#[test]
fn snapshots_bring_the_state_back() {
    let pool = Pool::new(2).unwrap();
    let model = load(nano::PQ2_0, "", &pool);
    let tokens = eval_tokens();
    let mut session = Session::new(&model, &pool, size(256, 64)).unwrap();
    let empty = session.snapshot().unwrap();
    let hash = session.state_hash().unwrap();
    session.advance(&tokens[..50]).unwrap();
    session.propose(&tokens[50..55]).unwrap();
    session.accept(3).unwrap();
    let snapshot = session.snapshot().unwrap();
    let wanted = session.state_hash().unwrap();
    session.advance(&tokens[100..190]).unwrap();
    assert_ne!(session.state_hash().unwrap(), wanted);
    session.restore(&snapshot).unwrap();
    assert_eq!(session.state_hash().unwrap(), wanted);
    assert_eq!(wanted, fresh_hash(&model, &pool, &tokens[..53]));
    session.restore(&empty).unwrap();
    assert_eq!(session.state_hash().unwrap(), hash);
    session.advance(&tokens[1..60]).unwrap();
    assert!(
        session
            .restore(&snapshot)
            .unwrap_err()
            .to_string()
            .contains("not of this text")
    );
}

#[test]
fn what_a_session_cannot_do_is_an_error_and_changes_nothing() {
    let pool = Pool::new(1).unwrap();
    let model = load(nano::PQ2_0, "", &pool);
    let mut session = Session::new(&model, &pool, size(8, 4)).unwrap();
    assert!(session.last_logits().is_err());
    session.advance(&[1, 2, 3]).unwrap();
    let hash = session.state_hash().unwrap();
    let refused =
        |error: anyhow::Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    refused(
        session.advance(&[0; 6]).unwrap_err(),
        "3 and 6 more tokens, expected at most 8",
    );
    refused(
        session.advance(&[2048]).unwrap_err(),
        "expected one below 2048",
    );
    refused(session.propose(&[0; 6]).unwrap_err(), "at most 8");
    refused(session.accept(1).unwrap_err(), "1 tokens accepted of 0");
    refused(session.logits(2..4).unwrap_err(), "a pass of 3");
    assert_eq!(session.state_hash().unwrap(), hash);
    assert_eq!(session.tokens(), [1, 2, 3]);
    for bad in [
        size(0, 4),
        size(8, 0),
        size(8, 5000),
        Size {
            proposals: 33,
            ..size(8, 4)
        },
    ] {
        assert!(Session::new(&model, &pool, bad).is_err(), "{bad:?}");
    }
}

/// The small model with some keys changed and some tensors left out.
fn altered(change: impl Fn(&str, &mut Writer) -> bool, keep: impl Fn(&str) -> bool) -> Vec<u8> {
    let nano = Gguf::from_bytes("nano", nano::PQ2_0).unwrap();
    let mut writer = Writer::new();
    for value in nano.keys() {
        if !change(value.key(), &mut writer) {
            writer.copy(&value).unwrap();
        }
    }
    let tensors: Vec<_> = nano.tensors().iter().filter(|t| keep(&t.name)).collect();
    for tensor in &tensors {
        writer
            .tensor(&tensor.name, &tensor.dims, tensor.format)
            .unwrap();
    }
    let mut bytes = vec![];
    writer
        .write_to(&mut bytes, |i, out| {
            Ok(out.write_all(nano.data(tensors[i]))?)
        })
        .unwrap();
    bytes
}

/// The line with which a file is refused.
fn refusal(bytes: &[u8]) -> String {
    let pool = Pool::new(1).unwrap();
    let error = nano::load("x.gguf", bytes, &Options::default(), &pool)
        .err()
        .expect("a refusal");
    let line = format!("{error:#}");
    assert!(
        line.starts_with("x.gguf: ") && !line.contains('\n'),
        "{line}"
    );
    line
}

#[test]
fn hostile_hyper_parameters_are_refused_by_name() {
    let counts: [(&str, u32, &str); 22] = [
        ("block_count", 0, "found 0, expected 1 to"),
        ("block_count", u32::MAX, "found 4294967295"),
        (
            "block_count",
            1 << 24,
            "tensor blk.4.attn_norm.weight is missing",
        ),
        ("nextn_predict_layers", 4, "fewer than the 4 blocks"),
        ("embedding_length", 0, "found 0"),
        (
            "embedding_length",
            512,
            "tensor token_embd.weight: shape [256, 2048], expected [512, 2048]",
        ),
        (
            "feed_forward_length",
            767,
            "tensor blk.0.ffn_gate.weight: shape",
        ),
        ("attention.head_count", 0, "found 0"),
        ("attention.head_count", 3, "a multiple of 2"),
        (
            "attention.head_count",
            8,
            "tensor blk.3.attn_q.weight: shape",
        ),
        ("attention.head_count_kv", 0, "found 0"),
        ("attention.key_length", 24, "a multiple of 16"),
        ("attention.value_length", 32, "the key length, 64"),
        ("rope.dimension_count", 66, "at most the head's 64"),
        ("rope.dimension_count", 31, "a multiple of 2"),
        ("ssm.conv_kernel", 3, "expected 4"),
        ("ssm.state_size", 72, "a multiple of 16"),
        ("ssm.group_count", 0, "found 0"),
        ("ssm.group_count", 3, "a multiple of 3"),
        ("ssm.inner_size", 128, "4 heads of 64"),
        ("full_attention_interval", 0, "found 0"),
        (
            "full_attention_interval",
            3,
            "tensor blk.2.attn_q.weight is missing",
        ),
    ];
    for (name, value, words) in counts {
        let key = format!("qwen35.{name}");
        let bytes = altered(
            |k, writer| k == key && writer.set(&key, value).is_ok(),
            |_| true,
        );
        // A key that the file does not have yet.
        let bytes = if name == "nextn_predict_layers" {
            altered(
                |k, writer| k == "general.name" && writer.set(&key, value).is_ok(),
                |_| true,
            )
        } else {
            bytes
        };
        let line = refusal(&bytes);
        assert!(line.contains(words), "{name} {value}: {line}");
    }
    for (name, value) in [
        ("rope.freq_base", 0.5f32),
        ("attention.layer_norm_rms_epsilon", 0.0),
    ] {
        let key = format!("qwen35.{name}");
        let line = refusal(&altered(
            |k, writer| k == key && writer.set(&key, value).is_ok(),
            |_| true,
        ));
        assert!(line.contains(&key), "{line}");
    }
    let other = altered(
        |k, w| k == "general.architecture" && w.set_str(k, "llama").is_ok(),
        |_| true,
    );
    assert!(refusal(&other).contains("expected \"qwen35\""));
    for name in [
        "token_embd.weight",
        "output_norm.weight",
        "blk.1.ssm_dt.bias",
        "blk.3.ffn_down.weight",
    ] {
        // The rotation must not ask for what is gone.
        let line = refusal(&altered(|k, _| k.starts_with("prism."), |t| t != name));
        assert!(
            line.contains(&format!("tensor {name} is missing")),
            "{line}"
        );
    }
    let version = altered(
        |k, w| k == "prism.hadamard.version" && w.set(k, 2u32).is_ok(),
        |_| true,
    );
    assert!(refusal(&version).contains("prism.hadamard.version"));
}

#[test]
fn files_that_differ_but_run() {
    let pool = Pool::new(1).unwrap();
    let load = |bytes: &[u8]| {
        nano::load("x.gguf", bytes, &Options::default(), &pool)
            .unwrap()
            .1
    };
    let hash = |model: &Model| {
        let mut session = Session::new(model, &pool, size(64, 64)).unwrap();
        perplexity::logits_hash(&mut session, &eval_tokens()[..HASHES[1].0]).unwrap()
    };
    // A trailing block for multi-token prediction is not run.
    let more = altered(
        |k, w| match k {
            "qwen35.block_count" => w
                .set(k, 5u32)
                .and_then(|()| w.set("qwen35.nextn_predict_layers", 1u32))
                .is_ok(),
            _ => false,
        },
        |_| true,
    );
    assert_eq!(hash(&load(&more)), HASHES[1].1);
    // Without the rotation's keys the weights run as stored, after a warning.
    let stored = load(&altered(|k, _| k.starts_with("prism."), |_| true));
    let warning = stored.unrotated_warning().unwrap();
    assert!(
        warning.contains("x.gguf: pq2_0 tensors without prism.hadamard keys"),
        "{warning}"
    );
    assert_ne!(hash(&stored), HASHES[1].1);
    // The embedding serves as the head where there is none, rotated as it is stored, in every layout.
    let tied = altered(
        |k, w| {
            let names = |gguf: &Gguf| -> Vec<String> {
                let names = gguf.key(k).unwrap().strs().unwrap();
                names
                    .into_iter()
                    .filter(|n| *n != "output.weight")
                    .map(str::to_owned)
                    .collect()
            };
            k == "prism.hadamard.weight_names"
                && w.set_strs(k, &names(&Gguf::from_bytes("nano", nano::PQ2_0).unwrap()))
                    .is_ok()
        },
        |t| t != "output.weight",
    );
    let mut hashes = vec![];
    for kernel in ["scalar", "stock", "row-pair", "wide-row"] {
        let options = Options {
            kernel: kernel.parse().unwrap(),
            size: None,
        };
        hashes.push(hash(&nano::load("tied", &tied, &options, &pool).unwrap().1));
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 1);
    assert_ne!(hashes[0], HASHES[1].1);
}

#[test]
fn a_mapped_file_runs_as_stored() {
    let pool = Pool::new(2).unwrap();
    for bytes in [nano::PQ2_0, nano::PTQ1_0] {
        let gguf = Arc::new(Gguf::from_bytes("mapped", bytes).unwrap());
        let options = |kernel: &str| Options {
            kernel: kernel.parse().unwrap(),
            size: None,
        };
        let model = Model::mapped(&gguf, &options("stock"), &pool).unwrap();
        assert!(model.buffer().is_none());
        let mut session = Session::new(&model, &pool, size(64, 64)).unwrap();
        let hash = perplexity::logits_hash(&mut session, &eval_tokens()[..HASHES[1].0]).unwrap();
        assert_eq!(hash, HASHES[1].1);
        let error = Model::mapped(&gguf, &options("scalar"), &pool)
            .err()
            .expect("a refusal");
        assert!(
            format!("{error:#}").contains("expected --kernel stock"),
            "{error:#}"
        );
    }
}

#[test]
fn what_does_not_fit_in_memory_is_refused_before_loading() {
    let pool = Pool::new(1).unwrap();
    for context in [1 << 50, usize::MAX / 2] {
        let size = Some(Size {
            context,
            batch: 64,
            proposals: 0,
        });
        let error = nano::load(
            "x.gguf",
            nano::PQ2_0,
            &Options {
                size,
                ..Options::default()
            },
            &pool,
        )
        .err()
        .unwrap();
        assert!(
            error.to_string().contains("x.gguf: weights and state take"),
            "{error:#}"
        );
    }
}

#[test]
fn tokenizers_that_do_not_fit_are_refused_by_name() {
    let refused = |change: &dyn Fn(&str, &mut Writer) -> bool, words: &str| {
        let gguf = Gguf::from_bytes("x.gguf", altered(change, |_| false)).unwrap();
        let line = format!("{:#}", Tokenizer::from_gguf(&gguf).unwrap_err());
        assert!(
            line.starts_with("x.gguf: key tokenizer.ggml.") && line.contains(words),
            "{line}"
        );
    };
    refused(
        &|k, w| k == "tokenizer.ggml.model" && w.set_str(k, "llama").is_ok(),
        "expected \"gpt2\"",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.pre" && w.set_str(k, "gpt-2").is_ok(),
        "expected \"qwen35\"",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.tokens" && w.set_strs(k, &["a", "b"]).is_ok(),
        "one for each of 2 tokens",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.token_type" && w.set_array(k, &[3i32; 2048]).is_ok(),
        "no token for byte 0x00",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.merges" && w.set_strs(k, &["ab"]).is_ok(),
        "merge 0 \"ab\"",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.merges" && w.set_strs(k, &["! !!!!!!!!"]).is_ok(),
        "merge 0",
    );
    refused(
        &|k, w| k == "tokenizer.ggml.eos_token_id" && w.set(k, 2048u32).is_ok(),
        "a token below 2048",
    );
}

/// The small model with one key and one tensor taken away, and what `change` adds.
fn replaced(key: &str, tensor: &str, change: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let gguf = Gguf::from_bytes("nano", nano::PQ2_0).unwrap();
    let mut writer = Writer::new();
    for value in gguf.keys().filter(|v| v.key() != key) {
        writer.copy(&value).unwrap();
    }
    let kept: Vec<_> = gguf.tensors().iter().filter(|t| t.name != tensor).collect();
    for t in &kept {
        writer.tensor(&t.name, &t.dims, t.format).unwrap();
    }
    change(&mut writer);
    let header = writer.describe("altered").unwrap();
    let mut bytes = vec![];
    let data = |i: usize, out: &mut dyn std::io::Write| match kept.get(i) {
        Some(t) => Ok(out.write_all(gguf.data(t))?),
        None => Ok(out.write_all(&vec![0; header.tensors()[i].bytes as usize])?),
    };
    writer.write_to(&mut bytes, data).unwrap();
    bytes
}

/// Every key and tensor in turn, taken away or made wrong: what passes the check loads and runs, and what does not is refused in
/// the same words.
#[test]
fn one_place_decides_whether_a_file_runs() {
    let pool = Pool::new(1).unwrap();
    let (mut passed, mut refused) = (0, 0);
    let mut try_out = |what: &str, bytes: &[u8]| {
        let Ok(gguf) = Gguf::from_bytes("altered", bytes) else {
            return; // refused before anything is asked
        };
        let checked = Model::check(&gguf).map_err(|e| format!("{e:#}"));
        let loaded = Model::load(&gguf, &gguf, &Options::default(), &pool);
        match (checked, loaded) {
            (Ok(tokenizer), Ok(model)) => {
                passed += 1;
                assert_eq!(tokenizer.len(), model.vocabulary());
                let mut session = Session::new(&model, &pool, size(8, 4)).unwrap();
                session.advance(&[1, 2, 3, 4, 5]).unwrap();
                let _ = session.last_logits(); // finite or not
            }
            (Err(line), loaded) => {
                refused += 1;
                assert!(
                    line.starts_with("altered: ") && !line.contains('\n'),
                    "{line}"
                );
                match loaded {
                    Err(error) => assert_eq!(format!("{error:#}"), line, "{what}"),
                    Ok(_) => assert!(line.contains("tokenizer.ggml."), "{what}: {line}"),
                }
            }
            (Ok(_), Err(error)) => panic!("{what}: passed, and then: {error:#}"),
        }
    };
    let gguf = Gguf::from_bytes("nano", nano::PQ2_0).unwrap();
    for key in gguf.keys().map(|v| v.key()) {
        try_out(key, &replaced(key, "", |_| {}));
        for n in [0u32, 1, 2, 3, 4, 16, 24, 64, 1 << 24, u32::MAX] {
            try_out(
                &format!("{key} = {n}"),
                &replaced(key, "", |w| w.set(key, n).unwrap_or_default()),
            );
        }
        try_out(
            key,
            &replaced(key, "", |w| w.set(key, -1i32).unwrap_or_default()),
        );
        for x in [0.0, 0.5, 1.0, f32::NAN] {
            try_out(
                &format!("{key} = {x}"),
                &replaced(key, "", |w| w.set(key, x).unwrap_or_default()),
            );
        }
        try_out(
            key,
            &replaced(key, "", |w| w.set_str(key, "x").unwrap_or_default()),
        );
        try_out(
            key,
            &replaced(key, "", |w| {
                w.set_strs(key, &["x", "blk.0.ffn_up.weight"])
                    .unwrap_or_default()
            }),
        );
        try_out(
            key,
            &replaced(key, "", |w| {
                w.set_array(key, &[0u32, 256]).unwrap_or_default()
            }),
        );
    }
    for t in gguf.tensors() {
        try_out(&t.name, &replaced("", &t.name, |_| {}));
        let (cols, rows) = (t.cols(), t.rows());
        for dims in [
            vec![rows, cols],
            vec![cols, rows + 1],
            vec![2 * cols, rows],
            vec![cols, rows, 1],
            vec![cols, 1, rows],
            vec![cols * rows],
            vec![256],
        ] {
            let add = |w: &mut Writer| w.tensor(&t.name, &dims, t.format).unwrap_or_default();
            try_out(&format!("{} {dims:?}", t.name), &replaced("", &t.name, add));
        }
        for format in Format::ALL {
            let add = |w: &mut Writer| w.tensor(&t.name, &t.dims, format).unwrap_or_default();
            try_out(&format!("{} {format}", t.name), &replaced("", &t.name, add));
        }
    }
    assert!(passed > 100 && refused > 500, "{passed} {refused}");
}
