//! llama.cpp as a peer: a safe, small view of ggml's matrix product and of libllama, for experiments that run both sides.
//!
//! Built only by `just peers`, for the CPU at hand (`target-cpu=native`): the package's build script passes that on to
//! ggml, whose kernels are chosen when it is compiled.

pub mod ggml;
pub mod llama;
pub mod matrix;
