//! Traces, metrics and bars.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::{adapter, assert_error, finish, folder, generate, write};

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
