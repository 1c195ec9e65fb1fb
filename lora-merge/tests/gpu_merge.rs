//! The merge on a device gives the bits of the CPU's merge.
#![cfg(feature = "cuda")]
#![expect(clippy::print_stdout, reason = "the timing test prints what it measured")]

mod common;

use common::Random;
use cuda_graphs::{Compiler, Device, DeviceBuffer, Event, Stream};
use half::bf16;
use lora_merge::cuda::{MergeKernels, MergePlan, MergeTarget, MergeWorkspace, kernel_specs};
use lora_merge::{Error, LowRankTerm, ModuleUpdate, merge_into};

#[test]
fn kernels_compile_for_every_architecture() {
    cuda_graphs::assert_kernels_compile(&kernel_specs());
}

fn open() -> (Stream, MergeKernels, MergeWorkspace) {
    let device = Device::open(0).expect("a CUDA device");
    let kernels = MergeKernels::load(&Compiler::new().expect("NVRTC"), &device).expect("the kernels");
    let workspace = MergeWorkspace::new(&device).expect("a stream");
    (Stream::new(&device).expect("a stream"), kernels, workspace)
}

/// Kinds of terms: f32, bf16 with a power of two, DoRA.
fn term(random: &mut Random, rows: usize, columns: usize, r: usize, kind: usize) -> LowRankTerm {
    let round = |values: Vec<f32>| {
        values
            .iter()
            .map(|v| bf16::from_f32(*v).to_f32())
            .collect::<Vec<_>>()
    };
    let (mut left, mut right) = (random.f32s(rows * r, 0.1), random.f32s(r * columns, 0.2));
    if kind == 1 {
        (left, right) = (round(left), round(right));
    }
    let magnitude = (kind == 2).then(|| random.f32s(rows, 1.0).into());
    LowRankTerm {
        r,
        left: left.into(),
        right: right.into(),
        scaling: if kind == 1 { 0.5 } else { 1.7 },
        magnitude,
    }
}

struct Case {
    name: String,
    w0: Vec<bf16>,
    update: ModuleUpdate,
}

fn case(
    random: &mut Random,
    index: usize,
    rows: usize,
    columns: usize,
    terms: &[(usize, usize)],
    scale: f32,
) -> Case {
    let terms = terms
        .iter()
        .map(|(r, kind)| term(random, rows, columns, *r, *kind))
        .collect();
    Case {
        name: format!("m{index}"),
        w0: random.bf16s(rows * columns, scale),
        update: ModuleUpdate::from_terms(rows, columns, terms).unwrap(),
    }
}

/// Merges all cases in one plan, every output in the middle of poisoned storage, and compares bit for bit.
fn check(cases: &[Case]) {
    let (stream, kernels, mut workspace) = open();
    let pristine: Vec<_> = cases
        .iter()
        .map(|c| DeviceBuffer::from_slice(&stream, &c.w0).unwrap())
        .collect();
    let poison = vec![bf16::from_bits(0x7fc1); cases.iter().map(|c| c.w0.len() + 128).sum()];
    let storage = DeviceBuffer::from_slice(&stream, &poison).unwrap();
    let mut at = 64;
    let mut targets = Vec::new();
    for (case, pristine) in cases.iter().zip(&pristine) {
        targets.push(MergeTarget {
            pristine: pristine.as_slice(),
            merged: storage.slice(at..at + case.w0.len()).unwrap(),
        });
        at += (case.w0.len() + 64).next_multiple_of(8);
    }
    let modules: Vec<(&str, &ModuleUpdate)> = cases.iter().map(|c| (c.name.as_str(), &c.update)).collect();
    // In several plans that are packed together.
    let lists: Vec<_> = modules.chunks(3).collect();
    let mut plans = workspace
        .make_plans(&lists, |plans| {
            let made = targets
                .chunks(3)
                .map(|targets| plans.next(&kernels, &stream, targets));
            let made = made.collect::<Result<Vec<_>, Error>>();
            assert!(
                plans.next(&kernels, &stream, &targets).is_err(),
                "there are no more"
            );
            made
        })
        .unwrap();
    for _ in 0..2 {
        for (plan, targets) in plans.iter_mut().zip(targets.chunks(3)) {
            plan.run(&kernels, &mut workspace, &stream, targets).unwrap();
        }
        let outcomes: Vec<_> = plans.iter().flat_map(|p| p.outcomes(&stream).unwrap()).collect();
        let got = stream.download(&storage).unwrap();
        let mut at = 64;
        assert!(got[..64].iter().all(|v| v.to_bits() == 0x7fc1));
        for (case, outcome) in cases.iter().zip(&outcomes) {
            let mut want = vec![bf16::ZERO; case.w0.len()];
            let expected = merge_into(&case.w0, &case.update, &mut want).unwrap();
            let got = &got[at..];
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{} {:?} element {i}",
                    case.name,
                    case.update.shape()
                );
            }
            assert!(
                got[want.len()..want.len() + 56]
                    .iter()
                    .all(|v| v.to_bits() == 0x7fc1),
                "{} overran",
                case.name
            );
            assert_eq!(outcome.differs_from_base, expected.differs_from_base);
            at += (case.w0.len() + 64).next_multiple_of(8);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_bit_is_that_of_the_cpu() {
    let mut random = Random(1);
    let mut cases = Vec::new();
    for (i, (rows, columns, terms)) in [
        (64, 128, vec![(32, 0)]),
        (1, 8, vec![(1, 0)]),
        (70, 136, vec![(8, 0)]),
        (130, 264, vec![(5, 0), (16, 2)]),
        (1024, 256, vec![(32, 1)]),
        (100, 1000, vec![(3, 1), (17, 1)]),
        (600, 512, vec![(128, 0)]),
        (65, 72, vec![(300, 0)]),
        (40, 136, vec![(600, 0)]),
        (48, 264, vec![(33, 1)]),
        (200, 128, vec![(64, 1)]),
        (96, 128, vec![(40, 2), (9, 0), (20, 2)]),
        (33, 64, vec![]),
        (513, 384, vec![(64, 0), (64, 1)]),
    ]
    .into_iter()
    .enumerate()
    {
        cases.push(case(
            &mut random,
            i,
            rows,
            columns,
            &terms,
            [0.02, 1.0, 1e-30][i % 3],
        ));
    }
    check(&cases);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_shapes_give_the_bits_of_the_cpu() {
    let mut random = Random(2);
    for _ in 0..if cuda_graphs::few_cases() { 3 } else { 20 } {
        let mut cases = Vec::new();
        for i in 0..1 + random.below(6) {
            let (rows, columns) = (1 + random.below(300), 8 * (1 + random.below(80)));
            let terms: Vec<_> = (0..random.below(4))
                .map(|_| (1 + random.below(80), random.below(3)))
                .collect();
            let scale = [0.0, 1e-3, 0.02, 1e20][random.below(4)];
            cases.push(case(&mut random, i, rows, columns, &terms, scale));
        }
        cases.retain(|c| {
            !c.w0.iter().all(|w| *w == bf16::ZERO) || c.update.terms().iter().all(|t| t.magnitude.is_none())
        });
        check(&cases);
    }
}

/// Shapes and ranks that every kernel takes: of few ranks, of more than a stage, of warpgroups.
const SHAPES: [(usize, usize, usize); 4] = [(19, 152, 3), (70, 128, 24), (130, 264, 48), (65, 136, 320)];

fn one_term(rows: usize, columns: usize, w0: Vec<bf16>, term: LowRankTerm) -> Case {
    Case {
        name: format!("{rows} x {columns}, rank {}", term.r),
        w0,
        update: ModuleUpdate::from_terms(rows, columns, vec![term]).unwrap(),
    }
}

/// A gain scales rows that have no products as well: B is 0 there, or of rank 0.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn magnitudes_scale_rows_without_products() {
    let mut random = Random(17);
    let mut cases = Vec::new();
    for (rows, columns, r) in SHAPES.into_iter().chain([(12, 128, 0), (3, 8, 0)]) {
        let w0 = random.bf16s(rows * columns, 0.1);
        let mut term = term(&mut random, rows, columns, r, 2);
        let mut left = term.left.to_vec();
        left.iter_mut().take(6 * r).for_each(|l| *l = 0.0);
        term.left = left.into();
        cases.push(one_term(rows, columns, w0, term));
    }
    check(&cases);
}

/// f32 has no relative precision for these gains, or no value at all. Their products with weights are ordinary numbers.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gains_that_f32_cannot_hold() {
    let mut random = Random(19);
    let mut cases = Vec::new();
    for (rows, columns, r) in SHAPES {
        for (weights, magnitude) in [(1e37, 1e-4), (3e-40, 1.0)] {
            let w0 = random.bf16s(rows * columns, weights);
            let mut term = term(&mut random, rows, columns, r, 2);
            // Products of the size of the weights.
            term.scaling = f64::from(weights) * 1e-3;
            term.magnitude = Some(random.f32s(rows, magnitude).into());
            cases.push(one_term(rows, columns, w0, term));
        }
    }
    check(&cases);
}

/// Beyond what f16 holds with any power of two: the greatest factors with sums that cancel; scalings that vanish in f32 beside
/// factors that make up for it; factors of a row, and weights that are as great as their products.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn factors_and_scalings_at_the_ends_of_f32() {
    let mut random = Random(23);
    let mut cases = Vec::new();
    for (rows, columns, r) in SHAPES {
        let mut add = |left: f32, right: f32, scaling: f64, cancel: bool| {
            let sign = |k: usize| if cancel && k >= r / 2 { -0.95 } else { 0.95 };
            let lefts = (0..rows * r).map(|_| left * (0.9 + 0.1 * random.unit()));
            let lefts: Vec<f32> = lefts.collect();
            let rights = (0..r * columns).map(|i| right * (sign(i / columns) + 0.02 * random.unit()));
            let rights: Vec<f32> = rights.collect();
            let product = f64::from(left) * f64::from(right) * scaling;
            let w0 = random.bf16s(rows * columns, product as f32);
            let term = LowRankTerm {
                r,
                left: lefts.into(),
                right: rights.into(),
                scaling,
                magnitude: None,
            };
            cases.push(one_term(rows, columns, w0, term));
        };
        add(2f32.powi(-30), f32::MAX, 0.1, true);
        add(f32::MAX, 1e-30, 1e-9, true);
        add(1e31, 1e4, 1.0, false);
        add(1e30, 1e-25, 1e-30, false);
        add(1e20, 1e-25, 1e-14, false);
        add(1e-40, 1e35, 1.0, false);
    }
    check(&cases);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn nan_in_a_factor_is_an_error_whatever_its_bits() {
    let (stream, kernels, mut workspace) = open();
    for (bits, in_left, (rows, columns, r)) in [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0xffff_ffff]
        .into_iter()
        .flat_map(|bits| [false, true].map(|in_left| (bits, in_left)))
        .flat_map(|(bits, in_left)| SHAPES.map(|shape| (bits, in_left, shape)))
    {
        let (mut left, mut right) = (vec![1.0; rows * r], vec![1.0; r * columns]);
        let factor = if in_left { &mut left } else { &mut right };
        factor[if in_left { r } else { 1 }] = f32::from_bits(bits);
        let term = LowRankTerm {
            r,
            left: left.into(),
            right: right.into(),
            scaling: 1.0,
            magnitude: None,
        };
        let case = one_term(rows, columns, vec![bf16::ONE; rows * columns], term);
        let pristine = DeviceBuffer::from_slice(&stream, &case.w0).unwrap();
        let merged = DeviceBuffer::from_slice(&stream, &case.w0).unwrap();
        let targets = [MergeTarget {
            pristine: pristine.as_slice(),
            merged: merged.as_slice(),
        }];
        let modules = [(case.name.as_str(), &case.update)];
        let mut plan = MergePlan::new(&kernels, &mut workspace, &stream, &modules, &targets).unwrap();
        plan.run(&kernels, &mut workspace, &stream, &targets).unwrap();
        let error = plan.outcomes(&stream).unwrap_err();
        let Error::MergedNotFinite { row, column, .. } = error else {
            panic!("{error}")
        };
        let first = if in_left { (1, 0) } else { (0, 1) };
        assert_eq!((row, column), first, "{bits:x}, {}", case.name);
        let got = stream.download(&merged).unwrap();
        assert!(got[first.0 * columns + first.1].is_nan());
    }
}

/// As on the CPU: what no term touches stays as it is, be it finite or not, and whatever the other factors are.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_without_products_stay_as_they_are() {
    let mut random = Random(29);
    let mut cases = Vec::new();
    for (rows, columns, r) in SHAPES {
        for scaling in [1.5, 0.0] {
            let mut w0 = random.bf16s(rows * columns, 0.1);
            let special = [f32::NAN, f32::INFINITY, -0.0, f32::NEG_INFINITY, 0.0];
            for (w, special) in w0.iter_mut().skip(columns + 2).zip(special) {
                *w = bf16::from_f32(special);
            }
            let mut term = term(&mut random, rows, columns, r, 0);
            let (mut left, mut right) = (term.left.to_vec(), term.right.to_vec());
            left[r..2 * r].fill(0.0);
            left[2 * r..3 * r].fill(-0.0);
            if scaling == 0.0 {
                right[5] = f32::NEG_INFINITY;
                right[7] = f32::NAN;
            }
            (term.left, term.right, term.scaling) = (left.into(), right.into(), scaling);
            cases.push(one_term(rows, columns, w0, term));
        }
    }
    check(&cases);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn overflow_is_reported_and_the_former_plan_restores_the_former_bits() {
    let (stream, kernels, mut workspace) = open();
    let mut random = Random(3);
    let good = case(&mut random, 0, 64, 128, &[(8, 0)], 0.02);
    let mut huge = good.update.terms()[0].clone();
    huge.scaling = 1e41;
    let huge = ModuleUpdate::from_terms(64, 128, vec![huge]).unwrap();
    let pristine = DeviceBuffer::from_slice(&stream, &good.w0).unwrap();
    let merged = DeviceBuffer::from_slice(&stream, &good.w0).unwrap();
    let targets = [MergeTarget {
        pristine: pristine.as_slice(),
        merged: merged.as_slice(),
    }];
    let mut plan = MergePlan::new(
        &kernels,
        &mut workspace,
        &stream,
        &[("m", &good.update)],
        &targets,
    )
    .unwrap();
    plan.run(&kernels, &mut workspace, &stream, &targets).unwrap();
    plan.outcomes(&stream).unwrap();
    let before = stream.download(&merged).unwrap();
    let mut bad = MergePlan::new(&kernels, &mut workspace, &stream, &[("m", &huge)], &targets).unwrap();
    bad.run(&kernels, &mut workspace, &stream, &targets).unwrap();
    assert!(matches!(
        bad.outcomes(&stream),
        Err(Error::MergedNotFinite { .. })
    ));
    plan.run(&kernels, &mut workspace, &stream, &targets).unwrap();
    assert_eq!(stream.download(&merged).unwrap(), before);
    assert_eq!(stream.download(&pristine).unwrap(), good.w0);
    // Targets that do not fit are refused before anything is written.
    let short = [MergeTarget {
        pristine: pristine.as_slice(),
        merged: merged.slice(8..).unwrap(),
    }];
    assert!(plan.run(&kernels, &mut workspace, &stream, &short).is_err());
    let dora = LowRankTerm {
        magnitude: Some(vec![1.0; 64].into()),
        left: vec![0.0; 512].into(),
        ..good.update.terms()[0].clone()
    };
    let dora = ModuleUpdate::from_terms(64, 128, vec![dora]).unwrap();
    let zeros = DeviceBuffer::<bf16>::zeroed(stream.device(), 64 * 128).unwrap();
    let targets = [MergeTarget {
        pristine: zeros.as_slice(),
        merged: merged.as_slice(),
    }];
    let error = MergePlan::new(&kernels, &mut workspace, &stream, &[("m", &dora)], &targets).unwrap_err();
    assert!(matches!(error, Error::ZeroNorm { row: 0, .. }), "{error}");
}

/// Time of a refresh of Qwen3-4B's shape with all seven projections adapted. Prints; asserts the first row's bits.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn refresh_time_of_a_4b_model() {
    let (stream, kernels, mut workspace) = open();
    const LAYERS: usize = 36;
    let shapes = [
        (4096, 2560),
        (1024, 2560),
        (1024, 2560),
        (2560, 4096),
        (9728, 2560),
        (9728, 2560),
        (2560, 9728),
    ];
    let mut random = Random(4);
    // The layers share host values; on the device each has its own.
    let host: Vec<Vec<bf16>> = shapes.iter().map(|(r, c)| random.bf16s(r * c, 0.035)).collect();
    let upload = || -> Vec<DeviceBuffer<bf16>> {
        (0..LAYERS)
            .flat_map(|_| host.iter().map(|w| DeviceBuffer::from_slice(&stream, w).unwrap()))
            .collect()
    };
    let (pristine, merged) = (upload(), upload());
    let targets: Vec<_> = pristine
        .iter()
        .zip(&merged)
        .map(|(p, m)| MergeTarget {
            pristine: p.as_slice(),
            merged: m.as_slice(),
        })
        .collect();
    for (rank, stored) in [(32, 0), (128, 0), (32, 1), (128, 1), (8, 0)] {
        // A as PEFT initialises it, B after some training: a delta of a few per cent of the weights.
        let updates: Vec<ModuleUpdate> = shapes
            .iter()
            .map(|(rows, columns)| {
                let mut t = term(&mut random, *rows, *columns, rank, stored);
                let scale =
                    |values: &[f32], by: f32| values.iter().map(|v| v * by).collect::<Vec<f32>>().into();
                // Powers of two keep bf16 values.
                t.left = scale(&t.left, 1.0 / 64.0);
                t.right = scale(&t.right, 1.0 / 8.0);
                t.scaling = 2.0;
                ModuleUpdate::from_terms(*rows, *columns, vec![t]).unwrap()
            })
            .collect();
        // Each layer's factors lie in memory of their own.
        let own = |values: &[f32]| values.to_vec().into();
        let updates_of_all: Vec<ModuleUpdate> = (0..LAYERS)
            .flat_map(|_| &updates)
            .map(|update| {
                let mut term = update.terms()[0].clone();
                (term.left, term.right) = (own(&term.left), own(&term.right));
                ModuleUpdate::from_terms(update.shape().0, update.shape().1, vec![term]).unwrap()
            })
            .collect();
        let modules: Vec<(&str, &ModuleUpdate)> = updates_of_all.iter().map(|u| ("m", u)).collect();
        let mut plan = MergePlan::new(&kernels, &mut workspace, &stream, &modules, &targets).unwrap();
        let mut times = Vec::new();
        for _ in 0..6 {
            let (begin, end) = (
                Event::new(stream.device()).unwrap(),
                Event::new(stream.device()).unwrap(),
            );
            stream.record(&begin).unwrap();
            plan.run(&kernels, &mut workspace, &stream, &targets).unwrap();
            stream.record(&end).unwrap();
            end.synchronize().unwrap();
            times.push(begin.elapsed_ms(&end).unwrap());
        }
        let recomputed: u64 = plan.outcomes(&stream).unwrap().iter().map(|o| o.recomputed).sum();
        let elements: usize = targets.iter().map(|t| t.pristine.len()).sum();
        times.remove(0);
        times.sort_by(f32::total_cmp);
        println!(
            "rank {rank:3} {}: kernels {:.2} ms (best {:.2}), {:.3} % in f64",
            ["f32 ", "bf16"][stored],
            times[times.len() / 2],
            times[0],
            100.0 * recomputed as f64 / elements as f64
        );
        workspace.recycle(plan);
        // The whole refresh: packing, upload and merge, some layers at a time, so that they overlap.
        for (name, layers) in [
            ("1, 2, 3, 4, 4, …", vec![1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 2]),
            ("4", vec![4; 9]),
        ] {
            let mut end = 0;
            let ranges = layers.iter().map(|n| {
                end += n * shapes.len();
                end - n * shapes.len()..end
            });
            let ranges: Vec<_> = ranges.collect();
            let lists: Vec<_> = ranges.iter().map(|r| &modules[r.clone()]).collect();
            let mut times = Vec::new();
            for _ in 0..8 {
                let start = std::time::Instant::now();
                let plans = workspace.make_plans(&lists, |plans| {
                    let each = ranges.iter().map(|range| {
                        let targets = &targets[range.clone()];
                        let mut plan = plans.next(&kernels, &stream, targets)?;
                        plan.run(&kernels, plans.workspace(), &stream, targets)?;
                        Ok(plan)
                    });
                    each.collect::<Result<Vec<_>, Error>>()
                });
                let plans = plans.unwrap();
                let queued = start.elapsed();
                for plan in &plans {
                    plan.outcomes(&stream).unwrap();
                }
                times.push((start.elapsed(), queued));
                plans.into_iter().for_each(|plan| workspace.recycle(plan));
            }
            times.remove(0);
            times.sort();
            let (total, queued) = times[times.len() / 2];
            println!(
                "    {name} layers at a time: {total:.2?} with packing and upload (best {:.2?}, queued in {queued:.2?})",
                times[0].0
            );
            workspace.trim();
        }
        // All layers have the same weights and factors: what one has, all have.
        let k_proj = |layer: usize| stream.download(targets[7 * layer + 1].merged).unwrap();
        let first = k_proj(0);
        for layer in 1..LAYERS {
            assert!(k_proj(layer) == first, "k_proj of layer {layer}");
        }
        let mut want = vec![bf16::ZERO; host[0].len()];
        merge_into(&host[0], &updates[0], &mut want).unwrap();
        assert_eq!(
            stream.download(targets[7 * 35].merged).unwrap(),
            want,
            "q_proj of the last layer"
        );
    }
}
