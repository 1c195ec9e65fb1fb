//! What is no adapter, or a broken one.

use lora_merge::{Adapter, Error};
use safetensors::Dtype;

use super::{A, B, CONFIG, Entry, attempt, file, good, specs};

/// What is broken, the files, and what the error must say.
#[test]
fn hostile_adapters_are_refused_with_a_reason() {
    let with = |extra: Entry<'static>| file(&[good(), vec![extra]].concat());
    let only = |index: usize| file(&good()[index..=index]);
    let patch = |from: &str, to: &str| CONFIG.replace(from, to);
    let mut nan = file(&good());
    let end = nan.len();
    nan[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let mut infinite = file(&good());
    infinite[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let mut truncated = file(&good());
    truncated.truncate(end - 5);
    let mut long_header = file(&good());
    long_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let config = CONFIG.to_owned();
    let good_file = file(&good());
    let table: Vec<(&str, String, Vec<u8>, &str)> = vec![
        ("no JSON", "{".into(), good_file.clone(), "adapter_config.json"),
        ("a JSON list", "[]".into(), good_file.clone(), "not a JSON object"),
        (
            "another method",
            patch("LORA", "IA3"),
            good_file.clone(),
            "`peft_type`",
        ),
        ("no method", "{}".into(), good_file.clone(), "`peft_type`"),
        (
            "rank 0",
            patch("\"r\": 2", "\"r\": 0"),
            good_file.clone(),
            "`r` must be a positive integer",
        ),
        (
            "negative rank",
            patch("\"r\": 2", "\"r\": -1"),
            good_file.clone(),
            "`r`",
        ),
        (
            "huge rank",
            patch("\"r\": 2", "\"r\": 9000000000000000000"),
            good_file.clone(),
            "has shape [2, 4]",
        ),
        (
            "rank as text",
            patch("\"r\": 2", "\"r\": \"2\""),
            good_file.clone(),
            "`r`",
        ),
        (
            "alpha as text",
            patch("4,", "\"4\","),
            good_file.clone(),
            "`lora_alpha`",
        ),
        (
            "alpha NaN",
            patch("4,", "NaN,"),
            good_file.clone(),
            "adapter_config.json",
        ),
        (
            "alpha 1e999",
            patch("4,", "1e999,"),
            good_file.clone(),
            "adapter_config.json",
        ),
        (
            "bad regex",
            patch("[\"q_proj\"]", "\"(q_proj\""),
            good_file.clone(),
            "bad pattern",
        ),
        (
            "regex in rank_pattern",
            patch("\"r\"", "\"rank_pattern\": {\"(\": 2}, \"r\""),
            good_file.clone(),
            "rank_pattern",
        ),
        (
            "regex that explodes",
            patch("[\"q_proj\"]", r#""(?:(.+)+(?!x))+\\1y""#),
            good_file.clone(),
            "target_modules",
        ),
        (
            "targets as a number",
            patch("[\"q_proj\"]", "3"),
            good_file.clone(),
            "`target_modules`",
        ),
        (
            "layers with a regex",
            patch("[\"q_proj\"]", "\".*\", \"layers_to_transform\": [1]"),
            good_file.clone(),
            "`layers_to_transform`",
        ),
        (
            "negative layer",
            patch("[\"q_proj\"]", "[\"q_proj\"], \"layers_to_transform\": [-1]"),
            good_file.clone(),
            "`layers_to_transform`",
        ),
        (
            "PiSSA",
            patch("\"r\"", "\"init_lora_weights\": \"pissa\", \"r\""),
            good_file.clone(),
            "`init_lora_weights`",
        ),
        (
            "an activated adapter",
            patch("\"r\"", "\"alora_invocation_tokens\": [1], \"r\""),
            good_file.clone(),
            "`alora_invocation_tokens`",
        ),
        (
            "a field from the future",
            patch("\"r\"", "\"warp\": 9, \"r\""),
            good_file.clone(),
            "`warp`",
        ),
        (
            "no target matches",
            patch("q_proj", "c_attn"),
            good_file.clone(),
            "match none",
        ),
        (
            "empty file",
            config.clone(),
            Vec::new(),
            "adapter_model.safetensors",
        ),
        (
            "truncated file",
            config.clone(),
            truncated,
            "adapter_model.safetensors",
        ),
        (
            "header beyond the file",
            config.clone(),
            long_header,
            "adapter_model.safetensors",
        ),
        ("A missing", config.clone(), only(1), "lora_A.weight"),
        ("B missing", config.clone(), only(0), "lora_B.weight"),
        (
            "A transposed",
            config.clone(),
            file(&[(A, Dtype::F32, vec![4, 2]), good()[1].clone()]),
            "has shape [4, 2]",
        ),
        (
            "B of another rank",
            config.clone(),
            file(&[good()[0].clone(), (B, Dtype::F32, vec![3, 3])]),
            "has shape [3, 3]",
        ),
        (
            "integers",
            config.clone(),
            file(&[(A, Dtype::I32, vec![2, 4]), good()[1].clone()]),
            "dtype I32",
        ),
        ("NaN", config.clone(), nan, "holds NaN"),
        ("infinity", config.clone(), infinite, "holds inf"),
        (
            "tensors of a module that is not targeted",
            config.clone(),
            with((
                "base_model.model.l.0.k_proj.lora_A.weight",
                Dtype::F32,
                vec![2, 4],
            )),
            "used by nothing",
        ),
        (
            "tensors of a module that does not exist",
            config.clone(),
            with((
                "base_model.model.l.9.q_proj.lora_A.weight",
                Dtype::F32,
                vec![2, 4],
            )),
            "l.9.q_proj",
        ),
        (
            "a magnitude without DoRA",
            config.clone(),
            with((
                "base_model.model.l.0.q_proj.lora_magnitude_vector",
                Dtype::F32,
                vec![3],
            )),
            "used by nothing",
        ),
        (
            "DoRA without a magnitude",
            patch("\"r\"", "\"use_dora\": true, \"r\""),
            good_file.clone(),
            "lora_magnitude_vector",
        ),
        (
            "a bias without lora_bias",
            config.clone(),
            with(("base_model.model.l.0.q_proj.lora_B.bias", Dtype::F32, vec![3])),
            "used by nothing",
        ),
        (
            "lora_bias without a bias",
            patch("\"r\"", "\"lora_bias\": true, \"r\""),
            good_file.clone(),
            "lora_B.bias",
        ),
        (
            "lora_bias with DoRA",
            patch("\"r\"", "\"lora_bias\": true, \"use_dora\": true, \"r\""),
            good_file.clone(),
            "`lora_bias`",
        ),
        (
            "modules_to_save without the tensor",
            patch("\"r\"", "\"modules_to_save\": [\"k_proj\"], \"r\""),
            good_file.clone(),
            "base_model.model.l.0.k_proj.weight",
        ),
        (
            "a whole module that nothing saves",
            config.clone(),
            with(("base_model.model.l.0.k_proj.weight", Dtype::F32, vec![3, 4])),
            "used by nothing",
        ),
        (
            "an embedding adapter",
            config.clone(),
            with(("base_model.model.embed.lora_embedding_A", Dtype::F32, vec![2, 4])),
            "lora_embedding_A",
        ),
        (
            "a stray name",
            config.clone(),
            with(("optimizer.state", Dtype::F32, vec![1])),
            "optimizer.state",
        ),
        (
            "an adapter's name left in a tensor's name",
            config.clone(),
            with((
                "base_model.model.l.0.k_proj.lora_A.default.weight",
                Dtype::F32,
                vec![2, 4],
            )),
            "lora_A.default.weight",
        ),
        (
            "the same tensor under two names",
            config,
            with(("l.0.q_proj.lora_A.weight", Dtype::F32, vec![2, 4])),
            "given twice",
        ),
    ];
    assert!(table.len() >= 15);
    for (what, config, bytes, says) in table {
        match attempt(&config, &bytes, &specs()) {
            Ok(()) => panic!("{what}: accepted"),
            Err(error) => assert!(error.to_string().contains(says), "{what}: {error}"),
        }
    }
}

#[test]
fn folders_that_are_no_adapters() {
    let folder = tempfile::tempdir().unwrap();
    let load = || Adapter::load(folder.path()).unwrap_err();
    assert!(matches!(
        load(),
        Error::NotAnAdapterFolder {
            missing: "adapter_config.json",
            ..
        }
    ));
    std::fs::write(folder.path().join("adapter_config.json"), CONFIG).unwrap();
    assert!(matches!(
        load(),
        Error::NotAnAdapterFolder {
            missing: "adapter_model.safetensors",
            ..
        }
    ));
    std::fs::write(folder.path().join("adapter_model.bin"), b"\x80\x02").unwrap();
    let error = load();
    assert!(matches!(error, Error::PickleRefused { .. }));
    assert!(
        error.to_string().contains("safe_serialization=True"),
        "says what to do: {error}"
    );
    std::fs::write(folder.path().join("adapter_model.safetensors"), file(&good())).unwrap();
    assert_eq!(Adapter::load(folder.path()).unwrap().n_tensors(), 2);
}
