//! Host memory that the device reaches by itself, so that copies run while the host goes on.

use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use crate::buffer::{MINIMUM_BYTES, resolve};
use crate::capture::forbid;
use crate::device::{Deferred, Device};
use crate::driver::cu;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Page-locked host memory, with the streams that copy to or from it.
#[derive(Debug)]
pub(crate) struct PinnedAllocation {
    device: Device,
    address: usize,
    used_by: Mutex<Vec<Stream>>,
}

impl PinnedAllocation {
    /// Notes that `stream` copies to or from the memory.
    pub(crate) fn used_by(&self, stream: &Stream) {
        let mut used_by = self.used_by.lock().unwrap_or_else(PoisonError::into_inner);
        if !used_by.contains(stream) {
            used_by.push(stream.clone());
        }
    }
}

impl Drop for PinnedAllocation {
    fn drop(&mut self) {
        // A copy that is still under way must not find the memory gone.
        for stream in self.used_by.get_mut().unwrap_or_else(PoisonError::into_inner) {
            if !stream.is_capturing() {
                let _ = stream.synchronize();
            }
        }
        self.device.free(Deferred::HostMemory(self.address));
    }
}

/// Page-locked host memory of `len` elements: the only host memory whose copies run while the host goes on.
///
/// Reading while a copy into it is under way gives old and new elements in any mixture; wait for an
/// [`Event`](crate::Event) recorded after the copy first.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let staging = PinnedBuffer::<u32>::zeroed(&device, 4)?;
/// staging.write(0, &[1, 2, 3, 4])?;
/// let buffer = DeviceBuffer::<u32>::zeroed(&device, 4)?;
/// stream.upload_async(buffer.as_slice(), staging.as_slice())?; // the host goes on
/// stream.synchronize()?;
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    allocation: Arc<PinnedAllocation>,
    len: usize,
    element: PhantomData<fn(T) -> T>,
}

impl<T: Pod> PinnedBuffer<T> {
    /// `len` elements of all zero bits.
    ///
    /// # Errors
    /// [`Error::ForbiddenInCapture`], [`Error::Driver`].
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::InvalidArgument {
                what: "buffer length",
                why: format!("{len} elements of {} bytes overflow", size_of::<T>()),
            })?;
        let bytes = bytes.max(MINIMUM_BYTES);
        forbid("cuMemHostAlloc")?;
        device.bind()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address; a context is current.
        unsafe { cu!(cuMemHostAlloc(&mut address, bytes, 0)) }?;
        // SAFETY: fresh memory of this length.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        let allocation = PinnedAllocation {
            device: device.clone(),
            address: address as usize,
            used_by: Mutex::new(Vec::new()),
        };
        Ok(Self {
            allocation: Arc::new(allocation),
            len,
            element: PhantomData,
        })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Overwrites elements from `start` on with `values`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn write(&self, start: usize, values: &[T]) -> Result<()> {
        resolve(&(start..start.saturating_add(values.len())), self.len)?;
        // SAFETY: inside the allocation, checked above; `values` is ordinary memory and cannot overlap it, since no
        // reference to the elements exists.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.at(start), values.len()) };
        Ok(())
    }

    /// Copies elements from `start` on into `values`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn read(&self, start: usize, values: &mut [T]) -> Result<()> {
        resolve(&(start..start.saturating_add(values.len())), self.len)?;
        // SAFETY: inside the allocation, checked above; every bit pattern is a `T`; no overlap, as in `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.at(start).cast_const(), values.as_mut_ptr(), values.len())
        };
        Ok(())
    }

    /// A copy of all elements.
    pub fn to_vec(&self) -> Vec<T> {
        let mut values = vec![T::zeroed(); self.len];
        // SAFETY: the whole allocation, see `read`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(0).cast_const(), values.as_mut_ptr(), self.len) };
        values
    }

    /// All elements as a view, for copies.
    pub fn as_slice(&self) -> PinnedSlice<'_, T> {
        PinnedSlice {
            buffer: self,
            start: 0,
            len: self.len,
        }
    }

    /// Some elements as a view, for copies.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<PinnedSlice<'_, T>> {
        let (start, end) = resolve(&range, self.len)?;
        Ok(PinnedSlice {
            buffer: self,
            start,
            len: end - start,
        })
    }

    fn at(&self, index: usize) -> *mut T {
        (self.allocation.address as *mut T).wrapping_add(index)
    }
}

/// A view of consecutive elements of a [`PinnedBuffer`].
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let staging = PinnedBuffer::<u32>::zeroed(&device, 4)?;
/// assert_eq!(staging.slice(1..3)?.len(), 2);
/// assert!(staging.slice(3..5).is_err());
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct PinnedSlice<'a, T> {
    buffer: &'a PinnedBuffer<T>,
    start: usize,
    len: usize,
}

impl<T> Clone for PinnedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PinnedSlice<'_, T> {}

impl<'a, T: Pod> From<&'a PinnedBuffer<T>> for PinnedSlice<'a, T> {
    fn from(buffer: &'a PinnedBuffer<T>) -> Self {
        buffer.as_slice()
    }
}

impl<'a, T: Pod> PinnedSlice<'a, T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn address(&self) -> *mut T {
        self.buffer.at(self.start)
    }

    pub(crate) fn owner(&self) -> &'a Arc<PinnedAllocation> {
        &self.buffer.allocation
    }
}
