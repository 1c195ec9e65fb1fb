#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! ```text
//!  KernelSpec ──Compiler──▶ Cubin ──Module::load──▶ Kernel ──launch──┐
//!  (source,     NVRTC, or   (ELF,                                    ▼
//!   limits)     the disk     ResourceUsage)          Matmul ─────▶ Stream ──Capture──▶ Graph
//!                                                    copies ─────▶   ▲                  │ one per bucket
//!  DeviceBuffer, MemoryPool (addresses never move) ──────────────────┘       GraphCache ◀┘
//! ```
//!
//! * **Capturing.** [`Capture`] ends on every path. What a capture forbids is refused before the driver sees it; what
//!   is dropped meanwhile is freed afterwards. Captures are bound to their thread, so that other threads may go on
//!   allocating.
//! * **Ownership.** A graph owns a share of each buffer and module that safe calls captured. Addresses inside a
//!   kernel's parameter struct are the launcher's to keep valid: see [`Kernel::launch`] and [`Stream::keep`].
//! * **No references into device memory.** Buffers are written through `&`, like a `Cell`; the order of writes is that
//!   of the stream.
//! * **Errors instead of panics.** NVRTC and cuBLASLt are opened by this crate's own function tables, the driver is
//!   looked for before cudarc would panic for want of it. An entry of the kernel cache that is damaged is rebuilt.
//! * **What may surprise.** Errors of a kernel itself (an illegal address) come with a later call, as always in CUDA.
//!   A product's algorithm is chosen the first time its shape is seen, which takes some milliseconds and waits; in a
//!   capture that is [`Error::NotPrepared`] instead. Streams do not wait for CUDA's legacy default stream.
#![cfg_attr(not(feature = "cuda"), allow(rustdoc::broken_intra_doc_links))]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]

mod buckets;
mod cases;
mod error;
mod report;

#[cfg(feature = "cuda")]
mod arch;
#[cfg(feature = "cuda")]
mod blas;
#[cfg(feature = "cuda")]
mod buffer;
#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cuda")]
mod capture;
#[cfg(feature = "cuda")]
mod check;
#[cfg(feature = "cuda")]
mod choices;
#[cfg(feature = "cuda")]
mod compiler;
#[cfg(feature = "cuda")]
mod copies;
#[cfg(feature = "cuda")]
mod cubin;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod graph_cache;
#[cfg(feature = "cuda")]
mod invariance;
#[cfg(feature = "cuda")]
mod kernel;
#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod matmul;
#[cfg(feature = "cuda")]
mod nvrtc;
#[cfg(feature = "cuda")]
mod pinned;
#[cfg(feature = "cuda")]
mod pool;
#[cfg(feature = "cuda")]
mod spec;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod tensor_map;
#[cfg(feature = "cuda")]
mod tuning;
#[cfg(feature = "cuda")]
mod verify;

pub use buckets::BucketSet;
pub use cases::{FEW_CASES_VARIABLE, cases, few_cases};
pub use error::{Error, Result};
pub use report::{BucketReport, CaptureReport, ReplayStats};

#[cfg(feature = "cuda")]
pub use {
    arch::Arch,
    buffer::{DeviceBuffer, DeviceMemory, DeviceSlice},
    cache::{CACHE_VARIABLE, CacheLocation},
    capture::{Capture, Graph},
    check::{REQUIRE_NVRTC_VARIABLE, UsageRow, UsageTable, assert_kernels_compile, check_kernels},
    compiler::{Compiler, CompilerOptions, Cubin},
    cubin::{ResourceUsage, resource_usage},
    device::{Device, DeviceInfo, MemoryInfo},
    graph_cache::{CaptureOptions, GraphCache, Rows, StaticBuffers},
    kernel::{Kernel, LaunchConfig, MAX_PARAMETER_BYTES, Module},
    library::LIBRARY_PATH_VARIABLE,
    matmul::{Matmul, MatmulDims, MatmulElement, MatmulOptions, MatmulReport, kernel_specs},
    pinned::{PinnedBuffer, PinnedSlice},
    pool::{MemoryPool, PoolSlice},
    spec::{Archs, EntryPoint, Header, KernelSpec, Limits},
    stream::{Event, Stream},
    tensor_map::{Swizzle, TensorElement, TensorMap, TensorMapSpec},
    tuning::row_classes,
    verify::{VerifyReport, verify},
};
