//! The persistent kernel for the layers of decode steps with weights in 4 bits, against an f64 reference.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::{DeviceBuffer, cases, few_cases};
use gpu_support::{Gpu, assert_twice, bf16s, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{
    FourBitBuffer, FourBitLayer, FourBitLayerOp, FourBitStage, MAX_STAGES, PartUpdate, RowPolicies, Site,
    StageOutput, UnmergedKernels, UnmergedTables,
};
use qwen3_model::{QuantType, QuantizedMatrix};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

const EPS: f32 = 1e-6;

/// A matrix with the values that its 4 bits stand for, and these rounded to bf16.
struct Weight {
    quantized: QuantizedMatrix,
    exact: Vec<f64>,
    rounded: Vec<f64>,
}

impl Weight {
    fn random(rng: &mut ChaCha8Rng, rows: usize, cols: usize, quant_type: QuantType) -> Self {
        let data = bf16s(rng, rows * cols, 1.0 / (cols as f32).sqrt());
        let quantized = QuantizedMatrix::quantize(rows, cols, &data, quant_type, false).unwrap();
        let nibbles = quantized.packed().iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let exact = nibbles.enumerate().map(|(i, nibble)| {
            f64::from(quantized.map()[usize::from(nibble)]) * f64::from(quantized.absmax()[i / 64])
        });
        let exact: Vec<f64> = exact.collect();
        let rounded: Vec<f64> = quantized.dequantize().iter().map(|w| w.to_f64()).collect();
        Self {
            quantized,
            exact,
            rounded,
        }
    }
}

struct Layer {
    hidden: usize,
    q: usize,
    inter: usize,
    last: usize,
    /// O, gate+up, down and the last product.
    weights: [Weight; 4],
    norms: [Vec<f32>; 2],
}

impl Layer {
    fn random([hidden, q, inter, last]: [usize; 4], quant_type: QuantType, seed: u64) -> Self {
        let mut rng = rng(seed);
        let shapes = [[hidden, q], [2 * inter, hidden], [hidden, inter], [last, hidden]];
        let weights = shapes.map(|[n, k]| Weight::random(&mut rng, n, k, quant_type));
        let norms = [(); 2].map(|()| {
            let ones = normals(&mut rng, hidden, 0.2);
            ones.iter().map(|x| bf16::from_f32(1.0 + x).to_f32()).collect()
        });
        Self {
            hidden,
            q,
            inter,
            last,
            weights,
            norms,
        }
    }

    /// Residual, gated and the last product of one row: in f64, or as a plain bf16 formula with rounded weights.
    fn reference(&self, mixed: &[bf16], residual: &[f32], plain: bool) -> [Vec<f64>; 3] {
        let rounding = |x: f64| if plain { round(x) } else { x };
        let product = |i: usize, x: &[f64]| -> Vec<f64> {
            let weight = &self.weights[i];
            let values = if plain { &weight.rounded } else { &weight.exact };
            let dot = |row: &[f64]| rounding(row.iter().zip(x).map(|(w, x)| w * x).sum());
            values.chunks_exact(x.len()).map(dot).collect()
        };
        let norm = |x: &[f64], weight: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            let scaled = x.iter().map(|x| rounding(x * scale));
            scaled
                .zip(weight)
                .map(|(x, w)| rounding(x * f64::from(*w)))
                .collect()
        };
        let mixed: Vec<f64> = mixed.iter().map(|x| x.to_f64()).collect();
        let mut h: Vec<f64> = residual.iter().map(|&x| f64::from(x)).collect();
        for (h, o) in h.iter_mut().zip(product(0, &mixed)) {
            *h = rounding(*h + o);
        }
        let gate_up = product(1, &norm(&h, &self.norms[0]));
        let (gate, up) = gate_up.split_at(self.inter);
        let silu = |g: f64| rounding(g / (1.0 + (-g).exp()));
        let gated: Vec<f64> = gate.iter().zip(up).map(|(&g, u)| rounding(silu(g) * u)).collect();
        for (h, d) in h.iter_mut().zip(product(2, &gated)) {
            *h = rounding(*h + d);
        }
        let last = product(3, &norm(&h, &self.norms[1]));
        [h, gated, last]
    }
}

struct Outputs {
    residual: Vec<f32>,
    gated: Vec<bf16>,
    last: Vec<f32>,
}

struct Device<'a> {
    gpu: &'a Gpu,
    kernel: FourBitLayer,
    layer: &'a Layer,
    weights: [FourBitBuffer; 4],
    norms: [DeviceBuffer<f32>; 2],
    counters: DeviceBuffer<u32>,
    launches: std::cell::Cell<usize>,
}

impl<'a> Device<'a> {
    fn new(gpu: &'a Gpu, layer: &'a Layer) -> Self {
        let kernel = FourBitLayer::load(&gpu.compiler, &gpu.device).unwrap();
        let [o, gate_up, down, last] = &layer.weights;
        let upload = |w: &Weight| FourBitBuffer::upload(&gpu.stream, &[&w.quantized]).unwrap();
        Self {
            kernel: kernel.expect("a device of compute capability 9.0 or 10.0"),
            weights: [upload(o), upload(gate_up), upload(down), upload(last)],
            norms: [gpu.put(&layer.norms[0]), gpu.put(&layer.norms[1])],
            counters: gpu.put(&[0u32; 2 * MAX_STAGES]),
            launches: 0.into(),
            gpu,
            layer,
        }
    }

    fn run(&self, mixed: &[bf16], residual: &[f32], f32_out: bool) -> Outputs {
        let Layer {
            hidden,
            q,
            inter,
            last,
            ..
        } = *self.layer;
        let (gpu, rows) = (self.gpu, mixed.len() / q);
        let (mixed, residual) = (gpu.put(mixed), gpu.put(residual));
        let normed = [(); 2].map(|()| gpu.poisoned::<bf16>(rows * hidden));
        let squares = [(); 2].map(|()| gpu.poisoned::<f32>(rows * self.kernel.blocks()));
        let gated = gpu.poisoned::<bf16>(rows * inter);
        let (out_f32, out_bf16) = (
            gpu.poisoned::<f32>(rows * last),
            gpu.poisoned::<bf16>(rows * last),
        );
        let to_residual = |i: usize| StageOutput::Residual {
            residual: residual.as_slice(),
            norm: self.norms[i].as_slice(),
            normed: normed[i].as_slice(),
            squares: squares[i].as_slice(),
        };
        let stage = |i: usize, input, squares, output| FourBitStage {
            weight: &self.weights[i],
            input,
            squares,
            output,
        };
        let stages = [
            stage(0, mixed.as_slice(), None, to_residual(0)),
            stage(
                1,
                normed[0].as_slice(),
                Some(squares[0].as_slice()),
                StageOutput::Gated(gated.as_slice()),
            ),
            stage(2, gated.as_slice(), None, to_residual(1)),
            stage(
                3,
                normed[1].as_slice(),
                Some(squares[1].as_slice()),
                match f32_out {
                    true => StageOutput::F32(out_f32.as_slice()),
                    false => StageOutput::Bf16(out_bf16.as_slice()),
                },
            ),
        ];
        let parity = self.launches.replace(self.launches.get() + 1) % 2;
        let set = |i: usize| self.counters.slice(i * MAX_STAGES..(i + 1) * MAX_STAGES).unwrap();
        let op = FourBitLayerOp {
            rows,
            stages: &stages,
            low_rank: None,
            counters: set(parity),
            clear: set(1 - parity),
            eps: EPS,
        };
        self.kernel.run(&gpu.stream, &op).unwrap();
        Outputs {
            residual: gpu.get(&residual),
            gated: gpu.get(&gated),
            last: match f32_out {
                true => gpu.get(&out_f32),
                false => gpu.get(&out_bf16).iter().map(|x| x.to_f32()).collect(),
            },
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn layers_agree_with_the_reference_at_every_batch_and_shape() {
    let gpu = Gpu::open();
    let shapes = [
        // Half a box of columns, fewer rows than blocks.
        [64, 64, 64, 128],
        [256, 512, 768, 1024],
        // Odd numbers of blocks of 64.
        [320, 192, 832, 2560],
        [1024, 2048, 3072, 4096],
        // Several passes over the last product.
        [128, 256, 192, 65_536],
    ];
    for (seed, shape) in (0..).zip(shapes) {
        let quant_type = [QuantType::Nf4, QuantType::Fp4][seed as usize % 2];
        let layer = Layer::random(shape, quant_type, seed);
        let device = Device::new(&gpu, &layer);
        let mut rng = rng(100 + seed);
        let all = if shape[0] > 1000 || shape[3] > 10_000 {
            vec![5, 16, 17, 64]
        } else {
            vec![1, 8, 9, 16, 17, 31, 32, 33, 63, 64]
        };
        for rows in all {
            let f32_out = rng.random_bool(0.5);
            let mixed = bf16s(&mut rng, rows * layer.q, 1.0);
            let residual = normals(&mut rng, rows * layer.hidden, 1.0);
            let got = device.run(&mixed, &residual, f32_out);
            let [exact, plain] = [false, true].map(|plain| {
                let mut all = [vec![], vec![], vec![]];
                for (mixed, residual) in mixed.chunks(layer.q).zip(residual.chunks(layer.hidden)) {
                    for (all, part) in all.iter_mut().zip(layer.reference(mixed, residual, plain)) {
                        all.extend(part);
                    }
                }
                all
            });
            let bf16s = |x: &[f32]| -> Vec<bf16> { x.iter().map(|&x| bf16::from_f32(x)).collect() };
            let what = |part: &str| format!("{shape:?}, {rows} rows, {part}");
            assert_twice(&what("residual"), &bf16s(&got.residual), &plain[0], &exact[0]);
            assert_twice(&what("gated"), &got.gated, &plain[1], &exact[1]);
            assert_twice(&what("last"), &bf16s(&got.last), &plain[2], &exact[2]);
        }
    }
}

/// Rows of a batch of up to 8, 16, 32 or 64: within each, a row's bits do not depend on the others.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_gives_the_same_bits_in_every_batch_of_its_class_and_at_every_run() {
    let gpu = Gpu::open();
    let layer = Layer::random([1024, 2048, 3072, 4800], QuantType::Nf4, 7);
    let device = Device::new(&gpu, &layer);
    let mut rng = rng(8);
    let (q, hidden, last) = (layer.q, layer.hidden, layer.last);
    let mixed = bf16s(&mut rng, 64 * q, 1.0);
    let residual = normals(&mut rng, 64 * hidden, 1.0);
    for (least, most) in [(1, 8), (9, 16), (17, 32), (33, 64)] {
        let part = |first: usize, rows: usize| {
            let mixed = &mixed[first * q..(first + rows) * q];
            device.run(mixed, &residual[first * hidden..(first + rows) * hidden], true)
        };
        let whole = part(0, most);
        for round in 0..if few_cases() { 2 } else { 20 } {
            let rows = rng.random_range(least..=most);
            let first = rng.random_range(0..=most - rows);
            let part = part(first, rows);
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(
                same(&part.last, &whole.last[first * last..(first + rows) * last])
                    && same(
                        &part.residual,
                        &whole.residual[first * hidden..(first + rows) * hidden]
                    ),
                "round {round}: {rows} rows from {first} of {most}"
            );
        }
    }
}

/// The second product of adapters as part of the base product: the same as a launch of its own, but for rounding.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn adapters_are_added_within_the_product() {
    let gpu = Gpu::open();
    let kernel = FourBitLayer::load(&gpu.compiler, &gpu.device).unwrap().unwrap();
    let kernels = UnmergedKernels::load(&gpu.compiler, &gpu.device).unwrap();
    let counters = gpu.put(&[0u32; MAX_STAGES]);
    for seed in cases(0..6) {
        let mut rng = rng(seed);
        let k = 64 * rng.random_range(1..20usize);
        let parts: Vec<usize> = (0..1 + seed as usize % 3)
            .map(|_| 16 * rng.random_range(1..90usize))
            .collect();
        let n: usize = parts.iter().sum();
        let weight = Weight::random(&mut rng, n, k, QuantType::Nf4);
        let w = FourBitBuffer::upload(&gpu.stream, &[&weight.quantized]).unwrap();
        let max_rank = 96;
        let site = Site {
            k,
            parts: parts.clone(),
        };
        let mut tables = UnmergedTables::new(&gpu.device, vec![site], 4, max_rank).unwrap();
        let policies: Vec<_> = (0..3)
            .map(|_| {
                let part = |&rows: &usize| {
                    let rank = 32 * rng.random_range(0..4usize);
                    PartUpdate {
                        rank,
                        a: bf16s(&mut rng, rank * k, 0.1),
                        b: bf16s(&mut rng, rows * rank, 0.1),
                        ..PartUpdate::default()
                    }
                };
                vec![parts.iter().map(part).collect::<Vec<_>>()]
            })
            .collect();
        tables.replace(&gpu.stream, &policies).unwrap();
        let of_slot = gpu.put(&[-1, 0, 1, 2, 3]);
        for m in [1usize, 8, 13, 32, 50, 64] {
            let slots: Vec<i32> = (0..m).map(|_| rng.random_range(0..5)).collect();
            let slots = gpu.put(&slots);
            let x = gpu.put(&bf16s(&mut rng, m * k, 1.0));
            let h = gpu.poisoned::<f32>(m * parts.len() * max_rank);
            let rows = RowPolicies {
                slots: slots.as_slice(),
                policy_of_slot: of_slot.as_slice(),
            };
            let [alone, fused] = [false, true].map(|fused| {
                let y = gpu.poisoned::<f32>(m * n);
                let term = kernels
                    .down(&gpu.stream, &tables, 0, rows, x.as_slice(), h.as_slice())
                    .unwrap();
                let stage = FourBitStage {
                    weight: &w,
                    input: x.as_slice(),
                    squares: None,
                    output: StageOutput::F32(y.as_slice()),
                };
                let op = FourBitLayerOp {
                    rows: m,
                    stages: &[stage],
                    low_rank: fused.then_some(&term),
                    counters: counters.as_slice(),
                    clear: counters.as_slice(),
                    eps: 0.0,
                };
                kernel.run(&gpu.stream, &op).unwrap();
                if !fused {
                    let y = qwen3_model::launch::ProductOutput::F32(y.as_slice());
                    kernels.up(&gpu.stream, &term, y).unwrap();
                }
                gpu.get(&y)
            });
            let size = alone.iter().fold(0f32, |size, y| size.max(y.abs()));
            for (i, (a, b)) in alone.iter().zip(&fused).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-4 * size,
                    "{n} x {k}, {m} rows: row {}, column {}: {b} for {a}",
                    i / n,
                    i % n
                );
            }
        }
    }
}
