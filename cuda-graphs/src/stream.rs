//! Streams and events.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::device::Device;
use crate::driver::cu;
use crate::error::{Error, Result};

/// What must outlive the graph being captured.
pub(crate) type Kept = Vec<Arc<dyn Any + Send + Sync>>;

#[derive(Debug)]
struct Inner {
    device: Device,
    raw: sys::CUstream,
    /// `Some` while the stream is being captured.
    kept: Mutex<Option<Kept>>,
}

// SAFETY: a CUstream may be used from any thread once its context is current there, and every use binds it first.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver's stream functions are thread-safe.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by cuStreamCreate, destroyed once. Pending work is finished by the driver first.
            let _ = unsafe { cu!(cuStreamDestroy_v2(self.raw)) };
        }
    }
}

/// An ordered queue of work for one device. Cheap to clone; all clones mean the same queue.
///
/// It does not wait for the legacy default stream. Work of one stream runs in order; work of two streams is ordered
/// only by [`Event`]s.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let buffer = DeviceBuffer::from_slice(&stream, &[1u32, 2, 3])?;
/// assert_eq!(stream.download(&buffer)?, [1, 2, 3]);
/// assert!(stream.is_idle()?);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Stream {}

impl Stream {
    /// A new stream on `device`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        unsafe {
            cu!(cuStreamCreate(
                &mut raw,
                sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32
            ))
        }?;
        Ok(Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                raw,
                kept: Mutex::new(None),
            }),
        })
    }

    /// The stream's device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Waits until everything given to the stream is done.
    ///
    /// # Errors
    /// [`Error::ForbiddenInCapture`] while the stream is being captured; [`Error::Driver`], also for errors of
    /// earlier work such as a kernel's illegal access.
    pub fn synchronize(&self) -> Result<()> {
        self.forbid_capture("cuStreamSynchronize")?;
        let raw = self.bound()?;
        // SAFETY: the stream is valid and its context current.
        unsafe { cu!(cuStreamSynchronize(raw)) }
    }

    /// Whether everything given to the stream is done, without waiting.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_idle(&self) -> Result<bool> {
        self.forbid_capture("cuStreamQuery")?;
        let raw = self.bound()?;
        // SAFETY: the stream is valid and its context current.
        match unsafe { sys::cuStreamQuery(raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => crate::driver::check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Marks the present end of the stream's work with `event`.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Driver`].
    pub fn record(&self, event: &Event) -> Result<()> {
        self.same_device(&event.inner.device, "the event")?;
        let raw = self.bound()?;
        self.keep(&event.inner);
        // SAFETY: stream and event are valid and of the same, current context.
        unsafe { cu!(cuEventRecord(event.inner.raw, raw)) }
    }

    /// Makes all later work of this stream wait for `event`, without blocking the host.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Driver`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.same_device(&event.inner.device, "the event")?;
        let raw = self.bound()?;
        self.keep(&event.inner);
        // SAFETY: stream and event are valid and of the same, current context.
        unsafe { cu!(cuStreamWaitEvent(raw, event.inner.raw, 0)) }
    }

    /// Whether a graph is being captured from this stream.
    pub fn is_capturing(&self) -> bool {
        self.lock_kept().is_some()
    }

    /// If the stream is being captured, makes the graph own a share of `object`: what a captured launch uses by
    /// address must live as long as the graph. Does nothing otherwise.
    pub fn keep<T: Any + Send + Sync>(&self, object: &Arc<T>) {
        if let Some(kept) = self.lock_kept().as_mut() {
            kept.push(object.clone());
        }
    }

    /// The driver's handle, with the context made current on this thread.
    pub(crate) fn bound(&self) -> Result<sys::CUstream> {
        self.inner.device.bind()?;
        Ok(self.inner.raw)
    }

    /// Begins or ends keeping objects for a graph; returns what was kept so far.
    pub(crate) fn set_kept(&self, kept: Option<Kept>) -> Option<Kept> {
        std::mem::replace(&mut *self.lock_kept(), kept)
    }

    pub(crate) fn forbid_capture(&self, call: &'static str) -> Result<()> {
        if self.is_capturing() {
            Err(Error::ForbiddenInCapture { call })
        } else {
            Ok(())
        }
    }

    pub(crate) fn same_device(&self, device: &Device, what: &'static str) -> Result<()> {
        if *device == self.inner.device {
            Ok(())
        } else {
            Err(Error::WrongDevice { what })
        }
    }

    fn lock_kept(&self) -> std::sync::MutexGuard<'_, Option<Kept>> {
        self.inner.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct EventInner {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: a CUevent may be used from any thread once its context is current there, and every use binds it first.
unsafe impl Send for EventInner {}
// SAFETY: as above; the driver's event functions are thread-safe.
unsafe impl Sync for EventInner {}

impl Drop for EventInner {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by cuEventCreate, destroyed once.
            let _ = unsafe { cu!(cuEventDestroy_v2(self.raw)) };
        }
    }
}

/// A point in a stream's work, with the time it was reached.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let (start, end) = (Event::new(&device)?, Event::new(&device)?);
/// stream.record(&start)?;
/// let _ = DeviceBuffer::from_slice(&stream, &[0u8; 1 << 20])?;
/// stream.record(&end)?;
/// end.synchronize()?;
/// println!("{} ms", start.elapsed_ms(&end)?);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Event {
    inner: Arc<EventInner>,
}

impl Event {
    /// An event that notes the time when it is reached.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event for ordering only; cheaper, without a time.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn without_timing(device: &Device) -> Result<Self> {
        Self::with_flags(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(device: &Device, flags: sys::CUevent_flags) -> Result<Self> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; a context is current.
        unsafe { cu!(cuEventCreate(&mut raw, flags as u32)) }?;
        Ok(Self {
            inner: Arc::new(EventInner {
                device: device.clone(),
                raw,
            }),
        })
    }

    /// Waits until the event is reached. One that was never recorded counts as reached.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn synchronize(&self) -> Result<()> {
        self.inner.device.bind()?;
        // SAFETY: the event is valid and its context current.
        unsafe { cu!(cuEventSynchronize(self.inner.raw)) }
    }

    /// Whether the event has been reached, without waiting.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn is_reached(&self) -> Result<bool> {
        self.inner.device.bind()?;
        // SAFETY: the event is valid and its context current.
        match unsafe { sys::cuEventQuery(self.inner.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => crate::driver::check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds from this event to `later`, both made by [`Event::new`] and recorded. Waits for both.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32> {
        self.synchronize()?;
        later.synchronize()?;
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        // cudarc binds only the name that drivers have from 12.8 on, and panics without it.
        // SAFETY: the driver is open, since there is an event; both names are functions of this type.
        let function = unsafe {
            let library = sys::culib();
            library
                .get::<Elapsed>(b"cuEventElapsedTime_v2")
                .or_else(|_| library.get::<Elapsed>(b"cuEventElapsedTime"))
                .map(|function| *function)
        };
        let function = function.map_err(|error| Error::UnusableLibrary {
            path: "libcuda.so".to_string(),
            reason: error.to_string(),
        })?;
        let mut ms = 0.0;
        // SAFETY: writes one float; both events are valid and reached.
        crate::driver::check("cuEventElapsedTime", unsafe {
            function(&mut ms, self.inner.raw, later.inner.raw)
        })?;
        Ok(ms)
    }
}
