//! Packed steps on a GPU that hold pieces of prompts and decode rows, against every sequence alone.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "tests on a GPU print what they measured")]

mod gpu_support;

use std::time::Instant;

use gpu_support::{Gpu, POISON, active, repository, rng, tuned};
use lora_merge::ActiveAdapter;
use paged_kv::{PageTable, Slot};
use qwen3_model::cuda::{CudaBackend, CudaOptions, DecodeRow, SampledToken, WeightSource};
use qwen3_model::sampling::{Sampling, TokenState, sample_row};
use qwen3_model::{
    Backend, LogitRows, QuantType, Qwen3Config, SequenceChunk, StepBatch, StepPlanner, Weights,
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// One sequence on its way.
struct Sequence {
    slot: Slot,
    policy: Option<usize>,
    sampling: Sampling,
    /// Prompt, then what was sampled.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Tokens that were computed.
    computed: usize,
    end: usize,
    /// Log-probability of each sampled token, and whether it came from a packed step.
    sampled: Vec<(f32, bool)>,
}

impl Sequence {
    fn in_prompt(&self) -> bool {
        self.computed < self.prompt_len
    }

    fn decodes(&self) -> bool {
        !self.in_prompt() && self.tokens.len() < self.end
    }

    /// `[vocab]`.
    fn states(&self, vocab: usize) -> Vec<TokenState> {
        let mut states = vec![TokenState::default(); vocab];
        let (prompt, completion) = self.tokens.split_at(self.prompt_len);
        for (id, state) in TokenState::of_sequence(prompt, completion, &[]) {
            states[id as usize] = state;
        }
        states
    }

    fn take(&mut self, sampled: &SampledToken, packed: bool) {
        assert!(sampled.logprob.is_finite());
        self.tokens.push(sampled.token);
        self.sampled.push((sampled.logprob, packed));
    }
}

struct Rig {
    backend: CudaBackend,
    table: PageTable,
    planner: StepPlanner,
}

impl Rig {
    fn new(backend: CudaBackend) -> Self {
        let table = PageTable::new(backend.options().page_table()).unwrap();
        let planner = StepPlanner::new();
        Self {
            backend,
            table,
            planner,
        }
    }

    /// The bundled model, in bf16 or in 4 bits.
    fn tiny(gpu: &Gpu, page_size: usize, quantized: bool) -> Self {
        let dir = repository().join("rollout-engine/models/tiny-qwen3-math");
        let config = Qwen3Config::from_dir(&dir).unwrap();
        let mut weights = Weights::open(&dir, &config).unwrap();
        if quantized {
            weights = weights.quantized(QuantType::Nf4, false).unwrap();
        }
        let options = tuned(CudaOptions {
            max_tokens: 1024,
            max_batch_size: if cuda_graphs::few_cases() { 8 } else { 24 },
            max_seq_length: 512,
            n_pages: 1 + 24 * 512 / page_size,
            page_size,
            ..CudaOptions::default()
        });
        let source = WeightSource::Given(&weights);
        let mut backend = CudaBackend::new(&gpu.device, &gpu.compiler, config, source, options).unwrap();
        // What nobody wrote must not be read.
        backend.cache().fill_bytes(backend.stream(), POISON).unwrap();
        backend.capture().unwrap();
        Self::new(backend)
    }

    fn vocab(&self) -> usize {
        self.backend.config().vocab_size
    }

    /// Reserves the next `n` positions of a slot; gives the first.
    fn extend(&mut self, slot: Slot, n: usize) -> usize {
        let start = self.table.len(slot).unwrap();
        assert!(self.table.reserve(slot, start + n).unwrap().copy.is_none());
        self.table.advance(slot, n).unwrap();
        start
    }

    /// One packed step: pieces of these lengths of prompts, and the next token of others. `all` are indexed by both.
    fn packed(&mut self, all: &mut [Sequence], pieces: &[(usize, usize)], decoding: &[usize]) {
        let (mut token_ids, mut chunks) = (Vec::new(), Vec::new());
        // Rows that are sampled, and how.
        let (mut rows, mut sampling) = (Vec::new(), Vec::new());
        for &(i, len) in pieces {
            let start = self.extend(all[i].slot, len);
            assert_eq!(start, all[i].computed);
            token_ids.extend_from_slice(&all[i].tokens[start..start + len]);
            all[i].computed += len;
            chunks.push(SequenceChunk {
                slot: all[i].slot,
                start,
                len,
                wants_logits: !all[i].in_prompt(),
            });
            if !all[i].in_prompt() {
                rows.push((i, all[i].computed - 1));
            }
        }
        for &i in decoding {
            let start = self.extend(all[i].slot, 1);
            all[i].computed += 1;
            // An id that would be wrong: the device knows the right one.
            token_ids.push(0);
            chunks.push(SequenceChunk {
                slot: all[i].slot,
                start,
                len: 1,
                wants_logits: true,
            });
            rows.push((i, start));
        }
        sampling.extend(rows.iter().map(|&(i, _)| all[i].sampling));
        self.backend.sync_pages(&mut self.table).unwrap();
        let batch = StepBatch {
            token_ids: &token_ids,
            chunks: &chunks,
        };
        let config = self.backend.config().clone();
        let plan = self
            .planner
            .plan(&config, &batch, &self.table, LogitRows::Wanted)
            .unwrap();
        let n = self
            .backend
            .prefill_and_decode(&plan, decoding.len(), &sampling)
            .unwrap();
        assert_eq!(n, rows.len());
        let pending = self.backend.read_back(n, 0).unwrap();
        let sampled = self.backend.collect(pending).unwrap();
        let logits = self.backend.read_logits().unwrap();
        for (((i, position), sampled), logits) in rows
            .into_iter()
            .zip(&sampled)
            .zip(logits.chunks(config.vocab_size))
        {
            let sampling = &all[i].sampling;
            let index = sampling.new_token_index(position);
            let states = all[i].states(config.vocab_size);
            let expected = sample_row(logits, sampling, index, &states);
            assert_eq!(sampled.token, expected.token, "position {position}, {sampling:?}");
            assert!((sampled.sampled_logprob - expected.sampled_logprob).abs() < 1e-4);
            assert_eq!(sampled.top_logprobs.len(), sampling.top_logprobs as usize);
            all[i].take(sampled, true);
        }
    }

    /// One decode step through its graph.
    fn decode(&mut self, all: &mut [Sequence], decoding: &[usize]) {
        let rows: Vec<DecodeRow> = decoding
            .iter()
            .map(|&i| DecodeRow {
                slot: all[i].slot.index(),
                position: self.extend(all[i].slot, 1),
                sampling: all[i].sampling,
            })
            .collect();
        self.backend.sync_pages(&mut self.table).unwrap();
        self.backend.decode(&rows).unwrap();
        let pending = self.backend.read_back(0, rows.len()).unwrap();
        let sampled = self.backend.collect(pending).unwrap();
        for (&i, sampled) in decoding.iter().zip(&sampled) {
            all[i].computed += 1;
            all[i].take(sampled, false);
        }
    }

    /// Log-probabilities of every token of a sequence, and of the best, computed in one piece and with nobody else.
    fn alone(&mut self, sequence: &Sequence) -> Vec<(f64, f64)> {
        let slot = self.table.allocate_slot().unwrap();
        if sequence.policy.is_some() {
            self.backend
                .set_slot_policy(slot.index(), sequence.policy)
                .unwrap();
        }
        let n = sequence.tokens.len();
        let start = self.extend(slot, n);
        let chunk = SequenceChunk {
            slot,
            start,
            len: n,
            wants_logits: true,
        };
        self.backend.sync_pages(&mut self.table).unwrap();
        let batch = StepBatch {
            token_ids: &sequence.tokens,
            chunks: &[chunk],
        };
        let plan = self
            .planner
            .plan(self.backend.config(), &batch, &self.table, LogitRows::All)
            .unwrap();
        self.backend.step(&plan).unwrap();
        let vocab = self.vocab();
        let logits = self.backend.read_logits().unwrap();
        let rows = logits.chunks(vocab).zip(&sequence.tokens[1..]);
        let logprobs = rows.map(|(row, &token)| {
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&x| f64::from(x - best).exp()).sum();
            (f64::from(row[token as usize] - best) - sum.ln(), -sum.ln())
        });
        let logprobs = logprobs.collect();
        self.table.erase(slot).unwrap();
        logprobs
    }
}

/// How often to do what a test does so many times: once, where few cases are wanted.
fn repeats(times: usize) -> usize {
    if cuda_graphs::few_cases() { 1 } else { times }
}

/// Every kind of row, one after the other.
fn sampling(number: usize, prompt_len: usize) -> Sampling {
    let greedy = Sampling {
        prompt_len: prompt_len as u32,
        ..Sampling::GREEDY
    };
    let hot = Sampling {
        temperature: 1.0,
        seed: number as u64,
        ..greedy
    };
    match number % 5 {
        0 | 1 => greedy,
        2 => Sampling {
            top_k: 20,
            top_p: 0.9,
            top_logprobs: 3,
            ..hot
        },
        3 => Sampling {
            repetition_penalty: 1.2,
            frequency_penalty: 0.1,
            ..hot
        },
        _ => hot,
    }
}

fn sequences(rig: &mut Rig, random: &mut ChaCha8Rng, n: usize, policies: usize) -> Vec<Sequence> {
    (0..n)
        .map(|number| {
            let slot = rig.table.allocate_slot().unwrap();
            let (longest, most_new) = if cuda_graphs::few_cases() {
                (60, 12)
            } else {
                (200, 40)
            };
            let prompt_len = random.random_range(1..longest);
            let tokens: Vec<u32> = (0..prompt_len).map(|_| random.random_range(5..560)).collect();
            let policy = (policies > 0).then(|| number % policies);
            if policy.is_some() {
                rig.backend.set_slot_policy(slot.index(), policy).unwrap();
            }
            let sampling = sampling(number, prompt_len);
            if sampling.uses_token_states() {
                let states = TokenState::of_sequence(&tokens, &[], &[]);
                rig.backend.set_token_states(slot.index(), &states).unwrap();
            }
            Sequence {
                slot,
                policy,
                sampling,
                tokens,
                prompt_len,
                computed: 0,
                end: prompt_len + random.random_range(1..most_new),
                sampled: Vec::new(),
            }
        })
        .collect()
}

/// Random packed steps and graphs in between until all sequences have ended. Gives how many packed steps held first and
/// later pieces, unfinished ones and decode rows at once.
fn serve(rig: &mut Rig, all: &mut [Sequence], random: &mut ChaCha8Rng) -> usize {
    let mut mixed = 0;
    while all.iter().any(|s| s.in_prompt() || s.decodes()) {
        let mut pieces = Vec::new();
        let few = random.random_bool(0.3);
        for (i, s) in all.iter().enumerate().filter(|(_, s)| s.in_prompt()) {
            let rest = s.prompt_len - s.computed;
            if random.random_bool(if few { 0.1 } else { 0.5 }) {
                pieces.push((i, random.random_range(1..=rest.min(60))));
            }
        }
        let decoding: Vec<usize> = (0..all.len())
            .filter(|&i| all[i].decodes() && random.random_bool(0.8))
            .collect();
        if pieces.is_empty() {
            rig.decode(all, &decoding);
            continue;
        }
        let first = pieces.iter().any(|&(i, _)| all[i].computed == 0);
        let later = pieces.iter().any(|&(i, _)| all[i].computed > 0);
        let cut = pieces
            .iter()
            .any(|&(i, len)| all[i].computed + len < all[i].prompt_len);
        mixed += usize::from(first && later && cut && !decoding.is_empty());
        rig.packed(all, &pieces, &decoding);
    }
    mixed
}

#[derive(Default)]
struct Errors {
    sum: f64,
    n: usize,
    largest: f64,
}

impl Errors {
    fn add(&mut self, error: f64) {
        self.sum += error;
        self.n += 1;
        self.largest = self.largest.max(error);
    }

    fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }
}

/// Compares everything that was sampled with each sequence alone.
fn compare(rig: &mut Rig, all: &[Sequence], what: &str) {
    let (mut packed, mut graphs, mut behind) = (Errors::default(), Errors::default(), 0f64);
    for sequence in all {
        let alone = rig.alone(sequence);
        assert_eq!(sequence.tokens.len(), sequence.end);
        for (&(logprob, in_packed), &(expected, best)) in
            sequence.sampled.iter().zip(&alone[sequence.prompt_len - 1..])
        {
            let of = if in_packed { &mut packed } else { &mut graphs };
            of.add((f64::from(logprob) - expected).abs());
            if sequence.sampling.temperature == 0.0 {
                behind = behind.max(best - expected);
            }
        }
    }
    println!(
        "{what}: log-probabilities off by {:.5} in {} rows of packed steps (at most {:.3}), by {:.5} in {} of graphs (at most \
         {:.3}); greedy tokens at most {behind:.3} behind the best",
        packed.mean(),
        packed.n,
        packed.largest,
        graphs.mean(),
        graphs.n,
        graphs.largest,
    );
    let few = cuda_graphs::few_cases();
    let fewest = if few { 0 } else { 50 };
    assert!(packed.n > fewest && graphs.n > fewest, "{what}");
    assert!(packed.mean() < 0.05 && packed.largest < 1.0, "{what}");
    assert!(few || packed.mean() <= 2.0 * graphs.mean() + 0.005, "{what}");
    assert!(behind < 0.3, "{what}");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pieces_of_many_prompts_and_decode_rows_give_what_each_sequence_gives_alone() {
    let gpu = Gpu::open();
    let mut mixed = 0;
    for (seed, page_size) in [(1, 16), (2, 64), (3, 256)].into_iter().take(repeats(3)) {
        let mut rig = Rig::tiny(&gpu, page_size, false);
        let mut random = rng(seed);
        let n = if cuda_graphs::few_cases() { 6 } else { 20 };
        let mut all = sequences(&mut rig, &mut random, n, 0);
        mixed += serve(&mut rig, &mut all, &mut random);
        compare(&mut rig, &all, &format!("pages of {page_size}"));
    }
    assert!(
        cuda_graphs::few_cases() || mixed >= 5,
        "only {mixed} steps held everything"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_same_with_weights_in_4_bits() {
    let gpu = Gpu::open();
    let mut rig = Rig::tiny(&gpu, 32, true);
    let mut random = rng(4);
    let mut all = sequences(&mut rig, &mut random, 2 + repeats(18), 0);
    serve(&mut rig, &mut all, &mut random);
    compare(&mut rig, &all, "nf4");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_same_with_a_policy_for_each_sequence() {
    let gpu = Gpu::open();
    for quantized in [false, true].into_iter().take(repeats(2)) {
        let mut rig = Rig::tiny(&gpu, 32, quantized);
        let policies = ["mult-r32", "qv-r8", "rslora-r8"].map(active);
        let all: Vec<&[ActiveAdapter]> = policies.iter().map(Vec::as_slice).collect();
        rig.backend.serve_policies(&all).unwrap();
        let mut random = rng(5);
        let mut all = sequences(&mut rig, &mut random, 2 + repeats(18), 3);
        serve(&mut rig, &mut all, &mut random);
        compare(&mut rig, &all, &format!("three policies, 4 bits {quantized}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_that_decode_must_be_chunks_of_one_token_at_the_end() {
    let gpu = Gpu::open();
    let mut rig = Rig::tiny(&gpu, 16, false);
    let slots = [(); 2].map(|()| rig.table.allocate_slot().unwrap());
    let chunks = [(slots[0], 1), (slots[1], 2)].map(|(slot, len)| SequenceChunk {
        slot,
        start: rig.extend(slot, len),
        len,
        wants_logits: true,
    });
    let batch = StepBatch {
        token_ids: &[5, 6, 7],
        chunks: &chunks,
    };
    let config = rig.backend.config().clone();
    let plan = rig
        .planner
        .plan(&config, &batch, &rig.table, LogitRows::Wanted)
        .unwrap();
    let greedy = [Sampling::GREEDY; 2];
    for continued in [1, 2, 3] {
        let refused = rig.backend.prefill_and_decode(&plan, continued, &greedy);
        assert!(refused.is_err(), "{continued}");
    }
    assert_eq!(rig.backend.prefill_and_decode(&plan, 0, &greedy).unwrap(), 2);
    assert!(rig.backend.prefill_and_decode(&plan, 0, &greedy[..1]).is_err());
}

/// Milliseconds a step, of ten queued one after the other.
fn time(rig: &mut Rig, mut step: impl FnMut(&mut Rig)) -> f64 {
    for _ in 0..3 {
        step(rig);
    }
    rig.backend.stream().synchronize().unwrap();
    let begin = Instant::now();
    for _ in 0..10 {
        step(rig);
    }
    rig.backend.stream().synchronize().unwrap();
    begin.elapsed().as_secs_f64() * 100.0
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn decode_rows_cost_less_beside_prompts_than_after_them() {
    const CONTEXT: usize = 400;
    const PIECE: usize = 160;
    let gpu = Gpu::open();
    let options = CudaOptions {
        max_tokens: 1024,
        max_batch_size: 80,
        max_seq_length: 512,
        n_pages: 1 + 80 * 8,
        page_size: 64,
        ..CudaOptions::default()
    };
    let source = WeightSource::Random(1);
    let config = Qwen3Config::qwen3_4b();
    let mut backend = CudaBackend::new(&gpu.device, &gpu.compiler, config.clone(), source, options).unwrap();
    backend.capture().unwrap();
    let mut rig = Rig::new(backend);
    let prompts = [(); 6].map(|()| rig.table.allocate_slot().unwrap());
    let decoding = [(); 64].map(|()| rig.table.allocate_slot().unwrap());
    for &slot in &prompts {
        rig.extend(slot, PIECE);
    }
    for &slot in &decoding {
        rig.extend(slot, CONTEXT + 1);
    }
    rig.backend.sync_pages(&mut rig.table).unwrap();
    println!("prompt tokens, rows: ms of the pass of prompts, the decode graph, both, one pass for both");
    for rows in [1, 16, 20, 64] {
        let mut sums = [0.0; 2];
        for tokens in [
            16usize, 32, 64, 96, 128, 160, 192, 224, 236, 256, 320, 384, 448, 512, 768,
        ] {
            let mut chunks = Vec::new();
            for (i, &slot) in prompts.iter().enumerate() {
                let len = tokens.saturating_sub(i * PIECE).min(PIECE);
                if len > 0 {
                    chunks.push(SequenceChunk {
                        slot,
                        start: 0,
                        len,
                        wants_logits: true,
                    });
                }
            }
            let pieces = chunks.len();
            chunks.extend(decoding[..rows].iter().map(|&slot| SequenceChunk {
                slot,
                start: CONTEXT,
                len: 1,
                wants_logits: true,
            }));
            let token_ids: Vec<u32> = (0..(tokens + rows) as u32).map(|i| i * 7919 % 150_000).collect();
            let decode_rows: Vec<DecodeRow> = decoding[..rows]
                .iter()
                .map(|slot| DecodeRow::greedy(slot.index(), CONTEXT))
                .collect();
            let greedy = vec![Sampling::GREEDY; pieces + rows];
            let packed = |rig: &mut Rig, ids: &[u32], chunks: &[SequenceChunk], continued: usize| {
                let batch = StepBatch {
                    token_ids: ids,
                    chunks,
                };
                rig.backend.sync_pages(&mut rig.table).unwrap();
                let plan = rig
                    .planner
                    .plan(&config, &batch, &rig.table, LogitRows::Wanted)
                    .unwrap();
                let greedy = &greedy[..chunks.len()];
                rig.backend.prefill_and_decode(&plan, continued, greedy).unwrap();
            };
            let alone = time(&mut rig, |rig| {
                packed(rig, &token_ids[..tokens], &chunks[..pieces], 0);
            });
            let graph = time(&mut rig, |rig| rig.backend.decode(&decode_rows).unwrap());
            let after = time(&mut rig, |rig| {
                packed(rig, &token_ids[..tokens], &chunks[..pieces], 0);
                rig.backend.decode(&decode_rows).unwrap();
            });
            let beside = time(&mut rig, |rig| packed(rig, &token_ids, &chunks, rows));
            println!("{tokens:4} {rows:3}: {alone:.3} {graph:.3} {after:.3} {beside:.3}");
            sums[0] += after;
            sums[1] += beside;
        }
        assert!(
            sums[1] < sums[0],
            "{rows} rows: {} ms beside, {} after",
            sums[1],
            sums[0]
        );
    }
}
