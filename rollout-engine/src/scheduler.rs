//! Continuous batching: which tokens of which sequences go into the next step.
//!
//! Invariants:
//! * A sequence with a slot owns pages for every position submitted so far. A page that it writes is its own; full pages
//!   may be shared with sequences that have the same tokens up to there.
//! * Older requests go first. When pages run out the newest running sequence gives its pages back and waits; it
//!   resumes from its prompt and the tokens it already has, so its completion is the same as if undisturbed.
//! * Every step makes progress: a request is admitted only if it fits the empty pool, and its length is capped at the
//!   pool's, so the oldest one can always go on.
//!
//! A sequence is one completion; a request may ask for several. They share the pages of their prompt, and a prefix index can
//! keep pages for later requests: see [`Scheduler::submit_group`] and [`Scheduler::set_prefix_cache`].
//!
//! What may surprise: a request that reaches the size of the whole page pool ends there with finish reason
//! `length`, as at the maximum sequence length. And a waiting request whose pages are not free may be overtaken
//! by later, shorter ones, but only a limited number of times.
//!
//! ```text
//!              admit: slot, pages for all known tokens       last token was a stop id, or length reached
//!   waiting ───────────────────────────────────▶ prefill ─▶ decode ───────────────────────▶ finished
//!      ▲                                            │          │
//!      └──────────── preempt: no page free, and no older sequence to make way for ┘
//! ```

mod group;
mod plan;
mod policies;
mod sequence;
mod sharing;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use group::{Group, siblings};
use lora_merge::PolicyVersion;
use paged_kv::{PageCopy, PageTable, PageTableConfig, Slot};
use qwen3_model::sampling::Philox;
use sequence::{Sequence, SequenceId};

use crate::Error;
use crate::adapters::NamedPolicy;
use crate::completion::{Event, RequestId, TokenCompletion};
use crate::prefix_index::PrefixIndex;
use crate::request::SamplingParams;
use crate::runner::{Runner, RunnerShape, SampledToken, SlotPolicy};
use crate::statistics::Statistics;
use crate::text::{StopText, TextPipeline};

/// Most completions of one request: beyond this it is a mistake.
pub(crate) const MAX_GROUP: usize = 1 << 16;

/// Drives a [`Runner`] for any number of requests, in token ids. [`Engine`](crate::Engine) adds text.
pub struct Scheduler<R> {
    runner: R,
    shape: RunnerShape,
    pages: PageTable,
    eos_token_ids: Vec<u32>,
    /// To look for stop strings.
    text: Option<Arc<TextPipeline>>,
    /// From which requests without a seed get theirs.
    seed: u64,
    /// Sequences without a slot, oldest first.
    waiting: BTreeMap<SequenceId, Sequence>,
    /// Sequences with a slot, oldest first.
    running: BTreeMap<SequenceId, Sequence>,
    /// Unfinished requests with more than one completion.
    groups: BTreeMap<RequestId, Group>,
    /// Pages kept for later requests, if they are.
    prefix_index: Option<PrefixIndex>,
    /// Owners of the sampled rows of each submitted step, oldest step first.
    in_flight: VecDeque<Vec<SequenceId>>,
    /// Copies that reservations asked for and no step has carried yet.
    copies: Vec<(Slot, PageCopy)>,
    mixed_limit: MixedLimit,
    next_id: u64,
    /// Of requests without a name of a policy.
    policy: PolicyVersion,
    /// Served by name, in the runner's order.
    named: Vec<NamedPolicy>,
    /// Policies of slots that the runner was told of before a change, for the next step to tell again.
    slots_anew: Vec<SlotPolicy>,
    statistics: Statistics,
}

/// What limits the prompt tokens of a step that also decodes, see [`Scheduler::set_mixed_prefill_tokens`].
#[derive(Clone, Copy, Debug)]
enum MixedLimit {
    None,
    Tokens(usize),
    /// The runner's choice.
    Runner,
}

impl<R> std::fmt::Debug for Scheduler<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("shape", &self.shape)
            .field("waiting", &self.waiting.len())
            .field("running", &self.running.len())
            .field("in_flight", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}

impl<R: Runner> Scheduler<R> {
    /// A scheduler without requests. `eos_token_ids` end every completion that does not ignore them.
    ///
    /// # Errors
    /// The runner's shape cannot work: a size of 0, a pool without a usable page.
    pub fn new(runner: R, eos_token_ids: Vec<u32>) -> Result<Self, Error> {
        let shape = runner.shape();
        check_shape(&shape)?;
        let pages = PageTable::new(PageTableConfig {
            n_pages: shape.n_pages,
            page_size: shape.page_size,
            n_slots: shape.max_batch_size.saturating_add(1),
            max_pages_per_slot: shape.max_seq_length.div_ceil(shape.page_size),
        })?;
        Ok(Self {
            policy: runner.policy(),
            mixed_limit: MixedLimit::None,
            runner,
            shape,
            pages,
            eos_token_ids,
            text: None,
            seed: 0,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            groups: BTreeMap::new(),
            prefix_index: None,
            in_flight: VecDeque::new(),
            copies: Vec::new(),
            next_id: 0,
            named: Vec::new(),
            slots_anew: Vec::new(),
            statistics: Statistics::default(),
        })
    }

    /// Lets requests have stop strings.
    #[must_use]
    pub fn with_text(mut self, text: Option<Arc<TextPipeline>>) -> Self {
        self.text = text;
        self
    }

    /// Sets the seed from which requests without one get theirs, each its own by the order of submission. Default: 0.
    /// With the same seed and the same requests in the same order all completions are the same again.
    pub fn set_seed(&mut self, seed: u64) {
        self.seed = seed;
    }

    /// Limits the prompt tokens of a step that sequences under way decode in: the time that these wait for prompts. The
    /// limit does not apply while more sequences wait to start than decode, when starting them matters more. 0 counts as 1,
    /// and never does a step have more than [`RunnerShape::max_prefill_tokens`]. Completions do not depend on it.
    /// Default: no limit of its own, which gives most tokens per second to a batch of which nobody waits for single tokens.
    pub fn set_mixed_prefill_tokens(&mut self, tokens: usize) {
        self.mixed_limit = MixedLimit::Tokens(tokens.max(1));
    }

    /// Leaves that limit to the runner, for readers who wait for single tokens: [`Runner::mixed_prefill_tokens`].
    /// Steps under way go on; what the runner has to make ready for such steps it does now, where none are.
    pub fn favor_latency(&mut self) {
        self.mixed_limit = MixedLimit::Runner;
        if self.in_flight.is_empty()
            && let Err(error) = self.runner.prepare_mixed_steps()
        {
            tracing::warn!(%error, "steps of prompts and decode rows are not prepared");
        }
    }

    /// The limit in force for a step in which `decoding` sequences decode.
    pub fn mixed_prefill_tokens(&self, decoding: usize) -> usize {
        let tokens = match self.mixed_limit {
            MixedLimit::None => usize::MAX,
            MixedLimit::Tokens(tokens) => tokens,
            MixedLimit::Runner => self.runner.mixed_prefill_tokens(decoding).max(1),
        };
        tokens.min(self.shape.max_prefill_tokens)
    }

    /// Accepts a request for generation.
    ///
    /// # Errors
    /// The request could never be completed as asked: empty prompt, an id outside the vocabulary, no room for one
    /// new token, a parameter that is not supported. Nothing has changed then.
    pub fn submit(&mut self, prompt: Vec<u32>, sampling: &SamplingParams) -> Result<RequestId, Error> {
        self.submit_group(prompt, sampling, 1)
    }

    /// Accepts a request for `n` completions of one prompt. The prompt is computed once; its completions share its full
    /// pages, and each copies the page in which the prompt ends. Every completion ends with an event of its own, then follows
    /// [`Event::GroupFinished`] if `n` is not 1.
    ///
    /// # Errors
    /// As for [`Scheduler::submit`], and [`Error::InvalidParameter`] for an `n` of 0 or beyond 65,536.
    pub fn submit_group(
        &mut self,
        prompt: Vec<u32>,
        sampling: &SamplingParams,
        n: usize,
    ) -> Result<RequestId, Error> {
        self.submit_under(prompt, sampling, n, None)
    }

    /// As [`Scheduler::submit_group`], sampled from the policy of this name, of those of [`Scheduler::serve_policies`].
    ///
    /// # Errors
    /// As for [`Scheduler::submit_group`], and [`Error::UnknownPolicy`].
    pub fn submit_under(
        &mut self,
        prompt: Vec<u32>,
        sampling: &SamplingParams,
        n: usize,
        policy: Option<&str>,
    ) -> Result<RequestId, Error> {
        let policy = policy.map(|name| self.find_policy(name)).transpose()?;
        self.check(&prompt, sampling)?;
        if !(1..=MAX_GROUP).contains(&n) {
            return Err(Error::InvalidParameter {
                parameter: "n",
                value: n.to_string(),
                advice: "use 1 to 65536",
            });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let max_tokens = self
            .max_tokens()
            .min(prompt.len().saturating_add(sampling.max_new_tokens));
        let mut stop_token_ids = sampling.stop_token_ids.clone();
        if !sampling.ignore_eos {
            stop_token_ids.extend_from_slice(&self.eos_token_ids);
        }
        if n > 1 {
            self.groups.insert(id, Group::new(prompt.len(), n));
        }
        let seed = Philox::seed_of_request(self.seed, id.0);
        let stop: Arc<[String]> = sampling.stop.as_slice().into();
        for index in 0..n {
            let row = sampling.for_row(seed, index, prompt.len());
            let text = self.text.as_ref().filter(|_| !stop.is_empty());
            let stop_text = text
                .map(|text| StopText::new(text.clone(), stop.clone(), sampling.include_stop_str_in_output));
            let mut sequence =
                Sequence::new(prompt.clone(), max_tokens, row, stop_token_ids.clone(), stop_text);
            sequence.policy = policy;
            self.waiting.insert(SequenceId { request: id, index }, sequence);
        }
        Ok(id)
    }

    /// Whether [`Scheduler::submit`] would accept the request.
    ///
    /// # Errors
    /// As for `submit`.
    pub fn check(&self, prompt: &[u32], sampling: &SamplingParams) -> Result<(), Error> {
        let vocab_size = self.shape.vocab_size;
        let known = |token: u32| (token as usize) < vocab_size;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(position) = prompt.iter().position(|&token| !known(token)) {
            return Err(Error::TokenOutOfVocabulary {
                token: prompt[position],
                position,
                vocab_size,
            });
        }
        if let Some(&token) = sampling.stop_token_ids.iter().find(|&&token| !known(token)) {
            return Err(Error::StopTokenOutOfVocabulary { token, vocab_size });
        }
        sampling.validate()?;
        if !sampling.stop.is_empty() && self.text.is_none() {
            return Err(Error::InvalidParameter {
                parameter: "stop",
                value: format!("{:?}", sampling.stop),
                advice: "the engine has no tokenizer to find texts with; use stop_token_ids",
            });
        }
        let tokens = prompt.len();
        if tokens >= self.shape.max_seq_length {
            return Err(Error::PromptTooLong {
                tokens,
                max_seq_length: self.shape.max_seq_length,
            });
        }
        if tokens >= self.pool_tokens() {
            return Err(Error::PromptExceedsPool {
                tokens,
                pool_tokens: self.pool_tokens(),
            });
        }
        Ok(())
    }

    /// Submits as many steps as may be in flight, then waits for the oldest and appends what it brought about.
    /// Does nothing if there is no unfinished request.
    ///
    /// # Errors
    /// The runner failed, or no progress is possible. All unfinished requests are then given up (their pages and
    /// slots are free again, no event follows for them); the scheduler accepts new ones.
    pub fn step(&mut self, events: &mut Vec<Event<TokenCompletion>>) -> Result<(), Error> {
        let result = self.try_step(events);
        if result.is_err() {
            self.abort_all();
        }
        result
    }

    fn try_step(&mut self, events: &mut Vec<Event<TokenCompletion>>) -> Result<(), Error> {
        while self.in_flight.len() < self.shape.max_in_flight && self.submit_step()? {}
        if !self.collect_step(events)? && self.has_unfinished() {
            return Err(Error::Stalled {
                waiting: self.waiting.len(),
                running: self.running.len(),
                free_pages: self.pages.free_pages(),
            });
        }
        Ok(())
    }

    /// Waits for the oldest step under way. False if there is none.
    fn collect_step(&mut self, events: &mut Vec<Event<TokenCompletion>>) -> Result<bool, Error> {
        let Some(owners) = self.in_flight.pop_front() else {
            return Ok(false);
        };
        let outputs =
            tracing::debug_span!("collect", rows = owners.len()).in_scope(|| self.runner.collect())?;
        if outputs.len() != owners.len() {
            return Err(Error::Runner {
                device: self.runner.device(),
                reason: format!("{} sampled tokens for {} rows", outputs.len(), owners.len()),
            });
        }
        for (id, output) in owners.into_iter().zip(outputs) {
            self.take_token(id, output, events)?;
        }
        Ok(true)
    }

    /// Appends one sampled token to its sequence, and ends the sequence if that was its last.
    fn take_token(
        &mut self,
        id: SequenceId,
        token: SampledToken,
        events: &mut Vec<Event<TokenCompletion>>,
    ) -> Result<(), Error> {
        let Some(sequence) = self.running.get_mut(&id) else {
            // The sequence ended or was cancelled while this row was already under way.
            self.statistics.wasted_rows += 1;
            return Ok(());
        };
        let SequenceId { request, index } = id;
        if token.logprob.is_nan() || token.sampled_logprob.is_nan() {
            let error = sequence.nothing_to_choose(&token);
            self.release(id)?;
            return self.finish(id, Err(error), events);
        }
        let version = match sequence.policy.and_then(|policy| self.named.get(policy)) {
            Some(named) => named.version,
            None => self.policy,
        };
        let pushed = sequence.push(token.clone(), version);
        self.statistics.new_tokens += 1;
        events.push(Event::Token {
            request,
            index,
            token,
        });
        if let Err(error) = pushed {
            self.release(id)?;
            return self.finish(id, Err(error), events);
        }
        if let Some(reason) = self.running.get(&id).and_then(Sequence::finish_reason) {
            self.enter_prefix(id)?;
            if let Some(sequence) = self.release(id)? {
                self.statistics.finished_completions += 1;
                self.finish(id, Ok(sequence.into_completion(index, reason)), events)?;
            }
        }
        Ok(())
    }

    /// Reports the end of a sequence, and of its group if it was the last.
    fn finish(
        &mut self,
        id: SequenceId,
        result: Result<TokenCompletion, Error>,
        events: &mut Vec<Event<TokenCompletion>>,
    ) -> Result<(), Error> {
        let SequenceId { request, index } = id;
        events.push(Event::Finished {
            request,
            index,
            result,
        });
        if self.leave_group(id)? {
            events.push(Event::GroupFinished { request });
        }
        Ok(())
    }

    /// Takes a running sequence out and frees its slot and pages at once. Rows of it that are under way write
    /// before any step of the pages' next owner.
    fn release(&mut self, id: SequenceId) -> Result<Option<Sequence>, Error> {
        let Some(mut sequence) = self.running.remove(&id) else {
            return Ok(None);
        };
        if let Some(group) = self.groups.get_mut(&id.request)
            && group.leader == Some(id)
        {
            group.leader = None;
        }
        if let Some(slot) = sequence.slot.take() {
            self.copies.retain(|(owner, _)| *owner != slot);
            self.pages.erase(slot)?;
        }
        Ok(Some(sequence))
    }

    /// Ends a request, with all its completions that are unfinished; their slots and pages are free at once. No event
    /// follows for it. False if it is not unfinished.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let of_request = |sequences: &BTreeMap<SequenceId, Sequence>| -> Vec<SequenceId> {
            sequences.range(siblings(request)).map(|(&id, _)| id).collect()
        };
        let (waiting, running) = (of_request(&self.waiting), of_request(&self.running));
        for id in &waiting {
            self.waiting.remove(id);
        }
        for &id in &running {
            // The page table knows every slot of a running sequence: neither fails.
            let _ = self.release(id);
        }
        let _ = self.drop_group(request);
        !waiting.is_empty() || !running.is_empty()
    }

    /// Ends all unfinished requests without completions, and forgets the pages kept for later ones.
    pub fn abort_all(&mut self) {
        self.runner.reset();
        self.in_flight.clear();
        self.copies.clear();
        self.slots_anew.clear();
        self.waiting.clear();
        // What the page table does not know is free already.
        let _ = self.forget_shared();
        self.groups.clear();
        for (_, sequence) in std::mem::take(&mut self.running) {
            if let Some(slot) = sequence.slot {
                let _ = self.pages.erase(slot);
            }
        }
    }

    /// Whether any request waits or runs.
    pub fn has_unfinished(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Completions under way without a slot.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Completions under way with a slot.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Most tokens that prompt and completion of one request can have together: what the model, the settings and
    /// the page pool allow.
    pub fn max_tokens(&self) -> usize {
        self.shape.max_seq_length.min(self.pool_tokens())
    }

    fn pool_tokens(&self) -> usize {
        (self.shape.n_pages - 1).saturating_mul(self.shape.page_size)
    }

    /// What the runner was built for.
    pub fn shape(&self) -> &RunnerShape {
        &self.shape
    }

    /// The page table, to look at.
    pub fn pages(&self) -> &PageTable {
        &self.pages
    }

    /// Device of the runner, in words.
    pub fn device(&self) -> String {
        self.runner.device()
    }

    /// The runner, to look at.
    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// The runner, for what only it can do; not while steps are under way.
    pub(crate) fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    /// Gives the runner back. Unfinished requests end without completions.
    pub fn into_runner(mut self) -> R {
        self.abort_all();
        self.runner
    }

    /// Counters since the scheduler was made.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }
}

fn check_shape(shape: &RunnerShape) -> Result<(), Error> {
    let at_least = |setting, value: usize, least: usize, why: &str| match value >= least {
        true => Ok(()),
        false => Err(Error::InvalidSetting {
            setting,
            value: value.to_string(),
            advice: format!("at least {least}{why}"),
        }),
    };
    // What a page table can have, in the words of this shape.
    let at_most = |setting, value: usize, most: usize| match value <= most {
        true => Ok(()),
        false => Err(Error::InvalidSetting {
            setting,
            value: value.to_string(),
            advice: format!("at most {most}"),
        }),
    };
    const MOST: usize = i32::MAX as usize;
    at_least("max_batch_size", shape.max_batch_size, 1, "")?;
    at_most("max_batch_size", shape.max_batch_size, MOST - 1)?;
    at_least("page_size", shape.page_size, 1, "")?;
    at_least("n_pages", shape.n_pages, 2, " (page 0 is reserved for padding)")?;
    at_least(
        "max_seq_length",
        shape.max_seq_length,
        2,
        " (a prompt token and a new one)",
    )?;
    at_most(
        "max_seq_length",
        shape.max_seq_length,
        MOST.saturating_mul(shape.page_size),
    )?;
    at_least("max_in_flight", shape.max_in_flight, 1, "")?;
    at_least("max_prefill_tokens", shape.max_prefill_tokens, 1, "")
}
