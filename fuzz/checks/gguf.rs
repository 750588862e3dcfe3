//! Any bytes as a GGUF file: read or refused, and what is read can be looked at.

use common::runtime::gguf::{Gguf, Memory};
use common::runtime::hyper::Hyper;
use common::runtime::model::Model;
use common::runtime::tokenizer::Tokenizer;

pub fn check(bytes: &[u8]) {
    let Ok(gguf) = Gguf::from_bytes("fuzz.gguf", bytes) else {
        return;
    };
    for value in gguf.keys() {
        let _ = format!("{value:?}");
    }
    for tensor in gguf.tensors() {
        assert!(tensor.weights() == tensor.rows() * tensor.cols());
        assert!(gguf.find_tensor(&tensor.name).is_some());
        let _ = gguf.data(tensor).iter().fold(0u8, |a, b| a ^ b);
    }
    if let Ok(hyper) = Hyper::from_gguf(&gguf) {
        let _ = Memory::of(&gguf, &hyper, 4096, 64).total();
    }
    let _ = Model::check(&gguf).map(drop);
    if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) {
        let _ = tokenizer.decode(&tokenizer.encode("def f(n):\n    return n"));
    }
}
