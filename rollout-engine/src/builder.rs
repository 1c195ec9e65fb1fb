//! Building an engine from a model folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use paged_kv::KvDtype;
use qwen3_model::{GenerationConfig, KernelOptions, MergeMode, PristineCopy, Qwen3Config};

use crate::adapters::{AdapterSet, AdapterSource, PolicyUpdate};
use crate::device::{self, DeviceChoice, OpenedDevice};
use crate::engine::Engine;
use crate::pool::PoolSettings;
use crate::text::TextPipeline;
use crate::tuned::TunedChoice;
use crate::{Error, model_folder};

/// Settings of an engine. All have defaults; without a model folder the bundled model is used.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Request};
///
/// let mut engine = Engine::builder()
///     .device(DeviceChoice::Cpu)
///     .max_batch_size(2)
///     .max_seq_length(128)
///     .page_size(16)
///     .build()?;
/// let completion = engine.generate(&[Request::text("Count").max_new_tokens(3)])?.remove(0)?;
/// assert_eq!(completion.token_ids.len(), 3);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct EngineBuilder {
    model_dir: Option<PathBuf>,
    device: DeviceChoice,
    settings: RunnerSettings,
    adapters: Vec<(PathBuf, f32)>,
    /// `None`: merged where that can be, at run time for a model in 4 bits.
    merge_mode: Option<MergeMode>,
    seed: u64,
    prefix_cache: bool,
}

/// What a device needs to know besides the model folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunnerSettings {
    pub(crate) pool: PoolSettings,
    pub(crate) kv_dtype: Option<KvDtype>,
    /// On a GPU, launch decode steps kernel by kernel.
    pub(crate) eager: bool,
    /// On a GPU, where pristine copies of adapted weights live.
    pub(crate) pristine: PristineCopy,
    /// On a GPU, options of its kernels.
    pub(crate) kernels: KernelOptions,
    /// Which profile fills in what is left open.
    pub(crate) tuned: TunedChoice,
    /// Results do not depend on the batch.
    pub(crate) batch_invariant: bool,
    /// Weights in 4 bits become bf16 ones when they are loaded.
    pub(crate) dequantize: bool,
}

/// An engine with what there is to say about how it was built.
///
/// ```
/// use rollout_engine::{BuiltEngine, Engine};
///
/// let BuiltEngine { engine, notice, policy } = Engine::builder().max_batch_size(2).build_with_notice()?;
/// if let Some(notice) = notice {
///     eprintln!("{notice}"); // such as: no GPU, hence on the CPU
/// }
/// assert!(policy.is_none(), "no adapter was given");
/// assert_eq!(engine.scheduler().shape().max_batch_size, 2);
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct BuiltEngine {
    /// The engine.
    pub engine: Engine,
    /// One line for the user if the device `auto` could not use a GPU.
    pub notice: Option<String>,
    /// What the adapters did to the model, if there are any.
    pub policy: Option<PolicyUpdate>,
}

impl EngineBuilder {
    /// Default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// A folder in Hugging Face form: `config.json`, safetensors, and for text `tokenizer.json`; or an id, such as
    /// `Qwen/Qwen3-0.6B`, that Hugging Face's cache on this machine has. Nothing is fetched.
    #[must_use]
    pub fn model(mut self, dir: impl Into<PathBuf>) -> Self {
        self.model_dir = Some(dir.into());
        self
    }

    /// Where to run. Default: [`DeviceChoice::Auto`].
    #[must_use]
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// All sizes at once.
    #[must_use]
    pub fn pool(mut self, pool: PoolSettings) -> Self {
        self.settings.pool = pool;
        self
    }

    /// Most sequences at once. Default: 64.
    #[must_use]
    pub fn max_batch_size(mut self, sequences: usize) -> Self {
        self.settings.pool.max_batch_size = Some(sequences);
        self
    }

    /// Most tokens of prompt and completion together. Default: the model's positions.
    #[must_use]
    pub fn max_seq_length(mut self, tokens: usize) -> Self {
        self.settings.pool.max_seq_length = Some(tokens);
        self
    }

    /// Pages of the KV cache, the reserved page 0 included. Default: see [`PoolSettings::n_pages`].
    #[must_use]
    pub fn n_pages(mut self, pages: usize) -> Self {
        self.settings.pool.n_pages = Some(pages);
        self
    }

    /// Token positions per page. Default: 64.
    #[must_use]
    pub fn page_size(mut self, tokens: usize) -> Self {
        self.settings.pool.page_size = Some(tokens);
        self
    }

    /// Most prompt tokens per step, which bounds the memory for activations. Default: 512 on a CPU, 4096 on a GPU. See also
    /// [`Scheduler::set_mixed_prefill_tokens`](crate::Scheduler::set_mixed_prefill_tokens).
    #[must_use]
    pub fn max_prefill_tokens(mut self, tokens: usize) -> Self {
        self.settings.pool.max_prefill_tokens = Some(tokens);
        self
    }

    /// Type of the KV cache. Default: f32 on a CPU, bf16 on a GPU.
    #[must_use]
    pub fn kv_dtype(mut self, dtype: KvDtype) -> Self {
        self.settings.kv_dtype = Some(dtype);
        self
    }

    /// Whether decode steps on a GPU are captured as CUDA graphs; without, the same work is launched kernel by
    /// kernel, with the same results. Default: true. Without effect on a CPU.
    #[must_use]
    pub fn capture_graphs(mut self, on: bool) -> Self {
        self.settings.eager = !on;
        self
    }

    /// Options of the kernels of a GPU. They change speed, and the order of sums. Default: what is best on the device as
    /// far as we know. Without effect on a CPU.
    #[must_use]
    pub fn kernel_options(mut self, kernels: KernelOptions) -> Self {
        self.settings.kernels = kernels;
        self
    }

    /// Which profile fills in sizes and kernel options that are not set. Default: that of the device and the model's
    /// shape, if `rollout tune` has written one or there is one built in.
    #[must_use]
    pub fn tuned_profile(mut self, choice: TunedChoice) -> Self {
        self.settings.tuned = choice;
        self
    }

    /// Seed from which requests without one get theirs; see [`Scheduler::set_seed`](crate::Scheduler::set_seed). Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Serves an adapter, from a PEFT folder. May be given several times: the adapters then apply together.
    #[must_use]
    pub fn adapter(self, dir: impl Into<PathBuf>) -> Self {
        self.weighted_adapter(dir, 1.0)
    }

    /// As [`EngineBuilder::adapter`], with a factor on the adapter's scaling; 1 is what it was trained with.
    #[must_use]
    pub fn weighted_adapter(mut self, dir: impl Into<PathBuf>, weight: f32) -> Self {
        self.adapters.push((dir.into(), weight));
        self
    }

    /// Whether adapters are merged into the weights or applied at run time. Default: merged, or at run time for a model in
    /// 4 bits, whose weights cannot be merged into.
    #[must_use]
    pub fn merge_mode(mut self, mode: MergeMode) -> Self {
        self.merge_mode = Some(mode);
        self
    }

    /// Whether the weights of a model in 4 bits become bf16 when they are loaded: four times the memory, and adapters can
    /// be merged. Without effect on other models. Default: false.
    #[must_use]
    pub fn dequantize(mut self, on: bool) -> Self {
        self.settings.dequantize = on;
        self
    }

    /// Where the pristine copies of weights that adapters target live on a GPU: memory against the time of a refresh, with
    /// the same results. Default: in device memory. On a CPU it is the model file, if that is bf16.
    #[must_use]
    pub fn pristine_copy(mut self, place: PristineCopy) -> Self {
        self.settings.pristine = place;
        self
    }

    /// Whether a request's tokens and log-probabilities must have the same bits whatever else is in the batch, however its
    /// prompt is cut into chunks, and whether it is preempted. On a CPU they always have. On a GPU products and attention then
    /// take forms that do not depend on the number of rows, which costs speed (`docs/performance.md` says how much), and
    /// weights in 4 bits or adapters beside the weights are refused. Default: false.
    #[must_use]
    pub fn batch_invariant(mut self, on: bool) -> Self {
        self.settings.batch_invariant = on;
        self
    }

    /// Whether pages of computed prompts and completions are kept for later requests that start with the same tokens, such
    /// as a system prompt or the turns of a conversation. They are used under the policy that computed them only, and give
    /// way, least recently used first, when running sequences need pages. The last token of a prompt is always computed.
    /// Default: false, so that the time of a request does not depend on those before it.
    #[must_use]
    pub fn prefix_cache(mut self, on: bool) -> Self {
        self.prefix_cache = on;
        self
    }

    /// Loads the model.
    ///
    /// # Errors
    /// A file of a folder is missing or wrong, an adapter does not fit the model, a setting cannot work, or the device cannot be used.
    pub fn build(self) -> Result<Engine, Error> {
        Ok(self.build_with_notice()?.engine)
    }

    /// As [`EngineBuilder::build`], with the line that says why `auto` did not use a GPU.
    ///
    /// # Errors
    /// As for `build`.
    pub fn build_with_notice(self) -> Result<BuiltEngine, Error> {
        let dir = self.model_dir()?;
        let _span = tracing::info_span!("load", what = %dir.display()).entered();
        let config = Qwen3Config::from_dir(&dir)?;
        let generation = GenerationConfig::from_dir(&dir)?.unwrap_or_default();
        let eos_token_ids = match generation.eos_token_ids.is_empty() {
            true => config.eos_token_ids.clone(),
            false => generation.eos_token_ids,
        };
        let text = TextPipeline::from_dir(&dir)?.map(Arc::new);
        self.open(&dir, &config, eos_token_ids, text)
    }

    fn open(
        self,
        dir: &Path,
        config: &Qwen3Config,
        eos_token_ids: Vec<u32>,
        text: Option<Arc<TextPipeline>>,
    ) -> Result<BuiltEngine, Error> {
        // Adapters before weights: a mistake in them shows before a large model is loaded.
        let sources = self.adapters.into_iter();
        let mut adapters = AdapterSet::read(
            self.merge_mode.unwrap_or_default(),
            sources.map(|(dir, weight)| (AdapterSource::from(dir), weight)),
        )?;
        let OpenedDevice {
            runner,
            notice,
            quantized,
        } = device::open(self.device, dir, config, &self.settings)?;
        if quantized && self.merge_mode.is_none() {
            adapters.set_mode(MergeMode::Unmerged);
        }
        let mut engine = Engine::with_runner(runner, eos_token_ids, text)?;
        engine.set_seed(self.seed);
        let policy = engine.serve_first(adapters)?;
        engine.set_prefix_cache(self.prefix_cache)?;
        Ok(BuiltEngine {
            engine,
            notice,
            policy,
        })
    }

    /// The folder of the model, that of the bundled one if none was given.
    pub(crate) fn model_dir(&self) -> Result<PathBuf, Error> {
        model_folder::find(self.model_dir.as_deref())
    }

    #[cfg(feature = "serve")]
    pub(crate) fn seed_given(&self) -> u64 {
        self.seed
    }

    /// Whether adapters were given.
    #[cfg(feature = "serve")]
    pub(crate) fn has_adapters(&self) -> bool {
        !self.adapters.is_empty()
    }

    /// As [`EngineBuilder::build`], for other weights of a model whose tokenizer and end-of-sequence ids are known:
    /// the folder needs none.
    #[cfg(feature = "serve")]
    pub(crate) fn reopen(
        self,
        eos_token_ids: Vec<u32>,
        text: Option<Arc<TextPipeline>>,
    ) -> Result<Engine, Error> {
        let dir = self.model_dir()?;
        let config = Qwen3Config::from_dir(&dir)?;
        Ok(self.open(&dir, &config, eos_token_ids, text)?.engine)
    }
}
