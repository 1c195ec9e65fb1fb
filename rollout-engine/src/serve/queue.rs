//! Which waiting request the engine gets next, when only one policy can be in force at a time. Where adapters are applied at
//! run time all policies over one base count as one here.
//!
//! Requests under the policy in force go first, in the order of their arrival. When nothing of it waits or runs, the
//! policy of the oldest waiting request comes next. A stream of requests under one policy cannot keep another waiting
//! for ever: once the oldest other request has waited for `patience`, no more are admitted under the present policy, what
//! runs finishes, and the policy changes. Every policy is in force for at least one admission.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Something that waits, with the version of its policy.
#[derive(Debug)]
struct Waiting<T> {
    item: T,
    arrived: Instant,
}

/// What to do next.
#[derive(Debug, PartialEq)]
pub(super) enum Next<T> {
    /// Give this to the engine.
    Admit(T),
    /// Put this policy in force: nothing runs.
    Switch(u64),
    /// Wait for running requests, or for new ones.
    Nothing,
}

/// Waiting requests by policy.
#[derive(Debug)]
pub(super) struct PolicyQueue<T> {
    waiting: BTreeMap<u64, VecDeque<Waiting<T>>>,
    in_force: u64,
    since: Instant,
    admitted: bool,
    patience: Duration,
}

impl<T> PolicyQueue<T> {
    pub(super) fn new(in_force: u64, patience: Duration, now: Instant) -> Self {
        Self {
            waiting: BTreeMap::new(),
            in_force,
            since: now,
            admitted: false,
            patience,
        }
    }

    pub(super) fn push(&mut self, policy: u64, item: T, now: Instant) {
        let queue = self.waiting.entry(policy).or_default();
        queue.push_back(Waiting { item, arrived: now });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the next request of the policy in force, or says what else to do. `idle` means that nothing runs.
    pub(super) fn next(&mut self, idle: bool, now: Instant) -> Next<T> {
        let other = self
            .waiting
            .iter()
            .filter(|(policy, _)| **policy != self.in_force)
            .filter_map(|(&policy, queue)| Some((queue.front()?.arrived, policy)))
            .min();
        let closed = self.admitted
            && other.is_some_and(|(arrived, _)| {
                now.saturating_duration_since(arrived.max(self.since)) >= self.patience
            });
        if !closed && let Some(item) = self.pop() {
            self.admitted = true;
            return Next::Admit(item);
        }
        match other {
            Some((_, policy)) if idle => Next::Switch(policy),
            _ => Next::Nothing,
        }
    }

    /// The oldest that waits under a policy.
    pub(super) fn front(&self, policy: u64) -> Option<&T> {
        Some(&self.waiting.get(&policy)?.front()?.item)
    }

    fn pop(&mut self) -> Option<T> {
        let queue = self.waiting.get_mut(&self.in_force)?;
        let item = queue.pop_front()?.item;
        if queue.is_empty() {
            self.waiting.remove(&self.in_force);
        }
        Some(item)
    }

    /// To be called when a policy has come into force.
    pub(super) fn switched(&mut self, policy: u64, now: Instant) {
        self.in_force = policy;
        self.since = now;
        self.admitted = false;
    }

    /// Takes out everything under one policy.
    pub(super) fn take_policy(&mut self, policy: u64) -> Vec<T> {
        let queue = self.waiting.remove(&policy).unwrap_or_default();
        queue.into_iter().map(|waiting| waiting.item).collect()
    }

    /// Takes out what does not satisfy a condition.
    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        for queue in self.waiting.values_mut() {
            queue.retain(|waiting| keep(&waiting.item));
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PATIENCE: Duration = Duration::from_millis(1000);

    #[test]
    fn the_policy_in_force_goes_first_until_another_has_waited() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut queue = PolicyQueue::new(0, PATIENCE, start);
        queue.push(1, "b1", at(0));
        queue.push(0, "a1", at(1));
        queue.push(0, "a2", at(2));
        queue.push(0, "a3", at(3));
        assert_eq!(queue.next(true, at(4)), Next::Admit("a1"));
        assert_eq!(queue.next(false, at(999)), Next::Admit("a2"));
        // Closed: what runs finishes first.
        assert_eq!(queue.next(false, at(1000)), Next::Nothing);
        assert_eq!(queue.next(true, at(1500)), Next::Switch(1));
        queue.switched(1, at(1500));
        // The oldest of policy 0 has waited for longer than the patience, but policy 1 has just come.
        assert_eq!(queue.next(true, at(1501)), Next::Admit("b1"));
        assert_eq!(queue.next(false, at(1502)), Next::Nothing);
        assert_eq!(queue.next(true, at(1503)), Next::Switch(0));
        queue.switched(0, at(1503));
        assert_eq!(queue.next(true, at(1504)), Next::Admit("a3"));
        assert_eq!(queue.next(true, at(1505)), Next::Nothing);
        assert!(queue.is_empty());
    }

    proptest! {
        /// Whatever arrives when, with any patience: everything is admitted, under its own policy, and in order within it.
        #[test]
        fn nothing_starves(
            arrivals in proptest::collection::vec((0u64..4, 0u64..50), 1..80),
            patience in 0u64..100,
            run_for in 1usize..6,
        ) {
            let start = Instant::now();
            let mut queue = PolicyQueue::new(0, Duration::from_millis(patience), start);
            let (mut now, mut in_force, mut running) = (start, 0, 0usize);
            let mut arrivals = arrivals.into_iter().enumerate();
            let mut admitted = Vec::new();
            let mut idle_rounds = 0;
            loop {
                let arrival = arrivals.next();
                if let Some((number, (policy, pause))) = arrival {
                    now += Duration::from_millis(pause);
                    queue.push(policy, (policy, number), now);
                }
                now += Duration::from_millis(7);
                match queue.next(running == 0, now) {
                    Next::Admit(item) => {
                        prop_assert_eq!(item.0, in_force);
                        admitted.push(item);
                        running = run_for;
                        idle_rounds = 0;
                    }
                    Next::Switch(policy) => {
                        prop_assert_eq!(running, 0);
                        prop_assert_ne!(policy, in_force);
                        in_force = policy;
                        queue.switched(policy, now);
                        idle_rounds = 0;
                    }
                    Next::Nothing => {
                        running = running.saturating_sub(1);
                        idle_rounds += 1;
                    }
                }
                prop_assert!(idle_rounds <= run_for + 1 || queue.is_empty());
                if arrival.is_none() && queue.is_empty() {
                    break;
                }
            }
            for policy in 0..4 {
                let numbers: Vec<_> = admitted.iter().filter(|i| i.0 == policy).map(|i| i.1).collect();
                prop_assert!(numbers.is_sorted());
            }
        }
    }
}
