//! Answers as server-sent events, one per token.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::Frame;
use serde::Serialize;

use super::answer::{AnswerKind, Choice, Envelope, PolicyReport, Usage};
use super::app::{App, now};
use super::command::JobEvent;
use super::error::ApiError;
use super::handle::RunningJob;
use super::logprobs::Tokens;
use super::params::Params;
use super::text::TextStream;
use super::with_policy_header;
use crate::completion::Completion;
use crate::runner::SampledToken;

/// A frame is sent on when it has so many bytes, even if more events are there.
const FRAME_BYTES: usize = 64 << 10;

/// Waits until the job has started (errors before that have a status of their own), then streams it. `prompts` are told if
/// they are there.
pub(super) async fn response(
    app: &Arc<App>,
    mut job: RunningJob,
    kind: AnswerKind,
    params: Params,
    prompt_tokens: usize,
    prompts: Vec<Vec<u32>>,
) -> Result<Response, ApiError> {
    let policy = app.started(&mut job).await?;
    let stop: Arc<[String]> = params.sampling.stop.as_slice().into();
    let choices = (0..job.completions).map(|_| Progress {
        text: TextStream::new(app.model.text.clone(), stop.clone()),
        offset: 0,
        begun: false,
    });
    let events = Events {
        choices: choices.collect(),
        app: app.clone(),
        job,
        kind,
        id: app.answer_id(kind.id_prefix()),
        created: now(),
        policy: policy.clone(),
        usage: Usage::new(prompt_tokens, 0),
        prompts,
        params,
        over: false,
    };
    let mut response = Response::new(Body::new(events));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(with_policy_header(response, &policy))
}

/// How far a completion has been sent.
#[derive(Debug)]
struct Progress {
    text: TextStream,
    /// Characters of the tokens so far.
    offset: usize,
    /// Whether a piece was sent.
    begun: bool,
}

/// The body of a streamed answer. Dropping it, as happens when the client goes away, cancels the job.
#[derive(Debug)]
struct Events {
    app: Arc<App>,
    job: RunningJob,
    kind: AnswerKind,
    id: String,
    created: u64,
    policy: PolicyReport,
    usage: Usage,
    /// Ids of each, or none to tell.
    prompts: Vec<Vec<u32>>,
    params: Params,
    choices: Vec<Progress>,
    over: bool,
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut out = Vec::new();
        while !self.over && out.len() < FRAME_BYTES {
            match self.job.poll_next(context) {
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(event) => self.write(event, &mut out),
            }
        }
        match out.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(Ok(Frame::data(Bytes::from(out))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.over
    }
}

impl Events {
    fn write(&mut self, event: Option<JobEvent>, out: &mut Vec<u8>) {
        match event {
            Some(JobEvent::Started { .. }) => {}
            Some(JobEvent::Token { index, token }) => self.token(index, &token, out),
            Some(JobEvent::Finished { index, completion }) => self.finished(index, &completion, out),
            Some(JobEvent::Failed(error)) => {
                event_line(&error.body(), out);
                self.over = true;
            }
            None => {
                if self.params.include_usage {
                    let usage = Some(Usage::new(self.usage.prompt_tokens, self.usage.completion_tokens));
                    self.envelope(&[], None, usage, out);
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
                self.over = true;
            }
        }
    }

    fn token(&mut self, index: usize, token: &SampledToken, out: &mut Vec<u8>) {
        self.usage.completion_tokens += 1;
        // A decoder that fails now fails for the completion, too, which then says so.
        let text = self.choices[index].text.push(token.token).unwrap_or_default();
        let wanted = self.params.logprobs.is_some() || self.params.return_token_ids;
        if wanted || !text.is_empty() {
            self.piece(index, text, Some(token), None, out);
        }
    }

    fn finished(&mut self, index: usize, completion: &Completion, out: &mut Vec<u8>) {
        let rest = self.choices[index].text.finish(&completion.text);
        self.piece(index, rest, None, Some(completion), out);
    }

    fn piece(
        &mut self,
        index: usize,
        text: String,
        token: Option<&SampledToken>,
        end: Option<&Completion>,
        out: &mut Vec<u8>,
    ) {
        let app = self.app.clone();
        let writer = app.token_writer(&self.params);
        let progress = &mut self.choices[index];
        let first = !std::mem::replace(&mut progress.begun, true);
        let offset = progress.offset;
        let logprobs =
            token.and_then(|token| writer.logprobs(Tokens::One(token), self.kind.logprobs_form(offset)));
        if let (Some(token), Some(_)) = (token, &logprobs) {
            progress.offset += writer.chars(token.token);
        }
        let prompt = first.then(|| self.prompts.get(index / self.params.n)).flatten();
        let prompt = prompt.map(Vec::as_slice);
        let ids = token.map_or(&[][..], |token| std::slice::from_ref(&token.token));
        let choice = Choice {
            index,
            content: Some(self.kind.piece(&text, first)),
            logprobs,
            finish_reason: end.map(|completion| completion.finish_reason),
            stop_reason: end.and_then(|completion| completion.stop_reason.as_ref()),
            token_ids: self.params.return_token_ids.then_some(ids),
            prompt_token_ids: prompt,
        };
        self.envelope(&[choice], prompt, None, out);
    }

    /// `prompt` is that of the choices, where it is to be told.
    fn envelope(
        &self,
        choices: &[Choice<'_>],
        prompt: Option<&[u32]>,
        usage: Option<Usage>,
        out: &mut Vec<u8>,
    ) {
        let envelope = Envelope {
            id: &self.id,
            object: self.kind.object(true),
            created: self.created,
            model: &self.policy.name,
            choices,
            prompt_token_ids: self.kind.prompt_of_all(prompt),
            usage,
            policy: &self.policy,
        };
        event_line(&envelope, out);
    }
}

fn event_line(value: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    // Maps with string keys and finite numbers: serialization does not fail.
    let _ = serde_json::to_writer(&mut *out, value);
    out.extend_from_slice(b"\n\n");
}
