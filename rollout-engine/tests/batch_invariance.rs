//! The bundled model on the CPU: what a request gets has the same bits in every schedule.

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

/// How requests arrive and what the engine has for them.
#[derive(Clone, Debug)]
struct Schedule {
    page_size: usize,
    max_batch_size: usize,
    n_pages: usize,
    max_prefill_tokens: usize,
    prefix_cache: bool,
    /// Requests in the order of arrival, with the steps taken before each, and after how many steps it is cancelled.
    arrivals: Vec<(usize, usize, Option<usize>)>,
}

fn requests() -> Vec<Request> {
    let problems = [
        "Noah has 255 apples. Noah sells 89 apples. 75 apples break. What is the number of apples now?",
        "Noah has 255 apples. Noah sells 89 apples. 75 apples break. How many apples are left?",
        "Count from 259 to 315 by 2.",
        "What is 7 times 846?",
        "Add the list: 58, 1, 3, 35, 4, 34, 54, 9, 3, 60, 18, 50.",
        "Uma has 31 tickets. Uma sells 25 tickets. Uma finds 74 more tickets. How many tickets are left with Uma?",
    ];
    let request = |(i, problem): (usize, &&str)| {
        let request = Request::user(*problem).max_new_tokens(14 + 3 * i).seed(i as u64);
        match i % 3 {
            0 => request,
            1 => request.temperature(1.0).n(3),
            _ => request.temperature(1.3).n(2),
        }
    };
    problems.iter().enumerate().map(request).collect()
}

fn builder() -> EngineBuilder {
    Engine::builder()
        .model(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tiny-qwen3-math"))
        .device(DeviceChoice::Cpu)
        .batch_invariant(true)
}

/// Sizes of pages; each has its own order of sums.
const PAGE_SIZES: [usize; 3] = [4, 16, 64];

/// Each completion computed alone, in one chunk.
fn alone(page_size: usize, requests: &[Request]) -> Vec<Vec<Bits>> {
    let builder = builder().max_batch_size(1).page_size(page_size);
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

fn schedule(n_requests: usize) -> impl Strategy<Value = Schedule> {
    let arrival = (
        0..n_requests,
        0usize..6,
        proptest::option::weighted(0.1, 0usize..20),
    );
    (
        prop::sample::select(PAGE_SIZES.to_vec()),
        1usize..9,
        0usize..64,
        1usize..90,
        any::<bool>(),
        prop::collection::vec(arrival, 1..6),
    )
        .prop_map(
            |(page_size, max_batch_size, spare, max_prefill_tokens, prefix_cache, arrivals)| Schedule {
                page_size,
                max_batch_size,
                // The longest sequence fits; a few often do not.
                n_pages: 1 + (112 + spare).div_ceil(page_size),
                max_prefill_tokens,
                prefix_cache,
                arrivals,
            },
        )
}

/// Runs a schedule, compares every completion that was not cancelled, and gives (preemptions, cached starts, groups).
fn run(schedule: &Schedule, requests: &[Request], expected: &[Vec<Bits>]) -> [u64; 3] {
    let mut engine = builder()
        .page_size(schedule.page_size)
        .max_batch_size(schedule.max_batch_size)
        .n_pages(schedule.n_pages)
        .max_prefill_tokens(schedule.max_prefill_tokens)
        .prefix_cache(schedule.prefix_cache)
        .build()
        .expect("builds");
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
    let statistics = engine.statistics();
    [
        statistics.preemptions,
        statistics.prefix_hits,
        statistics.copied_pages,
    ]
}

#[test]
fn two_hundred_random_schedules_give_the_same_bits() {
    let requests = requests();
    let expected: HashMap<_, _> = PAGE_SIZES.map(|size| (size, alone(size, &requests))).into();
    // A fixed seed: every run tries the same schedules.
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    let strategy = schedule(requests.len());
    let mut totals = [0; 3];
    for number in 0..200 {
        let schedule = strategy.new_tree(&mut runner).expect("a schedule").current();
        let expected = &expected[&schedule.page_size];
        let counts = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run(&schedule, &requests, expected)
        }));
        let counts = counts.unwrap_or_else(|_| panic!("schedule {number}: {schedule:?}"));
        totals.iter_mut().zip(counts).for_each(|(total, n)| *total += n);
    }
    let [preemptions, prefix_hits, copied_pages] = totals;
    eprintln!("{preemptions} preemptions, {prefix_hits} cached starts, {copied_pages} copied pages");
    assert!(preemptions > 4 && prefix_hits > 50 && copied_pages > 50);
}
