//! Causal prefill of packed chunks against f64, by the ≤ 2× rule, and its invariances.
#![cfg(feature = "cuda")]

mod gpu_common;

use block_mask::cuda::{
    CudaError, Functions, PrefillArgs, PrefillAttention, PrefillChunk, PrefillLimits, TileOptions,
};
use block_mask::{MaskMod, ScoreMod, alibi_slopes};
use cuda_graphs::DeviceBuffer;
use gpu_common::{Errors, Gpu, Placed, Random, Sequences, bits, gpu};
use half::bf16;

struct Setup {
    group: usize,
    window: Option<usize>,
    scale: Option<f32>,
    options: TileOptions,
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
}

/// The form for every device, and the one for this device if it is another.
fn forms(gpu: &Gpu) -> Vec<TileOptions> {
    let mut forms = vec![TileOptions::default(), TileOptions::for_device(gpu.device.info())];
    forms.dedup();
    forms
}

impl Setup {
    fn plain(group: usize) -> Setup {
        Setup::with(group, TileOptions::default())
    }

    fn with(group: usize, options: TileOptions) -> Setup {
        Setup {
            group,
            window: None,
            scale: None,
            options,
            mask: None,
            score: None,
        }
    }

    fn attention(&self, gpu: &Gpu, sequences: &Sequences) -> Result<PrefillAttention, CudaError> {
        let config = sequences.config();
        let limits = PrefillLimits {
            max_tokens: sequences.lens.iter().sum::<usize>() + 64,
            max_chunks: 256,
            n_slots: config.n_slots,
            max_pages_per_slot: config.max_pages_per_slot,
        };
        let functions = Functions::new(&gpu.stream, self.mask.as_ref(), self.score.as_ref())?;
        let shape = sequences.shape(self.group);
        let (device, options) = (&gpu.device, self.options);
        PrefillAttention::new(
            device,
            &gpu.compiler,
            shape,
            limits,
            self.window,
            self.scale,
            functions,
            options,
        )
    }

    fn heads(&self, sequences: &Sequences) -> usize {
        self.group * sequences.kv_heads
    }
}

/// Queries for the tokens `starts[i]..lens[i]` of each sequence, packed one after another after `gap` rows of nobody.
struct Queries {
    starts: Vec<usize>,
    rows: Vec<usize>,
    n: usize,
    stride: usize,
    values: Vec<bf16>,
}

impl Queries {
    fn new(
        random: &mut Random,
        setup: &Setup,
        sequences: &Sequences,
        starts: Vec<usize>,
        gap: usize,
    ) -> Queries {
        let mut n = gap;
        let mut rows = Vec::new();
        for (start, len) in starts.iter().zip(&sequences.lens) {
            rows.push(n);
            n += len - start;
        }
        // As part of a wider fused QKV tensor.
        let stride = setup.heads(sequences) * sequences.head_dim + 64;
        let values = random.values(n * stride);
        Queries {
            starts,
            rows,
            n,
            stride,
            values,
        }
    }

    /// Whole sequences as one chunk each, or cut at random places and in random order.
    fn chunks(
        &self,
        random: &mut Random,
        sequences: &Sequences,
        placed: &Placed,
        cut: bool,
    ) -> Vec<PrefillChunk> {
        let mut chunks = Vec::new();
        for (i, &len) in sequences.lens.iter().enumerate() {
            let mut position = self.starts[i];
            while position < len {
                let q_len = if cut {
                    random.within(1, 70).min(len - position)
                } else {
                    len - position
                };
                let q_start = self.rows[i] + position - self.starts[i];
                chunks.push(PrefillChunk {
                    slot: placed.slots[i],
                    q_start,
                    q_len,
                    position,
                });
                position += q_len;
            }
        }
        random.shuffle(&mut chunks);
        chunks
    }
}

/// Queries of sequences that lie at random places, in chunks.
struct Case<'a> {
    gpu: &'a Gpu,
    setup: &'a Setup,
    sequences: &'a Sequences,
    queries: &'a Queries,
    placed: Placed,
    chunks: Vec<PrefillChunk>,
}

impl<'a> Case<'a> {
    fn new(
        gpu: &'a Gpu,
        setup: &'a Setup,
        sequences: &'a Sequences,
        queries: &'a Queries,
        random: &mut Random,
        cut: bool,
    ) -> Self {
        let placed = sequences.place(gpu, random);
        let chunks = queries.chunks(random, sequences, &placed, cut);
        Self {
            gpu,
            setup,
            sequences,
            queries,
            placed,
            chunks,
        }
    }

    fn run(&self, attention: &mut PrefillAttention) -> (Vec<bf16>, Vec<f32>) {
        let Self {
            gpu,
            sequences,
            queries,
            placed,
            ..
        } = self;
        let (stream, heads) = (&gpu.stream, self.setup.heads(sequences));
        let q = DeviceBuffer::from_slice(stream, &queries.values).unwrap();
        let n = queries.n * heads;
        let out = DeviceBuffer::<bf16>::filled_with_bytes(&gpu.device, n * sequences.head_dim, 0xff).unwrap();
        let lse = DeviceBuffer::<f32>::filled_with_bytes(&gpu.device, n, 0xff).unwrap();
        let plan = attention.plan(stream, &self.chunks).unwrap();
        let args = PrefillArgs {
            q: q.as_slice(),
            q_token_stride: queries.stride,
            k: placed.k.as_slice(),
            v: placed.v.as_slice(),
            page_table: placed.rows.as_slice(),
            out: out.as_slice(),
            lse: Some(lse.as_slice()),
        };
        plan.run(stream, &args).unwrap();
        (stream.download(&out).unwrap(), stream.download(&lse).unwrap())
    }

    /// Runs the chunks and compares with f64.
    fn check(&self, attention: &mut PrefillAttention, what: &str) {
        let Self {
            setup,
            sequences,
            queries,
            placed,
            ..
        } = self;
        let (out, lse) = &self.run(attention);
        let (d, heads) = (sequences.head_dim, setup.heads(sequences));
        let scale = setup.scale.unwrap_or(1.0 / (d as f32).sqrt());
        let mut errors = Errors::default();
        for (b, chunk) in self.chunks.iter().enumerate() {
            let i = placed.slots.iter().position(|slot| *slot == chunk.slot).unwrap();
            for token in 0..chunk.q_len {
                let (row, position) = (chunk.q_start + token, chunk.position + token);
                for h in 0..heads {
                    let score = |score: f32, kv: usize| {
                        let seen = kv <= position && setup.window.is_none_or(|window| position < kv + window);
                        let allowed = seen
                            && setup
                                .mask
                                .as_ref()
                                .is_none_or(|mask| mask.allows(b, h, position, kv));
                        allowed.then(|| {
                            setup
                                .score
                                .as_ref()
                                .map_or(score, |f| f.eval(score, b, h, position, kv))
                        })
                    };
                    let q = &queries.values[row * queries.stride + h * d..][..d];
                    let answer = sequences.attend(i, h / setup.group, q, scale, &score);
                    let at = row * heads + h;
                    errors.add(
                        &format!("{what}, row {row}, head {h}"),
                        &out[at * d..][..d],
                        Some(lse[at]),
                        &answer,
                    );
                }
            }
        }
        errors.check(what);
        let gap = queries.rows.first().copied().unwrap_or(0) * heads * d;
        assert!(
            out[..gap].iter().all(|x| x.to_bits() == 0xffff),
            "{what}: rows of no chunk were written"
        );
    }
}

fn random_sequences(random: &mut Random, head_dim: usize) -> Sequences {
    let page_size = random.pick(&[16, 32, 64, 128, 256]);
    let n = random.within(1, 3);
    let mut lens: Vec<usize> = (0..n).map(|_| random.within(1, 180)).collect();
    lens[0] = random.pick(&[1, 16, 17, 63, 64, 65, 128, 129, page_size, page_size + 1]);
    let kv_heads = random.within(1, 2);
    Sequences::new(random, kv_heads, head_dim, page_size, &lens)
}

fn random_starts(random: &mut Random, sequences: &Sequences) -> Vec<usize> {
    sequences
        .lens
        .iter()
        .map(|&len| {
            if random.below(2) == 0 {
                0
            } else {
                random.below(len)
            }
        })
        .collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn random_chunks_and_options_stay_within_twice_the_error_of_bf16() {
    let gpu = gpu();
    let forms = forms(&gpu);
    for seed in cuda_graphs::cases(0..30) {
        let mut random = Random::new(seed);
        let head_dim = random.pick(&[64, 128]);
        let sequences = random_sequences(&mut random, head_dim);
        let mut setup = Setup::plain(random.within(1, 6));
        setup.window = (random.below(3) == 0).then(|| random.within(1, 100));
        (setup.options.block_m, setup.options.warps) = random.pick(&[(128, 4), (64, 4), (128, 8)]);
        setup.options.block_n = random.pick(&[32, 64, 128]);
        setup.options.stages = random.within(1, 2);
        setup.options.blocks_per_multiprocessor = 1;
        if random.below(2) == 0 {
            setup.options = random.pick(&forms);
            setup.options.block_n = random.pick(&[64, 128]);
        }
        let mut attention = match setup.attention(&gpu, &sequences) {
            Err(CudaError::OptionRefused { .. }) => continue,
            made => made.unwrap(),
        };
        let starts = random_starts(&mut random, &sequences);
        let gap = random.below(5);
        let queries = Queries::new(&mut random, &setup, &sequences, starts, gap);
        let cut = random.below(2) == 0;
        let case = Case::new(&gpu, &setup, &sequences, &queries, &mut random, cut);
        case.check(&mut attention, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_ratio_of_query_to_kv_heads_and_every_page_size() {
    let gpu = gpu();
    let mut random = Random::new(100);
    for group in cuda_graphs::cases(1..=16) {
        for (head_dim, form) in [64, 128]
            .iter()
            .flat_map(|&d| forms(&gpu).into_iter().map(move |form| (d, form)))
        {
            let sequences = Sequences::new(&mut random, 2, head_dim, 16 << (group % 5), &[70, 33]);
            let setup = Setup::with(group, form);
            let mut attention = setup.attention(&gpu, &sequences).unwrap();
            let queries = Queries::new(&mut random, &setup, &sequences, vec![40, 0], 0);
            let case = Case::new(&gpu, &setup, &sequences, &queries, &mut random, false);
            let what = format!("group {group}, head_dim {head_dim}, {form:?}");
            case.check(&mut attention, &what);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn neither_the_placement_of_pages_nor_the_cut_into_chunks_changes_a_bit() {
    let gpu = gpu();
    for (seed, form) in
        cuda_graphs::cases((0..6).flat_map(|seed| forms(&gpu).into_iter().map(move |form| (seed, form))))
    {
        let mut random = Random::new(200 + seed);
        let sequences = Sequences::new(&mut random, 2, 128, 32, &[300, 77, 129]);
        let setup = Setup {
            window: (seed % 2 == 1).then_some(60),
            ..Setup::with(4, form)
        };
        let mut attention = setup.attention(&gpu, &sequences).unwrap();
        let queries = Queries::new(&mut random, &setup, &sequences, vec![0; 3], 0);
        let mut case = |cut| Case::new(&gpu, &setup, &sequences, &queries, &mut random, cut);
        let (whole, pieces) = (case(false), case(true));
        assert!(pieces.chunks.len() > 3);
        let (a, b) = (whole.run(&mut attention), pieces.run(&mut attention));
        assert_eq!(bits(&a.0), bits(&b.0), "seed {seed}");
        assert_eq!(a.1, b.1, "seed {seed}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn mask_and_score_functions_are_applied_as_on_the_cpu() {
    let gpu = gpu();
    for (seed, form) in
        cuda_graphs::cases((0..6).flat_map(|seed| forms(&gpu).into_iter().map(move |form| (seed, form))))
    {
        let mut random = Random::new(300 + seed);
        let sequences = random_sequences(&mut random, 128);
        let mut setup = Setup::with(random.within(1, 4), form);
        let heads = setup.heads(&sequences);
        let window = MaskMod::sliding_window(random.within(1, 50));
        setup.mask = (seed % 3 != 0).then(|| window | MaskMod::prefix_lm(vec![3, 0, 9]));
        let score = ScoreMod::alibi(alibi_slopes(heads).unwrap()).then(&ScoreMod::soft_cap(15.0).unwrap());
        setup.score = (seed % 3 != 1).then_some(score);
        let mut attention = setup.attention(&gpu, &sequences).unwrap();
        let starts = random_starts(&mut random, &sequences);
        let queries = Queries::new(&mut random, &setup, &sequences, starts, 2);
        let case = Case::new(&gpu, &setup, &sequences, &queries, &mut random, false);
        case.check(&mut attention, &format!("seed {seed}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn more_tiles_than_multiprocessors() {
    let gpu = gpu();
    for form in forms(&gpu) {
        let mut random = Random::new(450);
        let lens: Vec<usize> = (0..40).map(|_| random.within(1, 90)).chain([400]).collect();
        let sequences = Sequences::new(&mut random, 8, 64, 16, &lens);
        let setup = Setup::with(4, form);
        let mut attention = setup.attention(&gpu, &sequences).unwrap();
        let starts = random_starts(&mut random, &sequences);
        let queries = Queries::new(&mut random, &setup, &sequences, starts, 3);
        let case = Case::new(&gpu, &setup, &sequences, &queries, &mut random, false);
        // Twice: a launch leaves nothing behind that the next one could stumble over.
        for _ in 0..2 {
            case.check(&mut attention, &format!("{form:?}"));
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_long_prompt_and_a_prescaled_query() {
    let gpu = gpu();
    let mut random = Random::new(400);
    let sequences = Sequences::new(&mut random, 1, 64, 128, &[1500]);
    let setup = |prescale: bool| {
        let mut setup = Setup::plain(2);
        setup.scale = Some(0.125);
        setup.options.prescale_qk = prescale;
        setup
    };
    let plain = setup(false);
    let queries = Queries::new(&mut random, &plain, &sequences, vec![1100], 0);
    let case = Case::new(&gpu, &plain, &sequences, &queries, &mut random, false);
    for prescale in [false, true] {
        let mut attention = setup(prescale).attention(&gpu, &sequences).unwrap();
        case.check(&mut attention, &format!("prescale {prescale}"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn options_that_would_give_wrong_numbers_are_refused() {
    let gpu = gpu();
    let mut random = Random::new(500);
    let sequences = Sequences::new(&mut random, 1, 128, 16, &[20]);
    let refused = |setup: Setup, name: &str| match setup.attention(&gpu, &sequences) {
        Err(CudaError::OptionRefused { option, .. }) => assert_eq!(option, name),
        other => panic!("{name} gave {other:?}"),
    };
    let with = |change: fn(&mut TileOptions)| {
        let mut setup = Setup::plain(1);
        change(&mut setup.options);
        setup
    };
    refused(with(|options| options.prescale_qk = true), "prescale_qk");
    refused(with(|options| options.block_m = 96), "block_m");
    refused(with(|options| options.warps = 2), "warps");
    refused(
        Setup {
            window: Some(5),
            ..with(|options| options.rows_guaranteed_safe = true)
        },
        "rows_guaranteed_safe",
    );
    let masked = Setup {
        mask: Some(MaskMod::none()),
        ..with(|options| options.rows_guaranteed_safe = true)
    };
    refused(masked, "rows_guaranteed_safe");
    let chunk = |slot, position, q_len| PrefillChunk {
        slot,
        q_start: 0,
        q_len,
        position,
    };
    let mut attention = Setup::plain(1).attention(&gpu, &sequences).unwrap();
    let far = paged_kv::Slot::new(1000);
    assert!(
        attention.plan(&gpu.stream, &[chunk(far, 0, 1)]).is_err(),
        "a slot outside the table"
    );
    let slot = paged_kv::Slot::new(1);
    assert!(
        attention
            .plan(&gpu.stream, &[chunk(slot, usize::MAX, 1)])
            .is_err(),
        "positions past the table"
    );
    assert!(
        attention.plan(&gpu.stream, &[chunk(slot, 0, 5000)]).is_err(),
        "too many tokens"
    );
}
