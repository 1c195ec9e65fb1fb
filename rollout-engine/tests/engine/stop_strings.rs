//! Stop strings where tokens and characters do not end together.

use std::sync::Arc;

use rollout_engine::fake_runner::FakeRunner;
use rollout_engine::text::TextPipeline;
use rollout_engine::{Engine, FinishReason, Request, RunnerShape, SamplingParams};

use crate::support::{Constant, fixtures};

#[test]
fn a_stop_string_ends_a_completion_also_before_a_part_of_a_character() {
    let text = TextPipeline::from_dir(fixtures().join("qwen3-tokenizer")).expect("reads");
    let text = Arc::new(text.expect("has a tokenizer"));
    // A space and the first bytes of the character, in one token.
    let token = text.tokenizer().encode(" 🤖", false).expect("encodes")[0];
    assert!(text.decode(&[token]).expect("decodes").starts_with(" \u{fffd}"));
    let shape = RunnerShape {
        vocab_size: 200_000,
        ..FakeRunner::small_shape()
    };
    for (include_stop_str_in_output, whole) in [(false, ""), (true, " ")] {
        let mut engine = Engine::with_runner(Constant::new(shape, token), vec![], Some(text.clone()))
            .expect("a valid shape");
        let request = Request::token_ids([1]).sampling(SamplingParams {
            stop: vec![" ".into()],
            include_stop_str_in_output,
            max_new_tokens: 1,
            ..SamplingParams::default()
        });
        let completion = engine
            .generate(&[request])
            .expect("runs")
            .remove(0)
            .expect("completes");
        assert_eq!(
            (completion.finish_reason, completion.text.as_str()),
            (FinishReason::Stop, whole)
        );
    }
}
