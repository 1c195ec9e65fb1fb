//! The fields of a request's body: each is taken by name, and none may be left over.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields that cannot change a completion and are accepted with any value: who asks, how it is billed, stored, logged,
/// ordered or cached (caches are keyed by policy here). [`harmless_fields`](super::harmless_fields) gives the list.
pub(super) const HARMLESS: [&str; 14] = [
    "cache_salt",
    "kv_transfer_params",
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
    "include_reasoning",
];

/// A JSON object whose fields are being taken.
#[derive(Debug)]
pub(super) struct Fields {
    map: Map<String, Value>,
    /// Where the object stands within the body, for messages: empty, or `sampling_params.`.
    prefix: &'static str,
}

impl Fields {
    pub(super) fn new(map: Map<String, Value>) -> Self {
        Self { map, prefix: "" }
    }

    /// The fields of an object within this one.
    pub(super) fn nested(&mut self, name: &'static str, prefix: &'static str) -> Result<Self, ApiError> {
        let map = self.take::<Map<String, Value>>(name)?.unwrap_or_default();
        Ok(Self { map, prefix })
    }

    /// A field's value; `None` if it is absent or null.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        match self.map.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|error| ApiError::bad_param(format!("{}{name}", self.prefix), in_words(&error))),
        }
    }

    /// As [`Fields::take`], but the field must be there.
    pub(super) fn require<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take(name)?
            .ok_or_else(|| ApiError::bad_param(format!("{}{name}", self.prefix), "this field is required"))
    }

    /// A switch: true or false, also as the words that a query has for them, in any case.
    pub(super) fn take_flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take::<Value>(name)? {
            None => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(on)),
            Some(Value::String(word)) if word.eq_ignore_ascii_case("true") => Ok(Some(true)),
            Some(Value::String(word)) if word.eq_ignore_ascii_case("false") => Ok(Some(false)),
            Some(_) => Err(ApiError::bad_param(
                format!("{}{name}", self.prefix),
                "use true or false",
            )),
        }
    }

    /// A time above 0: a number of seconds, also as text, as a query has it.
    pub(super) fn take_seconds(&mut self, name: &str) -> Result<Option<Duration>, ApiError> {
        let seconds = match self.take::<Value>(name)? {
            None => return Ok(None),
            Some(Value::String(text)) => text.parse().ok(),
            Some(value) => value.as_f64(),
        };
        match seconds.map(Duration::try_from_secs_f64) {
            Some(Ok(time)) if !time.is_zero() => Ok(Some(time)),
            _ => Err(ApiError::bad_param(
                format!("{}{name}", self.prefix),
                "use a number of seconds above 0, or leave it out",
            )),
        }
    }

    /// Takes a field that is not implemented and must therefore have a value that changes nothing.
    pub(super) fn neutral(
        &mut self,
        name: &str,
        is_neutral: impl Fn(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.map.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if is_neutral(&value) => Ok(()),
            Some(value) => Err(ApiError::bad_param(
                format!("{}{name}", self.prefix),
                format_args!("{value} is not supported: leave the field out"),
            )
            .code("unsupported_parameter")),
        }
    }

    /// Refuses whatever has not been taken, except harmless fields and nulls.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        let unknown: Vec<_> = self
            .map
            .iter()
            .filter(|(name, value)| !value.is_null() && !HARMLESS.contains(&name.as_str()))
            .map(|(name, _)| format!("{}{name}", self.prefix))
            .collect();
        match unknown.first() {
            None => Ok(()),
            Some(first) => Err(ApiError {
                param: Some(first.clone()),
                ..ApiError::bad_request(format!(
                    "not known, and it could change the result: {}",
                    unknown.join(", ")
                ))
            }
            .code("unknown_parameter")),
        }
    }
}

/// What serde says of a value of the wrong type, in the words of JSON instead of Rust.
pub(super) fn in_words(error: &serde_json::Error) -> String {
    let words = [
        ("a whole number", &["usize", "u32", "u64", "i64"][..]),
        ("a number", &["f32", "f64"]),
        ("a list", &["a sequence"]),
        ("an object", &["a map"]),
    ];
    let mut text = error.to_string();
    for (word, names) in words {
        for name in names {
            text = text.replace(&format!("expected {name}"), &format!("expected {word}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        match value {
            Value::Object(map) => Fields::new(map),
            other => panic!("{other} is not an object"),
        }
    }

    #[test]
    fn what_is_left_over_is_refused_by_name_unless_harmless_or_null() {
        assert_eq!(
            fields(json!({ "user": "me", "typical_p": null })).finish(),
            Ok(())
        );
        let error = fields(json!({ "user": "me", "typical_p": 0.9, "mirostat": 2 })).finish();
        let error = error.expect_err("two are unknown");
        assert_eq!(error.param.as_deref(), Some("typical_p"));
        assert!(error.message.contains("typical_p, mirostat"), "{}", error.message);
    }

    #[test]
    fn a_value_of_the_wrong_type_names_its_field() {
        let mut nested = fields(json!({ "sampling_params": { "n": "two" } }));
        let mut nested = nested
            .nested("sampling_params", "sampling_params.")
            .expect("an object");
        let error = nested.take::<usize>("n").expect_err("a string");
        assert_eq!(error.param.as_deref(), Some("sampling_params.n"));
        assert!(
            error.message.ends_with("expected a whole number"),
            "{}",
            error.message
        );
        let error = nested.require::<usize>("m").expect_err("absent");
        assert!(error.message.contains("required"), "{}", error.message);
    }

    #[test]
    fn neutral_values_pass() {
        let zero = |value: &Value| value.as_f64() == Some(0.0);
        let mut fields = fields(json!({ "a": 0, "b": 0.0, "c": null, "d": 0.5 }));
        for name in ["a", "b", "c", "absent"] {
            assert_eq!(fields.neutral(name, zero), Ok(()));
        }
        assert!(fields.neutral("d", zero).is_err());
    }
}
