//! The `tern` tool from outside: exit codes, one line on errors, memory.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models")
        .join(name)
}

fn tern(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tern"));
    command.args(args).output().unwrap()
}

/// Exit code 2, nothing on standard output, one line on standard error.
fn assert_refused(output: &Output, words: &str) {
    let line = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert_eq!(line.matches('\n').count(), 1, "{line}");
    assert!(line.ends_with('\n') && line.starts_with("tern: "), "{line}");
    assert!(line.contains(words), "{line} does not contain {words}");
    assert!(output.stdout.is_empty());
}

#[test]
fn flags() {
    assert_refused(&tern(&[]), "requires a subcommand");
    assert_refused(&tern(&["no-such"]), "no-such");
    assert_refused(&tern(&["--no-such"]), "--no-such");
    assert_refused(&tern(&["inspect"]), "FILE.gguf");
    assert_refused(&tern(&["inspect", "x", "--ctx", "0"]), "--ctx");
    assert_refused(&tern(&["inspect", "x", "--ctx", "many"]), "--ctx");
    assert_refused(&tern(&["convert", "a", "b", "--to", "q9"]), "q9");
    assert_refused(&tern(&["convert", "a", "b"]), "--to");
    assert_refused(&tern(&["synthetic", "70b", "x"]), "70b");
    assert_refused(
        &tern(&["generate", "--prompt", "x", "--synthetic", "1b/q8_0"]),
        "1b/q8_0",
    );
    assert_refused(&tern(&["inspect", "no\nsuch"]), "no\\nsuch");
    let help = tern(&["--help"]);
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("inspect"));
}

#[test]
fn inspect_shows_what_the_file_holds() {
    let file = model("tern-nano-pq2_0.gguf");
    let output = tern(&["inspect", file.to_str().unwrap(), "--ctx", "1024"]);
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).unwrap();
    for words in [
        "GGUF v3, 42 keys, 56 tensors",
        "\"qwen35\"",
        "2048 in all",
        "blk.3.attn_k.weight",
        "256 x 128",
        "36.06%",
        "26 matrices and the embedding in blocks of 256",
        "KV cache, f32, 1024 tokens",
    ] {
        assert!(text.contains(words), "{words}");
    }
}

#[test]
fn inspect_survives_a_closed_pipe() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tern"))
        .args(["inspect", model("tern-nano-pq2_0.gguf").to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

/// The start of a file: magic, version, counts, then what follows.
fn header(tensors: u64, keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(keys.to_le_bytes());
    bytes.extend(rest.concat());
    bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
    bytes
}

fn tensor(dims: [u64; 2], offset: u64) -> Vec<u8> {
    let mut bytes = [&1u64.to_le_bytes()[..], b"t", &2u32.to_le_bytes()].concat();
    bytes.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

/// Within an address space of 50 MB where a shell can set that limit, else without.
fn inspect_in_little_memory(file: &str) -> Output {
    if cfg!(target_os = "linux") {
        let script = "ulimit -v 50000 && exec \"$0\" inspect \"$1\"";
        let args = ["-c", script, env!("CARGO_BIN_EXE_tern"), file];
        Command::new("sh").args(args).output().unwrap()
    } else {
        tern(&["inspect", file])
    }
}

#[test]
fn inspect_refuses_bad_files_in_little_memory() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let whole = std::fs::read(model("tern-nano-pq2_0.gguf")).unwrap();
    let huge = (1u64 << 40).to_le_bytes();
    let key_head = [&1u64.to_le_bytes()[..], b"k", &8u32.to_le_bytes()].concat();
    let cases: [(&[u8], &str); 12] = [
        (b"", "the magic"),
        (&whole[..10], "the tensor count"),
        (&whole[..5000], "tokenizer.ggml.tokens"),
        (
            &whole[..whole.len() - 1],
            "blk.3.post_attention_norm.weight",
        ),
        (b"GGML and something more than that", "magic"),
        (
            &header(1 << 63, 0, &[]),
            "tensor count is 9223372036854775808",
        ),
        (&header(0, 1 << 63, &[]), "key count is 9223372036854775808"),
        (&header(0, 1, &[&huge]), "1099511627776 bytes"),
        (&header(0, 1, &[&key_head, &huge]), "1099511627776 bytes"),
        (&header(1, 0, &[&tensor([1 << 40, 1 << 40], 0)]), "overflow"),
        (
            &header(1, 0, &[&tensor([1 << 40, 1], 0)]),
            "only 64 are left",
        ),
        (&header(1, 0, &[&tensor([8, 1], 1 << 41)]), "past the end"),
    ];
    for (i, (bytes, words)) in cases.into_iter().enumerate() {
        let file = write(&format!("{i}.gguf"), bytes);
        let output = inspect_in_little_memory(&file);
        assert_refused(&output, words);
        assert_refused(&output, &file);
    }
    // The limit itself lets a good file through.
    let good = write("good.gguf", &header(1, 0, &[&tensor([8, 2], 0)]));
    let output = inspect_in_little_memory(&good);
    assert!(output.status.success(), "{output:?}");
    assert_refused(
        &tern(&["inspect", folder.path().to_str().unwrap()]),
        "not a regular file",
    );
    assert_refused(&tern(&["inspect", "no-such.gguf"]), "no-such.gguf");
}

#[test]
fn convert_writes_the_other_packing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let (source, target) = (model("tern-nano-pq2_0.gguf"), out.to_str().unwrap());
    let source = source.to_str().unwrap();
    let output = tern(&["convert", source, target, "--to", "ptq1_0"]);
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    let expected = std::fs::read(model("tern-nano-ptq1_0.gguf")).unwrap();
    assert!(std::fs::read(&out).unwrap() == expected);
    // A refusal leaves what was there.
    assert_refused(
        &tern(&["convert", "no-such", target, "--to", "f32"]),
        "no-such",
    );
    let nowhere = folder.path().join("no-such-folder/out.gguf");
    let nowhere = nowhere.to_str().unwrap();
    assert_refused(&tern(&["convert", source, nowhere, "--to", "f32"]), nowhere);
    assert!(std::fs::read(&out).unwrap() == expected);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}
