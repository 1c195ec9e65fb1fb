//! From a prompt in any form to token ids, and from new tokens to text.

use std::path::Path;

use super::{ChatTemplates, Tokenizer};
use crate::Error;
use crate::request::Prompt;

/// Most bytes of text that one token can stand for: twice the longest token of Qwen's vocabulary (128 spaces), since
/// normalisation may shorten a text before it is cut into tokens.
const MAX_BYTES_PER_TOKEN: usize = 256;

/// Tokenizer and chat templates of one model. Needs no engine: a server can use it on its own threads.
///
/// ```
/// use rollout_engine::{Request, bundled, text::TextPipeline};
///
/// let text = TextPipeline::from_dir(bundled::model_dir()?)?.expect("has a tokenizer");
/// let ids = text.encode(&Request::text("Count from 5 to 9 by 1.").prompt)?;
/// assert_eq!(text.decode(&ids)?, "Count from 5 to 9 by 1.");
/// let chat = text.encode(&Request::user("Count from 5 to 9 by 1.").prompt)?; // through the model's chat template
/// assert!(chat.len() > ids.len());
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct TextPipeline {
    tokenizer: Tokenizer,
    chat_templates: ChatTemplates,
}

impl TextPipeline {
    /// Reads `tokenizer.json` and the chat template of a model folder. `None` if the folder has no tokenizer.
    ///
    /// # Errors
    /// A file cannot be read or is not what it should be; the message names it.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Option<Self>, Error> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        Ok(Some(Self {
            tokenizer: Tokenizer::from_file(path)?,
            chat_templates: ChatTemplates::from_dir(dir)?,
        }))
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat templates; empty if the model has none.
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.chat_templates
    }

    /// The token ids of a prompt.
    ///
    /// # Errors
    /// The tokenizer or the chat template refused the prompt, or there is no chat template for a conversation.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, Error> {
        self.encode_within(prompt, usize::MAX)
    }

    /// As [`TextPipeline::encode`], for a sequence of at most `max_tokens` tokens: a text that is too long for any
    /// such sequence is refused before time and memory go into tokenizing it. One that is tokenized may still have
    /// more tokens.
    ///
    /// # Errors
    /// As for `encode`, and [`Error::PromptTextTooLong`] beyond 256 bytes a token.
    pub fn encode_within(&self, prompt: &Prompt, max_tokens: usize) -> Result<Vec<u32>, Error> {
        let max_bytes = max_tokens.saturating_mul(MAX_BYTES_PER_TOKEN);
        let check = |text: &str| match text.len() {
            bytes if bytes > max_bytes => Err(Error::PromptTextTooLong {
                bytes,
                max_bytes,
                max_tokens,
            }),
            _ => Ok(()),
        };
        match prompt {
            Prompt::Text(text) => {
                check(text)?;
                self.tokenizer.encode(text, true)
            }
            Prompt::Chat(chat) => {
                let text = self.chat_templates.render(chat)?;
                check(&text)?;
                self.tokenizer.encode(&text, false)
            }
            Prompt::TokenIds(ids) => Ok(ids.clone()),
        }
    }

    /// The text of a completion: its tokens without special ones.
    ///
    /// # Errors
    /// The tokenizer's decoder failed.
    pub fn decode(&self, token_ids: &[u32]) -> Result<String, Error> {
        self.tokenizer.decode(token_ids, true)
    }
}
