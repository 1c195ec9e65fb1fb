use std::path::PathBuf;

use paged_kv::Slot;

/// What can go wrong while a model is read or run.
///
/// Errors about files name the file, and the field or tensor in it, so that one line tells what
/// to repair. All of them are found before memory for weights is taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A JSON file that is not JSON, not an object, or unreasonably large.
    #[error("{}: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, with line and column where known.
        problem: String,
    },
    /// A field is missing, has the wrong type, a value out of range, or asks for something that
    /// this crate does not compute.
    #[error("{}: field `{field}`: {problem}", path.display())]
    Field {
        /// The file; `Qwen3Config` for a configuration that was changed in memory.
        path: PathBuf,
        /// The field, dotted where nested.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder holds no weights in a form that can be read.
    #[error("{}: {problem}", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// What was looked for, and what to do.
        problem: String,
    },
    /// The index names a shard that is not in the folder.
    #[error("{}: shard `{shard}` is absent; {tensors} tensors are in it, the first is `{tensor}`", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// The absent file's name.
        shard: String,
        /// How many tensors the index places there.
        tensors: usize,
        /// The first of them by name.
        tensor: String,
    },
    /// A safetensors file that no index names, so that it is unclear which weights are meant.
    #[error("{}: this file belongs to no index; move it out of the folder or restore `model.safetensors.index.json`", path.display())]
    StrayShard {
        /// The file.
        path: PathBuf,
    },
    /// A safetensors file whose header cannot be believed.
    #[error("{}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor whose bytes lie outside the file, overlap another's, or do not fit its shape.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor that the configuration asks for is in no file.
    #[error("{}: tensor `{tensor}` of shape {shape:?} is missing", path.display())]
    MissingTensor {
        /// The file, or the index of a sharded model.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape it should have.
        shape: Vec<usize>,
    },
    /// A tensor that nothing in the model uses.
    #[error("{}: tensor `{tensor}` belongs to no part of the model that the configuration describes", path.display())]
    ExtraTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor of the wrong shape.
    #[error("{}: tensor `{tensor}` has shape {found:?}, the configuration asks for {expected:?}", path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The shape from the configuration.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor of a type that is not bf16, f16 or f32.
    #[error("{}: tensor `{tensor}` is {dtype}; bf16, f16 and f32 can be read", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The type in the file.
        dtype: String,
    },
    /// A module whose 4-bit tensors do not fit each other, or hold values that no weight can have.
    #[error("{}: module `{module}`: {problem}", path.display())]
    Quantization {
        /// The file.
        path: PathBuf,
        /// The module's name.
        module: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An option has a value that no model can be run with.
    #[error("option `{option}`: {problem}")]
    Option {
        /// The option.
        option: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A step that holds no token.
    #[error("the step is empty: {chunks} chunks with {tokens} tokens")]
    EmptyStep {
        /// Chunks in the step.
        chunks: usize,
        /// Token ids in the step.
        tokens: usize,
    },
    /// The chunks of a step do not cover its tokens exactly.
    #[error("the chunks hold {chunk_tokens} tokens, but {token_ids} token ids were given")]
    ChunkLength {
        /// Sum of the chunk lengths (saturating).
        chunk_tokens: usize,
        /// Token ids given.
        token_ids: usize,
    },
    /// More tokens than the backend has room for in one step.
    #[error("the step holds {tokens} tokens, at most {max} fit")]
    StepTooLarge {
        /// Tokens in the step.
        tokens: usize,
        /// The backend's limit.
        max: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} at row {row} is not below the vocabulary size {vocab}")]
    TokenId {
        /// The id.
        id: u32,
        /// Its row in the step.
        row: usize,
        /// The model's vocabulary size.
        vocab: usize,
    },
    /// A position past what the model can encode.
    #[error("slot {}: position {position} is not below the model's maximum of {max}", slot.index())]
    Position {
        /// The sequence's slot.
        slot: Slot,
        /// The first position that is too large.
        position: usize,
        /// The model's number of positions.
        max: usize,
    },
    /// A chunk starts past what has been written for its slot, so that it would attend to
    /// cache entries without content.
    #[error("slot {}: the chunk starts at {start}, but only {written} positions are written", slot.index())]
    Gap {
        /// The sequence's slot.
        slot: Slot,
        /// The chunk's first position.
        start: usize,
        /// Positions written so far.
        written: usize,
    },
    /// The slot has no page for a position of the chunk.
    #[error("slot {}: position {position} has no page; reserve it first", slot.index())]
    NoPage {
        /// The sequence's slot.
        slot: Slot,
        /// The position without a page.
        position: usize,
    },
    /// A slot twice in one step.
    #[error("slot {} occurs twice in one step", slot.index())]
    DuplicateSlot {
        /// The slot.
        slot: Slot,
    },
    /// The page table and the backend's cache differ in size.
    #[error(
        "the page table has {table_pages} pages of {table_page_size} tokens, the cache {cache_pages} of {cache_page_size}"
    )]
    CacheShape {
        /// Pages of the table.
        table_pages: usize,
        /// Page size of the table.
        table_page_size: usize,
        /// Pages of the cache.
        cache_pages: usize,
        /// Page size of the cache.
        cache_page_size: usize,
    },
    /// An error of the GPU or of what is needed to use it.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] cuda_graphs::Error),
    /// An error of the cache on the GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    CudaCache(#[from] paged_kv::cuda::CudaError),
    /// An error of attention on the GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    CudaAttention(#[from] block_mask::cuda::CudaError),
    /// An error of the paged cache.
    #[error(transparent)]
    PagedKv(#[from] paged_kv::Error),
    /// An adapter that cannot be applied. The previous policy is still in force.
    #[error(transparent)]
    Adapter(#[from] lora_merge::Error),
    /// An adapter of one of several policies that cannot be applied. The previous policies are still in force.
    #[error("policy {policy}: {source}")]
    Policy {
        /// Which of the policies that were given.
        policy: usize,
        /// What is wrong with its adapter.
        source: lora_merge::Error,
    },
    /// The backend cannot apply adapters in this way.
    #[error("the {backend} backend cannot apply adapters in the mode {mode:?}")]
    AdapterMode {
        /// The backend.
        backend: &'static str,
        /// The mode that was asked for.
        mode: crate::MergeMode,
    },
    /// An error of the block mask or of attention under it.
    #[error(transparent)]
    BlockMask(#[from] block_mask::Error),
}

impl Error {
    /// Whether the device's context is broken, so that nothing on it works in this process any more:
    /// [`cuda_graphs::Error::breaks_context`].
    pub fn breaks_context(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(error)
            | Self::CudaCache(paged_kv::cuda::CudaError::Cuda(error))
            | Self::CudaAttention(block_mask::cuda::CudaError::Cuda(error))
            | Self::Adapter(lora_merge::Error::Cuda(error))
            | Self::Policy {
                source: lora_merge::Error::Cuda(error),
                ..
            } => error.breaks_context(),
            _ => false,
        }
    }

    /// Tells which of several policies an adapter's error belongs to.
    #[cfg(feature = "cuda")]
    pub(crate) fn in_policy(self, policy: usize) -> Self {
        match self {
            Self::Adapter(source) => Self::Policy { policy, source },
            other => other,
        }
    }

    /// The opposite, for calls in which adapters are one policy without a number.
    pub(crate) fn without_policy(self) -> Self {
        match self {
            Self::Policy { source, .. } => Self::Adapter(source),
            other => other,
        }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
