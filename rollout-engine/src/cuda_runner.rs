//! A runner on an NVIDIA GPU that works one step ahead of what the host has seen.
//!
//! ```text
//!   submit: page copies, page-table rows ─▶ packed step, or decode graph ─▶ read-back, event
//!   collect: wait for the oldest event, read page-locked memory
//! ```
//!
//! Everything is queued on one stream in the order of submission. The input token of a decode row is the one that
//! the GPU sampled last for its slot, so the next step can be queued before the host knows the token. While the batch
//! stays the same, a decode step uploads nothing: the graph moves positions and tokens on by itself.
//!
//! A step with prompts takes its decode rows along in the packed pass: all products then read the weights once for both.

use std::collections::VecDeque;
use std::time::Instant;

use cuda_graphs::{Compiler, Device, DeviceInfo};
use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::{KvDtype, KvLayout, PageTable};
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, Pending, WeightSource};
use qwen3_model::{
    Backend, KernelOptions, LogitRows, MergeMode, PristineCopy, Qwen3Config, SequenceChunk, StepBatch,
    StepPlanner,
};

use crate::Error;
use crate::adapters::PolicyUpdate;
use crate::pool::{PoolLimits, PoolSettings};
use crate::runner::{Runner, RunnerMemory, RunnerShape, SampledToken, Sampling, Step};

/// Steps submitted and not collected: one that runs and one that waits for it.
const MAX_IN_FLIGHT: usize = 2;
/// Prompt tokens per step unless set by the user: enough rows for products to run at full rate.
const MAX_PREFILL_TOKENS: usize = 4096;
/// Rows of a step of prompts and decode rows, where readers wait for single tokens: a multiple of the rows of cuBLASLt's tiles
/// on an H200, where a row more takes half as long again and 128 rows fewer a fifth less.
const MIXED_ROWS: usize = 256;
/// The least prompt tokens of such a step. Where more rows decode than leave room for them, the step has more rows.
const MIN_MIXED_PREFILL_TOKENS: usize = 128;
/// Device memory left for activations, kernels and cuBLASLt when the page pool is sized.
const RESERVE_BYTES: u64 = 2 << 30;

/// Settings of a [`CudaRunner`] beyond the pool.
///
/// ```
/// use rollout_engine::cuda_runner::CudaSettings;
///
/// // Kernel by kernel on the second GPU, as for a profiler.
/// let settings = CudaSettings { ordinal: 1, capture: false, ..CudaSettings::default() };
/// assert!(!settings.capture && CudaSettings::default().capture);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaSettings {
    /// The GPU's ordinal.
    pub ordinal: usize,
    /// Whether decode steps are captured as graphs; without, the same work is launched kernel by kernel.
    pub capture: bool,
    /// Where pristine copies of adapted weights live.
    pub pristine: PristineCopy,
    /// Whether a step's prompts and decode rows share one pass over the weights; without, the decode rows follow in a pass of
    /// their own, which replays their graph. For measurements and tests.
    pub mixed_steps: bool,
    /// Whether decode steps read the pages of a prompt once for all completions that share them.
    pub share_reads: bool,
    /// Whether the bits of a sequence must not depend on the other sequences, the bucket, chunks or preemption; prompts are
    /// then never read once for all.
    pub batch_invariant: bool,
    /// Options of the kernels.
    pub kernels: KernelOptions,
}

impl Default for CudaSettings {
    fn default() -> Self {
        Self {
            ordinal: 0,
            capture: true,
            pristine: PristineCopy::default(),
            mixed_steps: true,
            share_reads: true,
            batch_invariant: false,
            kernels: KernelOptions::default(),
        }
    }
}

/// Seconds that each part of the start took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CudaStart {
    /// Opening the device and the compiler.
    pub open_s: f64,
    /// Kernels compiled or loaded, weights uploaded or drawn, buffers taken.
    pub load_s: f64,
    /// Of `load_s`, what the compiler took: little where its cache has the kernels.
    pub compile_s: f64,
    /// Algorithms of matrix products chosen and graphs captured.
    pub capture_s: f64,
    /// Graphs captured.
    pub graphs: usize,
}

/// Runs steps on an NVIDIA GPU. See the [module](self).
///
/// ```no_run
/// use qwen3_model::Qwen3Config;
/// use qwen3_model::cuda::WeightSource;
/// use rollout_engine::cuda_runner::{CudaSettings, CudaStart};
/// use rollout_engine::{CudaRunner, PoolSettings, Scheduler};
///
/// CudaRunner::check_device(0)?;
/// let pool = PoolSettings { max_batch_size: Some(16), ..PoolSettings::default() };
/// let config = Qwen3Config::qwen3_0_6b();
/// let runner = CudaRunner::open(&config, WeightSource::Random(1), &pool, &CudaSettings::default())?;
/// let CudaStart { graphs, capture_s, .. } = runner.start();
/// println!("{graphs} graphs in {capture_s} s");
/// let scheduler = Scheduler::new(runner, config.eos_token_ids.clone())?;
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct CudaRunner {
    backend: CudaBackend,
    planner: StepPlanner,
    shape: RunnerShape,
    device: String,
    start: CudaStart,
    free_at_start: u64,
    /// Weights held twice because of adapters.
    adapter_bytes: u64,
    pending: VecDeque<Pending>,
    mixed_steps: bool,
    chunks: Vec<SequenceChunk>,
    token_ids: Vec<u32>,
    sampling: Vec<Sampling>,
    rows: Vec<DecodeRow>,
}

impl CudaRunner {
    /// Whether the GPU can be opened and kernels can be compiled for it.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`], with what to do.
    pub fn check_device(ordinal: usize) -> Result<(), Error> {
        Self::device_info(ordinal).map(drop)
    }

    /// What the GPU is, if it can be opened and kernels can be compiled for it.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`], with what to do.
    pub fn device_info(ordinal: usize) -> Result<DeviceInfo, Error> {
        let checked = Device::open(ordinal).and_then(|device| Compiler::new().map(|_| device.info().clone()));
        checked.map_err(|error| unavailable(ordinal, error))
    }

    /// A runner with these weights. Opens the device, loads the model, and captures the decode graphs.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] if there is no usable GPU or a library is missing, with what to do;
    /// [`Error::InvalidSetting`] for sizes that cannot work; [`Error::Model`] for what the model's backend refuses.
    pub fn open(
        config: &Qwen3Config,
        weights: WeightSource<'_>,
        pool: &PoolSettings,
        settings: &CudaSettings,
    ) -> Result<Self, Error> {
        let begin = Instant::now();
        let _span = tracing::info_span!("load", what = "the model onto the GPU").entered();
        let unavailable = |error| unavailable(settings.ordinal, error);
        let device = Device::open(settings.ordinal).map_err(unavailable)?;
        let compiler = Compiler::new().map_err(unavailable)?;
        let open_s = begin.elapsed().as_secs_f64();
        // Bytes of a token do not depend on the number of pages.
        let layout = KvLayout {
            n_layers: config.n_layers,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            n_pages: 2,
            page_size: 1,
            dtype: KvDtype::Bf16,
        };
        let free = device.memory().map_err(unavailable)?.free as u64;
        let weight_bytes = match weights {
            WeightSource::Given(weights) => weights.bytes(),
            WeightSource::Random(_) | WeightSource::RandomQuantized(..) => 2 * config.n_parameters(),
        };
        let limits = PoolLimits {
            bytes_per_token: layout.bytes_per_token()?,
            available_bytes: Some(free.saturating_sub(weight_bytes + RESERVE_BYTES)),
            max_prefill_tokens: MAX_PREFILL_TOKENS,
            max_in_flight: MAX_IN_FLIGHT,
        };
        let shape = pool.resolve(config, &limits)?;
        let options = backend_options(&shape, settings);
        let mut backend =
            CudaBackend::new(&device, &compiler, config.clone(), weights, options).map_err(|error| {
                match error {
                    qwen3_model::Error::Cuda(error @ cuda_graphs::Error::MissingLibrary { .. }) => {
                        unavailable(error)
                    }
                    qwen3_model::Error::Option { option, problem } if option.ends_with("_kernel_options") => {
                        let of = &settings.kernels;
                        Error::InvalidSetting {
                            setting: option,
                            value: match option {
                                "decode_kernel_options" => of.decode.to_string(),
                                "prefill_kernel_options" => of.prefill.to_string(),
                                _ => of.matrix.to_string(),
                            },
                            advice: problem,
                        }
                    }
                    other => Error::Model(other),
                }
            })?;
        backend.set_pristine_copy(settings.pristine)?;
        backend.share_reads(settings.share_reads);
        if settings.batch_invariant {
            backend.make_batch_invariant(&compiler)?;
        }
        let load_s = begin.elapsed().as_secs_f64() - open_s;
        let info = device.info();
        let (major, minor) = info.compute_capability;
        let device = format!(
            "cuda:{} ({}, compute capability {major}.{minor})",
            settings.ordinal, info.name
        );
        let mut runner = Self {
            backend,
            planner: StepPlanner::new(),
            shape,
            device,
            start: CudaStart {
                open_s,
                load_s,
                compile_s: compiler.seconds(),
                ..CudaStart::default()
            },
            free_at_start: free,
            adapter_bytes: 0,
            pending: VecDeque::new(),
            mixed_steps: settings.mixed_steps,
            chunks: Vec::new(),
            token_ids: Vec::new(),
            sampling: Vec::new(),
            rows: Vec::new(),
        };
        if settings.capture {
            runner.start.graphs = runner.backend.capture()?.buckets.len();
            runner.start.capture_s = begin.elapsed().as_secs_f64() - open_s - load_s;
        }
        Ok(runner)
    }

    /// The model's backend.
    pub fn backend(&self) -> &CudaBackend {
        &self.backend
    }

    /// The backend, for what only it can do; not while steps are under way.
    pub fn backend_mut(&mut self) -> &mut CudaBackend {
        &mut self.backend
    }

    /// How long the start took.
    pub fn start(&self) -> &CudaStart {
        &self.start
    }

    /// Bytes of device memory taken since just before the device was used, by everyone on it.
    ///
    /// # Errors
    /// [`Error::Model`] for errors of the driver.
    pub fn memory_used(&self) -> Result<u64, Error> {
        let free = self
            .backend
            .stream()
            .device()
            .memory()
            .map_err(qwen3_model::Error::from)?
            .free as u64;
        Ok(self.free_at_start.saturating_sub(free))
    }

    /// Queues the pass of a step's prompts and of the first `together` decode rows. Gives the number of sampled rows.
    fn submit_packed(&mut self, step: &Step, together: usize, pages: &PageTable) -> Result<usize, Error> {
        let (tokens, sequences, rows) = (step.token_ids.len(), step.prefill.len(), together);
        let _span = tracing::debug_span!("prefill", tokens, sequences, rows).entered();
        let decoding = &step.decode[..together];
        self.chunks.clear();
        self.chunks.extend(step.prefill.iter().map(|chunk| SequenceChunk {
            slot: chunk.slot,
            start: chunk.start,
            len: chunk.len,
            wants_logits: chunk.sample.is_some(),
        }));
        self.chunks.extend(decoding.iter().map(|row| SequenceChunk {
            slot: row.slot,
            start: row.position,
            len: 1,
            wants_logits: true,
        }));
        self.token_ids.clear();
        self.token_ids.extend_from_slice(&step.token_ids);
        // Theirs are on the device; these are not looked at.
        self.token_ids.resize(tokens + together, 0);
        self.sampling.clear();
        self.sampling
            .extend(step.prefill.iter().filter_map(|chunk| chunk.sample));
        self.sampling.extend(decoding.iter().map(|row| row.sampling));
        let batch = StepBatch {
            token_ids: &self.token_ids,
            chunks: &self.chunks,
        };
        let plan = self
            .planner
            .plan(self.backend.config(), &batch, pages, LogitRows::Wanted)?;
        Ok(self.backend.prefill_and_decode(&plan, together, &self.sampling)?)
    }

    fn error(&self, reason: &str) -> Error {
        Error::Runner {
            device: self.device.clone(),
            reason: reason.into(),
        }
    }
}

/// What the backend of a runner of this shape is asked for.
pub(crate) fn backend_options(shape: &RunnerShape, settings: &CudaSettings) -> CudaOptions {
    CudaOptions {
        // Prompts, and a row for each sequence that decodes beside them.
        max_tokens: shape.max_prefill_tokens.saturating_add(shape.max_batch_size),
        max_batch_size: shape.max_batch_size,
        max_seq_length: shape.max_seq_length,
        n_pages: shape.n_pages,
        page_size: shape.page_size,
        kernels: settings.kernels,
    }
}

fn unavailable(ordinal: usize, error: cuda_graphs::Error) -> Error {
    Error::DeviceUnavailable {
        device: format!("cuda:{ordinal}"),
        reason: error.to_string(),
    }
}

/// Prompt tokens beside `decoding` rows that fill the tiles of the products.
fn mixed_prefill_tokens(decoding: usize) -> usize {
    let least = decoding.saturating_add(MIN_MIXED_PREFILL_TOKENS);
    least.max(MIXED_ROWS).next_multiple_of(MIXED_ROWS / 2) - decoding
}

impl Runner for CudaRunner {
    fn shape(&self) -> RunnerShape {
        self.shape
    }

    fn device(&self) -> String {
        self.device.clone()
    }

    fn memory(&self) -> RunnerMemory {
        RunnerMemory {
            weight_bytes: self.backend.weight_bytes(),
            adapter_bytes: self.adapter_bytes,
            kv_bytes: self.backend.kv_layout().bytes().unwrap_or(u64::MAX),
        }
    }

    fn mixed_prefill_tokens(&self, decoding: usize) -> usize {
        mixed_prefill_tokens(decoding).min(self.shape.max_prefill_tokens)
    }

    fn prepare_mixed_steps(&mut self) -> Result<(), Error> {
        let decoding = self.shape.max_batch_size;
        Ok(self
            .backend
            .prepare_products(decoding + mixed_prefill_tokens(decoding))?)
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        if self.pending.len() >= MAX_IN_FLIGHT {
            return Err(self.error("a step was submitted while two were under way"));
        }
        self.backend.copy_pages(&step.copies)?;
        self.backend.sync_pages(pages)?;
        for tokens in &step.slot_tokens {
            self.backend
                .set_token_states(tokens.slot.index(), &tokens.states)?;
        }
        for of in &step.slot_policies {
            self.backend.set_slot_policy(of.slot.index(), of.policy)?;
        }
        let mut sampled = 0;
        // Rows that go through the pass of the prompts.
        let mut together = 0;
        if !step.prefill.is_empty() {
            if self.mixed_steps {
                together = step.decode.len();
            }
            sampled = self.submit_packed(step, together, pages)?;
        }
        let alone = &step.decode[together..];
        let rows = alone.len();
        let _span = (rows > 0).then(|| tracing::debug_span!("decode", rows).entered());
        self.rows.clear();
        self.rows.extend(alone.iter().map(|row| DecodeRow {
            slot: row.slot.index(),
            position: row.position,
            sampling: row.sampling,
        }));
        self.backend.decode(&self.rows)?;
        self.pending
            .push_back(self.backend.read_back(sampled, self.rows.len())?);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        let Some(pending) = self.pending.pop_front() else {
            return Err(self.error("nothing was submitted"));
        };
        let sampled = self.backend.collect(pending)?;
        Ok(sampled
            .into_iter()
            .map(|s| SampledToken {
                token: s.token,
                logprob: s.logprob,
                sampled_logprob: s.sampled_logprob,
                top_logprobs: s.top_logprobs,
            })
            .collect())
    }

    fn reset(&mut self) {
        self.pending.clear();
        if let Err(error) = self.backend.reset() {
            tracing::error!(%error, "the GPU reports an error of the steps that were given up");
        }
    }

    fn policy(&self) -> PolicyVersion {
        self.backend.policy()
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        let update = PolicyUpdate::from(self.backend.set_adapters(active, mode)?);
        self.adapter_bytes = update.pristine_bytes;
        Ok(update)
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        let update = PolicyUpdate::from(self.backend.serve_policies(policies)?);
        self.adapter_bytes = update.pristine_bytes;
        Ok(update)
    }

    fn base_sha256(&mut self) -> Result<[u8; 32], Error> {
        Ok(self.backend.base_sha256()?)
    }

    fn served_sha256(&mut self) -> Result<[u8; 32], Error> {
        Ok(self.backend.served_sha256()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_beside_decoding_fill_whole_tiles_of_rows() {
        for (decoding, tokens) in [(1, 255), (20, 236), (64, 192), (128, 128), (129, 255), (256, 128)] {
            assert_eq!(mixed_prefill_tokens(decoding), tokens, "{decoding} rows decode");
        }
    }
}
