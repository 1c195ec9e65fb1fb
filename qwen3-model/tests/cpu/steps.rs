//! Steps: what may be in one, what is refused, and what must not change a result.

use crate::common::folder::Folder;
use crate::common::{extend, max_difference, options, oracle, table};
use paged_kv::{KvDtype, PageTable, Slot};
use proptest::prelude::*;
use qwen3_model::{CpuBackend, Error, LoadOptions, Model, Qwen3Config, SequenceChunk, StepBatch};
use serde_json::json;

const PAGES: usize = 40;

fn small() -> Model<CpuBackend> {
    random_model(&Folder::new().config, &options(PAGES, 4))
}

fn random_model(config: &serde_json::Value, options: &LoadOptions) -> Model<CpuBackend> {
    let config = Qwen3Config::from_json(config.to_string().as_bytes()).unwrap();
    Model::random(config, 11, options).unwrap()
}

fn ids(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 17 + i * i) % 24) as u32)
        .collect()
}

/// One sequence alone, in one chunk, on a fresh table.
fn alone(model: &mut Model<CpuBackend>, ids: &[u32]) -> Vec<f32> {
    let mut table = table(&options(PAGES, 4), 1);
    let slot = table.allocate_slot().unwrap();
    extend(model, &mut table, &[(slot, ids)], true)
}

fn slots(table: &mut PageTable, n: usize) -> Vec<Slot> {
    (0..n).map(|_| table.allocate_slot().unwrap()).collect()
}

#[test]
fn a_prompt_cut_into_chunks_gives_the_same_bits() {
    let mut model = small();
    let ids = ids(37, 0);
    let whole = alone(&mut model, &ids);
    for size in [1, 2, 3, 5, 16, 36] {
        let mut table = table(&options(PAGES, 4), 1);
        let slot = table.allocate_slot().unwrap();
        let mut cut = Vec::new();
        for chunk in ids.chunks(size) {
            cut.extend(extend(&mut model, &mut table, &[(slot, chunk)], true));
        }
        assert_eq!(cut, whole, "chunks of {size}");
    }
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbours() {
    let mut model = small();
    let sequences: Vec<_> = (0..5).map(|i| ids(3 + 4 * i, i)).collect();
    let alone: Vec<_> = sequences.iter().map(|ids| alone(&mut model, ids)).collect();
    let mut table = table(&options(PAGES, 4), 5);
    let slots = slots(&mut table, 5);
    let packed: Vec<_> = slots
        .iter()
        .zip(&sequences)
        .map(|(slot, ids)| (*slot, ids.as_slice()))
        .collect();
    assert_eq!(extend(&mut model, &mut table, &packed, true), alone.concat());
}

#[test]
fn equal_rows_of_a_batch_have_equal_logits() {
    let mut model = small();
    let prompt = ids(9, 3);
    let mut table = table(&options(PAGES, 4), 6);
    let slots = slots(&mut table, 6);
    for tokens in [&prompt[..], &[7], &[2]] {
        let packed: Vec<_> = slots.iter().map(|slot| (*slot, tokens)).collect();
        let logits = extend(&mut model, &mut table, &packed, false);
        let rows: Vec<_> = logits.chunks_exact(24).collect();
        assert!(rows.iter().all(|row| *row == rows[0]));
    }
}

#[test]
fn placement_of_pages_and_order_of_slots_do_not_change_bits() {
    let mut model = small();
    let sequences: Vec<_> = (0..3).map(|i| ids(10 + i, i)).collect();
    let expected: Vec<_> = sequences.iter().map(|ids| alone(&mut model, ids)).collect();
    // Slots in the order 3, 7, 1, whose pages interleave and lie where others were erased.
    let mut table = table(&options(PAGES, 4), 8);
    let all = slots(&mut table, 8);
    for slot in &all {
        let _ = table.reserve(*slot, 9).unwrap();
    }
    for slot in &all[1..] {
        table.erase(*slot).unwrap();
    }
    let again = slots(&mut table, 7);
    let used = [again[2], again[6], again[0]];
    model.backend_mut().cache_mut().fill(f32::NAN);
    let mut got = vec![Vec::new(); 3];
    for step in 0..12 {
        let mut packed = Vec::new();
        for (slot, ids) in used.iter().zip(&sequences) {
            packed.extend(ids.get(step..=step).map(|id| (*slot, id)));
        }
        let logits = extend(&mut model, &mut table, &packed, true);
        let running = (0..3).filter(|i| step < sequences[*i].len());
        for (i, logits) in running.zip(logits.chunks_exact(24)) {
            got[i].extend_from_slice(logits);
        }
    }
    assert_eq!(got, expected);
}

#[test]
fn a_cached_prompt_gives_logits_from_its_last_token_alone() {
    let mut model = small();
    let ids = ids(8, 1);
    let expected = alone(&mut model, &ids);
    let mut table = table(&options(PAGES, 4), 1);
    let slot = table.allocate_slot().unwrap();
    extend(&mut model, &mut table, &[(slot, &ids)], false);
    let chunk = SequenceChunk {
        slot,
        start: 7,
        len: 1,
        wants_logits: true,
    };
    let batch = StepBatch {
        token_ids: &ids[7..],
        chunks: &[chunk],
    };
    assert_eq!(model.forward(&batch, &table).unwrap(), &expected[7 * 24..]);
}

#[test]
fn a_forked_sequence_goes_its_own_way() {
    let mut model = small();
    let prompt = ids(6, 2);
    let mut table = table(&options(PAGES, 4), 2);
    let a = table.allocate_slot().unwrap();
    extend(&mut model, &mut table, &[(a, &prompt)], false);
    let b = table.fork(a).unwrap();
    let mut both = Vec::new();
    for (x, y) in [(1, 9), (2, 8), (3, 7)] {
        both.push(extend(&mut model, &mut table, &[(a, &[x]), (b, &[y])], false));
    }
    for (i, tail) in [[1, 2, 3], [9, 8, 7]].iter().enumerate() {
        let expected = alone(&mut model, &[&prompt[..], tail].concat());
        for (step, both) in both.iter().enumerate() {
            assert_eq!(both[i * 24..][..24], expected[(6 + step) * 24..][..24]);
        }
    }
}

#[test]
fn a_step_without_wanted_logits_returns_none() {
    let mut model = small();
    let mut table = table(&options(PAGES, 4), 1);
    let slot = table.allocate_slot().unwrap();
    let _ = table.reserve(slot, 3).unwrap();
    let chunk = SequenceChunk {
        slot,
        start: 0,
        len: 3,
        wants_logits: false,
    };
    let batch = StepBatch {
        token_ids: &[1, 2, 3],
        chunks: &[chunk],
    };
    assert!(model.forward(&batch, &table).unwrap().is_empty());
}

#[test]
fn a_bf16_cache_is_close_to_an_f32_one() {
    let mut exact = small();
    let mut options = options(PAGES, 4);
    options.kv_dtype = KvDtype::Bf16;
    let mut rounded = random_model(&Folder::new().config, &options);
    let ids = ids(20, 4);
    let difference = max_difference(&alone(&mut exact, &ids), &alone(&mut rounded, &ids));
    assert!(difference > 0.0 && difference < 1e-2, "{difference}");
}

#[test]
fn steps_that_cannot_be_run_are_refused_and_change_nothing() {
    let mut model = small();
    let mut table = table(&options(PAGES, 4), 3);
    let [a, b] = [table.allocate_slot().unwrap(), table.allocate_slot().unwrap()];
    let prompt = ids(6, 5);
    let expected = alone(&mut model, &prompt);
    extend(&mut model, &mut table, &[(a, &prompt[..5])], false);
    let mut step = |ids: &[u32], chunks: &[(Slot, usize, usize)]| {
        let chunk = |&(slot, start, len)| SequenceChunk {
            slot,
            start,
            len,
            wants_logits: true,
        };
        let chunks: Vec<_> = chunks.iter().map(chunk).collect();
        model
            .forward(
                &StepBatch {
                    token_ids: ids,
                    chunks: &chunks,
                },
                &table,
            )
            .map(<[f32]>::to_vec)
    };
    assert!(matches!(step(&[], &[]), Err(Error::EmptyStep { .. })));
    assert!(matches!(
        step(&[1], &[(a, 5, 1), (b, 0, 0)]),
        Err(Error::EmptyStep { .. })
    ));
    assert!(matches!(
        step(&[1, 2], &[(a, 5, 1)]),
        Err(Error::ChunkLength {
            chunk_tokens: 1,
            token_ids: 2
        })
    ));
    assert!(matches!(
        step(&[1], &[(a, 5, usize::MAX), (b, 0, 2)]),
        Err(Error::ChunkLength { .. })
    ));
    assert!(matches!(
        step(&[24], &[(a, 5, 1)]),
        Err(Error::TokenId {
            id: 24,
            row: 0,
            vocab: 24
        })
    ));
    assert!(matches!(
        step(&[1, 2], &[(a, 5, 1), (a, 6, 1)]),
        Err(Error::DuplicateSlot { .. })
    ));
    assert!(matches!(
        step(&[1], &[(a, 6, 1)]),
        Err(Error::Gap {
            start: 6,
            written: 5,
            ..
        })
    ));
    assert!(matches!(
        step(&[1], &[(a, usize::MAX, 1)]),
        Err(Error::Position { max: 64, .. })
    ));
    assert!(matches!(
        step(&[1], &[(a, 64, 1)]),
        Err(Error::Position { position: 64, .. })
    ));
    assert!(matches!(
        step(&[1; 4], &[(a, 5, 4)]),
        Err(Error::NoPage { position: 8, .. })
    ));
    assert!(matches!(
        step(&[1], &[(b, 0, 1)]),
        Err(Error::NoPage { position: 0, .. })
    ));
    assert!(matches!(
        step(&[1], &[(Slot::RESERVED, 0, 1)]),
        Err(Error::PagedKv(_))
    ));
    assert_eq!(step(&prompt[5..], &[(a, 5, 1)]).unwrap(), expected[5 * 24..]);
}

#[test]
fn a_table_of_another_size_and_a_step_too_large_are_refused() {
    let mut options = options(PAGES, 4);
    options.max_tokens = 4;
    let mut model = random_model(&Folder::new().config, &options);
    let mut run = |other: LoadOptions, n: usize| {
        let mut table = table(&other, 1);
        let slot = table.allocate_slot().unwrap();
        let _ = table.reserve(slot, n).unwrap();
        let chunk = SequenceChunk {
            slot,
            start: 0,
            len: n,
            wants_logits: true,
        };
        model
            .forward(
                &StepBatch {
                    token_ids: &vec![1; n],
                    chunks: &[chunk],
                },
                &table,
            )
            .map(|_| ())
    };
    assert!(matches!(
        run(options, 5),
        Err(Error::StepTooLarge { tokens: 5, max: 4 })
    ));
    assert!(matches!(
        run(crate::common::options(PAGES, 8), 4),
        Err(Error::CacheShape {
            table_page_size: 8,
            ..
        })
    ));
    assert!(matches!(
        run(crate::common::options(PAGES + 1, 4), 4),
        Err(Error::CacheShape { .. })
    ));
    run(options, 4).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Pieces of any length of any sequences in every step: whole prompts, first and later pieces, single next tokens.
    #[test]
    fn a_packed_step_gives_each_piece_the_bits_that_its_sequence_has_alone(
        lens in prop::collection::vec(1usize..24, 1..6),
        cuts in prop::collection::vec((0usize..6, 1usize..12, any::<bool>()), 1..40),
    ) {
        let mut model = small();
        let vocab = model.config().vocab_size;
        let sequences: Vec<_> = lens.iter().enumerate().map(|(i, &len)| ids(len, i)).collect();
        let whole: Vec<_> = sequences.iter().map(|ids| alone(&mut model, ids)).collect();
        let mut table = table(&options(PAGES, 4), lens.len());
        let slots = slots(&mut table, lens.len());
        let mut done = vec![0; lens.len()];
        // What the drawn pieces leave over follows token by token, all sequences together.
        let rest = std::iter::repeat_n((0..lens.len()).map(|i| (i, 1, i + 1 == lens.len())), 24).flatten();
        let mut step: Vec<(usize, usize)> = Vec::new();
        for (i, len, send) in cuts.into_iter().map(|(i, len, send)| (i % lens.len(), len, send)).chain(rest) {
            let len = len.min(lens[i] - done[i]);
            if len > 0 && step.iter().all(|&(other, _)| other != i) {
                step.push((i, len));
            }
            if !send || step.is_empty() {
                continue;
            }
            let parts: Vec<_> = step.iter().map(|&(i, len)| (slots[i], &sequences[i][done[i]..][..len])).collect();
            let got = extend(&mut model, &mut table, &parts, true);
            let mut expected = Vec::new();
            for (i, len) in step.drain(..) {
                expected.extend_from_slice(&whole[i][done[i] * vocab..][..len * vocab]);
                done[i] += len;
            }
            prop_assert_eq!(got, expected);
        }
        prop_assert_eq!(done, lens);
    }

    /// Shapes as they occur and as they do not, against the model written down in f64.
    #[test]
    fn logits_agree_with_the_f64_model(
        hidden in 1usize..20, intermediate in 1usize..20, half_head in 1usize..20, kv_heads in 1usize..4,
        group in 1usize..5, layers in 1usize..4, vocab in 2usize..40, tied: bool, yarn: bool, tokens in 1usize..30,
        seed: u64,
    ) {
        let mut config = Folder::new().config;
        config["hidden_size"] = json!(2 * hidden);
        config["intermediate_size"] = json!(2 * intermediate);
        config["head_dim"] = json!(2 * half_head);
        config["num_key_value_heads"] = json!(kv_heads);
        config["num_attention_heads"] = json!(kv_heads * group);
        config["num_hidden_layers"] = json!(layers);
        config["layer_types"] = json!(null);
        config["vocab_size"] = json!(vocab);
        config["tie_word_embeddings"] = json!(tied);
        if yarn {
            config["rope_parameters"] = json!({
                "rope_theta": 10000.0, "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32
            });
        }
        let config = Qwen3Config::from_json(config.to_string().as_bytes()).unwrap();
        let mut model = Model::random(config, seed, &options(PAGES, 4)).unwrap();
        let ids: Vec<u32> = (0..tokens).map(|i| ((i as u64 * 7 + seed % 101) % vocab as u64) as u32).collect();
        let expected = oracle::logits(model.config(), model.backend().weights(), &ids);
        for (got, want) in alone(&mut model, &ids).into_iter().zip(expected) {
            prop_assert!((f64::from(got) - want).abs() < 2e-5 * (1.0 + want.abs()), "{} for {}", got, want);
        }
    }
}
