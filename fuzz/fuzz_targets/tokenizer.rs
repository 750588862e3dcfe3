//! Any text through the tokenizer: see checks/tokenizer.rs, which the ordinary tests run too.
#![no_main]

#[path = "../checks/tokenizer.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|text: &str| checks::check(text));
