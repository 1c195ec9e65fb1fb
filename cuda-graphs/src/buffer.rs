//! Memory of the device.
//!
//! A [`DeviceBuffer`] never moves: its address is valid from its creation to its end, so a captured graph may
//! contain it. Neither it nor a [`PinnedBuffer`](crate::PinnedBuffer) ever lends out a Rust reference to its elements, since the device
//! may write to them at any time; both behave like a `Cell`, and copying through `&` is fine. What order copies and
//! kernels have is told by the stream they were given to.
//!
//! ```text
//! DeviceBuffer<f32>, len 8          slice(2..6)           cast::<u16>()
//! ┌──┬──┬──┬──┬──┬──┬──┬──┐      ┌──┬──┬──┬──┐      ┌─┬─┬─┬─┬─┬─┬─┬─┐
//! ptr()                          ptr() + 8           the same bytes
//! ```

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use bytemuck::Pod;

use crate::capture::forbid;
use crate::device::{Deferred, Device};
use crate::driver::cu;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Allocations are at least this long, so that empty buffers have an address too.
pub(crate) const MINIMUM_BYTES: usize = 16;

/// A piece of device memory, freed when its last owner goes.
#[derive(Debug)]
pub(crate) struct Allocation {
    device: Device,
    pointer: u64,
    bytes: usize,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // The driver finishes the device's work before it frees.
        self.device.free(Deferred::Memory(self.pointer));
    }
}

/// Device memory of `len` elements at an address that never changes.
///
/// ```no_run
/// use cuda_graphs::{Device, DeviceBuffer, Stream};
///
/// let device = Device::open(0)?;
/// let stream = Stream::new(&device)?;
/// let buffer = DeviceBuffer::<f32>::zeroed(&device, 4)?;
/// stream.upload(buffer.slice(1..3)?, &[1.0, 2.0])?;
/// assert_eq!(stream.download(&buffer)?, [0.0, 1.0, 2.0, 0.0]);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceBuffer<T> {
    allocation: Arc<Allocation>,
    len: usize,
    element: PhantomData<fn(T) -> T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// `len` elements of all zero bits. Waits until they are zero.
    ///
    /// # Errors
    /// [`Error::ForbiddenInCapture`], [`Error::Driver`] (out of memory among others).
    pub fn zeroed(device: &Device, len: usize) -> Result<Self> {
        Self::filled_with_bytes(device, len, 0)
    }

    /// `len` elements whose every byte is `byte`. `0xff` makes every float a NaN: the way to poison an output before
    /// a test. Waits until they are so.
    ///
    /// # Errors
    /// As [`DeviceBuffer::zeroed`].
    pub fn filled_with_bytes(device: &Device, len: usize, byte: u8) -> Result<Self> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::InvalidArgument {
                what: "buffer length",
                why: format!("{len} elements of {} bytes overflow", size_of::<T>()),
            })?;
        let bytes = bytes.max(MINIMUM_BYTES);
        forbid("cuMemAlloc")?;
        device.bind()?;
        let mut pointer = 0;
        // SAFETY: writes one address; a context is current.
        unsafe { cu!(cuMemAlloc_v2(&mut pointer, bytes)) }.map_err(|error| match error {
            Error::Driver {
                call,
                code,
                name,
                detail,
            } => {
                let free = device.memory().map_or(0, |memory| memory.free);
                let detail = format!("{detail}; {bytes} bytes were asked for, {free} are free");
                Error::Driver {
                    call,
                    code,
                    name,
                    detail,
                }
            }
            other => other,
        })?;
        let allocation = Arc::new(Allocation {
            device: device.clone(),
            pointer,
            bytes,
        });
        // SAFETY: the memory is this long and nobody else knows it. The null stream is waited for, because streams of
        // this crate do not wait for it.
        unsafe {
            cu!(cuMemsetD8_v2(pointer, byte, bytes))?;
            cu!(cuStreamSynchronize(std::ptr::null_mut()))?;
        }
        Ok(Self {
            allocation,
            len,
            element: PhantomData,
        })
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// As [`DeviceBuffer::zeroed`].
    pub fn from_slice(stream: &Stream, values: &[T]) -> Result<Self> {
        let buffer = Self::zeroed(stream.device(), values.len())?;
        stream.upload(&buffer, values)?;
        Ok(buffer)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device address of the first element; the same for the whole life of the buffer.
    pub fn ptr(&self) -> u64 {
        self.allocation.pointer
    }

    /// The device the memory is on.
    pub fn device(&self) -> &Device {
        &self.allocation.device
    }

    /// All elements as a view.
    pub fn as_slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice {
            allocation: &self.allocation,
            offset: 0,
            len: self.len,
            element: PhantomData,
        }
    }

    /// Some elements as a view.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceSlice<'_, T>> {
        self.as_slice().slice(range)
    }
}

/// A view of consecutive elements of a [`DeviceBuffer`] or a [`MemoryPool`](crate::MemoryPool). Checked when made.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// let buffer = DeviceBuffer::from_slice(&stream, &[1u32, 2, 3, 4])?;
/// let middle = buffer.slice(1..3)?;
/// assert_eq!(stream.download(middle)?, [2, 3]);
/// assert_eq!(middle.cast::<u8>()?.len(), 8);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceSlice<'a, T> {
    allocation: &'a Arc<Allocation>,
    /// In bytes.
    offset: usize,
    len: usize,
    element: PhantomData<fn(T) -> T>,
}

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

impl<'a, T: Pod> From<&'a DeviceBuffer<T>> for DeviceSlice<'a, T> {
    fn from(buffer: &'a DeviceBuffer<T>) -> Self {
        buffer.as_slice()
    }
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device address of the first element.
    pub fn ptr(&self) -> u64 {
        self.allocation.pointer + self.offset as u64
    }

    /// Length in bytes.
    pub fn byte_len(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device the memory is on.
    pub fn device(&self) -> &'a Device {
        &self.allocation.device
    }

    /// Some elements of this view.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, end) = resolve(&range, self.len)?;
        Ok(Self {
            offset: self.offset + start * size_of::<T>(),
            len: end - start,
            ..*self
        })
    }

    /// The same bytes as elements of another type.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the bytes are no whole number of `U`, or the address is not aligned for it.
    pub fn cast<U: Pod>(&self) -> Result<DeviceSlice<'a, U>> {
        let (bytes, size) = (self.byte_len(), size_of::<U>());
        if size == 0 || !bytes.is_multiple_of(size) || !self.ptr().is_multiple_of(align_of::<U>() as u64) {
            return Err(Error::InvalidArgument {
                what: "cast of device memory",
                why: format!(
                    "{bytes} bytes at {:#x} are no elements of {size} bytes",
                    self.ptr()
                ),
            });
        }
        Ok(DeviceSlice {
            allocation: self.allocation,
            offset: self.offset,
            len: bytes / size,
            element: PhantomData,
        })
    }

    /// What a captured graph has to own to use this memory.
    pub(crate) fn owner(&self) -> &'a Arc<Allocation> {
        self.allocation
    }

    pub(crate) fn whole(allocation: &'a Arc<Allocation>, offset: usize, len: usize) -> Self {
        debug_assert!(offset + len * size_of::<T>() <= allocation.bytes);
        Self {
            allocation,
            offset,
            len,
            element: PhantomData,
        }
    }
}

/// Device memory whose element type does not matter, such as the outputs given to `verify`.
///
/// ```no_run
/// # use cuda_graphs::*;
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// /// Anything that lies on the device.
/// fn size(memory: &dyn DeviceMemory) -> usize {
///     memory.bytes().len()
/// }
/// assert_eq!(size(&DeviceBuffer::<f32>::zeroed(&device, 4)?), 16);
/// # Ok::<(), cuda_graphs::Error>(())
/// ```
pub trait DeviceMemory {
    /// The memory as bytes.
    fn bytes(&self) -> DeviceSlice<'_, u8>;
}

impl<T: Pod> DeviceMemory for DeviceBuffer<T> {
    fn bytes(&self) -> DeviceSlice<'_, u8> {
        self.as_slice().bytes_of()
    }
}

impl<T: Pod> DeviceMemory for DeviceSlice<'_, T> {
    fn bytes(&self) -> DeviceSlice<'_, u8> {
        self.bytes_of()
    }
}

impl<'a, T: Pod> DeviceSlice<'a, T> {
    fn bytes_of(self) -> DeviceSlice<'a, u8> {
        DeviceSlice {
            allocation: self.allocation,
            offset: self.offset,
            len: self.byte_len(),
            element: PhantomData,
        }
    }
}

/// The start and end that `range` means in `len` elements.
pub(crate) fn resolve(range: &impl RangeBounds<usize>, len: usize) -> Result<(usize, usize)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start <= end && end <= len {
        Ok((start, end))
    } else {
        Err(Error::OutOfBounds { start, end, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_resolve_as_for_slices_and_refuse_what_slices_would_panic_on() {
        assert_eq!(resolve(&(..), 5), Ok((0, 5)));
        assert_eq!(resolve(&(1..=3), 5), Ok((1, 4)));
        assert_eq!(resolve(&(5..), 5), Ok((5, 5)));
        assert!(resolve(&(6..), 5).is_err());
        assert!(resolve(&(..6), 5).is_err());
        assert!(resolve(&(..=usize::MAX), 5).is_err());
        let reversed = std::ops::Range { start: 3, end: 2 };
        assert!(resolve(&reversed, 5).is_err());
    }
}
