//! Adapters at run time: requests under several policies in one batch, each as if it were alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rollout_engine::serve::Server;
use rollout_engine::{
    Engine, EngineBuilder, FakeRunner, MergeMode, Request, RunnerShape, SamplingParams, bundled,
};
use serde_json::{Value, json};

use crate::model::builder;
use crate::policies::sha256;
use crate::support::{
    Gate, Running, VOCAB, adapters, fake_in, floats, long_shape, settings, start, token_ids, wait_until,
};

fn fake() -> Running {
    fake_in(MergeMode::Unmerged, FakeRunner::new(long_shape()), |_| {})
}

/// Whether these are the tokens of one policy from the first to the last.
fn of_one_policy(prompt: &[u32], tokens: &[u32]) -> bool {
    let numbers = (0..20).flat_map(|change| (0..5).map(move |place| change + 1000 * place));
    let mut of = numbers.map(|number| FakeRunner::expected_under(number, prompt, tokens.len(), &[], VOCAB));
    of.any(|expected| expected == tokens)
}

fn beside(server: &Running) -> Value {
    server.get("/server_info").ok()["rollout_engine"]["beside_it"].clone()
}

#[test]
fn several_policies_run_at_once_and_come_and_go_beside_each_other() {
    let server = fake();
    let prompt = [1, 2, 3];
    server.load("a", &adapters().join("qv-r8")).ok();
    server.gate.close();
    std::thread::scope(|scope| {
        let ask = |name: &'static str| {
            let server = &server;
            scope.spawn(move || server.complete(name, &prompt, 900))
        };
        let running = |n: f64| {
            server
                .gate
                .pass_until(|| server.metric("rollout_sequences_running") == n);
        };
        let (base, first) = (ask("base"), ask("a"));
        running(2.0);
        // Another policy comes, and the first gets other weights: in force at once, and nothing that runs ends.
        let load = |name: &'static str, dir: &'static str| {
            let server = &server;
            let loading = scope.spawn(move || {
                let body =
                    json!({ "lora_name": name, "lora_path": adapters().join(dir), "load_inplace": true });
                server.post("/v1/load_lora_adapter", &body)
            });
            server.gate.pass_until(|| loading.is_finished());
            let loaded = loading.join().expect("no panic").ok();
            assert_eq!(loaded["in_force"], true);
        };
        load("b", "layers13-r4");
        load("a", "mult-r32");
        let (second, other) = (ask("a"), ask("b"));
        running(4.0);
        assert_eq!(server.metric("rollout_policy_switches_total"), 0.0);
        let versions = json!([{ "name": "a", "version": 1 }, { "name": "b", "version": 2 }, { "name": "a", "version": 3 }]);
        assert_eq!(beside(&server), versions);
        server.gate.open();
        for (answer, version, sha256) in [
            (base, 0, None),
            (first, 1, Some(sha256("qv-r8"))),
            (other, 2, Some(sha256("layers13-r4"))),
            (second, 3, Some(sha256("mult-r32"))),
        ] {
            let answer = answer.join().expect("no panic").ok();
            assert_eq!(answer["policy"]["version"], version);
            if let Some(sha256) = sha256 {
                assert_eq!(answer["policy"]["sha256"], sha256);
            }
            assert!(
                of_one_policy(&prompt, &token_ids(&answer["choices"][0])),
                "version {version}"
            );
        }
    });
    // The one that was replaced is given up with its last request, an unloaded one at once.
    wait_until("what is not needed to go", || {
        beside(&server).as_array().is_some_and(|list| list.len() == 2)
    });
    server
        .post("/v1/unload_lora_adapter", &json!({ "lora_name": "a" }))
        .ok();
    wait_until("a to go", || {
        beside(&server) == json!([{ "name": "b", "version": 2 }])
    });
    let error = server.complete("a", &prompt, 3).error(404);
    assert_eq!(error["code"], "model_not_found");
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|message| message.contains("\"a\""))
    );
}

#[test]
fn a_policy_that_cannot_be_served_is_refused_and_the_others_stay() {
    let server = fake_in(
        MergeMode::Unmerged,
        FakeRunner::new(long_shape()).failing_policy_changes_after(2),
        |_| {},
    );
    server.load("a", &adapters().join("qv-r8")).ok();
    let error = server.load("b", &adapters().join("mult-r32")).error(400);
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|message| message.contains("told to fail"))
    );
    assert_eq!(beside(&server), json!([{ "name": "a", "version": 1 }]));
    server.complete("b", &[1, 2], 3).error(404);
    // Also under a name that is known, which goes on meaning what it did.
    let in_place =
        json!({ "lora_name": "a", "lora_path": adapters().join("mult-r32"), "load_inplace": true });
    server.post("/v1/load_lora_adapter", &in_place).error(400);
    assert_eq!(beside(&server), json!([{ "name": "a", "version": 1 }]));
    let answer = server.complete("a", &[1, 2], 3).ok();
    assert_eq!(answer["policy"]["version"], 1);
    assert_eq!(answer["policy"]["sha256"], sha256("qv-r8"));
}

const NAMES: [&str; 3] = ["mult-r32", "qv-r8", "lorabias-r4"];

/// Every prompt under the base model and every adapter, by clients at the same time; and alone by an engine.
fn check(builder: impl Fn() -> EngineBuilder) {
    let server = Server::from_builder(builder(), settings()).expect("loads");
    for name in NAMES {
        server.load_adapter(name, adapters().join(name)).expect("loads");
    }
    let server = start(server, Gate::default());
    let mut alone: Vec<(&str, Engine)> = vec![("base", builder().build().expect("loads"))];
    for name in NAMES {
        let mut engine = builder().build().expect("loads");
        engine.load_adapter(adapters().join(name)).expect("loads");
        alone.push((name, engine));
    }
    let encode = |text: &&str| alone[0].1.encode(&Request::user(*text).prompt).expect("a prompt");
    let prompts: Vec<_> = bundled::PROMPTS[..3].iter().map(encode).collect();
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let clients: Vec<_> = alone
            .iter()
            .flat_map(|(name, _)| prompts.iter().map(move |prompt| (*name, prompt)))
            .map(|(name, prompt)| {
                let server = &server;
                scope.spawn(move || {
                    let mut body = crate::support::completion_body(name, prompt, 24);
                    body["logprobs"] = json!(0);
                    server.post("/v1/completions", &body).ok()
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("no panic"))
            .collect()
    });
    assert!(server.metric("rollout_policy_switches_total") == 0.0);
    let mut answers = answers.iter();
    let mut seen = std::collections::HashSet::new();
    for (name, engine) in &mut alone {
        for prompt in &prompts {
            let sampling = SamplingParams {
                max_new_tokens: 24,
                ..SamplingParams::default()
            };
            let request = Request::token_ids(prompt.clone()).sampling(sampling);
            let expected = engine
                .generate(&[request])
                .expect("runs")
                .remove(0)
                .expect("completes");
            let answer = answers.next().expect("an answer");
            assert_eq!(answer["policy"]["name"], *name);
            assert_eq!(answer["policy"]["sha256"], engine.policy().sha256_hex());
            let choice = &answer["choices"][0];
            assert_eq!(token_ids(choice), expected.token_ids, "{name}");
            let got = floats(&choice["logprobs"]["token_logprobs"]);
            assert_eq!(got, expected.logprobs, "{name}");
            seen.insert(format!("{got:?}"));
        }
    }
    assert_eq!(seen.len(), 12, "every policy has log-probabilities of its own");
    let error = server.complete("nobody", &prompts[0], 3).error(404);
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("model_not_found"), &json!("model"))
    );
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|message| message.contains("\"nobody\""))
    );
}

#[test]
fn clients_of_one_bf16_base_get_the_bits_of_each_policy_alone() {
    check(|| builder().merge_mode(MergeMode::Unmerged));
}

#[test]
fn clients_of_one_base_in_4_bits_get_the_bits_of_each_policy_alone() {
    let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/tiny-qwen3-math-bnb-nf4");
    check(|| builder().model(dir.clone()));
}

/// The engine gives all requests up then; nobody told their clients, who waited for ever.
#[test]
fn a_step_that_fails_while_an_adapter_comes_fails_its_requests() {
    let shape = RunnerShape {
        max_in_flight: 2,
        ..long_shape()
    };
    let server = fake_in(MergeMode::Unmerged, FakeRunner::new(shape), |_| {});
    server.gate.close();
    // The second step is still under way when the adapter comes.
    server.gate.lose_results_of(2);
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("base", &[1, 2, 3], 900));
        server.gate.wait_for_steps(1);
        server.gate.pass_one();
        server.gate.wait_for_steps(2);
        let loading = scope.spawn(|| server.load("a", &adapters().join("qv-r8")));
        wait_until("the adapter", || {
            server.get("/v1/models").text().contains("\"a\"")
        });
        std::thread::sleep(Duration::from_millis(100));
        server.gate.pass_one();
        let error = loading.join().expect("no panic").error(400);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|m| m.contains("results are lost"))
        );
        let error = running.join().expect("no panic").error(500);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|m| m.contains("results are lost"))
        );
    });
    server.gate.open();
    let answer = server.complete("base", &[1, 2, 3], 5).ok();
    assert!(of_one_policy(&[1, 2, 3], &token_ids(&answer["choices"][0])));
}
