//! Masks, and attention on the CPU, in one binary: linking one costs more than most of its tests.

mod attention;
mod common;
mod extremes;
mod masks;
mod pictures;
mod situations;
