//! Generation that is held, and what happens if nobody lets it go on.

use std::io::Write;
use std::time::{Duration, Instant};

use rollout_engine::FakeRunner;
use serde_json::{Value, json};

use crate::client::{connect, post_bytes, read_reply, request};
use crate::support::{Running, VOCAB, completion_body, fake, token_ids, wait_until};

fn is_paused(server: &Running) -> bool {
    server.get("/is_paused").ok()["is_paused"] == true
}

fn pause(server: &Running, query: &str, body: &Value) {
    assert_eq!(
        server.post(&format!("/pause{query}"), body).ok(),
        json!({ "status": "paused" })
    );
}

fn resume(server: &Running) {
    server.post("/resume", &json!({})).ok();
    assert!(!is_paused(server));
}

/// A trainer that has died does not resume.
#[test]
fn a_pause_whose_time_is_over_ends_by_itself() {
    let server = fake(|_| {});
    for (query, body) in [
        ("?mode=keep&timeout=0.4", json!({})),
        ("", json!({ "mode": "keep", "timeout": 0.4 })),
    ] {
        let start = Instant::now();
        pause(&server, query, &body);
        assert!(is_paused(&server) || start.elapsed() >= Duration::from_millis(400));
        let answer = server.complete("base", &[1, 2, 3], 5).ok();
        assert!(start.elapsed() >= Duration::from_millis(400), "it was not held");
        assert_eq!(
            token_ids(&answer["choices"][0]),
            FakeRunner::expected(&[1, 2, 3], 5, &[], VOCAB)
        );
        assert!(!is_paused(&server));
    }
}

#[test]
fn the_time_of_an_earlier_pause_does_not_end_a_later_one() {
    let server = fake(|_| {});
    pause(&server, "?mode=keep&timeout=0.2", &json!({}));
    resume(&server);
    pause(&server, "?mode=keep", &json!({}));
    std::thread::sleep(Duration::from_millis(400));
    assert!(is_paused(&server));
    // Nor if the earlier one is still on: the later call counts.
    pause(&server, "?mode=keep&timeout=0.2", &json!({}));
    pause(&server, "?mode=keep&timeout=60", &json!({}));
    std::thread::sleep(Duration::from_millis(400));
    assert!(is_paused(&server));
    resume(&server);
}

#[test]
fn the_server_has_a_time_for_pauses_that_name_none() {
    let server = fake(|settings| settings.pause_timeout = Some(Duration::from_millis(300)));
    pause(&server, "?mode=keep", &json!({}));
    wait_until("the end of the pause", || !is_paused(&server));
    pause(&server, "?mode=keep&timeout=60", &json!({}));
    std::thread::sleep(Duration::from_millis(600));
    assert!(is_paused(&server));
}

/// Its connection ends, and with it the call; what it has asked for goes on.
#[test]
fn a_trainer_that_dies_while_it_waits_for_a_pause_holds_nobody_up_for_longer() {
    let server = fake(|_| {});
    server.gate.close();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("base", &[1, 2, 3], 5).ok());
        server.gate.wait_for_steps(1);
        let mut trainer = connect(server.address);
        trainer
            .write_all(&post_bytes("/pause?mode=wait&timeout=1.5", b"{}"))
            .expect("writes");
        server.gate.pass_until(|| is_paused(&server));
        drop(trainer);
        server.gate.open();
        running.join().expect("no panic");
        // What comes now is held until the time is over.
        server.complete("base", &[4, 5], 5).ok();
        assert!(!is_paused(&server));
    });
}

/// The mode of a pause decides what is lost: it must not be overlooked.
#[test]
fn the_mode_may_stand_in_the_body_and_switches_in_any_case() {
    let server = fake(|_| {});
    server.gate.close();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("base", &[1, 2, 3], 5));
        server.gate.wait_for_steps(1);
        // As clients write it: `params={"clear_cache": False}` of Python's requests, and JSON.
        let pausing = scope.spawn(|| pause(&server, "?clear_cache=False", &json!({ "mode": "keep" })));
        server.gate.pass_until(|| pausing.is_finished());
        pausing.join().expect("no panic");
        pause(&server, "", &json!({ "mode": "keep", "clear_cache": true }));
        resume(&server);
        server.gate.open();
        running.join().expect("no panic").ok();
    });
    let reply = request(server.address, "POST", "/pause?mode=keep", &[], b"");
    assert_eq!(reply.ok()["status"], "paused");
    resume(&server);
    for (query, body, param) in [
        ("?mode=sometimes", json!({}), "mode"),
        ("", json!({ "mode": 1 }), "mode"),
        ("?clear_cache=perhaps", json!({}), "clear_cache"),
        ("?timeout=0", json!({}), "timeout"),
        ("?timeout=-1", json!({}), "timeout"),
        ("?timeout=soon", json!({}), "timeout"),
        ("?timeout=1e300", json!({}), "timeout"),
        ("", json!({ "timeout": true }), "timeout"),
        ("?moed=keep", json!({}), "moed"),
    ] {
        let error = server.post(&format!("/pause{query}"), &body).error(400);
        assert_eq!(error["param"], param, "{query} {body}: {error}");
    }
    assert!(!is_paused(&server), "a refused call has paused");
}

#[test]
fn a_pause_that_comes_at_the_end_holds_up_nothing() {
    let mut server = fake(|settings| settings.limits.drain_timeout = Duration::from_secs(100));
    server.gate.close();
    let address = server.address;
    let body = completion_body("base", &[1, 2, 3], 20);
    let running = std::thread::spawn(move || crate::client::post(address, "/v1/completions", &body));
    server.gate.wait_for_steps(1);
    let mut trainer = connect(address);
    let pause = post_bytes("/pause?mode=keep", b"{}");
    trainer.write_all(&pause[..pause.len() - 1]).expect("writes");
    server.wait_for_metric("rollout_http_connections", 3.0);
    let start = Instant::now();
    let ended = server.shut_down();
    wait_until("the listener's end", || {
        std::net::TcpStream::connect(address).is_err()
    });
    trainer.write_all(&pause[pause.len() - 1..]).expect("writes");
    // Its answer comes between two steps.
    let reply = std::thread::spawn(move || read_reply(trainer));
    server.gate.pass_until(|| reply.is_finished());
    assert_eq!(reply.join().expect("no panic").status, 200);
    server.gate.open();
    running.join().expect("no panic").ok();
    ended.join().expect("ends without a panic");
    assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
}
