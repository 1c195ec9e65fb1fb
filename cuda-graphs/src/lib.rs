//! CUDA graphs per batch bucket, kernel compilation with a disk cache and address-stable buffers, without a toolkit at build time.
#![warn(missing_docs)]

mod buckets;
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
mod kernel;
#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod matmul;
#[cfg(feature = "cuda")]
mod nvrtc;
#[cfg(feature = "cuda")]
mod pool;
#[cfg(feature = "cuda")]
mod spec;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod tensor_map;
#[cfg(feature = "cuda")]
mod verify;

pub use buckets::BucketSet;
pub use error::{Error, Result};
pub use report::{BucketReport, CaptureReport, ReplayStats};

#[cfg(feature = "cuda")]
pub use {
    arch::Arch,
    buffer::{DeviceBuffer, DeviceMemory, DeviceSlice, PinnedBuffer, PinnedSlice},
    cache::{CACHE_VARIABLE, CacheLocation},
    capture::{Capture, Graph},
    check::{REQUIRE_NVRTC_VARIABLE, UsageRow, UsageTable, assert_kernels_compile, check_kernels},
    compiler::{Compiler, CompilerOptions, Cubin},
    cubin::{ResourceUsage, resource_usage},
    device::{Device, DeviceInfo, MemoryInfo},
    graph_cache::{CaptureOptions, GraphCache, Rows, StaticBuffers},
    kernel::{Kernel, LaunchConfig, MAX_PARAMETER_BYTES, Module},
    library::LIBRARY_PATH_VARIABLE,
    matmul::{Matmul, MatmulDims, MatmulElement, MatmulOptions, MatmulReport},
    pool::{MemoryPool, PoolSlice},
    spec::{Archs, EntryPoint, Header, KernelSpec, Limits},
    stream::{Event, Stream},
    tensor_map::{Swizzle, TensorElement, TensorMap, TensorMapSpec},
    verify::{VerifyReport, verify},
};
