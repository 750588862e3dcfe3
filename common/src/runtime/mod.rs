//! A model running: files, tokenizer, forward pass, thread pool, speculation, perplexity.

pub mod attention;
pub mod bandwidth;
pub mod chat;
pub mod deltanet;
pub mod gguf;
pub mod hadamard;
pub mod hyper;
mod lanes;
pub mod math;
pub mod memory;
pub mod model;
pub mod nano;
pub mod perplexity;
pub mod pool;
pub mod products;
pub mod sampler;
pub mod session;
pub mod shapes;
mod shared;
pub mod speculation;
pub mod stack;
pub mod state;
pub mod synthetic;
pub mod tokenizer;

#[cfg(test)]
mod tests;
