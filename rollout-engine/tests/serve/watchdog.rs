//! An engine that is lost in a step or in a change of policy, and does not come back.

use std::time::Duration;

use rollout_engine::{Error, FakeRunner};
use serde_json::{Value, json};

use crate::support::{Running, VOCAB, adapters, completion_body, fake, token_ids, wait_until};

/// Well above what a step of these tests takes on a busy machine, unless it is held.
const TIMEOUT: Duration = Duration::from_millis(400);

fn impatient() -> Running {
    fake(|settings| {
        settings.watchdog_timeout = Some(TIMEOUT);
        settings.limits.drain_timeout = Duration::from_millis(200);
    })
}

fn complete_in_background(server: &Running) -> std::thread::JoinHandle<Value> {
    let address = server.address;
    let body = completion_body("base", &[1, 2, 3], 5);
    std::thread::spawn(move || crate::client::post(address, "/v1/completions", &body).ok())
}

fn wait_for_hang(server: &Running) -> String {
    wait_until("the hang", || server.get("/health").status == 503);
    let error = server.get("/health").error(503);
    assert_eq!(error["code"], "engine_hangs");
    error["message"].as_str().expect("words").to_string()
}

/// Such as a kernel that never ends. Whatever supervises the server asks these.
#[test]
fn a_step_that_does_not_end_is_unhealthy_until_it_does() {
    let server = impatient();
    server.gate.close();
    let running = complete_in_background(&server);
    server.gate.wait_for_steps(1);
    let message = wait_for_hang(&server);
    assert!(message.contains("computing one step"), "{message}");
    for path in ["/liveness", "/ping"] {
        server.get(path).error(503);
    }
    assert_eq!(server.metric("rollout_healthy"), 0.0);
    server.gate.open();
    let answer = running.join().expect("no panic");
    assert_eq!(
        token_ids(&answer["choices"][0]),
        FakeRunner::expected(&[1, 2, 3], 5, &[], VOCAB)
    );
    server.get("/health").ok();
    assert_eq!(server.metric("rollout_healthy"), 1.0);
}

#[test]
fn an_adapter_that_is_never_applied_is_unhealthy() {
    let server = impatient();
    server.gate.hold_changes(true);
    let (address, dir) = (server.address, adapters().join("qv-r8"));
    let body = json!({ "lora_name": "a", "lora_path": dir });
    let loading = std::thread::spawn(move || crate::client::post(address, "/v1/load_lora_adapter", &body));
    let message = wait_for_hang(&server);
    assert!(message.contains("applying adapters"), "{message}");
    server.gate.hold_changes(false);
    loading.join().expect("no panic").ok();
    server.get("/health").ok();
}

#[test]
fn waiting_is_no_hang_be_it_for_requests_or_for_the_end_of_a_pause() {
    let server = impatient();
    std::thread::sleep(2 * TIMEOUT);
    server.get("/health").ok();
    server.post("/pause?mode=keep", &json!({})).ok();
    let held = complete_in_background(&server);
    server.wait_for_metric("rollout_sequences_waiting", 1.0);
    std::thread::sleep(2 * TIMEOUT);
    server.get("/health").ok();
    server.post("/resume", &json!({})).ok();
    held.join().expect("no panic");
    // Nor is it one if a completion takes long, as long as its steps end.
    server.gate.slow(TIMEOUT / 8);
    let running = server.complete("base", &[1, 2, 3], 20);
    running.ok();
    server.get("/health").ok();
}

#[test]
fn with_no_time_set_nothing_is_a_hang() {
    let server = fake(|settings| settings.watchdog_timeout = None);
    server.gate.close();
    let running = complete_in_background(&server);
    server.gate.wait_for_steps(1);
    std::thread::sleep(2 * TIMEOUT);
    server.get("/health").ok();
    server.gate.open();
    running.join().expect("no panic");
}

/// It would wait for the step for ever, and whatever supervises it for it.
#[test]
fn a_server_that_is_told_to_end_leaves_an_engine_behind_that_hangs() {
    let mut server = impatient();
    server.gate.close();
    let address = server.address;
    let cut_off = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let body = completion_body("base", &[1, 2, 3], 5).to_string();
        let mut stream = crate::client::connect(address);
        let bytes = crate::client::post_bytes("/v1/completions", body.as_bytes());
        stream.write_all(&bytes).expect("writes");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    server.gate.wait_for_steps(1);
    server.tell_to_end();
    let error = server.ended().expect_err("the step has not ended");
    assert!(
        matches!(&error, Error::EngineHangs { reason } if reason.contains("computing one step")),
        "{error}"
    );
    cut_off.join().expect("no panic");
}
