//! The `rollout` command from outside: what it writes, and how it takes broken input.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longer than any run here should take, even unoptimised on a busy machine.
const DEADLINE: Duration = Duration::from_secs(300);

struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rollout"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the end, but not for ever.
fn finish(mut child: Child) -> Outcome {
    let reader = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).expect("the pipe can be read");
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = child.stdout.take().map(|pipe| reader(Box::new(pipe)));
    let stderr = child.stderr.take().map(|pipe| reader(Box::new(pipe)));
    let start = Instant::now();
    let code = loop {
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            break status.code();
        }
        if start.elapsed() > DEADLINE {
            child.kill().expect("the child can be stopped");
            panic!("the command hangs");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    };
    let text = |handle: Option<std::thread::JoinHandle<String>>| {
        handle.map_or(String::new(), |handle| handle.join().expect("the reader ends"))
    };
    Outcome {
        code,
        stdout: text(stdout),
        stderr: text(stderr),
    }
}

fn run(args: &[&str]) -> Outcome {
    finish(command(args).spawn().expect("the command starts"))
}

/// Runs `generate` on the CPU without notices.
fn generate(args: &[&str]) -> Outcome {
    run(&[&["generate", "--device", "cpu", "--quiet"], args].concat())
}

/// Checks an error: its exit code, that it is one line and says these words.
fn assert_error(outcome: &Outcome, code: i32, words: &[&str], what: &str) {
    let stderr = outcome.stderr.trim_end_matches('\n');
    assert_eq!(outcome.code, Some(code), "{what}: {stderr}");
    assert!(
        stderr.starts_with("rollout: ") && !stderr.contains('\n'),
        "{what}: not one line: {stderr}"
    );
    assert!(!stderr.contains("panicked"), "{what}: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{what}: {word:?} is not in {stderr}");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn write(dir: &Path, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = dir.join(name);
    std::fs::write(&path, content).expect("writable");
    path.to_str().expect("a UTF-8 path").to_string()
}

fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math")
}

fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a whole JSON line"))
        .collect()
}

#[test]
fn without_arguments_it_solves_the_bundled_problems() {
    let outcome = run(&["generate"]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    for answer in ["#### 91", "#### 601", "#### 80", "315"] {
        assert!(
            outcome.stdout.contains(answer),
            "{answer} is not in\n{}",
            outcome.stdout
        );
    }
    let last = outcome.stderr.lines().last().expect("a closing line");
    for word in ["4 completions", "tokens", "tok/s", "peak memory", "device"] {
        assert!(last.contains(word), "{word} is not in {last}");
    }
    // Not a terminal: no bar, and at most one line more, which says why there is no GPU.
    assert!(outcome.stderr.lines().count() <= 2, "{}", outcome.stderr);
}

#[test]
fn quiet_prints_the_results_alone() {
    let outcome = generate(&["--prompt", "Repeat and count: Iris Kim Kim cookies Noah."]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    assert!(
        outcome.stdout.contains("Iris Kim Kim cookies Noah\n#### 5"),
        "{}",
        outcome.stdout
    );
}

#[test]
fn lines_of_all_forms_become_lines_with_all_fields() {
    let dir = folder();
    let prompts = write(
        dir.path(),
        "in.jsonl",
        concat!(
            "{\"id\": \"count\", \"messages\": [{\"role\": \"user\", \"content\": \"Count from 259 to 315 by 2.\"}]}\n",
            "\n",
            "{\"prompt\": \"<|im_start|>user\\nRepeat and count: Iris Kim.<|im_end|>\\n<|im_start|>assistant\\n\"}\n",
            "{\"id\": 7, \"prompt_token_ids\": [569, 288, 198]}\n",
        ),
    );
    let output = dir.path().join("out.jsonl");
    let outcome = generate(&[
        "--prompts",
        &prompts,
        "--output",
        output.to_str().expect("UTF-8"),
        "--max-new-tokens",
        "12",
    ]);
    assert_eq!(
        (outcome.code, outcome.stdout.as_str(), outcome.stderr.as_str()),
        (Some(0), "", "")
    );
    let mut lines = lines(&std::fs::read_to_string(&output).expect("was written"));
    lines.sort_by_key(|line| line["id"].to_string());
    assert_eq!(lines.len(), 3);
    for line in &lines {
        let keys: Vec<&str> = line
            .as_object()
            .expect("an object")
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(
            keys,
            [
                "id",
                "index",
                "prompt_token_ids",
                "token_ids",
                "text",
                "finish_reason",
                "stop_reason",
                "logprobs",
                "sampled_logprobs",
                "policy_version",
                "policies"
            ]
        );
        let tokens = line["token_ids"].as_array().expect("a list").len();
        assert_eq!(line["logprobs"].as_array().expect("a list").len(), tokens);
        assert_eq!(line["index"], 0);
        assert_eq!(line["policy_version"], 0);
        assert_eq!(line["policies"][0]["first_token"], 0);
        assert_eq!(line["policies"][0]["sha256"].as_str().map(str::len), Some(64));
    }
    let [count, repeat, ids] = &lines[..] else {
        unreachable!("three lines")
    };
    assert_eq!(
        (&count["id"], &count["finish_reason"]),
        (&"count".into(), &"length".into())
    );
    assert_eq!(
        (&repeat["id"], &repeat["finish_reason"]),
        (&1.into(), &"stop".into())
    );
    assert_eq!(repeat["text"], "Iris Kim\nIris Kim\n#### 4");
    assert_eq!(
        (&ids["id"], &ids["prompt_token_ids"]),
        (&7.into(), &serde_json::json!([569, 288, 198]))
    );
}

#[test]
fn the_output_goes_to_standard_output_and_the_input_comes_from_standard_input() {
    let mut child = command(&[
        "generate",
        "--prompts",
        "-",
        "--output",
        "-",
        "--max-new-tokens",
        "3",
    ])
    .stdin(Stdio::piped())
    .spawn()
    .expect("starts");
    let mut stdin = child.stdin.take().expect("is piped");
    stdin.write_all(b"{\"prompt\": \"Count\"}").expect("takes input");
    drop(stdin);
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(
        lines(&outcome.stdout)[0]["token_ids"]
            .as_array()
            .expect("a list")
            .len(),
        3
    );
}

#[test]
fn text_prompts_go_through_the_template_unless_raw() {
    let ids = |args: &[&str]| {
        let outcome = generate(&[args, &["--output", "-", "--max-new-tokens", "1"]].concat());
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        lines(&outcome.stdout)[0]["prompt_token_ids"].clone()
    };
    let chat = ids(&["--prompt", "Count", "--chat"]);
    let raw = ids(&["--prompt", "Count", "--raw"]);
    assert_eq!(ids(&["--prompt", "Count"]), chat);
    assert_ne!(chat, raw);
    let dir = folder();
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"Count\"}\n");
    assert_eq!(ids(&["--prompts", &prompts]), raw);
    assert_eq!(ids(&["--prompts", &prompts, "--chat"]), chat);
}

#[test]
fn bad_flags_are_refused_with_advice() {
    let dir = folder();
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"x\"}\n");
    let table: &[(&[&str], &[&str])] = &[
        (&[], &["no command", "rollout generate"]),
        (&["no-such-command"], &["no-such-command", "--help"]),
        (&["generate", "--no-such-flag"], &["--no-such-flag", "--help"]),
        (&["generate", "stray"], &["stray"]),
        (
            &["generate", "--max-new-tokens", "0"],
            &["--max-new-tokens", "at least 1"],
        ),
        (&["generate", "--max-new-tokens", "-5"], &["-5"]),
        (
            &["generate", "--max-new-tokens", "many"],
            &["--max-new-tokens", "whole number"],
        ),
        (
            &["generate", "--max-batch-size", "0"],
            &["--max-batch-size", "at least 1"],
        ),
        (
            &["generate", "--max-batch-size", "1000000000"],
            &["--max-batch-size", "at most"],
        ),
        (
            &["generate", "--max-batch-size", "99999999999999999999999"],
            &["--max-batch-size"],
        ),
        (&["generate", "--page-size", "0"], &["--page-size", "at least 1"]),
        (
            &["generate", "--page-size", "1000000000"],
            &["--page-size", "at most"],
        ),
        (&["generate", "--n-pages", "0"], &["--n-pages", "at least 1"]),
        (
            &["generate", "--n-pages", "1"],
            &["--n-pages 1", "at least 2", "reserved"],
        ),
        (
            &["generate", "--n-pages", "1000000000000"],
            &["--n-pages", "use fewer pages"],
        ),
        (
            &["generate", "--max-seq-length", "1"],
            &["--max-seq-length", "at least 2"],
        ),
        (
            &["generate", "--max-seq-length", "2049"],
            &["--max-seq-length", "at most 2048"],
        ),
        (&["generate", "--device", "gpu"], &["--device", "cuda:N"]),
        (&["generate", "--device", "cuda:x"], &["--device", "cuda:N"]),
        (&["generate", "--device", "cuda:99"], &["cuda:99", "cpu"]),
        (
            &["generate", "--prompt", "x", "--prompts", &prompts],
            &["--prompt", "cannot be used with"],
        ),
        (
            &["generate", "--chat", "--raw"],
            &["--chat", "cannot be used with"],
        ),
        (&["generate", "--seed", "-1"], &["-1"]),
        (
            &["generate", "--prompts", &prompts, "--output", &prompts],
            &["--output", "name another"],
        ),
        (&["inspect", "--memory", "16"], &["--memory", "unit"]),
    ];
    for (args, words) in table {
        assert_error(&run(args), 2, words, &args.join(" "));
    }
    assert_eq!(
        std::fs::read_to_string(&prompts).expect("is there"),
        "{\"prompt\": \"x\"}\n",
        "the input is intact"
    );
}

#[test]
fn broken_prompt_files_name_the_line() {
    let dir = folder();
    let table: &[(&[u8], &[&str])] = &[
        (b"", &["no prompts"]),
        (b"\n \n", &["no prompts"]),
        (b"{\"prompt\": \"x\"}\n{\"prompt\": ", &["line 2", "EOF"]),
        (b"{\"prompt\": \"x\"}\n\n\xff\xfe\n", &["line 3", "UTF-8"]),
        (b"[1, 2]\n", &["line 1", "expected an object"]),
        (b"[null, \"x\", null, null, null, null]\n", &["line 1", "a list"]),
        (
            b"{\"prompt\": \"x\", \"messages\": [{}]}\n",
            &["line 1", "more than one"],
        ),
        (b"{\"id\": 1}\n", &["line 1", "none of"]),
        (
            b"{\"prompt\": \"x\", \"top_p\": 0.5}\n",
            &["line 1", "unknown field `top_p`"],
        ),
        (b"{\"prompt_token_ids\": [1, -1]}\n", &["line 1", "-1"]),
        (b"{\"prompt_token_ids\": [1.5]}\n", &["line 1", "1.5"]),
        (b"{\"messages\": []}\n", &["line 1", "messages"]),
        (b"{\"id\": {}, \"prompt\": \"x\"}\n", &["line 1", "`id`"]),
    ];
    for (content, words) in table {
        let prompts = write(dir.path(), "in.jsonl", content);
        assert_error(
            &generate(&["--prompts", &prompts]),
            1,
            words,
            &String::from_utf8_lossy(content),
        );
    }
    let deep = format!(
        "{{\"messages\": {}{}}}\n",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    let prompts = write(dir.path(), "deep.jsonl", deep);
    assert_error(
        &generate(&["--prompts", &prompts]),
        1,
        &["line 1"],
        "deep nesting",
    );
    assert_error(
        &generate(&["--prompts", "/no/such/file"]),
        1,
        &["/no/such/file"],
        "absent file",
    );
    let path = dir.path().to_str().expect("UTF-8");
    assert_error(&generate(&["--prompts", path]), 1, &[path], "a folder");
}

/// Each of these is refused alone; the prompt behind it is completed.
#[test]
fn prompts_that_can_never_be_completed_are_refused_and_the_others_go_on() {
    let dir = folder();
    let many = |n: usize| format!("{:?}", vec![5; n]);
    let table = [
        ("{\"prompt_token_ids\": []}".to_string(), "empty"),
        ("{\"prompt\": \"\"}".to_string(), "empty"),
        (
            "{\"prompt_token_ids\": [1, 1024]}".to_string(),
            "vocabulary of 1024",
        ),
        (
            "{\"prompt_token_ids\": [4294967295]}".to_string(),
            "vocabulary of 1024",
        ),
        // 31 usable pages of 16 tokens.
        (
            format!("{{\"prompt_token_ids\": {}}}", many(496)),
            "all pages together hold 496",
        ),
        (
            format!("{{\"prompt_token_ids\": {}}}", many(2048)),
            "a sequence may hold 2048",
        ),
        (
            format!("{{\"prompt_token_ids\": {}}}", many(100_000)),
            "100000 tokens",
        ),
        (
            format!("{{\"prompt\": {:?}}}", "apples ".repeat(100_000)),
            "tokens",
        ),
        (
            "{\"messages\": [{\"role\": \"user\"}]}".to_string(),
            "chat template",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": 5}]}".to_string(),
            "chat template",
        ),
    ];
    for (bad, word) in table {
        let prompts = write(
            dir.path(),
            "in.jsonl",
            format!("{bad}\n{{\"id\": \"good\", \"prompt\": \"Count\"}}\n"),
        );
        let outcome = generate(&[
            "--prompts",
            &prompts,
            "--output",
            "-",
            "--max-new-tokens",
            "2",
            "--n-pages",
            "32",
            "--page-size",
            "16",
        ]);
        let what = &bad[..bad.len().min(60)];
        assert_eq!(outcome.code, Some(1), "{what}");
        let errors: Vec<&str> = outcome.stderr.lines().collect();
        assert_eq!(errors.len(), 2, "{what}: {}", outcome.stderr);
        assert!(
            errors[0].contains("in.jsonl line 1: ") && errors[0].contains(word),
            "{what}: {}",
            errors[0]
        );
        assert!(errors[1].contains("1 of 2 completions"), "{what}: {}", errors[1]);
        let lines = lines(&outcome.stdout);
        assert_eq!(lines.len(), 1, "{what}");
        assert_eq!(lines[0]["id"], "good");
    }
}

#[test]
fn a_pool_of_one_usable_page_generates_up_to_its_end() {
    let outcome = generate(&[
        "--prompt",
        "Count",
        "--raw",
        "--n-pages",
        "2",
        "--page-size",
        "8",
        "--output",
        "-",
    ]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let line = &lines(&outcome.stdout)[0];
    let total = ["prompt_token_ids", "token_ids"].map(|key| line[key].as_array().expect("a list").len());
    assert_eq!(total.iter().sum::<usize>(), 8);
    assert_eq!(line["finish_reason"], "length");
}

#[test]
fn model_folders_that_are_broken_are_named() {
    let dir = folder();
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).expect("writable");
    let file = write(dir.path(), "file", "x");
    for (path, word) in [
        ("/no/such/folder", "/no/such/folder"),
        (&file, "file"),
        (empty.to_str().expect("UTF-8"), "config.json"),
    ] {
        assert_error(&generate(&["--prompt", "x", "--model", path]), 1, &[word], path);
        assert_error(&run(&["inspect", "--model", path]), 1, &[word], path);
    }
    for (name, content, word) in [
        ("config.json", "{", "config.json"),
        ("config.json", "{\"model_type\": \"llama\"}", "config.json"),
        ("generation_config.json", "[]", "generation_config.json"),
        ("tokenizer.json", "{\"version\": 3}", "tokenizer.json"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json"),
        ("chat_template.jinja", "{% for %}", "chat_template.jinja"),
        (
            "chat_template.jinja",
            "{{ raise_exception('no systems please') }}",
            "no systems please",
        ),
        ("model.safetensors", "cut off", "model.safetensors"),
    ] {
        let broken = folder();
        for entry in std::fs::read_dir(tiny_model()).expect("is there") {
            let entry = entry.expect("can be listed");
            std::fs::copy(entry.path(), broken.path().join(entry.file_name())).expect("copies");
        }
        write(broken.path(), name, content);
        let model = broken.path().to_str().expect("UTF-8");
        let outcome = generate(&["--prompt", "x", "--model", model]);
        assert_eq!(outcome.code, Some(1), "{name}: {}", outcome.stderr);
        assert!(
            outcome.stderr.contains(word),
            "{name}: {word:?} is not in {}",
            outcome.stderr
        );
        assert!(
            outcome.stderr.lines().all(|line| line.starts_with("rollout: ")),
            "{name}: {}",
            outcome.stderr
        );
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let dir = folder();
    let path = dir.path().to_str().expect("UTF-8");
    assert_error(&generate(&["--output", path]), 1, &["--output"], "a folder");
    let absent = format!("{path}/no/such/out.jsonl");
    assert_error(
        &generate(&["--output", &absent]),
        1,
        &["no/such"],
        "an absent folder",
    );
    if Path::new("/dev/full").exists() {
        assert_error(
            &generate(&["--output", "/dev/full"]),
            1,
            &["/dev/full"],
            "a full disk",
        );
    }
}

#[test]
fn output_over_a_file_that_is_read_is_refused_and_leaves_it_as_it_is() {
    let dir = folder();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).expect("a folder");
    for file in std::fs::read_dir(tiny_model()).expect("a folder") {
        let file = file.expect("an entry");
        std::fs::copy(file.path(), model.join(file.file_name())).expect("copied");
    }
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"a\"}\n");
    let linked = dir.path().join("linked.jsonl");
    std::fs::hard_link(&prompts, &linked).expect("linked");
    let weights_linked = dir.path().join("weights");
    std::fs::hard_link(model.join("model.safetensors"), &weights_linked).expect("linked");
    let model_name = model.to_str().expect("text");
    for output in [
        model.join("model.safetensors"),
        model.join("config.json"),
        weights_linked,
        linked,
    ] {
        let before = std::fs::read(&output).expect("readable");
        let name = output.to_str().expect("text");
        let outcome = generate(&["--model", model_name, "--prompts", &prompts, "--output", name]);
        assert_error(&outcome, 2, &["--output", "name another one"], name);
        assert!(
            std::fs::read(&output).expect("readable") == before,
            "{name} was changed"
        );
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_run_without_noise() {
    let mut child = command(&["generate", "--device", "cpu", "--output", "-"])
        .spawn()
        .expect("starts");
    drop(child.stdout.take());
    let outcome = finish(child);
    assert_eq!(
        (outcome.code, outcome.stderr.as_str()),
        (Some(141), ""),
        "as of a program that SIGPIPE ended"
    );
    let mut child = command(&["generate", "--help"]).spawn().expect("starts");
    drop(child.stdout.take());
    let outcome = finish(child);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(141), ""), "help");
}

/// Runs `generate --quiet` on the CPU with two prompts in a shell, behind `prefix` and before `suffix`.
#[cfg(unix)]
fn shell(dir: &Path, prefix: &str, arguments: &str, suffix: &str) -> Outcome {
    let script = format!(
        "cd '{}' && {prefix} exec '{}' generate --device cpu --quiet --max-new-tokens 40 {arguments} {suffix}",
        dir.display(),
        env!("CARGO_BIN_EXE_rollout")
    );
    let mut command = Command::new("sh");
    command
        .args(["-c", &script])
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    finish(command.spawn().expect("a shell"))
}

#[test]
#[cfg(unix)]
fn a_standard_output_that_is_closed_is_an_error_where_something_would_be_written_to_it() {
    let dir = folder();
    write(dir.path(), "in.jsonl", "{\"prompt\": \"Count\"}\n");
    for arguments in ["--prompts in.jsonl", "--prompts in.jsonl --output -"] {
        for suffix in [">&-", "<&- >&-"] {
            let outcome = shell(dir.path(), "", arguments, suffix);
            assert_error(&outcome, 1, &["standard output is closed"], arguments);
        }
    }
    for (arguments, suffix) in [
        ("--output out.jsonl", ">&-"),
        ("", "> /dev/null"),
        ("", "<> /dev/null >&0"),
    ] {
        let outcome = shell(dir.path(), "", &format!("--prompts in.jsonl {arguments}"), suffix);
        assert_eq!(
            (outcome.code, outcome.stderr.as_str()),
            (Some(0), ""),
            "{arguments} {suffix}"
        );
    }
    let script = format!("exec '{}' inspect >&-", env!("CARGO_BIN_EXE_rollout"));
    let outcome = finish(
        Command::new("sh")
            .args(["-c", &script])
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell"),
    );
    assert_error(&outcome, 1, &["standard output is closed"], "inspect");
}

#[test]
#[cfg(target_os = "linux")]
fn a_limit_on_the_size_of_files_leaves_whole_lines_and_is_an_error() {
    let dir = folder();
    write(dir.path(), "in.jsonl", "{\"prompt\": \"Count\"}\n".repeat(12));
    for (arguments, suffix, name) in [
        ("--output out.jsonl", "", "out.jsonl"),
        ("--output -", "> redirected.jsonl", "redirected.jsonl"),
        ("--output -", ">> appended.jsonl", "appended.jsonl"),
    ] {
        // 4 blocks are 2 or 4 kB, depending on the shell; a line is 1 kB.
        let arguments = format!("--prompts in.jsonl {arguments}");
        let outcome = shell(dir.path(), "ulimit -f 4;", &arguments, suffix);
        assert_error(&outcome, 1, &["File too large", "complete"], name);
        let text = std::fs::read_to_string(dir.path().join(name)).expect("was written");
        let written = lines(&text).len();
        assert!(
            text.ends_with('\n') && (1..12).contains(&written),
            "{name}: {text}"
        );
    }
}

#[test]
#[cfg(unix)]
fn output_into_the_file_that_is_read_is_refused_whoever_opened_it() {
    let dir = folder();
    let content = "{\"prompt\": \"Count\"}\n";
    write(dir.path(), "in.jsonl", content);
    for (arguments, suffix) in [
        ("--prompts - --output in.jsonl", "< in.jsonl"),
        ("--prompts - --output -", "< in.jsonl >> in.jsonl"),
        ("--prompts in.jsonl --output -", ">> in.jsonl"),
        ("--prompts in.jsonl", ">> in.jsonl"),
    ] {
        let outcome = shell(dir.path(), "", arguments, suffix);
        let what = format!("{arguments} {suffix}");
        assert_error(&outcome, 2, &["is the file of --prompts"], &what);
        let after = std::fs::read_to_string(dir.path().join("in.jsonl")).expect("is there");
        assert_eq!(after, content, "{what}");
    }
    // Not files: nothing can be lost.
    let outcome = shell(
        dir.path(),
        "",
        "--prompts - --output /dev/null",
        "< in.jsonl > /dev/null",
    );
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
}

#[test]
fn a_flag_without_effect_on_the_cpu_is_not_ignored() {
    let adapter = adapter("qv-r8");
    for flags in [
        &["--no-capture-cudagraph"][..],
        &["--lora-pristine", "pinned", "--adapter", &adapter],
        &["--lora-pristine", "device", "--adapter", &adapter],
    ] {
        let outcome = generate(&[&["--prompt", "x"], flags].concat());
        assert_error(&outcome, 2, &[flags[0], "no effect on the CPU"], flags[0]);
    }
    assert_error(
        &generate(&["--lora-pristine", "pinned"]),
        2,
        &["--adapter"],
        "a place for the copy of nothing",
    );
}

#[test]
fn a_text_that_no_sequence_can_hold_is_refused_before_it_is_tokenized() {
    let dir = folder();
    let huge = format!("{{\"prompt\": \"{}\"}}\n", "12 apples, ".repeat(4 << 20));
    let chat = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{}\"}}]}}\n",
        "12 apples, ".repeat(1 << 20)
    );
    let prompts = write(
        dir.path(),
        "in.jsonl",
        format!("{{\"prompt\": \"Count\"}}\n{huge}{chat}"),
    );
    let outcome = generate(&["--prompts", &prompts, "--max-new-tokens", "2", "--output", "-"]);
    assert_eq!(
        (outcome.code, lines(&outcome.stdout).len()),
        (Some(1), 1),
        "{}",
        outcome.stderr
    );
    let errors: Vec<_> = outcome.stderr.lines().collect();
    assert!(
        errors[0].contains("in.jsonl line 2: the prompt's text has 46137344 bytes"),
        "{errors:?}"
    );
    assert!(
        errors[0].contains("2048 tokens") && errors[0].contains("at most 524288"),
        "{errors:?}"
    );
    assert!(
        errors[1].contains("in.jsonl line 3: the prompt's text has 115"),
        "{errors:?}"
    );
    assert!(errors[2].contains("2 of 3 completions are missing"), "{errors:?}");
}

/// Waits until the process `id` has taken over the signal that Ctrl-C sends.
#[cfg(target_os = "linux")]
fn wait_for_handler(id: u32) {
    let start = Instant::now();
    loop {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if caught.is_some_and(|mask| mask & 0b10 != 0) {
            return;
        }
        assert!(start.elapsed() < DEADLINE, "no handler: {status}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn one_interruption_ends_a_command_that_waits_for_a_pipe() {
    let dir = folder();
    let pipe = dir.path().join("pipe");
    let made = Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .expect("mkfifo is there");
    assert!(made.success());
    let pipe = pipe.to_str().expect("UTF-8");
    for flag in ["--prompts", "--output"] {
        let child = command(&["generate", "--device", "cpu", flag, pipe])
            .spawn()
            .expect("starts");
        wait_for_handler(child.id());
        let kill = Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status();
        assert!(kill.expect("kill is there").success());
        let outcome = finish(child);
        assert_error(&outcome, 130, &["interrupted before the first step"], flag);
    }
}

#[test]
#[cfg(unix)]
fn an_interrupted_run_leaves_whole_lines_and_exits_130() {
    let dir = folder();
    // Far more work than is done before the interruption.
    let line = "{\"messages\": [{\"role\": \"user\", \"content\": \"Count from 1 to 2000 by 1.\"}]}\n";
    let prompts = write(dir.path(), "in.jsonl", line.repeat(5000));
    let output = dir.path().join("out.jsonl");
    let child = command(&[
        "generate",
        "--device",
        "cpu",
        "--prompts",
        &prompts,
        "--output",
        output.to_str().expect("UTF-8"),
        "--max-batch-size",
        "4",
        "--max-new-tokens",
        "20",
    ])
    .spawn()
    .expect("starts");
    let start = Instant::now();
    while std::fs::metadata(&output).map_or(0, |meta| meta.len()) < 500 {
        assert!(start.elapsed() < DEADLINE, "nothing is written while it runs");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let status = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .expect("kill is there");
    assert!(status.success());
    let outcome = finish(child);
    assert_eq!(outcome.code, Some(130), "{}", outcome.stderr);
    let text = std::fs::read_to_string(&output).expect("was written");
    assert!(text.ends_with('\n'));
    let written = lines(&text).len();
    let last = outcome.stderr.lines().last().expect("says so");
    assert!(last.contains(&format!("{written} of 5000")), "{last}");
}

#[test]
fn inspect_describes_a_model() {
    let outcome = run(&[
        "inspect",
        "--model",
        tiny_model().to_str().expect("UTF-8"),
        "--memory",
        "1GB",
    ]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    for word in [
        "parameters",
        "4,096 bytes",
        "1.00 GB (given)",
        "sequences of 2048",
        "[570, 568]",
    ] {
        assert!(
            outcome.stdout.contains(word),
            "{word} is not in\n{}",
            outcome.stdout
        );
    }
}

#[test]
fn help_explains_every_flag() {
    let outcome = run(&["generate", "--help"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    for flag in [
        "--model",
        "--prompt ",
        "--prompts",
        "--chat",
        "--raw",
        "--max-new-tokens",
        "--max-batch-size",
        "--n-pages",
        "--page-size",
        "--max-seq-length",
        "--device",
        "--output",
        "--quiet",
        "--seed",
    ] {
        assert!(
            outcome.stdout.contains(flag),
            "{flag} is not in\n{}",
            outcome.stdout
        );
    }
    assert!(
        outcome.stdout.matches("efault").count() >= 11,
        "{}",
        outcome.stdout
    );
    assert_eq!(
        run(&["--version"]).stdout,
        concat!("rollout ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

fn adapter(name: &str) -> String {
    format!("{}/../fixtures/adapters/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn adapters_change_completions_and_name_their_policy() {
    let generate = |extra: &[&str]| -> Vec<Value> {
        let mut args = vec![
            "generate",
            "--device",
            "cpu",
            "--quiet",
            "--max-new-tokens",
            "12",
            "--output",
            "-",
        ];
        args.extend_from_slice(extra);
        let outcome = run(&args);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
        let mut lines = lines(&outcome.stdout);
        lines.sort_by_key(|line| line["id"].to_string());
        lines
    };
    let (first, second) = (adapter("mult-r32"), adapter("qv-r8"));
    let base = generate(&[]);
    let merged = generate(&["--adapter", &first, "--adapter", &second]);
    let run_time = generate(&["--adapter", &second, "--adapter", &first, "--no-merge-lora"]);
    assert!(
        base.iter()
            .zip(&merged)
            .all(|(a, b)| a["logprobs"] != b["logprobs"])
    );
    for (merged, run_time) in merged.iter().zip(&run_time) {
        assert_eq!(merged["token_ids"], run_time["token_ids"]);
        assert_eq!(merged["policy_version"], 1);
        assert_eq!(merged["policies"], run_time["policies"], "whatever the order");
        assert_ne!(merged["policies"][0]["sha256"], base[0]["policies"][0]["sha256"]);
    }
}

#[test]
fn an_adapter_that_cannot_be_used_ends_the_command_before_it_generates() {
    for (args, code) in [
        (vec!["generate", "--device", "cpu", "--adapter", "not-there"], 1),
        (vec!["generate", "--device", "cpu", "--no-merge-lora"], 2),
        (vec!["verify-no-drift"], 2),
        (vec!["verify-no-drift", "--adapter", "not-there"], 1),
        (vec!["verify-no-drift", "--adapter", "x", "--iterations", "0"], 2),
        (vec!["verify-no-drift", "--adapter", "x", "--noise", "nan"], 2),
    ] {
        let outcome = run(&args);
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (Some(code), ""),
            "{args:?}"
        );
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
}

#[test]
fn the_bundled_model_does_not_drift() {
    let adapter = adapter("mult-r32");
    let args = [
        "verify-no-drift",
        "--device",
        "cpu",
        "--adapter",
        &adapter,
        "--iterations",
        "3",
        "--noise",
        "0.02",
    ];
    let outcome = run(&args);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let report: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let keys: Vec<&str> = report
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        [
            "mode",
            "n_iters",
            "noise_scale",
            "base_hash_before",
            "base_hash_after",
            "base_bit_identical",
            "inference_hash_initial_merged",
            "inference_hash_after_restore",
            "inference_deterministic"
        ]
    );
    assert_eq!(
        (&report["mode"], &report["n_iters"]),
        (&"merged".into(), &3.into())
    );
    assert_eq!(report["base_bit_identical"], true);
    assert_eq!(report["inference_deterministic"], true);
    assert_ne!(
        report["base_hash_before"],
        report["inference_hash_initial_merged"]
    );
}

#[test]
fn a_trace_has_the_spans_of_a_run_and_metrics_its_counters() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let (trace, metrics) = (path("trace.json"), path("metrics.json"));
    let adapter = adapter("qv-r8");
    let outcome = generate(&[
        "--adapter",
        &adapter,
        "--max-new-tokens",
        "5",
        "--trace",
        &trace,
        "--metrics",
        &metrics,
    ]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let read = |path: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path).expect("was written")).expect("JSON")
    };
    let trace = read(&trace);
    let events = trace.as_array().expect("a list");
    let spans = |name: &str| -> Vec<&Value> {
        events
            .iter()
            .filter(|event| event["name"] == name && event["ph"] == "X")
            .collect()
    };
    for (name, count) in [
        ("load", 1),
        ("read", 1),
        ("refresh", 1),
        ("prefill", 1),
        ("decode", 4),
        ("collect", 5),
    ] {
        assert_eq!(spans(name).len(), count, "{name}");
    }
    assert_eq!(spans("prefill")[0]["args"]["sequences"], 4);
    assert_eq!(spans("decode")[0]["args"]["rows"], 4);
    let metrics = read(&metrics);
    for (key, value) in [("prompts", 4), ("completions", 4), ("failed", 0)] {
        assert_eq!(metrics[key], value, "{key}");
    }
    assert_eq!(metrics["interrupted"], false);
    assert_eq!(metrics["statistics"]["new_tokens"], 20);
    assert_eq!(metrics["policy"]["number"], 1);
    for (group, key) in [
        ("memory", "weights"),
        ("memory", "kv_cache"),
        ("statistics", "steps"),
    ] {
        assert!(metrics[group][key].as_u64() > Some(0), "{group}.{key}: {metrics}");
    }
    for key in ["load_s", "generate_s", "new_tokens_per_s"] {
        assert!(metrics[key].as_f64() > Some(0.0), "{key}: {metrics}");
    }
}

#[test]
fn metrics_and_traces_spare_files_that_are_read_and_fail_loudly() {
    let dir = folder();
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"a\"}\n");
    let output = dir.path().join("out.jsonl").to_str().expect("UTF-8").to_string();
    for (args, code, words) in [
        (vec!["--metrics", &prompts], 2, vec!["--metrics", "--prompts"]),
        (
            vec!["--output", &output, "--metrics", &output],
            2,
            vec!["--metrics", "--output"],
        ),
        (vec!["--trace", &prompts], 2, vec!["--trace", "not a trace"]),
        (vec!["--trace", "/no/such/trace"], 1, vec!["/no/such/trace"]),
        (vec!["--metrics", "/no/such/metrics"], 1, vec!["/no/such/metrics"]),
    ] {
        let args = [&["--prompts", &prompts, "--max-new-tokens", "1"][..], &args].concat();
        assert_error(&generate(&args), code, &words, &args.join(" "));
        let left = std::fs::read_to_string(&prompts).expect("is there");
        assert_eq!(left, "{\"prompt\": \"a\"}\n", "{args:?}");
    }
}

/// Bars go to terminals: `script` makes one.
#[test]
#[cfg(target_os = "linux")]
fn on_a_terminal_bars_tell_of_loading_and_of_completions_unless_quiet() {
    let dir = folder();
    for (flag, shown) in [("", true), ("--quiet", false)] {
        let run = format!(
            "'{}' generate --device cpu --max-new-tokens 60 {flag} > '{}'",
            env!("CARGO_BIN_EXE_rollout"),
            dir.path().join("text").display()
        );
        let mut command = Command::new("script");
        command.args(["-qec", &run, "/dev/null"]).stdin(Stdio::null());
        command
            .env("TERM", "xterm")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let Ok(child) = command.spawn() else {
            println!("NOT CHECKED: `script` is not installed");
            return;
        };
        let outcome = finish(child);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stdout);
        for word in ["loading", "0/4 completions", "tok/s"] {
            assert_eq!(
                outcome.stdout.contains(word),
                shown,
                "{word} {flag}: {:?}",
                outcome.stdout
            );
        }
    }
}

#[test]
fn the_plot_in_the_documentation_is_that_of_its_numbers() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let dir = folder();
    let svg = dir.path().join("throughput.svg");
    let outcome = run(&[
        "plot",
        &format!("{docs}/data/h200-qwen3-4b.json"),
        "--plot-other",
        &format!("{docs}/data/h200-qwen3-4b-other.json"),
        "--output",
        svg.to_str().expect("UTF-8"),
    ]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let read = |path: &Path| std::fs::read_to_string(path).expect("is there");
    let drawn = read(&svg);
    assert!(
        drawn == read(Path::new(&format!("{docs}/throughput.svg"))),
        "draw docs/throughput.svg anew with `rollout plot`"
    );
    for text in ["vLLM 0.22.1", "floor: weights", "new tokens / s"] {
        assert!(drawn.contains(text), "{text}");
    }
}

#[test]
fn a_plot_of_something_else_is_refused() {
    let dir = folder();
    let stats = write(dir.path(), "stats.json", "{\"n_prompts\": 1}");
    let svg = format!("{}.svg", stats);
    let plot = |args: &[&str]| run(&[&["plot"], args, &["--output", &svg]].concat());
    assert_error(
        &plot(&[&stats]),
        1,
        &["stats.json", "max_new_tokens"],
        "half a measurement",
    );
    assert_error(&plot(&["/no/such/stats"]), 1, &["/no/such/stats"], "no file");
    assert_error(&plot(&[]), 2, &["STATS"], "nothing");
    assert!(!Path::new(&svg).exists());
}

#[test]
#[cfg(feature = "cuda")]
fn bench_plots_what_it_measures() {
    let dir = folder();
    let svg = dir.path().join("bench.svg");
    let stats = dir.path().join("stats.json");
    let [svg, stats] = [&svg, &stats].map(|path| path.to_str().expect("UTF-8").to_string());
    let bench = "bench --device cpu --batches 1,2 --n-rounds 1 --max-new-tokens 8 --stats-path";
    let mut args: Vec<&str> = bench.split(' ').collect();
    args.extend([stats.as_str(), "--plot", &svg]);
    let outcome = run(&args);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let again = format!("{svg}.again");
    assert_eq!(run(&["plot", &stats, "--output", &again]).code, Some(0));
    let read = |path: &str| std::fs::read_to_string(path).expect("was written");
    assert_eq!(read(&svg), read(&again));
    assert_eq!(
        read(&svg).matches("<circle").count(),
        4,
        "two batches in two panels"
    );
}

#[test]
fn sampling_flags_reach_the_completions_and_seeds_repeat_them() {
    let base = [
        "--prompt",
        "What is 12 + 7?",
        "--max-new-tokens",
        "24",
        "--output",
        "-",
    ];
    let lines = |flags: &[&str]| -> Vec<Value> {
        let outcome = generate(&[&base, flags].concat());
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        let parse = |line| serde_json::from_str(line).expect("a JSON object");
        outcome.stdout.lines().map(parse).collect()
    };
    let hot = [
        "--temperature",
        "1.5",
        "--top-k",
        "50",
        "--top-p",
        "0.98",
        "--min-p",
        "0.001",
        "-n",
        "2",
    ];
    let penalties = [
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "-0.1",
        "--frequency-penalty",
        "0.1",
    ];
    let flags = [&hot[..], &penalties[..], &["--seed", "5", "--top-logprobs", "3"]].concat();
    let (first, second) = (lines(&flags), lines(&flags));
    assert_eq!(first, second, "the same seed");
    assert_eq!(first.len(), 2);
    assert_ne!(first[0]["token_ids"], first[1]["token_ids"], "siblings");
    for line in &first {
        let n = line["token_ids"].as_array().expect("a list").len();
        for field in ["logprobs", "sampled_logprobs", "top_logprobs"] {
            assert_eq!(line[field].as_array().map(Vec::len), Some(n), "{field}");
        }
        assert!(line["top_logprobs"][0][2][1].as_f64().is_some());
    }
    let plain = &lines(&[])[0];
    assert!(plain.get("top_logprobs").is_none());
    let text = plain["text"].as_str().expect("text");
    let stop = &text[2..4];
    let stopped = &lines(&["--stop", stop])[0];
    assert_eq!(
        (stopped["text"].as_str(), &stopped["stop_reason"]),
        (text.split(stop).next(), &stop.into())
    );
    let id = plain["token_ids"][1].to_string();
    let stopped = &lines(&["--stop-token-id", &id, "--min-new-tokens", "4"])[0];
    assert!(stopped["token_ids"].as_array().expect("a list").len() > 4);
    // The bundled model recommends nothing, so that this is greedy.
    assert_eq!(lines(&["--use-generation-config"])[0], *plain);
}

#[test]
fn sampling_flags_that_contradict_each_other_are_refused() {
    let cases: [(&[&str], &[&str]); 12] = [
        (&["--top-k", "5"], &["--top-k", "--temperature"]),
        (
            &["--top-p", "0.5", "--temperature", "0"],
            &["--top-p", "--temperature"],
        ),
        (&["--min-p", "0.1"], &["--min-p", "--temperature"]),
        (&["--temperature", "-1"], &["temperature", "-1"]),
        (&["--temperature", "nan"], &["temperature", "NaN"]),
        (&["--temperature", "1", "--top-p", "0"], &["top_p", "0"]),
        (&["--temperature", "1", "--top-k", "-2"], &["top_k", "-2"]),
        (&["--repetition-penalty", "0"], &["repetition_penalty"]),
        (&["--min-new-tokens", "300"], &["min_new_tokens", "300"]),
        (&["--stop", ""], &["stop"]),
        (
            &["--top-logprobs", "21", "--output", "-"],
            &["top_logprobs", "21"],
        ),
        (&["--stop-token-id", "100000"], &["100000"]),
    ];
    for (args, words) in cases {
        let code = if args[0] == "--stop-token-id" { 1 } else { 2 };
        let outcome = generate(args);
        assert_eq!(outcome.code, Some(code), "{args:?}: {}", outcome.stderr);
        assert!(
            words.iter().all(|word| outcome.stderr.contains(word)),
            "{args:?}: {}",
            outcome.stderr
        );
    }
    for args in [
        &["--include-stop-str-in-output"][..],
        &["--top-logprobs", "2"],
        &["--top-a", "1"],
    ] {
        assert_eq!(generate(args).code, Some(2), "{args:?}");
    }
}
