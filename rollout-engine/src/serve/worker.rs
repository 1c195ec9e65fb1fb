//! The engine's thread: takes commands between two steps, steps while there is work, and sends results on.
//!
//! ```text
//!  handlers ── Command ─▶ channel ─▶ [ drain commands ─ admit ─ step ─ send events ] ─▶ a channel per job ─▶ handlers
//! ```
//!
//! Channels to jobs are unbounded, so that a slow reader never holds up a step; what they can hold is bounded by the
//! tokens that the job asked for. Nothing here waits for a client.

mod policies;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lora_merge::PolicyVersion;
use qwen3_model::MergeMode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use super::command::{Command, Job, JobEvent, JobId, PauseId, PauseMode, PromptJob};
use super::error::ApiError;
use super::policy::{Policies, Policy};
use super::queue::{Next, PolicyQueue};
use super::side_by_side::SideBySide;
use super::snapshot::Shared;
use super::watchdog::Task;
use crate::Error;
use crate::completion::{Completion, Event, RequestId};
use crate::engine::Engine;
use crate::request::{Request, SamplingParams};

/// An engine without work waits for more requests until none has come for `ARRIVAL_GAP`, at most `ARRIVAL_LIMIT`.
const ARRIVAL_GAP: Duration = Duration::from_micros(500);
const ARRIVAL_LIMIT: Duration = Duration::from_millis(4);

/// Opens the engine anew over the weights of a folder; there is none for an engine that did not come from one.
pub(super) type Reopen = Box<dyn FnMut(Option<&Path>) -> Result<Engine, Error> + Send>;

#[derive(Debug, PartialEq, Eq)]
enum Pause {
    Off,
    /// Nothing new starts; at the end of what runs the waiting callers are told.
    Finishing,
    On,
}

struct JobState {
    policy: Arc<Policy>,
    events: UnboundedSender<JobEvent>,
    stream: bool,
    started: bool,
    requests: Vec<RequestId>,
    /// Completions to come.
    left: usize,
}

/// A prompt that the engine has.
#[derive(Clone, Copy, Debug)]
struct Live {
    job: JobId,
    /// Index of its first completion among those of the job.
    first_index: usize,
    /// Completions to come.
    left: usize,
    /// The engine's own name for its policy.
    version: PolicyVersion,
}

#[derive(Debug)]
struct Item {
    job: JobId,
    policy: Arc<Policy>,
    prompt: PromptJob,
    /// Index of its first completion.
    first_index: usize,
}

/// The state of the engine's thread.
pub(super) struct Worker {
    /// `None` only if it could not be opened anew.
    engine: Option<Engine>,
    reopen: Reopen,
    /// In force; where several are, the base model.
    policy: Arc<Policy>,
    /// Where adapters are applied at run time, those that are in force.
    side_by_side: Option<SideBySide>,
    commands: UnboundedReceiver<Command>,
    queue: PolicyQueue<Item>,
    jobs: HashMap<JobId, JobState>,
    live: HashMap<RequestId, Live>,
    pause: Pause,
    /// The latest call that paused.
    pause_id: PauseId,
    told_when_idle: Vec<oneshot::Sender<()>>,
    /// The server is about to end.
    draining: bool,
    stopped: bool,
    /// What the device said first after which nothing on it works any more.
    lost: Option<String>,
    shared: Arc<Shared>,
}

impl Worker {
    pub(super) fn new(
        mut engine: Engine,
        reopen: Reopen,
        policies: Arc<Policies>,
        patience: std::time::Duration,
        commands: UnboundedReceiver<Command>,
        shared: Arc<Shared>,
    ) -> Self {
        engine.favor_latency();
        let policy = policies.base();
        let at_run_time = engine.merge_mode() == MergeMode::Unmerged;
        let worker = Self {
            side_by_side: at_run_time.then(|| SideBySide::new(policies)),
            engine: Some(engine),
            reopen,
            queue: PolicyQueue::new(policy.version, patience, Instant::now()),
            policy,
            commands,
            jobs: HashMap::new(),
            live: HashMap::new(),
            pause: Pause::Off,
            pause_id: 0,
            told_when_idle: Vec::new(),
            draining: false,
            stopped: false,
            lost: None,
            shared,
        };
        // Healthy from the first request on.
        worker.publish();
        worker
    }

    /// Runs until [`Command::Stop`], until nobody can send commands any more or until the device is lost.
    ///
    /// # Errors
    /// [`Error::DeviceLost`]: whoever supervises the process is to start another.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.publish();
        while !self.stopped {
            if !self.has_work() {
                self.shared.watchdog.rests();
                match self.commands.blocking_recv() {
                    Some(command) => self.handle(command),
                    None => break,
                }
                self.gather();
            }
            self.take_commands();
            if self.pause == Pause::Off && !self.stopped {
                self.admit();
            }
            if self.pause != Pause::On && !self.stopped {
                self.step();
            }
            if self.pause == Pause::Finishing && self.live.is_empty() {
                self.pause = Pause::On;
            }
            if self.pause == Pause::On && !self.told_when_idle.is_empty() {
                // Whoever has the answer finds it paused.
                self.publish();
                for caller in self.told_when_idle.drain(..) {
                    let _ = caller.send(());
                }
            }
            self.publish();
        }
        self.shared.watchdog.begins(Task::Closing);
        let lost = self.lost.take();
        self.fail_all(&match &lost {
            None => ApiError::unavailable("the server is shutting down"),
            Some(reason) => ApiError::internal(format!("the device is lost: {reason}")),
        });
        self.publish();
        lost.map_or(Ok(()), |reason| Err(Error::DeviceLost { reason }))
    }

    /// What an error of the engine says. Ends the engine's thread if nothing can come after it.
    fn told(&mut self, error: &Error) -> String {
        if error.device_is_lost() {
            self.lost.get_or_insert_with(|| error.to_string());
            self.stopped = true;
        }
        error.to_string()
    }

    /// Handles what has come. Whether anything has.
    fn take_commands(&mut self) -> bool {
        let mut any = false;
        while let Ok(command) = self.commands.try_recv() {
            self.handle(command);
            any = true;
        }
        any
    }

    /// Waits for the rest of a burst. Clients that send many requests at once need a few milliseconds for it; prompts that
    /// miss the first step are computed later beside decoding, which costs everyone more than this wait.
    fn gather(&mut self) {
        let end = Instant::now() + ARRIVAL_LIMIT;
        while self.has_work() && !self.stopped && Instant::now() < end {
            std::thread::sleep(ARRIVAL_GAP);
            if !self.take_commands() {
                return;
            }
        }
    }

    fn has_work(&self) -> bool {
        match self.pause {
            Pause::Off => !self.live.is_empty() || !self.queue.is_empty(),
            Pause::Finishing => !self.live.is_empty(),
            Pause::On => false,
        }
    }

    fn handle(&mut self, command: Command) {
        self.shared.watchdog.begins(Task::Command);
        // A caller that has gone away needs no answer.
        match command {
            Command::Submit(id, job) => self.submit(id, job),
            Command::Cancel(id) => self.forget(id),
            // What runs is to finish before the server ends.
            Command::Pause(_, _, done) if self.draining => {
                let _ = done.send(());
            }
            Command::Pause(id, mode, done) => {
                self.pause_id = id;
                match mode {
                    PauseMode::Keep => self.pause = Pause::On,
                    PauseMode::Abort => {
                        self.fail_all(&ApiError::unavailable("aborted by /pause").code("aborted"));
                        self.pause = Pause::On;
                    }
                    PauseMode::Wait if self.pause == Pause::On => {}
                    PauseMode::Wait => self.pause = Pause::Finishing,
                }
                self.told_when_idle.push(done);
            }
            Command::Resume(done) => {
                self.resume();
                let _ = done.send(());
            }
            Command::EndPause(id) => {
                if self.pause != Pause::Off && self.pause_id == id {
                    tracing::warn!("nobody has resumed generation in time: it goes on");
                    self.resume();
                }
            }
            Command::Prepare(policy, done) => {
                let _ = done.send(self.prepare(&policy));
            }
            Command::Unloaded => self.tidy(),
            Command::ResetPrefixCache(done) => {
                let cleared = self.engine.as_mut().map_or(Ok(()), Engine::clear_prefix_cache);
                let _ = done.send(cleared.map_err(|error| self.told(&error)));
            }
            Command::Drain => {
                self.draining = true;
                if self.pause == Pause::On {
                    self.fail_all(&ApiError::unavailable("the server is shutting down"));
                }
                // What runs finishes, also if a caller waits for just that.
                self.resume();
            }
            Command::Stop => self.stopped = true,
        }
    }

    fn resume(&mut self) {
        self.pause = Pause::Off;
        self.told_when_idle.clear();
        // Now, and not after the next step, which may take long.
        self.publish();
    }

    fn submit(&mut self, id: JobId, job: Job) {
        let mut first_index = 0;
        let now = Instant::now();
        for prompt in job.prompts {
            let n = prompt.n;
            let item = Item {
                job: id,
                policy: job.policy.clone(),
                prompt,
                first_index,
            };
            self.queue.push(self.group(&job.policy), item, now);
            first_index += n;
        }
        let state = JobState {
            policy: job.policy,
            events: job.events,
            stream: job.stream,
            started: false,
            requests: Vec::new(),
            left: first_index,
        };
        self.jobs.insert(id, state);
    }

    /// Gives the engine what may run next, a batch ahead of what it has slots for.
    fn admit(&mut self) {
        loop {
            let ahead = self
                .engine
                .as_ref()
                .map_or(0, |engine| engine.scheduler().shape().max_batch_size);
            let waiting = self
                .engine
                .as_ref()
                .map_or(0, |engine| engine.scheduler().waiting());
            if waiting > ahead {
                return;
            }
            match self.queue.next(self.live.is_empty(), Instant::now()) {
                Next::Admit(item) => self.start(item),
                Next::Switch(group) => {
                    let Some(policy) = self.queue.front(group).map(|item| item.policy.clone()) else {
                        return;
                    };
                    if let Err(reason) = self.switch_to(&policy) {
                        let error = not_in_force(&policy, &reason);
                        for item in self.queue.take_policy(group) {
                            self.fail(item.job, error.clone());
                        }
                    }
                }
                Next::Nothing => return,
            }
        }
    }

    /// Requests of the same group can run at the same time.
    fn group(&self, policy: &Policy) -> u64 {
        match self.side_by_side {
            Some(_) => policy.base.number,
            None => policy.version,
        }
    }

    fn start(&mut self, item: Item) {
        if let Err(reason) = self.add(&item.policy) {
            return self.fail(item.job, not_in_force(&item.policy, &reason));
        }
        let Some(engine) = &mut self.engine else {
            return self.fail(item.job, ApiError::internal("the engine is gone"));
        };
        let Some(job) = self.jobs.get_mut(&item.job) else {
            return;
        };
        let n = item.prompt.n;
        let mut request = Request::token_ids(item.prompt.token_ids)
            .sampling(SamplingParams::clone(&item.prompt.sampling))
            .n(n);
        let mut version = engine.policy();
        if self.side_by_side.is_some() {
            request.policy = SideBySide::name(&item.policy);
            version = SideBySide::version(engine, &item.policy);
        }
        match engine.submit(&request) {
            Ok(request) => {
                if !job.started {
                    job.started = true;
                    let _ = job.events.send(JobEvent::Started { version });
                }
                job.requests.push(request);
                let live = Live {
                    job: item.job,
                    first_index: item.first_index,
                    left: n,
                    version,
                };
                self.live.insert(request, live);
            }
            Err(error) => self.fail(item.job, ApiError::from(&error)),
        }
    }

    fn step(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        if !engine.has_unfinished() {
            return;
        }
        let begin = Instant::now();
        self.shared.watchdog.begins(Task::Step);
        let stepped = engine.step();
        self.shared.watchdog.begins(Task::BetweenSteps);
        match stepped {
            Ok(events) => {
                self.shared.count_busy(begin.elapsed());
                // Whoever has an answer finds it counted.
                if events.iter().any(|event| matches!(event, Event::Finished { .. })) {
                    self.publish();
                }
                events.into_iter().for_each(|event| self.deliver(event));
            }
            Err(error) => {
                // The engine has given up all requests that it had.
                tracing::error!(%error, "a step failed");
                let error = ApiError::internal(self.told(&error));
                self.fail_live(&error);
            }
        }
    }

    /// Fails all jobs that the engine has something of.
    fn fail_live(&mut self, error: &ApiError) {
        let mut jobs: Vec<_> = self.live.values().map(|live| live.job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs.into_iter().for_each(|job| self.fail(job, error.clone()));
    }

    /// To be called after an error of the engine outside of [`Worker::step`]: if it was one of a step that was under way, the
    /// engine has given up all its requests, and nothing more comes of them.
    fn after_error(&mut self, error: &str) {
        let Some(engine) = &mut self.engine else { return };
        if self.live.is_empty() || engine.scheduler().has_unfinished() {
            return;
        }
        // What steps before it have brought about is there to be taken, and nothing else is done.
        let events = engine.step().unwrap_or_default();
        events.into_iter().for_each(|event| self.deliver(event));
        self.fail_live(&ApiError::internal(error));
    }

    fn deliver(&mut self, event: Event) {
        match event {
            Event::GroupFinished { .. } => {}
            Event::Token {
                request,
                index,
                token,
            } => {
                let Some(live) = self.live.get(&request) else {
                    return;
                };
                let (id, index) = (live.job, live.first_index + index);
                let Some(job) = self.jobs.get(&id).filter(|job| job.stream) else {
                    return;
                };
                if job.events.send(JobEvent::Token { index, token }).is_err() {
                    self.forget(id);
                }
            }
            Event::Finished {
                request,
                index,
                result,
            } => {
                let Some(live) = self.live.get_mut(&request) else {
                    return;
                };
                live.left -= 1;
                let (id, index, version) = (live.job, live.first_index + index, live.version);
                if live.left == 0 {
                    self.live.remove(&request);
                }
                match result {
                    Ok(completion) if completion.policies.iter().any(|span| span.version != version) => {
                        let message = "the policy changed while this request ran: please report this";
                        self.fail(id, ApiError::internal(message));
                    }
                    Ok(completion) => self.finish(id, index, completion),
                    Err(error) => self.fail(id, ApiError::from(&error)),
                }
            }
        }
    }

    fn finish(&mut self, id: JobId, index: usize, completion: Completion) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.left -= 1;
        let completion = Box::new(completion);
        let sent = job.events.send(JobEvent::Finished { index, completion });
        if sent.is_err() || job.left == 0 {
            self.forget(id);
        }
    }

    fn fail(&mut self, id: JobId, error: ApiError) {
        if let Some(job) = self.jobs.get(&id) {
            let _ = job.events.send(JobEvent::Failed(error));
        }
        self.forget(id);
    }

    fn fail_all(&mut self, error: &ApiError) {
        let jobs: Vec<_> = self.jobs.keys().copied().collect();
        jobs.into_iter().for_each(|job| self.fail(job, error.clone()));
    }

    /// Ends a job, whatever there still is of it. Its pages are free at once.
    fn forget(&mut self, id: JobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        for request in job.requests {
            if self.live.remove(&request).is_some()
                && let Some(engine) = &mut self.engine
            {
                engine.cancel(request);
            }
        }
        self.queue.retain(|item| item.job != id);
        self.tidy();
    }

    fn publish(&self) {
        let beside = self.side_by_side.as_ref().map_or(&[][..], SideBySide::served);
        self.shared.publish(
            self.engine.as_ref(),
            &self.policy,
            beside,
            self.pause != Pause::Off,
            self.live.len(),
        );
    }
}

fn not_in_force(policy: &Policy, reason: &str) -> ApiError {
    ApiError::internal(format!("{:?} cannot be put in force: {reason}", policy.name))
}
