//! Sampling through the engine on the CPU: seeds, stop strings, limits, and independence of how requests are scheduled.

use std::collections::BTreeSet;

use rollout_engine::{
    Completion, DeviceChoice, Engine, EngineBuilder, Error, FinishReason, Request, SamplingParams, StopReason,
};

fn builder() -> EngineBuilder {
    Engine::builder()
        .device(DeviceChoice::Cpu)
        .max_batch_size(16)
        .max_seq_length(256)
        .page_size(16)
        .n_pages(400)
}

fn generate(engine: &mut Engine, requests: &[Request]) -> Vec<Completion> {
    let results = engine.generate(requests).expect("the device works");
    results
        .into_iter()
        .map(|result| result.expect("a completion"))
        .collect()
}

fn prompt(number: usize) -> Request {
    Request::user(format!("What is {} + {}?", 17 + number, 5 * number + 3)).max_new_tokens(40)
}

/// Every kind of sampling, one after the other.
fn request(number: usize) -> Request {
    let mut request = prompt(number).temperature(1.2).seed(number as u64 / 3);
    let sampling = &mut request.sampling;
    // At full length most outgrow the smallest pool.
    sampling.ignore_eos = number % 6 != 5;
    match number % 6 {
        0 => {}
        1 => (sampling.top_k, sampling.top_p) = (20, 0.95),
        2 => sampling.min_p = 0.05,
        3 => sampling.repetition_penalty = 1.3,
        4 => (sampling.frequency_penalty, sampling.presence_penalty) = (0.3, 0.2),
        _ => (sampling.min_new_tokens, sampling.top_logprobs) = (30, 4),
    }
    request
}

#[test]
fn tokens_do_not_depend_on_batches_pages_or_preemption() {
    let requests: Vec<Request> = (0..18).map(request).collect();
    let reference = generate(&mut builder().build().expect("an engine"), &requests);
    for (what, builder) in [
        ("one at a time", builder().max_batch_size(1)),
        ("other pages", builder().page_size(7)),
        ("short prefill chunks", builder().max_prefill_tokens(5)),
        ("preemption", builder().n_pages(18)),
    ] {
        let mut engine = builder.build().expect("an engine");
        let other = generate(&mut engine, &requests);
        for (i, (a, b)) in reference.iter().zip(&other).enumerate() {
            assert_eq!(
                (&a.token_ids, &a.text),
                (&b.token_ids, &b.text),
                "{what}, request {i}"
            );
        }
        assert!(
            what != "preemption" || engine.statistics().preemptions > 0,
            "{what}"
        );
    }
    for (request, completion) in requests.iter().zip(&reference) {
        let n = completion.token_ids.len();
        assert_eq!(
            (completion.logprobs.len(), completion.sampled_logprobs.len()),
            (n, n)
        );
        assert!(n > request.sampling.min_new_tokens || completion.finish_reason == FinishReason::Length);
        let asked = request.sampling.top_logprobs;
        assert_eq!(completion.top_logprobs.len(), if asked > 0 { n } else { 0 });
        assert!(completion.top_logprobs.iter().all(|top| top.len() == asked));
        for ((&token, &logprob), top) in completion
            .token_ids
            .iter()
            .zip(&completion.logprobs)
            .zip(&completion.top_logprobs)
        {
            // A token among the alternatives has the same log-probability there.
            assert!(top.iter().all(|t| t.token != token || t.logprob == logprob));
        }
    }
}

#[test]
fn greedy_draws_with_certainty_and_temperature_1_from_the_policy() {
    let mut engine = builder().build().expect("an engine");
    let completions = generate(&mut engine, &[prompt(1), prompt(1).temperature(1.0)]);
    assert!(completions[0].sampled_logprobs.iter().all(|&p| p == 0.0));
    for (a, b) in completions[1]
        .logprobs
        .iter()
        .zip(&completions[1].sampled_logprobs)
    {
        assert!((a - b).abs() < 1e-5, "{a} and {b}");
    }
}

#[test]
fn the_engine_seed_makes_a_run_repeatable_and_its_requests_distinct() {
    let run = |seed: u64| -> Vec<Vec<u32>> {
        let requests = vec![prompt(2).temperature(2.0); 8];
        let mut engine = builder().seed(seed).build().expect("an engine");
        generate(&mut engine, &requests)
            .into_iter()
            .map(|c| c.token_ids)
            .collect()
    };
    let first = run(1);
    assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 8);
    assert_eq!(first, run(1));
    assert_ne!(first, run(2));
    // A request's own seed outweighs the engine's and its place in the run.
    let own = |seed: u64, before: usize| {
        let mut requests = vec![prompt(3).temperature(2.0); before];
        requests.push(prompt(2).temperature(2.0).seed(9));
        let mut engine = builder().seed(seed).build().expect("an engine");
        generate(&mut engine, &requests)
            .pop()
            .expect("the last")
            .token_ids
    };
    assert_eq!(own(1, 0), own(2, 3));
}

#[test]
fn a_stop_string_ends_the_text_before_it_and_the_tokens_with_it() {
    let mut engine = builder().build().expect("an engine");
    let whole = generate(&mut engine, &[prompt(4)]).remove(0);
    assert!(whole.text.is_ascii() && whole.text.len() > 12, "{:?}", whole.text);
    let with = |stop: &[&str], change: fn(&mut SamplingParams)| {
        let mut request = prompt(4);
        request.sampling.stop = stop.iter().map(|s| s.to_string()).collect();
        change(&mut request.sampling);
        request
    };
    for start in 1..whole.text.len() - 4 {
        // Wherever it lies, across tokens too.
        let stop = &whole.text[start..start + 3];
        let first = whole.text.find(stop).expect("is there");
        let stopped = generate(
            &mut engine,
            &[
                with(&["never", stop], |_| {}),
                with(&[stop], |p| p.include_stop_str_in_output = true),
                with(&[stop, &whole.text[..1]], |_| {}),
            ],
        );
        assert_eq!(stopped[0].text, whole.text[..first]);
        assert_eq!(stopped[1].text, whole.text[..first + 3]);
        assert_eq!(stopped[2].text, "");
        for completion in &stopped {
            assert_eq!(completion.finish_reason, FinishReason::Stop);
            assert!(whole.token_ids.starts_with(&completion.token_ids));
        }
        assert_eq!(stopped[0].stop_reason, Some(StopReason::Text(stop.into())));
        assert_eq!(stopped[0].token_ids, stopped[1].token_ids);
    }
    // Not before the fewest tokens.
    let late = with(&[&whole.text[..1]], |p| p.min_new_tokens = 5);
    let late = generate(&mut engine, &[late]).remove(0);
    assert!(late.token_ids.len() > 5 || late.text == whole.text);
}

#[test]
fn stop_ids_are_banned_until_the_fewest_tokens_are_there() {
    let mut engine = builder().build().expect("an engine");
    let whole = generate(&mut engine, &[prompt(5)]).remove(0);
    let stop = whole.token_ids[2];
    let mut request = prompt(5);
    request.sampling.stop_token_ids = vec![stop];
    let stopped = generate(&mut engine, std::slice::from_ref(&request)).remove(0);
    assert_eq!(stopped.stop_reason, Some(StopReason::TokenId(stop)));
    assert!(stopped.token_ids.len() <= 3);
    request.sampling.min_new_tokens = 20;
    let late = generate(&mut engine, &[request]).remove(0);
    let first = late.token_ids.iter().position(|&id| id == stop);
    assert!(first.is_none_or(|first| first >= 20), "{:?}", late.token_ids);
    assert!(late.token_ids.len() > 20);
}

#[test]
fn a_request_that_bans_every_token_is_told_so() {
    let mut engine = builder().build().expect("an engine");
    let all = 0..1024; // the model's vocabulary
    for (temperature, top_k) in [(0.0, 0), (1.0, 0), (0.7, 5)] {
        let mut request = prompt(5).temperature(temperature).seed(1);
        request.sampling.top_k = top_k;
        request.sampling.stop_token_ids = all.clone().collect();
        request.sampling.min_new_tokens = 3;
        let completion = engine.generate(&[request]).expect("runs").remove(0);
        let error = completion.expect_err("nothing is left to choose");
        assert!(
            matches!(
                error,
                Error::EveryTokenBanned {
                    new_token: 0,
                    min_new_tokens: 3
                }
            ),
            "{error}"
        );
        assert!(error.to_string().contains("min_new_tokens = 3"), "{error}");
    }
}
