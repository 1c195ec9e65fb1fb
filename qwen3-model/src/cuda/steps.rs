//! Giving steps to the device and reading what they sampled.

use cuda_graphs::{CaptureOptions, CaptureReport, GraphCache, row_classes};
use paged_kv::PageTable;

use super::inputs::SampledBy;
use super::{CudaBackend, DecodeRow, Pending, Rows, SampledToken};
use crate::sampling::{Sampling, TokenState};
use crate::{Backend, Error, FusedMatrix, Result, StepPlan, walk};

/// Token states that travel at once.
pub(super) const TOKEN_STATES: usize = 8192;

impl CudaBackend {
    /// Brings the device's copy of the page table up to date: only rows that changed travel. To be called before the
    /// steps that need the changes are given; a packed step without it brings its own table.
    ///
    /// # Errors
    /// [`Error::CudaCache`] for a table of another shape than [`CudaOptions::page_table`](super::CudaOptions::page_table). Panics: none.
    pub fn sync_pages(&mut self, table: &mut PageTable) -> Result<()> {
        self.mirror.update(&self.stream, table)?;
        self.mirrored = true;
        Ok(())
    }

    /// Replaces what sampling knows of the tokens of a slot: all states are the default but those given, each with its id.
    /// To be called before the first row of a sequence whose [`Sampling::uses_token_states`]; from then on tokens that are
    /// sampled for the slot are counted.
    ///
    /// # Errors
    /// [`Error::Option`] for a slot that is not there; [`Error::Cuda`]. Panics: none.
    pub fn set_token_states(&mut self, slot: usize, states: &[(u32, TokenState)]) -> Result<()> {
        let words: Vec<u32> = states
            .iter()
            .flat_map(|&(id, state)| [id, u32::from(state.0)])
            .collect();
        let mut pieces = words.chunks(2 * TOKEN_STATES);
        let first = pieces.next().unwrap_or(&[]);
        for (clear, piece) in std::iter::once((true, first)).chain(pieces.map(|piece| (false, piece))) {
            let entries = self.state_entries.slice(..piece.len())?;
            self.staging.begin()?;
            self.staging.upload(&self.stream, entries, piece)?;
            self.staging.end(&self.stream)?;
            let (states, vocab) = (self.token_states.as_slice(), self.config.vocab_size);
            self.kernels
                .token_states(&self.stream, states, vocab, slot, entries, clear)?;
        }
        Ok(())
    }

    /// Queues a packed step that samples the next token of each chunk that wants logits, and keeps it for the
    /// chunk's slot. `sampling` says how, for each of them in order. Returns how many rows were sampled.
    ///
    /// # Errors
    /// As [`Backend::step`]; [`Error::StepTooLarge`] for more sampled rows than the largest batch; [`Error::Option`] if
    /// `sampling` is not one for each. Panics: none.
    pub fn prefill(&mut self, plan: &StepPlan<'_>, sampling: &[Sampling]) -> Result<usize> {
        let rows = plan.logit_rows().len();
        if sampling.len() != rows {
            let problem = format!("is for {} rows, {rows} want a token", sampling.len());
            return Err(Error::Option {
                option: "sampling",
                problem,
            });
        }
        if rows > self.options.max_batch_size {
            return Err(Error::StepTooLarge {
                tokens: rows,
                max: self.options.max_batch_size,
            });
        }
        self.step(plan)?;
        if rows > 0 {
            self.staging.begin()?;
            let (stream, staging) = (&self.stream, &mut self.staging);
            self.packed.upload_sampling(stream, staging, plan, sampling)?;
            self.staging.end(&self.stream)?;
            self.sample(SampledBy::Packed, rows)?;
        }
        self.asked[0] = sampling.iter().map(|sampling| sampling.top_logprobs).collect();
        Ok(rows)
    }

    /// As [`prefill`](Self::prefill), with the next tokens of sequences in the same pass over the weights: the last
    /// `continued` chunks have one token each, whose id is not that of the plan but the one sampled last for the slot. Their
    /// attention is that of a decode step.
    ///
    /// # Errors
    /// As for `prefill`; [`Error::Option`] if one of these chunks has more than one token. Panics: none.
    pub fn prefill_and_decode(
        &mut self,
        plan: &StepPlan<'_>,
        continued: usize,
        sampling: &[Sampling],
    ) -> Result<usize> {
        let chunks = plan.chunks();
        let first = chunks.len().checked_sub(continued);
        if first.is_none_or(|first| chunks[first..].iter().any(|chunk| chunk.len != 1)) {
            return Err(Error::Option {
                option: "continued",
                problem: format!("is {continued}; so many chunks of one token at the end are not there"),
            });
        }
        self.continued = continued;
        let sampled = self.prefill(plan, sampling);
        self.continued = 0;
        sampled
    }

    /// Queues a decode step: the next token of each of `rows`, from the token sampled last for its slot. Replays the
    /// bucket's graph if [`capture`](Self::capture) has run.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`] for more rows than the largest batch; [`Error::Option`] for a slot or position outside
    /// the page table; [`Error::Cuda`]. Panics: none.
    pub fn decode(&mut self, rows: &[DecodeRow]) -> Result<()> {
        let bucket = self.set_decode_rows(rows)?;
        self.asked[1].clear();
        self.asked[1].extend(rows.iter().map(|row| row.sampling.top_logprobs));
        if bucket == 0 {
            return Ok(());
        }
        if let Some(trace) = &mut self.trace {
            trace.record(&self.stream, false)?;
        }
        match self.graphs.take() {
            Some(graphs) => {
                let replayed = graphs.replay(bucket);
                self.graphs = Some(graphs);
                replayed?;
            }
            None => self.run_decode(bucket)?,
        }
        if let Some(trace) = &mut self.trace {
            trace.record(&self.stream, true)?;
        }
        self.decode.advanced(bucket);
        Ok(())
    }

    /// Whether decode steps read pages that neighbouring rows share, such as the prompt of a group's siblings, once for all of
    /// them; on at first. Counts for steps that are launched and graphs that are captured afterwards.
    pub fn share_reads(&mut self, on: bool) {
        self.attention.share_reads = on;
    }

    /// Chooses the algorithms of a layer's products for packed steps of up to `rows` rows, so that no step stops for it. Not
    /// between a step and the reading of its logits. Takes milliseconds where the choices are known.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn prepare_products(&mut self, rows: usize) -> Result<()> {
        let room = self.options.max_tokens.max(self.options.max_batch_size);
        for class in row_classes(rows.min(room)) {
            self.rows = Rows::Packed {
                tokens: class.min(room),
                wanted: 0,
                continued: 0,
            };
            for matrix in FusedMatrix::ALL {
                // Over whatever the workspace holds.
                self.project(0, matrix)?;
            }
        }
        Ok(())
    }

    /// Captures a graph for every bucket, the largest first. Later decode steps replay them.
    ///
    /// # Errors
    /// [`Error::Cuda`] and those of the operations; decode steps then go on without graphs. Panics: none.
    pub fn capture(&mut self) -> Result<&CaptureReport> {
        self.graphs = None;
        let bucket = self.set_decode_rows(&[DecodeRow::greedy(0, 0)])?;
        debug_assert!(bucket > 0);
        let (stream, buckets) = (self.stream.clone(), self.buckets.clone());
        let captured = GraphCache::capture(
            &stream,
            buckets,
            (),
            &CaptureOptions::default(),
            |_, (), bucket| self.run_decode(bucket),
        )?;
        Ok(self.graphs.insert(captured).report())
    }

    /// What capturing cost; `None` before [`capture`](Self::capture).
    pub fn capture_report(&self) -> Option<&CaptureReport> {
        self.graphs.as_ref().map(GraphCache::report)
    }

    /// Queues the read-back of the sampled rows of the steps given so far: those of the last packed step, then those
    /// of the last decode step.
    ///
    /// # Errors
    /// [`Error::StepTooLarge`] for more rows than there are; [`Error::Cuda`]. Panics: none.
    pub fn read_back(&mut self, packed_rows: usize, decode_rows: usize) -> Result<Pending> {
        let [packed, decode] = &self.asked;
        let first = |asked: &[u32], rows: usize| match asked.get(..rows) {
            Some(asked) => Ok(asked.to_vec()),
            None => Err(Error::StepTooLarge {
                tokens: rows,
                max: asked.len(),
            }),
        };
        let asked = [first(packed, packed_rows)?, first(decode, decode_rows)?];
        self.results.read_back(&self.stream, &self.sampled, asked)
    }

    /// Waits for sampled rows: those of the packed step, then those of the decode step.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for errors of the kernels that computed them. Panics: none.
    pub fn collect(&mut self, pending: Pending) -> Result<Vec<SampledToken>> {
        self.results.collect(pending)
    }

    /// Forgets what is under way: waits for the device and makes no use of what it computed.
    ///
    /// # Errors
    /// [`Error::Cuda`]. Panics: none.
    pub fn reset(&mut self) -> Result<()> {
        self.decode.forget();
        Ok(self.stream.synchronize()?)
    }

    /// Checks and announces the rows of a decode step. Returns the bucket, 0 without rows.
    pub(super) fn set_decode_rows(&mut self, rows: &[DecodeRow]) -> Result<usize> {
        let table = self.options.page_table();
        let max_len = table.max_pages_per_slot * table.page_size;
        for row in rows {
            if row.slot >= table.n_slots || row.position >= max_len {
                let problem = format!(
                    "slot {} at position {} is outside the {} slots of {max_len} positions",
                    row.slot, row.position, table.n_slots
                );
                return Err(Error::Option {
                    option: "rows",
                    problem,
                });
            }
        }
        if rows.is_empty() {
            return Ok(0);
        }
        let Some(bucket) = self.buckets.for_batch(rows.len()) else {
            return Err(Error::StepTooLarge {
                tokens: rows.len(),
                max: self.options.max_batch_size,
            });
        };
        self.staging.begin()?;
        self.decode.set(&self.stream, &mut self.staging, rows, bucket)?;
        self.staging.end(&self.stream)?;
        Ok(bucket)
    }

    /// Everything that a decode graph holds.
    pub(super) fn run_decode(&mut self, bucket: usize) -> Result<()> {
        self.rows = Rows::Decode { bucket };
        walk(self)?;
        self.sample(SampledBy::Decode, bucket)
    }
}
