//! Model folders that are broken in one way each, and the error that says which.

use std::path::Path;

use crate::common::folder::{Folder, RawTensor, write_raw};
use qwen3_model::{LoadOptions, Model};
use safetensors::Dtype;
use serde_json::{Value, json};

/// Damages a good folder, writes it, and expects an error whose text contains all `words`.
fn refused(name: &str, words: &[&str], damage: impl FnOnce(Folder, &Path)) {
    let dir = tempfile::tempdir().unwrap();
    damage(Folder::new(), dir.path());
    let error = match Model::load(dir.path(), &LoadOptions::default()) {
        Ok(_) => panic!("{name}: was loaded"),
        Err(error) => error.to_string(),
    };
    for word in words {
        assert!(error.contains(word), "{name}: {error:?} does not say {word:?}");
    }
    assert!(!error.contains('\n'), "{name}: {error:?} takes several lines");
}

/// A change to `config.json`; the weights stay as they are.
fn config_refused(name: &str, field: &str, value: Value, words: &[&str]) {
    refused(name, words, |mut folder, dir| {
        let object = folder.config.as_object_mut().unwrap();
        if value == json!("REMOVE") {
            object.remove(field);
        } else {
            object.insert(field.into(), value);
        }
        folder.write(dir);
    });
}

#[test]
fn good_folders_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    Folder::new().write(dir.path());
    Model::load(dir.path(), &LoadOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    Folder::new().write_sharded(dir.path(), 3);
    Model::load(dir.path(), &LoadOptions::default()).unwrap();
}

#[test]
fn broken_configurations_are_refused_by_field() {
    let table: &[(&str, Value, &[&str])] = &[
        (
            "model_type",
            json!("qwen3_moe"),
            &["config.json", "`model_type`", "qwen3_moe"],
        ),
        ("model_type", json!("REMOVE"), &["`model_type`", "missing"]),
        (
            "architectures",
            json!(["Qwen3ForSequenceClassification"]),
            &["`architectures`", "Classification"],
        ),
        ("attention_bias", json!(true), &["`attention_bias`"]),
        ("hidden_act", json!("gelu"), &["`hidden_act`", "gelu"]),
        (
            "quantization_config",
            json!({"quant_method": "gptq"}),
            &["`quantization_config.quant_method`", "gptq"],
        ),
        ("dtype", json!("float8_e4m3fn"), &["`dtype`", "float8_e4m3fn"]),
        (
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            &["`layer_types`", "layer 1", "sliding"],
        ),
        (
            "layer_types",
            json!(["full_attention"]),
            &["`layer_types`", "1 entries", "2 layers"],
        ),
        (
            "num_hidden_layers",
            json!("REMOVE"),
            &["`num_hidden_layers`", "missing"],
        ),
        ("num_hidden_layers", json!(1e30), &["`num_hidden_layers`"]),
        ("num_hidden_layers", json!(0), &["`num_hidden_layers`", "0"]),
        (
            "num_key_value_heads",
            json!(3),
            &["`num_key_value_heads`", "divide"],
        ),
        (
            "num_key_value_heads",
            json!("REMOVE"),
            &["`num_key_value_heads`", "missing"],
        ),
        ("head_dim", json!(7), &["`head_dim`", "7"]),
        ("head_dim", json!("8"), &["`head_dim`", "\"8\""]),
        ("head_dim", json!(-8), &["`head_dim`", "-8"]),
        ("hidden_size", json!(u64::MAX), &["`hidden_size`"]),
        ("hidden_size", json!(17), &["`hidden_size`", "17"]),
        ("vocab_size", json!(null), &["`vocab_size`", "missing"]),
        ("rms_norm_eps", json!(0.0), &["`rms_norm_eps`"]),
        ("rms_norm_eps", json!("tiny"), &["`rms_norm_eps`", "tiny"]),
        ("eos_token_id", json!([1, -1]), &["`eos_token_id`"]),
        (
            "rope_parameters",
            json!({"rope_type": "llama3"}),
            &["`rope_parameters.rope_type`", "llama3"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": 3}),
            &["`rope_parameters.rope_type`"],
        ),
        (
            "rope_parameters",
            json!({"rope_theta": -1.0}),
            &["`rope_parameters.rope_theta`", "-1"],
        ),
        ("rope_parameters", json!([1]), &["`rope_parameters`", "list"]),
        (
            "rope_parameters",
            json!({"full_attention": {}}),
            &["`rope_parameters.full_attention`"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 0.5}),
            &["`rope_parameters.factor`", "0.5"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320, "beta_slow": 1e-320}),
            &["`rope_parameters`", "finite"],
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 1e-300}),
            &["`rope_parameters`", "finite"],
        ),
        (
            "rope_parameters",
            json!({"partial_rotary_factor": 0.5}),
            &["`rope_parameters.partial_rotary_factor`"],
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
            &["`rope_scaling`", "rope_parameters"],
        ),
        ("rope_theta", json!(5e5), &["`rope_theta`", "500000", "10000"]),
        (
            "max_position_embeddings",
            json!(0),
            &["`max_position_embeddings`"],
        ),
        (
            "tie_word_embeddings",
            json!("yes"),
            &["`tie_word_embeddings`", "yes"],
        ),
    ];
    for (field, value, words) in table {
        config_refused(&format!("{field} = {value}"), field, value.clone(), words);
    }
}

#[test]
fn sliding_windows_in_use_are_refused() {
    refused(
        "window",
        &["`use_sliding_window`", "layers 1 to 1"],
        |mut folder, dir| {
            let config = folder.config.as_object_mut().unwrap();
            config.remove("layer_types");
            config.insert("use_sliding_window".into(), json!(true));
            config.insert("sliding_window".into(), json!(32));
            config.insert("max_window_layers".into(), json!(1));
            folder.write(dir);
        },
    );
}

#[test]
fn broken_json_is_refused() {
    for (text, words) in [
        ("", &["config.json", "EOF"][..]),
        ("{\"model_type\": \"qwen3\",}", &["config.json", "line 1"]),
        ("[1, 2]", &["config.json", "list"]),
        ("\u{feff}{}", &["config.json", "not valid JSON"]),
        ("{\"rms_norm_eps\": NaN}", &["config.json", "not valid JSON"]),
    ] {
        refused(text, words, |folder, dir| {
            folder.write(dir);
            std::fs::write(dir.join("config.json"), text).unwrap();
        });
    }
    refused("deep", &["config.json", "recursion"], |folder, dir| {
        folder.write(dir);
        std::fs::write(dir.join("config.json"), "[".repeat(100_000)).unwrap();
    });
    refused("folder", &["config.json"], |_, dir| {
        std::fs::create_dir(dir.join("config.json")).unwrap()
    });
    refused("nothing", &["config.json"], |_, _| {});
}

#[test]
fn missing_and_stray_files_are_named() {
    refused("no weights", &["model.safetensors", "index"], |folder, dir| {
        folder.write_config(dir)
    });
    refused("torch file", &["pytorch_model.bin", "convert"], |folder, dir| {
        folder.write_config(dir);
        std::fs::write(dir.join("pytorch_model.bin"), "x").unwrap();
    });
    refused(
        "absent shard",
        &["index.json", "model-00002-of-00003", "absent"],
        |folder, dir| {
            folder.write_sharded(dir, 3);
            std::fs::remove_file(dir.join("model-00002-of-00003.safetensors")).unwrap();
        },
    );
    refused("no index", &["model-00001-of-00003", "neither"], |folder, dir| {
        folder.write_sharded(dir, 3);
        std::fs::remove_file(dir.join("model.safetensors.index.json")).unwrap();
    });
    refused(
        "stray shard beside the index",
        &["model-00004-of-00004", "no index"],
        |folder, dir| {
            folder.write_sharded(dir, 3);
            std::fs::copy(
                dir.join("model-00001-of-00003.safetensors"),
                dir.join("model-00004-of-00004.safetensors"),
            )
            .unwrap();
        },
    );
    refused(
        "stray file beside a single one",
        &["old.safetensors"],
        |folder, dir| {
            folder.write(dir);
            std::fs::copy(dir.join("model.safetensors"), dir.join("old.safetensors")).unwrap();
        },
    );
    refused("a folder as weights", &["model.safetensors"], |folder, dir| {
        folder.write_config(dir);
        std::fs::create_dir(dir.join("model.safetensors")).unwrap();
    });
}

#[test]
fn indexes_that_lie_are_refused() {
    let index = |dir: &Path, change: &dyn Fn(&mut Value)| {
        let path = dir.join("model.safetensors.index.json");
        let mut index = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        std::fs::write(path, index.to_string()).unwrap();
    };
    let norm = "model.norm.weight";
    refused(
        "no map",
        &["index.json", "`weight_map`", "missing"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            index(dir, &|index| *index = json!({}));
        },
    );
    refused("empty map", &["`weight_map`", "empty"], |folder, dir| {
        folder.write_sharded(dir, 2);
        index(dir, &|index| index["weight_map"] = json!({}));
    });
    refused(
        "path",
        &["index.json", "`weight_map.model.norm.weight`", "../"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            index(dir, &|index| {
                index["weight_map"][norm] = json!("../model.safetensors")
            });
        },
    );
    refused(
        "number",
        &["`weight_map.model.norm.weight`", "7"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            index(dir, &|index| index["weight_map"][norm] = json!(7));
        },
    );
    refused(
        "elsewhere",
        &["-of-00002.safetensors", "model.norm.weight"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            index(dir, &|index| {
                let shards = [
                    "model-00001-of-00002.safetensors",
                    "model-00002-of-00002.safetensors",
                ];
                let other = shards
                    .into_iter()
                    .find(|shard| index["weight_map"][norm] != json!(shard))
                    .unwrap();
                index["weight_map"][norm] = json!(other);
            });
        },
    );
    refused(
        "not listed",
        &["-of-00002.safetensors", "model.norm.weight"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            index(dir, &|index| {
                index["weight_map"].as_object_mut().unwrap().remove(norm);
            });
        },
    );
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let file = "model.safetensors";
    let q = "model.layers.1.self_attn.q_proj.weight";
    refused("missing", &[file, q, "[32, 16]", "missing"], |mut folder, dir| {
        folder.tensors.remove(q);
        folder.write(dir);
    });
    refused(
        "missing from shards",
        &["index.json", q, "missing"],
        |mut folder, dir| {
            folder.tensors.remove(q);
            folder.write_sharded(dir, 2);
        },
    );
    refused("extra", &[file, "q_proj.bias"], |mut folder, dir| {
        let bias = RawTensor::new(Dtype::BF16, &[32], 0);
        folder
            .tensors
            .insert("model.layers.0.self_attn.q_proj.bias".into(), bias);
        folder.write(dir);
    });
    refused(
        "a layer too many",
        &[file, "model.layers.1."],
        |mut folder, dir| {
            folder.config["num_hidden_layers"] = json!(1);
            folder.config["layer_types"] = json!(["full_attention"]);
            folder.write(dir);
        },
    );
    refused(
        "transposed",
        &[file, q, "[16, 32]", "[32, 16]"],
        |mut folder, dir| {
            folder
                .tensors
                .insert(q.into(), RawTensor::new(Dtype::BF16, &[16, 32], 0));
            folder.write(dir);
        },
    );
    refused("flat", &[file, q, "[512]"], |mut folder, dir| {
        folder
            .tensors
            .insert(q.into(), RawTensor::new(Dtype::BF16, &[512], 0));
        folder.write(dir);
    });
    refused("integers", &[file, q, "I8", "bf16"], |mut folder, dir| {
        folder
            .tensors
            .insert(q.into(), RawTensor::new(Dtype::I8, &[32, 16], 0));
        folder.write(dir);
    });
    refused(
        "head_dim of another model",
        &[file, "q_norm", "[16]", "[8]"],
        |mut folder, dir| {
            folder.config["head_dim"] = json!(16);
            folder.write(dir);
        },
    );
    refused(
        "untied without a head",
        &[file, "lm_head.weight", "missing"],
        |mut folder, dir| {
            folder.config["tie_word_embeddings"] = json!(false);
            folder.write(dir);
        },
    );
    refused(
        "tied with another head",
        &[file, "lm_head.weight", "tie_word_embeddings"],
        |mut folder, dir| {
            folder
                .tensors
                .insert("lm_head.weight".into(), RawTensor::new(Dtype::BF16, &[24, 16], 5));
            folder.write(dir);
        },
    );
}

#[test]
fn damaged_safetensors_files_are_refused() {
    let file = "model.safetensors";
    refused(
        "truncated data",
        &[file, "`model.norm.weight`", "truncated"],
        |folder, dir| {
            folder.write(dir);
            let bytes = std::fs::read(dir.join(file)).unwrap();
            std::fs::write(dir.join(file), &bytes[..bytes.len() - 3]).unwrap();
        },
    );
    refused(
        "truncated shard",
        &["model-00002-of-00002", "truncated"],
        |folder, dir| {
            folder.write_sharded(dir, 2);
            let path = dir.join("model-00002-of-00002.safetensors");
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        },
    );
    refused("truncated header", &[file, "header"], |folder, dir| {
        folder.write(dir);
        let bytes = std::fs::read(dir.join(file)).unwrap();
        std::fs::write(dir.join(file), &bytes[..100]).unwrap();
    });
    refused("empty file", &[file, "0 bytes"], |folder, dir| {
        folder.write(dir);
        std::fs::write(dir.join(file), "").unwrap();
    });
    refused(
        "a pointer to large storage",
        &[file, "not a safetensors file"],
        |folder, dir| {
            folder.write(dir);
            std::fs::write(
                dir.join(file),
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            )
            .unwrap();
        },
    );
    refused(
        "bytes after the last tensor",
        &[file, "4 bytes after"],
        |folder, dir| {
            folder.write(dir);
            let mut bytes = std::fs::read(dir.join(file)).unwrap();
            bytes.extend_from_slice(b"tail");
            std::fs::write(dir.join(file), bytes).unwrap();
        },
    );
    let headers: &[(&str, &str, &[&str])] = &[
        ("not JSON", "{", &["not valid JSON"]),
        ("a list", "[]", &["list"]),
        (
            "no offsets",
            r#"{"a":{"dtype":"F32","shape":[1]}}"#,
            &["`a`", "data_offsets"],
        ),
        (
            "unknown type",
            r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#,
            &["`a`", "F99"],
        ),
        (
            "negative",
            r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#,
            &["`a`"],
        ),
        (
            "backwards",
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            &["`a`", "before it begins"],
        ),
        (
            "past the end",
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#,
            &["`a`", "truncated"],
        ),
        (
            "wrong size",
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            &["`a`", "8 bytes"],
        ),
        (
            "overflow",
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}}"#,
            &["`a`", "8 bytes"],
        ),
        (
            "overlap",
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            &["`b`", "overlaps"],
        ),
        (
            "gap",
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            &["`a`", "unexplained"],
        ),
        ("empty", "{}", &["8 bytes after"]),
    ];
    for (name, header, words) in headers {
        refused(name, words, |folder, dir| {
            folder.write_config(dir);
            write_raw(dir.join(file), header, &[0; 8]);
        });
    }
}

#[test]
fn options_without_meaning_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    Folder::new().write(dir.path());
    let load = |change: &dyn Fn(&mut LoadOptions)| {
        let mut options = LoadOptions::default();
        change(&mut options);
        Model::load(dir.path(), &options)
            .err()
            .expect("was loaded")
            .to_string()
    };
    assert!(load(&|o| o.max_tokens = 0).contains("max_tokens"));
    assert!(load(&|o| o.page_size = 0).contains("page_size"));
    assert!(load(&|o| o.n_pages = 0).contains("n_pages"));
    assert!(load(&|o| o.n_pages = usize::MAX / 1024).contains("KV cache"));
}
