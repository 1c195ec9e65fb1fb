//! The way from a handler to the engine's thread, with a limit on what may be under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use super::command::{Command, Job, JobEvent, JobId, PauseId, PauseMode, PromptJob};
use super::error::ApiError;
use super::policy::Policy;
use super::snapshot::Shared;

/// Sends commands to the engine's thread.
#[derive(Debug)]
pub(super) struct EngineHandle {
    commands: UnboundedSender<Command>,
    shared: Arc<Shared>,
    next_job: AtomicU64,
    next_pause: AtomicU64,
    /// Completions accepted and not finished.
    unfinished: Arc<AtomicUsize>,
    max_unfinished: usize,
    draining: watch::Sender<bool>,
}

impl EngineHandle {
    pub(super) fn new(
        commands: UnboundedSender<Command>,
        shared: Arc<Shared>,
        max_unfinished: usize,
    ) -> Self {
        Self {
            commands,
            shared,
            next_job: AtomicU64::new(0),
            next_pause: AtomicU64::new(0),
            unfinished: Arc::default(),
            max_unfinished,
            draining: watch::Sender::new(false),
        }
    }

    /// Hands prompts to the engine. Dropping the result cancels what is unfinished.
    ///
    /// # Errors
    /// 400 if these are more completions than the limit allows at all, 429 if they are too many now, 503 if the server
    /// shuts down.
    pub(super) fn submit(
        &self,
        policy: Arc<Policy>,
        prompts: Vec<PromptJob>,
        stream: bool,
    ) -> Result<RunningJob, ApiError> {
        if self.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        let completions = prompts
            .iter()
            .fold(0usize, |sum, prompt| sum.saturating_add(prompt.n));
        let share = self.reserve(completions)?;
        let id = self.next_job.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = unbounded_channel();
        let job = Job {
            policy: policy.clone(),
            prompts,
            stream,
            events,
        };
        self.send(Command::Submit(id, job))?;
        Ok(RunningJob {
            id,
            policy,
            completions,
            left: completions,
            events: receiver,
            commands: self.commands.clone(),
            _share: share,
        })
    }

    fn reserve(&self, completions: usize) -> Result<Share, ApiError> {
        let limit = self.max_unfinished;
        if completions > limit {
            let message = format!(
                "{completions} completions in one request, but the server takes {limit} at once (--max-unfinished)"
            );
            return Err(ApiError::bad_request(message).code("too_many_completions"));
        }
        let grown = |now: usize| Some(now + completions).filter(|&sum| sum <= limit);
        match self
            .unfinished
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, grown)
        {
            Ok(_) => Ok(Share {
                unfinished: self.unfinished.clone(),
                completions,
            }),
            Err(now) => Err(ApiError {
                retry_after: Some(self.retry_after(now)),
                ..ApiError::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    format!("{now} completions are under way and {completions} more would exceed {limit}: try again later"),
                )
            }
            .code("queue_full")),
        }
    }

    /// Seconds until an eighth of what is under way should have finished, at the rate so far.
    fn retry_after(&self, unfinished: usize) -> u64 {
        let finished = self.shared.snapshot().statistics.finished_completions;
        let rate = finished as f64 / self.shared.busy().as_secs_f64().max(1e-3);
        let seconds = (unfinished as f64 / 8.0 / rate.max(1e-3)).ceil();
        (seconds as u64).clamp(1, 60)
    }

    /// Completions accepted and not finished.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Acquire)
    }

    /// Pauses generation, and ends this pause by itself after `timeout`, should nobody else.
    pub(super) async fn pause(&self, mode: PauseMode, timeout: Option<Duration>) -> Result<(), ApiError> {
        let (done, answer) = oneshot::channel();
        let id: PauseId = self.next_pause.fetch_add(1, Ordering::Relaxed);
        self.send(Command::Pause(id, mode, done))?;
        if let Some(timeout) = timeout {
            let commands = self.commands.clone();
            // On its own: the caller may be gone before the time is over, and even before the pause has begun.
            tokio::spawn(async move {
                tokio::time::sleep(timeout).await;
                let _ = commands.send(Command::EndPause(id));
            });
        }
        // A resume that came meanwhile ends the waiting, too.
        let _ = answer.await;
        Ok(())
    }

    pub(super) async fn resume(&self) -> Result<(), ApiError> {
        self.ask(Command::Resume).await
    }

    pub(super) async fn reset_prefix_cache(&self) -> Result<(), ApiError> {
        self.ask(Command::ResetPrefixCache)
            .await?
            .map_err(ApiError::internal)
    }

    /// Puts a policy in force if nothing runs, and says whether it is.
    pub(super) async fn prepare(&self, policy: Arc<Policy>) -> Result<bool, ApiError> {
        self.ask(|done| Command::Prepare(policy, done))
            .await?
            .map_err(ApiError::internal)
    }

    /// A name is not known any more.
    pub(super) fn unloaded(&self) -> Result<(), ApiError> {
        self.send(Command::Unloaded)
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, ApiError> {
        let (done, answer) = oneshot::channel();
        self.send(command(done))?;
        answer.await.map_err(|_| gone())
    }

    /// Accept nothing more.
    pub(super) fn drain(&self) {
        self.draining.send_replace(true);
        let _ = self.commands.send(Command::Drain);
    }

    pub(super) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Resolves when nothing more is accepted.
    pub(super) async fn drained(&self) {
        // The sender is not dropped before this future.
        let _ = self.draining.subscribe().wait_for(|draining| *draining).await;
    }

    /// Ends the engine's thread. What is unfinished fails.
    pub(super) fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    fn send(&self, command: Command) -> Result<(), ApiError> {
        self.commands.send(command).map_err(|_| gone())
    }
}

fn gone() -> ApiError {
    ApiError::internal("the engine has ended")
}

/// A job's part of the limit; given back when dropped.
#[derive(Debug)]
struct Share {
    unfinished: Arc<AtomicUsize>,
    completions: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.unfinished.fetch_sub(self.completions, Ordering::AcqRel);
    }
}

/// A job that the engine has, to receive its events from. Dropping it cancels what is unfinished.
#[derive(Debug)]
pub(super) struct RunningJob {
    id: JobId,
    pub(super) policy: Arc<Policy>,
    pub(super) completions: usize,
    left: usize,
    events: UnboundedReceiver<JobEvent>,
    commands: UnboundedSender<Command>,
    _share: Share,
}

impl RunningJob {
    /// The next event; `None` after the last completion or an error.
    pub(super) async fn next(&mut self) -> Option<JobEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`RunningJob::next`], to be polled.
    pub(super) fn poll_next(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<JobEvent>> {
        if self.left == 0 {
            return std::task::Poll::Ready(None);
        }
        let event = std::task::ready!(self.events.poll_recv(context));
        let event = event.unwrap_or_else(|| JobEvent::Failed(gone()));
        match &event {
            JobEvent::Finished { .. } => self.left -= 1,
            JobEvent::Failed(_) => self.left = 0,
            JobEvent::Started { .. } | JobEvent::Token { .. } => {}
        }
        std::task::Poll::Ready(Some(event))
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        if self.left > 0 {
            let _ = self.commands.send(Command::Cancel(self.id));
        }
    }
}
