//! `tern inspect`: what a GGUF file holds, and whether it can be run.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Error, Result};
use comfy_table::{CellAlignment, Table, presets};
use common::formats::Format;
use common::lab;
use common::runtime::gguf::{Gguf, Memory, Rotation, Survey};
use common::runtime::hyper::{ARCHITECTURE, Hyper};
use common::runtime::model::Model;
use indicatif::{ProgressBar, ProgressStyle};

/// Prints keys, tensors, what a run needs in memory, and whether the file can be run.
#[derive(clap::Args)]
pub struct Args {
    /// GGUF file.
    #[arg(value_name = "FILE.gguf")]
    file: PathBuf,
    /// Tokens of context that the memory table is for [default: the file's, at most 4096].
    #[arg(long, value_parser = lab::number::<u64>(1..))]
    ctx: Option<u64>,
}

/// Tokens a batch of the prefill, for the memory table.
const BATCH: u64 = 64;
/// Characters of a value that are shown.
const WIDTH: usize = 64;

/// A file of another architecture is only described; one that says it is of ours and cannot be run is bad.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let gguf = Gguf::open(&args.file)?;
    let (version, alignment, bytes) = (gguf.version(), gguf.alignment(), gguf.file_bytes());
    let (keys, tensors) = (gguf.keys().len(), gguf.tensors().len());
    writeln!(
        out,
        "{}: GGUF v{version}, {keys} keys, {tensors} tensors, {bytes} bytes, alignment {alignment}\n",
        gguf.file()
    )?;
    write_keys(&gguf, out)?;
    write_tensors(&gguf, out)?;
    write_rotation(&gguf, out)?;
    write_memory(&gguf, args.ctx, out)?;
    match Model::check(&gguf) {
        Ok(_) => writeln!(out, "\nrun: yes")?,
        Err(reason) => {
            writeln!(out, "\nrun: no: {}", one_line(&reason))?;
            let ours = gguf.get("general.architecture");
            if ours.is_some_and(|value| value.expect_str(ARCHITECTURE).is_ok()) {
                return Err(reason);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// As `tern` itself writes it on standard error.
fn one_line(error: &Error) -> String {
    lab::one_line(&format!("{error:#}"))
}

fn write_keys(gguf: &Gguf, out: &mut dyn Write) -> Result<()> {
    let mut table = table(["key", "type", "value"], 0);
    for value in gguf.keys() {
        let key: String = value.key().escape_debug().collect();
        table.add_row([key, value.type_name(), value.display(WIDTH)]);
    }
    Ok(writeln!(out, "{table}\n")?)
}

/// A row a tensor, then a row a format.
fn write_tensors(gguf: &Gguf, out: &mut dyn Write) -> Result<()> {
    let progress = progress(gguf.tensors().iter().map(|t| t.bytes).sum());
    let mut rows = table(
        [
            "tensor",
            "type",
            "dims",
            "bytes",
            "zeros",
            "code 3",
            "non-finite",
        ],
        3,
    );
    let mut sums = table(
        [
            "type",
            "tensors",
            "weights",
            "bytes",
            "zeros",
            "code 3",
            "non-finite",
        ],
        1,
    );
    let mut totals = [(0u64, 0u64, 0u64, Survey::default()); Format::ALL.len()];
    for t in gguf.tensors() {
        let survey = Survey::of(gguf, t);
        progress.inc(t.bytes);
        let dims: Vec<String> = t.dims.iter().map(usize::to_string).collect();
        let mut row = vec![
            t.name.escape_debug().to_string(),
            t.format.to_string(),
            dims.join(" x "),
            t.bytes.to_string(),
        ];
        row.extend(columns(survey));
        rows.add_row(row);
        for (format, total) in Format::ALL.iter().zip(&mut totals) {
            if *format == t.format {
                total.0 += 1;
                total.1 += t.weights() as u64;
                total.2 += t.bytes;
                total.3 = total.3.plus(survey);
            }
        }
    }
    progress.finish_and_clear();
    for (format, (n, weights, bytes, survey)) in Format::ALL.iter().zip(totals) {
        if n > 0 {
            let mut row = vec![format.to_string()];
            row.extend([n, weights, bytes].map(|n| n.to_string()));
            row.extend(columns(survey));
            sums.add_row(row);
        }
    }
    Ok(writeln!(out, "{rows}\n\n{sums}\n")?)
}

/// Zeros, code 3 and non-finite scales (of plain types: values) as table cells.
fn columns(survey: Survey) -> [String; 3] {
    let ternary = survey.zero_share();
    [
        ternary.map_or_else(String::new, |share| format!("{:.2}%", 100.0 * share)),
        ternary.map_or_else(String::new, |_| survey.code_3.to_string()),
        survey.non_finite.to_string(),
    ]
}

fn write_rotation(gguf: &Gguf, out: &mut dyn Write) -> Result<()> {
    let ternary = gguf.tensors().iter().any(|t| t.format.is_ternary());
    match Rotation::read(gguf) {
        Err(reason) => writeln!(out, "rotation: {}\n", one_line(&reason))?,
        Ok(Some(r)) => writeln!(
            out,
            "rotation: {} matrices{} in blocks of {}, signs {}, value heads of ssm_out {}\n",
            r.matrices(),
            if r.rotates_embedding() {
                " and the embedding"
            } else {
                ""
            },
            r.block,
            if r.has_signs() {
                "explicit"
            } else {
                "identity"
            },
            if r.gdn_v_grouped { "grouped" } else { "tiled" },
        )?,
        Ok(None) if ternary => writeln!(
            out,
            "rotation: none (no prism.hadamard keys: ternary weights run as stored)\n"
        )?,
        Ok(None) => writeln!(out, "rotation: none\n")?,
    }
    Ok(())
}

fn write_memory(gguf: &Gguf, ctx: Option<u64>, out: &mut dyn Write) -> Result<()> {
    let Ok(hyper) = Hyper::from_gguf(gguf) else {
        let bytes: u64 = gguf.tensors().iter().map(|t| t.bytes).sum();
        return Ok(writeln!(
            out,
            "memory: {bytes} bytes of weights; the rest is not known"
        )?);
    };
    let made_for = hyper.context.unwrap_or(4096) as u64;
    let m = Memory::of(gguf, &hyper, ctx.unwrap_or(made_for.min(4096)), BATCH);
    let mut table = table(["memory", "bytes", "MiB"], 1);
    for (name, bytes) in [
        ("weights".to_owned(), m.weights),
        (format!("KV cache, f32, {} tokens", m.ctx), m.kv_cache),
        ("recurrent state, f32".to_owned(), m.recurrent),
        (format!("scratch, batches of {}", m.batch), m.scratch),
        ("total".to_owned(), m.total()),
    ] {
        let mib = format!("{:.1}", bytes as f64 / (1 << 20) as f64);
        table.add_row([name, bytes.to_string(), mib]);
    }
    Ok(writeln!(out, "{table}")?)
}

/// A plain table whose columns from `numbers` on are right-aligned (0: none).
fn table<const N: usize>(header: [&str; N], numbers: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for column in table
        .column_iter_mut()
        .skip(numbers.max(1))
        .filter(|_| numbers > 0)
    {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A bar on standard error, if that is a terminal.
pub fn progress(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template("{bytes} of {total_bytes} {bar:30} {eta}") {
        bar.set_style(style);
    }
    bar
}
