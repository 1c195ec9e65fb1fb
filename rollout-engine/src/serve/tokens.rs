//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::app::{App, blocking};
use super::body;
use super::chat;
use super::error::{ApiError, json_response};
use crate::Error;
use crate::request::Prompt;

/// `POST /tokenize` with `prompt`, or with `messages` and what else belongs to a conversation.
pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app).await?;
    if let Some(model) = fields.take::<String>("model")? {
        app.policies.find(&model)?;
    }
    let prompt = match fields.take::<String>("prompt")? {
        Some(text) => {
            // Qwen3's tokenizer adds none.
            fields.neutral("add_special_tokens", Value::is_boolean)?;
            Prompt::Text(text)
        }
        None => Prompt::Chat(chat::conversation(&mut fields)?),
    };
    let with_names = fields.take("return_token_strs")?.unwrap_or(false);
    fields.finish()?;
    let tokens = app.encode(vec![prompt], usize::MAX).await?.concat();
    let name_all = move || {
        let names = with_names.then(|| tokens.iter().map(|&token| name(&app, token)).collect::<Vec<_>>());
        let body = json!({
            "count": tokens.len(),
            "max_model_len": app.model.max_tokens,
            "tokens": tokens,
            "token_strs": names,
        });
        Ok(json_response(StatusCode::OK, &body))
    };
    blocking(name_all).await
}

fn name(app: &App, token: u32) -> String {
    let text = app.model.text.as_ref();
    text.and_then(|text| text.tokenizer().decode(&[token], false).ok())
        .unwrap_or_default()
}

/// `POST /detokenize` with `tokens`: their text, special tokens included.
pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut fields = body::fields(request, &app).await?;
    if let Some(model) = fields.take::<String>("model")? {
        app.policies.find(&model)?;
    }
    let tokens: Vec<u32> = fields.require("tokens")?;
    fields.finish()?;
    let text = app.model.text.clone();
    let text = text.ok_or_else(|| ApiError::from(&Error::NoTokenizer))?;
    let decode = move || {
        let decoded = text.tokenizer().decode(&tokens, false);
        decoded.map_err(|error| ApiError::from(&error))
    };
    let prompt = blocking(decode).await?;
    Ok(json_response(StatusCode::OK, &json!({ "prompt": prompt })))
}
