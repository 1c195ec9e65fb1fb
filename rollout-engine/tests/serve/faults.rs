//! Clients that go away, read slowly or never speak; an engine that fails.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use rollout_engine::{Error, FakeRunner};
use serde_json::json;

use crate::client::{connect, exchange, post_bytes};
use crate::support::{VOCAB, completion_body, fake, fake_over, shape, token_ids, wait_until};

#[test]
fn a_client_that_goes_away_frees_its_pages_within_one_step() {
    for stream in [false, true] {
        let server = fake(|_| {});
        server.gate.close();
        let mut body = completion_body("base", &[1, 2, 3], 50);
        body["stream"] = json!(stream);
        body["n"] = json!(3);
        let mut client = connect(server.address);
        client
            .write_all(&post_bytes("/v1/completions", body.to_string().as_bytes()))
            .expect("writes");
        server.gate.wait_for_steps(1);
        (0..3).for_each(|_| server.gate.pass_one());
        server.gate.wait_for_steps(4);
        // The fourth step is under way.
        drop(client);
        // The connection that asks is the only one left: the server has seen the other one end.
        server.wait_for_metric("rollout_http_connections", 1.0);
        server.gate.pass_one();
        wait_until("free pages", || server.metric("rollout_kv_pages_free") == 60.0);
        assert_eq!(server.gate.steps(), 4, "a step was taken for nobody");
        assert_eq!(server.metric("rollout_sequences_waiting"), 0.0);
        server.gate.open();
        server.complete("base", &[1, 2, 3], 5).ok();
    }
}

#[test]
fn a_client_that_goes_away_while_waiting_is_never_computed() {
    let server = fake(|_| {});
    server.gate.close();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            let mut body = completion_body("base", &[1, 2, 3], 10);
            body["n"] = json!(4);
            server.post("/v1/completions", &body)
        });
        server.gate.wait_for_steps(1);
        let mut client = connect(server.address);
        let body = completion_body("base", &[4, 5], 10).to_string();
        client
            .write_all(&post_bytes("/v1/completions", body.as_bytes()))
            .expect("writes");
        server.wait_for_metric("rollout_sequences_waiting", 1.0 + 4.0);
        drop(client);
        server.wait_for_metric("rollout_sequences_waiting", 4.0);
        server.gate.open();
        running.join().expect("no panic").ok();
        assert_eq!(server.metric("rollout_generated_tokens_total"), 40.0);
    });
}

#[test]
fn a_reader_that_reads_nothing_stalls_nobody_and_is_cut_off() {
    let server = fake(|settings| settings.limits.write_timeout = Duration::from_millis(500));
    // Long pieces, so that they fill what the system keeps for the socket.
    let mut body = completion_body("base", &[], 60);
    body["prompt"] = json!([[1, 2, 3], [1, 2, 4]]);
    body["stream"] = json!(true);
    body["n"] = json!(256);
    body["logprobs"] = json!(0);
    let mut slow = connect(server.address);
    slow.write_all(&post_bytes("/v1/completions", body.to_string().as_bytes()))
        .expect("writes");
    server.gate.wait_for_steps(1);
    let answer = server.complete("base", &[7, 8], 10).ok();
    assert_eq!(
        token_ids(&answer["choices"][0]),
        FakeRunner::expected(&[7, 8], 10, &[], VOCAB)
    );
    // It is disconnected: only the connection that asks for the metric is left.
    server.wait_for_metric("rollout_http_connections", 1.0);
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    assert!(
        !rest.ends_with(b"[DONE]\n\n\r\n0\r\n\r\n"),
        "it was served to the end"
    );
}

#[test]
fn half_open_connections_are_closed_and_give_way() {
    let server = fake(|settings| {
        settings.limits.header_timeout = Duration::from_millis(300);
        settings.limits.body_timeout = Duration::from_millis(300);
        settings.limits.max_connections = 4;
    });
    let mut silent = connect(server.address);
    let mut partial = connect(server.address);
    partial.write_all(b"POST /v1/completions HTT").expect("writes");
    let mut headers = connect(server.address);
    headers
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: b\r\n")
        .expect("writes");
    let mut body = connect(server.address);
    body.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":")
        .expect("writes");
    // All places are taken; the next one is served as soon as one is free.
    let start = Instant::now();
    assert_eq!(server.get("/health").status, 200);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    for stream in [&mut silent, &mut partial, &mut headers] {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.starts_with(b"HTTP/1.1 200"));
    }
    let mut rest = Vec::new();
    let _ = body.read_to_end(&mut rest);
    assert!(
        rest.starts_with(b"HTTP/1.1 408"),
        "{}",
        String::from_utf8_lossy(&rest)
    );
}

#[test]
fn a_client_that_keeps_its_side_open_after_a_refusal_gives_its_place_back() {
    let server = fake(|_| {});
    let mut clients: Vec<_> = (0..3).map(|_| connect(server.address)).collect();
    for client in &mut clients {
        let head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{";
        client.write_all(head).expect("writes");
        let mut answer = [0; 12];
        client.read_exact(&mut answer).expect("is answered");
        assert_eq!(&answer, b"HTTP/1.1 413");
    }
    server.wait_for_metric("rollout_http_connections", 1.0);
}

#[test]
fn ten_thousand_quick_connections_leave_it_serving() {
    let server = fake(|_| {});
    for i in 0..10_000u32 {
        let mut stream = connect(server.address);
        match i % 4 {
            0 => {}
            1 => stream.write_all(b"GET / HT").expect("writes"),
            2 => {
                let _ = stream.write_all(b"\0\xff\xfe nonsense\r\n\r\n");
            }
            _ => {
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
    }
    server.complete("base", &[1, 2, 3], 5).ok();
    server.wait_for_metric("rollout_http_connections", 1.0);
    assert!(server.metric("rollout_http_connections_total") > 9_000.0);
}

#[test]
fn broken_bodies_are_refused_and_leave_it_serving() {
    let server = fake(|_| {});
    let deep = "[".repeat(100_000);
    let deep_object = format!("{{\"model\":{deep}");
    for body in [
        &b""[..],
        b"{",
        b"[]",
        b"null",
        b"\"text\"",
        b"{\"model\": \"base\", \"prompt\": [1, 2}",
        b"{\"model\": \"base\", \"prompt\": \"\xff\xfe\"}",
        b"{\"model\": \"\xed\xa0\x80\", \"prompt\": [1]}",
        b"{\"model\": \"base\", \"prompt\": \"\\ud800\"}",
        b"{\"model\": \"base\", \"prompt\": [1], \"temperature\": 1e999}",
        b"{\"model\": \"base\", \"prompt\": [1], \"temperature\": NaN}",
        deep.as_bytes(),
        deep_object.as_bytes(),
        &[0u8; 1000],
    ] {
        for path in [
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/load_lora_adapter",
            "/tokenize",
        ] {
            let reply = exchange(server.address, &post_bytes(path, body));
            let error = reply.error(400);
            assert_eq!(error["type"], "invalid_request_error", "{error}");
        }
    }
    server.complete("base", &[1, 2, 3], 5).ok();
}

#[test]
fn a_failed_step_fails_its_requests_and_no_later_ones() {
    let server = fake_over(FakeRunner::new(shape()).failing_after(3), |_| {});
    let error = server.complete("base", &[1, 2, 3], 20).error(500);
    assert_eq!(error["type"], "server_error");
    assert_eq!(server.get("/health").status, 200);
    let answer = server.complete("base", &[1, 2, 3], 20).ok();
    assert_eq!(
        token_ids(&answer["choices"][0]),
        FakeRunner::expected(&[1, 2, 3], 20, &[], VOCAB)
    );
}

/// Whatever supervises it sees that, and can start it anew; a process that answers nothing would be left alone.
#[test]
fn a_server_whose_engine_is_gone_ends_with_an_error() {
    let mut server = fake(|_| {});
    server.complete("base", &[1, 2, 3], 5).ok();
    server.gate.break_next();
    server.complete("base", &[1, 2, 3], 5).error(500);
    let error = server.ended().expect_err("a panic");
    assert!(matches!(error, Error::EngineEnded), "{error}");
}

/// What a step returns after a fault of the driver.
#[cfg(feature = "cuda")]
fn of_driver(code: u32) -> Error {
    let error = cuda_graphs::Error::Driver {
        call: "cuGraphLaunch",
        code,
        name: format!("error {code}"),
        detail: String::new(),
    };
    qwen3_model::Error::Cuda(error).into()
}

#[test]
#[cfg(feature = "cuda")]
fn a_server_whose_device_is_lost_ends_with_an_error() {
    let mut server = fake(|_| {});
    // After too little memory for one step the next may work.
    server.gate.fail(|| of_driver(2));
    server.complete("base", &[1, 2, 3], 5).error(500);
    server.complete("base", &[1, 2, 3], 5).error(500);
    server.gate.fail(|| of_driver(700));
    let error = server.complete("base", &[1, 2, 3], 5).error(500);
    assert!(
        error["message"].as_str().is_some_and(|m| m.contains("error 700")),
        "{error}"
    );
    let error = server.ended().expect_err("a lost device");
    assert!(
        matches!(&error, Error::DeviceLost { reason } if reason.contains("cuGraphLaunch")),
        "{error}"
    );
}

#[test]
fn logits_that_are_not_finite_fail_one_request_alone() {
    let bad = FakeRunner::expected(&[9, 9], 8, &[], VOCAB);
    let good = FakeRunner::expected(&[1, 2, 3], 20, &[], VOCAB);
    let nan = *bad
        .iter()
        .find(|token| !good.contains(token))
        .expect("one that the other has not");
    let server = fake_over(FakeRunner::new(shape()).with_nan_token(nan), |_| {});
    std::thread::scope(|scope| {
        let other = scope.spawn(|| server.complete("base", &[1, 2, 3], 20).ok());
        let mut body = completion_body("base", &[9, 9], 8);
        let error = server.post("/v1/completions", &body).error(500);
        assert!(
            error["message"].as_str().is_some_and(|m| m.contains("NaN")),
            "{error}"
        );
        // Within a stream the error is its last event.
        body["stream"] = json!(true);
        let reply = server.post("/v1/completions", &body);
        let last = reply
            .text()
            .trim_end()
            .rsplit("\n\n")
            .next()
            .expect("an event")
            .to_string();
        assert!(last.starts_with("data: {\"error\":"), "{last}");
        assert_eq!(token_ids(&other.join().expect("no panic")["choices"][0]), good);
    });
}

#[test]
fn at_its_end_it_finishes_what_it_has() {
    let mut server = fake(|_| {});
    server.gate.close();
    let address = server.address;
    let body = completion_body("base", &[1, 2, 3], 20);
    let request = std::thread::spawn(move || crate::client::post(address, "/v1/completions", &body));
    server.gate.wait_for_steps(1);
    let ended = server.shut_down();
    wait_until("the listener's end", || {
        std::net::TcpStream::connect(address).is_err()
    });
    assert!(!ended.is_finished());
    server.gate.open();
    let answer = request.join().expect("no panic").ok();
    assert_eq!(
        token_ids(&answer["choices"][0]),
        FakeRunner::expected(&[1, 2, 3], 20, &[], VOCAB)
    );
    ended.join().expect("ends without a panic");
}

/// It failed them, where it lets requests finish that no pause holds.
#[test]
fn at_its_end_it_finishes_what_a_pause_waits_for() {
    let mut server = fake(|_| {});
    server.gate.close();
    let address = server.address;
    let body = completion_body("base", &[1, 2, 3], 20);
    let request = std::thread::spawn(move || crate::client::post(address, "/v1/completions", &body));
    server.gate.wait_for_steps(1);
    let pausing = std::thread::spawn(move || crate::client::post(address, "/pause?mode=wait", &json!({})));
    server
        .gate
        .pass_until(|| server.metric("rollout_paused") == 1.0 || request.is_finished());
    let ended = server.shut_down();
    wait_until("the listener's end", || {
        std::net::TcpStream::connect(address).is_err()
    });
    server.gate.open();
    request.join().expect("no panic").ok();
    pausing.join().expect("no panic").ok();
    ended.join().expect("ends without a panic");
}

#[test]
fn at_its_end_it_does_not_wait_for_ever() {
    let mut server = fake(|settings| settings.limits.drain_timeout = Duration::from_millis(200));
    server.gate.slow(Duration::from_millis(20));
    let address = server.address;
    let mut body = completion_body("base", &[1, 2, 3], 60);
    body["n"] = json!(256);
    let request = std::thread::spawn(move || {
        let mut stream = connect(address);
        stream
            .write_all(&post_bytes("/v1/completions", body.to_string().as_bytes()))
            .expect("writes");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        rest
    });
    server.gate.wait_for_steps(1);
    let start = Instant::now();
    server.shut_down().join().expect("ends without a panic");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    let rest = request.join().expect("no panic");
    assert!(!rest.starts_with(b"HTTP/1.1 200"));
}

#[test]
fn at_its_end_it_does_not_wait_for_a_body_that_stays_away() {
    let mut server = fake(|settings| settings.limits.drain_timeout = Duration::from_secs(100));
    let mut half = connect(server.address);
    half.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":")
        .expect("writes");
    server.wait_for_metric("rollout_http_connections", 2.0);
    // Its headers have arrived: what a connection sends is read in order.
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    server.shut_down().join().expect("ends without a panic");
    assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());
    let mut rest = Vec::new();
    let _ = half.read_to_end(&mut rest);
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.starts_with("HTTP/1.1 503"), "{rest}");
}

#[test]
fn what_a_pause_holds_fails_at_the_end() {
    let mut server = fake(|_| {});
    server.post("/pause?mode=keep", &json!({})).ok();
    let address = server.address;
    let body = completion_body("base", &[1, 2, 3], 20);
    let request = std::thread::spawn(move || crate::client::post(address, "/v1/completions", &body));
    server.wait_for_metric("rollout_sequences_waiting", 1.0);
    server.shut_down().join().expect("ends without a panic");
    request.join().expect("no panic").error(503);
}
