//! What every kernel is given, and what it makes of it.

use anyhow::{Context, Result};
use common::kernels::Kernel;
use common::lab::{self, Experiment, Row};
use common::runtime::gguf::Gguf;
use common::runtime::model::Model;
use common::runtime::perplexity;
use common::runtime::pool::Pool;
use common::runtime::session::{Session, Size};
use common::runtime::speculation;
use common::runtime::tokenizer::Tokenizer;
use shared::prompts;

/// Tokens a chunk.
const CONTEXT: usize = 128;
const SIZE: Size = Size {
    context: 512,
    batch: 64,
    proposals: 0,
};

/// What every kernel is given.
pub struct Task {
    tokenizer: Tokenizer,
    text: Vec<u32>,
    prompts: Vec<(Vec<u32>, usize)>,
    /// Of the text, for rows.
    hash: String,
}

impl Task {
    /// The text and the prompts of the repo in tokens of the model; in a quick run, one chunk and two short prompts.
    pub fn new(exp: &mut Experiment, model: &Gguf) -> Result<Task> {
        let file = exp.repo_file("models/eval-code.txt")?;
        let text = String::from_utf8(lab::read(&file, 1 << 20)?).context("eval-code.txt")?;
        let prompts = prompts::read(exp)?;
        let tokenizer = Tokenizer::from_gguf(model)?;
        let (most_chunks, most_prompts, most_ids) = if exp.quick() {
            (1, 2, 12)
        } else {
            (12, usize::MAX, usize::MAX)
        };
        let mut tokens = tokenizer.encode(&text);
        tokens.truncate(most_chunks * CONTEXT);
        let prompts = prompts.iter().take(most_prompts);
        let prompts = prompts.map(|p| (tokenizer.encode(&p.prompt), p.n.min(most_ids)));
        Ok(Task {
            text: tokens,
            prompts: prompts.collect(),
            tokenizer,
            hash: lab::sha256(text.as_bytes()),
        })
    }

    pub fn row(&self, kernel: &Kernel, threads: usize) -> Row {
        Row::new(kernel.layout().name(), kernel.isa().name())
            .threads(threads)
            .param("text", &self.hash[..12])
            .param("tokens", self.text.len())
            .param("ctx", CONTEXT)
    }
}

/// What a kernel makes of it.
#[derive(PartialEq)]
pub struct Answer {
    pub nll: Vec<f64>,
    pub ids: Vec<Vec<u32>>,
}

impl Answer {
    pub fn of(model: &Model, pool: &Pool, task: &Task) -> Result<Self> {
        let mut session = Session::new(model, pool, SIZE)?;
        let chunks = perplexity::chunks(&task.text, CONTEXT)?;
        let nll = chunks
            .map(|c| Ok(perplexity::chunk(&mut session, c)?.nll))
            .collect::<Result<_>>()?;
        let is_end = |id| task.tokenizer.is_end(id);
        let mut greedy = |(prompt, n): &(Vec<u32>, usize)| -> Result<Vec<u32>> {
            session.reset();
            session.advance(prompt)?;
            Ok(speculation::greedy(&mut session, *n, is_end, None)?.0)
        };
        let ids = task.prompts.iter().map(&mut greedy);
        let ids = ids.collect::<Result<_>>()?;
        Ok(Answer { nll, ids })
    }

    pub fn mean(&self) -> f64 {
        self.nll.iter().sum::<f64>() / self.nll.len() as f64
    }

    /// Ids that differ.
    pub fn differing(&self, other: &Answer) -> usize {
        let pairs = self.ids.iter().zip(&other.ids);
        pairs.map(|(a, b)| prompts::differing(a, b)).sum()
    }

    /// By how much `model` preferred its own id to that of `stock` where their texts first part, as a difference of logits.
    pub fn margin(
        &self,
        stock: &Answer,
        model: &Model,
        pool: &Pool,
        task: &Task,
    ) -> Result<Option<f64>> {
        let texts = task.prompts.iter().zip(self.ids.iter().zip(&stock.ids));
        for ((prompt, _), (own, stock)) in texts {
            let mut pairs = own.iter().zip(stock);
            let Some(at) = pairs.position(|(a, b)| a != b) else {
                continue;
            };
            let mut session = Session::new(model, pool, SIZE)?;
            session.advance(&[prompt, &own[..at]].concat())?;
            let logits = session.last_logits()?;
            let of = |ids: &[u32]| f64::from(logits[ids[at] as usize]);
            return Ok(Some(of(own) - of(stock)));
        }
        Ok(None)
    }
}
