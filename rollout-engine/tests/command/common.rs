//! Running the command, and files for it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longer than any run here should take, even unoptimised on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);

pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rollout"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the end, but not for ever.
pub(crate) fn finish(mut child: Child) -> Outcome {
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

pub(crate) fn run(args: &[&str]) -> Outcome {
    finish(command(args).spawn().expect("the command starts"))
}

/// Runs `generate` on the CPU without notices.
pub(crate) fn generate(args: &[&str]) -> Outcome {
    run(&[&["generate", "--device", "cpu", "--quiet"], args].concat())
}

/// Checks an error: its exit code, that it is one line and says these words.
pub(crate) fn assert_error(outcome: &Outcome, code: i32, words: &[&str], what: &str) {
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

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

pub(crate) fn write(dir: &Path, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = dir.join(name);
    std::fs::write(&path, content).expect("writable");
    path.to_str().expect("a UTF-8 path").to_string()
}

pub(crate) fn tiny_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math")
}

pub(crate) fn lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a whole JSON line"))
        .collect()
}

/// Runs `generate --quiet` on the CPU with two prompts in a shell, behind `prefix` and before `suffix`.
#[cfg(unix)]
pub(crate) fn shell(dir: &Path, prefix: &str, arguments: &str, suffix: &str) -> Outcome {
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

pub(crate) fn adapter(name: &str) -> String {
    format!("{}/../fixtures/adapters/{name}", env!("CARGO_MANIFEST_DIR"))
}
