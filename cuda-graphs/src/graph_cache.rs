//! One graph per bucket.
//!
//! Invariant: every bucket of the set has a graph, captured from the same function over the same static buffers, and
//! all of them live as long as the cache, which owns the buffers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytemuck::Pod;

use crate::buckets::BucketSet;
use crate::buffer::{DeviceBuffer, DeviceMemory, DeviceSlice};
use crate::capture::{Capture, Graph};
use crate::error::{Error, Result};
use crate::pool::MemoryPool;
use crate::report::{BucketReport, CaptureReport, ReplayStats};
use crate::stream::Stream;
use crate::verify::{VerifyReport, verify};

/// The buffers that captured graphs read and write by address.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use std::ops::Range;
///
/// struct Inputs {
///     tokens: Rows<u32>,
///     positions: Rows<u32>,
/// }
///
/// impl StaticBuffers for Inputs {
///     fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()> {
///         self.tokens.pad(stream, rows.clone())?;
///         self.positions.pad(stream, rows)
///     }
/// }
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
pub trait StaticBuffers {
    /// Makes `rows`, which no request uses in the coming replay, harmless: such as slot 0 and position 0. Must only
    /// give work to `stream`.
    ///
    /// # Errors
    /// What the copies and fills return.
    fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()>;
}

impl StaticBuffers for () {
    fn pad(&self, _: &Stream, _: Range<usize>) -> Result<()> {
        Ok(())
    }
}

impl<B: StaticBuffers + ?Sized> StaticBuffers for Box<B> {
    fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()> {
        (**self).pad(stream, rows)
    }
}

impl<B: StaticBuffers + ?Sized> StaticBuffers for std::sync::Arc<B> {
    fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()> {
        (**self).pad(stream, rows)
    }
}

impl<A: StaticBuffers, B: StaticBuffers> StaticBuffers for (A, B) {
    fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()> {
        self.0.pad(stream, rows.clone())?;
        self.1.pad(stream, rows)
    }
}

/// A static input of `[rows, width]` elements whose unused rows hold a fixed value.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let tokens = Rows::<u32>::new(&stream, 16, 1, 0)?; // 16 rows of one element; padding is 0
/// tokens.upload(&stream, &[5, 6, 7])?;
/// assert_eq!(stream.download(tokens.rows(0..3)?)?, [5, 6, 7]);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct Rows<T> {
    buffer: DeviceBuffer<T>,
    width: usize,
    padding: T,
}

impl<T: Pod> Rows<T> {
    /// `rows * width` elements, all `padding`, which has 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an element of another size or 0 elements, [`Error::Driver`].
    pub fn new(stream: &Stream, rows: usize, width: usize, padding: T) -> Result<Self> {
        let len = rows
            .checked_mul(width)
            .filter(|&len| len > 0)
            .ok_or_else(|| Error::InvalidArgument {
                what: "rows",
                why: format!("{rows} rows of {width} elements"),
            })?;
        let buffer = DeviceBuffer::zeroed(stream.device(), len)?;
        stream.fill(&buffer, padding)?;
        stream.synchronize()?;
        Ok(Self {
            buffer,
            width,
            padding,
        })
    }

    /// The whole buffer.
    pub fn buffer(&self) -> &DeviceBuffer<T> {
        &self.buffer
    }

    /// Some rows as a view of `rows.len() * width` elements.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], counted in elements.
    pub fn rows(&self, rows: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        self.buffer
            .slice(rows.start.saturating_mul(self.width)..rows.end.saturating_mul(self.width))
    }

    /// Writes the first rows and waits.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Driver`].
    pub fn upload(&self, stream: &Stream, values: &[T]) -> Result<()> {
        stream.upload(self.buffer.slice(..values.len())?, values)
    }
}

impl<T: Pod> StaticBuffers for Rows<T> {
    fn pad(&self, stream: &Stream, rows: Range<usize>) -> Result<()> {
        stream.fill(self.rows(rows)?, self.padding)
    }
}

/// How graphs are captured.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// // One pool for two sets of graphs that never run at the same time.
/// let options = CaptureOptions { pool: Some(MemoryPool::new(&device)), ..CaptureOptions::default() };
/// assert!(options.warm_up);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CaptureOptions {
    /// Run the work of each bucket once before its capture, so that kernels are loaded, algorithms chosen and the
    /// pool grown outside it. The run has all rows as padding.
    pub warm_up: bool,
    /// Scratch memory to start over before each run, and to freeze at the end.
    pub pool: Option<MemoryPool>,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self {
            warm_up: true,
            pool: None,
        }
    }
}

/// Graphs for all buckets of a set, with the static buffers they use.
///
/// ```no_run
/// use cuda_graphs::{BucketSet, CaptureOptions, Device, Error, GraphCache, Rows, Stream};
///
/// let device = Device::open(0)?;
/// let stream = Stream::new(&device)?;
/// let tokens = Rows::<u32>::new(&stream, 64, 1, 0)?;
/// let step = |stream: &Stream, tokens: &Rows<u32>, bucket: usize| {
///     stream.fill(tokens.rows(0..bucket)?, 7) // your kernels instead
/// };
/// let cache =
///     GraphCache::capture::<Error>(&stream, BucketSet::new(64)?, tokens, &CaptureOptions::default(), step)?;
/// let bucket = cache.replay(33)?; // 33 rows run in the bucket of 48
/// assert_eq!(bucket, 48);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct GraphCache<B> {
    // Before the buffers, so that graphs go first.
    graphs: BTreeMap<usize, Graph>,
    buckets: BucketSet,
    stream: Stream,
    report: CaptureReport,
    stats: Mutex<ReplayStats>,
    buffers: B,
}

impl<B: StaticBuffers> GraphCache<B> {
    /// Captures one graph per bucket, the largest first. `run` gives the work of one bucket to the stream it gets;
    /// it must do the same for the same bucket, and touch memory only through `buffers` and what else lives as long
    /// as the cache.
    ///
    /// # Errors
    /// Those of `run`, of [`Capture::begin`] and of [`Capture::finish`]. The stream is usable afterwards.
    pub fn capture<E: From<Error>>(
        stream: &Stream,
        buckets: BucketSet,
        buffers: B,
        options: &CaptureOptions,
        mut run: impl FnMut(&Stream, &B, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let device = stream.device();
        stream.synchronize()?;
        let start = Instant::now();
        let free_at_start = device.memory()?.free;
        let mut graphs = BTreeMap::new();
        let mut report = CaptureReport::default();
        for (index, bucket) in buckets.largest_first().enumerate() {
            let _span =
                tracing::info_span!("capture", bucket, index, of = buckets.largest_first().len()).entered();
            let free_before = device.memory()?.free;
            let mut lap = Lap::start();
            if options.warm_up {
                options.pool.iter().for_each(MemoryPool::reset);
                buffers.pad(stream, 0..bucket)?;
                run(stream, &buffers, bucket)?;
                stream.synchronize()?;
            }
            let warm_up_ms = lap.ms();
            options.pool.iter().for_each(MemoryPool::reset);
            let capture = Capture::begin(stream)?;
            run(stream, &buffers, bucket)?;
            let captured = capture.finish_capture()?;
            let capture_ms = lap.ms();
            let graph = captured.instantiate()?;
            graph.upload(stream)?;
            stream.synchronize()?;
            let instantiate_ms = lap.ms();
            report.buckets.push(BucketReport {
                bucket,
                nodes: graph.nodes(),
                warm_up_ms,
                capture_ms,
                instantiate_ms,
                memory_bytes: free_before.saturating_sub(device.memory()?.free) as u64,
            });
            graphs.insert(bucket, graph);
        }
        options.pool.iter().for_each(MemoryPool::freeze);
        report.total_ms = start.elapsed().as_secs_f64() * 1e3;
        report.memory_bytes = free_at_start.saturating_sub(device.memory()?.free) as u64;
        tracing::info!(
            graphs = graphs.len(),
            ms = report.total_ms,
            bytes = report.memory_bytes,
            "captured"
        );
        Ok(Self {
            graphs,
            buckets,
            stream: stream.clone(),
            report,
            stats: Mutex::new(ReplayStats::default()),
            buffers,
        })
    }

    /// Replays the graph of the smallest bucket of at least `rows` rows, the rows beyond padded; does not wait.
    /// Returns the bucket.
    ///
    /// # Errors
    /// [`Error::BatchTooLarge`], or [`Error::InvalidArgument`] for 0 rows; [`Error::Driver`].
    pub fn replay(&self, rows: usize) -> Result<usize> {
        let (bucket, graph) = self.find(rows)?;
        if rows < bucket {
            self.buffers.pad(&self.stream, rows..bucket)?;
        }
        graph.launch(&self.stream)?;
        self.stats
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .record(rows, bucket);
        Ok(bucket)
    }

    /// Checks the graph that serves `rows` rows against an eager run of `run`: both start from the present content of
    /// `state` and of `outputs`, and must leave the same bytes in `outputs`. Afterwards both hold what the replay left.
    ///
    /// # Errors
    /// [`Error::ReplayDiffers`]; those of [`GraphCache::replay`] and of `run`.
    pub fn verify<E: From<Error>>(
        &self,
        rows: usize,
        state: &[&dyn DeviceMemory],
        outputs: &[&dyn DeviceMemory],
        mut run: impl FnMut(&Stream, &B, usize) -> Result<(), E>,
    ) -> Result<VerifyReport, E> {
        let (bucket, graph) = self.find(rows)?;
        if rows < bucket {
            self.buffers.pad(&self.stream, rows..bucket)?;
        }
        verify(&self.stream, graph, state, outputs, |stream| {
            run(stream, &self.buffers, bucket)
        })
    }

    /// The static buffers.
    pub fn buffers(&self) -> &B {
        &self.buffers
    }

    /// The buckets.
    pub fn buckets(&self) -> &BucketSet {
        &self.buckets
    }

    /// The stream graphs were captured from and are replayed on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The graph of exactly this bucket.
    pub fn graph(&self, bucket: usize) -> Option<&Graph> {
        self.graphs.get(&bucket)
    }

    /// What capturing cost.
    pub fn report(&self) -> &CaptureReport {
        &self.report
    }

    /// How replays were served so far.
    pub fn stats(&self) -> ReplayStats {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn find(&self, rows: usize) -> Result<(usize, &Graph)> {
        if rows == 0 {
            return Err(Error::InvalidArgument {
                what: "rows",
                why: "0 rows need no replay".to_string(),
            });
        }
        self.buckets
            .for_batch(rows)
            .and_then(|bucket| Some((bucket, self.graphs.get(&bucket)?)))
            .ok_or(Error::BatchTooLarge {
                rows,
                max: self.buckets.max(),
            })
    }
}

/// A stop watch that starts over when read.
struct Lap(Instant);

impl Lap {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn ms(&mut self) -> f64 {
        let now = Instant::now();
        let ms = (now - self.0).as_secs_f64() * 1e3;
        self.0 = now;
        ms
    }
}
