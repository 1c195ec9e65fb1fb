//! What a server is told: its name, its limits, where adapters may come from.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a [`Server`](super::Server). All limits have defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServeSettings {
    /// Name under which the base model is asked for, in the field `model`. Default: `model`.
    pub model_name: String,
    /// If set, every request but those for `/health`, `/liveness` and `/ping` must carry `Authorization: Bearer KEY`.
    /// Default: none.
    pub api_key: Option<String>,
    /// Folders from below which adapters and weights may be loaded by request. Empty refuses every load. Default:
    /// empty.
    pub allowed_roots: Vec<PathBuf>,
    /// Most adapters registered at once. Default: 16.
    pub max_adapters: usize,
    /// Which of the two log-probabilities of a token is reported. Default: [`LogprobsMode::Processed`].
    pub logprobs_mode: LogprobsMode,
    /// How long requests under one policy may hold up the oldest request under another before no more of them are
    /// admitted. Default: 1 s.
    pub policy_patience: Duration,
    /// Time after which paused generation goes on by itself, where `/pause` names none: a trainer that has ended does not
    /// resume it. Default: none, it stays paused.
    pub pause_timeout: Option<Duration>,
    /// Time that the engine may take for one step, or for opening weights or applying adapters, before it is taken to hang:
    /// `/health` answers 503 from then on, until it gets on again. A pause is no hang. Zero or none notices nothing.
    /// Default: 15 min, which a large model from a slow disk may need more than.
    pub watchdog_timeout: Option<Duration>,
    /// Bounds on what clients may ask for and use.
    pub limits: Limits,
}

/// Which log-probability is reported as a token's.
///
/// ```
/// use rollout_engine::serve::{LogprobsMode, ServeSettings};
///
/// let mut settings = ServeSettings::default();
/// assert_eq!(settings.logprobs_mode.name(), "processed_logprobs");
/// settings.logprobs_mode = LogprobsMode::Raw;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LogprobsMode {
    /// Of the distribution that the token was drawn from: after penalties, temperature and truncation.
    #[default]
    Processed,
    /// Of the model at temperature 1 over the whole vocabulary.
    Raw,
}

impl LogprobsMode {
    /// The name that vLLM gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Processed => "processed_logprobs",
            Self::Raw => "raw_logprobs",
        }
    }
}

/// Bounds on what clients may ask for and use.
///
/// ```
/// use rollout_engine::serve::{Limits, ServeSettings};
///
/// let mut settings = ServeSettings::default();
/// settings.limits.max_unfinished = 256; // the 257th completion is answered with 429
/// assert_eq!(settings.limits.max_n, Limits::default().max_n);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Most completions accepted and not finished, waiting and running together; beyond it requests are answered
    /// with 429. Default: 8192.
    pub max_unfinished: usize,
    /// Most completions per prompt (`n`). Default: 256.
    pub max_n: usize,
    /// Most alternatives per token (`logprobs`, `top_logprobs`). Default: 20.
    pub max_logprobs: usize,
    /// Most bytes of a request's body. Default: 32 MiB.
    pub max_body_bytes: usize,
    /// Most bytes of a request's line and headers, at least 8192. Default: 16 KiB.
    pub max_header_bytes: usize,
    /// Most headers of a request. Default: 100.
    pub max_headers: usize,
    /// Most connections open at once, at most what the process may have files open, less 160. Beyond it requests for completions
    /// are answered with 429, all others are served, up to 32 at once. Default: 8192.
    pub max_connections: usize,
    /// Time for a request's headers to arrive, and for which an idle connection is kept. Default: 30 s.
    pub header_timeout: Duration,
    /// Time for a request's body to arrive. Default: 60 s.
    pub body_timeout: Duration,
    /// Time after which a client that reads nothing of its answer is disconnected. Default: 120 s.
    pub write_timeout: Duration,
    /// Time for requests under way to finish at shutdown. Default: 60 s.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_unfinished: 8192,
            max_n: 256,
            max_logprobs: 20,
            max_body_bytes: 32 << 20,
            max_header_bytes: 16 << 10,
            max_headers: 100,
            max_connections: 8192,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(120),
            drain_timeout: Duration::from_secs(60),
        }
    }
}

impl Default for ServeSettings {
    fn default() -> Self {
        Self {
            model_name: "model".into(),
            api_key: None,
            allowed_roots: Vec::new(),
            max_adapters: 16,
            logprobs_mode: LogprobsMode::default(),
            policy_patience: Duration::from_secs(1),
            pause_timeout: None,
            watchdog_timeout: Some(Duration::from_secs(900)),
            limits: Limits::default(),
        }
    }
}
