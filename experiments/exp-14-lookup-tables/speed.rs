//! One race of multiplying, looking up and mask-slot, for one token and for many. Claim B04.

use anyhow::Result;
use common::formats::{Codes, Format};
use common::kernels::lookup::{Kernel, Matrix, ROWS, Tokens, Way};
use common::kernels::{Activations, Form};
use common::lab::{Experiment, Key, Metric, Row};
use common::runtime::pool::Pool;
use half::f16;
use shared::contest::{self, Entry};
use shared::decode::At;

use crate::{SCALE, bytes, codes, floats, rivals, zeros};

/// Rows that are drawn, whole tiles; those of a matrix are these over and over.
const DRAWN: usize = 64;

/// Median GMAC/s by name, and the keys of their rows.
pub type Rates = Vec<(String, f64, Key)>;

/// One race at each thread count: the three ways and mask-slot on the same weights and tokens. Gives what all threads reached.
pub fn race(exp: &mut Experiment, kernel: Kernel, at: &At, tokens: usize) -> Result<Rates> {
    let (rows, cols) = (at.rows, at.cols);
    exp.progress(format!("{rows} x {cols} from {}, {tokens} tokens", at.from));
    let rng = &mut exp.rng("speed");
    let copies = contest::copies(exp, at, 5);
    let w = codes(rng, DRAWN * cols);
    let mut held = Vec::new();
    for way in Way::ALL {
        let parts = way.pack(&Codes::new(&w, DRAWN, cols)?)?;
        let parts = parts.map(|part| part.repeat(rows / DRAWN));
        let copies = copies(parts.iter().map(Vec::len).sum());
        held.push((way, contest::aligned(&parts, copies)?));
    }
    let scales = vec![f16::from_f32(SCALE); w.len() / Format::Pq2_0.block_weights()];
    let mut stacks = Vec::new();
    for rival in rivals(kernel.isa) {
        stacks.push(contest::stack(rival, &w, &scales, at, &copies)?);
    }
    // The first is the largest, so that quantizing gives these bytes back, with SCALE.
    let mut y = bytes(rng, tokens * cols);
    y.iter_mut().step_by(cols).for_each(|y| *y = 127);
    let values: Vec<f32> = y.iter().map(|&y| f32::from(y) * SCALE).collect();
    let mut matrices = Vec::new();
    for (way, copies) in &held {
        let copies = copies
            .iter()
            .map(|c| Matrix::new(*way, (rows, cols), SCALE, c));
        let copies: Vec<Matrix> = copies.collect::<Result<_>>()?;
        let mut x = Tokens::quantize(&values, cols)?;
        x.tables(&copies[0]);
        matrices.push((way.name(), copies, x));
    }
    let mut rates = Rates::new();
    let x = q8_k(&y, cols, tokens)?;
    for threads in exp.thread_counts() {
        let pool = Pool::new(threads)?;
        let wall = contest::wall(exp, &pool, at)?;
        let macs = (rows * cols * tokens) as f64;
        let outs = Way::ALL.map(|_| zeros(rows * tokens));
        let mut theirs = vec![vec![0f32; rows * tokens]; stacks.len()];
        let mut entries = Vec::new();
        for ((variant, all, x), out) in matrices.iter().zip(&outs) {
            let (pool, bytes, mut next) = (&pool, all[0].bytes(), 0);
            let call = move || {
                next = (next + 1) % all.len();
                contest::by_rows(pool, rows, bytes, ROWS, |rows| {
                    kernel.multiply(&all[next], x, rows, out)
                })
            };
            entries.push(Entry {
                variant,
                isa: kernel.isa.name(),
                weights: macs,
                bytes: bytes as f64,
                call: Box::new(call),
            });
        }
        for (stack, out) in stacks.iter_mut().zip(&mut theirs) {
            entries.push(Entry::of_stack(stack, &pool, &x, out));
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
        let first = floats(&outs[0]);
        let same = outs
            .iter()
            .map(|o| floats(o))
            .chain(theirs)
            .all(|o| o == first);
        exp.must_hold("multiplying and looking up give the same results", same);
        let Some((last, others)) = names.split_last() else {
            continue;
        };
        let rate = |name: &str| times.rate(name, metric, macs).median;
        let mut found = Rates::new();
        for (name, start) in others.iter().zip(starts) {
            let speedup = times.speedup(name, last);
            let key = exp.row(start.baseline(last).metric(Metric::Speedup, speedup))?;
            found.push((name.clone(), rate(name), key));
        }
        let key = found.last().map(|r| r.2.clone());
        found.extend(key.map(|key| (last.clone(), rate(last), key)));
        if threads == exp.all_threads() {
            rates = found;
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
