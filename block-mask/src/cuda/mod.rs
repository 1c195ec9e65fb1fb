//! Attention kernels for NVIDIA GPUs of compute capability 8.0 and newer.
//!
//! | kernel | for | reads keys through |
//! |---|---|---|
//! | [`DecodeAttention`] | one query a row, lengths and slots in device memory (so it can be captured in a graph) | page table |
//! | [`PrefillAttention`] | packed chunks of many sequences, causal | page table |
//! | [`FlexAttention`] | any [`BlockMask<Physical>`](crate::BlockMask) | the mask's own lists |
//!
//! All three take mask and score functions ([`Functions`]), printed into the kernel and compiled when it is made.
//!
//! **Invariants.** The order of every sum depends on the row's own sequence alone: neither the other rows, nor where pages
//! lie, nor (in prefill) how the sequence is cut into chunks changes a bit of a row's output. In decoding the number of
//! rows of the step does, unless [`DecodeOptions::split`] fixes where rows are cut, and so do neighbours that share a prefix,
//! where [`DecodeAttention::plan_shared`] lets them. Nothing at or past a
//! sequence's length and no page that its slot does not own takes part, whatever is there. A row that sees no key gives 0 and a log-sum-exp
//! of −∞.
//!
//! What may surprise: a key that a *function* hides is read all the same, and its weight is 0; if its value is NaN or
//! infinite, so is the output. (Lengths and page tables hide without reading.)
//!
//! A graph that captures a run keeps the memory of everything the run was given.

mod decode;
mod error;
mod flex;
mod functions;
mod options;
mod prefill;
mod prefill_tiles;
mod shape;
mod specs;

pub use decode::{DecodeArgs, DecodeAttention, DecodeLimits, DecodePlan, PlannedItems};
pub use error::CudaError;
pub use flex::{DeviceBlockMask, FlexArgs, FlexAttention, QueryLayout};
pub use functions::Functions;
pub use options::{DecodeOptions, TileOptions};
pub use prefill::{PrefillArgs, PrefillAttention, PrefillChunk, PrefillLimits, PrefillPlan};
pub use shape::AttentionShape;
pub use specs::kernel_specs;
