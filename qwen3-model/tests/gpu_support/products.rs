//! Products of decode steps: their reference, and what a norm leaves before them.

use half::bf16;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::{normals, round};

pub const EPS: f32 = 1e-6;
/// Rows that the kernels are compiled for, those of `WideProducts` up to 96.
pub const FORMS: [usize; 6] = [32, 64, 96, 128, 192, 256];

pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// `[rows, n]` exact products of `[rows, k]` with `[n, k]`.
pub fn multiply(x: &[f64], w: &[bf16], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[bf16]| -> f64 { x.iter().zip(w).map(|(x, w)| x * w.to_f64()).sum() };
    let rows = x.par_chunks(k);
    rows.flat_map_iter(|x| w.chunks(k).map(move |w| dot(x, w)))
        .collect()
}

/// `silu(gate) * up` of rows of `n` products.
pub fn gated(products: &[f64], n: usize, rounding: fn(f64) -> f64) -> Vec<f64> {
    let unit = |(g, u): (&f64, &f64)| rounding(rounding(g / (1.0 + (-g).exp())) * u);
    let row = |row: &[f64]| -> Vec<f64> { row[..n / 2].iter().zip(&row[n / 2..]).map(unit).collect() };
    products.chunks(n).flat_map(row).collect()
}

/// What the norm before a product leaves: its bf16 input, not scaled, and sums of squares; and what goes through.
pub struct Normed {
    pub x: Vec<bf16>,
    /// `[parts, columns]`, of 64 elements each.
    pub squares: Vec<f32>,
    pub exact: Vec<f64>,
    /// As a bf16 formula rounds.
    pub plain: Vec<f64>,
}

impl Normed {
    pub fn random(rng: &mut ChaCha8Rng, rows: usize, k: usize) -> Self {
        let hidden = normals(rng, rows * k, 1.5);
        let norm: Vec<f32> = normals(rng, k, 0.2).iter().map(|x| 1.0 + x).collect();
        let weighed = |i: usize| hidden[i] * norm[i % k];
        let columns = FORMS.into_iter().find(|&columns| rows <= columns).unwrap();
        // Places of rows beyond the batch are not read.
        let mut squares = vec![f32::NAN; k.div_ceil(64) * columns];
        let (mut exact, mut plain) = (vec![], vec![]);
        for (row, hidden) in hidden.chunks(k).enumerate() {
            for (slot, part) in hidden.chunks(64).enumerate() {
                squares[slot * columns + row] = part.iter().map(|x| x * x).sum();
            }
            let mean = hidden.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / k as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (&x, &w) in hidden.iter().zip(&norm) {
                let (x, w) = (f64::from(x), f64::from(w));
                exact.push(x * scale * w);
                plain.push(round(round(x * scale) * w));
            }
        }
        let x = (0..rows * k).map(|i| bf16::from_f32(weighed(i))).collect();
        Self {
            x,
            squares,
            exact,
            plain,
        }
    }
}
