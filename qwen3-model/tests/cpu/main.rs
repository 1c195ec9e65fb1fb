//! The model on the CPU, in one binary: linking one costs more than most of its tests.

mod adapters;
mod cases;
mod common;
mod golden;
mod hostile;
mod quantized;
mod quantized_hostile;
mod sampling;
mod shapes;
mod steps;
