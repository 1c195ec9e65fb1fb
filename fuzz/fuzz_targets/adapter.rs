//! An adapter's two files, divided by the first zero byte: configuration, then tensors.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lora_merge::{ActiveAdapter, Adapter, AdapterConfig, MergedStore, ModuleSpec, OwnedWeights};
use std::sync::OnceLock;

fn specs() -> &'static [ModuleSpec] {
    static SPECS: OnceLock<Vec<ModuleSpec>> = OnceLock::new();
    SPECS.get_or_init(|| {
        vec![
            ModuleSpec::linear("model.layers.0.self_attn.q_proj", 3, 4),
            ModuleSpec::linear("model.layers.1.self_attn.v_proj", 3, 4).with_bias(),
            ModuleSpec::output_head("lm_head", 5, 4),
        ]
    })
}

fuzz_target!(|data: &[u8]| {
    let mut parts = data.splitn(2, |byte| *byte == 0);
    let (config, tensors) = (parts.next().unwrap_or(&[]), parts.next().unwrap_or(&[]));
    let Ok(config) = std::str::from_utf8(config) else {
        return;
    };
    if let Ok(parsed) = AdapterConfig::from_json(config) {
        // Accepted configurations have a canonical form that is JSON.
        assert!(parsed.canonical_json().starts_with('{'));
    }
    let Ok(adapter) = Adapter::from_bytes(config, tensors) else {
        return;
    };
    let weights = specs().iter().map(|spec| vec![Default::default(); spec.elements()]);
    let mut store = MergedStore::new(specs().to_vec(), OwnedWeights::new(weights))
        .expect("the weights fit the modules");
    if store.refresh(&[ActiveAdapter::new(adapter)]).is_ok() {
        for module in 0..specs().len() {
            let weight = store.weight(module).expect("the module exists");
            assert!(weight.iter().all(|w| w.is_finite()));
        }
    }
});
