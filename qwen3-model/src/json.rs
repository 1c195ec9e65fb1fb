//! Reading JSON files so that every error names the file and the field.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Configuration files are a few kilobytes and the largest index a few hundred.
const MAX_JSON_BYTES: u64 = 64 << 20;

pub(crate) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    let io = |source| Error::Io {
        path: path.to_owned(),
        source,
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io)?;
    file.take(MAX_JSON_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        let problem = format!("larger than {MAX_JSON_BYTES} bytes");
        return Err(Error::Json {
            path: path.to_owned(),
            problem,
        });
    }
    parse_object(path, &bytes)
}

pub(crate) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    let problem = match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => return Ok(map),
        Ok(other) => format!("holds {}, not an object", kind(&other)),
        Err(error) => format!("not valid JSON: {error}"),
    };
    Err(Error::Json {
        path: path.to_owned(),
        problem,
    })
}

/// What a JSON value is, for messages.
pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) => n.to_string(),
        Value::String(s) if s.chars().count() <= 60 => format!("{s:?}"),
        Value::String(_) => "a long string".into(),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// The fields of one object in a file. A field that is null counts as absent, as in the files
/// that transformers writes.
pub(crate) struct Fields<'a> {
    path: &'a Path,
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self {
            path,
            prefix: String::new(),
            map,
        }
    }

    pub(crate) fn error(&self, field: &str, problem: impl Into<String>) -> Error {
        let field = format!("{}{field}", self.prefix);
        Error::Field {
            path: self.path.to_owned(),
            field,
            problem: problem.into(),
        }
    }

    pub(crate) fn value(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// The value as it stands, null included.
    pub(crate) fn raw(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    fn typed<T>(&self, field: &str, what: &str, f: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(field) else {
            return Ok(None);
        };
        match f(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.error(field, format!("is {}, expected {what}", kind(value)))),
        }
    }

    pub(crate) fn string(&self, field: &str) -> Result<Option<&'a str>> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(crate) fn boolean(&self, field: &str) -> Result<Option<bool>> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn array(&self, field: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(field, "a list", Value::as_array)
    }

    pub(crate) fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        let map = self.typed(field, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields {
            path: self.path,
            prefix: format!("{}{field}.", self.prefix),
            map,
        }))
    }

    /// A finite number above zero.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number above 0", |value| {
            value.as_f64().filter(|x| x.is_finite() && *x > 0.0)
        })
    }

    /// A finite number.
    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number", |value| {
            value.as_f64().filter(|x| x.is_finite())
        })
    }

    /// A whole number, 0 or more.
    pub(crate) fn count(&self, field: &str) -> Result<Option<usize>> {
        self.typed(field, "a whole number", |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number from 1 to `max`.
    pub(crate) fn size(&self, field: &str, max: usize) -> Result<Option<usize>> {
        self.typed(field, &format!("a whole number from 1 to {max}"), |value| {
            value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| (1..=max).contains(n))
        })
    }

    /// One token id, a list of them, or nothing.
    pub(crate) fn token_ids(&self, field: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(field, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            single => id(single).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}
