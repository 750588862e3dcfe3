//! A model running: files, tokenizer, forward pass, thread pool, speculation, perplexity.

pub mod attention;
pub mod bandwidth;
pub mod deltanet;
pub mod gguf;
pub mod hadamard;
mod lanes;
pub mod math;
pub mod memory;
pub mod pool;
pub mod shapes;
pub mod stack;
