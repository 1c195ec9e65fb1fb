//! `rollout serve` as a process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::client::{get, post};
use crate::support::wait_until;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rollout"));
    command
        .arg("serve")
        .args(args)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A server with the bundled model on a port of the system's choice.
struct Serving {
    child: Child,
    address: SocketAddr,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Serving {
    fn start(args: &[&str]) -> Self {
        let small = [
            "--port",
            "0",
            "--device",
            "cpu",
            "--max-seq-length",
            "512",
            "--max-batch-size",
            "4",
        ];
        let mut child = command(&[&small, args].concat()).spawn().expect("starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains("http://") {
            line.clear();
            assert_ne!(stderr.read_line(&mut line).expect("readable"), 0, "it has ended");
        }
        let address = line
            .split("http://")
            .nth(1)
            .and_then(|rest| rest.split(',').next());
        let address = address.expect("an address").parse().expect("an address");
        Self {
            child,
            address,
            stderr,
        }
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([name, &self.child.id().to_string()])
            .status();
        assert!(status.expect("kill is there").success());
    }

    /// Its exit code and what it wrote until then.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        while self.stderr.read_line(&mut rest).expect("readable") > 0 {}
        (self.child.wait().expect("can be waited for").code(), rest)
    }
}

#[test]
#[cfg(unix)]
fn sigterm_lets_requests_finish_and_exits_with_0() {
    let serving = Serving::start(&[]);
    assert!(
        serving.address.ip().is_loopback(),
        "the default is open to the network"
    );
    let address = serving.address;
    let body = json!({
        "model": "tiny-qwen3-math", "prompt": "Count from 1 to 999 by 1.", "max_tokens": 300, "temperature": 0,
        "ignore_eos": true, "n": 4,
    });
    let request = std::thread::spawn(move || post(address, "/v1/completions", &body));
    wait_until("the request", || {
        get(address, "/metrics")
            .text()
            .contains("rollout_sequences_running 4")
    });
    serving.signal("-TERM");
    let answer = request.join().expect("no panic").ok();
    assert_eq!(answer["usage"]["completion_tokens"], 1200);
    let (code, rest) = serving.end();
    assert_eq!(code, Some(0), "{rest}");
    assert!(!rest.contains("panicked"), "{rest}");
}

#[test]
#[cfg(unix)]
fn a_pause_that_nobody_ends_is_logged_when_its_time_is_over() {
    // With vLLM's name of another flag.
    let serving = Serving::start(&["--pause-timeout", "0.3", "--enable-prefix-caching"]);
    let address = serving.address;
    post(address, "/pause?mode=keep", &json!({})).ok();
    let body = json!({ "model": "tiny-qwen3-math", "prompt": "x", "max_tokens": 2 });
    post(address, "/v1/completions", &body).ok();
    serving.signal("-TERM");
    let (code, rest) = serving.end();
    assert_eq!(code, Some(0), "{rest}");
    assert!(rest.contains("nobody has resumed generation in time"), "{rest}");
}

#[test]
#[cfg(unix)]
fn a_step_that_takes_longer_than_the_watchdog_waits_is_logged_and_so_is_its_end() {
    let serving = Serving::start(&["--watchdog-timeout", "0.002"]);
    let address = serving.address;
    // One step of hundreds of prompt tokens, and no other.
    let body = json!({ "model": "tiny-qwen3-math", "prompt": vec![7; 500], "max_tokens": 1 });
    post(address, "/v1/completions", &body).ok();
    wait_until("health", || get(address, "/health").status == 200);
    std::thread::sleep(std::time::Duration::from_millis(100));
    // To end in order takes longer, too.
    serving.signal("-KILL");
    let (_, rest) = serving.end();
    for line in ["the engine hangs: it has been", "the engine gets on again"] {
        // On a busy machine anything may take 2 ms; asked after the step every half a millisecond, it is not said each time.
        assert!((1..=4).contains(&rest.matches(line).count()), "{rest}");
    }
}

#[test]
#[cfg(unix)]
fn a_second_signal_ends_at_once() {
    let serving = Serving::start(&[]);
    let address = serving.address;
    let request = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let body = json!({
            "model": "tiny-qwen3-math", "prompt": "x", "n": 256, "max_tokens": 500, "ignore_eos": true,
        })
        .to_string();
        let mut stream = crate::client::connect(address);
        stream
            .write_all(&crate::client::post_bytes("/v1/completions", body.as_bytes()))
            .expect("writes");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    wait_until("the request", || {
        get(address, "/metrics")
            .text()
            .contains("rollout_sequences_running 4")
    });
    serving.signal("-INT");
    wait_until("the drain", || std::net::TcpStream::connect(address).is_err());
    serving.signal("-INT");
    assert_eq!(serving.end().0, Some(130));
    request.join().expect("no panic");
}

#[test]
fn adapters_and_a_key_from_the_command_line() {
    let adapter = crate::support::adapters().join("qv-r8");
    let adapter = format!("policy={}", adapter.display());
    let mut child = command(&["--api-key-env", "ROLLOUT_TEST_NO_SUCH_KEY"])
        .spawn()
        .expect("starts");
    assert_eq!(child.wait().expect("ends").code(), Some(2));

    let mut command = command(&[
        "--port",
        "0",
        "--device",
        "cpu",
        "--adapter",
        &adapter,
        "--api-key-env",
        "ROLLOUT_TEST_KEY",
    ]);
    let mut child = command.env("ROLLOUT_TEST_KEY", "k").spawn().expect("starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("readable");
    let address = line
        .split("http://")
        .nth(1)
        .and_then(|rest| rest.split(',').next());
    let address = address
        .unwrap_or_else(|| panic!("{line}"))
        .parse()
        .expect("an address");
    get(address, "/v1/models").error(401);
    let key = [("authorization", "Bearer k")];
    let models = crate::client::request(address, "GET", "/v1/models", &key, b"").ok();
    assert_eq!(models["data"][1]["id"], "policy");
    child.kill().expect("can be stopped");
    child.wait().expect("ends");
}

#[test]
fn what_cannot_be_served_is_one_line_and_an_exit_code() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    for (args, code, word) in [
        (
            &["--port", port.as_str(), "--device", "cpu"][..],
            1,
            "cannot listen",
        ),
        // Before the model is looked at, which can take long.
        (
            &["--port", port.as_str(), "--model", "/none/such"],
            1,
            "cannot listen",
        ),
        (&["--allow-root", "/none/such"], 2, "--allow-root"),
        (&["--adapter", "x"], 2, "NAME=DIR"),
        (&["--served-model-name", ""], 2, "--served-model-name"),
        (&["--host", "example"], 2, "--host"),
        (&["--model", "/none/such", "--device", "cpu"], 1, "/none/such"),
        (&["--adapter", "x=/none/such", "--device", "cpu"], 1, "/none/such"),
        (&["--pause-timeout", "0"], 2, "--pause-timeout"),
        (&["--watchdog-timeout", "soon"], 2, "--watchdog-timeout"),
        (
            &["--device", "cpu", "--no-capture-cudagraph"],
            2,
            "no effect on the CPU",
        ),
        (
            &["--device", "cpu", "--lora-pristine", "pinned"],
            2,
            "no effect on the CPU",
        ),
        (&["--pause-timeout", "soon"], 2, "seconds above 0"),
    ] {
        let output = command(args).output().expect("runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(
            stderr.contains(word) && stderr.trim_end().lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
}
