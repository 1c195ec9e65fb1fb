//! Matrices in 4 bits on a GPU: every kernel against the CPU or an f64 reference, and the quantised model.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "tests on a GPU print what they measured")]

mod gpu_support;

use cuda_graphs::few_cases;
use gpu_support::{Gpu, active, bf16s, mean_difference, repository, rng, tuned};
use half::bf16;
use lora_merge::ActiveAdapter;
use paged_kv::PageTable;
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, WeightSource};
use qwen3_model::launch::{FourBitBuffer, FourBitKernels, ProductOutput};
use qwen3_model::{
    Backend, CpuBackend, LoadOptions, MergeMode, Model, Projection, QuantType, QuantizedMatrix, Qwen3Config,
    SequenceChunk, StepBatch, Weights, random_adapter,
};
use rand::Rng;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_agree_with_f64_whatever_the_number_of_rows() {
    let gpu = Gpu::open();
    let kernels = FourBitKernels::load(&gpu.compiler, &gpu.device).unwrap();
    // One block, ragged units, one and several tiles per block, resident and not.
    let shapes = [
        (16, 64),
        (48, 320),
        (256, 640),
        (1024, 1088),
        (4224, 256),
        (64, 9728),
        (32, 25_600),
    ];
    for (seed, (rows, cols)) in cuda_graphs::cases((1..).zip(shapes)) {
        let mut rng = rng(seed);
        let quant_type = if seed % 2 == 0 {
            QuantType::Fp4
        } else {
            QuantType::Nf4
        };
        // Two parts with scales of their own.
        let parts: Vec<QuantizedMatrix> = [rows / 16 / 2 * 16, rows - rows / 16 / 2 * 16]
            .into_iter()
            .filter(|&rows| rows > 0)
            .map(|rows| {
                let data = bf16s(&mut rng, rows * cols, 0.02);
                QuantizedMatrix::quantize(rows, cols, &data, quant_type, seed % 3 == 0).unwrap()
            })
            .collect();
        let w = FourBitBuffer::upload(&gpu.stream, &parts.iter().collect::<Vec<_>>()).unwrap();
        let values: Vec<bf16> = parts.iter().flat_map(QuantizedMatrix::dequantize).collect();
        let out = gpu.poisoned::<bf16>(rows * cols);
        kernels
            .dequantize(&gpu.stream, &w, 0..rows, out.as_slice())
            .unwrap();
        assert!(gpu.get(&out) == values, "{rows} x {cols}: dequantised");
        // A piece of it, and nothing beside it.
        let piece = rows / 3..rows - rows / 4;
        let out = gpu.poisoned::<bf16>(rows * cols);
        let to = out.slice(..piece.len() * cols).unwrap();
        kernels.dequantize(&gpu.stream, &w, piece.clone(), to).unwrap();
        let got = gpu.get(&out);
        assert!(got[..piece.len() * cols] == values[piece.start * cols..piece.end * cols]);
        assert!(got[piece.len() * cols..].iter().all(|x| x.to_bits() == u16::MAX));
        let x = bf16s(&mut rng, 64 * cols, 1.0);
        let device_x = gpu.put(&x);
        let mut first: Option<Vec<f32>> = None;
        // The largest of each size class of the kernel, then others of it.
        for m in [64, 33, 63, 32, 17, 31, 16, 9, 8, 1, 3] {
            if m % 8 == 0 {
                first = None;
            }
            let y = gpu.poisoned::<f32>(64 * rows);
            let input = device_x.slice(..m * cols).unwrap();
            let f32s = ProductOutput::F32(y.slice(..m * rows).unwrap());
            kernels.multiply(&gpu.stream, m, input, &w, f32s).unwrap();
            let all = gpu.get(&y);
            let (got, rest) = all.split_at(m * rows);
            assert!(
                rest.iter().all(|x| x.to_bits() == u32::MAX),
                "{m}: wrote past its rows"
            );
            match &first {
                // Within a class rows do not depend on their neighbours.
                Some(first) => assert!(got == &first[..got.len()], "{rows} x {cols}: {m} rows"),
                None => {
                    let sample = (rows * 64 / 3000).max(1);
                    for at in (0..got.len()).step_by(sample) {
                        let (t, n) = (at / rows, at % rows);
                        let terms = values[n * cols..][..cols].iter().zip(&x[t * cols..][..cols]);
                        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), (w, x)| {
                            let term = w.to_f64() * x.to_f64();
                            (sum + term, size + term.abs())
                        });
                        let off = (f64::from(got[at]) - sum).abs();
                        assert!(
                            off <= 1e-6 * size + 1e-30,
                            "{rows} x {cols}: {} for {sum}",
                            got[at]
                        );
                    }
                    first = Some(all.clone());
                }
            }
            let y = gpu.poisoned::<bf16>(m * rows);
            kernels
                .multiply(&gpu.stream, m, input, &w, ProductOutput::Bf16(y.as_slice()))
                .unwrap();
            let rounded: Vec<bf16> = all[..m * rows].iter().copied().map(bf16::from_f32).collect();
            assert!(gpu.get(&y) == rounded, "{rows} x {cols}: {m} rows in bf16");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn quantising_gives_the_bits_of_the_cpu() {
    let gpu = Gpu::open();
    let kernels = FourBitKernels::load(&gpu.compiler, &gpu.device).unwrap();
    for (seed, quant_type) in [(1, QuantType::Nf4), (2, QuantType::Fp4)] {
        let mut rng = rng(seed);
        let (rows, cols) = (48, 64 * rng.random_range(1..20usize));
        let mut data = bf16s(&mut rng, rows * cols, 0.02);
        data[..64].fill(bf16::ZERO);
        data[64] = bf16::from_f32(-3e38);
        let expected = QuantizedMatrix::quantize(rows, cols, &data, quant_type, false).unwrap();
        let w = FourBitBuffer::zeroed(&gpu.device, rows, cols, quant_type).unwrap();
        let half = rows / 2 * cols;
        let device = gpu.put(&data);
        for (part, first) in [(half..2 * half, rows / 2), (0..half, 0)] {
            let part = device.slice(part).unwrap();
            kernels
                .quantize(&gpu.stream, part, &w, first, quant_type)
                .unwrap();
        }
        let out = gpu.poisoned::<bf16>(rows * cols);
        kernels
            .dequantize(&gpu.stream, &w, 0..rows, out.as_slice())
            .unwrap();
        assert!(gpu.get(&out) == expected.dequantize(), "{quant_type:?}");
    }
}

fn nf4() -> (Qwen3Config, Weights) {
    let dir = repository().join("fixtures/tiny-qwen3-math-bnb-nf4");
    let config = Qwen3Config::from_dir(&dir).unwrap();
    let weights = Weights::open(&dir, &config).unwrap();
    (config, weights)
}

fn options() -> CudaOptions {
    tuned(CudaOptions {
        max_tokens: 256,
        max_batch_size: 8,
        max_seq_length: 512,
        n_pages: 65,
        page_size: 16,
        ..CudaOptions::default()
    })
}

/// Logits of all of `ids`, fed in steps of at most `step` tokens.
fn logits<B: Backend>(model: &mut Model<B>, ids: &[u32], step: usize) -> Vec<f32> {
    let mut table = PageTable::new(options().page_table()).unwrap();
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, ids.len()).unwrap();
    let mut all = Vec::new();
    for (i, ids) in ids.chunks(step).enumerate() {
        let chunk = SequenceChunk {
            slot,
            start: i * step,
            len: ids.len(),
            wants_logits: true,
        };
        let batch = StepBatch {
            token_ids: ids,
            chunks: &[chunk],
        };
        all.extend_from_slice(model.forward_all(&batch, &table).unwrap());
        table.advance(slot, ids.len()).unwrap();
    }
    all
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_quantised_model_is_the_cpus_with_and_without_an_adapter() {
    let gpu = Gpu::open();
    let (config, weights) = nf4();
    let load = |weights: &Weights| {
        let source = WeightSource::Given(weights);
        Model::new(CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options()).unwrap())
    };
    let mut four_bit = load(&weights);
    let mut full = load(&weights.dequantized());
    // Scales in f32; the embedding stays in bf16.
    let saved = full.backend().weight_bytes() - four_bit.backend().weight_bytes();
    let matrices: usize = Projection::ALL
        .map(|p| 4 * weights.layers[0].projection(p).cols() * weights.layers[0].projection(p).rows())
        .iter()
        .sum();
    assert_eq!(saved, 2 * matrices as u64 * 23 / 32);
    let mut cpu_options = LoadOptions::default();
    (cpu_options.n_pages, cpu_options.page_size) = (options().n_pages, options().page_size);
    let mut cpu = Model::new(CpuBackend::new(config.clone(), weights.clone(), &cpu_options).unwrap());
    assert_eq!(
        four_bit.backend_mut().base_sha256().unwrap(),
        cpu.backend_mut().base_sha256().unwrap()
    );
    let ids: Vec<u32> = (0..150).map(|i| (i * 37 + i * i) % 571).collect();
    for adapters in [vec![], active("mult-r32"), vec![]] {
        for backend in [four_bit.backend_mut(), full.backend_mut()] {
            backend.set_adapters(&adapters, MergeMode::Unmerged).unwrap();
        }
        cpu.set_adapters(&adapters, MergeMode::Unmerged).unwrap();
        let reference = logits(&mut cpu, &ids, 150);
        for step in if few_cases() {
            vec![150, 50]
        } else {
            vec![150, 16, 5]
        } {
            let theirs = mean_difference(&logits(&mut full, &ids, step), &reference);
            let ours = mean_difference(&logits(&mut four_bit, &ids, step), &reference);
            println!(
                "{} adapters, steps of {step}: off by {ours:.5}, in bf16 {theirs:.5}",
                adapters.len()
            );
            assert!(ours <= 1.5 * theirs + 1e-4 && theirs < 0.05);
        }
    }
    let version = four_bit.backend().policy();
    let error = four_bit
        .backend_mut()
        .set_adapters(&active("mult-r32"), MergeMode::Merged)
        .unwrap_err();
    assert!(error.to_string().contains("4 bits"), "{error}");
    assert_eq!(four_bit.backend().policy(), version);
}

/// Matrices that are dequantised in several pieces, one of them smaller, against the same values in bf16.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn prompts_through_pieces_of_large_matrices_are_those_of_whole_ones() {
    let gpu = Gpu::open();
    let mut config = Qwen3Config::published_shape("qwen3-4b").unwrap();
    let (n_layers, n) = if few_cases() { (1, 24) } else { (2, 230) };
    (config.n_layers, config.vocab_size) = (n_layers, 576);
    let weights = Weights::random(&config, 3)
        .quantized(QuantType::Nf4, false)
        .unwrap();
    let load = |weights: &Weights| {
        let source = WeightSource::Given(weights);
        Model::new(CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options()).unwrap())
    };
    let mut four_bit = load(&weights);
    let mut full = load(&weights.dequantized());
    let ids: Vec<u32> = (0..n as u32).map(|i| (i * 37 + i * i) % 571).collect();
    // The products of many rows have the same values; those of 16 are rounded elsewhere.
    let size = |logits: &[f32]| mean_difference(logits, &vec![0.0; logits.len()]);
    let theirs = logits(&mut full, &ids, n);
    let ours = logits(&mut four_bit, &ids, n);
    let off = mean_difference(&ours, &theirs) / size(&theirs);
    let few = mean_difference(&logits(&mut four_bit, &ids, 16), &theirs) / size(&theirs);
    println!("off by {off:.2e} of the logits' size, in steps of 16 by {few:.2e}");
    assert!(off < 1e-2 && few < 2e-2, "{off} and {few}");
    assert_eq!(logits(&mut four_bit, &ids, n), ours);
    let mut cpu = CpuBackend::new(config.clone(), weights, &LoadOptions::default()).unwrap();
    assert_eq!(
        four_bit.backend_mut().base_sha256().unwrap(),
        cpu.base_sha256().unwrap()
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_weights_are_quantised_as_on_the_cpu() {
    let gpu = Gpu::open();
    let (config, _) = nf4();
    for quant_type in [QuantType::Nf4, QuantType::Fp4] {
        let source = WeightSource::RandomQuantized(5, quant_type);
        let mut backend =
            CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options()).unwrap();
        let weights = Weights::random(&config, 5).quantized(quant_type, false).unwrap();
        let mut cpu = CpuBackend::new(config.clone(), weights, &LoadOptions::default()).unwrap();
        assert_eq!(backend.base_sha256().unwrap(), cpu.base_sha256().unwrap());
    }
}

/// Milliseconds of a decode step, the fastest of a few, with contexts of a few hundred tokens.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn decode_steps_at_the_shape_of_qwen3_4b() {
    let gpu = Gpu::open();
    let config = Qwen3Config::published_shape("qwen3-4b").unwrap();
    let options = CudaOptions {
        max_tokens: 512,
        max_batch_size: 64,
        max_seq_length: 512,
        n_pages: 64 * 8 + 1,
        page_size: 64,
        ..CudaOptions::default()
    };
    let adapter = [ActiveAdapter::new(random_adapter(&config, 32, 1).unwrap())];
    for (what, source, adapters) in [
        ("bf16", WeightSource::Random(0), &[][..]),
        ("nf4", WeightSource::RandomQuantized(0, QuantType::Nf4), &[][..]),
        (
            "nf4, adapter of rank 32 at run time",
            WeightSource::RandomQuantized(0, QuantType::Nf4),
            &adapter[..],
        ),
    ] {
        let mut backend =
            CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options).unwrap();
        backend.set_adapters(adapters, MergeMode::Unmerged).unwrap();
        backend.capture().unwrap();
        let mut table = PageTable::new(options.page_table()).unwrap();
        let slots: Vec<usize> = (0..64)
            .map(|_| {
                let slot = table.allocate_slot().unwrap();
                let _ = table.reserve(slot, 512).unwrap();
                table.advance(slot, 512).unwrap();
                slot.index()
            })
            .collect();
        backend.sync_pages(&mut table).unwrap();
        print!("{what}, {:.2} GB:", backend.weight_bytes() as f64 / 1e9);
        assert!(what == "bf16" || backend.weight_bytes() < 3_500_000_000);
        for batch in [1, 8, 16, 32, 64] {
            let mut best = f64::INFINITY;
            let mut position = 400;
            for _ in 0..4 {
                let begin = std::time::Instant::now();
                for _ in 0..10 {
                    let rows: Vec<DecodeRow> = slots[..batch]
                        .iter()
                        .map(|&slot| DecodeRow::greedy(slot, position))
                        .collect();
                    backend.decode(&rows).unwrap();
                    position += 1;
                }
                backend.stream().synchronize().unwrap();
                best = best.min(begin.elapsed().as_secs_f64() * 100.0);
            }
            backend.reset().unwrap();
            print!("  {batch} rows {best:.3} ms");
            assert!(best.is_finite() && best > 0.0);
        }
        println!();
    }
}
