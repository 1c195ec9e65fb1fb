#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod adapters;
mod builder;
pub mod bundled;
#[cfg(feature = "cli")]
pub mod cli;
mod completion;
#[cfg(feature = "cuda")]
pub mod cuda_runner;
mod device;
mod engine;
mod error;
pub mod fake_runner;
mod groups;
pub mod memory;
mod model_folder;
mod model_runner;
pub mod pool;
mod prefix_index;
mod request;
pub mod runner;
mod sampling;
pub mod scheduler;
#[cfg(feature = "serve")]
pub mod serve;
mod statistics;
pub mod text;
mod tuned;

pub use adapters::{AdapterSource, NamedPolicy, PolicySpan, PolicyUpdate};
pub use builder::{BuiltEngine, EngineBuilder};
pub use completion::{Completion, Event, FinishReason, RequestId, StopReason, TokenCompletion};
#[cfg(feature = "cuda")]
pub use cuda_runner::CudaRunner;
pub use device::DeviceChoice;
pub use engine::{Engine, Finished, Stream};
pub use error::Error;
pub use fake_runner::FakeRunner;
pub use groups::{FinishedGroup, Group, GroupStream, group_advantages};
pub use lora_merge::PolicyVersion;
pub use model_runner::ModelRunner;
pub use pool::PoolSettings;
pub use qwen3_model::{KernelOptions, MergeMode, PristineCopy};
pub use request::{ChatPrompt, Prompt, Request, SamplingParams};
pub use runner::{Runner, RunnerShape, Sampling, TokenLogprob};
pub use scheduler::Scheduler;
pub use statistics::Statistics;
pub use tuned::{ModelShape, PROFILES_VARIABLE, TunedBy, TunedChoice, TunedOptions, TunedProfile};
