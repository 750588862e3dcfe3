//! tern: ternary language models on ordinary CPUs, measured.
//!
//! Dependencies point one way: [`formats`] (bytes) <- [`kernels`] (arithmetic) <- [`runtime`]
//! (a model running). [`lab`] (measuring) knows none of the three.

pub mod formats;
pub mod kernels;
pub mod lab;
pub mod runtime;
#[cfg(unix)]
pub mod test_support;
mod widened;
