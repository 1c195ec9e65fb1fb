//! `rollout bench --context-lengths`: how a decode step grows with the tokens of context that each sequence has.
//!
//! On a GPU contexts are not computed: the cache is filled with random keys and values, and steps of sequences of the length
//! asked for are timed as graphs. Where the cache cannot hold all of them, later sequences take over the pages of earlier
//! ones. A step reads a sequence's pages once per layer, long after it read them for the other sequence and after more bytes
//! than the device's cache holds, so each still reads them from memory. On a CPU prompts of that length are computed.
//!
//! Attention's share of a step is what the step takes more than one of the same batch with hardly any context.

use std::fmt::Write as _;

use paged_kv::{PageTable, Slot};
use qwen3_model::Qwen3Config;
use qwen3_model::cuda::{CudaBackend, DecodeRow, Stage};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::BenchArgs;
use super::floor::Floor;
use super::workload::{Round, median, prompt};
use crate::Error;
use crate::cli::CliError;
use crate::request::SamplingParams;
use crate::runner::Runner;
use crate::scheduler::Scheduler;

/// Context of the steps that all else is compared with, in tokens.
const HARDLY_ANY: usize = 16;
/// Positions by which timed replays move a row on, at most.
pub(super) const TIMED: usize = 64;
/// New tokens on a CPU, of which the middle half is timed.
const ON_CPU: usize = 12;

/// One batch size and length of context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::cli) struct Point {
    pub(in crate::cli) n_prompts: usize,
    pub(in crate::cli) context_tokens: usize,
    /// A whole decode step.
    pub(in crate::cli) step_ms: f64,
    /// What it takes more than with hardly any context.
    pub(in crate::cli) context_ms: f64,
    /// Attention alone in a graph, where it is a kernel of its own.
    pub(in crate::cli) attention_ms: Option<f64>,
    /// Keys and values that a step reads.
    pub(in crate::cli) context_gb: f64,
    /// All weights and the context read once, at the measured rate.
    pub(in crate::cli) floor_ms: Option<f64>,
    /// Bytes of context over `context_ms`; `None` where noise is greater than that.
    pub(in crate::cli) read_tb_s: Option<f64>,
    /// The same of the measured rate.
    pub(in crate::cli) percent_of_read_rate: Option<f64>,
    /// Bytes of context over `attention_ms`, of the measured rate.
    pub(in crate::cli) attention_percent_of_read_rate: Option<f64>,
    /// Sequences whose contexts are pages of their own.
    pub(in crate::cli) distinct_contexts: usize,
}

impl Point {
    fn new(
        floor: &Floor,
        (n_prompts, context_tokens): (usize, usize),
        (step_ms, base_ms): (f64, f64),
        attention_ms: Option<f64>,
        distinct_contexts: usize,
    ) -> Self {
        let bytes = floor.bytes_per_token * (n_prompts * context_tokens) as f64;
        let base_bytes = floor.bytes_per_token * (n_prompts * HARDLY_ANY.min(context_tokens)) as f64;
        let context_ms = step_ms - base_ms;
        let rate = |bytes: f64, ms: f64| bytes / (ms / 1e3);
        let percent = |rate: f64| floor.rate.map(|of| 100.0 * rate / of);
        let read = (context_ms > 0.0).then(|| rate(bytes - base_bytes, context_ms));
        Self {
            n_prompts,
            context_tokens,
            step_ms,
            context_ms,
            attention_ms,
            context_gb: bytes / 1e9,
            floor_ms: floor.ms(n_prompts * context_tokens),
            read_tb_s: read.map(|read| read / 1e12),
            percent_of_read_rate: read.and_then(percent),
            attention_percent_of_read_rate: attention_ms.and_then(|ms| percent(rate(bytes, ms))),
            distinct_contexts,
        }
    }
}

/// A sequence of `context` tokens each, taking over the pages of earlier ones where there are no more.
fn sequences(pages: &mut PageTable, n: usize, context: usize) -> Result<Option<(Vec<Slot>, usize)>, Error> {
    let page_size = pages.page_size();
    let len = context + TIMED;
    // Besides shared pages each sequence writes some of its own.
    let own = len.div_ceil(page_size) - context / page_size;
    let whole = len.div_ceil(page_size);
    let usable = pages.free_pages();
    let distinct = match n * whole <= usable {
        true => n,
        false => match usable.checked_sub(n * own) {
            Some(left) => (left / (whole - own).max(1)).min(n),
            None => 0,
        },
    };
    if distinct == 0 || len > pages.max_len() {
        return Ok(None);
    }
    let mut slots = Vec::with_capacity(n);
    for i in 0..n {
        let slot = match i < distinct {
            true => {
                let slot = pages.allocate_slot()?;
                let _ = pages.reserve(slot, context)?;
                // Whole pages alone are shared.
                pages.advance(slot, context / page_size * page_size)?;
                slot
            }
            false => pages.fork(slots[i % distinct])?,
        };
        slots.push(slot);
    }
    for &slot in &slots {
        let _ = pages.reserve(slot, len)?;
    }
    Ok(Some((slots, distinct)))
}

/// Times steps of all batches and contexts on a GPU; those that do not fit are left out.
pub(super) fn on_gpu(
    backend: &mut CudaBackend,
    floor: &Floor,
    batches: &[usize],
    contexts: &[usize],
    seed: u64,
) -> Result<Vec<Point>, Error> {
    backend.fill_cache_random(seed)?;
    let mut points = Vec::new();
    for &n in batches {
        let mut base_ms = None;
        for &context in std::iter::once(&HARDLY_ANY).chain(contexts) {
            let mut pages = PageTable::new(backend.options().page_table())?;
            let Some((slots, distinct)) = sequences(&mut pages, n, context)? else {
                continue;
            };
            backend.sync_pages(&mut pages)?;
            let rows: Vec<_> = slots
                .iter()
                .map(|slot| DecodeRow::greedy(slot.index(), context - 1))
                .collect();
            let times = backend.profile_stages(&rows, &[None, Some(Stage::Attention)])?;
            let [step, attention] = &times[..] else {
                continue;
            };
            let Some(base_ms) = base_ms else {
                base_ms = Some(step.ms);
                continue;
            };
            let attention_ms = (attention.nodes > 0).then_some(attention.ms);
            let ms = (step.ms, base_ms);
            points.push(Point::new(floor, (n, context), ms, attention_ms, distinct));
        }
    }
    Ok(points)
}

/// The same with any runner, by computing prompts.
pub(super) fn with_prompts<R: Runner>(
    args: &BenchArgs,
    scheduler: &mut Scheduler<R>,
    config: &Qwen3Config,
    floor: &Floor,
    batches: &[usize],
    contexts: &[usize],
) -> Result<Vec<Point>, CliError> {
    let sampling = SamplingParams {
        max_new_tokens: ON_CPU,
        ..args.sampling()?
    };
    let mut points = Vec::new();
    for &n in batches {
        let mut base_ms = None;
        for &context in std::iter::once(&HARDLY_ANY).chain(contexts) {
            // At mid-run the context is as long as asked for.
            let len = context.saturating_sub(ON_CPU / 2).max(1);
            let prompts: Vec<_> = (0..n).map(|i| prompt(i, Some(len), config.vocab_size)).collect();
            let round = Round::run(scheduler, &prompts, 1, &sampling, args.seed, |_| Ok(()))?;
            let step_ms = median(round.middle());
            match base_ms {
                None => base_ms = Some(step_ms),
                Some(base_ms) => {
                    points.push(Point::new(floor, (n, context), (step_ms, base_ms), None, n));
                }
            }
        }
    }
    Ok(points)
}

pub(super) fn report(points: &[Point], read_tb_s: Option<f64>) -> Value {
    json!({ "read_rate_tb_s": read_tb_s, "context_growth": points })
}

pub(super) fn table(points: &[Point]) -> String {
    let mut out = String::from(
        "prompts  context  step ms  floor ms  context ms  TB/s  % of read rate  attention alone ms  %  own contexts\n",
    );
    let or_dash = |x: Option<f64>, digits: usize| x.map_or("-".into(), |x| format!("{x:.digits$}"));
    for point in points {
        let _ = writeln!(
            out,
            "{:>7}  {:>7}  {:>7.3}  {:>8}  {:>10.3}  {:>4}  {:>14}  {:>18}  {:>2}  {:>12}",
            point.n_prompts,
            point.context_tokens,
            point.step_ms,
            or_dash(point.floor_ms, 3),
            point.context_ms,
            or_dash(point.read_tb_s, 2),
            or_dash(point.percent_of_read_rate, 0),
            or_dash(point.attention_ms, 3),
            or_dash(point.attention_percent_of_read_rate, 0),
            point.distinct_contexts,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use paged_kv::PageTableConfig;

    use super::*;

    fn table_of(n_pages: usize) -> PageTable {
        PageTable::new(PageTableConfig {
            n_pages,
            page_size: 16,
            n_slots: 10,
            max_pages_per_slot: 20,
        })
        .unwrap()
    }

    #[test]
    fn sequences_take_over_pages_only_where_there_are_no_more() {
        // 100 tokens of context and 64 to write are 11 pages, of which 6 whole ones can be shared.
        for (n_pages, distinct) in [(9 * 11 + 1, 9), (9 * 11, 8), (9 * 5 + 6 + 1, 1)] {
            let mut pages = table_of(n_pages);
            let (slots, found) = sequences(&mut pages, 9, 100).unwrap().unwrap();
            assert_eq!((slots.len(), found), (9, distinct), "{n_pages} pages");
            pages.check_integrity().unwrap();
            for slot in slots {
                assert!(pages.capacity(slot).unwrap() >= 164);
            }
        }
        assert!(sequences(&mut table_of(9 * 5 + 6), 9, 100).unwrap().is_none());
        assert!(
            sequences(&mut table_of(1000), 1, 300).unwrap().is_none(),
            "too long"
        );
    }
}
