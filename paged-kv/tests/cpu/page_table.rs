//! Situations that users of paged caches have met, each by its name.

use paged_kv::{Error, PageId, PageTable, PageTableConfig, Slot};

fn table(n_pages: usize, page_size: usize, n_slots: usize, max_pages_per_slot: usize) -> PageTable {
    PageTable::new(PageTableConfig {
        n_pages,
        page_size,
        n_slots,
        max_pages_per_slot,
    })
    .unwrap()
}

/// Reserve, then record the tokens as written, up to `len` in total.
fn grow(table: &mut PageTable, slot: Slot, len: usize) -> Result<(), Error> {
    let _ = table.reserve(slot, len)?;
    table.advance(slot, len - table.len(slot)?)
}

#[test]
fn a_sequence_larger_than_the_pool_is_refused_and_the_next_one_fits() {
    let mut table = table(5, 16, 4, 1_000);
    let large = table.allocate_slot().unwrap();
    assert!(!table.can_reserve(large, 65));
    assert_eq!(
        table.reserve(large, 65),
        Err(Error::OutOfPages {
            slot: large,
            needed: 5,
            free: 4
        })
    );
    assert_eq!(table.capacity(large), Ok(0));
    let small = table.allocate_slot().unwrap();
    assert_eq!(table.reserve(small, 64).unwrap().new_pages, 4);
}

#[test]
fn a_sequence_longer_than_a_row_is_refused_however_many_pages_are_free() {
    let mut table = table(100, 16, 2, 3);
    let slot = table.allocate_slot().unwrap();
    let too_long = Error::SequenceTooLong {
        slot,
        asked: 49,
        limit: 48,
    };
    assert_eq!(table.pages_needed(slot, 49), Err(too_long.clone()));
    assert_eq!(table.reserve(slot, 49), Err(too_long));
    let huge = Error::SequenceTooLong {
        slot,
        asked: usize::MAX,
        limit: 48,
    };
    assert_eq!(table.reserve(slot, usize::MAX), Err(huge));
    assert!(table.can_reserve(slot, 48));
}

#[test]
fn a_lone_sequence_grows_to_the_last_page_and_no_further() {
    let mut table = table(4, 8, 2, 10);
    let slot = table.allocate_slot().unwrap();
    for len in 1..=24 {
        grow(&mut table, slot, len).unwrap();
        assert_eq!(table.free_pages(), 3 - len.div_ceil(8));
    }
    assert!(!table.can_reserve(slot, 25));
    assert_eq!(
        grow(&mut table, slot, 25),
        Err(Error::OutOfPages {
            slot,
            needed: 1,
            free: 0
        })
    );
    assert_eq!(table.len(slot), Ok(24));
    table.check_integrity().unwrap();
}

#[test]
fn a_sequence_crosses_a_page_boundary_exactly_at_it() {
    for page_size in [16, 256] {
        let mut table = table(4, page_size, 3, 4);
        let slot = table.allocate_slot().unwrap();
        grow(&mut table, slot, page_size).unwrap();
        assert_eq!(table.capacity(slot), Ok(page_size));
        assert_eq!(
            table.advance(slot, 1),
            Err(Error::NotReserved {
                slot,
                asked: page_size + 1,
                capacity: page_size
            })
        );
        assert_eq!(table.pages_needed(slot, page_size + 1), Ok(1));

        // Preempted here and resumed with the token that did not fit.
        table.erase(slot).unwrap();
        let slot = table.allocate_slot().unwrap();
        grow(&mut table, slot, page_size + 1).unwrap();
        assert_eq!(table.capacity(slot), Ok(2 * page_size));
        let second_page = table.row(slot)[1] as usize;
        assert_eq!(table.physical(slot, page_size), Some(second_page * page_size));
    }
}

#[test]
fn slots_and_pages_of_hundreds_of_requests_under_pressure_come_back() {
    let mut table = table(33, 16, 9, 8);
    let mut running: Vec<Slot> = Vec::new();
    let (mut failed, mut finished) = (0, 0);
    for request in 0..500_usize {
        let Ok(slot) = table.allocate_slot() else {
            finished += 1;
            table.erase(running.remove(request % running.len())).unwrap();
            continue;
        };
        // Every seventh is longer than a row can map.
        let len = if request % 7 == 3 {
            16 * 8 + 1
        } else {
            1 + (request * 37) % 100
        };
        if grow(&mut table, slot, len).is_ok() {
            running.push(slot);
        } else {
            failed += 1;
            table.erase(slot).unwrap();
        }
        table.check_integrity().unwrap();
    }
    assert!(
        failed > 50 && finished > 50,
        "{failed} failed, {finished} finished"
    );
    for slot in running {
        table.erase(slot).unwrap();
    }
    assert_eq!((table.free_pages(), table.free_slots()), (32, 8));
    table.check_integrity().unwrap();
}

#[test]
fn erasing_twice_is_an_error_and_gives_nothing_back_twice() {
    let mut table = table(9, 4, 4, 4);
    let slot = table.allocate_slot().unwrap();
    grow(&mut table, slot, 9).unwrap();
    table.erase(slot).unwrap();
    assert_eq!(table.erase(slot), Err(Error::DeadSlot { slot }));
    assert_eq!((table.free_pages(), table.free_slots()), (8, 3));
    table.check_integrity().unwrap();

    // Were a page or slot in the free list twice, two sequences would get it now.
    let slots: Vec<Slot> = (0..3).map(|_| table.allocate_slot().unwrap()).collect();
    assert!(slots[0] != slots[1] && slots[1] != slots[2] && slots[0] != slots[2]);
    let mut pages = Vec::new();
    for (slot, len) in slots.into_iter().zip([12, 12, 8]) {
        grow(&mut table, slot, len).unwrap();
        pages.extend(table.pages(slot).unwrap());
    }
    pages.sort();
    assert!(pages.into_iter().eq((1..9).map(PageId::new)));
}

#[test]
fn every_operation_refuses_an_erased_slot_and_slot_0_and_one_outside_the_table() {
    let mut table = table(9, 4, 4, 4);
    let dead = table.allocate_slot().unwrap();
    grow(&mut table, dead, 5).unwrap();
    table.erase(dead).unwrap();
    let outside = Slot::new(4);
    let before = table.clone();
    for (slot, error) in [
        (dead, Error::DeadSlot { slot: dead }),
        (Slot::RESERVED, Error::ReservedSlot),
        (
            outside,
            Error::NoSuchSlot {
                slot: outside,
                n_slots: 4,
            },
        ),
        (
            Slot::new(u32::MAX),
            Error::NoSuchSlot {
                slot: Slot::new(u32::MAX),
                n_slots: 4,
            },
        ),
    ] {
        assert!(!table.can_reserve(slot, 1) && !table.can_reserve(slot, 0) && !table.can_fork(slot));
        assert_eq!(table.reserve(slot, 1), Err(error.clone()));
        assert_eq!(table.pages_needed(slot, 1), Err(error.clone()));
        assert_eq!(table.fork(slot), Err(error.clone()));
        assert_eq!(table.advance(slot, 0), Err(error.clone()));
        assert_eq!(
            table.write_positions(slot, 0..1, &mut Vec::new()),
            Err(error.clone())
        );
        assert_eq!(table.erase(slot), Err(error.clone()));
        assert_eq!(table.attach_shared(slot, &[]), Err(error.clone()));
        assert_eq!(table.len(slot), Err(error.clone()));
        assert_eq!(table.capacity(slot), Err(error.clone()));
        assert_eq!(table.pages(slot).err(), Some(error));
        assert!(!table.is_live(slot));
        assert_eq!(table.logical_page(slot, PageId::new(1)), None);
    }
    assert!(table == before);
    assert_eq!(table.row(outside), &[] as &[i32]);
    assert_eq!(table.physical(outside, 0), None);
    assert_eq!(table.physical(dead, 0), None);
}

#[test]
fn the_row_of_a_reused_slot_holds_no_stale_pages() {
    let mut table = table(9, 4, 2, 6);
    let slot = table.allocate_slot().unwrap();
    grow(&mut table, slot, 24).unwrap();
    let stale: Vec<PageId> = table.pages(slot).unwrap().collect();
    table.erase(slot).unwrap();
    assert_eq!(table.row(slot), [-1; 6]);
    assert_eq!(table.allocate_slot(), Ok(slot));
    grow(&mut table, slot, 5).unwrap();
    assert_eq!(table.row(slot)[2..], [-1; 4]);
    assert_eq!(table.physical(slot, 8), None);
    let owned = stale
        .iter()
        .filter(|&&page| table.logical_page(slot, page).is_some())
        .count();
    assert_eq!(owned, 2);
}

#[test]
fn padding_rows_reach_page_0_only_and_no_sequence_ever_gets_it() {
    let mut table = table(9, 4, 4, 6);
    assert_eq!(table.row(Slot::RESERVED), [0; 6]);
    for position in 0..24 {
        assert_eq!(table.physical(Slot::RESERVED, position), Some(position % 4));
    }
    assert_eq!(table.physical(Slot::RESERVED, 24), None);
    let slots: Vec<Slot> = (0..3).map(|_| table.allocate_slot().unwrap()).collect();
    for &slot in &slots {
        grow(&mut table, slot, 8).unwrap();
    }
    assert!(slots.iter().all(|&slot| slot != Slot::RESERVED));
    assert!(
        slots
            .iter()
            .all(|&slot| table.pages(slot).unwrap().all(|page| page != PageId::RESERVED))
    );
    assert!(
        slots
            .iter()
            .all(|&slot| table.logical_page(slot, PageId::RESERVED).is_none())
    );
    assert_eq!(table.retain(PageId::RESERVED), Err(Error::ReservedPage));
    assert_eq!(table.release(PageId::RESERVED), Err(Error::ReservedPage));
}

#[test]
fn a_table_for_a_batch_of_n_runs_n_sequences() {
    for batch in [1, 6, 7, 10, 12, 15, 18, 64, 100, 200, 300] {
        let mut table = table(batch + 1, 4, batch + 1, 1);
        for _ in 0..batch {
            let slot = table.allocate_slot().unwrap();
            grow(&mut table, slot, 4).unwrap();
        }
        assert_eq!(
            table.allocate_slot(),
            Err(Error::OutOfSlots { n_slots: batch + 1 })
        );
        assert_eq!(table.live_slots().count(), batch);
    }
}

#[test]
fn slots_that_grow_interleaved_keep_their_places_apart() {
    let mut table = table(64, 4, 9, 8);
    let slots: Vec<Slot> = (0..8).map(|_| table.allocate_slot().unwrap()).collect();
    let order = [slots[2], slots[6], slots[0]];
    for len in 1..=19 {
        for slot in order {
            grow(&mut table, slot, len).unwrap();
        }
    }
    let mut places = std::collections::BTreeSet::new();
    for slot in order {
        for position in 0..19 {
            let place = table.physical(slot, position).unwrap();
            assert!(places.insert(place), "place {place} is used twice");
            assert_eq!(
                table.logical_page(slot, PageId::new((place / 4) as u32)),
                Some(position / 4)
            );
        }
        // Grown one after the other, a slot's pages are not neighbours.
        assert_ne!(table.row(slot)[0] + 1, table.row(slot)[1]);
    }
}

#[test]
fn a_reservation_of_what_there_is_takes_nothing() {
    let mut table = table(9, 4, 3, 6);
    let slot = table.allocate_slot().unwrap();
    grow(&mut table, slot, 6).unwrap();
    table.drain_dirty().for_each(drop);
    for len in [0, 3, 6, 8] {
        let reservation = table.reserve(slot, len).unwrap();
        assert_eq!((reservation.new_pages, reservation.copy), (0, None));
    }
    assert_eq!((table.capacity(slot), table.len(slot)), (Ok(8), Ok(6)));
    assert_eq!(table.drain_dirty().len(), 0);
}

#[test]
fn a_mirror_that_follows_the_dirty_rows_equals_the_table() {
    let mut table = table(17, 4, 5, 4);
    let mut mirror = vec![i32::MIN; table.rows().len()];
    let mut upload = |table: &mut PageTable| {
        let mut slots = Vec::new();
        for (slot, row) in table.drain_dirty() {
            mirror[slot.index() * 4..][..4].copy_from_slice(row);
            slots.push(slot);
        }
        assert_eq!(mirror, table.rows());
        slots
    };
    assert_eq!(upload(&mut table).len(), 5, "at first every row is new");
    let a = table.allocate_slot().unwrap();
    grow(&mut table, a, 3).unwrap();
    assert_eq!(upload(&mut table), [a]);
    grow(&mut table, a, 4).unwrap();
    assert_eq!(upload(&mut table), [], "the row did not change");
    let b = table.fork(a).unwrap();
    assert_eq!(upload(&mut table), [b]);
    table.erase(a).unwrap();
    table.erase(b).unwrap();
    let mut both = upload(&mut table);
    both.sort();
    assert_eq!(both, [a, b]);
    table.mark_all_dirty();
    drop(table.drain_dirty());
    assert_eq!(
        table.drain_dirty().len(),
        0,
        "an iterator that is not run still cleans"
    );
    table.check_integrity().unwrap();
}

#[test]
fn sizes_that_cannot_work_are_refused_by_name() {
    let good = PageTableConfig {
        n_pages: 2,
        page_size: 1,
        n_slots: 2,
        max_pages_per_slot: 1,
    };
    assert!(PageTable::new(good).is_ok());
    let pool_of_one = PageTable::new(PageTableConfig { n_pages: 1, ..good }).unwrap_err();
    assert_eq!(
        pool_of_one.to_string(),
        "n_pages is 1, but must be in 2..=2147483647"
    );
    for (config, name) in [
        (PageTableConfig { n_pages: 0, ..good }, "n_pages"),
        (
            PageTableConfig {
                n_pages: 1 << 31,
                ..good
            },
            "n_pages",
        ),
        (PageTableConfig { page_size: 0, ..good }, "page_size"),
        (
            PageTableConfig {
                page_size: 1 << 32,
                ..good
            },
            "page_size",
        ),
        (PageTableConfig { n_slots: 1, ..good }, "n_slots"),
        (
            PageTableConfig {
                n_slots: usize::MAX,
                ..good
            },
            "n_slots",
        ),
        (
            PageTableConfig {
                max_pages_per_slot: 0,
                ..good
            },
            "max_pages_per_slot",
        ),
        (
            PageTableConfig {
                max_pages_per_slot: usize::MAX,
                ..good
            },
            "max_pages_per_slot",
        ),
    ] {
        assert!(matches!(PageTable::new(config), Err(Error::OutOfRange { field, .. }) if field == name));
    }
}

#[test]
fn a_table_that_does_not_fit_memory_is_refused_before_any_is_used() {
    // 2^50 entries of 4 bytes.
    let config = PageTableConfig {
        n_pages: 2,
        page_size: 1,
        n_slots: 1 << 20,
        max_pages_per_slot: 1 << 30,
    };
    assert!(matches!(
        PageTable::new(config),
        Err(Error::OutOfMemory {
            what: "rows of the page table",
            ..
        })
    ));
}
