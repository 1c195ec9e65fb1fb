//! `/inference/v1/generate`: token ids in, token ids out.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::answer::TokenWriter;
use super::app::App;
use super::body;
use super::error::{ApiError, json_response};
use super::params::{Dialect, Params};
use super::with_policy_header;

pub(super) async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app.settings.limits).await?;
    let policy = app.policies.find(&fields.require::<String>("model")?)?;
    let prompt: Vec<u32> = fields.require("token_ids")?;
    let mut sampling = fields.nested("sampling_params", "sampling_params.")?;
    let mode = app.settings.logprobs_mode;
    let mut params = Params::take(&mut sampling, Dialect::Generate, &app.settings.limits, mode)?;
    sampling.finish()?;
    fields.neutral("stream", |value| *value == Value::Bool(false))?;
    fields.neutral("features", |_| false)?;
    fields.finish()?;
    params.stream = false;
    params.tokens_as_ids = true;
    let prompt_tokens = prompt.len();
    let job = app.submit(policy, vec![prompt], &params)?;
    let answer = app.finished(job).await?;
    let writer = TokenWriter::new(None, &params, mode);
    let completion_tokens: usize = answer.completions.iter().map(|c| c.token_ids.len()).sum();
    let choices: Vec<_> = answer
        .completions
        .iter()
        .enumerate()
        .map(|(index, completion)| {
            json!({
                "index": index,
                "token_ids": completion.token_ids,
                "logprobs": writer.chat(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            })
        })
        .collect();
    let body = json!({
        "request_id": app.answer_id("generate-tokens"),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "policy": answer.policy,
    });
    Ok(with_policy_header(
        json_response(StatusCode::OK, &body),
        &answer.policy,
    ))
}
