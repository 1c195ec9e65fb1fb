//! Situations in which loaders of such models have gone wrong, each with the right behaviour.

use crate::common::folder::{Folder, RawTensor};
use crate::common::{argmax, extend, max_difference, model_dir, options, oracle, table};
use qwen3_model::{
    CpuBackend, GenerationConfig, LoadOptions, Model, Projection, Qwen3Config, RopeScaling, Weights,
};
use safetensors::Dtype;
use serde_json::{Value, json};

fn parse(config: &Value) -> Qwen3Config {
    Qwen3Config::from_json(config.to_string().as_bytes()).unwrap()
}

/// `config.json` of Qwen3-4B as transformers 4 wrote it.
fn published_4b() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151936
    })
}

fn load(folder: &Folder) -> Model<CpuBackend> {
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    Model::load(dir.path(), &options(8, 16)).unwrap()
}

fn all_logits(model: &mut Model<CpuBackend>, ids: &[u32]) -> Vec<f32> {
    let mut table = table(&options(8, 16), 1);
    let slot = table.allocate_slot().unwrap();
    extend(model, &mut table, &[(slot, ids)], true)
}

#[test]
fn rope_theta_inside_rope_parameters_counts() {
    let mut new = published_4b();
    let object = new.as_object_mut().unwrap();
    for field in ["rope_theta", "rope_scaling", "torch_dtype"] {
        object.remove(field);
    }
    object.insert(
        "rope_parameters".into(),
        json!({"rope_theta": 1000000, "rope_type": "default"}),
    );
    object.insert("dtype".into(), json!("bfloat16"));
    let config = parse(&new);
    assert_eq!(config.rope.theta, 1e6);
    assert_eq!(config, parse(&published_4b()));
    assert_eq!(config, Qwen3Config::qwen3_4b());
}

#[test]
fn rope_theta_inside_rope_scaling_counts() {
    let mut config = published_4b();
    config.as_object_mut().unwrap().remove("rope_theta");
    for scaling in [
        json!({"rope_theta": 5000000, "rope_type": "default"}),
        json!({"rope_theta": 5000000, "rope_type": "yarn", "factor": 4.0}),
    ] {
        config["rope_scaling"] = scaling;
        assert_eq!(parse(&config).rope.theta, 5e6);
    }
    config["rope_theta"] = json!(1000000);
    let error = Qwen3Config::from_json(config.to_string().as_bytes()).unwrap_err();
    assert!(
        error.to_string().contains("`rope_scaling.rope_theta` is 5000000"),
        "{error}"
    );
    config.as_object_mut().unwrap().remove("rope_scaling");
    config["rope_theta"] = json!(1e-300);
    let error = Qwen3Config::from_json(config.to_string().as_bytes()).unwrap_err();
    assert!(
        error.to_string().contains("`rope_theta`"),
        "nothing else is in the file: {error}"
    );
}

#[test]
fn rope_theta_absent_everywhere_is_the_default_of_transformers() {
    let mut config = published_4b();
    config.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(parse(&config).rope.theta, 10_000.0);
}

#[test]
fn yarn_is_read_from_both_forms() {
    let mut old = published_4b();
    old["rope_scaling"] = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let mut new = published_4b();
    new.as_object_mut().unwrap().remove("rope_theta");
    new["rope_parameters"] = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6
    });
    let config = parse(&old);
    assert_eq!(config, parse(&new));
    assert_eq!(config.max_positions(), 131_072);
    let RopeScaling::Yarn {
        attention_factor,
        beta_fast,
        beta_slow,
        truncate,
        ..
    } = config.rope.scaling
    else {
        panic!("not yarn");
    };
    assert!((attention_factor - (0.1 * 4.0f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!((beta_fast, beta_slow, truncate), (32.0, 1.0, true));
}

#[test]
fn head_dim_need_not_be_hidden_size_by_heads() {
    let config = parse(&published_4b());
    assert_eq!(config.head_dim, 128);
    assert_ne!(config.head_dim, config.hidden_size / config.n_heads);
    assert_eq!(config.projection_shape(Projection::Q), [4096, 2560]);
    assert_eq!(config.projection_shape(Projection::O), [2560, 4096]);
    assert_eq!(config.projection_shape(Projection::K), [1024, 2560]);
    assert_eq!(config.n_parameters(), 4_022_468_096);
}

#[test]
fn both_end_tokens_of_the_generation_config_are_known() {
    let config = Qwen3Config::from_dir(&model_dir()).unwrap();
    assert_eq!(config.eos_token_ids, [570]);
    let generation = GenerationConfig::from_dir(&model_dir()).unwrap().unwrap();
    assert_eq!(generation.eos_token_ids, [570, 568]);
    let single = GenerationConfig::from_json(br#"{"eos_token_id": 7, "temperature": 0.6}"#).unwrap();
    assert_eq!((single.eos_token_ids, single.temperature), (vec![7], Some(0.6)));
    let twice = GenerationConfig::from_json(br#"{"eos_token_id": [7, 8, 7]}"#).unwrap();
    assert_eq!(twice.eos_token_ids, [7, 8]);
    let error = GenerationConfig::from_json(br#"{"eos_token_id": "</s>"}"#)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("generation_config.json") && error.contains("`eos_token_id`"),
        "{error}"
    );
    assert_eq!(
        GenerationConfig::from_dir(tempfile::tempdir().unwrap().path()).unwrap(),
        None
    );
}

#[test]
fn a_tied_head_may_or_may_not_stand_in_the_file() {
    let ids = [1, 5, 9];
    let mut without = load(&Folder::new());
    let expected = all_logits(&mut without, &ids);
    let mut folder = Folder::new();
    folder.tensors.insert(
        "lm_head.weight".into(),
        folder.tensors["model.embed_tokens.weight"].clone(),
    );
    let mut with = load(&folder);
    assert_eq!(all_logits(&mut with, &ids), expected);
    assert!(with.backend().weights().is_tied());
    assert_eq!(
        with.backend().weights().bytes(),
        without.backend().weights().bytes()
    );
}

#[test]
fn an_untied_head_is_used() {
    let mut folder = Folder::new();
    folder.config["tie_word_embeddings"] = json!(false);
    folder.fill(Dtype::BF16);
    folder.tensors.insert(
        "lm_head.weight".into(),
        RawTensor::new(Dtype::BF16, &[24, 16], 99),
    );
    let mut model = load(&folder);
    assert!(!model.backend().weights().is_tied());
    let expected = oracle::logits(model.config(), model.backend().weights(), &[1, 5, 9]);
    let expected: Vec<f32> = expected.into_iter().map(|x| x as f32).collect();
    assert!(max_difference(&all_logits(&mut model, &[1, 5, 9]), &expected) < 1e-5);
}

#[test]
fn shards_and_a_single_file_are_the_same_model() {
    let folder = Folder::new();
    let expected = all_logits(&mut load(&folder), &[1, 5, 9]);
    for n in [1, 2, 5] {
        let dir = tempfile::tempdir().unwrap();
        folder.write_sharded(dir.path(), n);
        let mut model = Model::load(dir.path(), &options(8, 16)).unwrap();
        assert_eq!(all_logits(&mut model, &[1, 5, 9]), expected);
    }
}

#[test]
fn f16_and_f32_files_are_read_like_bf16_ones() {
    let mut folder = Folder::new();
    let mut bf16 = load(&folder);
    assert!(bf16.backend().weights().embed_tokens.is_mapped());
    let expected = all_logits(&mut bf16, &[1, 5, 9]);
    for dtype in [Dtype::F16, Dtype::F32] {
        folder.fill(dtype);
        let mut model = load(&folder);
        assert!(!model.backend().weights().embed_tokens.is_mapped());
        assert_eq!(all_logits(&mut model, &[1, 5, 9]), expected, "{dtype:?}");
    }
}

#[test]
fn positions_past_4096_are_encoded_when_the_config_promises_40960() {
    let mut folder = Folder::new();
    folder.config["max_position_embeddings"] = json!(40_960);
    folder.config["num_hidden_layers"] = json!(1);
    folder.config["layer_types"] = json!(["full_attention"]);
    folder.fill(Dtype::BF16);
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    let options = options(80, 64);
    let mut model = Model::load(dir.path(), &options).unwrap();
    let ids: Vec<u32> = (0..4200).map(|i| (i * i % 23) as u32).collect();
    let mut table = table(&options, 1);
    let slot = table.allocate_slot().unwrap();
    let mut ours = Vec::new();
    for ids in ids.chunks(512) {
        ours = extend(&mut model, &mut table, &[(slot, ids)], false);
    }
    let expected = oracle::logits(model.config(), model.backend().weights(), &ids);
    let expected: Vec<f32> = expected[expected.len() - 24..]
        .iter()
        .map(|x| *x as f32)
        .collect();
    assert!(
        max_difference(&ours, &expected) < 1e-4,
        "{}",
        max_difference(&ours, &expected)
    );
}

#[test]
fn a_window_that_is_switched_off_does_not_count() {
    let mut old = published_4b();
    old["sliding_window"] = json!(4096);
    old["max_window_layers"] = json!(28);
    assert_eq!(parse(&old), Qwen3Config::qwen3_4b());
    // Switched on, but for layers past the last one only.
    old["use_sliding_window"] = json!(true);
    old["max_window_layers"] = json!(36);
    assert_eq!(parse(&old), Qwen3Config::qwen3_4b());
    old["max_window_layers"] = json!(28);
    let error = Qwen3Config::from_json(old.to_string().as_bytes())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("use_sliding_window") && error.contains("28 to 35"),
        "{error}"
    );
}

#[test]
fn ids_above_the_tokenizers_vocabulary_have_logits_and_embeddings() {
    let options = LoadOptions::default();
    let mut model = Model::load(model_dir(), &options).unwrap();
    assert_eq!(model.config().vocab_size, 1024);
    let mut table = table(&options, 1);
    let slot = table.allocate_slot().unwrap();
    let logits = extend(&mut model, &mut table, &[(slot, &[569, 1023, 700])], false);
    assert_eq!(logits.len(), 1024);
    assert!(logits.iter().all(|x| x.is_finite()));
    assert!(argmax(&logits) < 1024);
}

#[test]
fn random_weights_are_the_same_on_every_run_and_take_only_their_size() {
    let config = Qwen3Config::from_dir(&model_dir()).unwrap();
    let (a, b) = (Weights::random(&config, 7), Weights::random(&config, 7));
    assert_eq!(
        a.layers[3].projection(Projection::Down).data(),
        b.layers[3].projection(Projection::Down).data()
    );
    assert_ne!(
        a.layers[3].projection(Projection::Down).data(),
        a.layers[2].projection(Projection::Down).data()
    );
    // Norms are kept in f32, the rest in bf16.
    let norms = 4 * (2 * 256 + 2 * 128) + 256;
    assert_eq!(a.bytes(), 2 * config.n_parameters() + 2 * norms);
}
