//! Output that cannot be written, or must not be.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{assert_error, command, finish, folder, generate, lines, shell, tiny_model, write};

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
fn one_file_for_two_results_is_refused() {
    let dir = folder();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    // Under two names, neither of which is there yet.
    let name = dir.path().file_name().expect("a name").to_str().expect("UTF-8");
    let (plain, roundabout) = (path("out"), path(&format!("../{name}/out")));
    for (first, second) in [
        ("--output", "--metrics"),
        ("--trace", "--output"),
        ("--trace", "--metrics"),
    ] {
        for other in [&plain, &roundabout] {
            let outcome = generate(&["--prompt", "a", first, &plain, second, other]);
            assert_error(&outcome, 2, &[second, first, "name another one"], other);
            let _ = std::fs::remove_file(&plain);
        }
    }
    if Path::new("/dev/null").exists() {
        let outcome = generate(&["--prompt", "a", "--output", "/dev/null", "--metrics", "/dev/null"]);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
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
    // More than a pipe holds: however late the reader goes, the command has not written everything by then.
    let dir = folder();
    let prompts = write(dir.path(), "in.jsonl", "{\"prompt\": \"Count\"}\n".repeat(200));
    let mut child = command(&[
        "generate",
        "--device",
        "cpu",
        "--prompts",
        &prompts,
        "--output",
        "-",
    ])
    .spawn()
    .expect("starts");
    let mut first = [0];
    let mut reader = child.stdout.take().expect("a pipe");
    reader.read_exact(&mut first).expect("something is written");
    drop(reader);
    let outcome = finish(child);
    assert_eq!(
        (first, outcome.code, outcome.stderr.as_str()),
        ([b'{'], Some(141), ""),
        "as of a program that SIGPIPE ended"
    );
    // Little output: the reader has gone before the command begins.
    for args in [
        &["generate", "--help"][..],
        &[
            "generate",
            "--device",
            "cpu",
            "--max-new-tokens",
            "1",
            "--output",
            "-",
        ],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let outcome = finish(command(args).stdout(writer).spawn().expect("starts"));
        assert_eq!(
            (outcome.code, outcome.stderr.as_str()),
            (Some(141), ""),
            "{args:?}"
        );
    }
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
