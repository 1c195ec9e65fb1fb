//! Text of a completion while its tokens come in.

use std::sync::Arc;

use crate::Error;
use crate::text::TextPipeline;

/// Turns tokens into pieces of text that, put together, are the text of the whole completion.
///
/// A piece is held back while it may still change: while it ends within a character, and while it may be the beginning of
/// a stop string.
#[derive(Debug)]
pub(super) struct TextStream {
    pipeline: Option<Arc<TextPipeline>>,
    stop: Vec<String>,
    ids: Vec<u32>,
    /// `ids[context..read]` gave the end of `text`; decoding starts there so that a token sees those before it.
    context: usize,
    read: usize,
    text: String,
    /// Bytes of `text` that were given out.
    sent: usize,
    stopped: bool,
}

impl TextStream {
    pub(super) fn new(pipeline: Option<Arc<TextPipeline>>, stop: Vec<String>) -> Self {
        Self {
            pipeline,
            stop,
            ids: Vec::new(),
            context: 0,
            read: 0,
            text: String::new(),
            sent: 0,
            stopped: false,
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
        self.ids.push(id);
        let known = pipeline.decode(&self.ids[self.context..self.read])?;
        let longer = pipeline.decode(&self.ids[self.context..])?;
        match longer.strip_prefix(known.as_str()) {
            Some(new) if !longer.ends_with(char::REPLACEMENT_CHARACTER) => {
                self.text.push_str(new);
                self.context = self.read;
                self.read = self.ids.len();
            }
            _ => return Ok(String::new()),
        }
        let end = self.safe_end();
        let piece = self.text[self.sent..end].to_string();
        self.sent = end;
        Ok(piece)
    }

    /// Up to where no stop string can begin.
    fn safe_end(&mut self) -> usize {
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0);
        if self.stopped {
            return self.sent;
        }
        let found = self
            .stop
            .iter()
            .filter_map(|stop| self.text[self.sent..].find(stop.as_str()));
        if let Some(at) = found.min() {
            self.stopped = true;
            return self.sent + at;
        }
        let mut end = self
            .text
            .len()
            .saturating_sub(longest.saturating_sub(1))
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
    use crate::bundled;
    use proptest::prelude::*;

    fn pipeline() -> Arc<TextPipeline> {
        let dir = bundled::model_dir().expect("the bundled model");
        Arc::new(
            TextPipeline::from_dir(dir)
                .expect("reads")
                .expect("has a tokenizer"),
        )
    }

    fn pieces(pipeline: &Arc<TextPipeline>, ids: &[u32], stop: &[String], whole: &str) -> String {
        let mut stream = TextStream::new(Some(pipeline.clone()), stop.to_vec());
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
        fn pieces_stop_before_a_stop_string(text in "[a-c ä😀]{0,40}", stop in "[a-cä ]{1,4}") {
            let pipeline = pipeline();
            let ids = pipeline.tokenizer().encode(&text, false).expect("encodes");
            let whole = pipeline.decode(&ids).expect("decodes");
            let cut = whole.find(&stop).map_or(whole.as_str(), |at| &whole[..at]);
            prop_assert_eq!(pieces(&pipeline, &ids, &[stop], cut), cut);
        }
    }

    #[test]
    fn a_character_of_several_tokens_comes_whole() {
        let pipeline = pipeline();
        let text = "5 🤖 €";
        let ids = pipeline.tokenizer().encode(text, false).expect("encodes");
        let mut stream = TextStream::new(Some(pipeline), Vec::new());
        for id in ids {
            let piece = stream.push(id).expect("decodes");
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
        }
    }
}
