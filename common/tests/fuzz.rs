//! What the fuzz targets check, on their seeds and what they once found (in `fuzz/regressions`), and on seeded changes of these.

use std::fs;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[path = "../../fuzz/checks/csv.rs"]
mod csv;
#[path = "../../fuzz/checks/gguf.rs"]
mod gguf;
#[path = "../../fuzz/checks/tokenizer.rs"]
mod tokenizer;

/// Hands every file of a target to `check`, whole and then changed in a few places, cut or doubled.
fn replay(target: &str, check: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/regressions");
    let mut files: Vec<_> = fs::read_dir(folder.join(target))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no seeds of {target}");
    let mut rng = StdRng::seed_from_u64(1);
    for file in files {
        let whole = fs::read(file).unwrap();
        check(&whole);
        for _ in 0..200 {
            let mut bytes = whole.clone();
            for _ in 0..rng.random_range(1..6) {
                let at = rng.random_range(0..bytes.len());
                match rng.random_range(0..6) {
                    0 => bytes.truncate(at + 1),
                    1 => bytes.extend_from_within(at..),
                    2 => bytes[at] = bytes[at].wrapping_add(1),
                    3 => bytes[at] ^= 1 << rng.random_range(0..8),
                    4 => bytes[at] = [0, 0xff][rng.random_range(0..2)],
                    _ => bytes[at] = rng.random(),
                }
            }
            check(&bytes);
        }
    }
}

#[test]
fn gguf_files() {
    replay("gguf", gguf::check);
}

#[test]
fn tables() {
    replay("csv", csv::check);
}

#[test]
fn texts() {
    replay("tokenizer", |bytes| {
        tokenizer::check(&String::from_utf8_lossy(bytes));
    });
}
