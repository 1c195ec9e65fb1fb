//! Pages that sequences share: what one takes over when it is admitted, and what gives way when pages run short.

use paged_kv::{PageId, Slot};

use super::Scheduler;
use super::group::{Group, Start, has_sibling};
use super::sequence::SequenceId;
use crate::Error;
use crate::prefix_index::PrefixIndex;
use crate::runner::Runner;

impl<R: Runner> Scheduler<R> {
    /// Whether pages of finished prefixes are kept for later requests that start with the same tokens. Off at first. They are
    /// used under the policy that computed them only, and give way, least recently used first, when pages run short.
    ///
    /// # Errors
    /// Those of the page table, which are defects.
    pub fn set_prefix_cache(&mut self, on: bool) -> Result<(), Error> {
        self.clear_prefix_cache()?;
        // From now on the index keeps what groups had pinned. Of a page that both held each would take the other for a user,
        // and none would give it up.
        for group in self.groups.values_mut().filter(|_| on) {
            group.unpin(&mut self.pages)?;
        }
        self.prefix_index = on.then(|| PrefixIndex::new(self.shape.page_size, self.versions()));
        Ok(())
    }

    /// Forgets the pages kept for later requests, if there are any.
    ///
    /// # Errors
    /// Those of the page table, which are defects.
    pub fn clear_prefix_cache(&mut self) -> Result<(), Error> {
        let versions = self.versions();
        match &mut self.prefix_index {
            Some(index) => index.clear(versions, &mut self.pages),
            None => Ok(()),
        }
    }

    /// Pages kept for later requests, those that running ones use included.
    pub fn prefix_cache_pages(&self) -> usize {
        self.prefix_index.as_ref().map_or(0, PrefixIndex::len)
    }

    /// Forgets the pages kept for later requests under policies that are no longer in force.
    pub(super) fn index_policies_in_force(&mut self) -> Result<(), Error> {
        let versions = self.versions();
        match &mut self.prefix_index {
            Some(index) => index.keep_only(versions, &mut self.pages),
            None => Ok(()),
        }
    }

    /// Forgets everything that was computed for use by others: it may not have been computed.
    pub(super) fn forget_shared(&mut self) -> Result<(), Error> {
        for group in self.groups.values_mut() {
            group.unpin(&mut self.pages)?;
            group.leader = None;
        }
        self.clear_prefix_cache()
    }

    /// Running leaders whose shared part was computed by earlier steps.
    pub(super) fn ready_leaders(&self) -> Vec<SequenceId> {
        if self.groups.is_empty() {
            return Vec::new();
        }
        let prefilling = self.running.iter().filter(|(_, sequence)| sequence.prefilling);
        prefilling
            .filter(|&(&id, sequence)| {
                let group = self.groups.get(&id.request);
                group.is_some_and(|group| group.leader == Some(id) && group.shared_len == sequence.computed)
            })
            .map(|(&id, _)| id)
            .collect()
    }

    /// Whether a waiting sequence is to wait for its group's leader.
    pub(super) fn held_back(&self, id: SequenceId, ready: &[SequenceId]) -> bool {
        let leader = self.groups.get(&id.request).and_then(|group| group.leader);
        leader.is_some_and(|leader| !ready.contains(&leader))
    }

    /// What a waiting sequence that is not held back would take over.
    pub(super) fn start_of(&mut self, id: SequenceId) -> Start {
        let group = self.groups.get(&id.request);
        if let Some(leader) = group.and_then(|group| group.leader) {
            return Start::Fork(leader);
        }
        if let Some(group) = group
            && !group.pinned.is_empty()
        {
            return Start::Pages {
                pages: group.pinned.clone(),
                from_index: false,
            };
        }
        // The last token is computed in any case; siblings share nothing beyond their prompt.
        let policy = self.waiting.get(&id).map(|sequence| self.version_of(sequence));
        let pages = match (&mut self.prefix_index, self.waiting.get(&id), policy) {
            (Some(index), Some(sequence), Some(policy)) => {
                let limit = group.map_or(sequence.token_ids.len() - 1, |group| group.shared_len);
                index.matching(policy, &sequence.token_ids, limit / self.shape.page_size)
            }
            _ => Vec::new(),
        };
        Start::Pages {
            pages,
            from_index: true,
        }
    }

    /// Frees pages for a waiting sequence besides what it takes over, and `headroom` for those that run. False if there are
    /// too few; nothing is given up then.
    pub(super) fn make_room(
        &mut self,
        id: SequenceId,
        start: &Start,
        headroom: usize,
    ) -> Result<bool, Error> {
        let page_size = self.shape.page_size;
        let Some(sequence) = self.waiting.get(&id) else {
            return Ok(false);
        };
        let total = sequence.token_ids.len().div_ceil(page_size);
        let own_growth = usize::from(total < sequence.pages_at_end(page_size));
        let spare = if self.running.is_empty() {
            0
        } else {
            headroom + own_growth
        };
        let (shared, held): (usize, &[PageId]) = match start {
            Start::Fork(_) => {
                let group = self.groups.get(&id.request);
                (group.map_or(0, |group| group.shared_len / page_size), &[])
            }
            Start::Pages { pages, .. } => (pages.len(), pages),
        };
        let wanted = total - shared + spare;
        let free = self.pages.free_pages();
        if wanted <= free {
            return Ok(true);
        }
        for &page in held {
            self.pages.retain(page)?;
        }
        let freed = self.reclaim(wanted - free)?;
        for &page in held {
            self.pages.release(page)?;
        }
        Ok(freed)
    }

    /// Frees `n` pages that are only kept for sequences to come. False, and nothing is given up, if there are too few.
    pub(super) fn reclaim(&mut self, n: usize) -> Result<bool, Error> {
        let table = &self.pages;
        let in_index = (self.prefix_index.as_ref()).map_or(0, |index| index.reclaimable(table));
        let in_groups: usize = self.groups.values().map(|group| group.reclaimable(table)).sum();
        if in_index + in_groups < n {
            return Ok(false);
        }
        let mut freed = 0;
        if let Some(index) = &mut self.prefix_index {
            freed += index.evict(n, &mut self.pages)?;
            self.statistics.evicted_pages += freed as u64;
        }
        // The newest first: older ones are admitted sooner.
        for group in self.groups.values_mut().rev() {
            if freed >= n {
                break;
            }
            if group.reclaimable(&self.pages) > 0 {
                freed += group.unpin(&mut self.pages)?;
            }
        }
        Ok(true)
    }

    /// Gives a waiting sequence a slot with what it takes over, and pages for the rest of its tokens.
    pub(super) fn admit(&mut self, id: SequenceId, start: Start) -> Result<(), Error> {
        let Some(mut sequence) = self.waiting.remove(&id) else {
            return Ok(());
        };
        let slot = match &start {
            Start::Fork(leader) => {
                let leader = self.running.get(leader).and_then(|leader| leader.slot);
                self.pages.fork(leader.unwrap_or(Slot::RESERVED))?
            }
            Start::Pages { .. } => self.pages.allocate_slot()?,
        };
        let tokens = sequence.token_ids.len();
        sequence.slot = Some(slot);
        let sequence = self.running.entry(id).or_insert(sequence);
        let mut led = true;
        if let Start::Pages { pages, from_index } = start {
            self.pages.attach_shared(slot, &pages)?;
            self.statistics.prefix_hits += u64::from(from_index && !pages.is_empty());
            led = false;
        }
        let computed = self.pages.len(slot)?;
        sequence.computed = computed;
        self.statistics.shared_pages += (computed / self.shape.page_size) as u64;
        self.statistics.saved_prefill_tokens += computed as u64;
        if !led
            && let Some(group) = self.groups.get_mut(&id.request)
            && group.shared_len > computed
            && (self.pages.free_slots() > 0 || group.pinned.is_empty())
            && has_sibling(&self.waiting, id.request)
        {
            group.leader = Some(id);
        }
        self.reserve(slot, tokens)
    }

    /// A leader whose siblings have forked goes on as one of them; its full pages stay for those that come later.
    pub(super) fn end_leading(&mut self, leader: SequenceId) -> Result<(), Error> {
        let sequence = self.running.get(&leader);
        let (Some(slot), Some(group)) = (
            sequence.and_then(|sequence| sequence.slot),
            self.groups.get_mut(&leader.request),
        ) else {
            return Ok(());
        };
        group.leader = None;
        let shared_pages = group.shared_len / self.shape.page_size;
        let pages: Vec<_> = self.pages.pages(slot)?.take(shared_pages).collect();
        if self.prefix_index.is_some() {
            self.enter_prefix(leader)?;
        } else if let Some(group) = self.groups.get_mut(&leader.request)
            && group.pinned.is_empty()
        {
            group.pin(pages, &mut self.pages)?;
        }
        // A slot that reserved and was then forked must reserve again.
        match self.running.get(&leader).map(|leader| leader.token_ids.len()) {
            Some(tokens) => self.reserve(slot, tokens),
            None => Ok(()),
        }
    }

    /// Keeps what a running sequence has computed for later requests.
    pub(super) fn enter_prefix(&mut self, id: SequenceId) -> Result<(), Error> {
        let policy = self.running.get(&id).map(|sequence| self.version_of(sequence));
        if let (Some(index), Some(sequence)) = (&mut self.prefix_index, self.running.get(&id))
            && let (Some(slot), Some(policy)) = (sequence.slot, policy)
        {
            let pages: Vec<_> = self.pages.pages(slot)?.collect();
            index.insert(policy, sequence.computed_tokens(), &pages, &mut self.pages)?;
        }
        Ok(())
    }

    /// One sibling less to wait for. True for the last one of a group.
    pub(super) fn leave_group(&mut self, id: SequenceId) -> Result<bool, Error> {
        let Some(group) = self.groups.get_mut(&id.request) else {
            return Ok(false);
        };
        group.unfinished = group.unfinished.saturating_sub(1);
        if group.unfinished > 0 {
            return Ok(false);
        }
        self.drop_group(id.request)?;
        Ok(true)
    }

    pub(super) fn drop_group(&mut self, request: crate::completion::RequestId) -> Result<(), Error> {
        match self.groups.remove(&request) {
            Some(mut group) => Group::unpin(&mut group, &mut self.pages).map(drop),
            None => Ok(()),
        }
    }
}
