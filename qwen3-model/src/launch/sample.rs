//! Sampling: four kernels of a decode step, and the upload of token states.

use bytemuck::{Pod, Zeroable};
use cuda_graphs::{Device, DeviceBuffer, DeviceSlice, KernelSpec, LaunchConfig, Limits, Stream};

use super::{COMMON, Kernels, aligned, refuse, same, small};
use crate::Result;
use crate::sampling::{MAX_TOP_LOGPROBS, Sampling, TokenState};

const CHUNK: usize = 4096;
/// Bins of distances, as in `sampling.cuh`.
const BINS: usize = 258;
const PARTIAL_THREADS: u32 = 256;
const CHOOSE_THREADS: u32 = 1024;
const TOP_THREADS: u32 = 1024;
const STATES_THREADS: u32 = 1024;
const SAMPLING: super::Header =
    super::Header::new("sampling.cuh", include_str!("../../kernels/sampling.cuh"));

pub(super) fn specs() -> [KernelSpec; 4] {
    let spec =
        |name: &'static str, source: &'static str| KernelSpec::new(name, source).headers([COMMON, SAMPLING]);
    [
        spec("sample", include_str!("../../kernels/sample.cu"))
            .entry("sample_partial", Limits::registers(64))
            .entry("sample_weigh", Limits::registers(64)),
        spec("sample_choose", include_str!("../../kernels/sample_choose.cu"))
            .entry("sample_choose", Limits::registers(64)),
        spec("sample_top", include_str!("../../kernels/sample_top.cu"))
            .entry("sample_top", Limits::registers(64)),
        spec("token_states", include_str!("../../kernels/token_states.cu"))
            .entry("token_states", Limits::registers(40)),
    ]
}

/// Parameters of one row, as the kernels read them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    scale: f32,
    limit: f32,
    top_p: f32,
    top_k: u32,
    repetition: f32,
    inverse_repetition: f32,
    presence: f32,
    frequency: f32,
    flags: u32,
    seed: [u32; 2],
    completion: u32,
    prompt_len: u32,
    min_new_tokens: u32,
    top_logprobs: u32,
    position: u32,
}

impl SampleRow {
    /// 32-bit words of a row.
    pub const WORDS: usize = size_of::<Self>() / 4;

    const DRAWS: u32 = 1;
    const CUTS: u32 = 2;
    const PENALISES: u32 = 4;
    const COUNTS: u32 = 8;

    /// A row whose input token is at `position`; it counts only where [`Sample::positions`] is `None`.
    pub fn new(sampling: &Sampling, position: usize) -> Self {
        let draws = sampling.temperature > 0.0;
        let cuts = draws && (sampling.top_k > 0 || sampling.top_p < 1.0);
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        Self {
            scale: if draws { sampling.distance_scale() } else { 0.0 },
            limit: sampling.distance_limit(),
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            repetition: sampling.repetition_penalty,
            inverse_repetition: 1.0 / sampling.repetition_penalty,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            flags: flag(draws, Self::DRAWS)
                | flag(cuts, Self::CUTS)
                | flag(sampling.has_penalties(), Self::PENALISES)
                | flag(sampling.uses_token_states(), Self::COUNTS),
            seed: [sampling.seed as u32, (sampling.seed >> 32) as u32],
            completion: sampling.completion,
            prompt_len: sampling.prompt_len,
            min_new_tokens: sampling.min_new_tokens,
            top_logprobs: sampling.top_logprobs,
            position: position as u32,
        }
    }
}

/// Buffers that the kernels of [`Kernels::sample`] pass on.
#[derive(Debug)]
pub struct SampleScratch {
    chunk_max: DeviceBuffer<f32>,
    chunk_index: DeviceBuffer<u32>,
    chunk_sum: DeviceBuffer<f32>,
    adjusted_max: DeviceBuffer<f32>,
    adjusted_index: DeviceBuffer<u32>,
    chunk_weight: DeviceBuffer<u64>,
    bin_weight: DeviceBuffer<u64>,
    bin_count: DeviceBuffer<u32>,
}

impl SampleScratch {
    /// Room for `rows` rows of `vocab` logits.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn new(device: &Device, rows: usize, vocab: usize) -> Result<Self> {
        let chunks = rows * vocab.div_ceil(CHUNK);
        Ok(Self {
            chunk_max: DeviceBuffer::zeroed(device, chunks)?,
            chunk_index: DeviceBuffer::zeroed(device, chunks)?,
            chunk_sum: DeviceBuffer::zeroed(device, chunks)?,
            adjusted_max: DeviceBuffer::zeroed(device, chunks)?,
            adjusted_index: DeviceBuffer::zeroed(device, chunks)?,
            chunk_weight: DeviceBuffer::zeroed(device, chunks)?,
            bin_weight: DeviceBuffer::zeroed(device, rows * BINS)?,
            bin_count: DeviceBuffer::zeroed(device, rows * BINS)?,
        })
    }
}

/// Operands of [`Kernels::sample`].
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// `[rows, vocab]`.
    pub logits: DeviceSlice<'a, f32>,
    /// Logits per row; a multiple of 4.
    pub vocab: usize,
    /// Room between the kernels.
    pub scratch: &'a SampleScratch,
    /// `[rows, SampleRow::WORDS]`: a [`SampleRow`] for each row.
    pub rows: DeviceSlice<'a, u32>,
    /// `[rows]`, slot of each row; 0 for padding.
    pub slots: DeviceSlice<'a, i32>,
    /// `[n_slots, vocab]`: [`TokenState`]s. Read, and counted up, for rows whose sampling uses them.
    pub states: DeviceSlice<'a, TokenState>,
    /// `[n_slots]`: takes up each row's token.
    pub last_token: DeviceSlice<'a, u32>,
    /// `[rows]`, positions of the input tokens, raised by one for rows with a slot. `None`: those in `rows` count.
    pub positions: Option<DeviceSlice<'a, i32>>,
    /// `[rows]`: the tokens.
    pub tokens: DeviceSlice<'a, u32>,
    /// `[rows]`: their log-probabilities at temperature 1; NaN for a row whose logits are not finite.
    pub logprobs: DeviceSlice<'a, f32>,
    /// `[rows]`: the log-probabilities that they were drawn with; NaN also if no token may come.
    pub sampled_logprobs: DeviceSlice<'a, f32>,
    /// `[rows, 2, MAX_TOP_LOGPROBS]`: for rows that ask for them, ids of the most likely tokens, then the bits of their
    /// log-probabilities; the id `u32::MAX` where there is none. Other rows are left as they are.
    pub top: DeviceSlice<'a, u32>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SampleParams {
    logits: u64,
    sample_rows: u64,
    slots: u64,
    states: u64,
    positions: u64,
    last_token: u64,
    chunk_max: u64,
    chunk_index: u64,
    chunk_sum: u64,
    adjusted_max: u64,
    adjusted_index: u64,
    chunk_weight: u64,
    bin_weight: u64,
    bin_count: u64,
    out_tokens: u64,
    out_logprobs: u64,
    out_sampled_logprobs: u64,
    out_top: u64,
    rows: u32,
    vocab: u32,
    n_chunks: u32,
    n_slots: u32,
    max_top: u32,
    unused: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TokenStatesParams {
    states: u64,
    entries: u64,
    slot: u32,
    n_slots: u32,
    vocab: u32,
    n_entries: u32,
    clear: u32,
    unused: u32,
}

impl Kernels {
    /// The next token of each of `rows` = `slots.len()` rows, chosen as [`sampling`](crate::sampling) defines it, its
    /// log-probabilities, and the state of the next decode step.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn sample(&self, stream: &Stream, op: &Sample<'_>) -> Result<()> {
        let rows = op.slots.len();
        let n_chunks = op.vocab.div_ceil(CHUNK);
        let n_slots = op.last_token.len();
        if op.vocab == 0 || !op.vocab.is_multiple_of(4) {
            return refuse("vocab", format!("is {}; a multiple of 4 is needed", op.vocab));
        }
        same("logits", op.logits.len(), rows * op.vocab)?;
        same("sample rows", op.rows.len(), rows * SampleRow::WORDS)?;
        same("token states", op.states.len(), n_slots * op.vocab)?;
        same("tokens", op.tokens.len(), rows)?;
        same("logprobs", op.logprobs.len(), rows)?;
        same("sampled logprobs", op.sampled_logprobs.len(), rows)?;
        same("top", op.top.len(), rows * 2 * MAX_TOP_LOGPROBS)?;
        aligned("logits", op.logits.ptr(), 16)?;
        aligned("token states", op.states.ptr(), 8)?;
        let scratch = op.scratch;
        if scratch.chunk_max.len() < rows * n_chunks || scratch.bin_count.len() < rows * BINS {
            let problem = format!(
                "has room for {} chunks and {} bins, {} and {} are needed",
                scratch.chunk_max.len(),
                scratch.bin_count.len(),
                rows * n_chunks,
                rows * BINS
            );
            return refuse("scratch", problem);
        }
        // The grid's second dimension ends at 65,535.
        if rows > 65_535 {
            return refuse("rows", format!("{rows} rows at once, at most 65535 are possible"));
        }
        if let Some(positions) = op.positions {
            same("positions", positions.len(), rows)?;
            stream.keep_memory(positions);
        }
        for buffer in [
            op.logits,
            op.logprobs,
            op.sampled_logprobs,
            scratch.chunk_max.as_slice(),
            scratch.chunk_sum.as_slice(),
            scratch.adjusted_max.as_slice(),
        ] {
            stream.keep_memory(buffer);
        }
        for buffer in [
            op.rows,
            op.last_token,
            op.tokens,
            op.top,
            scratch.chunk_index.as_slice(),
            scratch.adjusted_index.as_slice(),
            scratch.bin_count.as_slice(),
        ] {
            stream.keep_memory(buffer);
        }
        for buffer in [scratch.chunk_weight.as_slice(), scratch.bin_weight.as_slice()] {
            stream.keep_memory(buffer);
        }
        stream.keep_memory(op.states);
        stream.keep_memory(op.slots);
        if rows == 0 {
            return Ok(());
        }
        let params = SampleParams {
            logits: op.logits.ptr(),
            sample_rows: op.rows.ptr(),
            slots: op.slots.ptr(),
            states: op.states.ptr(),
            positions: op.positions.map_or(0, |positions| positions.ptr()),
            last_token: op.last_token.ptr(),
            chunk_max: scratch.chunk_max.ptr(),
            chunk_index: scratch.chunk_index.ptr(),
            chunk_sum: scratch.chunk_sum.ptr(),
            adjusted_max: scratch.adjusted_max.ptr(),
            adjusted_index: scratch.adjusted_index.ptr(),
            chunk_weight: scratch.chunk_weight.ptr(),
            bin_weight: scratch.bin_weight.ptr(),
            bin_count: scratch.bin_count.ptr(),
            out_tokens: op.tokens.ptr(),
            out_logprobs: op.logprobs.ptr(),
            out_sampled_logprobs: op.sampled_logprobs.ptr(),
            out_top: op.top.ptr(),
            rows: small("rows", rows)?,
            vocab: small("vocab", op.vocab)?,
            n_chunks: small("chunks", n_chunks)?,
            n_slots: small("slots", n_slots)?,
            max_top: MAX_TOP_LOGPROBS as u32,
            unused: 0,
        };
        let chunks =
            LaunchConfig::with_dimensions([params.n_chunks, params.rows, 1], [PARTIAL_THREADS, 1, 1])
                .programmatic(true);
        let each_row = |threads| LaunchConfig::new(params.rows, threads).programmatic(true);
        // SAFETY: every buffer has the length that `SampleParams` in `sampling.cuh` gives it, checked above, and is kept by
        // a capture; the kernels check slots against `n_slots`, and ids come from loops below `vocab`.
        unsafe {
            self.sample_partial.launch(stream, &chunks, &params)?;
            self.sample_weigh.launch(stream, &chunks, &params)?;
            self.sample_choose
                .launch(stream, &each_row(CHOOSE_THREADS), &params)?;
            self.sample_top.launch(stream, &each_row(TOP_THREADS), &params)?;
        }
        Ok(())
    }

    /// Sets the states of a slot's ids: `entries` is `[n, 2]`, an id and its state each. With `clear` all others become the
    /// default, without they stay. Ids outside the vocabulary are left out.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for lengths that do not fit each other and a slot that is not there;
    /// [`Error::Cuda`](crate::Error::Cuda). Panics: none.
    pub fn token_states(
        &self,
        stream: &Stream,
        states: DeviceSlice<'_, TokenState>,
        vocab: usize,
        slot: usize,
        entries: DeviceSlice<'_, u32>,
        clear: bool,
    ) -> Result<()> {
        if vocab == 0 || !vocab.is_multiple_of(4) {
            return refuse("vocab", format!("is {vocab}; a multiple of 4 is needed"));
        }
        let n_slots = states.len() / vocab;
        same("token states", states.len(), n_slots * vocab)?;
        same("entries", entries.len() % 2, 0)?;
        aligned("token states", states.ptr(), 8)?;
        if slot >= n_slots {
            return refuse("slot", format!("is {slot}; there are {n_slots}"));
        }
        stream.keep_memory(states);
        stream.keep_memory(entries);
        let params = TokenStatesParams {
            states: states.ptr(),
            entries: entries.ptr(),
            slot: small("slot", slot)?,
            n_slots: small("slots", n_slots)?,
            vocab: small("vocab", vocab)?,
            n_entries: small("entries", entries.len() / 2)?,
            clear: u32::from(clear),
            unused: 0,
        };
        let config = LaunchConfig::new(1, STATES_THREADS).programmatic(true);
        // SAFETY: as in `sample`; the kernel checks ids against `vocab`.
        Ok(unsafe { self.token_states.launch(stream, &config, &params) }?)
    }
}
