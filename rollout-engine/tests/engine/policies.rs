//! Policies served by name: every request of one batch under its own, as if it were alone.

use std::sync::Arc;

use lora_merge::{ActiveAdapter, Adapter, AdapterConfig, TensorSlice, TensorValues};
use proptest::prelude::*;
use qwen3_model::{Projection, Qwen3Config};
use rollout_engine::{
    AdapterSource, Completion, DeviceChoice, Engine, Error, FakeRunner, MergeMode, PolicySpan, Request,
    SamplingParams, Scheduler,
};

use crate::support::{adapter, bundled_model, golden};

fn engine() -> Engine {
    Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(12)
        .page_size(16)
        .n_pages(1 + 12 * 40)
        .merge_mode(MergeMode::Unmerged)
        .prefix_cache(true)
        .build()
        .expect("builds")
}

fn all(engine: &mut Engine, requests: &[Request]) -> Vec<Completion> {
    let results = engine.generate(requests).expect("runs");
    results
        .into_iter()
        .map(|result| result.expect("completes"))
        .collect()
}

const NAMES: [&str; 3] = ["mult-r32", "qv-r8", "lorabias-r4"];

#[test]
fn one_batch_gives_every_policy_its_golden_tokens_and_the_bits_of_being_alone() {
    let mut together = engine();
    let update = together
        .serve_policies(NAMES.map(|name| (name, adapter(name))))
        .expect("serves");
    assert!(update.differs_from_base && update.policies.len() == 3);
    // Four prompts under each policy, dealt in turn, and under the base.
    let cases = NAMES.map(|name| golden(name).into_iter().take(4).collect::<Vec<_>>());
    let (mut requests, mut expected) = (Vec::new(), Vec::new());
    for i in 0..4 {
        for (name, cases) in NAMES.into_iter().zip(&cases) {
            let request = Request::token_ids(cases[i].prompt_ids.clone()).max_new_tokens(400);
            requests.push(request.policy(name));
            expected.push(cases[i].completion_ids.clone());
        }
    }
    let prompt = cases[0][0].prompt_ids.clone();
    requests.push(Request::token_ids(prompt).max_new_tokens(40));
    let got = all(&mut together, &requests);
    for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
        let name = NAMES[i % 3];
        assert_eq!(got.token_ids, *expected, "{name}, prompt {}", i / 3);
        let named = &together.named_policies()[i % 3];
        assert_eq!((named.name.as_str(), named.version.number), (name, 1));
        let span = PolicySpan {
            first_token: 0,
            version: named.version,
        };
        assert_eq!(got.policies, [span]);
    }
    // Alone: the same adapter for everyone. The prefix cache is asked for the same prompts once more.
    for (i, name) in NAMES.into_iter().enumerate() {
        let mut alone = engine();
        let update = alone.load_adapter(adapter(name)).expect("loads");
        assert_eq!(update.version.sha256, together.named_policies()[i].version.sha256);
        let mine = requests.iter().skip(i).step_by(3).take(4).cloned();
        let unnamed: Vec<_> = mine
            .map(|request| Request {
                policy: None,
                ..request
            })
            .collect();
        for (completion, at) in all(&mut alone, &unnamed).iter().zip((i..).step_by(3)) {
            assert_eq!(completion.logprobs, got[at].logprobs, "{name}");
        }
        let again = all(&mut together, &requests[i..=i]);
        assert_eq!(again[0].logprobs, got[i].logprobs, "{name} from the prefix cache");
    }
    assert!(together.statistics().prefix_hits > 0);
    let base = all(&mut engine(), &requests[12..]);
    assert_eq!(base[0].logprobs, got[12].logprobs);
    assert_eq!(got[12].policies[0].version, together.policy());
    assert_ne!(got[12].logprobs, got[0].logprobs);
}

#[test]
fn a_group_is_sampled_under_its_policy() {
    let mut engine = engine();
    let policies = NAMES.map(|name| (name, adapter(name)));
    engine.serve_policies(policies).expect("serves");
    let case = &golden(NAMES[1])[0];
    let request = Request::token_ids(case.prompt_ids.clone())
        .max_new_tokens(400)
        .policy(NAMES[1]);
    let other = Request::token_ids(case.prompt_ids.clone())
        .max_new_tokens(400)
        .policy(NAMES[0]);
    let groups = engine.generate_groups(&[request.n(3), other.n(2)]).expect("runs");
    let groups: Vec<_> = groups
        .into_iter()
        .map(|group| group.expect("is accepted").all().expect("completes"))
        .collect();
    for completion in &groups[0] {
        assert_eq!(completion.token_ids, case.completion_ids);
    }
    assert_eq!(groups[1][0].token_ids, groups[1][1].token_ids);
    assert_ne!(groups[1][0].logprobs, groups[0][0].logprobs);
}

#[test]
fn names_are_checked_and_a_policy_in_use_stays() {
    let mut engine = engine();
    let request = Request::token_ids([5, 6, 7]).max_new_tokens(8);
    let refused = engine.submit(&request.clone().policy("a"));
    assert!(matches!(refused, Err(Error::UnknownPolicy { name, known }) if name == "a" && known.is_empty()));
    let twice = engine.serve_policies([("a", adapter("qv-r8")), ("a", adapter("mult-r32"))]);
    assert!(matches!(
        twice,
        Err(Error::InvalidSetting {
            setting: "policies",
            ..
        })
    ));
    engine
        .serve_policies([("a", adapter("qv-r8")), ("b", adapter("mult-r32"))])
        .expect("serves");
    let refused = engine.submit(&request.clone().policy("c"));
    assert!(matches!(refused, Err(Error::UnknownPolicy { known, .. }) if known == ["a", "b"]));
    let id = engine.submit(&request.clone().policy("b")).expect("is accepted");
    engine.step().expect("steps");
    let before = engine.named_policies().to_vec();
    for change in [
        engine.load_adapter(adapter("qv-r8")),
        engine.unload_adapters(),
        engine.serve_policies([("a", adapter("mult-r32"))]),
    ] {
        assert!(
            matches!(change, Err(Error::PolicyInUse { ref name, request }) if name == "b" && request == id),
            "{change:?}"
        );
    }
    assert_eq!(engine.named_policies(), before);
    // The same name in another place with another adapter: the request goes on under it.
    let update = engine
        .serve_policies([("b", adapter("qv-r8")), ("c", adapter("mult-r32"))])
        .expect("serves");
    assert_eq!((update.version.number, update.continued_requests), (2, 1));
    let mut finished = None;
    while engine.has_unfinished() {
        for event in engine.step().expect("steps") {
            if let rollout_engine::Event::Finished { result, .. } = event {
                finished = Some(result.expect("completes"));
            }
        }
    }
    let finished = finished.expect("finished");
    let versions: Vec<_> = finished.policies.iter().map(|span| span.version).collect();
    assert_eq!(versions, [before[1].version, engine.named_policies()[0].version]);
    assert_eq!(engine.refresh().expect("reads again").version.number, 3);
    assert_eq!(engine.named_policies().len(), 2);
    engine.unload_adapters().expect("nobody needs them");
    assert!(engine.named_policies().is_empty());
}

/// What stays the same is not computed anew: its requests go on where they were, and its pages stay in the prefix cache.
#[test]
fn policies_come_and_go_beside_those_that_stay() {
    let mut engine = engine();
    engine
        .serve_policies([("a", adapter("mult-r32")), ("b", adapter("qv-r8"))])
        .expect("serves");
    let case = &golden("mult-r32")[0];
    let request = Request::token_ids(case.prompt_ids.clone()).max_new_tokens(400);
    let expected = all(&mut engine, &[request.clone(), request.clone().policy("a")]);
    let before = (engine.named_policies()[0].version, engine.policy());
    let hits = engine.statistics().prefix_hits;
    let ids = [request.clone(), request.clone().policy("a")]
        .map(|request| engine.submit(&request).expect("is accepted"));
    let mut finished = vec![None, None];
    let mut steps = 0;
    while engine.has_unfinished() {
        // Every few steps another set; "a" comes to stand in another place.
        steps += 1;
        if steps % 10 == 0 {
            let others = [("b", "qv-r8"), ("c", "layers13-r4"), ("c", "lorabias-r4")];
            let mut set: Vec<_> = others
                .iter()
                .take(steps / 10 % 3)
                .map(|&(name, dir)| (name, adapter(dir)))
                .collect();
            set.push(("a", adapter("mult-r32")));
            let update = engine.serve_policies(set).expect("serves");
            assert_eq!(update.continued_requests, 0);
        }
        for event in engine.step().expect("steps") {
            if let rollout_engine::Event::Finished { request, result, .. } = event {
                let at = ids.iter().position(|id| *id == request).expect("is known");
                finished[at] = Some(result.expect("completes"));
            }
        }
    }
    assert!(steps > 30, "{steps}");
    for (finished, (expected, version)) in finished
        .into_iter()
        .zip(expected.iter().zip([before.1, before.0]))
    {
        let finished = finished.expect("has finished");
        assert_eq!(finished.logprobs, expected.logprobs);
        let span = PolicySpan {
            first_token: 0,
            version,
        };
        assert_eq!(finished.policies, [span]);
    }
    let statistics = engine.statistics();
    assert_eq!((statistics.prefix_hits, statistics.preemptions), (hits + 2, 0));
    let last = all(&mut engine, &[request.policy("a")]);
    assert_eq!(last[0].logprobs, expected[1].logprobs);
    assert_eq!(engine.statistics().prefix_hits, hits + 3);
}

/// A whole module cannot be replaced for one of several.
#[test]
fn an_adapter_that_does_not_fit_changes_nothing() {
    let mut engine = engine();
    engine.serve_policies([("a", adapter("qv-r8"))]).expect("serves");
    let before = engine.named_policies().to_vec();
    let missing = engine.serve_policies([("b", adapter("none"))]);
    assert!(matches!(missing, Err(Error::Adapter(_))));
    assert_eq!(engine.named_policies(), before);
    // B holds what f32 can hold, but not with its scaling.
    let huge = with_values("model.layers.2.mlp.up_proj", 1e30, 1e30);
    let sources = [
        ("a", AdapterSource::from(adapter("qv-r8"))),
        ("c", AdapterSource::from(huge)),
    ];
    let error = engine.serve_policies(sources).expect_err("is too large");
    let text = error.to_string();
    assert!(
        matches!(error, Error::Policy { name, .. } if name == "c"),
        "{text}"
    );
    assert!(
        text.contains("`model.layers.2.mlp.up_proj`") && text.contains("`lora_B`"),
        "{text}"
    );
    assert_eq!(engine.named_policies(), before);
}

/// An adapter of one module with these values in B.
fn with_values(module: &str, value: f32, alpha: f64) -> Arc<Adapter> {
    let config = Qwen3Config::from_dir(&bundled_model()).expect("reads");
    let [rows, columns] = config.projection_shape(Projection::Up);
    let (a, b) = (vec![1.0; columns], vec![value; rows]);
    let names = ["A", "B"].map(|part| format!("{module}.lora_{part}.weight"));
    let shapes = [[1, columns], [rows, 1]];
    let tensor = |i: usize, values| TensorSlice {
        name: &names[i],
        shape: &shapes[i],
        values: TensorValues::F32(values),
    };
    let config = AdapterConfig::new(1, alpha, [module]);
    Adapter::from_tensors(config, &[tensor(0, &a), tensor(1, &b)])
        .expect("is an adapter")
        .into()
}

fn active(name: &str) -> Vec<ActiveAdapter> {
    let adapter = Adapter::load(adapter(name)).expect("loads");
    vec![ActiveAdapter {
        adapter: adapter.into(),
        weight: 1.0,
    }]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever shares the batch, is preempted, or is taken from the prefix cache: pages of one policy are never used under
    /// another, since the fake runner's tokens depend on both.
    #[test]
    fn policies_never_mix(
        requests in prop::collection::vec((1usize..14, 0u32..3, 1usize..12, 0usize..3), 1..14),
        cache in any::<bool>(),
    ) {
        let shape = FakeRunner::small_shape();
        let mut scheduler = Scheduler::new(FakeRunner::new(shape), vec![]).expect("a valid shape");
        scheduler.set_prefix_cache(cache).expect("sets");
        let mut events = Vec::new();
        let policies = [("a".to_string(), active("qv-r8")), ("b".to_string(), active("mult-r32"))];
        scheduler.serve_policies(&policies, &mut events).expect("serves");
        let mut expected = std::collections::HashMap::new();
        for (len, start, new, policy) in requests {
            // Few different prompts, so that prefixes are shared.
            let prompt: Vec<u32> = (0..len as u32).map(|i| start + i / 6).collect();
            let sampling = SamplingParams { max_new_tokens: new, ..SamplingParams::default() };
            let name = [None, Some("a"), Some("b")][policy];
            let id = scheduler.submit_under(prompt.clone(), &sampling, 1, name).expect("fits");
            // The base is what it was before the change.
            let number = policy.checked_sub(1).map_or(0, |policy| 1 + FakeRunner::named(policy));
            expected.insert(id, (FakeRunner::expected_under(number, &prompt, new, &[], shape.vocab_size), policy));
        }
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).expect("steps");
        }
        let mut finished = 0;
        for event in events {
            if let rollout_engine::Event::Finished { request, result, .. } = event {
                let completion = result.expect("completes");
                let (tokens, policy) = &expected[&request];
                prop_assert_eq!(&completion.token_ids, tokens);
                let version = match policy {
                    0 => scheduler.policy(),
                    policy => scheduler.named_policies()[policy - 1].version,
                };
                prop_assert_eq!(completion.policies[0].version, version);
                finished += 1;
            }
        }
        prop_assert_eq!(finished, expected.len());
    }
}
