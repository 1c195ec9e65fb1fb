//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};

use super::answer::AnswerKind;
use super::app::App;
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::params::{Dialect, Params};
use super::reply::reply;
use crate::request::{ChatPrompt, Prompt};

pub(super) async fn chat_completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app).await?;
    let policy = app.policies.find(&fields.require::<String>("model")?)?;
    let chat = conversation(&mut fields)?;
    let mode = app.settings.logprobs_mode;
    let params = Params::take(&mut fields, Dialect::Chat, &app.settings.limits, mode)?;
    // Tools are shown to the model; calls of them stay in the text as the model writes them.
    fields.neutral("tool_choice", |value| value == "auto" || value == "none")?;
    fields.finish()?;
    let prompts = app.encode_prompts(vec![Prompt::Chat(chat)]).await?;
    reply(&app, AnswerKind::Chat, policy, prompts, params).await
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
    chat.variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let among_variables = chat.variables.shift_remove("add_generation_prompt");
    let param = "chat_template_kwargs.add_generation_prompt";
    chat.add_generation_prompt = match (fields.take("add_generation_prompt")?, among_variables) {
        (given, None) => given.unwrap_or(true),
        (given, Some(Value::Bool(also))) if given.is_none_or(|given| given == also) => also,
        (_, Some(Value::Bool(_))) => {
            return Err(ApiError::bad_param(param, "the request says otherwise beside it"));
        }
        (_, Some(_)) => return Err(ApiError::bad_param(param, "use true or false")),
    };
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
