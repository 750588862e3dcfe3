//! A model running: files, tokenizer, forward pass, thread pool, speculation, perplexity.

pub mod gguf;
