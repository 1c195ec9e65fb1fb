//! The fast merge against the formula, element by element.

mod common;

use common::{Random, oracle, rounded};
use half::bf16;
use lora_merge::{Error, LowRankTerm, ModuleUpdate, bf16_from_f64, merge_into};
use proptest::prelude::*;

fn term(random: &mut Random, rows: usize, columns: usize, r: usize, dora: bool) -> LowRankTerm {
    LowRankTerm {
        r,
        left: random.f32s(rows * r, 0.1).into(),
        right: random.f32s(r * columns, 0.5).into(),
        scaling: f64::from(random.unit()) * 3.0,
        magnitude: dora.then(|| random.f32s(rows, 1.0).into()),
    }
}

/// Merges on NaN-poisoned output and checks every element; the merged weight.
fn check(w0: &[bf16], update: &ModuleUpdate) -> Vec<bf16> {
    let mut out = vec![bf16::NAN; w0.len()];
    let outcome = merge_into(w0, update, &mut out).unwrap();
    let exact = oracle(w0, update);
    for (i, (got, exact)) in out.iter().zip(&exact).enumerate() {
        // Two f64 sums in another order may fall on two sides of a tie.
        assert!(rounded(*got, *exact, 1e-8), "element {i}: {got:?} for {exact:e}");
    }
    assert_eq!(
        outcome.differs_from_base,
        out.iter().zip(w0).any(|(a, b)| a.to_bits() != b.to_bits())
    );
    assert!(w0.is_empty() || outcome.changed, "NaN was overwritten");
    let again = merge_into(w0, update, &mut out).unwrap();
    assert!(!again.changed, "the same merge again changes nothing");
    out
}

proptest! {
    #[test]
    fn every_element_is_correctly_rounded(
        rows in 0usize..110, columns in 0usize..300, ranks in proptest::collection::vec((1usize..70, any::<bool>()), 0..4),
        scale in prop::sample::select(vec![1e-30f32, 1e-3, 0.02, 1.0, 1e30]), seed: u64,
    ) {
        let mut random = Random(seed);
        let w0 = random.bf16s(rows * columns, scale);
        let dora = columns > 0;
        let terms = ranks.iter().map(|(r, d)| term(&mut random, rows, columns, *r, *d && dora)).collect();
        check(&w0, &ModuleUpdate::from_terms(rows, columns, terms).unwrap());
    }

    #[test]
    fn cancelling_terms_leave_the_base(rows in 1usize..20, columns in 1usize..40, r in 1usize..40, seed: u64) {
        let mut random = Random(seed);
        let w0 = random.bf16s(rows * columns, 0.02);
        let plus = term(&mut random, rows, columns, r, false);
        let minus = LowRankTerm { scaling: -plus.scaling, ..plus.clone() };
        let update = ModuleUpdate::from_terms(rows, columns, vec![plus, minus]).unwrap();
        prop_assert_eq!(check(&w0, &update), w0);
    }

    #[test]
    fn rows_without_any_term_keep_their_weights(
        rows in 1usize..20, columns in 1usize..70, r in 1usize..20, without: u32, seed: u64,
    ) {
        let mut random = Random(seed);
        let w0 = random.bf16s(rows * columns, 0.02);
        let mut term = term(&mut random, rows, columns, r, false);
        let mut left = term.left.to_vec();
        let is_without = |row: usize| without >> row & 1 == 1;
        for (row, left) in left.chunks_mut(r).enumerate().filter(|(row, _)| is_without(*row)) {
            left.fill(if row % 2 == 0 { 0.0 } else { -0.0 });
        }
        term.left = left.into();
        let merged = check(&w0, &ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap());
        for (row, (merged, w0)) in merged.chunks(columns).zip(w0.chunks(columns)).enumerate() {
            prop_assert!(!is_without(row) || merged == w0, "row {row}");
        }
    }
}

#[test]
fn large_and_deep_matrices() {
    let mut random = Random(7);
    for (rows, columns, r) in [(200, 1030, 128), (97, 513, 33), (6, 4096, 300), (1, 1, 1)] {
        let w0 = random.bf16s(rows * columns, 0.05);
        let terms = vec![term(&mut random, rows, columns, r, false)];
        check(&w0, &ModuleUpdate::from_terms(rows, columns, terms).unwrap());
    }
}

/// Sums that lie on or next to a tie: W₀ = 1, Δ = 2⁻⁸ (half the distance to the next bf16) ± a little.
#[test]
fn sums_on_a_tie_and_next_to_it() {
    for wiggle in [
        0.0,
        2f32.powi(-30),
        -(2f32.powi(-30)),
        2f32.powi(-45),
        -(2f32.powi(-45)),
    ] {
        let right: Vec<f32> = [2f32.powi(-8), wiggle].iter().flat_map(|v| [*v; 40]).collect();
        let update = ModuleUpdate::from_terms(
            1,
            40,
            vec![LowRankTerm {
                r: 2,
                left: vec![1.0, 1.0].into(),
                right: right.into(),
                scaling: 1.0,
                magnitude: None,
            }],
        );
        let mut out = vec![bf16::ZERO; 40];
        let outcome = merge_into(&[bf16::ONE; 40], &update.unwrap(), &mut out).unwrap();
        let want = bf16_from_f64(1.0 + 2f64.powi(-8) + f64::from(wiggle));
        assert_eq!(want.to_f64() > 1.0, wiggle > 0.0);
        assert_eq!(out, [want; 40], "{wiggle:e}");
        assert_eq!(outcome.recomputed, 40, "f32 cannot decide these");
    }
}

/// A gain scales rows that have no products as well: B is 0 there, or of rank 0.
#[test]
fn magnitudes_scale_rows_without_products() {
    let mut random = Random(17);
    for (rows, columns, r) in [(19, 150, 3), (12, 128, 0), (3, 5, 0)] {
        let w0 = random.bf16s(rows * columns, 0.1);
        let mut term = term(&mut random, rows, columns, r, true);
        let mut left = term.left.to_vec();
        left.iter_mut().take(6 * r).for_each(|l| *l = 0.0);
        term.left = left.into();
        check(&w0, &ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap());
    }
}

/// f32 has no relative precision for these gains.
#[test]
fn gains_that_are_subnormal_in_f32() {
    let mut random = Random(19);
    for (rows, columns, r) in [(12, 128, 2), (3, 21, 1)] {
        let w0 = random.bf16s(rows * columns, 1e37);
        let mut term = term(&mut random, rows, columns, r, true);
        term.magnitude = Some(random.f32s(rows, 1e-4).into());
        check(&w0, &ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap());
    }
}

/// The norm of such columns is greater than any f32. Sums that grow and cancel leave large errors behind.
#[test]
fn factors_next_to_the_greatest_f32() {
    let mut random = Random(23);
    let (rows, columns, r) = (13, 144, 96);
    let tiny = 2f32.powi(-30);
    let left: Vec<f32> = (0..rows * r)
        .map(|_| tiny * (1.0 + 1e-3 * random.unit()))
        .collect();
    let sign = |k: usize| if k < r / 2 { 0.95 } else { -0.95 };
    let right = |i: usize| f32::MAX * (sign(i / columns) + 0.02 * random.unit());
    let right: Vec<f32> = (0..r * columns).map(right).collect();
    let w0 = random.bf16s(rows * columns, 0.1 * f32::MAX * tiny);
    let term = LowRankTerm {
        r,
        left: left.into(),
        right: right.into(),
        scaling: 1.0,
        magnitude: None,
    };
    check(&w0, &ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap());
}

#[test]
fn nan_in_a_factor_is_an_error_whatever_its_bits() {
    for bits in [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0xffff_ffff] {
        for (rows, columns) in [(12, 128), (12, 16), (2, 5)] {
            for in_left in [false, true] {
                let (mut left, mut right) = (vec![1.0; rows], vec![1.0; columns]);
                let factor = if in_left { &mut left } else { &mut right };
                factor[1] = f32::from_bits(bits);
                let term = LowRankTerm {
                    r: 1,
                    left: left.into(),
                    right: right.into(),
                    scaling: 1.0,
                    magnitude: None,
                };
                let update = ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap();
                let mut out = vec![bf16::ZERO; rows * columns];
                let error = merge_into(&vec![bf16::ONE; rows * columns], &update, &mut out).unwrap_err();
                let first = if in_left { (1, 0) } else { (0, 1) };
                let Error::MergedNotFinite { row, column, .. } = error else {
                    panic!("{error}")
                };
                assert_eq!((row, column), first, "{bits:x}");
                assert!(out[first.0 * columns + first.1].is_nan());
            }
        }
    }
}

#[test]
fn zero_updates_and_zero_weights() {
    let mut random = Random(3);
    let mut w0 = random.bf16s(50 * 70, 0.1);
    w0[..100].fill(bf16::ZERO);
    w0[7] = bf16::NEG_ZERO;
    w0[3000] = bf16::NEG_ZERO;
    let mut zero = term(&mut random, 50, 70, 8, false);
    zero.left = vec![0.0; 50 * 8].into();
    let update = ModuleUpdate::from_terms(50, 70, vec![zero]).unwrap();
    let mut out = w0.clone();
    let outcome = merge_into(&w0, &update, &mut out).unwrap();
    assert!(!outcome.changed && !outcome.differs_from_base && outcome.recomputed == 0);
    let bits = |w: &[bf16]| w.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&out), bits(&w0));
    let terms = vec![term(&mut random, 50, 70, 8, false)];
    check(&w0, &ModuleUpdate::from_terms(50, 70, terms).unwrap());
}

#[test]
fn a_sum_that_overflows_only_in_f32_is_right_and_a_real_overflow_is_an_error() {
    let update = |scaling: f64| {
        let left: Vec<f32> = vec![1e20, -1e20];
        let right: Vec<f32> = [vec![1e20; 20], vec![1e20; 20]].concat();
        ModuleUpdate::from_terms(
            1,
            20,
            vec![
                LowRankTerm {
                    r: 2,
                    left: left.into(),
                    right: right.into(),
                    scaling: 1.0,
                    magnitude: None,
                },
                LowRankTerm {
                    r: 1,
                    left: vec![1e20].into(),
                    right: vec![1e20; 20].into(),
                    scaling,
                    magnitude: None,
                },
            ],
        )
        .unwrap()
    };
    let mut out = vec![bf16::ZERO; 20];
    merge_into(&[bf16::ONE; 20], &update(1e-40), &mut out).unwrap();
    assert_eq!(out, [bf16_from_f64(2.0); 20]);
    let error = merge_into(&[bf16::ONE; 20], &update(1.0), &mut out).unwrap_err();
    assert!(
        matches!(
            error,
            Error::MergedNotFinite {
                row: 0,
                column: 0,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let mut random = Random(11);
    let w0 = random.bf16s(500 * 300, 0.02);
    let terms = vec![
        term(&mut random, 500, 300, 16, false),
        term(&mut random, 500, 300, 5, true),
    ];
    let update = ModuleUpdate::from_terms(500, 300, terms).unwrap();
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let mut out = vec![bf16::ZERO; w0.len()];
        pool.install(|| merge_into(&w0, &update, &mut out)).unwrap();
        out
    };
    let one = with(1);
    for threads in [2, 3, 8] {
        assert_eq!(one, with(threads));
    }
}

#[test]
fn wrong_lengths_and_zero_norms_are_errors() {
    let mut random = Random(5);
    let good = term(&mut random, 4, 6, 2, false);
    for bad in [
        LowRankTerm {
            left: vec![0.0; 7].into(),
            ..good.clone()
        },
        LowRankTerm {
            right: vec![0.0; 13].into(),
            ..good.clone()
        },
        LowRankTerm {
            magnitude: Some(vec![1.0; 3].into()),
            ..good.clone()
        },
        LowRankTerm {
            r: usize::MAX,
            ..good.clone()
        },
    ] {
        assert!(matches!(
            ModuleUpdate::from_terms(4, 6, vec![bad]),
            Err(Error::Length { .. })
        ));
    }
    let update = ModuleUpdate::from_terms(4, 6, vec![good.clone()]).unwrap();
    let mut out = [bf16::ZERO; 24];
    assert!(matches!(
        merge_into(&[bf16::ONE; 23], &update, &mut out),
        Err(Error::Length { .. })
    ));
    assert!(matches!(
        merge_into(&[bf16::ONE; 24], &update, &mut out[1..]),
        Err(Error::Length { .. })
    ));
    let dora = LowRankTerm {
        left: vec![0.0; 8].into(),
        magnitude: Some(vec![1.0; 4].into()),
        ..good
    };
    let update = ModuleUpdate::from_terms(4, 6, vec![dora]).unwrap();
    let mut w0 = [bf16::ONE; 24];
    w0[12..18].fill(bf16::ZERO);
    assert!(matches!(
        merge_into(&w0, &update, &mut out),
        Err(Error::ZeroNorm { row: 2, .. })
    ));
}

#[test]
fn shapes_without_elements_and_shapes_that_overflow() {
    let empty = |r: usize, rows: usize, dora: bool| LowRankTerm {
        r,
        left: vec![0.5; rows * r].into(),
        right: vec![].into(),
        scaling: 1.0,
        magnitude: dora.then(|| vec![1.0; rows].into()),
    };
    for (r, rows, dora) in [(0, 3, true), (0, 3, false), (2, 0, true), (2, 3, false)] {
        let update = ModuleUpdate::from_terms(rows, 0, vec![empty(r, rows, dora)]).unwrap();
        let unmerged = update.unmerged(Some(&[]));
        if dora && rows > 0 {
            assert!(
                matches!(unmerged, Err(Error::ZeroNorm { row: 0, .. })),
                "rank {r}"
            );
            assert!(matches!(
                merge_into(&[], &update, &mut []),
                Err(Error::ZeroNorm { .. })
            ));
        } else {
            assert_eq!(unmerged.unwrap().b.len(), rows * r);
            assert!(!merge_into(&[], &update, &mut []).unwrap().changed);
        }
    }
    let huge = ModuleUpdate::from_terms(1 << 40, 1 << 40, vec![]).unwrap();
    assert!(matches!(
        merge_into(&[], &huge, &mut []),
        Err(Error::Length { .. })
    ));
}

#[test]
fn what_f32_cannot_hold_is_an_error_at_run_time_too() {
    let term = LowRankTerm {
        r: 2,
        left: vec![0.0, 1.0, 1.0, 3e38].into(),
        right: vec![1.0, 2.0].into(),
        scaling: 4.0,
        magnitude: None,
    };
    let update = ModuleUpdate::from_terms(2, 1, vec![term.clone()]).unwrap();
    assert!(matches!(
        update.unmerged(None),
        Err(Error::FactorNotFinite {
            factor: "lora_B",
            row: 1,
            column: 1,
            format: "f32",
            ..
        })
    ));
    let gain = LowRankTerm {
        left: vec![0.0; 4].into(),
        magnitude: Some(vec![1.0, 3e38].into()),
        ..term
    };
    let update = ModuleUpdate::from_terms(2, 1, vec![gain]).unwrap();
    let small = [bf16::ONE, bf16::from_f32(1e-3)];
    assert!(matches!(
        update.unmerged(Some(&small)),
        Err(Error::FactorNotFinite {
            factor: "gain",
            row: 1,
            column: 0,
            format: "f32",
            ..
        })
    ));
}

/// PEFT's forward pass with several DoRA adapters: each norm over the unmerged weight.
#[test]
fn unmerged_and_merged_agree() {
    let mut random = Random(13);
    let (rows, columns) = (30, 50);
    let w0 = random.bf16s(rows * columns, 0.1);
    let terms = vec![
        term(&mut random, rows, columns, 4, true),
        term(&mut random, rows, columns, 3, false),
        term(&mut random, rows, columns, 5, true),
    ];
    let update = ModuleUpdate::from_terms(rows, columns, terms).unwrap();
    let exact = oracle(&w0, &update);
    let unmerged = update.unmerged(Some(&w0)).unwrap();
    assert_eq!(unmerged.rank, 12);
    let gain = unmerged.gain.as_ref().unwrap();
    let x = random.f32s(columns, 1.0);
    for o in 0..rows {
        let dot = |row: &[f32]| {
            row.iter()
                .zip(&x)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum::<f64>()
        };
        let base: Vec<f32> = w0[o * columns..][..columns].iter().map(|w| w.to_f32()).collect();
        let low: f64 = (0..unmerged.rank)
            .map(|k| {
                f64::from(unmerged.b[o * unmerged.rank + k]) * dot(&unmerged.a[k * columns..][..columns])
            })
            .sum();
        let got = f64::from(gain[o]) * dot(&base) + low;
        let want: f64 = exact[o * columns..][..columns]
            .iter()
            .zip(&x)
            .map(|(w, x)| w * f64::from(*x))
            .sum();
        assert!((got - want).abs() < 1e-5 * (1.0 + want.abs()), "{got} {want}");
    }
    assert!(matches!(
        update.unmerged(None),
        Err(Error::Module {
            field: "use_dora",
            ..
        })
    ));
}
