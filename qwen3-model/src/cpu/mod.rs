//! The model on the processor: weights in bf16 where they lie, or in 4 bits, and everything else in f32.

mod attention;
mod elementwise;
mod matmul;
mod runtime_update;
mod simd;

use std::borrow::Cow;
use std::path::Path;
use std::time::Instant;

use half::bf16;
use lora_merge::{
    ActiveAdapter, DriftSubject, MergedStore, ModuleUpdate, PolicyVersion, PristineSource, RefreshStep,
    Resolved,
};
use paged_kv::{KvCache, KvDtype, KvLayout, PageCopy};

use crate::adapters::{digest_of_policies, has_effect, module_index};
use crate::digest::{Parameter, Values, digest};
use crate::{
    AdapterReport, Backend, Error, FusedMatrix, MergeMode, Model, Norm, PristineWeights, Qwen3Config, Result,
    RopeFrequencies, StepPlan, Weights, modules, walk,
};
use attention::Attention;
use elementwise::{add, for_rows, norm_rope, rms_norm, silu_mul, widen};
use matmul::{Matrix, SplitRows, matmul};
use runtime_update::{Columns, RuntimePolicies};

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

/// [`Backend`] on the processor's cores and vector units.
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

/// What [`Backend::prepare`] took over.
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
    /// [`Error::Option`] for an option that is 0, [`Error::PagedKv`] for a cache that cannot be.
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

impl Backend for CpuBackend {
    fn config(&self) -> &Qwen3Config {
        &self.config
    }

    fn kv_layout(&self) -> &KvLayout {
        self.cache.layout()
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn prepare(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        let (tokens, max) = (plan.n_tokens(), self.max_tokens);
        if tokens > max {
            return Err(Error::StepTooLarge { tokens, max });
        }
        let layout = self.cache.layout();
        let (table_pages, table_page_size) = (plan.table().n_pages(), plan.table().page_size());
        if (table_pages, table_page_size) != (layout.n_pages, layout.page_size) {
            let (cache_pages, cache_page_size) = (layout.n_pages, layout.page_size);
            return Err(Error::CacheShape {
                table_pages,
                table_page_size,
                cache_pages,
                cache_page_size,
            });
        }
        self.attention.prepare(plan)?;
        let half = self.config.head_dim / 2;
        let step = &mut self.step;
        replace(&mut step.token_ids, plan.token_ids());
        replace(&mut step.physical, plan.physical());
        replace(&mut step.logit_rows, plan.logit_rows());
        let chunks = plan.chunks().iter();
        self.runtime
            .prepare(chunks.map(|chunk| (chunk.slot.index(), chunk.len)));
        step.cos.resize(tokens * half, 0.0);
        step.sin.resize(tokens * half, 0.0);
        let angles = step
            .cos
            .chunks_exact_mut(half)
            .zip(step.sin.chunks_exact_mut(half));
        for (position, (cos, sin)) in plan.positions().iter().zip(angles) {
            self.rope.cos_sin(*position as usize, cos, sin);
        }
        self.buffers.resize(&self.config, tokens, plan.logit_rows().len());
        Ok(())
    }

    fn embed(&mut self) -> Result<()> {
        let (ids, table) = (&self.step.token_ids, &self.store.source().weights().embed_tokens);
        for_rows(&mut self.buffers.residual, self.config.hidden_size, |row, to| {
            widen(to, table.row(ids[row] as usize));
        });
        Ok(())
    }

    fn rms_norm(&mut self, layer: usize, norm: Norm) -> Result<()> {
        let (hidden, eps) = (self.config.hidden_size, self.rms_norm_eps());
        let weights = &self.store.source().weights().layers[layer];
        let weight = match norm {
            Norm::Attention => &weights.input_norm,
            Norm::Mlp => &weights.post_attention_norm,
        };
        let Buffers {
            residual,
            normed,
            delta,
            ..
        } = &mut self.buffers;
        if (layer, norm) != (0, Norm::Attention) {
            for_rows(residual, hidden, |row, to| {
                add(to, &delta[row * hidden..][..hidden])
            });
        }
        for_rows(normed, hidden, |row, to| {
            rms_norm(to, &residual[row * hidden..][..hidden], weight, eps)
        });
        Ok(())
    }

    fn project(&mut self, layer: usize, matrix: FusedMatrix) -> Result<()> {
        let Buffers {
            normed,
            qkv,
            mixed,
            delta,
            gate_up,
            gated,
            split,
            scratch,
            ..
        } = &mut self.buffers;
        let (input, output) = match matrix {
            FusedMatrix::Qkv => (normed, qkv),
            FusedMatrix::O => (mixed, delta),
            FusedMatrix::GateUp => (normed, gate_up),
            FusedMatrix::Down => (gated, delta),
        };
        let cols = input.len() / self.step.token_ids.len();
        let (store, runtime) = (&self.store, &self.runtime);
        let part = |i: usize| match matrix.parts().get(i) {
            Some(projection) => served(store, runtime, module_index(layer, *projection)),
            None => Matrix::Bf16(&[]),
        };
        split.set(input, cols);
        matmul(&[part(0), part(1), part(2)], split, scratch, output);
        let stride = output.len() / self.step.token_ids.len();
        let mut first = 0;
        for &projection in matrix.parts() {
            let size = self.config.projection_shape(projection)[0];
            let columns = Columns { stride, first, size };
            let module = module_index(layer, projection);
            complete(store, runtime, module, input, output, columns, |row| row);
            first += size;
        }
        Ok(())
    }

    fn qk_norm_rope_write(&mut self, layer: usize) -> Result<()> {
        let eps = self.rms_norm_eps();
        let (head_dim, half) = (self.config.head_dim, self.config.head_dim / 2);
        let (q_size, kv_size, qkv_size) = (
            self.config.q_size(),
            self.config.kv_size(),
            self.config.qkv_size(),
        );
        let weights = &self.store.source().weights().layers[layer];
        let Step {
            cos, sin, physical, ..
        } = &self.step;
        let Buffers {
            qkv, keys, values, ..
        } = &mut self.buffers;
        for_rows(qkv, qkv_size, |row, qkv| {
            let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
            let (queries, rest) = qkv.split_at_mut(q_size);
            for head in queries.chunks_exact_mut(head_dim) {
                norm_rope(head, &weights.q_norm, eps, cos, sin);
            }
            for head in rest[..kv_size].chunks_exact_mut(head_dim) {
                norm_rope(head, &weights.k_norm, eps, cos, sin);
            }
        });
        for (row, qkv) in qkv.chunks_exact(qkv_size).enumerate() {
            let (key, value) = qkv[q_size..].split_at(kv_size);
            keys[row * kv_size..][..kv_size].copy_from_slice(key);
            values[row * kv_size..][..kv_size].copy_from_slice(value);
        }
        self.cache.write(layer, physical, keys, values)?;
        Ok(())
    }

    fn attention(&mut self, layer: usize) -> Result<()> {
        let view = self.cache.layer(layer)?;
        self.attention
            .run(&self.config, &self.buffers.qkv, view, &mut self.buffers.mixed)
    }

    fn silu_mul(&mut self) -> Result<()> {
        let size = self.config.intermediate_size;
        let gate_up = &self.buffers.gate_up;
        for_rows(&mut self.buffers.gated, size, |row, to| {
            let (gate, up) = gate_up[row * 2 * size..][..2 * size].split_at(size);
            silu_mul(to, gate, up);
        });
        Ok(())
    }

    fn logits(&mut self) -> Result<()> {
        let wanted = self.step.logit_rows.len();
        if wanted == 0 {
            return Ok(());
        }
        let (hidden, eps) = (self.config.hidden_size, self.rms_norm_eps());
        let Buffers {
            residual,
            normed,
            delta,
            split,
            scratch,
            logits,
            ..
        } = &mut self.buffers;
        let normed = &mut normed[..wanted * hidden];
        for (to, &row) in normed.chunks_exact_mut(hidden).zip(&self.step.logit_rows) {
            let place = row as usize * hidden..(row as usize + 1) * hidden;
            add(&mut residual[place.clone()], &delta[place.clone()]);
            rms_norm(to, &residual[place], &self.store.source().weights().norm, eps);
        }
        split.set(normed, hidden);
        let (module, size) = (self.store.specs().len() - 1, self.config.vocab_size);
        matmul(
            &[served(&self.store, &self.runtime, module)],
            split,
            scratch,
            logits,
        );
        let columns = Columns {
            stride: size,
            first: 0,
            size,
        };
        let rows = &self.step.logit_rows;
        let row_of = |row: usize| rows[row] as usize;
        complete(
            &self.store,
            &self.runtime,
            module,
            normed,
            logits,
            columns,
            row_of,
        );
        Ok(())
    }

    fn step(&mut self, plan: &StepPlan<'_>) -> Result<()> {
        // From within rayon's pool each parallel operation saves the hand-over to it.
        rayon::scope(|_| {
            self.prepare(plan)?;
            walk(self)
        })
    }

    fn read_logits(&mut self) -> Result<&[f32]> {
        Ok(&self.buffers.logits)
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<()> {
        Ok(self.cache.copy_pages(copies)?)
    }

    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<AdapterReport> {
        let start = Instant::now();
        let resolved = self.store.resolve(active)?;
        match mode {
            MergeMode::Merged => self.change(active, RuntimePolicies::default(), &[resolved], mode, start),
            MergeMode::Unmerged => {
                let resolved = [resolved];
                let runtime = RuntimePolicies::new(&resolved, self.weights())?;
                self.change(&[], runtime, &resolved, mode, start)
            }
        }
    }

    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<AdapterReport> {
        let start = Instant::now();
        let resolved = policies.iter().map(|active| self.store.resolve(active));
        let resolved = resolved.collect::<Result<Vec<_>, _>>()?;
        for resolved in &resolved {
            let whole =
                |update: &Option<ModuleUpdate>| update.as_ref().is_some_and(|u| u.replacement().is_some());
            if let Some(module) = resolved.updates().iter().position(whole) {
                return Err(lora_merge::Error::Module {
                    module: self.store.specs()[module].name.clone(),
                    field: "modules_to_save",
                    reason: "a whole module cannot be replaced for one of several policies; merge the adapter",
                }
                .into());
            }
        }
        let runtime = RuntimePolicies::new(&resolved, self.weights())?;
        self.change(&[], runtime, &resolved, MergeMode::Unmerged, start)
    }

    fn set_slot_policy(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        self.runtime.set_slot(slot, policy)
    }

    fn policy(&self) -> PolicyVersion {
        self.version
    }

    fn base_sha256(&mut self) -> Result<[u8; 32]> {
        let this = &*self;
        digest(&self.config, |parameter| {
            Ok(match parameter {
                Parameter::Weight(module) => this.matrix(module, this.store.source().slice(module)),
                other => this.other_parameter(other),
            })
        })
    }

    fn served_sha256(&mut self) -> Result<[u8; 32]> {
        let this = &*self;
        digest(&self.config, |parameter| {
            Ok(match parameter {
                Parameter::Weight(module) => this.matrix(module, this.store.weight(module)),
                Parameter::Bias(module) => match this.store.bias(module) {
                    Some(bias) => Values::Bias(Cow::Borrowed(bias)),
                    None => Values::Absent,
                },
                other => this.other_parameter(other),
            })
        })
    }
}

impl CpuBackend {
    /// Makes `merged` and `runtime` the adapters in force, which are those of `resolved`.
    fn change(
        &mut self,
        merged: &[ActiveAdapter],
        runtime: RuntimePolicies,
        resolved: &[Resolved],
        mode: MergeMode,
        start: Instant,
    ) -> Result<AdapterReport> {
        let updates = || resolved.iter().flat_map(|one| one.updates().iter().flatten());
        let effective = updates().filter(|update| has_effect(update)).count();
        // The last step that can fail, and it leaves the store as it was if it does.
        let refresh = self.store.refresh(merged)?;
        let was_runtime = std::mem::replace(&mut self.runtime, runtime).any();
        let sha256 = digest_of_policies(resolved);
        let same_policy = self.version.sha256 == sha256 && was_runtime;
        self.version = PolicyVersion {
            number: self.version.number + 1,
            sha256,
        };
        let adapted = resolved.iter().map(|one| one.updates().iter().flatten().count());
        Ok(AdapterReport {
            version: self.version,
            mode,
            adapted_modules: adapted.max().unwrap_or(0),
            warnings: resolved.iter().flat_map(|one| one.warnings().to_vec()).collect(),
            changed_modules: match mode {
                MergeMode::Merged => refresh.changed_modules,
                MergeMode::Unmerged if same_policy => 0,
                MergeMode::Unmerged => effective.max(refresh.changed_modules),
            },
            differs_from_base: match mode {
                MergeMode::Merged => refresh.differs_from_base,
                MergeMode::Unmerged => effective > 0,
            },
            recomputed: refresh.recomputed,
            memory: self.store.memory(),
            policies: resolved.iter().map(Resolved::digest).collect(),
            merge_elapsed: refresh.elapsed,
            elapsed: start.elapsed(),
        })
    }

    /// A parameter of the base, but for the matrices of modules and their biases.
    fn other_parameter(&self, parameter: Parameter) -> Values<'_> {
        let weights = self.weights();
        let norm = |values| Values::Norm(Cow::Borrowed(values));
        match parameter {
            Parameter::Embedding => Values::Matrix(Cow::Borrowed(weights.embed_tokens.data())),
            Parameter::FinalNorm => norm(&weights.norm),
            Parameter::InputNorm(layer) => norm(&weights.layers[layer].input_norm),
            Parameter::PostAttentionNorm(layer) => norm(&weights.layers[layer].post_attention_norm),
            Parameter::QueryNorm(layer) => norm(&weights.layers[layer].q_norm),
            Parameter::KeyNorm(layer) => norm(&weights.layers[layer].k_norm),
            Parameter::Weight(_) | Parameter::Bias(_) => Values::Absent,
        }
    }

    /// A module's matrix, unless it is the embedding itself; one in 4 bits counts with its bf16 values.
    fn matrix<'a>(&'a self, module: usize, data: Option<&'a [bf16]>) -> Values<'a> {
        let embedding = self.weights().embed_tokens.data();
        match (data, self.weights().module(module)) {
            (Some(data), _) if std::ptr::eq(data, embedding) => Values::Absent,
            (Some(data), _) => Values::Matrix(Cow::Borrowed(data)),
            (None, Some(matrix)) => Values::Matrix(matrix.to_bf16()),
            (None, None) => Values::Absent,
        }
    }
}

/// The matrix that a module computes with.
fn served<'a>(
    store: &'a MergedStore<PristineWeights>,
    runtime: &'a RuntimePolicies,
    module: usize,
) -> Matrix<'a> {
    let base = store.source().weights().module(module);
    match (
        runtime.replacement(module),
        base.and_then(|matrix| matrix.quantized()),
    ) {
        (Some(replacement), _) => Matrix::Bf16(replacement),
        (None, Some(quantized)) => Matrix::FourBit(quantized),
        (None, None) => Matrix::Bf16(store.weight(module).unwrap_or_default()),
    }
}

/// Adds to a module's product what its matrix does not hold: biases, and adapters at run time. Row `i` of the output is row
/// `row_of(i)` of the step.
fn complete(
    store: &MergedStore<PristineWeights>,
    runtime: &RuntimePolicies,
    module: usize,
    input: &[f32],
    output: &mut [f32],
    columns: Columns,
    row_of: impl Fn(usize) -> usize + Sync + Send,
) {
    if !runtime.apply(module, input, output, columns, row_of)
        && let Some(bias) = store.bias(module)
    {
        let Columns { stride, first, size } = columns;
        for_rows(output, stride, |_, row| add(&mut row[first..first + size], bias));
    }
}

/// `verify_no_drift` over all parameters.
impl DriftSubject for CpuBackend {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32]> {
        self.base_sha256()
    }

    fn served_digest(&mut self) -> Result<[u8; 32]> {
        self.served_sha256()
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<()> {
        self.set_adapters(active, MergeMode::Merged).map(|_| ())
    }
}

fn replace<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
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
