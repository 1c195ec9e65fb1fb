//! Situations that users of such schedulers have met, each by its name.

use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::{
    Engine, Error, Event, FinishReason, Request, RequestId, Runner, RunnerShape, SamplingParams, Scheduler,
    TokenCompletion,
};

use crate::support::{new_tokens, prompt, scheduler};

pub(crate) fn shape() -> RunnerShape {
    RunnerShape {
        vocab_size: 1000,
        max_seq_length: 600,
        max_batch_size: 8,
        n_pages: 1 + 64,
        page_size: 16,
        max_in_flight: 1,
        max_prefill_tokens: 128,
    }
}

/// Runs to the end and gives the results by request.
pub(crate) fn finish<R: Runner>(
    scheduler: &mut Scheduler<R>,
) -> Vec<(RequestId, Result<TokenCompletion, Error>)> {
    let mut events = Vec::new();
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).expect("steps");
    }
    let finished = events.into_iter().filter_map(|event| match event {
        Event::Finished { request, result, .. } => Some((request, result)),
        _ => None,
    });
    finished.collect()
}

fn assert_as_alone(completion: &TokenCompletion, max_new_tokens: usize) {
    let expected = FakeRunner::expected(&completion.prompt_token_ids, max_new_tokens, &[], 1000);
    assert_eq!(completion.token_ids, expected);
}

#[test]
fn a_sequence_that_would_outgrow_the_pool_ends_with_length_even_when_it_is_alone() {
    for max_in_flight in [1, 2] {
        let mut scheduler = scheduler(RunnerShape {
            n_pages: 1 + 4,
            max_in_flight,
            ..shape()
        });
        scheduler.submit(prompt(10, 1), &new_tokens(500)).expect("fits");
        let (_, result) = finish(&mut scheduler).pop().expect("one result");
        let completion = result.expect("completes");
        assert_eq!(completion.finish_reason, FinishReason::Length);
        assert_eq!(completion.token_ids.len(), 4 * 16 - 10);
        assert_as_alone(&completion, 54);
        assert_eq!(scheduler.statistics().preemptions, 0);
    }
}

#[test]
fn a_sequence_ends_at_the_models_maximum_length() {
    let mut scheduler = scheduler(RunnerShape {
        max_seq_length: 50,
        ..shape()
    });
    scheduler.submit(prompt(49, 1), &new_tokens(500)).expect("fits");
    scheduler
        .submit(prompt(10, 1), &new_tokens(usize::MAX))
        .expect("fits");
    for (_, result) in finish(&mut scheduler) {
        let completion = result.expect("completes");
        assert_eq!(completion.prompt_token_ids.len() + completion.token_ids.len(), 50);
        assert_eq!(completion.finish_reason, FinishReason::Length);
    }
}

#[test]
fn shorter_requests_run_while_a_long_one_waits_for_pages_but_not_for_ever() {
    // The first request owns half of the pool for long; the second needs more than is left.
    let mut scheduler = scheduler(RunnerShape {
        max_batch_size: 4,
        n_pages: 1 + 20,
        ..shape()
    });
    scheduler.submit(prompt(10, 0), &new_tokens(150)).expect("fits");
    let long = scheduler
        .submit(prompt(310, 1), &new_tokens(5))
        .expect("fits alone");
    for salt in 2..100 {
        scheduler.submit(prompt(5, salt), &new_tokens(4)).expect("fits");
    }
    let results = finish(&mut scheduler);
    let order: Vec<u64> = results.iter().map(|(id, _)| id.number()).collect();
    let place = order
        .iter()
        .position(|&id| id == long.number())
        .expect("finished");
    assert!(place > 3, "nothing ran while the long one waited: {order:?}");
    assert!(
        place < 60,
        "the long one was overtaken again and again: {order:?}"
    );
    for (_, result) in results {
        let completion = result.expect("completes");
        let n = completion.token_ids.len();
        assert_as_alone(&completion, n);
    }
}

#[test]
fn sequences_of_different_lengths_do_not_push_each_other_out_in_turns() {
    for max_in_flight in [1, 2] {
        let mut scheduler = scheduler(RunnerShape {
            max_in_flight,
            n_pages: 1 + 24,
            ..shape()
        });
        for salt in 0..12 {
            scheduler
                .submit(prompt(3 + 40 * (salt as usize % 3), salt), &new_tokens(150))
                .expect("fits");
        }
        let results = finish(&mut scheduler);
        assert_eq!(results.len(), 12);
        let statistics = *scheduler.statistics();
        assert!(statistics.preemptions > 0, "the pool was meant to be short");
        // Each of the 1800 tokens is computed once; taking turns would compute most of them many times.
        assert!(statistics.resumed_tokens < 2 * 1800, "{statistics:?}");
        // The last token of a completion is never computed.
        let once = 4 * (3 + 43 + 83) + 12 * 149;
        assert_eq!(
            statistics.prefill_tokens + statistics.decode_rows,
            once + statistics.resumed_tokens,
            "{statistics:?}"
        );
        for (_, result) in results {
            assert_as_alone(&result.expect("completes"), 150);
        }
    }
}

#[test]
fn preemption_exactly_at_a_page_boundary_repeats_and_loses_nothing() {
    for (page_size, first_len) in [(16, 17), (16, 16), (256, 257), (256, 256), (1, 5)] {
        for max_in_flight in [1, 2] {
            let mut scheduler = scheduler(RunnerShape {
                page_size,
                n_pages: 1 + 2 * (first_len / page_size + 1),
                max_in_flight,
                max_seq_length: 1000,
                ..shape()
            });
            // Both reach the boundary at the same step and need a page more than there is soon after.
            for salt in 0..2 {
                scheduler
                    .submit(prompt(first_len - 2, salt), &new_tokens(2 * page_size + 3))
                    .expect("fits");
            }
            let mut events = Vec::new();
            while scheduler.has_unfinished() {
                scheduler.step(&mut events).expect("steps");
            }
            assert!(
                scheduler.statistics().preemptions > 0,
                "page size {page_size}, length {first_len}"
            );
            let mut streamed = std::collections::HashMap::<RequestId, Vec<u32>>::new();
            for event in events {
                match event {
                    Event::Token { request, token, .. } => {
                        streamed.entry(request).or_default().push(token.token)
                    }
                    Event::Finished { request, result, .. } => {
                        let completion = result.expect("completes");
                        assert_as_alone(
                            &completion,
                            (2 * page_size + 3).min(scheduler.max_tokens() - first_len + 2),
                        );
                        assert_eq!(streamed[&request], completion.token_ids, "no token is told twice");
                    }
                    _ => unreachable!("no other events"),
                }
            }
        }
    }
}

#[test]
fn slots_and_pages_of_requests_that_fail_come_back() {
    for max_in_flight in [1, 2] {
        let shape = RunnerShape {
            max_in_flight,
            n_pages: 1 + 30,
            vocab_size: 100,
            ..shape()
        };
        let mut scheduler =
            Scheduler::new(FakeRunner::new(shape).with_nan_token(42), vec![]).expect("a valid shape");
        let mut cancelled = 0;
        let ids: Vec<RequestId> = (0..300)
            .map(|i| {
                let prompt = prompt(1 + i % 90, i as u32)
                    .into_iter()
                    .map(|t| t % 100)
                    .collect();
                scheduler.submit(prompt, &new_tokens(1 + i % 80)).expect("fits")
            })
            .collect();
        let mut events = Vec::new();
        let mut steps = 0;
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).expect("steps");
            cancelled += usize::from(scheduler.cancel(ids[steps % ids.len()]));
            steps += 7;
        }
        let failed = events.iter().filter(|event| {
            matches!(
                event,
                Event::Finished {
                    result: Err(Error::NonFiniteLogits { .. }),
                    ..
                }
            )
        });
        assert!(failed.count() > 20, "some were meant to fail");
        assert!(cancelled > 5, "some were meant to be cancelled");
        for event in &events {
            if let Event::Finished {
                result: Ok(completion),
                ..
            } = event
            {
                assert!(!completion.token_ids.contains(&42));
                let n = completion.token_ids.len();
                assert_eq!(
                    completion.token_ids,
                    FakeRunner::expected(&completion.prompt_token_ids, n, &[], 100)
                );
            }
        }
        assert_eq!(scheduler.pages().free_pages(), 30);
        assert_eq!(scheduler.pages().free_slots(), shape.max_batch_size);
        scheduler.pages().check_integrity().expect("the table is sound");
    }
}

#[test]
fn every_maximum_batch_size_is_really_reached() {
    for max_batch_size in [1, 6, 7, 10, 12, 15, 18, 64, 100, 200, 300] {
        let mut scheduler = scheduler(RunnerShape {
            max_batch_size,
            n_pages: 2000,
            max_prefill_tokens: 4000,
            ..shape()
        });
        for salt in 0..max_batch_size as u32 + 5 {
            scheduler.submit(prompt(3, salt), &new_tokens(6)).expect("fits");
        }
        assert_eq!(finish(&mut scheduler).len(), max_batch_size + 5);
        assert_eq!(scheduler.statistics().max_running, max_batch_size as u64);
        let full = scheduler
            .runner()
            .history()
            .iter()
            .any(|&(_, decode)| decode == max_batch_size);
        assert!(full, "no step decoded {max_batch_size} rows");
    }
}

#[test]
fn a_prompt_that_fills_its_pages_exactly_is_computed_to_its_last_token() {
    let mut scheduler = scheduler(shape());
    for salt in 0..4 {
        scheduler
            .submit(prompt(16 * (1 + salt as usize), salt), &new_tokens(1))
            .expect("fits");
    }
    for (_, result) in finish(&mut scheduler) {
        assert_as_alone(&result.expect("completes"), 1);
    }
}

#[test]
fn completions_of_early_finishers_come_back_in_order_and_none_is_missing() {
    let mut engine = Engine::with_runner(FakeRunner::new(shape()), vec![], None).expect("a valid shape");
    // Lengths such that later requests finish first, and the same prompt several times.
    let requests: Vec<Request> = (0..40)
        .map(|i| Request::token_ids(prompt(20, i % 3)).max_new_tokens(1 + ((40 - i) as usize * 7) % 50))
        .collect();
    let completions = engine.generate(&requests).expect("runs");
    assert_eq!(completions.len(), requests.len());
    for (request, completion) in requests.iter().zip(completions) {
        let completion = completion.expect("completes");
        assert_eq!(completion.token_ids.len(), request.sampling.max_new_tokens);
        assert_eq!(
            completion.token_ids,
            FakeRunner::expected(
                &completion.prompt_token_ids,
                request.sampling.max_new_tokens,
                &[],
                1000
            )
        );
        assert_eq!(
            rollout_engine::Prompt::TokenIds(completion.prompt_token_ids),
            request.prompt
        );
    }
}

#[test]
fn every_end_of_sequence_id_and_every_stop_id_ends_a_completion() {
    let alone = FakeRunner::expected(&prompt(5, 1), 60, &[], 1000);
    let (first, second) = (alone[20], alone[30]);
    let run = |eos: Vec<u32>, stop_token_ids: Vec<u32>, ignore_eos| {
        let mut scheduler = Scheduler::new(FakeRunner::new(shape()), eos).expect("a valid shape");
        let sampling = SamplingParams {
            max_new_tokens: 60,
            stop_token_ids,
            ignore_eos,
            ..Default::default()
        };
        scheduler.submit(prompt(5, 1), &sampling).expect("fits");
        finish(&mut scheduler)
            .pop()
            .expect("one result")
            .1
            .expect("completes")
    };
    for (eos, stops, ignore_eos, expected) in [
        (vec![first, second], vec![], false, 21),
        (vec![second, first], vec![], false, 21),
        (vec![second], vec![], false, 31),
        (vec![second], vec![first], false, 21),
        (vec![first], vec![second], true, 31),
        (vec![first], vec![], true, 60),
    ] {
        let completion = run(eos, stops, ignore_eos);
        assert_eq!(
            completion.token_ids,
            alone[..expected],
            "the stop id is the last token"
        );
        let reason = if expected == 60 {
            FinishReason::Length
        } else {
            FinishReason::Stop
        };
        assert_eq!(completion.finish_reason, reason);
    }
}

#[test]
fn running_ahead_wastes_at_most_one_row_per_sequence_and_none_on_length() {
    let lengths = |max_in_flight, eos: Vec<u32>| {
        let shape = RunnerShape {
            max_in_flight,
            ..shape()
        };
        let mut scheduler = Scheduler::new(FakeRunner::new(shape), eos).expect("a valid shape");
        for salt in 0..20 {
            scheduler.submit(prompt(5, salt), &new_tokens(40)).expect("fits");
        }
        finish(&mut scheduler);
        *scheduler.statistics()
    };
    assert_eq!(lengths(2, vec![]).wasted_rows, 0);
    let common: Vec<u32> = (0..100).collect();
    assert_eq!(lengths(1, common.clone()).wasted_rows, 0);
    let ahead = lengths(2, common.clone());
    assert!((1..=20).contains(&ahead.wasted_rows), "{ahead:?}");
    assert_eq!(ahead.new_tokens, lengths(1, common).new_tokens);
}

#[test]
fn the_prefill_budget_bounds_every_step() {
    // The fake runner refuses a step beyond the budget.
    let mut scheduler = scheduler(RunnerShape {
        max_prefill_tokens: 7,
        ..shape()
    });
    for salt in 0..6 {
        scheduler
            .submit(prompt(100, salt), &new_tokens(10))
            .expect("fits");
    }
    for (_, result) in finish(&mut scheduler) {
        assert_as_alone(&result.expect("completes"), 10);
    }
}

#[test]
fn after_a_failed_step_everything_is_free_and_new_requests_run() {
    for max_in_flight in [1, 2] {
        for fail_after in 0..12 {
            let shape = RunnerShape {
                max_in_flight,
                ..shape()
            };
            let runner = FakeRunner::new(shape).failing_after(fail_after);
            let mut scheduler = Scheduler::new(runner, vec![]).expect("a valid shape");
            for salt in 0..12 {
                scheduler.submit(prompt(30, salt), &new_tokens(20)).expect("fits");
            }
            let mut events = Vec::new();
            let error = loop {
                if let Err(error) = scheduler.step(&mut events) {
                    break error;
                }
            };
            assert!(matches!(error, Error::Runner { .. }));
            assert!(!scheduler.has_unfinished());
            assert_eq!(scheduler.pages().free_pages(), 64);
            assert_eq!(scheduler.pages().free_slots(), 8);
            scheduler.submit(prompt(30, 99), &new_tokens(20)).expect("fits");
            assert_as_alone(
                &finish(&mut scheduler).pop().expect("one").1.expect("completes"),
                20,
            );
        }
    }
}

#[test]
fn a_stream_that_is_dropped_cancels_what_is_left() {
    let mut engine = Engine::with_runner(FakeRunner::new(shape()), vec![], None).expect("a valid shape");
    let other = engine
        .submit(&Request::token_ids(prompt(4, 9)).max_new_tokens(30))
        .expect("fits");
    let requests: Vec<Request> = (0..10)
        .map(|i| Request::token_ids(prompt(5, i)).max_new_tokens(5 + i as usize * 10))
        .collect();
    {
        let mut stream = engine.stream(&requests);
        let first = stream.next().expect("one").expect("runs");
        assert_eq!(first.index, 0);
    }
    let mut events = Vec::new();
    while engine.has_unfinished() {
        events.extend(engine.step().expect("steps"));
    }
    let finished: Vec<RequestId> = events
        .iter()
        .filter_map(|event| match event {
            Event::Finished { request, .. } => Some(*request),
            _ => None,
        })
        .collect();
    assert_eq!(finished, [other], "only the request outside the stream went on");
    let tokens = events
        .iter()
        .filter(|event| matches!(event, Event::Token { .. }))
        .count();
    assert_eq!(tokens, 30, "no token of it was lost while the stream was read");
}
