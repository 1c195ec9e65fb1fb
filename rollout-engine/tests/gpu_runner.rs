//! The engine on a GPU against the golden completions of the bundled model: eager and in every bucket, under
//! preemption, and for thousands of requests.
#![cfg(feature = "cuda")]

mod gpu_support;

use std::collections::BTreeMap;

use cuda_graphs::few_cases;
use gpu_support::{CLOSE, Golden, profile, tiny};
use qwen3_model::KernelOptions;
use qwen3_model::cuda::WeightSource;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_engine::cuda_runner::{CudaRunner, CudaSettings};
use rollout_engine::{Event, PoolSettings, RequestId, SamplingParams, Scheduler, TokenCompletion};

fn scheduler(pool: PoolSettings, capture: bool) -> Scheduler<CudaRunner> {
    scheduler_with(
        pool,
        CudaSettings {
            capture,
            ..CudaSettings::default()
        },
    )
}

fn scheduler_with(pool: PoolSettings, settings: CudaSettings) -> Scheduler<CudaRunner> {
    let (config, weights, eos) = tiny();
    let runner = CudaRunner::open(&config, WeightSource::Given(&weights), &pool, &settings).unwrap();
    Scheduler::new(runner, eos).unwrap()
}

fn pool(batch: usize, page_size: usize, n_pages: usize) -> PoolSettings {
    gpu_support::pool(batch, page_size, n_pages, 2048)
}

/// Runs all requests to their end. Every page must be free then.
fn run(
    scheduler: &mut Scheduler<CudaRunner>,
    requests: impl IntoIterator<Item = (Vec<u32>, SamplingParams)>,
) -> Vec<TokenCompletion> {
    let ids: Vec<RequestId> = requests
        .into_iter()
        .map(|(prompt, sampling)| scheduler.submit(prompt, &sampling).unwrap())
        .collect();
    let mut events = Vec::new();
    let mut done = BTreeMap::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).unwrap();
        for event in events.drain(..) {
            if let Event::Finished { request, result, .. } = event {
                done.insert(request, result.unwrap());
            }
        }
    }
    let pages = scheduler.pages();
    pages.check_integrity().unwrap();
    assert_eq!(pages.free_pages(), pages.n_pages() - 1, "pages are lost");
    ids.into_iter().map(|id| done.remove(&id).unwrap()).collect()
}

fn goldens() -> Vec<Golden> {
    Golden::all("base")
}

/// What a test takes of its cases: all, or with few cases wanted these. Under a sanitizer even the capture of a runner's graphs
/// takes seconds.
fn some<T: Copy>(all: &[T], few: &[T]) -> Vec<T> {
    if few_cases() { few } else { all }.to_vec()
}

fn greedy(max_new_tokens: usize) -> SamplingParams {
    SamplingParams {
        max_new_tokens,
        ..SamplingParams::default()
    }
}

/// Compares with the goldens; where the reference was nearly undecided, only up to the first difference. Returns how
/// many completions left their golden one there.
fn assert_golden(what: &str, goldens: &[&Golden], completions: &[TokenCompletion]) -> usize {
    let (mut excepted, mut sum, mut largest, mut count) = (0, 0f64, 0f64, 0);
    for (index, (golden, completion)) in goldens.iter().zip(completions).enumerate() {
        assert_eq!(completion.prompt_token_ids, golden.prompt, "{what}");
        let same = golden
            .completion
            .iter()
            .zip(&completion.token_ids)
            .take_while(|(a, b)| a == b)
            .count();
        if completion.token_ids != golden.completion {
            assert!(
                golden.gap < CLOSE,
                "{what}: prompt {index} leaves its golden completion at token {same}: {:?}, not {:?}",
                completion.token_ids,
                golden.completion
            );
            excepted += 1;
        }
        for (ours, golden) in completion.logprobs.iter().zip(&golden.logprobs).take(same) {
            let difference = (f64::from(*ours) - golden).abs();
            assert!(
                difference.is_finite(),
                "{what}: prompt {index} has log-probability {ours}"
            );
            (sum, count) = (sum + difference, count + 1);
            largest = largest.max(difference);
        }
    }
    let mean = sum / f64::from(count.max(1));
    eprintln!(
        "{what}: {} completions, {excepted} excepted, log-probabilities off by {mean:.6} on average, {largest:.4} at most",
        completions.len()
    );
    // The model is confident: most log-probabilities are near 0.
    assert!(
        mean < 0.01,
        "{what}: log-probabilities are off by {mean} on average"
    );
    excepted
}

fn golden_run(scheduler: &mut Scheduler<CudaRunner>, what: &str, goldens: &[&Golden]) -> usize {
    let completions = run(
        scheduler,
        goldens.iter().map(|golden| (golden.prompt.clone(), greedy(400))),
    );
    assert_golden(what, goldens, &completions)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_profile_that_tests_run_under_is_in_force() {
    let scheduler = scheduler(pool(4, 64, 40), false);
    let backend = scheduler.runner().backend();
    let given = KernelOptions::of_environment().unwrap();
    let (decode, prefill) = backend.attention_options();
    println!(
        "{given:?}: pages of {} tokens, {decode:?}, {prefill:?}",
        backend.options().page_size
    );
    assert_eq!(backend.options().kernels, given);
    assert_eq!(decode.warps, given.decode.warps.unwrap_or(decode.warps));
    assert_eq!(decode.stages, given.decode.stages.unwrap_or(decode.stages));
    assert_eq!(decode.split, given.decode.split_kv.or(decode.split));
    assert_eq!(prefill.block_n, given.prefill.block_n.unwrap_or(prefill.block_n));
    assert_eq!(backend.options().page_size, profile::pages(40, 64).1);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn eager_decoding_gives_the_golden_completions() {
    let goldens = goldens();
    let all: Vec<&Golden> = goldens.iter().collect();
    for (batch, page_size) in some(&[(1, 64), (5, 16), (48, 128)], &[(3, 16)]) {
        let mut scheduler = scheduler(pool(batch, page_size, 2 + 48 * 512 / page_size), false);
        golden_run(
            &mut scheduler,
            &format!("eager, batch {batch}, page size {page_size}"),
            &all,
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn graphed_decoding_gives_the_golden_completions_at_every_page_size() {
    let goldens = goldens();
    let all: Vec<&Golden> = goldens.iter().collect();
    for page_size in some(&[16, 32, 64, 128, 256], &[64]) {
        let mut scheduler = scheduler(pool(48, page_size, 2 + 48 * 512 / page_size), true);
        let what = format!("page size {page_size}");
        golden_run(&mut scheduler, &what, &all);
        let reversed: Vec<&Golden> = goldens.iter().rev().collect();
        golden_run(&mut scheduler, &format!("{what}, in reverse"), &reversed);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_batch_from_1_to_64_gives_the_golden_completions_across_bucket_edges() {
    let goldens = goldens();
    let batches = some(&Vec::from_iter(1..=64), &[1, 17]);
    let most = batches[batches.len() - 1];
    let mut scheduler = scheduler(pool(most, 64, 1 + most * 8), true);
    let mut excepted = 0;
    for batch in batches {
        // As many prompts as rows; the batch shrinks through the smaller buckets as they end.
        let chosen: Vec<&Golden> = (0..batch)
            .map(|i| &goldens[(i * 7 + batch) % goldens.len()])
            .collect();
        excepted += golden_run(&mut scheduler, &format!("batch {batch}"), &chosen);
    }
    eprintln!("{excepted} completions left a nearly undecided golden one");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn batches_of_65_to_256_give_the_golden_completions() {
    let goldens = goldens();
    // The graphs of all buckets take minutes under a sanitizer.
    let mut scheduler = scheduler(pool(256, 64, 1 + 256 * 8), !few_cases());
    let mut excepted = 0;
    for batch in some(&[65, 81, 96, 112, 128, 144, 193, 224, 256], &[130]) {
        let chosen: Vec<&Golden> = (0..batch)
            .map(|i| &goldens[(i * 7 + batch) % goldens.len()])
            .collect();
        excepted += golden_run(&mut scheduler, &format!("batch {batch}"), &chosen);
    }
    eprintln!("{excepted} completions left a nearly undecided golden one");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_maximum_batch_that_is_no_bucket_of_the_usual_ones_works() {
    let goldens = goldens();
    for batch in some(&[3, 7, 12, 15, 18], &[7]) {
        let mut scheduler = scheduler(pool(batch, 64, 1 + batch * 8), true);
        let chosen: Vec<&Golden> = goldens.iter().take(2 * batch).collect();
        golden_run(&mut scheduler, &format!("maximum batch {batch}"), &chosen);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn preempted_sequences_resume_to_the_same_completion_during_graphed_decoding() {
    let goldens = Golden::every("base");
    let all: Vec<&Golden> = goldens.iter().collect();
    // The longest completions, each three times: all of them outgrow the pages they start with.
    let tokens = |golden: &Golden| golden.prompt.len() + golden.completion.len();
    let mut long: Vec<&Golden> = (0..3).flat_map(|_| &goldens).collect();
    long.sort_by_key(|golden| std::cmp::Reverse(tokens(golden)));
    long.truncate(36);
    let longest = goldens.iter().map(tokens).max().unwrap();
    let mut preemptions = 0;
    for page_size in some(&[16, 64], &[16]) {
        let spare = if few_cases() { 0 } else { 4 };
        let n_pages = 1 + longest.div_ceil(page_size) + spare;
        for (batch, chosen) in some(&[(5, &all[..]), (48, &all), (36, &long)], &[(5, &long[..3])]) {
            let mut scheduler = scheduler(pool(batch, page_size, n_pages), true);
            golden_run(
                &mut scheduler,
                &format!("{batch} rows in {n_pages} pages of {page_size}"),
                chosen,
            );
            preemptions += scheduler.statistics().preemptions;
        }
    }
    eprintln!("{preemptions} preemptions");
    let expected = if few_cases() { 1 } else { 10 };
    assert!(preemptions >= expected, "only {preemptions} preemptions");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn chunked_prompts_give_the_golden_completions() {
    let goldens = goldens();
    let all: Vec<&Golden> = goldens.iter().collect();
    for budget in some(&[1, 7, 33], &[7]) {
        let settings = PoolSettings {
            max_prefill_tokens: Some(budget),
            ..pool(16, 16, 600)
        };
        let mut scheduler = scheduler(settings, true);
        golden_run(&mut scheduler, &format!("{budget} prompt tokens per step"), &all);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_thousand_requests_in_a_tight_pool_end_with_every_page_free() {
    let (n, slots, n_pages, longest) = some(&[(2000, 32, 120, 160)], &[(16, 8, 20, 40)])[0];
    let mut scheduler = scheduler(pool(slots, 16, n_pages), true);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let requests: Vec<(Vec<u32>, SamplingParams)> = (0..n)
        .map(|_| {
            let prompt = (0..rng.random_range(1..120))
                .map(|_| rng.random_range(5..500))
                .collect();
            let sampling = SamplingParams {
                ignore_eos: rng.random(),
                ..greedy(rng.random_range(1..longest))
            };
            (prompt, sampling)
        })
        .collect();
    let first = run(&mut scheduler, requests.clone());
    assert_eq!(first.len(), n);
    for ((prompt, sampling), completion) in requests.iter().zip(&first) {
        assert_eq!(&completion.prompt_token_ids, prompt);
        assert!(!completion.token_ids.is_empty() && completion.token_ids.len() <= sampling.max_new_tokens);
        assert_eq!(completion.token_ids.len(), completion.logprobs.len());
        assert!(
            completion
                .logprobs
                .iter()
                .all(|logprob| *logprob <= 0.0 && logprob.is_finite())
        );
    }
    eprintln!("{:?}", scheduler.statistics());
    assert!(scheduler.statistics().preemptions > 0);
}

fn drawn_tokens() -> usize {
    if few_cases() { 16 } else { 120 }
}

/// Every kind of sampling, one after the other.
fn sampled(number: usize) -> SamplingParams {
    let hot = SamplingParams {
        temperature: 1.0,
        seed: Some(number as u64),
        ..greedy(drawn_tokens())
    };
    match number % 7 {
        0 => hot,
        1 => SamplingParams {
            top_k: 20,
            top_p: 0.95,
            ..hot
        },
        2 => SamplingParams {
            min_p: 0.05,
            temperature: 1.3,
            ..hot
        },
        3 => SamplingParams {
            repetition_penalty: 1.1,
            ..hot
        },
        4 => SamplingParams {
            frequency_penalty: 0.2,
            presence_penalty: 0.1,
            top_p: 0.9,
            ..hot
        },
        5 => SamplingParams {
            min_new_tokens: 60,
            top_logprobs: 5,
            ..hot
        },
        _ => SamplingParams {
            top_logprobs: 3,
            ..greedy(drawn_tokens())
        },
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sampling_does_not_depend_on_graphs_batches_pages_or_preemption() {
    let goldens = goldens();
    let requests = || {
        goldens
            .iter()
            .enumerate()
            .map(|(i, golden)| (golden.prompt.clone(), sampled(i)))
    };
    let reference = run(&mut scheduler(pool(48, 64, 2 + 48 * 8), true), requests());
    let eager = run(&mut scheduler(pool(48, 64, 2 + 48 * 8), false), requests());
    assert_eq!(reference, eager, "graphs and eager steps");
    for (i, completion) in reference.iter().enumerate() {
        let sampling = sampled(i);
        let n = completion.token_ids.len();
        assert!(n > sampling.min_new_tokens && completion.sampled_logprobs.len() == n);
        if i % 7 == 0 {
            // Drawn from the policy's own distribution.
            for (a, b) in completion.logprobs.iter().zip(&completion.sampled_logprobs) {
                assert!((a - b).abs() < 1e-5, "{a} and {b}");
            }
        }
        let asked = sampling.top_logprobs;
        assert_eq!(completion.top_logprobs.len(), if asked > 0 { n } else { 0 });
        for (token, top) in completion.top_logprobs.iter().enumerate() {
            assert!(top.len() == asked && top.is_sorted_by(|a, b| a.logprob >= b.logprob));
            if sampling.temperature == 0.0 {
                assert_eq!(
                    (top[0].token, top[0].logprob),
                    (completion.token_ids[token], completion.logprobs[token])
                );
            }
        }
    }
    // Matrix products round differently in other buckets, so that now and then another token is drawn.
    let others = [
        ("a batch of 5", pool(5, 64, 2 + 48 * 8)),
        ("pages of 16", pool(48, 16, 2 + 48 * 32)),
        ("preemption", pool(48, 16, 40)),
    ];
    for (what, pool) in some(&others, &others[..1]) {
        let mut scheduler = scheduler(pool, true);
        let other = run(&mut scheduler, requests());
        let same = reference
            .iter()
            .zip(&other)
            .filter(|(a, b)| a.token_ids == b.token_ids)
            .count();
        println!("{what}: {same} of {} completions are the same", reference.len());
        assert!(
            same * 10 >= reference.len() * 8 || few_cases(),
            "{what}: only {same} completions are the same"
        );
        if what == "preemption" {
            assert!(scheduler.statistics().preemptions > 0);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_engine_seed_makes_a_run_repeatable_and_its_requests_distinct() {
    let prompt = goldens()[0].prompt.clone();
    let hot = SamplingParams {
        temperature: 4.0,
        ..greedy(if few_cases() { 8 } else { 40 })
    };
    let mut runs = Vec::new();
    for seed in [1, 1, 2] {
        let mut scheduler = scheduler(pool(16, 64, 200), true);
        scheduler.set_seed(seed);
        let completions = run(&mut scheduler, (0..16).map(|_| (prompt.clone(), hot.clone())));
        let tokens: Vec<_> = completions
            .into_iter()
            .map(|completion| completion.token_ids)
            .collect();
        let distinct: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert!(
            distinct.len() > 12,
            "{} different completions of 16",
            distinct.len()
        );
        runs.push(tokens);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn siblings_that_read_their_prompt_once_agree_with_siblings_that_read_it_each() {
    // A few prompts on end: long enough to be shared.
    let goldens = goldens();
    let prompts = goldens.iter().cycle().flat_map(|golden| golden.prompt.iter());
    let prompt: Vec<u32> = prompts.copied().take(400).collect();
    let hot = SamplingParams {
        temperature: 1.0,
        seed: Some(5),
        ..greedy(if few_cases() { 16 } else { 60 })
    };
    let run = |share_reads: bool| {
        let settings = CudaSettings {
            share_reads,
            ..CudaSettings::default()
        };
        let mut scheduler = scheduler_with(pool(48, 16, 1 + 48 * 32), settings);
        let mut completions = BTreeMap::new();
        for n in [16, 8, 1] {
            scheduler.submit_group(prompt[n..].to_vec(), &hot, n).unwrap();
        }
        let mut events = Vec::new();
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).unwrap();
            for event in events.drain(..) {
                if let Event::Finished {
                    request,
                    index,
                    result,
                } = event
                {
                    completions.insert((request, index), result.unwrap());
                }
            }
        }
        let saved = scheduler.statistics().saved_prefill_tokens;
        assert!(
            saved as usize > 20 * 300,
            "only {saved} prompt tokens were shared"
        );
        completions.into_values().collect::<Vec<_>>()
    };
    let (once, each) = (run(true), run(false));
    assert_eq!((once.len(), each.len()), (25, 25));
    let (mut same, mut sum, mut count) = (0, 0f64, 0);
    for (a, b) in once.iter().zip(&each) {
        // A rounding may tip a draw; from there on the texts are two.
        let common = a
            .token_ids
            .iter()
            .zip(&b.token_ids)
            .take_while(|(a, b)| a == b)
            .count();
        same += usize::from(a.token_ids == b.token_ids);
        for (x, y) in a.logprobs.iter().zip(&b.logprobs).take(common) {
            sum += f64::from((x - y).abs());
            count += 1;
        }
    }
    let mean = sum / f64::from(count.max(1));
    eprintln!(
        "{same} of 25 completions are the same, {count} log-probabilities differ by {mean:.5} on average"
    );
    assert!(
        same > 10 && count > 300 && mean < 0.02,
        "{same} the same, mean {mean} of {count}"
    );
}
