//! Short programs to copy from, and what is too long for one of them.

pub mod arithmetic;
pub mod gains;
