//! Adapters, and the proof that they leave the base weights alone.

use serde_json::Value;

use crate::common::{adapter, lines, run};

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
