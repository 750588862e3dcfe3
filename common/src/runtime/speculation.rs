//! Generation, with drafts that are verified in one batch. What is generated never depends on the drafts.
//!
//! A step feeds the token that is known to come next, and after it a draft. The logits after each tell what the model itself says; the
//! draft is accepted up to where they disagree, and the first token that the model says instead comes next. One token is drawn from
//! each logits in order, so that sampling takes the same random numbers with and without drafts.

use std::collections::HashMap;

use anyhow::{Result, ensure};

use super::sampler::{Sampler, Sampling};
use super::session::{LOGITS, MAX_PROPOSALS, Session};

/// The longest draft: a batch is the known token and the draft.
pub const MAX_DRAFT: usize = if LOGITS < MAX_PROPOSALS {
    LOGITS - 1
} else {
    MAX_PROPOSALS - 1
};

/// Guesses what comes next.
pub trait Drafter {
    /// Appends at most `max` tokens to `draft`: a guess at what follows `tokens`.
    fn draft(&mut self, tokens: &[u32], max: usize, draft: &mut Vec<u32>);
}

/// Looks up the last tokens in the text so far, and drafts what followed them the last time: 3 tokens if they occurred, else 2.
#[derive(Debug, Default)]
pub struct Lookup {
    /// (last tokens) to the place after them, of the latest occurrence but the end of the text.
    threes: HashMap<[u32; 3], usize>,
    twos: HashMap<[u32; 2], usize>,
    /// Tokens of the text that are indexed.
    seen: usize,
}

impl Lookup {
    /// Indexes every place before the end.
    fn index(&mut self, tokens: &[u32]) {
        if tokens.len() < self.seen {
            *self = Lookup::default(); // another text
        }
        for end in self.seen.max(1)..tokens.len() {
            if let Some(&key) = tokens[..end].last_chunk() {
                self.twos.insert(key, end);
            }
            if let Some(&key) = tokens[..end].last_chunk() {
                self.threes.insert(key, end);
            }
        }
        self.seen = tokens.len();
    }
}

impl Drafter for Lookup {
    fn draft(&mut self, tokens: &[u32], max: usize, draft: &mut Vec<u32>) {
        self.index(tokens);
        let three = tokens.last_chunk().and_then(|key| self.threes.get(key));
        let two = || tokens.last_chunk().and_then(|key| self.twos.get(key));
        if let Some(&at) = three.or_else(two) {
            // Where the text ends, it goes on with the draft itself.
            for i in at..at + max {
                let next = match tokens.get(i) {
                    Some(&token) => token,
                    None => draft[i - tokens.len()],
                };
                draft.push(next);
            }
        }
    }
}

/// Drafts what is known to come: the tokens of an earlier run.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// Prompt and generated tokens of that run.
    pub tokens: Vec<u32>,
}

impl Drafter for Oracle {
    fn draft(&mut self, tokens: &[u32], max: usize, draft: &mut Vec<u32>) {
        draft.extend(self.tokens.iter().skip(tokens.len()).take(max));
    }
}

/// Drafts what is known not to come: the tokens of an earlier run, plus one.
#[derive(Clone, Debug)]
pub struct Junk {
    /// Prompt and generated tokens of that run.
    pub tokens: Vec<u32>,
    /// Tokens the model knows; one past the last is the first.
    pub vocabulary: u32,
}

impl Drafter for Junk {
    fn draft(&mut self, tokens: &[u32], max: usize, draft: &mut Vec<u32>) {
        let known = self.tokens.iter().skip(tokens.len()).take(max);
        draft.extend(known.map(|t| (t + 1) % self.vocabulary));
    }
}

/// How long drafts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Always as long as can be.
    Fixed(usize),
    /// One longer after a draft that was accepted whole, up to this; half after one that was not; and after some that were
    /// refused at once, none for a while that doubles each time.
    Adaptive(usize),
}

/// The length of the next draft.
#[derive(Clone, Debug)]
struct Pace {
    length: Length,
    now: usize,
    /// Refused at their first token, in a row.
    misses: u32,
    /// Steps left without a draft.
    pause: u32,
    next_pause: u32,
}

impl Pace {
    /// Misses in a row that are one too many, and the longest pause.
    const MISSES: u32 = 2;
    const MAX_PAUSE: u32 = 64;

    fn new(length: Length) -> Self {
        let now = match length {
            Length::Fixed(n) => n,
            Length::Adaptive(max) => max.min(2),
        };
        Pace {
            length,
            now,
            misses: 0,
            pause: 0,
            next_pause: 4,
        }
    }

    fn next(&mut self) -> usize {
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        self.now
    }

    fn learn(&mut self, drafted: usize, accepted: usize) {
        let Length::Adaptive(max) = self.length else {
            return;
        };
        if drafted == 0 {
            return;
        }
        if accepted == drafted {
            self.now = (self.now + 1).min(max);
        } else {
            self.now = (self.now / 2).max(1);
        }
        if accepted > 0 {
            (self.misses, self.next_pause) = (0, 4);
            return;
        }
        self.misses += 1;
        if self.misses >= Self::MISSES {
            (self.misses, self.pause) = (0, self.next_pause);
            self.next_pause = (2 * self.next_pause).min(Self::MAX_PAUSE);
        }
    }
}

/// What generation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens generated.
    pub generated: usize,
    /// Passes after the prompt.
    pub steps: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Of which were accepted.
    pub accepted: usize,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As many tokens as were asked for.
    Length,
    /// A token that ends the text, which is the last one generated.
    Token,
    /// The context is full.
    Context,
    /// The caller wanted no more.
    Stopped,
}

/// Where drafts come from, and how long they are.
pub struct Speculation<'a> {
    /// Guesses.
    pub drafter: &'a mut dyn Drafter,
    /// How many at once.
    pub length: Length,
}

/// Generates up to `n` tokens after the tokens that the session has consumed (at least one, with its logits at hand), and hands each to
/// `each`, which says whether to go on. Of the tokens generated, all but the last are consumed: drafts leave the same state as none
/// (unless `each` stops it, when tokens that were accepted together may be consumed already).
///
/// # Errors
/// As [`Session::advance`]; a draft that is longer than the session can propose.
pub fn generate(
    session: &mut Session,
    sampler: &mut Sampler,
    n: usize,
    is_end: impl Fn(u32) -> bool,
    mut speculation: Option<Speculation>,
    mut each: impl FnMut(u32) -> bool,
) -> Result<(Counts, End)> {
    let mut counts = Counts::default();
    if n == 0 {
        return Ok((counts, End::Length));
    }
    let mut pace = Pace::new(speculation.as_ref().map_or(Length::Fixed(0), |s| s.length));
    if let Some(Speculation {
        length: Length::Fixed(n) | Length::Adaptive(n),
        ..
    }) = &speculation
    {
        ensure!(*n <= MAX_DRAFT, "--draft {n}: expected at most {MAX_DRAFT}");
    }
    let mut text = session.tokens().to_vec();
    let mut batch = Vec::with_capacity(MAX_DRAFT + 1);
    let mut next = sampler.sample(session.last_logits()?);
    loop {
        // `next` is known, but not consumed yet.
        counts.generated += 1;
        text.push(next);
        if !each(next) {
            return Ok((counts, End::Stopped));
        }
        if is_end(next) {
            return Ok((counts, End::Token));
        }
        if counts.generated == n {
            return Ok((counts, End::Length));
        }
        let room = session.context() - session.tokens().len();
        if room == 0 {
            return Ok((counts, End::Context));
        }
        // A draft no longer than what is still wanted after it, and than the context has room for.
        let most = pace.next().min(n - counts.generated - 1).min(room - 1);
        batch.clear();
        if let Some(Speculation { drafter, .. }) = &mut speculation
            && most > 0
        {
            drafter.draft(&text, most, &mut batch);
            batch.truncate(most);
        }
        let drafted = batch.len();
        batch.insert(0, next);
        counts.steps += 1;
        if drafted == 0 {
            session.advance(&batch)?;
            next = sampler.sample(session.last_logits()?);
            continue;
        }
        session.propose(&batch)?;
        let vocabulary = session.model().vocabulary();
        let mut accepted = 0;
        let mut ended = false;
        for logits in session.logits(0..batch.len())?.chunks_exact(vocabulary) {
            next = sampler.sample(logits);
            if accepted == drafted || batch[accepted + 1] != next {
                break;
            }
            accepted += 1;
            if is_end(next) {
                ended = true;
                break;
            }
        }
        counts.drafted += drafted;
        counts.accepted += accepted;
        pace.learn(drafted, accepted);
        // The accepted tokens but one that ends the text are consumed; `next` comes after them, or is that end.
        let consumed = if ended { accepted } else { accepted + 1 };
        session.accept(consumed)?;
        for &token in &batch[1..consumed] {
            counts.generated += 1;
            text.push(token);
            if !each(token) {
                return Ok((counts, End::Stopped));
            }
        }
    }
}

/// [`generate`] with the likeliest token each time: the tokens.
///
/// # Errors
/// As [`generate`].
pub fn greedy(
    session: &mut Session,
    n: usize,
    is_end: impl Fn(u32) -> bool,
    speculation: Option<Speculation>,
) -> Result<(Vec<u32>, Counts, End)> {
    let mut sampler = Sampler::new(Sampling::default(), session.model().vocabulary())?;
    let mut ids = Vec::with_capacity(n.min(session.context()));
    let each = |id| {
        ids.push(id);
        true
    };
    let (counts, end) = generate(session, &mut sampler, n, is_end, speculation, each)?;
    Ok((ids, counts, end))
}
