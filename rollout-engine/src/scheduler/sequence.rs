//! One request on its way through the scheduler.

use lora_merge::PolicyVersion;
use paged_kv::Slot;

use crate::Error;
use crate::adapters::PolicySpan;
use crate::completion::{FinishReason, RequestId, StopReason, TokenCompletion};
use crate::runner::{SampledToken, Sampling, SlotTokens, TokenLogprob, TokenState};
use crate::text::StopText;

/// One completion of one request. In order of submission, then of siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SequenceId {
    pub(super) request: RequestId,
    /// Number of the completion among those of its request.
    pub(super) index: usize,
}

/// ```text
///   token_ids:   prompt            | new tokens known        | sampled, not collected
///                0 .. prompt_len   .. token_ids.len()        .. + in_flight
///   computed:    ───────── KV written or under way ──────▶
/// ```
#[derive(Debug)]
pub(super) struct Sequence {
    /// Prompt, then the new tokens known so far.
    pub(super) token_ids: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Of the new tokens.
    logprobs: Vec<f32>,
    sampled_logprobs: Vec<f32>,
    top_logprobs: Vec<Vec<TokenLogprob>>,
    /// How the next token is chosen.
    pub(super) sampling: Sampling,
    /// Most tokens of prompt and completion together.
    pub(super) max_tokens: usize,
    stop_token_ids: Vec<u32>,
    stop_text: Option<StopText>,
    /// What ended the sequence, with the text up to there if that is a stop string.
    stopped: Option<(StopReason, Option<String>)>,
    policies: Vec<PolicySpan>,
    /// Which of the policies that are served by name it is sampled under.
    pub(super) policy: Option<usize>,
    /// Set while running.
    pub(super) slot: Option<Slot>,
    /// Positions whose KV has been written by submitted steps.
    pub(super) computed: usize,
    /// Tokens sampled by submitted steps and not collected.
    pub(super) in_flight: usize,
    /// Whether known tokens remain to be computed before the sequence can decode.
    pub(super) prefilling: bool,
    /// How many later requests were admitted while this one waited for pages.
    pub(super) overtaken: usize,
    /// Positions that were computed before the sequence lost a slot.
    pub(super) lost: usize,
}

impl Sequence {
    /// `stop_token_ids` and `stop_text` end the sequence, as does the length `max_tokens`.
    pub(super) fn new(
        prompt: Vec<u32>,
        max_tokens: usize,
        sampling: Sampling,
        stop_token_ids: Vec<u32>,
        stop_text: Option<StopText>,
    ) -> Self {
        Self {
            prompt_len: prompt.len(),
            token_ids: prompt,
            logprobs: Vec::new(),
            sampled_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            sampling,
            max_tokens,
            stop_token_ids,
            stop_text,
            stopped: None,
            policies: Vec::new(),
            policy: None,
            slot: None,
            computed: 0,
            in_flight: 0,
            prefilling: true,
            overtaken: 0,
            lost: 0,
        }
    }

    /// Takes a token that was sampled under a policy.
    ///
    /// # Errors
    /// The tokenizer failed on text that is searched for stop strings.
    pub(super) fn push(&mut self, token: SampledToken, version: PolicyVersion) -> Result<(), Error> {
        if self.policies.last().map(|span| span.version) != Some(version) {
            self.policies.push(PolicySpan {
                first_token: self.token_ids.len() - self.prompt_len,
                version,
            });
        }
        self.token_ids.push(token.token);
        self.logprobs.push(token.logprob);
        self.sampled_logprobs.push(token.sampled_logprob);
        if self.sampling.top_logprobs > 0 {
            self.top_logprobs.push(token.top_logprobs);
        }
        self.in_flight -= 1;
        let may_stop = self.token_ids.len() - self.prompt_len > self.sampling.min_new_tokens as usize;
        if self.stop_token_ids.contains(&token.token) {
            self.stopped = Some((StopReason::TokenId(token.token), None));
        } else if let Some(stop_text) = &mut self.stop_text
            && let Some(found) = stop_text.push(token.token, may_stop)?
        {
            self.stopped = Some((StopReason::Text(found.stop), Some(found.text)));
        }
        Ok(())
    }

    /// Why no token could be chosen after the latest one, from what was reported instead, which has a NaN.
    pub(super) fn nothing_to_choose(&self, token: &SampledToken) -> Error {
        let new_token = self.token_ids.len() - self.prompt_len;
        let min_new_tokens = self.sampling.min_new_tokens as usize;
        // The policy's own probability is a number: only what the request asks for has left nothing.
        match !token.logprob.is_nan() && new_token < min_new_tokens {
            true => Error::EveryTokenBanned {
                new_token,
                min_new_tokens,
            },
            false => Error::NonFiniteLogits { new_token },
        }
    }

    /// The states of all ids that occur or would end the sequence, for a runner that knows nothing of it yet. `None` if
    /// sampling does not ask for them.
    pub(super) fn slot_tokens(&self) -> Option<SlotTokens> {
        if !self.sampling.uses_token_states() {
            return None;
        }
        let (prompt, completion) = self.token_ids.split_at(self.prompt_len);
        Some(SlotTokens {
            slot: self.slot?,
            states: TokenState::of_sequence(prompt, completion, &self.stop_token_ids),
        })
    }

    /// Whether any token was sampled.
    pub(super) fn has_new_tokens(&self) -> bool {
        self.token_ids.len() > self.prompt_len
    }

    /// Whether a decode row can be submitted: its input token is known or under way, and its output is wanted.
    pub(super) fn can_decode(&self) -> bool {
        !self.prefilling && self.token_ids.len() + self.in_flight < self.max_tokens
    }

    /// Pages that the sequence will own in the end if no stop id comes: its last token is never computed.
    pub(super) fn pages_at_end(&self, page_size: usize) -> usize {
        (self.max_tokens - 1).div_ceil(page_size)
    }

    /// Why the sequence is over after its latest token, if it is.
    pub(super) fn finish_reason(&self) -> Option<FinishReason> {
        if self.stopped.is_some() {
            Some(FinishReason::Stop)
        } else if self.token_ids.len() >= self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// Forgets everything that was computed, to compute it anew. To be called when nothing of the sequence is in flight.
    pub(super) fn restart(&mut self) {
        self.slot = None;
        self.lost = self.lost.max(self.computed);
        self.computed = 0;
        self.prefilling = true;
    }

    /// The tokens that are known and whose keys and values steps have written or will have, in order.
    pub(super) fn computed_tokens(&self) -> &[u32] {
        &self.token_ids[..self.computed.min(self.token_ids.len())]
    }

    pub(super) fn into_completion(mut self, index: usize, finish_reason: FinishReason) -> TokenCompletion {
        let token_ids = self.token_ids.split_off(self.prompt_len);
        let (stop_reason, text) = match self.stopped {
            Some((reason, text)) => (Some(reason), text),
            None => (None, None),
        };
        TokenCompletion {
            index,
            prompt_token_ids: self.token_ids,
            token_ids,
            text,
            logprobs: self.logprobs,
            sampled_logprobs: self.sampled_logprobs,
            top_logprobs: self.top_logprobs,
            finish_reason,
            stop_reason,
            policies: self.policies,
        }
    }
}
