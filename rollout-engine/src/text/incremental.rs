//! Text of a completion while its tokens come, and stop strings in it.

use std::sync::Arc;

use super::TextPipeline;
use crate::Error;

/// Tokens that may be held back for a character that is not complete. A character has at most four bytes.
const MAX_HELD: usize = 16;

/// Turns tokens into text one by one, without special tokens.
///
/// A token may hold a part of a character: text is given once it is complete. All that was given and what
/// [`finish`](Self::finish) gives is together the text of the whole.
///
/// ```text
///   ids:   … given | context | not yet given
///                  ^0        ^given           decoders may look at what comes before, so that the last ids given stay
/// ```
///
/// ```
/// use rollout_engine::bundled;
/// use rollout_engine::text::{IncrementalDecoder, TextPipeline};
///
/// let text = TextPipeline::from_dir(bundled::model_dir()?)?.expect("has a tokenizer");
/// let (mut decoder, mut whole) = (IncrementalDecoder::new(), String::new());
/// for id in text.tokenizer().encode("5 € and more", false)? {
///     whole += &decoder.push(&text, id)?; // never a part of a character
/// }
/// whole += &decoder.finish(&text)?;
/// assert_eq!(whole, "5 € and more");
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct IncrementalDecoder {
    ids: Vec<u32>,
    /// Ids at the front whose text was given.
    given: usize,
}

impl IncrementalDecoder {
    /// Before the first token.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes one more token and gives the text that is complete now, often empty or a few characters.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn push(&mut self, text: &TextPipeline, id: u32) -> Result<String, Error> {
        Ok(self.take(text, id)?.0)
    }

    /// The text that is complete now, and what can be read already of a text that is held back.
    fn take(&mut self, text: &TextPipeline, id: u32) -> Result<(String, String), Error> {
        self.ids.push(id);
        let (before, now) = (text.decode(&self.ids[..self.given])?, text.decode(&self.ids)?);
        let mut new = now.get(before.len()..).unwrap_or_default().to_string();
        let n_held = self.ids.len() - self.given;
        if new.is_empty() {
            if n_held == 1 {
                // An id without text, such as a special one, says nothing of those after it, and may come without end.
                self.ids.pop();
            }
            return Ok(Default::default());
        }
        if now.ends_with(char::REPLACEMENT_CHARACTER) && n_held < MAX_HELD {
            new.truncate(new.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
            return Ok((String::new(), new));
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok((new, String::new()))
    }

    /// The text of what was held back: U+FFFD for characters that never became complete.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn finish(&mut self, text: &TextPipeline) -> Result<String, Error> {
        let (before, now) = (text.decode(&self.ids[..self.given])?, text.decode(&self.ids)?);
        self.given = self.ids.len();
        Ok(now.get(before.len()..).unwrap_or_default().to_string())
    }
}

/// Looks for the stop strings of one completion.
#[derive(Debug)]
pub(crate) struct StopText {
    pipeline: Arc<TextPipeline>,
    stop: Arc<[String]>,
    include: bool,
    decoder: IncrementalDecoder,
    text: String,
}

/// A stop string that was found.
#[derive(Debug, PartialEq)]
pub(crate) struct StopFound {
    /// The stop string.
    pub(crate) stop: String,
    /// The completion's text, ending before or after it.
    pub(crate) text: String,
}

impl StopText {
    pub(crate) fn new(pipeline: Arc<TextPipeline>, stop: Arc<[String]>, include: bool) -> Self {
        Self {
            pipeline,
            stop,
            include,
            decoder: IncrementalDecoder::new(),
            text: String::new(),
        }
    }

    /// Takes one more token. If it completed a stop string and `may_stop`, that one; of several, the one that begins first.
    pub(crate) fn push(&mut self, id: u32, may_stop: bool) -> Result<Option<StopFound>, Error> {
        let old = self.text.len();
        let (new, held) = self.decoder.take(&self.pipeline, id)?;
        self.text.push_str(&new);
        if !may_stop {
            return Ok(None);
        }
        let complete = self.text.len();
        // A stop string before a part of a character has come: that the character may not, as at the last token.
        self.text.push_str(&held);
        let found = self.stop.iter().filter_map(|stop| {
            // Only what ends in the new part: at most all but one byte of it is older.
            let mut from = old.saturating_sub(stop.len() - 1);
            while !self.text.is_char_boundary(from) {
                from += 1;
            }
            Some((from + self.text[from..].find(stop.as_str())?, stop))
        });
        let Some((start, stop)) = found.min_by_key(|&(start, _)| start) else {
            self.text.truncate(complete);
            return Ok(None);
        };
        let end = start + if self.include { stop.len() } else { 0 };
        Ok(Some(StopFound {
            stop: stop.clone(),
            text: self.text[..end].to_string(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundled;

    #[test]
    fn ids_without_text_are_not_kept() {
        let dir = bundled::model_dir().expect("the bundled model");
        let text = TextPipeline::from_dir(dir)
            .expect("reads")
            .expect("has a tokenizer");
        let special = text.tokenizer().token_id("<|endoftext|>").expect("is there");
        let mut ids = vec![special; 100];
        // Within a character, too.
        for id in text.tokenizer().encode("5 🤖 €", false).expect("encodes") {
            ids.extend([id, special]);
        }
        ids.extend([special; 100]);
        let (mut decoder, mut whole) = (IncrementalDecoder::new(), String::new());
        for id in ids {
            whole += &decoder.push(&text, id).expect("decodes");
            assert!(decoder.ids.len() <= 2 * MAX_HELD, "{decoder:?}");
        }
        whole += &decoder.finish(&text).expect("decodes");
        assert_eq!(whole, "5 🤖 €");
    }
}
