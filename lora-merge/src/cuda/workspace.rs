//! Memory that refreshes share: page-locked staging on the host, scratch on the device, buffers of former plans.

use crate::Result;
use cuda_graphs::{Device, DeviceBuffer, DeviceSlice, Event, PinnedBuffer, Stream};

/// Bytes of one staging buffer.
pub(super) const SLOT_BYTES: usize = 8 << 20;
/// Staging buffers: some are filled while others are on their way. They are few enough to stay in the processor's caches,
/// from which the copy engine reads.
pub(super) const SLOTS: usize = 8;

/// What [`crate::cuda::MergePlan`]s need besides their own memory: staging buffers, a stream for uploads, scratch memory.
///
/// One workspace serves any number of plans on one device, whose work must be given to one and the same stream.
#[derive(Debug)]
pub struct MergeWorkspace {
    device: Device,
    pub(super) uploads: Stream,
    pub(super) slots: Vec<Slot>,
    /// For tables on their way.
    tables: Option<Slot>,
    /// What `prepare` writes and the merge behind it reads.
    scratch: Option<DeviceBuffer<u8>>,
    spare: Vec<DeviceBuffer<u8>>,
    /// Whether memory came back since uploads last waited for whoever used it.
    recycled: bool,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) buffer: PinnedBuffer<u8>,
    /// Reached when the last upload from it is done.
    pub(super) free: Event,
}

impl MergeWorkspace {
    /// An empty workspace: memory is taken when it is first needed (64 MiB of page-locked memory, and the scratch memory of
    /// the largest launch).
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]. Panics: none.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            uploads: Stream::new(device)?,
            slots: Vec::new(),
            tables: None,
            scratch: None,
            spare: Vec::new(),
            recycled: false,
        })
    }

    /// The device that it is for.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of device memory that the workspace holds.
    pub fn bytes(&self) -> usize {
        self.scratch
            .iter()
            .chain(&self.spare)
            .map(DeviceBuffer::len)
            .sum()
    }

    /// Takes a plan's memory for plans to come. The plan's work must have ended.
    pub fn recycle(&mut self, plan: super::MergePlan) {
        self.spare.push(plan.into_memory());
        self.recycled = true;
    }

    /// Frees what [`recycle`](Self::recycle) took and nobody used.
    pub fn trim(&mut self) {
        self.spare.clear();
    }

    /// Device memory of at least this many bytes, with any content.
    pub(super) fn take(&mut self, bytes: usize) -> Result<DeviceBuffer<u8>> {
        // Much larger ones are left to larger plans.
        let fits = |b: &DeviceBuffer<u8>| b.len() >= bytes && b.len() / 2 <= bytes;
        let found = (0..self.spare.len()).filter(|i| fits(&self.spare[*i]));
        match found.min_by_key(|i| self.spare[*i].len()) {
            Some(i) => Ok(self.spare.swap_remove(i)),
            None => Ok(DeviceBuffer::zeroed(&self.device, bytes)?),
        }
    }

    /// Makes the scratch memory at least this large. A smaller one is freed, which waits for the device.
    pub(super) fn reserve_scratch(&mut self, bytes: usize) -> Result<()> {
        if self.scratch.as_ref().is_none_or(|s| s.len() < bytes) {
            self.scratch = None;
            self.scratch = Some(DeviceBuffer::zeroed(&self.device, bytes)?);
        }
        Ok(())
    }

    /// The scratch memory.
    pub(super) fn scratch(&self) -> Option<DeviceSlice<'_, u8>> {
        self.scratch.as_ref().map(DeviceBuffer::as_slice)
    }

    /// Makes later uploads wait for the present end of `stream` if its work may still read recycled memory. Otherwise they
    /// go on beside the merges of the plans before.
    pub(super) fn begin(&mut self, stream: &Stream) -> Result<()> {
        if !std::mem::take(&mut self.recycled) {
            return Ok(());
        }
        let event = Event::without_timing(&self.device)?;
        stream.record(&event)?;
        Ok(self.uploads.wait(&event)?)
    }

    /// Makes later work of `stream` wait for all uploads so far.
    pub(super) fn end(&mut self, stream: &Stream) -> Result<()> {
        let event = Event::without_timing(&self.device)?;
        self.uploads.record(&event)?;
        Ok(stream.wait(&event)?)
    }

    /// Some staging buffers that nothing is uploaded from any more. Whoever takes them puts them back into `slots`.
    pub(super) fn take_slots(&mut self, n: usize) -> Result<Vec<Slot>> {
        let mut slots = std::mem::take(&mut self.slots);
        for slot in &slots {
            slot.free.synchronize()?;
        }
        while slots.len() < n {
            slots.push(Slot {
                buffer: PinnedBuffer::zeroed(&self.device, SLOT_BYTES)?,
                free: Event::without_timing(&self.device)?,
            });
        }
        Ok(slots)
    }

    /// Makes room for so many bytes of tables in page-locked memory, of which nothing is uploaded any more.
    pub(super) fn reserve_tables(&mut self, bytes: usize) -> Result<()> {
        match &self.tables {
            Some(tables) if tables.buffer.len() >= bytes => tables.free.synchronize()?,
            _ => {
                self.tables = Some(Slot {
                    buffer: PinnedBuffer::zeroed(&self.device, bytes.next_power_of_two())?,
                    free: Event::without_timing(&self.device)?,
                });
            }
        }
        Ok(())
    }

    /// Uploads tables by way of their place in the page-locked memory.
    pub(super) fn upload_tables(&self, at: usize, bytes: &[u8], to: DeviceSlice<'_, u8>) -> Result<()> {
        let Some(tables) = self.tables.as_ref().filter(|_| !bytes.is_empty()) else {
            return Ok(());
        };
        tables.buffer.write(at, bytes)?;
        self.uploads
            .upload_async(to, tables.buffer.slice(at..at + bytes.len())?)?;
        Ok(self.uploads.record(&tables.free)?)
    }
}
