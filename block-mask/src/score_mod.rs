//! Score functions: what happens to a score before the softmax.

use crate::error::{Error, Result};
use crate::expr::eval;
use crate::expr::{Axis, Domain, Float, FloatBuffer, bounds, check_size, h, kv, q, score};
use crate::mask_mod::{cell, positions_from};

/// A score function `(score, b, h, q, kv) -> score`, applied to `scale · q·k` in natural units.
///
/// ```
/// use block_mask::ScoreMod;
/// let capped = ScoreMod::soft_cap(50.0)?;
/// assert!((capped.eval(1000.0, 0, 0, 0, 0) - 50.0).abs() < 1e-3);
/// # Ok::<(), block_mask::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ScoreMod {
    expr: Float,
}

impl ScoreMod {
    /// A function written from expression nodes; [`score()`] is the incoming score. A result of −∞ masks the cell.
    ///
    /// # Errors
    /// [`Error::TooDeep`], [`Error::TooLarge`] beyond [`MAX_DEPTH`](crate::expr::MAX_DEPTH) levels or [`MAX_NODES`](crate::expr::MAX_NODES) nodes.
    pub fn new(expr: Float) -> Result<ScoreMod> {
        let function = ScoreMod { expr };
        check_size(function.expr.depth(), function.expr.size())?;
        Ok(function)
    }

    /// The score as it is.
    pub fn identity() -> ScoreMod {
        ScoreMod { expr: score() }
    }

    /// ALiBi: adds `slopes[h] · (kv − q)`; see [`alibi_slopes`].
    pub fn alibi(slopes: impl Into<Vec<f32>>) -> ScoreMod {
        ScoreMod {
            expr: score() + FloatBuffer::new(slopes).at(h()) * (kv() - q()).to_float(),
        }
    }

    /// `cap · tanh(score / cap)`.
    ///
    /// # Errors
    /// [`Error::SoftCap`] unless `cap` is positive and finite.
    pub fn soft_cap(cap: f32) -> Result<ScoreMod> {
        if !(cap > 0.0 && cap.is_finite()) {
            return Err(Error::SoftCap);
        }
        Ok(ScoreMod {
            expr: (score() / cap).tanh() * cap,
        })
    }

    /// Adds `bias[h, d]` with `d = clamp(kv − q, −max_distance, max_distance) + max_distance`; `bias` is
    /// `[heads, 2 · max_distance + 1]`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] unless the length of `bias` is a positive multiple of `2 · max_distance + 1`,
    /// [`Error::TooLarge`] if it exceeds 32-bit indices.
    pub fn relative_bias(bias: impl Into<Vec<f32>>, max_distance: usize) -> Result<ScoreMod> {
        let bias = bias.into();
        let max = (i32::MAX / 4) as usize;
        if max_distance > max {
            return Err(Error::TooLarge {
                what: "the largest distance",
                value: max_distance,
                max,
            });
        }
        let width = 2 * max_distance + 1;
        if bias.is_empty() || !bias.len().is_multiple_of(width) {
            return Err(Error::Mismatch {
                what: "length of the relative bias",
                expected: bias.len().div_ceil(width).max(1) * width,
                found: bias.len(),
            });
        }
        let limit = max_distance as i32;
        let distance = (kv() - q()).clamp(-limit, limit) + limit;
        let index = h() * width as i32 + distance;
        Ok(ScoreMod {
            expr: score() + FloatBuffer::new(bias).at(index),
        })
    }

    /// `self`, then `next` applied to its result.
    #[must_use]
    pub fn then(self, next: &ScoreMod) -> ScoreMod {
        ScoreMod {
            expr: next.expr.with_score(&self.expr),
        }
    }

    /// The expression.
    pub fn expr(&self) -> &Float {
        &self.expr
    }

    /// Whether the function reads an axis.
    pub fn depends_on(&self, axis: Axis) -> bool {
        self.expr.deps().on(axis)
    }

    /// One cell; positions as in [`MaskMod::allows`](crate::MaskMod::allows). An expression beyond
    /// [`MAX_DEPTH`](crate::expr::MAX_DEPTH) or [`MAX_NODES`](crate::expr::MAX_NODES) gives 0; [`ScoreMod::check`] tells.
    pub fn eval(&self, score: f32, b: usize, h: usize, q: usize, kv: usize) -> f32 {
        eval::float_at(&self.expr, cell(b, h, q, kv), score)
    }

    /// `scores[i]`, the score at key `kv + i`, is replaced by the function's value, as [`ScoreMod::eval`] gives it.
    pub fn eval_row(&self, b: usize, h: usize, q: usize, kv: usize, scores: &mut [f32]) {
        let (row, beyond) = scores.split_at_mut(scores.len().min(positions_from(kv)));
        eval::float_row(&self.expr, cell(b, h, q, kv), row);
        for score in beyond {
            *score = self.eval(*score, b, h, q, usize::MAX);
        }
    }

    /// Proves that no captured buffer is read outside its bounds anywhere in `domain`.
    ///
    /// # Errors
    /// As [`MaskMod::check`](crate::MaskMod::check).
    pub fn check(&self, domain: &Domain) -> Result<()> {
        check_size(self.expr.depth(), self.expr.size())?;
        bounds::check_float(&self.expr, domain)
    }
}

/// The ALiBi slopes of `heads` heads: 2^(−8(i+1)/n) for a power of two n, and for other counts those of the next lower
/// power of two followed by every second slope of twice that.
///
/// # Errors
/// [`Error::TooLarge`] beyond 2¹⁶ heads.
pub fn alibi_slopes(heads: usize) -> Result<Vec<f32>> {
    const MAX: usize = 1 << 16;
    if heads > MAX {
        return Err(Error::TooLarge {
            what: "the number of heads",
            value: heads,
            max: MAX,
        });
    }
    let geometric = |n: usize, i: usize| 2f64.powf(-8.0 * (i + 1) as f64 / n as f64) as f32;
    if heads == 0 {
        return Ok(Vec::new());
    }
    let base = 1usize << heads.ilog2();
    let extra = (0..heads - base).map(|i| geometric(2 * base, 2 * i));
    Ok((0..base).map(|i| geometric(base, i)).chain(extra).collect())
}
