//! Answers as OpenAI's and vLLM's clients read them, whole or in pieces.

use serde::Serialize;

use super::logprobs::{Logprobs, LogprobsForm, TokenWriter, Tokens};
use super::params::Params;
use crate::completion::{Completion, FinishReason, StopReason};

/// The policy of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PolicyReport {
    /// The name that was asked for.
    pub(super) name: String,
    /// Rises with every policy that the server comes to know; 0 is the base model at the start.
    pub(super) version: u64,
    /// Of the adapters in force.
    pub(super) sha256: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
}

impl Usage {
    pub(super) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
        }
    }
}

/// Which of OpenAI's APIs is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerKind {
    Completion,
    Chat,
}

impl AnswerKind {
    /// What ids of answers begin with.
    pub(super) fn id_prefix(self) -> &'static str {
        match self {
            Self::Completion => "cmpl",
            Self::Chat => "chatcmpl",
        }
    }

    /// The prompt's ids where the whole answer has them: a chat has one prompt.
    pub(super) fn prompt_of_all(self, ids: Option<&[u32]>) -> Option<&[u32]> {
        ids.filter(|_| self == Self::Chat)
    }

    /// The field `object` of an answer, or of a piece of one.
    pub(super) fn object(self, piece: bool) -> &'static str {
        match (self, piece) {
            (Self::Completion, _) => "text_completion",
            (Self::Chat, false) => "chat.completion",
            (Self::Chat, true) => "chat.completion.chunk",
        }
    }

    /// The form of log-probabilities whose first token begins at `offset`.
    pub(super) fn logprobs_form(self, offset: usize) -> LogprobsForm {
        match self {
            Self::Completion => LogprobsForm::Lists { offset },
            Self::Chat => LogprobsForm::Entries,
        }
    }

    /// A whole text.
    pub(super) fn whole(self, text: &str) -> Content<'_> {
        match self {
            Self::Completion => Content::Text(text),
            Self::Chat => Content::Message(Message {
                role: Some("assistant"),
                content: Some(text),
            }),
        }
    }

    /// A piece of a text; of a chat the first says whose it is.
    pub(super) fn piece(self, text: &str, first: bool) -> Content<'_> {
        match self {
            Self::Completion => Content::Text(text),
            Self::Chat => Content::Delta(Message {
                role: first.then_some("assistant"),
                content: (first || !text.is_empty()).then_some(text),
            }),
        }
    }
}

/// Anything that is sent as a whole, or as one event of a stream.
#[derive(Debug, Serialize)]
pub(super) struct Envelope<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: &'a [Choice<'a>],
    /// Of a chat, where clients look for them here; of completions each choice has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    pub(super) policy: &'a PolicyReport,
}

/// A completion, or a piece of one.
#[derive(Debug, Serialize)]
pub(super) struct Choice<'a> {
    pub(super) index: usize,
    /// `None` where answers have no text.
    #[serde(flatten)]
    pub(super) content: Option<Content<'a>>,
    pub(super) logprobs: Option<Logprobs<'a>>,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
}

impl<'a> Choice<'a> {
    /// A whole completion.
    pub(super) fn whole(
        index: usize,
        completion: &'a Completion,
        content: Option<Content<'a>>,
        logprobs: Option<Logprobs<'a>>,
        with_ids: bool,
    ) -> Self {
        Self {
            index,
            content,
            logprobs,
            finish_reason: Some(completion.finish_reason),
            stop_reason: completion.stop_reason.as_ref(),
            token_ids: with_ids.then_some(&completion.token_ids),
            prompt_token_ids: with_ids.then_some(&completion.prompt_token_ids),
        }
    }
}

/// The completions of an answer as choices of this kind.
pub(super) fn choices<'a>(
    completions: &'a [Completion],
    kind: AnswerKind,
    writer: TokenWriter<'a>,
    params: &Params,
) -> Vec<Choice<'a>> {
    let choice = |(index, completion): (usize, &'a Completion)| {
        let logprobs = writer.logprobs(Tokens::All(completion), kind.logprobs_form(0));
        let content = kind.whole(&completion.text);
        Choice::whole(
            index,
            completion,
            Some(content),
            logprobs,
            params.return_token_ids,
        )
    };
    completions.iter().enumerate().map(choice).collect()
}

/// What a choice says, under the name that its API has for it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Content<'a> {
    Text(&'a str),
    Message(Message<'a>),
    Delta(Message<'a>),
}

#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_choice_says_has_the_name_of_its_api() {
        let written = |content| {
            let choice = Choice {
                index: 3,
                content,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
                prompt_token_ids: None,
            };
            let text = serde_json::to_string(&choice).expect("JSON");
            let rest = ",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null}";
            let middle = text
                .strip_prefix("{\"index\":3")
                .and_then(|text| text.strip_suffix(rest));
            middle.unwrap_or_else(|| panic!("{text}")).to_string()
        };
        assert_eq!(
            written(Some(AnswerKind::Completion.whole("a"))),
            ",\"text\":\"a\""
        );
        assert_eq!(
            written(Some(AnswerKind::Chat.whole("a"))),
            ",\"message\":{\"role\":\"assistant\",\"content\":\"a\"}"
        );
        assert_eq!(
            written(Some(AnswerKind::Chat.piece("", true))),
            ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"}"
        );
        assert_eq!(written(Some(AnswerKind::Chat.piece("", false))), ",\"delta\":{}");
        assert_eq!(written(None), "");
        assert_eq!(json!(Usage::new(2, 3))["total_tokens"], 5);
    }
}
