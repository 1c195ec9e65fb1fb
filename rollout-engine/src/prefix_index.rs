//! Which pages of the KV cache hold which tokens: prefixes that later requests can take over instead of computing them.
//!
//! A tree. An entry is one full page; its path from the root spells the tokens of a sequence's start, page by page. A child is
//! found by the tokens of its page, hashed and then compared one by one, so that a hit is never false:
//!
//! ```text
//!   root ─┬─ [system prompt, page 0] ─── [page 1] ─┬─ [question a]
//!         │                                        └─ [question b]
//!         └─ [another start]
//! ```
//!
//! Invariants:
//! * There is a tree for every policy in force, and everything in it was computed under that one. [`PrefixIndex::keep_only`]
//!   comes with a change of policies, and a look-up under another policy finds nothing.
//! * The index retains each of its pages once in the page table. A page that only the index holds can be evicted.
//! * An entry is used no earlier than its descendants, so evicting by least recent use takes leaves before their parents.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use lora_merge::PolicyVersion;
use paged_kv::{PageId, PageTable};

use crate::Error;

/// Names an entry. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct EntryId(u64);

type Children = HashMap<Arc<[u32]>, EntryId>;

/// What an entry continues.
#[derive(Clone, Copy, Debug)]
enum Parent {
    /// Nothing: it is the first page of sequences under this policy.
    Root(PolicyVersion),
    Entry(EntryId),
}

#[derive(Debug)]
struct Entry {
    page: PageId,
    tokens: Arc<[u32]>,
    parent: Parent,
    children: Children,
    /// Number of the page within its sequence.
    depth: usize,
    last_use: u64,
}

impl Entry {
    fn rank(&self, id: EntryId) -> Rank {
        (self.last_use, Reverse(self.depth), id)
    }
}

/// Order of eviction: least recently used, of equals the deepest first.
type Rank = (u64, Reverse<usize>, EntryId);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    page_size: usize,
    /// Of the policies in force.
    roots: HashMap<PolicyVersion, Children>,
    entries: HashMap<EntryId, Entry>,
    by_use: BTreeSet<Rank>,
    clock: u64,
    next_id: u64,
}

impl PrefixIndex {
    /// An empty index over pages of `page_size` tokens, for these policies.
    pub(crate) fn new(page_size: usize, policies: impl IntoIterator<Item = PolicyVersion>) -> Self {
        Self {
            page_size,
            roots: empty_roots(policies),
            entries: HashMap::new(),
            by_use: BTreeSet::new(),
            clock: 0,
            next_id: 0,
        }
    }

    /// Pages in the index.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The pages that hold the start of `tokens`, at most `max_pages`, and marks them as used.
    pub(crate) fn matching(
        &mut self,
        policy: PolicyVersion,
        tokens: &[u32],
        max_pages: usize,
    ) -> Vec<PageId> {
        self.clock += 1;
        let mut pages = Vec::new();
        let mut parent = Parent::Root(policy);
        for page_tokens in tokens.chunks_exact(self.page_size).take(max_pages) {
            let Some(id) = self.child(parent, page_tokens) else {
                break;
            };
            pages.extend(self.touch(id));
            parent = Parent::Entry(id);
        }
        pages
    }

    /// Enters the full pages of a sequence that starts with `tokens`; `pages` are its pages in order. Where the index
    /// already has a page of the same tokens it keeps that one.
    pub(crate) fn insert(
        &mut self,
        policy: PolicyVersion,
        tokens: &[u32],
        pages: &[PageId],
        table: &mut PageTable,
    ) -> Result<(), Error> {
        if !self.roots.contains_key(&policy) {
            return Ok(());
        }
        self.clock += 1;
        let mut parent = Parent::Root(policy);
        for (depth, (page_tokens, &page)) in tokens.chunks_exact(self.page_size).zip(pages).enumerate() {
            let id = match self.child(parent, page_tokens) {
                Some(id) => {
                    self.touch(id);
                    id
                }
                None => {
                    table.retain(page)?;
                    self.add(parent, page_tokens, page, depth)
                }
            };
            parent = Parent::Entry(id);
        }
        Ok(())
    }

    /// Pages that [`PrefixIndex::evict`] could free: those that nobody else holds.
    pub(crate) fn reclaimable(&self, table: &PageTable) -> usize {
        let alone = |entry: &&Entry| table.holders(entry.page) == 1;
        self.entries.values().filter(alone).count()
    }

    /// Frees at least `n` pages, least recently used first, or all that nobody else holds. Gives how many.
    pub(crate) fn evict(&mut self, n: usize, table: &mut PageTable) -> Result<usize, Error> {
        let alone = self.by_use.iter().map(|&(_, _, id)| id);
        let alone = alone.filter(|id| {
            let entry = self.entries.get(id);
            entry.is_some_and(|entry| table.holders(entry.page) == 1)
        });
        let victims: Vec<_> = alone.take(n).collect();
        let mut freed = 0;
        for id in victims {
            // A subtree that has lost its root cannot be found again.
            let mut doomed = vec![id];
            while let Some(id) = doomed.pop() {
                if let Some(entry) = self.remove(id) {
                    doomed.extend(entry.children.values());
                    freed += usize::from(table.release(entry.page)?);
                }
            }
        }
        Ok(freed)
    }

    /// Forgets everything; from now on the index is for these policies.
    pub(crate) fn clear(
        &mut self,
        policies: impl IntoIterator<Item = PolicyVersion>,
        table: &mut PageTable,
    ) -> Result<(), Error> {
        self.roots = empty_roots(policies);
        self.by_use.clear();
        for (_, entry) in std::mem::take(&mut self.entries) {
            table.release(entry.page)?;
        }
        Ok(())
    }

    /// From now on the index is for these policies; what was computed under others is forgotten.
    pub(crate) fn keep_only(
        &mut self,
        policies: impl IntoIterator<Item = PolicyVersion>,
        table: &mut PageTable,
    ) -> Result<(), Error> {
        let mut doomed = Vec::new();
        for (policy, children) in std::mem::replace(&mut self.roots, empty_roots(policies)) {
            match self.roots.get_mut(&policy) {
                Some(root) => *root = children,
                None => doomed.extend(children.into_values()),
            }
        }
        while let Some(id) = doomed.pop() {
            if let Some(entry) = self.remove(id) {
                doomed.extend(entry.children.into_values());
                table.release(entry.page)?;
            }
        }
        Ok(())
    }

    fn child(&self, parent: Parent, tokens: &[u32]) -> Option<EntryId> {
        let children = match parent {
            Parent::Root(policy) => self.roots.get(&policy)?,
            Parent::Entry(parent) => &self.entries.get(&parent)?.children,
        };
        children.get(tokens).copied()
    }

    fn children_mut(&mut self, parent: Parent) -> Option<&mut Children> {
        match parent {
            Parent::Root(policy) => self.roots.get_mut(&policy),
            Parent::Entry(parent) => self.entries.get_mut(&parent).map(|entry| &mut entry.children),
        }
    }

    fn touch(&mut self, id: EntryId) -> Option<PageId> {
        let entry = self.entries.get_mut(&id)?;
        self.by_use.remove(&entry.rank(id));
        entry.last_use = self.clock;
        self.by_use.insert(entry.rank(id));
        Some(entry.page)
    }

    fn add(&mut self, parent: Parent, tokens: &[u32], page: PageId, depth: usize) -> EntryId {
        let id = EntryId(self.next_id);
        self.next_id += 1;
        let tokens: Arc<[u32]> = tokens.into();
        if let Some(children) = self.children_mut(parent) {
            children.insert(tokens.clone(), id);
        }
        let entry = Entry {
            page,
            tokens,
            parent,
            children: Children::new(),
            depth,
            last_use: self.clock,
        };
        self.by_use.insert(entry.rank(id));
        self.entries.insert(id, entry);
        id
    }

    fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.by_use.remove(&entry.rank(id));
        if let Some(siblings) = self.children_mut(entry.parent) {
            siblings.remove(&entry.tokens);
        }
        Some(entry)
    }
}

fn empty_roots(policies: impl IntoIterator<Item = PolicyVersion>) -> HashMap<PolicyVersion, Children> {
    let policies = policies.into_iter();
    policies.map(|policy| (policy, Children::new())).collect()
}

#[cfg(test)]
mod tests {
    use paged_kv::PageTableConfig;
    use proptest::prelude::*;

    use super::*;
    use crate::adapters::base_policy;

    const PAGE: usize = 2;

    fn table(n_pages: usize) -> PageTable {
        PageTable::new(PageTableConfig {
            n_pages,
            page_size: PAGE,
            n_slots: 4,
            max_pages_per_slot: 8,
        })
        .expect("a valid table")
    }

    fn index() -> PrefixIndex {
        PrefixIndex::new(PAGE, [base_policy()])
    }

    /// Computes `tokens` in a slot after what the index has of them, enters them, and gives the slot's pages.
    fn compute(index: &mut PrefixIndex, table: &mut PageTable, tokens: &[u32]) -> Vec<PageId> {
        let slot = table.allocate_slot().expect("a slot");
        let found = index.matching(base_policy(), tokens, usize::MAX);
        table.attach_shared(slot, &found).expect("attaches");
        let missing = (tokens.len() / PAGE - found.len()).saturating_sub(table.free_pages());
        index.evict(missing, table).expect("evicts");
        let _ = table.reserve(slot, tokens.len()).expect("there is room");
        table
            .advance(slot, tokens.len() - found.len() * PAGE)
            .expect("was reserved");
        let pages: Vec<_> = table.pages(slot).expect("is live").collect();
        index
            .insert(base_policy(), tokens, &pages, table)
            .expect("inserts");
        table.erase(slot).expect("is live");
        pages
    }

    #[test]
    fn a_change_of_policies_forgets_what_belongs_to_those_that_are_no_more() {
        let (mut index, mut table) = (index(), table(20));
        let stays = base_policy();
        let goes = PolicyVersion { number: 7, ..stays };
        index.keep_only([stays, goes], &mut table).expect("changes");
        let pages = compute(&mut index, &mut table, &[1, 2, 3, 4]);
        let slot = table.allocate_slot().expect("a slot");
        let _ = table.reserve(slot, 6).expect("there is room");
        table.advance(slot, 6).expect("was reserved");
        let others: Vec<_> = table.pages(slot).expect("is live").collect();
        index
            .insert(goes, &[1, 2, 3, 4, 5, 6], &others, &mut table)
            .expect("inserts");
        table.erase(slot).expect("is live");
        assert_eq!((index.len(), table.free_pages()), (5, 19 - 5));
        let comes = PolicyVersion { number: 8, ..stays };
        index.keep_only([comes, stays], &mut table).expect("changes");
        assert_eq!((index.len(), table.free_pages()), (2, 19 - 2));
        assert_eq!(index.matching(stays, &[1, 2, 3, 4], 9), pages);
        assert_eq!(index.matching(goes, &[1, 2, 3, 4], 9), []);
        assert_eq!(index.evict(9, &mut table).expect("evicts"), 2);
    }

    #[test]
    fn a_prefix_is_found_page_by_page_and_never_under_another_policy() {
        let (mut index, mut table) = (index(), table(20));
        let a = compute(&mut index, &mut table, &[1, 2, 3, 4, 5, 6]);
        let b = compute(&mut index, &mut table, &[1, 2, 3, 4, 7, 8]);
        assert_eq!(a[..2], b[..2]);
        assert_ne!(a[2], b[2]);
        let policy = base_policy();
        assert_eq!(index.matching(policy, &[1, 2, 3, 4, 7, 8, 9], 9), b);
        assert_eq!(index.matching(policy, &[1, 2, 3, 4, 7, 8, 9], 2), b[..2]);
        assert_eq!(index.matching(policy, &[1, 2, 3], 9), a[..1]);
        assert_eq!(index.matching(policy, &[3, 4, 5, 6], 9), []);
        let newer = PolicyVersion {
            number: policy.number + 1,
            ..policy
        };
        assert_eq!(index.matching(newer, &[1, 2, 3, 4], 9), []);
        index
            .insert(newer, &[9, 9], &a, &mut table)
            .expect("does nothing");
        assert_eq!(index.len(), 4);
        index.clear([newer], &mut table).expect("clears");
        assert_eq!((index.len(), table.free_pages()), (0, 19));
        assert_eq!(index.matching(newer, &[1, 2, 3, 4], 9), []);
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first_and_pages_in_use_stay() {
        let (mut index, mut table) = (index(), table(20));
        let a = compute(&mut index, &mut table, &[1, 2, 3, 4, 5, 6]);
        compute(&mut index, &mut table, &[7, 8, 9, 9]);
        let _ = index.matching(base_policy(), &[1, 2, 3, 4], 9);
        // Oldest use: page 2 of the first, then the second sequence, leaf first, then the first two pages.
        let slot = table.allocate_slot().expect("a slot");
        table.attach_shared(slot, &a[..1]).expect("attaches");
        assert_eq!(index.reclaimable(&table), 4);
        assert_eq!(index.evict(1, &mut table).expect("evicts"), 1);
        assert_eq!(index.matching(base_policy(), &[1, 2, 3, 4, 5, 6], 9), a[..2]);
        assert_eq!(index.evict(1, &mut table).expect("evicts"), 1);
        assert_eq!(index.matching(base_policy(), &[7, 8, 9, 9], 9).len(), 1);
        assert_eq!(index.evict(9, &mut table).expect("evicts"), 2);
        assert_eq!(index.matching(base_policy(), &[1, 2, 3, 4, 5, 6], 9), a[..1]);
        table.check_integrity().expect("is sound");
    }

    proptest! {
        /// A page found for a prefix is one that was computed for exactly that prefix.
        #[test]
        fn hits_are_true_and_every_page_comes_back(
            sequences in prop::collection::vec(prop::collection::vec(0u32..3, 1..8), 1..40),
        ) {
            let (mut index, mut table) = (index(), table(9));
            // What each page was last computed for; pages of a found prefix keep what they had.
            let mut content: HashMap<PageId, Vec<u32>> = HashMap::new();
            for pages in sequences {
                let tokens: Vec<u32> = pages.iter().flat_map(|&page| [page, page + 7]).collect();
                let found = index.matching(base_policy(), &tokens, usize::MAX);
                for (i, page) in found.iter().enumerate() {
                    prop_assert_eq!(&content[page], &tokens[..(i + 1) * PAGE]);
                }
                let found = found.len();
                let computed = compute(&mut index, &mut table, &tokens);
                for (i, page) in computed.into_iter().enumerate().skip(found) {
                    content.insert(page, tokens[..(i + 1) * PAGE].to_vec());
                }
                table.check_integrity().expect("is sound");
                prop_assert_eq!(table.free_pages() + index.len(), 8);
            }
            index.clear([base_policy()], &mut table).expect("clears");
            prop_assert_eq!(table.free_pages(), 8);
        }
    }
}
