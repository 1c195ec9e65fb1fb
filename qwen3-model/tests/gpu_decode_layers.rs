//! The persistent kernel for the layers of small decode steps, against an f64 reference.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::{DeviceBuffer, few_cases};
use gpu_support::decode_layers::{D, Model, Sizes, Step};
use gpu_support::products::EPS;
use gpu_support::{Gpu, assert_twice, rng, round};
use half::bf16;
use qwen3_model::launch::{
    DecodeLayers, DecodeLayersOp, DecodeLayersScratch, LayerOperands, LayersShape, QkvRopeWrite,
};
use rand::Rng;

struct DeviceLayer {
    matrices: [DeviceBuffer<bf16>; 4],
    norms: [DeviceBuffer<f32>; 4],
}

struct Device<'a> {
    gpu: &'a Gpu,
    kernel: DecodeLayers,
    scratch: DecodeLayersScratch,
    model: &'a Model,
    layers: Vec<DeviceLayer>,
    head: DeviceBuffer<bf16>,
    cos_sin: DeviceBuffer<f32>,
    page_table: DeviceBuffer<i32>,
}

struct Outputs {
    residual: Vec<f32>,
    logits: Vec<f32>,
    /// Of the last layer.
    qkv: Vec<bf16>,
    keys: Vec<bf16>,
    values: Vec<bf16>,
}

impl<'a> Device<'a> {
    fn new(gpu: &'a Gpu, model: &'a Model) -> Self {
        let sizes = &model.sizes;
        let kernel = DecodeLayers::load(&gpu.compiler, &gpu.device).unwrap();
        let kernel = kernel.expect("a device of compute capability 9.0 or 10.0");
        let max_length = sizes.max_length();
        let scratch =
            DecodeLayersScratch::new(&gpu.device, &kernel, sizes.shape, sizes.n_layers, max_length).unwrap();
        let layers = model.layers.iter().map(|layer| DeviceLayer {
            matrices: [&layer.qkv, &layer.o, &layer.gate_up, &layer.down].map(|w| gpu.put(w)),
            norms: [&layer.q_norm, &layer.k_norm, &layer.post_norm, &layer.next_norm].map(|w| gpu.put(w)),
        });
        Self {
            kernel,
            scratch,
            layers: layers.collect(),
            head: gpu.put(&model.head),
            cos_sin: gpu.put(&model.cos_sin),
            page_table: gpu.put(&model.page_table),
            gpu,
            model,
        }
    }

    fn run(&self, step: &Step) -> Outputs {
        let (gpu, sizes) = (self.gpu, &self.model.sizes);
        let rows = step.slots.len();
        let caches: Vec<_> = (self.model.layers.iter())
            .map(|layer| [gpu.put(&layer.keys), gpu.put(&layer.values)])
            .collect();
        let (normed, residual) = (gpu.put(&step.normed), gpu.put(&step.residual));
        let (slots, positions) = (gpu.put(&step.slots), gpu.put(&step.positions));
        let mixed = gpu.poisoned::<bf16>(rows * sizes.q());
        let gated = gpu.poisoned::<bf16>(rows * sizes.shape.intermediate);
        let logits = gpu.poisoned::<f32>(rows * sizes.shape.vocab);
        let layers: Vec<_> = (self.layers.iter().zip(&caches))
            .map(|(layer, [keys, values])| {
                let [qkv, o, gate_up, down] = layer.matrices.each_ref().map(DeviceBuffer::as_slice);
                let [q_norm, k_norm, post_norm, next_norm] =
                    layer.norms.each_ref().map(DeviceBuffer::as_slice);
                LayerOperands {
                    qkv,
                    o,
                    gate_up,
                    down,
                    q_norm,
                    k_norm,
                    post_norm,
                    next_norm,
                    keys: keys.as_slice(),
                    values: values.as_slice(),
                }
            })
            .collect();
        let op = DecodeLayersOp {
            layers: &layers,
            head: self.head.as_slice(),
            normed: normed.as_slice(),
            residual: residual.as_slice(),
            mixed: mixed.as_slice(),
            gated: gated.as_slice(),
            logits: logits.as_slice(),
            positions: positions.as_slice(),
            slots: slots.as_slice(),
            page_table: self.page_table.as_slice(),
            max_pages: sizes.max_pages,
            page_size: sizes.page_size,
            cos_sin: self.cos_sin.as_slice(),
            eps: EPS,
        };
        self.kernel.run(&gpu.stream, &self.scratch, &op).unwrap();
        let [keys, values] = caches.last().unwrap();
        Outputs {
            residual: gpu.get(&residual),
            logits: gpu.get(&logits),
            qkv: gpu.get(self.scratch.qkv())[..rows * sizes.qkv()]
                .iter()
                .map(|&word| bf16::from_bits(word as u16))
                .collect(),
            keys: gpu.get(keys),
            values: gpu.get(values),
        }
    }

    /// The last layer's cache as the kernel of prompts writes it from the same products.
    fn written(&self, step: &Step, qkv: &[bf16]) -> [Vec<bf16>; 2] {
        let (gpu, sizes) = (self.gpu, &self.model.sizes);
        let (layer, on_device) = (self.model.layers.last().unwrap(), self.layers.last().unwrap());
        let (keys, values, qkv) = (gpu.put(&layer.keys), gpu.put(&layer.values), gpu.put(qkv));
        let (slots, positions) = (gpu.put(&step.slots), gpu.put(&step.positions));
        let op = QkvRopeWrite {
            qkv: qkv.as_slice(),
            q_norm: on_device.norms[0].as_slice(),
            k_norm: on_device.norms[1].as_slice(),
            cos_sin: self.cos_sin.as_slice(),
            positions: positions.as_slice(),
            slots: slots.as_slice(),
            page_table: self.page_table.as_slice(),
            max_pages: sizes.max_pages,
            k_cache: keys.as_slice(),
            v_cache: values.as_slice(),
            q_heads: sizes.shape.heads,
            kv_heads: sizes.shape.kv_heads,
            page_size: sizes.page_size,
            eps: EPS,
        };
        gpu.kernels(256, D)
            .qkv_rope_write(&gpu.stream, &op, None)
            .unwrap();
        [gpu.get(&keys), gpu.get(&values)]
    }
}

fn shape(hidden: usize, heads: usize, kv_heads: usize, intermediate: usize, vocab: usize) -> LayersShape {
    LayersShape {
        hidden,
        heads,
        kv_heads,
        intermediate,
        vocab,
    }
}

/// Rows at random positions in slots of their own, the first few at the edges of pages and granules.
fn rows_of(sizes: &Sizes, rows: usize, seed: u64) -> Vec<(i32, i32)> {
    let mut rng = rng(seed);
    let last = sizes.max_length() as i32 - 1;
    let edges = [last, 0, 15, 16, sizes.page_size as i32 - 1, 127];
    (0..rows)
        .map(|row| {
            let position = match edges.get(row) {
                Some(&edge) => edge.min(last),
                None => rng.random_range(0..=last),
            };
            (row as i32 + 1, position)
        })
        .collect()
}

fn same<T: bytemuck::Pod>(a: &[T], b: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(a) == bytemuck::cast_slice::<T, u8>(b)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn layers_agree_with_the_reference_at_every_batch_and_shape() {
    let gpu = Gpu::open();
    let cases = [
        // One chunk of columns, fewer rows than blocks, more layers than a launch takes.
        (shape(64, 1, 1, 64, 130), 50, 16, 3),
        // Chunks that no group of activations divides; groups of 8 and of 3.
        (shape(320, 8, 1, 832, 2568), 2, 32, 10),
        (shape(256, 6, 2, 192, 1000), 2, 128, 9),
        // Several passes over the head, several splits of a row.
        (shape(128, 4, 2, 192, 30_000), 1, 64, 30),
        (shape(2560, 32, 8, 9728, 300), 1, 64, 9),
        // More items of attention than multiprocessors.
        (shape(64, 16, 16, 64, 130), 2, 16, 9),
        // More granules of a row than lanes of a warp hold pages of.
        (shape(64, 8, 8, 64, 130), 1, 64, 70),
    ];
    for (seed, (shape, n_layers, page_size, max_pages)) in cases.into_iter().enumerate() {
        let sizes = Sizes {
            shape,
            n_layers,
            page_size,
            max_pages,
            n_slots: 17,
        };
        let counts = match (shape.hidden > 2000 || max_pages > 60, few_cases()) {
            (true, true) => continue,
            (true, false) if max_pages > 60 => vec![16],
            (true, false) => vec![1, 3],
            (false, true) => vec![1, 16],
            (false, false) => vec![1, 2, 7, 9, 16],
        };
        let all = rows_of(&sizes, 16, seed as u64);
        let mut model = Model::random(sizes, seed as u64);
        model.poison(&all);
        let device = Device::new(&gpu, &model);
        for count in counts {
            let step = Step::random(&sizes, &all[..count], 100 + seed as u64);
            let got = device.run(&step);
            let (mut exact, mut plain) = ([vec![], vec![]], [vec![], vec![]]);
            for row in 0..count {
                for (all, part) in exact.iter_mut().zip(model.reference(&step, row, |x| x)) {
                    all.extend(part);
                }
                for (all, part) in plain.iter_mut().zip(model.reference(&step, row, round)) {
                    all.extend(part);
                }
            }
            let rounded = |x: &[f32]| -> Vec<bf16> { x.iter().map(|&x| bf16::from_f32(x)).collect() };
            let what = |part: &str| format!("{shape:?}, {count} rows, {part}");
            assert_twice(&what("residual"), &rounded(&got.residual), &plain[0], &exact[0]);
            assert_twice(&what("logits"), &rounded(&got.logits), &plain[1], &exact[1]);
            let [keys, values] = device.written(&step, &got.qkv);
            assert!(
                same(&keys, &got.keys) && same(&values, &got.values),
                "{}",
                what("the cache differs from what prompts write")
            );
        }
    }
}

const SMALL: Sizes = Sizes {
    shape: LayersShape {
        hidden: 512,
        heads: 8,
        kv_heads: 2,
        intermediate: 1536,
        vocab: 5000,
    },
    n_layers: 2,
    page_size: 64,
    max_pages: 20,
    n_slots: 17,
};

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_gives_the_same_bits_beside_other_rows_and_at_every_run() {
    let gpu = Gpu::open();
    let all = rows_of(&SMALL, 16, 3);
    let model = Model::random(SMALL, 7);
    let device = Device::new(&gpu, &model);
    let step = Step::random(&SMALL, &all, 8);
    let whole = device.run(&step);
    let (hidden, vocab) = (SMALL.shape.hidden, SMALL.shape.vocab);
    let mut rng = rng(9);
    // How attention cuts a row depends on the number of rows, rounded up to a power of two.
    for round in 0..if few_cases() { 3 } else { 40 } {
        let rows = rng.random_range(9..=16usize);
        let first = rng.random_range(0..=16 - rows);
        let part = device.run(&step.part(&SMALL, first..first + rows));
        assert!(
            same(&part.logits, &whole.logits[first * vocab..(first + rows) * vocab])
                && same(
                    &part.residual,
                    &whole.residual[first * hidden..(first + rows) * hidden]
                ),
            "round {round}: {rows} rows from {first}"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn padding_and_rows_past_their_end_touch_nothing() {
    let gpu = Gpu::open();
    let mut model = Model::random(SMALL, 11);
    // Slot 3 has lost the page of its newest token, slot 4 one in the middle.
    model.page_table[3 * SMALL.max_pages + 5] = -1;
    model.page_table[4 * SMALL.max_pages + 2] = -1;
    let end = SMALL.max_length() as i32;
    let rows = [(0, 0), (1, 700), (2, end + 3), (3, 5 * 64 + 9), (4, 400), (0, 0)];
    model.poison(&rows);
    let device = Device::new(&gpu, &model);
    let step = Step::random(&SMALL, &rows, 12);
    let got = device.run(&step);
    let last = model.layers.last().unwrap();
    let stride = SMALL.tokens_per_head();
    let written: Vec<usize> = [(1, 700), (4, 400)]
        .iter()
        .map(|&(slot, token)| model.place(slot, token).unwrap())
        .collect();
    for (place, (before, after)) in (last.keys.chunks(D).zip(got.keys.chunks(D))).enumerate() {
        assert_eq!(
            !same(before, after),
            written.contains(&(place % stride)),
            "token {place} of the keys"
        );
    }
    for (row, logits) in got.logits.chunks(SMALL.shape.vocab).enumerate() {
        let [_, exact] = model.reference(&step, row, |x| x);
        let [_, plain] = model.reference(&step, row, round);
        let logits: Vec<bf16> = logits.iter().map(|&x| bf16::from_f32(x)).collect();
        assert_twice(&format!("row {row}"), &logits, &plain, &exact);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_single_row_and_several_take_turns() {
    let gpu = Gpu::open();
    let model = Model::random(SMALL, 21);
    let device = Device::new(&gpu, &model);
    let all = rows_of(&SMALL, 16, 22);
    // A launch of one row leaves counters and numbers as one of several finds them, and the other way round.
    let turns = [0..1, 0..3, 0..1, 4..5, 0..16, 4..5, 0..1, 0..3, 0..16];
    let mut first: Vec<(std::ops::Range<usize>, Vec<f32>)> = Vec::new();
    for rows in turns {
        let step = Step::random(&SMALL, &all, 23).part(&SMALL, rows.clone());
        let got = device.run(&step);
        if let Some((_, before)) = first.iter().find(|(seen, _)| *seen == rows) {
            assert!(same(before, &got.logits), "rows {rows:?} the second time");
            continue;
        }
        let rounded = |x: &[f32]| -> Vec<bf16> { x.iter().map(|&x| bf16::from_f32(x)).collect() };
        for row in 0..rows.len() {
            let [_, exact] = model.reference(&step, row, |x| x);
            let [_, plain] = model.reference(&step, row, round);
            let logits = &got.logits[row * SMALL.shape.vocab..][..SMALL.shape.vocab];
            assert_twice(
                &format!("rows {rows:?}, row {row}"),
                &rounded(logits),
                &plain,
                &exact,
            );
        }
        first.push((rows, got.logits));
    }
}
