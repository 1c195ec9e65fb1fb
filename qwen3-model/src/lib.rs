#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod adapters;
pub mod backend;
mod checkpoint;
mod config;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod digest;
mod error;
mod four_bit;
#[doc(hidden)]
pub mod fuzzing;
mod generation_config;
mod json;
mod kernel_options;
// Kernels by themselves: for the tests and the backend, no part of the interface.
#[cfg(feature = "cuda")]
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod launch;
#[allow(unsafe_code)]
mod mapped_file;
mod model;
mod projection;
mod random;
mod rope;
mod safetensors_file;
pub mod sampling;
pub mod step;
mod weights;

pub use adapters::{AdapterReport, MergeMode, PristineCopy, PristineWeights, modules, random_adapter};
pub use backend::{Backend, Norm, walk};
pub use block_mask::{DecodeKernelOptions, KernelOptionsError, PrefillKernel, PrefillKernelOptions};
pub use config::Qwen3Config;
pub use cpu::{CpuBackend, LoadOptions};
pub use error::{Error, Result};
pub use four_bit::{QuantType, QuantizeOptions, QuantizeReport, QuantizedMatrix, quantize_folder};
pub use generation_config::GenerationConfig;
pub use kernel_options::{KERNEL_OPTIONS_VARIABLE, KernelOptions, MatrixKernelOptions};
pub use model::Model;
pub use projection::{FusedMatrix, Projection};
pub use rope::{RopeConfig, RopeFrequencies, RopeScaling};
pub use step::{LogitRows, SequenceChunk, StepBatch, StepPlan, StepPlanner};
pub use weights::{LayerWeights, WeightMatrix, Weights};
