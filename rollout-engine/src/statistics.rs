//! Counters of what an engine did.

use serde::Serialize;

/// Counters since the engine was made.
///
/// ```
/// use rollout_engine::{DeviceChoice, Engine, Request, Statistics};
///
/// let mut engine = Engine::builder().device(DeviceChoice::Cpu).max_batch_size(2).build()?;
/// engine.generate(&[Request::text("Count").max_new_tokens(3)])?;
/// let statistics: &Statistics = engine.statistics();
/// assert_eq!((statistics.new_tokens, statistics.finished_completions, statistics.preemptions), (3, 1, 0));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
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
    /// Completions that came to their end.
    pub finished_completions: u64,
    /// Times that a running sequence gave its pages back for an older one.
    pub preemptions: u64,
    /// Changes of policy.
    pub policy_changes: u64,
    /// Tokens computed once more because of a preemption or a change of policy.
    pub resumed_tokens: u64,
    /// Rows computed after their sequence had ended, because the next step was under way already.
    pub wasted_rows: u64,
    /// Prompt tokens that were not computed because another sequence had computed them: of a group's siblings, and of prefixes
    /// found in the prefix index.
    pub saved_prefill_tokens: u64,
    /// Pages that were shared for that instead of taken, each time that one was.
    pub shared_pages: u64,
    /// Pages copied because a sequence was about to write into one that another still reads.
    pub copied_pages: u64,
    /// Times that a sequence started with pages of the prefix index.
    pub prefix_hits: u64,
    /// Pages of the prefix index given up because running sequences needed them.
    pub evicted_pages: u64,
    /// Most sequences with a slot at once.
    pub max_running: u64,
}
