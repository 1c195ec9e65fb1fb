//! Adapters on a GPU: the bits of the CPU's merge, captured graphs across refreshes, failures, times.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "the timing test prints what it measured")]

mod gpu_support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuda_graphs::few_cases;
use gpu_support::{Gpu, config, tiny, tuned};
use half::bf16;
use lora_merge::{
    ActiveAdapter, Adapter, AdapterConfig, DriftOptions, DriftSubject, MergedStore, TensorSlice,
    TensorValues, verify_no_drift,
};
use paged_kv::PageTable;
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, WeightSource};
use qwen3_model::{
    Backend, CpuBackend, Error, LoadOptions, MergeMode, PristineCopy, PristineWeights, Projection,
    Qwen3Config, modules, random_adapter,
};

const PLACES: [PristineCopy; 3] = [PristineCopy::Device, PristineCopy::Pinned, PristineCopy::File];
/// All fixtures and the stacked pair, and a made-up adapter on the head.
const NAMES: [&str; 9] = [
    "lorabias-r4",
    HEAD,
    "mult-r32",
    "qv-r8",
    "rslora-r8",
    "dora-r8",
    "pattern",
    "layers13-r4",
    "mult-r32+qv-r8",
];

const HEAD: &str = "lm_head";

/// An adapter on the head of the bundled model, which is tied to its embedding.
fn head_adapter() -> ActiveAdapter {
    let (config, _) = tiny();
    assert!(config.tie_word_embeddings);
    let values = |n: usize, seed: usize| -> Vec<f32> {
        let one = |i: usize| ((i * 2_654_435 + seed) % 1009) as f32 / 1009.0 - 0.5;
        (0..n).map(one).collect()
    };
    let (a, b) = (
        values(4 * config.hidden_size, 1),
        values(config.vocab_size * 4, 7),
    );
    let tensors = [
        TensorSlice {
            name: "lm_head.lora_A.weight",
            shape: &[4, config.hidden_size],
            values: TensorValues::F32(&a),
        },
        TensorSlice {
            name: "lm_head.lora_B.weight",
            shape: &[config.vocab_size, 4],
            values: TensorValues::F32(&b),
        },
    ];
    ActiveAdapter::new(Adapter::from_tensors(AdapterConfig::new(4, 2.0, [HEAD]), &tensors).unwrap())
}

fn active(name: &str) -> Vec<ActiveAdapter> {
    if name == HEAD {
        return vec![head_adapter()];
    }
    gpu_support::active(name)
}

fn options() -> CudaOptions {
    tuned(CudaOptions {
        max_tokens: 256,
        max_batch_size: 4,
        max_seq_length: 256,
        n_pages: 65,
        page_size: 16,
        ..CudaOptions::default()
    })
}

fn backend(gpu: &Gpu, config: &Qwen3Config, weights: WeightSource<'_>) -> CudaBackend {
    CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), weights, options()).unwrap()
}

/// All projections as they are served, with their addresses.
fn served(backend: &CudaBackend) -> Vec<(u64, Vec<bf16>)> {
    let layers = 0..backend.config().n_layers;
    layers
        .flat_map(|layer| Projection::ALL.map(|projection| (layer, projection)))
        .map(|(layer, projection)| {
            let slice = backend.projection(layer, projection).unwrap();
            (slice.ptr(), backend.stream().download(slice).unwrap())
        })
        .collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn merged_bits_are_those_of_the_cpu_wherever_the_pristine_copy_lives() {
    let gpu = Gpu::open();
    let (config, weights) = tiny();
    let mut store = MergedStore::new(modules(&config), PristineWeights::new(weights.clone())).unwrap();
    let mut cpu = CpuBackend::new(config.clone(), weights.clone(), &LoadOptions::default()).unwrap();
    for place in PLACES {
        let mut backend = backend(&gpu, &config, WeightSource::Given(&weights));
        backend.set_pristine_copy(place).unwrap();
        let base = served(&backend);
        for (number, name) in cuda_graphs::cases(NAMES).into_iter().enumerate() {
            let report = backend.set_adapters(&active(name), MergeMode::Merged).unwrap();
            let expected = store.refresh(&active(name)).unwrap();
            assert_eq!(report.version.number, number as u64 + 1);
            assert_eq!(report.version.sha256, expected.version.sha256);
            assert_eq!(report.adapted_modules, expected.adapted_modules);
            assert!(report.changed_modules > 0 && report.differs_from_base);
            for (module, ((address, bits), (before, _))) in served(&backend).iter().zip(&base).enumerate() {
                assert_eq!(address, before, "{name}: storage moved");
                assert!(
                    store.weight(module).unwrap() == bits,
                    "{place:?} {name}: module {module}"
                );
            }
            // With the head and the biases.
            cpu.set_adapters(&active(name), MergeMode::Merged).unwrap();
            let (served, expected) = (backend.served_sha256().unwrap(), cpu.served_sha256().unwrap());
            // A head that was once adapted counts from then on: here the CPU's store is older.
            assert!(
                served == expected || number == 0 && place != PLACES[0],
                "{place:?} {name}"
            );
            assert_eq!(backend.base_sha256().unwrap(), cpu.base_sha256().unwrap());
        }
        let memory = backend
            .set_adapters(&active("mult-r32"), MergeMode::Merged)
            .unwrap()
            .memory;
        assert_eq!(memory.pristine_bytes == 0, place == PristineCopy::File);
        // Another place needs another backend.
        let other = if place == PristineCopy::Device {
            PristineCopy::Pinned
        } else {
            PristineCopy::Device
        };
        assert!(matches!(
            backend.set_pristine_copy(other),
            Err(Error::Option { .. })
        ));
        let report = backend.set_adapters(&[], MergeMode::Merged).unwrap();
        assert!(!report.differs_from_base && report.changed_modules > 0);
        assert!(served(&backend) == base, "{place:?}: the base came back");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn captured_graphs_compute_with_what_a_refresh_wrote() {
    let gpu = Gpu::open();
    let (config, weights) = tiny();
    let mut graphs = backend(&gpu, &config, WeightSource::Given(&weights));
    let mut eager = backend(&gpu, &config, WeightSource::Given(&weights));
    graphs.capture().unwrap();
    let mut table = PageTable::new(options().page_table()).unwrap();
    let rows: Vec<DecodeRow> = (0..3)
        .map(|_| {
            let slot = table.allocate_slot().unwrap();
            let _ = table.reserve(slot, 16).unwrap();
            table.advance(slot, 16).unwrap();
            DecodeRow::greedy(slot.index(), 0)
        })
        .collect();
    graphs.sync_pages(&mut table.clone()).unwrap();
    eager.sync_pages(&mut table).unwrap();
    let mut seen = Vec::new();
    for (position, name) in [
        "",
        "mult-r32",
        "dora-r8",
        "lorabias-r4",
        "qv-r8",
        HEAD,
        "mult-r32+qv-r8",
        "",
    ]
    .into_iter()
    .take(if few_cases() { 2 } else { usize::MAX })
    .enumerate()
    {
        let rows: Vec<DecodeRow> = rows
            .iter()
            .map(|row| DecodeRow::greedy(row.slot, position))
            .collect();
        let active = active(name);
        let mut results = Vec::new();
        for backend in [&mut graphs, &mut eager] {
            backend.set_adapters(&active, MergeMode::Merged).unwrap();
            backend.decode(&rows).unwrap();
            let pending = backend.read_back(0, rows.len()).unwrap();
            let sampled = backend.collect(pending).unwrap();
            results.push(
                sampled
                    .iter()
                    .map(|s| (s.token, s.logprob.to_bits()))
                    .collect::<Vec<_>>(),
            );
        }
        assert_eq!(results[0], results[1], "replay and eager under {name:?}");
        assert!(
            !seen.contains(&results[0]),
            "{name:?} gave what another policy gave"
        );
        seen.push(results.remove(0));
        graphs.verify_decode(&rows).unwrap();
        eager.reset().unwrap();
        graphs.reset().unwrap();
        // `verify_decode` made the step again: the other follows.
        eager.decode(&rows).unwrap();
        eager.reset().unwrap();
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_refresh_that_fails_at_any_step_leaves_the_former_bits() {
    let gpu = Gpu::open();
    let (config, weights) = tiny();
    let pairs = PLACES.into_iter().zip(["dora-r8", "lorabias-r4", "mult-r32"]);
    for (place, next) in pairs.take(if few_cases() { 1 } else { usize::MAX }) {
        let mut backend = backend(&gpu, &config, WeightSource::Given(&weights));
        backend.set_pristine_copy(place).unwrap();
        backend.set_adapters(&active("qv-r8"), MergeMode::Merged).unwrap();
        let (version, before) = (backend.policy(), served(&backend));
        let served_before = backend.served_sha256().unwrap();
        let (fails_at, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let hook = {
            let (fails_at, asked) = (fails_at.clone(), asked.clone());
            move |_| asked.fetch_add(1, Ordering::SeqCst) == fails_at.load(Ordering::SeqCst)
        };
        backend.set_fault_hook(Some(Box::new(hook)));
        let mut failed = 0;
        loop {
            asked.store(0, Ordering::SeqCst);
            fails_at.store(failed, Ordering::SeqCst);
            match backend.set_adapters(&active(next), MergeMode::Merged) {
                Ok(_) => break,
                Err(error) => assert!(error.to_string().contains("injected"), "{error}"),
            }
            assert_eq!(backend.policy(), version);
            assert!(served(&backend) == before, "{place:?}: step {failed}");
            assert_eq!(
                backend.served_sha256().unwrap(),
                served_before,
                "{place:?}: step {failed}"
            );
            failed = if few_cases() { 20 * failed + 9 } else { failed + 1 };
        }
        assert!(failed > 3, "{failed} steps were made to fail");
        backend.set_fault_hook(None);
        if few_cases() {
            continue;
        }
        // Real failures: weights beyond bf16, adapters that do not fit.
        let (version, before) = (backend.policy(), served(&backend));
        let mut huge = active("mult-r32");
        huge[0].weight = f32::MAX;
        // Once is still finite in bf16, so many times.
        let huge = vec![huge[0].clone(); 256];
        assert!(
            backend.set_adapters(&huge, MergeMode::Merged).is_err(),
            "{place:?}"
        );
        assert_eq!(backend.policy(), version, "{place:?}");
        assert!(served(&backend) == before);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_weights_have_no_file_to_read_again() {
    let gpu = Gpu::open();
    let config = config(64, 64, 4, 2);
    let adapter = [ActiveAdapter::new(random_adapter(&config, 4, 1).unwrap())];
    let mut backend = backend(&gpu, &config, WeightSource::Random(7));
    let base = backend.base_sha256().unwrap();
    backend.set_pristine_copy(PristineCopy::File).unwrap();
    assert!(matches!(
        backend.set_adapters(&adapter, MergeMode::Merged),
        Err(Error::Option { .. })
    ));
    backend.set_pristine_copy(PristineCopy::Pinned).unwrap();
    backend.set_adapters(&adapter, MergeMode::Merged).unwrap();
    assert_ne!(backend.served_sha256().unwrap(), base);
    assert_eq!(backend.base_sha256().unwrap(), base);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_base_on_the_device_does_not_drift() {
    let gpu = Gpu::open();
    let (config, weights) = tiny();
    let mut cpu = CpuBackend::new(config.clone(), weights.clone(), &LoadOptions::default()).unwrap();
    for place in PLACES {
        let mut backend = backend(&gpu, &config, WeightSource::Given(&weights));
        backend.set_pristine_copy(place).unwrap();
        let report = verify_no_drift(&mut backend, &active("mult-r32"), &DriftOptions::default()).unwrap();
        assert!(report.passed(), "{report:?}");
        assert_eq!(
            report.base_hash_before,
            lora_merge::hex(&cpu.base_digest().unwrap())
        );
        cpu.refresh(&active("mult-r32")).unwrap();
        assert_eq!(
            report.inference_hash_after_restore,
            lora_merge::hex(&cpu.served_digest().unwrap())
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn refresh_times_at_the_shape_of_qwen3_4b() {
    let gpu = Gpu::open();
    let config = Qwen3Config::published_shape("qwen3-4b").unwrap();
    for place in [PristineCopy::Device, PristineCopy::Pinned] {
        let mut backend = backend(&gpu, &config, WeightSource::Random(0));
        backend.set_pristine_copy(place).unwrap();
        for rank in [32, 128] {
            let adapter = |seed| [ActiveAdapter::new(random_adapter(&config, rank, seed).unwrap())];
            let adapters = [adapter(1), adapter(2)];
            let mut times = Vec::new();
            for i in 0..6 {
                let report = backend.set_adapters(&adapters[i % 2], MergeMode::Merged).unwrap();
                assert_eq!(report.changed_modules, 7 * config.n_layers);
                times.push((report.merge_elapsed, report.elapsed));
            }
            times.remove(0);
            times.sort();
            let (merge, total) = times[2];
            println!(
                "{place:?}, rank {rank}: weights written in {merge:.2?}, {total:.2?} with matching and upload"
            );
        }
    }
}
