//! Adapters in force: what a module computes with, and what all parameters are.

use std::borrow::Cow;
use std::time::Instant;

use half::bf16;
use lora_merge::{ActiveAdapter, DriftSubject, MergedStore, PolicyVersion, Resolved};

use super::CpuBackend;
use super::elementwise::{add, for_rows};
use super::matmul::Matrix;
use super::runtime_update::{Columns, RuntimePolicies};
use crate::adapters::{digest_of_policies, has_effect};
use crate::digest::{Parameter, Values};
use crate::{AdapterReport, Backend, Error, MergeMode, PristineWeights, Result};

impl CpuBackend {
    /// Makes `merged` and `runtime` the adapters in force, which are those of `resolved`.
    pub(super) fn change(
        &mut self,
        merged: &[ActiveAdapter],
        runtime: RuntimePolicies,
        resolved: &[Resolved],
        mode: MergeMode,
        start: Instant,
    ) -> Result<AdapterReport> {
        let updates = || resolved.iter().flat_map(|one| one.updates().iter().flatten());
        let effective = updates().filter(|update| has_effect(update)).count();
        // The last step that can fail, and it leaves the store as it was if it does.
        let refresh = self.store.refresh(merged)?;
        let was_runtime = std::mem::replace(&mut self.runtime, runtime).any();
        let sha256 = digest_of_policies(resolved);
        let same_policy = self.version.sha256 == sha256 && was_runtime;
        self.version = PolicyVersion {
            number: self.version.number + 1,
            sha256,
        };
        let adapted = resolved.iter().map(|one| one.updates().iter().flatten().count());
        Ok(AdapterReport {
            version: self.version,
            mode,
            adapted_modules: adapted.max().unwrap_or(0),
            warnings: resolved.iter().flat_map(|one| one.warnings().to_vec()).collect(),
            changed_modules: match mode {
                MergeMode::Merged => refresh.changed_modules,
                MergeMode::Unmerged if same_policy => 0,
                MergeMode::Unmerged => effective.max(refresh.changed_modules),
            },
            differs_from_base: match mode {
                MergeMode::Merged => refresh.differs_from_base,
                MergeMode::Unmerged => effective > 0,
            },
            recomputed: refresh.recomputed,
            memory: self.store.memory(),
            policies: resolved.iter().map(Resolved::digest).collect(),
            merge_elapsed: refresh.elapsed,
            elapsed: start.elapsed(),
        })
    }

    /// A parameter of the base, but for the matrices of modules and their biases.
    pub(super) fn other_parameter(&self, parameter: Parameter) -> Values<'_> {
        let weights = self.weights();
        let norm = |values| Values::Norm(Cow::Borrowed(values));
        match parameter {
            Parameter::Embedding => Values::Matrix(Cow::Borrowed(weights.embed_tokens.data())),
            Parameter::FinalNorm => norm(&weights.norm),
            Parameter::InputNorm(layer) => norm(&weights.layers[layer].input_norm),
            Parameter::PostAttentionNorm(layer) => norm(&weights.layers[layer].post_attention_norm),
            Parameter::QueryNorm(layer) => norm(&weights.layers[layer].q_norm),
            Parameter::KeyNorm(layer) => norm(&weights.layers[layer].k_norm),
            Parameter::Weight(_) | Parameter::Bias(_) => Values::Absent,
        }
    }

    /// A module's matrix, unless it is the embedding itself; one in 4 bits counts with its bf16 values.
    pub(super) fn matrix<'a>(&'a self, module: usize, data: Option<&'a [bf16]>) -> Values<'a> {
        let embedding = self.weights().embed_tokens.data();
        match (data, self.weights().module(module)) {
            (Some(data), _) if std::ptr::eq(data, embedding) => Values::Absent,
            (Some(data), _) => Values::Matrix(Cow::Borrowed(data)),
            (None, Some(matrix)) => Values::Matrix(matrix.to_bf16()),
            (None, None) => Values::Absent,
        }
    }
}

/// The matrix that a module computes with.
pub(super) fn served<'a>(
    store: &'a MergedStore<PristineWeights>,
    runtime: &'a RuntimePolicies,
    module: usize,
) -> Matrix<'a> {
    let base = store.source().weights().module(module);
    match (
        runtime.replacement(module),
        base.and_then(|matrix| matrix.quantized()),
    ) {
        (Some(replacement), _) => Matrix::Bf16(replacement),
        (None, Some(quantized)) => Matrix::FourBit(quantized),
        (None, None) => Matrix::Bf16(store.weight(module).unwrap_or_default()),
    }
}

/// Adds to a module's product what its matrix does not hold: biases, and adapters at run time. Row `i` of the output is row
/// `row_of(i)` of the step.
pub(super) fn complete(
    store: &MergedStore<PristineWeights>,
    runtime: &RuntimePolicies,
    module: usize,
    input: &[f32],
    output: &mut [f32],
    columns: Columns,
    row_of: impl Fn(usize) -> usize + Sync + Send,
) {
    if !runtime.apply(module, input, output, columns, row_of)
        && let Some(bias) = store.bias(module)
    {
        let Columns { stride, first, size } = columns;
        for_rows(output, stride, |_, row| add(&mut row[first..first + size], bias));
    }
}

/// `verify_no_drift` over all parameters.
impl DriftSubject for CpuBackend {
    type Error = Error;

    fn base_digest(&mut self) -> Result<[u8; 32]> {
        self.base_sha256()
    }

    fn served_digest(&mut self) -> Result<[u8; 32]> {
        self.served_sha256()
    }

    fn refresh(&mut self, active: &[ActiveAdapter]) -> Result<()> {
        self.set_adapters(active, MergeMode::Merged).map(|_| ())
    }
}
