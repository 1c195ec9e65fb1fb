//! Adapters that the engine applies at run time, several in one batch: which of them it has.
//!
//! ```text
//!   names that clients know        requests under way         what the engine serves
//!   a ─▶ version 3 ─────────────────────────────────────────▶ "3"
//!   b ─▶ version 4 ─────────────────────────────────────────▶ "4"
//!                                   one under version 1 ────▶ "1"   (a's adapter of before)
//! ```
//!
//! The engine knows a policy by its version, so that one that was replaced or unloaded goes on being served until its last
//! request has finished. What is served already stays as it is when something comes or goes.

use std::sync::Arc;

use lora_merge::PolicyVersion;

use super::policy::{Policies, Policy};
use crate::Error;
use crate::adapters::AdapterSource;
use crate::engine::Engine;

#[derive(Debug)]
pub(super) struct SideBySide {
    known: Arc<Policies>,
    served: Vec<Arc<Policy>>,
}

impl SideBySide {
    /// For an engine that serves no policies by name.
    pub(super) fn new(known: Arc<Policies>) -> Self {
        Self {
            known,
            served: Vec::new(),
        }
    }

    /// To be called when the engine is another one, which serves nothing by name.
    pub(super) fn forget(&mut self) {
        self.served.clear();
    }

    /// Name of a policy in the engine; `None` is the base model.
    pub(super) fn name(policy: &Policy) -> Option<String> {
        policy.adapter.as_ref().map(|_| policy.version.to_string())
    }

    /// The engine's own version of a policy that it serves.
    pub(super) fn version(engine: &Engine, policy: &Policy) -> PolicyVersion {
        let name = Self::name(policy);
        let mut named = engine.named_policies().iter();
        let named = named.find(|named| Some(&named.name) == name.as_ref());
        named.map_or_else(|| engine.policy(), |named| named.version)
    }

    /// What is served, besides the base model.
    pub(super) fn served(&self) -> &[Arc<Policy>] {
        &self.served
    }

    /// Has the engine serve a policy beside those that can be asked for or that `used` says are in use.
    ///
    /// # Errors
    /// The engine's; it then serves what it did before.
    pub(super) fn add(
        &mut self,
        engine: &mut Engine,
        policy: &Arc<Policy>,
        used: impl Fn(&Policy) -> bool,
    ) -> Result<(), Error> {
        if self.serves(policy) {
            return Ok(());
        }
        let mut next = self.wanted(used);
        next.push(policy.clone());
        self.serve(engine, next)
    }

    /// Whether there is nothing to do for a policy.
    pub(super) fn serves(&self, policy: &Policy) -> bool {
        policy.adapter.is_none() || self.served.iter().any(|served| served.version == policy.version)
    }

    /// Has the engine give up what nobody can ask for and nobody uses.
    ///
    /// # Errors
    /// The engine's; it then serves what it did before.
    pub(super) fn tidy(&mut self, engine: &mut Engine, used: impl Fn(&Policy) -> bool) -> Result<(), Error> {
        let wanted = self.wanted(used);
        match wanted.len() == self.served.len() {
            true => Ok(()),
            false => self.serve(engine, wanted),
        }
    }

    fn wanted(&self, used: impl Fn(&Policy) -> bool) -> Vec<Arc<Policy>> {
        let known = |policy: &Policy| {
            let named = self.known.find(&policy.name);
            named.is_ok_and(|named| named.version == policy.version)
        };
        let served = self.served.iter();
        let wanted = served.filter(|policy| known(policy) || used(policy));
        wanted.cloned().collect()
    }

    fn serve(&mut self, engine: &mut Engine, next: Vec<Arc<Policy>>) -> Result<(), Error> {
        let sources = next.iter().filter_map(|policy| {
            let source = AdapterSource::from(policy.adapter.clone()?);
            Some((Self::name(policy)?, source))
        });
        engine.serve_policies(sources)?;
        self.served = next;
        Ok(())
    }
}
