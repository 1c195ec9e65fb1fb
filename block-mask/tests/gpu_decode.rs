//! Decode attention against f64, by the ≤ 2× rule, and its invariances.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{CudaError, DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions};
use block_mask::{MaskMod, ScoreMod, alibi_slopes};
use cuda_graphs::{Capture, DeviceBuffer};
use gpu_common::{Errors, Gpu, Placed, Random, Sequences, bits, gpu};
use half::bf16;

/// Row `i` asks sequence `of[i]` with its first `lens[i]` tokens; `None` is a padded row.
struct Rows {
    of: Vec<Option<usize>>,
    lens: Vec<usize>,
    q: Vec<bf16>,
}

struct Setup {
    group: usize,
    window: Option<usize>,
    options: DecodeOptions,
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
}

impl Setup {
    fn plain(group: usize, gpu: &Gpu, sequences: &Sequences) -> Setup {
        let options = DecodeOptions::for_device(gpu.device.info(), &sequences.shape(group));
        Setup {
            group,
            window: None,
            options,
            mask: None,
            score: None,
        }
    }

    fn attention(
        &self,
        gpu: &Gpu,
        sequences: &Sequences,
        max_rows: usize,
    ) -> Result<DecodeAttention, CudaError> {
        let config = sequences.config();
        let limits = DecodeLimits {
            max_rows,
            n_slots: config.n_slots,
            max_pages_per_slot: config.max_pages_per_slot,
        };
        let functions = Functions::new(&gpu.stream, self.mask.as_ref(), self.score.as_ref())?;
        let shape = sequences.shape(self.group);
        DecodeAttention::new(
            &gpu.device,
            &gpu.compiler,
            shape,
            limits,
            self.window,
            None,
            functions,
            self.options,
        )
    }
}

fn row_elements(setup: &Setup, sequences: &Sequences) -> usize {
    setup.group * sequences.kv_heads * sequences.head_dim
}

fn random_rows(random: &mut Random, setup: &Setup, sequences: &Sequences, n: usize) -> Rows {
    let mut sequence: Vec<usize> = (0..sequences.lens.len()).collect();
    random.shuffle(&mut sequence);
    let of: Vec<Option<usize>> = (0..n)
        .map(|i| (random.below(6) > 0 && i < sequence.len()).then(|| sequence[i]))
        .collect();
    let lens = of
        .iter()
        .map(|of| of.map_or(random.below(9999), |i| sequences.lens[i]))
        .collect();
    let q = random.values(n * row_elements(setup, sequences));
    Rows { of, lens, q }
}

/// Output and log-sum-exp on poisoned buffers; run twice, since counters must be left as they were found, the second time with
/// an early start.
fn run(
    gpu: &Gpu,
    attention: &DecodeAttention,
    sequences: &Sequences,
    placed: &Placed,
    rows: &Rows,
) -> (Vec<bf16>, Vec<f32>) {
    let stream = &gpu.stream;
    let n = rows.of.len();
    let elements = rows.q.len() / n;
    let slots: Vec<i32> = rows
        .of
        .iter()
        .map(|of| of.map_or(0, |i| placed.slots[i].index() as i32))
        .collect();
    let positions: Vec<i32> = rows.lens.iter().map(|&len| len as i32 - 1).collect();
    let slots = DeviceBuffer::from_slice(stream, &slots).unwrap();
    let positions = DeviceBuffer::from_slice(stream, &positions).unwrap();
    let q = DeviceBuffer::from_slice(stream, &rows.q).unwrap();
    let heads = elements / sequences.head_dim;
    let mut previous: Option<(Vec<bf16>, Vec<f32>)> = None;
    for early in [false, true] {
        let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, rows.q.len(), 0xff).unwrap();
        let lse = DeviceBuffer::<f32>::filled_with_bytes(&gpu.device, n * heads, 0xff).unwrap();
        let args = DecodeArgs {
            q: q.as_slice(),
            q_row_stride: elements,
            k: placed.k.as_slice(),
            v: placed.v.as_slice(),
            page_table: placed.rows.as_slice(),
            out: out.as_slice(),
            lse: Some(lse.as_slice()),
        };
        let plan = attention
            .plan(stream, slots.as_slice(), positions.as_slice(), 1)
            .unwrap();
        plan.early(early).run(stream, &args).unwrap();
        let result = (stream.download(&out).unwrap(), stream.download(&lse).unwrap());
        if let Some((out, _)) = &previous {
            assert_eq!(
                bits(out),
                bits(&result.0),
                "the second run differs from the first"
            );
        }
        previous = Some(result);
    }
    previous.unwrap()
}

fn compare(setup: &Setup, sequences: &Sequences, rows: &Rows, out: &[bf16], lse: &[f32], what: &str) {
    let (d, heads) = (sequences.head_dim, setup.group * sequences.kv_heads);
    let scale = 1.0 / (d as f32).sqrt();
    let mut errors = Errors::default();
    for (row, of) in rows.of.iter().enumerate() {
        for h in 0..heads {
            let at = row * heads + h;
            let got = &out[at * d..(at + 1) * d];
            let Some(i) = *of else {
                assert!(
                    got.iter().all(|x| x.to_bits() == 0),
                    "{what}: padded row {row} is not 0"
                );
                assert_eq!(lse[at], f32::NEG_INFINITY, "{what}: padded row {row}");
                continue;
            };
            let position = sequences.lens[i] - 1;
            let score = |score: f32, kv: usize| {
                let in_window = setup.window.is_none_or(|window| position < kv + window);
                let allowed = setup
                    .mask
                    .as_ref()
                    .is_none_or(|mask| mask.allows(row, h, position, kv));
                let modified = setup
                    .score
                    .as_ref()
                    .map_or(score, |f| f.eval(score, row, h, position, kv));
                (in_window && allowed).then_some(modified)
            };
            let q = &rows.q[at * d..(at + 1) * d];
            let answer = sequences.attend(i, h / setup.group, q, scale, &score);
            errors.add(
                &format!("{what}, row {row}, head {h}"),
                got,
                Some(lse[at]),
                &answer,
            );
        }
    }
    if rows.of.iter().any(Option::is_some) {
        errors.check(what);
    }
}

fn random_lens(random: &mut Random, page_size: usize) -> Vec<usize> {
    let n = random.within(1, 6);
    let mut lens: Vec<usize> = (0..n).map(|_| random.within(1, 700)).collect();
    // Lengths at the edges of pages and granules, where masks and look-ups change over.
    lens[0] = random.pick(&[
        1,
        15,
        16,
        17,
        page_size,
        page_size + 1,
        2 * page_size - 1,
        128,
        129,
        256,
    ]);
    lens
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_shapes_lengths_and_options_stay_within_twice_the_error_of_bf16() {
    let gpu = gpu();
    for seed in cuda_graphs::cases(0..24) {
        let mut random = Random::new(seed);
        let (page_size, head_dim) = (random.pick(&[16, 32, 64, 128, 256]), random.pick(&[64, 128]));
        let kv_heads = random.within(1, 3);
        let lens = random_lens(&mut random, page_size);
        let sequences = Sequences::new(&mut random, kv_heads, head_dim, page_size, &lens);
        let mut setup = Setup::plain(random.within(1, 16), &gpu, &sequences);
        setup.window = (random.below(3) == 0).then(|| random.within(1, 200));
        setup.options.split = random.pick(&[None, Some(16), Some(48), Some(64), Some(128), Some(256)]);
        setup.options.max_splits = random.pick(&[1, 3, 8, 32]);
        if random.below(3) == 0 {
            (setup.options.warps, setup.options.stages) = random.pick(&[(1, 2), (2, 4), (8, 2), (4, 2)]);
            setup.options.blocks_per_multiprocessor = 1;
        }
        let n = random.within(1, 9);
        let attention = match setup.attention(&gpu, &sequences, 16) {
            // Not every random ring fits every device.
            Err(CudaError::OptionRefused { option: "stages", .. }) => continue,
            made => made.unwrap(),
        };
        let rows = random_rows(&mut random, &setup, &sequences, n);
        let placed = sequences.place(&gpu, &mut random);
        let (out, lse) = run(&gpu, &attention, &sequences, &placed, &rows);
        compare(&setup, &sequences, &rows, &out, &lse, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_ratio_of_query_to_kv_heads_and_every_page_size() {
    let gpu = gpu();
    let mut random = Random::new(100);
    for group in cuda_graphs::cases(1..=16) {
        for head_dim in [64, 128] {
            let page_size = 16 << (group % 5);
            let sequences = Sequences::new(&mut random, 2, head_dim, page_size, &[300, 37]);
            let setup = Setup::plain(group, &gpu, &sequences);
            let attention = setup.attention(&gpu, &sequences, 2).unwrap();
            let rows = Rows {
                of: vec![Some(0), Some(1)],
                lens: vec![300, 37],
                q: random.values(2 * row_elements(&setup, &sequences)),
            };
            let placed = sequences.place(&gpu, &mut random);
            let (out, lse) = run(&gpu, &attention, &sequences, &placed, &rows);
            compare(
                &setup,
                &sequences,
                &rows,
                &out,
                &lse,
                &format!("group {group}, head_dim {head_dim}"),
            );
        }
    }
}

/// Rows of a large step are cut where blocks' equal shares of all tokens end.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn large_steps_are_dealt_in_equal_shares() {
    let gpu = gpu();
    for seed in cuda_graphs::cases(0..8) {
        let mut random = Random::new(250 + seed);
        let (page_size, head_dim) = (random.pick(&[16, 64]), random.pick(&[64, 128]));
        // In some steps a few rows have most of the tokens, and a share holds many of the others.
        let most = if seed % 2 == 0 { 500 } else { 40 };
        let mut lens: Vec<usize> = (0..random.within(60, 90))
            .map(|_| random.within(1, most))
            .collect();
        for len in &mut lens[..3] {
            *len = random.within(500, 900);
        }
        let sequences = Sequences::new(&mut random, 8, head_dim, page_size, &lens);
        let mut setup = Setup::plain(random.within(1, 3), &gpu, &sequences);
        setup.window = (seed % 4 == 2).then(|| random.within(1, 400));
        setup.mask = (seed % 4 == 3).then(|| MaskMod::sliding_window(100));
        let n = random.within(60, 100);
        let attention = setup.attention(&gpu, &sequences, 128).unwrap();
        let rows = random_rows(&mut random, &setup, &sequences, n);
        let placed = sequences.place(&gpu, &mut random);
        let (out, lse) = run(&gpu, &attention, &sequences, &placed, &rows);
        let shares = attention.blocks() as usize / 8;
        let planned = attention.planned_items(&gpu.stream).unwrap();
        assert!(planned.dealt, "seed {seed}: {planned:?} for {shares} blocks");
        compare(&setup, &sequences, &rows, &out, &lse, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_placement_of_pages_and_slots_changes_no_bit() {
    let gpu = gpu();
    for seed in 0..4 {
        let mut random = Random::new(200 + seed);
        let sequences = Sequences::new(&mut random, 2, 128, 16, &[700, 129, 16, 1, 333]);
        let setup = Setup::plain(4, &gpu, &sequences);
        let attention = setup.attention(&gpu, &sequences, 8).unwrap();
        let rows = random_rows(&mut random, &setup, &sequences, 5);
        let here = sequences.place(&gpu, &mut random);
        let there = sequences.place(&gpu, &mut random);
        assert_ne!(here.table.rows(), there.table.rows(), "the placements differ");
        let (a, b) = (
            run(&gpu, &attention, &sequences, &here, &rows),
            run(&gpu, &attention, &sequences, &there, &rows),
        );
        assert_eq!(bits(&a.0), bits(&b.0));
        assert_eq!(a.1, b.1);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_is_the_same_bits_alone_in_any_batch_and_beside_padding() {
    let gpu = gpu();
    let mut random = Random::new(300);
    let lens: Vec<usize> = (0..33).map(|i| 1 + (i * 53) % 900).collect();
    let sequences = Sequences::new(&mut random, 2, 64, 32, &lens);
    let mut setup = Setup::plain(5, &gpu, &sequences);
    // Chosen by the number of rows it would not be the same.
    setup.options.split = Some(128);
    let attention = setup.attention(&gpu, &sequences, 64).unwrap();
    let elements = row_elements(&setup, &sequences);
    let q = random.values(33 * elements);
    let placed = sequences.place(&gpu, &mut random);
    let all = Rows {
        of: (0..33).map(Some).collect(),
        lens: lens.clone(),
        q: q.clone(),
    };
    let (together, _) = run(&gpu, &attention, &sequences, &placed, &all);
    for i in [0, 7, 16, 32] {
        let own = q[i * elements..(i + 1) * elements].to_vec();
        let alone = Rows {
            of: vec![Some(i)],
            lens: vec![lens[i]],
            q: own.clone(),
        };
        let (alone, _) = run(&gpu, &attention, &sequences, &placed, &alone);
        assert_eq!(
            bits(&alone),
            bits(&together[i * elements..(i + 1) * elements]),
            "row {i} alone"
        );
        let mut padded = random.values(64 * elements);
        padded[63 * elements..].copy_from_slice(&own);
        let mut rows = Rows {
            of: vec![None; 64],
            lens: vec![77; 64],
            q: padded,
        };
        (rows.of[63], rows.lens[63]) = (Some(i), lens[i]);
        let (padded, _) = run(&gpu, &attention, &sequences, &placed, &rows);
        assert_eq!(
            bits(&padded[63 * elements..]),
            bits(&alone),
            "row {i} behind 63 padded rows"
        );
        assert!(
            padded[..63 * elements].iter().all(|x| x.to_bits() == 0),
            "padded rows are 0"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn mask_and_score_functions_are_applied_as_on_the_cpu() {
    let gpu = gpu();
    for seed in cuda_graphs::cases(0..6) {
        let mut random = Random::new(400 + seed);
        let lens = random_lens(&mut random, 16);
        let sequences = Sequences::new(&mut random, 2, 128, 16, &lens);
        let mut setup = Setup::plain(random.within(1, 6), &gpu, &sequences);
        let heads = setup.group * 2;
        let prefix: Vec<i32> = (0..8).map(|_| random.below(40) as i32).collect();
        let window = MaskMod::sliding_window(random.within(1, 90));
        setup.mask = (seed % 3 != 0)
            .then(|| (MaskMod::causal() & window) | MaskMod::prefix_lm(prefix) & !MaskMod::none());
        let score = ScoreMod::alibi(alibi_slopes(heads).unwrap()).then(&ScoreMod::soft_cap(15.0).unwrap());
        setup.score = (seed % 3 != 1).then_some(score);
        let attention = setup.attention(&gpu, &sequences, 8).unwrap();
        let n = random.within(1, 6);
        let rows = random_rows(&mut random, &setup, &sequences, n);
        let placed = sequences.place(&gpu, &mut random);
        let (out, lse) = run(&gpu, &attention, &sequences, &placed, &rows);
        compare(&setup, &sequences, &rows, &out, &lse, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_whose_every_key_is_masked_gives_zero_and_minus_infinity() {
    let gpu = gpu();
    let mut random = Random::new(500);
    let sequences = Sequences::new(&mut random, 1, 64, 16, &[200]);
    let setup = Setup {
        mask: Some(MaskMod::none()),
        ..Setup::plain(3, &gpu, &sequences)
    };
    let attention = setup.attention(&gpu, &sequences, 1).unwrap();
    let rows = Rows {
        of: vec![Some(0)],
        lens: vec![200],
        q: random.values(3 * 64),
    };
    let placed = sequences.place(&gpu, &mut random);
    let (out, lse) = run(&gpu, &attention, &sequences, &placed, &rows);
    assert!(out.iter().all(|x| x.to_f32() == 0.0));
    assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_captured_step_follows_the_lengths_on_the_device() {
    let gpu = gpu();
    let stream = &gpu.stream;
    let mut random = Random::new(600);
    let sequences = Sequences::new(&mut random, 2, 128, 64, &[900, 500, 257]);
    let setup = Setup::plain(4, &gpu, &sequences);
    let attention = setup.attention(&gpu, &sequences, 4).unwrap();
    let placed = sequences.place(&gpu, &mut random);
    let elements = row_elements(&setup, &sequences);
    let q = DeviceBuffer::from_slice(stream, &random.values(4 * elements)).unwrap();
    let out = DeviceBuffer::<bf16>::zeroed(&gpu.device, 4 * elements).unwrap();
    let slots = DeviceBuffer::<i32>::zeroed(&gpu.device, 4).unwrap();
    let lengths = DeviceBuffer::<i32>::zeroed(&gpu.device, 4).unwrap();
    let args = DecodeArgs {
        q: q.as_slice(),
        q_row_stride: elements,
        k: placed.k.as_slice(),
        v: placed.v.as_slice(),
        page_table: placed.rows.as_slice(),
        out: out.as_slice(),
        lse: None,
    };
    let step = |stream: &cuda_graphs::Stream| -> Result<(), CudaError> {
        attention
            .plan(stream, slots.as_slice(), lengths.as_slice(), 0)?
            .run(stream, &args)
    };
    let graph = Capture::record(stream, |stream| step(stream)).unwrap();
    for _ in 0..20 {
        let mut of = [Some(0), Some(1), Some(2), None];
        random.shuffle(&mut of);
        let slot: Vec<i32> = of
            .iter()
            .map(|of| of.map_or(0, |i: usize| placed.slots[i].index() as i32))
            .collect();
        let len: Vec<i32> = of
            .iter()
            .map(|of| of.map_or(5, |i| random.within(1, sequences.lens[i]) as i32))
            .collect();
        stream.upload(&slots, &slot).unwrap();
        stream.upload(&lengths, &len).unwrap();
        stream.fill_bytes(&out, 0xff).unwrap();
        graph.launch(stream).unwrap();
        let replayed = stream.download(&out).unwrap();
        stream.fill_bytes(&out, 0xff).unwrap();
        step(stream).unwrap();
        assert_eq!(
            bits(&replayed),
            bits(&stream.download(&out).unwrap()),
            "lengths {len:?}"
        );
        assert!(replayed.iter().all(|x| x.is_finite()));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU with 10 GB"]
fn offsets_beyond_two_to_the_31_elements() {
    let gpu = gpu();
    let stream = &gpu.stream;
    let mut random = Random::new(700);
    let small = Sequences::new(&mut random, 8, 128, 256, &[600]);
    // The sequence's three pages are the last of a cache of 2³¹ + elements.
    let n_pages = 8200;
    let positions = n_pages * 256;
    let shape = block_mask::cuda::AttentionShape {
        n_pages,
        ..small.shape(2)
    };
    let pages = [n_pages - 1, n_pages - 3, n_pages - 2];
    let cache = |values: &[bf16]| {
        let all = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, 8 * positions * 128, 0xff).unwrap();
        for h in 0..8 {
            for (i, page) in pages.iter().enumerate() {
                let n = (600 - i * 256).min(256) * 128;
                let (from, to) = ((h * 600 + i * 256) * 128, (h * positions + page * 256) * 128);
                stream
                    .upload(all.slice(to..to + n).unwrap(), &values[from..from + n])
                    .unwrap();
            }
        }
        all
    };
    let (k, v) = (cache(&small.k[0]), cache(&small.v[0]));
    assert!(k.len() > 1 << 31);
    let table = [[0; 3], pages.map(|page| page as i32)].concat();
    let setup = Setup::plain(2, &gpu, &small);
    let limits = DecodeLimits {
        max_rows: 1,
        n_slots: 2,
        max_pages_per_slot: 3,
    };
    let options = setup.options;
    let functions = Functions::none();
    let attention = DecodeAttention::new(
        &gpu.device,
        &gpu.compiler,
        shape,
        limits,
        None,
        None,
        functions,
        options,
    )
    .unwrap();
    let rows = Rows {
        of: vec![Some(0)],
        lens: vec![600],
        q: random.values(16 * 128),
    };
    let q = DeviceBuffer::from_slice(stream, &rows.q).unwrap();
    let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, rows.q.len(), 0xff).unwrap();
    let lse = DeviceBuffer::<f32>::filled_with_bytes(&gpu.device, 16, 0xff).unwrap();
    let table = DeviceBuffer::from_slice(stream, &table).unwrap();
    let slots = DeviceBuffer::from_slice(stream, &[1]).unwrap();
    let lengths = DeviceBuffer::from_slice(stream, &[600]).unwrap();
    let args = DecodeArgs {
        q: q.as_slice(),
        q_row_stride: 16 * 128,
        k: k.as_slice(),
        v: v.as_slice(),
        page_table: table.as_slice(),
        out: out.as_slice(),
        lse: Some(lse.as_slice()),
    };
    attention
        .plan(stream, slots.as_slice(), lengths.as_slice(), 0)
        .unwrap()
        .run(stream, &args)
        .unwrap();
    let (out, lse) = (stream.download(&out).unwrap(), stream.download(&lse).unwrap());
    compare(&setup, &small, &rows, &out, &lse, "the end of a large cache");
}
