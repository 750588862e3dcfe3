//! Byte-level BPE: text to token ids and back.
//!
//! Text is split by a pattern; each piece is taken as bytes, and neighbours are merged by rank until no pair has one. GGUF stores
//! tokens with each byte as a printable character (GPT-2's table); here they are bytes again.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use anyhow::{Context, Result, ensure};
use regex::Regex;

use super::gguf::Gguf;

/// The pattern of the `qwen35` pre-tokenizer, at the start of a text and without the one branch that looks ahead, `\s+(?!\S)` before
/// the last: [`split`] does its work, so that an automaton takes one step a character, however long a run of spaces is.
const QWEN35: &str = r"\A(?:(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+)";

/// Token types of GGUF: 3 is control, 4 is defined by a user; both are matched whole.
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// Control tokens that end generation besides the file's own.
const END_NAMES: [&[u8]; 2] = [b"<|endoftext|>", b"<|im_end|>"];

/// A tokenizer, as a file describes it.
pub struct Tokenizer {
    /// The bytes of each token.
    tokens: Vec<Vec<u8>>,
    /// Whether a token is a control token, which has no text of its own.
    control: Vec<bool>,
    /// The token of each single byte.
    bytes: [u32; 256],
    /// A pair of tokens to (rank, what they merge into).
    merges: HashMap<(u32, u32), (u32, u32)>,
    pattern: Regex,
    /// Tokens matched whole before splitting; of two that fit, the longer is tried first.
    whole: Option<Regex>,
    whole_ids: HashMap<Vec<u8>, u32>,
    end: Vec<u32>,
    bos: Option<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer of {} tokens", self.tokens.len())
    }
}

/// GPT-2's printable character of a byte: itself where printable, else the next of U+0100 on.
pub(super) fn printable(byte: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        char::from(byte)
    } else {
        let before = (0..byte).filter(|&b| !plain(b)).count() as u32;
        char::from_u32(256 + before).expect("below U+0200")
    }
}

impl Tokenizer {
    /// The tokenizer of a file.
    ///
    /// # Errors
    /// One line that names the file and the key: another kind of tokenizer, lengths that do not agree, a byte with no token, a merge of
    /// unknown tokens.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        gguf.key("tokenizer.ggml.model")?.expect_str("gpt2")?;
        gguf.key("tokenizer.ggml.pre")?.expect_str("qwen35")?;
        let from_printable: HashMap<char, u8> = (0..=255).map(|b| (printable(b), b)).collect();
        let to_bytes = |text: &str| -> Option<Vec<u8>> {
            text.chars()
                .map(|c| from_printable.get(&c).copied())
                .collect()
        };

        let list = gguf.key("tokenizer.ggml.tokens")?;
        let texts = list.strs()?;
        ensure!(
            u32::try_from(texts.len()).is_ok(),
            list.unexpected(&format!("{} tokens", texts.len()), "fewer than 2^32")
        );
        let types = match gguf.get("tokenizer.ggml.token_type") {
            Some(types) => {
                ensure!(
                    types.len() == texts.len(),
                    types.unexpected(
                        &format!("{} types", types.len()),
                        &format!("one for each of {} tokens", texts.len())
                    )
                );
                types.u32s()?
            }
            None => vec![1; texts.len()],
        };
        // Control and user-defined tokens stand in the list as they are; all others byte by byte.
        let is_whole = |id: usize| matches!(types[id], CONTROL | USER_DEFINED);
        let mut tokens = Vec::with_capacity(texts.len());
        let mut ids = HashMap::with_capacity(texts.len());
        let mut whole_ids = HashMap::new();
        for (id, text) in texts.iter().enumerate() {
            let bytes = match to_bytes(text) {
                Some(bytes) if !is_whole(id) => bytes,
                _ => text.as_bytes().to_vec(),
            };
            if is_whole(id) {
                whole_ids.entry(bytes.clone()).or_insert(id as u32);
            } else {
                ids.entry(bytes.clone()).or_insert(id as u32);
            }
            tokens.push(bytes);
        }
        let mut bytes = [0; 256];
        for (byte, id) in bytes.iter_mut().enumerate() {
            *id = *ids.get(&[byte as u8][..]).ok_or_else(|| {
                list.unexpected(
                    &format!("no token for byte {byte:#04x}"),
                    "one for each byte",
                )
            })?;
        }

        let list = gguf.key("tokenizer.ggml.merges")?;
        let mut merges = HashMap::with_capacity(list.len());
        for (rank, text) in list.strs()?.into_iter().enumerate() {
            let merge = || -> Option<_> {
                let (left, right) = text.split_once(' ')?;
                let (left, right) = (to_bytes(left)?, to_bytes(right)?);
                let whole = ids.get(&[&left[..], &right[..]].concat())?;
                Some(((*ids.get(&left)?, *ids.get(&right)?), (rank as u32, *whole)))
            };
            let (pair, to) = merge().ok_or_else(|| {
                list.unexpected(
                    &format!("merge {rank} {text:?}"),
                    "two tokens whose concatenation is a token",
                )
            })?;
            merges.entry(pair).or_insert(to);
        }

        let id_of = |key: &str| -> Result<Option<u32>> {
            let Some(value) = gguf.get(key) else {
                return Ok(None);
            };
            let id = value.u32()?;
            ensure!(
                (id as usize) < texts.len(),
                value.unexpected(&id.to_string(), &format!("a token below {}", texts.len()))
            );
            Ok(Some(id))
        };
        let mut end: Vec<u32> = id_of("tokenizer.ggml.eos_token_id")?.into_iter().collect();
        end.extend(
            (0..texts.len())
                .filter(|&id| types[id] == CONTROL && END_NAMES.contains(&&tokens[id][..]))
                .map(|id| id as u32),
        );
        end.sort_unstable();
        end.dedup();
        let add_bos = match gguf.get("tokenizer.ggml.add_bos_token") {
            Some(value) => value.bool()?,
            None => false,
        };
        let bos = if add_bos {
            id_of("tokenizer.ggml.bos_token_id")?
        } else {
            None
        };

        Ok(Tokenizer {
            control: types.iter().map(|&t| t == CONTROL).collect(),
            tokens,
            bytes,
            merges,
            pattern: Regex::new(QWEN35)?,
            whole: whole_pattern(&whole_ids).with_context(|| {
                let found = format!("{} control and user-defined", whole_ids.len());
                list.unexpected(&found, "fewer").to_string()
            })?,
            whole_ids,
            end,
            bos,
        })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none, which no file that loads has.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The bytes of a token; empty for an id past the last.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], |t| t)
    }

    /// Whether generation ends at a token.
    pub fn is_end(&self, id: u32) -> bool {
        self.end.contains(&id)
    }

    /// The token that starts a text, where the file asks for one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The ids of a text; names of control tokens in it become these tokens. The token that starts a text comes first where the file
    /// asks for one.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        let mut end = 0;
        for found in self.whole.iter().flat_map(|whole| whole.find_iter(text)) {
            self.encode_plain(&text[end..found.start()], &mut ids);
            ids.push(self.whole_ids[found.as_str().as_bytes()]);
            end = found.end();
        }
        self.encode_plain(&text[end..], &mut ids);
        ids
    }

    fn encode_plain(&self, mut text: &str, ids: &mut Vec<u32>) {
        while !text.is_empty() {
            let (piece, rest) = text.split_at(split(&self.pattern, text));
            self.merge(piece.as_bytes(), ids);
            text = rest;
        }
    }

    /// Merges the bytes of a piece by rank, of equal ranks the leftmost first, in n log n.
    fn merge(&self, piece: &[u8], ids: &mut Vec<u32>) {
        /// Marks a place that was merged into the one before it.
        const GONE: u32 = u32::MAX;
        let mut tokens: Vec<u32> = piece.iter().map(|&b| self.bytes[usize::from(b)]).collect();
        let n = tokens.len();
        let mut next: Vec<usize> = (1..=n).collect();
        let mut previous: Vec<usize> = (0..n).map(|i| i.wrapping_sub(1)).collect();
        // (rank, place, left, right, merged): stale if the tokens at the place have changed since.
        let mut heap = BinaryHeap::new();
        let look = |heap: &mut BinaryHeap<_>, tokens: &[u32], at: usize, right: usize| {
            if right < n
                && let Some(&(rank, to)) = self.merges.get(&(tokens[at], tokens[right]))
            {
                heap.push(Reverse((rank, at, tokens[at], tokens[right], to)));
            }
        };
        for i in 1..n {
            look(&mut heap, &tokens, i - 1, i);
        }
        while let Some(Reverse((_, at, left, right, to))) = heap.pop() {
            let other = next[at];
            if tokens[at] != left || other >= n || tokens[other] != right {
                continue;
            }
            tokens[at] = to;
            tokens[other] = GONE;
            next[at] = next[other];
            if next[at] < n {
                previous[next[at]] = at;
            }
            look(&mut heap, &tokens, at, next[at]);
            if previous[at] < n {
                look(&mut heap, &tokens, previous[at], at);
            }
        }
        ids.extend(tokens.into_iter().filter(|&t| t != GONE));
    }

    /// The tokens that are this one with nothing but line breaks behind it.
    pub fn with_line_breaks(&self, id: u32) -> impl Iterator<Item = u32> {
        let breaks = move |token: &[u8]| match token.strip_prefix(self.bytes(id)) {
            Some(rest) => !rest.is_empty() && rest.iter().all(|b| matches!(b, b'\r' | b'\n')),
            None => false,
        };
        let plain = !self.bytes(id).is_empty() && self.control.get(id as usize) == Some(&false);
        (0..)
            .zip(&self.tokens)
            .filter(move |(_, token)| plain && breaks(token))
            .map(|(id, _)| id)
    }

    /// The text of tokens; control tokens have none, and bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut stream = Detokenizer::default();
        let mut text: String = ids.iter().map(|&id| stream.push(self, id)).collect();
        text.push_str(&stream.finish());
        text
    }
}

/// Where the first piece of a text ends.
fn split(pattern: &Regex, text: &str) -> usize {
    // Every character has a branch.
    let end = pattern.find(text).map_or(text.len(), |piece| piece.end());
    // Only the last branch ends in a space that breaks no line. Its last space belongs to the word behind it, unless it is the only one.
    match text[..end].char_indices().next_back() {
        Some((last, c))
            if last > 0 && end < text.len() && c.is_whitespace() && !matches!(c, '\r' | '\n') =>
        {
            last
        }
        _ => end,
    }
}

fn whole_pattern(ids: &HashMap<Vec<u8>, u32>) -> Result<Option<Regex>> {
    let mut names: Vec<&str> = ids
        .keys()
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| !name.is_empty())
        .collect();
    names.sort_unstable_by_key(|name| (Reverse(name.len()), *name));
    if names.is_empty() {
        return Ok(None);
    }
    let names: Vec<_> = names.into_iter().map(regex::escape).collect();
    Ok(Some(Regex::new(&names.join("|"))?))
}

/// Turns a stream of tokens into text without splitting a character.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The bytes of a character that is not yet whole.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// The text that becomes whole with this token. Bytes that no continuation could make UTF-8 become U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if tokenizer.control.get(id as usize) == Some(&true) {
            return self.finish();
        }
        self.push_bytes(tokenizer.bytes(id))
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(bad) = error.error_len() else {
                        break; // the start of a character: wait for the rest
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        text
    }

    /// What is left at the end: U+FFFD for a character that never became whole.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use fancy_regex::Regex as Reference;
    use proptest::prelude::*;

    use super::*;

    /// The pattern as it is published.
    const PUBLISHED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn pieces<'t>(pattern: &Regex, mut text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![];
        while !text.is_empty() {
            let (piece, rest) = text.split_at(split(pattern, text));
            pieces.push(piece);
            text = rest;
        }
        pieces
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn pieces_are_those_of_the_published_pattern(
            // Of each class of characters in it, several times each; and any others.
            text in r"([ \t\u{a0}\u{2028}\u{3000}]{0,4}|[\r\n]|'(?i:s|\u{17f}|t|re|ve|m|ll|d|x)|[a-zé日\u{301}]{1,3}|[0-9\u{b2}]|[.:=🙂\u{0}]|\PC|.){0,24}"
        ) {
            static PATTERNS: LazyLock<(Regex, Reference)> =
                LazyLock::new(|| (Regex::new(QWEN35).unwrap(), Reference::new(PUBLISHED).unwrap()));
            let (pattern, reference) = &*PATTERNS;
            let expected: Vec<&str> = reference.find_iter(&text).map(|m| m.unwrap().as_str()).collect();
            prop_assert_eq!(pieces(pattern, &text), expected);
        }
    }
}
