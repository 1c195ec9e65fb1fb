//! Adapters through the engine: golden completions, changes of policy under way, failures.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lora_merge::{ActiveAdapter, Adapter, DriftOptions, TensorSlice, TensorValues, verify_no_drift};
use qwen3_model::{LoadOptions, Model};
use rollout_engine::runner::RunnerMemory;
use rollout_engine::{
    AdapterSource, Completion, DeviceChoice, Engine, Error, Event, FakeRunner, MergeMode, ModelRunner,
    PolicySpan, Request, RunnerShape, SamplingParams, Scheduler,
};

use crate::support::{Golden, adapter, bundled_model, golden};

const NAMES: [&str; 8] = [
    "mult-r32",
    "qv-r8",
    "rslora-r8",
    "dora-r8",
    "pattern",
    "lorabias-r4",
    "layers13-r4",
    "mult-r32+qv-r8",
];

fn requests(golden: &[Golden]) -> Vec<Request> {
    golden
        .iter()
        .map(|case| Request::token_ids(case.prompt_ids.clone()).max_new_tokens(400))
        .collect()
}

fn engine(names: &str, mode: MergeMode) -> Engine {
    let mut builder = Engine::builder()
        .model(bundled_model())
        .device(DeviceChoice::Cpu)
        .max_batch_size(24)
        .page_size(16)
        .n_pages(1 + 24 * 40)
        .merge_mode(mode);
    for name in names.split('+').filter(|name| !name.is_empty()) {
        builder = builder.adapter(adapter(name));
    }
    builder.build().expect("builds")
}

fn completions<R: rollout_engine::Runner>(engine: &mut Engine<R>, requests: &[Request]) -> Vec<Completion> {
    let results = engine.generate(requests).expect("runs");
    results
        .into_iter()
        .map(|result| result.expect("completes"))
        .collect()
}

/// Whether the completions are the golden ones; gives the largest difference of a log-probability.
fn agree(name: &str, golden: &[Golden], completions: &[Completion]) -> f32 {
    let mut worst = 0f32;
    for (i, (case, completion)) in golden.iter().zip(completions).enumerate() {
        assert_eq!(completion.token_ids, case.completion_ids, "{name}, prompt {i}");
        for (ours, theirs) in completion.logprobs.iter().zip(&case.logprobs) {
            worst = worst.max((ours - theirs).abs());
        }
    }
    worst
}

fn golden_completions(mode: MergeMode, tolerance: f32) {
    let mut one = engine("", mode);
    for (number, name) in NAMES.into_iter().enumerate() {
        let golden = golden(name);
        // The first engine goes from adapter to adapter; a pair must do the same from the start.
        let update = one
            .load_adapters(name.split('+').map(|name| (adapter(name).into(), 1.0)))
            .expect("loads");
        assert!(update.changed && update.differs_from_base && update.remark().is_none());
        assert_eq!(update.version.number, number as u64 + 1);
        let refreshed = completions(&mut one, &requests(&golden));
        let worst = agree(name, &golden, &refreshed);
        assert!(worst <= tolerance, "{name}: {worst}");
        for completion in &refreshed {
            let span = PolicySpan {
                first_token: 0,
                version: update.version,
            };
            assert_eq!(completion.policies, [span]);
        }
        if name.contains('+') {
            let built = completions(&mut engine(name, mode), &requests(&golden));
            agree(name, &golden, &built);
        }
    }
}

#[test]
fn golden_completions_of_merged_adapters() {
    golden_completions(MergeMode::Merged, 1e-2);
}

#[test]
fn golden_completions_of_adapters_at_run_time() {
    golden_completions(MergeMode::Unmerged, 2e-4);
}

/// Tensors of a safetensors file as f32, by name.
fn tensors(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(dir.join("adapter_model.safetensors")).expect("readable");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let map: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    let mut out = BTreeMap::new();
    for (name, info) in map.iter().filter(|(name, _)| *name != "__metadata__") {
        let numbers =
            |key: &str| -> Vec<usize> { serde_json::from_value(info[key].clone()).expect("numbers") };
        let (shape, place) = (numbers("shape"), numbers("data_offsets"));
        let data = &bytes[8 + header + place[0]..8 + header + place[1]];
        let halves = data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let values = match info["dtype"].as_str() {
            Some("F32") => data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Some("BF16") => halves.map(|b| half::bf16::from_bits(b).to_f32()).collect(),
            Some("F16") => halves.map(|b| half::f16::from_bits(b).to_f32()).collect(),
            other => panic!("{name} is {other:?}"),
        };
        out.insert(name.clone(), (shape, values));
    }
    out
}

#[test]
fn folder_bytes_and_tensors_give_the_same_policy() {
    let dir = adapter("mult-r32");
    let config_json = std::fs::read_to_string(dir.join("adapter_config.json")).expect("readable");
    let safetensors = std::fs::read(dir.join("adapter_model.safetensors")).expect("readable");
    let tensors = tensors(&dir);
    let slices: Vec<TensorSlice<'_>> = tensors
        .iter()
        .map(|(name, (shape, values))| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        })
        .collect();
    let mut engine = engine("", MergeMode::Merged);
    let first = engine.load_adapter(&dir).expect("loads");
    let request = Request::user("What is 12 times 7?").max_new_tokens(20);
    let expected = completions(&mut engine, std::slice::from_ref(&request));
    let sources = [
        AdapterSource::Bytes {
            config_json: &config_json,
            safetensors: &safetensors,
        },
        AdapterSource::Tensors {
            config: lora_merge::AdapterConfig::from_json(&config_json).expect("a configuration"),
            tensors: &slices,
        },
        Adapter::load(&dir).expect("loads").into(),
    ];
    for source in sources {
        // The digest is one of bytes: the folder's tensors are bf16, the slices f32.
        let same_bytes = !matches!(source, AdapterSource::Tensors { .. });
        let update = engine.load_adapter(source).expect("loads");
        assert_eq!(update.version.sha256 == first.version.sha256, same_bytes);
        assert!(!update.changed, "the same weights again");
        assert_eq!(
            update.remark(),
            Some("the update changed no weight: the policy is the same as before")
        );
        let again = completions(&mut engine, std::slice::from_ref(&request));
        assert_eq!(again[0].token_ids, expected[0].token_ids);
        assert_eq!(again[0].logprobs, expected[0].logprobs);
    }
    assert_eq!(engine.policy().number, 4);
}

#[test]
fn a_folder_with_new_values_is_read_again_by_refresh() {
    let dir = tempfile::tempdir().expect("a folder");
    let copy = |name: &str| {
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(adapter(name).join(file), dir.path().join(file)).expect("copied");
        }
    };
    copy("qv-r8");
    let mut engine = engine("", MergeMode::Merged);
    engine.load_adapter(dir.path()).expect("loads");
    let golden_qv = golden("qv-r8");
    agree(
        "qv-r8",
        &golden_qv,
        &completions(&mut engine, &requests(&golden_qv)),
    );
    copy("mult-r32");
    let update = engine.refresh().expect("refreshes");
    assert!(update.changed && update.version.number == 2);
    let golden_mult = golden("mult-r32");
    agree(
        "mult-r32",
        &golden_mult,
        &completions(&mut engine, &requests(&golden_mult)),
    );
    // A folder that is gone leaves the policy in force.
    std::fs::remove_file(dir.path().join("adapter_model.safetensors")).expect("removed");
    assert!(matches!(engine.refresh(), Err(Error::Adapter(_))));
    assert_eq!(engine.policy(), update.version);
    agree(
        "mult-r32",
        &golden_mult,
        &completions(&mut engine, &requests(&golden_mult)),
    );
    engine.unload_adapters().expect("unloads");
    let golden_base = golden("base");
    agree(
        "base",
        &golden_base,
        &completions(&mut engine, &requests(&golden_base)),
    );
}

#[test]
fn an_adapter_without_effect_is_reported() {
    let dir = adapter("qv-r8");
    let zeros: BTreeMap<_, _> = tensors(&dir)
        .into_iter()
        .map(|(name, (shape, values))| {
            let values = if name.contains("lora_B") {
                vec![0.0; values.len()]
            } else {
                values
            };
            (name, (shape, values))
        })
        .collect();
    let slices: Vec<_> = zeros
        .iter()
        .map(|(name, (shape, values))| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        })
        .collect();
    let config = std::fs::read_to_string(dir.join("adapter_config.json")).expect("readable");
    for mode in [MergeMode::Merged, MergeMode::Unmerged] {
        let source = AdapterSource::Tensors {
            config: lora_merge::AdapterConfig::from_json(&config).expect("a configuration"),
            tensors: &slices,
        };
        let update = engine("", mode).load_adapter(source).expect("loads");
        assert!(update.adapted_modules > 0 && !update.differs_from_base);
        assert!(update.remark().expect("a remark").contains("base model"));
    }
}

#[test]
fn an_adapter_that_cannot_be_served_is_never_loaded() {
    for broken in ["", "not-there"] {
        let built = Engine::builder()
            .model(bundled_model())
            .device(DeviceChoice::Cpu)
            .adapter(adapter(broken))
            .build();
        assert!(matches!(built, Err(Error::Adapter(_))));
    }
    let mut engine = engine("mult-r32", MergeMode::Merged);
    let policy = engine.policy();
    assert!(engine.load_adapter("not-there").is_err());
    let infinite = [(AdapterSource::from(adapter("qv-r8")), f32::INFINITY)];
    assert!(engine.load_adapters(infinite).is_err());
    assert_eq!((engine.policy(), engine.active_adapters().len()), (policy, 1));
}

/// Tokens of one request after a policy has changed at some of its tokens: those of an engine that was under each
/// policy from the start, given the tokens so far.
#[test]
fn a_change_under_way_is_taken_at_a_step_boundary_and_marked() {
    let prompt = golden("base")[0].prompt_ids.clone();
    let request = |ids: Vec<u32>, n: usize| Request::token_ids(ids).max_new_tokens(n);
    for mode in [MergeMode::Merged, MergeMode::Unmerged] {
        let mut engine = engine("mult-r32", mode);
        let others = requests(&golden("mult-r32")[1..6]);
        let id = engine.submit(&request(prompt.clone(), 24)).expect("accepted");
        for other in &others {
            engine.submit(other).expect("accepted");
        }
        let mut tokens = 0;
        let mut finished = None;
        let mut take = |events: Vec<Event>, tokens: &mut usize| {
            for event in events {
                match event {
                    Event::Token { request, .. } if request == id => *tokens += 1,
                    Event::Finished { request, result, .. } if request == id => {
                        finished = Some(result.expect("completes"));
                    }
                    _ => {}
                }
            }
        };
        while tokens < 5 {
            take(engine.step().expect("runs"), &mut tokens);
        }
        let update = engine.load_adapter(adapter("rslora-r8")).expect("loads");
        assert!(update.continued_requests >= 1);
        while engine.has_unfinished() {
            take(engine.step().expect("runs"), &mut tokens);
        }
        let completion = finished.expect("finished");
        let [first, second] = completion.policies[..] else {
            panic!("{:?}", completion.policies)
        };
        assert_eq!((first.first_token, first.version.number), (0, 1));
        assert_eq!((second.first_token, second.version), (5, update.version));

        let mut fresh = self::engine("mult-r32", mode);
        let before = &completions(&mut fresh, &[request(prompt.clone(), 5)])[0];
        assert_eq!(before.token_ids, completion.token_ids[..5]);
        let known: Vec<u32> = prompt.iter().chain(&before.token_ids).copied().collect();
        fresh.load_adapter(adapter("rslora-r8")).expect("loads");
        let after = &completions(&mut fresh, &[request(known, 24 - 5)])[0];
        assert_eq!(after.token_ids, completion.token_ids[5..]);
        assert_eq!(after.logprobs, completion.logprobs[5..]);
    }
}

/// Preempted sequences wait with tokens of one policy and resume under another; the fake runner's tokens depend on the
/// policy that computed every position.
#[test]
fn sequences_preempted_before_a_change_resume_under_the_new_policy() {
    for max_in_flight in [1, 2] {
        let shape = RunnerShape {
            max_in_flight,
            n_pages: 10,
            ..FakeRunner::small_shape()
        };
        let mut scheduler = Scheduler::new(FakeRunner::new(shape), vec![]).expect("a scheduler");
        let sampling = SamplingParams {
            max_new_tokens: 20,
            ..SamplingParams::default()
        };
        let prompts: Vec<Vec<u32>> = (0..6u32)
            .map(|i| (0..=i % 3 + 3).map(|j| 7 * i + j).collect())
            .collect();
        for prompt in &prompts {
            scheduler.submit(prompt.clone(), &sampling).expect("accepted");
        }
        let mut events = Vec::new();
        let mut changes = 0;
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).expect("runs");
            if scheduler.statistics().steps > 9 * (changes + 1) {
                let active = if changes % 2 == 0 {
                    vec![ActiveAdapter::new(
                        Adapter::load(adapter("qv-r8")).expect("loads"),
                    )]
                } else {
                    vec![]
                };
                scheduler
                    .set_adapters(&active, MergeMode::Merged, &mut events)
                    .expect("changes");
                scheduler.pages().check_integrity().expect("whole");
                changes += 1;
            }
        }
        assert!(scheduler.statistics().preemptions > 0 && changes > 2);
        assert_eq!(scheduler.pages().free_pages(), 9);
        let mut mixed = 0;
        let mut finished = 0;
        for event in events {
            let Event::Finished { result, .. } = event else {
                continue;
            };
            let completion = result.expect("completes");
            finished += 1;
            mixed += usize::from(completion.policies.len() > 1);
            assert_eq!(completion.policies[0].first_token, 0);
            let ends = completion.policies.iter().skip(1).map(|span| span.first_token);
            for (span, end) in completion
                .policies
                .iter()
                .zip(ends.chain([completion.token_ids.len()]))
            {
                let known: Vec<u32> = (completion.prompt_token_ids.iter())
                    .chain(&completion.token_ids[..span.first_token])
                    .copied()
                    .collect();
                let expected =
                    FakeRunner::expected_under(span.version.number, &known, end - span.first_token, &[], 97);
                assert_eq!(completion.token_ids[span.first_token..end], expected);
            }
        }
        assert_eq!(finished, prompts.len());
        assert!(mixed > 0, "no completion saw two policies");
    }
}

#[test]
fn a_change_that_fails_disturbs_no_request() {
    let runner = FakeRunner::new(FakeRunner::small_shape()).failing_policy_changes();
    let mut scheduler = Scheduler::new(runner, vec![]).expect("a scheduler");
    let sampling = SamplingParams {
        max_new_tokens: 9,
        ..SamplingParams::default()
    };
    scheduler.submit(vec![1, 2, 3], &sampling).expect("accepted");
    let mut events = Vec::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).expect("runs");
        let policy = scheduler.policy();
        assert!(
            scheduler
                .set_adapters(&[], MergeMode::Merged, &mut events)
                .is_err()
        );
        assert_eq!(scheduler.policy(), policy);
    }
    let Some(Event::Finished { result: Ok(done), .. }) = events.pop() else {
        panic!("no completion")
    };
    assert_eq!(done.token_ids, FakeRunner::expected(&[1, 2, 3], 9, &[], 97));
    assert_eq!(done.policies.len(), 1);
}

/// Every step of a merge is made to fail once, while requests are under way.
#[test]
fn a_merge_that_fails_at_any_step_leaves_the_policy_in_force() {
    let mut options = LoadOptions::default();
    (options.n_pages, options.page_size) = (65, 16);
    let mut model = Model::load(bundled_model(), &options).expect("loads");
    // The step that fails, and how many steps were asked.
    let (fails_at, asked) = (
        Arc::new(AtomicUsize::new(usize::MAX)),
        Arc::new(AtomicUsize::new(0)),
    );
    let hook = {
        let (fails_at, asked) = (fails_at.clone(), asked.clone());
        move |_| asked.fetch_add(1, Ordering::SeqCst) == fails_at.load(Ordering::SeqCst)
    };
    model.backend_mut().set_fault_hook(Some(Box::new(hook)));
    let shape = RunnerShape {
        vocab_size: 1024,
        max_seq_length: 256,
        max_batch_size: 4,
        n_pages: 65,
        page_size: 16,
        max_in_flight: 1,
        max_prefill_tokens: 512,
    };
    let runner = ModelRunner::new(model, shape, "cpu".into(), RunnerMemory::default());
    let mut engine = Engine::with_runner(runner, vec![], None).expect("an engine");
    engine.load_adapter(adapter("qv-r8")).expect("loads");
    let policy = engine.policy();
    let request = Request::token_ids(vec![5, 6, 7]).max_new_tokens(6);
    let expected = completions(&mut engine, std::slice::from_ref(&request));
    let mut n = 0;
    loop {
        fails_at.store(n, Ordering::SeqCst);
        asked.store(0, Ordering::SeqCst);
        engine.submit(&request).expect("accepted");
        engine.step().expect("runs");
        if engine.load_adapter(adapter("mult-r32")).is_ok() {
            break;
        }
        let mut last = None;
        while engine.has_unfinished() {
            last = engine.step().expect("runs").pop().or(last);
        }
        assert_eq!(engine.policy(), policy);
        let Some(Event::Finished { result: Ok(done), .. }) = last else {
            panic!("no completion")
        };
        assert_eq!(
            (&done.token_ids, &done.logprobs),
            (&expected[0].token_ids, &expected[0].logprobs)
        );
        assert_eq!(done.policies, expected[0].policies, "step {n}");
        n += 1;
    }
    assert!(n > 28, "only {n} steps were made to fail");
}

#[test]
fn an_engine_does_not_drift() {
    let mut engine = engine("", MergeMode::Merged);
    let active = [ActiveAdapter::new(
        Adapter::load(adapter("mult-r32")).expect("loads"),
    )];
    let mut options = DriftOptions::default();
    options.iterations = 3;
    let report = verify_no_drift(&mut engine, &active, &options).expect("runs");
    assert!(report.passed());
    assert_ne!(report.base_hash_before, report.inference_hash_initial_merged);
    engine.unload_adapters().expect("unloads");
    let served = lora_merge::DriftSubject::served_digest(&mut engine).expect("digests");
    assert_eq!(lora_merge::hex(&served), report.base_hash_before);
}
