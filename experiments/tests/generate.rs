//! `tern generate`, `tern perplexity` and `tern tokenize` from outside, on the built-in model.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn tern(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tern"))
        .args(args)
        .output()
        .unwrap()
}

/// What went to standard output, of a run that worked.
fn printed(args: &[&str]) -> String {
    let output = tern(args);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Exit code 2, nothing on standard output, one line that says why.
fn refused(args: &[&str], words: &str) {
    let output = tern(args);
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {line}");
    assert!(
        line.starts_with("tern: ") && line.ends_with('\n') && line.matches('\n').count() == 1,
        "{line}"
    );
    assert!(
        line.contains(words),
        "{args:?}: {line} does not contain {words}"
    );
    assert!(output.stdout.is_empty());
}

fn model(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models")
        .join(name);
    path.to_str().unwrap().to_owned()
}

/// A file with these bytes, removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path =
            std::env::temp_dir().join(format!("tern-generate-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const PROMPT: [&str; 3] = ["generate", "--prompt", "def fibonacci(n):\n"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&PROMPT, more].concat()
}

#[test]
fn it_writes_python() {
    let text = printed(&with(&["--n", "24"]));
    assert!(
        text.starts_with("    \"\"\"Return ") && text.ends_with('\n'),
        "{text:?}"
    );
    assert_eq!(
        printed(&with(&[
            "--n",
            "24",
            "--threads",
            "1",
            "--kernel",
            "scalar"
        ])),
        text
    );
}

#[test]
fn a_line_break_that_the_shell_took_is_found_again() {
    let run = |more: &[&str]| {
        printed(
            &[
                &["generate", "--prompt", "def fibonacci(n):", "--n", "24"],
                more,
            ]
            .concat(),
        )
    };
    let whole = printed(&with(&["--n", "24"]));
    assert_eq!(run(&[]), format!("\n{whole}"));
    assert_ne!(run(&["--as-is"]), run(&[]));
    let ids = run(&["--ids"]);
    let typed = printed(&["tokenize", "--prompt", "def fibonacci(n):"]);
    assert_eq!(ids.lines().next(), Some(typed.trim_end()));
}

#[test]
fn ids_are_the_same_in_both_packings_with_every_draft() {
    let ids = printed(&with(&["--n", "40", "--ids"]));
    let lines: Vec<&str> = ids.lines().collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        lines[0],
        printed(&["tokenize", "--prompt", PROMPT[2]]).trim_end()
    );
    assert_eq!(lines[1].split(' ').count(), 40);
    let packing = model("tern-nano-ptq1_0.gguf");
    for more in [
        &["--draft", "2"][..],
        &["--draft", "adaptive", "--threads", "3"],
        &["--layout", "row-pair"],
        &["--model", &packing],
        &["--model", &packing, "--mmap", "--kernel", "stock"],
        &["--model", &packing, "--draft", "15"],
    ] {
        assert_eq!(
            printed(&[&with(&["--n", "40", "--ids"]), more].concat()),
            ids,
            "{more:?}"
        );
    }
    let output = tern(&with(&["--n", "40", "--draft", "3"]));
    let stats = String::from_utf8(output.stderr).unwrap();
    assert!(
        stats.contains("pq2_0 by ") && stats.contains("prefill 8 tokens"),
        "{stats}"
    );
    assert!(
        stats.contains("decode 39 tokens") && stats.contains("drafted tokens accepted"),
        "{stats}"
    );
}

#[test]
fn sampling_follows_its_seed() {
    let draw = |more: &[&str]| {
        printed(
            &[
                &with(&[
                    "--n", "30", "--temp", "0.8", "--top-k", "40", "--top-p", "0.9",
                ]),
                more,
            ]
            .concat(),
        )
    };
    let first = draw(&["--seed", "1"]);
    assert_eq!(draw(&["--seed", "1"]), first);
    assert_eq!(draw(&["--seed", "1", "--draft", "3"]), first);
    assert_ne!(draw(&["--seed", "2"]), first);
    refused(&with(&["--temp", "-1"]), "--temp");
    refused(&with(&["--top-p", "0"]), "--top-p");
}

#[test]
fn edges_of_length() {
    assert_eq!(printed(&with(&["--n", "0"])), "\n");
    assert_eq!(
        printed(&with(&["--n", "0", "--ids"])).lines().nth(1),
        Some("")
    );
    let full = tern(&with(&["--n", "40", "--ctx", "10", "--ids"]));
    assert!(String::from_utf8_lossy(&full.stderr).contains("the context is full"));
    let ids = String::from_utf8(full.stdout).unwrap();
    assert_eq!(ids.lines().nth(1).unwrap().split(' ').count(), 3); // 8 + 2 fit, and the next is known
    let whole = printed(&with(&["--n", "40", "--ctx", "8", "--ids"]));
    assert_eq!(whole.lines().nth(1).unwrap().split(' ').count(), 1);
    refused(
        &with(&["--ctx", "7"]),
        "--prompt: the text has 8 tokens, expected at most the context of 7",
    );
    refused(&with(&["--ctx", "0"]), "--ctx");
    refused(
        &["generate", "--prompt", ""],
        "--prompt: the text is empty, expected at least one token",
    );
    assert_eq!(printed(&["tokenize", "--prompt", ""]), "\n");
}

#[test]
fn files_are_read_or_refused() {
    let good = Temporary::new("good.txt", PROMPT[2].as_bytes());
    assert_eq!(
        printed(&["generate", "--file", good.path(), "--n", "9"]),
        printed(&with(&["--n", "9"]))
    );
    assert_eq!(
        printed(&["tokenize", "--file", good.path()]),
        printed(&["tokenize", "--prompt", PROMPT[2]])
    );
    let empty = Temporary::new("empty.txt", b"");
    refused(
        &["generate", "--file", empty.path()],
        "empty.txt: the text is empty, expected at least one token",
    );
    // As long as no stack and no pattern would take.
    let spaces = Temporary::new("spaces.txt", " ".repeat(1_000_000).as_bytes());
    let ids = printed(&["tokenize", "--file", spaces.path()]);
    assert!(ids.split_whitespace().count() > 1000);
    refused(
        &["generate", "--file", spaces.path()],
        "tokens, expected at most the context of",
    );
    let bad = Temporary::new("bad.txt", b"def \xff(n):");
    for command in ["generate", "tokenize", "perplexity"] {
        refused(
            &[command, "--file", bad.path()],
            "bad.txt: byte 0xff at 4, expected UTF-8 text",
        );
        refused(
            &[command, "--file", "no-such.txt"],
            "no-such.txt: cannot read",
        );
    }
    refused(&["generate"], "--prompt");
    refused(
        &["generate", "--prompt", "a", "--file", "b"],
        "cannot be used with",
    );
    refused(&with(&["--model", good.path()]), "good.txt");
    refused(&with(&["--model", "no-such.gguf"]), "no-such.gguf");
    refused(&with(&["--kernel", "fast"]), "--kernel fast: found 'fast'");
    refused(&with(&["--threads", "0"]), "threads");
    refused(&with(&["--draft", "16"]), "--draft");
    refused(&with(&["--n", "-1"]), "--n");
    refused(&with(&["--chat"]), "tokenizer.chat_template");
    refused(&with(&["--ctx", "99999999999"]), "weights and state take");
    refused(&with(&["--mmap"]), "--model");
    refused(
        &with(&[
            "--mmap",
            "--model",
            &model("tern-nano-pq2_0.gguf"),
            "--kernel",
            "row-pair",
        ]),
        "expected --kernel stock",
    );
}

#[test]
fn perplexity_by_chunk() {
    let text = model("eval-code.txt");
    let lines = printed(&["perplexity", "--file", &text, "--ctx", "128"]);
    let lines: Vec<&str> = lines.lines().collect();
    assert!(
        lines[0].contains("4299 tokens, ctx 128, 33 chunks") && lines[0].contains("sha256 "),
        "{}",
        lines[0]
    );
    let nll = |line: &str| {
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    // 8-bit activations against the dense reference.
    assert!((nll(lines[2]) - 2.949213).abs() < 0.01, "{}", lines[2]);
    let mean = lines[2..35].iter().map(|l| nll(l)).sum::<f64>() / 33.0;
    assert!((nll(lines[35]) - mean).abs() < 1e-6, "{} {mean}", lines[35]);
    refused(
        &["perplexity", "--file", &text, "--ctx", "9999"],
        "expected at least one chunk of 9999",
    );
    refused(
        &["perplexity", "--file", &text, "--ctx", "1"],
        "expected a whole number, at least 2",
    );
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_it_cleanly() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tern"))
        .args(with(&["--n", "1000000", "--ctx", "1000000", "--temp", "1"]))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    let stats = String::from_utf8_lossy(&output.stderr);
    // Unless the model ended the text by itself before the interrupt came.
    assert!(
        stats.contains("; stopped") || stats.contains("; ended by the model"),
        "{stats}"
    );
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout.ends_with(b"\n"));
}
