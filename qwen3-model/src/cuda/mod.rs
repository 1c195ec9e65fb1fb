//! The model on an NVIDIA GPU.
//!
//! [`CudaBackend`] is the second implementation of [`Backend`](crate::Backend): our own kernels between matrix
//! products by cuBLASLt (on Hopper most by kernels of our own for decode steps of up to 256 rows), all on
//! one stream, over buffers whose addresses never change. Two kinds of
//! steps share the buffers and the [`walk`](crate::walk) over the layers:
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
//! [`read_logits`](crate::Backend::read_logits) do. A decode step takes its input tokens from what was
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
mod options;
mod profile;
mod results;
mod staging;
mod steps;
mod trace;
mod unmerged;
mod verify;
mod weights;
mod wide;
mod workspace;

use block_mask::cuda::{DecodeOptions, TileOptions};
use cuda_graphs::{BucketSet, Compiler, Device, DeviceBuffer, DeviceSlice, GraphCache, Matmul, Stream};
use half::bf16;
use paged_kv::cuda::{CudaKvCache, PageTableMirror};
use paged_kv::{KvDtype, KvLayout};

pub use inputs::DecodeRow;
pub use options::CudaOptions;
pub use profile::{Stage, StageTime};
pub use results::{Pending, SampledToken};
pub use trace::DecodeSpan;

use crate::launch::{FourBitKernels, Kernels};
use crate::sampling::TokenState;
use crate::{
    Error, KERNEL_OPTIONS_VARIABLE, KernelOptions, Projection, QuantType, Qwen3Config, Result, Weights,
};
use adapters::Adapters;
use attention::Attention;
use decode_layers::LayerKernel;
use four_bit::FourBit;
use inputs::{DecodeInputs, PackedInputs, Sampled};
use invariant::Invariant;
use options::{matmul_options, products};
use results::Results;
use staging::Staging;
use steps::TOKEN_STATES;
use trace::DecodeTrace;
use unmerged::UnmergedAdapters;
use weights::{DeviceWeights, projection_rows};
use wide::Wide;
use workspace::Workspace;

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
    invariant: Option<Invariant>,
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
    /// [`Error::Field`] for a configuration that no model has, and [`Error::Option`] for a size or a model shape that cannot
    /// work here, before anything is allocated; [`Error::Cuda`] for a missing library, too little memory and errors of the
    /// driver. Panics: none.
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
        config.check()?;
        options.check(&config)?;
        let kernels = Kernels::load(compiler, device, &config)?;
        let stream = Stream::new(device)?;
        let matrix = &options.kernels.matrix;
        let matmul = products(&stream, compiler, matrix, &matmul_options(matrix))?;
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
            invariant: None,
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

    /// Version of the cuBLASLt that computes products, such as 130000; `None` if the plain kernel does.
    pub fn library_version(&self) -> Option<usize> {
        self.matmul.library_version()
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
