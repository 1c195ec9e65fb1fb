//! `rollout tune` on the CPU, and what later runs make of its profile.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A small workload on the CPU; profiles live in `folder`.
fn rollout(folder: &Path, command: &str, args: &[&str]) -> Output {
    let workload = "--device cpu --n-prompts 2 --max-new-tokens 3 --n-rounds 1";
    Command::new(env!("CARGO_BIN_EXE_rollout"))
        .env("ROLLOUT_TUNED_PROFILES", folder.join("profiles"))
        .arg(command)
        .args(workload.split(' '))
        .args(args)
        .output()
        .expect("the command runs")
}

fn stdout(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("was written")).expect("JSON")
}

#[test]
fn a_sweep_goes_on_from_its_state_and_leaves_a_profile_that_later_runs_load() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state.json");
    let args = ["--state", state.to_str().expect("UTF-8")];
    let first = stdout(&rollout(folder.path(), "tune", &args));
    assert!(
        first.contains("defaults: ") && first.contains("page size: "),
        "{first}"
    );
    let measured = json(&state)["entries"].as_array().expect("entries").len();
    assert!(measured >= 7, "the defaults and their neighbours: {measured}");
    let before = std::fs::read(&state).expect("is there");
    let second = stdout(&rollout(folder.path(), "tune", &args));
    assert_eq!(
        before,
        std::fs::read(&state).expect("is there"),
        "nothing is measured again"
    );
    assert_eq!(first, second);
    let another = rollout(
        folder.path(),
        "tune",
        &[&args[..], &["--tolerance", "0.1"]].concat(),
    );
    assert_eq!(another.status.code(), Some(2), "the state of another sweep");

    let mut profiles = std::fs::read_dir(folder.path().join("profiles")).expect("a folder");
    let profile = profiles.next().expect("a profile").expect("readable").path();
    assert!(profiles.next().is_none());
    let mut content = json(&profile);
    assert_eq!(content["by"]["measured"], measured);
    assert!(
        content["by"]["default_tokens_per_s"][0]
            .as_f64()
            .is_some_and(|rate| rate > 0.0)
    );
    assert!(
        content["options"].get("kernels").is_none(),
        "the CPU's kernels have no options: {content}"
    );
    // Whatever was fastest in so short a run: later runs take what the file says.
    content["options"] = serde_json::json!({ "page_size": 32 });
    std::fs::write(&profile, content.to_string()).expect("writable");
    let stats = folder.path().join("stats.json");
    let page_size = |args: &[&str]| {
        let output = ["--stats-path", stats.to_str().expect("UTF-8")];
        stdout(&rollout(folder.path(), "bench", &[&output[..], args].concat()));
        let report = json(&stats);
        (report["page_size"].clone(), report["tuned"]["page_size"].clone())
    };
    assert_eq!(page_size(&[]), (32.into(), 32.into()));
    assert_eq!(page_size(&["--no-tuned-profile"]), (64.into(), Value::Null));
    assert_eq!(page_size(&["--page-size", "16"]).0, 16);
    let elsewhere = folder.path().join("elsewhere.json");
    std::fs::rename(&profile, &elsewhere).expect("movable");
    let elsewhere = elsewhere.to_str().expect("UTF-8");
    assert_eq!(page_size(&[]), (64.into(), Value::Null));
    assert_eq!(page_size(&["--tuned-profile", elsewhere]).0, 32);
    // A damaged profile ends a run that names it, and is passed over by one that does not.
    std::fs::write(elsewhere, "{").expect("writable");
    let refused = rollout(folder.path(), "bench", &["--tuned-profile", elsewhere]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("elsewhere.json"));
    std::fs::copy(elsewhere, &profile).expect("movable");
    assert_eq!(page_size(&[]), (64.into(), Value::Null));
}

#[test]
fn the_time_limit_ends_a_sweep_with_what_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = folder.path().join("profile.json");
    let args = [
        "--time-limit",
        "0.001s",
        "--profile",
        profile.to_str().expect("UTF-8"),
    ];
    let text = stdout(&rollout(folder.path(), "tune", &args));
    assert!(
        text.contains("the time is over") && text.contains("the defaults"),
        "{text}"
    );
    assert_eq!(json(&profile)["options"], serde_json::json!({}));
    assert!(!folder.path().join("profiles").exists());
}

#[test]
fn what_is_no_workload_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for (args, word) in [
        (&["--arrival-rate", "3"][..], "--arrival-rate"),
        (&["--context-lengths", "64"], "--context-lengths"),
        (&["--stats-path", "x"], "--stats-path"),
        (&["--time-limit", "5"], "90s"),
        (&["--tolerance", "11"], "tolerance"),
        (
            &["--state", "x", "--profile", "x"],
            "--profile is the file of --state",
        ),
        (&["--state", "/no/such/folder/state"], "/no/such/folder"),
    ] {
        let output = rollout(folder.path(), "tune", args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{args:?}");
        assert!(
            stderr.contains(word) && stderr.trim_end().lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
}
