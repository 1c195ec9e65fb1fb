//! Sampled tokens on their way to the host.
//!
//! After the steps of a round their results are copied to page-locked memory and an event marks the
//! spot; the host goes on and collects them when it wants. With [`ROUNDS`] buffers several rounds may
//! be under way.

use cuda_graphs::{Device, Event, PinnedBuffer, Stream};

use super::inputs::{SAMPLED_WORDS, Sampled, SampledBy, TOP_WORDS};
use crate::sampling::{MAX_TOP_LOGPROBS, TokenLogprob};
use crate::{Error, Result};

/// Rounds that may be under way at once.
const ROUNDS: usize = 4;

/// One sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub token: u32,
    /// Natural logarithm of its probability at temperature 1 over the whole vocabulary; NaN if the row's logits were
    /// not finite.
    pub logprob: f32,
    /// Natural logarithm of the probability that it was drawn with, after penalties, temperature and truncation; 0 at
    /// temperature 0, NaN also if no token could come.
    pub sampled_logprob: f32,
    /// The most likely tokens, as many as the row asked for.
    pub top_logprobs: Vec<TokenLogprob>,
}

/// Results that were asked for and are not collected yet.
#[derive(Debug)]
#[must_use = "results are lost unless collected"]
pub struct Pending {
    round: usize,
    /// Most likely tokens that each row of the packed step and of the decode step asked for.
    asked: [Vec<u32>; 2],
}

#[derive(Debug)]
struct Round {
    words: PinnedBuffer<u32>,
    top: PinnedBuffer<u32>,
    done: Event,
}

#[derive(Debug)]
pub(crate) struct Results {
    rounds: Vec<Round>,
    next: usize,
    max_batch: usize,
}

const HALVES: [SampledBy; 2] = [SampledBy::Packed, SampledBy::Decode];

impl Results {
    pub(crate) fn new(device: &Device, max_batch: usize) -> Result<Self> {
        let round = |_| -> Result<Round> {
            Ok(Round {
                words: PinnedBuffer::zeroed(device, 2 * SAMPLED_WORDS * max_batch)?,
                top: PinnedBuffer::zeroed(device, 2 * TOP_WORDS * max_batch)?,
                done: Event::without_timing(device)?,
            })
        };
        Ok(Self {
            rounds: (0..ROUNDS).map(round).collect::<Result<_>>()?,
            next: 0,
            max_batch,
        })
    }

    /// `asked` is the number of most likely tokens wanted, for each row of the packed step and of the decode step.
    pub(crate) fn read_back(
        &mut self,
        stream: &Stream,
        sampled: &Sampled,
        asked: [Vec<u32>; 2],
    ) -> Result<Pending> {
        let max = self.max_batch;
        if let Some(tokens) = asked.iter().map(Vec::len).find(|&rows| rows > max) {
            return Err(Error::StepTooLarge { tokens, max });
        }
        let round = self.next;
        self.next = (round + 1) % self.rounds.len();
        let Round { words, top, done } = &self.rounds[round];
        // One copy of the part that is wanted: all that belongs to a half lies together.
        let half = SAMPLED_WORDS * max;
        let range = match (asked[0].is_empty(), asked[1].is_empty()) {
            (true, true) => 0..0,
            (true, false) => half..2 * half,
            (false, true) => 0..half,
            (false, false) => 0..2 * half,
        };
        stream.download_async(words.slice(range.clone())?, sampled.words().slice(range)?)?;
        for (half, asked) in HALVES.into_iter().zip(&asked) {
            if asked.iter().any(|&n| n > 0) {
                let start = half as usize * TOP_WORDS * max;
                let range = start..start + asked.len() * TOP_WORDS;
                stream.download_async(top.slice(range)?, sampled.top(half, asked.len())?)?;
            }
        }
        stream.record(done)?;
        Ok(Pending { round, asked })
    }

    pub(crate) fn collect(&mut self, pending: Pending) -> Result<Vec<SampledToken>> {
        let Round { words, top, done } = &self.rounds[pending.round];
        done.synchronize()?;
        let mut sampled = Vec::with_capacity(pending.asked.iter().map(Vec::len).sum());
        for (half, asked) in HALVES.into_iter().zip(&pending.asked) {
            let rows = asked.len();
            let part = |part: usize| -> Result<Vec<u32>> {
                let mut values = vec![0; rows];
                words.read(
                    (half as usize * SAMPLED_WORDS + part) * self.max_batch,
                    &mut values,
                )?;
                Ok(values)
            };
            let (tokens, logprobs, sampled_logprobs) = (part(0)?, part(1)?, part(2)?);
            for (row, &asked) in asked.iter().enumerate() {
                let mut top_logprobs = Vec::new();
                if asked > 0 {
                    let mut values = [0; TOP_WORDS];
                    top.read((half as usize * self.max_batch + row) * TOP_WORDS, &mut values)?;
                    let (ids, bits) = values.split_at(MAX_TOP_LOGPROBS);
                    top_logprobs = (ids.iter().zip(bits).take(asked as usize))
                        .filter(|&(&token, _)| token != u32::MAX)
                        .map(|(&token, &bits)| TokenLogprob {
                            token,
                            logprob: f32::from_bits(bits),
                        })
                        .collect();
                }
                sampled.push(SampledToken {
                    token: tokens[row],
                    logprob: f32::from_bits(logprobs[row]),
                    sampled_logprob: f32::from_bits(sampled_logprobs[row]),
                    top_logprobs,
                });
            }
        }
        Ok(sampled)
    }
}
