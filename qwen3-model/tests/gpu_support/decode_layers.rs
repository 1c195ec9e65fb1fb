//! A model of a few layers, and what a decode step of it gives, in f64: the reference of the kernel of all layers.

use half::bf16;
use qwen3_model::launch::LayersShape;
use rand::seq::SliceRandom;

use super::products::EPS;
use super::{bf16s, normals, rng};

pub const D: usize = 128;

/// Sizes of a test model and its cache.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub shape: LayersShape,
    pub n_layers: usize,
    pub page_size: usize,
    pub max_pages: usize,
    pub n_slots: usize,
}

impl Sizes {
    pub fn q(&self) -> usize {
        self.shape.heads * D
    }
    pub fn qkv(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * D
    }
    pub fn tokens_per_head(&self) -> usize {
        (1 + self.n_slots * self.max_pages) * self.page_size
    }
    pub fn max_length(&self) -> usize {
        self.max_pages * self.page_size
    }
}

pub struct Layer {
    pub qkv: Vec<bf16>,
    pub o: Vec<bf16>,
    pub gate_up: Vec<bf16>,
    pub down: Vec<bf16>,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub post_norm: Vec<f32>,
    pub next_norm: Vec<f32>,
    pub keys: Vec<bf16>,
    pub values: Vec<bf16>,
}

pub struct Model {
    pub sizes: Sizes,
    pub layers: Vec<Layer>,
    pub head: Vec<bf16>,
    pub cos_sin: Vec<f32>,
    pub page_table: Vec<i32>,
}

/// What one step takes in.
pub struct Step {
    pub normed: Vec<bf16>,
    pub residual: Vec<f32>,
    pub slots: Vec<i32>,
    pub positions: Vec<i32>,
}

impl Step {
    pub fn random(sizes: &Sizes, rows: &[(i32, i32)], seed: u64) -> Self {
        let (mut rng, hidden) = (rng(seed), sizes.shape.hidden);
        Self {
            normed: bf16s(&mut rng, rows.len() * hidden, 1.0),
            residual: normals(&mut rng, rows.len() * hidden, 1.0),
            slots: rows.iter().map(|row| row.0).collect(),
            positions: rows.iter().map(|row| row.1).collect(),
        }
    }

    pub fn part(&self, sizes: &Sizes, rows: std::ops::Range<usize>) -> Self {
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
    pub fn random(sizes: Sizes, seed: u64) -> Self {
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
    pub fn place(&self, slot: i32, token: usize) -> Option<usize> {
        let Sizes {
            page_size, max_pages, ..
        } = self.sizes;
        let page = self.page_table[slot as usize * max_pages + token / page_size];
        (page >= 0).then(|| page as usize * page_size + token % page_size)
    }

    /// Poisons what a row may not read: its own position and what lies behind it.
    pub fn poison(&mut self, rows: &[(i32, i32)]) {
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
    pub fn reference(&self, step: &Step, row: usize, rounding: fn(f64) -> f64) -> [Vec<f64>; 2] {
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
