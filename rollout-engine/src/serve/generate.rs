//! `/inference/v1/generate`: token ids in, token ids out.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::answer::{Choice, Usage};
use super::app::App;
use super::body;
use super::error::{ApiError, json_response};
use super::logprobs::{LogprobsForm, Tokens};
use super::params::{Dialect, Params};
use super::with_policy_header;

pub(super) async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app).await?;
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
    let writer = app.token_writer(&params);
    let choice = |(index, completion)| {
        let logprobs = writer.logprobs(Tokens::All(completion), LogprobsForm::Entries);
        let choice = Choice::whole(index, completion, None, logprobs, true);
        // The client has the prompt.
        Choice {
            prompt_token_ids: None,
            ..choice
        }
    };
    let choices: Vec<_> = answer.completions.iter().enumerate().map(choice).collect();
    let body = json!({
        "request_id": app.answer_id("generate-tokens"),
        "choices": choices,
        "usage": Usage::new(prompt_tokens, answer.completion_tokens()),
        "policy": answer.policy,
    });
    Ok(with_policy_header(
        json_response(StatusCode::OK, &body),
        &answer.policy,
    ))
}
