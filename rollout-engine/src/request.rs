//! What a user asks for: a prompt and how to continue it.

use qwen3_model::sampling::MAX_TOP_LOGPROBS;
use serde_json::{Map, Value};

use crate::Error;
use crate::runner::Sampling;

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
    /// Name of the policy to sample from, of those that [`Engine::serve_policies`](crate::Engine::serve_policies) serves.
    /// Default: none, the policy in force for requests without a name.
    pub policy: Option<String>,
    /// Completions of the prompt, at least 1. Default: 1. More than one share the prompt's pages and are numbered from 0.
    pub n: usize,
}

/// The three forms of a prompt.
///
/// ```
/// use rollout_engine::{ChatPrompt, Prompt, Request};
///
/// let question = serde_json::json!({ "role": "user", "content": "What is 2 + 2?" });
/// let mut chat = ChatPrompt::new(vec![question]);
/// chat.variables.insert("enable_thinking".into(), false.into());
/// assert_eq!(Request::chat(chat.clone()).prompt, Prompt::Chat(chat));
/// assert_eq!(Request::token_ids([1, 2]).prompt, Prompt::TokenIds(vec![1, 2]));
/// ```
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
    /// Further template variables, such as `enable_thinking`; none with the name of what the fields above set.
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
            policy: None,
            n: 1,
        }
    }

    /// Names the policy to sample from.
    #[must_use]
    pub fn policy(mut self, name: impl Into<String>) -> Self {
        self.policy = Some(name.into());
        self
    }

    /// Sets the number of completions. More than one come from [`Engine::generate_groups`](crate::Engine::generate_groups).
    #[must_use]
    pub fn n(mut self, n: usize) -> Self {
        self.n = n;
        self
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

    /// Sets the softmax temperature; 0 is greedy.
    #[must_use]
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.sampling.temperature = temperature;
        self
    }

    /// Sets the seed of the request's random numbers.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.sampling.seed = Some(seed);
        self
    }
}

/// How tokens are chosen and when a completion ends.
///
/// A token is chosen in these steps: ids that may not come yet (`min_new_tokens`) are banned; `repetition_penalty`,
/// `frequency_penalty` and `presence_penalty` change the logits; `temperature` divides them; `min_p`, `top_k` and `top_p`
/// cut, in this order; one of the tokens left is drawn. [`qwen3_model::sampling`] has the exact definition.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate, at least 1. Default: 256. A completion also ends, with finish reason `length`,
    /// where the longest sequence allowed or the whole page pool ends.
    pub max_new_tokens: usize,
    /// Fewest tokens to generate: before, ids that would end the completion have probability 0, and stop strings are not
    /// looked for. Default: 0.
    pub min_new_tokens: usize,
    /// Softmax temperature: 0, which means greedy, or from 0.001. Default: 0.
    pub temperature: f32,
    /// Keep only the `top_k` most likely tokens; 0 and -1 keep all. Equals of the last one stay too. Default: 0.
    pub top_k: i64,
    /// Keep only the most likely tokens that together reach this probability, in (0, 1]; 1 keeps all. Equals of the last
    /// one stay too. Default: 1.
    pub top_p: f32,
    /// Keep only tokens with at least this fraction of the most likely token's probability, in [0, 1]; 0 keeps all, 1
    /// the most likely and its equals. Default: 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that occur in the prompt or the completion so far;
    /// from 0.001 to 1000, 1 does nothing. Default: 1.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the completion so far, in [-2, 2]. Default: 0.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens once per occurrence in the completion so far, in [-2, 2]. Default: 0.
    pub frequency_penalty: f32,
    /// Seed of the random numbers: the same request gives the same tokens whatever else the engine does. Without one, the
    /// engine derives it from its own seed and the request's number. Default: none.
    pub seed: Option<u64>,
    /// Ids that end this completion, besides the model's own. Default: none.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end this completion where they first occur; none of them empty. Need a tokenizer. Default: none.
    pub stop: Vec<String>,
    /// Leave the stop string at the end of the text. Default: false. The token ids always reach to the token that
    /// completed it.
    pub include_stop_str_in_output: bool,
    /// Go on past the model's end-of-sequence ids (not past `stop_token_ids`). Default: false.
    pub ignore_eos: bool,
    /// For every token, report so many of the most likely ones, at most [`MAX_TOP_LOGPROBS`]. Default: 0.
    pub top_logprobs: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_new_tokens: 256,
            min_new_tokens: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            top_logprobs: 0,
        }
    }
}

impl SamplingParams {
    /// Checks everything that does not depend on the model.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] and [`Error::NoNewTokens`].
    pub fn validate(&self) -> Result<(), Error> {
        let check = |good: bool, parameter, value: &dyn std::fmt::Display, advice| match good {
            true => Ok(()),
            false => Err(Error::InvalidParameter {
                parameter,
                value: value.to_string(),
                advice,
            }),
        };
        if self.max_new_tokens == 0 {
            return Err(Error::NoNewTokens);
        }
        check(
            self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            &self.min_new_tokens,
            "at most max_new_tokens",
        )?;
        check(
            self.temperature == 0.0 || (0.001..f32::INFINITY).contains(&self.temperature),
            "temperature",
            &self.temperature,
            "0 for greedy decoding, or a number from 0.001",
        )?;
        check(
            (-1..=i64::from(u32::MAX)).contains(&self.top_k),
            "top_k",
            &self.top_k,
            "0 or -1 for all tokens, or how many to keep",
        )?;
        check(
            self.top_p > 0.0 && self.top_p <= 1.0,
            "top_p",
            &self.top_p,
            "above 0 and at most 1",
        )?;
        check(
            (0.0..=1.0).contains(&self.min_p),
            "min_p",
            &self.min_p,
            "from 0 to 1",
        )?;
        check(
            (0.001..=1000.0).contains(&self.repetition_penalty),
            "repetition_penalty",
            &self.repetition_penalty,
            "a number from 0.001 to 1000; 1 does nothing",
        )?;
        for (parameter, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check((-2.0..=2.0).contains(&value), parameter, &value, "from -2 to 2")?;
        }
        check(
            self.stop.iter().all(|text| !text.is_empty()),
            "stop",
            &"\"\"",
            "an empty text would end every completion at once",
        )?;
        check(
            self.top_logprobs <= MAX_TOP_LOGPROBS,
            "top_logprobs",
            &self.top_logprobs,
            "at most 20",
        )
    }

    /// What a runner needs to know of these parameters, for one completion of a prompt.
    ///
    /// `seed` stands in for a request without one; `completion` is the index among the completions of the prompt.
    pub(crate) fn for_row(&self, seed: u64, completion: usize, prompt_len: usize) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.unwrap_or(seed),
            completion: completion as u32,
            prompt_len: prompt_len as u32,
            min_new_tokens: u32::try_from(self.min_new_tokens).unwrap_or(u32::MAX),
            top_logprobs: self.top_logprobs as u32,
        }
    }
}
