//! llama.cpp as it is against llama.cpp with the patch in `patches/`: two builds, run in turn.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use common::formats::Format;
use common::lab::{self, Experiment, Metric, Row, Stat};
use common::runtime::gguf::{self, Gguf};

/// The two builds, by the names that `patches/check/run.sh --llama` gives them.
const BUILDS: [&str; 2] = ["stock", "patched"];
const CHECK: &str = "target/patch-check";
/// Rounding may differ between builds where the compiler fuses differently: so much of a chunk's nll, and no more.
const NLL_TOLERANCE: f64 = 1e-4;

fn main() -> ExitCode {
    lab::run("exp-17-upstream-patch", &[], |exp| {
        let root = lab::root();
        exp.progress("building stock and patched llama.cpp");
        let built = Command::new("bash")
            .arg(root.join("patches/check/run.sh"))
            .arg("--llama")
            .stdout(Stdio::null())
            .status()
            .context("bash: cannot start; expected it to run patches/check/run.sh")?;
        ensure!(built.success(), "patches/check/run.sh --llama: {built}");

        exp.repo_file("patches/ggml-q2_0-wide-repack.patch")?;
        let source = exp.model()?;
        let model = root.join(CHECK).join("model-q2_0.gguf");
        // The codes stay bit for bit. libllama does not know that activations are rotated, so the model makes no sense, but is
        // the same for both builds.
        gguf::convert(&Gguf::open(&source)?, &model, Format::Q2_0, |_| {})?;
        same_results(exp, &model)?;
        for threads in exp.thread_counts() {
            model_rates(exp, &model, threads)?;
            kernel_rates(exp, threads)?;
        }
        Ok(())
    })
}

fn driver(kind: &str, build: &str) -> PathBuf {
    lab::root()
        .join(CHECK)
        .join(format!("{kind}_check-{build}"))
}

/// Runs `llama_check` on commands; one answer a command, without its first word.
fn ask(build: &str, model: &Path, threads: usize, commands: &[String]) -> Result<Vec<String>> {
    let program = driver("llama", build);
    let mut child = Command::new(&program)
        .arg(model)
        .arg(threads.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{}: cannot start", program.display()))?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    stdin.write_all((commands.join("\n") + "\n").as_bytes())?;
    drop(stdin);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "llama_check of {build}: {}",
        output.status
    );
    let text = String::from_utf8(output.stdout)?;
    let answers: Vec<String> = commands
        .iter()
        .zip(text.lines())
        .map(|(command, line)| {
            let word = command.split(' ').next().unwrap_or_default();
            let rest = line
                .strip_prefix(word)
                .context("llama_check: an answer to another command")?;
            Ok(rest.trim().to_owned())
        })
        .collect::<Result<_>>()?;
    ensure!(
        answers.len() == commands.len(),
        "llama_check of {build}: {} answers to {} commands",
        answers.len(),
        commands.len()
    );
    Ok(answers)
}

/// Tokens of a chunk.
const CONTEXT: usize = 128;

/// Perplexity by chunk and greedy ids.
fn same_results(exp: &mut Experiment, model: &Path) -> Result<()> {
    let text = exp.repo_file("models/eval-code.txt")?;
    let reference = exp.repo_file("models/reference.json")?;
    let reference: serde_json::Value = serde_json::from_slice(&fs::read(&reference)?)?;
    let mut commands = vec![format!("nll {CONTEXT} {}", text.display())];
    let prompts = reference["greedy"]
        .as_array()
        .context("reference.json: no greedy")?;
    for prompt in prompts {
        let ids = prompt["prompt_ids"]
            .as_array()
            .context("reference.json: no prompt_ids")?;
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        commands.push(format!(
            "greedy {} {}",
            if exp.quick() { 8 } else { 64 },
            ids.join(" ")
        ));
    }
    exp.progress("perplexity and greedy ids of both builds");
    let threads = exp.all_threads();
    let [stock, patched] = BUILDS.map(|build| ask(build, model, threads, &commands));
    let (stock, patched) = (stock?, patched?);

    let numbers = |line: &str| {
        line.split(' ')
            .map(|n| n.parse().context("nll"))
            .collect::<Result<Vec<f64>>>()
    };
    let (a, b) = (numbers(&stock[0])?, numbers(&patched[0])?);
    ensure!(
        a.len() == b.len() && !a.is_empty(),
        "nll: {} chunks and {}",
        a.len(),
        b.len()
    );
    let hash = lab::sha256(&fs::read(&text)?);
    let mut worst = 0.0_f64;
    for (i, (one, other)) in a.iter().zip(&b).enumerate() {
        for (build, nll) in BUILDS.into_iter().zip([one, other]) {
            exp.row(
                Row::new(build, "")
                    .exact(Metric::Nll, *nll)
                    .threads(threads)
                    .param("text", &hash[..12])
                    .param("tokens", CONTEXT * a.len())
                    .param("ctx", CONTEXT)
                    .param("chunk", i + 1),
            )?;
        }
        worst = worst.max((one - other).abs() / one.abs());
    }
    exp.row(
        Row::new("patched", "")
            .baseline("stock")
            .exact(Metric::RelativeError, worst)
            .threads(threads),
    )?;
    exp.must_hold(
        "the nll of every chunk is that of the stock build within 1e-4",
        worst <= NLL_TOLERANCE,
    );
    let same = stock[1..] == patched[1..];
    exp.row(
        Row::new("patched", "")
            .baseline("stock")
            .exact(Metric::Equal, same)
            .threads(threads)
            .param("prompts", prompts.len()),
    )?;
    exp.must_hold(
        "greedy ids are those of the stock build on every prompt",
        same,
    );
    Ok(())
}

/// Prefill and decode through libllama, the two builds in turn.
fn model_rates(exp: &mut Experiment, model: &Path, threads: usize) -> Result<()> {
    let (prefill, decode) = if exp.quick() { (16, 4) } else { (64, 32) };
    for (what, tokens) in [("prefill", prefill), ("decode", decode)] {
        exp.progress(format!("{what}, {threads} threads"));
        let command = [format!("{what} {tokens}")];
        let mut race = exp.race();
        for build in BUILDS {
            let command = &command;
            race.add_timed(build, move || {
                let seconds: f64 = ask(build, model, threads, command)?[0].parse()?;
                Ok(Duration::from_secs_f64(seconds))
            });
        }
        let times = race.run()?;
        let params = |row: Row| {
            row.threads(threads)
                .params([(what, tokens)])
                .param("model", "nano")
        };
        for build in BUILDS {
            exp.row(params(Row::new(build, "").metric(
                Metric::TokensPerS,
                times.rate(build, Metric::TokensPerS, f64::from(tokens)),
            )))?;
        }
        exp.row(params(
            Row::new("patched", "")
                .baseline("stock")
                .metric(Metric::Speedup, times.speedup("patched", "stock")),
        ))?;
    }
    Ok(())
}

/// The matrix product alone: Q2_0 of both builds, and TQ2_0, which the patch does not touch.
fn kernel_rates(exp: &mut Experiment, threads: usize) -> Result<()> {
    let cases: &[(usize, usize, usize, usize, &str)] = if exp.quick() {
        &[(256, 1024, 1, 4, "cache"), (256, 512, 64, 1, "")]
    } else {
        &[
            (2048, 2048, 1, 40, "cache"),
            (32768, 8192, 1, 1, ""),
            (4096, 5120, 64, 1, ""),
        ]
    };
    for &(rows, cols, batch, repeat, from) in cases {
        exp.progress(format!("{rows}x{cols}, {batch} columns, {threads} threads"));
        // GMAC/s by build and variant, one value a round.
        let mut rates: BTreeMap<(&str, String), Vec<f64>> = BTreeMap::new();
        for round in 0..exp.rounds() {
            for turn in 0..2 {
                let build = BUILDS[(round + turn) % 2];
                for (variant, rate) in bench(build, [rows, cols, batch, threads, 1, repeat])? {
                    rates.entry((build, variant)).or_default().push(rate);
                }
            }
        }
        let metric = if batch == 1 {
            Metric::WeightsPerS
        } else {
            Metric::MacPerS
        };
        let params = |row: Row| {
            let row =
                row.threads(threads)
                    .params([("rows", rows), ("cols", cols), ("batch", batch)]);
            if from.is_empty() {
                row
            } else {
                row.param("from", from)
            }
        };
        for ((build, variant), rates) in &rates {
            exp.row(params(
                Row::new(format!("{build} {variant}"), "").metric(metric, Stat::of(rates)),
            ))?;
        }
        let rate = |build, variant: &str| {
            let rates = rates.get(&(build, variant.to_owned()));
            rates.with_context(|| format!("the {build} build timed no {variant}"))
        };
        let patched = rate("patched", "q2_0 repack")?;
        for (build, variant) in [("stock", "q2_0 plain"), ("patched", "tq2_0")] {
            let ratios: Vec<f64> = patched
                .iter()
                .zip(rate(build, variant)?)
                .map(|(a, b)| a / b)
                .collect();
            let row = Row::new("patched q2_0 repack", "").baseline(format!("{build} {variant}"));
            exp.row(params(row.metric(Metric::Speedup, Stat::of(&ratios))))?;
        }
    }
    Ok(())
}

/// One run of `q2_0_check bench`: variants and their GMAC/s.
fn bench(build: &str, arguments: [usize; 6]) -> Result<Vec<(String, f64)>> {
    let output = Command::new(driver("q2_0", build))
        .arg("bench")
        .args(arguments.map(|a| a.to_string()))
        .output()
        .with_context(|| format!("q2_0_check of {build}: cannot start"))?;
    if !output.status.success() {
        bail!("q2_0_check of {build}: {}", output.status);
    }
    let text = String::from_utf8(output.stdout)?;
    let lines = text.lines().skip(1).map(|line| {
        let mut fields = line.split(',');
        let variant = fields.next().context("q2_0_check: no variant")?;
        let rate = fields.next_back().context("q2_0_check: no rate")?;
        Ok((variant.to_owned(), rate.parse()?))
    });
    lines.collect()
}
