//! Perplexity by chunk, and the hash of logits that must be one number everywhere.

use anyhow::{Result, ensure};
use sha2::{Digest, Sha256};

use super::math::{self, Simd};
use super::session::{LOGITS, Session};

/// What a chunk gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// Mean of -ln p over the positions scored, all but the first.
    pub nll: f64,
}

/// The mean over chunks of equal length, and its exponential.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Mean of -ln p, in nat.
    pub nll: f64,
    /// e^nll.
    pub perplexity: f64,
}

/// -ln p of `token` under `logits`.
pub fn nll(simd: Simd, logits: &[f32], token: u32) -> f64 {
    let max = logits
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
    math::ln_f64(math::sum_exp(simd, logits, max)) + f64::from(max)
        - f64::from(logits[token as usize])
}

/// Runs `tokens` from the empty state and hands out the logits after each, in order; stops at the first error.
///
/// # Errors
/// As [`Session::advance`], or what `each` returns.
pub fn each_logits(
    session: &mut Session,
    tokens: &[u32],
    mut each: impl FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    session.reset();
    let (vocabulary, batch) = (session.model().vocabulary(), session.batch());
    for (b, tokens) in tokens.chunks(batch).enumerate() {
        session.advance(tokens)?;
        for start in (0..tokens.len()).step_by(LOGITS.min(batch)) {
            let end = tokens.len().min(start + LOGITS.min(batch));
            let logits = session.logits(start..end)?;
            for (i, logits) in logits.chunks_exact(vocabulary).enumerate() {
                each(b * batch + start + i, logits)?;
            }
        }
    }
    Ok(())
}

/// Scores one chunk from the empty state: every position but the first.
///
/// # Errors
/// A chunk of fewer than two tokens; as [`Session::advance`].
pub fn chunk(session: &mut Session, tokens: &[u32]) -> Result<Chunk> {
    ensure!(
        tokens.len() >= 2,
        "perplexity: a chunk of {} tokens, expected at least 2",
        tokens.len()
    );
    let (simd, mut sum) = (Simd::best(), 0.0);
    each_logits(session, tokens, |i, logits| {
        if let Some(&next) = tokens.get(i + 1) {
            sum += nll(simd, logits, next);
        }
        Ok(())
    })?;
    Ok(Chunk {
        nll: sum / (tokens.len() - 1) as f64,
    })
}

/// The whole chunks of a text.
///
/// # Errors
/// A context below 2, a text shorter than one chunk.
pub fn chunks(tokens: &[u32], context: usize) -> Result<impl ExactSizeIterator<Item = &[u32]>> {
    ensure!(context >= 2, "--ctx: {context} tokens, expected at least 2");
    ensure!(
        tokens.len() >= context,
        "the text has {} tokens, expected at least one chunk of {context}",
        tokens.len()
    );
    Ok(tokens.chunks_exact(context))
}

/// The mean over chunks.
pub fn mean(chunks: &[Chunk]) -> Score {
    let nll = chunks.iter().map(|c| c.nll).sum::<f64>() / chunks.len().max(1) as f64;
    Score {
        nll,
        perplexity: math::exp_f64(nll),
    }
}

/// SHA-256 over the bits of all logits after each of `tokens`, from the empty state.
///
/// # Errors
/// As [`Session::advance`].
pub fn logits_hash(session: &mut Session, tokens: &[u32]) -> Result<String> {
    let mut hash = Sha256::new();
    each_logits(session, tokens, |_, logits| {
        hash.update(bytemuck::cast_slice(logits));
        Ok(())
    })?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
