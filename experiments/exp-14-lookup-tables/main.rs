//! Lookup tables: sums of activations that weights point to, against multiplying and adding.

mod lookup;

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use common::formats::{Codes, Format, i2_s};
use common::kernels::census::{self, Census};
use common::kernels::{self, Activations, Choice, Form, Isa};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::memory;
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};
use half::f16;
use rand::RngExt;
use shared::contest::{self, Entry};
use shared::decode::{self, At, Wall};

use lookup::{Kernel, Packed, Tokens, Way};

const WAYS: [Way; 3] = [Way::I2S, Way::Tl1, Way::Tl2];

/// The scale of every weight and token here: a power of two, so that results are exact whatever the order of additions.
const SCALE: f32 = 0.5;

fn main() -> std::process::ExitCode {
    lab::run("exp-14-lookup-tables", &["B04", "B05"], |exp| {
        let kernel = *lookup::kernels().last().expect("the scalar reference");
        for way in WAYS {
            let why = "the best instruction set here";
            exp.kernel_chosen(way.name(), kernel.isa.name(), why);
        }
        shapes(exp)?;
        overflow(exp)?;
        let ops = operations(exp, kernel)?;
        let (from, rows, cols) = match exp.quick() {
            true => ("cache", 512, 1152),
            false => ("dram", 32768, 8192),
        };
        let tokens = if exp.quick() { 8 } else { 64 };
        let one = speed(exp, kernel, &At::new(rows, cols, from), 1)?;
        let side = if exp.quick() { 384 } else { 4096 };
        let many = speed(exp, kernel, &At::new(side, side, "cache"), tokens)?;
        verdict(exp, kernel, ops, &one, &many)
    })
}

/// Codes with the usual share of zeros.
fn codes(rng: &mut impl RngExt, n: usize) -> Vec<u8> {
    (0..n)
        .map(|_| match rng.random_bool(stack::ZEROS) {
            true => 1,
            false => 2 * u8::from(rng.random::<bool>()),
        })
        .collect()
}

/// Tokens with the extremes among them.
fn bytes(rng: &mut impl RngExt, n: usize) -> Vec<i8> {
    (0..n).map(|_| rng.random_range(-127..=127)).collect()
}

/// B05: every shape computes the integer sums of the reference, or is refused with a line that says what was found.
fn shapes(exp: &mut Experiment) -> Result<()> {
    let rng = &mut exp.rng("shapes");
    let pool = Pool::new(2)?;
    let rows = [1, 2, 31, 32, 33, 64, 255, 257, 300];
    let cols = [
        1, 2, 3, 31, 32, 33, 95, 96, 97, 128, 192, 255, 257, 384, 577, 1000,
    ];
    let (mut computed, mut equal) = (0, true);
    for &rows in &rows {
        for &cols in &cols {
            let tokens = 1 + (rows + cols) % 3;
            let w = codes(rng, rows * cols);
            let y = bytes(rng, tokens * cols);
            let expected: Vec<f32> = y
                .chunks(cols)
                .flat_map(|y| {
                    w.chunks(cols)
                        .map(move |w| dot(w, y) as f32 * SCALE * SCALE)
                })
                .collect();
            let w = Codes::new(&w, rows, cols)?;
            for way in WAYS {
                let packed = Packed::new(way, &w, SCALE, rows)?;
                let mut x = Tokens::new(&y, &vec![SCALE; tokens], cols)?;
                x.tables(&packed);
                for kernel in lookup::kernels() {
                    let out = zeros(expected.len());
                    kernel.multiply(&pool, &packed, &x, &out)?;
                    equal &= floats(&out) == expected;
                }
                computed += 1;
            }
        }
    }
    exp.must_hold("every shape computes the reference's integer sums", equal);
    let refusals = refusals(&pool)?;
    let all = refusals.iter().all(|(words, line)| line.contains(words));
    for (_, line) in &refusals {
        exp.say(&format!("refused by name: {line}"));
    }
    exp.must_hold("what does not fit is refused by name", all);
    let row = |what: &str| Row::new("lookup", "").claim("B05").param("shapes", what);
    exp.row(row("refused").exact(Metric::Count, refusals.len()))?;
    let key = exp.row(row("computed").exact(Metric::Count, computed))?;
    let reason = format!(
        "{computed} shapes in three formats compute, {} that do not fit are refused by name; that bitnet.cpp skips them was read in its generators, not run",
        refusals.len()
    );
    exp.verdict("B05", equal && all, reason, &key)
}

/// What cannot be multiplied: the word that must be said, and the line.
fn refusals(pool: &Pool) -> Result<Vec<(&'static str, String)>> {
    let none = |found: Result<()>| found.err().map_or(String::new(), |e| format!("{e:#}"));
    let some = [1; 96];
    let w = Packed::new(Way::Tl2, &Codes::new(&some, 1, 96)?, 1.0, 1)?;
    let other = Packed::new(Way::Tl1, &Codes::new(&some, 1, 96)?, 1.0, 1)?;
    let mut x = Tokens::new(&[1; 96], &[1.0], 96)?;
    x.tables(&other);
    let kernel = lookup::kernels()[0];
    let narrow = Tokens::new(&[1; 95], &[1.0], 95)?;
    Ok(vec![
        ("0 rows", none(Codes::new(&[], 0, 96).map(drop))),
        ("0 weights", none(Codes::new(&[], 1, 0).map(drop))),
        (
            "found 95 codes",
            none(Codes::new(&some[..95], 1, 96).map(drop)),
        ),
        ("code 3", none(Codes::new(&[3], 1, 1).map(drop))),
        ("0 scales", none(Tokens::new(&[], &[], 96).map(drop))),
        (
            "expected rows of 96",
            none(Tokens::new(&[1; 95], &[1.0], 96).map(drop)),
        ),
        ("code -128", none(Tokens::new(&[-128], &[1.0], 1).map(drop))),
        (
            "95 of activations",
            none(kernel.multiply(pool, &w, &narrow, &zeros(1))),
        ),
        (
            "not for this matrix",
            none(kernel.multiply(pool, &w, &x, &zeros(1))),
        ),
        (
            "expected 1 tokens of 1 rows",
            none(kernel.multiply(pool, &other, &x, &zeros(2))),
        ),
        (
            "cannot be repeated",
            none(Packed::new(Way::Tl1, &Codes::new(&some, 3, 32)?, 1.0, 6).map(drop)),
        ),
        ("a group of 100", none(i2_s_group(100))),
    ])
}

fn i2_s_group(group: usize) -> Result<()> {
    common::formats::I2S::pack(&Codes::new(&[1], 1, 1)?, 1.0, group).map(drop)
}

fn dot(w: &[u8], y: &[i8]) -> i32 {
    let terms = w.iter().zip(y);
    terms
        .map(|(&u, &y)| (i32::from(u) - 1) * i32::from(y))
        .sum()
}

fn zeros(n: usize) -> Vec<AtomicU32> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

fn floats(out: &[AtomicU32]) -> Vec<f32> {
    out.iter()
        .map(|v| f32::from_bits(v.load(Relaxed)))
        .collect()
}

/// The largest sums of 16 bits, in bitnet.cpp's I2_S, which widens after 32 groups, and here, after 16: all weights +1, all
/// activations 127.
fn overflow(exp: &mut Experiment) -> Result<()> {
    for (variant, groups) in [("i2_s-32-groups", 32), ("i2_s", lookup::GROUPS)] {
        // Per lane of 16 bits: two products in each of four slots a group.
        let products = groups * i2_s::GROUP_X86 / 32 * 2;
        let sum: i64 = (0..products).map(|_| 2 * 127).sum();
        let row = Row::new(variant, "").param("largest", "16-bit-sum");
        exp.row(row.exact(Metric::Count, sum))?;
    }
    Ok(())
}

/// Vector operations for 64 weights and one token, by way; the last is mask-slot with the same instruction set.
type Operations = Vec<(String, f64)>;

/// Counts the vector instructions of each loop in the code that runs.
fn operations(exp: &mut Experiment, kernel: Kernel) -> Result<Operations> {
    let mut found = Operations::new();
    let mut add = |exp: &mut Experiment, variant, isa: Isa, census: Result<Census>, times: f64| {
        let census = match census {
            Ok(census) => census,
            Err(error) => {
                exp.refused(variant, isa.name(), format!("{error:#}"));
                return Ok(());
            }
        };
        let per_64 = |n: usize| census.per_64_weights(n) / times;
        for (ops, count) in [
            ("multiply-or-look-up", census.dots),
            ("unpack", census.unpack),
            ("other", census.other),
            ("load", census.loads),
        ] {
            let row = Row::new(variant, isa.name()).claim("B04").param("ops", ops);
            exp.row(row.param("weights", 64).exact(Metric::Count, per_64(count)))?;
        }
        found.push((
            contest::name(variant, isa.name()),
            per_64(census.dots + census.unpack + census.other),
        ));
        anyhow::Ok(())
    };
    for way in WAYS {
        // A lookup of 32 bytes gives one byte of two for two or three weights of 32 rows.
        let (work, times): (&[&str], f64) = match way {
            Way::I2S => (&census::DOTS, 1.0),
            Way::Tl1 => (&["Vpshufb"], 1.0),
            Way::Tl2 => (&["Vpshufb"], 1.5),
        };
        // SAFETY: `code` gives the start of a function.
        let census = unsafe { census::census_of(way.name(), kernel.code(way), work) };
        add(exp, way.name(), kernel.isa, census, times)?;
    }
    for kernel in rivals(kernel.isa) {
        let (variant, isa) = (kernel.layout().name(), kernel.isa());
        add(exp, variant, isa, census::census(kernel), 1.0)?;
    }
    Ok(found)
}

/// Mask-slot with the instruction set of the lookups, and the best there is.
fn rivals(isa: Isa) -> Vec<&'static kernels::Kernel> {
    let of = |name: &str| name.parse::<Choice>()?.kernel(Format::Pq2_0);
    let mut rivals: Vec<_> = [format!("wide-row/{isa}"), "wide-row".into()]
        .iter()
        .filter_map(|name| of(name).ok())
        .collect();
    rivals.dedup();
    rivals
}

/// Median GMAC/s by name, and the keys of their rows.
type Rates = Vec<(String, f64, lab::Key)>;

/// One race at each thread count: the three ways and mask-slot on the same weights and tokens. Gives what all threads reached.
fn speed(exp: &mut Experiment, kernel: Kernel, at: &At, tokens: usize) -> Result<Rates> {
    let (rows, cols, dram) = (at.rows, at.cols, at.from == "dram");
    exp.progress(format!("{rows} x {cols} from {}, {tokens} tokens", at.from));
    let rng = &mut exp.rng("speed");
    let (drawn, llc) = (64, exp.last_level_cache());
    let budget = memory::available_memory().unwrap_or(4 << 30) / 10;
    let copies = |bytes| {
        if dram {
            Stack::copies_for_dram(bytes, llc, budget)
        } else {
            1
        }
    };
    let w = codes(rng, drawn * cols);
    let mut matrices = Vec::new();
    for way in WAYS {
        let first = Packed::new(way, &Codes::new(&w, drawn, cols)?, SCALE, rows)?;
        let mut all = vec![first];
        for _ in 1..copies(all[0].bytes()) {
            all.push(all[0].copy()?);
        }
        matrices.push((way, all));
    }
    let mut few = vec![0; Format::Pq2_0.matrix_bytes(drawn, cols)?];
    let scales = vec![f16::from_f32(SCALE); w.len() / Format::Pq2_0.block_weights()];
    Format::Pq2_0.pack(&w, &scales, &mut few)?;
    let stock: Vec<u8> = few
        .iter()
        .copied()
        .cycle()
        .take(few.len() / drawn * rows)
        .collect();
    let mut stacks = Vec::new();
    for kernel in rivals(kernel.isa) {
        stacks.push(Stack::new(kernel, &stock, rows, cols, copies(stock.len()))?);
    }
    // The first is the largest, so that quantizing gives these bytes back, with SCALE.
    let mut y = bytes(rng, tokens * cols);
    y.iter_mut().step_by(cols).for_each(|y| *y = 127);
    let values: Vec<f32> = y.iter().map(|&y| f32::from(y) * SCALE).collect();
    let mut rates = Rates::new();
    let mut tables = Vec::new();
    for (_, all) in &matrices {
        let mut x = Tokens::quantize(&values, cols)?;
        x.tables(&all[0]);
        tables.push(x);
    }
    let x = q8_k(&y, cols, tokens)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = if dram {
            Some(Wall::new(&pool, exp)?)
        } else {
            None
        };
        let macs = (rows * cols * tokens) as f64;
        let mut outs: Vec<Vec<AtomicU32>> = WAYS.map(|_| zeros(rows * tokens)).into();
        let mut theirs = vec![vec![0f32; rows * tokens]; stacks.len()];
        let mut entries = Vec::new();
        for (((way, all), x), out) in matrices.iter().zip(&tables).zip(&mut outs) {
            let (pool, mut next) = (&pool, 0);
            let call = Box::new(move || {
                next = (next + 1) % all.len();
                kernel.multiply(pool, &all[next], x, out)
            });
            let (variant, isa, bytes) = (way.name(), kernel.isa.name(), all[0].bytes() as f64);
            entries.push(Entry {
                variant,
                isa,
                weights: macs,
                bytes,
                call,
            });
        }
        for (stack, out) in stacks.iter_mut().zip(&mut theirs) {
            let (variant, isa) = decode::names(stack.kernel());
            let (pool, x, bytes) = (&pool, &x, stack.bytes() as f64);
            let call = Box::new(move || stack.multiply(pool, x, out));
            entries.push(Entry {
                variant,
                isa,
                weights: macs,
                bytes,
                call,
            });
        }
        let names: Vec<String> = entries.iter().map(Entry::name).collect();
        let row = |variant: &str, isa: &str| {
            let row = Row::new(variant, isa).claim("B04").threads(threads);
            let row = row.params([("rows", rows), ("cols", cols), ("batch", tokens)]);
            row.param("from", at.from)
        };
        let metric = if tokens == 1 {
            Metric::WeightsPerS
        } else {
            Metric::MacPerS
        };
        let wall = wall.as_ref().map(|wall| (&pool, wall));
        let (times, _) = contest::run(exp, &mut entries, wall, metric, &row)?;
        let starts: Vec<Row> = entries.iter().map(|e| row(e.variant, e.isa)).collect();
        drop(entries);
        let same = outs
            .iter()
            .map(|o| floats(o))
            .chain(theirs)
            .collect::<Vec<_>>();
        let same = same.windows(2).all(|o| o[0] == o[1]);
        exp.must_hold("multiplying and looking up give the same results", same);
        for (name, start) in names.iter().zip(starts) {
            let Some(other) = names.last().filter(|other| *other != name) else {
                continue;
            };
            let speedup = times.speedup(name, other);
            let key = exp.row(start.baseline(other).metric(Metric::Speedup, speedup))?;
            if threads == exp.all_threads() {
                rates.push((name.clone(), times.rate(name, metric, macs).median, key));
            }
        }
        if let Some(last) = names.last().filter(|_| threads == exp.all_threads()) {
            let key = rates.last().map(|r| r.2.clone());
            let rate = times.rate(last, metric, macs).median;
            rates.extend(key.map(|key| (last.clone(), rate, key)));
        }
    }
    Ok(rates)
}

/// The same tokens as mask-slot takes them: one scale for all.
fn q8_k(y: &[i8], cols: usize, tokens: usize) -> Result<Activations> {
    let padded = cols.next_multiple_of(Form::Q8K.block());
    let mut codes = vec![0; tokens * padded];
    for (to, from) in codes.chunks_mut(padded).zip(y.chunks(cols)) {
        to[..cols].copy_from_slice(from);
    }
    let mut x = Activations::new(Form::Q8K, cols, tokens);
    x.set_codes(&codes, &vec![SCALE; codes.len() / Form::Q8K.block()])?;
    Ok(x)
}

/// B04: whether looking up replaces multiplying to advantage.
fn verdict(
    exp: &mut Experiment,
    kernel: Kernel,
    ops: Operations,
    one: &Rates,
    many: &Rates,
) -> Result<()> {
    if kernel.isa == Isa::Scalar {
        return exp.not_testable("B04", "no vector lookups but the scalar reference here");
    }
    let best = one.iter().filter(|r| r.0.starts_with("tl"));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1));
    let rate = |of: &Rates, name: &str| of.iter().find(|r| r.0 == name).map_or(0.0, |r| r.1);
    let multiply = contest::name(Way::I2S.name(), kernel.isa.name());
    let Some((name, found, key)) = best else {
        return exp.not_testable("B04", "nothing was measured");
    };
    ensure!(rate(one, &multiply) > 0.0, "i2_s: no rate");
    let last = one.last().map_or("", |r| &r.0);
    let ops: Vec<String> = ops
        .iter()
        .map(|(name, n)| format!("{name} {n:.1}"))
        .collect();
    let reason = format!(
        "exact without a multiplication; {name} {:.2} times as fast as multiplying (i2_s) for one token and {:.2} for many, {:.2} and {:.2} times {last}; vector operations for 64 weights: {}",
        found / rate(one, &multiply),
        rate(many, name) / rate(many, &multiply),
        found / rate(one, last),
        rate(many, name) / rate(many, last),
        ops.join(", ")
    );
    exp.verdict("B04", *found >= rate(one, &multiply), reason, key)
}
