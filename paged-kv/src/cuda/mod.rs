//! The cache, and the page table's mirror, on a CUDA device.
//!
//! **Invariant.** Addresses never change: one allocation holds K and V of every layer, one more the rows of the page
//! table. A captured graph may contain both.
//!
//! ```text
//! CudaKvCache   ┌──────────┬──────────┬──────────┬──────────┬─
//!               │ layer 0 K│ layer 0 V│ layer 1 K│ layer 1 V│ …    each [kv_heads, n_pages * page_size, head_dim] bf16
//!               └──────────┴──────────┴──────────┴──────────┴─
//! PageTableMirror   [n_slots, max_pages_per_slot] i32, −1 = no page, row 0 all 0
//! ```
//!
//! What may surprise: all operations are given to a stream and do not wait, unless they return data. A mirror is up to
//! date for the work that is given to the same stream after [`PageTableMirror::update`].

mod cache;
mod launch;
mod mirror;

pub use cache::CudaKvCache;
pub use launch::kernel_specs;
pub use mirror::PageTableMirror;

/// What the CUDA side of this crate refuses or fails at.
///
/// ```no_run
/// # use cuda_graphs::{Compiler, Device, Stream};
/// # use paged_kv::{KvDtype, KvLayout, PageTable, PageTableConfig};
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use paged_kv::cuda::{CudaError, CudaKvCache};
///
/// let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 64, n_pages: 2, page_size: 16, dtype: KvDtype::F32 };
/// let error = CudaKvCache::new(&device, &Compiler::new()?, layout).err();
/// assert!(matches!(error, Some(CudaError::UnsupportedDtype { dtype: KvDtype::F32 })));
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
    Cache(#[from] crate::Error),
    /// Kernels hold bf16 only.
    #[error("a cache on CUDA holds bf16, {dtype} was asked for")]
    UnsupportedDtype {
        /// What was asked.
        dtype: crate::KvDtype,
    },
    /// Rows of K and V must be whole 16-byte words.
    #[error("head_dim is {head_dim}, on CUDA it must be a multiple of 8")]
    UnsupportedHeadDim {
        /// What was asked.
        head_dim: usize,
    },
    /// The table is not the one the mirror was made for.
    #[error("the table has {n_slots} slots of {width} pages, its mirror {mirror_slots} of {mirror_width}")]
    TableMismatch {
        /// Slots of the table.
        n_slots: usize,
        /// Pages per slot of the table.
        width: usize,
        /// Slots of the mirror.
        mirror_slots: usize,
        /// Pages per slot of the mirror.
        mirror_width: usize,
    },
}
