//! The model on an NVIDIA GPU.
//!
//! [`CudaBackend`] is the second implementation of [`Backend`]: our own kernels between matrix
//! products by cuBLASLt (on Hopper by kernels of our own for decode steps of up to 64 rows), all on
//! one stream, over buffers whose addresses never change. Two kinds of
//! steps share the buffers and the [`walk`] over the layers:
//!
//! ```text
//!   packed step   prompts, any mix of chunks,     inputs uploaded, kernels launched one by one
//!                 and one token for each of n rows
//!   decode step   one token for each of n rows    one graph launch, n padded to a bucket:
//!
//!       last_token[slot] ─▶ embed ─▶ layers ─▶ head ─▶ sample ─▶ last_token[slot], positions + 1
//! ```
//!
//! **Invariant.** Nothing on the device is freed or moved while the backend lives, so captured graphs
//! stay valid; padded rows have slot 0 and can write page 0 alone.
//!
//! **What may surprise.** Operations are queued and do not wait: [`CudaBackend::collect`] and
//! [`read_logits`](Backend::read_logits) do. A decode step takes its input tokens from what was
//! sampled last for each slot, on the device: the host need not have seen them.
//!
//! The numbers: weights, keys, values and the inputs of products are bf16; the residual stream, what
//! is added to it, norms, rotations, sums and logits are f32.

mod adapters;
mod attention;
mod biases;
mod decode_layers;
mod four_bit;
mod hashes;
mod inputs;
mod invariant;
mod operations;
mod profile;
mod results;
mod staging;
mod trace;
mod unmerged;
mod verify;
mod weights;
mod wide;
mod workspace;

use block_mask::cuda::{DecodeOptions, TileOptions};
use cuda_graphs::{
    BucketSet, CaptureOptions, CaptureReport, Compiler, Device, DeviceBuffer, DeviceSlice, GraphCache,
    Matmul, MatmulOptions, Stream, row_classes,
};
use half::bf16;
use paged_kv::cuda::{CudaKvCache, PageTableMirror};
use paged_kv::{KvDtype, KvLayout, PageTable, PageTableConfig};

pub use inputs::DecodeRow;
pub use profile::{Stage, StageTime};
pub use results::{Pending, SampledToken};
pub use trace::DecodeSpan;

use crate::launch::{FourBitKernels, Kernels, MAX_ROWS};
use crate::sampling::{Sampling, TokenState};
use crate::{
    Backend, Error, FusedMatrix, KERNEL_OPTIONS_VARIABLE, KernelOptions, MatrixKernelOptions, Projection,
    QuantType, Qwen3Config, Result, StepPlan, Weights, walk,
};
use adapters::Adapters;
use attention::Attention;
use decode_layers::LayerKernel;
use four_bit::FourBit;
use inputs::{DecodeInputs, PackedInputs, Sampled, SampledBy};
use results::Results;
use staging::Staging;
use trace::DecodeTrace;
use unmerged::UnmergedAdapters;
use weights::{DeviceWeights, projection_rows};
use wide::Wide;
use workspace::Workspace;

/// Sizes of a [`CudaBackend`]: they decide how much memory it takes.
///
/// ```
/// use qwen3_model::cuda::CudaOptions;
///
/// let options = CudaOptions { max_batch_size: 16, ..CudaOptions::default() };
/// // The slots of 16 sequences, and slot 0, which padding uses.
/// assert_eq!(options.page_table().n_slots, 17);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// Most tokens in one packed step.
    pub max_tokens: usize,
    /// Most rows in a decode step, and most rows whose logits are kept on the device at once.
    pub max_batch_size: usize,
    /// Most tokens of a sequence.
    pub max_seq_length: usize,
    /// Pages of the KV cache, page 0 included.
    pub n_pages: usize,
    /// Tokens in a page: 16, 32, 64, 128 or 256.
    pub page_size: usize,
    /// Options of the kernels, after them those of [`KERNEL_OPTIONS_VARIABLE`].
    pub kernels: KernelOptions,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            max_tokens: 4096,
            max_batch_size: 64,
            max_seq_length: 4096,
            n_pages: 1025,
            page_size: 64,
            kernels: KernelOptions::default(),
        }
    }
}

impl CudaOptions {
    /// Shape of the page table that steps must use: a slot more than `max_batch_size` for slot 0.
    pub fn page_table(&self) -> PageTableConfig {
        PageTableConfig {
            n_pages: self.n_pages,
            page_size: self.page_size,
            n_slots: self.max_batch_size + 1,
            max_pages_per_slot: self.max_seq_length.div_ceil(self.page_size.max(1)),
        }
    }

    fn check(&self, config: &Qwen3Config) -> Result<()> {
        let refuse = |option, problem: String| Err(Error::Option { option, problem });
        for (option, value) in [
            ("max_tokens", self.max_tokens),
            ("max_batch_size", self.max_batch_size),
            ("max_seq_length", self.max_seq_length),
        ] {
            if value == 0 || value > 1 << 24 {
                return refuse(
                    option,
                    format!("is {value}; between 1 and {} is possible", 1 << 24),
                );
            }
        }
        if self.max_seq_length > config.max_positions() {
            let max = config.max_positions();
            return refuse(
                "max_seq_length",
                format!("is {}; the model has {max} positions", self.max_seq_length),
            );
        }
        if !self.page_size.is_power_of_two() || !(16..=256).contains(&self.page_size) {
            return refuse(
                "page_size",
                format!("is {}; on CUDA it is 16, 32, 64, 128 or 256", self.page_size),
            );
        }
        let matrix = &self.kernels.matrix;
        if let Some(algorithms) = matrix.algorithms.filter(|n| !(1..=64).contains(n)) {
            return refuse(
                MATRIX_OPTIONS,
                format!("algorithms is {algorithms}: 1 to 64 are possible"),
            );
        }
        if let Some(rows) = matrix.layer_kernel_rows.filter(|&rows| rows > MAX_ROWS) {
            return refuse(
                MATRIX_OPTIONS,
                format!(
                    "layer_kernel_rows is {rows}: the kernel takes at most {MAX_ROWS}, and 0 does without it"
                ),
            );
        }
        if self.n_pages < 2 {
            return refuse(
                "n_pages",
                format!("is {}; at least 2, since page 0 is reserved", self.n_pages),
            );
        }
        Ok(())
    }
}

/// What the kinds of kernel options are called in errors.
const MATRIX_OPTIONS: &str = "matrix_kernel_options";

fn matmul_options(given: &MatrixKernelOptions) -> MatmulOptions {
    let default = MatmulOptions::default();
    MatmulOptions {
        algorithms: given.algorithms.unwrap_or(default.algorithms),
        split_k: given.split_k.unwrap_or(default.split_k),
        ..default
    }
}

/// Token states that travel at once.
const TOKEN_STATES: usize = 8192;

/// Where the weights come from.
///
/// ```no_run
/// use qwen3_model::cuda::WeightSource;
/// use qwen3_model::{Qwen3Config, Weights};
///
/// let weights = Weights::open("Qwen3-0.6B".as_ref(), &Qwen3Config::qwen3_0_6b())?;
/// for source in [WeightSource::Given(&weights), WeightSource::Random(1)] {
///     println!("{source:?}"); // for CudaBackend::new
/// }
/// # Ok::<(), qwen3_model::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub enum WeightSource<'a> {
    /// Weights of a model folder, or made by the caller; copied to the device.
    Given(&'a Weights),
    /// Those of [`Weights::random`] for the seed, drawn on the device.
    Random(u64),
    /// The same, with the projections of all layers in 4 bits, without double quantisation.
    RandomQuantized(u64, QuantType),
}

/// The rows that operations of the layer walk work on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// `tokens` rows of [`PackedInputs`], the logits of `wanted` of them. The last `continued` rows are the next tokens
    /// of sequences that decode.
    Packed {
        tokens: usize,
        wanted: usize,
        continued: usize,
    },
    /// A bucket of [`DecodeInputs`]; the logits of all.
    Decode { bucket: usize },
}

/// A Qwen3 model on an NVIDIA GPU. See the [module](self).
///
/// ```no_run
/// use cuda_graphs::{Compiler, Device};
/// use paged_kv::PageTable;
/// use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, Pending, SampledToken, WeightSource};
/// use qwen3_model::sampling::Sampling;
/// use qwen3_model::{LogitRows, Qwen3Config, SequenceChunk, StepBatch, StepPlanner};
///
/// let (device, compiler) = (Device::open(0)?, Compiler::new()?);
/// let (config, options) = (Qwen3Config::qwen3_0_6b(), CudaOptions::default());
/// let mut backend = CudaBackend::new(&device, &compiler, config.clone(), WeightSource::Random(1), options)?;
/// println!("{}", backend.capture()?); // a graph for every bucket
///
/// // A prompt of three tokens.
/// let mut table = PageTable::new(options.page_table())?;
/// let slot = table.allocate_slot()?;
/// let _ = table.reserve(slot, 4)?;
/// table.advance(slot, 3)?;
/// backend.sync_pages(&mut table)?;
/// let chunk = SequenceChunk { slot, start: 0, len: 3, wants_logits: true };
/// let batch = StepBatch { token_ids: &[5, 6, 7], chunks: &[chunk] };
/// let mut planner = StepPlanner::new();
/// let plan = planner.plan(&config, &batch, &table, LogitRows::Wanted)?;
/// let rows = backend.prefill(&plan, &[Sampling::GREEDY])?;
///
/// // The next step can be queued before the host has seen what the first one sampled.
/// table.advance(slot, 1)?;
/// backend.decode(&[DecodeRow::greedy(slot.index(), 3)])?;
/// let pending: Pending = backend.read_back(rows, 1)?;
/// let sampled: Vec<SampledToken> = backend.collect(pending)?;
/// assert_eq!(sampled.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudaBackend {
    // Graphs first: they are dropped before what they point to.
    graphs: Option<GraphCache<()>>,
    config: Qwen3Config,
    options: CudaOptions,
    stream: Stream,
    kernels: Kernels,
    matmul: Matmul,
    attention: Attention,
    /// Whether nothing about a row may depend on the others: see [`invariant`].
    invariant: bool,
    /// The layers of a small decode step, where the device can run them.
    layer_kernel: Option<LayerKernel>,
    /// The products of a decode step of more rows, where the device can run them.
    wide_products: Option<Wide>,
    weights: DeviceWeights,
    /// With a matrix in 4 bits only.
    four_bit: Option<FourBit>,
    adapters: Adapters,
    /// Adapters beside the weights; `None` while they are merged.
    unmerged: Option<UnmergedAdapters>,
    cos_sin: DeviceBuffer<f32>,
    cache: CudaKvCache,
    mirror: PageTableMirror,
    /// Whether `mirror` was brought up to date for the step to come.
    mirrored: bool,
    workspace: Workspace,
    staging: Staging,
    packed: PackedInputs,
    decode: DecodeInputs,
    last_token: DeviceBuffer<u32>,
    /// `[n_slots, vocab]`.
    token_states: DeviceBuffer<TokenState>,
    /// Where token states are uploaded to, `[TOKEN_STATES, 2]`.
    state_entries: DeviceBuffer<u32>,
    /// Most likely tokens that each row of the last packed step and the last decode step asked for.
    asked: [Vec<u32>; 2],
    sampled: Sampled,
    results: Results,
    buckets: BucketSet,
    rows: Rows,
    /// Rows at the end of the packed step to come that decode.
    continued: usize,
    /// The one stage that a profile run keeps.
    only: Option<Stage>,
    /// Of decode steps, while one is taken.
    trace: Option<DecodeTrace>,
    /// Logits that were read back, `[wanted, vocab]`.
    host_logits: Vec<f32>,
}

impl CudaBackend {
    /// A model on `device`. Kernels are compiled by `compiler`, or taken from its cache.
    ///
    /// # Errors
    /// [`Error::Option`] for a size or a model shape that cannot work, before anything is allocated;
    /// [`Error::Cuda`] for a missing library, too little memory and errors of the driver. Panics: none.
    pub fn new(
        device: &Device,
        compiler: &Compiler,
        config: Qwen3Config,
        weights: WeightSource<'_>,
        mut options: CudaOptions,
    ) -> Result<Self> {
        let of_environment = KernelOptions::of_environment().map_err(|error| Error::Option {
            option: KERNEL_OPTIONS_VARIABLE,
            problem: format!("is no set of kernel options: {error}"),
        })?;
        options.kernels = options.kernels.or(of_environment);
        options.check(&config)?;
        let kernels = Kernels::load(compiler, device, &config)?;
        let stream = Stream::new(device)?;
        let matmul = Matmul::with_options(&stream, &matmul_options(&options.kernels.matrix))?;
        let attention = Attention::new(&stream, compiler, &config, &options)?;
        let layer_kernel = LayerKernel::new(device, compiler, &config, &options)?;
        let wide_products = Wide::new(device, compiler, &config, &options)?;
        let layout = KvLayout {
            n_layers: config.n_layers,
            kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            n_pages: options.n_pages,
            page_size: options.page_size,
            dtype: KvDtype::Bf16,
        };
        let adapters = Adapters::new(
            compiler,
            &config,
            match weights {
                WeightSource::Given(weights) => Some(weights),
                WeightSource::Random(_) | WeightSource::RandomQuantized(..) => None,
            },
        )?;
        let weights = match weights {
            WeightSource::Given(weights) => DeviceWeights::upload(&stream, &config, weights)?,
            WeightSource::Random(seed) => DeviceWeights::random(&stream, &kernels, &config, seed, None)?,
            WeightSource::RandomQuantized(seed, quant_type) => {
                let four_bit = FourBitKernels::load(compiler, device)?;
                let quantized = Some((&four_bit, quant_type));
                DeviceWeights::random(&stream, &kernels, &config, seed, quantized)?
            }
        };
        let four_bit = FourBit::for_weights(&stream, compiler, &config, &weights)?;
        let cache = CudaKvCache::new(device, compiler, layout)?;
        let table = options.page_table();
        let buckets = BucketSet::new(options.max_batch_size)?;
        let max_rows = options.max_tokens.max(options.max_batch_size);
        let words = PackedInputs::words(options.max_tokens, options.max_batch_size);
        let backend = Self {
            graphs: None,
            workspace: Workspace::new(device, &config, max_rows, options.max_batch_size, |rows| rows)?,
            cos_sin: DeviceBuffer::from_slice(&stream, &rotations(&config, options.max_seq_length))?,
            mirror: PageTableMirror::new(device, &table)?,
            mirrored: false,
            staging: Staging::new(device, words.max(DecodeInputs::words(options.max_batch_size)))?,
            packed: PackedInputs::new(&stream, options.max_tokens, options.max_batch_size)?,
            decode: DecodeInputs::new(&stream, options.max_batch_size)?,
            last_token: DeviceBuffer::zeroed(device, table.n_slots)?,
            token_states: DeviceBuffer::zeroed(device, table.n_slots * config.vocab_size)?,
            state_entries: DeviceBuffer::zeroed(device, 2 * TOKEN_STATES)?,
            asked: [Vec::new(), Vec::new()],
            sampled: Sampled::new(&stream, options.max_batch_size)?,
            results: Results::new(device, options.max_batch_size)?,
            rows: Rows::Packed {
                tokens: 0,
                wanted: 0,
                continued: 0,
            },
            continued: 0,
            only: None,
            trace: None,
            host_logits: Vec::new(),
            config,
            options,
            stream,
            kernels,
            matmul,
            attention,
            invariant: false,
            layer_kernel,
            wide_products,
            weights,
            four_bit,
            adapters,
            unmerged: None,
            cache,
            buckets,
        };
        Ok(backend)
    }

    /// The sizes it was made with.
    pub fn options(&self) -> &CudaOptions {
        &self.options
    }

    /// The options that attention runs with: of decode steps, and of packed ones.
    pub fn attention_options(&self) -> (&DecodeOptions, &TileOptions) {
        self.attention.options()
    }

    /// The stream of all work.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The KV cache, for tests and reports.
    pub fn cache(&self) -> &CudaKvCache {
        &self.cache
    }

    /// The batch sizes that decode steps are padded to.
    pub fn buckets(&self) -> &BucketSet {
        &self.buckets
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// A projection's weight on the device, `[out, in]` row-major: whole rows of its fused matrix, at an address that
    /// never changes. What is written here counts for the work given to [`stream`](Self::stream) afterwards.
    ///
    /// # Errors
    /// [`Error::Option`] for a layer that is not there; [`Error::Cuda`], also for a matrix in 4 bits. Panics: none.
    pub fn projection(&self, layer: usize, projection: Projection) -> Result<DeviceSlice<'_, bf16>> {
        let layers = self.weights.layers.len();
        let Some(weights) = self.weights.layers.get(layer) else {
            let problem = format!("is {layer}; the model has {layers} layers");
            return Err(Error::Option {
                option: "layer",
                problem,
            });
        };
        let rows = projection_rows(&self.config, projection);
        let cols = self.config.projection_shape(projection)[1];
        let matrix = weights.matrix(projection.fused());
        Ok(matrix.slice(rows.start * cols..rows.end * cols)?)
    }

    /// The embedding on the device, `[vocab, hidden]`, row-major.
    pub fn embedding(&self) -> DeviceSlice<'_, bf16> {
        self.weights.embed.as_slice()
    }

    /// The output head on the device, `[vocab, hidden]`, row-major: the embedding if it is tied.
    pub fn output_head(&self) -> DeviceSlice<'_, bf16> {
        self.weights.head().as_slice()
    }

    /// Brings the device's copy of the page table up to date: only rows that changed travel. To be called before the
    /// steps that need the changes are given; a packed step without it brings its own table.
    ///
    /// # Errors
    /// [`Error::CudaCache`] for a table of another shape than [`CudaOptions::page_table`]. Panics: none.
    pub fn sync_pages(&mut self, table: &mut PageTable) -> Result<()> {
        self.mirror.update(&self.stream, table)?;
        self.mirrored = true;
        Ok(())
    }

    /// Replaces what sampling knows of the tokens of a slot: all states are the default but those given, each with its id.
    /// To be called before the first row of a sequence whose [`Sampling::uses_token_states`]; from then on tokens that are
    /// sampled for the slot are counted.
    ///
    /// # Errors
    /// [`Error::Option`] for a slot that is not there; [`Error::Cuda`]. Panics: none.
    pub fn set_token_states(&mut self, slot: usize, states: &[(u32, TokenState)]) -> Result<()> {
        let words: Vec<u32> = states
            .iter()
            .flat_map(|&(id, state)| [id, u32::from(state.0)])
            .collect();
        let mut pieces = words.chunks(2 * TOKEN_STATES);
        let first = pieces.next().unwrap_or(&[]);
        for (clear, piece) in std::iter::once((true, first)).chain(pieces.map(|piece| (false, piece))) {
            let entries = self.state_entries.slice(..piece.len())?;
            self.staging.begin()?;
            self.staging.upload(&self.stream, entries, piece)?;
            self.staging.end(&self.stream)?;
            let (states, vocab) = (self.token_states.as_slice(), self.config.vocab_size);
            self.kernels
                .token_states(&self.stream, states, vocab, slot, entries, clear)?;
        }
        Ok(())
    }

    /// Queues a packed step that samples the next token of each chunk that wants logits, and keeps it for the
    /// chunk's slot. `sampling` says how, for each of them in order. Returns how many rows were sampled.
    ///
    /// # Errors
    /// As [`Backend::step`]; [`Error::StepTooLarge`] for more sampled rows than the largest batch; [`Error::Option`] if
    /// `sampling` is not one for each. Panics: none.
    pub fn prefill(&mut self, plan: &StepPlan<'_>, sampling: &[Sampling]) -> Result<usize> {
        let rows = plan.logit_rows().len();
        if sampling.len() != rows {
            let problem = format!("is for {} rows, {rows} want a token", sampling.len());
            return Err(Error::Option {
                option: "sampling",
                problem,
            });
        }
        if rows > self.options.max_batch_size {
            return Err(Error::StepTooLarge {
                tokens: rows,
                max: self.options.max_batch_size,
            });
        }
        self.step(plan)?;
        if rows > 0 {
            self.staging.begin()?;
            let (stream, staging) = (&self.stream, &mut self.staging);
            self.packed.upload_sampling(stream, staging, plan, sampling)?;
            self.staging.end(&self.stream)?;
            self.sample(SampledBy::Packed, rows)?;
        }
        self.asked[0] = sampling.iter().map(|sampling| sampling.top_logprobs).collect();
        Ok(rows)
    }

    /// As [`prefill`](Self::prefill), with the next tokens of sequences in the same pass over the weights: the last
    /// `continued` chunks have one token each, whose id is not that of the plan but the one sampled last for the slot. Their
    /// attention is that of a decode step.
    ///
    /// # Errors
    /// As for `prefill`; [`Error::Option`] if one of these chunks has more than one token. Panics: none.
    pub fn prefill_and_decode(
        &mut self,
        plan: &StepPlan<'_>,
        continued: usize,
        sampling: &[Sampling],
    ) -> Result<usize> {
        let chunks = plan.chunks();
        let first = chunks.len().checked_sub(continued);
        if first.is_none_or(|first| chunks[first..].iter().any(|chunk| chunk.len != 1)) {
            return Err(Error::Option {
                option: "continued",
                problem: format!("is {continued}; so many chunks of one token at the end are not there"),
            });
        }
        self.continued = continued;
        let sampled = self.prefill(plan, sampling);
        self.continued = 0;
        sampled
    }

    /// Queues a decode step: the next token of each of `rows`, from the token sampled last for its slot. Replays the
    /// bucket's graph if [`capture`](Self::capture) has run.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`] for more rows than the largest batch; [`Error::Option`] for a slot or position outside
    /// the page table; [`Error::Cuda`]. Panics: none.
    pub fn decode(&mut self, rows: &[DecodeRow]) -> Result<()> {
        let bucket = self.set_decode_rows(rows)?;
        self.asked[1].clear();
        self.asked[1].extend(rows.iter().map(|row| row.sampling.top_logprobs));
        if bucket == 0 {
            return Ok(());
        }
        if let Some(trace) = &mut self.trace {
            trace.record(&self.stream, false)?;
        }
        match self.graphs.take() {
            Some(graphs) => {
                let replayed = graphs.replay(bucket);
                self.graphs = Some(graphs);
                replayed?;
            }
            None => self.run_decode(bucket)?,
        }
        if let Some(trace) = &mut self.trace {
            trace.record(&self.stream, true)?;
        }
        self.decode.advanced(bucket);
        Ok(())
    }

    /// Whether decode steps read pages that neighbouring rows share, such as the prompt of a group's siblings, once for all of
    /// them; on at first. Counts for steps that are launched and graphs that are captured afterwards.
    pub fn share_reads(&mut self, on: bool) {
        self.attention.share_reads = on;
    }

    /// Chooses the algorithms of a layer's products for packed steps of up to `rows` rows, so that no step stops for it. Not
    /// between a step and the reading of its logits. Takes milliseconds where the choices are known.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn prepare_products(&mut self, rows: usize) -> Result<()> {
        let room = self.options.max_tokens.max(self.options.max_batch_size);
        for class in row_classes(rows.min(room)) {
            self.rows = Rows::Packed {
                tokens: class.min(room),
                wanted: 0,
                continued: 0,
            };
            for matrix in FusedMatrix::ALL {
                // Over whatever the workspace holds.
                self.project(0, matrix)?;
            }
        }
        Ok(())
    }

    /// Captures a graph for every bucket, the largest first. Later decode steps replay them.
    ///
    /// # Errors
    /// [`Error::Cuda`] and those of the operations; decode steps then go on without graphs. Panics: none.
    pub fn capture(&mut self) -> Result<&CaptureReport> {
        self.graphs = None;
        let bucket = self.set_decode_rows(&[DecodeRow::greedy(0, 0)])?;
        debug_assert!(bucket > 0);
        let (stream, buckets) = (self.stream.clone(), self.buckets.clone());
        let captured = GraphCache::capture(
            &stream,
            buckets,
            (),
            &CaptureOptions::default(),
            |_, (), bucket| self.run_decode(bucket),
        )?;
        Ok(self.graphs.insert(captured).report())
    }

    /// What capturing cost; `None` before [`capture`](Self::capture).
    pub fn capture_report(&self) -> Option<&CaptureReport> {
        self.graphs.as_ref().map(GraphCache::report)
    }

    /// Queues the read-back of the sampled rows of the steps given so far: those of the last packed step, then those
    /// of the last decode step.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`] for more rows than there are; [`Error::Cuda`]. Panics: none.
    pub fn read_back(&mut self, packed_rows: usize, decode_rows: usize) -> Result<Pending> {
        let [packed, decode] = &self.asked;
        let first = |asked: &[u32], rows: usize| match asked.get(..rows) {
            Some(asked) => Ok(asked.to_vec()),
            None => Err(Error::StepTooLarge {
                tokens: rows,
                max: asked.len(),
            }),
        };
        let asked = [first(packed, packed_rows)?, first(decode, decode_rows)?];
        self.results.read_back(&self.stream, &self.sampled, asked)
    }

    /// Waits for sampled rows: those of the packed step, then those of the decode step.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for errors of the kernels that computed them. Panics: none.
    pub fn collect(&mut self, pending: Pending) -> Result<Vec<SampledToken>> {
        self.results.collect(pending)
    }

    /// Forgets what is under way: waits for the device and makes no use of what it computed.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn reset(&mut self) -> Result<()> {
        self.decode.forget();
        Ok(self.stream.synchronize()?)
    }

    /// Checks and announces the rows of a decode step. Returns the bucket, 0 without rows.
    fn set_decode_rows(&mut self, rows: &[DecodeRow]) -> Result<usize> {
        let table = self.options.page_table();
        let max_len = table.max_pages_per_slot * table.page_size;
        for row in rows {
            if row.slot >= table.n_slots || row.position >= max_len {
                let problem = format!(
                    "slot {} at position {} is outside the {} slots of {max_len} positions",
                    row.slot, row.position, table.n_slots
                );
                return Err(Error::Option {
                    option: "rows",
                    problem,
                });
            }
        }
        if rows.is_empty() {
            return Ok(0);
        }
        let Some(bucket) = self.buckets.for_batch(rows.len()) else {
            return Err(Error::StepTooLarge {
                tokens: rows.len(),
                max: self.options.max_batch_size,
            });
        };
        self.staging.begin()?;
        self.decode.set(&self.stream, &mut self.staging, rows, bucket)?;
        self.staging.end(&self.stream)?;
        Ok(bucket)
    }

    /// Everything that a decode graph holds.
    fn run_decode(&mut self, bucket: usize) -> Result<()> {
        self.rows = Rows::Decode { bucket };
        walk(self)?;
        self.sample(SampledBy::Decode, bucket)
    }
}

/// `[positions, head_dim]`: cosines, then sines, of every position.
fn rotations(config: &Qwen3Config, positions: usize) -> Vec<f32> {
    let frequencies = config.rope.frequencies(config.head_dim);
    let mut table = vec![0.0; positions * config.head_dim];
    for (position, row) in table.chunks_exact_mut(config.head_dim).enumerate() {
        let (cos, sin) = row.split_at_mut(config.head_dim / 2);
        frequencies.cos_sin(position, cos, sin);
    }
    table
}
