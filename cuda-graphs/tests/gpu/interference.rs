//! What one thread may do while another captures.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuda_graphs::{
    CacheLocation, Capture, DeviceBuffer, Error, Event, Matmul, MatmulDims, MatmulOptions, PinnedBuffer,
    Result, Stream,
};
use half::bf16;

use crate::support::{compiler, kernel_specs, stream};

type Act<'a> = &'a (dyn Fn(&Stream) -> Result<()> + Sync);

/// Captures over and over for as long as `act` is done over and over by another thread. Returns the captures, those that
/// failed with the first reason, and how often `act` was done.
fn captures_beside(act: Act<'_>) -> (usize, usize, Option<Error>, usize) {
    let (mine, theirs) = (stream(), stream());
    let x = DeviceBuffer::<u32>::zeroed(mine.device(), 1000).unwrap();
    let (over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut captured, mut broken, mut first) = (0, 0, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                act(&theirs).unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(400) || done.load(Ordering::Relaxed) < 3 {
            captured += 1;
            let graph = Capture::record::<Error>(&mine, |mine| {
                for value in 0..40 {
                    mine.fill(&x, value)?;
                }
                Ok(())
            });
            if let Err(error) = graph {
                broken += 1;
                first.get_or_insert(error);
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    (captured, broken, first, done.into_inner())
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_another_thread_does_by_this_crate_breaks_no_capture() {
    let folder = tempfile::tempdir().unwrap();
    // Shapes are new each time: their algorithms are timed.
    let options = || MatmulOptions {
        cache: CacheLocation::Off,
        ..MatmulOptions::default()
    };
    let dims = |m| MatmulDims { m, n: 256, k: 128 };
    let multiply = |stream: &Stream, matmul: &Matmul, m: usize| -> Result<()> {
        let x = DeviceBuffer::<bf16>::zeroed(stream.device(), m * 128)?;
        let w = DeviceBuffer::<bf16>::zeroed(stream.device(), 256 * 128)?;
        let y = DeviceBuffer::<f32>::zeroed(stream.device(), m * 256)?;
        matmul.multiply(dims(m), &x, &w, &y, None)?;
        stream.synchronize()
    };
    let acts: [(&str, Act<'_>); 11] = [
        ("memory", &|stream| {
            DeviceBuffer::<u32>::zeroed(stream.device(), 1 << 20).map(drop)
        }),
        ("pinned memory", &|stream| {
            PinnedBuffer::<u32>::zeroed(stream.device(), 1 << 16).map(drop)
        }),
        ("copies", &|stream| {
            let x = DeviceBuffer::from_slice(stream, &[1u32; 1000])?;
            stream.download(&x).map(drop)
        }),
        ("streams and events", &|stream| {
            let other = Stream::new(stream.device())?;
            let event = Event::new(stream.device())?;
            other.record(&event)?;
            stream.wait(&event)?;
            event.synchronize()
        }),
        ("captures", &|stream| {
            let x = DeviceBuffer::<u32>::zeroed(stream.device(), 1000)?;
            Capture::record::<Error>(stream, |stream| stream.fill(&x, 1))?.launch(stream)
        }),
        ("modules", &|stream| {
            compiler(folder.path())
                .load(stream.device(), &kernel_specs()[0])
                .map(drop)
        }),
        ("free memory", &|stream| stream.device().memory().map(drop)),
        ("waits for the stream", &|stream| stream.synchronize()),
        ("waits for the device", &|stream| stream.device().synchronize()),
        ("a handle of cuBLASLt", &|stream| {
            Matmul::with_options(stream, &options()).map(drop)
        }),
        ("products of new shapes", &|stream| {
            let matmul = Matmul::with_options(stream, &options())?;
            (1..4).try_for_each(|m| multiply(stream, &matmul, 17 * m))
        }),
    ];
    let mut bad = Vec::new();
    for (what, act) in acts {
        let (captured, broken, first, done) = captures_beside(act);
        println!("{what}: {broken} of {captured} captures broken beside {done} of them: {first:?}");
        if broken > 0 {
            bad.push(what);
        }
    }
    assert!(bad.is_empty(), "captures break beside {bad:?}");
}
