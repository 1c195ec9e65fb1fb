//! The table against the maps.

use paged_kv::{PageId, Slot};

use super::Model;

impl Model {
    /// Everything that can be observed of the table against the maps.
    pub(super) fn compare(&self) {
        let Self { table, config, .. } = self;
        table.check_integrity().expect("the table is consistent");
        assert_eq!(table.free_pages(), config.n_pages - 1 - self.pages.len());
        assert_eq!(table.free_slots(), config.n_slots - 1 - self.sequences.len());
        assert!(
            table
                .live_slots()
                .map(|slot| slot.index() as u32)
                .eq(self.sequences.keys().copied())
        );
        for (&key, page) in &self.pages {
            assert_eq!(table.holders(page.id), u64::from(self.holders(key)));
        }
        let width = config.max_pages_per_slot;
        for index in 0..config.n_slots as u32 + 1 {
            let slot = Slot::new(index);
            let row = table.row(slot);
            let Some(sequence) = self.sequences.get(&index) else {
                let (entry, width) = match index as usize {
                    0 => (0, width),
                    index if index < config.n_slots => (-1, width),
                    _ => (-1, 0),
                };
                assert_eq!(row, vec![entry; width]);
                assert!(table.len(slot).is_err() && table.capacity(slot).is_err());
                assert!(
                    (0..config.n_pages as u32)
                        .all(|page| table.logical_page(slot, PageId::new(page)).is_none())
                );
                continue;
            };
            let capacity = sequence.pages.len() * config.page_size;
            assert_eq!(table.len(slot), Ok(sequence.tokens.len()));
            assert_eq!(table.capacity(slot), Ok(capacity));
            let ids: Vec<i32> = sequence
                .pages
                .iter()
                .map(|key| self.pages[key].id.index() as i32)
                .collect();
            assert_eq!(row[..ids.len()], ids);
            assert!(row.len() == width && row[ids.len()..].iter().all(|&entry| entry == -1));
            for page in 0..config.n_pages as u32 + 1 {
                let logical = ids.iter().position(|&id| id == page as i32);
                assert_eq!(table.logical_page(slot, PageId::new(page)), logical);
            }
            for position in 0..capacity + 2 {
                let place = table.physical(slot, position);
                let id = ids.get(position / config.page_size);
                let expected = id.map(|&id| id as usize * config.page_size + position % config.page_size);
                assert_eq!(place, expected);
                if let (Some(&token), Some(place)) = (sequence.tokens.get(position), place) {
                    assert_eq!(
                        self.memory[place], token,
                        "slot {slot} lost the token at {position}"
                    );
                }
            }
        }
    }
}
