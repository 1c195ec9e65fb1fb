//! Attention over block masks against f64, by the ≤ 2× rule.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{CudaError, DeviceBlockMask, FlexArgs, FlexAttention, QueryLayout, TileOptions};
use block_mask::{
    BlockMask, BlockState, KvBlocks, Logical, MaskMod, MaskShape, PackedSequence, Physical, ScoreMod,
    alibi_slopes,
};
use cuda_graphs::DeviceBuffer;
use gpu_common::{Errors, Gpu, Placed, Random, Sequences, bits, gpu};
use half::bf16;

struct Problem {
    sequences: Sequences,
    group: usize,
    score: Option<ScoreMod>,
    options: TileOptions,
    q: Vec<bf16>,
    layout: QueryLayout,
}

impl Problem {
    fn heads(&self) -> usize {
        self.group * self.sequences.kv_heads
    }

    fn attention(&self, gpu: &Gpu, mask_mod: &MaskMod) -> Result<FlexAttention, CudaError> {
        let shape = self.sequences.shape(self.group);
        let score = self.score.as_ref();
        FlexAttention::new(
            &gpu.stream,
            &gpu.compiler,
            shape,
            mask_mod,
            score,
            None,
            self.options,
        )
    }

    /// The element of head `h` of query `i` of batch row `b` at which its head begins.
    fn at(&self, mask: &BlockMask<Physical>, b: usize, h: usize, i: usize) -> usize {
        let row = mask.queries(b).unwrap().row;
        let batch = if mask.is_packed() {
            0
        } else {
            b * self.layout.batch_stride
        };
        batch + h * self.layout.head_stride + (row + i) * self.layout.row_stride
    }

    fn lse_at(&self, mask: &BlockMask<Physical>, b: usize, h: usize, i: usize) -> usize {
        let row = mask.queries(b).unwrap().row + i;
        if mask.is_packed() {
            row * self.heads() + h
        } else {
            (b * self.heads() + h) * mask.query_rows() + row
        }
    }

    fn run(&self, gpu: &Gpu, placed: &Placed, mask: &BlockMask<Physical>) -> (Vec<bf16>, Vec<f32>) {
        self.try_run(gpu, placed, mask, mask.mask_mod()).unwrap()
    }

    /// With a kernel for `mask_mod`.
    fn try_run(
        &self,
        gpu: &Gpu,
        placed: &Placed,
        mask: &BlockMask<Physical>,
        mask_mod: &MaskMod,
    ) -> Result<(Vec<bf16>, Vec<f32>), CudaError> {
        let stream = &gpu.stream;
        let attention = self.attention(gpu, mask_mod).unwrap();
        let on_device = DeviceBlockMask::new(stream, mask).unwrap();
        let q = DeviceBuffer::from_slice(stream, &self.q).unwrap();
        let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, self.q.len(), 0xff).unwrap();
        let rows = self.q.len() / self.sequences.head_dim;
        let lse = DeviceBuffer::<f32>::filled_with_bytes(&gpu.device, rows, 0xff).unwrap();
        let args = FlexArgs {
            q: q.as_slice(),
            out: out.as_slice(),
            layout: self.layout,
            lse: Some(lse.as_slice()),
            k: placed.k.as_slice(),
            v: placed.v.as_slice(),
        };
        attention.run(stream, &on_device, &args)?;
        Ok((stream.download(&out).unwrap(), stream.download(&lse).unwrap()))
    }

    /// Against what the lists and the function say, cell by cell.
    fn compare(&self, mask: &BlockMask<Physical>, (out, lse): &(Vec<bf16>, Vec<f32>), what: &str) {
        let (d, shape) = (self.sequences.head_dim, mask.shape());
        let scale = 1.0 / (d as f32).sqrt();
        let mut errors = Errors::default();
        let mut written = vec![false; out.len()];
        for b in 0..shape.batch {
            let span = mask.queries(b).unwrap();
            for h in 0..self.heads() {
                for i in 0..span.len {
                    let list_head = if shape.heads == 1 { 0 } else { h };
                    let mut states = vec![BlockState::Empty; mask.kv_len(b).div_ceil(shape.block_kv)];
                    for block in mask.blocks(b, list_head, i / shape.block_q) {
                        states[block.logical] = if block.full {
                            BlockState::Full
                        } else {
                            BlockState::Partial
                        };
                    }
                    let position = span.position + i;
                    let score = |score: f32, kv: usize| {
                        let state = states
                            .get(kv / shape.block_kv)
                            .copied()
                            .unwrap_or(BlockState::Empty);
                        let seen = match state {
                            BlockState::Empty => false,
                            BlockState::Full => true,
                            BlockState::Partial => {
                                kv < mask.kv_len(b) && mask.mask_mod().allows(b, h, position, kv)
                            }
                        };
                        seen.then(|| {
                            self.score
                                .as_ref()
                                .map_or(score, |f| f.eval(score, b, h, position, kv))
                        })
                    };
                    let at = self.at(mask, b, h, i);
                    let q = &self.q[at..at + d];
                    let answer = self.sequences.attend(b, h / self.group, q, scale, &score);
                    let what = format!("{what}, batch row {b}, head {h}, query {i}");
                    errors.add(
                        &what,
                        &out[at..at + d],
                        Some(lse[self.lse_at(mask, b, h, i)]),
                        &answer,
                    );
                    written[at..at + d].fill(true);
                }
            }
        }
        errors.check(what);
        for (at, value) in out.iter().enumerate().filter(|(at, _)| !written[*at]) {
            assert_eq!(
                value.to_bits(),
                0xffff,
                "{what}: element {at} belongs to no query"
            );
        }
    }
}

fn random_options(random: &mut Random) -> TileOptions {
    let mut options = TileOptions::default();
    (options.block_m, options.warps) = random.pick(&[(128, 4), (64, 4), (128, 8)]);
    options.block_n = random.pick(&[64, 128]);
    options.blocks_per_multiprocessor = 1;
    options
}

fn random_problem(random: &mut Random, lens: &[usize], page_size: usize) -> Problem {
    let (kv_heads, head_dim) = (random.within(1, 2), random.pick(&[64, 128]));
    let sequences = Sequences::new(random, kv_heads, head_dim, page_size, lens);
    let group = random.within(1, 4);
    let slopes =
        ScoreMod::alibi(alibi_slopes(group * kv_heads).unwrap()).then(&ScoreMod::soft_cap(12.0).unwrap());
    let score = (random.below(2) == 0).then_some(slopes);
    let options = random_options(random);
    let layout = QueryLayout::packed(group * kv_heads, head_dim);
    Problem {
        sequences,
        group,
        score,
        options,
        q: Vec::new(),
        layout,
    }
}

fn random_mask_mod(random: &mut Random, batch: usize) -> MaskMod {
    let prefix: Vec<i32> = (0..batch).map(|_| random.below(60) as i32).collect();
    match random.below(5) {
        0 => MaskMod::causal(),
        1 => MaskMod::causal() & MaskMod::sliding_window(random.within(1, 90)),
        2 => MaskMod::prefix_lm(prefix),
        3 => MaskMod::padding(prefix),
        _ => MaskMod::causal() & !MaskMod::padding(prefix),
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn masks_from_functions_and_from_lists_in_batches() {
    let gpu = gpu();
    for seed in cuda_graphs::cases(0..16) {
        let mut random = Random::new(seed);
        let batch = random.within(1, 3);
        let lens: Vec<usize> = (0..batch).map(|_| random.within(1, 260)).collect();
        let page_size = random.pick(&[16, 32, 64, 128, 256]);
        let mask_mod = random_mask_mod(&mut random, batch);
        let mut problem = random_problem(&mut random, &lens, page_size);
        let heads = problem.heads();
        let (q_len, block_q) = (random.within(1, 150), random.pick(&[16, 64, 100, 128, 200]));
        let list_heads = if random.below(2) == 0 { 1 } else { heads };
        let longest = *lens.iter().max().unwrap();
        let shape = MaskShape::new(batch, list_heads, q_len, longest).with_blocks(block_q, page_size);
        let mask = if random.below(2) == 0 {
            BlockMask::from_fn(shape, mask_mod).unwrap()
        } else {
            random_lists(&mut random, shape, mask_mod)
        };
        problem.layout = QueryLayout::batched(heads, q_len, problem.sequences.head_dim);
        problem.q = random.values(batch * problem.layout.batch_stride);
        let here = problem.sequences.place(&gpu, &mut random);
        let physical = mask.to_physical(&here.table, &here.slots).unwrap();
        let result = problem.run(&gpu, &here, &physical);
        problem.compare(&physical, &result, &format!("seed {seed}"));
        // Somewhere else in the cache: the same bits.
        let there = problem.sequences.place(&gpu, &mut random);
        let moved = mask.to_physical(&there.table, &there.slots).unwrap();
        let again = problem.run(&gpu, &there, &moved);
        assert_eq!(bits(&result.0), bits(&again.0), "seed {seed}: pages moved");
    }
}

/// Blocks of random kinds, listed in random order.
fn random_lists(random: &mut Random, shape: MaskShape, mask_mod: MaskMod) -> BlockMask<Logical> {
    let (rows, width) = (shape.batch * shape.heads * shape.q_blocks(), shape.kv_blocks());
    let (mut counts, mut indices) = (vec![vec![0; rows]; 2], vec![vec![0; rows * width]; 2]);
    for row in 0..rows {
        let mut blocks: Vec<usize> = (0..width).collect();
        random.shuffle(&mut blocks);
        for block in blocks {
            let kind = random.below(3);
            if kind < 2 {
                indices[kind][row * width + counts[kind][row] as usize] = block as i32;
                counts[kind][row] += 1;
            }
        }
    }
    let lists = KvBlocks {
        num_blocks: &counts[0],
        indices: &indices[0],
        full_num_blocks: &counts[1],
        full_indices: &indices[1],
    };
    BlockMask::from_kv_blocks(shape, &lists, mask_mod).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn packed_chunks_and_decoding_rows_in_one_mask() {
    let gpu = gpu();
    for seed in cuda_graphs::cases(0..8) {
        let mut random = Random::new(100 + seed);
        let lens: Vec<usize> = (0..random.within(1, 5)).map(|_| random.within(1, 300)).collect();
        let page_size = random.pick(&[16, 64, 256]);
        let window = MaskMod::sliding_window(random.within(1, 100));
        let mask_mod = if seed % 2 == 0 {
            MaskMod::causal()
        } else {
            MaskMod::causal() & window
        };
        let mut problem = random_problem(&mut random, &lens, page_size);
        let placed = problem.sequences.place(&gpu, &mut random);
        let mut row = random.below(4);
        let packed: Vec<PackedSequence> = lens
            .iter()
            .zip(&placed.slots)
            .map(|(&len, &slot)| {
                let q_len = if random.below(2) == 0 {
                    1
                } else {
                    random.within(1, len)
                };
                let q_start = row;
                row += q_len;
                PackedSequence {
                    slot,
                    q_start,
                    q_len,
                    kv_start_pos: len - q_len,
                }
            })
            .collect();
        let block_q = random.pick(&[16, 64, 128]);
        let mask = BlockMask::packed(&placed.table, &packed, 1, block_q, mask_mod).unwrap();
        problem.q = random.values((row + 3) * problem.layout.row_stride);
        let result = problem.run(&gpu, &placed, &mask);
        problem.compare(&mask, &result, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_that_may_see_nothing_are_refused_the_kernel_without_guards() {
    let gpu = gpu();
    let mut random = Random::new(200);
    let mut safe = TileOptions::default();
    safe.rows_guaranteed_safe = true;
    for (mask_mod, is_safe) in [
        (MaskMod::causal(), true),
        (MaskMod::causal() & MaskMod::sliding_window(3), false),
        (MaskMod::none(), false),
    ] {
        let mut problem = random_problem(&mut random, &[200], 64);
        (problem.options, problem.score) = (safe, None);
        let heads = problem.heads();
        problem.layout = QueryLayout::batched(heads, 200, problem.sequences.head_dim);
        problem.q = random.values(problem.layout.batch_stride);
        let placed = problem.sequences.place(&gpu, &mut random);
        let shape = MaskShape::new(1, 1, 200, 200).with_blocks(128, 64);
        let mask = BlockMask::from_fn(shape, mask_mod).unwrap();
        let mask = mask.to_physical(&placed.table, &placed.slots).unwrap();
        if is_safe {
            let result = problem.run(&gpu, &placed, &mask);
            problem.compare(&mask, &result, "a causal mask");
            continue;
        }
        let refused = problem
            .try_run(&gpu, &placed, &mask, mask.mask_mod())
            .unwrap_err();
        assert!(matches!(
            refused,
            CudaError::OptionRefused {
                option: "rows_guaranteed_safe",
                ..
            }
        ));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn contiguous_blocks_are_stepped_through_only_where_they_were_checked() {
    let gpu = gpu();
    for seed in 0..6 {
        let mut random = Random::new(400 + seed);
        let page_size = random.pick(&[16, 32]);
        let lens = [random.within(150, 300), random.within(150, 300)];
        let mut problem = random_problem(&mut random, &lens, page_size);
        let heads = problem.heads();
        problem.layout = QueryLayout::batched(heads, 150, problem.sequences.head_dim);
        problem.q = random.values(2 * problem.layout.batch_stride);
        let shape = MaskShape::new(2, 1, 150, 300).with_blocks(64, page_size);
        let logical = BlockMask::from_fn(shape, MaskMod::causal()).unwrap();
        let in_order = problem.sequences.place_in_order(&gpu);
        let mask = logical.to_physical(&in_order.table, &in_order.slots).unwrap();
        assert!(mask.is_contiguous());
        let listed = problem.run(&gpu, &in_order, &mask);
        problem.options.blocks_are_contiguous = true;
        let stepped = problem.run(&gpu, &in_order, &mask);
        problem.compare(&mask, &stepped, &format!("seed {seed}"));
        assert_eq!(bits(&listed.0), bits(&stepped.0), "seed {seed}");
        // Where pages lie in turns the same kernel would read other sequences' keys: it is not run.
        let scattered = problem.sequences.place(&gpu, &mut random);
        let mask = logical.to_physical(&scattered.table, &scattered.slots).unwrap();
        let refused = problem
            .try_run(&gpu, &scattered, &mask, mask.mask_mod())
            .unwrap_err();
        assert!(matches!(
            refused,
            CudaError::OptionRefused {
                option: "blocks_are_contiguous",
                ..
            }
        ));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_mask_of_another_function_is_refused() {
    let gpu = gpu();
    let mut random = Random::new(300);
    let mut problem = random_problem(&mut random, &[40], 16);
    problem.layout = QueryLayout::batched(problem.heads(), 16, problem.sequences.head_dim);
    problem.q = random.values(problem.layout.batch_stride);
    let placed = problem.sequences.place(&gpu, &mut random);
    let shape = MaskShape::new(1, 1, 16, 40).with_blocks(16, 16);
    let lists = KvBlocks {
        num_blocks: &[0],
        indices: &[0; 3],
        full_num_blocks: &[1],
        full_indices: &[2, 0, 0],
    };
    let mask = BlockMask::from_kv_blocks(shape, &lists, MaskMod::causal()).unwrap();
    let mask = mask.to_physical(&placed.table, &placed.slots).unwrap();
    let refused = problem
        .try_run(&gpu, &placed, &mask, &MaskMod::causal())
        .unwrap_err();
    assert!(matches!(refused, CudaError::OtherFunction { .. }));
    // With the mask's own function the cut block is seen as far as the sequence goes.
    let result = problem.run(&gpu, &placed, &mask);
    problem.compare(&mask, &result, "a cut full block");
}
