//! What the engine's thread lets others see, written after every step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::policy::Policy;
use super::watchdog::{Hang, Watchdog};
use crate::engine::Engine;
use crate::statistics::Statistics;

/// The engine as it was after its last step.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) statistics: Statistics,
    /// Sequences with a slot.
    pub(super) running: usize,
    /// Sequences that the engine has, with or without a slot.
    pub(super) admitted: usize,
    pub(super) free_pages: usize,
    pub(super) pages: usize,
    pub(super) policy_name: String,
    pub(super) policy_version: u64,
    /// Adapters in force beside that one.
    pub(super) beside: Vec<Arc<Policy>>,
    pub(super) paused: bool,
    /// Whether there is an engine that gets on.
    pub(super) healthy: bool,
    /// Why it does not get on.
    pub(super) hang: Option<Hang>,
}

/// Shared between the engine's thread and everyone else.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) watchdog: Watchdog,
    snapshot: Mutex<Snapshot>,
    /// Counters of engines that were replaced, and of this one.
    switches: AtomicU64,
    busy_micros: AtomicU64,
    ended: watch::Sender<bool>,
}

impl Shared {
    pub(super) fn new(watchdog: Watchdog) -> Self {
        Self {
            watchdog,
            snapshot: Mutex::default(),
            switches: AtomicU64::default(),
            busy_micros: AtomicU64::default(),
            ended: watch::Sender::default(),
        }
    }

    pub(super) fn publish(
        &self,
        engine: Option<&Engine>,
        policy: &Policy,
        beside: &[Arc<Policy>],
        paused: bool,
        admitted: usize,
    ) {
        let mut snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = engine {
            let scheduler = engine.scheduler();
            snapshot.statistics = *engine.statistics();
            snapshot.running = scheduler.running();
            snapshot.free_pages = scheduler.pages().free_pages();
            // Page 0 belongs to nobody.
            snapshot.pages = scheduler.shape().n_pages - 1;
        }
        if snapshot.policy_version != policy.version || snapshot.policy_name.is_empty() {
            snapshot.policy_name.clone_from(&policy.name);
            snapshot.policy_version = policy.version;
        }
        let same = |(a, b): (&Arc<Policy>, &Arc<Policy>)| a.version == b.version;
        if snapshot.beside.len() != beside.len() || !snapshot.beside.iter().zip(beside).all(same) {
            snapshot.beside = beside.to_vec();
        }
        snapshot.admitted = admitted;
        snapshot.paused = paused;
        snapshot.healthy = engine.is_some();
    }

    /// The engine as it was after its last step, and whether it gets on now.
    pub(super) fn snapshot(&self) -> Snapshot {
        let snapshot = self.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let mut snapshot = snapshot.clone();
        snapshot.hang = self.watchdog.hang();
        snapshot.healthy &= !*self.ended.borrow() && snapshot.hang.is_none();
        snapshot
    }

    pub(super) fn count_switch(&self) {
        self.switches.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn switches(&self) -> u64 {
        self.switches.load(Ordering::Relaxed)
    }

    pub(super) fn count_busy(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.busy_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Time spent in steps.
    pub(super) fn busy(&self) -> Duration {
        Duration::from_micros(self.busy_micros.load(Ordering::Relaxed))
    }

    /// The engine's thread is over.
    pub(super) fn end(&self) {
        self.watchdog.ends();
        self.ended.send_replace(true);
    }

    /// Resolves when the engine's thread is over.
    pub(super) async fn ended(&self) {
        // The sender is not dropped before this future.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }
}
