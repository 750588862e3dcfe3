//! Zero density: a bitmap of the weights that are not zero and their signs, against two bits and base 3.

mod bitcos;

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Result, ensure};
use common::formats::bitcos::{Bitcos, GROUP, bits_per_weight};
use common::formats::{BlockTrits160, Codes, Format};
use common::kernels::{Form, Isa};
use common::lab::{self, Experiment, Metric, Row, Times};
use common::runtime::gguf::{Gguf, Survey};
use common::runtime::memory;
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};
use half::f16;
use rand::seq::SliceRandom;
use shared::contest::{self, Entry};
use shared::decode::{self, At, Wall};

use bitcos::{Kernel, Packed};

/// Zero shares where speed is taken: a third, two of trained models and one far above.
const SHARES: [f64; 4] = [0.33, 0.42, 0.515, 0.7];

/// Bits a weight of codes alone: PTQ1_0's 26 bytes of 128, and five trits a byte.
const PTQ1_0: f64 = (8 * (size_of_block(Format::Ptq1_0) - 2)) as f64 / 128.0;
const TRITS: f64 = (8 * (size_of::<BlockTrits160>() - 2)) as f64 / 160.0;

const fn size_of_block(format: Format) -> usize {
    format.block_bytes()
}

fn main() -> std::process::ExitCode {
    lab::run("exp-13-zero-density", &["B01", "B02", "B03"], |exp| {
        let kernel = *bitcos::kernels().last().expect("the scalar reference");
        let why = "the best instruction set here";
        exp.kernel_chosen("bitcos", kernel.isa.name(), why);
        sizes(exp)?;
        model(exp)?;
        let at = match exp.quick() {
            true => At::new(1024, 2048, "cache"),
            false => At::new(32768, 8192, "dram"),
        };
        let mut rates = Vec::new();
        for zeros in if exp.quick() {
            &SHARES[2..3]
        } else {
            &SHARES[..]
        } {
            speed(exp, kernel, *zeros, &at, &mut rates)?;
        }
        verdict(exp, kernel, &rates)
    })
}

/// Codes of which exactly that share, to the nearest, is zero, and the rest half and half.
fn codes(exp: &Experiment, rows: usize, cols: usize, zeros: f64) -> Vec<u8> {
    let n = rows * cols;
    let none = (n as f64 * zeros).round() as usize;
    let mut codes: Vec<u8> = (0..n)
        .map(|i| if i < none { 1 } else { 2 * (i % 2) as u8 })
        .collect();
    codes.shuffle(&mut exp.rng("codes"));
    codes
}

/// Bits a weight of bitmap and signs, and of what finds the rows, measured on packed codes.
fn measured(exp: &Experiment, zeros: f64) -> Result<(f64, f64)> {
    let (rows, cols) = (32, 8192);
    let codes = codes(exp, rows, cols, zeros);
    let scales = vec![f16::ONE; codes.len() / GROUP];
    let packed = Bitcos::pack(&Codes::new(&codes, rows, cols)?, &scales)?;
    let back = packed.codes() == codes;
    ensure!(
        back,
        "bitcos: codes are not what they were, at zeros={zeros}"
    );
    let (sizes, n) = (packed.sizes(), codes.len() as f64);
    let bits = (sizes.presence + sizes.signs) as f64 / n;
    Ok((bits, sizes.index as f64 / n))
}

/// Least bits a weight for codes of that zero share: their entropy.
fn entropy(zeros: f64) -> f64 {
    let term = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    term(zeros) + 2.0 * term((1.0 - zeros) / 2.0)
}

/// B01 and B02: bits a weight over zero shares, and where BITCOS becomes the smaller.
fn sizes(exp: &mut Experiment) -> Result<()> {
    let tenths = (0..10).map(|i| f64::from(i) / 10.0);
    let shares = tenths.clone().chain(
        SHARES
            .into_iter()
            .filter(|s| tenths.clone().all(|t| t != *s)),
    );
    let mut equal = true;
    let mut key = None;
    for zeros in shares {
        let (bits, index) = measured(exp, zeros)?;
        // The zeros are counted out to the nearest of 2^18 weights.
        equal &= (bits - bits_per_weight(zeros)).abs() < 1e-5;
        let row = |variant: &str| Row::new(variant, "").param("zeros", zeros);
        let bits = row("bitcos")
            .claim("B01")
            .exact(Metric::BitsPerWeight, bits);
        let bits = exp.row(bits)?;
        if zeros == 0.515 {
            key = Some(bits);
        }
        for (variant, value) in [
            ("bitcos-index", index),
            ("ptq1_0", PTQ1_0),
            ("trits5", TRITS),
            ("pq2_0", 2.0),
            ("entropy", entropy(zeros)),
        ] {
            exp.row(row(variant).exact(Metric::BitsPerWeight, value))?;
        }
    }
    exp.must_hold("bitmap and signs take 2 - z bits a weight", equal);
    if let Some(key) = key {
        let reason =
            "codes with that share of zeros, packed; the models of the source are not here";
        exp.verdict("B01", equal, reason, &key)?;
    }
    // In steps of a thousandth.
    let mut crossing = |name: &str, bits: f64| -> Result<(f64, lab::Key)> {
        let (mut low, mut high) = (0u32, 1000);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if measured(exp, f64::from(middle) / 1000.0)?.0 < bits {
                high = middle;
            } else {
                low = middle;
            }
        }
        let row = |method: &str| {
            let row = Row::new("bitcos", "").claim("B02").baseline(name);
            row.param("smaller_above", method)
        };
        exp.row(row("arithmetic").exact(Metric::Share, 100.0 * (2.0 - bits)))?;
        let found = 0.1 * f64::from(high);
        Ok((found, exp.row(row("packed").exact(Metric::Share, found))?))
    };
    let (ptq1_0, key) = crossing("ptq1_0", PTQ1_0)?;
    let (trits, _) = crossing("trits5", TRITS)?;
    let near = |found: f64, published: f64| (found - published).abs() <= 0.11;
    let reason = format!(
        "smaller than 1.625 bits from {ptq1_0:.1}% zeros, than 1.6 from {trits:.1}%, in steps of 0.1%; the source: above 37.5% and 40%"
    );
    exp.verdict("B02", near(ptq1_0, 37.5) && near(trits, 40.0), reason, &key)
}

/// The zero share of each ternary tensor of the model, and which of the two layouts with kernels is smaller for it, scales aside.
fn model(exp: &mut Experiment) -> Result<()> {
    let path = exp.model()?;
    let file = Gguf::open(&path)?;
    let mut counts = [("bitcos", 0u64), ("ptq1_0", 0)];
    for tensor in file.tensors().iter().filter(|t| t.format.is_ternary()) {
        let survey = Survey::of(&file, tensor);
        let Some(zeros) = survey.zero_share() else {
            continue;
        };
        let smaller = usize::from(bits_per_weight(zeros) >= PTQ1_0);
        counts[smaller].1 += 1;
        let row = Row::new(counts[smaller].0, "")
            .claim("B02")
            .param("smallest_for", &tensor.name)
            .param("cols", tensor.cols());
        exp.row(row.exact(Metric::Share, 100.0 * zeros))?;
    }
    if counts.iter().all(|c| c.1 == 0) {
        exp.refused("model", "", "no ternary tensor in it");
    }
    for (variant, count) in counts {
        let row = Row::new(variant, "").claim("B02");
        exp.row(
            row.param("smallest_for", "tensors")
                .exact(Metric::Count, count),
        )?;
    }
    Ok(())
}

/// Gw/s of BITCOS and of one other kernel, in the same race.
struct Rate {
    zeros: f64,
    threads: usize,
    other: String,
    bitcos: f64,
    theirs: f64,
    speedup: lab::Stat,
    key: lab::Key,
    share: Option<f64>,
}

/// BITCOS and the kernels for PQ2_0 and PTQ1_0 on the same codes, at each thread count.
fn speed(
    exp: &mut Experiment,
    kernel: Kernel,
    zeros: f64,
    at: &At,
    rates: &mut Vec<Rate>,
) -> Result<()> {
    let (rows, cols, dram) = (at.rows, at.cols, at.from == "dram");
    exp.progress(format!("{rows} x {cols}, {zeros} zeros"));
    let budget = memory::available_memory().unwrap_or(4 << 30) / 12;
    let copies = |bytes, llc| {
        if dram {
            Stack::copies_for_dram(bytes, llc, budget)
        } else {
            1
        }
    };
    let llc = exp.last_level_cache();

    let drawn = 64;
    let codes = codes(exp, drawn, cols, zeros);
    let scales = vec![f16::from_f32(0.75); codes.len() / GROUP];
    let some = Bitcos::pack(&Codes::new(&codes, drawn, cols)?, &scales)?;
    let mut matrices = vec![Packed::repeated(&some, rows)?];
    for _ in 1..copies(matrices[0].bytes(), llc) {
        matrices.push(matrices[0].copy()?);
    }
    let mut stacks = Vec::new();
    for (format, layout) in [
        (Format::Pq2_0, "stock"),
        (Format::Pq2_0, "wide-row"),
        (Format::Ptq1_0, "stock"),
        (Format::Ptq1_0, "wide-row-b3"),
    ] {
        let other = match decode::best(format, layout) {
            Ok(other) => other,
            Err(error) => {
                exp.refused(layout, "", format!("{error:#}"));
                continue;
            }
        };
        let mut few = vec![0; format.matrix_bytes(drawn, cols)?];
        format.pack(&codes, &scales, &mut few)?;
        let stock: Vec<u8> = few
            .iter()
            .copied()
            .cycle()
            .take(few.len() / drawn * rows)
            .collect();
        stacks.push(Stack::new(
            other,
            &stock,
            rows,
            cols,
            copies(stock.len(), llc),
        )?);
    }
    let x = stack::random_activations(Form::Q8K, cols, 1, exp.flags().seed)?;
    let variants: Vec<_> = stacks.iter().map(|s| decode::names(s.kernel())).collect();
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = if dram {
            Some(Wall::new(&pool, exp)?)
        } else {
            None
        };
        let out: Vec<AtomicU32> = (0..rows).map(|_| AtomicU32::new(0)).collect();
        let mut outs = vec![vec![0f32; rows]; stacks.len()];
        let (weights, mut next) = (matrices[0].weights() as f64, 0);
        let mut entries = vec![Entry {
            variant: "bitcos",
            isa: kernel.isa.name(),
            weights,
            bytes: matrices[0].bytes() as f64,
            call: Box::new(|| {
                next = (next + 1) % matrices.len();
                kernel.multiply(&pool, &matrices[next], &x, &out)
            }),
        }];
        for ((stack, out), (variant, isa)) in stacks.iter_mut().zip(&mut outs).zip(&variants) {
            let (bytes, pool, x) = (stack.bytes() as f64, &pool, &x);
            let call = Box::new(move || stack.multiply(pool, x, out));
            entries.push(Entry {
                variant,
                isa,
                weights,
                bytes,
                call,
            });
        }
        let row = |variant: &str, isa: &str| {
            let row = at.row(variant, isa, threads).param("zeros", zeros);
            row.claim("B03")
        };
        let wall = wall.as_ref().map(|wall| (&pool, wall));
        let (times, shares) = contest::run(exp, &mut entries, wall, Metric::WeightsPerS, &row)?;
        drop(entries);
        let bits: Vec<u32> = out.iter().map(|v| v.load(Relaxed)).collect();
        let same = |other: &Vec<f32>| other.iter().zip(&bits).all(|(v, b)| v.to_bits() == *b);
        exp.must_hold(
            "bitcos gives the bits of PQ2_0 and PTQ1_0",
            outs.iter().all(same),
        );

        let mine = contest::name("bitcos", kernel.isa.name());
        let share = shares.first().map(|s| s.0);
        for (variant, isa) in &variants {
            let other = contest::name(variant, isa);
            let speedup = times.speedup(&mine, &other);
            let row = row("bitcos", kernel.isa.name()).baseline(&other);
            let key = exp.row(row.metric(Metric::Speedup, speedup))?;
            let rate =
                |times: &Times, name: &str| times.rate(name, Metric::WeightsPerS, weights).median;
            rates.push(Rate {
                zeros,
                threads,
                bitcos: rate(&times, &mine),
                theirs: rate(&times, &other),
                other,
                speedup,
                key,
                share,
            });
        }
    }
    Ok(())
}

/// B03, and the zero shares where BITCOS begins to be the faster: measured, between the shares it was measured at, and by the
/// bytes that each streams.
fn verdict(exp: &mut Experiment, kernel: Kernel, rates: &[Rate]) -> Result<()> {
    let all: Vec<&Rate> = rates
        .iter()
        .filter(|r| r.threads == exp.all_threads())
        .collect();
    if exp.quick() || kernel.isa == Isa::Scalar {
        let reason = match exp.quick() {
            true => "a quick run does not read from DRAM",
            false => "no kernel but the scalar reference here",
        };
        return exp.not_testable("B03", reason);
    }
    let others = all.iter().filter(|r| r.zeros == SHARES[0]);
    let others: Vec<&str> = others.map(|r| &r.other[..]).collect();
    for other in &others {
        let of: Vec<&&Rate> = all.iter().filter(|r| r.other == **other).collect();
        let ahead = |r: &Rate| r.bitcos / r.theirs - 1.0;
        let crossing = of.windows(2).find_map(|pair| {
            let (a, b) = (ahead(pair[0]), ahead(pair[1]));
            let step = pair[1].zeros - pair[0].zeros;
            (a < 0.0 && b >= 0.0).then(|| pair[0].zeros - a / (b - a) * step)
        });
        let row = |method: &str| {
            let row = Row::new("bitcos", kernel.isa.name()).claim("B03");
            row.baseline(*other)
                .threads(exp.all_threads())
                .param("faster_above", method)
        };
        let bits = if other.contains("b3") || other.contains("ptq1_0") {
            PTQ1_0
        } else {
            2.0
        };
        let rows = [
            (row("bytes"), Some(2.0 - bits)),
            (row("measured"), crossing),
        ];
        for (row, share) in rows {
            if let Some(share) = share {
                exp.row(row.exact(Metric::Share, 100.0 * share))?;
            }
        }
    }
    let real: Vec<&&Rate> = all.iter().filter(|r| r.zeros == 0.515).collect();
    let stock = real.iter().filter(|r| !r.other.contains("wide-row"));
    let least = stock.min_by(|a, b| a.speedup.median.total_cmp(&b.speedup.median));
    let Some(least) = least else {
        return exp.not_testable("B03", "no stock kernel here to compare with");
    };
    let listed: Vec<String> = real
        .iter()
        .map(|r| format!("{:.2} times {}", r.speedup.median, r.other))
        .collect();
    let reason = format!(
        "at 51.5% zeros, all threads, from DRAM: {}; {:.0}% of plain reads; judged against the formats as files store them",
        listed.join(", "),
        least.share.unwrap_or(0.0)
    );
    exp.verdict("B03", least.speedup.low > 1.0, reason, &least.key)
}
