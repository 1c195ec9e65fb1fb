//! Log-probabilities in the forms of OpenAI's two APIs, written straight from the tokens.

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use super::names::{TokenName, TokenNames};
use super::params::{Params, Reported};
use super::settings::LogprobsMode;
use crate::completion::Completion;
use crate::runner::{SampledToken, TokenLogprob};

/// Tokens of an answer, without their text.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tokens<'a> {
    /// All of a completion.
    All(&'a Completion),
    /// The one of a piece.
    One(&'a SampledToken),
}

/// One of them.
#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    id: u32,
    logprob: f32,
    sampled_logprob: f32,
    top_logprobs: &'a [TokenLogprob],
}

impl<'a> Tokens<'a> {
    /// The ids.
    pub(super) fn ids(self) -> &'a [u32] {
        match self {
            Self::All(completion) => &completion.token_ids,
            Self::One(token) => std::slice::from_ref(&token.token),
        }
    }

    fn iter(self) -> impl Iterator<Item = Token<'a>> {
        self.ids().iter().enumerate().map(move |(i, &id)| match self {
            Self::All(completion) => Token {
                id,
                logprob: completion.logprobs[i],
                sampled_logprob: completion.sampled_logprobs[i],
                top_logprobs: completion.top_logprobs.get(i).map_or(&[], Vec::as_slice),
            },
            Self::One(token) => Token {
                id,
                logprob: token.logprob,
                sampled_logprob: token.sampled_logprob,
                top_logprobs: &token.top_logprobs,
            },
        })
    }
}

/// How tokens and their log-probabilities are written in the answers to one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenWriter<'a> {
    names: &'a TokenNames,
    tokens_as_ids: bool,
    /// Alternatives per token; `None` for no log-probabilities.
    alternatives: Option<usize>,
    reported: Reported,
}

impl<'a> TokenWriter<'a> {
    pub(super) fn new(names: &'a TokenNames, params: &Params, mode: LogprobsMode) -> Self {
        Self {
            names,
            tokens_as_ids: params.tokens_as_ids,
            alternatives: params.logprobs,
            reported: params.reported(mode),
        }
    }

    /// What is to be written about tokens, if it was asked for.
    pub(super) fn logprobs(self, tokens: Tokens<'a>, form: LogprobsForm) -> Option<Logprobs<'a>> {
        let writer = self;
        self.alternatives.map(|_| Logprobs { writer, tokens, form })
    }

    /// Characters that a token adds to the text, as far as [`LogprobsForm::Lists`] counts them.
    pub(super) fn chars(self, token: u32) -> usize {
        self.name(token).chars()
    }

    fn name(self, token: u32) -> TokenName<'a> {
        match self.tokens_as_ids {
            true => TokenName::Id(token),
            false => self.names.name(token),
        }
    }

    /// Of the sampled token.
    fn logprob(self, token: Token<'_>) -> f32 {
        match self.reported {
            Reported::Policy => token.logprob,
            Reported::Tempered(_) | Reported::SampledAlone => token.sampled_logprob,
        }
    }

    /// The alternatives, the most likely first, and after them the sampled token if it is not among them.
    fn top(self, token: Token<'_>) -> Vec<(u32, f32)> {
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
        if !top.iter().any(|(id, _)| *id == token.id) {
            top.push((token.id, self.logprob(token)));
        }
        top
    }

    /// An object of names and log-probabilities. Of tokens with the same name the first counts.
    fn named(self, token: Token<'_>) -> Named<'a> {
        let mut named: Vec<(TokenName<'a>, f32)> = Vec::new();
        for (id, logprob) in self.top(token) {
            let name = self.name(id);
            if named.iter().all(|(known, _)| *known != name) {
                named.push((name, logprob));
            }
        }
        Named(named)
    }

    /// Here the alternatives are as many as were asked for, with or without the sampled token.
    fn entry(self, token: Token<'_>) -> Entry<'a> {
        let top = self.top(token).into_iter().take(self.alternatives.unwrap_or(0));
        Entry {
            top_logprobs: Some(top.map(|(id, logprob)| self.alternative(id, logprob)).collect()),
            ..self.alternative(token.id, self.logprob(token))
        }
    }

    fn alternative(self, token: u32, logprob: f32) -> Entry<'a> {
        Entry {
            token: self.name(token),
            logprob,
            top_logprobs: None,
        }
    }
}

/// The form of log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogprobsForm {
    /// Of completions: four lists of one length. The last says where each token's text begins, in characters; that of the
    /// first begins at `offset`.
    Lists {
        /// Characters before the first token.
        offset: usize,
    },
    /// Of chats: a list of objects.
    Entries,
}

/// Log-probabilities, ready to be serialized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logprobs<'a> {
    writer: TokenWriter<'a>,
    tokens: Tokens<'a>,
    form: LogprobsForm,
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { writer, tokens, form } = *self;
        match form {
            LogprobsForm::Lists { offset } => {
                let offsets = || {
                    tokens.iter().scan(offset, |offset, token| {
                        let start = *offset;
                        *offset += writer.chars(token.id);
                        Some(start)
                    })
                };
                let mut lists = serializer.serialize_struct("logprobs", 4)?;
                lists.serialize_field(
                    "tokens",
                    &List(|| tokens.iter().map(|token| writer.name(token.id))),
                )?;
                lists.serialize_field(
                    "token_logprobs",
                    &List(|| tokens.iter().map(|token| writer.logprob(token))),
                )?;
                lists.serialize_field(
                    "top_logprobs",
                    &List(|| tokens.iter().map(|token| writer.named(token))),
                )?;
                lists.serialize_field("text_offset", &List(offsets))?;
                lists.end()
            }
            LogprobsForm::Entries => {
                let mut content = serializer.serialize_struct("logprobs", 1)?;
                content.serialize_field(
                    "content",
                    &List(|| tokens.iter().map(|token| writer.entry(token))),
                )?;
                content.end()
            }
        }
    }
}

/// A list whose items are made while it is written.
struct List<F>(F);

impl<F: Fn() -> I, I: Iterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

#[derive(Debug)]
struct Named<'a>(Vec<(TokenName<'a>, f32)>);

impl Serialize for Named<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, logprob)| (name, logprob)))
    }
}

/// A token of a chat, or an alternative to it.
#[derive(Debug)]
struct Entry<'a> {
    token: TokenName<'a>,
    logprob: f32,
    /// `None` for an alternative.
    top_logprobs: Option<Vec<Entry<'a>>>,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entry = serializer.serialize_struct("entry", 4)?;
        entry.serialize_field("token", &self.token)?;
        entry.serialize_field("logprob", &self.logprob)?;
        // Null where the token is part of a character.
        entry.serialize_field("bytes", &self.token.bytes())?;
        match &self.top_logprobs {
            Some(top) => entry.serialize_field("top_logprobs", top)?,
            None => entry.skip_field("top_logprobs")?,
        }
        entry.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

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

    fn top(reported: Reported, alternatives: usize) -> Vec<(u32, f32)> {
        let names = TokenNames::new(None);
        let token = token();
        writer(&names, reported, alternatives).top(Tokens::One(&token).iter().next().expect("one"))
    }

    fn writer(names: &TokenNames, reported: Reported, alternatives: usize) -> TokenWriter<'_> {
        TokenWriter {
            names,
            tokens_as_ids: true,
            alternatives: Some(alternatives),
            reported,
        }
    }

    fn written(form: LogprobsForm, alternatives: usize) -> Value {
        let names = TokenNames::new(None);
        let token = token();
        let logprobs = writer(&names, Reported::Policy, alternatives).logprobs(Tokens::One(&token), form);
        serde_json::to_value(logprobs).expect("JSON")
    }

    #[test]
    fn the_sampled_token_is_always_among_the_alternatives() {
        assert_eq!(top(Reported::Policy, 1), [(7, 0.5f32.ln()), (9, 0.2f32.ln())]);
        assert_eq!(top(Reported::Policy, 0), [(9, 0.2f32.ln())]);
        let chat = written(LogprobsForm::Entries, 1);
        assert_eq!(
            chat["content"][0]["top_logprobs"].as_array().map(Vec::len),
            Some(1)
        );
        assert_eq!(chat["content"][0]["bytes"], Value::Null);
    }

    #[test]
    fn tempered_alternatives_are_those_of_the_tempered_distribution() {
        let top = top(Reported::Tempered(0.5), 2);
        for ((_, logprob), p) in top.iter().zip([0.25f32 / 0.38, 0.09 / 0.38, 0.04 / 0.38]) {
            assert!((logprob - p.ln()).abs() < 1e-6, "{logprob} {p}");
        }
    }

    #[test]
    fn lists_have_one_length() {
        let lists = written(LogprobsForm::Lists { offset: 4 }, 2);
        assert_eq!(lists["tokens"], json!(["token_id:9"]));
        assert_eq!(lists["token_logprobs"], json!([0.2f32.ln()]));
        assert_eq!(
            lists["top_logprobs"],
            json!([{ "token_id:7": 0.5f32.ln(), "token_id:8": 0.3f32.ln(), "token_id:9": 0.2f32.ln() }])
        );
        assert_eq!(lists["text_offset"], json!([4]));
    }
}
