//! Sampled tokens on their way to the host.
//!
//! After the steps of a round their results are copied to page-locked memory and an event marks the
//! spot; the host goes on and collects them when it wants. With [`ROUNDS`] buffers several rounds may
//! be under way.

use cuda_graphs::{Device, Event, PinnedBuffer, Stream};

use super::inputs::{Sampled, SampledBy};
use crate::{Error, Result};

/// Rounds that may be under way at once.
const ROUNDS: usize = 4;

/// One sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub token: u32,
    /// Natural logarithm of its probability at temperature 1 over the whole vocabulary; NaN if the row's logits were
    /// not finite.
    pub logprob: f32,
}

/// Results that were asked for and are not collected yet.
#[derive(Debug)]
#[must_use = "results are lost unless collected"]
pub struct Pending {
    round: usize,
    packed_rows: usize,
    decode_rows: usize,
}

#[derive(Debug)]
struct Round {
    words: PinnedBuffer<u32>,
    done: Event,
}

#[derive(Debug)]
pub(crate) struct Results {
    rounds: Vec<Round>,
    next: usize,
    max_batch: usize,
}

impl Results {
    pub(crate) fn new(device: &Device, max_batch: usize) -> Result<Self> {
        let round = |_| -> Result<Round> {
            Ok(Round {
                words: PinnedBuffer::zeroed(device, 4 * max_batch)?,
                done: Event::without_timing(device)?,
            })
        };
        Ok(Self {
            rounds: (0..ROUNDS).map(round).collect::<Result<_>>()?,
            next: 0,
            max_batch,
        })
    }

    pub(crate) fn read_back(
        &mut self,
        stream: &Stream,
        sampled: &Sampled,
        packed_rows: usize,
        decode_rows: usize,
    ) -> Result<Pending> {
        let max = self.max_batch;
        if let Some(tokens) = [packed_rows, decode_rows].into_iter().find(|&rows| rows > max) {
            return Err(Error::StepTooLarge { tokens, max });
        }
        let round = self.next;
        self.next = (round + 1) % self.rounds.len();
        let Round { words, done } = &self.rounds[round];
        // One copy of the part that is wanted: tokens and log-probabilities of a half lie next to each other.
        let range = match (packed_rows, decode_rows) {
            (0, 0) => 0..0,
            (0, _) => SampledBy::Decode as usize * max..4 * max,
            (_, 0) => 0..2 * max,
            _ => 0..4 * max,
        };
        stream.download_async(words.slice(range.clone())?, sampled.words().slice(range)?)?;
        stream.record(done)?;
        Ok(Pending {
            round,
            packed_rows,
            decode_rows,
        })
    }

    pub(crate) fn collect(&mut self, pending: Pending) -> Result<Vec<SampledToken>> {
        let Round { words, done } = &self.rounds[pending.round];
        done.synchronize()?;
        let mut sampled = Vec::with_capacity(pending.packed_rows + pending.decode_rows);
        for (half, rows) in [
            (SampledBy::Packed, pending.packed_rows),
            (SampledBy::Decode, pending.decode_rows),
        ] {
            let start = half as usize * self.max_batch;
            let mut tokens = vec![0; rows];
            let mut logprobs = vec![0; rows];
            words.read(start, &mut tokens)?;
            words.read(start + self.max_batch, &mut logprobs)?;
            let pairs = tokens.into_iter().zip(logprobs);
            sampled.extend(pairs.map(|(token, bits)| SampledToken {
                token,
                logprob: f32::from_bits(bits),
            }));
        }
        Ok(sampled)
    }
}
