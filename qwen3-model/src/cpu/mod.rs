//! The model on the processor: weights in bf16 where they lie, or in 4 bits, and everything else in f32.

mod attention;
mod elementwise;
mod matmul;
mod operations;
mod policies;
mod runtime_update;
mod simd;

use std::path::Path;

use lora_merge::{MergedStore, PolicyVersion, RefreshStep};
use paged_kv::{KvCache, KvDtype, KvLayout};

use crate::{Error, Model, PristineWeights, Qwen3Config, Result, RopeFrequencies, Weights, modules};
use attention::Attention;
use matmul::SplitRows;
use runtime_update::RuntimePolicies;

/// How a model is set up on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadOptions {
    /// Type of the cached keys and values. f32 (the default) reproduces an f32 model; bf16 halves
    /// the memory.
    pub kv_dtype: KvDtype,
    /// Pages of the cache, the reserved page 0 included.
    pub n_pages: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Most tokens in one step. Buffers grow to what is used, not to this.
    pub max_tokens: usize,
}

impl Default for LoadOptions {
    /// f32 cache of 64 pages with 64 tokens each, up to 2048 tokens per step.
    fn default() -> Self {
        Self {
            kv_dtype: KvDtype::F32,
            n_pages: 64,
            page_size: 64,
            max_tokens: 2048,
        }
    }
}

/// [`Backend`](crate::Backend) on the processor's cores and vector units.
///
/// A step runs on rayon's threads. A token's logits depend on its own sequence only, bit for bit:
/// not on what else is in the step, and not on how a prompt was cut into chunks.
///
/// ```
/// use qwen3_model::{CpuBackend, LoadOptions, Model, Qwen3Config, Weights};
///
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../rollout-engine/models/tiny-qwen3-math");
/// let config = Qwen3Config::from_dir(dir.as_ref())?;
/// // In 4 bits, as bitsandbytes would store it.
/// let weights = Weights::open(dir.as_ref(), &config)?.quantized(Default::default(), true)?;
/// let model = Model::new(CpuBackend::new(config, weights, &LoadOptions::default())?);
/// assert!(model.backend().weights().is_quantized());
/// # Ok::<(), qwen3_model::Error>(())
/// ```
pub struct CpuBackend {
    config: Qwen3Config,
    /// Pristine weights, and merged ones where adapters have targeted them.
    store: MergedStore<PristineWeights>,
    /// Adapters that are not merged.
    runtime: RuntimePolicies,
    version: PolicyVersion,
    rope: RopeFrequencies,
    cache: KvCache,
    max_tokens: usize,
    step: Step,
    buffers: Buffers,
    attention: Attention,
}

/// What [`Backend::prepare`](crate::Backend::prepare) took over.
#[derive(Default)]
struct Step {
    token_ids: Vec<u32>,
    physical: Vec<usize>,
    logit_rows: Vec<u32>,
    /// `[tokens, head_dim / 2]` each.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// The buffers in the drawing of [`crate::backend`].
#[derive(Default)]
struct Buffers {
    residual: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]` each, packed for the cache.
    keys: Vec<f32>,
    values: Vec<f32>,
    mixed: Vec<f32>,
    delta: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    logits: Vec<f32>,
    /// Input of the product at hand.
    split: SplitRows,
    scratch: Vec<f32>,
}

impl CpuBackend {
    /// A backend over `weights`, with an empty cache.
    ///
    /// # Errors
    /// [`Error::Field`] for a configuration that no model has; [`Error::Option`] for an option that is 0 and weights of
    /// another shape; [`Error::PagedKv`] for a cache that cannot be.
    pub fn new(config: Qwen3Config, weights: Weights, options: &LoadOptions) -> Result<Self> {
        let LoadOptions {
            kv_dtype,
            n_pages,
            page_size,
            max_tokens,
        } = *options;
        if max_tokens == 0 {
            return Err(Error::Option {
                option: "max_tokens",
                problem: "is 0".into(),
            });
        }
        config.check()?;
        weights.check(&config)?;
        let cache = KvCache::new(KvLayout {
            n_layers: config.n_layers,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            n_pages,
            page_size,
            dtype: kv_dtype,
        })?;
        let rope = config.rope.frequencies(config.head_dim);
        let specs = modules(&config);
        let store = MergedStore::new(specs, PristineWeights::new(weights))?;
        Ok(Self {
            config,
            runtime: RuntimePolicies::default(),
            version: store.version(),
            store,
            rope,
            cache,
            max_tokens,
            step: Step::default(),
            buffers: Buffers::default(),
            attention: Attention::default(),
        })
    }

    /// The pristine weights.
    pub fn weights(&self) -> &Weights {
        self.store.source().weights()
    }

    /// Pristine and merged weights of the modules that adapters may target.
    pub fn store(&self) -> &MergedStore<PristineWeights> {
        &self.store
    }

    /// Sets a hook that is asked before every step of a merge whether the step shall fail, for tests of what happens
    /// then. Panics: none.
    pub fn set_fault_hook(&mut self, hook: Option<Box<dyn FnMut(RefreshStep) -> bool + Send>>) {
        self.store.set_fault_hook(hook);
    }

    /// The policy in force.
    pub fn version(&self) -> PolicyVersion {
        self.version
    }

    /// The cache.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// The cache, for instance to poison pages in a test.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// Bytes of the buffers that steps work in, beside weights and cache: as many as the largest step so far needed,
    /// whatever the lengths of its sequences.
    pub fn workspace_bytes(&self) -> usize {
        let Buffers {
            residual,
            normed,
            qkv,
            keys,
            values,
            mixed,
            delta,
            gate_up,
            gated,
            logits,
            split,
            scratch,
        } = &self.buffers;
        let buffers = [
            residual, normed, qkv, keys, values, mixed, delta, gate_up, gated, logits, scratch,
        ];
        let floats = buffers.iter().map(|buffer| buffer.capacity()).sum::<usize>() + split.capacity();
        floats * size_of::<f32>()
    }

    fn rms_norm_eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }
}

impl Model<CpuBackend> {
    /// Loads a Hugging Face folder: `config.json` and safetensors. Weights of bf16 files are not
    /// copied but used from the mapped file.
    ///
    /// # Errors
    /// Those of [`Error`] about files, fields and tensors, and of [`CpuBackend::new`].
    pub fn load(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let dir = dir.as_ref();
        let config = Qwen3Config::from_dir(dir)?;
        let weights = Weights::open(dir, &config)?;
        Ok(Self::new(CpuBackend::new(config, weights, options)?))
    }

    /// A model with random weights (see [`Weights::random`]), for measurements.
    ///
    /// # Errors
    /// Those of [`CpuBackend::new`].
    pub fn random(config: Qwen3Config, seed: u64, options: &LoadOptions) -> Result<Self> {
        let weights = Weights::random(&config, seed);
        Ok(Self::new(CpuBackend::new(config, weights, options)?))
    }
}

impl Buffers {
    fn resize(&mut self, config: &Qwen3Config, tokens: usize, wanted: usize) {
        let sizes = [
            (&mut self.residual, tokens * config.hidden_size),
            (&mut self.normed, tokens * config.hidden_size),
            (&mut self.qkv, tokens * config.qkv_size()),
            (&mut self.keys, tokens * config.kv_size()),
            (&mut self.values, tokens * config.kv_size()),
            (&mut self.mixed, tokens * config.q_size()),
            (&mut self.delta, tokens * config.hidden_size),
            (&mut self.gate_up, tokens * 2 * config.intermediate_size),
            (&mut self.gated, tokens * config.intermediate_size),
            (&mut self.logits, wanted * config.vocab_size),
        ];
        for (buffer, size) in sizes {
            buffer.resize(size, 0.0);
        }
    }
}
