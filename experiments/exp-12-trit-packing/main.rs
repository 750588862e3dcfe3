//! Trit packing: how many trits fit a block, what the ceiling is for, and how fast five of them leave a byte. Claims P01, P02, P03.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::ExitCode;

use anyhow::{Context, Result};
use common::formats::base3;
use common::kernels::Isa;
use common::kernels::unpack::{self, BLOCK, Stored, Trits, Variant};
use common::lab::{self, Experiment, Metric, Row, Times};
use rand::RngExt;

fn main() -> ExitCode {
    lab::run("exp-12-trit-packing", &["P01", "P02", "P03"], |exp| {
        blocks(exp)?;
        lossless(exp)?;
        speed(exp)
    })
}

/// The most trits that `bits` bits hold: the largest n with 3^n <= 2^bits.
fn trits_in(bits: u32) -> u32 {
    (1u128 << bits).ilog(3)
}

/// P01: every block of up to 64 bits. Densities are compared as fractions, without rounding.
fn blocks(exp: &mut Experiment) -> Result<()> {
    let denser = |a: u32, b: u32| trits_in(a) * b > trits_in(b) * a;
    let row = |bits: u32| {
        Row::new("block", "")
            .claim("P01")
            .params([("bits", bits), ("trits", trits_in(bits))])
    };
    let mut best = 2;
    for bits in 2..=64 {
        let cost = f64::from(bits) / f64::from(trits_in(bits));
        exp.row(row(bits).exact(Metric::BitsPerWeight, cost))?;
        let record = denser(bits, best);
        if record {
            best = bits;
        }
        if record || bits.is_power_of_two() {
            // Of the log2(3) bits that a trit is worth.
            exp.row(row(bits).exact(Metric::Share, 100.0 * 3f64.log2() / cost))?;
        }
    }
    let better: Vec<String> = (2..=64)
        .filter(|&bits| denser(bits, 8))
        .map(|bits| format!("{} in {bits}", trits_in(bits)))
        .collect();
    let count = Row::new("denser-than-5-in-8", "").claim("P01");
    let key = exp.row(count.exact(Metric::Count, better.len()))?;
    let holds = trits_in(8) == 5 && [16, 32, 64].iter().all(|&bits| !denser(bits, 8));
    let reason = format!(
        "of all blocks of 2 to 64 bits these are: {}",
        better.join(", ")
    );
    exp.verdict("P01", holds, reason, &key)
}

/// A fraction as an integer, by one rounding or another.
type Round = fn(u32, u32) -> u32;

/// A way to put base-3 digits in a byte: how many, and the power of three that the byte is a fraction of.
struct Packing {
    name: &'static str,
    digits: u32,
    of: u32,
}

const PACKINGS: [Packing; 3] = [
    Packing {
        name: "five",
        digits: 5,
        of: 243,
    },
    Packing {
        name: "four",
        digits: 4,
        of: 81,
    },
    // The last bytes of TQ1_0 and PTQ1_0: four digits of a number that is a multiple of 3.
    Packing {
        name: "qh",
        digits: 4,
        of: 243,
    },
];

impl Packing {
    /// The digits as a number: what a byte is to hold.
    fn number(&self, byte: u8) -> u32 {
        (0..self.digits as usize).fold(0, |q, n| q * 3 + u32::from(base3::digit(byte, n)))
    }

    /// The numbers that do not come back from the bytes that `round` makes of q * 256 / 3^n.
    fn lost(&self, round: Round) -> Vec<u32> {
        let values = 3u32.pow(self.digits);
        let comes_back = |q: u32| {
            let byte = round(q * (self.of / values) * 256, self.of);
            u8::try_from(byte).is_ok_and(|byte| self.number(byte) == q)
        };
        (0..values).filter(|&q| !comes_back(q)).collect()
    }
}

/// P02: every value of every packing, there and back, rounded up, down and to the nearest.
fn lossless(exp: &mut Experiment) -> Result<()> {
    let rounds: [(&str, Round); 3] = [
        ("ceiling", |a, b| a.div_ceil(b)),
        ("floor", |a, b| a / b),
        ("nearest", |a, b| (a + b / 2) / b),
    ];
    let mut key = None;
    let mut needed = true;
    for (name, round) in rounds {
        for packing in &PACKINGS {
            let lost = packing.lost(round);
            let row = Row::new(name, "")
                .claim("P02")
                .params([("digits", packing.name), ("what", "values-lost")]);
            let this = exp.row(row.exact(Metric::Count, lost.len()))?;
            exp.say(&format!(
                "{name}, {} digits: lost {}",
                packing.name,
                ranges(&lost)
            ));
            if name == "ceiling" {
                let what = format!("rounded up, {} digits come back whole", packing.name);
                exp.must_hold(what, lost.is_empty());
                key.get_or_insert(this);
            } else {
                needed &= !lost.is_empty();
            }
        }
    }
    // Where one byte alone gives a number's digits back, no other rounding can do.
    let mut bytes = BTreeMap::new();
    for byte in 0..=255 {
        bytes
            .entry(PACKINGS[0].number(byte))
            .or_insert(vec![])
            .push(byte);
    }
    let single = bytes.values().filter(|bytes| bytes.len() == 1).count();
    let row = Row::new("ceiling", "")
        .claim("P02")
        .params([("digits", "five"), ("what", "only-byte")]);
    exp.row(row.exact(Metric::Count, single))?;
    let reason = format!(
        "every value of 243, of 81 and of qh rounded up comes back, not so rounded down or to the nearest; for {single} of the 243 \
         no other byte would do"
    );
    let lossless = PACKINGS.iter().all(|p| p.lost(rounds[0].1).is_empty());
    exp.verdict(
        "P02",
        lossless && needed,
        reason,
        &key.context("no packing")?,
    )
}

/// `1-242` and the like.
fn ranges(values: &[u32]) -> String {
    let runs = values.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let runs: Vec<String> = runs.collect();
    if runs.is_empty() {
        "none".into()
    } else {
        runs.join(" ")
    }
}

/// P03: bytes in the first-level cache unpacked in every way, one thread.
fn speed(exp: &mut Experiment) -> Result<()> {
    let rng = &mut exp.rng("trits");
    let trits: Vec<Trits> = (0..64)
        .map(|_| std::array::from_fn(|_| std::array::from_fn(|_| rng.random_range(0..3))))
        .collect();
    let pack = |byte: fn([u8; 5]) -> u8| -> Vec<[u8; BLOCK]> {
        let block = |t: &Trits| std::array::from_fn(|m| byte(std::array::from_fn(|n| t[n][m])));
        trits.iter().map(block).collect()
    };
    let fractions = pack(base3::encode);
    let numbers = pack(|digits| digits.iter().fold(0, |q, d| q * 3 + d));

    let mut out = vec![[[9; BLOCK]; 5]; trits.len()];
    let variants = unpack::variants();
    for variant in &variants {
        out.fill([[9; BLOCK]; 5]);
        variant.unpack(packed(variant, &fractions, &numbers), &mut out);
        exp.must_hold(
            "every way to unpack gives the trits that were packed",
            out == trits,
        );
    }
    let has = |isa| variants.iter().any(|v| v.isa == isa && v.method == "table");
    for (isa, why) in [
        (
            Isa::Avx2,
            "its byte shuffle looks up 16 entries, a table has 256",
        ),
        (Isa::Avx512Vnni, "no lookup of 64 bytes (AVX-512 VBMI)"),
    ] {
        if isa.available() && !has(isa) {
            exp.refused("table", isa.name(), why);
        }
    }
    exp.progress("unpacking");
    let mut race = exp.race();
    for variant in &variants {
        let bytes = packed(variant, &fractions, &numbers);
        let mut out = out.clone();
        race.add(name(variant), move || {
            variant.unpack(black_box(bytes), &mut out);
            black_box(&mut out);
        });
    }
    let times = race.run()?;
    drop(race);
    for variant in &variants {
        let stat = times.rate(
            &name(variant),
            Metric::TritsPerS,
            (trits.len() * 5 * BLOCK) as f64,
        );
        exp.row(row(variant).metric(Metric::TritsPerS, stat))?;
    }
    judge(exp, &variants, &times)
}

fn packed<'a, T>(variant: &Variant, fractions: &'a [T], numbers: &'a [T]) -> &'a [T] {
    match variant.stored {
        Stored::Fraction => fractions,
        Stored::Number => numbers,
    }
}

fn name(variant: &Variant) -> String {
    format!("{} {} {}", variant.method, variant.code, variant.isa)
}

fn row(variant: &Variant) -> Row {
    Row::new(variant.method, variant.isa.name())
        .claim("P03")
        .params([("code", variant.code)])
}

/// Multiplication against division: a byte at a time, and on each instruction set the faster code of each.
fn judge(exp: &mut Experiment, variants: &[Variant], times: &Times) -> Result<()> {
    let fastest = |method: &str, isa: Isa, alone: bool| {
        let of = |v: &&Variant| v.method == method && v.isa == isa && (v.code == "byte") == alone;
        let median = |v: &Variant| times.rate(&name(v), Metric::Time, 1.0).median;
        variants
            .iter()
            .filter(of)
            .min_by(|a, b| median(a).total_cmp(&median(b)))
    };
    let mut faster = true;
    let mut last = None;
    let mut told = Vec::new();
    let alone = ["divide", "divide-by-3"].map(|division| (division, Isa::Scalar, true));
    for (division, isa, alone) in alone
        .into_iter()
        .chain(Isa::ALL.map(|isa| ("divide-by-3", isa, false)))
    {
        let (Some(a), Some(b)) = (
            fastest("multiply", isa, alone),
            fastest(division, isa, alone),
        ) else {
            continue;
        };
        let speedup = times.speedup(&name(a), &name(b));
        let row = row(a)
            .param("against", b.code)
            .baseline(format!("{division} {isa}"));
        last = Some(exp.row(row.metric(Metric::Speedup, speedup))?);
        faster &= speedup.low > 1.0;
        told.push(format!(
            "{:.1}x {division} ({} on {isa})",
            speedup.median, b.code
        ));
    }
    let key = last.context("no way to unpack by division")?;
    exp.verdict(
        "P03",
        faster,
        format!("multiply-and-shift runs at {}", told.join(", ")),
        &key,
    )
}
