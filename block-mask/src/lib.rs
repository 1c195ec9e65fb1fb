#![doc = include_str!("../README.md")]
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![cfg_attr(feature = "cuda", deny(unsafe_code))]

pub mod attention;
pub mod codegen;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod expr;
mod kernel_options;
#[cfg(feature = "cuda")]
mod launch;
mod mask;
mod mask_mod;
pub mod reference;
mod score_mod;

pub use attention::{ContiguousKv, FlexOptions, QueryView, flex_attention, flex_attention_contiguous};
pub use error::{Error, Result};
pub use kernel_options::{DecodeKernelOptions, KernelOptionsError, PrefillKernel, PrefillKernelOptions};
pub use mask::{
    Block, BlockArrays, BlockMask, BlockState, DEFAULT_BLOCK, KvBlocks, Logical, MaskShape, PackedSequence,
    Paged, Physical, QuerySpan, Space, paged_causal_mask,
};
pub use mask_mod::MaskMod;
pub use score_mod::{ScoreMod, alibi_slopes};
