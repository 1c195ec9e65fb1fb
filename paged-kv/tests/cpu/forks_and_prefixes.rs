//! Pages with more than one holder: forks, and prefixes that outlive their slot.

use paged_kv::{Error, PageCopy, PageId, PageTable, PageTableConfig, Slot};

fn table(n_pages: usize) -> PageTable {
    let config = PageTableConfig {
        n_pages,
        page_size: 4,
        n_slots: 9,
        max_pages_per_slot: 8,
    };
    PageTable::new(config).unwrap()
}

fn grow(table: &mut PageTable, slot: Slot, len: usize) -> Option<PageCopy> {
    let copy = table.reserve(slot, len).unwrap().copy;
    table.advance(slot, len - table.len(slot).unwrap()).unwrap();
    table.check_integrity().unwrap();
    copy
}

fn sequence(table: &mut PageTable, len: usize) -> Slot {
    let slot = table.allocate_slot().unwrap();
    grow(table, slot, len);
    slot
}

fn pages(table: &PageTable, slot: Slot) -> Vec<PageId> {
    table.pages(slot).unwrap().collect()
}

#[test]
fn the_samples_of_a_prompt_share_its_full_pages_and_copy_the_tail_once_each_but_the_last() {
    let mut table = table(32);
    let first = sequence(&mut table, 10);
    let siblings: Vec<Slot> = (0..7).map(|_| table.fork(first).unwrap()).collect();
    assert_eq!(table.free_pages(), 31 - 3, "forks take no page");
    let tail = pages(&table, first)[2];
    for &sibling in &siblings {
        let copy = grow(&mut table, sibling, 11).expect("the tail is shared");
        assert_eq!(
            (copy.src, copy.dst, copy.tokens),
            (tail, pages(&table, sibling)[2], 2)
        );
    }
    assert_eq!(
        grow(&mut table, first, 11),
        None,
        "its last holder writes in place"
    );
    assert_eq!(pages(&table, first)[2], tail);
    let prefix = &pages(&table, first)[..2];
    assert!(
        siblings
            .iter()
            .all(|&sibling| pages(&table, sibling)[..2] == *prefix)
    );
    assert_eq!(table.holders(prefix[0]), 8);
    assert_eq!(table.logical_page(siblings[6], prefix[1]), Some(1));
    assert_eq!(table.logical_page(first, pages(&table, siblings[0])[2]), None);
    assert_eq!(table.free_pages(), 31 - 3 - 7);
}

#[test]
fn the_parent_may_be_the_first_to_write_and_then_copies() {
    let mut table = table(32);
    let parent = sequence(&mut table, 6);
    let child = table.fork(parent).unwrap();
    let tail = pages(&table, child)[1];
    let copy = grow(&mut table, parent, 7).unwrap();
    assert_eq!((copy.src, copy.tokens), (tail, 2));
    assert_ne!(pages(&table, parent)[1], tail);
    assert_eq!(grow(&mut table, child, 7), None);
    assert_eq!(pages(&table, child)[1], tail);
}

#[test]
fn a_fork_at_a_page_boundary_never_copies() {
    let mut table = table(32);
    let parent = sequence(&mut table, 8);
    let child = table.fork(parent).unwrap();
    assert_eq!(grow(&mut table, parent, 9), None);
    assert_eq!(grow(&mut table, child, 9), None);
    assert_eq!(pages(&table, parent)[..2], pages(&table, child)[..2]);
    assert_ne!(pages(&table, parent)[2], pages(&table, child)[2]);
}

#[test]
fn capacity_reserved_before_a_fork_does_not_let_anyone_write_into_the_shared_tail() {
    let mut table = table(32);
    let parent = sequence(&mut table, 6);
    let _ = table.reserve(parent, 16).unwrap();
    let child = table.fork(parent).unwrap();
    assert_eq!((table.capacity(parent), table.capacity(child)), (Ok(16), Ok(8)));
    let page = pages(&table, parent)[1];
    for slot in [parent, child] {
        assert_eq!(table.advance(slot, 1), Err(Error::PageShared { slot, page }));
        assert_eq!(
            table.write_positions(slot, 6..7, &mut Vec::new()),
            Err(Error::PageShared { slot, page })
        );
        assert!(
            table.write_positions(slot, 0..1, &mut Vec::new()).is_err(),
            "nor into a full one"
        );
    }
    // Past the shared pages the parent's capacity is its own, but tokens are written in order.
    let mut places = Vec::new();
    table.write_positions(parent, 8..10, &mut places).unwrap();
    assert_eq!(
        places,
        [
            table.physical(parent, 8).unwrap(),
            table.physical(parent, 9).unwrap()
        ]
    );

    let reservation = table.reserve(parent, 7).unwrap();
    assert_eq!(
        (reservation.new_pages, reservation.copy.map(|copy| copy.src)),
        (0, Some(page))
    );
    table.advance(parent, 10).unwrap();
    table.advance(child, 2).unwrap();
    table.check_integrity().unwrap();
}

#[test]
fn a_copy_that_finds_no_page_is_refused_and_counted_beforehand() {
    let mut table = table(4);
    let parent = sequence(&mut table, 10);
    let child = table.fork(parent).unwrap();
    assert_eq!(table.pages_needed(child, 11), Ok(1));
    assert!(!table.can_reserve(child, 11));
    assert!(table.can_reserve(child, 10), "what is written needs no copy");
    let before = table.clone();
    assert_eq!(
        table.reserve(child, 11),
        Err(Error::OutOfPages {
            slot: child,
            needed: 1,
            free: 0
        })
    );
    assert!(table == before);
    table.erase(parent).unwrap();
    assert_eq!(grow(&mut table, child, 11), None, "alone it writes in place");
}

#[test]
fn a_shared_page_is_free_only_when_its_last_holder_is_erased() {
    let mut table = table(32);
    let parent = sequence(&mut table, 10);
    let child = table.fork(parent).unwrap();
    let grandchild = table.fork(child).unwrap();
    for (slot, free) in [(child, 28), (parent, 28), (grandchild, 31)] {
        table.erase(slot).unwrap();
        table.check_integrity().unwrap();
        assert_eq!(table.free_pages(), free);
    }
}

#[test]
fn forks_of_an_empty_slot_and_without_a_free_slot() {
    let mut table = table(32);
    let empty = table.allocate_slot().unwrap();
    let child = table.fork(empty).unwrap();
    assert_eq!((table.len(child), table.capacity(child)), (Ok(0), Ok(0)));
    while table.free_slots() > 0 {
        table.allocate_slot().unwrap();
    }
    assert!(!table.can_fork(empty));
    let before = table.clone();
    assert_eq!(table.fork(empty), Err(Error::OutOfSlots { n_slots: 9 }));
    assert!(table == before);
}

#[test]
fn a_retained_prefix_outlives_its_slot_and_starts_another() {
    let mut table = table(32);
    let first = sequence(&mut table, 11);
    let prefix = pages(&table, first)[..2].to_vec();
    for &page in &prefix {
        table.retain(page).unwrap();
    }
    table.erase(first).unwrap();
    table.check_integrity().unwrap();
    assert_eq!(table.free_pages(), 29);

    let second = table.allocate_slot().unwrap();
    table.attach_shared(second, &prefix).unwrap();
    assert_eq!((table.len(second), table.capacity(second)), (Ok(8), Ok(8)));
    assert_eq!(table.physical(second, 5), Some(prefix[1].index() * 4 + 1));
    assert_eq!(
        grow(&mut table, second, 11),
        None,
        "full pages are never written again"
    );
    let third = table.fork(second).unwrap();

    // The cache lets go while two sequences still read the pages.
    for &page in &prefix {
        assert_eq!(table.release(page), Ok(false));
        assert_eq!(table.release(page), Err(Error::NotRetained { page }));
    }
    table.erase(second).unwrap();
    assert_eq!(table.holders(prefix[0]), 1);
    table.erase(third).unwrap();
    assert_eq!(table.free_pages(), 31);
    table.check_integrity().unwrap();
}

#[test]
fn each_retain_needs_its_release() {
    let mut table = table(32);
    let slot = sequence(&mut table, 4);
    let page = pages(&table, slot)[0];
    table.retain(page).unwrap();
    table.retain(page).unwrap();
    table.erase(slot).unwrap();
    assert_eq!(table.release(page), Ok(false));
    table.check_integrity().unwrap();
    assert_eq!(table.release(page), Ok(true));
    assert_eq!(table.release(page), Err(Error::FreePage { page }));
    assert_eq!(table.free_pages(), 31);
}

#[test]
fn only_full_pages_can_be_retained_or_attached() {
    let mut table = table(32);
    let slot = sequence(&mut table, 6);
    let _ = table.reserve(slot, 12).unwrap();
    let [full, partial, unwritten] = pages(&table, slot)[..] else {
        unreachable!("12 tokens are 3 pages")
    };
    let empty = table.allocate_slot().unwrap();
    for (page, written) in [(partial, 2), (unwritten, 0)] {
        let error = Error::PageNotFull {
            page,
            written,
            page_size: 4,
        };
        assert_eq!(table.retain(page), Err(error.clone()));
        assert_eq!(table.attach_shared(empty, &[full, page]), Err(error));
    }
    assert_eq!(table.capacity(empty), Ok(0));
    table.attach_shared(empty, &[full]).unwrap();
    table.check_integrity().unwrap();
}

#[test]
fn a_prefix_is_attached_in_its_order_to_an_empty_slot_or_not_at_all() {
    let mut table = table(32);
    let source = sequence(&mut table, 36 - 4);
    let all = pages(&table, source);
    let slot = table.allocate_slot().unwrap();
    let before = table.clone();
    let swapped = [all[0], all[2], all[1]];
    assert_eq!(
        table.attach_shared(slot, &swapped),
        Err(Error::WrongLogicalPage {
            page: all[2],
            holds: 2,
            wanted: 1
        })
    );
    let twice = [all[0], all[0]];
    assert_eq!(
        table.attach_shared(slot, &twice),
        Err(Error::WrongLogicalPage {
            page: all[0],
            holds: 0,
            wanted: 1
        })
    );
    let too_many: Vec<PageId> = all.iter().chain(&all).copied().collect();
    assert_eq!(
        table.attach_shared(slot, &too_many),
        Err(Error::SequenceTooLong {
            slot,
            asked: 64,
            limit: 32
        })
    );
    let free = PageId::new(31);
    assert_eq!(
        table.attach_shared(slot, &[free]),
        Err(Error::FreePage { page: free })
    );
    let outside = PageId::new(32);
    assert_eq!(
        table.attach_shared(slot, &[outside]),
        Err(Error::NoSuchPage {
            page: outside,
            n_pages: 32
        })
    );
    assert_eq!(
        table.attach_shared(slot, &[PageId::RESERVED]),
        Err(Error::ReservedPage)
    );
    assert_eq!(
        table.attach_shared(source, &all[..1]),
        Err(Error::SlotNotEmpty {
            slot: source,
            pages: 8
        })
    );
    assert!(table == before);
    table.attach_shared(slot, &all).unwrap();
    assert_eq!(table.row(slot), table.row(source));
}

#[test]
fn a_prompt_whose_pages_are_all_cached_keeps_its_last_token_to_compute() {
    // 8 tokens, both pages cached: attaching one page leaves 4 tokens to compute, the last one among them.
    let mut table = table(32);
    let first = sequence(&mut table, 8);
    let cached = pages(&table, first);
    let (prompt, page_size) = (8_usize, 4);
    let slot = table.allocate_slot().unwrap();
    table
        .attach_shared(slot, &cached[..(prompt - 1) / page_size])
        .unwrap();
    assert_eq!(table.len(slot), Ok(4));
    assert_eq!(grow(&mut table, slot, prompt), None);
    assert_ne!(pages(&table, slot)[1], cached[1]);
}
