//! The model against logits and completions of transformers in f32.

use crate::common::*;
use paged_kv::Slot;
use qwen3_model::{GenerationConfig, Model};

#[test]
fn teacher_forced_logits_agree() {
    let options = options(40, 16);
    let mut model = Model::load(model_dir(), &options).unwrap();
    for (ids, logits) in golden_logits("base") {
        let mut table = table(&options, 1);
        let slot = table.allocate_slot().unwrap();
        let ours = extend(&mut model, &mut table, &[(slot, &ids)], true);
        let difference = max_difference(&ours, &logits);
        assert!(difference < 1e-3, "{difference}");
    }
}

/// All prompts at once: one packed prefill, then one row per unfinished sequence.
#[test]
fn greedy_completions_agree_token_for_token() {
    let eos = GenerationConfig::from_dir(&model_dir())
        .unwrap()
        .unwrap()
        .eos_token_ids;
    assert_eq!(eos, [570, 568]);
    let golden = greedy("base");
    assert_eq!(golden.len(), 48);
    let mut options = options(1200, 16);
    options.max_tokens = 4096;
    let mut model = Model::load(model_dir(), &options).unwrap();
    let mut table = table(&options, golden.len());
    let slots: Vec<Slot> = golden.iter().map(|_| table.allocate_slot().unwrap()).collect();
    let mut running: Vec<usize> = (0..golden.len()).collect();
    let mut next: Vec<Vec<u32>> = golden.iter().map(|g| g.prompt_ids.clone()).collect();
    let mut done = vec![0; golden.len()];
    let mut worst = 0.0f64;
    while !running.is_empty() {
        let sequences: Vec<_> = running.iter().map(|&i| (slots[i], next[i].as_slice())).collect();
        let logits = extend(&mut model, &mut table, &sequences, false);
        let vocab = model.config().vocab_size;
        for (&i, logits) in running.iter().zip(logits.chunks_exact(vocab)) {
            let id = argmax(logits);
            let golden = &golden[i];
            assert_eq!(
                id, golden.completion_ids[done[i]],
                "prompt {i}, token {}",
                done[i]
            );
            worst = worst.max((log_prob(logits, id) - golden.logprobs[done[i]]).abs());
            done[i] += 1;
            next[i] = vec![id];
        }
        running.retain(|&i| {
            let last = next[i][0];
            let more = !eos.contains(&last) && done[i] < 400;
            assert_eq!(more, done[i] < golden[i].completion_ids.len(), "prompt {i}");
            more
        });
    }
    assert!(worst < 2e-4, "{worst}");
}
