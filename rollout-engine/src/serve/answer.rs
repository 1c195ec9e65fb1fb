//! Answers as OpenAI's and vLLM's clients read them.

use serde::Serialize;

use super::params::{Params, Reported};
use super::settings::LogprobsMode;
use crate::completion::{Completion, FinishReason, StopReason};
use crate::runner::{SampledToken, TokenLogprob};
use crate::text::TextPipeline;

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

/// Anything that is sent as a whole, or as one event of a stream.
#[derive(Debug, Serialize)]
pub(super) struct Envelope<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    pub(super) policy: &'a PolicyReport,
}

/// `/v1/completions`, whole or a piece.
#[derive(Debug, Serialize)]
pub(super) struct CompletionChoice {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: Option<CompletionLogprobs>,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

/// Three lists of one length, and where each token's text begins.
#[derive(Debug, Default, Serialize)]
pub(super) struct CompletionLogprobs {
    pub(super) tokens: Vec<String>,
    pub(super) token_logprobs: Vec<f32>,
    pub(super) top_logprobs: Vec<NamedLogprobs>,
    /// In characters.
    pub(super) text_offset: Vec<usize>,
}

/// An object of token names and log-probabilities. Of tokens with the same name the first counts.
#[derive(Debug, Default)]
pub(super) struct NamedLogprobs(Vec<(String, f32)>);

impl NamedLogprobs {
    fn push(&mut self, name: String, logprob: f32) {
        if self.0.iter().all(|(known, _)| *known != name) {
            self.0.push((name, logprob));
        }
    }
}

impl Serialize for NamedLogprobs {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

/// `/v1/chat/completions`, whole.
#[derive(Debug, Serialize)]
pub(super) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: ChatMessage,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatMessage {
    pub(super) role: &'static str,
    pub(super) content: String,
}

/// `/v1/chat/completions`, a piece.
#[derive(Debug, Serialize)]
pub(super) struct ChatPiece {
    pub(super) index: usize,
    pub(super) delta: ChatDelta,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<FinishReason>,
    pub(super) stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ChatLogprobs {
    pub(super) content: Vec<ChatTokenLogprob>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatTokenLogprob {
    pub(super) token: String,
    pub(super) logprob: f32,
    /// `None` where the token is part of a character.
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Serialize)]
pub(super) struct TopLogprob {
    pub(super) token: String,
    pub(super) logprob: f32,
    pub(super) bytes: Option<Vec<u8>>,
}

/// How tokens and their log-probabilities are written in the answers to one request.
#[derive(Debug)]
pub(super) struct TokenWriter<'a> {
    pub(super) text: Option<&'a TextPipeline>,
    pub(super) tokens_as_ids: bool,
    /// Alternatives per token; `None` for no log-probabilities.
    pub(super) alternatives: Option<usize>,
    pub(super) reported: Reported,
}

impl<'a> TokenWriter<'a> {
    pub(super) fn new(text: Option<&'a TextPipeline>, params: &Params, mode: LogprobsMode) -> Self {
        Self {
            text,
            tokens_as_ids: params.tokens_as_ids,
            alternatives: params.logprobs,
            reported: params.reported(mode),
        }
    }

    fn name(&self, token: u32) -> String {
        match self.text {
            Some(text) if !self.tokens_as_ids => text.tokenizer().decode(&[token], false).unwrap_or_default(),
            _ => format!("token_id:{token}"),
        }
    }

    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        (!self.tokens_as_ids && !name.contains(char::REPLACEMENT_CHARACTER)).then(|| name.as_bytes().to_vec())
    }

    /// Of the sampled token.
    fn logprob(&self, token: &SampledToken) -> f32 {
        match self.reported {
            Reported::Policy => token.logprob,
            Reported::Tempered(_) | Reported::SampledAlone => token.sampled_logprob,
        }
    }

    /// The alternatives, the most likely first, and after them the sampled token if it is not among them.
    fn top(&self, token: &SampledToken) -> Vec<(u32, f32)> {
        let wanted = self.alternatives.unwrap_or(0);
        let of = |other: &TokenLogprob| match self.reported {
            Reported::Policy | Reported::SampledAlone => other.logprob,
            // Both differ from the logit over the temperature by a constant.
            Reported::Tempered(t) => (other.logprob - token.logprob) / t + token.sampled_logprob,
        };
        let mut top: Vec<_> = token
            .top_logprobs
            .iter()
            .take(wanted)
            .map(|other| (other.token, of(other)))
            .filter(|(_, logprob)| logprob.is_finite())
            .collect();
        if !top.iter().any(|(id, _)| *id == token.token) {
            top.push((token.token, self.logprob(token)));
        }
        top
    }

    /// Adds one token to the lists of a completion. `offset` is where its text begins, and is moved on.
    pub(super) fn completion_logprobs(
        &self,
        token: &SampledToken,
        lists: &mut CompletionLogprobs,
        offset: &mut usize,
    ) {
        let name = self.name(token.token);
        lists.text_offset.push(*offset);
        if !self.tokens_as_ids {
            *offset += name.chars().count();
        }
        let mut top = NamedLogprobs::default();
        for (id, logprob) in self.top(token) {
            top.push(self.name(id), logprob);
        }
        lists.tokens.push(name);
        lists.token_logprobs.push(self.logprob(token));
        lists.top_logprobs.push(top);
    }

    /// One token of a chat completion. Here `top_logprobs` holds as many as were asked for, with or without the sampled
    /// token.
    pub(super) fn chat_logprob(&self, token: &SampledToken) -> ChatTokenLogprob {
        let name = self.name(token.token);
        let top = self.top(token).into_iter().take(self.alternatives.unwrap_or(0));
        let top_logprobs = top
            .map(|(id, logprob)| {
                let token = self.name(id);
                let bytes = self.bytes(&token);
                TopLogprob {
                    token,
                    logprob,
                    bytes,
                }
            })
            .collect();
        ChatTokenLogprob {
            bytes: self.bytes(&name),
            token: name,
            logprob: self.logprob(token),
            top_logprobs,
        }
    }

    /// All of a completion's, if they were asked for.
    pub(super) fn completion(&self, completion: &Completion) -> Option<CompletionLogprobs> {
        self.alternatives?;
        let (mut lists, mut offset) = (CompletionLogprobs::default(), 0);
        for token in tokens(completion) {
            self.completion_logprobs(&token, &mut lists, &mut offset);
        }
        Some(lists)
    }

    /// As [`TokenWriter::completion`], for chats.
    pub(super) fn chat(&self, completion: &Completion) -> Option<ChatLogprobs> {
        self.alternatives?;
        let content = tokens(completion)
            .map(|token| self.chat_logprob(&token))
            .collect();
        Some(ChatLogprobs { content })
    }
}

fn tokens(completion: &Completion) -> impl Iterator<Item = SampledToken> + '_ {
    (0..completion.token_ids.len()).map(|i| SampledToken {
        token: completion.token_ids[i],
        logprob: completion.logprobs[i],
        sampled_logprob: completion.sampled_logprobs[i],
        top_logprobs: completion.top_logprobs.get(i).cloned().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> SampledToken {
        // Policy: 0.5, 0.3, 0.2 for tokens 7, 8, 9; drawn: 9, at temperature 0.5.
        let weights = [0.5f32, 0.3, 0.2].map(|p| p * p);
        let sum: f32 = weights.iter().sum();
        SampledToken {
            token: 9,
            logprob: 0.2f32.ln(),
            sampled_logprob: (weights[2] / sum).ln(),
            top_logprobs: vec![
                TokenLogprob {
                    token: 7,
                    logprob: 0.5f32.ln(),
                },
                TokenLogprob {
                    token: 8,
                    logprob: 0.3f32.ln(),
                },
            ],
        }
    }

    fn writer(reported: Reported, alternatives: usize) -> TokenWriter<'static> {
        TokenWriter {
            text: None,
            tokens_as_ids: true,
            alternatives: Some(alternatives),
            reported,
        }
    }

    #[test]
    fn the_sampled_token_is_always_among_the_alternatives() {
        let top = writer(Reported::Policy, 1).top(&token());
        assert_eq!(top, [(7, 0.5f32.ln()), (9, 0.2f32.ln())]);
        let top = writer(Reported::Policy, 0).top(&token());
        assert_eq!(top, [(9, 0.2f32.ln())]);
        assert_eq!(
            writer(Reported::Policy, 1)
                .chat_logprob(&token())
                .top_logprobs
                .len(),
            1
        );
    }

    #[test]
    fn tempered_alternatives_are_those_of_the_tempered_distribution() {
        let top = writer(Reported::Tempered(0.5), 2).top(&token());
        for ((_, logprob), p) in top.iter().zip([0.25f32 / 0.38, 0.09 / 0.38, 0.04 / 0.38]) {
            assert!((logprob - p.ln()).abs() < 1e-6, "{logprob} {p}");
        }
    }

    #[test]
    fn lists_have_one_length() {
        let (mut lists, mut offset) = (CompletionLogprobs::default(), 0);
        for _ in 0..3 {
            writer(Reported::Policy, 2).completion_logprobs(&token(), &mut lists, &mut offset);
        }
        assert_eq!(lists.tokens, ["token_id:9"; 3]);
        assert_eq!((lists.token_logprobs.len(), lists.top_logprobs.len()), (3, 3));
        assert_eq!(lists.top_logprobs[0].0.len(), 3);
    }
}
