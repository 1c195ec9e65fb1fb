//! Memory that refreshes share: page-locked staging on the host, scratch on the device, buffers of former plans.

use super::pack::Segment;
use crate::Result;
use cuda_graphs::{Device, DeviceBuffer, DeviceSlice, Event, PinnedBuffer, Stream};
use rayon::prelude::*;

/// Bytes of one staging buffer.
const SLOT_BYTES: usize = 16 << 20;
/// Staging buffers: one is filled while the others are on their way.
const SLOTS: usize = 3;

/// What [`crate::cuda::MergePlan`]s need besides their own memory: staging buffers, a stream for uploads, scratch memory.
///
/// One workspace serves any number of plans on one device, whose work must be given to one and the same stream.
#[derive(Debug)]
pub struct MergeWorkspace {
    device: Device,
    uploads: Stream,
    slots: Vec<Slot>,
    next: usize,
    /// What `prepare` writes and the merge behind it reads.
    scratch: Option<DeviceBuffer<u8>>,
    spare: Vec<DeviceBuffer<u8>>,
}

#[derive(Debug)]
struct Slot {
    buffer: PinnedBuffer<u8>,
    /// Reached when the last upload from it is done.
    free: Event,
}

impl MergeWorkspace {
    /// An empty workspace: memory is taken when it is first needed (48 MiB of page-locked memory, and the scratch memory of
    /// the largest launch).
    ///
    /// # Errors
    /// [`crate::Error::Cuda`]. Panics: none.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            uploads: Stream::new(device)?,
            slots: Vec::new(),
            next: 0,
            scratch: None,
            spare: Vec::new(),
        })
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

    /// Makes later uploads wait for the present end of `stream`, whose work may still read recycled memory.
    pub(super) fn begin(&mut self, stream: &Stream) -> Result<()> {
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

    /// Packs segments, which must be in rising order, and queues their upload. What lies between them is overwritten with
    /// anything.
    pub(super) fn upload(&mut self, to: &DeviceBuffer<u8>, mut segments: &[Segment<'_>]) -> Result<()> {
        while let Some(first) = segments.first() {
            let start = first.at;
            let n = segments
                .iter()
                .take_while(|s| s.end() <= start + SLOT_BYTES)
                .count();
            // A segment is far smaller than a slot.
            let (now, later) = segments.split_at(n.max(1));
            segments = later;
            let end = now.last().map_or(start, Segment::end);
            if self.slots.len() < SLOTS {
                self.slots.push(Slot {
                    buffer: PinnedBuffer::zeroed(&self.device, SLOT_BYTES)?,
                    free: Event::without_timing(&self.device)?,
                });
                self.next = self.slots.len() - 1;
            }
            let slot = &self.slots[self.next];
            self.next = (self.next + 1) % SLOTS;
            slot.free.synchronize()?;
            now.par_iter()
                .try_for_each(|segment| segment.pack(&slot.buffer, segment.at - start))?;
            self.uploads
                .upload_async(to.slice(start..end)?, slot.buffer.slice(..end - start)?)?;
            self.uploads.record(&slot.free)?;
        }
        Ok(())
    }
}
