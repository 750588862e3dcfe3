//! Any bytes as a GGUF file: see checks/gguf.rs, which the ordinary tests run too.
#![no_main]

#[path = "../checks/gguf.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| checks::check(bytes));
