//! The rows of a page table on the device, kept up to date row by row.

use cuda_graphs::{Device, DeviceBuffer, DeviceSlice, Event, PinnedBuffer, Stream};

use super::CudaError;
use crate::{PageTable, PageTableConfig};

/// Page-locked copies of the rows; while one is still being read by a copy, the next update uses the other.
const STAGES: usize = 2;

/// `[n_slots, max_pages_per_slot]` i32 in device memory at an address that never changes.
///
/// [`update`](Self::update) sends only the rows that changed. It is one copy for each run of neighbouring slots.
///
/// ```no_run
/// # use cuda_graphs::{Compiler, Device, Stream};
/// # use paged_kv::{KvDtype, KvLayout, PageTable, PageTableConfig};
/// # let device = Device::open(0)?;
/// # let stream = Stream::new(&device)?;
/// use paged_kv::cuda::PageTableMirror;
///
/// let config = PageTableConfig { n_pages: 8, page_size: 4, n_slots: 3, max_pages_per_slot: 4 };
/// let mut table = PageTable::new(config)?;
/// let mut mirror = PageTableMirror::new(&device, &config)?;
/// let slot = table.allocate_slot()?;
/// let _ = table.reserve(slot, 9)?;
/// mirror.update(&stream, &mut table)?;
/// assert_eq!(mirror.update(&stream, &mut table)?, 0, "nothing has changed since");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PageTableMirror {
    rows: DeviceBuffer<i32>,
    n_slots: usize,
    width: usize,
    stages: Vec<Stage>,
    next: usize,
    /// Slots of the present update, reused.
    slots: Vec<usize>,
}

#[derive(Debug)]
struct Stage {
    rows: PinnedBuffer<i32>,
    copied: Event,
    used: bool,
}

impl PageTableMirror {
    /// A mirror for tables of this shape. Until the first update every row maps page 0.
    ///
    /// # Errors
    /// [`CudaError::Cache`] if the sizes overflow, [`CudaError::Cuda`]. Panics: none.
    pub fn new(device: &Device, config: &PageTableConfig) -> Result<Self, CudaError> {
        let (n_slots, width) = (config.n_slots, config.max_pages_per_slot);
        let len = n_slots
            .checked_mul(width)
            .ok_or(crate::Error::SizeOverflow { what: "page table" })?;
        let stages = (0..STAGES)
            .map(|_| {
                let rows = PinnedBuffer::zeroed(device, len)?;
                Ok(Stage {
                    rows,
                    copied: Event::without_timing(device)?,
                    used: false,
                })
            })
            .collect::<Result<Vec<_>, CudaError>>()?;
        let rows = DeviceBuffer::zeroed(device, len)?;
        Ok(PageTableMirror {
            rows,
            n_slots,
            width,
            stages,
            next: 0,
            slots: Vec::new(),
        })
    }

    /// Sends the rows that changed since the last update, of this or of another mirror. Does not wait, except for the
    /// update before the last one. Returns how many rows were sent.
    ///
    /// # Errors
    /// [`CudaError::TableMismatch`], [`CudaError::Cuda`]; after either every row is sent again by the next update.
    /// Panics: none.
    pub fn update(&mut self, stream: &Stream, table: &mut PageTable) -> Result<usize, CudaError> {
        let config = table.config();
        if (config.n_slots, config.max_pages_per_slot) != (self.n_slots, self.width) {
            return Err(CudaError::TableMismatch {
                n_slots: config.n_slots,
                width: config.max_pages_per_slot,
                mirror_slots: self.n_slots,
                mirror_width: self.width,
            });
        }
        self.slots.clear();
        self.slots
            .extend(table.drain_dirty().map(|(slot, _)| slot.index()));
        self.slots.sort_unstable();
        if self.slots.is_empty() {
            return Ok(0);
        }
        let sent = self.send(stream, table);
        if sent.is_err() {
            table.mark_all_dirty();
        }
        sent.map(|()| self.slots.len())
    }

    /// All rows, `[n_slots, max_pages_per_slot]`.
    pub fn rows(&self) -> DeviceSlice<'_, i32> {
        self.rows.as_slice()
    }

    /// Rows of the table, slot 0 included.
    pub fn n_slots(&self) -> usize {
        self.n_slots
    }

    /// Entries of a row.
    pub fn max_pages_per_slot(&self) -> usize {
        self.width
    }

    fn send(&mut self, stream: &Stream, table: &PageTable) -> Result<(), CudaError> {
        let stage = &mut self.stages[self.next];
        self.next = (self.next + 1) % STAGES;
        if stage.used {
            stage.copied.synchronize()?;
        }
        for run in self.slots.chunk_by(|a, b| a + 1 == *b) {
            let (start, end) = (run[0] * self.width, (run[run.len() - 1] + 1) * self.width);
            stage.rows.write(start, &table.rows()[start..end])?;
            stream.upload_async(self.rows.slice(start..end)?, stage.rows.slice(start..end)?)?;
        }
        stage.used = true;
        Ok(stream.record(&stage.copied)?)
    }
}
