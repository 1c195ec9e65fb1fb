//! The same policy without merging: base plus a low-rank product at run time.

use crate::merge::RowFactors;
use crate::{Error, ModuleUpdate, Result};
use half::bf16;

/// What a layer computes besides its base product: `y = gain ⊙ (W₀·x) + b·(a·x) + bias`.
///
/// All terms of all active adapters are stacked along the rank, scalings already in `b`. This is the reference for
/// merged weights, and the only way for a base whose weights cannot be rewritten (4-bit).
///
/// ```
/// # use half::bf16;
/// # use lora_merge::*;
/// use lora_merge::{LowRankTerm, ModuleUpdate};
///
/// let term = LowRankTerm {
///     r: 1,
///     left: vec![0.5, -0.5].into(),       // B, [2, 1]
///     right: vec![1.0, 0.0, 2.0].into(),  // A, [1, 3]
///     scaling: 2.0,
///     magnitude: None,
/// };
/// let unmerged = ModuleUpdate::from_terms(2, 3, vec![term])?.unmerged(None)?;
/// assert_eq!((unmerged.rank, unmerged.a, unmerged.b), (1, vec![1.0, 0.0, 2.0], vec![1.0, -1.0]));
/// # Ok::<(), lora_merge::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UnmergedUpdate {
    /// Sum of the ranks.
    pub rank: usize,
    /// `[rank, in]`.
    pub a: Vec<f32>,
    /// `[out, rank]`, with scaling (and DoRA's row factor).
    pub b: Vec<f32>,
    /// `[out]`: factor on the base product, with DoRA only.
    pub gain: Option<Vec<f32>>,
}

impl ModuleUpdate {
    /// The run-time form of the low-rank terms of a weight stored `[out, in]`. DoRA's norms need the base weight
    /// (`[out, in]`); without DoRA `w0` may be `None`. The bias is in [`ModuleUpdate::bias`], a replaced weight in
    /// [`ModuleUpdate::replacement`].
    ///
    /// # Errors
    /// [`Error::Module`] if DoRA is used and `w0` is `None`; [`Error::Length`]; [`Error::ZeroNorm`];
    /// [`Error::FactorNotFinite`] for a factor or gain that f32 cannot hold. `module` is empty in all of them:
    /// [`Error::in_module`]. Panics: none.
    pub fn unmerged(&self, w0: Option<&[bf16]>) -> Result<UnmergedUpdate> {
        let (rows, columns) = self.shape();
        let factors = match w0 {
            Some(w0) => RowFactors::new(w0, self)?,
            None if self.terms.iter().all(|t| t.magnitude.is_none()) => RowFactors::plain(self),
            None => {
                return Err(Error::Module {
                    module: String::new(),
                    field: "use_dora",
                    reason: "its norms need the base weight",
                });
            }
        };
        let rank = self.total_rank();
        let mut a = Vec::with_capacity(rank * columns);
        let mut b = Vec::with_capacity(rows * rank);
        for term in &self.terms {
            a.extend_from_slice(&term.right);
        }
        for row in 0..rows {
            for (i, term) in self.terms.iter().enumerate() {
                let scale = factors.scale(self, i, row);
                b.extend(
                    term.left[row * term.r..][..term.r]
                        .iter()
                        .map(|l| (scale * f64::from(*l)) as f32),
                );
            }
        }
        let gain: Option<Vec<f32>> = factors.gain().map(|g| g.iter().map(|g| *g as f32).collect());
        // The factors of an adapter are finite, but not what scaling makes of them.
        let gains = gain.as_deref().unwrap_or_default();
        for (factor, values, columns) in [("lora_B", &b[..], rank), ("gain", gains, 1)] {
            if let Some(index) = values.iter().position(|v| !v.is_finite()) {
                return Err(Error::FactorNotFinite {
                    module: String::new(),
                    factor,
                    row: index / columns,
                    column: index % columns,
                    format: "f32",
                });
            }
        }
        Ok(UnmergedUpdate { rank, a, b, gain })
    }
}
