#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod completion;
mod error;
pub mod fake_runner;
mod request;
pub mod runner;
pub mod scheduler;
mod statistics;
pub mod text;

pub use completion::{Completion, FinishReason, RequestId, TokenCompletion};
pub use error::Error;
pub use fake_runner::FakeRunner;
pub use request::{ChatPrompt, Prompt, Request, SamplingParams};
pub use runner::{Runner, RunnerShape};
pub use scheduler::{Event, Scheduler};
pub use statistics::Statistics;
