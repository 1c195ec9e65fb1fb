//! Completions of one prompt: who computes it, and how the others come to share its pages.
//!
//! ```text
//!   leader     prompt but its last token ─┬─ last token ─ decode …
//!   siblings   held back until then       ├─ fork ─ last token ─ decode …
//!                                         └─ fork ─ last token ─ decode …
//!   late ones  (no slot was free)              full pages of the prompt ─ rest of the prompt ─ decode …
//! ```
//!
//! The prompt's last token is computed once per sibling, as one row, because a sibling's first new token is sampled from
//! the logits of that row with the sibling's own random numbers. Its key and value go into the tail page, so that a
//! fork's tail page is copied at once; the full pages before it are shared.
//!
//! The full pages stay pinned while any sibling is unfinished, for those that start late or resume after a preemption.
//! While a sibling runs the pin costs nothing. When none does and pages run short the pin is given up; the next sibling to
//! be admitted then leads again.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use paged_kv::{PageId, PageTable};

use super::sequence::{Sequence, SequenceId};
use crate::Error;
use crate::completion::RequestId;

/// The state of a request with more than one completion.
#[derive(Debug)]
pub(super) struct Group {
    /// Tokens that siblings can share: the prompt but its last token.
    pub(super) shared_len: usize,
    /// Siblings without a result.
    pub(super) unfinished: usize,
    /// The running sibling that computes the prompt for those that are held back.
    pub(super) leader: Option<SequenceId>,
    /// Full pages of the shared tokens, each retained once.
    pub(super) pinned: Vec<PageId>,
}

impl Group {
    pub(super) fn new(prompt_len: usize, siblings: usize) -> Self {
        Self {
            shared_len: prompt_len - 1,
            unfinished: siblings,
            leader: None,
            pinned: Vec::new(),
        }
    }

    /// Pins pages, of which there are none so far.
    pub(super) fn pin(&mut self, pages: Vec<PageId>, table: &mut PageTable) -> Result<(), Error> {
        for page in pages {
            table.retain(page)?;
            self.pinned.push(page);
        }
        Ok(())
    }

    /// Gives the pinned pages up. Gives how many became free.
    pub(super) fn unpin(&mut self, table: &mut PageTable) -> Result<usize, Error> {
        let mut freed = 0;
        for page in self.pinned.drain(..) {
            freed += usize::from(table.release(page)?);
        }
        Ok(freed)
    }

    /// Pages that [`Group::unpin`] would free.
    pub(super) fn reclaimable(&self, table: &PageTable) -> usize {
        let alone = |page: &&PageId| table.holders(**page) == 1;
        self.pinned.iter().filter(alone).count()
    }
}

/// All siblings of a request.
pub(super) fn siblings(request: RequestId) -> RangeInclusive<SequenceId> {
    let sibling = |index| SequenceId { request, index };
    sibling(0)..=sibling(usize::MAX)
}

/// Whether any sibling of a request is among these.
pub(super) fn has_sibling(sequences: &BTreeMap<SequenceId, Sequence>, request: RequestId) -> bool {
    sequences.range(siblings(request)).next().is_some()
}

/// What a sequence takes over when it gets a slot.
#[derive(Debug)]
pub(super) enum Start {
    /// Everything that its group's leader has computed: a fork.
    Fork(SequenceId),
    /// Full pages, from its group or from the prefix index; may be none.
    Pages { pages: Vec<PageId>, from_index: bool },
}
