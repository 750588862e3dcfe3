//! Ways to draft, and what the model generates by each.

use std::time::{Duration, Instant};

use anyhow::Result;
use common::runtime::session::Session;
use common::runtime::speculation::{
    self, Counts, Drafter, Junk, Length, Lookup, Oracle, Speculation,
};
use common::runtime::tokenizer::Tokenizer;
use shared::prompts::{self, Prompt};

/// A prompt in tokens, and what follows it greedily.
pub struct Case {
    prompt: Vec<u32>,
    n: usize,
    wanted: Vec<u32>,
    hash: String,
}

/// A way to draft: `greedy` (not at all), `lookup` (always as many), `adaptive`, `oracle`, `junk`.
#[derive(Clone, Copy)]
pub struct Way {
    pub variant: &'static str,
    pub draft: usize,
}

pub const GREEDY: Way = Way {
    variant: "greedy",
    draft: 0,
};

impl Way {
    /// The name in a race.
    pub fn name(self) -> String {
        format!("{} {}", self.variant, self.draft)
    }

    fn length(self) -> Length {
        match self.variant {
            "adaptive" => Length::Adaptive(self.draft),
            _ => Length::Fixed(self.draft),
        }
    }

    fn drafter(self, case: &Case, vocabulary: usize) -> Option<Box<dyn Drafter>> {
        let tokens = || [&case.prompt[..], &case.wanted].concat();
        match self.variant {
            "lookup" | "adaptive" => Some(Box::new(Lookup::default())),
            "oracle" => Some(Box::new(Oracle { tokens: tokens() })),
            "junk" => Some(Box::new(Junk {
                tokens: tokens(),
                vocabulary: vocabulary as u32,
            })),
            _ => None,
        }
    }
}

/// What a way did on all prompts of a kind.
#[derive(Default)]
pub struct Outcome {
    pub counts: Counts,
    pub differ: usize,
    pub states_differ: usize,
}

pub struct Bench<'a> {
    pub session: Session<'a>,
    pub tokenizer: Tokenizer,
}

impl Bench<'_> {
    /// Generates after a prompt; the time is that of generating alone.
    pub fn generate(&mut self, case: &Case, way: Way) -> Result<(Vec<u32>, Counts, Duration)> {
        let (session, tokenizer) = (&mut self.session, &self.tokenizer);
        session.reset();
        session.advance(&case.prompt)?;
        let mut drafter = way.drafter(case, session.model().vocabulary());
        let speculation = drafter.as_mut().map(|drafter| Speculation {
            drafter: drafter.as_mut(),
            length: way.length(),
        });
        let is_end = |id| tokenizer.is_end(id);
        let start = Instant::now();
        let (ids, counts, _) = speculation::greedy(session, case.n, is_end, speculation)?;
        Ok((ids, counts, start.elapsed()))
    }

    /// A prompt with its greedy continuation and the state that it leaves.
    pub fn case(&mut self, prompt: &Prompt) -> Result<Case> {
        let mut case = Case {
            prompt: self.tokenizer.encode(&prompt.prompt),
            n: prompt.n,
            wanted: vec![],
            hash: String::new(),
        };
        case.wanted = self.generate(&case, GREEDY)?.0;
        case.hash = self.session.state_hash()?;
        Ok(case)
    }

    /// Runs a way on every prompt and holds text and state to the greedy ones.
    pub fn check(&mut self, cases: &[Case], way: Way) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        for case in cases {
            let (ids, counts, _) = self.generate(case, way)?;
            outcome.differ += prompts::differing(&ids, &case.wanted);
            outcome.states_differ += usize::from(self.session.state_hash()? != case.hash);
            outcome.counts.generated += counts.generated;
            outcome.counts.steps += counts.steps;
            outcome.counts.drafted += counts.drafted;
            outcome.counts.accepted += counts.accepted;
        }
        Ok(outcome)
    }
}
