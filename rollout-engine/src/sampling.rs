//! Choosing tokens from rows of logits, on the CPU.

use qwen3_model::sampling::{sample_row, top_logprobs};
use rayon::prelude::*;

use crate::runner::{SampledToken, Sampling, SlotTokens, TokenState};

/// One row to sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    /// Slot of its sequence, as an index.
    pub(crate) slot: usize,
    /// Logical position of its input token.
    pub(crate) position: usize,
    /// How to choose its token.
    pub(crate) sampling: Sampling,
}

/// Samples rows, and knows the tokens of the sequences whose sampling depends on them.
#[derive(Debug)]
pub(crate) struct Sampler {
    vocab: usize,
    /// `[vocab]` for each slot that needed it so far, else empty.
    states: Vec<Vec<TokenState>>,
}

impl Sampler {
    pub(crate) fn new(vocab: usize, n_slots: usize) -> Self {
        Self {
            vocab,
            states: vec![Vec::new(); n_slots],
        }
    }

    /// Replaces what is known of a slot. Ids outside the vocabulary and slots that are not there are left out.
    pub(crate) fn set(&mut self, tokens: &SlotTokens) {
        if let Some(states) = self.states.get_mut(tokens.slot.index()) {
            states.clear();
            states.resize(self.vocab, TokenState::default());
            for &(token, state) in &tokens.states {
                if let Some(place) = states.get_mut(token as usize) {
                    *place = state;
                }
            }
        }
    }

    /// Samples one token per row of `logits` `[rows, vocab]`.
    pub(crate) fn sample(&mut self, logits: &[f32], rows: &[Row]) -> Vec<SampledToken> {
        debug_assert_eq!(logits.len(), self.vocab * rows.len());
        let states = &self.states;
        let sampled: Vec<_> = logits
            .par_chunks_exact(self.vocab.max(1))
            .zip(rows)
            .map(|(logits, row)| {
                let index = row.sampling.new_token_index(row.position);
                let states = states.get(row.slot).map_or(&[][..], Vec::as_slice);
                let sampled = sample_row(logits, &row.sampling, index, states);
                SampledToken {
                    token: sampled.token,
                    logprob: sampled.logprob,
                    sampled_logprob: sampled.sampled_logprob,
                    top_logprobs: top_logprobs(logits, row.sampling.top_logprobs as usize),
                }
            })
            .collect();
        for (row, sampled) in rows.iter().zip(&sampled) {
            if row.sampling.uses_token_states()
                && let Some(states) = self.states.get_mut(row.slot)
                && let Some(state) = states.get_mut(sampled.token as usize)
            {
                *state = state.counted();
            }
        }
        sampled
    }
}
