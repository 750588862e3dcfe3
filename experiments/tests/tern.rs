//! The `tern` tool from outside: exit codes, one line on errors, memory.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::runtime::gguf::{Gguf, Writer};

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
    let generate = ["generate", "--prompt", "x"];
    for (command, flag, found, expected) in [
        (&generate[..], "--n", "-1", "a whole number, at least 0"),
        (&generate, "--ctx", "-5", "a whole number, at least 1"),
        (&generate, "--ctx", "0", "a whole number, at least 1"),
        (
            &generate,
            "--threads",
            "-1",
            "a whole number from 1 to 1024",
        ),
        (&generate, "--threads", "0", "a whole number from 1 to 1024"),
        (&generate, "--top-k", "-1", "a whole number, at least 0"),
        (&generate, "--seed", "1.5", "a whole number, at least 0"),
        (&generate, "--temp", "-1", "a number from 0 to 100"),
        (&generate, "--top-p", "x", "a number from 0 to 1"),
        (&generate, "--draft", "-1", "0 to 15, or adaptive"),
        (
            &["inspect", "x"],
            "--ctx",
            "-5",
            "a whole number, at least 1",
        ),
        (
            &["perplexity", "--file", "x"],
            "--ctx",
            "1",
            "a whole number, at least 2",
        ),
        (
            &["lab-check"],
            "--runs",
            "-1",
            "a whole number from 1 to 1000",
        ),
        (&["compare", "a", "b"], "--threshold", "-1", "a percentage"),
        (
            &["synthetic", "1b", "x"],
            "--seed",
            "-1",
            "a whole number, at least 0",
        ),
    ] {
        let output = tern(&[command, &[flag, found]].concat());
        assert_refused(&output, &format!("invalid value '{found}' for '{flag} <"));
        assert_refused(&output, &format!("expected {expected}"));
    }
    assert_refused(&tern(&["tokenize", "--file", ""]), "--file <FILE>");
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
        "\nrun: yes\n",
    ] {
        assert!(text.contains(words), "{words}");
    }
}

/// The small model with one key replaced.
fn with_key(path: &Path, key: &str, change: impl FnOnce(&mut Writer)) {
    let gguf = Gguf::open(&model("tern-nano-pq2_0.gguf")).unwrap();
    let mut writer = Writer::new();
    for value in gguf.keys().filter(|v| v.key() != key) {
        writer.copy(&value).unwrap();
    }
    change(&mut writer);
    for t in gguf.tensors() {
        writer.tensor(&t.name, &t.dims, t.format).unwrap();
    }
    let data = |i: usize, out: &mut dyn Write| Ok(out.write_all(gguf.data(&gguf.tensors()[i]))?);
    writer.write(path, data).unwrap();
}

#[test]
fn inspect_and_generate_agree() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let file = path.to_str().unwrap();
    for (key, n) in [
        ("attention.head_count", 0u32),
        ("attention.head_count", 3),
        ("ssm.state_size", 0),
        ("ssm.time_step_rank", 0),
        ("feed_forward_length", 7),
        ("context_length", 0),
        ("block_count", 5),
    ] {
        let key = &format!("qwen35.{key}");
        with_key(&path, key, |w| w.set(key, n).unwrap());
        let (inspected, generated) = (
            tern(&["inspect", file]),
            tern(&["generate", "--model", file, "--prompt", "x"]),
        );
        assert_refused(&generated, file);
        let line = String::from_utf8(generated.stderr).unwrap();
        assert_eq!(inspected.status.code(), Some(2), "{line}");
        assert_eq!(String::from_utf8(inspected.stderr).unwrap(), line);
        // And what the file holds is shown all the same.
        let shown = String::from_utf8(inspected.stdout).unwrap();
        let reason = line.trim_end().strip_prefix("tern: ").unwrap();
        assert!(shown.contains("blk.3.attn_k.weight"), "{shown}");
        assert!(shown.ends_with(&format!("run: no: {reason}\n")), "{shown}");
    }
    // Of another architecture, and good.
    let key = "general.architecture";
    with_key(&path, key, |w| w.set_str(key, "llama").unwrap());
    let output = tern(&["inspect", file]);
    assert!(output.status.success() && output.stderr.is_empty());
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(
        shown.ends_with("found \"llama\", expected \"qwen35\"\n"),
        "{shown}"
    );
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

#[cfg(unix)]
#[test]
fn convert_and_links() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (input, out, link) = (path("in.gguf"), path("sub/out.gguf"), path("link.gguf"));
    std::fs::copy(model("tern-nano-pq2_0.gguf"), &input).unwrap();
    std::fs::create_dir(path("sub")).unwrap();
    std::fs::write(&out, "old").unwrap();
    symlink("sub/out.gguf", &link).unwrap();
    // Through the link, which stays one.
    let output = tern(&["convert", &input, &link, "--to", "ptq1_0"]);
    assert!(output.status.success(), "{output:?}");
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    let expected = std::fs::read(model("tern-nano-ptq1_0.gguf")).unwrap();
    assert!(std::fs::read(&out).unwrap() == expected);
    assert_eq!(std::fs::read_dir(path("sub")).unwrap().count(), 1);
    // One that leads nowhere.
    symlink("no-such/out.gguf", path("dangling")).unwrap();
    let convert = |out: &str, words: &str| {
        let output = tern(&["convert", &input, out, "--to", "ptq1_0"]);
        assert_refused(&output, words);
        // The file that is at fault comes first.
        let line = String::from_utf8(output.stderr).unwrap();
        assert!(line.starts_with(&format!("tern: {out}: ")), "{line}");
    };
    convert(&path("dangling"), "cannot follow the link");
    convert(&path("sub"), "is a folder");
    convert(&path("no-such/out.gguf"), "cannot create");
    // The file that is read, by any name.
    symlink("in.gguf", path("soft")).unwrap();
    std::fs::hard_link(&input, path("hard")).unwrap();
    for same in [&input, &path("soft"), &path("hard")] {
        convert(same, "is the file to read");
    }
    let whole = std::fs::read(model("tern-nano-pq2_0.gguf")).unwrap();
    assert!(std::fs::read(&input).unwrap() == whole);
}
