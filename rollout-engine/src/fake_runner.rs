//! A runner without a model, for tests of scheduling.
//!
//! Its "KV cache" holds one number per physical position, made of the token and its logical position. To sample a
//! token it reads the numbers of the whole sequence back through the page table and hashes them. So the token
//! depends on everything that a scheduler could get wrong: a page given to two sequences, a stale or unmapped page,
//! a position written twice or never, a token resumed wrongly. [`FakeRunner::expected`] computes what must come out
//! from the tokens alone.
//!
//! ```
//! use rollout_engine::{FakeRunner, Event, SamplingParams, Scheduler};
//! # fn main() -> Result<(), rollout_engine::Error> {
//! let mut scheduler = Scheduler::new(FakeRunner::new(FakeRunner::small_shape()), vec![])?;
//! scheduler.submit(vec![1, 2, 3], &SamplingParams { max_new_tokens: 5, ..Default::default() })?;
//! let mut events = Vec::new();
//! while scheduler.has_unfinished() {
//!     scheduler.step(&mut events)?;
//! }
//! let Some(Event::Finished { result: Ok(completion), .. }) = events.pop() else { panic!() };
//! assert_eq!(completion.token_ids, FakeRunner::expected(&[1, 2, 3], 5, &[], 97));
//! # Ok(()) }
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::{PageTable, Slot};
use qwen3_model::MergeMode;
use sha2::{Digest, Sha256};

use crate::Error;
use crate::adapters::{PolicyUpdate, base_policy};
use crate::runner::{Runner, RunnerMemory, RunnerShape, SampledToken, Sampling, Step};

/// A runner whose next token is a hash of the sequence so far. See the [module](self).
#[derive(Debug)]
pub struct FakeRunner {
    shape: RunnerShape,
    /// One cell per physical position.
    cells: Vec<u64>,
    /// The token sampled last for each slot.
    last_tokens: Vec<u32>,
    /// Submitted steps with the rows of the page table as they were then; run when collected.
    submitted: VecDeque<(Step, Vec<i32>)>,
    /// Sampling this token gives NaN as its log-probability.
    nan_token: Option<u32>,
    /// Steps until `submit` fails.
    fail_after: Option<usize>,
    /// Changes of policy until all others fail.
    fail_policy: Option<usize>,
    policy: PolicyVersion,
    /// Of sequences under no name: digest of their policy, and what their keys and values depend on, the number of the change
    /// that brought it.
    unnamed: ([u8; 32], u64),
    /// The same of the policies that are served by name, with [`FakeRunner::named`] added.
    named: Vec<([u8; 32], u64)>,
    /// Which of them the sequence in each slot is computed under.
    slot_policies: Vec<Option<usize>>,
    /// Decode rows and prefill chunks of every step, for tests that look at batches.
    history: Vec<(usize, usize)>,
}

impl FakeRunner {
    /// A runner of this shape with an empty cache.
    pub fn new(shape: RunnerShape) -> Self {
        Self {
            cells: vec![u64::MAX; shape.n_pages.saturating_mul(shape.page_size)],
            last_tokens: vec![0; shape.max_batch_size.saturating_add(1)],
            shape,
            submitted: VecDeque::new(),
            nan_token: None,
            fail_after: None,
            fail_policy: None,
            policy: base_policy(),
            unnamed: (base_policy().sha256, 0),
            named: Vec::new(),
            slot_policies: vec![None; shape.max_batch_size.saturating_add(1)],
            history: Vec::new(),
        }
    }

    /// 97 ids, sequences of up to 64 tokens, a batch of 4, 15 usable pages of 4 positions, one step in flight.
    pub fn small_shape() -> RunnerShape {
        RunnerShape {
            vocab_size: 97,
            max_seq_length: 64,
            max_batch_size: 4,
            n_pages: 16,
            page_size: 4,
            max_in_flight: 1,
            max_prefill_tokens: 16,
        }
    }

    /// Makes the log-probability NaN wherever this token is sampled.
    #[must_use]
    pub fn with_nan_token(mut self, token: u32) -> Self {
        self.nan_token = Some(token);
        self
    }

    /// Makes the `n`-th submission from now (from 0) fail, once.
    #[must_use]
    pub fn failing_after(mut self, n: usize) -> Self {
        self.fail_after = Some(n);
        self
    }

    /// Makes changes of policy fail.
    #[must_use]
    pub fn failing_policy_changes(self) -> Self {
        self.failing_policy_changes_after(0)
    }

    /// Makes changes of policy fail after `n` from now.
    #[must_use]
    pub fn failing_policy_changes_after(mut self, n: usize) -> Self {
        self.fail_policy = Some(n);
        self
    }

    /// (prefill chunks, decode rows) of every submitted step.
    pub fn history(&self) -> &[(usize, usize)] {
        &self.history
    }

    /// The completion of `prompt`: up to `max_new_tokens` tokens, ending with the first of `stop_token_ids`.
    pub fn expected(
        prompt: &[u32],
        max_new_tokens: usize,
        stop_token_ids: &[u32],
        vocab_size: usize,
    ) -> Vec<u32> {
        Self::expected_under(0, prompt, max_new_tokens, stop_token_ids, vocab_size)
    }

    /// As [`FakeRunner::expected`], under the policy of this number.
    pub fn expected_under(
        policy: u64,
        prompt: &[u32],
        max_new_tokens: usize,
        stop_token_ids: &[u32],
        vocab_size: usize,
    ) -> Vec<u32> {
        let greedy = Sampling::GREEDY;
        Self::expected_sampled(
            policy,
            &greedy,
            prompt,
            max_new_tokens,
            stop_token_ids,
            vocab_size,
        )
    }

    /// As [`FakeRunner::expected_under`]; at temperatures above 0 tokens depend on seed and completion of `sampling` too.
    pub fn expected_sampled(
        policy: u64,
        sampling: &Sampling,
        prompt: &[u32],
        max_new_tokens: usize,
        stop_token_ids: &[u32],
        vocab_size: usize,
    ) -> Vec<u32> {
        let mut hash = SEED;
        let mut fed = 0;
        let mut completion = Vec::new();
        while completion.len() < max_new_tokens {
            for position in fed..prompt.len() + completion.len() {
                let token = prompt
                    .get(position)
                    .or_else(|| completion.get(position - prompt.len()));
                hash = fold(
                    hash,
                    cell(token.copied().unwrap_or_default(), position) ^ salt(policy),
                );
            }
            fed = prompt.len() + completion.len();
            let token = token_of(hash ^ stream(sampling, completion.len() as u32), vocab_size);
            completion.push(token);
            if stop_token_ids.contains(&token) {
                break;
            }
        }
        completion
    }

    /// The log-probability that goes with each token of `completion`.
    pub fn expected_logprobs(prompt: &[u32], completion: &[u32]) -> Vec<f32> {
        let mut hash = SEED;
        let mut logprobs = Vec::new();
        for (position, &token) in prompt.iter().chain(completion).enumerate() {
            if position >= prompt.len() {
                logprobs.push(logprob_of(hash));
            }
            hash = fold(hash, cell(token, position));
        }
        logprobs
    }

    fn error(&self, reason: String) -> Error {
        Error::Runner {
            device: self.device(),
            reason,
        }
    }

    /// Refuses steps that no runner should have to expect.
    fn check(&self, step: &Step, pages: &PageTable) -> Result<(), Error> {
        let shape = &self.shape;
        let tokens: usize = step.prefill.iter().map(|chunk| chunk.len).sum();
        let spans = (step
            .prefill
            .iter()
            .map(|chunk| (chunk.slot, chunk.start, chunk.len)))
        .chain(step.decode.iter().map(|row| (row.slot, row.position, 1)));
        let mut slots = Vec::new();
        for (slot, start, len) in spans {
            if slot == Slot::RESERVED || slots.contains(&slot) {
                return Err(self.error(format!("slot {slot} is reserved or occurs twice in a step")));
            }
            slots.push(slot);
            if len == 0 || start + len > shape.max_seq_length || pages.len(slot)? != start + len {
                return Err(self.error(format!(
                    "positions {start}..{} of slot {slot} are wrong",
                    start + len
                )));
            }
        }
        if step.is_empty() || tokens != step.token_ids.len() || tokens > shape.max_prefill_tokens {
            return Err(self.error(format!("a step of {tokens} prompt tokens")));
        }
        if slots.len() > shape.max_batch_size || self.submitted.len() >= shape.max_in_flight {
            return Err(self.error(format!(
                "{} rows with {} steps in flight",
                slots.len(),
                self.submitted.len()
            )));
        }
        Ok(())
    }

    /// Keys and values depend on the policy that computed them.
    fn salt(&self, slot: Slot) -> u64 {
        let named = self.slot_policies[slot.index()].and_then(|policy| self.named.get(policy));
        salt(named.unwrap_or(&self.unnamed).1)
    }

    /// What [`FakeRunner::expected_under`] takes for the policy that came to be served by name as number `policy`, beyond the
    /// number of the version.
    pub fn named(policy: usize) -> u64 {
        1000 * (policy as u64 + 1)
    }

    fn physical(&self, rows: &[i32], slot: Slot, position: usize) -> Result<usize, Error> {
        let width = rows.len() / (self.shape.max_batch_size + 1);
        let page = rows[slot.index() * width + position / self.shape.page_size];
        if page <= 0 {
            return Err(self.error(format!("position {position} of slot {slot} is in page {page}")));
        }
        Ok(page as usize * self.shape.page_size + position % self.shape.page_size)
    }

    fn sample(
        &mut self,
        rows: &[i32],
        slot: Slot,
        len: usize,
        sampling: &Sampling,
    ) -> Result<SampledToken, Error> {
        let mut hash = SEED;
        for position in 0..len {
            hash = fold(hash, self.cells[self.physical(rows, slot, position)?]);
        }
        let index = sampling.new_token_index(len - 1);
        let token = token_of(hash ^ stream(sampling, index), self.shape.vocab_size);
        self.last_tokens[slot.index()] = token;
        let logprob = if self.nan_token == Some(token) {
            f32::NAN
        } else {
            logprob_of(hash)
        };
        Ok(SampledToken {
            token,
            logprob,
            ..SampledToken::default()
        })
    }
}

impl Runner for FakeRunner {
    fn shape(&self) -> RunnerShape {
        self.shape
    }

    fn device(&self) -> String {
        "fake".into()
    }

    fn memory(&self) -> RunnerMemory {
        RunnerMemory {
            weight_bytes: 0,
            adapter_bytes: 0,
            kv_bytes: (self.cells.len() * 8) as u64,
        }
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        if let Some(left) = self.fail_after {
            self.fail_after = left.checked_sub(1);
            if left == 0 {
                return Err(self.error("told to fail".into()));
            }
        }
        self.check(step, pages)?;
        pages.check_integrity().map_err(|e| self.error(e.to_string()))?;
        self.history.push((step.prefill.len(), step.decode.len()));
        self.submitted.push_back((step.clone(), pages.rows().to_vec()));
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        let Some((step, rows)) = self.submitted.pop_front() else {
            return Err(self.error("nothing was submitted".into()));
        };
        let page_size = self.shape.page_size;
        for copy in &step.copies {
            let (src, dst) = (copy.src.index() * page_size, copy.dst.index() * page_size);
            self.cells.copy_within(src..src + copy.tokens, dst);
        }
        for of in &step.slot_policies {
            if of.policy.is_some_and(|policy| policy >= self.named.len()) {
                return Err(self.error(format!("policy {:?} of {}", of.policy, self.named.len())));
            }
            self.slot_policies[of.slot.index()] = of.policy;
        }
        let mut tokens = step.token_ids.iter();
        for chunk in &step.prefill {
            for (position, &token) in (chunk.start..chunk.start + chunk.len).zip(&mut tokens) {
                let at = self.physical(&rows, chunk.slot, position)?;
                self.cells[at] = cell(token, position) ^ self.salt(chunk.slot);
            }
        }
        for row in &step.decode {
            let at = self.physical(&rows, row.slot, row.position)?;
            self.cells[at] = cell(self.last_tokens[row.slot.index()], row.position) ^ self.salt(row.slot);
        }
        let mut sampled = Vec::with_capacity(step.sampled_rows());
        for chunk in &step.prefill {
            if let Some(sampling) = &chunk.sample {
                sampled.push(self.sample(&rows, chunk.slot, chunk.start + chunk.len, sampling)?);
            }
        }
        for row in &step.decode {
            sampled.push(self.sample(&rows, row.slot, row.position + 1, &row.sampling)?);
        }
        Ok(sampled)
    }

    fn reset(&mut self) {
        self.submitted.clear();
    }

    fn policy(&self) -> PolicyVersion {
        self.policy
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        let update = self.change(&[active], mode)?;
        self.unnamed = (update.version.sha256, update.version.number);
        Ok(update)
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        let before = self.named.clone();
        let update = self.change(policies, MergeMode::Unmerged)?;
        let base = base_policy().sha256;
        if self.unnamed.0 != base {
            self.unnamed = (base, update.version.number);
        }
        let digests = update.policies.iter().enumerate();
        let named = digests.map(|(i, &digest)| {
            let same = before.iter().find(|(old, _)| *old == digest);
            same.copied()
                .unwrap_or((digest, update.version.number + Self::named(i)))
        });
        self.named = named.collect();
        Ok(update)
    }
}

impl FakeRunner {
    fn change(&mut self, policies: &[&[ActiveAdapter]], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        if !self.submitted.is_empty() {
            return Err(self.error("the policy was changed while steps were under way".into()));
        }
        if let Some(left) = self.fail_policy {
            if left == 0 {
                return Err(self.error("told to fail".into()));
            }
            self.fail_policy = Some(left - 1);
        }
        let digest = |active: &&[ActiveAdapter]| -> [u8; 32] {
            let mut sha = Sha256::new();
            active.iter().for_each(|a| sha.update(a.adapter.digest()));
            match active {
                [] => base_policy().sha256,
                _ => sha.finalize().into(),
            }
        };
        let digests: Vec<_> = policies.iter().map(digest).collect();
        let sha256 = match digests[..] {
            [one] => one,
            _ => Sha256::digest(digests.concat()).into(),
        };
        let changed = sha256 != self.policy.sha256;
        self.policy = PolicyVersion {
            number: self.policy.number + 1,
            sha256,
        };
        self.named.clear();
        self.slot_policies.fill(None);
        let adapted_modules = policies.iter().map(|active| active.len()).sum();
        Ok(PolicyUpdate {
            version: self.policy,
            policies: digests,
            mode,
            adapted_modules,
            changed,
            differs_from_base: adapted_modules > 0,
            pristine_bytes: 0,
            merged_bytes: 0,
            merge_elapsed: Duration::ZERO,
            elapsed: Duration::ZERO,
            warnings: Vec::new(),
            continued_requests: 0,
        })
    }
}

const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The content of a position. Never `u64::MAX`, which marks an unwritten cell.
fn cell(token: u32, position: usize) -> u64 {
    (u64::from(token) << 32) | (position as u64 & 0xffff_ffff)
}

/// What a policy does to every content; nothing for policy 0. Only the upper bits, which tokens leave free.
fn salt(policy: u64) -> u64 {
    policy.wrapping_mul(0x9e37_79b9_0000_0000) & (0xffff << 48)
}

/// What the random numbers of a sequence do to its token number `index`; nothing at temperature 0.
fn stream(sampling: &Sampling, index: u32) -> u64 {
    if sampling.temperature == 0.0 {
        return 0;
    }
    let counter = (u64::from(sampling.completion) << 32) | u64::from(index);
    fold(fold(SEED, sampling.seed), counter)
}

/// One round of the SplitMix64 finaliser over a running hash.
fn fold(hash: u64, value: u64) -> u64 {
    let mut x = hash ^ value.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn token_of(hash: u64, vocab_size: usize) -> u32 {
    (hash % vocab_size.max(1) as u64) as u32
}

fn logprob_of(hash: u64) -> f32 {
    -((hash >> 40) as f32) / 1e6
}
