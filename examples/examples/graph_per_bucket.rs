//! One CUDA graph per batch bucket: capture a matrix product for every bucket, replay it for batches of any size.
//!
//! `cargo run --release -p examples --example graph_per_bucket`
//!
//! Without a GPU it shows the buckets alone and says what is missing.

use cuda_graphs::{BucketSet, Device, Error};

const MAX_BATCH: usize = 40;

fn main() -> std::process::ExitCode {
    let buckets = match BucketSet::new(MAX_BATCH) {
        Ok(buckets) => buckets,
        Err(error) => {
            eprintln!("{error}");
            return std::process::ExitCode::FAILURE;
        }
    };
    for rows in [1, 3, 9, 33, 40] {
        eprintln!(
            "a batch of {rows} runs in the bucket of {:?}",
            buckets.for_batch(rows)
        );
    }
    run(buckets)
}

fn run(buckets: BucketSet) -> std::process::ExitCode {
    let device = match Device::open(0) {
        Ok(device) => device,
        // Not a failure of the example: there is nothing to run on.
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            eprintln!("No GPU to capture on: {error}");
            return std::process::ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("The GPU cannot be used: {error}");
            return std::process::ExitCode::FAILURE;
        }
    };
    match on_gpu::run(&device, buckets) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

mod on_gpu {
    use cuda_graphs::{
        BucketSet, CaptureOptions, Device, DeviceBuffer, Error, GraphCache, Matmul, MatmulDims, Result, Rows,
        Stream,
    };
    use half::bf16;

    const FEATURES: usize = 256;

    pub(crate) fn run(device: &Device, buckets: BucketSet) -> Result<()> {
        eprintln!("{}", device.info().name);
        let stream = Stream::new(device)?;
        let matmul = Matmul::new(&stream)?;
        // Twice the identity: what comes out is easy to check.
        let element = |i| bf16::from_f32(if i / FEATURES == i % FEATURES { 2.0 } else { 0.0 });
        let weights: Vec<bf16> = (0..FEATURES * FEATURES).map(element).collect();
        let weights = DeviceBuffer::from_slice(&stream, &weights)?;

        // The graphs read and write this memory by address: it never moves. Rows that no request uses are set to 1.
        let input = Rows::<bf16>::new(&stream, buckets.max(), FEATURES, bf16::ONE)?;
        let output = DeviceBuffer::<f32>::zeroed(device, buckets.max() * FEATURES)?;
        let step = |_: &Stream, input: &Rows<bf16>, bucket: usize| {
            let dims = MatmulDims {
                m: bucket,
                n: FEATURES,
                k: FEATURES,
            };
            matmul.multiply(
                dims,
                input.rows(0..bucket)?,
                &weights,
                output.slice(..bucket * FEATURES)?,
                None,
            )
        };
        // Runs each bucket once, which chooses the product's algorithm, and then captures it, the largest first.
        let options = CaptureOptions::default();
        let graphs = GraphCache::capture::<Error>(&stream, buckets, input, &options, step)?;
        eprintln!("{}", graphs.report());

        for rows in [1, 3, 9, 33, 40] {
            let values: Vec<bf16> = (0..rows * FEATURES)
                .map(|i| bf16::from_f32((i % 100) as f32))
                .collect();
            graphs.buffers().upload(&stream, &values)?;
            let bucket = graphs.replay(rows)?;
            let got = stream.download(output.slice(..bucket * FEATURES)?)?;
            for (index, value) in got.into_iter().enumerate() {
                let expected = if index < values.len() {
                    (index % 100 * 2) as f32
                } else {
                    2.0
                };
                assert_eq!(value, expected, "row {} of {bucket}", index / FEATURES);
            }
            graphs.verify::<Error>(rows, &[], &[&output], step)?;
        }
        eprintln!("replays equal eager runs bit for bit: {:?}", graphs.stats());
        Ok(())
    }
}
