//! The CUDA backend.
pub(crate) mod pages;
pub(crate) mod staging;
pub(crate) mod weights;
