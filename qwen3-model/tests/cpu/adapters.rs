//! Adapters against PEFT: logits of every fixture, merged and at run time.

use std::slice::from_ref;

use crate::common::*;
use lora_merge::{
    ActiveAdapter, Adapter, AdapterConfig, DriftOptions, TensorSlice, TensorValues, verify_no_drift,
};
use qwen3_model::{Backend, CpuBackend, Error, MergeMode, Model, Projection};

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

fn active(name: &str) -> Vec<ActiveAdapter> {
    let load = |name| ActiveAdapter::new(Adapter::load(fixture("adapters").join(name)).unwrap());
    name.split('+').map(load).collect()
}

fn load() -> Model<CpuBackend> {
    Model::load(model_dir(), &options(40, 16)).unwrap()
}

#[test]
fn adapters_at_run_time_agree_with_peft() {
    let mut model = load();
    for name in NAMES {
        model.set_adapters(&active(name), MergeMode::Unmerged).unwrap();
        let (log_prob, logit) = compare(&mut model, name);
        assert!(log_prob < 2e-4 && logit < 1e-3, "{name}: {log_prob} {logit}");
    }
}

/// Merged weights are rounded to bf16 once more; PEFT's values here are not.
#[test]
fn merged_adapters_are_close_to_peft() {
    let mut model = load();
    for name in NAMES {
        let report = model.set_adapters(&active(name), MergeMode::Merged).unwrap();
        assert!(report.changed_modules > 0);
        let (log_prob, logit) = compare(&mut model, name);
        assert!(log_prob < 1e-2 && logit < 0.1, "{name}: {log_prob} {logit}");
    }
}

fn greedy_agrees(mode: MergeMode, bound: f64) {
    let mut model = load();
    for name in NAMES {
        model.set_adapters(&active(name), mode).unwrap();
        let mut worst = 0.0f64;
        for (i, golden) in greedy(name).iter().enumerate() {
            let mut table = table(&options(40, 16), 1);
            let slot = table.allocate_slot().unwrap();
            let mut next = golden.prompt_ids.clone();
            for (n, (id, expected)) in golden.completion_ids.iter().zip(&golden.logprobs).enumerate() {
                let logits = extend(&mut model, &mut table, &[(slot, &next)], false);
                assert_eq!(argmax(&logits), *id, "{name}, prompt {i}, token {n}");
                worst = worst.max((log_prob(&logits, *id) - expected).abs());
                next = vec![*id];
            }
        }
        assert!(worst < bound, "{name}: {worst}");
    }
}

#[test]
fn greedy_completions_at_run_time_are_pefts() {
    greedy_agrees(MergeMode::Unmerged, 2e-4);
}

#[test]
fn greedy_completions_of_merged_adapters_are_pefts() {
    greedy_agrees(MergeMode::Merged, 1e-2);
}

#[test]
fn the_base_comes_back_bit_for_bit() {
    let mut model = load();
    let ids = &golden_logits("base")[0].0;
    let run = |model: &mut Model<CpuBackend>| {
        let mut table = table(&options(40, 16), 1);
        let slot = table.allocate_slot().unwrap();
        extend(model, &mut table, &[(slot, ids)], true)
    };
    let base = run(&mut model);
    for (number, mode) in [(1, MergeMode::Merged), (3, MergeMode::Unmerged)] {
        let version = model.set_adapters(&active("dora-r8"), mode).unwrap().version;
        assert_eq!(version.number, number);
        assert_ne!(run(&mut model), base);
        model.set_adapters(&[], mode).unwrap();
        assert_eq!(run(&mut model), base);
    }
}

#[test]
fn merged_storage_exists_for_targets_only_and_never_moves() {
    let mut model = load();
    assert_eq!(model.backend().store().memory().merged_bytes, 0);
    assert_eq!(
        model.backend().store().memory().pristine_bytes,
        0,
        "the file is mapped"
    );
    model.set_adapters(&active("qv-r8"), MergeMode::Merged).unwrap();
    let memory = model.backend().store().memory();
    assert_eq!(memory.merged_modules, 8);
    assert_eq!(memory.merged_bytes, 4 * 2 * (1024 + 256) * 256);
    let address = |model: &Model<CpuBackend>| {
        let store = model.backend().store();
        let module = store.module("model.layers.2.self_attn.v_proj").unwrap();
        store.weight(module).unwrap().as_ptr()
    };
    let before = address(&model);
    for name in ["mult-r32", "qv-r8", "dora-r8"] {
        model.set_adapters(&active(name), MergeMode::Merged).unwrap();
        assert_eq!(address(&model), before);
    }
}

#[test]
fn an_adapter_that_does_not_fit_leaves_the_previous_one_in_force() {
    let mut model = load();
    model
        .set_adapters(&active("mult-r32"), MergeMode::Merged)
        .unwrap();
    let version = model.backend().version();
    let good = compare(&mut model, "mult-r32");
    let small = crate::common::folder::Folder::new();
    let dir = tempfile::tempdir().unwrap();
    small.write(dir.path());
    let mut other = Model::load(dir.path(), &options(8, 16)).unwrap();
    for mode in [MergeMode::Merged, MergeMode::Unmerged] {
        let error = other
            .set_adapters(&active("mult-r32"), mode)
            .unwrap_err()
            .to_string();
        assert!(error.contains("layers."), "{error}");
        let mut broken = active("mult-r32");
        broken[0].weight = f32::NAN;
        assert!(model.set_adapters(&broken, mode).is_err());
        assert_eq!(model.backend().version(), version);
        assert_eq!(compare(&mut model, "mult-r32"), good);
    }
}

#[test]
fn weights_beyond_bf16_are_refused_and_leave_the_previous_policy_in_force() {
    let mut model = load();
    let before = model.set_adapters(&active("qv-r8"), MergeMode::Merged).unwrap();
    let mut huge = active("mult-r32");
    huge[0].weight = f32::MAX;
    // Once is still finite in bf16, many times is not.
    let error = model
        .set_adapters(&vec![huge[0].clone(); 256], MergeMode::Merged)
        .unwrap_err();
    assert!(error.to_string().contains("finite"), "{error}");
    // At run time there is no sum with the base, but a scaled factor that f32 cannot hold.
    let alpha = |alpha: f64| {
        let tensor = |name, shape, values| TensorSlice {
            name,
            shape,
            values: TensorValues::F32(values),
        };
        let config = model.config();
        let (name, [rows, columns]) = (Projection::O.module(1), config.projection_shape(Projection::O));
        let (a, b) = (vec![1.0; columns], vec![1e10; rows]);
        let (name_a, name_b) = (format!("{name}.lora_A.weight"), format!("{name}.lora_B.weight"));
        let (shape_a, shape_b) = ([1, columns], [rows, 1]);
        let tensors = [tensor(&name_a, &shape_a, &a), tensor(&name_b, &shape_b, &b)];
        ActiveAdapter::new(Adapter::from_tensors(AdapterConfig::new(1, alpha, [name]), &tensors).unwrap())
    };
    let (fits, huge) = (alpha(1.0), alpha(1e30));
    for mode in [MergeMode::Merged, MergeMode::Unmerged] {
        let error = model.set_adapters(from_ref(&huge), mode).unwrap_err().to_string();
        assert!(error.contains("`model.layers.1.self_attn.o_proj`"), "{error}");
        let policies: [&[ActiveAdapter]; 2] = [from_ref(&fits), from_ref(&huge)];
        let error = model.backend_mut().serve_policies(&policies).unwrap_err();
        let Error::Policy { policy: 1, source } = &error else {
            panic!("{error}");
        };
        assert!(
            matches!(source, lora_merge::Error::FactorNotFinite { module, factor: "lora_B", .. }
                if module == "model.layers.1.self_attn.o_proj"),
            "{error}"
        );
    }
    let (log_prob, _) = compare(&mut model, "qv-r8");
    assert!(log_prob < 1e-2, "{log_prob}");
    let again = model.set_adapters(&active("qv-r8"), MergeMode::Merged).unwrap();
    assert_eq!(again.version.sha256, before.version.sha256);
}

#[test]
fn the_base_does_not_drift() {
    let mut model = load();
    let report = verify_no_drift(model.backend_mut(), &active("mult-r32"), &DriftOptions::default()).unwrap();
    assert!(report.passed(), "{report:?}");
}
