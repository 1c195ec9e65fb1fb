//! 4-bit checkpoints of bitsandbytes: values, logits and completions against it, and folders that this crate writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::folder::Folder;
use crate::common::*;
use half::bf16;
use lora_merge::{ActiveAdapter, Adapter};
use qwen3_model::{
    Backend, CpuBackend, GenerationConfig, MergeMode, Model, Projection, QuantType, QuantizeOptions,
    Qwen3Config, Weights, quantize_folder,
};
use safetensors::SafeTensors;

fn nf4_dir() -> PathBuf {
    fixture("tiny-qwen3-math-bnb-nf4")
}

fn weights(dir: &Path) -> Weights {
    Weights::open(dir, &Qwen3Config::from_dir(dir).unwrap()).unwrap()
}

fn load() -> Model<CpuBackend> {
    Model::load(nf4_dir(), &options(40, 16)).unwrap()
}

fn mult() -> Vec<ActiveAdapter> {
    vec![ActiveAdapter::new(
        Adapter::load(fixture("adapters/mult-r32")).unwrap(),
    )]
}

#[test]
fn dequantised_values_are_bitsandbytes() {
    let weights = weights(&nf4_dir());
    assert!(weights.is_quantized() && weights.is_tied());
    let bytes = std::fs::read(fixture("golden/dequant-nf4.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let mut compared = 0;
    for projection in [Projection::Q, Projection::O, Projection::Down] {
        let matrix = weights.layers[1].projection(projection);
        let golden = golden.tensor(matrix.name()).unwrap();
        let quantized = matrix.quantized().expect("is in 4 bits");
        let mut ours = vec![bf16::NAN; 64 * matrix.cols()];
        quantized.dequantize_rows(0..64, &mut ours).unwrap();
        assert_eq!(ours, matrix.to_bf16()[..ours.len()]);
        for (ours, golden) in ours.iter().zip(golden.data().chunks_exact(4)) {
            assert_eq!(
                ours.to_f32().to_bits(),
                u32::from_le_bytes(golden.try_into().unwrap())
            );
            compared += 1;
        }
    }
    assert_eq!(compared, 64 * (256 + 1024 + 640));
}

#[test]
fn weights_take_a_little_over_four_bits() {
    let (four_bit, full) = (weights(&nf4_dir()), weights(&model_dir()));
    let matrices: u64 = Projection::ALL
        .map(|p| full.layers[0].projection(p).bytes() as u64)
        .iter()
        .sum::<u64>()
        * 4;
    // 4 bits, and 32 of every 64 for the scale.
    assert_eq!(full.bytes() - four_bit.bytes(), matrices - matrices * 9 / 32);
    assert_eq!(four_bit.dequantized().bytes(), full.bytes());
}

fn greedy_agrees(model: &mut Model<CpuBackend>, name: &str) {
    let eos = GenerationConfig::from_dir(&nf4_dir())
        .unwrap()
        .unwrap()
        .eos_token_ids;
    let mut worst = 0.0f64;
    for (i, golden) in greedy(name).iter().enumerate() {
        let mut table = table(&options(40, 16), 1);
        let slot = table.allocate_slot().unwrap();
        let mut next = golden.prompt_ids.clone();
        for (n, (id, expected)) in golden.completion_ids.iter().zip(&golden.logprobs).enumerate() {
            let logits = extend(model, &mut table, &[(slot, &next)], false);
            assert_eq!(argmax(&logits), *id, "{name}, prompt {i}, token {n}");
            worst = worst.max((log_prob(&logits, *id) - expected).abs());
            next = vec![*id];
        }
        assert!(golden.completion_ids.len() == 400 || eos.contains(&next[0]));
    }
    assert!(worst < 2e-4, "{name}: {worst}");
}

#[test]
fn the_quantised_model_is_transformers() {
    let mut model = load();
    let (log_prob, logit) = compare(&mut model, "nf4");
    assert!(log_prob < 2e-4 && logit < 1e-3, "{log_prob} {logit}");
    greedy_agrees(&mut model, "nf4");
}

#[test]
fn with_an_adapter_at_run_time_it_is_pefts() {
    let mut model = load();
    let report = model.set_adapters(&mult(), MergeMode::Unmerged).unwrap();
    assert!(report.differs_from_base);
    assert_eq!(report.memory.merged_bytes, 0);
    let (log_prob, logit) = compare(&mut model, "nf4+mult-r32");
    assert!(log_prob < 2e-4 && logit < 1e-3, "{log_prob} {logit}");
    greedy_agrees(&mut model, "nf4+mult-r32");
    model.set_adapters(&[], MergeMode::Unmerged).unwrap();
    assert!(compare(&mut model, "nf4").0 < 2e-4);
}

#[test]
fn every_kind_of_adapter_applies_as_to_the_dequantised_model() {
    let mut dequantized = Model::new(
        CpuBackend::new(
            Qwen3Config::from_dir(&nf4_dir()).unwrap(),
            weights(&nf4_dir()).dequantized(),
            &options(40, 16),
        )
        .unwrap(),
    );
    let mut model = load();
    let ids = &golden_logits("nf4")[0].0;
    let run = |model: &mut Model<CpuBackend>| {
        let mut table = table(&options(40, 16), 1);
        let slot = table.allocate_slot().unwrap();
        extend(model, &mut table, &[(slot, ids)], true)
    };
    for name in ["dora-r8", "lorabias-r4", "pattern", "qv-r8"] {
        let active = [ActiveAdapter::new(
            Adapter::load(fixture("adapters").join(name)).unwrap(),
        )];
        for model in [&mut model, &mut dequantized] {
            model.set_adapters(&active, MergeMode::Unmerged).unwrap();
        }
        assert_eq!(run(&mut model), run(&mut dequantized), "{name}");
        // What cannot be merged into 4 bits can be into the bf16 copy.
        dequantized.set_adapters(&active, MergeMode::Merged).unwrap();
        assert!(
            max_difference(&run(&mut model), &run(&mut dequantized)) < 0.1,
            "{name}"
        );
    }
}

#[test]
fn merging_is_refused_with_the_reason_and_changes_nothing() {
    let mut model = load();
    let version = model.set_adapters(&mult(), MergeMode::Unmerged).unwrap().version;
    let base = model.backend_mut().base_sha256().unwrap();
    let error = model
        .set_adapters(&mult(), MergeMode::Merged)
        .unwrap_err()
        .to_string();
    for word in [
        "model.layers.0.self_attn.q_proj",
        "4 bits",
        "run time",
        "dequantise",
    ] {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
    assert_eq!(model.backend().version(), version);
    assert!(compare(&mut model, "nf4+mult-r32").0 < 2e-4);
    // No adapters are the base, merged or not.
    model.set_adapters(&[], MergeMode::Merged).unwrap();
    assert!(compare(&mut model, "nf4").0 < 2e-4);
    assert_eq!(model.backend_mut().base_sha256().unwrap(), base);
    assert_eq!(model.backend_mut().served_sha256().unwrap(), base);
}

#[test]
fn digests_of_the_quantised_and_the_dequantised_model_are_equal() {
    let config = Qwen3Config::from_dir(&nf4_dir()).unwrap();
    let dequantized = weights(&nf4_dir()).dequantized();
    let mut full = CpuBackend::new(config, dequantized, &options(8, 16)).unwrap();
    let mut model = load();
    assert_eq!(
        model.backend_mut().base_sha256().unwrap(),
        full.base_sha256().unwrap()
    );
}

fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, t): (String, safetensors::tensor::TensorView<'_>)| {
        (
            name,
            (format!("{:?}", t.dtype()), t.shape().to_vec(), t.data().to_vec()),
        )
    };
    file.tensors().into_iter().map(entry).collect()
}

#[test]
fn quantising_the_bf16_model_gives_bitsandbytes_file() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("quantised");
    let report = quantize_folder(&model_dir(), &to, &QuantizeOptions::default()).unwrap();
    assert_eq!((report.quantized_modules, report.kept_modules), (28, 0));
    let (ours, golden) = (tensors(&to), tensors(&nf4_dir()));
    assert_eq!(ours.keys().collect::<Vec<_>>(), golden.keys().collect::<Vec<_>>());
    for (name, golden) in &golden {
        assert!(ours[name] == *golden, "{name} differs");
    }
    let bytes: usize = ours.values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(report.bytes_after, bytes as u64);
    let config = |dir: &Path| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
    };
    let (mut ours, mut golden) = (config(&to), config(&nf4_dir()));
    for config in [&mut ours, &mut golden] {
        // The fixture was made for computing in f32; versions differ.
        config["quantization_config"]["bnb_4bit_compute_dtype"] = "".into();
        config["transformers_version"] = "".into();
    }
    assert_eq!(ours, golden);
    for file in [
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer_config.json",
    ] {
        assert!(to.join(file).is_file(), "{file}");
    }
}

#[test]
fn every_option_writes_a_folder_that_is_read_back() {
    let source = tempfile::tempdir().unwrap();
    Folder::new().write(source.path());
    let full = weights(source.path());
    for (quant_type, double_quant, skip) in [
        (QuantType::Nf4, false, vec![]),
        (QuantType::Fp4, true, vec![]),
        (QuantType::Fp4, false, vec!["down_proj".to_owned()]),
        (
            QuantType::Nf4,
            true,
            vec![
                "model.layers.1".to_owned(),
                "self_attn.q_proj".into(),
                "lm_head".into(),
            ],
        ),
    ] {
        let to = source.path().join("to");
        let mut options = QuantizeOptions::default();
        options.quant_type = quant_type;
        options.double_quant = double_quant;
        options.skip_modules = skip.clone();
        let report = quantize_folder(source.path(), &to, &options).unwrap();
        let read = weights(&to);
        let mut kept = 0;
        for layer in 0..2 {
            for p in Projection::ALL {
                let (ours, full) = (read.layers[layer].projection(p), full.layers[layer].projection(p));
                let skipped = match skip.len() {
                    0 => false,
                    1 => p == Projection::Down,
                    _ => layer == 1 || p == Projection::Q,
                };
                assert_eq!(ours.quantized().is_none(), skipped, "{}", ours.name());
                if skipped {
                    kept += 1;
                    assert_eq!(ours.data(), full.data());
                } else {
                    let expected = full.quantize(quant_type, double_quant).unwrap();
                    assert_eq!(ours.to_bf16(), expected.to_bf16());
                    // No value is farther off than half the widest gap between values, and the error of the scale.
                    let gap =
                        0.5 * if quant_type == QuantType::Fp4 {
                            1.0 / 3.0
                        } else {
                            0.31
                        } + 0.01;
                    for (a, b) in ours.to_bf16().chunks(64).zip(full.data().chunks(64)) {
                        let max = b.iter().fold(0.0f32, |m, x| m.max(x.to_f32().abs()));
                        let far = |(a, b): (&bf16, &bf16)| (a.to_f32() - b.to_f32()).abs() > gap * max + 1e-3;
                        assert!(!a.iter().zip(b).any(far), "{}", ours.name());
                    }
                }
            }
        }
        assert_eq!((report.quantized_modules, report.kept_modules), (14 - kept, kept));
        Model::load(&to, &crate::common::options(8, 16)).unwrap();
        std::fs::remove_dir_all(&to).unwrap();
    }
}

#[test]
fn what_cannot_be_quantised_is_refused_before_anything_is_written() {
    let source = tempfile::tempdir().unwrap();
    Folder::new().write(source.path());
    let to = source.path().join("to");
    let refused = |from: &Path, to: &Path, skip: &str, word: &str| {
        let mut options = QuantizeOptions::default();
        options
            .skip_modules
            .extend((!skip.is_empty()).then(|| skip.to_owned()));
        let error = quantize_folder(from, to, &options).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert!(!to.join("model.safetensors").exists() || to == from);
    };
    refused(source.path(), &to, "down", "down");
    refused(source.path(), &to, "layers.2", "layers.2");
    refused(&nf4_dir(), &to, "", "quantised already");
    refused(source.path(), source.path(), "", "holds files already");
    refused(&source.path().join("nowhere"), &to, "", "nowhere");
    let mut broken = Folder::new();
    let tensor = broken
        .tensors
        .get_mut("model.layers.1.mlp.up_proj.weight")
        .unwrap();
    tensor.bytes[2..4].copy_from_slice(&bf16::NAN.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    broken.write(dir.path());
    refused(
        dir.path(),
        &to,
        "",
        "element 1 of `model.layers.1.mlp.up_proj.weight`",
    );
    assert!(!to.exists());
}
