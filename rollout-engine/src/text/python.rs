//! Python's ways of writing values, which chat templates rely on: `json.dumps` and `str`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write as _;

/// Options of Python's `json.dumps` as templates pass them to `tojson`.
pub(super) struct JsonStyle {
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

/// `json.dumps(value, …)`.
pub(super) fn to_json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    if depth > 200 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: nested more than 200 levels deep",
        ));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value, ["NaN", "Infinity", "-Infinity"]),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, '[', ']', items.len(), style, depth, |out, i| {
                write_json(out, &items[i], style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut entries = Vec::new();
            for key in value.try_iter()? {
                let name = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_string(),
                    ValueKind::None => "null".to_string(),
                    ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_string(),
                    _ => to_str(&key),
                };
                entries.push((name, value.get_item(&key)?));
            }
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_items(out, '{', '}', entries.len(), style, depth, |out, i| {
                write_json_string(out, &entries[i].0, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_json(out, &entries[i].1, style, depth + 1)
            })?;
        }
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: a value of type {kind} has no JSON"),
            ));
        }
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    open: char,
    close: char,
    len: usize,
    style: &JsonStyle,
    depth: usize,
    mut write: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(open);
    for i in 0..len {
        if i > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1);
        write(out, i)?;
    }
    if len > 0 {
        new_line(out, style, depth);
    }
    out.push(close);
    Ok(())
}

fn new_line(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn write_number(out: &mut String, value: &Value, special: [&str; 3]) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
    } else if let Ok(number) = f64::try_from(value.clone()) {
        out.push_str(&match number {
            n if n.is_nan() => special[0].to_string(),
            n if n.is_infinite() => special[if n > 0.0 { 1 } else { 2 }].to_string(),
            n => float_repr(n),
        });
    } else {
        let _ = write!(out, "{value}");
    }
}

/// `repr(float)`: the shortest digits that read back the same; an exponent from 1e16 on and below 1e-4.
fn float_repr(number: f64) -> String {
    let shortest = format!("{number:e}");
    let n_digits = shortest
        .split('e')
        .next()
        .map_or(0, |digits| digits.chars().filter(char::is_ascii_digit).count());
    // Of two that are equally short and near Python takes the even one, as rounding to so many digits does.
    let even = format!("{number:.*e}", n_digits.saturating_sub(1));
    let scientific = match even.parse() == Ok(number) {
        true => even,
        false => shortest,
    };
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", digits),
    };
    let digits = digits.replace('.', "");
    match usize::try_from(exponent) {
        Err(_) => {
            let zeros = "0".repeat(exponent.unsigned_abs() as usize - 1);
            format!("{sign}0.{zeros}{digits}")
        }
        Ok(whole) if digits.len() <= whole + 1 => format!("{sign}{digits:0<width$}.0", width = whole + 1),
        Ok(whole) => format!("{sign}{}.{}", &digits[..=whole], &digits[whole + 1..]),
    }
}

/// What `{{ value }}` prints: `str(value)`.
pub(super) fn to_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_string(),
        _ => {
            let mut out = String::new();
            write_repr(&mut out, value, 0);
            out
        }
    }
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > 200 {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value, ["nan", "inf", "-inf"]),
        ValueKind::String => write_repr_string(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn write_repr_string(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn style() -> JsonStyle {
        JsonStyle {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }

    fn value(json: &str) -> Value {
        Value::from_serialize(serde_json::from_str::<serde_json::Value>(json).expect("test JSON"))
    }

    // The expected strings were printed by Python 3.12's json.dumps(..., ensure_ascii=False).
    #[test]
    fn json_is_written_as_python_writes_it() {
        for (given, expected) in [
            (
                r#"{"b":1,"a":[1,2.0,-0.5],"n":null,"t":true}"#,
                r#"{"b": 1, "a": [1, 2.0, -0.5], "n": null, "t": true}"#,
            ),
            (
                r#"[1e16, 1e15, 1e-4, 1e-5, 1.5e300, 0.1, 123456789012345678]"#,
                "[1e+16, 1000000000000000.0, 0.0001, 1e-05, 1.5e+300, 0.1, 123456789012345678]",
            ),
            // Numbers that are easily read one unit too high or too low.
            (
                "[9579015.799741179, 29596969789.342854, 7.011164773394663e-11, 0.30000000000000004]",
                "[9579015.799741179, 29596969789.342854, 7.011164773394663e-11, 0.30000000000000004]",
            ),
            // Half-way between two decimals that read back the same.
            (
                "[2242484753866457.25, -2242484753866457.75, 5e-324, 9007199254740993.0]",
                "[2242484753866457.2, -2242484753866457.8, 5e-324, 9007199254740992.0]",
            ),
            (
                "[0.0, -0.0, 1.0, -12.5, 100.0, 0.001, 123456789.0, 1e15, 9999999999999998.0, 0.00012]",
                "[0.0, -0.0, 1.0, -12.5, 100.0, 0.001, 123456789.0, 1000000000000000.0, 9999999999999998.0, 0.00012]",
            ),
            (
                r#"["<a href='x'>&amp;</a>", "é世🌍", "\u0001\u007f\b\f\n\r\t\"\\/"]"#,
                "[\"<a href='x'>&amp;</a>\", \"é世🌍\", \"\\u0001\u{7f}\\b\\f\\n\\r\\t\\\"\\\\/\"]",
            ),
            ("[]", "[]"),
            ("{}", "{}"),
            (r#"{"a": {}}"#, r#"{"a": {}}"#),
        ] {
            assert_eq!(to_json(&value(given), &style()).expect("has JSON"), expected);
        }
    }

    #[test]
    fn json_indentation_keeps_empty_containers_short() {
        let style = JsonStyle {
            indent: Some("  ".into()),
            item_separator: ",".into(),
            ..style()
        };
        let text = to_json(&value(r#"{"a":[1,{"b":2}],"c":{},"d":[]}"#), &style).expect("has JSON");
        assert_eq!(
            text,
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": {},\n  \"d\": []\n}"
        );
    }

    #[test]
    fn ascii_escapes_use_surrogate_pairs() {
        let style = JsonStyle {
            ensure_ascii: true,
            ..style()
        };
        assert_eq!(
            to_json(&value(r#""é🌍""#), &style).expect("has JSON"),
            r#""\u00e9\ud83c\udf0d""#
        );
    }

    #[test]
    fn printed_values_look_like_python() {
        let v = value(r#"{"a": [true, null, "it's", 1.0], "b": "x\ny"}"#);
        assert_eq!(to_str(&v), r#"{'a': [True, None, "it's", 1.0], 'b': 'x\ny'}"#);
    }
}
