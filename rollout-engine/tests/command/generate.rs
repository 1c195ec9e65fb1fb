//! Completions: prompts in all forms, and what is written of them.

use std::io::Write;
use std::process::Stdio;

use crate::common::{command, finish, folder, generate, lines, run, write};

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
