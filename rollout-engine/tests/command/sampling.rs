//! Flags that say how tokens are chosen.

use serde_json::Value;

use crate::common::generate;

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
