//! Greedy completions of the bundled model against transformers in float32, token for token.

use rollout_engine::{DeviceChoice, Engine, FinishReason, Request};
use serde::Deserialize;

use crate::support::{bundled_model, fixtures};

/// Longest completion in the golden file.
const MAX_NEW_TOKENS: usize = 400;
const TOLERANCE: f32 = 2e-4;

#[derive(Deserialize)]
struct Golden {
    messages: Vec<serde_json::Value>,
    prompt_ids: Vec<u32>,
    completion_ids: Vec<u32>,
    logprobs: Vec<f32>,
    text: String,
}

fn golden() -> Vec<Golden> {
    let path = fixtures().join("golden/greedy-base.json");
    let cases: Vec<Golden> =
        serde_json::from_str(&std::fs::read_to_string(path).expect("the golden file")).expect("JSON");
    assert_eq!(cases.len(), 48);
    cases
}

/// Completes the golden prompts in the given order and gives the number of preemptions.
fn check(cases: &[&Golden], page_size: usize, batch_size: usize, n_pages: usize) -> u64 {
    let mut engine = Engine::builder()
        .model(bundled_model())
        .device(DeviceChoice::Cpu)
        .page_size(page_size)
        .max_batch_size(batch_size)
        .n_pages(n_pages)
        .build()
        .expect("builds");
    let requests: Vec<Request> = cases
        .iter()
        .map(|case| Request::token_ids(case.prompt_ids.clone()).max_new_tokens(MAX_NEW_TOKENS))
        .collect();
    let completions = engine.generate(&requests).expect("runs");
    let what = format!("page size {page_size}, batch {batch_size}, {n_pages} pages");
    let mut worst = 0f32;
    for (index, (case, completion)) in cases.iter().zip(completions).enumerate() {
        let completion = completion.expect("completes");
        assert_eq!(
            completion.prompt_token_ids, case.prompt_ids,
            "{what}, prompt {index}"
        );
        assert_eq!(
            completion.token_ids, case.completion_ids,
            "{what}, prompt {index}"
        );
        assert_eq!(completion.text, case.text, "{what}, prompt {index}");
        assert_eq!(
            completion.finish_reason,
            FinishReason::Stop,
            "{what}, prompt {index}"
        );
        assert_eq!(
            completion.logprobs.len(),
            case.logprobs.len(),
            "{what}, prompt {index}"
        );
        for (ours, theirs) in completion.logprobs.iter().zip(&case.logprobs) {
            worst = worst.max((ours - theirs).abs());
        }
    }
    assert!(worst <= TOLERANCE, "{what}: log-probabilities differ by {worst}");
    eprintln!(
        "{what}: {:?}, worst log-probability difference {worst:e}",
        engine.statistics()
    );
    let pages = engine.scheduler().pages();
    assert_eq!(pages.free_pages(), n_pages - 1, "every page came back");
    engine.statistics().preemptions
}

fn tokens(case: &Golden) -> usize {
    case.prompt_ids.len() + case.completion_ids.len()
}

/// A fixed shuffle.
fn shuffled(cases: &[Golden]) -> Vec<&Golden> {
    let n = cases.len();
    (0..n).map(|i| &cases[(i * 29 + 11) % n]).collect()
}

#[test]
fn with_ample_pages_whatever_page_and_batch_size() {
    let cases = golden();
    let in_order: Vec<_> = cases.iter().collect();
    for page_size in [16, 64, 128] {
        for batch_size in [1, 5, 48] {
            let n_pages = 1 + batch_size * 640usize.div_ceil(page_size);
            assert_eq!(check(&in_order, page_size, batch_size, n_pages), 0);
        }
    }
}

#[test]
fn with_so_few_pages_that_sequences_are_preempted_again_and_again() {
    let cases = golden();
    let in_order: Vec<_> = cases.iter().collect();
    let longest = cases.iter().map(tokens).max().expect("there are cases");
    // The longest completions, each three times: all of them outgrow the pages they start with.
    let mut long: Vec<_> = (0..3).flat_map(|_| &cases).collect();
    long.sort_by_key(|case| std::cmp::Reverse(tokens(case)));
    long.truncate(36);
    let mut preemptions = 0;
    for page_size in [16, 64, 128] {
        // Page 0, the longest sequence, and a few pages that others start in.
        let n_pages = 1 + longest.div_ceil(page_size) + 4;
        preemptions += check(&in_order, page_size, 5, n_pages);
        preemptions += check(&shuffled(&cases), page_size, 48, n_pages);
        let of_long = check(&long, page_size, 36, n_pages);
        assert!(of_long > 0, "page size {page_size}: no preemption");
        preemptions += of_long;
    }
    assert!(preemptions > 30, "only {preemptions} preemptions");
}

#[test]
fn in_any_order() {
    let cases = golden();
    for (order, batch_size) in [(shuffled(&cases), 48), (cases.iter().rev().collect(), 5)] {
        assert_eq!(check(&order, 64, batch_size, 1 + 48 * 10), 0);
    }
}

#[test]
fn from_messages_through_the_chat_template() {
    let mut engine = Engine::builder()
        .model(bundled_model())
        .device(DeviceChoice::Cpu)
        .build()
        .expect("builds");
    let cases = golden();
    let requests: Vec<Request> = cases
        .iter()
        .map(|case| {
            Request::chat(rollout_engine::ChatPrompt::new(case.messages.clone()))
                .max_new_tokens(MAX_NEW_TOKENS)
        })
        .collect();
    for (case, completion) in cases.iter().zip(engine.generate(&requests).expect("runs")) {
        assert_eq!(completion.expect("completes").token_ids, case.completion_ids);
    }
}
