//! `/v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::Value;

use super::answer::{CompletionChoice, Envelope, TokenWriter, Usage};
use super::app::{App, now};
use super::body;
use super::error::{ApiError, json_response};
use super::params::{Dialect, Params};
use super::stream::{self, StreamKind};
use super::with_policy_header;
use crate::request::Prompt;

pub(super) async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app.settings.limits).await?;
    let policy = app.policies.find(&fields.require::<String>("model")?)?;
    let prompts = prompts(fields.require("prompt")?)?;
    let mode = app.settings.logprobs_mode;
    let params = Params::take(&mut fields, Dialect::Completions, &app.settings.limits, mode)?;
    // Qwen3's tokenizer adds none.
    fields.neutral("add_special_tokens", Value::is_boolean)?;
    fields.finish()?;
    let prompts = app.encode(prompts).await?;
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let job = app.submit(policy, prompts, &params)?;
    if params.stream {
        return stream::response(&app, job, StreamKind::Completion, params, prompt_tokens).await;
    }
    let answer = app.finished(job).await?;
    let writer = TokenWriter::new(app.model.text.as_deref(), &params, mode);
    let completion_tokens = answer.completions.iter().map(|c| c.token_ids.len()).sum();
    let choices = answer
        .completions
        .into_iter()
        .enumerate()
        .map(|(index, completion)| {
            let logprobs = writer.completion(&completion);
            CompletionChoice {
                index,
                text: completion.text,
                logprobs,
                finish_reason: Some(completion.finish_reason),
                stop_reason: completion.stop_reason,
                token_ids: params.return_token_ids.then_some(completion.token_ids),
                prompt_token_ids: params.return_token_ids.then_some(completion.prompt_token_ids),
            }
        });
    let envelope = Envelope {
        id: &app.answer_id("cmpl"),
        object: "text_completion",
        created: now(),
        model: &answer.policy.name,
        choices: choices.collect(),
        usage: Some(Usage::new(prompt_tokens, completion_tokens)),
        policy: &answer.policy,
    };
    let response = json_response(StatusCode::OK, &envelope);
    Ok(with_policy_header(response, &answer.policy))
}

/// A text, token ids, or a list of either.
fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let ids = |value: Value| {
        serde_json::from_value::<Vec<u32>>(value)
            .map(Prompt::TokenIds)
            .map_err(|error| ApiError::bad_param("prompt", error))
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
