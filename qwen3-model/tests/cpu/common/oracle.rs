//! Qwen3 written down once more, in f64 and without any cleverness.

use qwen3_model::{LayerWeights, Projection, Qwen3Config, RopeScaling, WeightMatrix, Weights};

/// Logits `[tokens, vocab]` of one sequence.
pub fn logits(config: &Qwen3Config, weights: &Weights, ids: &[u32]) -> Vec<f64> {
    let embed = |id: &u32| {
        weights
            .embed_tokens
            .row(*id as usize)
            .iter()
            .map(|x| x.to_f64())
            .collect()
    };
    let mut rows: Vec<Vec<f64>> = ids.iter().map(embed).collect();
    for layer in &weights.layers {
        let normed = rows
            .iter()
            .map(|row| norm(row, &layer.input_norm, config.rms_norm_eps));
        let mixed = attention(config, layer, &normed.collect::<Vec<_>>());
        for (row, mixed) in rows.iter_mut().zip(mixed) {
            add(row, &times(layer.projection(Projection::O), &mixed));
            let normed = norm(row, &layer.post_attention_norm, config.rms_norm_eps);
            let gate = times(layer.projection(Projection::Gate), &normed);
            let up = times(layer.projection(Projection::Up), &normed);
            let gated: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            add(row, &times(layer.projection(Projection::Down), &gated));
        }
    }
    let head = |row: &Vec<f64>| times(&weights.lm_head, &norm(row, &weights.norm, config.rms_norm_eps));
    rows.iter().flat_map(head).collect()
}

fn attention(config: &Qwen3Config, layer: &LayerWeights, normed: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let d = config.head_dim;
    let heads = |projection, weight: Option<&[f32]>| -> Vec<Vec<Vec<f64>>> {
        let row = |(position, row): (usize, &Vec<f64>)| {
            let all = times(layer.projection(projection), row);
            let head = |head: &[f64]| match weight {
                Some(weight) => rotate(config, &norm(head, weight, config.rms_norm_eps), position),
                None => head.to_vec(),
            };
            all.chunks_exact(d).map(head).collect()
        };
        normed.iter().enumerate().map(row).collect()
    };
    let q = heads(Projection::Q, Some(&layer.q_norm));
    let k = heads(Projection::K, Some(&layer.k_norm));
    let v = heads(Projection::V, None);
    let group = config.n_heads / config.n_kv_heads;
    let mut out = Vec::new();
    for (position, q) in q.iter().enumerate() {
        let mut row = Vec::new();
        for (head, q) in q.iter().enumerate() {
            let score = |k: &Vec<Vec<f64>>| {
                let dot: f64 = q.iter().zip(&k[head / group]).map(|(q, k)| q * k).sum();
                (dot / (d as f64).sqrt()).exp()
            };
            let scores: Vec<f64> = k[..=position].iter().map(score).collect();
            let total: f64 = scores.iter().sum();
            let value = |i| {
                scores
                    .iter()
                    .zip(&v)
                    .map(|(s, v)| s * v[head / group][i])
                    .sum::<f64>()
                    / total
            };
            row.extend((0..d).map(value));
        }
        out.push(row);
    }
    out
}

/// Frequencies from the definitions in the YaRN paper, not from the code under test.
fn rotate(config: &Qwen3Config, head: &[f64], position: usize) -> Vec<f64> {
    let half = head.len() / 2;
    let mut out = vec![0.0; head.len()];
    for i in 0..half {
        let plain = config.rope.theta.powf(-2.0 * i as f64 / head.len() as f64);
        let (frequency, scale) = match config.rope.scaling {
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                let dim = |rotations: f64| {
                    let context = original_max_position_embeddings as f64;
                    head.len() as f64 * (context / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * config.rope.theta.ln())
                };
                let low = dim(beta_fast).floor().max(0.0);
                let high = dim(beta_slow).ceil().min(head.len() as f64 - 1.0);
                let high = if low == high { high + 0.001 } else { high };
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                (plain / factor * ramp + plain * (1.0 - ramp), attention_factor)
            }
            _ => (plain, 1.0),
        };
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        out[i] = scale * (head[i] * cos - head[i + half] * sin);
        out[i + half] = scale * (head[i + half] * cos + head[i] * sin);
    }
    out
}

fn norm(row: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter()
        .zip(weight)
        .map(|(x, w)| x / (mean + eps).sqrt() * f64::from(*w))
        .collect()
}

fn times(matrix: &WeightMatrix, x: &[f64]) -> Vec<f64> {
    let row = |row| matrix.row(row).iter().zip(x).map(|(w, x)| w.to_f64() * x).sum();
    (0..matrix.rows()).map(row).collect()
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}
