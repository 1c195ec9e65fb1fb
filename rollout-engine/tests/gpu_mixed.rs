//! Steps on a GPU whose prompts and decode rows share one pass, against steps with a pass for each.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "tests on a GPU print what they measured")]

mod gpu_support;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_support::tiny;
use lora_merge::{ActiveAdapter, Adapter};
use qwen3_model::cuda::WeightSource;
use qwen3_model::{MergeMode, QuantType, Qwen3Config};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_engine::cuda_runner::{CudaRunner, CudaSettings};
use rollout_engine::{Event, PoolSettings, SamplingParams, Scheduler, TokenCompletion};

/// Two passes round differently: where the two best tokens are nearer than this, either may be chosen.
const CLOSE: f32 = 0.15;

/// One test at a time: one of them measures the device's memory.
fn device() -> MutexGuard<'static, ()> {
    static DEVICE: Mutex<()> = Mutex::new(());
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settings(mixed_steps: bool) -> CudaSettings {
    CudaSettings {
        mixed_steps,
        ..CudaSettings::default()
    }
}

fn scheduler(mixed_steps: bool, pool: &PoolSettings, quantized: bool) -> Scheduler<CudaRunner> {
    let (config, mut weights, eos) = tiny();
    if quantized {
        weights = weights.quantized(QuantType::Nf4, false).unwrap();
    }
    let source = WeightSource::Given(&weights);
    let runner = CudaRunner::open(&config, source, pool, &settings(mixed_steps)).unwrap();
    let mut scheduler = Scheduler::new(runner, eos).unwrap();
    scheduler.set_mixed_prefill_tokens(40);
    scheduler
}

fn pool(batch: usize, page_size: usize, n_pages: usize) -> PoolSettings {
    // A graph is captured for each bucket.
    let batch = if cuda_graphs::few_cases() {
        batch.min(8)
    } else {
        batch
    };
    gpu_support::pool(batch, page_size, n_pages, 128)
}

/// Prompt, sampling, completions.
type Request = (Vec<u32>, SamplingParams, usize);
type Completions = BTreeMap<(u64, usize), TokenCompletion>;

/// Submits a few requests at once and the others one at a step, so that prompts meet decode rows; runs all to their ends.
fn run(scheduler: &mut Scheduler<CudaRunner>, requests: &[Request]) -> Completions {
    let mut waiting = requests.iter();
    let mut submit = |scheduler: &mut Scheduler<CudaRunner>| match waiting.next() {
        Some((prompt, sampling, n)) => scheduler.submit_group(prompt.clone(), sampling, *n).is_ok(),
        None => false,
    };
    for _ in 0..4 {
        assert!(submit(scheduler));
    }
    let (mut events, mut done) = (Vec::new(), BTreeMap::new());
    while submit(scheduler) || scheduler.has_unfinished() {
        scheduler.step(&mut events).unwrap();
        for event in events.drain(..) {
            if let Event::Finished {
                request,
                index,
                result,
            } = event
            {
                done.insert((request.number(), index), result.unwrap());
            }
        }
    }
    let pages = scheduler.pages();
    pages.check_integrity().unwrap();
    assert_eq!(pages.free_pages(), pages.n_pages() - 1, "pages are lost");
    assert_eq!(done.len(), requests.iter().map(|(_, _, n)| n).sum::<usize>());
    done
}

fn greedy(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_new_tokens,
        top_logprobs: 2,
        ..SamplingParams::default()
    }
}

fn prompts(seed: u64, n: usize, longest: usize) -> Vec<Vec<u32>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut prompt = |_| {
        let len = random.random_range(1..longest);
        (0..len).map(|_| random.random_range(5..560)).collect()
    };
    (0..n).map(&mut prompt).collect()
}

/// Greedy completions are the same but where the best two tokens were close; of drawn ones at least half (13 of 19 were, in 4 bits
/// and with other kernels than the default ones).
fn compare(what: &str, requests: &[Request], mixed: &Completions, separate: &Completions) {
    let (mut same, mut close, mut drawn, mut drawn_same) = (0, 0, 0, 0);
    for (key, a) in separate {
        let b = &mixed[key];
        assert_eq!(a.policies.len(), b.policies.len(), "{what}");
        let (_, sampling, _) = &requests[key.0 as usize];
        let equal = a.token_ids == b.token_ids && a.finish_reason == b.finish_reason;
        let first = a.token_ids.iter().zip(&b.token_ids).position(|(a, b)| a != b);
        for at in 0..first.unwrap_or(a.token_ids.len().min(b.token_ids.len())) {
            let off = (a.logprobs[at] - b.logprobs[at]).abs();
            assert!(off < 0.5, "{what}, {key:?}, token {at}: off by {off}");
        }
        // Alternatives say nothing of how close penalised tokens were.
        if sampling.temperature > 0.0 || sampling.repetition_penalty != 1.0 {
            drawn += 1;
            drawn_same += usize::from(equal);
            continue;
        }
        match first {
            None => {
                assert!(equal, "{what}, {key:?}: ends elsewhere");
                same += 1;
            }
            Some(at) => {
                let top = &a.top_logprobs[at];
                let gap = top[0].logprob - top[1].logprob;
                assert!(
                    gap < CLOSE,
                    "{what}, {key:?}: differs at {at}, where the gap is {gap}"
                );
                close += 1;
            }
        }
    }
    println!(
        "{what}: {same} greedy completions the same, {close} differ where it was close; of {drawn} drawn or penalised {drawn_same} the same"
    );
    assert!(same >= close, "{what}");
    // By another token's choice at one place the rest differs, too. With other random numbers none would be the same.
    assert!(drawn_same * 2 >= drawn, "{what}");
}

/// Runs the requests with one pass and with two.
fn both(
    what: &str,
    pool: &PoolSettings,
    quantized: bool,
    adapter: Option<&str>,
    requests: &[Request],
) -> [Scheduler<CudaRunner>; 2] {
    let [(one, a), (two, b)] = [true, false].map(|mixed_steps| {
        let mut scheduler = scheduler(mixed_steps, pool, quantized);
        if let Some(name) = adapter {
            let path = gpu_support::adapter(name);
            let active = [ActiveAdapter::new(Adapter::load(path).unwrap())];
            let mut events = Vec::new();
            scheduler
                .set_adapters(&active, MergeMode::Unmerged, &mut events)
                .unwrap();
        }
        let done = run(&mut scheduler, requests);
        (scheduler, done)
    });
    compare(what, requests, &a, &b);
    [one, two]
}

/// Every kind of sampling, stop ids, and prompts longer than the budget.
fn requests(n: usize) -> Vec<Request> {
    match cuda_graphs::few_cases() {
        true => requests_of(n.div_ceil(10).max(4), 60, 12),
        false => requests_of(n, 150, 60),
    }
}

/// With prompts shorter than `longest` and so many new tokens at most.
fn requests_of(n: usize, longest: usize, max_new_tokens: usize) -> Vec<Request> {
    let greedy = |tokens: usize| greedy(tokens * max_new_tokens / 60);
    let prompts = prompts(1, n, longest).into_iter().enumerate();
    let request = |(i, prompt)| {
        let hot = SamplingParams {
            temperature: 1.0,
            seed: Some(i as u64),
            ..greedy(50)
        };
        let sampling = match i % 6 {
            0 | 1 => greedy(60),
            2 => SamplingParams {
                stop_token_ids: vec![20, 21, 22, 23],
                ignore_eos: true,
                ..greedy(60)
            },
            3 => SamplingParams {
                repetition_penalty: 1.1,
                min_new_tokens: 10,
                ..greedy(60)
            },
            4 => SamplingParams {
                top_k: 20,
                top_p: 0.9,
                ..hot
            },
            _ => hot,
        };
        (prompt, sampling, 1)
    };
    prompts.map(request).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_pass_gives_the_tokens_of_two_for_any_sampling_and_stop_ids() {
    let _device = device();
    both("bf16", &pool(24, 32, 1 + 24 * 16), false, None, &requests(60));
    both(
        "bf16, batch 3",
        &pool(3, 64, 1 + 3 * 8),
        false,
        None,
        &requests(30),
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_pass_gives_the_tokens_of_two_under_preemption() {
    let _device = device();
    // Of few requests short ones, all of which start and then outgrow the pages together.
    let (n_pages, requests) = match cuda_graphs::few_cases() {
        true => (7, requests_of(5, 20, 36)),
        false => (24, requests(60)),
    };
    for scheduler in both("a tight pool", &pool(24, 16, n_pages), false, None, &requests) {
        assert!(scheduler.statistics().preemptions > 0);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn one_pass_gives_the_tokens_of_two_with_4_bits_and_with_adapters_at_run_time() {
    let _device = device();
    let pool = pool(24, 32, 1 + 24 * 16);
    let requests = requests(40);
    if !cuda_graphs::few_cases() {
        both("nf4", &pool, true, None, &requests);
        both("mult-r32", &pool, false, Some("mult-r32"), &requests);
    }
    both("nf4 and mult-r32", &pool, true, Some("mult-r32"), &requests);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn siblings_of_a_group_start_beside_decode_rows_when_their_prompt_is_done() {
    let _device = device();
    let mut requests = requests(24);
    requests.iter_mut().step_by(2).for_each(|request| request.2 = 5);
    let [scheduler, _] = both("groups", &pool(24, 32, 1 + 24 * 16), false, None, &requests);
    assert!(
        scheduler.statistics().saved_prefill_tokens > 0,
        "{:?}",
        scheduler.statistics()
    );
}

/// A runner of Qwen3-0.6B's shape after a short prompt, its device memory, and what it makes of a prompt of `len` tokens.
fn long_prompt(len: usize, budget: usize) -> (u64, u64, TokenCompletion) {
    let config = Qwen3Config::qwen3_0_6b();
    let page_size = 64;
    let pool = PoolSettings {
        max_batch_size: Some(2),
        max_seq_length: Some(len + 64),
        n_pages: Some(2 + (len + 64).div_ceil(page_size) + 16),
        page_size: Some(page_size),
        max_prefill_tokens: Some(budget),
    };
    let runner = CudaRunner::open(&config, WeightSource::Random(3), &pool, &settings(true)).unwrap();
    let mut scheduler = Scheduler::new(runner, vec![]).unwrap();
    let mut complete = |len: usize| {
        let prompt = (0..len as u64)
            .map(|i| (1000 + 7919 * i % 140_000) as u32)
            .collect();
        scheduler.submit(prompt, &greedy(8)).unwrap();
        let mut events = Vec::new();
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).unwrap();
        }
        let Some(Event::Finished { result: Ok(done), .. }) = events.pop() else {
            panic!("no completion")
        };
        (scheduler.runner().memory_used().unwrap(), done)
    };
    // Chooses algorithms and loads kernels.
    let (before, _) = complete(budget + 7);
    let (after, done) = complete(len);
    (before, after, done)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_prompt_of_32k_tokens_takes_no_more_memory_than_its_budget() {
    let _device = device();
    let len = 32_768;
    let (before, after, small) = long_prompt(len, 256);
    let (before_large, _, large) = long_prompt(len, 4096);
    println!(
        "256 tokens a step: {before} bytes before, {after} after; 4,096: {before_large}; {:?} and {:?}",
        small.token_ids, large.token_ids
    );
    // Kernels that were first needed now may have been loaded.
    assert!(after <= before + (64 << 20), "{before} and {after} bytes");
    assert!(
        before + (100 << 20) < before_large,
        "the budget decides: {before} and {before_large}"
    );
    let off = (small.logprobs[0] - large.logprobs[0]).abs();
    assert!(off < 0.1, "first log-probabilities are off by {off}");
    let gap = large.top_logprobs[0][0].logprob - large.top_logprobs[0][1].logprob;
    assert!(small.token_ids[0] == large.token_ids[0] || gap < CLOSE, "{gap}");
}
