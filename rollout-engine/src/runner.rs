//! The seam between scheduling and arithmetic: a [`Runner`] executes steps, on any device.
//!
//! The scheduler describes a [`Step`] in terms of slots and positions; the runner keeps the weights, the KV
//! cache and, for every slot, the token it sampled last. Because of the latter the scheduler can submit the next
//! decode step before it has seen the result of the previous one.
//!
//! ```text
//!  scheduler   plan 1 ── submit ─┐  plan 2 ── submit ─┐ collect 1   plan 3 ── submit ─┐ collect 2
//!  runner                        └─ step 1 ───────────┴─ step 2 ──────────────────────┴─ step 3
//! ```
//!
//! Steps take effect in the order of submission, as on a CUDA stream. That alone makes it safe to free pages at
//! once when a result shows that a sequence has ended while a later step still writes one more token of it: the
//! pages' next owner writes in a step submitted after that.

use crate::Error;
use crate::adapters::{PolicyUpdate, base_policy};
use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::{PageCopy, PageTable, Slot};
use qwen3_model::MergeMode;

pub use qwen3_model::sampling::{Sampling, TokenLogprob, TokenState};

/// What a runner was built for. The scheduler takes the geometry of its page table from here.
///
/// ```
/// use rollout_engine::{FakeRunner, RunnerShape, Runner};
///
/// let shape = RunnerShape { max_batch_size: 8, ..FakeRunner::small_shape() };
/// assert_eq!(FakeRunner::new(shape).shape(), shape);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerShape {
    /// Ids the model knows: valid tokens are `0..vocab_size`.
    pub vocab_size: usize,
    /// Most tokens of prompt and completion together.
    pub max_seq_length: usize,
    /// Most sequences in one step. The page table has one slot more, for the reserved slot 0.
    pub max_batch_size: usize,
    /// Pages of the KV cache, the reserved page 0 included.
    pub n_pages: usize,
    /// Token positions per page.
    pub page_size: usize,
    /// Most steps that may be submitted and not yet collected, at least 1.
    pub max_in_flight: usize,
    /// Most prompt tokens in one step, at least 1: bounds the memory for activations.
    pub max_prefill_tokens: usize,
}

/// What a runner has to know of the tokens of a sequence before it samples for it.
///
/// ```
/// use paged_kv::Slot;
/// use rollout_engine::runner::{SlotTokens, Step, TokenState};
///
/// // A prompt of 4 and 6, and a completion that has begun with 6: a repetition penalty needs to know.
/// let states = TokenState::of_sequence(&[4, 6], &[6], &[]);
/// let tokens = SlotTokens { slot: Slot::new(1), states };
/// assert!(Step { slot_tokens: vec![tokens], ..Step::default() }.is_empty(), "nothing to compute yet");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SlotTokens {
    /// The sequence's slot.
    pub slot: Slot,
    /// The states of ids that differ from the default, by rising id. They replace all that was known for the slot.
    pub states: Vec<(u32, TokenState)>,
}

/// The policy of a sequence.
///
/// ```
/// use paged_kv::Slot;
/// use rollout_engine::runner::{SlotPolicy, Step};
///
/// // The sequence in slot 1 is computed under the second policy that is served.
/// let slot_policies = vec![SlotPolicy { slot: Slot::new(1), policy: Some(1) }];
/// assert!(Step { slot_policies, ..Step::default() }.is_empty(), "nothing to compute yet");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPolicy {
    /// The sequence's slot.
    pub slot: Slot,
    /// Which of the policies given to [`Runner::serve_policies`]; `None` for the base model.
    pub policy: Option<usize>,
}

/// Some or all of the uncomputed tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillChunk {
    /// The sequence's slot.
    pub slot: Slot,
    /// Logical position of the first token.
    pub start: usize,
    /// Number of tokens, taken in order from [`Step::token_ids`].
    pub len: usize,
    /// `Some` in the last chunk of a prompt: sample the next token from the last position and keep it for the slot.
    pub sample: Option<Sampling>,
}

/// One more token of a sequence. Its input is the token that the runner sampled last for the slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeRow {
    /// The sequence's slot.
    pub slot: Slot,
    /// Logical position of the input token.
    pub position: usize,
    /// How to choose the next token.
    pub sampling: Sampling,
}

/// Work for one pass through the model. A slot occurs at most once in it.
///
/// ```
/// use paged_kv::Slot;
/// use rollout_engine::runner::{DecodeRow, PrefillChunk, Sampling, Step};
///
/// // The last part of one prompt, and one more token of another sequence.
/// let step = Step {
///     token_ids: vec![5, 6, 7],
///     prefill: vec![PrefillChunk { slot: Slot::new(1), start: 8, len: 3, sample: Some(Sampling::GREEDY) }],
///     decode: vec![DecodeRow { slot: Slot::new(2), position: 20, sampling: Sampling::GREEDY }],
///     ..Step::default()
/// };
/// assert_eq!(step.sampled_rows(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Pages to copy, in this order, before anything else happens.
    pub copies: Vec<PageCopy>,
    /// For sequences that got a slot and whose sampling [uses it](Sampling::uses_token_states): the tokens known so far.
    /// From then on the runner counts the tokens that it samples for the slot.
    pub slot_tokens: Vec<SlotTokens>,
    /// For sequences that got a slot while policies are served by name: which of these they are computed under, until the
    /// slot is given to another.
    pub slot_policies: Vec<SlotPolicy>,
    /// The tokens of all prefill chunks, one chunk after the other.
    pub token_ids: Vec<u32>,
    /// Prompt work.
    pub prefill: Vec<PrefillChunk>,
    /// Decode work.
    pub decode: Vec<DecodeRow>,
}

impl Step {
    /// Rows that sample a token: the chunks with `sample`, in order, then the decode rows.
    pub fn sampled_rows(&self) -> usize {
        self.prefill.iter().filter(|chunk| chunk.sample.is_some()).count() + self.decode.len()
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty()
    }
}

/// One sampled token.
///
/// ```
/// use rollout_engine::TokenLogprob;
/// use rollout_engine::runner::SampledToken;
///
/// let sampled = SampledToken {
///     token: 9,
///     logprob: 0.25f32.ln(),        // of the policy
///     sampled_logprob: 0.5f32.ln(), // as drawn: half of what top-k = 2 left
///     top_logprobs: vec![TokenLogprob { token: 9, logprob: 0.25f32.ln() }],
/// };
/// assert!(sampled.logprob < sampled.sampled_logprob);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledToken {
    /// The token.
    pub token: u32,
    /// Natural logarithm of the probability that the policy gives it: at temperature 1, over the whole vocabulary. NaN
    /// means that the row's logits were not finite; the scheduler then fails that request and leaves the others alone.
    pub logprob: f32,
    /// Natural logarithm of the probability that it was drawn with: after penalties, temperature and truncation. 0 at
    /// temperature 0. NaN is treated as in `logprob`.
    pub sampled_logprob: f32,
    /// The most likely tokens of the policy, if any were asked for: the most likely first, of equals the lowest id.
    pub top_logprobs: Vec<TokenLogprob>,
}

/// Bytes that a runner holds, by what for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunnerMemory {
    /// Weights, each once.
    pub weight_bytes: u64,
    /// The second copy of weights that adapters target.
    pub adapter_bytes: u64,
    /// KV cache, all pages.
    pub kv_bytes: u64,
}

/// Executes steps. Implement it to drive another device or model from the same scheduler.
///
/// ```
/// use paged_kv::PageTable;
/// use rollout_engine::runner::{Runner, RunnerMemory, SampledToken, Step};
/// use rollout_engine::{Engine, Error, FakeRunner, Request, RunnerShape};
///
/// /// Samples the number of the step.
/// struct Counting(u32, usize);
///
/// impl Runner for Counting {
///     fn shape(&self) -> RunnerShape {
///         FakeRunner::small_shape()
///     }
///     fn device(&self) -> String {
///         "a counter".into()
///     }
///     fn memory(&self) -> RunnerMemory {
///         RunnerMemory::default()
///     }
///     fn submit(&mut self, step: &Step, _: &mut PageTable) -> Result<(), Error> {
///         (self.0, self.1) = (self.0 + 1, step.sampled_rows());
///         Ok(())
///     }
///     fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
///         Ok(vec![SampledToken { token: self.0, ..SampledToken::default() }; self.1])
///     }
///     fn reset(&mut self) {}
/// }
///
/// let mut engine = Engine::with_runner(Counting(0, 0), vec![], None)?;
/// let completion = engine.generate(&[Request::token_ids([1, 2]).max_new_tokens(3)])?.remove(0)?;
/// assert_eq!(completion.token_ids, [1, 2, 3]);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
pub trait Runner {
    /// What the runner was built for. Does not change.
    fn shape(&self) -> RunnerShape;

    /// Device in words, for reports, such as `cpu (8 threads)`.
    fn device(&self) -> String;

    /// Bytes held.
    fn memory(&self) -> RunnerMemory;

    /// Most prompt tokens, at least 1, in a step that `decoding` sequences under way decode in, if these are not to wait
    /// long for it: what [`Scheduler::favor_latency`](crate::Scheduler::favor_latency) goes by. Default: no fewer than in
    /// any other step.
    fn mixed_prefill_tokens(&self, decoding: usize) -> usize {
        let _ = decoding;
        self.shape().max_prefill_tokens
    }

    /// Makes ready what steps of prompts and decode rows within [`mixed_prefill_tokens`](Runner::mixed_prefill_tokens) need,
    /// so that none of them stops for it. Called only while no step is uncollected. Default: nothing.
    ///
    /// # Errors
    /// Those of the device; steps then go on as without.
    fn prepare_mixed_steps(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Starts a step. `pages` already covers every position of it, and its rows are to be read (or mirrored) now:
    /// the scheduler may change them as soon as this returns. Called only while fewer than `max_in_flight` steps
    /// are uncollected.
    ///
    /// # Errors
    /// The step could not be run. The scheduler then gives up all unfinished requests and calls [`Runner::reset`].
    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error>;

    /// Waits for the oldest uncollected step and gives its sampled tokens, in the order of
    /// [`Step::sampled_rows`].
    ///
    /// # Errors
    /// As for [`Runner::submit`].
    fn collect(&mut self) -> Result<Vec<SampledToken>, Error>;

    /// Forgets all uncollected steps.
    fn reset(&mut self);

    /// The policy in force.
    fn policy(&self) -> PolicyVersion {
        base_policy()
    }

    /// Makes `active` the adapters in force, replacing those before; none is the base model. Called only while no
    /// step is uncollected.
    ///
    /// # Errors
    /// [`Error::AdaptersUnsupported`], as in this default, and errors of the adapters and the device. The previous
    /// policy is then fully in force.
    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        let _ = active;
        Err(Error::AdaptersUnsupported {
            device: self.device(),
            mode,
        })
    }

    /// Serves `policies` side by side, each a set of adapters at run time, in place of all adapters before. Steps say which
    /// policy each sequence is computed under: see [`Step::slot_policies`]. Called only while no step is uncollected.
    ///
    /// # Errors
    /// As for [`Runner::set_adapters`]; the default is that nothing of the kind can be done.
    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        let _ = policies;
        Err(Error::AdaptersUnsupported {
            device: self.device(),
            mode: MergeMode::Unmerged,
        })
    }

    /// SHA-256 over all parameters of the base model, sorted by name, each as its name's bytes and then its raw
    /// bytes.
    ///
    /// # Errors
    /// [`Error::AdaptersUnsupported`], as in this default; errors of the device.
    fn base_sha256(&mut self) -> Result<[u8; 32], Error> {
        Err(Error::AdaptersUnsupported {
            device: self.device(),
            mode: MergeMode::Merged,
        })
    }

    /// The same over the parameters that steps are computed with.
    ///
    /// # Errors
    /// As for [`Runner::base_sha256`].
    fn served_sha256(&mut self) -> Result<[u8; 32], Error> {
        self.base_sha256()
    }
}

impl<R: Runner + ?Sized> Runner for Box<R> {
    fn shape(&self) -> RunnerShape {
        (**self).shape()
    }

    fn device(&self) -> String {
        (**self).device()
    }

    fn memory(&self) -> RunnerMemory {
        (**self).memory()
    }

    fn mixed_prefill_tokens(&self, decoding: usize) -> usize {
        (**self).mixed_prefill_tokens(decoding)
    }

    fn prepare_mixed_steps(&mut self) -> Result<(), Error> {
        (**self).prepare_mixed_steps()
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        (**self).submit(step, pages)
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        (**self).collect()
    }

    fn reset(&mut self) {
        (**self).reset();
    }

    fn policy(&self) -> PolicyVersion {
        (**self).policy()
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        (**self).set_adapters(active, mode)
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        (**self).serve_policies(policies)
    }

    fn base_sha256(&mut self) -> Result<[u8; 32], Error> {
        (**self).base_sha256()
    }

    fn served_sha256(&mut self) -> Result<[u8; 32], Error> {
        (**self).served_sha256()
    }
}
