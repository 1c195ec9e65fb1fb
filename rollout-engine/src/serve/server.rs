//! The server as a whole.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use qwen3_model::{GenerationConfig, Qwen3Config};
use tokio::net::TcpListener;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinSet;

use super::admin::read_adapter;
use super::app::{App, ModelInfo};
use super::fingerprint;
use super::handle::EngineHandle;
use super::listener::{self, Routers};
use super::policy::{Base, Policies};
use super::router::router;
use super::settings::ServeSettings;
use super::snapshot::Shared;
use super::watchdog::Watchdog;
use super::worker::{Reopen, Worker};
use crate::Error;
use crate::builder::EngineBuilder;
use crate::engine::Engine;
use crate::pool::PoolSettings;

/// An engine on its own thread, and the HTTP side of it. Dropping it ends the engine.
#[derive(Debug)]
pub struct Server {
    app: Arc<App>,
    thread: Option<JoinHandle<Result<(), Error>>>,
    notice: Option<String>,
}

impl Server {
    /// Loads the model that `builder` describes and serves it. Its weights can be replaced by request.
    ///
    /// # Errors
    /// As for [`EngineBuilder::build`]; and adapters in the builder are refused: give them names with
    /// [`Server::load_adapter`].
    pub fn from_builder(builder: EngineBuilder, settings: ServeSettings) -> Result<Self, Error> {
        if builder.has_adapters() {
            return Err(Error::InvalidSetting {
                setting: "adapter",
                value: "of the builder".into(),
                advice: "a server's adapters have names: use Server::load_adapter".into(),
            });
        }
        let dir = builder.model_dir()?;
        let config = Qwen3Config::from_dir(&dir)?;
        let fingerprint = fingerprint::of_folder(&dir).map_err(|error| Error::io(&dir, error))?;
        let built = builder.clone().build_with_notice()?;
        let engine = built.engine;
        let shape = *engine.scheduler().shape();
        // The first engine has looked at the memory; those after it get the same.
        let pool = PoolSettings {
            max_batch_size: Some(shape.max_batch_size),
            max_seq_length: Some(shape.max_seq_length),
            n_pages: Some(shape.n_pages),
            page_size: Some(shape.page_size),
            max_prefill_tokens: Some(shape.max_prefill_tokens),
        };
        let text = engine.text().cloned();
        let generation = GenerationConfig::from_dir(&dir)?.unwrap_or_default();
        let eos_token_ids = match generation.eos_token_ids.is_empty() {
            true => config.eos_token_ids.clone(),
            false => generation.eos_token_ids,
        };
        let model = ModelInfo {
            text: text.clone(),
            max_tokens: engine.scheduler().max_tokens(),
            dtype: dtype(&dir),
            device: engine.scheduler().device(),
            config: Some(config),
        };
        let base = Base {
            fingerprint,
            dir: Some(dir.canonicalize().unwrap_or(dir)),
            ..Base::default()
        };
        let mut opened = 0u64;
        let reopen: Reopen = Box::new(move |dir: Option<&Path>| {
            // Requests are numbered from 0 again: another seed, so that none draws an earlier one's numbers.
            opened += 1;
            let seed = builder
                .seed_given()
                .wrapping_add(opened.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut builder = builder.clone().pool(pool).seed(seed);
            if let Some(dir) = dir {
                builder = builder.model(dir);
            }
            builder.reopen(eos_token_ids.clone(), text.clone())
        });
        let mut server = Self::start(engine, base, reopen, model, settings)?;
        server.notice = built.notice;
        Ok(server)
    }

    /// Serves an engine of one's own. Its weights cannot be replaced by request, and whether an adapter fits shows when
    /// it comes into force.
    ///
    /// # Errors
    /// The engine's thread cannot be started.
    pub fn new(engine: Engine, settings: ServeSettings) -> Result<Self, Error> {
        let model = ModelInfo {
            text: engine.text().cloned(),
            max_tokens: engine.scheduler().max_tokens(),
            config: None,
            dtype: "float32".into(),
            device: engine.scheduler().device(),
        };
        let reopen: Reopen = Box::new(|_| {
            Err(Error::InvalidSetting {
                setting: "model",
                value: "(given)".into(),
                advice: "an engine that was not built from a folder cannot be opened anew".into(),
            })
        });
        Self::start(engine, Base::default(), reopen, model, settings)
    }

    fn start(
        engine: Engine,
        base: Base,
        reopen: Reopen,
        model: ModelInfo,
        settings: ServeSettings,
    ) -> Result<Self, Error> {
        let policies = Arc::new(Policies::new(
            settings.model_name.clone(),
            base,
            settings.max_adapters,
        ));
        let shared = Arc::new(Shared::new(Watchdog::new(settings.watchdog_timeout)));
        let (commands, receiver) = unbounded_channel();
        let worker = Worker::new(
            engine,
            reopen,
            policies.clone(),
            settings.policy_patience,
            receiver,
            shared.clone(),
        );
        let ending = EndOfThread(shared.clone());
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let _ending = ending;
                worker.run()
            })
            .map_err(|error| Error::io("engine thread", error))?;
        let handle = EngineHandle::new(commands, shared.clone(), settings.limits.max_unfinished);
        Ok(Self {
            app: Arc::new(App::new(settings, model, policies, handle, shared)),
            thread: Some(thread),
            notice: None,
        })
    }

    /// One line for the user if the device `auto` could not use a GPU.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Device of the engine, in words.
    pub fn device(&self) -> &str {
        &self.app.model.device
    }

    /// Gives an adapter a name, from any folder.
    ///
    /// # Errors
    /// The adapter cannot be read or does not fit the model; the name cannot be used; there are too many.
    pub fn load_adapter(&self, name: &str, dir: impl AsRef<Path>) -> Result<(), Error> {
        let dir = dir.as_ref();
        let problem = |error: super::error::ApiError| Error::invalid_file(dir, error.message);
        let adapter = read_adapter(dir, self.app.model.config.as_ref()).map_err(problem)?;
        let loaded = self.app.policies.load(name, adapter, dir.to_path_buf(), false);
        loaded.map_err(problem)?;
        Ok(())
    }

    /// Serves until `shutdown` resolves. Then nothing more is accepted, requests under way have
    /// [`Limits::drain_timeout`](super::Limits::drain_timeout) to finish, and the engine ends.
    ///
    /// # Errors
    /// [`Error::EngineEnded`] if the engine's thread has panicked, [`Error::DeviceLost`] if nothing on the device works any
    /// more. The server ends then, too, so that whatever supervises it can start it anew. [`Error::EngineHangs`] if it is to
    /// end and the engine's thread does not ([`ServeSettings::watchdog_timeout`]); that thread is left behind.
    pub async fn run(
        mut self,
        listener: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let routers = Routers {
            usual: router(&self.app, false),
            when_full: router(&self.app, true),
        };
        let shared = self.app.shared.clone();
        // Ends when it is dropped, whichever way this function ends.
        let mut watch = JoinSet::new();
        watch.spawn(async move { shared.watchdog.watch().await });
        listener::run(listener, routers, self.app.clone(), shutdown).await;
        self.app.engine.stop();
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        // It ends after the step under way, if that ever ends.
        tokio::select! {
            biased;
            () = self.app.shared.ended() => {}
            hang = self.app.shared.watchdog.hangs() => {
                return Err(Error::EngineHangs { reason: hang.to_string() });
            }
        }
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(ended)) => ended,
            _ => Err(Error::EngineEnded),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.app.engine.stop();
    }
}

/// Marks the engine as gone, also if its thread panics.
struct EndOfThread(Arc<Shared>);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The type of weights that `config.json` names; trainers compare it with their own.
fn dtype(dir: &Path) -> String {
    let read = || {
        let text = std::fs::read_to_string(dir.join("config.json")).ok()?;
        let config: serde_json::Value = serde_json::from_str(&text).ok()?;
        let dtype = config.get("dtype").or_else(|| config.get("torch_dtype"))?;
        Some(dtype.as_str()?.to_string())
    };
    read().unwrap_or_else(|| "bfloat16".into())
}
