//! What is refused, with which words; help.

use crate::common::{adapter, assert_error, command, finish, folder, generate, run, tiny_model, write};

#[test]
fn bad_flags_are_refused_with_advice() {
    let dir = folder();
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"x\"}\n");
    let table: &[(&[&str], &[&str])] = &[
        (&[], &["no command", "rollout generate"]),
        (&["no-such-command"], &["no-such-command", "--help"]),
        (
            &["generate", "--no-such-flag"],
            &["--no-such-flag", "rollout generate --help"],
        ),
        (&["generate", "stray"], &["stray", "rollout generate --help"]),
        // A tip is a sentence of its own.
        (
            &["generate", "--max-new-token", "5"],
            &["found; tip:", "'--max-new-tokens'"],
        ),
        (
            &["generate", "--max-new-tokens", "0"],
            &["--max-new-tokens", "at least 1"],
        ),
        // The help that was named for a wrong value once was `rollout --help`, which has none of the flags.
        (
            &["generate", "--device", "gpu"],
            &["cuda:N", "see `rollout generate --help`"],
        ),
        (&["generate", "--max-new-tokens", "-5"], &["-5"]),
        (&["generate", "-n", "0"], &["--n", "at least 1"]),
        // It once was taken for a number of places to reserve.
        (
            &["generate", "-n", "9223372036854775807"],
            &["--n", "at most 65536"],
        ),
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
fn a_model_that_is_not_there_is_an_error_that_says_how_to_get_one() {
    for command in ["generate", "inspect", "verify-no-drift"] {
        let adapter = adapter("qv-r8");
        let mut args = vec![command, "--model", "no-such-owner/no-such-model"];
        if command == "verify-no-drift" {
            args.extend(["--adapter", &adapter]);
        }
        assert_error(
            &run(&args),
            1,
            &["no-such-owner/no-such-model", "hf download"],
            command,
        );
    }
}

/// As `vllm serve` and transformers take it.
#[test]
#[cfg(unix)]
fn an_id_means_the_model_in_hugging_faces_cache() {
    let cache = folder();
    let model = cache.path().join("models--Some--Model");
    for dir in ["refs", "snapshots"] {
        std::fs::create_dir_all(model.join(dir)).expect("writable");
    }
    std::fs::write(model.join("refs/main"), "0123abc").expect("writable");
    std::os::unix::fs::symlink(tiny_model(), model.join("snapshots/0123abc")).expect("links");
    let mut command = command(&["generate", "--device", "cpu", "--quiet", "--model", "Some/Model"]);
    command
        .args(["--prompt", "x", "--max-tokens", "2"])
        .env("HF_HUB_CACHE", cache.path());
    let outcome = finish(command.spawn().expect("starts"));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
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
fn a_flag_without_effect_on_the_cpu_is_not_ignored() {
    let adapter = adapter("qv-r8");
    for flags in [
        &["--no-capture-cudagraph"][..],
        &["--lora-pristine", "pinned", "--adapter", &adapter],
        &["--lora-pristine", "device", "--adapter", &adapter],
        &["--decode-kernel-options", "{\"split_kv\": 64}"],
        &["--prefill-kernel-options", "{\"BLOCK_N\": 64}"],
        &["--matrix-kernel-options", "{\"algorithms\": 1}"],
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
