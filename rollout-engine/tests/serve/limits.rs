//! Bounds on what clients may ask for, and who may ask.

use std::io::Write;
use std::time::Duration;

use serde_json::json;

use crate::client::{connect, exchange, post_bytes, read_reply, request};
use crate::support::{completion_body, fake, wait_until};

#[test]
fn a_full_queue_is_answered_with_429_and_a_time_to_come_back() {
    let server = fake(|settings| settings.limits.max_unfinished = 6);
    server.gate.close();
    let mut body = completion_body("base", &[1, 2, 3], 5);
    std::thread::scope(|scope| {
        body["n"] = json!(5);
        let body = &body;
        let server = &server;
        let first = scope.spawn(move || server.post("/v1/completions", body));
        server.gate.wait_for_steps(1);
        let reply = server.post("/v1/completions", body);
        let error = reply.error(429);
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("rate_limit_error"), &json!("queue_full"))
        );
        let seconds: u64 = reply
            .header("retry-after")
            .expect("a time")
            .parse()
            .expect("a number");
        assert!((1..=60).contains(&seconds));
        assert_eq!(server.metric("rollout_rejected_total"), 1.0);
        // One more fits.
        let second = scope.spawn(|| server.complete("base", &[1, 2, 3], 5));
        server.wait_for_metric("rollout_sequences_waiting", 6.0);
        server.complete("base", &[1, 2, 3], 5).error(429);
        server.gate.open();
        first.join().expect("no panic").ok();
        second.join().expect("no panic").ok();
        server.post("/v1/completions", body).ok();
    });
    // What can never fit is told to be so.
    body["n"] = json!(7);
    assert_eq!(
        server.post("/v1/completions", &body).error(400)["code"],
        "too_many_completions"
    );
}

#[test]
fn bodies_headers_and_numbers_are_limited() {
    let server = fake(|settings| {
        settings.limits.max_body_bytes = 10_000;
        settings.limits.max_n = 3;
        settings.limits.max_logprobs = 2;
    });
    let long = vec![b' '; 10_001];
    exchange(server.address, &post_bytes("/v1/completions", &long)).error(413);
    // The same without a declared length.
    let mut stream = connect(server.address);
    let _ = stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2711\r\n");
    let _ = stream.write_all(&long);
    let _ = stream.write_all(b"\r\n");
    read_reply(stream).error(413);
    let value = "x".repeat(20_000);
    assert_eq!(
        request(server.address, "GET", "/health", &[("x-long", &value)], b"").status,
        431
    );
    let many: Vec<_> = (0..200).map(|i| (format!("x-{i}"), "v")).collect();
    let many: Vec<_> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(request(server.address, "GET", "/health", &many, b"").status, 431);
    let mut body = completion_body("base", &[1], 1);
    body["n"] = json!(4);
    assert_eq!(server.post("/v1/completions", &body).error(400)["param"], "n");
    body["n"] = json!(3);
    body["logprobs"] = json!(3);
    assert_eq!(
        server.post("/v1/completions", &body).error(400)["param"],
        "logprobs"
    );
    let error = server.complete("base", &[1; 64], 1).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    server.complete("base", &[1, 2, 3], 5).ok();
}

#[test]
fn limits_that_say_any_are_no_limits() {
    let server = fake(|settings| {
        let limits = &mut settings.limits;
        limits.max_unfinished = usize::MAX;
        limits.max_body_bytes = usize::MAX;
        limits.max_header_bytes = usize::MAX;
        limits.max_headers = usize::MAX;
        limits.max_connections = usize::MAX;
        for time in [
            &mut limits.header_timeout,
            &mut limits.body_timeout,
            &mut limits.write_timeout,
            &mut limits.drain_timeout,
        ] {
            *time = Duration::MAX;
        }
        settings.policy_patience = Duration::MAX;
    });
    server.complete("base", &[1, 2, 3], 5).ok();
    let mut body = completion_body("base", &[1, 2, 3], 5);
    body["stream"] = json!(true);
    assert!(!server.post("/v1/completions", &body).events().is_empty());
}

#[test]
fn without_the_key_only_its_health_is_told() {
    let server = fake(|settings| settings.api_key = Some("sésame".into()));
    let ask = |path: &str, key: Option<&str>| {
        let headers: Vec<_> = key.map(|key| ("authorization", key)).into_iter().collect();
        request(server.address, "GET", path, &headers, b"")
    };
    for path in ["/v1/models", "/server_info", "/metrics", "/none"] {
        for key in [
            None,
            Some("Bearer "),
            Some("Bearer sesame"),
            Some("Bearer sésam"),
            Some("sésame"),
            Some("Basic sésame"),
        ] {
            let reply = ask(path, key);
            assert_eq!(reply.error(401)["code"], "invalid_api_key", "{path} {key:?}");
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        }
    }
    ask("/v1/models", Some("Bearer sésame")).ok();
    ask("/v1/models", Some("bearer sésame")).ok();
    ask("/health", None).ok();
    // The body of a stranger is not read.
    let big = vec![b' '; 1 << 20];
    exchange(server.address, &post_bytes("/v1/completions", &big)).error(401);
}

#[test]
fn web_pages_are_not_served() {
    let server = fake(|_| {});
    let origin = [("origin", "http://localhost:8000")];
    request(server.address, "POST", "/pause", &origin, b"").error(403);
    assert_eq!(server.metric("rollout_paused"), 0.0);
}

#[test]
fn an_idle_connection_is_closed() {
    use std::io::Read;
    let server = fake(|settings| settings.limits.header_timeout = Duration::from_millis(200));
    let mut stream = connect(server.address);
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        .expect("writes");
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("is closed in order");
    assert!(all.starts_with("HTTP/1.1 200"), "{all}");
}

#[test]
fn a_full_server_tells_its_health_and_can_be_told_to_go_on() {
    let server = fake(|settings| settings.limits.max_connections = 4);
    server.post("/pause?mode=keep", &json!({})).ok();
    let body = serde_json::to_vec(&completion_body("base", &[1, 2, 3], 5)).expect("JSON");
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = connect(server.address);
            stream
                .write_all(&post_bytes("/v1/completions", &body))
                .expect("writes");
            stream
        })
        .collect();
    wait_until("all wait", || server.metric("rollout_sequences_waiting") == 4.0);
    // More often than there are places beyond the limit: none of them is kept.
    for _ in 0..100 {
        server.get("/health").ok();
    }
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
    ] {
        let refused = server.post(path, &json!({}));
        assert_eq!(refused.error(429)["code"], "too_many_connections");
        assert_eq!(refused.header("retry-after"), Some("1"));
        assert_eq!(refused.header("connection"), Some("close"));
    }
    server.post("/resume", &json!({})).ok();
    for stream in waiting {
        read_reply(stream).ok();
    }
    server.wait_for_metric("rollout_http_connections", 1.0);
    server.complete("base", &[1, 2, 3], 5).ok();
}
