//! Groups and shared prefixes against an oracle that generates every completion alone.

use std::collections::HashMap;

use proptest::prelude::*;
use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::{
    Engine, Error, Event, Request, RequestId, RunnerShape, Sampling, SamplingParams, Scheduler,
    TokenCompletion,
};

use crate::support::{new_tokens, prompt, scheduler};

fn shape() -> RunnerShape {
    RunnerShape {
        vocab_size: 1000,
        max_seq_length: 2000,
        max_batch_size: 16,
        n_pages: 1 + 1200,
        page_size: 16,
        max_in_flight: 1,
        max_prefill_tokens: 512,
    }
}

/// What became of each completion of each request.
type Results = HashMap<(RequestId, usize), Result<TokenCompletion, Error>>;

/// Takes events apart and checks that groups end once, after their last completion.
fn results(events: Vec<Event<TokenCompletion>>, n: &HashMap<RequestId, usize>) -> Results {
    let mut results = Results::new();
    let mut ended = Vec::new();
    for event in events {
        match event {
            Event::Finished {
                request,
                index,
                result,
            } => {
                assert!(index < n[&request]);
                if let Ok(completion) = &result {
                    assert_eq!(completion.index, index);
                }
                assert!(
                    results.insert((request, index), result).is_none(),
                    "finished twice"
                );
            }
            Event::GroupFinished { request } => {
                let there = (0..n[&request]).filter(|&i| results.contains_key(&(request, i)));
                assert_eq!(there.count(), n[&request], "the group is not complete");
                assert!(n[&request] > 1 && !ended.contains(&request));
                ended.push(request);
            }
            Event::Token { .. } => {}
            _ => panic!("unknown event"),
        }
    }
    for (request, &n) in n {
        let complete = (0..n).all(|index| results.contains_key(&(*request, index)));
        assert_eq!(ended.contains(request), complete && n > 1);
    }
    results
}

fn finish(scheduler: &mut Scheduler<FakeRunner>, n: &HashMap<RequestId, usize>) -> Results {
    let mut events = Vec::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).expect("steps");
        scheduler
            .pages()
            .check_integrity()
            .expect("the page table is sound");
    }
    results(events, n)
}

#[test]
fn sixteen_completions_of_a_long_prompt_take_a_twelfth_of_the_pages() {
    let used_when_all_decode = |group: bool| {
        // All prompts in one step, so that none has grown when the last one starts.
        let mut scheduler = scheduler(RunnerShape {
            max_prefill_tokens: 16_000,
            ..shape()
        });
        if group {
            scheduler
                .submit_group(prompt(1000, 1), &new_tokens(50), 16)
                .expect("fits");
        } else {
            for _ in 0..16 {
                scheduler.submit(prompt(1000, 1), &new_tokens(50)).expect("fits");
            }
        }
        let mut tokens = std::collections::HashSet::new();
        while tokens.len() < 16 {
            let mut events = Vec::new();
            scheduler.step(&mut events).expect("steps");
            tokens.extend(events.iter().filter_map(|event| match event {
                Event::Token { request, index, .. } => Some((*request, *index)),
                _ => None,
            }));
        }
        let used = scheduler.shape().n_pages - 1 - scheduler.pages().free_pages();
        (used, *scheduler.statistics())
    };
    let (separate, _) = used_when_all_decode(false);
    let (group, statistics) = used_when_all_decode(true);
    assert_eq!(separate, 16 * 63);
    // 62 full pages once, and for each sibling the page in which the prompt ends.
    assert_eq!(group, 62 + 16);
    assert!(group * 12 <= separate);
    assert_eq!(statistics.prefill_tokens, 999 + 16);
    assert_eq!(statistics.saved_prefill_tokens, 15 * 999);
    assert_eq!((statistics.shared_pages, statistics.copied_pages), (15 * 62, 15));
}

#[test]
fn siblings_without_a_slot_start_later_with_the_prompts_full_pages() {
    for (len, page_size) in [(1, 16), (2, 16), (16, 16), (17, 16), (33, 16), (100, 16), (5, 1)] {
        let mut scheduler = scheduler(RunnerShape {
            max_batch_size: 3,
            page_size,
            ..shape()
        });
        let id = scheduler
            .submit_group(prompt(len, 1), &new_tokens(20), 8)
            .expect("fits");
        let results = finish(&mut scheduler, &HashMap::from([(id, 8)]));
        let expected = FakeRunner::expected(&prompt(len, 1), 20, &[], 1000);
        assert_eq!(results.len(), 8);
        for result in results.values() {
            assert_eq!(result.as_ref().expect("completes").token_ids, expected);
        }
        let full = (len - 1) / page_size * page_size;
        let statistics = scheduler.statistics();
        assert!(
            statistics.saved_prefill_tokens >= 7 * full as u64,
            "{len}: {statistics:?}"
        );
        assert!(
            statistics.prefill_tokens <= (8 * (len - full) + full) as u64,
            "{len}"
        );
        assert_eq!(scheduler.pages().free_pages(), 1200);
    }
}

#[test]
fn the_slots_of_a_group_are_not_given_to_later_requests() {
    let mut scheduler = scheduler(RunnerShape {
        max_batch_size: 4,
        ..shape()
    });
    let group = scheduler
        .submit_group(prompt(100, 1), &new_tokens(5), 4)
        .expect("fits");
    let later = scheduler.submit(prompt(10, 2), &new_tokens(5)).expect("fits");
    let mut events = Vec::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).expect("steps");
    }
    let first_token = |wanted| {
        let of = |event: &Event<_>| matches!(event, Event::Token { request, .. } if *request == wanted);
        events.iter().position(of).expect("has tokens")
    };
    assert!(first_token(group) < first_token(later));
    assert_eq!(scheduler.statistics().saved_prefill_tokens, 3 * 99);
}

#[test]
fn a_failing_sibling_ends_alone() {
    let expected = FakeRunner::expected(&prompt(40, 1), 10, &[], 1000);
    let runner = FakeRunner::new(shape()).with_nan_token(expected[6]);
    let mut engine = Engine::with_runner(runner, vec![], None).expect("a valid shape");
    let request = Request::token_ids(prompt(40, 1)).max_new_tokens(10).n(3);
    let group = engine
        .generate_groups(&[request])
        .expect("runs")
        .remove(0)
        .expect("is accepted");
    assert_eq!(group.completions.len(), 3);
    for completion in &group.completions {
        assert!(matches!(completion, Err(Error::NonFiniteLogits { new_token: 6 })));
    }
    assert!(!engine.has_unfinished());
}

#[test]
fn groups_come_back_whole_and_in_order_with_refusals_in_their_place() {
    let runner = FakeRunner::new(RunnerShape {
        max_batch_size: 5,
        ..shape()
    });
    let mut engine = Engine::with_runner(runner, vec![], None).expect("a valid shape");
    let requests = [
        Request::token_ids(prompt(70, 1)).max_new_tokens(9).n(4),
        Request::token_ids(vec![]).n(3),
        Request::token_ids(prompt(20, 2)).max_new_tokens(30),
        Request::token_ids(prompt(20, 3)).n(0),
        Request::token_ids(prompt(300, 4)).max_new_tokens(2).n(7),
    ];
    let groups = engine.generate_groups(&requests).expect("runs");
    assert_eq!(groups.len(), 5);
    for (request, group) in requests.iter().zip(groups) {
        let rollout_engine::Prompt::TokenIds(prompt) = &request.prompt else {
            panic!("ids")
        };
        if prompt.is_empty() || request.n == 0 {
            group.expect_err("is refused");
            continue;
        }
        let completions = group.expect("is accepted").all().expect("completes");
        assert_eq!(completions.len(), request.n);
        let expected = FakeRunner::expected(prompt, request.sampling.max_new_tokens, &[], 1000);
        for (i, completion) in completions.iter().enumerate() {
            assert_eq!(completion.index, i);
            assert_eq!(completion.token_ids, expected);
        }
    }
    // One completion per request: more are refused, not dropped.
    let results = engine.generate(&requests[..1]).expect("runs");
    results
        .into_iter()
        .next()
        .expect("one result")
        .expect_err("asks for more than one");
    assert!(!engine.has_unfinished());
}

#[test]
fn a_stream_of_groups_that_is_dropped_cancels_the_rest() {
    let mut engine = Engine::with_runner(FakeRunner::new(shape()), vec![], None).expect("a valid shape");
    let requests: Vec<_> = [3usize, 40, 3]
        .iter()
        .map(|&n| Request::token_ids(prompt(50, 1)).max_new_tokens(n).n(4))
        .collect();
    let mut stream = engine.stream_groups(&requests);
    let first = stream.next().expect("an item").expect("runs");
    assert_eq!(
        (first.index, first.result.expect("completes").completions.len()),
        (0, 4)
    );
    drop(stream);
    assert!(!engine.has_unfinished());
    assert_eq!(engine.scheduler().pages().free_pages(), 1200);
}

#[test]
fn no_event_follows_a_cancellation_also_of_tokens_that_came_while_a_stream_was_read() {
    let mut engine = Engine::with_runner(FakeRunner::new(shape()), vec![], None).expect("a valid shape");
    let long = Request::token_ids(prompt(5, 1)).max_new_tokens(40);
    let cancelled = engine.submit(&long).expect("accepted");
    let kept = engine.submit(&long).expect("accepted");
    let short = Request::token_ids(prompt(5, 2)).max_new_tokens(3);
    engine.generate(&[short]).expect("runs");
    assert!(engine.cancel(cancelled) && !engine.cancel(cancelled));
    let mut of_kept = 0;
    while engine.has_unfinished() {
        for event in engine.step().expect("runs") {
            assert_eq!(event.request(), kept);
            of_kept += 1;
        }
    }
    assert_eq!(of_kept, 41, "forty tokens and the end");
}

#[test]
fn a_prefix_is_computed_once_and_its_last_token_always() {
    for len in [15, 16, 17, 32, 33, 500] {
        let mut scheduler = scheduler(shape());
        scheduler.set_prefix_cache(true).expect("nothing runs");
        for round in 0..3 {
            let before = *scheduler.statistics();
            let id = scheduler.submit(prompt(len, 1), &new_tokens(6)).expect("fits");
            let results = finish(&mut scheduler, &HashMap::from([(id, 1)]));
            let completion = results[&(id, 0)].as_ref().expect("completes");
            let expected = FakeRunner::expected(&prompt(len, 1), 6, &[], 1000);
            assert_eq!(completion.token_ids, expected);
            let computed = scheduler.statistics().prefill_tokens - before.prefill_tokens;
            let cached = if round == 0 { 0 } else { (len - 1) / 16 * 16 };
            assert_eq!(computed, (len - cached) as u64, "{len} in round {round}");
        }
        let cached = scheduler.prefix_cache_pages();
        assert_eq!(cached, (len + 5) / 16);
        assert_eq!(scheduler.pages().free_pages(), 1200 - cached);
        scheduler.clear_prefix_cache().expect("clears");
        assert_eq!(scheduler.pages().free_pages(), 1200);
    }
}

#[test]
fn the_turns_of_a_conversation_find_their_history() {
    let mut scheduler = scheduler(shape());
    scheduler.set_prefix_cache(true).expect("nothing runs");
    let mut history = prompt(50, 1);
    for _ in 0..4 {
        let before = scheduler.statistics().prefill_tokens;
        let id = scheduler.submit(history.clone(), &new_tokens(30)).expect("fits");
        let mut results = finish(&mut scheduler, &HashMap::from([(id, 1)]));
        let completion = results.remove(&(id, 0)).expect("is there").expect("completes");
        let computed = scheduler.statistics().prefill_tokens - before;
        assert!(computed <= 50 + 16, "{computed}");
        history.extend(completion.token_ids);
        history.extend(prompt(20, 3));
    }
}

#[test]
fn a_prefix_of_one_policy_is_not_used_under_another() {
    let mut scheduler = scheduler(shape());
    scheduler.set_prefix_cache(true).expect("nothing runs");
    for policy in 0..3 {
        if policy > 0 {
            let mut events = Vec::new();
            scheduler
                .set_adapters(&[], Default::default(), &mut events)
                .expect("changes");
            assert_eq!(scheduler.prefix_cache_pages(), 0);
        }
        for round in 0..2 {
            let hits = scheduler.statistics().prefix_hits;
            let id = scheduler.submit(prompt(100, 1), &new_tokens(6)).expect("fits");
            let results = finish(&mut scheduler, &HashMap::from([(id, 1)]));
            let expected = FakeRunner::expected_under(policy, &prompt(100, 1), 6, &[], 1000);
            assert_eq!(results[&(id, 0)].as_ref().expect("completes").token_ids, expected);
            assert_eq!(scheduler.statistics().prefix_hits - hits, round);
        }
    }
}

#[derive(Clone, Debug)]
struct Job {
    prompt: Vec<u32>,
    n: usize,
    sampling: SamplingParams,
    steps_before: usize,
    cancel_after: Option<usize>,
    /// Change the policy before submitting.
    change_policy: bool,
}

fn tight_shape() -> impl Strategy<Value = RunnerShape> {
    (3usize..9, 2usize..40, 1usize..6, 1usize..3, 1usize..40).prop_map(
        |(max_batch_size, n_pages, page_size, max_in_flight, max_prefill_tokens)| RunnerShape {
            vocab_size: 30,
            max_seq_length: 70,
            max_batch_size,
            n_pages,
            page_size,
            max_in_flight,
            max_prefill_tokens,
        },
    )
}

fn jobs() -> impl Strategy<Value = Vec<Job>> {
    // Few tokens and starts in common: prefixes recur and part in the middle of pages.
    let start = prop::sample::select(vec![0usize, 3, 8, 16, 21]);
    let prompt = (start, prop::collection::vec(0u32..3, 0..12)).prop_map(|(start, rest)| {
        let mut prompt: Vec<u32> = (0..start as u32).map(|i| i % 5).collect();
        prompt.extend(rest);
        prompt
    });
    let stops = prop::collection::vec(0u32..30, 0..2);
    let job = (
        prompt,
        prop::sample::select(vec![1usize, 1, 2, 3, 5, 9]),
        1usize..30,
        stops,
        0usize..5,
        prop::option::weighted(0.15, 0usize..12),
        prop::bool::weighted(0.05),
        prop::sample::select(vec![0f32, 1.0]),
        0u64..5,
    );
    let job = job.prop_map(
        |(
            prompt,
            n,
            max_new_tokens,
            stop_token_ids,
            steps_before,
            cancel_after,
            change_policy,
            temperature,
            seed,
        )| Job {
            prompt,
            n,
            sampling: SamplingParams {
                max_new_tokens,
                stop_token_ids,
                temperature,
                seed: Some(seed),
                ..Default::default()
            },
            steps_before,
            cancel_after,
            change_policy,
        },
    );
    prop::collection::vec(job, 1..12)
}

/// Runs the jobs and compares each completion with one generated alone; across changes of policy only lengths are compared.
fn run(shape: RunnerShape, jobs: &[Job], prefix_cache: bool) {
    let mut scheduler = scheduler(shape);
    scheduler.set_prefix_cache(prefix_cache).expect("nothing runs");
    let limit = shape.max_seq_length.min((shape.n_pages - 1) * shape.page_size);
    let mut submitted = Vec::new();
    let mut cancels: Vec<(usize, RequestId)> = Vec::new();
    let mut cancelled = Vec::new();
    let mut events = Vec::new();
    let mut rest = jobs.iter();
    let mut next = rest.next();
    let (mut wait, mut steps) = (0, 0);
    while next.is_some() || scheduler.has_unfinished() {
        if let (Some(job), 0) = (next, wait) {
            if job.change_policy {
                let update = scheduler.set_adapters(&[], Default::default(), &mut events);
                update.expect("changes");
                assert_eq!(scheduler.prefix_cache_pages(), 0);
            }
            match scheduler.submit_group(job.prompt.clone(), &job.sampling, job.n) {
                Ok(id) => {
                    cancels.extend(job.cancel_after.map(|after| (steps + after, id)));
                    submitted.push((id, job, scheduler.policy().number));
                }
                Err(_) => assert!(job.prompt.is_empty() || job.prompt.len() >= limit),
            }
            next = rest.next();
            wait = next.map_or(0, |job| job.steps_before);
            continue;
        }
        wait = wait.saturating_sub(1);
        for &(_, id) in cancels.iter().filter(|(at, _)| *at == steps) {
            if scheduler.cancel(id) {
                cancelled.push(id);
            }
        }
        scheduler.step(&mut events).expect("no step fails");
        steps += 1;
        scheduler
            .pages()
            .check_integrity()
            .expect("the page table is sound");
        assert!(steps < 100_000, "no end");
    }
    assert_eq!(
        scheduler.pages().free_pages() + scheduler.prefix_cache_pages(),
        shape.n_pages - 1
    );
    scheduler.clear_prefix_cache().expect("clears");
    assert_eq!(scheduler.pages().free_pages(), shape.n_pages - 1);
    assert_eq!(scheduler.pages().free_slots(), shape.max_batch_size);

    let n = submitted.iter().map(|(id, job, _)| (*id, job.n)).collect();
    let results = results(events, &n);
    for (id, job, policy) in submitted {
        if cancelled.contains(&id) {
            assert!((0..job.n).any(|i| !results.contains_key(&(id, i))));
            continue;
        }
        for index in 0..job.n {
            let completion = results[&(id, index)].as_ref().expect("completes");
            let stops = &job.sampling.stop_token_ids;
            let most = job.sampling.max_new_tokens.min(limit - job.prompt.len());
            assert_eq!(completion.prompt_token_ids, job.prompt);
            match completion.policies.as_slice() {
                [span] if span.version.number == policy => {
                    let sampling = Sampling {
                        temperature: job.sampling.temperature,
                        seed: job.sampling.seed.expect("is set"),
                        completion: index as u32,
                        ..Sampling::GREEDY
                    };
                    let vocab = shape.vocab_size;
                    let expected =
                        FakeRunner::expected_sampled(policy, &sampling, &job.prompt, most, stops, vocab);
                    assert_eq!(completion.token_ids, expected);
                }
                _ => assert!(completion.token_ids.len() <= most),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1500)
    ))]

    #[test]
    fn every_sibling_gets_what_it_would_get_alone(shape in tight_shape(), jobs in jobs()) {
        run(shape, &jobs, false);
    }

    #[test]
    fn shared_prefixes_change_no_completion(shape in tight_shape(), jobs in jobs()) {
        run(shape, &jobs, true);
    }
}

#[test]
fn pages_that_a_group_pinned_before_the_prefix_cache_came_can_be_given_up() {
    let mut scheduler = scheduler(RunnerShape {
        vocab_size: 1000,
        max_batch_size: 2,
        n_pages: 1 + 12,
        ..FakeRunner::small_shape()
    });
    // Grows to the whole pool.
    let alone = scheduler.submit(prompt(4, 2), &new_tokens(60)).expect("fits");
    let group = scheduler
        .submit_group(prompt(21, 1), &new_tokens(3), 80)
        .expect("fits");
    let mut events = Vec::new();
    for _ in 0..8 {
        scheduler.step(&mut events).expect("steps");
    }
    scheduler.set_prefix_cache(true).expect("keeps pages");
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).expect("steps");
    }
    results(events, &HashMap::from([(alone, 1), (group, 80)]));
}

/// Prompts that fill each step's budget and end with their first token, one more with every step: as a stream of
/// requests to classify would.
#[test]
fn the_sibling_that_computed_a_groups_prompt_is_not_passed_over_for_later_requests() {
    for n in [2, 3] {
        let mut scheduler = scheduler(RunnerShape {
            vocab_size: 1000,
            n_pages: 1 + 60,
            ..FakeRunner::small_shape()
        });
        let group = scheduler
            .submit_group(prompt(11, 0), &new_tokens(3), n)
            .expect("fits");
        let mut events = Vec::new();
        for step in 0..20 {
            scheduler
                .submit(prompt(16, 1 + step), &new_tokens(1))
                .expect("fits");
            scheduler.step(&mut events).expect("steps");
        }
        assert!(
            events
                .iter()
                .any(|event| matches!(event, Event::GroupFinished { request } if *request == group)),
            "{n} completions of 3 tokens took more than 20 steps"
        );
    }
}

#[test]
fn aborting_gives_back_the_pages_of_groups_and_of_the_prefix_cache_at_any_time() {
    for (cached, n_steps) in [false, true]
        .into_iter()
        .flat_map(|cached| (0..20).map(move |n| (cached, n)))
    {
        let mut scheduler = scheduler(shape());
        scheduler.set_prefix_cache(cached).expect("is set");
        let submit = |scheduler: &mut Scheduler<FakeRunner>| {
            let group = scheduler.submit_group(prompt(600, 1), &new_tokens(8), 5);
            let alone = scheduler.submit(prompt(70, 2), &new_tokens(3));
            HashMap::from([(group.expect("fits"), 5), (alone.expect("fits"), 1)])
        };
        submit(&mut scheduler);
        let mut events = Vec::new();
        for _ in 0..n_steps {
            scheduler.step(&mut events).expect("steps");
        }
        let finished = |event: &&Event<TokenCompletion>| matches!(event, Event::Finished { .. });
        let before = events.iter().filter(finished).count() as u64;
        assert_eq!(scheduler.statistics().finished_completions, before);

        scheduler.abort_all();
        assert!(!scheduler.has_unfinished());
        let pages = scheduler.pages();
        pages.check_integrity().expect("the page table is sound");
        assert_eq!(
            pages.free_pages(),
            pages.n_pages() - 1,
            "after {n_steps} steps, prefix cache: {cached}"
        );

        let n = submit(&mut scheduler);
        let results = finish(&mut scheduler, &n);
        assert!(results.values().all(Result::is_ok), "{results:?}");
        assert_eq!(scheduler.statistics().finished_completions, before + 6);
    }
}
