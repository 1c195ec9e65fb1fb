//! The bundled model: what a request gets has the same bits in every schedule, on the CPU and on a GPU.

use std::collections::HashMap;

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use proptest::{prelude::*, strategy::ValueTree};
use rollout_engine::{Completion, DeviceChoice, Engine, EngineBuilder, Event, Request, RequestId};

/// What must not depend on the schedule.
#[derive(Clone, Debug, PartialEq)]
struct Bits {
    token_ids: Vec<u32>,
    logprobs: Vec<u32>,
    sampled_logprobs: Vec<u32>,
    text: String,
}

impl From<Completion> for Bits {
    fn from(completion: Completion) -> Self {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        Self {
            token_ids: completion.token_ids,
            logprobs: bits(completion.logprobs),
            sampled_logprobs: bits(completion.sampled_logprobs),
            text: completion.text,
        }
    }
}

/// What an engine has for requests.
#[derive(Clone, Debug)]
struct Sizes {
    page_size: usize,
    max_batch_size: usize,
    n_pages: usize,
    max_prefill_tokens: usize,
}

/// How requests arrive.
#[derive(Clone, Debug)]
struct Schedule {
    prefix_cache: bool,
    /// Requests in the order of arrival, with the steps taken before each, and after how many steps it is cancelled.
    arrivals: Vec<(usize, usize, Option<usize>)>,
}

/// Problems with `longest` new tokens at most, and a few more for each.
fn requests(longest: usize) -> Vec<Request> {
    let problems = [
        "Noah has 255 apples. Noah sells 89 apples. 75 apples break. What is the number of apples now?",
        "Noah has 255 apples. Noah sells 89 apples. 75 apples break. How many apples are left?",
        "Count from 259 to 315 by 2.",
        "What is 7 times 846?",
        "Add the list: 58, 1, 3, 35, 4, 34, 54, 9, 3, 60, 18, 50.",
        "Uma has 31 tickets. Uma sells 25 tickets. Uma finds 74 more tickets. How many tickets are left with Uma?",
    ];
    let request = |(i, problem): (usize, &&str)| {
        let request = Request::user(*problem)
            .max_new_tokens(longest + 3 * i)
            .seed(i as u64);
        match i % 3 {
            0 => request,
            1 => request.temperature(1.0).n(3),
            _ => request.temperature(1.3).n(2),
        }
    };
    problems.iter().enumerate().map(request).collect()
}

/// Prompts of arbitrary tokens around the first position where a GPU cuts a sequence, 1,024 tokens: the cut comes while decoding,
/// or in the prompt. The last two start alike.
fn long_requests() -> Vec<Request> {
    let prompt =
        |seed: u32, len: u32| -> Vec<u32> { (0..len).map(|i| 20 + (i * i + seed * i) % 150).collect() };
    let prompts = [
        prompt(1, 1000),
        prompt(2, 500),
        prompt(3, 1030),
        prompt(4, 1010),
        prompt(4, 700),
    ];
    let request = |(i, prompt): (usize, Vec<u32>)| {
        let mut request = Request::token_ids(prompt)
            .max_new_tokens(40)
            .n(1 + i % 2)
            .seed(i as u64);
        request.sampling.temperature = 1.2;
        request.sampling.ignore_eos = true;
        request
    };
    prompts.into_iter().enumerate().map(request).collect()
}

/// Tokens of the longest of them, completed.
const LONGEST: usize = 1070;

fn builder(device: DeviceChoice) -> EngineBuilder {
    Engine::builder()
        .model(model())
        .device(device)
        .batch_invariant(true)
}

/// The bundled model, also for a test binary that was carried to another machine with the repository.
fn model() -> std::path::PathBuf {
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math");
    match built.is_dir() {
        true => built,
        false => "rollout-engine/models/tiny-qwen3-math".into(),
    }
}

fn engine(device: DeviceChoice, sizes: &Sizes) -> Engine {
    let builder = builder(device)
        .page_size(sizes.page_size)
        .max_batch_size(sizes.max_batch_size)
        .n_pages(sizes.n_pages)
        .max_prefill_tokens(sizes.max_prefill_tokens);
    builder.build().expect("builds")
}

/// Sizes of pages on the CPU; each has its own order of sums.
const PAGE_SIZES: [usize; 3] = [4, 16, 64];
/// Sizes of pages on a GPU, where they do not matter.
const GPU_PAGE_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Each completion computed alone, in one chunk.
fn alone(device: DeviceChoice, page_size: usize, requests: &[Request]) -> Vec<Vec<Bits>> {
    let builder = builder(device).max_batch_size(1).page_size(page_size);
    let mut engine = builder.build().expect("builds");
    let groups = requests.iter().map(|request| {
        let mut groups = engine
            .generate_groups(std::slice::from_ref(request))
            .expect("runs");
        let completions = groups.remove(0).expect("is accepted").all().expect("completes");
        completions.into_iter().map(Bits::from).collect()
    });
    groups.collect()
}

/// Pools in which the longest sequence, of `longest` tokens, fits; a few often do not.
fn sizes(
    page_sizes: &[usize],
    batches: std::ops::Range<usize>,
    longest: usize,
    spare: std::ops::Range<usize>,
    chunks: std::ops::Range<usize>,
) -> impl Strategy<Value = Sizes> {
    (prop::sample::select(page_sizes.to_vec()), batches, spare, chunks).prop_map(
        move |(page_size, max_batch_size, spare, max_prefill_tokens)| Sizes {
            page_size,
            max_batch_size,
            n_pages: 1 + (longest + spare).div_ceil(page_size),
            max_prefill_tokens,
        },
    )
}

fn schedule(n_requests: usize) -> impl Strategy<Value = Schedule> {
    let arrival = (
        0..n_requests,
        0usize..6,
        proptest::option::weighted(0.1, 0usize..20),
    );
    let arrivals = prop::collection::vec(arrival, 1..6);
    (any::<bool>(), arrivals).prop_map(|(prefix_cache, arrivals)| Schedule {
        prefix_cache,
        arrivals,
    })
}

/// Runs a schedule, compares every completion that was not cancelled, and gives (preemptions, cached starts, groups).
fn run(engine: &mut Engine, schedule: &Schedule, requests: &[Request], expected: &[Vec<Bits>]) -> [u64; 3] {
    engine.set_prefix_cache(schedule.prefix_cache).expect("is set");
    let before = counts(engine);
    let mut open: Vec<(RequestId, usize, Option<usize>)> = Vec::new();
    let mut arrivals = schedule.arrivals.iter().copied().peekable();
    let mut wait = arrivals.peek().map_or(0, |&(_, wait, _)| wait);
    let mut compared = 0;
    while arrivals.peek().is_some() || engine.has_unfinished() {
        if wait == 0
            && let Some((request, _, cancel)) = arrivals.next()
        {
            let id = engine.submit(&requests[request]).expect("is accepted");
            open.push((id, request, cancel));
            wait = arrivals.peek().map_or(0, |&(_, wait, _)| wait);
            continue;
        }
        wait = wait.saturating_sub(1);
        for (id, _, cancel) in &mut open {
            match cancel {
                Some(0) => {
                    engine.cancel(*id);
                    *cancel = None;
                }
                Some(steps) => *steps -= 1,
                None => {}
            }
        }
        for event in engine.step().expect("steps") {
            if let Event::Finished {
                request,
                index,
                result,
            } = event
            {
                let (_, which, _) = open
                    .iter()
                    .find(|(id, ..)| *id == request)
                    .expect("was submitted");
                let bits = Bits::from(result.expect("completes"));
                assert_eq!(
                    bits, expected[*which][index],
                    "request {which}, completion {index}"
                );
                compared += 1;
            }
        }
    }
    let some_stay = schedule.arrivals.iter().any(|(_, _, cancel)| cancel.is_none());
    assert!(compared > 0 || !some_stay);
    let pages = engine.scheduler().pages();
    pages.check_integrity().expect("the page table is sound");
    let after = counts(engine);
    std::array::from_fn(|i| after[i] - before[i])
}

fn counts(engine: &Engine) -> [u64; 3] {
    let statistics = engine.statistics();
    [
        statistics.preemptions,
        statistics.prefix_hits,
        statistics.copied_pages,
    ]
}

/// As [`run`], and names the schedule that fails.
fn run_number(
    number: usize,
    engine: &mut Engine,
    sizes: &Sizes,
    schedule: &Schedule,
    requests: &[Request],
    expected: &[Vec<Bits>],
    totals: &mut [u64; 3],
) {
    let counts = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run(engine, schedule, requests, expected)
    }));
    let counts = counts.unwrap_or_else(|_| panic!("schedule {number}: {schedule:?} with {sizes:?}"));
    totals.iter_mut().zip(counts).for_each(|(total, n)| *total += n);
}

fn check_totals([preemptions, prefix_hits, copied_pages]: [u64; 3]) {
    eprintln!("{preemptions} preemptions, {prefix_hits} cached starts, {copied_pages} copied pages");
    assert!(preemptions > 4 && prefix_hits > 50 && copied_pages > 50);
}

/// A fixed seed: every run tries the same schedules.
fn fixed() -> TestRunner {
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    TestRunner::new_with_rng(Config::default(), random)
}

#[test]
fn two_hundred_random_schedules_give_the_same_bits() {
    let requests = requests(14);
    let expected: HashMap<_, _> = PAGE_SIZES
        .map(|size| (size, alone(DeviceChoice::Cpu, size, &requests)))
        .into();
    let mut runner = fixed();
    let strategy = (
        sizes(&PAGE_SIZES, 1..9, 112, 0..64, 1..90),
        schedule(requests.len()),
    );
    let mut totals = [0; 3];
    for number in 0..200 {
        let (sizes, schedule) = strategy.new_tree(&mut runner).expect("a schedule").current();
        let expected = &expected[&sizes.page_size];
        let mut engine = engine(DeviceChoice::Cpu, &sizes);
        run_number(
            number,
            &mut engine,
            &sizes,
            &schedule,
            &requests,
            expected,
            &mut totals,
        );
    }
    check_totals(totals);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_hundred_random_schedules_give_the_same_bits_on_a_gpu() {
    let device = DeviceChoice::Cuda(0);
    // Pages hold 16 tokens at least: these grow over several.
    let few = cuda_graphs::few_cases();
    let mut short = requests(if few { 4 } else { 64 });
    let long = if few { Vec::new() } else { long_requests() };
    short.truncate(if few { 3 } else { short.len() });
    let requests = [short.clone(), long].concat();
    let expected = alone(device, 64, &requests);
    let mut runner = fixed();
    let mut totals = [0; 3];
    // An engine serves many schedules: to make one takes longer than a schedule. Batches of all buckets up to 48.
    for round in 0..if few { 1 } else { 10 } {
        let batches = match (few, round % 2) {
            (true, _) => 3..5,
            (_, 0) => 1..12,
            _ => 12..49,
        };
        // Long prompts in some: there the others would hardly ever fill the pool.
        let (n_requests, sizes) = match round % 3 {
            2 => (
                requests.len(),
                sizes(&GPU_PAGE_SIZES, batches, LONGEST, 0..300, 20..300),
            ),
            _ => (short.len(), sizes(&GPU_PAGE_SIZES, batches, 164, 0..64, 1..90)),
        };
        let sizes = sizes.new_tree(&mut runner).expect("sizes").current();
        let mut engine = engine(device, &sizes);
        for number in 0..if few { 1 } else { 20 } {
            let strategy = schedule(n_requests);
            let schedule = strategy.new_tree(&mut runner).expect("a schedule").current();
            let number = 20 * round + number;
            run_number(
                number,
                &mut engine,
                &sizes,
                &schedule,
                &requests,
                &expected,
                &mut totals,
            );
        }
    }
    if !few {
        check_totals(totals);
    }
}
