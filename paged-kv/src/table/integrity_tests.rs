//! Each way of breaking a table is found, and by its name.

use super::super::PageState;
use super::*;
use crate::PageTableConfig;

/// Slots 1 and 2 share pages 1 and 2 (page 2 is partly written); slot 1 also has page 3, not written. Page 4 is
/// only retained. Pages 5 to 7 and slots 3 and 4 are free.
fn table() -> PageTable {
    let config = PageTableConfig {
        n_pages: 8,
        page_size: 4,
        n_slots: 5,
        max_pages_per_slot: 3,
    };
    let mut table = PageTable::new(config).unwrap();
    let first = table.allocate_slot().unwrap();
    let _ = table.reserve(first, 12).unwrap();
    table.advance(first, 6).unwrap();
    table.fork(first).unwrap();
    let third = table.allocate_slot().unwrap();
    let _ = table.reserve(third, 4).unwrap();
    table.advance(third, 4).unwrap();
    table.retain(PageId::new(4)).unwrap();
    table.erase(third).unwrap();
    table.drain_dirty().for_each(drop);
    table.check_integrity().unwrap();
    table
}

fn broken(how: impl FnOnce(&mut PageTable)) -> IntegrityError {
    let mut table = table();
    how(&mut table);
    table.check_integrity().expect_err("the table is broken")
}

#[test]
fn a_wrong_free_list_is_found() {
    for page in [0, 5, 8] {
        let page = PageId::new(page);
        assert_eq!(
            broken(|table| table.free_pages.push(page)),
            IntegrityError::FreeList { page }
        );
    }
    let held = PageId::new(4);
    assert_eq!(
        broken(|table| table.free_pages.push(held)),
        IntegrityError::NotPartitioned {
            page: held,
            free: true,
            holders: 1
        }
    );
    let lost = PageId::new(5);
    assert_eq!(
        broken(|table| table.free_pages.retain(|&page| page != lost)),
        IntegrityError::NotPartitioned {
            page: lost,
            free: false,
            holders: 0
        }
    );
    assert_eq!(
        broken(|table| table.pages[0] = PageState {
            retains: 1,
            ..table.pages[0]
        }),
        IntegrityError::NotPartitioned {
            page: PageId::RESERVED,
            free: false,
            holders: 1
        }
    );
}

#[test]
fn wrong_counts_of_holders_are_found() {
    let page = PageId::new(1);
    for counted in [1, 3] {
        assert_eq!(
            broken(|table| table.pages[1].owners = counted),
            IntegrityError::RefCount {
                page,
                counted,
                rows: 2
            }
        );
    }
    let leaked = PageId::new(4);
    assert_eq!(
        broken(|table| table.pages[4].retains = 0),
        IntegrityError::NotPartitioned {
            page: leaked,
            free: false,
            holders: 0
        }
    );
    // A page that is not full cannot be retained.
    assert_eq!(
        broken(|table| table.pages[2].retains = 1),
        IntegrityError::Written {
            page: PageId::new(2),
            counted: 2,
            implied: 4
        }
    );
}

#[test]
fn wrong_rows_are_found() {
    // Entries are [n_slots = 5, max_pages_per_slot = 3].
    let row = |slot, column, entry| IntegrityError::Row {
        slot: Slot::new(slot),
        column,
        entry,
    };
    assert_eq!(broken(|table| table.rows[1] = -1), row(0, 1, -1));
    assert_eq!(broken(|table| table.rows[4] = -1), row(1, 1, -1));
    assert_eq!(broken(|table| table.rows[4] = 0), row(1, 1, 0));
    assert_eq!(broken(|table| table.rows[4] = 8), row(1, 1, 8));
    assert_eq!(broken(|table| table.rows[8] = 3), row(2, 2, 3));
    assert_eq!(broken(|table| table.rows[11] = 1), row(3, 2, 1));
}

#[test]
fn a_wrong_logical_index_is_found() {
    let inverse = |page, logical, column| IntegrityError::Inverse {
        page: PageId::new(page),
        logical,
        column,
    };
    assert_eq!(
        broken(|table| table.pages[2].logical = 0),
        inverse(2, Some(0), Some(1))
    );
    // The same page twice in a row.
    assert_eq!(broken(|table| table.rows[4] = 1), inverse(1, Some(0), Some(1)));
    assert_eq!(
        broken(|table| table.pages[6].logical = 2),
        inverse(6, Some(2), None)
    );
    assert_eq!(
        broken(|table| table.pages[4].logical = NO_LOGICAL),
        inverse(4, None, None)
    );
}

#[test]
fn a_wrong_length_is_found() {
    let first = Slot::new(1);
    assert_eq!(
        broken(|table| table.slots[1].len = 13),
        IntegrityError::Capacity {
            slot: first,
            len: 13,
            pages: 3
        }
    );
    assert_eq!(
        broken(|table| table.slots[1].pages = 4),
        IntegrityError::Capacity {
            slot: first,
            len: 6,
            pages: 4
        }
    );
    assert_eq!(
        broken(|table| table.slots[4].pages = 1),
        IntegrityError::Capacity {
            slot: Slot::new(4),
            len: 0,
            pages: 1
        }
    );
    assert_eq!(
        broken(|table| table.slots[2].len = 7),
        IntegrityError::Written {
            page: PageId::new(2),
            counted: 2,
            implied: 3
        }
    );
    assert_eq!(
        broken(|table| table.pages[5].written = 1),
        IntegrityError::Written {
            page: PageId::new(5),
            counted: 1,
            implied: 0
        }
    );
}

#[test]
fn wrong_lists_of_slots_are_found() {
    let list = |slot| IntegrityError::SlotList {
        slot: Slot::new(slot),
    };
    for slot in [0, 4, 5] {
        assert_eq!(broken(|table| table.free_slots.push(Slot::new(slot))), list(slot));
    }
    assert_eq!(broken(|table| table.free_slots.push(Slot::new(1))), list(1));
    assert_eq!(broken(|table| table.slots[0].live = true), list(0));
    assert_eq!(
        broken(|table| table.free_slots.retain(|slot| slot.index() != 4)),
        list(4)
    );
    let dirty = |slot| IntegrityError::Dirty {
        slot: Slot::new(slot),
    };
    assert_eq!(broken(|table| table.dirty.push(Slot::new(2))), dirty(2));
    assert_eq!(broken(|table| table.slots[3].dirty = true), dirty(3));
    assert_eq!(broken(|table| table.dirty.push(Slot::new(9))), dirty(9));
    assert_eq!(
        broken(|table| {
            table.mark_dirty(Slot::new(2));
            table.dirty.push(Slot::new(2));
        }),
        dirty(2)
    );
}
