//! Any bytes as a CSV of results: see checks/csv.rs, which the ordinary tests run too.
#![no_main]

#[path = "../checks/csv.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| checks::check(bytes));
