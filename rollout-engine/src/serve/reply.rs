//! From prompts to an answer: what `/v1/completions` and `/v1/chat/completions` share.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;

use super::answer::{AnswerKind, Envelope, Usage, choices};
use super::app::{App, now};
use super::error::{ApiError, json_response};
use super::params::Params;
use super::policy::Policy;
use super::stream;
use super::with_policy_header;

/// Hands prompts to the engine and answers with their completions, as a whole or as a stream.
pub(super) async fn reply(
    app: &Arc<App>,
    kind: AnswerKind,
    policy: Arc<Policy>,
    prompts: Vec<Vec<u32>>,
    params: Params,
) -> Result<Response, ApiError> {
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    if params.stream {
        // The first event of each choice tells its prompt.
        let told = match params.return_token_ids {
            true => prompts.clone(),
            false => Vec::new(),
        };
        let job = app.submit(policy, prompts, &params)?;
        return stream::response(app, job, kind, params, prompt_tokens, told).await;
    }
    let job = app.submit(policy, prompts, &params)?;
    let answer = app.finished(job).await?;
    let prompt = answer.completions.first();
    let prompt = prompt.map(|completion| completion.prompt_token_ids.as_slice());
    let envelope = Envelope {
        id: &app.answer_id(kind.id_prefix()),
        object: kind.object(false),
        created: now(),
        model: &answer.policy.name,
        choices: &choices(&answer.completions, kind, app.token_writer(&params), &params),
        prompt_token_ids: kind.prompt_of_all(prompt.filter(|_| params.return_token_ids)),
        usage: Some(Usage::new(prompt_tokens, answer.completion_tokens())),
        policy: &answer.policy,
    };
    let response = json_response(StatusCode::OK, &envelope);
    Ok(with_policy_header(response, &answer.policy))
}
