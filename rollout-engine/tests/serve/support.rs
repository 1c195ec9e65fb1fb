//! Servers over a runner without a model, whose steps can be held.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use lora_merge::{ActiveAdapter, PolicyVersion};
use paged_kv::PageTable;
use rollout_engine::runner::{RunnerMemory, SampledToken, Step};
use rollout_engine::serve::{ServeSettings, Server};
use rollout_engine::{Engine, Error, FakeRunner, MergeMode, PolicyUpdate, Runner, RunnerShape};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::client::{self, DEADLINE, Reply};

pub(crate) const VOCAB: usize = 97;

/// Lets steps pass: without limit, or one by one.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<GateState>, Condvar)>);

#[derive(Default)]
struct GateState {
    closed: bool,
    /// Time that a step takes.
    delay: Duration,
    /// Steps that may pass although it is closed.
    passes: usize,
    /// Steps begun.
    steps: usize,
    /// Changes of policy wait.
    changes_held: bool,
    /// The next step panics.
    breaks: bool,
    /// Results collected, and which of them fails, from 1.
    collected: usize,
    lost: usize,
    /// What the next step and all after it return.
    error: Option<fn() -> Error>,
}

impl Gate {
    pub(crate) fn close(&self) {
        self.0.0.lock().expect("no panic").closed = true;
    }

    /// Makes every step take some time.
    pub(crate) fn slow(&self, delay: Duration) {
        self.0.0.lock().expect("no panic").delay = delay;
    }

    /// Makes changes of policy wait, or lets them go on.
    pub(crate) fn hold_changes(&self, held: bool) {
        self.0.0.lock().expect("no panic").changes_held = held;
        self.0.1.notify_all();
    }

    fn change(&self) {
        let mut state = self.0.0.lock().expect("no panic");
        while state.changes_held {
            state = self.0.1.wait(state).expect("no panic");
        }
    }

    /// Lets the next step panic.
    pub(crate) fn break_next(&self) {
        self.0.0.lock().expect("no panic").breaks = true;
    }

    /// Lets the results of one step be lost.
    pub(crate) fn lose_results_of(&self, step: usize) {
        self.0.0.lock().expect("no panic").lost = step;
    }

    fn collect(&self) -> Result<(), Error> {
        let mut state = self.0.0.lock().expect("no panic");
        state.collected += 1;
        match state.collected == state.lost {
            true => Err(Error::Runner {
                device: "fake".into(),
                reason: "results are lost".into(),
            }),
            false => Ok(()),
        }
    }

    /// Lets steps fail from now on.
    pub(crate) fn fail(&self, error: fn() -> Error) {
        self.0.0.lock().expect("no panic").error = Some(error);
    }

    pub(crate) fn open(&self) {
        self.0.0.lock().expect("no panic").closed = false;
        self.0.1.notify_all();
    }

    /// Lets one more step pass.
    pub(crate) fn pass_one(&self) {
        self.0.0.lock().expect("no panic").passes += 1;
        self.0.1.notify_all();
    }

    /// Lets a step pass now and then until something has happened for which the engine must come between two steps.
    pub(crate) fn pass_until(&self, done: impl Fn() -> bool) {
        while !done() {
            self.pass_one();
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn steps(&self) -> usize {
        self.0.0.lock().expect("no panic").steps
    }

    /// Waits until so many steps have begun.
    pub(crate) fn wait_for_steps(&self, steps: usize) {
        wait_until("steps", || self.steps() >= steps);
    }

    fn pass(&self) -> Result<(), Error> {
        let mut state = self.0.0.lock().expect("no panic");
        state.steps += 1;
        self.0.1.notify_all();
        while state.closed && state.passes == 0 {
            state = self.0.1.wait(state).expect("no panic");
        }
        if state.closed {
            state.passes -= 1;
        }
        let (delay, breaks, error) = (state.delay, state.breaks, state.error);
        drop(state);
        assert!(!breaks, "a step that is to panic");
        std::thread::sleep(delay);
        error.map_or(Ok(()), |error| Err(error()))
    }
}

/// Runs each step when the gate lets it.
struct Gated {
    inner: FakeRunner,
    gate: Gate,
}

impl Runner for Gated {
    fn shape(&self) -> RunnerShape {
        self.inner.shape()
    }
    fn device(&self) -> String {
        self.inner.device()
    }
    fn memory(&self) -> RunnerMemory {
        self.inner.memory()
    }
    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        self.gate.pass()?;
        self.inner.submit(step, pages)
    }
    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        self.gate.collect()?;
        self.inner.collect()
    }
    fn reset(&mut self) {
        self.inner.reset();
    }
    fn policy(&self) -> PolicyVersion {
        self.inner.policy()
    }
    fn set_adapters(&mut self, active: &[ActiveAdapter], mode: MergeMode) -> Result<PolicyUpdate, Error> {
        self.gate.change();
        self.inner.set_adapters(active, mode)
    }
    fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<PolicyUpdate, Error> {
        self.inner.serve_policies(policies)
    }
}

/// A server that runs, and stops when dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) gate: Gate,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<Result<(), Error>>>,
}

impl Running {
    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        client::post(self.address, path, body)
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        client::get(self.address, path)
    }

    /// One completion of `prompt` under `model`.
    pub(crate) fn complete(&self, model: &str, prompt: &[u32], max_tokens: usize) -> Reply {
        self.post("/v1/completions", &completion_body(model, prompt, max_tokens))
    }

    pub(crate) fn load(&self, name: &str, dir: &Path) -> Reply {
        let body = json!({ "lora_name": name, "lora_path": dir });
        self.post("/v1/load_lora_adapter", &body)
    }

    /// The value of a metric without labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let reply = self.get("/metrics");
        let line = reply
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .expect("a number")
    }

    pub(crate) fn wait_for_metric(&self, name: &str, value: f64) {
        wait_until(name, || self.metric(name) == value);
    }

    /// Tells the server to end, and gives back what waits for that.
    pub(crate) fn shut_down(&mut self) -> std::thread::JoinHandle<()> {
        self.tell_to_end();
        let thread = self.thread.take().expect("not shut down yet");
        std::thread::spawn(move || thread.join().expect("no panic").expect("ends well"))
    }

    /// Tells the server to end.
    pub(crate) fn tell_to_end(&mut self) {
        let _ = self.stop.take().expect("not shut down yet").send(());
    }

    /// Waits for a server to end, be it told to or not.
    pub(crate) fn ended(&mut self) -> Result<(), Error> {
        let thread = self.thread.take().expect("not shut down yet");
        wait_until("the server's end", || thread.is_finished());
        thread.join().expect("no panic")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.gate.open();
        self.gate.hold_changes(false);
        if let (Some(stop), Some(thread)) = (self.stop.take(), self.thread.take()) {
            let _ = stop.send(());
            let joined = thread.join();
            if !std::thread::panicking() {
                joined.expect("the server does not panic").expect("ends well");
            }
        }
    }
}

#[track_caller]
pub(crate) fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < DEADLINE, "{what}: waited too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn completion_body(model: &str, prompt: &[u32], max_tokens: usize) -> Value {
    json!({
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": true,
    })
}

pub(crate) fn token_ids(choice: &Value) -> Vec<u32> {
    serde_json::from_value(choice["token_ids"].clone()).expect("token ids")
}

pub(crate) fn floats(list: &Value) -> Vec<f32> {
    let list = list.as_array().unwrap_or_else(|| panic!("{list} is not a list"));
    list.iter()
        .map(|value| value.as_f64().expect("a number") as f32)
        .collect()
}

/// Room for requests that are under way for as long as a test likes.
pub(crate) fn long_shape() -> RunnerShape {
    RunnerShape {
        n_pages: 1025,
        max_seq_length: 1024,
        ..FakeRunner::small_shape()
    }
}

/// A batch of 4, sequences of up to 64 tokens, 97 ids, 60 pages of 4.
pub(crate) fn shape() -> RunnerShape {
    RunnerShape {
        n_pages: 61,
        ..FakeRunner::small_shape()
    }
}

pub(crate) fn settings() -> ServeSettings {
    let mut settings = ServeSettings::default();
    settings.model_name = "base".into();
    settings.allowed_roots = vec![adapters()];
    settings.limits.drain_timeout = Duration::from_secs(20);
    settings
}

pub(crate) fn adapters() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/adapters")
}

/// A server over a fake runner, after `change` has changed its settings.
pub(crate) fn fake(change: impl FnOnce(&mut ServeSettings)) -> Running {
    fake_over(FakeRunner::new(shape()), change)
}

pub(crate) fn fake_over(inner: FakeRunner, change: impl FnOnce(&mut ServeSettings)) -> Running {
    fake_in(MergeMode::Merged, inner, change)
}

/// The same over an engine that applies adapters in this way.
pub(crate) fn fake_in(
    mode: MergeMode,
    inner: FakeRunner,
    change: impl FnOnce(&mut ServeSettings),
) -> Running {
    let mut settings = settings();
    change(&mut settings);
    let gate = Gate::default();
    let gated = Gated {
        inner,
        gate: gate.clone(),
    };
    let runner: Box<dyn Runner + Send> = Box::new(gated);
    let mut engine = Engine::with_runner(runner, vec![], None).expect("a good shape");
    if mode != MergeMode::Merged {
        engine.set_merge_mode(mode).expect("sets");
    }
    start(Server::new(engine, settings).expect("starts"), gate)
}

pub(crate) fn start(server: Server, gate: Gate) -> Running {
    start_on(server, gate, "http")
}

/// On threads of this name.
pub(crate) fn start_on(server: Server, gate: Gate, threads: &'static str) -> Running {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("settable");
    let address = listener.local_addr().expect("bound");
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name(threads)
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            let ended = server.run(listener, async {
                // Without a word, as when the test is over, it goes on.
                if stopped.await.is_err() {
                    std::future::pending::<()>().await;
                }
            });
            ended.await
        })
    });
    Running {
        address,
        gate,
        stop: Some(stop),
        thread: Some(thread),
    }
}
