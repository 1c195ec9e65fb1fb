//! Adapters beside their weights on a GPU: the kernels against f64, models against the CPU, several policies in one batch.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "tests on a GPU print what they measured")]

mod gpu_support;

use cuda_graphs::{cases, few_cases};
use gpu_support::{Gpu, active, bf16s, mean_difference, normals, rng, tiny, tuned};
use half::bf16;
use lora_merge::ActiveAdapter;
use paged_kv::PageTable;
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, WeightSource};
use qwen3_model::launch::{PartUpdate, ProductOutput, RowPolicies, Site, UnmergedKernels, UnmergedTables};
use qwen3_model::{Backend, CpuBackend, LoadOptions, MergeMode, Model, SequenceChunk, StepBatch};
use rand::Rng;

/// `gain ⊙ y + B·A·x + bias` in f64, and the magnitudes that bound its rounding.
fn exact(part: &PartUpdate, x: &[bf16], y: f64, row: usize) -> (f64, f64) {
    let gain = part.gain.get(row).map_or(1.0, |g| f64::from(*g));
    let bias = part.bias.get(row).map_or(0.0, |b| f64::from(*b));
    let (mut sum, mut size) = (gain * y + bias, (gain * y).abs() + bias.abs());
    for r in 0..part.rank {
        let b = part.b[row * part.rank + r].to_f64();
        let a = &part.a[r * x.len()..][..x.len()];
        let terms = a.iter().zip(x).map(|(a, x)| a.to_f64() * x.to_f64());
        let (inner, inner_size) = terms.fold((0.0, 0.0), |(s, m), t: f64| (s + t, m + t.abs()));
        sum += b * inner;
        size += (b * inner).abs() + 1e-2 * (b * inner_size).abs();
    }
    (sum, size)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn updates_agree_with_f64_for_any_mix_of_policies() {
    let gpu = Gpu::open();
    let kernels = UnmergedKernels::load(&gpu.compiler, &gpu.device).unwrap();
    for seed in cases(1..8) {
        let mut rng = rng(seed);
        let k = 8 * rng.random_range(1..80usize);
        let n_parts = rng.random_range(1..4usize);
        let parts: Vec<usize> = (0..n_parts).map(|_| 16 * rng.random_range(1..12usize)).collect();
        // A site of another shape before it, so that places matter.
        let sites = vec![
            Site {
                k: 8,
                parts: vec![16],
            },
            Site {
                k,
                parts: parts.clone(),
            },
        ];
        let n_policies = rng.random_range(1..5usize);
        let max_rank = 96;
        let mut tables = UnmergedTables::new(&gpu.device, sites, 5, max_rank).unwrap();
        let mut policies = Vec::new();
        for _ in 0..n_policies {
            let mut site = Vec::new();
            for &rows in &parts {
                let rank = 32 * rng.random_range(0..4usize);
                let mut vector = |on: bool| if on { normals(&mut rng, rows, 1.0) } else { vec![] };
                let (gain, bias) = (vector(seed % 2 == 0), vector(seed % 3 == 0));
                site.push(PartUpdate {
                    rank,
                    a: bf16s(&mut rng, rank * k, 0.1),
                    b: bf16s(&mut rng, rows * rank, 0.1),
                    gain,
                    bias,
                });
            }
            policies.push(vec![vec![PartUpdate::default()], site]);
        }
        tables.replace(&gpu.stream, &policies).unwrap();
        let n: usize = parts.iter().sum();
        let n_slots = 20;
        // -1 is the base; 4 is a policy that there is room for, but that was not given.
        let of_slot: Vec<i32> = (0..n_slots)
            .map(|_| rng.random_range(-1..n_policies as i32))
            .collect();
        let device_of_slot = gpu.put(&of_slot);
        for m in [1usize, 7, 33, 100] {
            let slots: Vec<i32> = (0..m).map(|_| rng.random_range(-1..n_slots + 1)).collect();
            let device_slots = gpu.put(&slots);
            let x = bf16s(&mut rng, m * k, 1.0);
            let base = bf16s(&mut rng, m * n, 1.0);
            let device_x = gpu.put(&x);
            let h = gpu.poisoned::<f32>(m * n_parts * max_rank);
            let rows = RowPolicies {
                slots: device_slots.as_slice(),
                policy_of_slot: device_of_slot.as_slice(),
            };
            let floats: Vec<f32> = base.iter().map(|y| y.to_f32()).collect();
            let y = gpu.put(&floats);
            let y16 = gpu.put(&base);
            for output in [
                ProductOutput::F32(y.as_slice()),
                ProductOutput::Bf16(y16.as_slice()),
            ] {
                kernels
                    .apply(
                        &gpu.stream,
                        &tables,
                        1,
                        rows,
                        device_x.as_slice(),
                        h.as_slice(),
                        output,
                    )
                    .unwrap();
            }
            let (got, got16) = (gpu.get(&y), gpu.get(&y16));
            for row in 0..m {
                let policy = usize::try_from(slots[row])
                    .ok()
                    .and_then(|slot| of_slot.get(slot));
                let policy = policy.and_then(|&policy| usize::try_from(policy).ok());
                let mut column = 0;
                for (i, &rows) in parts.iter().enumerate() {
                    for r in 0..rows {
                        let at = row * n + column;
                        column += 1;
                        let y = base[at].to_f64();
                        let Some(policy) = policy else {
                            assert_eq!((got[at], got16[at]), (base[at].to_f32(), base[at]), "no policy");
                            continue;
                        };
                        let (sum, size) = exact(&policies[policy][1][i], &x[row * k..][..k], y, r);
                        let off = (f64::from(got[at]) - sum).abs();
                        // What is left of h keeps 16 bits.
                        assert!(
                            off <= 3e-5 * size + 1e-12,
                            "{m} rows, {row} {at}: {} for {sum}",
                            got[at]
                        );
                        assert_eq!(got16[at], bf16::from_f32(got[at]));
                    }
                }
            }
        }
        // Too many policies, too large a rank, a wrong length: refused, and nothing changes.
        let large = PartUpdate {
            rank: 128,
            ..PartUpdate::default()
        };
        let wrong = PartUpdate {
            bias: vec![1.0],
            ..PartUpdate::default()
        };
        for bad in [
            vec![policies[0].clone(); 6],
            vec![vec![vec![large], policies[0][1].clone()]],
            vec![vec![vec![wrong], policies[0][1].clone()]],
        ] {
            assert!(tables.replace(&gpu.stream, &bad).is_err());
        }
    }
}

const NAMES: [&str; 8] = [
    "mult-r32",
    "qv-r8",
    "rslora-r8",
    "dora-r8",
    "pattern",
    "lorabias-r4",
    "layers13-r4",
    "mult-r32+qv-r8",
];

fn options() -> CudaOptions {
    tuned(CudaOptions {
        max_tokens: 256,
        max_batch_size: 16,
        max_seq_length: 256,
        n_pages: 257,
        page_size: 16,
        ..CudaOptions::default()
    })
}

fn backend(gpu: &Gpu) -> CudaBackend {
    let (config, weights) = tiny();
    let source = WeightSource::Given(&weights);
    CudaBackend::new(&gpu.device, &gpu.compiler, config, source, options()).unwrap()
}

fn logits<B: Backend>(model: &mut Model<B>, ids: &[u32]) -> Vec<f32> {
    let mut table = PageTable::new(options().page_table()).unwrap();
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, ids.len()).unwrap();
    let chunk = SequenceChunk {
        slot,
        start: 0,
        len: ids.len(),
        wants_logits: true,
    };
    let batch = StepBatch {
        token_ids: ids,
        chunks: &[chunk],
    };
    model.forward_all(&batch, &table).unwrap().to_vec()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn models_with_any_adapter_are_the_cpus() {
    let gpu = Gpu::open();
    let (config, weights) = tiny();
    let mut cpu_options = LoadOptions::default();
    (cpu_options.n_pages, cpu_options.page_size) = (options().n_pages, options().page_size);
    let mut cpu = Model::new(CpuBackend::new(config, weights, &cpu_options).unwrap());
    let mut model = Model::new(backend(&gpu));
    let ids: Vec<u32> = (0..120).map(|i| (i * 37 + i * i) % 571).collect();
    let base = logits(&mut model, &ids);
    let plain = mean_difference(&base, &logits(&mut cpu, &ids));
    for name in cases(NAMES) {
        let report = model.set_adapters(&active(name), MergeMode::Unmerged).unwrap();
        let expected = cpu.set_adapters(&active(name), MergeMode::Unmerged).unwrap();
        assert_eq!(report.version, expected.version, "{name}");
        assert_eq!(report.adapted_modules, expected.adapted_modules);
        assert!(report.differs_from_base);
        let ours = logits(&mut model, &ids);
        let theirs = logits(&mut cpu, &ids);
        let off = mean_difference(&ours, &theirs);
        let effect = mean_difference(&theirs, &base);
        println!("{name}: off by {off:.5}, the base by {plain:.5}; the adapter moves logits by {effect:.4}");
        assert!(off <= 3.0 * plain + 1e-3 && off < 0.2 * effect, "{name}");
    }
    model.set_adapters(&[], MergeMode::Unmerged).unwrap();
    assert!(logits(&mut model, &ids) == base, "the base comes back");
    // From merged to beside and back.
    model
        .set_adapters(&active("mult-r32"), MergeMode::Merged)
        .unwrap();
    model.set_adapters(&active("qv-r8"), MergeMode::Unmerged).unwrap();
    model.set_adapters(&active("qv-r8"), MergeMode::Merged).unwrap();
    model.set_adapters(&[], MergeMode::Merged).unwrap();
    assert!(logits(&mut model, &ids) == base, "the base comes back again");
}

/// The next tokens of eight sequences that hold nothing but what they decode.
fn decode(backend: &mut CudaBackend, steps: usize) -> Vec<Vec<(u32, u32)>> {
    let mut table = PageTable::new(options().page_table()).unwrap();
    let rows: Vec<usize> = (0..8)
        .map(|_| {
            let slot = table.allocate_slot().unwrap();
            let _ = table.reserve(slot, 64).unwrap();
            table.advance(slot, 64).unwrap();
            slot.index()
        })
        .collect();
    // A prompt per slot decides what is decoded.
    let slots: Vec<_> = rows.clone();
    backend.sync_pages(&mut table).unwrap();
    let mut out = vec![Vec::new(); 8];
    for position in 0..steps {
        let rows: Vec<DecodeRow> = slots
            .iter()
            .map(|&slot| DecodeRow::greedy(slot, position))
            .collect();
        backend.decode(&rows).unwrap();
        let pending = backend.read_back(0, rows.len()).unwrap();
        for (out, s) in out.iter_mut().zip(backend.collect(pending).unwrap()) {
            out.push((s.token, s.logprob.to_bits()));
        }
    }
    backend.reset().unwrap();
    out
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn several_policies_in_one_batch_are_each_what_it_is_alone() {
    let gpu = Gpu::open();
    let policies = ["mult-r32", "qv-r8", "dora-r8", "lorabias-r4"].map(active);
    let all: Vec<&[ActiveAdapter]> = policies.iter().map(Vec::as_slice).collect();
    // Graphs of several policies are those of `captured_graphs_follow_new_adapters`, too.
    let (captures, steps) = match few_cases() {
        true => (vec![false], 2),
        false => (vec![false, true], 6),
    };
    for capture in captures {
        let fresh = || {
            let mut backend = backend(&gpu);
            if capture {
                backend.capture().unwrap();
            }
            backend
        };
        // Each policy for all eight sequences, and the base.
        let mut alone = Vec::new();
        for policy in &policies {
            let mut backend = fresh();
            backend.serve_policies(&[policy]).unwrap();
            alone.push(decode(&mut backend, steps));
        }
        // Through the same products: without any policy small steps have a kernel of their own.
        let mut backend = fresh();
        backend.serve_policies(&all).unwrap();
        for slot in 1..9 {
            backend.set_slot_policy(slot, None).unwrap();
        }
        let base = decode(&mut backend, steps);
        let mut backend = fresh();
        backend.serve_policies(&all).unwrap();
        // Slots of a new table count from 1.
        let of_row = [Some(0), Some(1), None, Some(2), Some(3), Some(1), None, Some(0)];
        for (row, policy) in of_row.iter().enumerate() {
            backend.set_slot_policy(row + 1, *policy).unwrap();
        }
        let mixed = decode(&mut backend, steps);
        for (row, policy) in of_row.iter().enumerate() {
            let expected = policy.map_or(&base[row], |policy| &alone[policy][row]);
            assert_eq!(
                &mixed[row], expected,
                "captured {capture}, row {row} under {policy:?}"
            );
        }
        assert!(mixed[0] != mixed[1] && mixed[1] != mixed[2] && mixed[3] != mixed[4]);
        // The sets change places under the same graphs.
        let turned: Vec<&[ActiveAdapter]> = [1, 0, 3, 2].map(|i| policies[i].as_slice()).to_vec();
        let mut backend_again = backend;
        backend_again.serve_policies(&turned).unwrap();
        for (row, policy) in of_row.iter().enumerate() {
            let policy = policy.map(|policy| [1, 0, 3, 2][policy]);
            backend_again.set_slot_policy(row + 1, policy).unwrap();
        }
        // The tokens sampled last are those of before: start as a new backend does.
        let rows: Vec<DecodeRow> = (1..9).map(|slot| DecodeRow::greedy(slot, steps)).collect();
        if capture {
            backend_again.verify_decode(&rows).unwrap();
        }
        for (slot, policy) in [(1, Some(4)), (99, Some(0)), (99, None)] {
            assert!(backend_again.set_slot_policy(slot, policy).is_err());
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn captured_graphs_follow_new_adapters() {
    let gpu = Gpu::open();
    let mut graphs = backend(&gpu);
    let mut eager = backend(&gpu);
    graphs.capture().unwrap();
    let mut seen: Vec<Vec<Vec<(u32, u32)>>> = Vec::new();
    for name in cases([
        "mult-r32",
        "qv-r8",
        "dora-r8",
        "lorabias-r4",
        "mult-r32+qv-r8",
        "pattern",
        "",
    ]) {
        for backend in [&mut graphs, &mut eager] {
            backend.set_adapters(&active(name), MergeMode::Unmerged).unwrap();
        }
        let (replayed, plain) = (decode(&mut graphs, 3), decode(&mut eager, 3));
        assert_eq!(replayed, plain, "{name}");
        assert!(!seen.contains(&replayed), "{name}");
        seen.push(replayed);
    }
    // What does not fit leaves the former policy in force.
    graphs
        .set_adapters(&active("qv-r8"), MergeMode::Unmerged)
        .unwrap();
    let version = graphs.policy();
    let mut broken = active("mult-r32");
    broken[0].weight = f32::NAN;
    assert!(graphs.set_adapters(&broken, MergeMode::Unmerged).is_err());
    assert_eq!(graphs.policy(), version);
}
