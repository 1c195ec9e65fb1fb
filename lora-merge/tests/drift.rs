//! The drift check passes for the store and fails for what other systems do.

mod common;

use common::{adapter, tiny_specs, tiny_weights};
use half::bf16;
use lora_merge::{
    ActiveAdapter, DriftOptions, DriftReport, DriftSubject, Error, MergedStore, ModuleSpec, PristineSource,
    Resolved, resolve, sequential_digest, verify_no_drift,
};

#[test]
fn the_store_does_not_drift() {
    let specs = tiny_specs();
    let mut store = MergedStore::new(specs.clone(), tiny_weights(&specs)).unwrap();
    let active = [adapter("mult-r32"), adapter("dora-r8")];
    let report = verify_no_drift(&mut store, &active, &DriftOptions::default()).unwrap();
    assert!(report.passed(), "{report:?}");
    assert_eq!(report.n_iters, 10);
    assert_ne!(report.base_hash_before, report.inference_hash_initial_merged);
    assert_eq!(store.version().number, 12);
    // The hash is the plain stream of sorted names and raw bytes.
    let source = store.source();
    let names: Vec<String> = specs.iter().map(|s| format!("{}.weight", s.name)).collect();
    let weights = names
        .iter()
        .enumerate()
        .map(|(m, n)| (n.as_str(), bytemuck::cast_slice(source.slice(m).unwrap())));
    assert_eq!(
        report.base_hash_before,
        lora_merge::hex(&sequential_digest(weights))
    );
}

#[test]
fn the_report_has_the_agreed_keys() {
    let specs = tiny_specs();
    let mut store = MergedStore::new(specs.clone(), tiny_weights(&specs)).unwrap();
    let mut options = DriftOptions::default();
    options.iterations = 1;
    let report = verify_no_drift(&mut store, &[adapter("qv-r8")], &options).unwrap();
    let json = serde_json::to_value(&report).unwrap();
    let keys: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    let agreed = [
        "mode",
        "n_iters",
        "noise_scale",
        "base_hash_before",
        "base_hash_after",
        "base_bit_identical",
        "inference_hash_initial_merged",
        "inference_hash_after_restore",
        "inference_deterministic",
    ];
    assert_eq!(keys, agreed);
    assert_eq!(serde_json::from_value::<DriftReport>(json).unwrap(), report);
}

/// What must not be done: one copy of the weights, adapters added to it and subtracted from it again.
struct MergeUnmerge {
    specs: Vec<ModuleSpec>,
    weights: Vec<Vec<bf16>>,
    merged: Option<Resolved>,
}

impl MergeUnmerge {
    fn add(&mut self, resolved: &Resolved, sign: f64) {
        for (weight, update) in self.weights.iter_mut().zip(resolved.updates()) {
            let Some(update) = update else { continue };
            let unmerged = update.unmerged(None).unwrap();
            let (rows, columns) = update.shape();
            for o in 0..rows {
                let mut delta = vec![0f32; columns];
                for k in 0..unmerged.rank {
                    let b = unmerged.b[o * unmerged.rank + k];
                    for (d, a) in delta.iter_mut().zip(&unmerged.a[k * columns..][..columns]) {
                        *d += b * a;
                    }
                }
                for (w, d) in weight[o * columns..][..columns].iter_mut().zip(delta) {
                    *w = bf16::from_f32(w.to_f32() + sign as f32 * d);
                }
            }
        }
    }

    fn digest(&self) -> [u8; 32] {
        let tensors = self.specs.iter().zip(&self.weights);
        sequential_digest(tensors.map(|(s, w)| (s.name.as_str(), bytemuck::cast_slice(w))))
    }

    fn unmerge(&mut self) {
        if let Some(old) = self.merged.take() {
            self.add(&old, -1.0);
        }
    }
}

impl DriftSubject for MergeUnmerge {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32], Error> {
        self.unmerge();
        Ok(self.digest())
    }

    fn served_digest(&mut self) -> Result<[u8; 32], Error> {
        Ok(self.digest())
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<(), Error> {
        self.unmerge();
        let resolved = resolve(active, &self.specs)?;
        self.add(&resolved, 1.0);
        self.merged = Some(resolved);
        Ok(())
    }
}

fn merge_unmerge() -> MergeUnmerge {
    let specs = tiny_specs();
    let source = tiny_weights(&specs);
    let weights = (0..specs.len())
        .map(|m| source.slice(m).unwrap().to_vec())
        .collect();
    MergeUnmerge {
        specs,
        weights,
        merged: None,
    }
}

#[test]
fn merging_and_unmerging_drifts_and_is_caught() {
    let mut subject = merge_unmerge();
    let mut options = DriftOptions::default();
    options.iterations = 2;
    let report = verify_no_drift(&mut subject, &[adapter("mult-r32")], &options).unwrap();
    assert!(!report.base_bit_identical && !report.inference_deterministic && !report.passed());
}

/// The numbers of the README. The share of changed weights only grows.
#[test]
fn the_drift_of_merging_and_unmerging_grows_with_the_cycles() {
    let mut subject = merge_unmerge();
    let pristine = subject.weights.clone();
    let start = adapter("mult-r32");
    let mut shares = Vec::new();
    for cycle in 0u64..10 {
        // The adapter moves between cycles, as in training.
        let moved = ActiveAdapter::new(start.adapter.perturbed(0.01, cycle));
        subject.refresh(&[moved]).unwrap();
        subject.unmerge();
        let changed = pristine
            .iter()
            .flatten()
            .zip(subject.weights.iter().flatten())
            .filter(|(a, b)| a != b)
            .count();
        let share = changed as f64 / pristine.iter().map(Vec::len).sum::<usize>() as f64;
        if [0, 9].contains(&cycle) {
            shares.push(share);
            eprintln!(
                "{} cycle(s): {:.1} % of weights changed",
                cycle + 1,
                100.0 * share
            );
        }
    }
    assert!(shares[0] > 0.02 && shares[1] > 2.0 * shares[0], "{shares:?}");
}

#[test]
fn nonsensical_options_are_errors() {
    let specs = tiny_specs();
    let mut store = MergedStore::new(specs.clone(), tiny_weights(&specs)).unwrap();
    for (iterations, noise) in [(0, 0.1), (1, -1.0), (1, f32::NAN), (1, f32::INFINITY)] {
        let mut options = DriftOptions::default();
        (options.iterations, options.noise_scale) = (iterations, noise);
        let result = verify_no_drift(&mut store, &[adapter("qv-r8")], &options);
        assert!(matches!(result, Err(Error::DriftOptions { .. })));
    }
}
