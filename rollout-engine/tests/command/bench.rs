//! `rollout bench` on the CPU, with the bundled model.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rollout"));
    command.args(["bench", "--device", "cpu"]).args(args);
    command.output().expect("the command runs")
}

fn report(args: &[&str]) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let output = bench(&[args, &["--stats-path", path.to_str().expect("a path")]].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!output.stdout.is_empty());
    serde_json::from_slice(&std::fs::read(&path).expect("a report")).expect("JSON")
}

#[test]
fn arrivals_are_reported_with_first_tokens_stalls_and_the_budgets_in_force() {
    let report = report(&[
        "--arrival-rate",
        "200",
        "--n-prompts",
        "6",
        "--max-new-tokens",
        "5",
        "--n-rounds",
        "2",
        "--max-batch-size",
        "3",
        "--max-prefill-tokens",
        "50",
        "--mixed-prefill-tokens",
        "20",
    ]);
    let number = |key: &str| {
        report[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} in {report}"))
    };
    assert_eq!(number("n_decoded_tokens"), 2.0 * 6.0 * 5.0);
    assert_eq!(
        (number("max_prefill_tokens"), number("mixed_prefill_tokens")),
        (50.0, 20.0)
    );
    assert!(number("max_running") <= 3.0);
    for key in ["first_token_ms", "inter_token_ms"] {
        let [p50, p99, max] = ["p50", "p99", "max"].map(|name| report[key][name].as_f64().expect("a number"));
        assert!(0.0 < p50 && p50 <= p99 && p99 <= max, "{key}: {p50} {p99} {max}");
    }
    assert_eq!(report["longest_decode_stall_ms"], report["inter_token_ms"]["max"]);
    assert!(number("step_without_prefill_ms") > 0.0 && number("step_with_prefill_ms") > 0.0);
}

#[test]
fn whatever_the_budget_the_workload_gives_the_same_tokens() {
    let checksum = |budget: &str| {
        let args = [
            "--n-prompts",
            "5",
            "--max-new-tokens",
            "4",
            "--n-rounds",
            "1",
            "--max-prefill-tokens",
            budget,
        ];
        report(&args)["token_checksum"].clone()
    };
    let whole = checksum("4096");
    assert!(whole.is_string());
    assert_eq!(checksum("33"), whole);
}

#[test]
fn sampling_flags_change_the_tokens_and_every_round_draws_the_same() {
    let with = |args: &[&str]| {
        let workload = ["--n-prompts", "3", "--max-new-tokens", "6", "--n-rounds", "2"];
        report(&[&workload[..], args].concat())
    };
    let greedy = with(&[]);
    assert_eq!(greedy["sampling"]["temperature"], 0.0);
    let args = [
        "--temperature",
        "1.5",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
    ];
    let drawn = with(&args);
    assert_eq!(drawn["sampling"]["top_k"], 50);
    assert_ne!(drawn["token_checksum"], greedy["token_checksum"]);
    let other = with(&[&args[..], &["--seed", "7"]].concat());
    assert_ne!(drawn["token_checksum"], other["token_checksum"]);
    // Alternatives cost time and change nothing.
    let listed = with(&["--top-logprobs", "3"]);
    assert_eq!(listed["token_checksum"], greedy["token_checksum"]);
}

#[test]
fn the_report_has_every_field() {
    let adapter = format!("{}/../fixtures/adapters/qv-r8", env!("CARGO_MANIFEST_DIR"));
    let report = report(&[
        "--n-prompts",
        "2",
        "--max-new-tokens",
        "24",
        "--n-rounds",
        "2",
        "--lora-adapter",
        &adapter,
    ]);
    let object = report.as_object().expect("an object");
    // Those of the Python system, then those beyond; a GPU fills what is null here.
    let on_any_device = [
        "backend",
        "capture_cudagraph",
        "lora_adapter",
        "n_prompts",
        "n_decoded_tokens",
        "wall_times_s",
        "median_wall_s",
        "best_wall_s",
        "decode_tps_median",
        "decode_tps_best",
        "max_new_tokens",
        "peak_memory_gb",
        "sample_completions",
        "device",
        "load_s",
        "prefill_ms",
        "step_ms",
        "steps_ms_at",
        "stages",
        "token_checksum",
        "page_size",
        "kernel_options",
        "sampling",
        "tolerance_pct",
    ];
    for key in on_any_device {
        assert!(
            object.get(key).is_some_and(|value| !value.is_null()),
            "{key} in {report}"
        );
    }
    for key in [
        "commit",
        "compile_s",
        "capture_s",
        "floor_ms",
        "percent_of_floor",
        "host_gap_pct",
        "refresh",
        "graphs",
        "tuned",
    ] {
        assert!(object.contains_key(key), "{key} in {report}");
    }
    assert_eq!(report["n_decoded_tokens"], 48);
    assert_eq!(report["wall_times_s"].as_array().map(Vec::len), Some(2));
    assert_eq!(report["lora_merged"], true);
    let points = report["steps_ms_at"].as_array().expect("a list");
    assert_eq!(points.len(), 5);
    assert!(
        points
            .iter()
            .all(|point| point["ms"].as_f64().is_some_and(|ms| ms > 0.0))
    );
}

#[test]
fn a_run_is_compared_with_what_was_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("kept.json");
    let file = path.to_str().expect("UTF-8");
    let workload = ["--n-prompts", "2", "--max-new-tokens", "4", "--n-rounds", "1"];
    let with = |args: &[&str]| bench(&[&workload[..], args].concat());
    let kept = with(&["--stats-path", file, "--compare-tolerance", "99"]);
    assert!(kept.status.success());
    let compared = with(&["--compare", file, "--compare-tokens"]);
    let stdout = String::from_utf8_lossy(&compared.stdout);
    assert!(
        compared.status.success() && stdout.contains("the same"),
        "{stdout}"
    );
    // As if it had been a thousand times as fast, with other tokens.
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).expect("is there")).expect("JSON");
    let rate = value["decode_tps_median"].as_f64().expect("a rate");
    value["decode_tps_median"] = (1000.0 * rate).into();
    value["token_checksum"] = "00".into();
    std::fs::write(&path, value.to_string()).expect("writable");
    // It is read before the new measurement takes its place.
    let slower = with(&[
        "--compare",
        file,
        "--stats-path",
        file,
        "--compare-tolerance",
        "99",
    ]);
    let stderr = String::from_utf8_lossy(&slower.stderr);
    assert_eq!(slower.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("kept.json") && stderr.contains("99 % are tolerated"),
        "{stderr}"
    );
    assert!(String::from_utf8_lossy(&slower.stdout).contains("others"));
    let other = bench(&[
        "--n-prompts",
        "1",
        "--max-new-tokens",
        "4",
        "--n-rounds",
        "1",
        "--compare",
        file,
    ]);
    assert_eq!(other.status.code(), Some(1), "nothing to compare with");
}

#[test]
fn steps_are_timed_against_the_length_of_contexts() {
    let folder = tempfile::tempdir().expect("a folder");
    let svg = folder.path().join("growth.svg");
    let svg = svg.to_str().expect("UTF-8");
    let report = report(&["--context-lengths", "64,200", "--batches", "1,3", "--plot", svg]);
    let points = report["context_growth"].as_array().expect("points");
    let at: Vec<_> = points
        .iter()
        .map(|point| (point["n_prompts"].as_u64(), point["context_tokens"].as_u64()))
        .collect();
    let expected = [(1, 64), (1, 200), (3, 64), (3, 200)].map(|(n, len)| (Some(n), Some(len)));
    assert_eq!(at, expected);
    assert!(
        points
            .iter()
            .all(|point| point["step_ms"].as_f64().is_some_and(|ms| ms > 0.0))
    );
    let drawn = std::fs::read_to_string(svg).expect("a picture");
    assert!(drawn.contains("tokens of context"));
}

#[test]
fn what_cannot_work_is_refused_in_a_line() {
    for (args, words) in [
        (&["--top-p", "0.9"][..], "--temperature"),
        (&["--temperature", "-1"], "temperature"),
        (&["--top-logprobs", "21"], "top_logprobs"),
        (&["--arrival-rate", "0"], "arrival-rate"),
        (&["--arrival-rate", "inf"], "arrival-rate"),
        (&["--arrival-rate", "1e-300"], "arrival-rate"),
        (
            &["--stats-path", "x", "--plot", "x"],
            "--plot is the file of --stats-path",
        ),
        (&["--arrival-rate", "2", "--batches", "1,2"], "batches"),
        (&["--model", "random:qwen3-4b"], "drawn on a GPU"),
        (&["--lora-rank", "8"], "--lora-rank"),
        (&["--context-lengths", "18446744073709551615"], "max-seq-length"),
        (&["--max-new-tokens", "18446744073709551615"], "max-seq-length"),
        (
            &["--decode-kernel-options", "{\"warps\": 4}"],
            "--decode-kernel-options",
        ),
        (&["--decode-kernel-options", "{\"SPLIT_KV\": 4}"], "SPLIT_KV"),
        (&["--prefill-kernel-options", "{\"kernel\": \"cudnn\"}"], "cudnn"),
        (&["--matrix-kernel-options", "{"], "matrix-kernel-options"),
        (&["--device", "auto"], "--device cpu"),
    ] {
        let output = if args.contains(&"--device") {
            Command::new(env!("CARGO_BIN_EXE_rollout"))
                .arg("bench")
                .args(args)
                .output()
                .expect("runs")
        } else {
            bench(args)
        };
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(
            stderr.contains(words) && stderr.trim_end().lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn groups_share_prompts_of_the_length_asked_for() {
    let report = report(&[
        "--n-prompts",
        "6",
        "--group-size",
        "3",
        "--prompt-tokens",
        "40",
        "--max-new-tokens",
        "4",
        "--n-rounds",
        "1",
        "--batch-invariant",
    ]);
    assert_eq!(report["group_size"], 3);
    assert_eq!(report["n_decoded_tokens"], 6 * 4);
    let prompts: Vec<_> = report["sample_completions"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|sample| &sample["prompt_tokens"])
        .collect();
    assert_eq!(prompts, [40, 40]);
    let output = bench(&["--n-prompts", "6", "--group-size", "4"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--group-size 4 does not divide 6 prompts"));
}
