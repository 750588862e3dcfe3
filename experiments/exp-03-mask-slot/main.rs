//! Mask-slot decode: the stock 2-bit kernel, 16-a-slot, row pairs and wide rows.

use std::array::from_fn;

use anyhow::{Result, ensure};
use common::formats::{Format, Layout};
use common::kernels::census::{self, Census};
use common::kernels::{Form, Kernel};
use common::lab::{self, Experiment, Metric, Row};
use common::runtime::gguf::Gguf;
use common::runtime::pool::Pool;
use common::runtime::stack::{self, Stack};
use rand::RngExt;
use shared::decode::{self, At, Wall};

const LAYOUTS: [&str; 4] = ["stock", "slot16", "row-pair", "wide-row"];

fn main() -> std::process::ExitCode {
    lab::run(
        "exp-03-mask-slot",
        &["L07", "L08", "L09", "L10", "L11"],
        |exp| {
            decode::announce(exp, Format::Pq2_0)?;
            let kernels = decode::kernels_of(Format::Pq2_0, &LAYOUTS);
            ensure!(
                !kernels.is_empty(),
                "no kernel but the scalar reference: nothing to compare"
            );
            operations(exp, &kernels)?;
            block_size(exp)?;
            identity(exp)?;
            for size in if exp.quick() {
                &[2048][..]
            } else {
                &[2048, 4096]
            } {
                let at = At::new(*size, *size, "cache");
                let stacks = &mut decode::stacks(exp, &kernels, &at)?;
                for threads in exp.thread_counts() {
                    let pool = Pool::new(threads)?;
                    decode::race(exp, &pool, stacks, None, &at, &|_, _| vec![])?;
                }
            }
            model(exp)?;
            if exp.quick() {
                for claim in ["L10", "L11"] {
                    exp.not_testable(claim, "a quick run does not read from DRAM")?;
                }
                return Ok(());
            }
            dram(exp)
        },
    )
}

/// L07: vector operations in the decode loops, counted in the code that runs.
fn operations(exp: &mut Experiment, kernels: &[&'static Kernel]) -> Result<()> {
    let mut counted: Vec<(&Kernel, Census, lab::Key)> = Vec::new();
    for &kernel in kernels {
        let (variant, isa) = decode::names(kernel);
        let census = match census::census(kernel) {
            Ok(census) => census,
            Err(error) => {
                exp.refused(variant, isa, format!("{error:#}"));
                continue;
            }
        };
        let counts = [
            ("dot", census.dots),
            ("other", census.other),
            ("load", census.loads),
            ("unpack", census.unpack),
        ];
        let mut last = None;
        for (ops, count) in counts {
            let row = Row::new(variant, isa)
                .claim("L07")
                .params([("ops", ops)])
                .param("weights", 64);
            last = Some(exp.row(row.exact(Metric::Count, census.per_64_weights(count)))?);
        }
        counted.extend(last.map(|key| (kernel, census, key)));
    }
    // The widest set that has both: there, as in the source, a dot takes each operand once.
    let find = |layout: &str| {
        counted
            .iter()
            .rev()
            .find(|(k, ..)| k.layout().name() == layout)
    };
    let best = counted
        .iter()
        .rev()
        .filter(|(k, ..)| k.layout().name() != "stock");
    let per_dot = |c: &Census| c.unpack as f64 / c.dots as f64;
    let best = best.min_by(|a, b| per_dot(&a.1).total_cmp(&per_dot(&b.1)));
    let (Some((stock, s, _)), Some((mask, m, key))) = (find("stock"), best) else {
        return exp.not_testable("L07", "instructions are counted on x86-64 only");
    };
    let reason = format!(
        "{:.1} operations a dot to unpack in {}, {:.1} in {}; the source's 16 and 4 for 4 dots are 4 and 1",
        per_dot(s),
        stock.name(),
        per_dot(m),
        mask.name()
    );
    exp.verdict("L07", per_dot(s) >= 3.5 * per_dot(m), reason, key)
}

/// L08: four stock blocks and a repacked one take the same bytes, and repacking loses nothing.
fn block_size(exp: &mut Experiment) -> Result<()> {
    let stock = stack::random_stock(Format::Pq2_0, 4, 128, stack::ZEROS, exp.flags().seed)?;
    let mut back = true;
    for layout in [Layout::Slot16, Layout::RowPair] {
        let mut bytes = stock.clone();
        layout.repack_in_place(&mut bytes, 4, 128)?;
        layout.restore_in_place(&mut bytes, 4, 128)?;
        back &= bytes == stock;
    }
    exp.must_hold(
        "a matrix repacked in place and restored is what it was",
        back,
    );
    let row = Row::new("row-pair", "")
        .claim("L08")
        .params([("rows", 4), ("cols", 128)]);
    let key = exp.row(row.exact(Metric::Bytes, stock.len()))?;
    let reason = "repacked in place into the bytes of four stock blocks, and back";
    exp.verdict(
        "L08",
        back && stock.len() == 4 * Format::Pq2_0.block_bytes(),
        reason,
        &key,
    )
}

/// L09: slots masked where they stand, summed apart and weighed at the end, are 16 times the dot product.
fn identity(exp: &mut Experiment) -> Result<()> {
    let rng = &mut exp.rng("identity");
    let mut equal = true;
    let mut largest = [0, 0];
    for round in 0..10_000 {
        for (max, largest) in [2, 3].into_iter().zip(&mut largest) {
            let (u, y) = block(rng, round, max);
            let dot: i32 = u
                .iter()
                .zip(&y)
                .map(|(&u, &y)| i32::from(u) * i32::from(y))
                .sum();
            match mask_slot(&u, &y) {
                Some(sum) => {
                    equal &= sum == 16 * dot;
                    *largest = sum.abs().max(*largest);
                }
                None => equal = false,
            }
        }
    }
    exp.must_hold(
        "a2 + 4 a1 + 16 (a0 + a3) = 16 dot(u, y) without overflow",
        equal,
    );
    let bound = |codes: &str, value: i32| {
        Row::new("row-pair", "")
            .claim("L09")
            .param("bound", codes)
            .exact(Metric::Count, value)
    };
    exp.row(bound("codes-0-to-3", largest[1]))?;
    let key = exp.row(bound("codes-0-to-2", largest[0]))?;
    let reason = "10000 blocks, the extremes among them, in checked 32-bit arithmetic";
    exp.verdict("L09", equal, reason, &key)
}

/// Codes up to `max` and activations: the extremes, all alike and mixed, and random ones in turn.
fn block(rng: &mut impl RngExt, round: usize, max: u8) -> ([u8; 128], [i8; 128]) {
    match round {
        0 => ([max; 128], [127; 128]),
        1 => ([max; 128], [-127; 128]),
        _ if round.is_multiple_of(2) => (
            from_fn(|_| rng.random_range(0..=max)),
            from_fn(|_| rng.random_range(-127..=127)),
        ),
        _ => (
            [max; 128],
            from_fn(|_| if rng.random() { 127 } else { -127 }),
        ),
    }
}

/// The source's form: slots 0 to 2 masked (u, 4u, 16u), slot 3 shifted down (u). `None` on overflow of 32 bits.
fn mask_slot(u: &[u8; 128], y: &[i8; 128]) -> Option<i32> {
    let mut a = [0i32; 4];
    for (u, y) in u.as_chunks::<4>().0.iter().zip(y.as_chunks::<4>().0) {
        let byte = u[0] | u[1] << 2 | u[2] << 4 | u[3] << 6;
        let slots = [byte & 0x03, byte & 0x0c, byte & 0x30, byte >> 6];
        for s in 0..4 {
            a[s] = a[s].checked_add(i32::from(slots[s]) * i32::from(y[s]))?;
        }
    }
    let [a0, a1, a2, a3] = a;
    a1.checked_mul(4)?
        .checked_add(a2)?
        .checked_add(a0.checked_add(a3)?.checked_mul(16)?)
}

/// Every ternary tensor of the model, on one thread: the same bits from each kernel, and Gw/s.
fn model(exp: &mut Experiment) -> Result<()> {
    let path = exp.model()?;
    let file = Gguf::open(&path)?;
    let tensors = file.tensors().iter().filter(|t| t.format == Format::Pq2_0);
    let mut shapes = Vec::new();
    let pool = Pool::new(1)?;
    for tensor in tensors {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        // In a large model the many tensors of one shape take the same time.
        if file.tensors().len() > 200 && shapes.contains(&(rows, cols)) {
            continue;
        }
        shapes.push((rows, cols));
        let stock = file.data(tensor);
        let x = stack::random_activations(Form::Q8K, cols, 3, exp.flags().seed)?;
        let some = rows.min(256);
        let few = &stock[..Format::Pq2_0.matrix_bytes(some, cols)?];
        let same = decode::same_bits(Format::Pq2_0, few, some, cols, &x)?;
        exp.must_hold(
            "every kernel gives the reference's bits on the model's weights",
            same,
        );
        let mut at = At::new(rows, cols, "cache");
        at.tensor = Some(tensor.name.clone());
        let best = LAYOUTS
            .iter()
            .map(|layout| decode::best(Format::Pq2_0, layout));
        let stacks = best.map(|kernel| Stack::new(kernel?, stock, rows, cols, 1));
        let mut stacks = stacks.collect::<Result<Vec<_>>>()?;
        decode::race(exp, &pool, &mut stacks, None, &at, &|_, _| vec![])?;
    }
    if shapes.is_empty() {
        exp.refused("model", "", "no pq2_0 tensor in it");
    }
    Ok(())
}

/// L10 and L11: a matrix far larger than any cache, next to plain reads.
fn dram(exp: &mut Experiment) -> Result<()> {
    let at = At::new(32768, 8192, "dram");
    let kernels = LAYOUTS
        .iter()
        .map(|layout| decode::best(Format::Pq2_0, layout));
    let kernels = kernels.collect::<Result<Vec<_>>>()?;
    let stacks = &mut decode::stacks(exp, &kernels, &at)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = Wall::new(&pool, exp)?;
        let claims = |variant: &str, metric| match (variant, metric) {
            ("slot16" | "row-pair", Metric::Bandwidth) => vec!["L10", "L11"],
            ("read", _) => vec![],
            _ => vec!["L10"],
        };
        let raced = decode::race(exp, &pool, stacks, Some(&wall), &at, &claims)?;
        let all = threads == exp.all_threads();
        let [stock, slot16, row_pair, wide] = kernels[..] else {
            continue;
        };
        let mut beats = true;
        for kernel in [slot16, row_pair, wide] {
            let (stat, _) = decode::faster(exp, &raced, &at, (kernel, stock), threads, &["L10"])?;
            beats &= stat.low > 1.0;
        }
        let (pairs, key) = decode::faster(exp, &raced, &at, (row_pair, slot16), threads, &["L11"])?;
        if !all {
            continue;
        }
        let (low, high) = (pairs.low, pairs.high);
        let reason = format!(
            "row pairs {low:.2} to {high:.2} times as fast as 16 a slot; from DRAM, all threads"
        );
        exp.verdict("L11", high >= 1.0 && pairs.median > 0.95, reason, &key)?;
        let shares = raced.shares.into_iter().zip(&kernels).skip(1);
        if let Some(((share, key), kernel)) = shares.max_by(|a, b| a.0.0.total_cmp(&b.0.0)) {
            let reason = format!(
                "{} reaches {share:.0}% of plain reads (the source: 93%); every mask-slot layout {} stock",
                kernel.name(),
                if beats { "beats" } else { "does not beat" }
            );
            exp.verdict("L10", beats && share >= 93.0, reason, &key)?;
        }
    }
    Ok(())
}
