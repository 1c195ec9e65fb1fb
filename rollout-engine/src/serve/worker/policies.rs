//! Which policies are in force, and how that changes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::super::command::JobId;
use super::super::policy::{Base, Policy};
use super::super::watchdog::Task;
use super::{JobState, Worker};
use crate::adapters::AdapterSource;
use crate::engine::Engine;

impl Worker {
    /// Puts a policy in force if that disturbs nothing. Whether it is.
    pub(super) fn prepare(&mut self, policy: &Arc<Policy>) -> Result<bool, String> {
        if self.group(policy) != self.group(&self.policy) {
            if !self.live.is_empty() {
                return Ok(false);
            }
            self.switch_to(policy)?;
        }
        self.add(policy).map(|()| true)
    }

    /// Puts a policy in force beside the others, where they are side by side.
    pub(super) fn add(&mut self, policy: &Arc<Policy>) -> Result<(), String> {
        let (Some(side_by_side), Some(engine)) = (&mut self.side_by_side, &mut self.engine) else {
            return Ok(());
        };
        if side_by_side.serves(policy) {
            return Ok(());
        }
        self.shared.watchdog.begins(Task::ApplyingAdapters);
        let added = side_by_side.add(engine, policy, |policy| in_use(&self.jobs, policy));
        added.map_err(|error| {
            let error = self.told(&error);
            self.after_error(&error);
            error
        })
    }

    /// Gives up adapters beside the weights that nobody needs.
    pub(super) fn tidy(&mut self) {
        let (Some(side_by_side), Some(engine)) = (&mut self.side_by_side, &mut self.engine) else {
            return;
        };
        self.shared.watchdog.begins(Task::ApplyingAdapters);
        if let Err(error) = side_by_side.tidy(engine, |policy| in_use(&self.jobs, policy)) {
            tracing::warn!(%error, "adapters that nobody needs are kept");
            let error = self.told(&error);
            self.after_error(&error);
        }
    }

    /// Puts a policy in force. Nothing must run. If that fails, the policy of before is in force, or there is no engine.
    pub(super) fn switch_to(&mut self, policy: &Arc<Policy>) -> Result<(), String> {
        if policy.base.number != self.policy.base.number || self.engine.is_none() {
            policy.base.still_there()?;
            if let Err(error) = self.open_under(policy) {
                // Its base may be open by now, and must not be taken for that of before.
                let current = self.policy.clone();
                self.open_under(&current)
                    .map_err(|lost| format!("{error}; {lost}"))?;
                return Err(error);
            }
        } else {
            self.apply(policy)?;
        }
        tracing::info!(policy = policy.name, version = policy.version, "policy in force");
        self.policy = policy.clone();
        self.queue.switched(self.group(policy), Instant::now());
        self.shared.count_switch();
        Ok(())
    }

    /// Opens the engine anew under a policy. There is none if that fails.
    fn open_under(&mut self, policy: &Policy) -> Result<(), String> {
        // One engine at a time: there may be no memory for two.
        self.engine = None;
        self.engine = Some(self.open(&policy.base)?);
        let applied = self.apply(policy);
        if applied.is_err() {
            self.engine = None;
        }
        applied
    }

    /// An engine over these weights, and no others that have taken their place.
    fn open(&mut self, base: &Base) -> Result<Engine, String> {
        self.shared.watchdog.begins(Task::OpeningWeights);
        let opened = (self.reopen)(base.dir.as_deref());
        let mut engine = opened.map_err(|error| self.told(&error))?;
        // Only now: what was opened stays as it is.
        base.still_there()?;
        engine.favor_latency();
        Ok(engine)
    }

    /// If that fails, the engine is as it was.
    fn apply(&mut self, policy: &Policy) -> Result<(), String> {
        self.shared.watchdog.begins(Task::ApplyingAdapters);
        if let Some(side_by_side) = &mut self.side_by_side {
            // It came with the engine.
            side_by_side.forget();
            return Ok(());
        }
        let engine = self.engine.as_mut().ok_or("the engine is gone")?;
        let sources = policy.adapter.iter();
        let sources = sources.map(|adapter| (AdapterSource::from(adapter.clone()), 1.0));
        let applied = engine.load_adapters(sources).map(|_| ());
        applied.map_err(|error| self.told(&error))
    }
}

/// Whether a request that has not ended asks for a policy.
fn in_use(jobs: &HashMap<JobId, JobState>, policy: &Policy) -> bool {
    jobs.values().any(|job| job.policy.version == policy.version)
}
