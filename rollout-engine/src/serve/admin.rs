//! What a trainer does besides asking for completions: look, load policies, pause.

use std::path::Path;
use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use lora_merge::{ActiveAdapter, Adapter};
use qwen3_model::{Qwen3Config, Weights};
use serde_json::{Value, json};

use super::app::{App, blocking};
use super::body;
use super::command::PauseMode;
use super::error::{ApiError, json_response};
use super::paths::NOT_THERE;
use super::policy::Policy;
use super::{fingerprint, metrics, paths};

type Answer = Result<Response, ApiError>;

fn ok(body: &Value) -> Response {
    json_response(StatusCode::OK, body)
}

/// `GET /health`, `/liveness` and `/ping`.
pub(super) async fn health(State(app): State<Arc<App>>) -> Answer {
    if app.engine.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    let snapshot = app.shared.snapshot();
    match (snapshot.healthy, snapshot.hang) {
        (true, _) => Ok(ok(&json!({ "status": "ok" }))),
        (false, Some(hang)) => Err(ApiError::unavailable(hang.to_string()).code("engine_hangs")),
        (false, None) => Err(ApiError::unavailable("the engine has ended")),
    }
}

/// `GET /v1/models`: the base model first, then adapters by name.
pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let base = app.policies.base();
    let mut data = vec![described(&app, &base)];
    data.extend(
        app.policies
            .adapters()
            .iter()
            .map(|policy| described(&app, policy)),
    );
    ok(&json!({ "object": "list", "data": data }))
}

/// `GET /v1/models/NAME`: one of them.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    name: Result<UrlPath<String>, PathRejection>,
) -> Answer {
    let UrlPath(name) = name.map_err(|error| ApiError::bad_param("model", error))?;
    Ok(ok(&described(&app, &*app.policies.find(&name)?)))
}

/// A policy as an entry of the list of models.
fn described(app: &App, policy: &Policy) -> Value {
    let base = policy.adapter.as_ref().map(|_| app.policies.base());
    json!({
        "id": policy.name,
        "object": "model",
        "created": app.created,
        "owned_by": "rollout-engine",
        "root": policy.path.as_ref().map_or(json!(policy.name), |path| json!(path)),
        "parent": base.as_ref().map(|base| &base.name),
        "max_model_len": app.model.max_tokens,
        "policy_version": policy.version,
    })
}

/// `GET /server_info`, with the parts of vLLM's configuration that trainers read.
pub(super) async fn server_info(State(app): State<Arc<App>>) -> Response {
    let snapshot = app.shared.snapshot();
    ok(&json!({
        "vllm_config": {
            "model_config": {
                "model": app.policies.base().name,
                "dtype": format!("torch.{}", app.model.dtype),
                "max_model_len": app.model.max_tokens,
                "logprobs_mode": app.settings.logprobs_mode.name(),
            },
            "weight_transfer_config": null,
            // Ranks have no limit of their own here.
            "lora_config": {
                "max_lora_rank": app.model.config.as_ref().map_or(512, |config| config.hidden_size),
                "max_loras": app.settings.max_adapters,
            },
            "parallel_config": { "data_parallel_size": 1, "tensor_parallel_size": 1 },
        },
        "rollout_engine": {
            "version": env!("CARGO_PKG_VERSION"),
            "device": app.model.device,
            "policy_in_force": { "name": snapshot.policy_name, "version": snapshot.policy_version },
            "beside_it": snapshot.beside.iter().map(|policy| json!({ "name": policy.name, "version": policy.version })).collect::<Vec<_>>(),
            "paused": snapshot.paused,
        },
    }))
}

/// `GET /version`.
pub(super) async fn version() -> Response {
    ok(&json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /get_world_size`.
pub(super) async fn world_size() -> Response {
    ok(&json!({ "world_size": 1 }))
}

/// `GET /metrics`.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut response = Response::new(metrics::render(&app).into());
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `POST /v1/load_lora_adapter`: another adapter under a known name needs `load_inplace`.
pub(super) async fn load_adapter(State(app): State<Arc<App>>, request: Request) -> Answer {
    load(&app, request, false).await
}

/// `POST /load_lora_adapter`, as prime-rl calls it: in place unless told otherwise, and 404 for files that are not there. It
/// then tries again, because files of a network's file system can appear late; TRL, which calls the other path, takes
/// 404 for a server that cannot load adapters.
pub(super) async fn load_adapter_in_place(State(app): State<Arc<App>>, request: Request) -> Answer {
    load(&app, request, true).await.map_err(|error| match error.code {
        Some(NOT_THERE) => ApiError {
            status: StatusCode::NOT_FOUND,
            ..error
        },
        _ => error,
    })
}

async fn load(app: &Arc<App>, request: Request, in_place: bool) -> Answer {
    let mut fields = body::fields(request, app).await?;
    let name: String = fields.require("lora_name")?;
    let path: String = fields.require("lora_path")?;
    let in_place = fields.take("load_inplace")?.unwrap_or(in_place);
    let base = app.policies.base();
    fields.neutral("base_model_name", |value| *value == base.name)?;
    fields.neutral("is_3d_lora_weight", |value| *value == Value::Bool(false))?;
    fields.finish()?;
    let reading = app.clone();
    let read = move || {
        let dir = paths::allowed(&reading.settings.allowed_roots, "lora_path", &path)?;
        let adapter = read_adapter(&dir, reading.model.config.as_ref())?;
        Ok::<_, ApiError>((dir, adapter))
    };
    let (dir, adapter) = blocking(read).await?;
    let loaded = app.policies.load(&name, adapter, dir, in_place)?;
    // At once if nothing runs: then an adapter that the device cannot apply is refused here.
    let in_force = match app.engine.prepare(loaded.policy.clone()).await {
        Ok(in_force) => in_force,
        Err(error) => {
            app.policies.withdraw(loaded);
            return Err(ApiError::bad_param("lora_path", error.message));
        }
    };
    Ok(ok(&json!({
        "success": true,
        "changed": loaded.changed,
        "in_force": in_force,
        "policy": { "name": name, "version": loaded.policy.version },
    })))
}

/// Reads an adapter and checks that it fits the model.
pub(super) fn read_adapter(dir: &Path, config: Option<&Qwen3Config>) -> Result<Arc<Adapter>, ApiError> {
    let problem = |error: lora_merge::Error| {
        let absent = matches!(error, lora_merge::Error::NotAnAdapterFolder { .. });
        let error = ApiError::bad_param("lora_path", error);
        if absent { error.code(NOT_THERE) } else { error }
    };
    let adapter = Arc::new(Adapter::load(dir).map_err(problem)?);
    if let Some(config) = config {
        let active = [ActiveAdapter::new(adapter.clone())];
        lora_merge::resolve(&active, &qwen3_model::modules(config)).map_err(problem)?;
    }
    Ok(adapter)
}

/// `POST /v1/unload_lora_adapter`: a name that is not known is nothing to complain about.
pub(super) async fn unload_adapter(State(app): State<Arc<App>>, request: Request) -> Answer {
    let mut fields = body::fields(request, &app).await?;
    let name: String = fields.require("lora_name")?;
    // vLLM's number for an adapter.
    fields.neutral("lora_int_id", Value::is_number)?;
    fields.finish()?;
    let changed = app.policies.unload(&name);
    app.engine.unloaded()?;
    Ok(ok(&json!({ "success": true, "changed": changed })))
}

/// `POST /pause?mode=keep|wait|abort&timeout=SECONDS`, also as a JSON object.
pub(super) async fn pause(State(app): State<Arc<App>>, request: Request) -> Answer {
    let mut fields = body::fields_and_query(request, &app).await?;
    let mode = match fields.take::<String>("mode")?.as_deref() {
        None if fields.take_flag("wait_for_inflight_requests")? == Some(true) => PauseMode::Wait,
        None | Some("abort") => PauseMode::Abort,
        Some("wait") => PauseMode::Wait,
        Some("keep") => PauseMode::Keep,
        Some(_) => return Err(ApiError::bad_param("mode", "use keep, wait or abort")),
    };
    fields.take_flag("wait_for_inflight_requests")?;
    // What is cached is keyed by policy, and never used for another one.
    fields.take_flag("clear_cache")?;
    let timeout = match fields.take_seconds("timeout")? {
        None => app.settings.pause_timeout,
        given => given,
    };
    fields.finish()?;
    app.engine.pause(mode, timeout).await?;
    Ok(ok(&json!({ "status": "paused" })))
}

/// `POST /resume`.
pub(super) async fn resume(State(app): State<Arc<App>>) -> Answer {
    app.engine.resume().await?;
    Ok(ok(&json!({ "status": "resumed" })))
}

/// `GET /is_paused`.
pub(super) async fn is_paused(State(app): State<Arc<App>>) -> Response {
    ok(&json!({ "is_paused": app.shared.snapshot().paused }))
}

/// `POST /reset_prefix_cache`.
pub(super) async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Answer {
    app.engine.reset_prefix_cache().await?;
    Ok(ok(&json!({ "success": true })))
}

/// `POST /update_weights {"weight_dir": …}`: other base weights of the same geometry.
pub(super) async fn update_weights(State(app): State<Arc<App>>, request: Request) -> Answer {
    let mut fields = body::fields(request, &app).await?;
    let path: String = fields.require("weight_dir")?;
    fields.neutral("reset_prefix_cache", Value::is_boolean)?;
    fields.finish()?;
    let Some(config) = app.model.config.clone() else {
        let message = "this server was not built from a model folder: its weights cannot be replaced";
        return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message));
    };
    let roots = app.settings.allowed_roots.clone();
    let check = move || {
        let dir = paths::allowed(&roots, "weight_dir", &path)?;
        check_weights(&dir, &config)?;
        let fingerprint =
            fingerprint::of_folder(&dir).map_err(|error| ApiError::bad_param("weight_dir", error))?;
        Ok::<_, ApiError>((dir, fingerprint))
    };
    let (dir, fingerprint) = blocking(check).await?;
    let loaded = app.policies.replace_base(dir, fingerprint);
    let in_force = app.engine.prepare(loaded.policy.clone()).await?;
    Ok(ok(&json!({
        "status": "ok",
        "changed": loaded.changed,
        "in_force": in_force,
        "policy": { "name": loaded.policy.name, "version": loaded.policy.version },
    })))
}

/// Whether a folder holds all weights of a model of this geometry.
fn check_weights(dir: &Path, config: &Qwen3Config) -> Result<(), ApiError> {
    let problem = |error: qwen3_model::Error| ApiError::bad_param("weight_dir", error);
    let mut new = Qwen3Config::from_dir(dir).map_err(problem)?;
    new.eos_token_ids.clone_from(&config.eos_token_ids);
    if new != *config {
        let message = "config.json describes another model than the one that is served";
        return Err(ApiError::bad_param("weight_dir", message));
    }
    Weights::open(dir, config).map_err(problem)?;
    Ok(())
}
