use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc::unbounded_channel;

use super::super::policy::Base;
use super::super::watchdog::Watchdog;
use super::*;
use crate::fake_runner::FakeRunner;
use crate::runner::{Runner, RunnerShape};

/// An engine that batches so many.
fn engine(max_batch_size: usize, change: fn(FakeRunner) -> FakeRunner) -> Engine {
    let shape = RunnerShape {
        max_batch_size,
        ..FakeRunner::small_shape()
    };
    let runner: Box<dyn Runner + Send> = Box::new(change(FakeRunner::new(shape)));
    Engine::with_runner(runner, vec![], None).expect("a good shape")
}

/// A worker over an engine that batches 4, and policies over its base and over another.
fn worker(reopen: Reopen) -> (Worker, Arc<Policy>) {
    let policies = Arc::new(Policies::new("base".into(), Base::default(), 4));
    let other = Policy {
        name: "base".into(),
        version: 1,
        base: Arc::new(Base {
            number: 1,
            ..Base::default()
        }),
        adapter: None,
        path: None,
    };
    let (_, commands) = unbounded_channel();
    let worker = Worker::new(
        engine(4, |runner| runner),
        reopen,
        policies,
        Duration::ZERO,
        commands,
        Arc::new(Shared::new(Watchdog::new(None))),
    );
    (worker, Arc::new(other))
}

fn batch(worker: &Worker) -> Option<usize> {
    let engine = worker.engine.as_ref();
    engine.map(|engine| engine.scheduler().shape().max_batch_size)
}

/// Requests under the policy of before were computed with the new base weights.
#[test]
fn an_adapter_that_cannot_be_applied_over_new_weights_leaves_the_old_ones_in_force() {
    let opened = AtomicUsize::new(0);
    let (mut worker, other) = worker(Box::new(move |_| {
        Ok(match opened.fetch_add(1, Ordering::Relaxed) {
            0 => engine(3, FakeRunner::failing_policy_changes),
            _ => engine(4, |runner| runner),
        })
    }));
    let error = worker.switch_to(&other).expect_err("it is told to fail");
    assert!(error.contains("told to fail"), "{error}");
    assert_eq!((worker.policy.version, batch(&worker)), (0, Some(4)));
}

#[test]
fn if_the_way_back_fails_too_there_is_no_engine_rather_than_a_wrong_one() {
    let (mut worker, other) = worker(Box::new(|_| Ok(engine(3, FakeRunner::failing_policy_changes))));
    let error = worker.switch_to(&other).expect_err("it is told to fail");
    assert_eq!(error.matches("told to fail").count(), 2, "{error}");
    assert_eq!(batch(&worker), None);
    worker.publish();
    assert!(!worker.shared.snapshot().healthy);
}
