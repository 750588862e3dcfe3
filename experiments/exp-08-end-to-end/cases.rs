//! The models that are measured.

use std::path::Path;

use anyhow::{Context, Result};
use common::formats::Format;
use common::kernels::Kernel;
use common::lab::{Experiment, Row};
use common::runtime::memory;
use common::runtime::model::Model;
use common::runtime::shapes::{SHAPE_1B, Shape};
use shared::weights::{Spec, Weights};

#[derive(clap::Args)]
pub struct Own {
    /// Random weights of this shape: 27b, 8b or 1b [default: the largest that fits in memory; with --quick the small model].
    #[arg(long, value_name = "SHAPE", conflicts_with = "model")]
    synthetic: Option<Spec>,
}

/// Weights in one format, and what rows call them.
pub struct Case {
    pub name: String,
    pub format: Format,
    pub weights: Weights,
}

impl Case {
    fn of_file(path: &Path) -> Result<Case> {
        let weights = Weights::open(path)?;
        let tensors = weights.gguf().tensors().iter();
        let ternary = tensors.filter(|t| t.format.is_ternary());
        let largest = ternary.max_by_key(|t| t.bytes);
        let largest = largest.with_context(|| format!("{}: no ternary tensor", path.display()))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Case {
            name: stem
                .trim_end_matches("-pq2_0")
                .trim_end_matches("-ptq1_0")
                .into(),
            format: largest.format,
            weights,
        })
    }

    /// A row; PQ2_0, the source's format, goes without saying.
    pub fn row(&self, variant: &str, isa: &str, threads: usize, phase: &str) -> Row {
        let row = Row::new(variant, isa)
            .threads(threads)
            .params([("model", self.name.as_str()), ("phase", phase)]);
        match self.format {
            Format::Pq2_0 => row,
            format => row.param("format", format),
        }
    }

    /// The kernel that multiplies by its ternary matrices.
    pub fn kernel(&self, model: &Model) -> Result<&'static Kernel> {
        let of_format = model.kernels().find(|(format, _)| *format == self.format);
        Ok(of_format.context("a kernel of the format")?.1)
    }

    /// Whether the claims are about it: they name PQ2_0, and a file that was given is what is asked about.
    pub fn is_claimed(&self, exp: &Experiment) -> bool {
        self.format == Format::Pq2_0 || exp.flags().model.is_some()
    }

    /// Says what is done with it.
    pub fn progress(&self, exp: &Experiment, what: &str) {
        exp.progress(format!("{} {}: {what}", self.name, self.format));
    }
}

/// The file that was given, in a quick run the small models, or else random weights in both packings.
pub fn all(exp: &mut Experiment, own: &Own) -> Result<Vec<Case>> {
    if exp.flags().model.is_some() {
        return Ok(vec![Case::of_file(&exp.model()?)?]);
    }
    if exp.quick() && own.synthetic.is_none() {
        let small = ["pq2_0", "ptq1_0"]
            .map(|name| Case::of_file(&exp.repo_file(&format!("models/tern-nano-{name}.gguf"))?));
        return small.into_iter().collect();
    }
    let shape = match own.synthetic {
        Some(spec) => spec.shape,
        None => fitting(exp)?,
    };
    let random = [Format::Pq2_0, Format::Ptq1_0].map(|format| {
        Ok(Case {
            name: shape.name.to_owned(),
            format,
            weights: Weights::Random(Spec { shape, format }.make(exp.flags().seed)?),
        })
    });
    random.into_iter().collect()
}

/// The largest shape that fits, with a sixth to spare for the embedding, state and buffers.
fn fitting(exp: &Experiment) -> Result<Shape> {
    let free = memory::available_memory().unwrap_or(u64::MAX);
    for shape in Shape::ALL {
        if shape.weight_bytes(Format::Pq2_0)? / 6 * 7 < free {
            return Ok(shape);
        }
        let free = free as f64 / 1e9;
        exp.say(&format!("the {} does not fit in {free:.1} GB", shape.name));
    }
    Ok(SHAPE_1B)
}
