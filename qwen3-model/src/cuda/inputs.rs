//! What differs from step to step, in device memory at fixed addresses.
//!
//! ```text
//!   packed steps   token_ids, positions, slots  [max tokens]
//!                  logit_rows, logit_slots      rows whose logits are wanted, and their slots
//!                  sample_rows [max batch]      how their tokens are chosen
//!   decode         rows = slots | positions     [2, max batch], one upload
//!                  sample_rows [max batch]      another, when it changes
//!   both           last_token [n_slots]         the id sampled last for each slot
//!                  states [n_slots, vocab]      what sampling knows of the tokens of each slot
//!                  sampled = tokens | log-probabilities | those drawn with   [3, max batch], for packed steps and for decode
//!                  top [max batch, 2, 20]       the most likely tokens, likewise
//! ```
//!
//! A replayed decode step moves `positions` and `last_token` on by itself; the host keeps what it
//! knows of them and uploads only when the batch changes.

use cuda_graphs::{DeviceBuffer, DeviceSlice, Stream};

use super::staging::Staging;
use crate::launch::SampleRow;
use crate::sampling::{MAX_TOP_LOGPROBS, Sampling};
use crate::{Result, StepPlan};

#[derive(Debug)]
pub(crate) struct PackedInputs {
    pub(crate) token_ids: DeviceBuffer<u32>,
    pub(crate) positions: DeviceBuffer<i32>,
    pub(crate) slots: DeviceBuffer<i32>,
    pub(crate) logit_rows: DeviceBuffer<i32>,
    pub(crate) logit_slots: DeviceBuffer<i32>,
    /// [`SampleRow`]s.
    pub(crate) sample_rows: DeviceBuffer<u32>,
    /// Host side of what is derived from the chunks, reused.
    host: Vec<i32>,
}

impl PackedInputs {
    pub(crate) fn new(stream: &Stream, max_tokens: usize, max_batch: usize) -> Result<Self> {
        let device = stream.device();
        let numbers = || DeviceBuffer::<i32>::zeroed(device, max_tokens);
        Ok(Self {
            token_ids: DeviceBuffer::zeroed(device, max_tokens)?,
            positions: numbers()?,
            slots: numbers()?,
            logit_rows: numbers()?,
            logit_slots: numbers()?,
            sample_rows: DeviceBuffer::zeroed(device, max_batch * SampleRow::WORDS)?,
            host: Vec::new(),
        })
    }

    /// Words that [`upload`](Self::upload) takes from the staging buffer at most.
    pub(crate) fn words(max_tokens: usize, max_batch: usize) -> usize {
        5 * max_tokens + max_batch * SampleRow::WORDS
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

    /// Uploads how the wanted rows of `plan` are sampled, one `sampling` each.
    pub(crate) fn upload_sampling(
        &mut self,
        stream: &Stream,
        staging: &mut Staging,
        plan: &StepPlan<'_>,
        sampling: &[Sampling],
    ) -> Result<()> {
        let positions = plan
            .logit_rows()
            .iter()
            .map(|&row| plan.positions()[row as usize]);
        let rows: Vec<_> = (sampling.iter().zip(positions))
            .map(|(sampling, position)| SampleRow::new(sampling, position as usize))
            .collect();
        let words: &[u32] = bytemuck::cast_slice(&rows);
        staging.upload(stream, self.sample_rows.slice(..words.len())?, words)
    }
}

/// One row of a decode step: the next token of the sequence in a slot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeRow {
    /// The sequence's slot, as an index; never 0, which padding uses.
    pub slot: usize,
    /// Logical position of the token that goes in: the one sampled last for the slot.
    pub position: usize,
    /// How the next token is chosen.
    pub sampling: Sampling,
}

impl DecodeRow {
    /// A row that takes the most likely token.
    pub const fn greedy(slot: usize, position: usize) -> Self {
        Self {
            slot,
            position,
            sampling: Sampling::GREEDY,
        }
    }
}

#[derive(Debug)]
pub(crate) struct DecodeInputs {
    rows: DeviceBuffer<i32>,
    /// [`SampleRow`]s.
    sample_rows: DeviceBuffer<u32>,
    /// How `sample_rows` says that rows are sampled; empty if unknown.
    known_sampling: Vec<Sampling>,
    max_batch: usize,
    /// What `rows` will hold once the queued work is done; empty if unknown.
    known: Vec<DecodeRow>,
    host: Vec<i32>,
}

const PADDING: DecodeRow = DecodeRow::greedy(0, 0);

impl DecodeInputs {
    pub(crate) fn new(stream: &Stream, max_batch: usize) -> Result<Self> {
        Ok(Self {
            rows: DeviceBuffer::zeroed(stream.device(), 2 * max_batch)?,
            sample_rows: DeviceBuffer::zeroed(stream.device(), max_batch * SampleRow::WORDS)?,
            known_sampling: Vec::new(),
            max_batch,
            known: vec![PADDING; max_batch],
            host: Vec::new(),
        })
    }

    /// Words that [`set`](Self::set) takes from the staging buffer.
    pub(crate) fn words(max_batch: usize) -> usize {
        max_batch * (2 + SampleRow::WORDS)
    }

    /// `[bucket]` slots.
    pub(crate) fn slots(&self, bucket: usize) -> Result<DeviceSlice<'_, i32>> {
        Ok(self.rows.slice(..bucket)?)
    }

    /// `[bucket]` positions.
    pub(crate) fn positions(&self, bucket: usize) -> Result<DeviceSlice<'_, i32>> {
        Ok(self.rows.slice(self.max_batch..self.max_batch + bucket)?)
    }

    /// `[bucket, SampleRow::WORDS]`.
    pub(crate) fn sample_rows(&self, bucket: usize) -> Result<DeviceSlice<'_, u32>> {
        Ok(self.sample_rows.slice(..bucket * SampleRow::WORDS)?)
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
        let sampling = all.iter().map(|row| row.sampling);
        if !sampling.clone().eq(self.known_sampling.iter().copied()) {
            let rows: Vec<_> = all
                .iter()
                .map(|row| SampleRow::new(&row.sampling, row.position))
                .collect();
            self.known_sampling.clear();
            staging.upload(
                stream,
                self.sample_rows.as_slice(),
                bytemuck::cast_slice::<_, u32>(&rows),
            )?;
            self.known_sampling.extend(sampling);
        }
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
        self.known_sampling.clear();
    }
}

/// Sampled tokens and what is said about them, on the device.
#[derive(Debug)]
pub(crate) struct Sampled {
    /// `[2, 3, max_batch]`: for packed steps and decode, tokens, log-probabilities, those drawn with.
    words: DeviceBuffer<u32>,
    /// `[2, max_batch, 2, MAX_TOP_LOGPROBS]`: likewise, ids of the most likely tokens and their log-probabilities.
    top: DeviceBuffer<u32>,
    max_batch: usize,
}

/// Which half of [`Sampled`] a step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampledBy {
    Packed = 0,
    Decode = 1,
}

/// Words of one row of [`Sampled`].
pub(crate) const SAMPLED_WORDS: usize = 3;
/// Words of one row's most likely tokens.
pub(crate) const TOP_WORDS: usize = 2 * MAX_TOP_LOGPROBS;

impl Sampled {
    pub(crate) fn new(stream: &Stream, max_batch: usize) -> Result<Self> {
        Ok(Self {
            words: DeviceBuffer::zeroed(stream.device(), 2 * SAMPLED_WORDS * max_batch)?,
            top: DeviceBuffer::zeroed(stream.device(), 2 * TOP_WORDS * max_batch)?,
            max_batch,
        })
    }

    pub(crate) fn words(&self) -> &DeviceBuffer<u32> {
        &self.words
    }

    fn part(&self, by: SampledBy, part: usize, rows: usize) -> Result<DeviceSlice<'_, u32>> {
        let start = (by as usize * SAMPLED_WORDS + part) * self.max_batch;
        Ok(self.words.slice(start..start + rows)?)
    }

    pub(crate) fn tokens(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, u32>> {
        self.part(by, 0, rows)
    }

    pub(crate) fn logprobs(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, f32>> {
        Ok(self.part(by, 1, rows)?.cast::<f32>()?)
    }

    pub(crate) fn sampled_logprobs(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, f32>> {
        Ok(self.part(by, 2, rows)?.cast::<f32>()?)
    }

    /// `[rows, 2, MAX_TOP_LOGPROBS]`.
    pub(crate) fn top(&self, by: SampledBy, rows: usize) -> Result<DeviceSlice<'_, u32>> {
        let start = by as usize * TOP_WORDS * self.max_batch;
        Ok(self.top.slice(start..start + rows * TOP_WORDS)?)
    }
}
