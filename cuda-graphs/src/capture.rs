//! Capturing a stream's work into a graph, and replaying it.
//!
//! The guard is the point: a capture that is begun is ended on every path, by an error's `?` and by a panic as well,
//! because a stream left capturing fails every later call on it. While a thread captures, whatever a capture
//! forbids (allocation, loading a module, waiting) is refused by this crate before the driver would break the
//! capture, and what is dropped meanwhile is freed afterwards.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use crate::device::Device;
use crate::driver::{cu, first_failure, forget_failure};
use crate::error::{Error, Result};
use crate::stream::{Kept, Stream};

thread_local! {
    /// Captures under way on this thread.
    static CAPTURES: Cell<usize> = const { Cell::new(0) };
}

/// Whether a capture is under way on this thread.
pub(crate) fn this_thread_captures() -> bool {
    CAPTURES.get() > 0
}

/// Refuses `call` while this thread captures.
pub(crate) fn forbid(call: &'static str) -> Result<()> {
    if this_thread_captures() {
        Err(Error::ForbiddenInCapture { call })
    } else {
        Ok(())
    }
}

/// A capture under way. Dropping it ends the capture and throws away what was captured.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// # let buffer = DeviceBuffer::<u32>::zeroed(&device, 8)?;
/// let capture = Capture::begin(&stream)?;
/// stream.fill(&buffer, 7)?; // an error here ends the capture, too
/// let graph = capture.finish()?;
/// graph.launch(&stream)?;
/// assert_eq!(stream.download(&buffer)?, [7; 8]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
#[must_use = "a dropped capture is thrown away"]
pub struct Capture<'a> {
    stream: &'a Stream,
    ended: bool,
    /// A capture is bound to its thread.
    not_send: PhantomData<*const ()>,
}

impl<'a> Capture<'a> {
    /// Begins to capture everything given to `stream`; nothing of it runs until the graph is launched. Waits while another
    /// thread is in [`Device::synchronize`](crate::Device::synchronize).
    ///
    /// # Errors
    /// [`Error::ForbiddenInCapture`] if the stream is being captured already, [`Error::Driver`].
    pub fn begin(stream: &'a Stream) -> Result<Self> {
        stream.forbid_capture("cuStreamBeginCapture")?;
        let raw = stream.bound()?;
        forget_failure();
        stream.device().capture_begins();
        // The mode in which other threads may go on allocating.
        // SAFETY: the stream is valid and its context current.
        let begun = unsafe {
            cu!(cuStreamBeginCapture_v2(
                raw,
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            ))
        };
        begun.inspect_err(|_| stream.device().capture_ended())?;
        stream.set_kept(Some(Kept::new()));
        CAPTURES.set(CAPTURES.get() + 1);
        Ok(Self {
            stream,
            ended: false,
            not_send: PhantomData,
        })
    }

    /// Ends the capture and makes the graph executable.
    ///
    /// # Errors
    /// [`Error::CaptureFailed`] naming the first call that failed since the capture began, if one broke it;
    /// [`Error::Driver`] if the graph cannot be made executable.
    pub fn finish(self) -> Result<Graph> {
        self.finish_capture()?.instantiate()
    }

    /// Ends the capture only.
    pub(crate) fn finish_capture(mut self) -> Result<Captured> {
        self.end()
    }

    /// Captures what `record` gives to `stream`.
    ///
    /// # Errors
    /// As [`Capture::begin`] and [`Capture::finish`], and whatever `record` returns; then nothing is captured.
    pub fn record<E: From<Error>>(
        stream: &'a Stream,
        record: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let capture = Self::begin(stream)?;
        record(stream)?;
        Ok(capture.finish()?)
    }

    fn end(&mut self) -> Result<Captured> {
        self.ended = true;
        let device = self.stream.device().clone();
        let mut graph = std::ptr::null_mut();
        let ended = self.stream.bound().and_then(|raw| {
            // SAFETY: the stream is valid, its context current, and this object began its capture.
            unsafe { cu!(cuStreamEndCapture(raw, &mut graph)) }
        });
        device.capture_ended();
        let kept = self.stream.set_kept(None).unwrap_or_default();
        CAPTURES.set(CAPTURES.get().saturating_sub(1));
        if !this_thread_captures() {
            device.free_deferred();
        }
        let captured = Captured {
            device,
            raw: graph,
            kept,
        };
        match ended {
            Ok(()) if !graph.is_null() => Ok(captured),
            Ok(()) => Err(Error::CaptureFailed {
                call: "cuStreamEndCapture".to_string(),
                reason: "no graph came of it".to_string(),
            }),
            Err(error) => {
                let (call, code, mut reason) = first_failure().map_or_else(
                    || ("cuStreamEndCapture", None, error.to_string()),
                    |failure| (failure.call, Some(failure.code), failure.text),
                );
                // No call of this thread broke it: the first one that failed found it broken.
                if code == Some(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) {
                    reason += "; another thread may have waited for the whole device, or a library done what a capture forbids";
                }
                Err(Error::CaptureFailed {
                    call: call.to_string(),
                    reason,
                })
            }
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // What was captured, or why it failed, is of no interest any more.
            let _ = self.end();
        }
    }
}

/// A captured graph that is not executable yet.
#[derive(Debug)]
pub(crate) struct Captured {
    device: Device,
    raw: sys::CUgraph,
    kept: Kept,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.device.bind().is_ok() {
            // SAFETY: came from cuStreamEndCapture, destroyed once.
            let _ = unsafe { cu!(cuGraphDestroy(self.raw)) };
        }
    }
}

impl Captured {
    pub(crate) fn instantiate(mut self) -> Result<Graph> {
        self.device.bind()?;
        let mut nodes = 0;
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph is valid; with a null list only the count is written.
        unsafe {
            cu!(cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut nodes))?;
            cu!(cuGraphInstantiateWithFlags(&mut exec, self.raw, 0))?;
        }
        let state = GraphState {
            exec,
            launched_on: Vec::new(),
        };
        Ok(Graph {
            state: Mutex::new(state),
            device: self.device.clone(),
            nodes,
            kept: std::mem::take(&mut self.kept),
        })
    }
}

#[derive(Debug)]
struct GraphState {
    exec: sys::CUgraphExec,
    launched_on: Vec<Stream>,
}

// SAFETY: a CUgraphExec may move between threads; the mutex around it serialises its uses, which the driver asks for.
unsafe impl Send for GraphState {}

/// An executable graph. It owns a share of every buffer and module that safe calls captured.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let (from, to) = (DeviceBuffer::from_slice(&stream, &[7u32])?, DeviceBuffer::<u32>::zeroed(&device, 1)?);
/// let capture = Capture::begin(&stream)?;
/// stream.copy(&to, &from)?; // recorded, not done
/// let graph: Graph = capture.finish()?;
/// graph.launch(&stream)?;
/// assert_eq!((graph.nodes(), stream.download(&to)?), (1, vec![7]));
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct Graph {
    state: Mutex<GraphState>,
    device: Device,
    nodes: usize,
    /// Dropped after the executable graph, see the order in `drop`.
    #[allow(dead_code, reason = "owned, never read")]
    kept: Kept,
}

impl Graph {
    /// Gives the graph to `stream`; does not wait.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::ForbiddenInCapture`], [`Error::Driver`].
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        stream.same_device(&self.device, "the graph")?;
        stream.forbid_capture("cuGraphLaunch")?;
        let raw = stream.bound()?;
        let mut state = self.lock();
        if !state.launched_on.contains(stream) {
            state.launched_on.push(stream.clone());
        }
        // SAFETY: graph and stream are valid and of the same, current context; the lock serialises uses of the graph.
        unsafe { cu!(cuGraphLaunch(state.exec, raw)) }
    }

    /// Brings the graph to the device ahead of its first launch.
    ///
    /// # Errors
    /// As [`Graph::launch`].
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        stream.same_device(&self.device, "the graph")?;
        stream.forbid_capture("cuGraphUpload")?;
        let raw = stream.bound()?;
        let state = self.lock();
        // SAFETY: as in `launch`.
        unsafe { cu!(cuGraphUpload(state.exec, raw)) }
    }

    /// How many nodes it has: kernels, copies and fills.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, GraphState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A replay that is still under way uses the buffers that are given back after this.
        for stream in &state.launched_on {
            if !stream.is_capturing() {
                let _ = stream.synchronize();
            }
        }
        if self.device.bind().is_ok() {
            // SAFETY: made by cuGraphInstantiate, destroyed once.
            let _ = unsafe { cu!(cuGraphExecDestroy(state.exec)) };
        }
    }
}
