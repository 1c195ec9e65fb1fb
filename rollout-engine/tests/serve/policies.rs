//! Policies: every answer under the one that was asked for, or an error.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use lora_merge::Adapter;
use rollout_engine::{FakeRunner, MergeMode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::{VOCAB, adapters, fake, fake_in, fake_over, long_shape, shape, token_ids, wait_until};

const NAMES: [&str; 3] = ["qv-r8", "mult-r32", "layers13-r4"];

/// What the fake runner gives as the digest of a policy with one adapter.
pub(crate) fn sha256(name: &str) -> String {
    let adapter = Adapter::load(adapters().join(name)).expect("loads");
    let digest = Sha256::digest(adapter.digest());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The change of policy, by number, that gives these tokens.
fn under(prompt: &[u32], tokens: &[u32]) -> u64 {
    (0..200)
        .find(|&number| FakeRunner::expected_under(number, prompt, tokens.len(), &[], VOCAB) == tokens)
        .expect("tokens of one policy from the first to the last")
}

#[test]
fn to_load_is_to_name_and_to_repeat_is_harmless() {
    let server = fake(|settings| settings.max_adapters = 2);
    let load = |name: &str, dir: &str, in_place: bool| {
        let body = json!({ "lora_name": name, "lora_path": adapters().join(dir), "load_inplace": in_place });
        server.post("/v1/load_lora_adapter", &body)
    };
    assert_eq!(load("a", "qv-r8", false).ok()["policy"]["version"], 1);
    let again = load("a", "qv-r8", false).ok();
    assert_eq!(
        (&again["changed"], &again["policy"]["version"]),
        (&json!(false), &json!(1))
    );
    // Other weights under the name only if asked for, and then under a new version.
    assert_eq!(load("a", "mult-r32", false).error(400)["param"], "lora_name");
    assert_eq!(load("a", "mult-r32", true).ok()["policy"]["version"], 2);
    let body = json!({ "lora_name": "a", "lora_path": adapters().join("qv-r8") });
    assert_eq!(
        server.post("/load_lora_adapter", &body).ok()["policy"]["version"],
        3
    );
    load("b", "qv-r8", false).ok();
    assert!(
        load("c", "qv-r8", false).error(409)["message"]
            .as_str()
            .is_some_and(|m| m.contains("unload one"))
    );
    load("", "qv-r8", true).error(400);
    load("line\nbreak", "qv-r8", true).error(400);
    let models = server.get("/v1/models").ok();
    let ids: Vec<_> = models["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| m["id"].clone())
        .collect();
    assert_eq!(json!(ids), json!(["base", "a", "b"]));
    assert_eq!(models["data"][1]["parent"], "base");
    for changed in [true, false] {
        let body = json!({ "lora_name": "b" });
        assert_eq!(
            server.post("/v1/unload_lora_adapter", &body).ok()["changed"],
            changed
        );
    }
    server.complete("b", &[1, 2], 3).error(404);
    load("c", "qv-r8", false).ok();
}

/// prime-rl loads its one adapter under the name that all its requests have.
#[test]
fn an_adapter_may_take_the_name_of_the_base_model() {
    for mode in [MergeMode::Merged, MergeMode::Unmerged] {
        let server = fake_in(mode, FakeRunner::new(shape()), |_| {});
        let sha256_of = |name: &str| server.complete(name, &[1, 2, 3], 5).ok()["policy"]["sha256"].clone();
        let base = sha256_of("base");
        for name in NAMES {
            let body = json!({ "lora_name": "base", "lora_path": adapters().join(name) });
            server.post("/load_lora_adapter", &body).ok();
            assert_eq!(sha256_of("base"), sha256(name), "{mode:?}");
        }
        let models = server.get("/v1/models").ok();
        assert_eq!(models["data"].as_array().expect("a list").len(), 2);
        assert_eq!(models["data"][0]["id"], "base");
        assert_eq!(server.get("/v1/models/base").ok()["parent"], "base");
        server
            .post("/v1/unload_lora_adapter", &json!({ "lora_name": "base" }))
            .ok();
        assert_eq!(sha256_of("base"), base);
    }
}

#[test]
fn folders_outside_the_roots_and_broken_adapters_are_refused() {
    let inside = tempfile::tempdir().expect("a temporary folder");
    let root = inside.path().to_path_buf();
    let server = fake(|settings| settings.allowed_roots = vec![root.clone()]);
    let outside = adapters().join("qv-r8");
    assert_eq!(server.load("a", &outside).error(403)["code"], "path_not_allowed");
    server.load("a", &root.join("../..")).error(403);
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&outside, root.join("link")).expect("links");
        server.load("a", &root.join("link")).error(403);
        std::fs::remove_file(root.join("link")).expect("removable");
    }
    server.load("a", &root.join("none")).error(400);
    // prime-rl tries again at 404, since files of a network's file system appear late; TRL gives up at it.
    let in_place = |dir: &Path| {
        let body = json!({ "lora_name": "a", "lora_path": dir });
        server.post("/load_lora_adapter", &body)
    };
    for absent in [root.join("none"), root.clone()] {
        assert_eq!(in_place(&absent).error(404)["code"], "path_not_found");
    }
    in_place(&outside).error(403);
    // A folder without an adapter, and one with a broken one.
    server.load("a", &root).error(400);
    std::fs::write(root.join("adapter_config.json"), "{").expect("writable");
    std::fs::write(root.join("adapter_model.safetensors"), "").expect("writable");
    server.load("a", &root).error(400);
    // Copied to the inside it works, also by a relative path.
    std::fs::create_dir(root.join("good")).expect("writable");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(outside.join(file), root.join("good").join(file)).expect("copies");
    }
    let body = json!({ "lora_name": "a", "lora_path": "good" });
    server.post("/v1/load_lora_adapter", &body).ok();
    let none = fake(|settings| settings.allowed_roots.clear());
    none.load("a", &outside).error(403);
}

#[test]
fn a_running_request_finishes_under_its_own_version() {
    let server = fake_over(FakeRunner::new(long_shape()), |_| {});
    server.load("a", &adapters().join("qv-r8")).ok();
    server.gate.close();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("a", &[1, 2, 3], 900));
        server.gate.wait_for_steps(1);
        // The name gets other weights while a request runs under the old ones: that is answered at once.
        let loading = scope.spawn(|| {
            let body =
                json!({ "lora_name": "a", "lora_path": adapters().join("mult-r32"), "load_inplace": true });
            server.post("/v1/load_lora_adapter", &body)
        });
        server.gate.pass_until(|| loading.is_finished());
        let loaded = loading.join().expect("no panic").ok();
        assert_eq!(
            (&loaded["policy"]["version"], &loaded["in_force"]),
            (&json!(2), &json!(false))
        );
        let next = scope.spawn(|| server.complete("a", &[1, 2, 3], 20));
        wait_until("the second request", || {
            server.metric("rollout_sequences_waiting") + server.metric("rollout_sequences_running") == 2.0
        });
        server.gate.open();
        for (answer, version, name) in [(running, 1, "qv-r8"), (next, 2, "mult-r32")] {
            let answer = answer.join().expect("no panic").ok();
            assert_eq!(answer["policy"]["version"], version);
            assert_eq!(answer["policy"]["sha256"], sha256(name));
            under(&[1, 2, 3], &token_ids(&answer["choices"][0]));
        }
    });
}

#[test]
fn a_request_survives_the_unloading_of_its_policy() {
    let server = fake(|_| {});
    server.load("a", &adapters().join("qv-r8")).ok();
    server.gate.close();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("a", &[1, 2, 3], 10));
        server.gate.wait_for_steps(1);
        server
            .post("/v1/unload_lora_adapter", &json!({ "lora_name": "a" }))
            .ok();
        server.complete("a", &[1], 1).error(404);
        server.gate.open();
        let answer = running.join().expect("no panic").ok();
        assert_eq!(answer["policy"]["sha256"], sha256("qv-r8"));
    });
}

#[test]
fn many_clients_under_many_policies_each_get_their_own() {
    let server = fake(|settings| settings.policy_patience = Duration::from_millis(20));
    for name in NAMES {
        server.load(name, &adapters().join(name)).ok();
    }
    // Change of policy → digest, over all answers.
    let mut seen: HashMap<u64, Value> = HashMap::new();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6u32)
            .map(|client| {
                let server = &server;
                scope.spawn(move || {
                    let ask = |i: u32| {
                        let name = ["base", NAMES[0], NAMES[1], NAMES[2]][((client + i) % 4) as usize];
                        let prompt = [client + 1, i + 1, 7];
                        (name, prompt, server.complete(name, &prompt, 8 + i as usize).ok())
                    };
                    (0..12).map(ask).collect::<Vec<_>>()
                })
            })
            .collect();
        clients
            .into_iter()
            .flat_map(|client| client.join().expect("no panic"))
            .collect()
    });
    assert_eq!(answers.len(), 72);
    for (name, prompt, answer) in answers {
        assert_eq!(answer["policy"]["name"], name);
        let digest = &answer["policy"]["sha256"];
        if name != "base" {
            assert_eq!(*digest, sha256(name));
        }
        let number = under(&prompt, &token_ids(&answer["choices"][0]));
        assert_eq!(seen.entry(number).or_insert_with(|| digest.clone()), digest);
    }
    assert!(seen.len() > 3, "the policy changed {} times", seen.len());
}

#[test]
fn pausing_keeps_waits_or_aborts() {
    let server = fake_over(FakeRunner::new(long_shape()), |_| {});
    let pause = |mode: &str| server.post(&format!("/pause?mode={mode}&clear_cache=false"), &json!({}));
    std::thread::scope(|scope| {
        // Keep: nothing moves until it is resumed; adapters can be loaded meanwhile.
        server.gate.close();
        let running = scope.spawn(|| server.complete("base", &[1, 2, 3], 900));
        server.gate.wait_for_steps(1);
        let pausing = scope.spawn(|| pause("keep"));
        server.gate.pass_until(|| pausing.is_finished());
        server.gate.open();
        pausing.join().expect("no panic").ok();
        pause("keep").ok();
        let steps = server.gate.steps();
        let waiting = scope.spawn(|| server.complete("a", &[1, 2, 3], 12));
        let loaded = server.load("a", &adapters().join("qv-r8")).ok();
        assert_eq!(loaded["in_force"], false);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(server.gate.steps(), steps, "a step was taken while paused");
        assert_eq!(server.get("/is_paused").ok(), json!({ "is_paused": true }));
        assert_eq!(server.metric("rollout_paused"), 1.0);
        server.post("/resume", &json!({})).ok();
        server.post("/resume", &json!({})).ok();
        let answer = running.join().expect("no panic").ok();
        assert_eq!(
            token_ids(&answer["choices"][0]),
            FakeRunner::expected(&[1, 2, 3], 900, &[], VOCAB)
        );
        // It may have come before the adapter was there.
        let waited = waiting.join().expect("no panic");
        assert!([200, 404].contains(&waited.status), "{}", waited.text());

        // Wait: what runs finishes, what comes later waits for the resumption.
        server.gate.close();
        let before = server.gate.steps();
        let running = scope.spawn(|| server.complete("base", &[4, 5], 6));
        server.gate.wait_for_steps(before + 1);
        let pausing = scope.spawn(|| pause("wait"));
        std::thread::sleep(Duration::from_millis(100));
        server.gate.open();
        pausing.join().expect("no panic").ok();
        running.join().expect("no panic").ok();
        let later = scope.spawn(|| server.complete("base", &[4, 5], 6));
        server.wait_for_metric("rollout_sequences_waiting", 1.0);
        assert!(!later.is_finished());

        // Abort: that one ends with an error that says why.
        pause("abort").ok();
        assert_eq!(later.join().expect("no panic").error(503)["code"], "aborted");
        server.post("/resume", &json!({})).ok();
        server.complete("base", &[4, 5], 6).ok();
    });
    assert_eq!(pause("sometimes").error(400)["param"], "mode");
}

#[test]
fn a_policy_that_cannot_be_applied_is_refused_and_the_others_stay() {
    let server = fake_over(FakeRunner::new(long_shape()).failing_policy_changes(), |_| {});
    let error = server.load("a", &adapters().join("qv-r8")).error(400);
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|m| m.contains("told to fail"))
    );
    server.complete("a", &[1], 1).error(404);
    server.complete("base", &[1, 2, 3], 3).ok();

    // While something runs it shows only at a request's turn: that request fails, and no other policy answers it.
    server.gate.close();
    let steps = server.gate.steps();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete("base", &[1, 2, 3], 900));
        server.gate.wait_for_steps(steps + 1);
        let loading = scope.spawn(|| server.load("b", &adapters().join("qv-r8")));
        server.gate.pass_until(|| loading.is_finished());
        assert_eq!(loading.join().expect("no panic").ok()["in_force"], false);
        let asking = scope.spawn(|| server.complete("b", &[1, 2, 3], 5));
        wait_until("the second request", || {
            server.metric("rollout_sequences_waiting") + server.metric("rollout_sequences_running") == 2.0
        });
        server.gate.open();
        running.join().expect("no panic").ok();
        let error = asking.join().expect("no panic").error(500);
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|m| m.contains("told to fail"))
        );
    });
    wait_until("idle", || server.metric("rollout_kv_pages_free") == 1024.0);
    server.complete("base", &[1, 2, 3], 3).ok();
}
