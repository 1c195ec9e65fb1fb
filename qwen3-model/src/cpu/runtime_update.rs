//! Adapters that are not merged: `y = gain ⊙ (W₀·x) + B·(A·x) + bias`, in f32.

use std::collections::BTreeMap;

use half::bf16;
use lora_merge::{ModuleSpec, ModuleUpdate, Resolved, UnmergedUpdate};

use super::elementwise::{add, for_rows, multiply, multiply_add};
use crate::{Error, Result, WeightMatrix, Weights};

/// Where a module's outputs lie in rows of a fused product.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) stride: usize,
    pub(super) first: usize,
    pub(super) size: usize,
}

/// What one module computes besides its base product.
pub(super) struct RuntimeUpdate {
    /// Takes the place of the base matrix.
    pub(super) replacement: Option<Vec<bf16>>,
    low_rank: UnmergedUpdate,
    bias: Option<Vec<f32>>,
}

impl RuntimeUpdate {
    pub(super) fn new(update: &ModuleUpdate, base: &WeightMatrix) -> Result<Self, lora_merge::Error> {
        // Only DoRA's norms need the base's values.
        let dora = update.terms().iter().any(|term| term.magnitude.is_some());
        let base = dora.then(|| base.to_bf16());
        let replacement: Option<Vec<bf16>> = update
            .replacement()
            .map(|w| w.iter().copied().map(bf16::from_f32).collect());
        if let Some(index) = replacement.iter().flatten().position(|w| !w.is_finite()) {
            let (_, columns) = update.shape();
            return Err(lora_merge::Error::MergedNotFinite {
                module: String::new(),
                row: index / columns,
                column: index % columns,
            });
        }
        Ok(Self {
            replacement,
            low_rank: update.unmerged(base.as_deref())?,
            bias: update.bias(None)?,
        })
    }

    /// Completes the module's columns `out` of one row, which hold the base product of the input `x`.
    fn apply(&self, x: &[f32], out: &mut [f32]) {
        let UnmergedUpdate { rank, a, b, gain, .. } = &self.low_rank;
        if let Some(gain) = gain {
            multiply(out, gain);
        }
        if *rank > 0 {
            let mut inner = vec![0.0; *rank];
            multiply_add(&mut inner, a, x);
            multiply_add(out, b, &inner);
        }
        if let Some(bias) = &self.bias {
            add(out, bias);
        }
    }
}

/// The policies whose adapters are not merged, and which of them each sequence and each row of a step is computed under.
#[derive(Default)]
pub(super) struct RuntimePolicies {
    /// Per policy what each module does; empty while adapters are merged.
    updates: Vec<Vec<Option<RuntimeUpdate>>>,
    /// Slots that are not under policy 0.
    slots: BTreeMap<usize, Option<usize>>,
    /// `[tokens]` of the step at hand.
    rows: Vec<Option<usize>>,
}

impl RuntimePolicies {
    /// All slots are under the first policy. The modules are those of `specs`.
    pub(super) fn new(resolved: &[Resolved], specs: &[ModuleSpec], weights: &Weights) -> Result<Self> {
        let mut updates = Vec::with_capacity(resolved.len());
        for (policy, resolved) in resolved.iter().enumerate() {
            let update =
                |(module, update): (usize, &Option<ModuleUpdate>)| match (update, weights.module(module)) {
                    (Some(update), Some(base)) => RuntimeUpdate::new(update, base)
                        .map(Some)
                        .map_err(|source| source.in_module(&specs[module].name)),
                    _ => Ok(None),
                };
            let of_modules = resolved.updates().iter().enumerate().map(update);
            let of_modules = of_modules.collect::<Result<Vec<_>, _>>();
            updates.push(of_modules.map_err(|source| Error::Policy { policy, source })?);
        }
        Ok(Self {
            updates,
            ..Self::default()
        })
    }

    /// Whether any policy has adapters.
    pub(super) fn any(&self) -> bool {
        self.updates.iter().flatten().any(Option::is_some)
    }

    pub(super) fn set_slot(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        match policy {
            Some(policy) if policy >= self.updates.len() => {
                return Err(Error::Option {
                    option: "policy",
                    problem: format!("is {policy} of {}", self.updates.len()),
                });
            }
            Some(0) => self.slots.remove(&slot),
            policy => self.slots.insert(slot, policy),
        };
        Ok(())
    }

    /// Takes over the slots of a step's rows: `(slot, rows)` in their order.
    pub(super) fn prepare(&mut self, chunks: impl Iterator<Item = (usize, usize)>) {
        self.rows.clear();
        if self.updates.is_empty() {
            return;
        }
        for (slot, len) in chunks {
            let policy = self.slots.get(&slot).copied().unwrap_or(Some(0));
            self.rows.extend(std::iter::repeat_n(policy, len));
        }
    }

    /// What takes the place of a module's matrix: only a policy that is alone can replace it.
    pub(super) fn replacement(&self, module: usize) -> Option<&[bf16]> {
        let update = self.updates.first()?[module].as_ref()?;
        update.replacement.as_deref()
    }

    /// Completes the module's columns of `out` `[rows, stride]`, which hold the base product of `x` `[rows, in]`; row `i`
    /// is row `row_of(i)` of the step. False if no policy touches the module.
    pub(super) fn apply(
        &self,
        module: usize,
        x: &[f32],
        out: &mut [f32],
        columns: Columns,
        row_of: impl Fn(usize) -> usize + Sync + Send,
    ) -> bool {
        if self.updates.iter().all(|updates| updates[module].is_none()) {
            return false;
        }
        let Columns { stride, first, size } = columns;
        let cols = x.len() / (out.len() / stride);
        for_rows(out, stride, |row, out| {
            if let Some(policy) = self.rows[row_of(row)]
                && let Some(update) = &self.updates[policy][module]
            {
                update.apply(&x[row * cols..][..cols], &mut out[first..first + size]);
            }
        });
        true
    }
}
