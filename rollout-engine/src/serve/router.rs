//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::app::App;
use super::error::ApiError;
use super::{admin, auth, chat, completions, generate, tokens};

/// What waits for the engine to generate, for as long as that takes.
const GENERATING: [&str; 3] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
];

/// All routes, behind the check of the key. When the server is `full`, one request of a connection is answered, and 429 if it
/// wants anything generated: those that all others may wait for, such as `/resume`, always find a place.
pub(super) fn router(app: &Arc<App>, full: bool) -> Router {
    let routes = Router::new()
        .route("/health", get(admin::health))
        .route("/liveness", get(admin::health))
        .route("/ping", get(admin::health))
        .route("/version", get(admin::version))
        .route("/metrics", get(admin::metrics))
        .route("/server_info", get(admin::server_info))
        .route("/get_world_size", get(admin::world_size))
        .route("/is_paused", get(admin::is_paused))
        .route("/v1/models", get(admin::models))
        .route("/v1/models/{*name}", get(admin::model))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/inference/v1/generate", post(generate::generate))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/load_lora_adapter", post(admin::load_adapter))
        .route("/load_lora_adapter", post(admin::load_adapter_in_place))
        .route("/v1/unload_lora_adapter", post(admin::unload_adapter))
        .route("/pause", post(admin::pause))
        .route("/resume", post(admin::resume))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/update_weights", post(admin::update_weights))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_such_path);
    let routes = match full {
        true => routes.layer(middleware::from_fn_with_state(app.clone(), when_full)),
        false => routes,
    };
    routes
        .layer(middleware::from_fn_with_state(app.clone(), auth::check))
        .layer(middleware::from_fn_with_state(app.clone(), count))
        .with_state(app.clone())
}

async fn no_such_path() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this path").code("no_such_path")
}

async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
}

async fn when_full(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let mut response = if route.is_some_and(|route| GENERATING.contains(&route.as_str())) {
        let message = "all connections that the server takes (--max-connections) are in use: ask again later";
        let error = ApiError {
            retry_after: Some(1),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).code("too_many_connections")
        };
        app.metrics.rejected(&error);
        error.into_response()
    } else {
        next.run(request).await
    };
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}

/// Counts answers by route.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    // Paths that lead nowhere share a name, so that clients cannot grow the table.
    let route = route.as_ref().map_or("(none)", MatchedPath::as_str);
    app.metrics.answered(route, response.status().as_u16());
    response
}
