//! Refusals and failures as clients of OpenAI's API expect them.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::Error;

/// An answer that is an error: a status and `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The field of the request that is at fault.
    pub(super) param: Option<String>,
    /// A word for programs.
    pub(super) code: Option<&'static str>,
    /// Seconds after which to try again.
    pub(super) retry_after: Option<u64>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// 400.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 for one field.
    pub(super) fn bad_param(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self {
            param: Some(param.clone()),
            ..Self::bad_request(format!("{param}: {problem}"))
        }
    }

    /// 503, to be tried again soon.
    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// 500.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    #[must_use]
    pub(super) fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// OpenAI's word for the kind of error.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            _ => "server_error",
        }
    }

    /// The body, also for an error within a stream.
    pub(super) fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind(),
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// A JSON answer.
pub(super) fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response {
    // Maps with string keys and finite numbers: serialization does not fail.
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Whether a request or the server is to blame for an error of the engine.
impl From<&Error> for ApiError {
    fn from(error: &Error) -> Self {
        let message = error.to_string();
        match error {
            Error::EmptyPrompt
            | Error::PromptExceedsPool { .. }
            | Error::TokenOutOfVocabulary { .. }
            | Error::NoTokenizer
            | Error::Tokenizer { .. }
            | Error::NoChatTemplate
            | Error::ChatTemplate { .. } => Self::bad_request(message),
            Error::PromptTooLong { .. } => Self::bad_request(message).code("context_length_exceeded"),
            Error::StopTokenOutOfVocabulary { .. } => Self {
                param: Some("stop_token_ids".into()),
                ..Self::bad_request(message)
            },
            Error::EveryTokenBanned { .. } => Self {
                param: Some(api_name("min_new_tokens").into()),
                ..Self::bad_request(in_api_names(&message))
            },
            Error::NoNewTokens => Self::bad_param("max_tokens", "0 cannot work: ask for at least one token"),
            Error::PromptTextTooLong { .. } => Self::bad_request(message).code("context_length_exceeded"),
            Error::InvalidParameter { parameter, .. } => Self {
                param: Some(api_name(parameter).into()),
                ..Self::bad_request(in_api_names(&message))
            },
            _ => Self::internal(message),
        }
    }
}

/// A message of the engine with the names that clients have for its parameters.
fn in_api_names(message: &str) -> String {
    let renamed = ["max_new_tokens", "min_new_tokens"];
    let rename = |message: String, name| message.replace(name, api_name(name));
    renamed.into_iter().fold(message.into(), rename)
}

/// What clients call a parameter that the engine calls so.
fn api_name(parameter: &'static str) -> &'static str {
    match parameter {
        "max_new_tokens" => "max_tokens",
        "min_new_tokens" => "min_tokens",
        "top_logprobs" => "logprobs",
        same => same,
    }
}
