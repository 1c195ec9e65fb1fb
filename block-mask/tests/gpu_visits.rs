//! What prefill visits on a GPU, counted by the kernels themselves, against the block mask.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{Functions, PrefillArgs, PrefillAttention, PrefillChunk, PrefillLimits, TileOptions};
use block_mask::{PackedSequence, paged_causal_mask};
use cuda_graphs::DeviceBuffer;
use gpu_common::{Random, Sequences, bits, gpu};
use half::bf16;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn kernels_visit_as_many_blocks_as_the_document_causal_mask_has() {
    let gpu = gpu();
    let mut forms = vec![TileOptions::default(), TileOptions::for_device(gpu.device.info())];
    forms.dedup();
    for (seed, form) in (0..4).flat_map(|seed| forms.iter().map(move |form| (seed, *form))) {
        for block_n in [64, 128] {
            let mut random = Random::new(seed);
            let (kv_heads, group, head_dim) = (random.within(1, 3), random.pick(&[1, 4, 8]), 128);
            let window = (seed % 2 == 1).then(|| random.within(1, 300));
            let mut options = form;
            options.block_n = block_n;
            // Whole prompts, later pieces and single rows; a page is a block of keys.
            let mut lens: Vec<usize> = (0..30).map(|_| random.within(1, 700)).collect();
            lens.extend([block_n - 1, block_n, block_n + 1]);
            let sequences = Sequences::new(&mut random, kv_heads, head_dim, block_n, &lens);
            let placed = sequences.place(&gpu, &mut random);
            let (mut chunks, mut packed, mut tokens) = (Vec::new(), Vec::new(), 0);
            for (i, &len) in lens.iter().enumerate() {
                let position = random.pick(&[0, 0, len / 2, len - 1]);
                let (slot, q_len) = (placed.slots[i], len - position);
                chunks.push(PrefillChunk {
                    slot,
                    q_start: tokens,
                    q_len,
                    position,
                });
                packed.push(PackedSequence {
                    slot,
                    q_start: tokens,
                    q_len,
                    kv_start_pos: position,
                });
                tokens += q_len;
            }
            let mask =
                paged_causal_mask(&placed.table, &packed, options.block_m / group, window).expect("a mask");
            let config = sequences.config();
            let mut attention = PrefillAttention::new(
                &gpu.device,
                &gpu.compiler,
                sequences.shape(group),
                PrefillLimits {
                    max_tokens: tokens,
                    max_chunks: chunks.len(),
                    n_slots: config.n_slots,
                    max_pages_per_slot: config.max_pages_per_slot,
                },
                window,
                None,
                Functions::none(),
                options,
            )
            .expect("these options");
            let row = group * kv_heads * head_dim;
            let q = DeviceBuffer::from_slice(&gpu.stream, &random.values(tokens * row)).unwrap();
            let outputs = [(); 2]
                .map(|()| DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, tokens * row, 0xff).unwrap());
            let mut args = PrefillArgs {
                q: q.as_slice(),
                q_token_stride: row,
                k: placed.k.as_slice(),
                v: placed.v.as_slice(),
                page_table: placed.rows.as_slice(),
                out: outputs[0].as_slice(),
                lse: None,
            };
            let plan = attention.plan(&gpu.stream, &chunks).unwrap();
            let visited = plan.count_blocks(&gpu.compiler, &gpu.stream, &args).unwrap();
            let what = format!("seed {seed}, window {window:?}, {options:?}");
            assert_eq!(visited, kv_heads * mask.n_blocks(), "{what}");
            assert_eq!(plan.blocks(), mask.n_blocks(), "{what}");
            // Counting changes nothing else.
            args.out = outputs[1].as_slice();
            plan.run(&gpu.stream, &args).unwrap();
            let [counted, plain] = [0, 1].map(|i| gpu.stream.download(&outputs[i]).unwrap());
            assert!(bits(&counted) == bits(&plain), "{what}");
            assert!(
                plain.iter().all(|x| x.is_finite()),
                "{what}: NaN of nobody's page was read"
            );
        }
    }
}
