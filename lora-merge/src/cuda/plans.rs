//! Plans that are made one after the other while the factors of all of them are packed.

use super::pack::Format;
use super::packing::Packing;
use super::plan::Draft;
use super::{MergeKernels, MergePlan, MergeTarget, MergeWorkspace};
use crate::{Error, ModuleUpdate, Result};
use cuda_graphs::Stream;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::AtomicU32;

/// The modules of one plan: names and updates.
type Modules<'a> = [(&'a str, &'a ModuleUpdate)];

/// What [`MergeWorkspace::make_plans`] hands out plans by, in order.
///
/// ```no_run
/// use cuda_graphs::Stream;
/// use lora_merge::cuda::{MergeKernels, MergePlan, MergeTarget, MergeWorkspace, PlansInTheMaking};
/// use lora_merge::{Error, ModuleUpdate};
///
/// # fn refresh(kernels: &MergeKernels, workspace: &mut MergeWorkspace, stream: &Stream,
/// #     layers: &[&[(&str, &ModuleUpdate)]], targets: &[Vec<MergeTarget<'_>>]) -> Result<(), Error> {
/// // One plan per layer: each is uploaded while those before it merge.
/// let plans: Vec<MergePlan> = workspace.make_plans(layers, |plans: &mut PlansInTheMaking<'_>| {
///     let each = targets.iter().map(|targets| {
///         let mut plan = plans.next(kernels, stream, targets)?;
///         plan.run(kernels, plans.workspace(), stream, targets)?;
///         Ok::<_, Error>(plan)
///     });
///     each.collect()
/// })?;
/// for plan in &plans {
///     println!("{:?}", plan.outcomes(stream)?);
/// }
/// # Ok(()) }
/// ```
pub struct PlansInTheMaking<'a> {
    workspace: &'a mut MergeWorkspace,
    waiting: std::vec::IntoIter<Waiting<'a>>,
}

struct Waiting<'a> {
    draft: Draft,
    modules: &'a Modules<'a>,
    packed: Packed<'a>,
}

/// Where a plan's factors are packed.
#[derive(Clone)]
pub(super) struct Packed<'a> {
    pub(super) packing: &'a Packing<'a>,
    pub(super) chunks: Range<usize>,
    /// Bits of the greatest magnitude of each term's right factor, once it is packed.
    pub(super) greatest: &'a [AtomicU32],
    /// Place of its tables in page-locked memory.
    pub(super) tables_at: usize,
}

impl std::fmt::Debug for PlansInTheMaking<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlansInTheMaking")
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

impl PlansInTheMaking<'_> {
    /// The next plan, as [`MergePlan::new`] makes it; returns when its factors are packed and their upload is queued.
    ///
    /// # Errors
    /// As [`MergePlan::new`]; [`Error::Length`] if there is no further plan. Panics: none.
    pub fn next(
        &mut self,
        kernels: &MergeKernels,
        stream: &Stream,
        targets: &[MergeTarget<'_>],
    ) -> Result<MergePlan> {
        let next = self.waiting.next().ok_or(Error::Length {
            what: "the list of plans",
            expected: 1,
            found: 0,
        })?;
        let packed = next.packed;
        MergePlan::of_draft(
            next.draft,
            kernels,
            self.workspace,
            stream,
            next.modules,
            targets,
            packed,
        )
    }

    /// The workspace, to run the plans made so far.
    pub fn workspace(&mut self) -> &mut MergeWorkspace {
        self.workspace
    }
}

/// Lets the threads that pack go, also when a panic passes.
struct Stop<'a>(&'a Packing<'a>);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl MergeWorkspace {
    /// Calls `make` to make and run plans for several lists of modules, while the threads of rayon's current pool pack the
    /// factors of all of them ahead. A plan is uploaded while the one before it merges: all together take little longer
    /// than the longest of packing, uploading and merging.
    ///
    /// Plans that are not made are forgotten. `make` runs on this thread.
    ///
    /// # Errors
    /// Those of `make`; [`Error::Cuda`]. Panics: those of `make`.
    pub fn make_plans<R, E: From<Error>>(
        &mut self,
        plans: &[&Modules<'_>],
        make: impl FnOnce(&mut PlansInTheMaking<'_>) -> Result<R, E>,
    ) -> Result<R, E> {
        let formats: Vec<Vec<Vec<Format>>> = plans
            .par_iter()
            .map(|modules| {
                modules
                    .iter()
                    .map(|(_, update)| Format::of_terms(update))
                    .collect()
            })
            .collect();
        let device = self.device().clone();
        let drafts = plans.iter().zip(&formats);
        let drafts: Vec<Draft> = drafts
            .map(|(modules, formats)| Draft::new(modules, formats, device.info()))
            .collect();
        let scratch = drafts.iter().map(|d| d.scratch_bytes).max().unwrap_or(0);
        self.reserve_scratch(scratch)?;
        self.reserve_tables(drafts.iter().map(Draft::table_bytes).sum())?;
        let greatest: Vec<Vec<AtomicU32>> = drafts
            .iter()
            .map(|d| (0..d.terms()).map(|_| AtomicU32::new(0)).collect())
            .collect();
        let segments = drafts.iter().zip(plans).zip(&greatest);
        let segments = segments.map(|((draft, modules), greatest)| draft.segments(modules, greatest));
        let (packing, chunks) = Packing::new(self, segments.collect())?;
        let mut tables_at = 0;
        let waiting = drafts.into_iter().zip(plans).zip(chunks).zip(&greatest);
        let waiting: Vec<Waiting<'_>> = waiting
            .map(|(((draft, modules), chunks), greatest)| {
                let packed = Packed {
                    packing: &packing,
                    chunks,
                    greatest,
                    tables_at,
                };
                tables_at += draft.table_bytes();
                Waiting {
                    draft,
                    modules,
                    packed,
                }
            })
            .collect();
        let made = rayon::in_place_scope(|scope| {
            let _stop = Stop(&packing);
            // This thread packs as well.
            for _ in 1..rayon::current_num_threads() {
                scope.spawn(|_| packing.help());
            }
            make(&mut PlansInTheMaking {
                workspace: self,
                waiting: waiting.into_iter(),
            })
        });
        self.slots = packing.into_slots();
        made
    }
}
