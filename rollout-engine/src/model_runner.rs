//! A runner over a [`qwen3_model::Model`] whose logits are read back and sampled on the CPU.

use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::PageTable;
use qwen3_model::{Backend, MergeMode, Model, SequenceChunk, StepBatch};

use crate::Error;
use crate::adapters::PolicyUpdate;
use crate::runner::{Runner, RunnerMemory, RunnerShape, SampledToken, Step};
use crate::sampling::{Row, Sampler};

/// Prompt tokens of a step that also decodes. A prompt's token costs a processor about what a decoded one does, so the
/// fewer the better for who decodes; much fewer would leave its cores idle.
const MIXED_PREFILL_TOKENS: usize = 64;

/// Runs each step to its end when it is submitted; prompts and decode rows share one pass through the layers.
///
/// ```
/// use qwen3_model::{LoadOptions, Model, Qwen3Config};
/// use rollout_engine::runner::RunnerMemory;
/// use rollout_engine::{Engine, FakeRunner, ModelRunner, Request, RunnerShape, bundled};
///
/// let dir = bundled::model_dir()?;
/// let mut options = LoadOptions::default();
/// (options.n_pages, options.page_size) = (16, 16);
/// let model = Model::load(&dir, &options)?;
/// let shape = RunnerShape { n_pages: 16, page_size: 16, ..FakeRunner::small_shape() };
/// let runner = ModelRunner::new(model, shape, "cpu".into(), RunnerMemory::default());
/// let mut engine = Engine::with_runner(runner, Qwen3Config::from_dir(&dir)?.eos_token_ids, None)?;
/// let completion = engine.generate(&[Request::token_ids([5, 6, 7]).max_new_tokens(2)])?.remove(0)?;
/// assert!((1..=2).contains(&completion.token_ids.len()));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct ModelRunner<B> {
    model: Model<B>,
    shape: RunnerShape,
    device: String,
    memory: RunnerMemory,
    /// The token sampled last for each slot.
    last_tokens: Vec<u32>,
    sampler: Sampler,
    /// The result of the submitted step.
    ready: Option<Vec<SampledToken>>,
    /// Buffers of [`ModelRunner::submit`], kept to allocate nothing per step.
    token_ids: Vec<u32>,
    chunks: Vec<SequenceChunk>,
}

impl<B: Backend> ModelRunner<B> {
    /// A runner over `model`, whose cache has the pages that `shape` says. `device` and `memory` are for reports.
    pub fn new(model: Model<B>, shape: RunnerShape, device: String, memory: RunnerMemory) -> Self {
        let shape = RunnerShape {
            vocab_size: model.config().vocab_size,
            max_in_flight: 1,
            ..shape
        };
        Self {
            last_tokens: vec![0; shape.max_batch_size.saturating_add(1)],
            sampler: Sampler::new(shape.vocab_size, shape.max_batch_size.saturating_add(1)),
            model,
            shape,
            device,
            memory,
            ready: None,
            token_ids: Vec::new(),
            chunks: Vec::new(),
        }
    }

    /// The model.
    pub fn model(&self) -> &Model<B> {
        &self.model
    }

    fn error(&self, reason: &str) -> Error {
        Error::Runner {
            device: self.device.clone(),
            reason: reason.into(),
        }
    }
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn shape(&self) -> RunnerShape {
        self.shape
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn memory(&self) -> RunnerMemory {
        self.memory
    }

    fn mixed_prefill_tokens(&self, _: usize) -> usize {
        MIXED_PREFILL_TOKENS.min(self.shape.max_prefill_tokens)
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        if self.ready.is_some() {
            return Err(self.error("a step was submitted before the last one was collected"));
        }
        let slots = step
            .prefill
            .iter()
            .map(|chunk| chunk.slot)
            .chain(step.decode.iter().map(|row| row.slot));
        if let Some(slot) = slots.clone().find(|slot| slot.index() >= self.last_tokens.len()) {
            return Err(self.error(&format!("slot {slot} is beyond the batch")));
        }
        // One pass for both: named after the work that dominates it.
        let rows = step.decode.len();
        let _span = match (step.token_ids.len(), step.prefill.len()) {
            (0, _) => tracing::debug_span!("decode", rows),
            (tokens, sequences) => tracing::debug_span!("prefill", tokens, sequences, rows),
        }
        .entered();
        self.token_ids.clear();
        self.token_ids.extend_from_slice(&step.token_ids);
        self.token_ids
            .extend(step.decode.iter().map(|row| self.last_tokens[row.slot.index()]));
        self.chunks.clear();
        self.chunks.extend(step.prefill.iter().map(|chunk| SequenceChunk {
            slot: chunk.slot,
            start: chunk.start,
            len: chunk.len,
            wants_logits: chunk.sample.is_some(),
        }));
        self.chunks.extend(step.decode.iter().map(|row| SequenceChunk {
            slot: row.slot,
            start: row.position,
            len: 1,
            wants_logits: true,
        }));
        let prefill = step.prefill.iter().filter_map(|chunk| {
            chunk.sample.map(|sampling| Row {
                slot: chunk.slot.index(),
                position: chunk.start + chunk.len - 1,
                sampling,
            })
        });
        let decode = step.decode.iter().map(|row| Row {
            slot: row.slot.index(),
            position: row.position,
            sampling: row.sampling,
        });
        let rows: Vec<_> = prefill.chain(decode).collect();
        step.slot_tokens
            .iter()
            .for_each(|tokens| self.sampler.set(tokens));
        for of in &step.slot_policies {
            let backend = self.model.backend_mut();
            backend.set_slot_policy(of.slot.index(), of.policy)?;
        }
        if !step.copies.is_empty() {
            self.model.copy_pages(&step.copies)?;
        }
        let batch = StepBatch {
            token_ids: &self.token_ids,
            chunks: &self.chunks,
        };
        let logits = self.model.forward(&batch, pages)?;
        let sampled = self.sampler.sample(logits, &rows);
        let wanted = self.chunks.iter().filter(|chunk| chunk.wants_logits);
        for (chunk, token) in wanted.zip(&sampled) {
            self.last_tokens[chunk.slot.index()] = token.token;
        }
        self.ready = Some(sampled);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        self.ready
            .take()
            .ok_or_else(|| self.error("nothing was submitted"))
    }

    fn reset(&mut self) {
        self.ready = None;
    }

    fn policy(&self) -> PolicyVersion {
        self.model.backend().policy()
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        let update = PolicyUpdate::from(self.model.set_adapters(active, mode)?);
        self.memory.adapter_bytes = update.merged_bytes;
        Ok(update)
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        let update = PolicyUpdate::from(self.model.backend_mut().serve_policies(policies)?);
        self.memory.adapter_bytes = update.merged_bytes;
        Ok(update)
    }

    fn base_sha256(&mut self) -> Result<[u8; 32], Error> {
        Ok(self.model.backend_mut().base_sha256()?)
    }

    fn served_sha256(&mut self) -> Result<[u8; 32], Error> {
        Ok(self.model.backend_mut().served_sha256()?)
    }
}
