//! Random workloads against an oracle that generates each request alone.

use proptest::prelude::*;
use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::{
    Error, Event, FinishReason, RequestId, RunnerShape, SamplingParams, Scheduler, TokenCompletion,
};

#[derive(Clone, Debug)]
struct Job {
    prompt: Vec<u32>,
    sampling: SamplingParams,
    /// Steps to take before submitting this job, so that requests arrive while others run.
    steps_before: usize,
    /// Cancel the job after so many further steps.
    cancel_after: Option<usize>,
}

fn shape() -> impl Strategy<Value = RunnerShape> {
    (
        2usize..60,
        2usize..80,
        1usize..9,
        2usize..40,
        1usize..9,
        1usize..3,
        1usize..40,
    )
        .prop_map(
            |(
                vocab_size,
                max_seq_length,
                max_batch_size,
                n_pages,
                page_size,
                max_in_flight,
                max_prefill_tokens,
            )| {
                RunnerShape {
                    vocab_size,
                    max_seq_length,
                    max_batch_size,
                    n_pages,
                    page_size,
                    max_in_flight,
                    max_prefill_tokens,
                }
            },
        )
}

fn job(vocab_size: u32) -> impl Strategy<Value = Job> {
    let prompt = proptest::collection::vec(0..vocab_size, 0..50);
    let stops = proptest::collection::vec(0..vocab_size, 0..3);
    (
        prompt,
        1usize..50,
        stops,
        any::<bool>(),
        0usize..4,
        proptest::option::weighted(0.1, 0usize..20),
    )
        .prop_map(
            |(prompt, max_new_tokens, stop_token_ids, ignore_eos, steps_before, cancel_after)| Job {
                prompt,
                sampling: SamplingParams {
                    max_new_tokens,
                    stop_token_ids,
                    ignore_eos,
                    ..Default::default()
                },
                steps_before,
                cancel_after,
            },
        )
}

fn workload() -> impl Strategy<Value = (RunnerShape, Vec<u32>, Vec<Job>)> {
    shape().prop_flat_map(|shape| {
        let vocab = shape.vocab_size as u32;
        let eos = proptest::collection::vec(0..vocab, 0..2);
        (Just(shape), eos, proptest::collection::vec(job(vocab), 0..24))
    })
}

/// Runs the workload to its end and checks everything that can be checked from outside.
fn run(shape: RunnerShape, eos: &[u32], jobs: &[Job]) {
    let mut scheduler = Scheduler::new(FakeRunner::new(shape), eos.to_vec()).expect("the shape is valid");
    let limit = shape.max_seq_length.min((shape.n_pages - 1) * shape.page_size);
    let mut submitted: Vec<(RequestId, &Job)> = Vec::new();
    let mut cancels: Vec<(usize, RequestId)> = Vec::new();
    let mut cancelled = Vec::new();
    let mut events = Vec::new();
    let mut steps = 0usize;
    let mut rest = jobs.iter();
    let mut wait = 0;
    let mut next = rest.next();
    while next.is_some() || scheduler.has_unfinished() {
        if let (Some(job), true) = (next, wait == 0) {
            match scheduler.submit(job.prompt.clone(), &job.sampling) {
                Ok(id) => {
                    cancels.extend(job.cancel_after.map(|after| (steps + after, id)));
                    submitted.push((id, job));
                }
                Err(Error::EmptyPrompt) => assert!(job.prompt.is_empty()),
                Err(Error::PromptTooLong { .. }) => assert!(job.prompt.len() + 1 > shape.max_seq_length),
                Err(Error::PromptExceedsPool { .. }) => {
                    assert!(job.prompt.len() + 1 > (shape.n_pages - 1) * shape.page_size);
                }
                Err(other) => panic!("unexpected refusal: {other}"),
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
        let before = events.len();
        scheduler.step(&mut events).expect("no step fails");
        steps += 1;
        assert!(scheduler.running() <= shape.max_batch_size);
        scheduler
            .pages()
            .check_integrity()
            .expect("the page table is sound");
        // Every step brings a token, computes a chunk of a prompt, or follows one that did.
        let work_bound = 200 + jobs.len() * (200 + 60 * 60);
        assert!(
            steps < work_bound,
            "no end after {steps} steps, last brought {}",
            events.len() - before
        );
    }
    let usable_pages = shape.n_pages - 1;
    assert_eq!(
        scheduler.pages().free_pages(),
        usable_pages,
        "every page came back"
    );
    assert_eq!(
        scheduler.pages().free_slots(),
        shape.max_batch_size,
        "every slot came back"
    );
    check_events(
        shape,
        eos,
        limit,
        &submitted,
        &cancelled,
        events,
        scheduler.statistics(),
    );
}

fn check_events(
    shape: RunnerShape,
    eos: &[u32],
    limit: usize,
    submitted: &[(RequestId, &Job)],
    cancelled: &[RequestId],
    events: Vec<Event<TokenCompletion>>,
    statistics: &rollout_engine::Statistics,
) {
    let mut streamed: std::collections::HashMap<RequestId, Vec<u32>> = Default::default();
    let mut finished = std::collections::HashMap::new();
    for event in events {
        match event {
            Event::Token { request, token, .. } => {
                assert!(!finished.contains_key(&request), "a token after the end");
                streamed.entry(request).or_default().push(token.token);
            }
            Event::Finished { request, result, .. } => {
                let completion = result.expect("no request fails");
                assert!(finished.insert(request, completion).is_none(), "finished twice");
            }
            _ => panic!("unknown event"),
        }
    }
    for (id, job) in submitted {
        if cancelled.contains(id) {
            assert!(!finished.contains_key(id), "a cancelled request finished");
            continue;
        }
        let completion = &finished[id];
        let most = job.sampling.max_new_tokens.min(limit - job.prompt.len());
        let mut stops = job.sampling.stop_token_ids.clone();
        if !job.sampling.ignore_eos {
            stops.extend_from_slice(eos);
        }
        let expected = FakeRunner::expected(&job.prompt, most, &stops, shape.vocab_size);
        assert_eq!(completion.token_ids, expected);
        assert_eq!(
            completion.logprobs,
            FakeRunner::expected_logprobs(&job.prompt, &expected)
        );
        assert_eq!(completion.prompt_token_ids, job.prompt);
        assert_eq!(
            streamed[id], expected,
            "streamed tokens are those of the completion"
        );
        let stopped = expected.last().is_some_and(|last| stops.contains(last));
        let reason = if stopped {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        assert_eq!(completion.finish_reason, reason);
    }
    // One step late at most: a sequence that ends with a stop id costs at most one row per step of run-ahead.
    let ended = submitted.len() as u64;
    assert!(statistics.wasted_rows <= ended * (shape.max_in_flight as u64 - 1) + cancelled.len() as u64 * 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2000)
    ))]

    #[test]
    fn every_request_gets_what_it_would_get_alone((shape, eos, jobs) in workload()) {
        run(shape, &eos, &jobs);
    }
}

#[test]
fn several_hundred_requests_under_pressure() {
    for max_in_flight in [1, 2] {
        let shape = RunnerShape {
            vocab_size: 500,
            max_seq_length: 200,
            max_batch_size: 16,
            n_pages: 40,
            page_size: 8,
            max_in_flight,
            max_prefill_tokens: 64,
        };
        let jobs: Vec<Job> = (0..400u32)
            .map(|i| Job {
                prompt: (0..1 + (i * 37) % 150).map(|j| (i * 31 + j * 7) % 500).collect(),
                sampling: SamplingParams {
                    max_new_tokens: 1 + (i as usize * 13) % 90,
                    ..Default::default()
                },
                steps_before: 0,
                cancel_after: (i % 10 == 3).then_some(i as usize),
            })
            .collect();
        run(shape, &[3, 250], &jobs);
    }
}
