//! Models in 4 bits through the engine.

use qwen3_model::MergeMode;
use rollout_engine::{DeviceChoice, Engine, EngineBuilder, Request};

use crate::support::{adapter, fixtures, golden};

fn builder() -> EngineBuilder {
    Engine::builder()
        .model(fixtures().join("tiny-qwen3-math-bnb-nf4"))
        .device(DeviceChoice::Cpu)
        .max_batch_size(48)
        .max_seq_length(1024)
}

fn completions_are_golden(engine: &mut Engine, name: &str) {
    let golden = golden(name);
    let requests: Vec<Request> = golden
        .iter()
        .map(|golden| Request::token_ids(golden.prompt_ids.clone()).max_new_tokens(400))
        .collect();
    for (golden, completion) in golden.iter().zip(engine.generate(&requests).unwrap()) {
        let completion = completion.unwrap();
        assert_eq!(completion.token_ids, golden.completion_ids, "{name}");
        for (ours, expected) in completion.logprobs.iter().zip(&golden.logprobs) {
            assert!((ours - expected).abs() < 2e-4, "{name}: {ours} for {expected}");
        }
    }
}

#[test]
fn completions_are_transformers_with_and_without_an_adapter() {
    let mut engine = builder().build().unwrap();
    completions_are_golden(&mut engine, "nf4");
    // Without being asked to, at run time: the weights cannot be merged into.
    let update = engine.load_adapter(adapter("mult-r32").as_path()).unwrap();
    assert_eq!((update.mode, update.merged_bytes), (MergeMode::Unmerged, 0));
    completions_are_golden(&mut engine, "nf4+mult-r32");
    let error = engine.set_merge_mode(MergeMode::Merged).unwrap_err().to_string();
    assert!(
        error.contains("4 bits") && error.contains("dequantise"),
        "{error}"
    );
    engine.unload_adapters().unwrap();
    completions_are_golden(&mut engine, "nf4");
}

#[test]
fn a_dequantised_model_takes_merges() {
    let error = builder()
        .adapter(adapter("mult-r32"))
        .merge_mode(MergeMode::Merged)
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("4 bits"), "{error}");
    let built = builder()
        .adapter(adapter("mult-r32"))
        .dequantize(true)
        .build_with_notice()
        .unwrap();
    let policy = built.policy.unwrap();
    assert_eq!(policy.mode, MergeMode::Merged);
    assert!(policy.merged_bytes > 0 && policy.differs_from_base);
}
