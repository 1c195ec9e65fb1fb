//! Text of a completion while its tokens come in.

use std::sync::Arc;

use crate::Error;
use crate::text::{IncrementalDecoder, TextPipeline, ceil_char_boundary};

/// Turns tokens into pieces of text that, put together, are the text of the whole completion.
///
/// A piece is held back while it may still change: while it ends within a character (for some tokens at most), and while it
/// may be the beginning of a stop string. A stop string that is there is held back with what follows it, until either the
/// end of the completion says where its text ends or another token shows that it did not stop there, as before
/// `min_tokens`.
#[derive(Debug)]
pub(super) struct TextStream {
    pipeline: Option<Arc<TextPipeline>>,
    stop: Arc<[String]>,
    decoder: IncrementalDecoder,
    text: String,
    /// Bytes of `text` that were given out.
    sent: usize,
}

impl TextStream {
    pub(super) fn new(pipeline: Option<Arc<TextPipeline>>, stop: Arc<[String]>) -> Self {
        Self {
            pipeline,
            stop,
            decoder: IncrementalDecoder::new(),
            text: String::new(),
            sent: 0,
        }
    }

    /// The next piece after one more token; may be empty.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub(super) fn push(&mut self, id: u32) -> Result<String, Error> {
        let Some(pipeline) = &self.pipeline else {
            return Ok(String::new());
        };
        let new = self.decoder.push(pipeline, id)?;
        if new.is_empty() {
            return Ok(new);
        }
        let known = self.text.len();
        self.text.push_str(&new);
        let end = self.safe_end(known);
        let piece = self.text[self.sent..end].to_string();
        self.sent = end;
        Ok(piece)
    }

    /// Up to where no stop string begins that ends after `known` bytes of the text. One that ended before did not stop the
    /// completion.
    fn safe_end(&self, known: usize) -> usize {
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0);
        let found = self.stop.iter().filter_map(|stop| {
            let from = ceil_char_boundary(&self.text, known.saturating_sub(stop.len() - 1));
            Some(from + self.text[from..].find(stop.as_str())?)
        });
        let perhaps = self.text.len().saturating_sub(longest.saturating_sub(1));
        let mut end = found
            .min()
            .map_or(perhaps, |found| found.min(perhaps))
            .max(self.sent);
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        end
    }

    /// What is left when the whole text is known.
    pub(super) fn finish(&mut self, whole: &str) -> String {
        let rest = match whole.get(..self.sent) == Some(&self.text[..self.sent]) {
            true => whole[self.sent..].to_string(),
            false => String::new(),
        };
        self.sent = whole.len();
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{StopText, bundled_pipeline as pipeline};
    use proptest::prelude::*;

    fn pieces(pipeline: &Arc<TextPipeline>, ids: &[u32], stop: &[String], whole: &str) -> String {
        let mut stream = TextStream::new(Some(pipeline.clone()), stop.into());
        let mut all = String::new();
        for &id in ids {
            all.push_str(&stream.push(id).expect("decodes"));
            assert!(whole.starts_with(&all), "{all:?} is not a beginning of {whole:?}");
        }
        all + &stream.finish(whole)
    }

    proptest! {
        #[test]
        fn pieces_make_up_the_whole(ids in proptest::collection::vec(0u32..2100, 0..60)) {
            let pipeline = pipeline();
            let whole = pipeline.decode(&ids).expect("decodes");
            prop_assert_eq!(pieces(&pipeline, &ids, &[], &whole), whole);
        }

        #[test]
        fn pieces_make_up_what_a_stop_string_leaves(
            text in "[a-c ä😀]{0,40}",
            stop in proptest::collection::vec("[a-cä ]{1,4}", 1..3),
            include in any::<bool>(),
            min_tokens in 0usize..20,
        ) {
            let pipeline = pipeline();
            let ids = pipeline.tokenizer().encode(&text, false).expect("encodes");
            let (len, whole) = stopped(&pipeline, &ids, &stop, include, min_tokens);
            prop_assert_eq!(pieces(&pipeline, &ids[..len], &stop, &whole), whole);
        }
    }

    /// As the engine ends a completion of at most these tokens: its length and its text.
    fn stopped(
        pipeline: &Arc<TextPipeline>,
        ids: &[u32],
        stop: &[String],
        include: bool,
        min_tokens: usize,
    ) -> (usize, String) {
        let mut search = StopText::new(pipeline.clone(), stop.into(), include);
        for (i, &id) in ids.iter().enumerate() {
            if let Some(found) = search.push(id, i >= min_tokens).expect("decodes") {
                return (i + 1, found.text);
            }
        }
        (ids.len(), pipeline.decode(ids).expect("decodes"))
    }

    #[test]
    fn a_stop_string_that_stays_is_the_end_also_within_a_token() {
        let pipeline = pipeline();
        let ids = pipeline
            .tokenizer()
            .encode(" instead of", false)
            .expect("encodes");
        let stop = ["a".to_string()];
        let (len, whole) = stopped(&pipeline, &ids, &stop, true, 0);
        assert_eq!(whole, " instea");
        assert_eq!(pieces(&pipeline, &ids[..len], &stop, &whole), whole);
    }

    #[test]
    fn a_stop_string_that_came_too_early_holds_up_one_token() {
        let pipeline = pipeline();
        let ids = pipeline.tokenizer().encode("a b c", false).expect("encodes");
        let mut stream = TextStream::new(Some(pipeline), ["a".to_string()].into());
        let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id).expect("decodes")).collect();
        assert_eq!(pieces.concat(), "a b c", "{pieces:?}");
        assert_eq!(pieces[0], "");
    }

    #[test]
    fn a_stream_goes_on_while_bytes_are_broken() {
        let pipeline = pipeline();
        let broken = pipeline.tokenizer().encode("🤖", false).expect("encodes")[0];
        let ids = [broken; 500];
        let whole = pipeline.decode(&ids).expect("decodes");
        let mut stream = TextStream::new(Some(pipeline), [].into());
        let streamed: Vec<_> = ids.iter().map(|&id| stream.push(id).expect("decodes")).collect();
        assert!(
            streamed[100..].iter().all(|piece| piece == "\u{fffd}"),
            "{streamed:?}"
        );
        assert_eq!(streamed.concat() + &stream.finish(&whole), whole);
    }

    #[test]
    fn a_character_of_several_tokens_comes_whole() {
        let pipeline = pipeline();
        let text = "5 🤖 €";
        let ids = pipeline.tokenizer().encode(text, false).expect("encodes");
        let mut stream = TextStream::new(Some(pipeline), [].into());
        for id in ids {
            let piece = stream.push(id).expect("decodes");
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
        }
    }
}
