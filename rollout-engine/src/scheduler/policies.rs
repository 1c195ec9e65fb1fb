//! Which policies sequences are sampled under, and the change between them.

use lora_merge::{ActiveAdapter, PolicyVersion};
use qwen3_model::MergeMode;

use super::Scheduler;
use super::sequence::{Sequence, SequenceId};
use crate::Error;
use crate::adapters::{NamedPolicy, PolicyUpdate, base_policy};
use crate::completion::{Event, TokenCompletion};
use crate::runner::{Runner, SlotPolicy};

/// What a change of policies ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Everything that was computed.
    All,
    /// What was computed under policies that are no more or have other adapters.
    Differing,
}

impl<R: Runner> Scheduler<R> {
    /// Changes the policy between two steps. Waits for the steps under way first, which were sampled under the policy
    /// so far; what they bring about is appended to `events`. Every sequence with a slot then gives its pages back and
    /// is computed anew, as after a preemption: nothing computed under one policy is used under another. No policy is
    /// served by name afterwards.
    ///
    /// # Errors
    /// Those of [`Runner::set_adapters`], and [`Error::PolicyInUse`]: the previous policies are in force and requests go on
    /// under them. An error of a step under way, as from [`Scheduler::step`], gives up all unfinished requests; the policy
    /// has not changed.
    pub fn set_adapters(
        &mut self,
        active: &[ActiveAdapter],
        mode: MergeMode,
        events: &mut Vec<Event<TokenCompletion>>,
    ) -> Result<PolicyUpdate, Error> {
        let _span = tracing::info_span!("refresh", adapters = active.len()).entered();
        self.change_policies(Vec::new(), Change::All, events, |runner| {
            let update = runner.set_adapters(active, mode)?;
            Ok((update.version, update))
        })
    }

    /// Serves policies by name, each a set of adapters at run time, in place of all adapters before; requests that name none
    /// are sampled from the base model. A request under way that names a policy goes on under the new one of that name. A
    /// policy with the name and the adapters of before stays as it is, with its version, and so does the base model: its
    /// requests go on undisturbed. All the rest is as for [`Scheduler::set_adapters`].
    ///
    /// # Errors
    /// As for [`Scheduler::set_adapters`], [`Error::InvalidSetting`] for a name that occurs twice, [`Error::Policy`] for an
    /// adapter that does not fit, and those of [`Runner::serve_policies`].
    pub fn serve_policies(
        &mut self,
        policies: &[(String, Vec<ActiveAdapter>)],
        events: &mut Vec<Event<TokenCompletion>>,
    ) -> Result<PolicyUpdate, Error> {
        let names: Vec<&String> = policies.iter().map(|(name, _)| name).collect();
        if let Some((_, twice)) = (names.iter().enumerate()).find(|(i, name)| names[..*i].contains(name)) {
            return Err(Error::InvalidSetting {
                setting: "policies",
                value: format!("{twice:?} twice"),
                advice: "give every policy a name of its own".into(),
            });
        }
        let _span = tracing::info_span!("refresh", policies = policies.len()).entered();
        let names = names.into_iter().cloned().collect();
        self.change_policies(names, Change::Differing, events, |runner| {
            let active: Vec<&[ActiveAdapter]> = policies.iter().map(|(_, active)| &active[..]).collect();
            let update = runner
                .serve_policies(&active)
                .map_err(|error| named(error, policies))?;
            let unnamed = PolicyVersion {
                number: update.version.number,
                ..base_policy()
            };
            Ok((unnamed, update))
        })
    }

    /// `change` gives the version of requests that name no policy, and what it did.
    fn change_policies(
        &mut self,
        names: Vec<String>,
        what: Change,
        events: &mut Vec<Event<TokenCompletion>>,
        change: impl FnOnce(&mut R) -> Result<(PolicyVersion, PolicyUpdate), Error>,
    ) -> Result<PolicyUpdate, Error> {
        loop {
            match self.collect_step(events) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.abort_all();
                    return Err(error);
                }
            }
        }
        // Where each policy of today is among those to come.
        let places = self
            .named
            .iter()
            .map(|old| names.iter().position(|name| *name == old.name));
        let places: Vec<_> = places.collect();
        let unfinished = self.waiting.iter().chain(&self.running);
        let gone = unfinished.filter_map(|(id, sequence)| {
            let policy = sequence.policy?;
            places[policy].is_none().then_some((id.request, policy))
        });
        if let Some((request, policy)) = gone.min() {
            let name = self.named[policy].name.clone();
            return Err(Error::PolicyInUse { name, request });
        }
        let (unnamed, mut update) = change(&mut self.runner)?;
        let stays = |old: PolicyVersion, sha256| what == Change::Differing && old.sha256 == sha256;
        let before = std::mem::take(&mut self.named);
        let base_stays = stays(self.policy, unnamed.sha256);
        if !base_stays {
            self.policy = unnamed;
        }
        for (name, &sha256) in names.into_iter().zip(&update.policies) {
            let same = before.iter().find(|old| old.name == name);
            let version = match same.filter(|old| stays(old.version, sha256)) {
                Some(old) => old.version,
                None => PolicyVersion {
                    number: update.version.number,
                    sha256,
                },
            };
            self.named.push(NamedPolicy { name, version });
        }
        self.statistics.policy_changes += 1;
        self.index_policies_in_force()?;
        // What was computed under a policy that is no more is computed anew.
        let named = &self.named;
        let goes_on = |sequence: &Sequence| match sequence.policy {
            None => base_stays,
            Some(policy) => {
                let now = places[policy].and_then(|place| named.get(place));
                now.is_some_and(|now| now.version == before[policy].version)
            }
        };
        let mut anew = Vec::new();
        for (&id, sequence) in self.waiting.iter().chain(&self.running) {
            if !goes_on(sequence) {
                anew.push(id);
            }
        }
        for sequence in self.waiting.values_mut().chain(self.running.values_mut()) {
            sequence.policy = sequence.policy.and_then(|policy| places[policy]);
        }
        for id in anew {
            if let Some(group) = self.groups.get_mut(&id.request) {
                group.unpin(&mut self.pages)?;
                group.leader = None;
            }
            if let Some(waiting) = self.waiting.get(&id) {
                update.continued_requests += usize::from(waiting.has_new_tokens());
            }
            // The page table knows every slot of a running sequence: release does not fail.
            if let Some(mut sequence) = self.release(id)? {
                update.continued_requests += 1;
                sequence.restart();
                self.waiting.insert(id, sequence);
            }
        }
        // The runner has forgotten which slot is under which policy.
        self.slots_anew = self
            .running
            .keys()
            .filter_map(|&id| self.slot_policy(id))
            .collect();
        tracing::debug!(version = %update.version, continued = update.continued_requests, "policy changed");
        Ok(update)
    }

    /// The policy of requests that name none.
    pub fn policy(&self) -> PolicyVersion {
        self.policy
    }

    /// The policies that are served by name.
    pub fn named_policies(&self) -> &[NamedPolicy] {
        &self.named
    }

    /// All policies in force.
    pub(super) fn versions(&self) -> Vec<PolicyVersion> {
        let named = self.named.iter().map(|named| named.version);
        std::iter::once(self.policy).chain(named).collect()
    }

    pub(super) fn version_of(&self, sequence: &Sequence) -> PolicyVersion {
        let named = sequence.policy.and_then(|policy| self.named.get(policy));
        named.map_or(self.policy, |named| named.version)
    }

    pub(super) fn find_policy(&self, name: &str) -> Result<usize, Error> {
        let place = self.named.iter().position(|named| named.name == name);
        place.ok_or_else(|| Error::UnknownPolicy {
            name: name.into(),
            known: self.named.iter().map(|named| named.name.clone()).collect(),
        })
    }

    /// What the runner is told of a sequence that got a slot.
    pub(super) fn slot_policy(&self, id: SequenceId) -> Option<SlotPolicy> {
        let sequence = self.running.get(&id).filter(|_| !self.named.is_empty())?;
        Some(SlotPolicy {
            slot: sequence.slot?,
            policy: sequence.policy,
        })
    }
}

/// Puts a policy's name in place of its number.
fn named(error: Error, policies: &[(String, Vec<ActiveAdapter>)]) -> Error {
    match error {
        Error::Model(qwen3_model::Error::Policy { policy, source }) if policy < policies.len() => {
            Error::Policy {
                name: policies[policy].0.clone(),
                source,
            }
        }
        other => other,
    }
}
