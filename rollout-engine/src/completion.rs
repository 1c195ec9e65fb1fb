//! What comes back: tokens, their log-probabilities, and why the completion ended.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::adapters::PolicySpan;
use crate::runner::{SampledToken, TokenLogprob};

/// Names one request of an engine. Never used twice by the same engine.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Request, RequestId};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let first: RequestId = engine.submit(&Request::text("Count"))?;
/// let second = engine.submit(&Request::text("Count"))?;
/// assert!(first < second && second.number() == first.number() + 1);
/// assert!(engine.cancel(first) && !engine.cancel(first));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct RequestId(pub(crate) u64);

impl RequestId {
    /// Running number of the request, in the order of submission, from 0.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Why a completion ended.
///
/// ```
/// use rollout_engine::FinishReason;
///
/// assert_eq!(serde_json::to_string(&FinishReason::Stop).unwrap(), r#""stop""#); // as in OpenAI's API
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FinishReason {
    /// An end-of-sequence id of the model or a stop id of the request, which is the last token, or a stop string, which the
    /// last token completed.
    Stop,
    /// `max_new_tokens`, the maximum sequence length or the page pool was reached.
    Length,
}

/// What ended a completion with [`FinishReason::Stop`].
///
/// ```
/// use rollout_engine::StopReason;
///
/// // A number or a text, as in vLLM's API.
/// assert_eq!(serde_json::to_string(&StopReason::TokenId(7)).unwrap(), "7");
/// assert_eq!(serde_json::to_string(&StopReason::Text("Stop".into())).unwrap(), "\"Stop\"");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StopReason {
    /// This id, one of the model's end-of-sequence ids or of the request's stop ids.
    TokenId(u32),
    /// This stop string.
    Text(String),
}

/// A finished request, in tokens.
///
/// ```
/// use rollout_engine::{Event, FakeRunner, SamplingParams, Scheduler, TokenCompletion};
///
/// let mut scheduler = Scheduler::new(FakeRunner::new(FakeRunner::small_shape()), vec![])?;
/// scheduler.submit(vec![1, 2, 3], &SamplingParams { max_new_tokens: 2, ..SamplingParams::default() })?;
/// let mut events = Vec::new();
/// while scheduler.has_unfinished() {
///     scheduler.step(&mut events)?;
/// }
/// let Some(Event::Finished { result, .. }) = events.pop() else { panic!("it is finished") };
/// let completion: TokenCompletion = result?;
/// assert_eq!((completion.prompt_token_ids, completion.token_ids.len()), (vec![1, 2, 3], 2));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TokenCompletion {
    /// Number of the completion among those of its request, from 0.
    pub index: usize,
    /// The prompt, exactly as it was given to the model.
    pub prompt_token_ids: Vec<u32>,
    /// The new tokens, a stop id included.
    pub token_ids: Vec<u32>,
    /// The text without special tokens up to the stop string, if one ended it.
    pub text: Option<String>,
    /// For each new token the natural logarithm of the probability that the policy gave it: at temperature 1, over the
    /// whole vocabulary.
    pub logprobs: Vec<f32>,
    /// For each new token the natural logarithm of the probability that it was drawn with: after penalties, temperature
    /// and truncation. 0 at temperature 0.
    pub sampled_logprobs: Vec<f32>,
    /// For each new token the most likely tokens of the policy, if any were asked for; else empty.
    pub top_logprobs: Vec<Vec<TokenLogprob>>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What ended it, if not a limit.
    pub stop_reason: Option<StopReason>,
    /// The policies (base weights and adapters) under which it was sampled, in order: one, or more if the policy
    /// changed meanwhile.
    pub policies: Vec<PolicySpan>,
}

/// A finished request, with its text.
///
/// ```
/// use rollout_engine::{Completion, DeviceChoice, Engine, FinishReason, Request};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// let completion: Completion = engine.generate(&[Request::text("Count").max_new_tokens(3)])?.remove(0)?;
/// assert_eq!((completion.token_ids.len(), completion.finish_reason), (3, FinishReason::Length));
/// assert_eq!(completion.logprobs.len(), 3);
/// assert!(completion.logprobs.iter().all(|logprob| *logprob <= 0.0));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Number of the completion among those of its request, from 0.
    pub index: usize,
    /// The prompt, exactly as it was given to the model.
    pub prompt_token_ids: Vec<u32>,
    /// The new tokens, a stop id included.
    pub token_ids: Vec<u32>,
    /// The new tokens as text without special tokens, up to a stop string; empty if the engine has no tokenizer. An id
    /// that the tokenizer does not know becomes U+FFFD.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What ended it, if not a limit.
    pub stop_reason: Option<StopReason>,
    /// For each new token the natural logarithm of the probability that the policy gave it: at temperature 1, over the
    /// whole vocabulary.
    pub logprobs: Vec<f32>,
    /// For each new token the natural logarithm of the probability that it was drawn with: after penalties, temperature
    /// and truncation. 0 at temperature 0.
    pub sampled_logprobs: Vec<f32>,
    /// For each new token the most likely tokens of the policy, if any were asked for; else empty.
    pub top_logprobs: Vec<Vec<TokenLogprob>>,
    /// The policies (base weights and adapters) under which it was sampled, in order: one, or more if the policy
    /// changed meanwhile.
    pub policies: Vec<PolicySpan>,
}

/// Something that a step brought about.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<C = Completion> {
    /// A completion got one more token. Never repeated, whatever happens to the request.
    Token {
        /// The request.
        request: RequestId,
        /// Number of the completion among those of the request.
        index: usize,
        /// The token and its log-probability.
        token: SampledToken,
    },
    /// A completion is over; with it the request, unless it asked for more than one.
    Finished {
        /// The request.
        request: RequestId,
        /// Number of the completion among those of the request.
        index: usize,
        /// Its completion, or why it alone failed.
        result: Result<C, Error>,
    },
    /// The last completion of a request that asked for more than one is over, its event given just before.
    GroupFinished {
        /// The request.
        request: RequestId,
    },
}

impl<C> Event<C> {
    /// The request that the event is about.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Token { request, .. }
            | Self::Finished { request, .. }
            | Self::GroupFinished { request } => *request,
        }
    }
}
