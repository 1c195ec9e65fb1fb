//! Copies and fills on a stream.

use bytemuck::Pod;

use crate::buffer::DeviceSlice;
use crate::driver::cu;
use crate::error::{Error, Result};
use crate::pinned::PinnedSlice;
use crate::stream::Stream;

/// Copies and fills. All take views or whole buffers of equal length.
impl Stream {
    /// If the stream is being captured, makes the graph own a share of the device memory, as
    /// [`Stream::keep`] does for other objects: for every address in a captured launch's parameters. Does nothing
    /// otherwise.
    pub fn keep_memory<'a, T: Pod>(&self, memory: impl Into<DeviceSlice<'a, T>>) {
        self.keep(memory.into().owner());
    }

    /// Copies `values` to the device and waits.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::WrongDevice`], [`Error::ForbiddenInCapture`], [`Error::Driver`].
    pub fn upload<'a, T: Pod>(&self, to: impl Into<DeviceSlice<'a, T>>, values: &[T]) -> Result<()> {
        let to = to.into();
        same_length("upload", to.len(), values.len())?;
        self.same_device(to.device(), "the destination")?;
        self.forbid_capture("an upload from pageable memory")?;
        if values.is_empty() {
            return Ok(());
        }
        let raw = self.bound()?;
        // SAFETY: both sides have this length, checked above; `values` is borrowed until the wait below.
        unsafe {
            cu!(cuMemcpyHtoDAsync_v2(
                to.ptr(),
                values.as_ptr().cast(),
                size_of_val(values),
                raw
            ))
        }?;
        self.synchronize()
    }

    /// Copies from the device into `values` and waits.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn download_into<'a, T: Pod>(
        &self,
        values: &mut [T],
        from: impl Into<DeviceSlice<'a, T>>,
    ) -> Result<()> {
        let from = from.into();
        same_length("download", from.len(), values.len())?;
        self.same_device(from.device(), "the source")?;
        self.forbid_capture("a download to pageable memory")?;
        if values.is_empty() {
            return Ok(());
        }
        let raw = self.bound()?;
        // SAFETY: both sides have this length, checked above; `values` is borrowed until the wait below, and every
        // bit pattern is a `T`.
        unsafe {
            cu!(cuMemcpyDtoHAsync_v2(
                values.as_mut_ptr().cast(),
                from.ptr(),
                from.byte_len(),
                raw
            ))
        }?;
        self.synchronize()
    }

    /// A copy of device memory on the host. Waits.
    ///
    /// # Errors
    /// As [`Stream::upload`].
    pub fn download<'a, T: Pod>(&self, from: impl Into<DeviceSlice<'a, T>>) -> Result<Vec<T>> {
        let from = from.into();
        let mut values = vec![T::zeroed(); from.len()];
        self.download_into(&mut values, from)?;
        Ok(values)
    }

    /// Copies from page-locked host memory to the device; does not wait, and can be captured.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::WrongDevice`], [`Error::Driver`].
    pub fn upload_async<'a, 'b, T: Pod>(
        &self,
        to: impl Into<DeviceSlice<'a, T>>,
        from: impl Into<PinnedSlice<'b, T>>,
    ) -> Result<()> {
        let (to, from) = (to.into(), from.into());
        same_length("upload", to.len(), from.len())?;
        self.same_device(to.device(), "the destination")?;
        if to.is_empty() {
            return Ok(());
        }
        let raw = self.bound()?;
        self.keep(to.owner());
        self.keep(from.owner());
        from.owner().used_by(self);
        // SAFETY: both sides have this length, checked above, and live until the copy is done: see the drops of their
        // allocations, and `keep` for captures.
        unsafe {
            cu!(cuMemcpyHtoDAsync_v2(
                to.ptr(),
                from.address().cast(),
                to.byte_len(),
                raw
            ))
        }
    }

    /// Copies from the device to page-locked host memory; does not wait, and can be captured.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::WrongDevice`], [`Error::Driver`].
    pub fn download_async<'a, 'b, T: Pod>(
        &self,
        to: impl Into<PinnedSlice<'b, T>>,
        from: impl Into<DeviceSlice<'a, T>>,
    ) -> Result<()> {
        let (to, from) = (to.into(), from.into());
        same_length("download", from.len(), to.len())?;
        self.same_device(from.device(), "the source")?;
        if from.is_empty() {
            return Ok(());
        }
        let raw = self.bound()?;
        self.keep(to.owner());
        self.keep(from.owner());
        to.owner().used_by(self);
        // SAFETY: as in `upload_async`.
        unsafe {
            cu!(cuMemcpyDtoHAsync_v2(
                to.address().cast(),
                from.ptr(),
                from.byte_len(),
                raw
            ))
        }
    }

    /// Copies device memory to device memory; does not wait, and can be captured.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::WrongDevice`], [`Error::InvalidArgument`] if the two overlap,
    /// [`Error::Driver`].
    pub fn copy<'a, 'b, T: Pod>(
        &self,
        to: impl Into<DeviceSlice<'a, T>>,
        from: impl Into<DeviceSlice<'b, T>>,
    ) -> Result<()> {
        let (to, from) = (to.into(), from.into());
        same_length("copy", from.len(), to.len())?;
        self.same_device(to.device(), "the destination")?;
        self.same_device(from.device(), "the source")?;
        if to.is_empty() {
            return Ok(());
        }
        let bytes = to.byte_len() as u64;
        if to.ptr() < from.ptr() + bytes && from.ptr() < to.ptr() + bytes {
            return Err(Error::InvalidArgument {
                what: "copy",
                why: "source and destination overlap".to_string(),
            });
        }
        let raw = self.bound()?;
        self.keep(to.owner());
        self.keep(from.owner());
        // SAFETY: both sides have this length and do not overlap, checked above; both live as in `upload_async`.
        unsafe { cu!(cuMemcpyDtoDAsync_v2(to.ptr(), from.ptr(), to.byte_len(), raw)) }
    }

    /// Sets every byte to `byte`; does not wait, and can be captured.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Driver`].
    pub fn fill_bytes<'a, T: Pod>(&self, to: impl Into<DeviceSlice<'a, T>>, byte: u8) -> Result<()> {
        let to = to.into();
        self.same_device(to.device(), "the destination")?;
        if to.byte_len() == 0 {
            return Ok(());
        }
        let raw = self.bound()?;
        self.keep(to.owner());
        // SAFETY: the memory has this length and lives as in `upload_async`.
        unsafe { cu!(cuMemsetD8Async(to.ptr(), byte, to.byte_len(), raw)) }
    }

    /// Sets every element to `value`, whose type has 1, 2, 4 or 8 bytes; does not wait, and can be captured.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another size, [`Error::WrongDevice`], [`Error::Driver`].
    pub fn fill<'a, T: Pod>(&self, to: impl Into<DeviceSlice<'a, T>>, value: T) -> Result<()> {
        let to = to.into();
        let bytes = bytemuck::bytes_of(&value);
        if let [first, rest @ ..] = bytes
            && rest.iter().all(|byte| byte == first)
        {
            return self.fill_bytes(to, *first);
        }
        self.same_device(to.device(), "the destination")?;
        if to.is_empty() {
            return Ok(());
        }
        let raw = self.bound()?;
        self.keep(to.owner());
        let (ptr, len) = (to.ptr(), to.len());
        // SAFETY: the memory has this many elements of this size, is aligned to it as every `T` is in its buffer, and
        // lives as in `upload_async`.
        unsafe {
            match *bytes {
                [a, b] => cu!(cuMemsetD16Async(ptr, u16::from_ne_bytes([a, b]), len, raw)),
                [a, b, c, d] => cu!(cuMemsetD32Async(ptr, u32::from_ne_bytes([a, b, c, d]), len, raw)),
                [a, b, c, d, e, f, g, h] => {
                    // Two columns of 4 bytes in rows of 8.
                    let (low, high) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
                    cu!(cuMemsetD2D32Async(ptr, 8, low, 1, len, raw))?;
                    cu!(cuMemsetD2D32Async(ptr + 4, 8, high, 1, len, raw))
                }
                _ => Err(Error::InvalidArgument {
                    what: "fill",
                    why: format!("elements of {} bytes; 1, 2, 4 and 8 are possible", bytes.len()),
                }),
            }
        }
    }
}

fn same_length(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::LengthMismatch { what, expected, got })
    }
}
