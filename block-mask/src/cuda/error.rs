//! What the CUDA side refuses or fails at.

/// What the CUDA side of this crate refuses or fails at.
///
/// ```no_run
/// # use block_mask::cuda::*;
/// # use block_mask::*;
/// # use cuda_graphs::{Compiler, Device, DeviceBuffer, Stream};
/// # use half::bf16;
/// # use paged_kv::{PageTable, PageTableConfig, Slot};
/// # let device = Device::open(0)?;
/// # let (stream, compiler) = (Stream::new(&device)?, Compiler::new()?);
/// # let shape = AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, page_size: 16, n_pages: 9 };
/// let shape = AttentionShape { head_dim: 96, ..shape };
/// let limits = DecodeLimits { max_rows: 4, n_slots: 4, max_pages_per_slot: 8 };
/// let options = DecodeOptions::for_device(device.info(), &shape);
/// let refused = DecodeAttention::new(&device, &compiler, shape, limits, None, None, Functions::none(), options);
/// assert!(matches!(refused, Err(CudaError::Unsupported { what: "head_dim", value: 96, .. })));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver, the compiler or a buffer.
    #[error(transparent)]
    Cuda(#[from] cuda_graphs::Error),
    /// The same refusal as on the CPU.
    #[error(transparent)]
    Mask(#[from] crate::Error),
    /// A size for which there is no kernel.
    #[error("{what} is {value}; {allowed}")]
    Unsupported {
        /// What has the size.
        what: &'static str,
        /// What was asked.
        value: usize,
        /// What there are kernels for.
        allowed: &'static str,
    },
    /// A kernel option that would give wrong numbers or cannot run.
    #[error("option {option} is refused: {why}")]
    OptionRefused {
        /// Name of the option.
        option: &'static str,
        /// Why.
        why: String,
    },
    /// A kernel was given a mask of another function than it was compiled for. Masks from lists have a function of their
    /// own, [`BlockMask::mask_mod`](crate::BlockMask::mask_mod), which knows the lists.
    #[error("the mask's function differs in its {what} from the one that the kernel was made for")]
    OtherFunction {
        /// What differs: the text or the captured values.
        what: &'static str,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch {
        /// What has the size.
        what: &'static str,
        /// What the other arguments call for.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// More of something than the object was made for.
    #[error("{what}: {asked} asked, at most {limit}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// What was asked.
        asked: usize,
        /// The limit.
        limit: usize,
    },
    /// An address that the kernel's wide loads cannot use.
    #[error("{what} must be aligned to {bytes} bytes")]
    Misaligned {
        /// The argument.
        what: &'static str,
        /// The alignment.
        bytes: u64,
    },
}
