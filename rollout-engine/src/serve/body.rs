//! Reading a request's body, within limits of size and time.

use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use serde_json::{Map, Value};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::settings::Limits;

/// A body that has begun to arrive when the server is told to end has so long to be complete: nothing of it is under way yet.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// The body's JSON object.
///
/// # Errors
/// 413 for a body that is too long, 408 for one that is too slow, 503 for one that keeps the server from its end, 400 for one
/// that is not a JSON object.
pub(super) async fn fields(request: Request, app: &App) -> Result<Fields, ApiError> {
    match object(request, app).await? {
        Some(map) => Ok(Fields::new(map)),
        None => Err(ApiError::bad_request("the body is empty: send a JSON object")),
    }
}

/// `None` for an empty body.
async fn object(request: Request, app: &App) -> Result<Option<Map<String, Value>>, ApiError> {
    let end = async {
        app.engine.drained().await;
        tokio::time::sleep(DRAIN_GRACE).await;
    };
    let bytes = tokio::select! {
        bytes = read(request, &app.settings.limits) => bytes?,
        () = end => return Err(ApiError::unavailable("the server is shutting down")),
    };
    if bytes.is_empty() {
        return Ok(None);
    }
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| ApiError::bad_request(format!("the body is not a JSON object: {error}")))
}

/// The fields of the query and of a body, which may be empty; one that both have is the body's.
///
/// # Errors
/// As for [`fields`].
pub(super) async fn fields_and_query(request: Request, app: &App) -> Result<Fields, ApiError> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let mut map = object(request, app).await?.unwrap_or_default();
    // None of the names and values that are known needs an escape.
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        map.entry(name).or_insert_with(|| value.into());
    }
    Ok(Fields::new(map))
}

async fn read(request: Request, limits: &Limits) -> Result<Bytes, ApiError> {
    let too_long = || {
        let message = format!("the body is longer than {} bytes", limits.max_body_bytes);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > limits.max_body_bytes as u64) {
        return Err(too_long());
    }
    let body = to_bytes(request.into_body(), limits.max_body_bytes);
    match tokio::time::timeout(limits.body_timeout, body).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if is_length_limit(&error) => Err(too_long()),
        Ok(Err(error)) => Err(ApiError::bad_request(format!("the body cannot be read: {error}"))),
        Err(_) => {
            let message = "the body did not arrive in time";
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
        }
    }
}

/// Whether the limit given to `to_bytes` was the reason.
fn is_length_limit(error: &axum::Error) -> bool {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = source {
        if error.to_string().contains("length limit") {
            return true;
        }
        source = error.source();
    }
    false
}
