//! Merged weights against those that PEFT's formulas give in f64.

mod common;

use common::{adapter, fixture, rounded, tiny_specs, tiny_weights};
use lora_merge::{ActiveAdapter, MergedStore};

/// Merges, compares the rows that the golden file holds, and returns how many elements were compared.
fn compare(name: &str, active: &[ActiveAdapter]) -> usize {
    let specs = tiny_specs();
    let mut store = MergedStore::new(specs.clone(), tiny_weights(&specs)).unwrap();
    let report = store.refresh(active).unwrap();
    assert!(report.differs_from_base);
    let bytes = std::fs::read(fixture(&format!("golden/merged-{name}.safetensors"))).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (mut elements, mut neighbours) = (0, 0);
    for (tensor, view) in file.tensors() {
        let spec = specs.iter().position(|s| tensor.contains(s.name.as_str()));
        let Some(module) = spec else { continue };
        if tensor.ends_with("bias") {
            let bias = store.bias(module).unwrap();
            for (got, want) in bias.iter().zip(view.data().chunks_exact(4)) {
                assert_eq!(*got, f32::from_le_bytes(want.try_into().unwrap()), "{tensor}");
                elements += 1;
            }
            continue;
        }
        let weight = store.weight(module).unwrap();
        for (i, (got, want)) in weight.iter().zip(view.data().chunks_exact(4)).enumerate() {
            let want = f64::from(f32::from_le_bytes(want.try_into().unwrap()));
            assert!(rounded(*got, want, 1e-3), "{name} {tensor} {i}: {got} for {want}");
            neighbours += usize::from(*got != lora_merge::bf16_from_f64(want));
            elements += 1;
        }
    }
    // The golden values were rounded to f32, so an exact value next to a tie may have landed on it.
    assert!(
        neighbours * 1000 <= elements,
        "{name}: {neighbours} of {elements}"
    );
    elements
}

#[test]
fn each_adapter_matches_peft() {
    for name in [
        "mult-r32",
        "qv-r8",
        "rslora-r8",
        "dora-r8",
        "pattern",
        "lorabias-r4",
        "layers13-r4",
    ] {
        assert!(compare(name, &[adapter(name)]) >= 64 * 256, "{name}");
    }
}

#[test]
fn two_adapters_match_peft_in_either_order() {
    let (a, b) = (adapter("mult-r32"), adapter("qv-r8"));
    assert!(compare("mult-r32+qv-r8", &[a.clone(), b.clone()]) >= 64 * 1024);
    compare("mult-r32+qv-r8", &[b, a]);
}
