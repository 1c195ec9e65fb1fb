//! What a user asks for: a prompt and how to continue it.

use serde_json::{Map, Value};

/// One prompt with its sampling parameters.
///
/// ```
/// use rollout_engine::Request;
/// let request = Request::text("2 + 2 =").max_new_tokens(16);
/// let chat = Request::user("What is 12 * 13?").max_new_tokens(200);
/// assert_eq!(chat.sampling.max_new_tokens, 200);
/// # let _ = request;
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// How to continue it.
    pub sampling: SamplingParams,
}

/// The three forms of a prompt.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text, tokenized as it is, without a template.
    Text(String),
    /// A conversation, rendered by the model's chat template.
    Chat(ChatPrompt),
    /// Token ids, used and echoed exactly.
    TokenIds(Vec<u32>),
}

/// A conversation and the variables of its chat template.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatPrompt {
    /// Objects with `role`, `content` and whatever else the template reads (`tool_calls`, `reasoning_content`, …).
    pub messages: Vec<Value>,
    /// Tool definitions, if any, in the form that the template expects.
    pub tools: Option<Vec<Value>>,
    /// Whether the rendered text ends with the opening of an assistant message. Default: true.
    pub add_generation_prompt: bool,
    /// Further template variables, such as `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl ChatPrompt {
    /// A conversation without tools, to be answered by the assistant.
    pub fn new(messages: Vec<Value>) -> Self {
        Self {
            messages,
            tools: None,
            add_generation_prompt: true,
            variables: Map::new(),
        }
    }
}

impl Request {
    /// Continues `text` as it is.
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Prompt::Text(text.into()))
    }

    /// Answers one user message through the chat template.
    pub fn user(content: impl Into<String>) -> Self {
        let content: String = content.into();
        Self::chat(ChatPrompt::new(vec![
            serde_json::json!({ "role": "user", "content": content }),
        ]))
    }

    /// Answers a conversation through the chat template.
    pub fn chat(chat: ChatPrompt) -> Self {
        Self::new(Prompt::Chat(chat))
    }

    /// Continues token ids.
    pub fn token_ids(ids: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::TokenIds(ids.into()))
    }

    /// A request with default sampling parameters.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::default(),
        }
    }

    /// Replaces all sampling parameters.
    #[must_use]
    pub fn sampling(mut self, sampling: SamplingParams) -> Self {
        self.sampling = sampling;
        self
    }

    /// Sets the most tokens to generate.
    #[must_use]
    pub fn max_new_tokens(mut self, max_new_tokens: usize) -> Self {
        self.sampling.max_new_tokens = max_new_tokens;
        self
    }
}

/// How tokens are chosen and when a completion ends.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate, at least 1. Default: 256. A completion also ends, with finish reason `length`,
    /// where the longest sequence allowed or the whole page pool ends.
    pub max_new_tokens: usize,
    /// Ids that end this completion, besides the model's own. Default: none.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the model's end-of-sequence ids (not past `stop_token_ids`). Default: false.
    pub ignore_eos: bool,
    /// Softmax temperature. Only 0, which means greedy, is supported so far; anything else is refused. Default: 0.
    pub temperature: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            temperature: 0.0,
        }
    }
}
