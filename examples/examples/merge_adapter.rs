//! Merges a PEFT adapter into the weights of a model, replaces it by another, and goes back to the base.
//!
//! ```text
//! cargo run --release -p examples --example merge_adapter -- [ADAPTER_DIR]
//! ```
#![expect(clippy::print_stdout, reason = "the example shows what happens")]

use half::bf16;
use lora_merge::{
    ActiveAdapter, Adapter, DriftOptions, MergedStore, ModuleSpec, OwnedWeights, verify_no_drift,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/adapters/mult-r32");
    let folder = std::env::args().nth(1).unwrap_or_else(|| bundled.to_owned());

    // The shapes of the bundled model's projections. Any named matrices will do: here they are drawn, not read.
    let mut specs = Vec::new();
    for layer in 0..4 {
        for (part, out, inputs) in [
            ("self_attn.q_proj", 1024, 256),
            ("self_attn.k_proj", 256, 256),
            ("self_attn.v_proj", 256, 256),
            ("self_attn.o_proj", 256, 1024),
            ("mlp.gate_proj", 640, 256),
            ("mlp.up_proj", 640, 256),
            ("mlp.down_proj", 256, 640),
        ] {
            specs.push(ModuleSpec::linear(
                format!("model.layers.{layer}.{part}"),
                out,
                inputs,
            ));
        }
    }
    let weights = specs.iter().map(|spec| {
        let value = |i: usize| bf16::from_f32(0.02 * (i as f32 * 0.7).sin());
        (0..spec.elements()).map(value).collect()
    });
    let weights = OwnedWeights::new(weights.collect::<Vec<_>>());
    let mut store = MergedStore::new(specs, weights)?;

    let adapter = ActiveAdapter::new(Adapter::load(&folder)?);
    let report = store.refresh(std::slice::from_ref(&adapter))?;
    println!(
        "{folder}: policy {}, {} modules merged in {:?}",
        report.version, report.adapted_modules, report.elapsed
    );
    let memory = store.memory();
    println!(
        "pristine {} bytes, merged {} bytes",
        memory.pristine_bytes, memory.merged_bytes
    );

    // A trainer's next step: straight from the pristine weights again.
    let next = ActiveAdapter::new(adapter.adapter.perturbed(0.01, 1));
    let report = store.refresh(&[next])?;
    println!(
        "policy {}, {} modules changed",
        report.version, report.changed_modules
    );

    let report = verify_no_drift(&mut store, &[adapter], &DriftOptions::default())?;
    println!(
        "after {} more refreshes: base identical {}, merged identical {}",
        report.n_iters, report.base_bit_identical, report.inference_deterministic
    );

    store.refresh(&[])?;
    println!("policy {} is the base again", store.version());
    Ok(())
}
