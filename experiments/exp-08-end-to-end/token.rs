//! The whole runtime, timed a token and a prompt at a time, next to reads of the model's own memory.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use common::runtime::bandwidth::Reader;
use common::runtime::model::Model;
use common::runtime::pool::Pool;
use common::runtime::sampler;
use common::runtime::session::{Kind, Profile, Session, Size};

/// Tokens of a prefill pass.
pub const BATCH: usize = 64;
/// Of the session: the longest prompt, and room to decode.
pub const CONTEXT: usize = 512 + 128;

pub const SIZE: Size = Size {
    context: CONTEXT,
    batch: BATCH,
    proposals: 0,
};

/// The wall: plain reads of the memory that holds the weights.
pub struct Wall<'a> {
    pool: &'a Pool,
    bytes: &'a [u8],
    reader: Reader,
    at: usize,
}

impl<'a> Wall<'a> {
    /// Tries the ways to read.
    pub fn new(model: &'a Model, pool: &'a Pool) -> Result<Self> {
        let bytes = model.buffer().context("the weights were read")?;
        let (reader, _) = Reader::fastest(pool, &bytes[..bytes.len().min(1 << 30)], 2);
        Ok(Wall {
            pool,
            bytes,
            reader,
            at: 0,
        })
    }

    /// What one read takes in.
    pub fn bytes(&self) -> usize {
        self.bytes.len().min(256 << 20)
    }

    /// Reads the next part, which other reads have driven out of the caches; seconds.
    pub fn read(&mut self) -> f64 {
        let len = self.bytes();
        if self.at + len > self.bytes.len() {
            self.at = 0;
        }
        let start = Instant::now();
        black_box(self.reader.read(self.pool, &self.bytes[self.at..][..len]));
        self.at += len;
        start.elapsed().as_secs_f64()
    }
}

/// Where the time of a token went, seconds.
#[derive(Clone, Copy)]
pub struct Spent {
    pub total: f64,
    pub sampling: f64,
    pub profile: Profile,
}

impl Spent {
    /// Names and seconds of all parts.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let kinds = Kind::ALL.map(|kind| (kind.name(), self.profile.seconds(kind)));
        kinds.into_iter().chain([("sampling", self.sampling)])
    }

    /// Products, with the waits at the end of all jobs: what a replay takes outside of the runtime.
    pub fn matmul(&self) -> f64 {
        self.profile.seconds(Kind::Matmul) + self.profile.seconds(Kind::Barrier)
    }
}

pub struct Bench<'a> {
    pub session: Session<'a>,
    prompt: &'a [u32],
}

impl<'a> Bench<'a> {
    pub fn new(model: &'a Model, pool: &'a Pool, prompt: &'a [u32]) -> Result<Self> {
        let session = Session::new(model, pool, SIZE)?;
        Ok(Bench { session, prompt })
    }

    /// Consumes the first `n` tokens of the prompt from an empty state: the seconds of each pass.
    pub fn prefill(&mut self, n: usize) -> Result<Vec<Spent>> {
        self.session.reset();
        let passes = self.prompt[..n].chunks(BATCH);
        passes
            .map(|tokens| {
                self.session.profile(true);
                let start = Instant::now();
                self.session.advance(tokens)?;
                let total = start.elapsed().as_secs_f64();
                Ok(Spent {
                    total,
                    sampling: 0.0,
                    profile: self.session.profile(false),
                })
            })
            .collect()
    }

    /// Logits, the greedy token, and the pass that consumes it.
    pub fn decode(&mut self) -> Result<(u32, Spent)> {
        if self.session.tokens().len() == CONTEXT {
            self.prefill(BATCH)?;
        }
        self.session.profile(true);
        let start = Instant::now();
        let logits = self.session.last_logits()?;
        let sample = Instant::now();
        let id = sampler::greedy(logits);
        let sampling = sample.elapsed().as_secs_f64();
        self.session.advance(&[id])?;
        let spent = Spent {
            total: start.elapsed().as_secs_f64(),
            sampling,
            profile: self.session.profile(false),
        };
        Ok((id, spent))
    }
}
