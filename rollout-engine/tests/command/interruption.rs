//! Signals.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{DEADLINE, assert_error, command, finish, folder, lines, write};

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
