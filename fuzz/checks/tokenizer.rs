//! Any text through the tokenizer of the model in this repository: every id is one of its own, and the ids are the same each time.

use std::sync::LazyLock;

use common::runtime::gguf::Gguf;
use common::runtime::nano;
use common::runtime::tokenizer::Tokenizer;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let gguf = Gguf::from_bytes("nano", nano::PQ2_0).expect("the model of this repository");
    Tokenizer::from_gguf(&gguf).expect("its tokenizer")
});

pub fn check(text: &str) {
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
}
