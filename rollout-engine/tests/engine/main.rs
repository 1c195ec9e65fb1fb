//! Engine and scheduler on the CPU, in one binary: linking one costs more than most of its tests.

mod adapters;
mod changing_policies;
mod chat_templates;
mod chunked_prefill;
mod golden;
mod groups;
mod policies;
mod quantized;
mod sampling;
mod scheduler_cases;
mod scheduler_properties;
mod scheduler_refusals;
mod stop_strings;
mod support;
