//! How the next token of a row is chosen: the parameters of a row, the random numbers, and the definition that the CPU
//! and CUDA share.
//!
//! Everything that decides a token after the logits is integer arithmetic, or floating-point arithmetic that rounds the
//! same way everywhere. So the same logits give the same token on every device, in any batch, in any order of summation.
//!
//! ```text
//!   x  logits, f32
//!   y  = x after the repetition, frequency and presence penalties; −∞ for ids that may not come yet
//!   u  = (max y − y) · log2(e) / temperature          distance from the best, in powers of two
//!   w  = ⌊2^44 · 2^−u⌋                                 weight, an integer; 0 from u = 45 on
//!   candidates: w > 0,  u ≤ −log2(min_p),  then top_k by u,  then top_p by w of those left
//!   token = the first candidate, in the order of ids, where the running sum of w exceeds ⌊uniform · Σ w⌋
//! ```
//!
//! At temperature 0 the token is the one with the greatest `y`, of equals the one with the lowest id.
//!
//! **What may surprise.** Of equals at the boundary of `top_k` or `top_p` all stay, so that the order of ids plays no part
//! in who is cut. A token whose probability is below 6·10⁻¹⁴ of the best one's is never drawn.

mod cpu;
mod philox;

pub use cpu::{Sampled, sample_row, top_logprobs};
pub use philox::{Philox, philox4x32_10};

/// How the next token of one row is chosen.
///
/// It says nothing about the token's place in its completion: that follows from the row's position and `prompt_len`, so
/// that it stays the same from step to step.
///
/// ```
/// use qwen3_model::sampling::Sampling;
///
/// let sampling = Sampling { temperature: 0.7, top_p: 0.9, seed: 1, prompt_len: 10, ..Sampling::GREEDY };
/// assert!(!sampling.uses_token_states());
/// assert_eq!(sampling.new_token_index(9), 0, "the last row of the prompt samples the first token");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Softmax temperature, at least 0; 0 takes the most likely token. On the CPU so do temperatures so small that f32 has no
    /// inverse for them, and what is no temperature: below 0 or NaN.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens and their equals; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the most likely token's probability, in [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of ids that occur in the prompt or the completion; above 0, 1 does
    /// nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of ids that occur in the completion.
    pub presence_penalty: f32,
    /// Subtracted from the logits of ids once for each time that they occur in the completion.
    pub frequency_penalty: f32,
    /// Key of the random numbers.
    pub seed: u64,
    /// Index of the completion among those of its prompt: with the same seed, each draws numbers of its own.
    pub completion: u32,
    /// Tokens of the prompt: a row at position `p` samples token number `p + 1 - prompt_len` of the completion.
    pub prompt_len: u32,
    /// Ids marked with [`TokenState::STOP`] may not come before this many tokens.
    pub min_new_tokens: u32,
    /// Most likely tokens to report with their log-probabilities, at most [`MAX_TOP_LOGPROBS`].
    pub top_logprobs: u32,
}

/// Most ids of a vocabulary that can be sampled from.
pub const MAX_VOCAB: usize = 1 << 19;

/// Most alternatives that a row can report.
pub const MAX_TOP_LOGPROBS: usize = 20;

impl Sampling {
    /// The token with the greatest logit; of equals the one with the lowest id.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
        completion: 0,
        prompt_len: 0,
        min_new_tokens: 0,
        top_logprobs: 0,
    };

    /// Whether logits depend on the tokens so far.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the row reads the [`TokenState`]s of its slot.
    pub fn uses_token_states(&self) -> bool {
        self.has_penalties() || self.min_new_tokens > 0
    }

    /// Number, from 0, of the token within its completion that a row at `position` samples.
    pub fn new_token_index(&self, position: usize) -> u32 {
        (position as u32).wrapping_add(1).wrapping_sub(self.prompt_len)
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// What is known about one id in one sequence: `count of the completion | STOP | PROMPT`, in 16 bits.
///
/// ```
/// use qwen3_model::sampling::TokenState;
///
/// let states = TokenState::of_sequence(&[4], &[6, 6], &[0]);
/// assert_eq!(states.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 4, 6]);
/// assert!(states[0].1.is_stop() && states[1].1.is_seen());
/// assert_eq!(states[2].1.count(), 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct TokenState(pub u16);

impl TokenState {
    /// The id occurs in the prompt.
    pub const PROMPT: u16 = 1 << 15;
    /// The id would end the completion.
    pub const STOP: u16 = 1 << 14;
    /// Bits of the count, which stays at its greatest value.
    pub const COUNT: u16 = Self::STOP - 1;

    /// How often the id occurs in the completion.
    pub fn count(self) -> u16 {
        self.0 & Self::COUNT
    }

    /// Whether the id occurs in the prompt or the completion.
    pub fn is_seen(self) -> bool {
        self.0 & !Self::STOP != 0
    }

    /// Whether the id would end the completion.
    pub fn is_stop(self) -> bool {
        self.0 & Self::STOP != 0
    }

    /// After one more occurrence in the completion.
    #[must_use]
    pub fn counted(self) -> Self {
        Self(if self.count() < Self::COUNT {
            self.0 + 1
        } else {
            self.0
        })
    }

    /// The states that differ from the default, for a sequence: its prompt, its completion so far, and the ids that would
    /// end it. By rising id.
    pub fn of_sequence(prompt: &[u32], completion: &[u32], stop_token_ids: &[u32]) -> Vec<(u32, TokenState)> {
        let mut states = std::collections::BTreeMap::<u32, TokenState>::new();
        for &id in prompt {
            states.entry(id).or_default().0 |= Self::PROMPT;
        }
        for &id in stop_token_ids {
            states.entry(id).or_default().0 |= Self::STOP;
        }
        for &id in completion {
            let state = states.entry(id).or_default();
            *state = state.counted();
        }
        states.into_iter().collect()
    }
}

/// One token with its log-probability at temperature 1 over the whole vocabulary.
///
/// ```
/// use qwen3_model::sampling::top_logprobs;
///
/// let best = top_logprobs(&[0.0, 1.0, 0.0], 1);
/// assert_eq!(best[0].token, 1);
/// assert!((best[0].logprob - (1f32.exp() / (2.0 + 1f32.exp())).ln()).abs() < 1e-6);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}
