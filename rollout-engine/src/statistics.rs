//! Counters of what an engine did.

use serde::Serialize;

/// Counters since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Statistics {
    /// Passes through the model.
    pub steps: u64,
    /// Tokens computed by prefill, those of resumed sequences included.
    pub prefill_tokens: u64,
    /// Rows computed by decode.
    pub decode_rows: u64,
    /// Tokens of completions.
    pub new_tokens: u64,
    /// Requests with a completion.
    pub finished_requests: u64,
    /// Times that a running sequence gave its pages back for an older one.
    pub preemptions: u64,
    /// Changes of policy.
    pub policy_changes: u64,
    /// Tokens computed once more because of a preemption or a change of policy.
    pub resumed_tokens: u64,
    /// Rows computed after their sequence had ended, because the next step was under way already.
    pub wasted_rows: u64,
    /// Most sequences with a slot at once.
    pub max_running: u64,
}
