//! Prompts computed in chunks beside decoding sequences, with a real model on the CPU: the cut changes no bit of any
//! completion, and the memory of a step depends on the budget, not on the prompt.

use paged_kv::PageTable;
use qwen3_model::{CpuBackend, LoadOptions, Model, Qwen3Config, Weights};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_engine::runner::{RunnerMemory, SampledToken, Step};
use rollout_engine::{Error, Event, ModelRunner, Runner, RunnerShape, SamplingParams, Scheduler};

const VOCAB: usize = 61;

/// One layer of `n_heads` query heads and half as many KV heads, at least one, of 8 dimensions.
fn model(n_heads: usize, positions: usize, shape: &RunnerShape) -> Model<CpuBackend> {
    let config = format!(
        r#"{{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "vocab_size": {VOCAB},
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": {n_heads},
        "num_key_value_heads": {}, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": {positions}, "tie_word_embeddings": true, "attention_bias": false}}"#,
        (n_heads / 2).max(1)
    );
    let config = Qwen3Config::from_json(config.as_bytes()).unwrap();
    let mut options = LoadOptions::default();
    (options.n_pages, options.page_size) = (shape.n_pages, shape.page_size);
    options.max_tokens = shape.max_prefill_tokens + shape.max_batch_size;
    let weights = Weights::random(&config, 3);
    Model::new(CpuBackend::new(config, weights, &options).unwrap())
}

fn runner(n_heads: usize, shape: RunnerShape) -> ModelRunner<CpuBackend> {
    let model = model(n_heads, shape.max_seq_length, &shape);
    ModelRunner::new(model, shape, "cpu".into(), RunnerMemory::default())
}

/// Notes every step on its way to a model.
struct Recording {
    inner: ModelRunner<CpuBackend>,
    steps: Vec<Step>,
}

impl Runner for Recording {
    fn shape(&self) -> RunnerShape {
        self.inner.shape()
    }

    fn device(&self) -> String {
        self.inner.device()
    }

    fn memory(&self) -> RunnerMemory {
        self.inner.memory()
    }

    fn mixed_prefill_tokens(&self, decoding: usize) -> usize {
        limit_beside(decoding)
    }

    fn submit(&mut self, step: &Step, pages: &mut PageTable) -> Result<(), Error> {
        self.steps.push(step.clone());
        self.inner.submit(step, pages)
    }

    fn collect(&mut self) -> Result<Vec<SampledToken>, Error> {
        self.inner.collect()
    }

    fn reset(&mut self) {
        self.inner.reset();
    }
}

/// The recording runner's choice for readers who wait.
fn limit_beside(decoding: usize) -> usize {
    12usize.saturating_sub(2 * decoding).max(3)
}

/// Tokens and bits of the log-probabilities of each request.
type Completions = Vec<(Vec<u32>, Vec<u32>)>;

/// Submits three prompts at once and one more before every other step, and runs all to their ends. `mixed`: prompt tokens
/// beside decode rows, the runner's choice if `None`.
fn complete(
    budget: usize,
    mixed: Option<usize>,
    page_size: usize,
    prompts: &[Vec<u32>],
) -> (Completions, Vec<Step>) {
    let shape = RunnerShape {
        vocab_size: VOCAB,
        max_seq_length: 256,
        max_batch_size: 6,
        n_pages: 6 * 256 / page_size + 1,
        page_size,
        max_in_flight: 1,
        max_prefill_tokens: budget,
    };
    let inner = runner(4, shape);
    let mut scheduler = Scheduler::new(
        Recording {
            inner,
            steps: Vec::new(),
        },
        vec![],
    )
    .unwrap();
    match mixed {
        Some(tokens) => scheduler.set_mixed_prefill_tokens(tokens),
        None => scheduler.favor_latency(),
    }
    let sampling = SamplingParams {
        max_new_tokens: 20,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let mut waiting = prompts.iter().cloned();
    for prompt in waiting.by_ref().take(3) {
        scheduler.submit(prompt, &sampling).unwrap();
    }
    let mut done = vec![None; prompts.len()];
    let mut events = Vec::new();
    for step in 0.. {
        if step % 2 == 1
            && let Some(prompt) = waiting.next()
        {
            scheduler.submit(prompt, &sampling).unwrap();
        }
        if !scheduler.has_unfinished() {
            break;
        }
        scheduler.step(&mut events).unwrap();
        for event in events.drain(..) {
            if let Event::Finished { request, result, .. } = event {
                let completion = result.unwrap();
                let bits = completion.logprobs.iter().map(|x| x.to_bits()).collect();
                done[request.number() as usize] = Some((completion.token_ids, bits));
            }
        }
    }
    let done = done.into_iter().map(|completion| completion.unwrap()).collect();
    (done, scheduler.into_runner().steps)
}

fn prompts() -> Vec<Vec<u32>> {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    [1, 130, 17, 64, 3, 200, 16, 65, 90, 33]
        .map(|len| (0..len).map(|_| random.random_range(0..VOCAB as u32)).collect())
        .to_vec()
}

#[test]
fn any_chunk_size_gives_the_same_bits() {
    let prompts = prompts();
    for (page_size, budgets) in [(4, [1, 7, 100]), (16, [2, 31, 64]), (64, [3, 16, 128])] {
        let (whole, _) = complete(4096, Some(4096), page_size, &prompts);
        assert!(whole.iter().all(|(tokens, _)| tokens.len() == 20));
        for budget in budgets {
            for mixed in [Some(1), Some(budget), None] {
                let (cut, steps) = complete(budget, mixed, page_size, &prompts);
                assert!(steps.iter().all(|step| step.token_ids.len() <= budget));
                assert!(
                    cut == whole,
                    "budget {budget}, beside decoding {mixed:?}, pages of {page_size}"
                );
            }
        }
    }
}

#[test]
fn one_step_holds_first_and_later_pieces_of_many_prompts_and_decode_rows() {
    let prompts = prompts();
    let (whole, _) = complete(4096, Some(4096), 16, &prompts);
    let (cut, steps) = complete(48, Some(48), 16, &prompts);
    assert!(cut == whole);
    let has_all = |step: &Step| {
        let first = step.prefill.iter().any(|chunk| chunk.start == 0);
        let later = step.prefill.iter().any(|chunk| chunk.start > 0);
        let unfinished = step.prefill.iter().any(|chunk| chunk.sample.is_none());
        first && later && unfinished && !step.decode.is_empty()
    };
    assert!(steps.iter().any(has_all), "no step mixed everything");
}

#[test]
fn decoding_sequences_wait_for_no_more_than_the_smaller_budget_unless_more_start_than_decode() {
    let (_, steps) = complete(100, Some(8), 16, &prompts());
    let beside = |step: &&Step| !step.decode.is_empty() && !step.prefill.is_empty();
    let (mut small, mut large) = (0, 0);
    for step in steps.iter().filter(beside) {
        match step.token_ids.len() {
            ..=8 => small += 1,
            _ => {
                large += 1;
                // At least those that were given tokens were starting.
                assert!(step.decode.len() <= 2, "{} sequences waited", step.decode.len());
            }
        }
    }
    assert!(
        small > 10 && large > 0,
        "{small} steps within the small budget, {large} beyond"
    );
}

#[test]
fn a_runner_chooses_anew_for_every_number_of_decoding_sequences() {
    let (_, steps) = complete(100, None, 16, &prompts());
    let beside = |step: &&Step| !step.decode.is_empty() && !step.prefill.is_empty();
    let mut filled = std::collections::BTreeSet::new();
    for step in steps.iter().filter(beside) {
        let (tokens, decoding) = (step.token_ids.len(), step.decode.len());
        // More may start than decode: these were given tokens or wait for a slot.
        assert!(
            tokens <= limit_beside(decoding) || decoding <= 2,
            "{tokens} beside {decoding}"
        );
        if tokens == limit_beside(decoding) {
            filled.insert(decoding);
        }
    }
    assert!(filled.len() >= 3, "{filled:?}");
}

/// Bytes of the step buffers after a prompt of `len` tokens.
fn workspace_after(len: usize, budget: usize) -> usize {
    let shape = RunnerShape {
        vocab_size: VOCAB,
        max_seq_length: 40_000,
        max_batch_size: 2,
        n_pages: 40_000 / 64 + 2,
        page_size: 64,
        max_in_flight: 1,
        max_prefill_tokens: budget,
    };
    let mut scheduler = Scheduler::new(runner(1, shape), vec![]).unwrap();
    let sampling = SamplingParams {
        max_new_tokens: 2,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let prompt = (0..len as u32).map(|i| i * 7 % VOCAB as u32).collect();
    scheduler.submit(prompt, &sampling).unwrap();
    let mut events = Vec::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).unwrap();
    }
    let Some(Event::Finished { result: Ok(done), .. }) = events.pop() else {
        panic!("no completion")
    };
    assert_eq!(done.token_ids.len(), 2);
    assert!(scheduler.statistics().steps as usize >= len / budget);
    scheduler.runner().model().backend().workspace_bytes()
}

#[test]
fn the_memory_of_a_step_depends_on_the_budget_and_not_on_the_prompt() {
    let budget = 256;
    let short = workspace_after(1000, budget);
    let long = workspace_after(32_768, budget);
    assert_eq!(long, short);
    assert!(workspace_after(1000, 4 * budget) > 2 * short);
}
