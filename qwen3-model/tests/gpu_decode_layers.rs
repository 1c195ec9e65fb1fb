//! The persistent kernel for the layers of small decode steps, against an f64 reference.
#![cfg(feature = "cuda")]

mod gpu_support;

use cuda_graphs::{DeviceBuffer, few_cases};
use gpu_support::{Gpu, assert_twice, bf16s, normals, rng, round};
use half::bf16;
use qwen3_model::launch::{
    DecodeLayers, DecodeLayersOp, DecodeLayersScratch, LayerOperands, LayersShape, QkvRopeWrite,
};
use rand::Rng;
use rand::seq::SliceRandom;

const EPS: f32 = 1e-6;
const D: usize = 128;

/// Sizes of a test model and its cache.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    shape: LayersShape,
    n_layers: usize,
    page_size: usize,
    max_pages: usize,
    n_slots: usize,
}

impl Sizes {
    fn q(&self) -> usize {
        self.shape.heads * D
    }
    fn qkv(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * D
    }
    fn tokens_per_head(&self) -> usize {
        (1 + self.n_slots * self.max_pages) * self.page_size
    }
    fn max_length(&self) -> usize {
        self.max_pages * self.page_size
    }
}

struct Layer {
    qkv: Vec<bf16>,
    o: Vec<bf16>,
    gate_up: Vec<bf16>,
    down: Vec<bf16>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    post_norm: Vec<f32>,
    next_norm: Vec<f32>,
    keys: Vec<bf16>,
    values: Vec<bf16>,
}

struct Model {
    sizes: Sizes,
    layers: Vec<Layer>,
    head: Vec<bf16>,
    cos_sin: Vec<f32>,
    page_table: Vec<i32>,
}

/// What one step takes in.
struct Step {
    normed: Vec<bf16>,
    residual: Vec<f32>,
    slots: Vec<i32>,
    positions: Vec<i32>,
}

impl Step {
    fn random(sizes: &Sizes, rows: &[(i32, i32)], seed: u64) -> Self {
        let (mut rng, hidden) = (rng(seed), sizes.shape.hidden);
        Self {
            normed: bf16s(&mut rng, rows.len() * hidden, 1.0),
            residual: normals(&mut rng, rows.len() * hidden, 1.0),
            slots: rows.iter().map(|row| row.0).collect(),
            positions: rows.iter().map(|row| row.1).collect(),
        }
    }

    fn part(&self, sizes: &Sizes, rows: std::ops::Range<usize>) -> Self {
        let wide = rows.start * sizes.shape.hidden..rows.end * sizes.shape.hidden;
        Self {
            normed: self.normed[wide.clone()].to_vec(),
            residual: self.residual[wide].to_vec(),
            slots: self.slots[rows.clone()].to_vec(),
            positions: self.positions[rows].to_vec(),
        }
    }
}

impl Model {
    fn random(sizes: Sizes, seed: u64) -> Self {
        let mut rng = rng(seed);
        let LayersShape {
            hidden,
            intermediate,
            vocab,
            kv_heads,
            ..
        } = sizes.shape;
        let layers = (0..sizes.n_layers).map(|_| {
            let mut matrix = |n: usize, k: usize| bf16s(&mut rng, n * k, 1.0 / (k as f32).sqrt());
            let qkv = matrix(sizes.qkv(), hidden);
            let o = matrix(hidden, sizes.q());
            let gate_up = matrix(2 * intermediate, hidden);
            let down = matrix(hidden, intermediate);
            let mut norm = |len: usize| -> Vec<f32> {
                let ones = normals(&mut rng, len, 0.2);
                ones.iter().map(|x| bf16::from_f32(1.0 + x).to_f32()).collect()
            };
            let [q_norm, k_norm] = [norm(D), norm(D)];
            let [post_norm, next_norm] = [norm(hidden), norm(hidden)];
            let cached = kv_heads * sizes.tokens_per_head() * D;
            let (keys, values) = (bf16s(&mut rng, cached, 1.0), bf16s(&mut rng, cached, 1.0));
            Layer {
                qkv,
                o,
                gate_up,
                down,
                q_norm,
                k_norm,
                post_norm,
                next_norm,
                keys,
                values,
            }
        });
        let layers = layers.collect();
        let head = bf16s(&mut rng, vocab * hidden, 1.0 / (hidden as f32).sqrt());
        let angles = (0..sizes.max_length()).flat_map(|position| {
            let angle = move |i: usize| position as f64 * 1e4f64.powf(-(i as f64) / 64.0);
            let cos = (0..64).map(move |i| angle(i).cos() as f32);
            cos.chain((0..64).map(move |i| angle(i).sin() as f32))
        });
        let cos_sin = angles.collect();
        // Page 0 is nobody's.
        let mut pages: Vec<i32> = (1..=(sizes.n_slots * sizes.max_pages) as i32).collect();
        pages.shuffle(&mut rng);
        pages[..sizes.max_pages].fill(0); // slot 0
        Self {
            sizes,
            layers,
            head,
            cos_sin,
            page_table: pages,
        }
    }

    /// Where a token of a slot lies, if it has a page.
    fn place(&self, slot: i32, token: usize) -> Option<usize> {
        let Sizes {
            page_size, max_pages, ..
        } = self.sizes;
        let page = self.page_table[slot as usize * max_pages + token / page_size];
        (page >= 0).then(|| page as usize * page_size + token % page_size)
    }

    /// Poisons what a row may not read: its own position and what lies behind it.
    fn poison(&mut self, rows: &[(i32, i32)]) {
        let stride = self.sizes.tokens_per_head();
        for &(slot, position) in rows.iter().filter(|row| row.0 > 0) {
            for token in position as usize..self.sizes.max_length() {
                let Some(place) = self.place(slot, token) else {
                    continue;
                };
                for layer in &mut self.layers {
                    for head in 0..self.sizes.shape.kv_heads {
                        let at = (head * stride + place) * D;
                        layer.keys[at..at + D].fill(bf16::NAN);
                        layer.values[at..at + D].fill(bf16::NAN);
                    }
                }
            }
        }
    }

    /// Residual and logits of one row; `rounding` is applied to what a plain bf16 formula rounds.
    fn reference(&self, step: &Step, row: usize, rounding: fn(f64) -> f64) -> [Vec<f64>; 2] {
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
        let (hidden, inner) = (self.sizes.shape.hidden, self.sizes.shape.intermediate);
        let input = &step.normed[row * hidden..(row + 1) * hidden];
        let mut normed: Vec<f64> = input.iter().map(|x| x.to_f64()).collect();
        let residual = &step.residual[row * hidden..(row + 1) * hidden];
        let mut h: Vec<f64> = residual.iter().map(|&x| f64::from(x)).collect();
        for layer in &self.layers {
            let qkv = product(&layer.qkv, &normed);
            let mixed = self.attention(
                layer,
                &qkv,
                step.slots[row],
                step.positions[row] as usize,
                rounding,
            );
            for (h, o) in h.iter_mut().zip(product(&layer.o, &mixed)) {
                *h = rounding(*h + o);
            }
            let gate_up = product(&layer.gate_up, &norm(&h, &layer.post_norm));
            let (gate, up) = gate_up.split_at(inner);
            let gated: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| rounding(rounding(g / (1.0 + (-g).exp())) * u))
                .collect();
            for (h, d) in h.iter_mut().zip(product(&layer.down, &gated)) {
                *h = rounding(*h + d);
            }
            normed = norm(&h, &layer.next_norm);
        }
        let logits = product(&self.head, &normed);
        [h, logits]
    }

    fn attention(
        &self,
        layer: &Layer,
        qkv: &[f64],
        slot: i32,
        position: usize,
        rounding: fn(f64) -> f64,
    ) -> Vec<f64> {
        let LayersShape { heads, kv_heads, .. } = self.sizes.shape;
        if slot == 0 {
            return vec![0.0; heads * D];
        }
        let angles = &self.cos_sin[position.min(self.sizes.max_length() - 1) * D..][..D];
        let rotate = |x: &[f64], weight: &[f32]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / D as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            let x: Vec<f64> = (x.iter().zip(weight))
                .map(|(x, w)| rounding(rounding(x * scale) * f64::from(*w)))
                .collect();
            let turned = (0..D).map(|i| {
                let (cos, sin) = (f64::from(angles[i % 64]), f64::from(angles[64 + i % 64]));
                match i < 64 {
                    true => rounding(rounding(x[i] * cos) - rounding(x[i + 64] * sin)),
                    false => rounding(rounding(x[i] * cos) + rounding(x[i - 64] * sin)),
                }
            });
            turned.collect()
        };
        let head = |number: usize| &qkv[number * D..(number + 1) * D];
        let mut mixed = Vec::new();
        for h in 0..heads {
            let kv = h / (heads / kv_heads);
            let query = rotate(head(h), &layer.q_norm);
            let (new_key, new_value) = (
                rotate(head(heads + kv), &layer.k_norm),
                head(heads + kv_heads + kv),
            );
            let mut seen: Vec<(f64, Vec<f64>)> = Vec::new();
            for token in 0..(position + 1).min(self.sizes.max_length()) {
                let Some(place) = self.place(slot, token) else {
                    continue;
                };
                let at = (kv * self.sizes.tokens_per_head() + place) * D;
                let (key, value) = match token == position {
                    true => (new_key.clone(), new_value.to_vec()),
                    false => {
                        let all = |x: &[bf16]| x[at..at + D].iter().map(|x| x.to_f64()).collect();
                        (all(&layer.keys), all(&layer.values))
                    }
                };
                let score: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                seen.push((rounding(score) / (D as f64).sqrt(), value));
            }
            let most = seen
                .iter()
                .map(|(score, _)| *score)
                .fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = seen.iter().map(|(score, _)| (score - most).exp()).sum();
            let mut out = vec![0.0; D];
            for (score, value) in &seen {
                let weight = rounding((score - most).exp() / total);
                out.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
            }
            mixed.extend(out.into_iter().map(rounding));
        }
        mixed
    }
}

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
