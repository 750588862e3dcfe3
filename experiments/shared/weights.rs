//! Where a model comes from: a file, or random weights of a shape.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use common::formats::Format;
use common::runtime::gguf::{Gguf, Rotation};
use common::runtime::hyper::Hyper;
use common::runtime::model::{GgufSource, Model, Options, Source};
use common::runtime::pool::Pool;
use common::runtime::shapes::Shape;
use common::runtime::synthetic::Synthetic;

/// A synthetic model by name, as flags take it: `27b` (in PQ2_0), `8b/ptq1_0`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Its sizes.
    pub shape: Shape,
    /// The format of its matrices.
    pub format: Format,
}

impl Spec {
    /// Its weights.
    ///
    /// # Errors
    /// As [`Synthetic::new`].
    pub fn make(self, seed: u64) -> Result<Synthetic> {
        Synthetic::new(&self.shape, self.format, seed)
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.shape.name, self.format)
    }
}

impl FromStr for Spec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (shape, format) = text.split_once('/').unwrap_or((text, "pq2_0"));
        let wrong = || anyhow!("expected 27b, 8b or 1b, and then /pq2_0 or /ptq1_0");
        let shape = Shape::from_name(shape).ok_or_else(wrong)?;
        let format = Format::from_name(format)
            .filter(|f| matches!(f, Format::Pq2_0 | Format::Ptq1_0))
            .ok_or_else(wrong)?;
        Ok(Spec { shape, format })
    }
}

/// Weights to load a model from, as often as it takes.
pub enum Weights {
    /// A file: its header, and where it is.
    File(Arc<Gguf>, PathBuf),
    /// Random ones, made anew each time.
    Random(Synthetic),
}

impl Weights {
    /// Those of a file.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Weights::File(Arc::new(Gguf::open(path)?), path.to_owned()))
    }

    /// The keys and tensors, of random weights without their data.
    pub fn gguf(&self) -> &Arc<Gguf> {
        match self {
            Weights::File(gguf, _) => gguf,
            Weights::Random(synthetic) => synthetic.gguf(),
        }
    }

    /// A model of these weights.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load(&self, options: &Options, pool: &Pool) -> Result<Model> {
        self.load_first(usize::MAX, options, pool)
    }

    /// A model of at most the first `layers` layers.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_first(&self, layers: usize, options: &Options, pool: &Pool) -> Result<Model> {
        let mut hyper = Hyper::from_gguf(self.gguf())?;
        hyper.layers = hyper.layers.min(layers);
        let rotation = Rotation::read(self.gguf())?;
        let build = |source: &dyn Source| Model::build(hyper, rotation, source, options, pool);
        match self {
            Weights::File(gguf, path) => build(&GgufSource::open(gguf, path)?),
            Weights::Random(synthetic) => build(synthetic),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_synthetic_models() {
        let spec: Spec = "8b/ptq1_0".parse().unwrap();
        assert_eq!((spec.shape.name, spec.format), ("8b", Format::Ptq1_0));
        assert_eq!("27b".parse::<Spec>().unwrap().to_string(), "27b/pq2_0");
        for wrong in ["70b", "", "1b/", "1b/q8_0", "1b/pq2_0/x"] {
            assert!(wrong.parse::<Spec>().is_err(), "{wrong}");
        }
    }
}
