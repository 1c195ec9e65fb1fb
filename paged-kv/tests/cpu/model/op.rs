//! The calls that are tried, and the sizes of tables.

use paged_kv::PageTableConfig;

/// One call. Slots and pages are picked by a byte from what there is when the call is made, see
/// `Model::pick_slot` and `Model::pick_page`.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Allocate,
    Reserve {
        slot: u8,
        len: usize,
    },
    /// Write and advance within what is reserved.
    Append {
        slot: u8,
        n: usize,
    },
    /// Reserve, copy if asked, write, advance: what an engine does.
    Grow {
        slot: u8,
        n: usize,
    },
    WritePositions {
        slot: u8,
        start: usize,
        n: usize,
    },
    Fork {
        slot: u8,
    },
    Erase {
        slot: u8,
    },
    Retain {
        page: u8,
    },
    Release {
        page: u8,
    },
    /// Attach the first `n` pages of another slot.
    AttachFromSlot {
        slot: u8,
        source: u8,
        n: usize,
        reversed: bool,
    },
    /// Attach retained pages whose logical indices are 0, 1, 2, …
    AttachRetained {
        slot: u8,
        n: usize,
    },
    DrainDirty,
}

impl Op {
    /// Any four bytes are an operation, suited to the small tables of [`config`].
    pub(crate) fn decode([kind, a, b, c]: [u8; 4]) -> Op {
        let (slot, page) = (a, a);
        let (small, large) = (usize::from(b) % 7, usize::from(b) % 48);
        match kind % 32 {
            0..=3 => Op::Allocate,
            4..=5 => Op::Reserve { slot, len: large },
            6..=7 => Op::Append { slot, n: small },
            8..=14 => Op::Grow { slot, n: small },
            15 => Op::WritePositions {
                slot,
                start: large,
                n: usize::from(c) % 12,
            },
            16..=19 => Op::Fork { slot },
            20..=22 => Op::Erase { slot },
            23..=24 => Op::Retain { page },
            25..=26 => Op::Release { page },
            27..=28 => Op::AttachFromSlot {
                slot,
                source: b,
                n: usize::from(c) % 6,
                reversed: c > 200,
            },
            29..=30 => Op::AttachRetained { slot, n: small },
            _ => Op::DrainDirty,
        }
    }
}

/// A small table's sizes from any four bytes.
pub(crate) fn config([a, b, c, d]: [u8; 4]) -> PageTableConfig {
    PageTableConfig {
        n_pages: 2 + usize::from(a) % 24,
        page_size: 1 + usize::from(b) % 5,
        n_slots: 2 + usize::from(c) % 8,
        max_pages_per_slot: 1 + usize::from(d) % 9,
    }
}
