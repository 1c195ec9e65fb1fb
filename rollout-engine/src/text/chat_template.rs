//! Chat templates, rendered as transformers renders them.
//!
//! A model folder names its template in `chat_template.jinja` (which wins) or in `tokenizer_config.json`, there
//! either one string or a list of named ones, of which `tool_use` serves conversations with tools. Templates are
//! written for Python's Jinja2; what they may rely on and MiniJinja does not bring by itself is added here:
//! string methods, `tojson` in the style of `json.dumps`, `raise_exception`, `strftime_now`, Python's way of printing
//! values, `{% generation %}` blocks, loop controls.

use std::path::Path;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value as Json};

use super::python::{self, JsonStyle};
use crate::Error;
use crate::request::ChatPrompt;

/// A template may run this many instructions; a conversation of a thousand messages takes under 1 % of it. A
/// template that loops without end is stopped with an error.
const FUEL: u64 = 20_000_000;
/// Variables that a [`ChatPrompt`] sets by fields of their own: among its further variables they would have no effect.
const OWN_VARIABLES: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// One compiled template.
///
/// ```
/// use rollout_engine::ChatPrompt;
/// use rollout_engine::text::ChatTemplate;
///
/// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
/// let template = ChatTemplate::new(source, Default::default())?;
/// let chat = ChatPrompt::new(vec![serde_json::json!({ "role": "user", "content": "Hello" })]);
/// assert_eq!(template.render(&chat)?, "<user>Hello");
/// # Ok::<(), rollout_engine::Error>(())
/// ```
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token`, … as template variables.
    special_tokens: Map<String, Json>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

/// The templates of a model folder.
///
/// ```
/// use rollout_engine::text::ChatTemplates;
/// use rollout_engine::{ChatPrompt, bundled};
///
/// let templates = ChatTemplates::from_dir(bundled::model_dir()?)?;
/// let chat = ChatPrompt::new(vec![serde_json::json!({ "role": "user", "content": "Hello" })]);
/// assert!(templates.render(&chat)?.contains("Hello"));
/// # Ok::<(), rollout_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplates {
    default: Option<ChatTemplate>,
    tool_use: Option<ChatTemplate>,
}

impl ChatTemplate {
    /// Compiles Jinja source. `special_tokens` become variables of the template (`bos_token` and the like).
    ///
    /// # Errors
    /// The source is not a valid template.
    pub fn new(source: &str, special_tokens: Map<String, Json>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|out, _state, value| {
            out.write_str(&python::to_str(value))
                .map_err(minijinja::Error::from)
        });
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned("chat", without_generation_tags(source))
            .map_err(template_error)?;
        Ok(Self {
            environment,
            special_tokens,
        })
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// The template raised an exception, or met a value it cannot use; or one of the prompt's variables has the name of what the
    /// prompt says itself (`messages`, `tools`, `add_generation_prompt`).
    pub fn render(&self, chat: &ChatPrompt) -> Result<String, Error> {
        if let Some(name) = OWN_VARIABLES
            .iter()
            .find(|name| chat.variables.contains_key(**name))
        {
            return Err(Error::ChatTemplate {
                reason: format!(
                    "the variable `{name}` is set by the conversation itself: leave it out of the others"
                ),
            });
        }
        let mut variables = self.special_tokens.clone();
        variables.extend(chat.variables.clone());
        variables.insert("messages".into(), Json::Array(chat.messages.clone()));
        variables.insert("tools".into(), chat.tools.clone().map_or(Json::Null, Json::Array));
        variables.entry("documents").or_insert(Json::Null);
        variables.insert(
            "add_generation_prompt".into(),
            Json::Bool(chat.add_generation_prompt),
        );
        let template = self.environment.get_template("chat").map_err(template_error)?;
        template
            .render(Value::from_serialize(&variables))
            .map_err(template_error)
    }
}

impl ChatTemplates {
    /// Reads the templates of a model folder; a folder without any gives an empty set.
    ///
    /// # Errors
    /// A file cannot be read, is not what it should be, or holds an invalid template; the message names it.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let config_path = dir.join("tokenizer_config.json");
        let config = match read_optional(&config_path)? {
            Some(text) => serde_json::from_str::<Map<String, Json>>(&text)
                .map_err(|e| Error::invalid_file(&config_path, format!("not a JSON object: {e}")))?,
            None => Map::new(),
        };
        let special_tokens = special_tokens(&config);
        let compile = |path: &Path, source: &str| {
            ChatTemplate::new(source, special_tokens.clone()).map_err(|e| Error::invalid_file(path, e))
        };

        let jinja_path = dir.join("chat_template.jinja");
        let mut templates = Self {
            default: None,
            tool_use: None,
        };
        if let Some(source) = read_optional(&jinja_path)? {
            templates.default = Some(compile(&jinja_path, &source)?);
            let tool_path = dir.join("additional_chat_templates").join("tool_use.jinja");
            if let Some(source) = read_optional(&tool_path)? {
                templates.tool_use = Some(compile(&tool_path, &source)?);
            }
            return Ok(templates);
        }
        match config.get("chat_template") {
            None | Some(Json::Null) => {}
            Some(Json::String(source)) => templates.default = Some(compile(&config_path, source)?),
            Some(Json::Array(named)) => {
                for entry in named {
                    let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str())
                    else {
                        return Err(Error::invalid_file(
                            &config_path,
                            "an entry of the list `chat_template` lacks `name` or `template`",
                        ));
                    };
                    match name {
                        "default" => templates.default = Some(compile(&config_path, source)?),
                        "tool_use" => templates.tool_use = Some(compile(&config_path, source)?),
                        _ => {}
                    }
                }
            }
            Some(_) => {
                return Err(Error::invalid_file(
                    &config_path,
                    "`chat_template` is neither a string nor a list",
                ));
            }
        }
        Ok(templates)
    }

    /// Whether conversations can be rendered.
    pub fn is_empty(&self) -> bool {
        self.default.is_none() && self.tool_use.is_none()
    }

    /// The text of a conversation, through the template for tools if there is one and the conversation has tools.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`] without a template that serves; otherwise as for [`ChatTemplate::render`].
    pub fn render(&self, chat: &ChatPrompt) -> Result<String, Error> {
        let for_tools = self.tool_use.as_ref().filter(|_| chat.tools.is_some());
        for_tools
            .or(self.default.as_ref())
            .ok_or(Error::NoChatTemplate)?
            .render(chat)
    }
}

fn read_optional(path: &Path) -> Result<Option<String>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path, e)),
    }
}

/// `…_token` entries, each a string or an object with the string in `content`.
fn special_tokens(config: &Map<String, Json>) -> Map<String, Json> {
    let text = |value: &Json| match value {
        Json::String(text) => Some(Json::String(text.clone())),
        Json::Object(object) => object
            .get("content")
            .filter(|content| content.is_string())
            .cloned(),
        _ => None,
    };
    let mut tokens = Map::new();
    for (name, value) in config {
        if let (true, Some(token)) = (name.ends_with("_token"), text(value)) {
            tokens.insert(name.clone(), token);
        }
    }
    if let Some(Json::Array(list)) = config.get("additional_special_tokens") {
        tokens.insert(
            "additional_special_tokens".into(),
            Json::Array(list.iter().filter_map(text).collect()),
        );
    }
    tokens
}

/// transformers lets templates mark assistant text with `{% generation %}…{% endgeneration %}`, which prints like
/// the body alone. A condition that is always true does the same, white space control included.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(close) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inner = &tag[2..close];
        let replacement = match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => Some(("generation", "if true")),
            "endgeneration" => Some(("endgeneration", "endif")),
            _ => None,
        };
        out.push_str("{%");
        match replacement {
            Some((name, with)) => out.push_str(&inner.replacen(name, with, 1)),
            None => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &tag[close + 2..];
    }
    out.push_str(rest);
    out
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(minijinja::Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two strings",
            ));
        }
    };
    let style = JsonStyle {
        indent,
        item_separator,
        key_separator,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    Ok(Value::from_safe_string(python::to_json(value, &style)?))
}

/// The local time, formatted by `strftime`.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// One line: the detail of the error, without the name of the only template there is.
fn template_error(error: minijinja::Error) -> Error {
    let line = error
        .line()
        .map_or(String::new(), |line| format!(" (template line {line})"));
    let reason = match error.detail() {
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => detail.to_string(),
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    Error::ChatTemplate {
        reason: format!("{reason}{line}").replace('\n', " "),
    }
}
