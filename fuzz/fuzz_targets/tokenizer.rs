//! Any text through the tokenizer of the model in this repository: every id is one of its own, and the ids are the same each time.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use common::runtime::gguf::Gguf;
use common::runtime::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tern-nano-pq2_0.gguf");
    let gguf = Gguf::open(&model).expect("the model of this repository");
    Tokenizer::from_gguf(&gguf).expect("its tokenizer")
});

fuzz_target!(|text: &str| {
    let tokenizer = &*TOKENIZER;
    let ids = tokenizer.encode(text);
    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.len()));
    assert_eq!(tokenizer.encode(text), ids);
    let bytes: Vec<u8> = ids
        .iter()
        .flat_map(|id| tokenizer.bytes(*id).to_vec())
        .collect();
    assert_eq!(String::from_utf8_lossy(&bytes), text);
    let _ = tokenizer.decode(&ids);
});
