//! What the scheduler refuses, and what goes on beside it.

use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::{Engine, Error, Request, RunnerShape, SamplingParams, Scheduler};

use crate::scheduler_cases::{finish, shape};
use crate::support::{Constant, new_tokens, prompt, scheduler};

#[test]
fn a_prompt_larger_than_the_pool_is_refused_and_the_queue_behind_it_goes_on() {
    let mut scheduler = scheduler(RunnerShape {
        n_pages: 1 + 10,
        ..shape()
    });
    scheduler.submit(prompt(20, 1), &new_tokens(5)).expect("fits");
    let error = scheduler
        .submit(prompt(160, 2), &new_tokens(5))
        .expect_err("leaves no room for a token");
    assert!(matches!(
        error,
        Error::PromptExceedsPool {
            tokens: 160,
            pool_tokens: 160
        }
    ));
    let error = scheduler
        .submit(prompt(100_000, 2), &new_tokens(5))
        .expect_err("is too long");
    assert!(matches!(
        error,
        Error::PromptTooLong {
            tokens: 100_000,
            max_seq_length: 600
        }
    ));
    scheduler
        .submit(prompt(159, 3), &new_tokens(5))
        .expect("room for one token");
    let results = finish(&mut scheduler);
    assert_eq!(results.len(), 2);
    let lengths: Vec<usize> = results
        .iter()
        .map(|(_, r)| r.as_ref().expect("completes").token_ids.len())
        .collect();
    assert_eq!(lengths, [5, 1]);
}

#[test]
fn refused_requests_keep_their_place_among_the_results() {
    let mut engine = Engine::with_runner(FakeRunner::new(shape()), vec![], None).expect("a valid shape");
    let requests = [
        Request::token_ids(prompt(5, 1)),
        Request::token_ids(vec![]),
        Request::token_ids(vec![1, 1000]),
        Request::token_ids(prompt(5, 2)).max_new_tokens(0),
        Request::text("no tokenizer here"),
        Request::token_ids(prompt(9999, 2)),
        Request::token_ids(prompt(5, 3)),
    ];
    let results = engine.generate(&requests).expect("runs");
    assert!(results[0].is_ok() && results[6].is_ok());
    assert!(matches!(results[1], Err(Error::EmptyPrompt)));
    assert!(matches!(
        results[2],
        Err(Error::TokenOutOfVocabulary {
            token: 1000,
            position: 1,
            vocab_size: 1000
        })
    ));
    assert!(matches!(results[3], Err(Error::NoNewTokens)));
    assert!(matches!(results[4], Err(Error::NoTokenizer)));
    assert!(matches!(results[5], Err(Error::PromptTooLong { .. })));
}

#[test]
fn parameters_that_cannot_work_are_refused_not_dropped() {
    let mut scheduler = scheduler(shape());
    type Change = fn(&mut SamplingParams);
    let changes: [(&str, &str, Change); 22] = [
        ("temperature", "-1", |p| p.temperature = -1.0),
        ("temperature", "0.0001", |p| p.temperature = 1e-4),
        ("temperature", "NaN", |p| p.temperature = f32::NAN),
        ("temperature", "inf", |p| p.temperature = f32::INFINITY),
        ("top_k", "-2", |p| p.top_k = -2),
        ("top_k", "4294967296", |p| p.top_k = 1 << 32),
        ("top_p", "0", |p| p.top_p = 0.0),
        ("top_p", "1.5", |p| p.top_p = 1.5),
        ("top_p", "NaN", |p| p.top_p = f32::NAN),
        ("min_p", "-0.1", |p| p.min_p = -0.1),
        ("min_p", "1.1", |p| p.min_p = 1.1),
        ("repetition_penalty", "0", |p| p.repetition_penalty = 0.0),
        ("repetition_penalty", "-1", |p| p.repetition_penalty = -1.0),
        // Its reciprocal times a logit would be infinite.
        ("repetition_penalty", "0.0001", |p| p.repetition_penalty = 1e-4),
        ("repetition_penalty", "inf", |p| {
            p.repetition_penalty = f32::INFINITY
        }),
        ("presence_penalty", "2.5", |p| p.presence_penalty = 2.5),
        ("frequency_penalty", "NaN", |p| p.frequency_penalty = f32::NAN),
        ("min_new_tokens", "11", |p| {
            (p.min_new_tokens, p.max_new_tokens) = (11, 10)
        }),
        ("stop", "\"\"", |p| p.stop = vec!["a".into(), String::new()]),
        ("stop", "[\"a\"]", |p| p.stop = vec!["a".into()]),
        ("top_logprobs", "21", |p| p.top_logprobs = 21),
        ("min_new_tokens", "257", |p| p.min_new_tokens = 257),
    ];
    for (name, shown, change) in changes {
        let mut sampling = SamplingParams::default();
        change(&mut sampling);
        match scheduler.submit(prompt(5, 1), &sampling).expect_err("is refused") {
            Error::InvalidParameter { parameter, value, .. } => {
                assert_eq!((parameter, value.as_str()), (name, shown))
            }
            other => panic!("{name}: {other}"),
        }
    }
    let sampling = SamplingParams {
        stop_token_ids: vec![1000],
        ..Default::default()
    };
    let error = scheduler.submit(prompt(5, 1), &sampling).expect_err("is refused");
    assert!(matches!(
        error,
        Error::StopTokenOutOfVocabulary { token: 1000, .. }
    ));
    assert!(!scheduler.has_unfinished());
}

#[test]
fn shapes_that_cannot_work_are_refused() {
    for (bad, setting) in [
        (
            RunnerShape {
                max_batch_size: 0,
                ..shape()
            },
            "max_batch_size",
        ),
        (
            RunnerShape {
                n_pages: 0,
                ..shape()
            },
            "n_pages",
        ),
        (
            RunnerShape {
                n_pages: 1,
                ..shape()
            },
            "n_pages",
        ),
        (
            RunnerShape {
                page_size: 0,
                ..shape()
            },
            "page_size",
        ),
        (
            RunnerShape {
                max_seq_length: 1,
                ..shape()
            },
            "max_seq_length",
        ),
        (
            RunnerShape {
                max_in_flight: 0,
                ..shape()
            },
            "max_in_flight",
        ),
        (
            RunnerShape {
                max_prefill_tokens: 0,
                ..shape()
            },
            "max_prefill_tokens",
        ),
        (
            RunnerShape {
                max_batch_size: usize::MAX,
                ..shape()
            },
            "max_batch_size",
        ),
        (
            RunnerShape {
                max_seq_length: usize::MAX,
                ..shape()
            },
            "max_seq_length",
        ),
    ] {
        match Scheduler::new(Constant::new(bad, 0), vec![]).map(drop) {
            Err(Error::InvalidSetting { setting: named, .. }) => assert_eq!(named, setting),
            other => panic!("{setting}: {other:?}"),
        }
    }
}

#[test]
fn nothing_follows_of_requests_that_a_step_gave_up_but_what_had_ended() {
    let shape = RunnerShape {
        max_in_flight: 2,
        ..FakeRunner::small_shape()
    };
    let mut engine =
        Engine::with_runner(FakeRunner::new(shape).failing_after(4), vec![], None).expect("a valid shape");
    let requests = [3, 30].map(|n| Request::token_ids([1, 2]).max_new_tokens(n));
    let [short, _long] = requests.map(|request| engine.submit(&request).expect("fits"));
    let mut failed = false;
    while !failed {
        failed = engine.step().is_err();
        if !failed {
            // Collects what is under way, which is kept for the next step.
            engine.load_adapters([]).expect("a change");
        }
    }
    let left = engine.step().expect("nothing to do");
    assert!(left.iter().all(|event| event.request() == short), "{left:?}");
    assert!(!engine.has_unfinished());
}
