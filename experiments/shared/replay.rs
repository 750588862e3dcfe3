//! The products of a pass outside the runtime: the matrices where the model has them, activations that are always the same.

use anyhow::{Context, Result};
use common::kernels::{Activations, Kernel, MatrixRef};
use common::runtime::model::Model;
use common::runtime::pool::Pool;
use common::runtime::products::{Job, Schedule};
use common::runtime::stack;

/// A way to share out the products: its name, the schedule, and whether those of one input are one job.
pub type Way = (&'static str, Schedule, bool);

/// The source's three, and what this runtime does.
pub const WAYS: [Way; 4] = [
    ("dynamic", Schedule::Counter, false),
    ("static", Schedule::Static, false),
    ("fused", Schedule::Static, true),
    ("fused-shares", Schedule::Dynamic, true),
];

/// The ternary products of a pass.
pub struct Replay<'a> {
    tokens: usize,
    groups: Vec<Vec<(&'static Kernel, MatrixRef<'a>)>>,
    inputs: Vec<Activations>,
    /// Of the first, second and third product of a group.
    outs: Vec<Vec<f32>>,
}

impl<'a> Replay<'a> {
    /// Those of a model and a token, the head among them, or of a batch of a prompt, without it.
    ///
    /// # Errors
    /// As [`stack::random_activations`].
    pub fn new(model: &'a Model, tokens: usize, seed: u64) -> Result<Self> {
        let mut groups = model.products();
        if tokens > 1 {
            groups.pop();
        }
        for group in &mut groups {
            group.retain(|(kernel, _)| kernel.layout().source().is_ternary());
        }
        groups.retain(|group| !group.is_empty());
        let (mut inputs, mut outs) = (Vec::<Activations>::new(), Vec::<Vec<f32>>::new());
        for group in &groups {
            for (i, (kernel, matrix)) in group.iter().enumerate() {
                outs.resize(outs.len().max(i + 1), vec![]);
                let values = (tokens * matrix.rows()).max(outs[i].len());
                outs[i].resize(values, 0.0);
                if input(&inputs, kernel, matrix).is_none() {
                    let x = stack::random_activations(kernel.form(), matrix.cols(), tokens, seed)?;
                    inputs.push(x);
                }
            }
        }
        Ok(Replay {
            tokens,
            groups,
            inputs,
            outs,
        })
    }

    /// Their number.
    pub fn products(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }

    /// Bytes of their weights.
    pub fn bytes(&self) -> usize {
        let all = self.groups.iter().flatten();
        all.map(|(_, matrix)| matrix.bytes().len()).sum()
    }

    /// Their weights.
    pub fn weights(&self) -> usize {
        let all = self.groups.iter().flatten();
        all.map(|(_, matrix)| matrix.rows() * matrix.cols()).sum()
    }

    /// Computes all of them.
    ///
    /// # Errors
    /// As [`Job::add`].
    pub fn run(&mut self, pool: &Pool, (_, schedule, fused): Way) -> Result<()> {
        for group in &self.groups {
            let mut job = Job::default();
            for ((kernel, matrix), out) in group.iter().zip(&mut self.outs) {
                let x = input(&self.inputs, kernel, matrix).context("an input for each product")?;
                job.add(kernel, *matrix, x, &mut out[..self.tokens * matrix.rows()])?;
                if !fused {
                    std::mem::take(&mut job).run(pool, schedule);
                }
            }
            if fused {
                job.run(pool, schedule);
            }
        }
        Ok(())
    }

    /// The results that stand in the buffers after a run: bits.
    pub fn results(&self) -> Vec<u32> {
        self.outs.iter().flatten().map(|x| x.to_bits()).collect()
    }
}

fn input<'x>(
    inputs: &'x [Activations],
    kernel: &Kernel,
    matrix: &MatrixRef,
) -> Option<&'x Activations> {
    let fits = |x: &&Activations| (x.form(), x.cols()) == (kernel.form(), matrix.cols());
    inputs.iter().find(fits)
}
