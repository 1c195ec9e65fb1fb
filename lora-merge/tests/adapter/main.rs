//! Reading adapters: what PEFT writes, and what lies.

#[path = "../common/mod.rs"]
mod common;
mod hostile;

use common::{adapter, fixture, tiny_specs};
use half::{bf16, f16};
use lora_merge::{
    ActiveAdapter, Adapter, AdapterConfig, Error, ModuleKind, ModuleSpec, TensorSlice, TensorValues, resolve,
};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const CONFIG: &str = r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}"#;

fn specs() -> Vec<ModuleSpec> {
    vec![
        ModuleSpec::linear("l.0.q_proj", 3, 4),
        ModuleSpec::linear("l.0.k_proj", 3, 4),
    ]
}

/// One tensor of the file: name, type, shape; filled with small values.
type Entry<'a> = (&'a str, Dtype, Vec<usize>);

fn file(entries: &[Entry<'_>]) -> Vec<u8> {
    let width = |d: Dtype| if d == Dtype::F32 || d == Dtype::I32 { 4 } else { 2 };
    let data: Vec<Vec<u8>> = entries
        .iter()
        .map(|(_, d, s)| vec![0x3c; s.iter().product::<usize>() * width(*d)])
        .collect();
    let views = entries
        .iter()
        .zip(&data)
        .map(|((n, d, s), b)| (*n, TensorView::new(*d, s.clone(), b).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

const A: &str = "base_model.model.l.0.q_proj.lora_A.weight";
const B: &str = "base_model.model.l.0.q_proj.lora_B.weight";

fn good() -> Vec<Entry<'static>> {
    vec![(A, Dtype::F32, vec![2, 4]), (B, Dtype::F32, vec![3, 2])]
}

/// Loads and resolves.
fn attempt(config: &str, bytes: &[u8], specs: &[ModuleSpec]) -> Result<(), Error> {
    let active = ActiveAdapter::new(Adapter::from_bytes(config, bytes)?);
    resolve(&[active], specs).map(|_| ())
}

#[test]
fn a_good_adapter_loads() {
    attempt(CONFIG, &file(&good()), &specs()).unwrap();
    let mixed = [(A, Dtype::BF16, vec![2, 4]), (B, Dtype::F16, vec![3, 2])];
    attempt(CONFIG, &file(&mixed), &specs()).unwrap();
}

#[test]
fn folder_bytes_and_slices_are_the_same_adapter() {
    let folder = fixture("adapters/mult-r32");
    let config = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let loaded = Adapter::load(&folder).unwrap();
    assert_eq!(
        loaded.digest(),
        Adapter::from_bytes(&config, &bytes).unwrap().digest()
    );
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let views = file.tensors();
    let values: Vec<Vec<bf16>> = views
        .iter()
        .map(|(_, v)| {
            v.data()
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]))
                .collect()
        })
        .collect();
    let slices: Vec<TensorSlice<'_>> = views
        .iter()
        .zip(&values)
        .map(|((name, view), v)| TensorSlice {
            name,
            shape: view.shape(),
            values: TensorValues::Bf16(v),
        })
        .collect();
    let config = AdapterConfig::from_json(&config).unwrap();
    assert_eq!(
        loaded.digest(),
        Adapter::from_tensors(config, &slices).unwrap().digest()
    );
}

#[test]
fn f32_f16_and_bf16_give_the_same_terms_where_the_values_fit() {
    let (a, b) = (
        [0.5f32, -1.0, 2.0, 0.25, 1.5, -0.5, 4.0, 0.0],
        [1.0f32, -2.0, 0.5, 0.125, 3.0, -0.75],
    );
    let half_a: Vec<f16> = a.iter().map(|v| f16::from_f32(*v)).collect();
    let brain_b: Vec<bf16> = b.iter().map(|v| bf16::from_f32(*v)).collect();
    let load = |a: TensorValues<'_>, b: TensorValues<'_>| {
        let config = AdapterConfig::new(2, 4.0, ["q_proj"]);
        let slices = [
            TensorSlice {
                name: A,
                shape: &[2, 4],
                values: a,
            },
            TensorSlice {
                name: B,
                shape: &[3, 2],
                values: b,
            },
        ];
        let active = ActiveAdapter::new(Adapter::from_tensors(config, &slices).unwrap());
        resolve(&[active], &specs()).unwrap()
    };
    let full = load(TensorValues::F32(&a), TensorValues::F32(&b));
    let small = load(TensorValues::F16(&half_a), TensorValues::Bf16(&brain_b));
    let term = |r: &lora_merge::Resolved| r.updates()[0].as_ref().unwrap().terms()[0].clone();
    assert_eq!(term(&full).left, term(&small).left);
    assert_eq!(term(&full).right, term(&small).right);
    assert_eq!(term(&full).scaling, 2.0);
    assert!(full.updates()[1].is_none());
    // A slice that does not fill its shape.
    let slices = [TensorSlice {
        name: A,
        shape: &[2, 5],
        values: TensorValues::F32(&a),
    }];
    let result = Adapter::from_tensors(AdapterConfig::new(2, 4.0, ["q_proj"]), &slices);
    assert!(matches!(result, Err(Error::TensorBytes { .. })));
}

#[test]
fn every_fixture_resolves_and_uses_all_of_its_tensors() {
    let count = |name: &str| {
        let resolved = resolve(&[adapter(name)], &tiny_specs()).unwrap();
        resolved.updates().iter().flatten().count()
    };
    let names = [
        "mult-r32",
        "qv-r8",
        "rslora-r8",
        "dora-r8",
        "pattern",
        "lorabias-r4",
        "layers13-r4",
    ];
    assert_eq!(names.map(count), [28, 8, 28, 28, 9, 8, 14]);
}

#[test]
fn rank_pattern_and_alpha_pattern_of_the_fixture() {
    let resolved = resolve(&[adapter("pattern")], &tiny_specs()).unwrap();
    let term = |name: &str| {
        let module = tiny_specs().iter().position(|s| s.name == name).unwrap();
        resolved.updates()[module]
            .as_ref()
            .map(|u| (u.terms()[0].r, u.terms()[0].scaling))
    };
    assert_eq!(term("model.layers.0.self_attn.q_proj"), Some((8, 1.0)));
    assert_eq!(term("model.layers.0.self_attn.o_proj"), Some((4, 2.0)));
    assert_eq!(term("model.layers.1.mlp.down_proj"), Some((8, 4.0)));
    assert_eq!(term("model.layers.3.self_attn.q_proj"), None);
}

#[test]
fn a_saved_module_replaces_the_base_and_is_never_ignored() {
    let config = CONFIG.replace("\"r\"", "\"modules_to_save\": [\"k_proj\"], \"r\"");
    let saved = ("base_model.model.l.0.k_proj.weight", Dtype::F32, vec![3, 4]);
    let bytes = file(&[good(), vec![saved]].concat());
    let load = || ActiveAdapter::new(Adapter::from_bytes(&config, &bytes).unwrap());
    let resolved = resolve(&[load()], &specs()).unwrap();
    assert_eq!(
        resolved.updates()[1]
            .as_ref()
            .unwrap()
            .replacement()
            .unwrap()
            .len(),
        12
    );
    let mut store = lora_merge::MergedStore::new(
        specs(),
        lora_merge::OwnedWeights::new([vec![bf16::ONE; 12], vec![bf16::ONE; 12]]),
    )
    .unwrap();
    store.refresh(&[load()]).unwrap();
    let value = bf16::from_f32(f32::from_le_bytes([0x3c; 4]));
    assert_eq!(store.weight(1).unwrap(), [value; 12]);
    let half = ActiveAdapter {
        weight: 0.5,
        ..load()
    };
    assert!(matches!(
        resolve(&[half], &specs()),
        Err(Error::AdapterWeight { .. })
    ));
    assert!(matches!(
        resolve(&[load(), load()], &specs()),
        Err(Error::ReplacedTwice { tensor: "weight", .. })
    ));
    let k = CONFIG.replace("q_proj", "k_proj");
    let entries = good()
        .into_iter()
        .map(|(n, d, s)| (n.replace("q_proj", "k_proj"), d, s))
        .collect::<Vec<_>>();
    let entries: Vec<Entry<'_>> = entries
        .iter()
        .map(|(n, d, s)| (n.as_str(), *d, s.clone()))
        .collect();
    let other = ActiveAdapter::new(Adapter::from_bytes(&k, &file(&entries)).unwrap());
    assert!(matches!(
        resolve(&[load(), other], &specs()),
        Err(Error::Module {
            field: "modules_to_save",
            ..
        })
    ));
}

#[test]
fn base_biases_that_were_trained_are_replaced() {
    let config = CONFIG.replace("\"r\"", "\"bias\": \"all\", \"r\"");
    let bias = ("base_model.model.l.0.k_proj.bias", Dtype::F32, vec![3]);
    let bytes = file(&[good(), vec![bias]].concat());
    let specs = vec![
        ModuleSpec::linear("l.0.q_proj", 3, 4),
        ModuleSpec::linear("l.0.k_proj", 3, 4).with_bias(),
    ];
    let active = ActiveAdapter::new(Adapter::from_bytes(&config, &bytes).unwrap());
    let resolved = resolve(&[active], &specs).unwrap();
    let value = f32::from_le_bytes([0x3c; 4]);
    let merged = resolved.updates()[1]
        .as_ref()
        .unwrap()
        .bias(Some(&[9.0; 3]))
        .unwrap()
        .unwrap();
    assert_eq!(merged, [value; 3]);
    let none = Adapter::from_bytes(CONFIG, &bytes).unwrap();
    assert!(matches!(
        resolve(&[ActiveAdapter::new(none)], &specs),
        Err(Error::UnusedTensors { .. })
    ));
}

#[test]
fn fan_in_fan_out_follows_the_kind_of_the_module() {
    let load = |config: &str| ActiveAdapter::new(Adapter::from_bytes(config, &file(&good())).unwrap());
    let set = CONFIG.replace("\"r\"", "\"fan_in_fan_out\": true, \"r\"");
    // PEFT turns the flag off for nn.Linear, with a warning.
    let resolved = resolve(&[load(&set)], &specs()).unwrap();
    assert_eq!(resolved.warnings().len(), 1);
    assert_eq!(resolved.updates()[0].as_ref().unwrap().shape(), (3, 4));
    let stored = vec![ModuleSpec::new("l.0.q_proj", 3, 4, ModuleKind::Conv1d)];
    let distinct = |n: usize| (0..n).map(|i| i as f32 + 1.0).collect::<Vec<f32>>();
    let (a, b) = (distinct(8), distinct(6));
    let slices = [
        TensorSlice {
            name: A,
            shape: &[2, 4],
            values: TensorValues::F32(&a),
        },
        TensorSlice {
            name: B,
            shape: &[3, 2],
            values: TensorValues::F32(&b),
        },
    ];
    let config = AdapterConfig::new(2, 2.0, ["q_proj"]);
    let active = ActiveAdapter::new(Adapter::from_tensors(config, &slices).unwrap());
    let resolved = resolve(&[active], &stored).unwrap();
    let update = resolved.updates()[0].as_ref().unwrap();
    assert_eq!(update.shape(), (4, 3));
    let mut out = [bf16::ZERO; 12];
    lora_merge::merge_into(&[bf16::ZERO; 12], update, &mut out).unwrap();
    for i in 0..4 {
        for o in 0..3 {
            let want: f32 = (0..2).map(|k| b[o * 2 + k] * a[k * 4 + i]).sum();
            assert_eq!(out[i * 3 + o], bf16::from_f32(want));
        }
    }
    let dora = CONFIG.replace("\"r\"", "\"use_dora\": true, \"r\"");
    let magnitude = (
        "base_model.model.l.0.q_proj.lora_magnitude_vector",
        Dtype::F32,
        vec![3],
    );
    let bytes = file(&[good(), vec![magnitude]].concat());
    let active = ActiveAdapter::new(Adapter::from_bytes(&dora, &bytes).unwrap());
    assert!(matches!(
        resolve(&[active], &stored),
        Err(Error::Module {
            field: "use_dora",
            ..
        })
    ));
}

#[test]
fn weights_of_adapters_must_be_finite() {
    for weight in [f32::NAN, f32::INFINITY] {
        let active = ActiveAdapter {
            weight,
            ..adapter("qv-r8")
        };
        assert!(matches!(
            resolve(&[active], &tiny_specs()),
            Err(Error::AdapterWeight { .. })
        ));
    }
    // Each of the two is finite, their product is not.
    let tensor = |name, shape, values| TensorSlice {
        name,
        shape,
        values: TensorValues::F32(values),
    };
    let tensors = [
        tensor("q_proj.lora_A.weight", &[1, 1], &[1.0]),
        tensor("q_proj.lora_B.weight", &[1, 1], &[1.0]),
    ];
    let adapter = Adapter::from_tensors(AdapterConfig::new(1, 1e300, ["q_proj"]), &tensors).unwrap();
    let active = ActiveAdapter {
        weight: 1e30,
        ..ActiveAdapter::new(adapter)
    };
    let error = resolve(&[active], &[ModuleSpec::linear("q_proj", 1, 1)]).unwrap_err();
    assert!(
        matches!(error, Error::AdapterWeight { weight: 1e30, .. }),
        "{error}"
    );
}

#[test]
fn the_order_of_adapters_changes_nothing() {
    let names = ["mult-r32", "dora-r8", "qv-r8"];
    let forward = resolve(&names.map(adapter), &tiny_specs()).unwrap();
    let mut names = names;
    names.reverse();
    let backward = resolve(&names.map(adapter), &tiny_specs()).unwrap();
    assert_eq!(forward.digest(), backward.digest());
    for (a, b) in forward
        .updates()
        .iter()
        .flatten()
        .zip(backward.updates().iter().flatten())
    {
        let scalings =
            |u: &lora_merge::ModuleUpdate| u.terms().iter().map(|t| (t.r, t.scaling)).collect::<Vec<_>>();
        assert_eq!(scalings(a), scalings(b));
    }
}
