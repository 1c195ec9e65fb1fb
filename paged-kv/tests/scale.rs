//! A large table: what it takes, and what its operations do not.

use allocation_counter::measure;
use paged_kv::{PageTable, PageTableConfig, Slot};

const LARGE: PageTableConfig = PageTableConfig {
    n_pages: 65_536,
    page_size: 16,
    n_slots: 1_024,
    max_pages_per_slot: 2_560,
};

#[test]
fn a_table_of_65_536_pages_and_1_024_slots_runs_full_in_13_mib() {
    let memory = measure(|| {
        let mut table = PageTable::new(LARGE).unwrap();
        let slots: Vec<Slot> = (1..1_024).map(|_| table.allocate_slot().unwrap()).collect();
        // Interleaved, so that every slot's pages are scattered over the pool; all but 63 pages are used.
        for len in (16..=1_024).step_by(16) {
            for &slot in &slots {
                let _ = table.reserve(slot, len).unwrap();
                table.advance(slot, 16).unwrap();
            }
        }
        assert_eq!(table.free_pages(), 65_535 - 1_023 * 64);
        for &slot in &slots {
            for position in [0, 511, 1_023] {
                let place = table.physical(slot, position).unwrap();
                let page = paged_kv::PageId::new((place / 16) as u32);
                assert_eq!(table.logical_page(slot, page), Some(position / 16));
            }
        }
        for &slot in &slots {
            table.erase(slot).unwrap();
        }
        assert_eq!((table.free_pages(), table.free_slots()), (65_535, 1_023));
    });
    assert!(memory.bytes_max < 13 << 20, "{} bytes", memory.bytes_max);
}

#[test]
fn a_full_large_table_is_consistent() {
    let mut table = PageTable::new(LARGE).unwrap();
    while let Ok(slot) = table.allocate_slot() {
        let _ = table.reserve(slot, 1_000).unwrap();
        table.advance(slot, 1_000).unwrap();
        if table.free_slots() % 2 == 1 {
            table.fork(slot).unwrap();
        }
    }
    table.check_integrity().unwrap();
}

#[test]
fn no_operation_allocates() {
    let mut table = PageTable::new(LARGE).unwrap();
    let mut places = Vec::with_capacity(4_096);
    let memory = measure(|| {
        let slot = table.allocate_slot().unwrap();
        assert!(table.can_reserve(slot, 4_095));
        let _ = table.reserve(slot, 4_095).unwrap();
        table.write_positions(slot, 0..4_095, &mut places).unwrap();
        table.advance(slot, 4_095).unwrap();
        let child = table.fork(slot).unwrap();
        assert!(table.reserve(child, 4_096).unwrap().copy.is_some());
        table.advance(child, 1).unwrap();
        let mut pages = [paged_kv::PageId::RESERVED; 255];
        for (to, page) in pages.iter_mut().zip(table.pages(child).unwrap()) {
            *to = page;
        }
        pages.iter().for_each(|&page| table.retain(page).unwrap());
        table.erase(child).unwrap();
        table.erase(slot).unwrap();
        let third = table.allocate_slot().unwrap();
        table.attach_shared(third, &pages).unwrap();
        assert_eq!(
            table.physical(third, 4_000).map(|place| place / 16),
            Some(pages[250].index())
        );
        assert!(pages.iter().all(|&page| table.release(page) == Ok(false)));
        table.erase(third).unwrap();
        table.mark_all_dirty();
        assert_eq!(table.drain_dirty().count(), 1_024);
    });
    assert_eq!(memory.count_total, 0);
}
