//! Factors on their way to the device: packed by all threads at once, ahead of the plans that need them.
//!
//! ```text
//! segments  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  of all plans, in order, taken one by one by whichever thread is free
//! chunks    └──0──┘└──1──┘└─2─┘│└──3──┘…  of one plan each, as large as a slot at most
//! slots       0      1      2     3  0 …  page-locked; a slot is free when its last upload has ended
//! ```
//!
//! The thread that makes the plans uploads a chunk as soon as it is full, and packs along while it waits. So a chunk is
//! packed while those before it are uploaded and plans before it merge, without a pause between one plan and the next.
//!
//! **Invariants.** A segment is taken only if its chunk has a slot, so that whoever takes one finishes it: packing ends even if
//! no other thread ever comes. Uploads are queued in the order of chunks, so that slots become free in that order.

use super::pack::Segment;
use super::workspace::{MergeWorkspace, SLOT_BYTES, SLOTS, Slot};
use crate::Result;
use cuda_graphs::DeviceBuffer;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Consecutive segments that are uploaded together.
#[derive(Debug)]
struct Chunk {
    /// Where its bytes lie in the plan's memory.
    bytes: Range<usize>,
    /// Segments that are not packed yet.
    missing: AtomicUsize,
}

/// What the threads share.
pub(super) struct Packing<'a> {
    /// With the chunks that they belong to.
    segments: Vec<(usize, Segment<'a>)>,
    chunks: Vec<Chunk>,
    slots: Vec<Slot>,
    /// The next segment to be taken.
    next: AtomicUsize,
    /// Chunks below this have a slot.
    free: AtomicUsize,
    stop: AtomicBool,
    error: Mutex<Option<crate::Error>>,
}

impl<'a> Packing<'a> {
    /// `plans` are the segments of each plan, in rising order of their places.
    pub(super) fn new(
        workspace: &mut MergeWorkspace,
        plans: Vec<Vec<Segment<'a>>>,
    ) -> Result<(Self, Vec<Range<usize>>)> {
        let mut segments = Vec::new();
        let mut chunks: Vec<Chunk> = Vec::new();
        let mut of_plans = Vec::with_capacity(plans.len());
        for plan in plans {
            let first = chunks.len();
            for segment in plan {
                match chunks[first..].last_mut() {
                    Some(last) if segment.end() <= last.bytes.start + SLOT_BYTES => {
                        last.bytes.end = segment.end();
                        *last.missing.get_mut() += 1;
                    }
                    _ => chunks.push(Chunk {
                        bytes: segment.at..segment.end(),
                        missing: AtomicUsize::new(1),
                    }),
                }
                segments.push((chunks.len() - 1, segment));
            }
            of_plans.push(first..chunks.len());
        }
        let slots = workspace.take_slots(chunks.len().min(SLOTS))?;
        let packing = Self {
            segments,
            chunks,
            free: AtomicUsize::new(slots.len()),
            slots,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
        };
        Ok((packing, of_plans))
    }

    /// Packs one segment, if there is one whose chunk has a slot.
    fn pack_one(&self) -> bool {
        let index = self.next.load(Ordering::Relaxed);
        let Some((chunk, segment)) = self.segments.get(index) else {
            return false;
        };
        // What the device read from the slot is read: pairs with `release`.
        if *chunk >= self.free.load(Ordering::Acquire) {
            return false;
        }
        let taken = self
            .next
            .compare_exchange(index, index + 1, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_err() {
            return true;
        }
        let to = &self.chunks[*chunk];
        let slot = &self.slots[*chunk % self.slots.len()];
        if let Err(error) = segment.pack(&slot.buffer, segment.at - to.bytes.start) {
            *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            self.stop.store(true, Ordering::Relaxed);
        }
        // Pairs with `upload`, which reads what is packed.
        to.missing.fetch_sub(1, Ordering::Release);
        true
    }

    /// Packs until nothing is left.
    pub(super) fn help(&self) {
        let mut idle = 0u32;
        while !self.stop.load(Ordering::Relaxed) && self.next.load(Ordering::Relaxed) < self.segments.len() {
            if self.pack_one() {
                idle = 0;
            } else {
                idle += 1;
                pause(idle);
            }
        }
    }

    /// Uploads chunks as they become full, and packs meanwhile.
    pub(super) fn upload(
        &self,
        workspace: &MergeWorkspace,
        chunks: Range<usize>,
        to: &DeviceBuffer<u8>,
    ) -> Result<()> {
        for (index, chunk) in chunks.clone().zip(&self.chunks[chunks]) {
            let mut idle = 0u32;
            while chunk.missing.load(Ordering::Acquire) > 0 {
                self.release(index)?;
                if let Some(error) = self.error.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    return Err(error);
                }
                if self.pack_one() {
                    idle = 0;
                } else {
                    idle += 1;
                    pause(idle);
                }
            }
            let slot = &self.slots[index % self.slots.len()];
            let bytes = &chunk.bytes;
            workspace
                .uploads
                .upload_async(to.slice(bytes.clone())?, slot.buffer.slice(..bytes.len())?)?;
            workspace.uploads.record(&slot.free)?;
            self.release(index + 1)?;
        }
        Ok(())
    }

    /// Gives the slots of chunks whose upload has ended, below `uploaded`, to later ones.
    fn release(&self, uploaded: usize) -> Result<()> {
        loop {
            let free = self.free.load(Ordering::Relaxed);
            let oldest = free - self.slots.len();
            if oldest >= uploaded
                || free >= self.chunks.len()
                || !self.slots[free % self.slots.len()].free.is_reached()?
            {
                return Ok(());
            }
            self.free.store(free + 1, Ordering::Release);
        }
    }

    /// Makes the others leave.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The slots, for the next time.
    pub(super) fn into_slots(self) -> Vec<Slot> {
        self.slots
    }
}

/// Waits a moment; for longer, others may run.
fn pause(idle: u32) {
    if idle < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
