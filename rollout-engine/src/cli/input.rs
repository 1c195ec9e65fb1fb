//! Prompts from the command line and from JSON lines.

use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::CliError;
use super::args::GenerateArgs;
use crate::bundled;
use crate::request::{ChatPrompt, Prompt, Request, SamplingParams};

/// Largest prompts file, in bytes.
const MAX_FILE: u64 = 4 << 30;

/// One request and how to speak of it.
#[derive(Debug, PartialEq)]
pub(super) struct Job {
    /// Echoed in the output; the number of the prompt, from 0, if it was not given.
    pub(super) id: Value,
    /// Line of the input, from 1, if it came from a file.
    pub(super) line: Option<usize>,
    /// What to print above the completion.
    pub(super) title: String,
    pub(super) request: Request,
}

/// A line of the input. Fields that are not listed are refused, since ignoring them could change what is generated.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Value>>,
    prompt_token_ids: Option<Vec<u32>>,
    tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// How text prompts are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextMode {
    Chat,
    Raw,
    Default,
}

/// The requests that the command line asks for, all of them with this `sampling`. `has_template` tells whether the model has a chat template.
pub(super) fn jobs(
    args: &GenerateArgs,
    sampling: &SamplingParams,
    has_template: bool,
) -> Result<Vec<Job>, CliError> {
    let mode = match (args.chat, args.raw) {
        (true, _) => TextMode::Chat,
        (_, true) => TextMode::Raw,
        _ => TextMode::Default,
    };
    let mut jobs = match (&args.prompt, &args.prompts) {
        (Some(text), _) => {
            let chat = mode == TextMode::Chat || (mode == TextMode::Default && has_template);
            vec![job(0, None, None, text_prompt(text, chat))]
        }
        (None, Some(path)) => parse_lines(&read(path)?, mode, path)?,
        (None, None) => {
            let chat = mode == TextMode::Chat || (mode == TextMode::Default && has_template);
            let prompt = |text: &&str| match chat {
                true => Prompt::Chat(ChatPrompt::new(vec![
                    serde_json::json!({"role": "system", "content": bundled::SYSTEM_PROMPT}),
                    serde_json::json!({"role": "user", "content": text}),
                ])),
                false => Prompt::Text(text.to_string()),
            };
            bundled::PROMPTS
                .iter()
                .enumerate()
                .map(|(i, text)| job(i, None, None, prompt(text)))
                .collect()
        }
    };
    for job in &mut jobs {
        job.request.sampling = sampling.clone();
        job.request.n = args.n;
    }
    Ok(jobs)
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let result = if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_FILE).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes))
    };
    match result {
        Ok(_) if bytes.len() as u64 == MAX_FILE => Err(CliError::Failed(format!(
            "{}: more than 4 GiB of prompts: split the file",
            path.display()
        ))),
        Ok(_) => Ok(bytes),
        Err(e) => Err(CliError::Failed(format!("--prompts {}: {e}", path.display()))),
    }
}

fn parse_lines(bytes: &[u8], mode: TextMode, path: &Path) -> Result<Vec<Job>, CliError> {
    let fail =
        |line: usize, reason: String| CliError::Failed(format!("{} line {line}: {reason}", path.display()));
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let mut jobs = Vec::new();
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let number = index + 1;
        let line = std::str::from_utf8(line)
            .map_err(|_| fail(number, "not UTF-8 text".into()))?
            .trim();
        if line.is_empty() {
            continue;
        }
        const EXPECTED: &str =
            "expected an object with `id` (optional) and one of `prompt`, `messages`, `prompt_token_ids`";
        // serde would take a list as the fields in the order of their declaration.
        if line.starts_with('[') {
            return Err(fail(number, format!("a list; {EXPECTED}")));
        }
        let value: Line = serde_json::from_str(line).map_err(|e| {
            let reason = e.to_string();
            // The error's own "at line 1 column 7" speaks of the line alone.
            let reason = reason.replace(" at line 1 column ", " at column ");
            fail(number, format!("{reason}; {EXPECTED}"))
        })?;
        let id = value.id.clone();
        if !matches!(id, None | Some(Value::String(_) | Value::Number(_))) {
            return Err(fail(number, "`id` must be a string or a number".into()));
        }
        let prompt = line_prompt(value, mode).map_err(|reason| fail(number, reason.into()))?;
        jobs.push(job(jobs.len(), id, Some(number), prompt));
    }
    if jobs.is_empty() {
        return Err(CliError::Failed(format!(
            "{}: there are no prompts in it",
            path.display()
        )));
    }
    Ok(jobs)
}

fn line_prompt(line: Line, mode: TextMode) -> Result<Prompt, &'static str> {
    let forms = [
        line.prompt.is_some(),
        line.messages.is_some(),
        line.prompt_token_ids.is_some(),
    ];
    match forms.into_iter().filter(|&given| given).count() {
        0 => return Err("none of `prompt`, `messages`, `prompt_token_ids` is there: give one"),
        1 => {}
        _ => return Err("more than one of `prompt`, `messages`, `prompt_token_ids` is there: give one"),
    }
    if line.messages.is_none() && (line.tools.is_some() || line.chat_template_kwargs.is_some()) {
        return Err("`tools` and `chat_template_kwargs` need `messages`");
    }
    if let Some(messages) = line.messages {
        if mode == TextMode::Raw {
            return Err(
                "--raw was given, but `messages` need the chat template: give `prompt`, or leave --raw out",
            );
        }
        if messages.is_empty() || !messages.iter().all(Value::is_object) {
            return Err("`messages` must be a list of objects with `role` and `content`");
        }
        let mut chat = ChatPrompt::new(messages);
        chat.tools = line.tools;
        chat.variables = line.chat_template_kwargs.unwrap_or_default();
        if let Some(value) = chat.variables.shift_remove("add_generation_prompt") {
            chat.add_generation_prompt = value
                .as_bool()
                .ok_or("`add_generation_prompt` must be true or false")?;
        }
        return Ok(Prompt::Chat(chat));
    }
    match (line.prompt, line.prompt_token_ids) {
        (Some(text), _) => Ok(text_prompt(&text, mode == TextMode::Chat)),
        (None, ids) => Ok(Prompt::TokenIds(ids.unwrap_or_default())),
    }
}

fn text_prompt(text: &str, chat: bool) -> Prompt {
    if chat {
        Request::user(text).prompt
    } else {
        Prompt::Text(text.to_string())
    }
}

fn job(index: usize, id: Option<Value>, line: Option<usize>, prompt: Prompt) -> Job {
    let title = match &prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::TokenIds(ids) => format!("({} token ids)", ids.len()),
        Prompt::Chat(chat) => {
            let last = chat.messages.last().and_then(|message| message.get("content"));
            last.and_then(Value::as_str).unwrap_or("(messages)").to_string()
        }
    };
    Job {
        id: id.unwrap_or_else(|| index.into()),
        line,
        title,
        request: Request::new(prompt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Job>, String> {
        parse_lines(text.as_bytes(), TextMode::Default, Path::new("in.jsonl")).map_err(|e| e.to_string())
    }

    #[test]
    fn lines_of_all_three_forms_are_read() {
        let jobs = parse(concat!(
            "\u{feff}{\"id\": \"a\", \"prompt\": \"x\"}\r\n\n",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}], \"chat_template_kwargs\": {\"enable_thinking\": false}}\n",
            "{\"id\": 7, \"prompt_token_ids\": [1, 2]}",
        ))
        .expect("valid lines");
        assert_eq!(
            jobs.iter().map(|job| job.line).collect::<Vec<_>>(),
            [Some(1), Some(3), Some(4)]
        );
        assert_eq!(
            jobs.iter().map(|job| job.id.to_string()).collect::<Vec<_>>(),
            ["\"a\"", "1", "7"]
        );
        assert_eq!(jobs[0].request.prompt, Prompt::Text("x".into()));
        assert_eq!(jobs[2].request.prompt, Prompt::TokenIds(vec![1, 2]));
    }

    #[test]
    fn a_bad_line_is_named_by_its_number() {
        let good = "{\"prompt\": \"x\"}\n\n";
        for (bad, word) in [
            ("{", "EOF"),
            ("[]", "a list"),
            (
                "[null, \"x\", null, null, null, null]",
                "a list; expected an object",
            ),
            ("\"text\"", "expected"),
            ("{}", "none of"),
            ("{\"prompt\": \"x\", \"messages\": []}", "more than one"),
            ("{\"prompt\": 3}", "expected a string"),
            (
                "{\"prompt\": \"x\", \"temperature\": 1}",
                "unknown field `temperature`",
            ),
            ("{\"prompt_token_ids\": [-1]}", "integer `-1`"),
            ("{\"prompt_token_ids\": [4294967296]}", "integer `4294967296`"),
            ("{\"prompt_token_ids\": \"x\"}", "expected a sequence"),
            ("{\"messages\": []}", "list of objects"),
            ("{\"messages\": [1]}", "list of objects"),
            ("{\"prompt\": \"x\", \"tools\": []}", "need `messages`"),
            ("{\"id\": [1], \"prompt\": \"x\"}", "`id` must be"),
            ("{\"prompt\": \"x\"} {\"prompt\": \"y\"}", "trailing characters"),
        ] {
            let error = parse(&format!("{good}{bad}\n")).expect_err(bad);
            assert!(
                error.starts_with("in.jsonl line 3: ") && error.contains(word),
                "{bad}: {error}"
            );
        }
        assert!(parse("\n \n").expect_err("empty").contains("no prompts"));
        let raw = parse_lines(b"\xff\n", TextMode::Default, Path::new("in.jsonl")).expect_err("bytes");
        assert_eq!(raw.to_string(), "in.jsonl line 1: not UTF-8 text");
    }
}
