//! The tokenizer of a model folder (`tokenizer.json`).

use std::path::Path;

use crate::Error;

/// Turns text into token ids and back, as the fast tokenizers of transformers do.
///
/// ```
/// use rollout_engine::bundled;
/// use rollout_engine::text::Tokenizer;
///
/// let tokenizer = Tokenizer::from_file(bundled::model_dir()?.join("tokenizer.json"))?;
/// let ids = tokenizer.encode("Count", false)?;
/// assert_eq!(tokenizer.decode(&ids, true)?, "Count");
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read or is not a tokenizer; the message names it.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| Error::invalid_file(path, format!("not a tokenizer: {e}")))?;
        // Training-time settings that some folders still carry would cut or pad prompts.
        inner
            .with_truncation(None)
            .map_err(|e| Error::invalid_file(path, format!("cannot switch truncation off: {e}")))?
            .with_padding(None);
        Ok(Self { inner })
    }

    /// Number of ids that have a token, added ones included. A model's vocabulary may be larger.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token, if there is such a token.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The ids of `text`. `add_special_tokens` adds what the tokenizer puts around a text (nothing for Qwen3);
    /// leave it off for text that a chat template has rendered.
    ///
    /// # Errors
    /// The tokenizer refused the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|e| Error::Tokenizer {
                reason: e.to_string(),
            })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD, and so does each id that has no token (a model's
    /// vocabulary is often padded beyond its tokenizer's), so that nothing sampled vanishes.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, Error> {
        let mut text = String::new();
        let mut rest = ids;
        while !rest.is_empty() {
            let known = rest
                .iter()
                .take_while(|&&id| self.inner.id_to_token(id).is_some())
                .count();
            let (run, after) = rest.split_at(known);
            if !run.is_empty() {
                let decoded = self.inner.decode(run, skip_special_tokens);
                text.push_str(&decoded.map_err(|e| Error::Tokenizer {
                    reason: e.to_string(),
                })?);
            }
            rest = match after {
                [] => after,
                [_unknown, after @ ..] => {
                    text.push(char::REPLACEMENT_CHARACTER);
                    after
                }
            };
        }
        Ok(text)
    }
}
