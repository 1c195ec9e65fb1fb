//! Other base weights by request.

use std::path::Path;
use std::time::Duration;

use rollout_engine::serve::Server;
use rollout_engine::{MergeMode, Request, bundled};
use serde_json::{Value, json};

use crate::model::builder;
use crate::support::{Gate, adapters, completion_body, floats, settings, start, token_ids};

/// A copy of the bundled model whose last norm, a vector of bf16, has its sign changed in `flips` places.
fn write_model(dir: &Path, flips: usize) {
    let source = bundled::model_dir().expect("the bundled model");
    std::fs::create_dir_all(dir).expect("writable");
    // As trainers write it: weights and configuration, no tokenizer.
    std::fs::copy(source.join("config.json"), dir.join("config.json")).expect("copies");
    let mut bytes = std::fs::read(source.join("model.safetensors")).expect("readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    let begin = header["model.norm.weight"]["data_offsets"][0]
        .as_u64()
        .expect("an offset") as usize;
    for i in 0..flips {
        bytes[8 + length + begin + 2 * i + 1] ^= 0x80;
    }
    std::fs::write(dir.join("model.safetensors"), bytes).expect("writable");
}

#[test]
fn replaced_weights_answer_what_comes_after() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let root = root.path().canonicalize().expect("is there");
    write_model(&root.join("step_1"), 200);
    let mut settings = settings();
    settings.allowed_roots = vec![root.clone(), adapters()];
    let server = start(
        Server::from_builder(builder(), settings).expect("loads"),
        Gate::default(),
    );
    let update = |dir: &Path| server.post("/update_weights", &json!({ "weight_dir": dir }));
    let prompt = builder()
        .build()
        .expect("loads")
        .generate(&[Request::user(bundled::PROMPTS[1]).max_new_tokens(1)])
        .expect("runs")
        .remove(0)
        .expect("completes")
        .prompt_token_ids;
    let expected = |dir: Option<&Path>| {
        let builder = dir.map_or_else(builder, |dir| builder().model(dir));
        let request = Request::token_ids(prompt.clone()).max_new_tokens(40);
        let result = builder
            .build()
            .expect("loads")
            .generate(&[request])
            .expect("runs")
            .remove(0);
        result.expect("completes").token_ids
    };
    let (old, new) = (expected(None), expected(Some(&root.join("step_1"))));
    assert_ne!(old, new);
    let ask = |name: &str| {
        let answer = server.complete(name, &prompt, 40).ok();
        (
            answer["policy"]["version"].as_u64().expect("a number"),
            token_ids(&answer["choices"][0]),
        )
    };
    assert_eq!(ask("base"), (0, old.clone()));
    server.load("a", &adapters().join("qv-r8")).ok();
    let (_, adapted) = ask("a");

    // Under way: it finishes under the old weights. Paused, as prime-rl does it, nothing has to be waited for.
    let before = std::thread::scope(|scope| {
        server.post("/pause?mode=keep", &json!({})).ok();
        let running = scope.spawn(|| ask("base"));
        server.wait_for_metric("rollout_sequences_waiting", 1.0);
        server.post("/resume", &json!({})).ok();
        std::thread::sleep(Duration::from_millis(20));
        server.post("/pause?mode=keep", &json!({})).ok();
        let answer = update(&root.join("step_1")).ok();
        assert_eq!(
            (&answer["changed"], &answer["policy"]["version"]),
            (&json!(true), &json!(2))
        );
        server.post("/resume", &json!({})).ok();
        running.join().expect("no panic")
    });
    assert_eq!(before, (0, old));
    assert_eq!(ask("base"), (2, new.clone()));
    // The adapter is over the new weights now, under a new version.
    let (version, over_new) = ask("a");
    assert_eq!(version, 3);
    assert_ne!(over_new, adapted);
    // Repeated, nothing changes; written anew, it does.
    assert_eq!(update(&root.join("step_1")).ok()["changed"], false);
    write_model(&root.join("step_2"), 0);
    assert_eq!(update(&root.join("step_2")).ok()["changed"], true);
    assert_eq!(ask("base").1, expected(None));

    // What does not fit is refused, and the weights stay.
    let version = ask("base").0;
    assert_eq!(update(Path::new("/")).error(403)["code"], "path_not_allowed");
    update(&root.join("none")).error(400);
    update(&root).error(400);
    let broken = root.join("broken");
    write_model(&broken, 0);
    std::fs::write(broken.join("model.safetensors"), b"nothing").expect("writable");
    update(&broken).error(400);
    write_model(&broken, 0);
    let config = std::fs::read_to_string(broken.join("config.json")).expect("readable");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["rms_norm_eps"] = json!(1e-3);
    std::fs::write(broken.join("config.json"), config.to_string()).expect("writable");
    update(&broken).error(400);
    let body = json!({ "weight_dir": root.join("step_1"), "method": "nccl" });
    assert_eq!(
        server.post("/update_weights", &body).error(400)["param"],
        "method"
    );
    assert_eq!(ask("base").0, version);
}

/// Adapters at run time are over whatever base is in force, and so are all that share a batch.
#[test]
fn replaced_weights_serve_adapters_side_by_side() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let root = root.path().canonicalize().expect("is there");
    let other = root.join("step_1");
    write_model(&other, 200);
    let mut settings = settings();
    settings.allowed_roots = vec![root.clone(), adapters()];
    let builder = || builder().merge_mode(MergeMode::Unmerged);
    let server = start(
        Server::from_builder(builder(), settings).expect("loads"),
        Gate::default(),
    );
    let prompt = [5, 6, 7, 8, 9, 10];
    let expected = |dir: Option<&Path>, adapter: Option<&str>| {
        let builder = dir.map_or_else(builder, |dir| builder().model(dir));
        let mut engine = builder.build().expect("loads");
        if let Some(name) = adapter {
            engine.load_adapter(adapters().join(name)).expect("loads");
        }
        let request = Request::token_ids(prompt).max_new_tokens(20);
        let result = engine.generate(&[request]).expect("runs").remove(0);
        result.expect("completes").logprobs
    };
    let ask = |name: &str| {
        let mut body = completion_body(name, &prompt, 20);
        body["logprobs"] = json!(0);
        let answer = server.post("/v1/completions", &body).ok();
        floats(&answer["choices"][0]["logprobs"]["token_logprobs"])
    };
    for name in ["qv-r8", "mult-r32"] {
        server.load(name, &adapters().join(name)).ok();
        assert_eq!(ask(name), expected(None, Some(name)));
    }
    assert_eq!(ask("base"), expected(None, None));
    let answer = server
        .post("/update_weights", &json!({ "weight_dir": other }))
        .ok();
    assert_eq!(answer["in_force"], true);
    for name in ["mult-r32", "qv-r8"] {
        assert_eq!(ask(name), expected(Some(&other), Some(name)));
    }
    assert_eq!(ask("base"), expected(Some(&other), None));
}

/// A trainer that saves to the same folder at every step. What was bound to the weights of before, and comes to its turn
/// after others were in force, cannot be answered any more; it must not be answered by what took their place.
#[test]
fn weights_that_were_overwritten_answer_nothing_that_was_bound_to_them() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let root = root.path().canonicalize().expect("is there");
    let dir = root.join("weights");
    let mut settings = settings();
    settings.allowed_roots = vec![root.clone()];
    settings.policy_patience = Duration::ZERO;
    let server = start(
        Server::from_builder(builder(), settings).expect("loads"),
        Gate::default(),
    );
    // By renaming, as safetensors does: what is mapped stays as it is.
    let save = |flips: usize| {
        write_model(&root.join("new"), flips);
        std::fs::create_dir_all(&dir).expect("writable");
        for file in ["config.json", "model.safetensors"] {
            std::fs::rename(root.join("new").join(file), dir.join(file)).expect("moves");
        }
        server.post("/update_weights", &json!({ "weight_dir": dir })).ok()
    };
    let prompt = [5, 6, 7, 8, 9, 10];
    let ask = || server.complete("base", &prompt, 10);
    assert_eq!(save(200)["policy"]["version"], 1);
    let first = ask().ok();
    assert_eq!(first["policy"]["version"], 1);
    std::thread::scope(|scope| {
        server.post("/pause?mode=keep", &json!({})).ok();
        let bound_to_old = scope.spawn(ask);
        server.wait_for_metric("rollout_sequences_waiting", 1.0);
        assert_eq!(save(100)["in_force"], true, "nothing runs");
        let bound_to_new = scope.spawn(ask);
        server.wait_for_metric("rollout_sequences_waiting", 2.0);
        server.post("/resume", &json!({})).ok();
        assert_eq!(
            bound_to_new.join().expect("no panic").ok()["policy"]["version"],
            2
        );
        let error = bound_to_old.join().expect("no panic").error(500);
        let message = error["message"].as_str().expect("a text");
        assert!(message.contains("has been written to"), "{message}");
    });
    // The others go on.
    let again = ask().ok();
    assert_eq!(again["policy"]["version"], 2);
    assert_ne!(token_ids(&again["choices"][0]), token_ids(&first["choices"][0]));
}
