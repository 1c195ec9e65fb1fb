//! The bundled model through the server, against the engine itself.

use std::sync::OnceLock;

use rollout_engine::serve::{LogprobsMode, ServeSettings, Server};
use rollout_engine::{DeviceChoice, Engine, Request, SamplingParams, bundled};
use serde_json::{Value, json};

use crate::client::Reply;
use crate::support::{Gate, Running, floats, settings, start, token_ids, wait_until};

pub(crate) fn builder() -> rollout_engine::EngineBuilder {
    Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(8)
        .max_seq_length(400)
        .page_size(16)
        .n_pages(1 + 8 * 25)
}

fn server(change: impl FnOnce(&mut ServeSettings)) -> Running {
    let mut settings = settings();
    change(&mut settings);
    start(
        Server::from_builder(builder(), settings).expect("loads"),
        Gate::default(),
    )
}

/// What the engine gives without a server.
fn direct(requests: &[Request]) -> Vec<rollout_engine::Completion> {
    static ENGINE: OnceLock<std::sync::Mutex<Engine>> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| std::sync::Mutex::new(builder().build().expect("loads")));
    let results = engine.lock().expect("no panic").generate(requests).expect("runs");
    results
        .into_iter()
        .map(|result| result.expect("completes"))
        .collect()
}

fn chat_body(change: Value) -> Value {
    let mut body = json!({
        "model": "base",
        "messages": [{ "role": "user", "content": bundled::PROMPTS[2] }],
        "max_tokens": 60,
        "temperature": 0,
    });
    let (Value::Object(map), Value::Object(change)) = (&mut body, change) else {
        panic!("objects");
    };
    map.extend(change);
    body
}

/// The contents of a streamed chat, put together, and the finish reasons.
fn chat_content(reply: &Reply) -> (String, Vec<Value>) {
    let mut content = String::new();
    let mut reasons = Vec::new();
    for (i, event) in reply.events().iter().enumerate() {
        let choice = &event["choices"][0];
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(choice["delta"].get("role").is_some(), i == 0);
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        if !choice["finish_reason"].is_null() {
            reasons.push(choice["finish_reason"].clone());
        }
    }
    (content, reasons)
}

#[test]
fn chats_are_those_of_the_engine_whole_and_in_pieces() {
    let server = server(|_| {});
    let expected = &direct(&[Request::user(bundled::PROMPTS[2]).max_new_tokens(60)])[0];
    let answer = server.post("/v1/chat/completions", &chat_body(json!({}))).ok();
    let choice = &answer["choices"][0];
    assert_eq!(
        choice["message"],
        json!({ "role": "assistant", "content": expected.text })
    );
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens"], expected.prompt_token_ids.len());
    assert!(expected.text.contains("#### 80"), "{}", expected.text);
    // Content in parts is the same content.
    let parts = json!([{ "role": "user", "content": [{ "type": "text", "text": bundled::PROMPTS[2] }] }]);
    let other = server
        .post("/v1/chat/completions", &chat_body(json!({ "messages": parts })))
        .ok();
    assert_eq!(other["choices"], answer["choices"]);

    let reply = server.post("/v1/chat/completions", &chat_body(json!({ "stream": true })));
    assert_eq!(chat_content(&reply), (expected.text.clone(), vec![json!("stop")]));

    // Trainers look for the prompt's ids beside the choices of a chat; in a stream in its first event.
    let mut ids = json!({ "return_token_ids": true });
    let whole = server.post("/v1/chat/completions", &chat_body(ids.clone())).ok();
    assert_eq!(whole["prompt_token_ids"], json!(expected.prompt_token_ids));
    assert_eq!(whole["choices"][0]["token_ids"], json!(expected.token_ids));
    ids["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &chat_body(ids)).events();
    for (i, event) in events.iter().enumerate() {
        let told = &event["prompt_token_ids"];
        assert_eq!(told.is_null(), i > 0, "{i}");
        assert!(i > 0 || *told == json!(expected.prompt_token_ids));
    }

    // A stop string cuts the text in both forms at the same place.
    let stop = json!({ "stop": ["####", "never"] });
    let whole = server.post("/v1/chat/completions", &chat_body(stop.clone())).ok();
    let cut = expected.text.split("####").next().expect("a beginning");
    assert_eq!(whole["choices"][0]["message"]["content"], cut);
    assert_eq!(whole["choices"][0]["stop_reason"], "####");
    let mut body = chat_body(stop);
    body["stream"] = json!(true);
    let reply = server.post("/v1/chat/completions", &body);
    assert_eq!(chat_content(&reply).0, cut);

    for (change, param) in [
        (json!({ "messages": [{ "content": "x" }] }), "messages[0].role"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content",
        ),
        (json!({ "messages": null }), "messages"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "functions": [] }), "functions"),
    ] {
        let error = server
            .post("/v1/chat/completions", &chat_body(change.clone()))
            .error(400);
        assert_eq!(error["param"], param, "{change}");
    }
}

#[test]
fn sampled_completions_and_their_log_probabilities_are_those_of_the_engine() {
    let server = server(|_| {});
    let sampling = SamplingParams {
        max_new_tokens: 40,
        temperature: 0.7,
        seed: Some(11),
        top_logprobs: 2,
        ..SamplingParams::default()
    };
    let prompts = [&bundled::PROMPTS[3], &bundled::PROMPTS[0]];
    let requests = prompts.map(|prompt| Request::text(*prompt).sampling(sampling.clone()));
    let expected = direct(&requests);
    let body = json!({
        "model": "base", "prompt": prompts, "max_tokens": 40, "temperature": 0.7, "seed": 11, "logprobs": 2,
        "return_token_ids": true,
    });
    let answer = server.post("/v1/completions", &body).ok();
    for (choice, expected) in answer["choices"]
        .as_array()
        .expect("a list")
        .iter()
        .zip(&expected)
    {
        assert_eq!(token_ids(choice), expected.token_ids);
        assert_eq!(choice["text"], expected.text);
        assert_eq!(
            floats(&choice["logprobs"]["token_logprobs"]),
            expected.sampled_logprobs
        );
        let lists = &choice["logprobs"];
        for list in ["tokens", "top_logprobs", "text_offset"] {
            assert_eq!(
                lists[list].as_array().map(Vec::len),
                Some(expected.token_ids.len())
            );
        }
        // At this temperature each alternative has the share that the policy's log-probabilities give it.
        let top = lists["top_logprobs"][0].as_object().expect("an object");
        assert!((2..=3).contains(&top.len()));
        let best = expected.top_logprobs[0]
            .iter()
            .map(|top| top.logprob)
            .collect::<Vec<_>>();
        let given: Vec<_> = top
            .values()
            .map(|v| v.as_f64().expect("a number") as f32)
            .collect();
        assert!(
            ((given[0] - given[1]) - (best[0] - best[1]) / 0.7).abs() < 1e-4,
            "{given:?} {best:?}"
        );
    }
    let raw = self::server(|settings| settings.logprobs_mode = LogprobsMode::Raw);
    let answer = raw.post("/v1/completions", &body).ok();
    for (choice, expected) in answer["choices"]
        .as_array()
        .expect("a list")
        .iter()
        .zip(&expected)
    {
        assert_eq!(floats(&choice["logprobs"]["token_logprobs"]), expected.logprobs);
    }
    let info = raw.get("/server_info").ok();
    assert_eq!(
        info["vllm_config"]["model_config"]["logprobs_mode"],
        "raw_logprobs"
    );
}

#[test]
fn completions_of_one_prompt_differ_and_repeat_with_their_seed() {
    let server = server(|_| {});
    let mut body = json!({
        "model": "base", "messages": [{ "role": "user", "content": bundled::PROMPTS[0] }], "n": 6, "max_tokens": 30,
        "temperature": 2, "seed": 3,
    });
    let first = server.post("/v1/chat/completions", &body).ok()["choices"].clone();
    let texts: std::collections::HashSet<_> = first
        .as_array()
        .expect("a list")
        .iter()
        .map(|choice| choice["message"]["content"].to_string())
        .collect();
    assert!(texts.len() > 3, "{texts:?}");
    assert_eq!(server.post("/v1/chat/completions", &body).ok()["choices"], first);
    body["seed"] = json!(null);
    let without = [(); 2].map(|()| server.post("/v1/chat/completions", &body).ok()["choices"].clone());
    assert_ne!(without[0], without[1]);
}

#[test]
fn text_becomes_tokens_and_text_again() {
    let server = server(|_| {});
    let text = "Count from 259 to 315 by 2. ä🤖";
    let tokens = server
        .post(
            "/tokenize",
            &json!({ "model": "base", "prompt": text, "return_token_strs": true }),
        )
        .ok();
    assert_eq!(
        tokens["count"].as_u64(),
        tokens["tokens"].as_array().map(|list| list.len() as u64)
    );
    assert_eq!(
        tokens["token_strs"].as_array().map(Vec::len),
        tokens["tokens"].as_array().map(Vec::len)
    );
    assert_eq!(tokens["max_model_len"], 400);
    let back = server
        .post("/detokenize", &json!({ "tokens": tokens["tokens"] }))
        .ok();
    assert_eq!(back["prompt"], text);
    let messages = json!({ "messages": [{ "role": "user", "content": bundled::PROMPTS[2] }] });
    let chat = server.post("/tokenize", &messages).ok();
    let expected = &direct(&[Request::user(bundled::PROMPTS[2]).max_new_tokens(1)])[0];
    assert_eq!(chat["tokens"], json!(expected.prompt_token_ids));
    assert_eq!(
        server
            .post("/tokenize", &json!({ "prompt": text, "x": 1 }))
            .error(400)["param"],
        "x"
    );
    server
        .post("/tokenize", &json!({ "model": "none", "prompt": text }))
        .error(404);
    let long = "x".repeat(400 * 256 + 1);
    let error = server
        .post("/v1/completions", &json!({ "model": "base", "prompt": long }))
        .error(400);
    assert_eq!(error["code"], "context_length_exceeded");
}

#[test]
fn what_a_chat_says_twice_is_said_once_or_refused() {
    let server = server(|_| {});
    let ask = |extra: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "2 + 2" }] });
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        server.post("/tokenize", &body)
    };
    let plain = ask(json!({})).ok()["tokens"].clone();
    let without = ask(json!({ "add_generation_prompt": false })).ok()["tokens"].clone();
    assert_ne!(plain, without);
    // Among the template's variables, as trainers pass what they would give to `apply_chat_template`.
    for same in [
        json!({ "chat_template_kwargs": { "add_generation_prompt": false } }),
        json!({ "add_generation_prompt": false, "chat_template_kwargs": { "add_generation_prompt": false } }),
    ] {
        assert_eq!(ask(same).ok()["tokens"], without);
    }
    for other in [json!(true), json!("no")] {
        let twice = json!({ "add_generation_prompt": false, "chat_template_kwargs": { "add_generation_prompt": other } });
        let param = ask(twice).error(400)["param"].clone();
        assert_eq!(param, "chat_template_kwargs.add_generation_prompt");
    }
    for name in ["messages", "tools"] {
        let error = ask(json!({ "chat_template_kwargs": { name: [] } })).error(400);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|message| message.contains(name)),
            "{error}"
        );
    }
}

#[test]
fn long_texts_hold_nobody_else_up() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let server = server(|_| {});
    let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let tokens = json!({ "tokens": vec![5; 2_000_000] });
    std::thread::scope(|scope| {
        // More than the server has threads for connections.
        for _ in 0..4 {
            scope.spawn(|| {
                begun.fetch_add(1, Ordering::SeqCst);
                server.post("/detokenize", &tokens).ok();
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        wait_until("all have begun", || begun.load(Ordering::SeqCst) == 4);
        let mut slowest = std::time::Duration::ZERO;
        let begin = std::time::Instant::now();
        while done.load(Ordering::SeqCst) == 0 {
            let asked = std::time::Instant::now();
            server.get("/health").ok();
            slowest = slowest.max(asked.elapsed());
        }
        assert!(
            slowest < begin.elapsed() / 2,
            "{slowest:?} of {:?}",
            begin.elapsed()
        );
    });
}
