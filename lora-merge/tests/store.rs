//! Refreshes: always from pristine, all or nothing.

mod common;

use common::{Random, adapter, model_file, random_adapter, tiny_specs, tiny_weights};
use half::bf16;
use lora_merge::{
    ActiveAdapter, AdapterConfig, BorrowedWeights, Error, FileWeights, MergedStore, ModuleSpec, OwnedWeights,
    PristineSource, RefreshStep,
};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn small_specs() -> Vec<ModuleSpec> {
    vec![
        ModuleSpec::linear("layers.0.q_proj", 24, 40),
        ModuleSpec::linear("layers.0.o_proj", 40, 24),
        ModuleSpec::linear("layers.1.q_proj", 24, 40).with_bias(),
        ModuleSpec::linear("layers.1.o_proj", 40, 24),
        ModuleSpec::output_head("lm_head", 33, 40),
    ]
}

fn small_weights(specs: &[ModuleSpec]) -> OwnedWeights {
    let mut random = Random(42);
    let weights: Vec<_> = specs.iter().map(|s| random.bf16s(s.elements(), 0.1)).collect();
    OwnedWeights::new(weights).with_bias(2, random.f32s(24, 1.0))
}

fn small_store() -> MergedStore<OwnedWeights> {
    let specs = small_specs();
    MergedStore::new(specs.clone(), small_weights(&specs)).unwrap()
}

/// Adapters of every kind that can be stacked.
fn pool() -> Vec<ActiveAdapter> {
    let specs = small_specs();
    let make = |targets: &[&str], seed: u64, change: fn(&mut AdapterConfig)| {
        let mut config = AdapterConfig::new(1 + seed as usize % 5, 8.0, targets.iter().copied());
        change(&mut config);
        ActiveAdapter {
            adapter: Arc::new(random_adapter(&config, &specs, targets, seed)),
            weight: [1.0, 0.5, -2.0][seed as usize % 3],
        }
    };
    vec![
        make(&["q_proj"], 1, |_| ()),
        make(&["o_proj", "q_proj"], 2, |c| c.use_rslora = true),
        make(&["q_proj", "o_proj"], 3, |c| c.use_dora = true),
        make(&["o_proj"], 4, |c| c.use_dora = true),
        make(&["q_proj"], 5, |c| c.lora_bias = true),
        make(&["lm_head"], 6, |_| ()),
        make(&["layers.1.o_proj"], 7, |c| c.lora_bias = true),
    ]
}

/// All bits that are served.
fn served<S: PristineSource>(store: &MergedStore<S>) -> Vec<(Vec<u16>, Option<Vec<u32>>)> {
    let weight = |m| store.weight(m).unwrap().iter().map(|w| w.to_bits()).collect();
    let bias = |m| store.bias(m).map(|b| b.iter().map(|v| v.to_bits()).collect());
    (0..store.specs().len()).map(|m| (weight(m), bias(m))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn any_sequence_of_refreshes_equals_merging_the_last_set_once(
        history in proptest::collection::vec(proptest::collection::vec(0usize..7, 0..4), 1..8),
        rotate in 0usize..4,
    ) {
        let pool = pool();
        let specs = small_specs();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let weights = small_weights(&specs);
        let mut offsets = Vec::new();
        {
            use std::io::Write;
            let mut at = 0;
            for module in 0..specs.len() {
                let bytes: &[u8] = bytemuck::cast_slice(weights.slice(module).unwrap());
                file.write_all(bytes).unwrap();
                offsets.push(at);
                at += bytes.len() as u64;
            }
        }
        // Biases are not in the file; a source that adds them.
        struct Reread(FileWeights, OwnedWeights);
        impl PristineSource for Reread {
            fn slice(&self, _: usize) -> Option<&[bf16]> { None }
            fn read(&self, module: usize, out: &mut [bf16]) -> Result<(), String> { self.0.read(module, out) }
            fn bias(&self, module: usize) -> Option<&[f32]> { self.1.bias(module) }
        }
        let reread = Reread(FileWeights::open(file.path(), &specs, offsets).unwrap(), weights);
        let mut store = small_store();
        let mut from_file = MergedStore::new(specs, reread).unwrap();
        let base = store.base_digest().unwrap();
        let sets: Vec<Vec<ActiveAdapter>> =
            history.iter().map(|set| set.iter().map(|i| pool[*i].clone()).collect()).collect();
        for (i, set) in sets.iter().enumerate() {
            let report = store.refresh(set).unwrap();
            prop_assert_eq!(report.version.number, i as u64 + 1);
            prop_assert_eq!(report.version, from_file.refresh(set).unwrap().version);
        }
        let mut last = sets.last().unwrap().clone();
        let mid = if last.is_empty() { 0 } else { rotate % last.len() };
        last.rotate_left(mid);
        let mut fresh = small_store();
        fresh.refresh(&last).unwrap();
        prop_assert_eq!(served(&store), served(&fresh));
        prop_assert_eq!(served(&from_file), served(&fresh));
        prop_assert_eq!(store.version().sha256, fresh.version().sha256);
        prop_assert_eq!(store.base_digest().unwrap(), base);
        prop_assert_eq!(store.fingerprint(), fresh.fingerprint());
        // And back to the base.
        store.refresh(&[]).unwrap();
        prop_assert_eq!(served(&store), served(&small_store()));
        prop_assert_eq!(store.served_digest(), base);
    }
}

/// Fails every step once, after every possible number of steps that succeed, and checks that nothing moved.
fn fail_everywhere<S: PristineSource>(
    store: &mut MergedStore<S>,
    from: &[ActiveAdapter],
    to: &[ActiveAdapter],
) -> usize {
    store.refresh(from).unwrap();
    let before = (served(store), store.version(), store.memory().merged_modules);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for fail_at in 0.. {
        let (count, steps) = (AtomicUsize::new(0), seen.clone());
        store.set_fault_hook(Some(Box::new(move |step| {
            let fail = count.fetch_add(1, Ordering::Relaxed) == fail_at;
            if fail {
                steps.lock().unwrap().push(step);
            }
            fail
        })));
        match store.refresh(to) {
            Err(Error::Injected { .. }) => {
                assert_eq!((served(store), store.version()), (before.0.clone(), before.1));
                assert_eq!(store.active().len(), from.len());
            }
            Err(other) => panic!("{other}"),
            Ok(_) => {
                store.set_fault_hook(None);
                break;
            }
        }
    }
    let seen = seen.lock().unwrap();
    assert!(
        seen.contains(&RefreshStep::Resolve) && seen.contains(&RefreshStep::Publish),
        "{seen:?}"
    );
    assert!(seen.iter().any(|s| matches!(s, RefreshStep::Commit(_))));
    seen.len()
}

#[test]
fn a_refresh_that_fails_at_any_step_leaves_the_previous_policy() {
    let pool = pool();
    let set = |of: &[usize]| of.iter().map(|i| pool[*i].clone()).collect::<Vec<_>>();
    let mut steps = 0;
    for (from, to) in [
        (vec![], vec![0, 2, 5]),
        (vec![0, 2, 5], vec![1, 4]),
        (vec![1, 3, 4, 6], vec![]),
        (vec![2, 6], vec![3, 5]),
    ] {
        let mut store = small_store();
        steps += fail_everywhere(&mut store, &set(&from), &set(&to));
        let mut fresh = small_store();
        fresh.refresh(&set(&to)).unwrap();
        assert_eq!(served(&store), served(&fresh), "and then it succeeds");
    }
    assert!(steps > 40, "{steps}");
}

/// Weights from nowhere near memory, which can be told to fail.
struct Flaky(OwnedWeights, Arc<AtomicBool>, Arc<AtomicUsize>);

impl PristineSource for Flaky {
    fn slice(&self, _module: usize) -> Option<&[bf16]> {
        None
    }

    fn read(&self, module: usize, out: &mut [bf16]) -> Result<(), String> {
        if self.1.load(Ordering::Relaxed) && self.2.fetch_add(1, Ordering::Relaxed) == 2 {
            return Err("the disk is gone".into());
        }
        out.copy_from_slice(self.0.slice(module).unwrap());
        Ok(())
    }
}

#[test]
fn a_pristine_source_that_fails_half_way_leaves_the_previous_policy() {
    let specs = small_specs();
    let (broken, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let source = Flaky(small_weights(&specs), broken.clone(), reads);
    let mut store = MergedStore::new(specs, source).unwrap();
    let pool = pool();
    fail_everywhere(
        &mut store,
        &[pool[2].clone()],
        &[pool[3].clone(), pool[0].clone()],
    );
    let before = served(&store);
    broken.store(true, Ordering::Relaxed);
    let error = store.refresh(&[pool[1].clone()]).unwrap_err();
    assert!(
        matches!(&error, Error::Pristine { reason, .. } if reason == "the disk is gone"),
        "{error}"
    );
    assert_eq!(served(&store), before);
}

#[test]
fn an_adapter_that_overflows_is_refused_and_rolled_back() {
    let specs = small_specs();
    let mut store = small_store();
    let pool = pool();
    store.refresh(&pool[..2]).unwrap();
    let before = (served(&store), store.version());
    let mut config = AdapterConfig::new(2, 8.0, ["o_proj"]);
    config.lora_alpha = 1e41;
    let huge = ActiveAdapter::new(random_adapter(&config, &specs, &["o_proj"], 9));
    let error = store.refresh(&[pool[0].clone(), huge]).unwrap_err();
    assert!(
        matches!(&error, Error::MergedNotFinite { module, .. } if module.ends_with("o_proj")),
        "{error}"
    );
    assert_eq!((served(&store), store.version()), before);
}

#[test]
fn addresses_of_merged_weights_never_move() {
    let pool = pool();
    let mut store = small_store();
    store.reserve([1]).unwrap();
    let reserved = store.weight(1).unwrap().as_ptr();
    store.refresh(&[pool[1].clone()]).unwrap();
    assert_eq!(store.weight(1).unwrap().as_ptr(), reserved);
    let addresses: Vec<_> = (0..4).map(|m| store.weight(m).unwrap().as_ptr()).collect();
    for set in [vec![2], vec![], vec![0, 5], vec![3, 6]] {
        store
            .refresh(&set.iter().map(|i| pool[*i].clone()).collect::<Vec<_>>())
            .unwrap();
        assert_eq!(
            (0..4)
                .map(|m| store.weight(m).unwrap().as_ptr())
                .collect::<Vec<_>>(),
            addresses
        );
    }
    assert!(matches!(store.reserve([99]), Err(Error::NoSuchModule { .. })));
    assert!(store.weight(99).is_none());
}

#[test]
fn only_targeted_matrices_are_held_twice() {
    let specs = tiny_specs();
    let mut store = MergedStore::new(specs.clone(), tiny_weights(&specs)).unwrap();
    let all: usize = specs.iter().map(|s| 2 * s.elements()).sum();
    let memory = store.memory();
    assert_eq!(
        (memory.weight_bytes, memory.pristine_bytes, memory.merged_bytes),
        (all, all, 0)
    );
    store.refresh(&[adapter("qv-r8")]).unwrap();
    let memory = store.memory();
    assert_eq!(
        (memory.merged_modules, memory.merged_bytes),
        (8, 4 * 2 * (1024 + 256) * 256)
    );
    let file = MergedStore::new(
        specs.clone(),
        FileWeights::from_safetensors(model_file(), &specs).unwrap(),
    );
    let memory = file.unwrap().memory();
    assert_eq!((memory.pristine_bytes, memory.merged_bytes), (0, all));
}

#[test]
fn the_kinds_of_pristine_copies_give_identical_bits() {
    let specs = tiny_specs();
    let owned = tiny_weights(&specs);
    let borrowed = BorrowedWeights((0..specs.len()).map(|m| owned.slice(m).unwrap()).collect());
    let active = [adapter("dora-r8"), adapter("mult-r32")];
    let mut a = MergedStore::new(specs.clone(), borrowed).unwrap();
    let mut b = MergedStore::new(
        specs.clone(),
        FileWeights::from_safetensors(model_file(), &specs).unwrap(),
    )
    .unwrap();
    let mut c = MergedStore::new(specs.clone(), owned.clone()).unwrap();
    for active in [&active[..], &active[1..], &[]] {
        a.refresh(active).unwrap();
        b.refresh(active).unwrap();
        c.refresh(active).unwrap();
        assert_eq!(a.fingerprint(), c.fingerprint());
        assert_eq!(b.fingerprint(), c.fingerprint());
    }
    let digests = [a.base_digest(), b.base_digest(), c.base_digest()].map(Result::unwrap);
    assert!(digests.iter().all(|d| *d == digests[0]));
}

#[test]
fn an_update_that_changes_no_weight_is_reported() {
    let specs = small_specs();
    let pool = pool();
    let mut store = small_store();
    let report = store.refresh(&[pool[0].clone()]).unwrap();
    assert!(report.differs_from_base);
    assert_eq!((report.adapted_modules, report.changed_modules), (2, 2));
    let report = store.refresh(&[pool[0].clone()]).unwrap();
    assert_eq!(
        (
            report.adapted_modules,
            report.changed_modules,
            report.version.number
        ),
        (2, 0, 2)
    );
    assert!(report.differs_from_base);
    // An untrained adapter: B is zero.
    let config = AdapterConfig::new(4, 0.0, ["q_proj"]);
    let idle = ActiveAdapter::new(random_adapter(&config, &specs, &["q_proj"], 8));
    let report = small_store().refresh(std::slice::from_ref(&idle)).unwrap();
    assert_eq!(
        (
            report.adapted_modules,
            report.changed_modules,
            report.differs_from_base
        ),
        (2, 0, false)
    );
    let report = store.refresh(&[idle]).unwrap();
    assert_eq!((report.changed_modules, report.differs_from_base), (2, false));
}

#[test]
fn modules_that_are_no_longer_targeted_go_back_to_pristine() {
    let pool = pool();
    let mut store = small_store();
    store.refresh(&[pool[1].clone()]).unwrap();
    let report = store.refresh(&[pool[0].clone()]).unwrap();
    assert_eq!(
        (
            report.adapted_modules,
            report.restored_modules,
            report.changed_modules
        ),
        (2, 2, 4)
    );
    assert_eq!(store.weight(1), store.source().slice(1));
}

#[test]
fn the_same_adapter_with_new_values_is_another_policy() {
    let specs = small_specs();
    let config = AdapterConfig::new(4, 8.0, ["q_proj"]);
    let [one, two, same] =
        [1, 2, 1].map(|seed| ActiveAdapter::new(random_adapter(&config, &specs, &["q_proj"], seed)));
    let mut store = small_store();
    let versions = [one.clone(), two, same, ActiveAdapter { weight: 0.5, ..one }]
        .map(|active| store.refresh(&[active]).unwrap().version);
    assert_ne!(versions[0].sha256, versions[1].sha256);
    assert_eq!(versions[0].sha256, versions[2].sha256);
    assert_ne!(versions[0].sha256, versions[3].sha256);
    assert!(versions.windows(2).all(|w| w[0].number < w[1].number));
}

#[test]
fn a_lora_on_a_tied_head_does_not_change_the_embeddings() {
    let mut random = Random(1);
    let shared = random.bf16s(33 * 40, 0.1);
    let specs = vec![
        ModuleSpec::embedding("model.embed_tokens", 33, 40),
        ModuleSpec::output_head("lm_head", 33, 40),
    ];
    let mut store = MergedStore::new(specs.clone(), BorrowedWeights(vec![&shared, &shared])).unwrap();
    let config = AdapterConfig::new(4, 8.0, ["lm_head"]);
    store
        .refresh(&[ActiveAdapter::new(random_adapter(
            &config,
            &specs,
            &["lm_head"],
            1,
        ))])
        .unwrap();
    assert_eq!(store.weight(0).unwrap(), shared);
    assert_ne!(store.weight(1).unwrap(), shared);
}

#[test]
fn lora_bias_merges_into_an_added_or_an_existing_bias() {
    let pool = pool();
    let mut store = small_store();
    assert!(store.bias(0).is_none());
    let base = store.bias(2).unwrap().to_vec();
    store.refresh(&[pool[4].clone()]).unwrap();
    let term = |m: usize| {
        let resolved = lora_merge::resolve(&[pool[4].clone()], &small_specs()).unwrap();
        resolved.updates()[m]
            .as_ref()
            .unwrap()
            .bias(None)
            .unwrap()
            .unwrap()
    };
    assert_eq!(store.bias(0).unwrap(), term(0));
    let sum: Vec<f32> = base.iter().zip(term(2)).map(|(a, b)| a + b).collect();
    let close = store
        .bias(2)
        .unwrap()
        .iter()
        .zip(&sum)
        .all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs().max(1.0));
    assert!(close);
    store.refresh(&[]).unwrap();
    assert!(store.bias(0).is_none());
    assert_eq!(store.bias(2).unwrap(), base);
}

#[test]
fn sources_that_do_not_fit_are_errors() {
    let specs = small_specs();
    let mut short = vec![Vec::new(); specs.len()];
    short[0] = vec![bf16::ONE; 3];
    assert!(matches!(
        MergedStore::new(specs.clone(), OwnedWeights::new(short)),
        Err(Error::Length { .. })
    ));
    assert!(matches!(
        MergedStore::new(specs.clone(), OwnedWeights::new([])),
        Err(Error::Length { .. } | Error::Pristine { .. })
    ));
    let twice = vec![specs[0].clone(), specs[0].clone()];
    assert!(matches!(
        MergedStore::new(twice, OwnedWeights::new([])),
        Err(Error::DuplicateModule { .. })
    ));
    let wrong = [ModuleSpec::linear("model.layers.0.self_attn.q_proj", 1024, 255)];
    assert!(matches!(
        FileWeights::from_safetensors(model_file(), &wrong),
        Err(Error::Pristine { .. })
    ));
    assert!(matches!(
        FileWeights::open(model_file(), &tiny_specs()[..1], vec![1 << 40]),
        Err(Error::Pristine { .. })
    ));
    assert!(matches!(
        FileWeights::open("/nonexistent", &[], vec![]),
        Err(Error::Read { .. })
    ));
}

#[test]
fn a_file_is_read_only_where_a_module_lies() {
    let specs = &tiny_specs()[..1];
    let weights = FileWeights::from_safetensors(model_file(), specs).unwrap();
    let mut whole = vec![bf16::ZERO; specs[0].elements()];
    weights.read(0, &mut whole).unwrap();
    let mut longer = vec![bf16::ZERO; whole.len() + 1];
    assert!(
        weights.read(0, &mut longer).is_err(),
        "the next tensor's bytes follow"
    );
    assert!(weights.read(0, &mut whole[1..]).is_err());
    assert!(weights.read(1, &mut whole).is_err());
    let absurd = [ModuleSpec::linear("q_proj", usize::MAX, 2)];
    assert!(matches!(
        FileWeights::open(model_file(), &absurd, vec![0]),
        Err(Error::Pristine { .. })
    ));
    // The second tensor begins where 64 bits end: eight bytes for the length and the header bring it into the file again.
    let gap = u64::MAX - 60;
    let header = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{gap}],"data_offsets":[0,{gap}]}},"m.weight":{{"dtype":"BF16","shape":[1,1],"data_offsets":[{gap},{}]}}}}"#,
        gap + 2
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let path = std::env::temp_dir().join(format!("wrapping-offset-{}.safetensors", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let result = FileWeights::from_safetensors(&path, &[ModuleSpec::linear("m", 1, 1)]);
    std::fs::remove_file(&path).unwrap();
    assert!(result.is_err());
}
