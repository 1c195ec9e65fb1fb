//! What differs from step to step, in device memory at fixed addresses.
//!
//! ```text
//!   packed steps   token_ids, positions, slots  [max tokens]
//!                  logit_rows, logit_slots      rows whose logits are wanted, and their slots
//!   decode         rows = slots | positions     [2, max batch], one upload
//!                  last_token [n_slots]         the id sampled last for each slot
//!   both           sampled = tokens | log-probabilities, of packed steps and of decode  [4, max batch]
//! ```
//!
//! A replayed decode step moves `positions` and `last_token` on by itself; the host keeps what it
//! knows of them and uploads only when the batch changes.

use cuda_graphs::{DeviceBuffer, DeviceSlice, Stream};

use super::staging::Staging;
use crate::{Result, StepPlan};

#[derive(Debug)]
pub(crate) struct PackedInputs {
    pub(crate) token_ids: DeviceBuffer<u32>,
    pub(crate) positions: DeviceBuffer<i32>,
    pub(crate) slots: DeviceBuffer<i32>,
    pub(crate) logit_rows: DeviceBuffer<i32>,
    pub(crate) logit_slots: DeviceBuffer<i32>,
    /// Host side of what is derived from the chunks, reused.
    host: Vec<i32>,
}

impl PackedInputs {
    pub(crate) fn new(stream: &Stream, max_tokens: usize) -> Result<Self> {
        let device = stream.device();
        let numbers = || DeviceBuffer::<i32>::zeroed(device, max_tokens);
        Ok(Self {
            token_ids: DeviceBuffer::zeroed(device, max_tokens)?,
            positions: numbers()?,
            slots: numbers()?,
            logit_rows: numbers()?,
            logit_slots: numbers()?,
            host: Vec::new(),
        })
    }

    /// Words that [`upload`](Self::upload) takes from the staging buffer at most.
    pub(crate) fn words(max_tokens: usize) -> usize {
        5 * max_tokens
    }

    pub(crate) fn upload(
        &mut self,
        stream: &Stream,
        staging: &mut Staging,
        plan: &StepPlan<'_>,
    ) -> Result<()> {
        let (tokens, wanted) = (plan.n_tokens(), plan.logit_rows());
        staging.upload(stream, self.token_ids.slice(..tokens)?, plan.token_ids())?;
        staging.upload(
            stream,
            self.positions.slice(..tokens)?.cast::<u32>()?,
            plan.positions(),
        )?;
        self.host.clear();
        for chunk in plan.chunks() {
            self.host
                .extend(std::iter::repeat_n(chunk.slot.index() as i32, chunk.len));
        }
        staging.upload(stream, self.slots.slice(..tokens)?, &self.host)?;
        staging.upload(
            stream,
            self.logit_rows.slice(..wanted.len())?.cast::<u32>()?,
            wanted,
        )?;
        let slots: Vec<i32> = wanted.iter().map(|&row| self.host[row as usize]).collect();
        staging.upload(stream, self.logit_slots.slice(..wanted.len())?, &slots)
    }
}

/// One row of a decode step: the next token of the sequence in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeRow {
    /// The sequence's slot, as an index; never 0, which padding uses.
    pub slot: usize,
    /// Logical position of the token that goes in: the one sampled last for the slot.
    pub position: usize,
}

#[derive(Debug)]
pub(crate) struct DecodeInputs {
    rows: DeviceBuffer<i32>,
    max_batch: usize,
    /// What `rows` will hold once the queued work is done; empty if unknown.
    known: Vec<DecodeRow>,
    host: Vec<i32>,
}

const PADDING: DecodeRow = DecodeRow { slot: 0, position: 0 };

impl DecodeInputs {
    pub(crate) fn new(stream: &Stream, max_batch: usize) -> Result<Self> {
        Ok(Self {
            rows: DeviceBuffer::zeroed(stream.device(), 2 * max_batch)?,
            max_batch,
            known: vec![PADDING; max_batch],
            host: Vec::new(),
        })
    }

    /// Words that [`set`](Self::set) takes from the staging buffer.
    pub(crate) fn words(max_batch: usize) -> usize {
        2 * max_batch
    }

    /// `[bucket]` slots.
    pub(crate) fn slots(&self, bucket: usize) -> Result<DeviceSlice<'_, i32>> {
        Ok(self.rows.slice(..bucket)?)
    }

    /// `[bucket]` positions.
    pub(crate) fn positions(&self, bucket: usize) -> Result<DeviceSlice<'_, i32>> {
        Ok(self.rows.slice(self.max_batch..self.max_batch + bucket)?)
    }

    /// Makes the device's rows `rows`, then padding up to `bucket`. Uploads only if the last step did not leave
    /// them so. True if it uploaded.
    pub(crate) fn set(
        &mut self,
        stream: &Stream,
        staging: &mut Staging,
        rows: &[DecodeRow],
        bucket: usize,
    ) -> Result<bool> {
        let padded = || {
            rows.iter()
                .copied()
                .chain(std::iter::repeat_n(PADDING, bucket - rows.len()))
        };
        if self.known.len() >= bucket && padded().eq(self.known[..bucket].iter().copied()) {
            return Ok(false);
        }
        let tail = padded().chain(std::iter::repeat_n(PADDING, self.max_batch - bucket));
        let all: Vec<DecodeRow> = tail.collect();
        self.host.clear();
        self.host.extend(all.iter().map(|row| row.slot as i32));
        self.host.extend(all.iter().map(|row| row.position as i32));
        // Unknown until the upload is queued.
        self.known.clear();
        staging.upload(stream, self.rows.as_slice(), &self.host)?;
        self.known = all;
        Ok(true)
    }

    /// Notes that a step of `bucket` rows was queued: rows with a slot move on by one position.
    pub(crate) fn advanced(&mut self, bucket: usize) {
        for row in self.known.iter_mut().take(bucket).filter(|row| row.slot != 0) {
            row.position += 1;
        }
    }

    /// Forgets what the device holds, after an error or a run that was not announced.
    pub(crate) fn forget(&mut self) {
        self.known.clear();
    }
}

/// Sampled tokens and log-probabilities on the device, `[4, max_batch]` words.
#[derive(Debug)]
pub(crate) struct Sampled {
    words: DeviceBuffer<u32>,
    max_batch: usize,
}

/// Which half of [`Sampled`] a step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampledBy {
    Packed = 0,
    Decode = 2,
}

impl Sampled {
    pub(crate) fn new(stream: &Stream, max_batch: usize) -> Result<Self> {
        Ok(Self {
            words: DeviceBuffer::zeroed(stream.device(), 4 * max_batch)?,
            max_batch,
        })
    }

    pub(crate) fn words(&self) -> &DeviceBuffer<u32> {
        &self.words
    }

    pub(crate) fn tokens(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, u32>> {
        let start = by as usize * self.max_batch;
        Ok(self.words.slice(start..start + rows)?)
    }

    pub(crate) fn logprobs(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, f32>> {
        let start = (by as usize + 1) * self.max_batch;
        Ok(self.words.slice(start..start + rows)?.cast::<f32>()?)
    }
}
