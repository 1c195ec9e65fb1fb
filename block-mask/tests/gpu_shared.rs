//! Decode attention of rows that share a prefix against f64, by the ≤ 2× rule, and what it must not disturb.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{DecodeArgs, DecodeAttention, DecodeLimits, DecodeOptions, Functions, PlannedItems};
use cuda_graphs::{DeviceBuffer, cases};
use gpu_common::{Errors, Gpu, Placed, Random, Sequences, bits, gpu};
use half::bf16;

/// Sequences of which some start with the pages of the one before them.
struct Siblings {
    sequences: Sequences,
    /// Tokens that a sequence has in common with the one before it, whole pages.
    common: Vec<usize>,
    group: usize,
}

impl Siblings {
    /// `groups`: (siblings, tokens of the prefix, tokens of each sibling's own at most).
    fn new(
        random: &mut Random,
        [group, kv_heads, head_dim, page_size]: [usize; 4],
        groups: &[(usize, usize, usize)],
    ) -> Siblings {
        let (mut lens, mut common) = (Vec::new(), Vec::new());
        for &(siblings, prefix, own) in groups {
            let prefix = prefix / page_size * page_size;
            for i in 0..siblings {
                // Without a prefix a sequence still has a token; with one its own part may be empty.
                lens.push(prefix + random.within(usize::from(prefix == 0), own));
                common.push(if i == 0 { 0 } else { prefix });
            }
        }
        let mut sequences = Sequences::new(random, kv_heads, head_dim, page_size, &lens);
        for i in 1..lens.len() {
            for values in [&mut sequences.k, &mut sequences.v] {
                let (before, rest) = values.split_at_mut(i);
                for head in 0..kv_heads {
                    let n = common[i] * head_dim;
                    let (from, to) = (head * lens[i - 1] * head_dim, head * lens[i] * head_dim);
                    rest[0][to..to + n].copy_from_slice(&before[i - 1][from..from + n]);
                }
            }
        }
        Siblings {
            sequences,
            common,
            group,
        }
    }

    /// The sequences in pages, siblings with the same pages; a sibling's own copy of the prefix is never named.
    fn place(&self, gpu: &Gpu, random: &mut Random) -> Placed {
        let mut placed = self.sequences.place(gpu, random);
        let width = self.sequences.config().max_pages_per_slot;
        let mut rows = placed.table.rows().to_vec();
        for i in 1..self.common.len() {
            let [from, to] = [i - 1, i].map(|i| placed.slots[i].index() * width);
            let pages = self.common[i] / self.sequences.page_size;
            rows.copy_within(from..from + pages, to);
        }
        placed.rows = DeviceBuffer::from_slice(&gpu.stream, &rows).unwrap();
        placed
    }

    fn attention(&self, gpu: &Gpu, max_rows: usize, options: DecodeOptions) -> DecodeAttention {
        let config = self.sequences.config();
        let limits = DecodeLimits {
            max_rows,
            n_slots: config.n_slots,
            max_pages_per_slot: config.max_pages_per_slot,
        };
        let shape = self.sequences.shape(self.group);
        let functions = Functions::none();
        DecodeAttention::new(
            &gpu.device,
            &gpu.compiler,
            shape,
            limits,
            None,
            None,
            functions,
            options,
        )
        .unwrap()
    }

    fn options(&self, gpu: &Gpu) -> DecodeOptions {
        DecodeOptions::for_device(gpu.device.info(), &self.sequences.shape(self.group))
    }

    fn elements(&self) -> usize {
        self.group * self.sequences.kv_heads * self.sequences.head_dim
    }

    /// Output and log-sum-exp of rows `of` (`None`: padding) on poisoned buffers; run twice, since counters must be left
    /// as they were found.
    fn run(
        &self,
        gpu: &Gpu,
        attention: &DecodeAttention,
        placed: &Placed,
        of: &[Option<usize>],
        q: &[bf16],
        sharing: bool,
    ) -> (Vec<bf16>, Vec<f32>, PlannedItems) {
        let stream = &gpu.stream;
        let slot = |of: &Option<usize>| of.map_or(0, |i| placed.slots[i].index() as i32);
        let position = |of: &Option<usize>| of.map_or(3, |i| self.sequences.lens[i] as i32 - 1);
        let slots = DeviceBuffer::from_slice(stream, &of.iter().map(slot).collect::<Vec<_>>()).unwrap();
        let positions =
            DeviceBuffer::from_slice(stream, &of.iter().map(position).collect::<Vec<_>>()).unwrap();
        let q_device = DeviceBuffer::from_slice(stream, q).unwrap();
        let heads = self.group * self.sequences.kv_heads;
        let (slots, positions) = (slots.as_slice(), positions.as_slice());
        let once = |early| {
            let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, q.len(), 0xff).unwrap();
            let lse = DeviceBuffer::<f32>::filled_with_bytes(&gpu.device, of.len() * heads, 0xff).unwrap();
            let args = DecodeArgs {
                q: q_device.as_slice(),
                q_row_stride: self.elements(),
                k: placed.k.as_slice(),
                v: placed.v.as_slice(),
                page_table: placed.rows.as_slice(),
                out: out.as_slice(),
                lse: Some(lse.as_slice()),
            };
            let plan = match sharing {
                true => attention.plan_shared(stream, slots, positions, 1, placed.rows.as_slice()),
                false => attention.plan(stream, slots, positions, 1),
            };
            plan.unwrap().early(early).run(stream, &args).unwrap();
            (stream.download(&out).unwrap(), stream.download(&lse).unwrap())
        };
        let (first, second) = (once(false), once(true));
        assert_eq!(
            bits(&first.0),
            bits(&second.0),
            "the second run differs from the first"
        );
        let items = attention.planned_items(stream).unwrap();
        (second.0, second.1, items)
    }

    fn compare(&self, what: &str, of: &[Option<usize>], q: &[bf16], out: &[bf16], lse: &[f32]) {
        let (d, heads) = (self.sequences.head_dim, self.group * self.sequences.kv_heads);
        let scale = 1.0 / (d as f32).sqrt();
        let mut errors = Errors::default();
        for (row, of) in of.iter().enumerate() {
            for h in 0..heads {
                let at = row * heads + h;
                let got = &out[at * d..(at + 1) * d];
                let Some(i) = *of else {
                    assert!(
                        got.iter().all(|x| x.to_bits() == 0),
                        "{what}: padded row {row} is not 0"
                    );
                    continue;
                };
                let q = &q[at * d..(at + 1) * d];
                let answer = self
                    .sequences
                    .attend(i, h / self.group, q, scale, &|score, _| Some(score));
                errors.add(
                    &format!("{what}, row {row}, head {h}"),
                    got,
                    Some(lse[at]),
                    &answer,
                );
            }
        }
        errors.check(what);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn groups_of_every_size_stay_within_twice_the_error_of_bf16() {
    let gpu = gpu();
    let (mut shared, mut cases) = (0, 0);
    for seed in 0..16 {
        let mut random = Random::new(seed);
        let page_size = random.pick(&[16, 32, 64, 128]);
        let group = if seed < 6 { 4 } else { random.within(1, 16) };
        let shape = [group, random.within(1, 2), random.pick(&[64, 128]), page_size];
        let n = random.within(1, 3);
        let groups: Vec<_> = (0..n)
            .map(|_| (random.within(1, 20), random.within(0, 500), random.within(1, 100)))
            .collect();
        let siblings = Siblings::new(&mut random, shape, &groups);
        let mut options = siblings.options(&gpu);
        options.split = random.pick(&[None, Some(64), Some(256)]);
        options.max_splits = random.pick(&[1, 4, 32]);
        options.shared_prefix = Some(random.pick(&[16, 128]));
        if seed % 4 == 3 {
            (options.warps, options.stages, options.blocks_per_multiprocessor) =
                random.pick(&[(2, 4, 1), (1, 4, 1), (1, 2, 1)]);
        }
        let rows = siblings.sequences.lens.len() + 2;
        let attention = siblings.attention(&gpu, rows, options);
        let placed = siblings.place(&gpu, &mut random);
        let mut of: Vec<Option<usize>> = (0..rows - 2).map(Some).collect();
        of.insert(random.below(of.len() + 1), None);
        of.push(None);
        let q = random.values(rows * siblings.elements());
        let (out, lse, items) = siblings.run(&gpu, &attention, &placed, &of, &q, true);
        siblings.compare(&format!("seed {seed}"), &of, &q, &out, &lse);
        let (out, lse, none) = siblings.run(&gpu, &attention, &placed, &of, &q, false);
        siblings.compare(&format!("seed {seed}, not shared"), &of, &q, &out, &lse);
        assert_eq!(none.shared, 0);
        shared += usize::from(items.shared > 0);
        cases += 1;
    }
    eprintln!("{shared} of {cases} cases had a prefix to share");
    assert!(shared * 2 > cases);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sixteen_siblings_of_a_long_prompt_share_one_read_and_others_are_left_alone() {
    let gpu = gpu();
    let mut random = Random::new(100);
    let siblings = Siblings::new(
        &mut random,
        [4, 2, 128, 64],
        &[
            (16, 2000, 90),
            (1, 700, 1),
            (8, 500, 300),
            (2, 100, 5),
            (3, 0, 400),
        ],
    );
    let n = siblings.sequences.lens.len();
    let attention = siblings.attention(&gpu, n, siblings.options(&gpu));
    let placed = siblings.place(&gpu, &mut random);
    let of: Vec<_> = (0..n).map(Some).collect();
    let q = random.values(n * siblings.elements());
    let (out, lse, items) = siblings.run(&gpu, &attention, &placed, &of, &q, true);
    siblings.compare("three groups", &of, &q, &out, &lse);
    // The prefix of 64 tokens is below the least; the two others are cut into 8 parts at most.
    assert!((4..=16).contains(&items.shared), "{items:?}");
    let (alone, _, _) = siblings.run(&gpu, &attention, &placed, &of, &q, false);
    let elements = siblings.elements();
    for row in (16..17).chain(25..n) {
        let row = row * elements..(row + 1) * elements;
        assert_eq!(
            bits(&out[row.clone()]),
            bits(&alone[row]),
            "a row that shares nothing"
        );
    }
    // Siblings that are no neighbours share nothing.
    let apart = [Some(0), Some(17), Some(1), Some(18)];
    let (_, _, items) = siblings.run(&gpu, &attention, &placed, &apart, &q[..4 * elements], true);
    assert_eq!(items.shared, 0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tokens_together_have_the_bits_that_each_has_alone() {
    let gpu = gpu();
    let shapes = [
        [4, 2, 128, 64],
        [4, 1, 64, 16],
        [16, 1, 128, 32],
        [1, 2, 64, 128],
        [3, 1, 128, 16],
    ];
    for (seed, shape) in cases(shapes).into_iter().enumerate() {
        let mut random = Random::new(200 + seed as u64);
        let lens = [700, 1300, 5, 64, 513];
        let sequences = Sequences::new(&mut random, shape[1], shape[2], shape[3], &lens);
        let (group, common) = (shape[0], vec![0; lens.len()]);
        let siblings = Siblings {
            sequences,
            common,
            group,
        };
        let config = siblings.sequences.config();
        let options = siblings
            .options(&gpu)
            .in_fixed_splits(config.max_pages_per_slot * shape[3]);
        let placed = siblings.place(&gpu, &mut random);
        // Tokens (sequence, length that the token sees): pieces of prompts, single rows, padding.
        let mut rows: Vec<Option<(usize, usize)>> = (600..=640).map(|len| Some((0, len))).collect();
        rows.push(None);
        rows.extend((1..=5).map(|len| Some((2, len))));
        rows.extend([Some((1, 1300)), Some((4, 513)), Some((3, 64)), None]);
        rows.extend((505..=520).map(|len| Some((1, len))));
        rows.extend((1020..=1030).map(|len| Some((1, len))));
        // A whole prompt: every block has several items, of which some leave warps without a token.
        let whole = if cuda_graphs::few_cases() { 300 } else { 1300 };
        let of_the_whole = rows.len()..rows.len() + whole;
        rows.extend((1..=whole).map(|len| Some((1, len))));
        let n = rows.len();
        let together = siblings.attention(&gpu, n, options.for_tokens_together());
        let singly = siblings.attention(&gpu, n, options);
        let alone = siblings.attention(&gpu, 2, options);
        let elements = siblings.elements();
        let q = random.values(n * elements);
        let run = |attention: &DecodeAttention, of: &[Option<(usize, usize)>], q: &[bf16]| {
            let stream = &gpu.stream;
            let slots: Vec<i32> = of
                .iter()
                .map(|of| of.map_or(0, |(i, _)| placed.slots[i].index() as i32))
                .collect();
            let lengths: Vec<i32> = of.iter().map(|of| of.map_or(7, |(_, len)| len as i32)).collect();
            let slots = DeviceBuffer::from_slice(stream, &slots).unwrap();
            let lengths = DeviceBuffer::from_slice(stream, &lengths).unwrap();
            let q = DeviceBuffer::from_slice(stream, q).unwrap();
            let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, q.len(), 0xff).unwrap();
            let args = DecodeArgs {
                q: q.as_slice(),
                q_row_stride: elements,
                k: placed.k.as_slice(),
                v: placed.v.as_slice(),
                page_table: placed.rows.as_slice(),
                out: out.as_slice(),
                lse: None,
            };
            let plan = attention
                .plan(stream, slots.as_slice(), lengths.as_slice(), 0)
                .unwrap();
            plan.run(stream, &args).unwrap();
            plan.run(stream, &args).unwrap();
            stream.download(&out).unwrap()
        };
        let together = run(&together, &rows, &q);
        let singly = run(&singly, &rows, &q);
        let (d, heads) = (shape[2], group * shape[1]);
        let mut errors = Errors::default();
        for (row, of) in rows.iter().enumerate() {
            let at = row * elements..(row + 1) * elements;
            let Some((i, len)) = *of else {
                assert!(
                    together[at].iter().all(|x| x.to_bits() == 0),
                    "padded row {row} is not 0"
                );
                continue;
            };
            let what = format!("shape {shape:?}, row {row} of sequence {i}, {len} tokens");
            let found = bits(&together[at.clone()]);
            assert!(
                bits(&singly[at.clone()]) == found,
                "{what}: in a step of single rows"
            );
            if of_the_whole.contains(&row) && row % 50 > 0 {
                continue;
            }
            let alone = run(&alone, &[None, *of], &[&q[..elements], &q[at.clone()]].concat());
            assert!(bits(&alone[elements..]) == found, "{what}: alone");
            for h in (0..heads).step_by(3) {
                let of = at.start + h * d..at.start + (h + 1) * d;
                let visible = |score: f32, kv: usize| (kv < len).then_some(score);
                let scale = 1.0 / (d as f32).sqrt();
                let answer = siblings
                    .sequences
                    .attend(i, h / group, &q[of.clone()], scale, &visible);
                errors.add(
                    &format!("shape {shape:?}, row {row}, head {h}"),
                    &together[of],
                    None,
                    &answer,
                );
            }
        }
        errors.check(&format!("shape {shape:?}"));
    }
}
