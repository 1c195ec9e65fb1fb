//! `rollout serve`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use qwen3_model::{MergeMode, PristineCopy};
use tokio::net::TcpSocket;

use super::args::positive;
use super::engine_args::EngineArgs;
use super::{CliError, report};
use crate::model_folder;
use crate::serve::{LogprobsMode, ServeSettings, Server};

/// Connections that the system holds until they are accepted.
const BACKLOG: u32 = 1024;

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    engine: EngineArgs,

    /// Name of the base model in requests. Default: its id, or the name of its folder.
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,

    /// LoRA adapter that requests can name. May be given several times; more can be loaded by request.
    #[arg(long, visible_alias = "lora-modules", value_name = "NAME=DIR", value_parser = named_folder)]
    adapter: Vec<(String, PathBuf)>,

    /// Address to listen on. Any other than a loopback address is open to the network: use a key.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,

    /// Port to listen on; 0 lets the system choose.
    #[arg(long, value_name = "N", default_value_t = 8000)]
    port: u16,

    /// Environment variable that holds the key which clients must send as `Authorization: Bearer KEY`. Default: no key.
    #[arg(long, value_name = "VAR")]
    api_key_env: Option<String>,

    /// Folder below which requests may have adapters and weights loaded. May be given several times. Default: the current
    /// folder.
    #[arg(long, value_name = "DIR")]
    allow_root: Vec<PathBuf>,

    /// Most adapters that requests can name at once.
    #[arg(long, visible_alias = "max-loras", value_name = "N", default_value_t = 16, value_parser = positive)]
    max_adapters: usize,

    /// Apply adapters at run time, next to the base weights, instead of merging them: requests under any of them share a
    /// batch, and there is no rounding of merged weights, but steps are slower. Always so for a model in 4 bits.
    #[arg(long)]
    no_merge_lora: bool,

    /// On a GPU, where pristine copies of the weights that adapters target live: device, pinned (page-locked host memory)
    /// or file (read again at every refresh). The results are the same. Default: device.
    #[arg(long, value_name = "PLACE")]
    lora_pristine: Option<PristineCopy>,

    /// Which log-probability is reported as a token's: processed (of the distribution it was drawn from) or raw (at
    /// temperature 1 over the whole vocabulary).
    #[arg(long, value_name = "MODE", default_value = "processed", value_parser = logprobs_mode)]
    logprobs_mode: LogprobsMode,

    /// Most completions accepted and not finished, waiting and running together; further requests are answered with 429.
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = positive)]
    max_unfinished: usize,

    /// Most connections open at once. On further ones requests for completions are answered with 429; all others, such as
    /// `/health` and `/resume`, are served.
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = positive)]
    max_connections: usize,

    /// Most bytes of a request's body.
    #[arg(long, value_name = "N", default_value_t = 32 << 20, value_parser = positive)]
    max_body_bytes: usize,

    /// Seconds after which paused generation goes on by itself, as after a trainer that ended without `/resume`. A pause can
    /// name another time: `/pause?timeout=N`. Default: it stays paused.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pause_timeout: Option<Duration>,

    /// Seconds that the engine may take for one step, or for opening weights or applying adapters, before it is taken to hang
    /// (a kernel that never ends, a driver that blocks): `/health` answers 503 from then on, until it gets on again. Pauses do
    /// not count. 0: never.
    #[arg(long, value_name = "N", default_value = "900", value_parser = seconds_or_0)]
    watchdog_timeout: Duration,

    /// Seconds that requests under way have to finish after SIGTERM or Ctrl-C. A second signal ends at once.
    #[arg(long, value_name = "N", default_value_t = 60)]
    drain_timeout: u64,

    /// Seed from which requests without one get theirs, in the order of their arrival. Default: drawn anew at every start,
    /// so that replicas differ.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Print errors only.
    #[arg(long)]
    quiet: bool,
}

impl ServeArgs {
    pub(super) fn quiet(&self) -> bool {
        self.quiet
    }
}

pub(super) fn run(args: &ServeArgs) -> Result<(), CliError> {
    args.engine
        .refuse_what_has_no_effect(args.lora_pristine.is_some())?;
    let settings = settings(args)?;
    let cannot_listen =
        |error| CliError::Failed(format!("cannot listen on {}:{}: {error}", args.host, args.port));
    // A port that is taken shows before a large model is loaded; nobody can connect until it is.
    let socket = bind((args.host, args.port).into()).map_err(cannot_listen)?;
    let server = open(args, settings.clone())?;
    if let (Some(notice), false) = (server.notice(), args.quiet) {
        report(notice);
        for flag in args.engine.gpu_flags(args.lora_pristine.is_some()) {
            report(&format!("{flag} has no effect on the CPU"));
        }
    }
    // HTTP is little work, and the cores are the engine's.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(|error| CliError::Failed(format!("the server's threads cannot be started: {error}")))?;
    runtime.block_on(async {
        let listener = socket.listen(BACKLOG).map_err(cannot_listen)?;
        if !args.quiet {
            if !args.host.is_loopback() && settings.api_key.is_none() {
                report("anyone who reaches this address can use the server: set a key with --api-key-env");
            }
            let address = listener
                .local_addr()
                .map_or_else(|error| error.to_string(), |a| a.to_string());
            report(&format!(
                "serving {} on http://{address}, device {}",
                settings.model_name,
                server.device()
            ));
        }
        let signal = shutdown_signal()?;
        let quiet = args.quiet;
        let ending = async move {
            signal.await;
            if !quiet {
                report("finishing the requests under way; a second signal ends at once");
            }
        };
        server.run(listener, ending).await.map_err(CliError::from)
    })
}

fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // So that a server can be started anew at once. Elsewhere it means something else.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

fn settings(args: &ServeArgs) -> Result<ServeSettings, CliError> {
    let model_name = match (&args.served_model_name, &args.engine.model) {
        (Some(name), _) => name.clone(),
        (None, None) => "tiny-qwen3-math".into(),
        (None, Some(dir)) if model_folder::hub_id(dir).is_some() => dir.display().to_string(),
        (None, Some(dir)) => {
            let real = dir.canonicalize().unwrap_or_else(|_| dir.clone());
            real.file_name()
                .map_or("model".into(), |name| name.to_string_lossy().into_owned())
        }
    };
    if model_name.is_empty() || model_name.contains(char::is_control) {
        let message = format!("--served-model-name {model_name:?}: give a name without control characters");
        return Err(CliError::Usage(message));
    }
    let mut settings = ServeSettings {
        model_name,
        ..ServeSettings::default()
    };
    if let Some(variable) = &args.api_key_env {
        match std::env::var(variable) {
            Ok(key) if !key.trim().is_empty() => settings.api_key = Some(key.trim().to_string()),
            _ => {
                let message = format!("--api-key-env {variable}: this variable is not set, or empty");
                return Err(CliError::Usage(message));
            }
        }
    }
    let here = || std::env::current_dir().map(|dir| vec![dir]).unwrap_or_default();
    settings.allowed_roots = match args.allow_root.is_empty() {
        true => here(),
        false => args.allow_root.clone(),
    };
    if let Some(root) = settings.allowed_roots.iter().find(|root| !root.is_dir()) {
        let message = format!("--allow-root {}: this is not a folder", root.display());
        return Err(CliError::Usage(message));
    }
    settings.max_adapters = args.max_adapters;
    settings.logprobs_mode = args.logprobs_mode;
    settings.limits.max_unfinished = args.max_unfinished;
    settings.limits.max_connections = args.max_connections;
    settings.limits.max_body_bytes = args.max_body_bytes;
    settings.pause_timeout = args.pause_timeout;
    settings.watchdog_timeout = Some(args.watchdog_timeout);
    settings.limits.drain_timeout = Duration::from_secs(args.drain_timeout);
    Ok(settings)
}

fn open(args: &ServeArgs, settings: ServeSettings) -> Result<Server, CliError> {
    let mut builder = args
        .engine
        .builder()
        .pristine_copy(args.lora_pristine.unwrap_or_default())
        .seed(args.seed.unwrap_or_else(random_seed));
    if args.no_merge_lora {
        builder = builder.merge_mode(MergeMode::Unmerged);
    }
    let server = Server::from_builder(builder, settings)?;
    for (name, dir) in &args.adapter {
        server.load_adapter(name, dir)?;
    }
    Ok(server)
}

/// Resolves at the first SIGTERM or Ctrl-C. From then on the next one ends the process.
fn shutdown_signal() -> Result<impl Future<Output = ()>, CliError> {
    let failed = |error| CliError::Failed(format!("signals cannot be taken over: {error}"));
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        Ok(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tokio::spawn(async move {
                let code = tokio::select! {
                    _ = terminate.recv() => 143,
                    _ = interrupt.recv() => 130,
                };
                std::process::exit(code);
            });
        })
    }
    #[cfg(not(unix))]
    {
        let mut interrupt = tokio::signal::windows::ctrl_c().map_err(failed)?;
        Ok(async move {
            interrupt.recv().await;
            tokio::spawn(async move {
                interrupt.recv().await;
                std::process::exit(130);
            });
        })
    }
}

/// From the system; the same on every start where it has no random numbers.
fn random_seed() -> u64 {
    getrandom::u64().unwrap_or(0)
}

fn named_folder(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, dir)) if !name.is_empty() && !dir.is_empty() => Ok((name.into(), dir.into())),
        _ => Err("use NAME=DIR, such as policy=out/checkpoint-10".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match seconds_or_0(text) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("use a number of seconds above 0".into()),
    }
}

fn seconds_or_0(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "use a number of seconds, 0 or more".into())
}

fn logprobs_mode(text: &str) -> Result<LogprobsMode, String> {
    match text {
        // With vLLM's names for them.
        "processed" | "processed_logprobs" => Ok(LogprobsMode::Processed),
        "raw" | "raw_logprobs" => Ok(LogprobsMode::Raw),
        _ => Err("use processed or raw".into()),
    }
}
