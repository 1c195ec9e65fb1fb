//! Kernel options on a GPU: each takes effect, none changes numbers beyond the order of sums, what cannot work is refused;
//! and the device does not wait for the host.
#![cfg(feature = "cuda")]

mod gpu_support;

use gpu_support::{pool, tiny};
use qwen3_model::cuda::{DecodeRow, Stage, WeightSource};
use qwen3_model::{KernelOptions, Qwen3Config};
use rollout_engine::cuda_runner::{CudaRunner, CudaSettings};
use rollout_engine::{Error, Event, PoolSettings, SamplingParams, Scheduler, TokenCompletion};

fn open(kernels: &str) -> Result<CudaRunner, Error> {
    let (config, weights, _) = tiny();
    let pool = pool(if cuda_graphs::few_cases() { 8 } else { 32 }, 64, 600, 2048);
    let settings = CudaSettings {
        kernels: kernels.parse().unwrap(),
        ..CudaSettings::default()
    };
    CudaRunner::open(&config, WeightSource::Given(&weights), &pool, &settings)
}

/// Prompts of up to four pages.
fn prompts() -> Vec<Vec<u32>> {
    let n = if cuda_graphs::few_cases() { 5 } else { 24 };
    (0..n)
        .map(|i| (0..40 + 9 * i).map(|j| 1 + (i * 31 + j * 17) % 500).collect())
        .collect()
}

/// Of each completion.
fn new_tokens() -> usize {
    if cuda_graphs::few_cases() { 10 } else { 40 }
}

fn run(runner: CudaRunner, eos: Vec<u32>, ignore_eos: bool) -> (Vec<TokenCompletion>, Scheduler<CudaRunner>) {
    let mut scheduler = Scheduler::new(runner, eos).unwrap();
    let sampling = SamplingParams {
        max_new_tokens: new_tokens(),
        ignore_eos,
        ..SamplingParams::default()
    };
    for prompt in prompts() {
        scheduler.submit(prompt, &sampling).unwrap();
    }
    let (mut events, mut done) = (Vec::new(), Vec::new());
    while scheduler.has_unfinished() {
        scheduler.step(&mut events).unwrap();
        for event in events.drain(..) {
            if let Event::Finished { request, result, .. } = event {
                done.push((request, result.unwrap()));
            }
        }
    }
    done.sort_by_key(|(request, _)| *request);
    let completions = done.into_iter().map(|(_, completion)| completion).collect();
    (completions, scheduler)
}

/// Mean |difference| of log-probabilities up to and including each pair's first different token.
fn difference(ours: &[TokenCompletion], theirs: &[TokenCompletion]) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for (a, b) in ours.iter().zip(theirs) {
        for i in 0..a.token_ids.len().min(b.token_ids.len()) {
            sum += f64::from((a.logprobs[i] - b.logprobs[i]).abs());
            count += 1;
            if a.token_ids[i] != b.token_ids[i] {
                break;
            }
        }
    }
    let fewest = if cuda_graphs::few_cases() { 10 } else { 200 };
    assert!(count > fewest, "{count} tokens compared");
    sum / f64::from(count)
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn options_take_effect_and_change_no_more_than_the_order_of_sums() {
    let (default, _) = run(open("{}").unwrap(), Vec::new(), true);
    for kernels in cuda_graphs::cases([
        r#"{"decode": {"split_kv": 64}}"#,
        r#"{"decode": {"warps": 2, "stages": 4, "blocks_per_multiprocessor": 1}}"#,
        r#"{"decode": {"split_kv": 32, "max_splits": 4}}"#,
        r#"{"prefill": {"kernel": "mma"}}"#,
        r#"{"prefill": {"kernel": "mma", "block_m": 64, "block_n": 32, "blocks_per_multiprocessor": 1}}"#,
        r#"{"prefill": {"USE_TMA": false, "num_stages": 2, "blocks_per_multiprocessor": 1}}"#,
        r#"{"matrix": {"layer_kernel_rows": 0}}"#,
        r#"{"matrix": {"split_k": false, "algorithms": 2}}"#,
        r#"{"matrix": {"library": false}}"#,
    ]) {
        let runner = open(kernels).unwrap();
        let given: KernelOptions = kernels.parse().unwrap();
        let (decode, prefill) = runner.backend().attention_options();
        let expect = |what: &str, given: Option<usize>, used: usize| {
            assert!(
                given.is_none_or(|given| given == used),
                "{kernels}: {what} is {used}"
            );
        };
        expect("warps", given.decode.warps, decode.warps);
        expect("stages", given.decode.stages, decode.stages);
        expect("max_splits", given.decode.max_splits, decode.max_splits);
        assert!(given.decode.split_kv.is_none() || given.decode.split_kv == decode.split);
        expect("block_m", given.prefill.block_m, prefill.block_m);
        expect("block_n", given.prefill.block_n, prefill.block_n);
        expect("stages", given.prefill.stages, prefill.stages);
        let library = runner.backend().library_version().is_some();
        assert_eq!(library, given.matrix.library.unwrap_or(library), "{kernels}");
        let forced = given.prefill.kernel.is_some() || given.prefill.use_tma.is_some();
        assert!(!forced || !prefill.warpgroup_products, "{kernels}");
        let (completions, scheduler) = run(runner, Vec::new(), true);
        let difference = difference(&default, &completions);
        println!("{kernels}: log-probabilities differ by {difference:.6}");
        assert!(difference < 0.02, "{kernels}: {difference}");
        // Without the layer kernel its stages are launches of their own.
        let mut runner = scheduler.into_runner();
        let rows = [DecodeRow::greedy(0, 0)];
        let times = runner
            .backend_mut()
            .profile_stages(&rows, &[Some(Stage::Layer), Some(Stage::O)])
            .unwrap();
        if given.matrix.layer_kernel_rows == Some(0) {
            assert!(
                times[0].nodes <= 1 && times[1].nodes > times[0].nodes,
                "{times:?}"
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn options_that_cannot_work_are_refused_by_their_flag_and_name() {
    for (kernels, flag, word) in [
        (r#"{"decode": {"warps": 3}}"#, "decode_kernel_options", "warps"),
        (
            r#"{"decode": {"split_kv": 100}}"#,
            "decode_kernel_options",
            "split",
        ),
        (
            r#"{"decode": {"warps": 8, "stages": 8}}"#,
            "decode_kernel_options",
            "shared memory",
        ),
        (
            r#"{"decode": {"blocks_are_contiguous": true}}"#,
            "decode_kernel_options",
            "blocks_are_contiguous",
        ),
        (
            r#"{"prefill": {"BLOCKS_ARE_CONTIGUOUS": true}}"#,
            "prefill_kernel_options",
            "blocks_are_contiguous",
        ),
        (
            r#"{"prefill": {"block_m": 48}}"#,
            "prefill_kernel_options",
            "block_m",
        ),
        (
            r#"{"prefill": {"kernel": "mma", "use_tma": true}}"#,
            "prefill_kernel_options",
            "use_tma",
        ),
        (
            r#"{"matrix": {"algorithms": 0}}"#,
            "matrix_kernel_options",
            "algorithms",
        ),
        (
            r#"{"matrix": {"layer_kernel_rows": 1000}}"#,
            "matrix_kernel_options",
            "layer_kernel_rows",
        ),
    ] {
        match open(kernels) {
            Err(Error::InvalidSetting { setting, advice, .. }) => {
                assert_eq!(setting, flag, "{kernels}");
                assert!(advice.contains(word), "{kernels}: {advice}");
            }
            other => panic!("{kernels}: {other:?}"),
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn running_ahead_wastes_at_most_one_row_per_sequence_that_ends() {
    let (free, _) = run(open("{}").unwrap(), Vec::new(), true);
    // Ids that end many of the completions, at different places.
    let eos: Vec<u32> = free
        .iter()
        .map(|completion| completion.token_ids[new_tokens() / 2])
        .collect();
    let (completions, scheduler) = run(open("{}").unwrap(), eos.clone(), false);
    let mut early = 0;
    for ended in &completions {
        let end = ended.token_ids.iter().position(|id| eos.contains(id));
        let length = ended.token_ids.len();
        early += u64::from(length < new_tokens());
        assert_eq!(
            end.map_or(new_tokens(), |at| at + 1),
            length,
            "it ends with the first such id"
        );
    }
    let wasted = scheduler.statistics().wasted_rows;
    assert!(
        early > 0 && wasted <= early,
        "{wasted} rows for {early} sequences"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_device_does_not_wait_for_the_host_between_decode_steps() {
    const NEW_TOKENS: usize = 48;
    let config = Qwen3Config::published_shape("qwen3-4b").unwrap();
    for batch in [1, 8, 16, 32, 64, 128, 256] {
        let pool = PoolSettings {
            max_batch_size: Some(batch),
            max_seq_length: Some(512),
            n_pages: Some(batch * 8 + 1),
            page_size: Some(64),
            max_prefill_tokens: None,
        };
        let settings = CudaSettings::default();
        let mut runner = CudaRunner::open(&config, WeightSource::Random(1), &pool, &settings).unwrap();
        runner.backend_mut().trace_decode(1000).unwrap();
        let mut scheduler = Scheduler::new(runner, Vec::new()).unwrap();
        let sampling = SamplingParams {
            max_new_tokens: NEW_TOKENS,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        for i in 0..batch as u32 {
            let prompt = (0..64 + i % 64).map(|j| 1000 + i * 31 + j).collect();
            scheduler.submit(prompt, &sampling).unwrap();
        }
        let mut events = Vec::new();
        while scheduler.has_unfinished() {
            scheduler.step(&mut events).unwrap();
        }
        let mut runner = scheduler.into_runner();
        let spans = runner.backend_mut().take_decode_trace().unwrap();
        // The last steps: no prompts are left.
        let counted = &spans[spans.len() - NEW_TOKENS / 2..spans.len() - 2];
        let gap: f64 = counted.iter().map(|span| span.gap_ms).sum();
        let busy: f64 = counted.iter().map(|span| span.busy_ms).sum();
        let percent = 100.0 * gap / (gap + busy);
        let steps = counted.len();
        println!(
            "batch {batch}: {steps} steps of {:.3} ms, waiting {percent:.2} %",
            busy / steps as f64
        );
        assert!(percent < 3.0, "batch {batch}: {percent:.2} %");
    }
}
