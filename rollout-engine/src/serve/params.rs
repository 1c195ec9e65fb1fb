//! How to continue a prompt, from the fields of a request.

use serde_json::{Number, Value};

use super::error::ApiError;
use super::fields::Fields;
use super::settings::{Limits, LogprobsMode};
use crate::request::SamplingParams;

/// Most stop strings, and most stop ids.
const MAX_STOPS: usize = 256;
/// Most bytes of all stop strings together: they are looked for after every token.
const MAX_STOP_BYTES: usize = 16 << 10;

/// How an API spells the same things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `/v1/completions`: `logprobs` is a number.
    Completions,
    /// `/v1/chat/completions`: `logprobs` is a switch, `top_logprobs` the number.
    Chat,
    /// `/inference/v1/generate`: within `sampling_params`, otherwise as for completions.
    Generate,
}

/// Everything about a request but its prompt and its policy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Params {
    pub(super) sampling: SamplingParams,
    /// `None` is what the context leaves.
    pub(super) max_tokens: Option<usize>,
    pub(super) n: usize,
    /// Alternatives per token; `None` for no log-probabilities at all.
    pub(super) logprobs: Option<usize>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    pub(super) tokens_as_ids: bool,
}

#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "use a text or a list of texts")]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    /// Known, and accepted where it asks for nothing.
    #[serde(default)]
    continuous_usage_stats: bool,
}

impl Params {
    /// Takes the parameters out of `fields`.
    ///
    /// # Errors
    /// 400 for a value that cannot work or is not supported.
    pub(super) fn take(
        fields: &mut Fields,
        dialect: Dialect,
        limits: &Limits,
        mode: LogprobsMode,
    ) -> Result<Self, ApiError> {
        let n = fields.take::<usize>("n")?.unwrap_or(1);
        if n == 0 || n > limits.max_n {
            return Err(ApiError::bad_param(
                "n",
                format_args!("{n} is not from 1 to {}", limits.max_n),
            ));
        }
        let stream = fields.take("stream")?.unwrap_or(false);
        let options = fields
            .take::<StreamOptions>("stream_options")?
            .unwrap_or_default();
        if options.continuous_usage_stats {
            return Err(ApiError::bad_param(
                "stream_options.continuous_usage_stats",
                "not supported: leave it out",
            ));
        }
        let max_tokens = match fields.take::<usize>("max_completion_tokens")? {
            Some(tokens) => {
                fields.take::<usize>("max_tokens")?;
                Some(tokens)
            }
            None => fields.take::<usize>("max_tokens")?,
        };
        let max_tokens = match (max_tokens, dialect) {
            (None, Dialect::Completions | Dialect::Generate) => Some(16),
            (given, _) => given,
        };
        let logprobs = alternatives(fields, dialect, limits)?;
        let stop = match fields.take::<OneOrMore>("stop")? {
            None => Vec::new(),
            Some(OneOrMore::One(text)) => vec![text],
            Some(OneOrMore::More(texts)) => texts,
        };
        let stop_token_ids = fields.take::<Vec<u32>>("stop_token_ids")?.unwrap_or_default();
        if stop.len() > MAX_STOPS || stop_token_ids.len() > MAX_STOPS {
            let param = if stop.len() > MAX_STOPS {
                "stop"
            } else {
                "stop_token_ids"
            };
            return Err(ApiError::bad_param(param, format_args!("more than {MAX_STOPS}")));
        }
        let bytes: usize = stop.iter().map(String::len).sum();
        if bytes > MAX_STOP_BYTES {
            let problem = format!("{bytes} bytes together are more than {MAX_STOP_BYTES}");
            return Err(ApiError::bad_param("stop", problem));
        }
        let number = |fields: &mut Fields, name, default: f32| {
            fields.take::<f32>(name).map(|value| value.unwrap_or(default))
        };
        let sampling = SamplingParams {
            max_new_tokens: max_tokens.unwrap_or(usize::MAX),
            min_new_tokens: fields.take("min_tokens")?.unwrap_or(0),
            temperature: number(fields, "temperature", 1.0)?,
            top_k: fields.take("top_k")?.unwrap_or(0),
            top_p: number(fields, "top_p", 1.0)?,
            min_p: number(fields, "min_p", 0.0)?,
            repetition_penalty: number(fields, "repetition_penalty", 1.0)?,
            presence_penalty: number(fields, "presence_penalty", 0.0)?,
            frequency_penalty: number(fields, "frequency_penalty", 0.0)?,
            seed: seed(fields)?,
            stop_token_ids,
            stop,
            include_stop_str_in_output: fields.take("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            top_logprobs: logprobs.unwrap_or(0),
        };
        refuse_what_is_not_there(fields, n)?;
        let params = Self {
            sampling,
            max_tokens,
            n,
            logprobs,
            stream,
            include_usage: options.include_usage,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: fields.take("return_tokens_as_token_ids")?.unwrap_or(false),
        };
        params
            .sampling
            .validate()
            .map_err(|error| ApiError::from(&error))?;
        if params.sampling.top_logprobs > 0 && params.reported(mode) == Reported::SampledAlone {
            return Err(ApiError::bad_param(
                "logprobs",
                "alternatives are not known for a distribution with penalties or truncation: ask for 0, or start the \
                 server with raw log-probabilities",
            )
            .code("unsupported_parameter"));
        }
        Ok(params)
    }

    /// What is reported as the log-probability of a token and its alternatives.
    pub(super) fn reported(&self, mode: LogprobsMode) -> Reported {
        let sampling = &self.sampling;
        let plain = sampling.top_k <= 0
            && sampling.top_p == 1.0
            && sampling.min_p == 0.0
            && sampling.min_new_tokens == 0
            && sampling.repetition_penalty == 1.0
            && sampling.presence_penalty == 0.0
            && sampling.frequency_penalty == 0.0;
        match mode {
            LogprobsMode::Raw => Reported::Policy,
            // Every draw is certain then, and says nothing.
            LogprobsMode::Processed if sampling.temperature == 0.0 => Reported::Policy,
            LogprobsMode::Processed if plain => Reported::Tempered(sampling.temperature),
            LogprobsMode::Processed => Reported::SampledAlone,
        }
    }
}

/// Which log-probabilities are reported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Reported {
    /// The policy's, at temperature 1 over the whole vocabulary.
    Policy,
    /// At this temperature, over the whole vocabulary.
    Tempered(f32),
    /// Those that tokens were drawn with; of other tokens they are not known.
    SampledAlone,
}

fn alternatives(fields: &mut Fields, dialect: Dialect, limits: &Limits) -> Result<Option<usize>, ApiError> {
    let (wanted, param) = match dialect {
        Dialect::Completions | Dialect::Generate => (fields.take::<usize>("logprobs")?, "logprobs"),
        Dialect::Chat => {
            let on = fields.take::<bool>("logprobs")?.unwrap_or(false);
            let top = fields.take::<usize>("top_logprobs")?;
            if !on && top.is_some_and(|top| top > 0) {
                return Err(ApiError::bad_param("top_logprobs", "needs logprobs to be true"));
            }
            (on.then_some(top.unwrap_or(0)), "top_logprobs")
        }
    };
    match wanted {
        Some(top) if top > limits.max_logprobs => Err(ApiError::bad_param(
            param,
            format_args!("{top} is more than {}", limits.max_logprobs),
        )),
        wanted => Ok(wanted),
    }
}

/// Any integer of 64 bits, with or without a sign.
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(number) = fields.take::<Number>("seed")? else {
        return Ok(None);
    };
    let seed = number
        .as_u64()
        .or_else(|| number.as_i64().map(i64::cast_unsigned));
    match seed {
        Some(seed) => Ok(Some(seed)),
        None => Err(ApiError::bad_param("seed", "not an integer of 64 bits")),
    }
}

/// Parameters that are known and not implemented must have a value that changes nothing.
fn refuse_what_is_not_there(fields: &mut Fields, n: usize) -> Result<(), ApiError> {
    let no = |value: &Value| *value == Value::Bool(false);
    let empty = |value: &Value| match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    fields.neutral("best_of", |value| value.as_u64() == Some(n as u64))?;
    for name in ["echo", "use_beam_search", "early_stopping", "prompt_logprobs"] {
        fields.neutral(name, no)?;
    }
    for name in [
        "logit_bias",
        "suffix",
        "bad_words",
        "allowed_token_ids",
        "logits_processors",
    ] {
        fields.neutral(name, empty)?;
    }
    for name in ["skip_special_tokens", "detokenize"] {
        fields.neutral(name, |value| *value == Value::Bool(true))?;
    }
    fields.neutral("length_penalty", |value| value.as_f64() == Some(1.0))?;
    fields.neutral("response_format", |value| value["type"] == "text")?;
    fields.neutral("structured_outputs", |_| false)?;
    // Only how vLLM's own engine and server talk to each other.
    fields.neutral("output_kind", |value| {
        value.as_u64().is_some_and(|kind| kind <= 2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn take(value: Value, dialect: Dialect) -> Result<Params, ApiError> {
        let Value::Object(map) = value else {
            panic!("not an object")
        };
        let mut fields = Fields::new(map);
        let params = Params::take(&mut fields, dialect, &Limits::default(), LogprobsMode::Processed)?;
        fields.finish()?;
        Ok(params)
    }

    #[test]
    fn everything_is_taken_by_its_name() {
        let params = take(
            json!({
                "n": 4, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25,
                "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": -1,
                "stop": "x", "stop_token_ids": [5], "include_stop_str_in_output": true, "ignore_eos": true,
                "logprobs": 0, "stream": true, "stream_options": { "include_usage": true },
                "return_token_ids": true, "return_tokens_as_token_ids": true,
            }),
            Dialect::Completions,
        );
        let expected = Params {
            sampling: SamplingParams {
                max_new_tokens: 7,
                min_new_tokens: 2,
                temperature: 0.5,
                top_k: 3,
                top_p: 0.75,
                min_p: 0.25,
                repetition_penalty: 1.5,
                presence_penalty: 0.5,
                frequency_penalty: -0.5,
                seed: Some(u64::MAX),
                stop_token_ids: vec![5],
                stop: vec!["x".into()],
                include_stop_str_in_output: true,
                ignore_eos: true,
                top_logprobs: 0,
            },
            max_tokens: Some(7),
            n: 4,
            logprobs: Some(0),
            stream: true,
            include_usage: true,
            return_token_ids: true,
            tokens_as_ids: true,
        };
        assert_eq!(params, Ok(expected));
    }

    #[test]
    fn defaults_are_those_of_openai() {
        let params = take(json!({}), Dialect::Completions).expect("works");
        assert_eq!(
            (params.sampling.temperature, params.max_tokens, params.logprobs),
            (1.0, Some(16), None)
        );
        let params = take(
            json!({ "max_tokens": 3, "max_completion_tokens": 4 }),
            Dialect::Chat,
        )
        .expect("works");
        assert_eq!((params.max_tokens, params.logprobs), (Some(4), None));
        assert_eq!(take(json!({}), Dialect::Chat).expect("works").max_tokens, None);
    }

    #[test]
    fn what_changes_the_result_and_is_not_there_is_refused_by_name() {
        for (name, value) in [
            ("logit_bias", json!({ "5": 1 })),
            ("best_of", json!(3)),
            ("echo", json!(true)),
            ("suffix", json!("x")),
            ("response_format", json!({ "type": "json_object" })),
            ("structured_outputs", json!({ "regex": "a" })),
            ("prompt_logprobs", json!(1)),
            ("use_beam_search", json!(true)),
            ("skip_special_tokens", json!(false)),
            ("guided_json", json!({})),
            ("temprature", json!(0)),
            ("temperature", json!(-1)),
            ("temperature", json!("hot")),
            ("top_p", json!(0)),
            ("n", json!(0)),
            ("n", json!(257)),
            ("n", json!(1.5)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-1)),
            ("seed", json!(0.5)),
            ("stop", json!(5)),
            ("stop", json!([""])),
            ("stop", json!(vec!["x"; 257])),
            ("stop", json!(["x".repeat(9000), "y".repeat(9000)])),
            ("logprobs", json!(21)),
            ("stream_options", json!({ "continuous": true })),
        ] {
            let error = take(json!({ name: value }), Dialect::Completions).expect_err(name);
            assert_eq!(error.status.as_u16(), 400, "{name}");
            assert_eq!(error.param.as_deref(), Some(name), "{}", error.message);
        }
        for (name, value) in [
            ("logit_bias", json!({})),
            ("best_of", json!(1)),
            ("echo", json!(false)),
            ("response_format", json!({ "type": "text" })),
            ("user", json!("u")),
            ("guided_json", json!(null)),
        ] {
            assert!(
                take(json!({ name: value }), Dialect::Completions).is_ok(),
                "{name}"
            );
        }
    }

    #[test]
    fn alternatives_are_given_only_where_they_are_known() {
        let ask = |extra: Value| {
            let mut body = json!({ "logprobs": 2 });
            let (Value::Object(body), Value::Object(extra)) = (&mut body, extra) else {
                panic!("objects")
            };
            body.extend(extra);
            let params = take(Value::Object(body.clone()), Dialect::Completions)?;
            Ok::<_, ApiError>(params.reported(LogprobsMode::Processed))
        };
        assert_eq!(ask(json!({})), Ok(Reported::Tempered(1.0)));
        assert_eq!(ask(json!({ "temperature": 0.7 })), Ok(Reported::Tempered(0.7)));
        assert_eq!(
            ask(json!({ "temperature": 0, "top_p": 0.5 })),
            Ok(Reported::Policy)
        );
        assert!(ask(json!({ "top_p": 0.5 })).is_err());
        assert!(ask(json!({ "presence_penalty": 0.5 })).is_err());
        let error = take(json!({ "top_logprobs": 2 }), Dialect::Chat).expect_err("logprobs is off");
        assert_eq!(error.param.as_deref(), Some("top_logprobs"));
    }
}
