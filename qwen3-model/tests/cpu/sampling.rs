//! Sampling on the CPU: its distribution, its log-probabilities, and every edge of every parameter.

use proptest::prelude::*;
use qwen3_model::sampling::{MAX_VOCAB, Philox, Sampling, TokenState, sample_row, top_logprobs};

const HOT: Sampling = Sampling {
    temperature: 1.0,
    seed: 7,
    ..Sampling::GREEDY
};

/// The distribution that a row is drawn from, by sorting, in f64. Of equals at a boundary all stay.
fn distribution(logits: &[f32], sampling: &Sampling, states: &[TokenState], index: u32) -> Vec<f64> {
    let adjusted: Vec<f64> = (0..logits.len())
        .map(|id| {
            let (mut y, state) = (f64::from(logits[id]), states.get(id).copied().unwrap_or_default());
            if state.is_stop() && index < sampling.min_new_tokens {
                return f64::NEG_INFINITY;
            }
            let penalty = f64::from(sampling.repetition_penalty);
            if state.is_seen() {
                y = if y > 0.0 { y / penalty } else { y * penalty };
            }
            if state.count() > 0 {
                y -= f64::from(sampling.frequency_penalty) * f64::from(state.count());
                y -= f64::from(sampling.presence_penalty);
            }
            y / f64::from(sampling.temperature)
        })
        .collect();
    let max = adjusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut weights: Vec<f64> = adjusted.iter().map(|y| (y - max).exp()).collect();
    weights.iter_mut().for_each(|w| {
        if *w < f64::from(sampling.min_p) {
            *w = 0.0;
        }
    });
    let sorted = |weights: &[f64]| {
        let mut sorted = weights.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted
    };
    let k = sampling.top_k as usize;
    if k > 0 && k < weights.len() {
        let least = sorted(&weights)[k - 1];
        weights.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
    }
    let total: f64 = weights.iter().sum();
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        let least = sorted(&weights).into_iter().find(|w| {
            sum += w;
            sum >= f64::from(sampling.top_p) * total
        });
        let least = least.unwrap_or(0.0);
        weights.iter_mut().filter(|w| **w < least).for_each(|w| *w = 0.0);
    }
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// Logits of 60 ids, no two of them near each other, in no order.
fn logits() -> Vec<f32> {
    (0..60).map(|i| ((i * 37 % 60) as f32) * 0.11 - 3.0).collect()
}

#[test]
fn tokens_follow_the_exact_distribution() {
    let states: Vec<TokenState> = {
        let mut states = vec![TokenState::default(); 60];
        let known = TokenState::of_sequence(&[1, 5, 9, 13], &[2, 9, 9, 30, 30, 30], &[7, 42]);
        known
            .into_iter()
            .for_each(|(id, state)| states[id as usize] = state);
        states
    };
    let cases = [
        ("temperature 1", HOT),
        (
            "temperature 0.5",
            Sampling {
                temperature: 0.5,
                ..HOT
            },
        ),
        (
            "temperature 3",
            Sampling {
                temperature: 3.0,
                ..HOT
            },
        ),
        ("top_k", Sampling { top_k: 7, ..HOT }),
        ("top_p", Sampling { top_p: 0.8, ..HOT }),
        ("min_p", Sampling { min_p: 0.1, ..HOT }),
        (
            "repetition_penalty",
            Sampling {
                repetition_penalty: 1.5,
                ..HOT
            },
        ),
        (
            "presence_penalty",
            Sampling {
                presence_penalty: 1.2,
                ..HOT
            },
        ),
        (
            "frequency_penalty",
            Sampling {
                frequency_penalty: 0.6,
                ..HOT
            },
        ),
        (
            "min_new_tokens",
            Sampling {
                min_new_tokens: u32::MAX,
                ..HOT
            },
        ),
        ("completion", Sampling { completion: 5, ..HOT }),
        (
            "all at once",
            Sampling {
                temperature: 1.4,
                top_k: 30,
                top_p: 0.9,
                min_p: 0.02,
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                min_new_tokens: u32::MAX,
                ..HOT
            },
        ),
    ];
    let (logits, draws) = (logits(), 40_000u32);
    for (what, sampling) in cases {
        let exact = distribution(&logits, &sampling, &states, 0);
        let mut counts = vec![0u32; logits.len()];
        for index in 0..draws {
            let sampled = sample_row(&logits, &sampling, index, &states);
            let (token, p) = (sampled.token as usize, exact[sampled.token as usize]);
            assert!(p > 0.0, "{what}: token {token} is cut");
            assert!(
                (f64::from(sampled.sampled_logprob) - p.ln()).abs() < 1e-5,
                "{what}: token {token}"
            );
            counts[token] += 1;
        }
        // Rare ids together, so that every class is large enough for the approximation.
        let (mut chi2, mut classes, mut rare) = (0.0, 0, (0.0, 0.0));
        let mut class = |expected: f64, seen: f64| {
            chi2 += (seen - expected).powi(2) / expected;
            classes += 1;
        };
        for (&p, &count) in exact.iter().zip(&counts) {
            let expected = p * f64::from(draws);
            if expected < 8.0 {
                rare = (rare.0 + expected, rare.1 + f64::from(count));
            } else {
                class(expected, f64::from(count));
            }
        }
        if rare.0 >= 8.0 {
            class(rare.0, rare.1);
        }
        let freedom = f64::from(classes - 1);
        assert!(classes > 3, "{what}: {classes} classes");
        // Beyond this with a probability of about 1e-4; the seed is fixed.
        assert!(
            chi2 < freedom + 4.0 * (2.0 * freedom).sqrt() + 6.0,
            "{what}: {chi2:.1} with {freedom} degrees of freedom"
        );
    }
}

#[test]
fn numbers_of_positions_and_siblings_are_uniform_and_unrelated() {
    let bits = |completion, index| Philox { seed: 3, completion }.uniform(index) >> 60;
    let draws = 32_000u32;
    let mut pairs = [[0u32; 256]; 2];
    for index in 0..draws {
        let (here, next, sibling) = (bits(0, index), bits(0, index + 1), bits(1, index));
        pairs[0][(here * 16 + next) as usize] += 1;
        pairs[1][(here * 16 + sibling) as usize] += 1;
    }
    for counts in pairs {
        let expected = f64::from(draws) / 256.0;
        let chi2: f64 = counts
            .iter()
            .map(|&c| (f64::from(c) - expected).powi(2) / expected)
            .sum();
        assert!(
            (160.0..360.0).contains(&chi2),
            "{chi2} with 255 degrees of freedom"
        );
    }
}

#[test]
fn parameters_that_cut_nothing_change_nothing() {
    let logits = logits();
    for index in 0..200 {
        let plain = sample_row(&logits, &HOT, index, &[]);
        for same in [
            Sampling { top_k: 60, ..HOT },
            Sampling { top_k: 61, ..HOT },
            Sampling {
                top_k: u32::MAX,
                ..HOT
            },
            Sampling {
                top_p: 1.0,
                min_p: 0.0,
                ..HOT
            },
            Sampling {
                top_p: 1.0 - f32::EPSILON / 2.0,
                ..HOT
            },
        ] {
            let sampled = sample_row(&logits, &same, index, &[]);
            assert_eq!(sampled.token, plain.token, "{same:?}");
            assert!((sampled.sampled_logprob - plain.sampled_logprob).abs() < 1e-5);
        }
    }
}

#[test]
fn the_strictest_cuts_leave_the_best_and_its_equals() {
    let mut logits = logits();
    let best = sample_row(&logits, &Sampling::GREEDY, 0, &[]).token as usize;
    let strict = [
        Sampling { top_k: 1, ..HOT },
        Sampling {
            top_p: f32::MIN_POSITIVE,
            ..HOT
        },
        Sampling { min_p: 1.0, ..HOT },
        Sampling {
            temperature: 0.001,
            ..HOT
        },
    ];
    for sampling in strict {
        for index in 0..50 {
            let sampled = sample_row(&logits, &sampling, index, &[]);
            assert_eq!((sampled.token as usize, sampled.sampled_logprob), (best, 0.0));
        }
    }
    // Three equals: all of them are drawn, even by top_k 1, and the first of them is greedy's.
    let equals = [best, (best + 10) % 60, (best + 20) % 60];
    equals.iter().for_each(|&id| logits[id] = logits[best]);
    for sampling in strict {
        let mut seen = [0; 3];
        for index in 0..300 {
            let sampled = sample_row(&logits, &sampling, index, &[]);
            let place = equals.iter().position(|&id| id == sampled.token as usize);
            seen[place.expect("one of the equals")] += 1;
            assert!((sampled.sampled_logprob + 3f32.ln()).abs() < 1e-6);
        }
        assert!(seen.iter().all(|&n| n > 60), "{sampling:?}: {seen:?}");
    }
    let first = *equals.iter().min().expect("three");
    assert_eq!(
        sample_row(&logits, &Sampling::GREEDY, 0, &[]).token as usize,
        first
    );
    // Two of three equals at the boundary of top_k stay with the third.
    let sampling = Sampling { top_k: 2, ..HOT };
    let drawn: std::collections::BTreeSet<_> = (0..200)
        .map(|index| sample_row(&logits, &sampling, index, &[]).token as usize)
        .collect();
    assert_eq!(drawn, equals.into_iter().collect());
}

#[test]
fn rows_that_leave_nothing_to_choose_are_marked() {
    let broken = [
        vec![0.0, f32::NAN, 1.0, 2.0],
        vec![f32::NEG_INFINITY; 4],
        vec![0.0, f32::INFINITY, 0.0, 0.0],
        vec![f32::NAN; 4],
    ];
    let stop = [TokenState(TokenState::STOP); 4];
    for sampling in [
        Sampling::GREEDY,
        HOT,
        Sampling {
            top_k: 2,
            top_p: 0.5,
            ..HOT
        },
    ] {
        for row in &broken {
            let sampled = sample_row(row, &sampling, 0, &[]);
            assert!(
                (sampled.token as usize) < 4 && sampled.logprob.is_nan() && sampled.sampled_logprob.is_nan()
            );
        }
        let banned = Sampling {
            min_new_tokens: 1,
            ..sampling
        };
        let row = [0.0, 1.0, 2.0, 3.0];
        let sampled = sample_row(&row, &banned, 0, &stop);
        assert!(sampled.sampled_logprob.is_nan(), "all are banned");
        assert!(
            !sample_row(&row, &banned, 1, &stop).sampled_logprob.is_nan(),
            "no longer"
        );
        // What is impossible is not chosen, and does no harm.
        let row = [f32::NEG_INFINITY, -2.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
        let sampled = sample_row(&row, &sampling, 0, &[]);
        assert_eq!(
            (sampled.token, sampled.logprob, sampled.sampled_logprob),
            (1, 0.0, 0.0)
        );
    }
}

#[test]
fn banned_ids_do_not_come_before_their_time() {
    let mut logits = logits();
    logits[42] = 30.0;
    let mut states = vec![TokenState::default(); 60];
    states[42] = TokenState(TokenState::STOP);
    for sampling in [Sampling::GREEDY, HOT] {
        let sampling = Sampling {
            min_new_tokens: 3,
            ..sampling
        };
        for index in 0..6 {
            let sampled = sample_row(&logits, &sampling, index, &states);
            assert_eq!(sampled.token == 42, index >= 3, "token {index}");
            // The policy's own log-probability knows nothing of bans.
            assert!(index >= 3 || sampled.logprob < -20.0);
        }
    }
}

#[test]
fn states_count_up_to_their_greatest_value() {
    let mut state = TokenState(TokenState::PROMPT | TokenState::STOP);
    for n in 0..20_000u32 {
        assert_eq!(u32::from(state.count()), n.min(u32::from(TokenState::COUNT)));
        assert!(state.is_seen() && state.is_stop());
        state = state.counted();
    }
    assert!(!TokenState(TokenState::STOP).is_seen());
    let states = TokenState::of_sequence(&[4, 4, 2], &[2, 9, 9], &[9, 1]);
    let expected = [
        (1, TokenState::STOP),
        (2, TokenState::PROMPT | 1),
        (4, TokenState::PROMPT),
        (9, TokenState::STOP | 2),
    ];
    assert_eq!(states, expected.map(|(id, bits)| (id, TokenState(bits))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn log_probabilities_agree_with_f64(
        row in proptest::collection::vec(-20f32..20.0, 1..2000),
        temperature in 0.3f32..3.0,
        index in 0u32..1000,
    ) {
        let sampling = Sampling { temperature, ..HOT };
        let sampled = sample_row(&row, &sampling, index, &[]);
        let log_softmax = |t: f64| {
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = row.iter().map(|&x| ((f64::from(x) - f64::from(max)) / t).exp()).sum();
            (f64::from(row[sampled.token as usize]) - f64::from(max)) / t - sum.ln()
        };
        prop_assert!((f64::from(sampled.logprob) - log_softmax(1.0)).abs() < 1e-5);
        prop_assert!((f64::from(sampled.sampled_logprob) - log_softmax(f64::from(temperature))).abs() < 1e-5);
    }

    #[test]
    fn cuts_agree_with_sorting(
        row in proptest::collection::vec((-40i32..40).prop_map(|x| x as f32 * 0.25), 1..300),
        top_k in 0u32..20,
        top_p in 0.01f32..1.0,
        min_p in 0.0f32..0.3,
        seed in any::<u64>(),
    ) {
        let sampling = Sampling { top_k, top_p, min_p, seed, ..HOT };
        let exact = distribution(&row, &sampling, &[], 0);
        for index in 0..20 {
            let sampled = sample_row(&row, &sampling, index, &[]);
            let p = exact[sampled.token as usize];
            prop_assert!(p > 0.0);
            prop_assert!((f64::from(sampled.sampled_logprob) - p.ln()).abs() < 1e-5);
        }
    }

    #[test]
    fn alternatives_are_the_greatest_in_order(
        row in proptest::collection::vec((-20i32..20).prop_map(|x| x as f32 * 0.5), 1..200),
        n in 0usize..25,
    ) {
        let top = top_logprobs(&row, n);
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
        prop_assert_eq!(top.len(), n.min(row.len()));
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        for (top, id) in top.iter().zip(order) {
            prop_assert_eq!(top.token as usize, id);
            prop_assert!((f64::from(top.logprob) - (f64::from(row[id]) - sum.ln())).abs() < 1e-5);
        }
    }
}

#[test]
fn temperatures_without_an_inverse_take_the_best() {
    let logits = [0.5, -1.0, 2.0, 2.0, 1.0];
    let best = sample_row(&logits, &Sampling::GREEDY, 0, &[]);
    for temperature in [1e-45, 1e-40, -0.0, -1.0, f32::NEG_INFINITY, f32::NAN] {
        let sampling = Sampling {
            temperature,
            ..Sampling::GREEDY
        };
        assert_eq!(sample_row(&logits, &sampling, 0, &[]), best, "{temperature}");
    }
    let hot = Sampling {
        temperature: f32::INFINITY,
        ..Sampling::GREEDY
    };
    let drawn = sample_row(&logits, &hot, 0, &[]);
    assert!((drawn.sampled_logprob - 0.2f32.ln()).abs() < 1e-6, "all alike");
}

/// The weights of more equals than there can be would not fit 64 bits.
#[test]
fn a_row_longer_than_any_vocabulary_is_cut() {
    let logits = vec![0.0; MAX_VOCAB * 4];
    let sampling = Sampling {
        temperature: 1.0,
        ..Sampling::GREEDY
    };
    for index in 0..4 {
        let drawn = sample_row(&logits, &sampling, index, &[]);
        assert!((drawn.token as usize) < MAX_VOCAB);
        assert_eq!(drawn.sampled_logprob, -(MAX_VOCAB as f32).ln());
    }
}
