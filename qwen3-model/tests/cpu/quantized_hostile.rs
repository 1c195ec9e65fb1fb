//! 4-bit checkpoints that are broken in one way each, and the error that names the module.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::folder::{Folder, RawTensor, write_tensors};
use qwen3_model::{Model, QuantType, QuantizeOptions, Qwen3Config, Weights, quantize_folder};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

const MODULE: &str = "model.layers.1.mlp.gate_proj";

/// A small folder in 4 bits.
struct Quantised {
    dir: tempfile::TempDir,
    tensors: BTreeMap<String, RawTensor>,
}

impl Quantised {
    fn new(quant_type: QuantType, double_quant: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Folder::new().write(dir.path());
        let to = dir.path().join("to");
        let mut options = QuantizeOptions::default();
        (options.quant_type, options.double_quant) = (quant_type, double_quant);
        quantize_folder(dir.path(), &to, &options).unwrap();
        let bytes = std::fs::read(to.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, t)| {
            let (dtype, shape, bytes) = (t.dtype(), t.shape().to_vec(), t.data().to_vec());
            (name, RawTensor { dtype, shape, bytes })
        });
        let tensors = tensors.collect();
        Self { dir, tensors }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("to")
    }

    fn write(&self) {
        write_tensors(&self.path().join("model.safetensors"), self.tensors.iter());
    }

    fn tensor(&mut self, suffix: &str) -> &mut RawTensor {
        self.tensors.get_mut(&format!("{MODULE}.weight{suffix}")).unwrap()
    }

    fn state(&mut self, change: impl FnOnce(&mut Value)) {
        let tensor = self.tensor(".quant_state.bitsandbytes__nf4");
        let mut state = serde_json::from_slice(&tensor.bytes).unwrap();
        change(&mut state);
        tensor.bytes = state.to_string().into_bytes();
        tensor.shape = vec![tensor.bytes.len()];
    }
}

fn error(dir: &Path) -> String {
    let config = Qwen3Config::from_dir(dir).unwrap();
    match Weights::open(dir, &config) {
        Ok(_) => "was loaded".into(),
        Err(error) => error.to_string(),
    }
}

/// Damages a good double-quantised folder and expects an error that names file and module and contains `words`.
fn refused(words: &[&str], damage: impl FnOnce(&mut Quantised)) {
    let mut folder = Quantised::new(QuantType::Nf4, true);
    damage(&mut folder);
    folder.write();
    let error = error(&folder.path());
    for word in [&["model.safetensors", MODULE], words].concat() {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
    assert!(!error.contains('\n'), "{error:?} takes several lines");
}

#[test]
fn states_that_lie_are_refused() {
    type Change = (&'static str, Value, &'static [&'static str]);
    let table: &[Change] = &[
        ("quant_type", json!("fp4"), &["`quant_type`", "fp4", "nf4"]),
        ("quant_type", Value::Null, &["`quant_type`"]),
        ("blocksize", json!(48), &["`blocksize`", "48"]),
        ("blocksize", json!(0), &["`blocksize`"]),
        ("blocksize", json!(-64), &["`blocksize`"]),
        ("blocksize", json!(128), &["`absmax`", "[8]"]),
        ("dtype", json!("float8"), &["`dtype`", "bfloat16"]),
        ("shape", json!([16, 32]), &["shape", "[16,32]", "[32, 16]"]),
        ("shape", json!([512]), &["shape"]),
        ("shape", json!("wide"), &["shape"]),
        ("nested_blocksize", json!(3), &["`nested_blocksize`"]),
        ("nested_dtype", json!("float16"), &["`nested_dtype`"]),
        ("nested_offset", json!("zero"), &["`nested_offset`"]),
        ("nested_offset", json!(1e300), &["`nested_offset`"]),
        ("nested_offset", json!(3.4e38), &["block 0", "not finite"]),
    ];
    for (field, value, words) in table {
        refused(words, |folder| {
            folder.state(|state| state[*field] = value.clone())
        });
    }
    for text in ["", "{", "[]", "null", "{\"quant_type\": NaN}"] {
        refused(&["quant_state"], |folder| {
            let tensor = folder.tensor(".quant_state.bitsandbytes__nf4");
            (tensor.bytes, tensor.shape) = (text.as_bytes().to_vec(), vec![text.len()]);
        });
    }
    refused(&["quant_state", "F32"], |folder| {
        *folder.tensor(".quant_state.bitsandbytes__nf4") = RawTensor::new(Dtype::F32, &[16], 0);
    });
    refused(&["nf4", "fp4"], |folder| {
        let state = folder.tensor(".quant_state.bitsandbytes__nf4").clone();
        let name = format!("{MODULE}.weight.quant_state.bitsandbytes__fp4");
        folder.tensors.insert(name, state);
    });
}

#[test]
fn tensors_of_the_wrong_size_or_type_are_refused() {
    for (suffix, dtype, len) in [
        ("", Dtype::U8, 255),
        ("", Dtype::U8, 257),
        ("", Dtype::F32, 63),
        (".absmax", Dtype::U8, 7),
        (".absmax", Dtype::F32, 8),
        (".quant_map", Dtype::F32, 15),
        (".quant_map", Dtype::BF16, 16),
        (".nested_absmax", Dtype::F32, 2),
        (".nested_quant_map", Dtype::F32, 255),
    ] {
        let what = if suffix.is_empty() { "weight" } else { &suffix[1..] };
        refused(&[what], |folder| {
            *folder.tensor(suffix) = RawTensor::new(dtype, &[len], 0);
        });
    }
    for suffix in [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"] {
        refused(&["missing", &suffix[1..]], |folder| {
            folder.tensors.remove(&format!("{MODULE}.weight{suffix}"));
        });
    }
    // The nibbles alone are missing; or the state, so that what is left belongs to nothing.
    for suffix in ["", ".quant_state.bitsandbytes__nf4"] {
        refused(&[], |folder| {
            folder.tensors.remove(&format!("{MODULE}.weight{suffix}"));
        });
    }
}

#[test]
fn values_that_are_not_finite_are_refused() {
    for suffix in [".quant_map", ".nested_absmax", ".nested_quant_map"] {
        for value in [f32::NAN, f32::INFINITY] {
            refused(&[&suffix[1..], "element 0"], |folder| {
                folder.tensor(suffix).bytes[..4].copy_from_slice(&value.to_le_bytes());
            });
        }
    }
    for value in [f32::NAN, f32::NEG_INFINITY, 3.4e38] {
        let mut folder = Quantised::new(QuantType::Nf4, false);
        folder.tensor(".absmax").bytes[12..16].copy_from_slice(&value.to_le_bytes());
        folder.write();
        let error = error(&folder.path());
        assert!(error.contains(MODULE) && error.contains('3'), "{error}");
    }
}

#[test]
fn whatever_type_the_nibbles_are_stored_under_they_are_the_same() {
    for (quant_type, double) in [(QuantType::Nf4, true), (QuantType::Fp4, false)] {
        let mut folder = Quantised::new(quant_type, double);
        let open = |folder: &Quantised| {
            let config = Qwen3Config::from_dir(&folder.path()).unwrap();
            let weights = Weights::open(&folder.path(), &config).unwrap();
            weights.layers[1]
                .projection(qwen3_model::Projection::Gate)
                .to_bf16()
                .into_owned()
        };
        let before = open(&folder);
        for (dtype, width) in [(Dtype::BF16, 2), (Dtype::F32, 4), (Dtype::I8, 1)] {
            let tensor = folder.tensor("");
            (tensor.dtype, tensor.shape) = (dtype, vec![tensor.bytes.len() / width, 1]);
            folder.write();
            assert_eq!(open(&folder), before);
        }
    }
}

#[test]
fn configurations_of_other_methods_are_refused_by_field() {
    let folder = Quantised::new(QuantType::Nf4, true);
    let path = folder.path().join("config.json");
    let good: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (field, value, words) in [
        (
            "quant_method",
            json!("awq"),
            ["quantization_config.quant_method", "awq"],
        ),
        (
            "quant_method",
            Value::Null,
            ["quantization_config.quant_method", "missing"],
        ),
        (
            "load_in_8bit",
            json!(true),
            ["quantization_config.load_in_8bit", "4 bits"],
        ),
    ] {
        let mut config = good.clone();
        config["quantization_config"][field] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        let error = Qwen3Config::from_dir(&folder.path()).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    // What is quantised the files tell, not the configuration.
    let mut config = good;
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(&path, config.to_string()).unwrap();
    Model::load(folder.path(), &crate::common::options(8, 16)).unwrap();
}
