//! Shapes of requests and answers.

use rollout_engine::FakeRunner;
use rollout_engine::serve::harmless_fields;
use serde_json::{Value, json};

use crate::client::{self, request};
use crate::support::{VOCAB, completion_body, fake, floats, token_ids};

#[test]
fn a_list_of_prompts_with_n_is_answered_prompt_by_prompt() {
    let server = fake(|_| {});
    let prompts = [vec![1u32, 2, 3], vec![4, 5], vec![6]];
    let body = json!({
        "model": "base", "prompt": prompts, "n": 2, "max_tokens": 5, "temperature": 0,
        "logprobs": 0, "return_token_ids": true, "return_tokens_as_token_ids": true,
    });
    let reply = server.post("/v1/completions", &body);
    let answer = reply.ok();
    assert_eq!(reply.header("x-policy-version"), Some("0"));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "base");
    assert_eq!(answer["policy"]["version"], 0);
    assert_eq!(answer["policy"]["name"], "base");
    assert_eq!(
        answer["usage"],
        json!({ "prompt_tokens": 6, "completion_tokens": 30, "total_tokens": 36 })
    );
    let choices = answer["choices"].as_array().expect("a list");
    assert_eq!(choices.len(), 6);
    for (index, choice) in choices.iter().enumerate() {
        let prompt = &prompts[index / 2];
        let expected = FakeRunner::expected(prompt, 5, &[], VOCAB);
        let logprobs = FakeRunner::expected_logprobs(prompt, &expected);
        assert_eq!(choice["index"], index);
        assert_eq!(choice["prompt_token_ids"], json!(prompt));
        assert_eq!(token_ids(choice), expected);
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(floats(&choice["logprobs"]["token_logprobs"]), logprobs);
        let names: Vec<_> = expected.iter().map(|id| format!("token_id:{id}")).collect();
        assert_eq!(choice["logprobs"]["tokens"], json!(names));
        let given = choice["logprobs"]["token_logprobs"].as_array().expect("a list");
        let tops = choice["logprobs"]["top_logprobs"].as_array().expect("a list");
        for ((top, name), logprob) in tops.iter().zip(&names).zip(given) {
            assert_eq!(*top, json!({ name: logprob }));
        }
    }
    // One prompt, as a list of its own, gives the same.
    let alone = server.complete("base", &[1, 2, 3], 5).ok();
    assert_eq!(alone["choices"][0]["token_ids"], choices[0]["token_ids"]);
    assert_eq!(alone["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn a_stream_gives_what_the_whole_answer_gives() {
    let server = fake(|_| {});
    let mut body = completion_body("base", &[1, 2, 3], 6);
    body["n"] = json!(2);
    body["logprobs"] = json!(0);
    let whole = server.post("/v1/completions", &body).ok();
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let reply = server.post("/v1/completions", &body);
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("x-policy-version"), Some("0"));
    let events = reply.events();
    let mut ids = [vec![], vec![]];
    let mut logprobs = [vec![], vec![]];
    let mut ends = [Value::Null, Value::Null];
    for event in &events {
        assert_eq!(event["policy"]["version"], 0);
        assert_eq!(event["id"], events[0]["id"]);
        for choice in event["choices"].as_array().expect("a list") {
            let index = choice["index"].as_u64().expect("a number") as usize;
            assert!(ends[index].is_null(), "nothing follows the end");
            ids[index].extend(token_ids(choice));
            if let Some(list) = choice["logprobs"]["token_logprobs"].as_array() {
                logprobs[index].extend(list.clone());
            }
            ends[index] = choice["finish_reason"].clone();
        }
    }
    for index in 0..2 {
        assert_eq!(ids[index], token_ids(&whole["choices"][index]));
        assert_eq!(
            json!(logprobs[index]),
            whole["choices"][index]["logprobs"]["token_logprobs"]
        );
        assert_eq!(ends[index], "length");
    }
    let last = events.last().expect("events");
    assert_eq!(last["usage"], whole["usage"]);
    assert_eq!(last["choices"], json!([]));
}

#[test]
fn what_cannot_be_done_as_asked_is_refused_and_named() {
    let server = fake(|_| {});
    let ask = |change: Value| {
        let mut body = completion_body("base", &[1, 2, 3], 5);
        let (Value::Object(body), Value::Object(change)) = (&mut body, change) else {
            panic!("objects");
        };
        body.extend(change);
        server.post("/v1/completions", &Value::Object(body.clone()))
    };
    for (change, param) in [
        (json!({ "temprature": 1 }), "temprature"),
        (json!({ "logit_bias": { "1": 5 } }), "logit_bias"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": "2" }), "n"),
        (json!({ "prompt": 5 }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": null }), "prompt"),
        (json!({ "prompt": [[1], "a", 5] }), "prompt"),
        (json!({ "prompt": [1, -1] }), "prompt"),
        (json!({ "stop_token_ids": [97] }), "stop_token_ids"),
        (json!({ "model": null }), "model"),
        (
            json!({ "top_p": 0.5, "temperature": 1, "logprobs": 3 }),
            "logprobs",
        ),
    ] {
        let error = ask(change.clone()).error(400);
        assert_eq!(error["param"], param, "{change}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    for (change, words) in [
        (json!({ "prompt": [1, 97] }), "token 97 at position 1"),
        (json!({ "prompt": [[1], []] }), "empty"),
        (json!({ "prompt": vec![1; 64] }), "64 tokens"),
        (json!({ "prompt": "text" }), "no tokenizer"),
    ] {
        let error = ask(change.clone()).error(400);
        let message = error["message"].as_str().expect("a text");
        assert!(message.contains(words), "{change}: {message}");
    }
    // Of several prompts one cannot be done: the whole request is refused, and nothing of it is left.
    ask(json!({ "prompt": [[1, 2], [1, 97]] })).error(400);
    server.wait_for_metric("rollout_sequences_running", 0.0);
    assert_eq!(
        ask(json!({ "model": "other" })).error(404)["code"],
        "model_not_found"
    );
    for field in harmless_fields() {
        ask(json!({ *field: "anything" })).ok();
    }
    ask(json!({ "unknown": null, "best_of": 1, "echo": false })).ok();
}

#[test]
fn paths_and_methods_that_are_not_there() {
    let server = fake(|_| {});
    let error = server.get("/v2/completions").error(404);
    assert_eq!(error["code"], "no_such_path");
    server.get("/v1/completions").error(405);
    request(server.address, "DELETE", "/health", &[], b"").error(405);
}

#[test]
fn what_trainers_look_at_first() {
    let server = fake(|settings| settings.max_adapters = 5);
    for path in ["/health", "/liveness", "/ping"] {
        assert_eq!(server.get(path).ok(), json!({ "status": "ok" }));
    }
    let models = server.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "base");
    assert_eq!(models["data"][0]["max_model_len"], 64);
    assert_eq!(server.get("/v1/models/base").ok(), models["data"][0]);
    let error = server.get("/v1/models/an%20other/one").error(404);
    assert_eq!(error["code"], "model_not_found");
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|message| message.contains("an other/one"))
    );
    server.get("/v1/models/%ff").error(400);
    let info = server.get("/server_info?config_format=json").ok();
    let config = &info["vllm_config"];
    assert_eq!(config["model_config"]["dtype"], "torch.float32");
    assert_eq!(config["model_config"]["logprobs_mode"], "processed_logprobs");
    assert_eq!(config["lora_config"]["max_loras"], 5);
    assert_eq!(config["parallel_config"]["data_parallel_size"], 1);
    assert_eq!(server.get("/get_world_size").ok(), json!({ "world_size": 1 }));
    assert_eq!(
        server.post("/reset_prefix_cache", &json!({})).ok(),
        json!({ "success": true })
    );
    assert!(server.get("/version").ok()["version"].is_string());
}

#[test]
fn token_ids_in_and_out_as_skyrl_asks() {
    let server = fake(|_| {});
    let body = json!({
        "model": "base", "token_ids": [1, 2, 3], "cache_salt": "7",
        "sampling_params": { "max_tokens": 4, "temperature": 0, "logprobs": 0, "n": 2 },
    });
    let answer = server.post("/inference/v1/generate", &body).ok();
    let expected = FakeRunner::expected(&[1, 2, 3], 4, &[], VOCAB);
    let logprobs = FakeRunner::expected_logprobs(&[1, 2, 3], &expected);
    for choice in answer["choices"].as_array().expect("a list") {
        assert_eq!(token_ids(choice), expected);
        assert_eq!(choice["finish_reason"], "length");
        let content = choice["logprobs"]["content"].as_array().expect("a list");
        let given: Vec<_> = content.iter().map(|entry| entry["logprob"].clone()).collect();
        assert_eq!(floats(&json!(given)), logprobs);
    }
    let bad = json!({ "model": "base", "token_ids": [1], "sampling_params": { "typical_p": 1 } });
    let error = server.post("/inference/v1/generate", &bad).error(400);
    assert_eq!(error["param"], "sampling_params.typical_p");
}

#[test]
fn metrics_are_in_prometheus_format() {
    let server = fake(|_| {});
    server.complete("base", &[1, 2, 3], 5).ok();
    server.complete("none", &[1, 2, 3], 5).error(404);
    let reply = server.get("/metrics");
    assert!(
        reply
            .header("content-type")
            .is_some_and(|kind| kind.starts_with("text/plain; version=0.0.4"))
    );
    let text = reply.text();
    for line in text.lines() {
        let name = |line: &str| line.split([' ', '{']).next().map(str::to_string);
        match line.strip_prefix("# ") {
            Some(comment) => assert!(comment.starts_with("HELP ") || comment.starts_with("TYPE ")),
            None => {
                let value = line.rsplit(' ').next().expect("a value");
                assert!(value.parse::<f64>().is_ok(), "{line}");
                let name = name(line).expect("a name");
                let base = name
                    .trim_end_matches("_bucket")
                    .trim_end_matches("_sum")
                    .trim_end_matches("_count");
                assert!(text.contains(&format!("# TYPE {base} ")), "{name} has no type");
            }
        }
    }
    for line in [
        "rollout_generated_tokens_total 5",
        "rollout_completions_total 1",
        "rollout_kv_pages 60",
        "rollout_kv_pages_free 60",
        "rollout_http_answers_total{route=\"/v1/completions\",status=\"200\"} 1",
        "rollout_http_answers_total{route=\"/v1/completions\",status=\"404\"} 1",
        "rollout_request_seconds_count 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}

#[test]
fn one_connection_serves_many_requests() {
    use std::io::Write;
    let server = fake(|_| {});
    let mut stream = client::connect(server.address);
    for _ in 0..3 {
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            .expect("writes");
        let reply = client::read_reply(stream.try_clone().expect("clones"));
        assert_eq!(reply.status, 200);
    }
}
