//! Adapters through the engine on a GPU, against the golden completions of PEFT.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::cases;
use gpu_support::{CLOSE, Golden, adapter, bundled_model, pool};
use lora_merge::{ActiveAdapter, Adapter, DriftOptions, verify_no_drift};
use rollout_engine::{AdapterSource, DeviceChoice, Engine, Error, MergeMode, Request};

fn engine(mode: MergeMode) -> Result<Engine, Error> {
    Engine::builder()
        .model(bundled_model())
        .device(DeviceChoice::Cuda(0))
        .pool(pool(16, 64, 1 + 16 * 8, 1024))
        .merge_mode(mode)
        .build()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn golden_completions_of_merged_adapters() {
    let mut engine = engine(MergeMode::Merged).expect("builds");
    for name in cases([
        "mult-r32",
        "qv-r8",
        "rslora-r8",
        "dora-r8",
        "pattern",
        "layers13-r4",
        "lorabias-r4",
        "mult-r32+qv-r8",
    ]) {
        let update = engine
            .load_adapters(
                name.split('+')
                    .map(|name| (AdapterSource::from(adapter(name)), 1.0)),
            )
            .expect("loads");
        let golden = Golden::all(name);
        let requests: Vec<Request> = golden
            .iter()
            .map(|case| Request::token_ids(case.prompt.clone()).max_new_tokens(400))
            .collect();
        let (mut sure, mut equal) = (0, 0);
        for (case, completion) in golden.iter().zip(engine.generate(&requests).expect("runs")) {
            let completion = completion.expect("completes");
            assert_eq!(completion.policies.len(), 1);
            assert_eq!(completion.policies[0].version, update.version);
            let same = completion.token_ids == case.completion;
            equal += usize::from(same);
            if case.gap > 2.0 * CLOSE {
                sure += 1;
                assert!(same, "{name}: a sure completion differs");
            }
        }
        eprintln!("{name}: {equal} of {} equal, {sure} sure", golden.len());
        assert!(
            2 * equal > golden.len(),
            "{name}: only {equal} of {} are equal",
            golden.len()
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_change_under_way_is_marked_with_both_policies() {
    let mut engine = engine(MergeMode::Merged).expect("builds");
    engine.load_adapter(adapter("mult-r32")).expect("loads");
    let request = Request::user("What is 23 times 45?").max_new_tokens(40);
    engine.submit(&request).expect("accepted");
    for _ in 0..8 {
        engine.step().expect("runs");
    }
    let update = engine.load_adapter(adapter("qv-r8")).expect("loads");
    assert_eq!(update.continued_requests, 1);
    let mut completion = None;
    while engine.has_unfinished() {
        for event in engine.step().expect("runs") {
            if let rollout_engine::Event::Finished { result, .. } = event {
                completion = Some(result.expect("completes"));
            }
        }
    }
    let completion = completion.expect("finished");
    let [first, second] = completion.policies[..] else {
        panic!("{:?}", completion.policies)
    };
    assert_eq!((first.version.number, second.version), (1, update.version));
    // The rest is what the second policy gives for the tokens up to there.
    let known: Vec<u32> = (completion.prompt_token_ids.iter())
        .chain(&completion.token_ids[..second.first_token])
        .copied()
        .collect();
    let left = 40 - second.first_token;
    let again = engine
        .generate(&[Request::token_ids(known).max_new_tokens(left)])
        .expect("runs");
    let again = again.into_iter().next().expect("one").expect("completes");
    assert_eq!(again.token_ids, completion.token_ids[second.first_token..]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_engine_does_not_drift_also_after_adapters_at_run_time() {
    let mut merged = engine(MergeMode::Merged).expect("builds");
    let active = [ActiveAdapter::new(
        Adapter::load(adapter("mult-r32")).expect("loads"),
    )];
    let report = verify_no_drift(&mut merged, &active, &DriftOptions::default()).expect("runs");
    assert!(report.passed(), "{report:?}");
    merged
        .set_merge_mode(MergeMode::Unmerged)
        .expect("adapters at run time");
    merged.refresh().expect("adapters at run time");
    merged.set_merge_mode(MergeMode::Merged).expect("merged again");
    let again = verify_no_drift(&mut merged, &active, &DriftOptions::default()).expect("runs");
    assert!(again.passed(), "{again:?}");
}
