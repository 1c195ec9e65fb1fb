//! What handlers tell the engine's thread, and what it tells them.

use std::sync::Arc;

use lora_merge::PolicyVersion;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::error::ApiError;
use super::policy::Policy;
use crate::completion::Completion;
use crate::request::SamplingParams;
use crate::runner::SampledToken;

/// Names one job of a server.
pub(super) type JobId = u64;

/// Names one call that paused generation.
pub(super) type PauseId = u64;

/// One prompt of a job.
#[derive(Clone, Debug)]
pub(super) struct PromptJob {
    pub(super) token_ids: Vec<u32>,
    /// Shared by the prompts of a job, of which there may be thousands.
    pub(super) sampling: Arc<SamplingParams>,
    /// Completions wanted.
    pub(super) n: usize,
}

/// What one HTTP request asks of the engine.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) policy: Arc<Policy>,
    pub(super) prompts: Vec<PromptJob>,
    /// Whether to send every token, or finished completions only.
    pub(super) stream: bool,
    pub(super) events: UnboundedSender<JobEvent>,
}

/// What happens to a job. Completion `k` of prompt `p` has the index `p * n + k`.
#[derive(Debug)]
pub(super) enum JobEvent {
    /// Its first prompt went to the engine, under this policy.
    Started { version: PolicyVersion },
    /// One more token, if the job streams.
    Token { index: usize, token: SampledToken },
    /// One more completion.
    Finished {
        index: usize,
        completion: Box<Completion>,
    },
    /// The job is over without (all of) its completions.
    Failed(ApiError),
}

/// What happens to running requests when generation is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PauseMode {
    /// They stop after the step under way and go on at `resume`.
    Keep,
    /// They finish first; no others start.
    Wait,
    /// They end with an error.
    Abort,
}

/// Something for the engine's thread to do between two steps.
#[derive(Debug)]
pub(super) enum Command {
    Submit(JobId, Job),
    Cancel(JobId),
    Pause(PauseId, PauseMode, oneshot::Sender<()>),
    Resume(oneshot::Sender<()>),
    /// The time of this pause is over. Nothing, if it has ended or another has followed.
    EndPause(PauseId),
    /// Put a policy in force if nothing runs. Answers whether it is in force.
    Prepare(Arc<Policy>, oneshot::Sender<Result<bool, String>>),
    /// A name is not known any more.
    Unloaded,
    ResetPrefixCache(oneshot::Sender<Result<(), String>>),
    /// The server is about to end. What is held by a pause would never finish, and fails.
    Drain,
    /// End the thread. What is unfinished fails.
    Stop,
}
