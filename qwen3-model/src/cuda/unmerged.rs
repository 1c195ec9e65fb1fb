//! Adapters beside the weights: every row's policy adds its low-rank terms to the base products.
//!
//! ```text
//!   product ──▶ y        h = A·x of the row's policy        y = gain ⊙ y + B·h + bias
//!
//!   policy_of_slot [n_slots]     which policy a sequence is sampled under; rows know their slot
//!   tables                       per layer and product: A, B, gain and bias of every policy
//! ```
//!
//! One base thus serves several policies in one batch. What graphs read first is at fixed addresses: another set of
//! adapters needs no new capture, as long as there are no more policies and no larger ranks than there is room for.
//!
//! The factors are rounded to bf16 once, the scaling included in B; all sums are in f32.

use std::ops::Range;
use std::time::Instant;

use cuda_graphs::{DeviceBuffer, DeviceSlice};
use lora_merge::{ActiveAdapter, MemoryReport, ModuleUpdate, PolicyVersion, Resolved};

use super::{CudaBackend, Rows};
use crate::adapters::{digest_of_policies, has_effect};
use crate::launch::{
    LowRankTerm, PartUpdate, ProductOutput, RANK_QUANTUM, RowPolicies, Site, UnmergedKernels, UnmergedTables,
};
use crate::{AdapterReport, Error, FusedMatrix, MergeMode, Projection, Result};

/// Room for this many policies at least.
const POLICIES: usize = 8;

#[derive(Debug)]
pub(super) struct UnmergedAdapters {
    kernels: UnmergedKernels,
    /// Four sites per layer, in the order of [`FusedMatrix::ALL`], then the head.
    tables: UnmergedTables,
    /// `[rows, parts, max_rank]`, for the largest step.
    inner: DeviceBuffer<f32>,
    policy_of_slot: DeviceBuffer<i32>,
    /// What the device's copy holds.
    slots: Vec<i32>,
    policies: usize,
    /// Which products any adapter touches: the others launch nothing.
    touched: [bool; 5],
}

/// Number of the head among [`UnmergedAdapters::touched`].
const HEAD: usize = 4;

impl CudaBackend {
    /// Serves several policies at once over the base weights, each a set of adapters at run time, in place of all before;
    /// every sequence is sampled under policy 0 until [`set_slot_policy`](Self::set_slot_policy) says otherwise. Captured
    /// graphs stay as they are, or are captured anew where the adapters need other launches.
    ///
    /// # Errors
    /// [`Error::Policy`] for an adapter that does not fit, replaces a whole module, or has a factor that bf16 cannot hold;
    /// [`Error::Option`] for a model shape that has no kernels, or where rows are
    /// [batch-invariant](Self::make_batch_invariant); [`Error::Cuda`]. The previous policies are then in force. Panics: none.
    pub fn serve_policies(&mut self, policies: &[&[ActiveAdapter]]) -> Result<AdapterReport> {
        if self.invariant.is_some() {
            let problem = "is not possible with adapters beside the weights: merge them".into();
            return Err(Error::Option {
                option: "batch_invariant",
                problem,
            });
        }
        let start = Instant::now();
        let (mut resolved, mut updates) = (Vec::new(), Vec::new());
        for (policy, active) in policies.iter().enumerate() {
            let one = self.adapters.resolver.resolve(active);
            resolved.push(one.map_err(|source| Error::Policy { policy, source })?);
        }
        for (policy, resolved) in resolved.iter().enumerate() {
            let of_policy = self.policy_updates(resolved);
            updates.push(of_policy.map_err(|error| error.in_policy(policy))?);
        }
        let effective = resolved
            .iter()
            .flat_map(|r| r.updates().iter().flatten())
            .filter(|u| has_effect(u))
            .count();
        // Weights go back to the base before the adapters are beside them.
        let merged = self.adapters_are_merged();
        let restored = match merged {
            true => self.merge_adapters(&[], MergeMode::Merged)?.changed_modules,
            false => 0,
        };
        let writing = Instant::now();
        self.put_tables(&updates)?;
        let same = resolved.len() == 1 && !merged && self.policy_in_force().sha256 == resolved[0].digest();
        let version = PolicyVersion {
            number: self.policy_in_force().number + u64::from(!merged),
            sha256: digest_of_policies(&resolved),
        };
        self.set_policy_version(version);
        let adapted = resolved
            .iter()
            .map(|r| r.updates().iter().flatten().count())
            .max();
        let mut memory = MemoryReport::default();
        memory.modules = self.adapters.resolver.specs().len();
        Ok(AdapterReport {
            version,
            mode: MergeMode::Unmerged,
            adapted_modules: adapted.unwrap_or(0),
            warnings: resolved.iter().flat_map(|r| r.warnings().to_vec()).collect(),
            changed_modules: if same { 0 } else { effective.max(restored) },
            differs_from_base: effective > 0,
            recomputed: 0,
            memory,
            policies: resolved.iter().map(Resolved::digest).collect(),
            merge_elapsed: writing.elapsed(),
            elapsed: start.elapsed(),
        })
    }

    /// Samples the sequence in `slot` under a policy of [`serve_policies`](Self::serve_policies) from the next step on, or
    /// under the base (`None`). What the cache holds of the slot must have been computed under the same policy.
    ///
    /// # Errors
    /// [`Error::Option`] for a slot or a policy that is not there; [`Error::Cuda`]. Panics: none.
    pub fn set_slot_policy(&mut self, slot: usize, policy: Option<usize>) -> Result<()> {
        let refuse = |option, problem: String| Err(Error::Option { option, problem });
        let Some(unmerged) = &mut self.unmerged else {
            return match policy {
                None => Ok(()),
                Some(policy) => refuse(
                    "policy",
                    format!("is {policy}; no adapters are served at run time"),
                ),
            };
        };
        if policy.is_some_and(|policy| policy >= unmerged.policies) {
            return refuse("policy", format!("is {policy:?} of {}", unmerged.policies));
        }
        if slot >= unmerged.slots.len() {
            return refuse("slot", format!("is {slot} of {}", unmerged.slots.len()));
        }
        let value = policy.map_or(-1, |policy| policy as i32);
        if std::mem::replace(&mut unmerged.slots[slot], value) != value {
            self.stream
                .upload(unmerged.policy_of_slot.slice(slot..=slot)?, &[value])?;
        }
        Ok(())
    }

    /// Forgets adapters at run time, once weights have been merged.
    pub(super) fn drop_unmerged(&mut self) -> Result<()> {
        if self.unmerged.is_some() {
            self.stream.synchronize()?;
            self.unmerged = None;
            self.capture_again()?;
        }
        Ok(())
    }

    fn capture_again(&mut self) -> Result<()> {
        if self.graphs.is_some() {
            self.capture()?;
        }
        Ok(())
    }

    /// `[sites][parts]` of one policy.
    fn policy_updates(&self, resolved: &Resolved) -> Result<Vec<Vec<PartUpdate>>> {
        let part = |module: usize| match &resolved.updates()[module] {
            Some(update) => self.part_update(module, update),
            None => Ok(PartUpdate::default()),
        };
        let n = Projection::ALL.len();
        let mut sites = Vec::new();
        for layer in 0..self.config.n_layers {
            for matrix in FusedMatrix::ALL {
                let parts = matrix.parts().iter().map(|&p| part(layer * n + p as usize));
                sites.push(parts.collect::<Result<_>>()?);
            }
        }
        sites.push(vec![part(self.config.n_layers * n)?]);
        Ok(sites)
    }

    fn part_update(&self, module: usize, update: &ModuleUpdate) -> Result<PartUpdate> {
        if update.replacement().is_some() {
            return Err(lora_merge::Error::Module {
                module: self.adapters.resolver.specs()[module].name.clone(),
                field: "modules_to_save",
                reason: "a whole module cannot be replaced at run time on a GPU; merge the adapter",
            }
            .into());
        }
        let dora = update.terms().iter().any(|term| term.magnitude.is_some());
        let base = match dora {
            true => Some(self.base_values(module)?),
            false => None,
        };
        let named = |error: lora_merge::Error| error.in_module(&self.adapters.resolver.specs()[module].name);
        let low_rank = update.unmerged(base.as_deref()).map_err(named)?;
        let bias = update.bias(None).map_err(named)?;
        Ok(PartUpdate::rounded(low_rank, bias).map_err(named)?)
    }

    /// Serves the updates; the tables are made, or made anew, where there is too little room.
    fn put_tables(&mut self, updates: &[Vec<Vec<PartUpdate>>]) -> Result<()> {
        let parts = || updates.iter().flatten().flatten();
        let rank = parts().map(|part| part.rank).max().unwrap_or(0).max(RANK_QUANTUM);
        let mut touched = [false; 5];
        for policy in updates {
            for (site, parts) in policy.iter().enumerate() {
                let kind = if site == 4 * self.config.n_layers {
                    HEAD
                } else {
                    site % 4
                };
                let some = |p: &PartUpdate| p.rank > 0 || !p.gain.is_empty() || !p.bias.is_empty();
                touched[kind] |= parts.iter().any(some);
            }
        }
        let stream = self.stream.clone();
        let all_slots = |n: usize| vec![if updates.is_empty() { -1 } else { 0 }; n];
        if let Some(unmerged) = &mut self.unmerged
            && unmerged.tables.policies() >= updates.len()
            && unmerged.tables.max_rank() >= rank
        {
            let was_low_rank = unmerged.tables.is_low_rank();
            unmerged.tables.replace(&stream, updates)?;
            let other_launches = unmerged.tables.is_low_rank() != was_low_rank;
            unmerged.policies = updates.len();
            unmerged.slots = all_slots(unmerged.slots.len());
            stream.upload(&unmerged.policy_of_slot, &unmerged.slots)?;
            let more = touched
                .iter()
                .zip(&unmerged.touched)
                .any(|(now, before)| *now && !before);
            if more || other_launches {
                unmerged.touched = touched;
                self.capture_again()?;
            }
            return Ok(());
        }
        let device = stream.device();
        let mut sites = Vec::new();
        for _ in 0..self.config.n_layers {
            sites.extend(FusedMatrix::ALL.map(|matrix| {
                let shapes = matrix.parts().iter().map(|&p| self.config.projection_shape(p));
                let shapes: Vec<_> = shapes.collect();
                Site {
                    k: shapes[0][1],
                    parts: shapes.iter().map(|shape| shape[0]).collect(),
                }
            }));
        }
        sites.push(Site {
            k: self.config.hidden_size,
            parts: vec![self.config.vocab_size],
        });
        let policies = updates.len().max(POLICIES);
        let mut tables = UnmergedTables::new(device, sites, policies, rank)?;
        tables.replace(&stream, updates)?;
        let rows = self.options.max_tokens.max(self.options.max_batch_size);
        let n_slots = self.options.page_table().n_slots;
        let slots = all_slots(n_slots);
        let unmerged = UnmergedAdapters {
            kernels: UnmergedKernels::load(self.compiler(), device)?,
            inner: DeviceBuffer::zeroed(device, rows * 3 * rank)?,
            policy_of_slot: DeviceBuffer::from_slice(&stream, &slots)?,
            tables,
            slots,
            policies: updates.len(),
            touched,
        };
        stream.synchronize()?;
        self.unmerged = Some(unmerged);
        self.capture_again()
    }

    /// Adds to a product of a layer what the policies of its rows add.
    pub(super) fn add_unmerged(&self, layer: usize, matrix: FusedMatrix) -> Result<()> {
        match self.low_rank(layer, matrix)? {
            Some(term) => self.add_low_rank(&term, self.operands(matrix)?.1),
            None => Ok(()),
        }
    }

    /// The first of the two products of that; `None` where no policy adds anything.
    pub(super) fn low_rank(&self, layer: usize, matrix: FusedMatrix) -> Result<Option<LowRankTerm<'_>>> {
        let Some(unmerged) = self.unmerged.as_ref().filter(|u| u.touched[matrix as usize]) else {
            return Ok(None);
        };
        let m = self.n_rows();
        let slots = match self.rows {
            Rows::Packed { .. } => self.packed.slots.slice(..m)?,
            Rows::Decode { bucket } => self.decode.slots(bucket)?,
        };
        let (x, _) = self.operands(matrix)?;
        let site = 4 * layer + matrix as usize;
        let rows = unmerged.rows(slots);
        let inner = unmerged.inner.as_slice();
        let kernels = &unmerged.kernels;
        let term = kernels.down(&self.stream, &unmerged.tables, site, rows, x, inner)?;
        Ok(Some(term))
    }

    /// The second product.
    pub(super) fn add_low_rank(&self, term: &LowRankTerm<'_>, y: ProductOutput<'_>) -> Result<()> {
        match &self.unmerged {
            Some(unmerged) => unmerged.kernels.up(&self.stream, term, y),
            None => Ok(()),
        }
    }

    /// Whether adapters are products of low rank and nothing else.
    pub(super) fn adds_low_rank_only(&self) -> bool {
        self.unmerged.as_ref().is_some_and(|u| u.tables.is_low_rank())
    }

    /// The same for the logits of the wanted rows `rows`, which are the first ones of `logits`.
    pub(super) fn add_unmerged_head(&self, rows: Range<usize>) -> Result<()> {
        let Some(unmerged) = self.unmerged.as_ref().filter(|u| u.touched[HEAD]) else {
            return Ok(());
        };
        let (n, w) = (rows.len(), &self.workspace);
        let slots = match self.rows {
            Rows::Packed { .. } => self.packed.logit_slots.slice(rows)?,
            Rows::Decode { bucket } => self.decode.slots(bucket)?,
        };
        let x = w.normed.slice(..n * self.config.hidden_size)?;
        let y = ProductOutput::F32(w.logits.slice(..n * self.config.vocab_size)?);
        let site = 4 * self.config.n_layers;
        let inner = unmerged.inner.as_slice();
        let kernels = &unmerged.kernels;
        kernels.apply(
            &self.stream,
            &unmerged.tables,
            site,
            unmerged.rows(slots),
            x,
            inner,
            y,
        )
    }
}

impl UnmergedAdapters {
    fn rows<'a>(&'a self, slots: DeviceSlice<'a, i32>) -> RowPolicies<'a> {
        RowPolicies {
            slots,
            policy_of_slot: self.policy_of_slot.as_slice(),
        }
    }
}
