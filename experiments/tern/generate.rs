//! `tern generate`: continues a text.

use std::io::{self, Write};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use common::lab;
use common::runtime::chat;
use common::runtime::model::Model;
use common::runtime::sampler::{Sampler, Sampling};
use common::runtime::session::{Session, Size};
use common::runtime::speculation::{self, End, Length, Lookup, MAX_DRAFT, Speculation};
use common::runtime::tokenizer::{Detokenizer, Tokenizer};

use crate::text::{self, BATCH, Engine, Text};

/// Continues a text, greedily unless told otherwise.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: Engine,
    #[command(flatten)]
    text: Text,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128, value_parser = lab::number::<usize>(0..))]
    n: usize,
    /// Tokens of context [default: the smaller of 4096 and what the file was made for]
    #[arg(long, value_parser = lab::number::<usize>(1..))]
    ctx: Option<usize>,
    /// Temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0, value_parser = lab::number::<f32>(0.0..=100.0))]
    temp: f32,
    /// Only that many of the likeliest tokens; 0 for all.
    #[arg(long, default_value_t = 0, value_parser = lab::number::<usize>(0..))]
    top_k: usize,
    /// Only the likeliest tokens that together reach this probability.
    #[arg(long, default_value_t = 1.0, value_parser = lab::number::<f32>(0.0..=1.0))]
    top_p: f32,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0, value_parser = lab::number::<u64>(0..))]
    seed: u64,
    /// Tokens to draft at once from what the text says already: a number, or `adaptive`. The result is the same.
    #[arg(long, default_value = "0", value_name = "N")]
    draft: Draft,
    /// Prints token ids instead of text: a line of the prompt's, a line of those generated.
    #[arg(long)]
    ids: bool,
    /// Leaves the prompt's last token as it is. Otherwise, where the text breaks off before a line break that the tokenizer would have
    /// merged with it, and the model expects that break, it is added (never with --ids or --file).
    #[arg(long)]
    as_is: bool,
    /// Puts the text into the file's own chat template, as the message of a user.
    #[arg(long)]
    chat: bool,
}

#[derive(Clone, Copy, Debug)]
struct Draft(Length);

impl FromStr for Draft {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(n) if n <= MAX_DRAFT => Ok(Draft(Length::Fixed(n))),
            Err(_) if text == "adaptive" => Ok(Draft(Length::Adaptive(8))),
            _ => Err(format!("expected 0 to {MAX_DRAFT}, or adaptive")),
        }
    }
}

impl Draft {
    fn most(self) -> usize {
        match self.0 {
            Length::Fixed(n) | Length::Adaptive(n) => n,
        }
    }
}

/// Set by Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);

fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

pub fn run(args: &Args, out: &mut dyn Write) -> Result<ExitCode> {
    let mut words = args.text.read()?;
    let gguf = args.engine.gguf()?;
    let tokenizer = Model::check(&gguf)?;
    if args.chat {
        words = chat::render(&gguf, &words)?;
    }
    let context = text::context(args.ctx, &gguf)?;
    let prompt = text::prompt_ids(&tokenizer, &words, &args.text.name(), context)?;
    let sampling = Sampling {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let mut sampler = Sampler::new(sampling, tokenizer.len())?;
    let draft = args.draft.most();
    let size = Size {
        context,
        batch: BATCH,
        proposals: if draft > 0 { draft + 1 } else { 0 },
    };
    let pool = args.engine.pool()?;
    let model = args.engine.load(&gguf, size, &pool)?;
    let mut session = Session::new(&model, &pool, size)?;
    ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed))
        .context("Ctrl-C: cannot watch for it")?;

    if args.ids {
        writeln!(out, "{}", text::join(&prompt))?;
    }
    let start = Instant::now();
    let (&last, rest) = prompt.split_last().context("an empty prompt")?;
    for tokens in rest.chunks(BATCH) {
        if !stopped() {
            session.advance(tokens)?;
        }
    }
    if !stopped() {
        let may_break =
            !(args.as_is || args.ids || args.chat) && args.text.is_typed() && !rest.is_empty();
        let next = if may_break {
            with_line_break(&mut session, &tokenizer, last)?
        } else {
            last
        };
        session.advance(&[next])?;
        out.write_all(&tokenizer.bytes(next)[tokenizer.bytes(last).len()..])?;
    }
    let prefilled = session.tokens().len();
    let prefill = start.elapsed().as_secs_f64();

    let mut writer = Writer {
        out,
        tokenizer: &tokenizer,
        ids: args.ids,
        stream: Detokenizer::default(),
        failure: None,
        first: true,
    };
    let mut lookup = Lookup::default();
    let speculation = (draft > 0).then_some(Speculation {
        drafter: &mut lookup,
        length: args.draft.0,
    });
    let n = if stopped() { 0 } else { args.n };
    let start = Instant::now();
    let each = |id| !stopped() && writer.write(id);
    let (counts, end) = speculation::generate(
        &mut session,
        &mut sampler,
        n,
        |id| tokenizer.is_end(id),
        speculation,
        each,
    )?;
    let decode = start.elapsed().as_secs_f64();
    writer.finish()?;

    let mut err = io::stderr().lock();
    let rate = |n: usize, seconds: f64| if n > 0 { n as f64 / seconds } else { 0.0 };
    // The first token comes from the prompt's logits; the others are what decoding cost.
    let decoded = counts.generated.saturating_sub(1);
    let mut line = format!(
        "prefill {prefilled} tokens, {:.1} tok/s; decode {decoded} tokens, {:.1} tok/s",
        rate(prefilled, prefill),
        rate(decoded, decode)
    );
    if counts.drafted > 0 {
        let share = 100.0 * counts.accepted as f64 / counts.drafted as f64;
        line += &format!(
            "; {} of {} drafted tokens accepted ({share:.1}%)",
            counts.accepted, counts.drafted
        );
    }
    line += match end {
        _ if stopped() => "; stopped",
        End::Length => "",
        End::Token => "; ended by the model",
        End::Context => "; the context is full",
        End::Stopped => "; stopped",
    };
    // Nobody reads it where this fails.
    let _ = writeln!(err, "{line}");
    Ok(ExitCode::SUCCESS)
}

/// The last token of a prompt, or the same with the line break that belongs to it where the model finds that likelier: a shell
/// takes it from the end of what is typed, and the tokenizer has one token for both.
fn with_line_break(session: &mut Session, tokenizer: &Tokenizer, last: u32) -> Result<u32> {
    let logits = session.last_logits()?;
    let likelier = |best: u32, id: u32| {
        if logits[id as usize] > logits[best as usize] {
            id
        } else {
            best
        }
    };
    Ok(tokenizer.with_line_breaks(last).fold(last, likelier))
}

/// Writes tokens as they come, as text or as ids.
struct Writer<'a> {
    out: &'a mut dyn Write,
    tokenizer: &'a Tokenizer,
    ids: bool,
    stream: Detokenizer,
    failure: Option<io::Error>,
    first: bool,
}

impl Writer<'_> {
    /// Whether it could be written.
    fn write(&mut self, id: u32) -> bool {
        let text = match (self.ids, self.first) {
            (true, true) => id.to_string(),
            (true, false) => format!(" {id}"),
            (false, _) => self.stream.push(self.tokenizer, id),
        };
        self.first = false;
        let done = self
            .out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush());
        self.failure = done.err();
        self.failure.is_none()
    }

    fn finish(mut self) -> Result<()> {
        if let Some(error) = self.failure {
            return Err(error.into());
        }
        let rest = self.stream.finish();
        writeln!(self.out, "{rest}")?;
        self.out.flush()?;
        Ok(())
    }
}
