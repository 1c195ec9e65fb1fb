//! The dumb oracle: dense masked softmax in f64, cell by cell, for tests of this crate and of kernels.

use crate::error::{Error, Result};

/// Extents of a dense attention problem.
///
/// ```
/// use block_mask::reference::{DenseShape, dense_attention};
///
/// let shape = DenseShape { batch: 1, heads: 1, kv_heads: 1, q_len: 2, kv_len: 2, head_dim: 1 };
/// let causal = |_, _, q: usize, kv: usize| kv <= q;
/// let (out, lse) = dense_attention(shape, &[0.0, 0.0], &[1.0, 1.0], &[4.0, 8.0], 1.0, causal, |score, _, _, _, _| score)?;
/// assert_eq!(out, [4.0, 6.0]); // the first query sees one key, the second both alike
/// assert!((lse[1] - 2f64.ln()).abs() < 1e-12);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseShape {
    /// Batch rows.
    pub batch: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Queries of a batch row.
    pub q_len: usize,
    /// Keys of a batch row.
    pub kv_len: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// Output `[batch, heads, q_len, head_dim]` and log-sum-exp `[batch, heads, q_len]` of
/// `softmax(score(scale · q·k)) · v` over the cells where `allowed(b, h, q, kv)`.
///
/// `q` is `[batch, heads, q_len, head_dim]`, `k` and `v` are `[batch, kv_heads, kv_len, head_dim]`. A row without allowed
/// cells gives 0 and −∞. Keys and values of cells that are not allowed are not read. Indices of `allowed` and `score`
/// count from 0.
///
/// # Errors
/// [`Error::Zero`] for a head size of 0; [`Error::HeadGroups`] unless the query heads are a multiple of the KV heads;
/// [`Error::Mismatch`] for a slice that has not the length that `shape` says, so that the results take no more memory than
/// the queries call for. Panics: none of its own.
pub fn dense_attention(
    shape: DenseShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    scale: f64,
    allowed: impl Fn(usize, usize, usize, usize) -> bool,
    score: impl Fn(f64, usize, usize, usize, usize) -> f64,
) -> Result<(Vec<f64>, Vec<f64>)> {
    shape.check(q.len(), k.len(), v.len())?;
    let DenseShape {
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        ..
    } = shape;
    let at = |x: &[f32], i: usize| f64::from(x[i]);
    let group = heads / kv_heads;
    let rows = q.len() / head_dim;
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f64::NEG_INFINITY; rows];
    for row in 0..rows {
        let (b, h, i) = (row / (heads * q_len), row / q_len % heads, row % q_len);
        let key = |j: usize| ((b * kv_heads + h / group) * kv_len + j) * head_dim;
        let scores: Vec<(usize, f64)> = (0..kv_len)
            .filter(|&j| allowed(b, h, i, j))
            .map(|j| {
                let dot: f64 = (0..head_dim)
                    .map(|d| at(q, row * head_dim + d) * at(k, key(j) + d))
                    .sum();
                (j, score(scale * dot, b, h, i, j))
            })
            .filter(|&(_, score)| score != f64::NEG_INFINITY)
            .collect();
        let Some(max) = scores.iter().map(|&(_, score)| score).reduce(f64::max) else {
            continue;
        };
        let sum: f64 = scores.iter().map(|&(_, score)| (score - max).exp()).sum();
        lse[row] = max + sum.ln();
        for &(j, score) in &scores {
            let weight = (score - max).exp() / sum;
            for d in 0..head_dim {
                out[row * head_dim + d] += weight * at(v, key(j) + d);
            }
        }
    }
    Ok((out, lse))
}

impl DenseShape {
    /// Checks the lengths of the tensors.
    fn check(&self, q: usize, k: usize, v: usize) -> Result<()> {
        let DenseShape {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
        } = *self;
        if head_dim == 0 {
            return Err(Error::Zero {
                what: "the head size",
            });
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadGroups {
                query_heads: heads,
                kv_heads,
            });
        }
        for (what, heads, len, found) in [
            ("length of the queries", heads, q_len, q),
            ("length of the keys", kv_heads, kv_len, k),
            ("length of the values", kv_heads, kv_len, v),
        ] {
            let expected = [batch, heads, len]
                .iter()
                .fold(head_dim, |product, &extent| product.saturating_mul(extent));
            if expected != found {
                return Err(Error::Mismatch {
                    what,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }
}
