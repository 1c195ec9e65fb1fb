//! Python's `re` for the patterns of an adapter configuration.
//!
//! PEFT pastes configuration strings into larger expressions and hands them to `re.match` or `re.fullmatch`. The
//! same text is built here and translated where the two dialects read it differently.

use crate::{Error, Result};
use fancy_regex::Regex;

/// A pattern that is anchored at both ends, as `re.fullmatch` is.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    regex: Regex,
    field: &'static str,
    source: String,
}

impl Pattern {
    /// `re.fullmatch(source, …)`.
    pub(crate) fn full(field: &'static str, source: &str) -> Result<Self> {
        Self::compile(field, source, true)
    }

    /// `re.match(source, …)`.
    pub(crate) fn prefix(field: &'static str, source: &str) -> Result<Self> {
        Self::compile(field, source, false)
    }

    fn compile(field: &'static str, source: &str, full: bool) -> Result<Self> {
        let bad = |reason: String| Error::Pattern {
            field,
            pattern: source.to_owned(),
            reason,
        };
        if source.len() > MAX_PATTERN {
            return Err(Error::Pattern {
                field,
                pattern: source.chars().take(60).collect(),
                reason: format!("{} bytes are more than the {MAX_PATTERN} allowed", source.len()),
            });
        }
        let (flags, body) = split_flags(source).map_err(bad)?;
        let body = translate(body);
        // In verbose mode a trailing comment would swallow what follows, hence the line break.
        let close = if flags.contains('x') { "\n)" } else { ")" };
        let flags = if flags.is_empty() {
            String::new()
        } else {
            format!("(?{flags})")
        };
        let text = format!(r"{flags}\A(?:{body}{close}{}", if full { r"\z" } else { "" });
        let regex = Regex::new(&text).map_err(|e| bad(e.to_string()))?;
        Ok(Self {
            regex,
            field,
            source: source.to_owned(),
        })
    }

    /// Whether `name` matches. Errors: the pattern backtracks beyond the engine's limit.
    pub(crate) fn matches(&self, name: &str) -> Result<bool> {
        self.regex.is_match(name).map_err(|e| self.failed(&e))
    }

    /// The text of group 1, if the pattern matches.
    pub(crate) fn group(&self, name: &str) -> Result<Option<String>> {
        let captures = self.regex.captures(name).map_err(|e| self.failed(&e))?;
        Ok(captures.and_then(|c| c.get(1).map(|g| g.as_str().to_owned())))
    }

    fn failed(&self, error: &fancy_regex::Error) -> Error {
        Error::Pattern {
            field: self.field,
            pattern: self.source.clone(),
            reason: error.to_string(),
        }
    }
}

/// Longer patterns are refused: nothing sensible needs them and compiling them takes memory.
const MAX_PATTERN: usize = 64 * 1024;

/// Takes a leading group of global flags, `(?ims)`, off the pattern: Python applies it to the whole expression.
fn split_flags(source: &str) -> std::result::Result<(String, &str), String> {
    let Some(rest) = source.strip_prefix("(?") else {
        return Ok((String::new(), source));
    };
    let Some(end) = rest.find(|c: char| !c.is_ascii_alphabetic()) else {
        return Ok((String::new(), source));
    };
    if end == 0 || !rest[end..].starts_with(')') {
        return Ok((String::new(), source));
    }
    let mut flags = String::new();
    for flag in rest[..end].chars() {
        match flag {
            'i' | 'm' | 's' | 'x' => flags.push(flag),
            'u' => {}
            _ => return Err(format!("flag {flag:?} is not supported")),
        }
    }
    Ok((flags, &rest[end + 1..]))
}

/// Rewrites what Python and Rust read differently: `\Z` is the very end, and inside a class `[`, `&&`, `--`, `~~`
/// are plain characters.
fn translate(body: &str) -> String {
    let mut out = String::with_capacity(body.len() + 8);
    let mut chars = body.chars().peekable();
    let mut in_class = false;
    // A `]` directly after `[` or `[^` is a member of the class.
    let mut class_start = false;
    while let Some(c) = chars.next() {
        let at_start = std::mem::take(&mut class_start);
        match c {
            '\\' => match chars.next() {
                Some('Z') if !in_class => out.push_str(r"\z"),
                Some(escaped) => {
                    out.push('\\');
                    out.push(escaped);
                }
                None => out.push('\\'),
            },
            '[' if !in_class => {
                in_class = true;
                class_start = true;
                out.push('[');
                if chars.peek() == Some(&'^') {
                    chars.next();
                    out.push('^');
                }
            }
            ']' if in_class && at_start => out.push_str(r"\]"),
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '[' => out.push_str(r"\["),
            '&' | '~' if in_class => {
                out.push('\\');
                out.push(c);
            }
            '-' if in_class && chars.peek() == Some(&'-') => out.push_str(r"\-"),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(pattern: &str, name: &str) -> bool {
        Pattern::full("target_modules", pattern)
            .unwrap()
            .matches(name)
            .unwrap()
    }

    #[test]
    fn the_whole_name_must_match() {
        assert!(full("a|ab", "ab"));
        assert!(!full("a|ab", "abc"));
        assert!(!full("b", "ab"));
        assert!(full(r".*\.q_proj", "model.layers.0.self_attn.q_proj"));
        assert!(!full(r"q_proj", "model.layers.0.self_attn.q_proj"));
    }

    #[test]
    fn python_constructs() {
        assert!(full(r"(?P<a>x)(?P=a)", "xx"));
        assert!(full(r"a(?!b)\w", "ac"));
        assert!(!full(r"a(?!b)\w", "ab"));
        assert!(full(r"(?<=)a\Z", "a"));
        assert!(full(r"(?i)Q_PROJ", "q_proj"));
        assert!(full("(?x) q_proj # the query", "q_proj"));
        assert!(full(r"[]a]+", "]a"));
        assert!(full(r"[[a]+", "[a"));
        assert!(full(r"[a&&b]+", "a&b"));
        assert!(full(r"[^]]", "x"));
        assert!(full(r"a++b", "aab"));
    }

    #[test]
    fn bad_patterns_are_errors() {
        for bad in ["(", "[", "a{2,1}", "*", "(?L)a"] {
            assert!(
                matches!(Pattern::full("target_modules", bad), Err(Error::Pattern { .. })),
                "{bad}"
            );
        }
    }

    #[test]
    fn catastrophic_backtracking_ends_in_an_error() {
        let pattern = Pattern::full("target_modules", r"(?:(a+)+(?!c))+\1b").unwrap();
        assert!(matches!(
            pattern.matches(&"a".repeat(200)),
            Err(Error::Pattern { .. })
        ));
    }
}
