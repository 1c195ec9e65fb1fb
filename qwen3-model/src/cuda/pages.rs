//! The page table's rows on the device.
//!
//! ```text
//!   host   rows()            [n_slots, max_pages]      changes when pages are reserved or given back
//!   here   copy of the rows as the device will have them once the queued uploads are done
//!   device rows              [n_slots, max_pages]      read by kernels; −1 = unmapped, row 0 all 0
//! ```
//!
//! Only entries that differ travel, which in a decode step is one entry in `page_size` steps.

use cuda_graphs::{DeviceBuffer, Stream};
use paged_kv::{PageTable, Slot};

use super::staging::Staging;
use crate::{Error, Result};

#[derive(Debug)]
pub(crate) struct DevicePages {
    rows: DeviceBuffer<i32>,
    copy: Vec<i32>,
    n_slots: usize,
    max_pages: usize,
}

impl DevicePages {
    /// No page mapped but in row 0, which padded rows use.
    pub(crate) fn new(stream: &Stream, n_slots: usize, max_pages: usize) -> Result<Self> {
        let mut copy = vec![-1; n_slots * max_pages];
        copy[..max_pages].fill(0);
        Ok(Self {
            rows: DeviceBuffer::from_slice(stream, &copy)?,
            copy,
            n_slots,
            max_pages,
        })
    }

    /// The rows on the device, `[n_slots, max_pages]`.
    pub(crate) fn rows(&self) -> &DeviceBuffer<i32> {
        &self.rows
    }

    pub(crate) fn n_slots(&self) -> usize {
        self.n_slots
    }

    pub(crate) fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// Whether a table has the shape of the copy here.
    pub(crate) fn check(&self, table: &PageTable) -> Result<()> {
        let config = table.config();
        for (option, asked, here) in [
            ("n_slots", config.n_slots, self.n_slots),
            ("max_pages_per_slot", config.max_pages_per_slot, self.max_pages),
        ] {
            if asked != here {
                let problem = format!("the page table has {asked}, the device's copy {here}");
                return Err(Error::Option { option, problem });
            }
        }
        Ok(())
    }

    /// Queues what changed in one slot's row. `row` is `[max_pages]`, of a table that passed
    /// [`check`](Self::check).
    pub(crate) fn update(
        &mut self,
        stream: &Stream,
        staging: &mut Staging,
        slot: Slot,
        row: &[i32],
    ) -> Result<()> {
        let start = slot.index() * self.max_pages;
        let copy = &mut self.copy[start..start + self.max_pages];
        let Some(first) = row.iter().zip(copy.iter()).position(|(new, old)| new != old) else {
            return Ok(());
        };
        let last = row
            .iter()
            .zip(copy.iter())
            .rposition(|(new, old)| new != old)
            .unwrap_or(first);
        copy[first..=last].copy_from_slice(&row[first..=last]);
        let to = self.rows.slice(start + first..start + last + 1)?;
        staging.upload(stream, to, &row[first..=last])
    }
}
