//! Models in 4 bits through the engine and the command.

use std::process::{Command, Output};

use qwen3_model::MergeMode;
use rollout_engine::{DeviceChoice, Engine, EngineBuilder, Request};
use serde::Deserialize;

use crate::support::fixtures;

#[derive(Deserialize)]
struct Golden {
    prompt_ids: Vec<u32>,
    completion_ids: Vec<u32>,
    logprobs: Vec<f64>,
}

fn builder() -> EngineBuilder {
    Engine::builder()
        .model(fixtures().join("tiny-qwen3-math-bnb-nf4"))
        .device(DeviceChoice::Cpu)
        .max_batch_size(48)
        .max_seq_length(1024)
}

fn completions_are_golden(engine: &mut Engine, name: &str) {
    let json = std::fs::read(fixtures().join(format!("golden/greedy-{name}.json"))).unwrap();
    let golden: Vec<Golden> = serde_json::from_slice(&json).unwrap();
    let requests: Vec<Request> = golden
        .iter()
        .map(|golden| Request::token_ids(golden.prompt_ids.clone()).max_new_tokens(400))
        .collect();
    for (golden, completion) in golden.iter().zip(engine.generate(&requests).unwrap()) {
        let completion = completion.unwrap();
        assert_eq!(completion.token_ids, golden.completion_ids, "{name}");
        for (ours, expected) in completion.logprobs.iter().zip(&golden.logprobs) {
            assert!(
                (f64::from(*ours) - expected).abs() < 2e-4,
                "{name}: {ours} for {expected}"
            );
        }
    }
}

#[test]
fn completions_are_transformers_with_and_without_an_adapter() {
    let mut engine = builder().build().unwrap();
    completions_are_golden(&mut engine, "nf4");
    // Without being asked to, at run time: the weights cannot be merged into.
    let update = engine
        .load_adapter(fixtures().join("adapters/mult-r32").as_path())
        .unwrap();
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
        .adapter(fixtures().join("adapters/mult-r32"))
        .merge_mode(MergeMode::Merged)
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("4 bits"), "{error}");
    let built = builder()
        .adapter(fixtures().join("adapters/mult-r32"))
        .dequantize(true)
        .build_with_notice()
        .unwrap();
    let policy = built.policy.unwrap();
    assert_eq!(policy.mode, MergeMode::Merged);
    assert!(policy.merged_bytes > 0 && policy.differs_from_base);
}

fn rollout(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rollout"))
        .args(args)
        .output()
        .expect("the command runs")
}

#[test]
fn the_command_quantises_and_generates() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("nf4");
    let to = to.to_str().unwrap();
    let elsewhere = dir.path().join("elsewhere/below");
    let elsewhere = elsewhere.to_str().unwrap();
    let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let output = rollout(&["quantize", "--output", to, "--skip-module", "layers.3.mlp"]);
    assert!(output.status.success(), "{output:?}");
    assert!(
        text(&output).contains("25 modules in nf4, 3 in bf16"),
        "{output:?}"
    );
    let adapter = fixtures().join("adapters/mult-r32");
    let generate = [
        "generate",
        "--device",
        "cpu",
        "--model",
        to,
        "--max-new-tokens",
        "3",
    ];
    for extra in [
        &[][..],
        &["--adapter", adapter.to_str().unwrap()],
        &["--adapter", adapter.to_str().unwrap(), "--dequantize"],
    ] {
        let output = rollout(&[&generate[..], extra].concat());
        assert!(output.status.success() && !output.stdout.is_empty(), "{output:?}");
    }
    let inspect = rollout(&["inspect", "--model", to]);
    assert!(
        text(&inspect).contains("25 of 28 modules in 4 bits"),
        "{inspect:?}"
    );
    for (args, words) in [
        (vec!["quantize", "--output", to], ["--output", "holds files"]),
        (
            vec!["quantize", "--output", elsewhere, "--skip-module", "proj"],
            ["--skip-module", "proj"],
        ),
        (
            vec!["quantize", "--output", elsewhere, "--model", to],
            ["--model", "already"],
        ),
    ] {
        let output = rollout(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!(error.trim().lines().count(), 1, "{error}");
    }
}
