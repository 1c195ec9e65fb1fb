//! What tokens are called in answers.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use serde::{Serialize, Serializer};

use crate::text::TextPipeline;

/// The texts that single tokens stand for, each decoded when it is first asked for: an answer with log-probabilities names
/// every token at least twice.
#[derive(Debug)]
pub(super) struct TokenNames {
    text: Option<Arc<TextPipeline>>,
    /// By id.
    known: Box<[OnceLock<Box<str>>]>,
}

/// A token as answers write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenName<'a> {
    /// Its text; U+FFFD for bytes that are no whole character.
    Text(Cow<'a, str>),
    /// `token_id:` and the number.
    Id(u32),
}

impl TokenNames {
    pub(super) fn new(text: Option<Arc<TextPipeline>>) -> Self {
        let ids = text.as_ref().map_or(0, |text| text.tokenizer().vocab_size());
        Self {
            text,
            known: (0..ids).map(|_| OnceLock::new()).collect(),
        }
    }

    /// By its text if there is a tokenizer, else by its id.
    pub(super) fn name(&self, token: u32) -> TokenName<'_> {
        let Some(text) = &self.text else {
            return TokenName::Id(token);
        };
        let decode = || {
            let text = text.tokenizer().decode(&[token], false);
            text.unwrap_or_default()
        };
        TokenName::Text(match self.known.get(token as usize) {
            Some(name) => Cow::Borrowed(name.get_or_init(|| decode().into())),
            None => Cow::Owned(decode()),
        })
    }
}

impl TokenName<'_> {
    /// The bytes of the text, where it is one.
    pub(super) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Text(text) if !text.contains(char::REPLACEMENT_CHARACTER) => Some(text.as_bytes()),
            _ => None,
        }
    }

    /// Characters that the token adds to a completion's text.
    pub(super) fn chars(&self) -> usize {
        match self {
            Self::Text(text) => text.chars().count(),
            Self::Id(_) => 0,
        }
    }
}

impl Serialize for TokenName<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Id(id) => serializer.collect_str(&format_args!("token_id:{id}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::bundled_pipeline;

    #[test]
    fn names_are_what_the_tokenizer_says_also_the_second_time_and_beyond_the_vocabulary() {
        let pipeline = bundled_pipeline();
        let names = TokenNames::new(Some(pipeline.clone()));
        for token in [0, 17, 300, 17, 1_000_000] {
            let text = pipeline.tokenizer().decode(&[token], false).expect("decodes");
            assert_eq!(names.name(token), TokenName::Text(text.into()), "{token}");
        }
        assert_eq!(names.name(1_000_000).bytes(), None);
        let without = TokenNames::new(None);
        assert_eq!(serde_json::to_value(without.name(5)).expect("JSON"), "token_id:5");
    }
}
