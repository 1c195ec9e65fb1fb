//! What one run of the model computes: token ids, and where each of them belongs.
//!
//! Sequences are packed along one axis of rows, whatever mix of prompts, parts of prompts and
//! single next tokens a scheduler puts together:
//!
//! ```text
//! row        0   1   2   3   4   5
//! token id   a   b   c | x | p   q
//! chunk      slot 3,   | 7,| slot 2,
//!            start 0   | 41| start 16      start: logical position of the chunk's first row
//! ```

use paged_kv::{PageTable, Slot};

use crate::{Error, Qwen3Config, Result};

/// Consecutive tokens of one sequence within a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceChunk {
    /// The sequence's slot in the page table.
    pub slot: Slot,
    /// Logical position of the chunk's first token. Everything before it must be in the cache.
    pub start: usize,
    /// Number of tokens; at least 1.
    pub len: usize,
    /// Whether the logits after the chunk's last token are wanted.
    pub wants_logits: bool,
}

/// One step of the model: packed token ids and the chunks that they form.
#[derive(Debug, Clone, Copy)]
pub struct StepBatch<'a> {
    /// `[tokens]`, the chunks' tokens one after the other.
    pub token_ids: &'a [u32],
    /// In the order of their tokens; no slot twice.
    pub chunks: &'a [SequenceChunk],
}

/// Which rows' logits a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// The last row of each chunk that wants logits.
    Wanted,
    /// Every row, for teacher forcing.
    All,
}

/// A checked step: every token id, position and page is valid for the model and the page table.
/// Backends receive nothing else.
#[derive(Debug, Clone, Copy)]
pub struct StepPlan<'a> {
    token_ids: &'a [u32],
    chunks: &'a [SequenceChunk],
    positions: &'a [u32],
    physical: &'a [usize],
    logit_rows: &'a [u32],
    table: &'a PageTable,
}

impl<'a> StepPlan<'a> {
    /// `[tokens]`, each below the vocabulary size.
    pub fn token_ids(&self) -> &'a [u32] {
        self.token_ids
    }

    /// The packed chunks.
    pub fn chunks(&self) -> &'a [SequenceChunk] {
        self.chunks
    }

    /// `[tokens]` logical positions.
    pub fn positions(&self) -> &'a [u32] {
        self.positions
    }

    /// `[tokens]` rows of the cache to write: page × page size + offset.
    pub fn physical(&self) -> &'a [usize] {
        self.physical
    }

    /// Rows whose logits are computed, ascending.
    pub fn logit_rows(&self) -> &'a [u32] {
        self.logit_rows
    }

    /// The page table the step was checked against.
    pub fn table(&self) -> &'a PageTable {
        self.table
    }

    /// Number of rows; at least 1.
    pub fn n_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Whether every chunk is a single token: the case that runs once per generated token.
    pub fn is_decode(&self) -> bool {
        self.chunks.len() == self.token_ids.len()
    }
}

/// Checks steps and holds what they are expanded to, so that a step allocates nothing once the
/// largest has been seen.
///
/// ```
/// use paged_kv::{PageTable, PageTableConfig};
/// use qwen3_model::{LogitRows, Qwen3Config, SequenceChunk, StepBatch, StepPlan, StepPlanner};
///
/// let mut table = PageTable::new(PageTableConfig { n_pages: 4, page_size: 16, n_slots: 2, max_pages_per_slot: 3 })?;
/// let slot = table.allocate_slot()?;
/// let _ = table.reserve(slot, 2)?;
/// let chunk = SequenceChunk { slot, start: 0, len: 2, wants_logits: true };
/// let batch = StepBatch { token_ids: &[5, 6], chunks: &[chunk] };
/// let mut planner = StepPlanner::new();
/// let plan: StepPlan<'_> = planner.plan(&Qwen3Config::qwen3_0_6b(), &batch, &table, LogitRows::Wanted)?;
/// assert_eq!((plan.positions(), plan.logit_rows()), (&[0, 1][..], &[1][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct StepPlanner {
    positions: Vec<u32>,
    physical: Vec<usize>,
    logit_rows: Vec<u32>,
    /// Per slot the number of the last step that used it.
    seen: Vec<u64>,
    step: u64,
}

impl StepPlanner {
    /// A planner without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks `batch` against model and page table.
    ///
    /// # Errors
    /// [`Error::EmptyStep`], [`Error::ChunkLength`], [`Error::TokenId`], [`Error::DuplicateSlot`],
    /// [`Error::Position`], [`Error::Gap`], [`Error::NoPage`], and [`Error::PagedKv`] for a slot
    /// that is not in use.
    pub fn plan<'a>(
        &'a mut self,
        config: &Qwen3Config,
        batch: &StepBatch<'a>,
        table: &'a PageTable,
        logit_rows: LogitRows,
    ) -> Result<StepPlan<'a>> {
        let StepBatch { token_ids, chunks } = *batch;
        check_tokens(config, token_ids, chunks)?;
        self.positions.clear();
        self.physical.clear();
        self.logit_rows.clear();
        self.step += 1;
        for chunk in chunks {
            self.add_chunk(config, chunk, table)?;
            let end = self.positions.len() as u32;
            match logit_rows {
                LogitRows::Wanted if chunk.wants_logits => self.logit_rows.push(end - 1),
                LogitRows::Wanted => {}
                LogitRows::All => self.logit_rows.extend(end - chunk.len as u32..end),
            }
        }
        Ok(StepPlan {
            token_ids,
            chunks,
            positions: &self.positions,
            physical: &self.physical,
            logit_rows: &self.logit_rows,
            table,
        })
    }

    fn add_chunk(&mut self, config: &Qwen3Config, chunk: &SequenceChunk, table: &PageTable) -> Result<()> {
        let SequenceChunk { slot, start, len, .. } = *chunk;
        let written = table.len(slot)?;
        if self.seen.len() <= slot.index() {
            self.seen.resize(slot.index() + 1, 0);
        }
        if std::mem::replace(&mut self.seen[slot.index()], self.step) == self.step {
            return Err(Error::DuplicateSlot { slot });
        }
        let max = config.max_positions();
        // `len` is bounded by the number of token ids, so only `start` can be out of all bounds.
        if start >= max || start + len > max {
            return Err(Error::Position {
                slot,
                position: start.max(max),
                max,
            });
        }
        if start > written {
            return Err(Error::Gap { slot, start, written });
        }
        for position in start..start + len {
            let physical = table
                .physical(slot, position)
                .ok_or(Error::NoPage { slot, position })?;
            self.positions.push(position as u32);
            self.physical.push(physical);
        }
        Ok(())
    }
}

fn check_tokens(config: &Qwen3Config, token_ids: &[u32], chunks: &[SequenceChunk]) -> Result<()> {
    let chunk_tokens = chunks
        .iter()
        .fold(0usize, |sum, chunk| sum.saturating_add(chunk.len));
    if chunk_tokens != token_ids.len() {
        return Err(Error::ChunkLength {
            chunk_tokens,
            token_ids: token_ids.len(),
        });
    }
    if token_ids.is_empty() || chunks.iter().any(|chunk| chunk.len == 0) {
        return Err(Error::EmptyStep {
            chunks: chunks.len(),
            tokens: token_ids.len(),
        });
    }
    match token_ids.iter().position(|&id| id as usize >= config.vocab_size) {
        Some(row) => Err(Error::TokenId {
            id: token_ids[row],
            row,
            vocab: config.vocab_size,
        }),
        None => Ok(()),
    }
}
