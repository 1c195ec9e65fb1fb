//! The persistent kernel for the layers of small decode steps, against an f64 reference.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::DeviceBuffer;
use gpu_support::{Gpu, assert_twice, bf16s, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{DecodeLayer, DecodeLayerOp, LayerStage, MAX_STAGES, StageOutput};
use rand::Rng;

const EPS: f32 = 1e-6;

struct Shape {
    hidden: usize,
    q: usize,
    inter: usize,
    /// Rows of the last product.
    last: usize,
}

struct Layer {
    shape: Shape,
    o: Vec<bf16>,
    gate_up: Vec<bf16>,
    down: Vec<bf16>,
    last: Vec<bf16>,
    norms: [Vec<f32>; 2],
}

impl Layer {
    fn random(shape: Shape, seed: u64) -> Self {
        let mut rng = rng(seed);
        let mut matrix = |n: usize, k: usize| bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
        let o = matrix(shape.hidden, shape.q);
        let gate_up = matrix(2 * shape.inter, shape.hidden);
        let down = matrix(shape.hidden, shape.inter);
        let last = matrix(shape.last, shape.hidden);
        let mut norm = || -> Vec<f32> {
            let ones = normals(&mut rng, shape.hidden, 0.2);
            ones.iter().map(|x| bf16::from_f32(1.0 + x).to_f32()).collect()
        };
        let norms = [norm(), norm()];
        Self {
            shape,
            o,
            gate_up,
            down,
            last,
            norms,
        }
    }

    /// Residual, gated and the last product of one row; `rounding` is applied to what a plain bf16 formula rounds.
    fn reference(&self, mixed: &[bf16], residual: &[f32], rounding: fn(f64) -> f64) -> [Vec<f64>; 3] {
        let product = |w: &[bf16], x: &[f64]| -> Vec<f64> {
            w.chunks_exact(x.len())
                .map(|row| rounding(row.iter().zip(x).map(|(w, x)| w.to_f64() * x).sum()))
                .collect()
        };
        let norm = |x: &[f64], weight: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            x.iter()
                .zip(weight)
                .map(|(x, w)| rounding(rounding(x * scale) * f64::from(*w)))
                .collect()
        };
        let mixed: Vec<f64> = mixed.iter().map(|x| x.to_f64()).collect();
        let mut h: Vec<f64> = residual.iter().map(|&x| f64::from(x)).collect();
        for (h, o) in h.iter_mut().zip(product(&self.o, &mixed)) {
            *h = rounding(*h + o);
        }
        let gate_up = product(&self.gate_up, &norm(&h, &self.norms[0]));
        let (gate, up) = gate_up.split_at(self.shape.inter);
        let gated: Vec<f64> = gate
            .iter()
            .zip(up)
            .map(|(g, u)| rounding(rounding(g / (1.0 + (-g).exp())) * u))
            .collect();
        for (h, d) in h.iter_mut().zip(product(&self.down, &gated)) {
            *h = rounding(*h + d);
        }
        let last = product(&self.last, &norm(&h, &self.norms[1]));
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
    kernel: DecodeLayer,
    layer: &'a Layer,
    weights: [DeviceBuffer<bf16>; 4],
    norms: [DeviceBuffer<f32>; 2],
    counters: DeviceBuffer<u32>,
    launches: std::cell::Cell<usize>,
}

impl<'a> Device<'a> {
    fn new(gpu: &'a Gpu, layer: &'a Layer) -> Self {
        let kernel = DecodeLayer::load(&gpu.compiler, &gpu.device).unwrap();
        Self {
            kernel: kernel.expect("a device of compute capability 9.0 or 10.0"),
            weights: [&layer.o, &layer.gate_up, &layer.down, &layer.last].map(|w| gpu.put(w)),
            norms: [gpu.put(&layer.norms[0]), gpu.put(&layer.norms[1])],
            counters: gpu.put(&[0u32; 2 * MAX_STAGES]),
            launches: 0.into(),
            gpu,
            layer,
        }
    }

    fn run(&self, mixed: &[bf16], residual: &[f32], f32_out: bool) -> Outputs {
        let Shape {
            hidden,
            q,
            inter,
            last,
        } = self.layer.shape;
        let (gpu, rows) = (self.gpu, mixed.len() / q);
        let (mixed, residual) = (gpu.put(mixed), gpu.put(residual));
        let (normed, normed_next) = (
            gpu.poisoned::<bf16>(rows * hidden),
            gpu.poisoned::<bf16>(rows * hidden),
        );
        let squares = [(); 2].map(|()| gpu.poisoned::<f32>(rows * self.kernel.blocks()));
        let gated = gpu.poisoned::<bf16>(rows * inter);
        let (out_f32, out_bf16) = (
            gpu.poisoned::<f32>(rows * last),
            gpu.poisoned::<bf16>(rows * last),
        );
        let [o, gate_up, down, w_last] = &self.weights;
        let stages = [
            LayerStage {
                weight: o.as_slice(),
                input: mixed.as_slice(),
                squares: None,
                output: StageOutput::Residual {
                    residual: residual.as_slice(),
                    norm: self.norms[0].as_slice(),
                    normed: normed.as_slice(),
                    squares: squares[0].as_slice(),
                },
            },
            LayerStage {
                weight: gate_up.as_slice(),
                input: normed.as_slice(),
                squares: Some(squares[0].as_slice()),
                output: StageOutput::Gated(gated.as_slice()),
            },
            LayerStage {
                weight: down.as_slice(),
                input: gated.as_slice(),
                squares: None,
                output: StageOutput::Residual {
                    residual: residual.as_slice(),
                    norm: self.norms[1].as_slice(),
                    normed: normed_next.as_slice(),
                    squares: squares[1].as_slice(),
                },
            },
            LayerStage {
                weight: w_last.as_slice(),
                input: normed_next.as_slice(),
                squares: Some(squares[1].as_slice()),
                output: match f32_out {
                    true => StageOutput::F32(out_f32.as_slice()),
                    false => StageOutput::Bf16(out_bf16.as_slice()),
                },
            },
        ];
        let parity = self.launches.replace(self.launches.get() + 1) % 2;
        let set = |i: usize| self.counters.slice(i * MAX_STAGES..(i + 1) * MAX_STAGES).unwrap();
        let op = DecodeLayerOp {
            rows,
            stages: &stages,
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
        // One chunk of columns, fewer rows than blocks, odd counts.
        (64, 64, 64, 130),
        (256, 512, 768, 1000),
        // Chunks that no group of activations divides, an odd number of boxes of two chunks.
        (320, 192, 832, 2568),
        (1024, 2048, 3072, 4096),
        // Several passes over the last product.
        (128, 256, 192, 30_000),
        (2560, 4096, 9728, 6144),
    ];
    for (seed, (hidden, q, inter, last)) in shapes.into_iter().enumerate() {
        let layer = Layer::random(
            Shape {
                hidden,
                q,
                inter,
                last,
            },
            seed as u64,
        );
        let device = Device::new(&gpu, &layer);
        let mut rng = rng(100 + seed as u64);
        let all = if hidden > 2000 {
            vec![1, 3, 16]
        } else {
            vec![1, 2, 7, 8, 9, 15, 16]
        };
        for rows in all {
            let f32_out = rng.random_bool(0.5);
            let mixed = bf16s(&mut rng, rows * q, 1.0);
            let residual = normals(&mut rng, rows * hidden, 1.0);
            let got = device.run(&mixed, &residual, f32_out);
            let (mut exact, mut plain) = ([vec![], vec![], vec![]], [vec![], vec![], vec![]]);
            for (mixed, residual) in mixed.chunks(q).zip(residual.chunks(hidden)) {
                for (all, part) in exact.iter_mut().zip(layer.reference(mixed, residual, |x| x)) {
                    all.extend(part);
                }
                for (all, part) in plain.iter_mut().zip(layer.reference(mixed, residual, round)) {
                    all.extend(part);
                }
            }
            let bf16s = |x: &[f32]| -> Vec<bf16> { x.iter().map(|&x| bf16::from_f32(x)).collect() };
            let what = |part: &str| format!("hidden {hidden}, {rows} rows, {part}");
            assert_twice(&what("residual"), &bf16s(&got.residual), &plain[0], &exact[0]);
            assert_twice(&what("gated"), &got.gated, &plain[1], &exact[1]);
            assert_twice(&what("last"), &bf16s(&got.last), &plain[2], &exact[2]);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_gives_the_same_bits_in_every_batch_and_at_every_run() {
    let gpu = Gpu::open();
    let (hidden, q, inter, last) = (1024, 2048, 3072, 5000);
    let layer = Layer::random(
        Shape {
            hidden,
            q,
            inter,
            last,
        },
        7,
    );
    let device = Device::new(&gpu, &layer);
    let mut rng = rng(8);
    let mixed = bf16s(&mut rng, 16 * q, 1.0);
    let residual = normals(&mut rng, 16 * hidden, 1.0);
    let whole = device.run(&mixed, &residual, true);
    for round in 0..60 {
        let rows = rng.random_range(1..=16usize);
        let first = rng.random_range(0..=16 - rows);
        let part = device.run(
            &mixed[first * q..(first + rows) * q],
            &residual[first * hidden..(first + rows) * hidden],
            true,
        );
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(
            same(&part.last, &whole.last[first * last..(first + rows) * last])
                && same(
                    &part.residual,
                    &whole.residual[first * hidden..(first + rows) * hidden]
                ),
            "round {round}: {rows} rows from {first}"
        );
    }
}
