//! Small uploads that never make the host wait.
//!
//! A step writes its inputs into one of several page-locked buffers and queues copies from there.
//! The buffer may be written again when the device has passed the step's end:
//!
//! ```text
//!   begin ── upload, upload, … ── end          buffer 0   step 0, 3, 6 …
//!   begin ── upload, …         ── end          buffer 1   step 1, 4, 7 …
//!   begin ── …                 ── end          buffer 2   step 2, 5, 8 …
//! ```

use bytemuck::Pod;
use cuda_graphs::{Device, DeviceSlice, Event, PinnedBuffer, Stream};

use crate::Result;

/// A packed step takes two and a decode step one: enough for two rounds under way and the one being written. Token states
/// take some more, now and then, and may wait.
const BUFFERS: usize = 9;

#[derive(Debug)]
struct Buffer {
    words: PinnedBuffer<u32>,
    free: Event,
}

#[derive(Debug)]
pub(crate) struct Staging {
    buffers: Vec<Buffer>,
    current: usize,
    used: usize,
}

impl Staging {
    /// Room for `words` 32-bit words per step; a step that needs more waits for its surplus.
    pub(crate) fn new(device: &Device, words: usize) -> Result<Self> {
        let buffer = |_| -> Result<Buffer> {
            Ok(Buffer {
                words: PinnedBuffer::zeroed(device, words)?,
                free: Event::without_timing(device)?,
            })
        };
        let buffers = (0..BUFFERS).map(buffer).collect::<Result<_>>()?;
        Ok(Self {
            buffers,
            current: 0,
            used: 0,
        })
    }

    /// Starts a step's uploads in the next buffer.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.current = (self.current + 1) % self.buffers.len();
        self.used = 0;
        Ok(self.buffers[self.current].free.synchronize()?)
    }

    /// Queues the copy of 32-bit values to the device. The values are taken over now.
    pub(crate) fn upload<T: Pod>(
        &mut self,
        stream: &Stream,
        to: DeviceSlice<'_, T>,
        values: &[T],
    ) -> Result<()> {
        const { assert!(size_of::<T>() == 4) };
        let words: &[u32] = bytemuck::cast_slice(values);
        let buffer = &self.buffers[self.current].words;
        if words.len() > buffer.len() - self.used {
            return Ok(stream.upload(to, values)?);
        }
        buffer.write(self.used, words)?;
        stream.upload_async(
            to.cast::<u32>()?,
            buffer.slice(self.used..self.used + words.len())?,
        )?;
        self.used += words.len();
        Ok(())
    }

    /// Ends the step's uploads: the buffer is free when `stream` gets here.
    pub(crate) fn end(&mut self, stream: &Stream) -> Result<()> {
        Ok(stream.record(&self.buffers[self.current].free)?)
    }
}
