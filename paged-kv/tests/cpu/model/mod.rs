//! A dumb model of the page table: plain maps, no reference counts, nothing incremental. It also plays the
//! cache: it keeps what was written at every physical place, so that a copy forgotten, or a write into a page
//! that somebody else reads, shows up as wrong contents.
//!
//! The property tests and the fuzz target run the same operations on the table and on this model.

use std::collections::{BTreeMap, BTreeSet};

use paged_kv::{Error, PageCopy, PageId, PageTable, PageTableConfig, Reservation, Slot};

mod compare;
mod op;

pub(crate) use op::{Op, config};

/// Content of a place that nobody may read.
const POISON: u64 = u64::MAX;

struct Sequence {
    tokens: Vec<u64>,
    /// Keys of `Model::pages`, in logical order.
    pages: Vec<u64>,
}

struct Page {
    id: PageId,
    logical: usize,
    tokens: Vec<u64>,
    retains: u32,
}

/// The table under test beside the maps.
pub(crate) struct Model {
    table: PageTable,
    config: PageTableConfig,
    sequences: BTreeMap<u32, Sequence>,
    /// By a number that is never used again, so that the model does not depend on which page the table takes.
    pages: BTreeMap<u64, Page>,
    next_page: u64,
    next_token: u64,
    /// `[n_pages * page_size]`, as a cache of one layer, head and element would be.
    memory: Vec<u64>,
    /// What a device would hold, and the slots that were changed since it was brought up to date.
    mirror: Vec<i32>,
    touched: BTreeSet<u32>,
    /// How often each outcome occurred, by the name of the call and of its error.
    pub(crate) outcomes: BTreeMap<String, u64>,
}

impl Model {
    pub(crate) fn new(config: PageTableConfig) -> Self {
        let table = PageTable::new(config).expect("the sizes of `config` are valid");
        Self {
            mirror: vec![i32::MIN; table.rows().len()],
            touched: (0..config.n_slots as u32).collect(),
            table,
            config,
            sequences: BTreeMap::new(),
            pages: BTreeMap::new(),
            next_page: 0,
            next_token: 0,
            memory: vec![POISON; config.n_pages * config.page_size],
            outcomes: BTreeMap::new(),
        }
    }

    /// Runs the operation on both and compares everything that can be observed. Panics where they differ.
    pub(crate) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Allocate => self.allocate(),
            Op::Reserve { slot, len } => drop(self.reserve(self.pick_slot(slot), len)),
            Op::Append { slot, n } => self.append(self.pick_slot(slot), n),
            Op::Grow { slot, n } => self.grow(self.pick_slot(slot), n),
            Op::WritePositions { slot, start, n } => {
                drop(self.write_positions(self.pick_slot(slot), start, n))
            }
            Op::Fork { slot } => self.fork(self.pick_slot(slot)),
            Op::Erase { slot } => self.erase(self.pick_slot(slot)),
            Op::Retain { page } => {
                self.retain(self.pick_page(page, |page| page.tokens.len() == self.config.page_size));
            }
            Op::Release { page } => self.release(self.pick_page(page, |page| page.retains > 0)),
            Op::AttachFromSlot {
                slot,
                source,
                n,
                reversed,
            } => {
                let source = self.sequences.get(&self.pick_slot(source));
                let mut pages: Vec<PageId> = match source {
                    Some(source) => source
                        .pages
                        .iter()
                        .take(n)
                        .map(|key| self.pages[key].id)
                        .collect(),
                    None => (0..n as u32).map(PageId::new).collect(),
                };
                if reversed {
                    pages.reverse();
                }
                self.attach(self.pick_empty_slot(slot), &pages);
            }
            Op::AttachRetained { slot, n } => {
                let retained = |logical| {
                    let mut pages = self.pages.values();
                    pages
                        .find(|page| page.retains > 0 && page.logical == logical)
                        .map(|page| page.id)
                };
                let pages: Vec<PageId> = (0..n).map_while(retained).collect();
                self.attach(self.pick_empty_slot(slot), &pages);
            }
            Op::DrainDirty => self.drain_dirty(),
        }
        self.compare();
    }

    /// Mostly a slot in use, else any index: slot 0, a dead slot, one outside the table.
    fn pick_slot(&self, pick: u8) -> u32 {
        let live = self.sequences.len();
        if pick < 32 || live == 0 {
            return u32::from(pick) % (self.config.n_slots as u32 + 1);
        }
        *self.sequences.keys().nth(usize::from(pick) % live).unwrap()
    }

    fn pick_empty_slot(&self, pick: u8) -> u32 {
        let empty = self
            .sequences
            .iter()
            .find(|(_, sequence)| sequence.pages.is_empty());
        empty
            .filter(|_| pick >= 64)
            .map_or_else(|| self.pick_slot(pick), |(&slot, _)| slot)
    }

    /// Mostly a page that suits the call, else any index: page 0, a free page, one outside the pool.
    fn pick_page(&self, pick: u8, suits: impl Fn(&Page) -> bool) -> PageId {
        let suitable: Vec<PageId> = self
            .pages
            .values()
            .filter(|page| suits(page))
            .map(|page| page.id)
            .collect();
        if pick < 64 || suitable.is_empty() {
            return PageId::new(u32::from(pick) % (self.config.n_pages as u32 + 1));
        }
        suitable[usize::from(pick) % suitable.len()]
    }

    fn allocate(&mut self) {
        if self.sequences.len() == self.config.n_slots - 1 {
            let n_slots = self.config.n_slots;
            self.refused(|table| table.allocate_slot(), Error::OutOfSlots { n_slots });
            return;
        }
        let slot = self.table.allocate_slot().expect("a slot is free");
        assert!(slot != Slot::RESERVED && slot.index() < self.config.n_slots);
        let sequence = Sequence {
            tokens: Vec::new(),
            pages: Vec::new(),
        };
        assert!(
            self.sequences.insert(slot.index() as u32, sequence).is_none(),
            "{slot} was in use"
        );
    }

    fn reserve(&mut self, slot: u32, len: usize) -> Result<(), Error> {
        let id = Slot::new(slot);
        let expected = self.expected_reservation(slot, len);
        assert_eq!(self.table.can_reserve(id, len), expected.is_ok());
        let (new_pages, copies) = match expected {
            Err(error) => {
                self.refused(|table| table.reserve(id, len), error.clone());
                return Err(error);
            }
            Ok(expected) => expected,
        };
        let needed = new_pages + usize::from(copies);
        assert_eq!(self.table.pages_needed(id, len), Ok(needed));
        let free = self.table.free_pages();
        let Reservation {
            new_pages: actual,
            copy,
        } = self
            .table
            .reserve(id, len)
            .expect("the model says there are pages");
        assert_eq!((actual, copy.is_some()), (new_pages, copies));
        assert_eq!(self.table.free_pages(), free - needed);

        self.count(if copies { "reserve with a copy" } else { "reserve" });
        let after: Vec<PageId> = self.table.pages(id).unwrap().collect();
        if let Some(PageCopy { src, dst, tokens }) = copy {
            let written = self.sequences[&slot].tokens.len();
            let column = written / self.config.page_size;
            let old = &self.pages[&self.sequences[&slot].pages[column]];
            assert_eq!(
                (src, dst, tokens),
                (old.id, after[column], written % self.config.page_size)
            );
            let contents = old.tokens.clone();
            let key = self.new_page(dst, column, contents);
            self.sequences.get_mut(&slot).unwrap().pages[column] = key;
            let page_size = self.config.page_size;
            let from = src.index() * page_size;
            self.memory
                .copy_within(from..from + tokens, dst.index() * page_size);
        }
        for (column, &page) in after.iter().enumerate().skip(self.sequences[&slot].pages.len()) {
            let key = self.new_page(page, column, Vec::new());
            self.sequences.get_mut(&slot).unwrap().pages.push(key);
        }
        if needed > 0 {
            self.touched.insert(slot);
        }
        Ok(())
    }

    /// New pages, and whether a copy is due.
    fn expected_reservation(&self, slot: u32, len: usize) -> Result<(usize, bool), Error> {
        self.check_slot(slot)?;
        let id = Slot::new(slot);
        let PageTableConfig {
            page_size,
            max_pages_per_slot,
            n_pages,
            ..
        } = self.config;
        let limit = max_pages_per_slot * page_size;
        if len > limit {
            return Err(Error::SequenceTooLong {
                slot: id,
                asked: len,
                limit,
            });
        }
        let sequence = &self.sequences[&slot];
        let new_pages = len.div_ceil(page_size).saturating_sub(sequence.pages.len());
        let written = sequence.tokens.len();
        let tail = sequence.pages.get(written / page_size);
        let copy = len > written && tail.is_some_and(|&key| self.holders(key) > 1);
        let (needed, free) = (new_pages + usize::from(copy), n_pages - 1 - self.pages.len());
        if needed > free {
            Err(Error::OutOfPages {
                slot: id,
                needed,
                free,
            })
        } else {
            Ok((new_pages, copy))
        }
    }

    fn grow(&mut self, slot: u32, n: usize) {
        let len = self
            .sequences
            .get(&slot)
            .map_or(0, |sequence| sequence.tokens.len());
        if self.reserve(slot, len + n).is_ok() {
            self.append(slot, n);
            assert_eq!(
                self.table.len(Slot::new(slot)),
                Ok(len + n),
                "a reserved write succeeds"
            );
        }
    }

    fn append(&mut self, slot: u32, n: usize) {
        let id = Slot::new(slot);
        let start = self
            .sequences
            .get(&slot)
            .map_or(0, |sequence| sequence.tokens.len());
        let places = match self.write_positions(slot, start, n) {
            Err(error) => return self.refused(|table| table.advance(id, n), error),
            Ok(places) => places,
        };
        self.table.advance(id, n).expect("the positions may be written");
        self.count("advance");
        for (i, place) in places.into_iter().enumerate() {
            let token = self.next_token;
            self.next_token += 1;
            self.memory[place] = token;
            let sequence = self.sequences.get_mut(&slot).unwrap();
            sequence.tokens.push(token);
            let key = sequence.pages[(start + i) / self.config.page_size];
            self.pages.get_mut(&key).unwrap().tokens.push(token);
        }
    }

    fn write_positions(&mut self, slot: u32, start: usize, n: usize) -> Result<Vec<usize>, Error> {
        let (id, range) = (Slot::new(slot), start..start + n);
        let mut places = vec![7; 3];
        let result = self.table.write_positions(id, range.clone(), &mut places);
        let expected = self.check_slot(slot).and_then(|()| {
            let page_size = self.config.page_size;
            let sequence = &self.sequences[&slot];
            let capacity = sequence.pages.len() * page_size;
            if range.end > capacity {
                return Err(Error::NotReserved {
                    slot: id,
                    asked: range.end,
                    capacity,
                });
            }
            let mut expected = Vec::new();
            for position in range {
                let key = sequence.pages[position / page_size];
                let page = self.pages[&key].id;
                if self.holders(key) > 1 {
                    return Err(Error::PageShared { slot: id, page });
                }
                expected.push(page.index() * page_size + position % page_size);
            }
            Ok(expected)
        });
        assert_eq!(result, expected.clone().map(drop));
        assert_eq!(&places[..3], &[7, 7, 7]);
        assert_eq!(&places[3..], expected.as_deref().unwrap_or(&[]));
        expected
    }

    fn fork(&mut self, slot: u32) {
        let id = Slot::new(slot);
        let n_slots = self.config.n_slots;
        let full = self.sequences.len() == n_slots - 1;
        let expected = self.check_slot(slot).and(if full {
            Err(Error::OutOfSlots { n_slots })
        } else {
            Ok(())
        });
        assert_eq!(self.table.can_fork(id), expected.is_ok());
        if let Err(error) = expected {
            return self.refused(|table| table.fork(id), error);
        }
        let free = self.table.free_pages();
        let child = self.table.fork(id).expect("a slot is free");
        assert_eq!(self.table.free_pages(), free, "a fork takes no page");
        let parent = &self.sequences[&slot];
        let n_shared = parent.tokens.len().div_ceil(self.config.page_size);
        let pages = parent.pages[..n_shared].to_vec();
        let sequence = Sequence {
            tokens: parent.tokens.clone(),
            pages,
        };
        let partial = !sequence.tokens.len().is_multiple_of(self.config.page_size);
        self.count(if partial { "fork within a page" } else { "fork" });
        let child = child.index() as u32;
        assert!(
            self.sequences.insert(child, sequence).is_none(),
            "slot {child} was in use"
        );
        self.touched.insert(child);
    }

    fn erase(&mut self, slot: u32) {
        let id = Slot::new(slot);
        if let Err(error) = self.check_slot(slot) {
            return self.refused(|table| table.erase(id), error);
        }
        self.table.erase(id).expect("the slot is live");
        self.sequences.remove(&slot);
        self.count("erase");
        self.touched.insert(slot);
        self.drop_unheld();
    }

    fn retain(&mut self, id: PageId) {
        let expected = self.full_page(id);
        let key = match expected {
            Err(error) => return self.refused(|table| table.retain(id), error),
            Ok(key) => key,
        };
        self.table.retain(id).expect("the page is full");
        self.count("retain");
        self.pages.get_mut(&key).unwrap().retains += 1;
    }

    fn release(&mut self, id: PageId) {
        let expected = self.used_page(id).and_then(|key| {
            if self.pages[&key].retains == 0 {
                Err(Error::NotRetained { page: id })
            } else {
                Ok(key)
            }
        });
        let key = match expected {
            Err(error) => return self.refused(|table| table.release(id), error),
            Ok(key) => key,
        };
        let freed = self.table.release(id).expect("the page is retained");
        self.pages.get_mut(&key).unwrap().retains -= 1;
        assert_eq!(freed, self.holders(key) == 0);
        self.count(if freed { "release and free" } else { "release" });
        self.drop_unheld();
    }

    fn attach(&mut self, slot: u32, pages: &[PageId]) {
        let id = Slot::new(slot);
        let expected = self.check_slot(slot).and_then(|()| {
            let held = self.sequences[&slot].pages.len();
            if held > 0 {
                return Err(Error::SlotNotEmpty {
                    slot: id,
                    pages: held,
                });
            }
            let PageTableConfig {
                page_size,
                max_pages_per_slot,
                ..
            } = self.config;
            if pages.len() > max_pages_per_slot {
                let (asked, limit) = (pages.len() * page_size, max_pages_per_slot * page_size);
                return Err(Error::SequenceTooLong {
                    slot: id,
                    asked,
                    limit,
                });
            }
            let mut keys = Vec::new();
            for (wanted, &page) in pages.iter().enumerate() {
                let key = self.full_page(page)?;
                let holds = self.pages[&key].logical;
                if holds != wanted {
                    return Err(Error::WrongLogicalPage { page, holds, wanted });
                }
                keys.push(key);
            }
            Ok(keys)
        });
        let keys = match expected {
            Err(error) => return self.refused(|table| table.attach_shared(id, pages), error),
            Ok(keys) => keys,
        };
        self.table
            .attach_shared(id, pages)
            .expect("the pages are full and in order");
        self.count(if keys.is_empty() {
            "attach nothing"
        } else {
            "attach"
        });
        let tokens = keys
            .iter()
            .flat_map(|key| self.pages[key].tokens.clone())
            .collect();
        self.sequences.insert(slot, Sequence { tokens, pages: keys });
        self.touched.insert(slot);
    }

    fn drain_dirty(&mut self) {
        let width = self.config.max_pages_per_slot;
        let mut drained = BTreeSet::new();
        for (slot, row) in self.table.drain_dirty() {
            assert!(drained.insert(slot.index() as u32), "{slot} drained twice");
            self.mirror[slot.index() * width..][..width].copy_from_slice(row);
        }
        assert_eq!(
            self.mirror,
            self.table.rows(),
            "a row changed and was not drained"
        );
        assert!(
            drained.is_subset(&self.touched),
            "a row was drained that nothing changed"
        );
        self.touched.clear();
    }

    /// The call fails with this error and changes nothing.
    fn refused<T>(&mut self, call: impl FnOnce(&mut PageTable) -> Result<T, Error>, expected: Error) {
        let before = self.table.clone();
        let text = format!("{expected:?}");
        self.count(text.split([' ', '{']).next().unwrap_or_default());
        assert_eq!(call(&mut self.table).map(drop), Err(expected));
        assert!(self.table == before, "a failed operation changed the table");
    }

    fn count(&mut self, outcome: &str) {
        match self.outcomes.get_mut(outcome) {
            Some(count) => *count += 1,
            None => drop(self.outcomes.insert(outcome.to_owned(), 1)),
        }
    }

    fn check_slot(&self, slot: u32) -> Result<(), Error> {
        let n_slots = self.config.n_slots;
        let id = Slot::new(slot);
        match slot {
            0 => Err(Error::ReservedSlot),
            _ if slot as usize >= n_slots => Err(Error::NoSuchSlot { slot: id, n_slots }),
            _ if !self.sequences.contains_key(&slot) => Err(Error::DeadSlot { slot: id }),
            _ => Ok(()),
        }
    }

    fn used_page(&self, page: PageId) -> Result<u64, Error> {
        let n_pages = self.config.n_pages;
        match self.pages.iter().find(|(_, used)| used.id == page) {
            _ if page == PageId::RESERVED => Err(Error::ReservedPage),
            _ if page.index() >= n_pages => Err(Error::NoSuchPage { page, n_pages }),
            None => Err(Error::FreePage { page }),
            Some((&key, _)) => Ok(key),
        }
    }

    fn full_page(&self, page: PageId) -> Result<u64, Error> {
        let key = self.used_page(page)?;
        let (written, page_size) = (self.pages[&key].tokens.len(), self.config.page_size);
        if written == page_size {
            Ok(key)
        } else {
            Err(Error::PageNotFull {
                page,
                written,
                page_size,
            })
        }
    }

    fn holders(&self, key: u64) -> u32 {
        let owners = self
            .sequences
            .values()
            .filter(|sequence| sequence.pages.contains(&key))
            .count();
        owners as u32 + self.pages[&key].retains
    }

    fn new_page(&mut self, id: PageId, logical: usize, tokens: Vec<u64>) -> u64 {
        assert!(id != PageId::RESERVED && id.index() < self.config.n_pages);
        assert!(
            self.pages.values().all(|page| page.id != id),
            "page {id} was taken though somebody holds it"
        );
        let key = self.next_page;
        self.next_page += 1;
        self.pages.insert(
            key,
            Page {
                id,
                logical,
                tokens,
                retains: 0,
            },
        );
        key
    }

    fn drop_unheld(&mut self) {
        let unheld: Vec<u64> = self
            .pages
            .keys()
            .copied()
            .filter(|&key| self.holders(key) == 0)
            .collect();
        for key in unheld {
            let page = self.pages.remove(&key).unwrap();
            let start = page.id.index() * self.config.page_size;
            self.memory[start..start + self.config.page_size].fill(POISON);
        }
    }
}
