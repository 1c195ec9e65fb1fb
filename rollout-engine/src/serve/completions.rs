//! `/v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;

use super::answer::AnswerKind;
use super::app::App;
use super::body;
use super::error::ApiError;
use super::fields::in_words;
use super::params::{Dialect, Params};
use super::reply::reply;
use crate::request::Prompt;

pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app).await?;
    let policy = app.policies.find(&fields.require::<String>("model")?)?;
    let prompts = prompts(fields.require("prompt")?)?;
    let mode = app.settings.logprobs_mode;
    let params = Params::take(&mut fields, Dialect::Completions, &app.settings.limits, mode)?;
    // Qwen3's tokenizer adds none.
    fields.neutral("add_special_tokens", Value::is_boolean)?;
    fields.finish()?;
    let prompts = app.encode_prompts(prompts).await?;
    reply(&app, AnswerKind::Completion, policy, prompts, params).await
}

/// A text, token ids, or a list of either.
fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let ids = |value: Value| {
        serde_json::from_value::<Vec<u32>>(value)
            .map(Prompt::TokenIds)
            .map_err(|error| ApiError::bad_param("prompt", in_words(&error)))
    };
    match value {
        Value::String(text) => Ok(vec![Prompt::Text(text)]),
        Value::Array(list) => match list.first() {
            None => Err(ApiError::bad_param("prompt", "the list is empty")),
            Some(Value::Number(_)) => Ok(vec![ids(Value::Array(list))?]),
            Some(_) => list
                .into_iter()
                .map(|item| match item {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(_) => ids(item),
                    _ => Err(ApiError::bad_param(
                        "prompt",
                        "a list of texts, or of lists of token ids",
                    )),
                })
                .collect(),
        },
        _ => Err(ApiError::bad_param(
            "prompt",
            "a text, token ids, or a list of either",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_that_are_none_are_refused_in_words_of_json() {
        for prompt in [json!([1, -1]), json!([[1, 0.5]]), json!([[1], [1u64 << 40]])] {
            let error = prompts(prompt).expect_err("no id");
            assert_eq!(error.param.as_deref(), Some("prompt"));
            assert!(
                error.message.ends_with("expected a whole number"),
                "{}",
                error.message
            );
        }
    }
}
