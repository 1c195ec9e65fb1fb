use std::panic::{AssertUnwindSafe, catch_unwind};

use cuda_graphs::{
    BucketSet, Capture, CaptureOptions, DeviceBuffer, Error, Event, GraphCache, Kernel, LaunchConfig,
    MemoryPool, Result, Rows, StaticBuffers, Stream,
};

use crate::support::{Add, Shift, kernel, module, stream};

fn add(kernel: &Kernel, stream: &Stream, x: &DeviceBuffer<u32>, value: u32) -> Result<()> {
    let n = x.len() as u32;
    let params = Add { x: x.ptr(), n, value };
    // SAFETY: `x` has `n` elements; the tests keep it until the work is done.
    unsafe { kernel.launch(stream, &LaunchConfig::new(n.div_ceil(256), 256), &params) }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_graph_does_its_work_at_each_launch_and_not_while_captured() {
    let stream = stream();
    let kernel = kernel(&stream, "add");
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 1000).unwrap();
    let graph = Capture::record::<Error>(&stream, |stream| {
        assert!(stream.is_capturing());
        add(&kernel, stream, &x, 2)?;
        add(&kernel, stream, &x, 3)
    })
    .unwrap();
    assert_eq!(graph.nodes(), 2);
    assert_eq!(stream.download(&x).unwrap(), [0; 1000]);
    graph.upload(&stream).unwrap();
    for _ in 0..10 {
        graph.launch(&stream).unwrap();
    }
    assert_eq!(stream.download(&x).unwrap(), [50; 1000]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_graph_owns_what_safe_calls_captured() {
    let stream = stream();
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 1 << 20).unwrap();
    let y = DeviceBuffer::<u32>::zeroed(stream.device(), 1 << 20).unwrap();
    let kernel = kernel(&stream, "add");
    let graph = {
        // Module, kernel and the buffers go out of scope before the replay.
        let between = DeviceBuffer::<u32>::zeroed(stream.device(), 1 << 20).unwrap();
        let by_address = DeviceBuffer::<u32>::filled_with_bytes(stream.device(), 256, 1).unwrap();
        let capture = Capture::begin(&stream).unwrap();
        stream.copy(&between, &x).unwrap();
        stream.copy(&y, &between).unwrap();
        add(&kernel, &stream, &y, 1).unwrap();
        stream.keep_memory(&by_address);
        add(&kernel, &stream, &by_address, 1).unwrap();
        capture.finish().unwrap()
    };
    drop(kernel);
    // Would take the memory if it had been freed.
    let noise = DeviceBuffer::<u32>::filled_with_bytes(stream.device(), 1 << 20, 0xee).unwrap();
    stream.fill(&x, 41).unwrap();
    graph.launch(&stream).unwrap();
    assert!(stream.download(&y).unwrap().iter().all(|&value| value == 42));
    assert!(
        stream
            .download(&noise)
            .unwrap()
            .iter()
            .all(|&value| value == 0xeeee_eeee)
    );
}

/// The stream captures nothing, and works.
fn assert_usable(stream: &Stream) {
    assert!(!stream.is_capturing());
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 8).unwrap();
    stream.fill(&x, 9).unwrap();
    assert_eq!(stream.download(&x).unwrap(), [9; 8]);
    let graph = Capture::record::<Error>(stream, |stream| stream.fill(&x, 0x0102_0304)).unwrap();
    graph.launch(stream).unwrap();
    assert_eq!(stream.download(&x).unwrap(), [0x0102_0304; 8]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_error_while_capturing_ends_the_capture_and_comes_back_as_it_is() {
    let stream = stream();
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 8).unwrap();
    let result = Capture::record::<Error>(&stream, |stream| {
        stream.fill(&x, 1)?;
        stream.upload(&x, &[1; 8])?;
        panic!("an upload from pageable memory was captured");
    });
    assert_eq!(
        result.unwrap_err(),
        Error::ForbiddenInCapture {
            call: "an upload from pageable memory"
        }
    );
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_panic_while_capturing_ends_the_capture() {
    let stream = stream();
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 8).unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        Capture::record::<Error>(&stream, |stream| {
            stream.fill(&x, 1)?;
            std::panic::resume_unwind(Box::new("a bug in the code that captures"));
        })
    }));
    assert!(outcome.is_err());
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_dropped_capture_is_thrown_away() {
    let stream = stream();
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 8).unwrap();
    let capture = Capture::begin(&stream).unwrap();
    stream.fill(&x, 1).unwrap();
    assert!(matches!(
        Capture::begin(&stream),
        Err(Error::ForbiddenInCapture { .. })
    ));
    drop(capture);
    assert_eq!(stream.download(&x).unwrap(), [0; 8]);
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_a_capture_forbids_is_refused_and_does_not_break_it() {
    let stream = stream();
    let device = stream.device();
    let x = DeviceBuffer::<u32>::zeroed(device, 8).unwrap();
    let dropped = DeviceBuffer::<u32>::zeroed(device, 8).unwrap();
    let module = module(&stream);
    let graph = Capture::record::<Error>(&stream, |stream| {
        let allocated = DeviceBuffer::<u32>::zeroed(device, 8);
        assert_eq!(
            allocated.unwrap_err(),
            Error::ForbiddenInCapture { call: "cuMemAlloc" }
        );
        assert!(matches!(
            stream.synchronize(),
            Err(Error::ForbiddenInCapture { .. })
        ));
        assert!(matches!(
            device.synchronize(),
            Err(Error::ForbiddenInCapture { .. })
        ));
        assert!(matches!(
            stream.download(&x),
            Err(Error::ForbiddenInCapture { .. })
        ));
        // Freed when the capture is over.
        drop(dropped);
        drop(module);
        stream.fill(&x, 0x0506_0708)
    })
    .unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(stream.download(&x).unwrap(), [0x0506_0708; 8]);
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_capture_the_driver_breaks_names_the_call() {
    let stream = stream();
    let other = Stream::new(stream.device()).unwrap();
    let x = DeviceBuffer::<u32>::zeroed(stream.device(), 8).unwrap();
    let forked = Event::without_timing(stream.device()).unwrap();
    let capture = Capture::begin(&stream).unwrap();
    stream.fill(&x, 1).unwrap();
    stream.record(&forked).unwrap();
    // The other stream joins the capture by waiting, and is never joined back.
    other.wait(&forked).unwrap();
    other.fill(&x, 2).unwrap();
    let Err(Error::CaptureFailed { call, reason }) = capture.finish() else {
        panic!("an unjoined capture ended well")
    };
    assert!(call.contains("cuStreamEndCapture"), "{call}: {reason}");
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn early_starting_kernels_replay_in_a_graph() {
    let stream = stream();
    let shift = kernel(&stream, "shift");
    let n = 1u32 << 20;
    let start: Vec<u32> = (0..n).collect();
    let buffers = [
        DeviceBuffer::from_slice(&stream, &start).unwrap(),
        DeviceBuffer::from_slice(&stream, &start).unwrap(),
    ];
    let graph = Capture::record::<Error>(&stream, |stream| {
        for step in 0..20u32 {
            let (from, to) = (&buffers[step as usize % 2], &buffers[(step as usize + 1) % 2]);
            let params = Shift {
                from: from.ptr(),
                to: to.ptr(),
                n,
                by: step * 7919,
            };
            // SAFETY: both buffers have `n` elements and outlive the replays.
            unsafe {
                shift.launch(
                    stream,
                    &LaunchConfig::new(n / 256, 256).programmatic(true),
                    &params,
                )
            }?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(graph.nodes(), 20);
    for _ in 0..30 {
        graph.launch(&stream).unwrap();
    }
    let by: u32 = (0..20u32).map(|step| step * 7919).sum::<u32>().wrapping_mul(30);
    let expected: Vec<u32> = (0..n).map(|i| (i + by) % n + 600).collect();
    assert_eq!(stream.download(&buffers[0]).unwrap(), expected);
}

/// A toy step: `out[row] = input[row] + 1` for a bucket's rows, and a count of steps.
struct Step {
    input: Rows<u32>,
    out: DeviceBuffer<u32>,
    steps: DeviceBuffer<u32>,
    add: Kernel,
}

impl StaticBuffers for Step {
    fn pad(&self, stream: &Stream, rows: std::ops::Range<usize>) -> Result<()> {
        self.input.pad(stream, rows)
    }
}

const PADDING: u32 = 1_000_000;

impl Step {
    fn new(stream: &Stream, max: usize) -> Self {
        Self {
            input: Rows::new(stream, max, 1, PADDING).unwrap(),
            out: DeviceBuffer::filled_with_bytes(stream.device(), max, 0xff).unwrap(),
            steps: DeviceBuffer::zeroed(stream.device(), 1).unwrap(),
            add: kernel(stream, "add"),
        }
    }

    fn run(&self, stream: &Stream, bucket: usize, plus: u32) -> Result<()> {
        stream.copy(self.out.slice(..bucket)?, self.input.rows(0..bucket)?)?;
        let params = Add {
            x: self.out.ptr(),
            n: bucket as u32,
            value: plus,
        };
        let one = LaunchConfig::new(1, 256);
        // SAFETY: `out` has at least `bucket` elements, `steps` one; both are owned with the graphs.
        unsafe {
            self.add.launch(stream, &one, &params)?;
            self.add.launch(
                stream,
                &one,
                &Add {
                    x: self.steps.ptr(),
                    n: 1,
                    value: 1,
                },
            )
        }
    }
}

fn cache(stream: &Stream, max: usize) -> GraphCache<Step> {
    let buckets = BucketSet::new(max).unwrap();
    let options = CaptureOptions::default();
    let run = |stream: &Stream, step: &Step, bucket: usize| step.run(stream, bucket, 1);
    GraphCache::capture::<Error>(stream, buckets, Step::new(stream, max), &options, run).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_batch_runs_in_its_bucket_with_padded_rows_beyond() {
    let stream = stream();
    let cache = cache(&stream, 40);
    eprintln!("{}", cache.report());
    let captured: Vec<_> = cache
        .report()
        .buckets
        .iter()
        .map(|bucket| bucket.bucket)
        .collect();
    assert_eq!(captured, [40, 32, 16, 8, 4, 2, 1], "largest first");
    assert!(
        cache
            .report()
            .buckets
            .iter()
            .all(|bucket| bucket.nodes == 3 && bucket.capture_ms > 0.0)
    );
    let step = cache.buffers();
    stream.fill(&step.steps, 0).unwrap();
    for rows in 1..=40usize {
        stream.fill(&step.out, u32::MAX - 1).unwrap();
        let input: Vec<u32> = (0..rows as u32).map(|row| row * 100 + rows as u32).collect();
        step.input.upload(&stream, &input).unwrap();
        let bucket = cache.replay(rows).unwrap();
        assert_eq!(Some(bucket), cache.buckets().for_batch(rows));
        let expected: Vec<u32> = (0..40)
            .map(|row| match row {
                row if row < rows => input[row] + 1,
                row if row < bucket => PADDING + 1,
                _ => u32::MAX - 1,
            })
            .collect();
        assert_eq!(stream.download(&step.out).unwrap(), expected, "{rows} rows");
    }
    assert_eq!(stream.download(&step.steps).unwrap(), [40], "one step per replay");
    assert_eq!(cache.stats().replays, 40);
    assert_eq!(cache.stats().by_bucket[&16], 8);
    assert!(matches!(
        cache.replay(41),
        Err(Error::BatchTooLarge { rows: 41, max: 40 })
    ));
    assert!(matches!(cache.replay(0), Err(Error::InvalidArgument { .. })));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn replay_is_verified_against_eager_and_a_planted_difference_is_found() {
    let stream = stream();
    let cache = cache(&stream, 12);
    let step = cache.buffers();
    step.input.upload(&stream, &(0..12).collect::<Vec<_>>()).unwrap();
    for rows in 1..=12 {
        stream.fill_bytes(&step.out, 0xff).unwrap();
        let report = cache
            .verify::<Error>(rows, &[&step.steps], &[&step.out], |stream, step, bucket| {
                step.run(stream, bucket, 1)
            })
            .unwrap();
        assert_eq!((report.buffers, report.bytes), (1, 48));
        assert!(report.changed > 0, "something was shown");
    }
    let steps = stream.download(&step.steps).unwrap();
    let planted = cache.verify::<Error>(3, &[&step.steps], &[&step.out], |stream, step, bucket| {
        step.run(stream, bucket, 2)
    });
    let Err(Error::ReplayDiffers {
        buffer: 0,
        first: 0,
        differing,
        bytes: 48,
    }) = planted
    else {
        panic!("a different run passed: {planted:?}");
    };
    assert_eq!(differing, 4, "one byte in each row of the bucket");
    assert_eq!(
        stream.download(&step.steps).unwrap()[0],
        steps[0] + 1,
        "state was restored before the replay"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_error_in_one_bucket_leaves_no_capture_behind() {
    let stream = stream();
    let run = |stream: &Stream, step: &Step, bucket: usize| {
        if bucket == 4 && stream.is_capturing() {
            return Err(Error::InvalidArgument {
                what: "planted",
                why: String::new(),
            });
        }
        step.run(stream, bucket, 1)
    };
    let result = GraphCache::capture(
        &stream,
        BucketSet::new(16).unwrap(),
        Step::new(&stream, 16),
        &CaptureOptions::default(),
        run,
    );
    assert!(matches!(
        result,
        Err(Error::InvalidArgument { what: "planted", .. })
    ));
    assert_usable(&stream);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn buckets_share_one_pool_sized_by_the_largest() {
    let stream = stream();
    let pool = MemoryPool::new(stream.device());
    let width = 100_000;
    let out = DeviceBuffer::<u32>::zeroed(stream.device(), 16 * width).unwrap();
    let run = |stream: &Stream, _: &(), bucket: usize| {
        let a = pool.alloc::<u32>(bucket * width)?;
        let b = pool.alloc::<u32>(bucket * width)?;
        stream.fill(&a, bucket as u32)?;
        stream.copy(&b, &a)?;
        stream.copy(out.slice(..bucket * width)?, &b)
    };
    let options = CaptureOptions {
        pool: Some(pool.clone()),
        ..CaptureOptions::default()
    };
    let cache =
        GraphCache::capture::<Error>(&stream, BucketSet::new(16).unwrap(), (), &options, run).unwrap();
    let needed = 2 * (16 * width * 4usize).next_multiple_of(256);
    assert!(
        (needed..needed + (4 << 20)).contains(&pool.capacity()),
        "{} for {needed}",
        pool.capacity()
    );
    for rows in [16, 1, 5, 3, 16] {
        let bucket = cache.replay(rows).unwrap();
        let values = stream.download(out.slice(..bucket * width).unwrap()).unwrap();
        assert!(values.iter().all(|&value| value == bucket as u32));
    }
    pool.reset();
    assert!(matches!(
        pool.alloc::<u32>(1 << 30),
        Err(Error::PoolExhausted { .. })
    ));
    assert!(pool.alloc::<u32>(8).unwrap().ptr().is_multiple_of(256));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn another_thread_may_allocate_while_this_one_captures() {
    let stream = stream();
    let device = stream.device().clone();
    let x = DeviceBuffer::<u32>::zeroed(&device, 8).unwrap();
    let capture = Capture::begin(&stream).unwrap();
    stream.fill(&x, 3).unwrap();
    std::thread::spawn(move || {
        let other = Stream::new(&device).unwrap();
        let y = DeviceBuffer::from_slice(&other, &[1u32, 2, 3]).unwrap();
        assert_eq!(other.download(&y).unwrap(), [1, 2, 3]);
    })
    .join()
    .unwrap();
    capture.finish().unwrap().launch(&stream).unwrap();
    assert_eq!(stream.download(&x).unwrap(), [3; 8]);
}
