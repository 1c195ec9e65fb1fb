//! Whether the engine's thread gets on.
//!
//! A thread that is lost in a driver call, or waits for a kernel that never ends, cannot say so. So it says beforehand what
//! it begins, and others look at how long ago that was. While it waits for commands it rests, and rest is no hang, however
//! long it takes: that is how an idle server and a paused one wait.

use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What the engine's thread is at. Each is an end of what was before, so that only one of them must fit into the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    Step,
    /// Handing results out and letting requests in.
    BetweenSteps,
    /// Something small that a client asked for.
    Command,
    OpeningWeights,
    /// Merging adapters, or copying them to the device.
    ApplyingAdapters,
    Closing,
}

impl Task {
    fn words(self) -> &'static str {
        match self {
            Self::Step => "computing one step",
            Self::BetweenSteps => "between two steps",
            Self::Command => "carrying out a command",
            Self::OpeningWeights => "opening weights",
            Self::ApplyingAdapters => "applying adapters",
            Self::Closing => "giving the device back",
        }
    }
}

/// The engine's thread has been at one thing for too long. Printed, it says at what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hang {
    task: Task,
    since: Instant,
    timeout: Duration,
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (task, timeout) = (self.task.words(), self.timeout.as_secs_f64());
        let seconds = self.since.elapsed().as_secs_f64();
        write!(
            f,
            "the engine hangs: it has been {task} for {seconds:.1} s, and the watchdog's time is {timeout} s"
        )
    }
}

/// Knows what the engine's thread is at.
#[derive(Debug)]
pub(super) struct Watchdog {
    /// `None` notices nothing.
    timeout: Option<Duration>,
    /// `None` while it rests.
    work: Mutex<Option<(Task, Instant)>>,
    over: AtomicBool,
}

impl Watchdog {
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        Self {
            timeout: timeout.filter(|timeout| !timeout.is_zero()),
            work: Mutex::new(None),
            over: AtomicBool::new(false),
        }
    }

    /// What was before is done, and this begins.
    pub(super) fn begins(&self, task: Task) {
        self.set(Some((task, Instant::now())));
    }

    /// There is nothing to do.
    pub(super) fn rests(&self) {
        self.set(None);
    }

    /// The thread has ended.
    pub(super) fn ends(&self) {
        self.over.store(true, Ordering::Relaxed);
        self.rests();
    }

    fn set(&self, work: Option<(Task, Instant)>) {
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }

    /// Whether the thread hangs now.
    pub(super) fn hang(&self) -> Option<Hang> {
        let timeout = self.timeout?;
        let (task, since) = (*self.work.lock().unwrap_or_else(PoisonError::into_inner))?;
        let hang = Hang { task, since, timeout };
        (since.elapsed() >= timeout).then_some(hang)
    }

    /// Resolves when the thread hangs.
    pub(super) async fn hangs(&self) -> Hang {
        loop {
            if let Some(hang) = self.hang() {
                return hang;
            }
            self.tick().await;
        }
    }

    /// Logs every hang once, and its end. Never resolves.
    pub(super) async fn watch(&self) {
        loop {
            let hang = self.hangs().await;
            tracing::error!("{hang}");
            while self.hang().is_some_and(|now| now.since == hang.since) {
                self.tick().await;
            }
            if self.over.load(Ordering::Relaxed) {
                return pending().await;
            }
            let seconds = hang.since.elapsed().as_secs_f64();
            tracing::warn!("the engine gets on again, after {seconds:.1} s");
        }
    }

    async fn tick(&self) {
        let Some(timeout) = self.timeout else {
            return pending().await;
        };
        // Often enough to be noticed soon after, and seldom enough to cost nothing.
        let pause = (timeout / 4).clamp(Duration::from_millis(1), Duration::from_secs(1));
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(30);

    #[test]
    fn only_work_that_takes_too_long_is_a_hang() {
        let watchdog = Watchdog::new(Some(SHORT));
        std::thread::sleep(2 * SHORT);
        assert_eq!(watchdog.hang(), None, "it has not begun anything");
        watchdog.begins(Task::OpeningWeights);
        std::thread::sleep(2 * SHORT);
        let hang = watchdog.hang().unwrap().to_string();
        assert!(
            hang.contains("opening weights for 0.") && hang.contains("is 0.03 s"),
            "{hang}"
        );
        watchdog.rests();
        assert_eq!(watchdog.hang(), None);
        let patient = Watchdog::new(Some(Duration::from_secs(3600)));
        for watchdog in [Watchdog::new(None), Watchdog::new(Some(Duration::ZERO)), patient] {
            watchdog.begins(Task::Step);
            std::thread::sleep(2 * SHORT);
            assert_eq!(watchdog.hang(), None);
        }
    }
}
