//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value};

use super::answer::{ChatChoice, ChatMessage, Envelope, TokenWriter, Usage};
use super::app::{App, now};
use super::body;
use super::error::{ApiError, json_response};
use super::fields::Fields;
use super::params::{Dialect, Params};
use super::stream::{self, StreamKind};
use super::with_policy_header;
use crate::request::{ChatPrompt, Prompt};

pub(super) async fn chat_completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app.settings.limits).await?;
    let policy = app.policies.find(&fields.require::<String>("model")?)?;
    let chat = conversation(&mut fields)?;
    let mode = app.settings.logprobs_mode;
    let params = Params::take(&mut fields, Dialect::Chat, &app.settings.limits, mode)?;
    // Tools are shown to the model; calls of them stay in the text as the model writes them.
    fields.neutral("tool_choice", |value| value == "auto" || value == "none")?;
    fields.finish()?;
    let prompts = app.encode(vec![Prompt::Chat(chat)]).await?;
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let job = app.submit(policy, prompts, &params)?;
    if params.stream {
        return stream::response(&app, job, StreamKind::Chat, params, prompt_tokens).await;
    }
    let answer = app.finished(job).await?;
    let writer = TokenWriter::new(app.model.text.as_deref(), &params, mode);
    let completion_tokens = answer.completions.iter().map(|c| c.token_ids.len()).sum();
    let choices = answer
        .completions
        .into_iter()
        .enumerate()
        .map(|(index, completion)| {
            let logprobs = writer.chat(&completion);
            ChatChoice {
                index,
                message: ChatMessage {
                    role: "assistant",
                    content: completion.text,
                },
                logprobs,
                finish_reason: Some(completion.finish_reason),
                stop_reason: completion.stop_reason,
                token_ids: params.return_token_ids.then_some(completion.token_ids),
                prompt_token_ids: params.return_token_ids.then_some(completion.prompt_token_ids),
            }
        });
    let envelope = Envelope {
        id: &app.answer_id("chatcmpl"),
        object: "chat.completion",
        created: now(),
        model: &answer.policy.name,
        choices: choices.collect(),
        usage: Some(Usage::new(prompt_tokens, completion_tokens)),
        policy: &answer.policy,
    };
    let response = json_response(StatusCode::OK, &envelope);
    Ok(with_policy_header(response, &answer.policy))
}

/// Takes a conversation and what else its template reads.
pub(super) fn conversation(fields: &mut Fields) -> Result<ChatPrompt, ApiError> {
    let messages: Vec<Map<String, Value>> = fields.require("messages")?;
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(i, message)| text_message(i, message));
    let mut chat = ChatPrompt::new(messages.collect::<Result<_, _>>()?);
    chat.tools = fields
        .take::<Vec<Value>>("tools")?
        .filter(|tools| !tools.is_empty());
    chat.add_generation_prompt = fields.take("add_generation_prompt")?.unwrap_or(true);
    chat.variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    fields.neutral("continue_final_message", |value| *value == Value::Bool(false))?;
    fields.neutral("add_special_tokens", |value| *value == Value::Bool(false))?;
    Ok(chat)
}

/// Joins content that comes in parts, of which only text is known.
fn text_message(index: usize, mut message: Map<String, Value>) -> Result<Value, ApiError> {
    let param = || format!("messages[{index}].content");
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(ApiError::bad_param(
            format!("messages[{index}].role"),
            "a text is required",
        ));
    }
    if let Some(Value::Array(parts)) = message.get("content") {
        let mut text = String::new();
        for part in parts {
            match (&part["type"], &part["text"]) {
                (Value::String(kind), Value::String(part)) if kind == "text" => text.push_str(part),
                (kind, _) => {
                    return Err(ApiError::bad_param(
                        param(),
                        format_args!("parts of type {kind} are not supported, text only"),
                    ));
                }
            }
        }
        message.insert("content".into(), Value::String(text));
    }
    Ok(Value::Object(message))
}
