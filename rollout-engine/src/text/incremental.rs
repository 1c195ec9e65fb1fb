//! Text of a completion while its tokens come, and stop strings in it.

use std::sync::Arc;

use super::{TextPipeline, ceil_char_boundary};
use crate::Error;

/// Tokens that may be held back for a character that is not complete. A character has at most four bytes.
const MAX_HELD: usize = 16;
/// Tokens that are decoded anew for each token while text ends in broken bytes without end. Half of them are more than the
/// last character can have.
const MAX_BROKEN: usize = 4 * MAX_HELD;

/// Turns tokens into text one by one, without special tokens.
///
/// A token may hold a part of a character: text is given once it is complete. All that was given and what
/// [`finish`](Self::finish) gives is together the text of the whole.
///
/// Bytes that cannot become a character, as a model may write without end, are given as U+FFFD, some tokens later than
/// other text: only the last U+FFFD can be a character that is not complete yet.
///
/// ```text
///   ids:   … forgotten | context | not yet given
///                      ^0        ^settled         decoders may look at what comes before, so that the last ids given stay
///   text of ids:         given                  | not yet given
///                                               ^given
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
    /// Ids at the front whose text was given and ends in a complete character.
    settled: usize,
    /// Bytes of the text of `ids`, and those of them that were given.
    bytes: usize,
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
        let now = text.decode(&self.ids)?;
        if now.len() == self.bytes && text.decode(&[id])?.is_empty() {
            // An id without text, such as a special one, says nothing of those after it, and may come without end.
            self.ids.pop();
            return Ok(Default::default());
        }
        self.bytes = now.len();
        let readable = now.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        if readable == now.len() {
            let new = self.give(&now, now.len());
            self.ids.drain(..self.settled);
            self.settled = self.ids.len();
            self.bytes = text.decode(&self.ids)?.len();
            self.given = self.bytes;
            return Ok((new, String::new()));
        }
        if self.ids.len() - self.settled < MAX_HELD {
            let held = now.get(self.given..readable).unwrap_or_default();
            return Ok((String::new(), held.to_string()));
        }
        let perhaps_incomplete = char::REPLACEMENT_CHARACTER.len_utf8();
        let new = self.give(&now, now.len() - perhaps_incomplete);
        if self.ids.len() >= MAX_BROKEN {
            self.ids.drain(..MAX_BROKEN / 2);
            self.settled = 0;
            // The last character is within what is left.
            self.bytes = text.decode(&self.ids)?.len();
            self.given = self.bytes.saturating_sub(perhaps_incomplete);
        }
        Ok((new, String::new()))
    }

    /// The part of the ids' text up to `end` that was not given.
    fn give(&mut self, now: &str, end: usize) -> String {
        let new = now.get(self.given..end).unwrap_or_default().to_string();
        self.given = self.given.max(end);
        new
    }

    /// The text of what was held back: U+FFFD for characters that never became complete.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn finish(&mut self, text: &TextPipeline) -> Result<String, Error> {
        let now = text.decode(&self.ids)?;
        let rest = self.give(&now, now.len());
        self.settled = self.ids.len();
        Ok(rest)
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
            let from = ceil_char_boundary(&self.text, old.saturating_sub(stop.len() - 1));
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
    use crate::text::bundled_pipeline as pipeline;
    use proptest::prelude::*;

    /// The ids of the tokens that are one byte each.
    fn byte_ids(text: &TextPipeline, bytes: &[u8]) -> Vec<u32> {
        let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let others: Vec<u8> = (0..=255).filter(|byte| !printable(byte)).collect();
        let name = |byte: u8| match others.iter().position(|&other| other == byte) {
            None => char::from(byte),
            Some(nth) => char::from_u32(0x100 + nth as u32).expect("a character"),
        };
        let id = |&byte: &u8| text.tokenizer().token_id(&name(byte).to_string());
        bytes
            .iter()
            .map(|byte| id(byte).expect("has every byte"))
            .collect()
    }

    /// Pieces of text, and the last of them from `finish`.
    fn pieces(text: &TextPipeline, ids: &[u32]) -> Vec<String> {
        let mut decoder = IncrementalDecoder::new();
        let mut pieces: Vec<String> = (ids.iter())
            .map(|&id| {
                let piece = decoder.push(text, id).expect("decodes");
                assert!(decoder.ids.len() <= MAX_BROKEN + MAX_HELD, "{decoder:?}");
                piece
            })
            .collect();
        pieces.push(decoder.finish(text).expect("decodes"));
        pieces
    }

    #[test]
    fn broken_bytes_without_end_are_given_while_they_come() {
        let text = pipeline();
        for broken in [
            &[0x80][..],
            &[0xf0, 0x9f],
            &[0xf0, 0x9f, 0x98],
            &[0xff, 0xe2, 0x82],
        ] {
            let ids = byte_ids(&text, &broken.repeat(200));
            let whole = text.decode(&ids).expect("decodes");
            let mut given = 0;
            for (i, piece) in pieces(&text, &ids).iter().enumerate() {
                given += piece.chars().count();
                let known = text.decode(&ids[..i.min(ids.len())]).expect("decodes");
                assert!(given + MAX_HELD >= known.chars().count(), "{given} of {known:?}");
            }
            assert_eq!(pieces(&text, &ids).concat(), whole);
        }
    }

    proptest! {
        /// Wherever a character begins after broken bytes, it comes whole, and what follows it is not lost.
        #[test]
        fn pieces_are_the_text_of_any_bytes(
            parts in proptest::collection::vec(
                prop_oneof![
                    (1..=100usize).prop_map(|n| vec![0x80; n]),
                    (1..=40usize).prop_map(|n| [0xf0, 0x9f, 0x98].repeat(n)),
                    (1..=40usize).prop_map(|n| [0xe2, 0x82].repeat(n)),
                    "[a😀€ ]{1,4}".prop_map(String::into_bytes),
                    proptest::collection::vec(any::<u8>(), 1..40),
                ],
                0..6,
            ),
        ) {
            let text = pipeline();
            let ids = byte_ids(&text, &parts.concat());
            let whole = text.decode(&ids).expect("decodes");
            prop_assert_eq!(pieces(&text, &ids).concat(), whole);
        }
    }

    #[test]
    fn a_stop_string_is_found_after_broken_bytes_and_a_character() {
        let text = pipeline();
        for n_broken in 1..2 * MAX_BROKEN {
            let bytes = [&[0x80].repeat(n_broken)[..], "😀 stop".as_bytes()].concat();
            let ids = byte_ids(&text, &bytes);
            let mut search = StopText::new(text.clone(), ["stop".to_string()].into(), false);
            let found = ids.iter().find_map(|&id| search.push(id, true).expect("decodes"));
            let expected = format!("{}😀 ", "\u{fffd}".repeat(n_broken));
            assert_eq!(found.map(|found| found.text), Some(expected), "{n_broken} bytes");
        }
    }

    #[test]
    fn ids_without_text_are_not_kept() {
        let text = pipeline();
        let special = text.tokenizer().token_id("<|endoftext|>").expect("is there");
        let mut ids = vec![special; 100];
        // Within a character, too.
        for id in text.tokenizer().encode("5 🤖 €", false).expect("encodes") {
            ids.push(id);
            ids.extend([special; 2 * MAX_BROKEN]);
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
