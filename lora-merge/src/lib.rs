#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

mod adapter;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod block;
mod config;
#[cfg(feature = "cuda")]
pub mod cuda;
mod digest;
mod drift;
mod error;
#[cfg(feature = "cuda")]
mod launch;
mod merge;
mod module;
mod panels;
mod pattern;
mod portable;
mod random;
mod resolve;
mod rounding;
mod source;
mod store;
mod target;
mod tensors;
mod tile;
mod unmerged;
mod version;

pub use adapter::Adapter;
pub use config::{AdapterConfig, BiasMode, Targets};
pub use digest::{hex, parallel_digest, sequential_digest};
pub use drift::{DriftOptions, DriftReport, DriftSubject, verify_no_drift};
pub use error::{Error, Result};
pub use merge::{MergeOutcome, merge_into};
pub use module::{ModuleKind, ModuleSpec};
pub use resolve::{ActiveAdapter, LowRankTerm, ModuleUpdate, Resolved, Resolver, resolve};
pub use rounding::bf16_from_f64;
pub use source::{BorrowedWeights, FileWeights, OwnedWeights, PristineSource};
pub use store::{MemoryReport, MergedStore, RefreshReport, RefreshStep};
pub use tensors::{TensorSlice, TensorValues};
pub use unmerged::UnmergedUpdate;
pub use version::PolicyVersion;
