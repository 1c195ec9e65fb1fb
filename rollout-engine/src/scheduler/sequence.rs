//! One request on its way through the scheduler.

use lora_merge::PolicyVersion;
use paged_kv::Slot;

use crate::adapters::PolicySpan;
use crate::completion::{FinishReason, TokenCompletion};
use crate::runner::SampledToken;

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
    /// Most tokens of prompt and completion together.
    pub(super) max_tokens: usize,
    stop_token_ids: Vec<u32>,
    policies: Vec<PolicySpan>,
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
    /// Whether the sequence had a slot before and lost it.
    pub(super) preempted: bool,
}

impl Sequence {
    pub(super) fn new(prompt: Vec<u32>, max_tokens: usize, stop_token_ids: Vec<u32>) -> Self {
        Self {
            prompt_len: prompt.len(),
            token_ids: prompt,
            logprobs: Vec::new(),
            max_tokens,
            stop_token_ids,
            policies: Vec::new(),
            slot: None,
            computed: 0,
            in_flight: 0,
            prefilling: true,
            overtaken: 0,
            preempted: false,
        }
    }

    /// Takes a token that was sampled under a policy.
    pub(super) fn push(&mut self, token: SampledToken, version: PolicyVersion) {
        if self.policies.last().map(|span| span.version) != Some(version) {
            self.policies.push(PolicySpan {
                first_token: self.token_ids.len() - self.prompt_len,
                version,
            });
        }
        self.token_ids.push(token.token);
        self.logprobs.push(token.logprob);
        self.in_flight -= 1;
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
        if self
            .token_ids
            .last()
            .is_some_and(|last| self.stop_token_ids.contains(last))
        {
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
        self.computed = 0;
        self.prefilling = true;
        self.preempted = true;
    }

    pub(super) fn into_completion(mut self, finish_reason: FinishReason) -> TokenCompletion {
        let token_ids = self.token_ids.split_off(self.prompt_len);
        TokenCompletion {
            prompt_token_ids: self.token_ids,
            token_ids,
            logprobs: self.logprobs,
            finish_reason,
            policies: self.policies,
        }
    }
}
