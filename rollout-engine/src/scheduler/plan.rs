//! Putting the next step together.

use std::ops::Bound;

use super::Scheduler;
use super::group::{Start, has_sibling};
use super::sequence::{Sequence, SequenceId};
use crate::Error;
use crate::runner::{DecodeRow, PrefillChunk, Runner, Step};

/// So many later requests may be admitted past one that waits for pages; then it is served first.
const MAX_OVERTAKES: usize = 32;
/// So many waiting requests are looked at per step when the first ones do not fit.
const MAX_LOOKED_AT: usize = 32;

/// Whether all running sequences that can decode got a page.
enum DecodePlan {
    Ready,
    /// Pages are short, but results under way may free some.
    Wait,
}

impl<R: Runner> Scheduler<R> {
    /// Plans and submits one step. False if there is nothing to submit before a result is collected.
    pub(super) fn submit_step(&mut self) -> Result<bool, Error> {
        let mut step = Step::default();
        let mut owners = Vec::new();
        if let DecodePlan::Wait = self.reserve_for_decode()? {
            return Ok(false);
        }
        let decode_owners = self.plan_decode(&mut step)?;
        self.plan_prefill(&mut step, &mut owners)?;
        owners.extend(decode_owners);
        if step.is_empty() {
            return Ok(false);
        }
        // Before those of sequences that got one of these slots since.
        step.slot_policies.splice(0..0, self.slots_anew.drain(..));
        step.copies
            .extend(self.copies.drain(..).map(|(_slot, copy)| copy));
        tracing::trace!(
            prefill_tokens = step.token_ids.len(),
            decode_rows = step.decode.len(),
            waiting = self.waiting.len(),
            "step"
        );
        self.statistics.steps += 1;
        self.statistics.prefill_tokens += step.token_ids.len() as u64;
        self.statistics.decode_rows += step.decode.len() as u64;
        self.statistics.max_running = self.statistics.max_running.max(self.running.len() as u64);
        self.runner.submit(&step, &mut self.pages)?;
        self.in_flight.push_back(owners);
        Ok(true)
    }

    /// Gives every running sequence that can decode the page of its next position, oldest first. Preempts the
    /// newest sequence where there is none, but only when nothing is in flight: results may free pages, and the
    /// tokens of the preempted sequence must be known to resume from.
    fn reserve_for_decode(&mut self) -> Result<DecodePlan, Error> {
        let mut after: Option<SequenceId> = None;
        loop {
            // Looked up anew each time because preemption takes sequences out.
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let next = self
                .running
                .range((from, Bound::Unbounded))
                .find(|(_, sequence)| sequence.can_decode())
                .and_then(|(&id, sequence)| Some((id, sequence.slot?, sequence.computed + 1)));
            let Some((id, slot, len)) = next else {
                return Ok(DecodePlan::Ready);
            };
            loop {
                let missing = self
                    .pages
                    .pages_needed(slot, len)?
                    .saturating_sub(self.pages.free_pages());
                if missing == 0 || self.reclaim(missing)? {
                    break;
                }
                if !self.in_flight.is_empty() {
                    return Ok(DecodePlan::Wait);
                }
                let Some((&newest, _)) = self.running.last_key_value() else {
                    break;
                };
                self.preempt(newest)?;
                if newest == id {
                    break;
                }
            }
            if self.running.contains_key(&id) {
                self.reserve(slot, len)?;
            }
            after = Some(id);
        }
    }

    pub(super) fn reserve(&mut self, slot: paged_kv::Slot, len: usize) -> Result<(), Error> {
        let reservation = self.pages.reserve(slot, len)?;
        self.statistics.copied_pages += u64::from(reservation.copy.is_some());
        self.copies.extend(reservation.copy.map(|copy| (slot, copy)));
        Ok(())
    }

    fn preempt(&mut self, id: SequenceId) -> Result<(), Error> {
        if let Some(mut sequence) = self.release(id)? {
            let tokens = sequence.token_ids.len();
            tracing::debug!(request = %id.request, index = id.index, tokens, "preempted");
            self.statistics.preemptions += 1;
            sequence.restart();
            self.waiting.insert(id, sequence);
        }
        Ok(())
    }

    /// Adds a row for every running sequence that can decode, whose page is reserved. Gives their owners.
    fn plan_decode(&mut self, step: &mut Step) -> Result<Vec<SequenceId>, Error> {
        let mut owners = Vec::new();
        for (&id, sequence) in &mut self.running {
            let Some(slot) = sequence.slot else { continue };
            if !sequence.can_decode() {
                continue;
            }
            self.pages.advance(slot, 1)?;
            step.decode.push(DecodeRow {
                slot,
                position: sequence.computed,
                sampling: sequence.sampling,
            });
            sequence.computed += 1;
            sequence.in_flight += 1;
            owners.push(id);
        }
        Ok(owners)
    }

    /// Prompt tokens of a step in which `decoding` sequences decode. These wait while prompts are computed, and whoever
    /// waits for a slot or for the rest of its prompt waits the longer the fewer tokens there are: the many go first.
    fn prefill_budget(&self, decoding: usize) -> usize {
        let under_way = self.running.values().filter(|sequence| sequence.prefilling);
        let starting = self.waiting.len().min(self.pages.free_slots()) + under_way.count();
        if starting > decoding {
            self.shape.max_prefill_tokens
        } else {
            self.mixed_prefill_tokens(decoding)
        }
    }

    /// Adds chunks of known tokens up to the budget: first of sequences that are under way, then of new ones. A leader
    /// whose siblings can fork goes on when they had their chance; after the last of them it has its turn by age again, since
    /// whoever only gets what later requests leave may wait for ever.
    fn plan_prefill(&mut self, step: &mut Step, owners: &mut Vec<SequenceId>) -> Result<(), Error> {
        let mut budget = self.prefill_budget(step.decode.len());
        let (ready, led): (Vec<_>, Vec<_>) =
            (self.ready_leaders().into_iter()).partition(|leader| has_sibling(&self.waiting, leader.request));
        for leader in led {
            self.end_leading(leader)?;
        }
        let under_way: Vec<_> = self
            .running
            .iter()
            .filter(|(id, sequence)| sequence.prefilling && !ready.contains(id))
            .map(|(&id, _)| id)
            .collect();
        for id in under_way {
            self.add_chunk(id, step, owners, &mut budget)?;
        }
        while budget > 0 && self.pages.free_slots() > 0 {
            let Some((id, start)) = self.next_to_admit(&ready)? else {
                break;
            };
            self.admit(id, start)?;
            step.slot_tokens
                .extend(self.running.get(&id).and_then(Sequence::slot_tokens));
            step.slot_policies.extend(self.slot_policy(id));
            self.add_chunk(id, step, owners, &mut budget)?;
        }
        for leader in ready {
            if budget > 0 {
                self.end_leading(leader)?;
                self.add_chunk(leader, step, owners, &mut budget)?;
            }
        }
        Ok(())
    }

    fn add_chunk(
        &mut self,
        id: SequenceId,
        step: &mut Step,
        owners: &mut Vec<SequenceId>,
        budget: &mut usize,
    ) -> Result<(), Error> {
        let Some(sequence) = self.running.get_mut(&id) else {
            return Ok(());
        };
        let (Some(slot), start) = (sequence.slot, sequence.computed) else {
            return Ok(());
        };
        let group = self.groups.get(&id.request);
        let end = match group.filter(|group| group.leader == Some(id)) {
            Some(group) => group.shared_len,
            None => sequence.token_ids.len(),
        };
        let rest = &sequence.token_ids[start..end];
        let len = rest.len().min(*budget);
        if len == 0 {
            return Ok(());
        }
        self.pages.advance(slot, len)?;
        step.token_ids.extend_from_slice(&rest[..len]);
        let last = start + len == sequence.token_ids.len();
        step.prefill.push(PrefillChunk {
            slot,
            start,
            len,
            sample: last.then_some(sequence.sampling),
        });
        *budget -= len;
        sequence.computed += len;
        self.statistics.resumed_tokens += sequence.lost.min(start + len).saturating_sub(start) as u64;
        if last {
            sequence.prefilling = false;
            sequence.in_flight += 1;
            owners.push(id);
            self.enter_prefix(id)?;
        }
        Ok(())
    }

    /// The oldest waiting sequence whose pages are free, and what it takes over, unless one before it has been overtaken
    /// often enough. Slots are left for siblings that wait for their leader.
    fn next_to_admit(&mut self, ready: &[SequenceId]) -> Result<Option<(SequenceId, Start)>, Error> {
        let headroom = self.headroom();
        let mut slots = self.pages.free_slots();
        let mut candidates = Vec::new();
        for &id in self.waiting.keys() {
            if slots == 0 || candidates.len() == MAX_LOOKED_AT {
                break;
            }
            if self.held_back(id, ready) {
                slots -= 1;
            } else {
                candidates.push(id);
            }
        }
        let mut blocked = Vec::new();
        let mut found = None;
        for id in candidates {
            let start = self.start_of(id);
            if self.make_room(id, &start, headroom)? {
                found = Some((id, start));
                break;
            }
            let overtaken = self.waiting.get(&id).map_or(0, |sequence| sequence.overtaken);
            if overtaken >= MAX_OVERTAKES {
                break;
            }
            blocked.push(id);
        }
        if found.is_some() {
            for id in blocked {
                if let Some(sequence) = self.waiting.get_mut(&id) {
                    sequence.overtaken += 1;
                }
            }
        }
        Ok(found)
    }

    /// Pages that running sequences will need soon: one each, unless they own all they can use. Keeping these free
    /// when a request is admitted lets everyone run for about a page before someone is preempted, instead of
    /// paying a prefill for every few tokens.
    fn headroom(&self) -> usize {
        self.running
            .values()
            .filter(|sequence| self.may_grow(sequence))
            .count()
    }

    fn may_grow(&self, sequence: &Sequence) -> bool {
        let owned = sequence
            .slot
            .and_then(|slot| self.pages.capacity(slot).ok())
            .unwrap_or(0);
        owned < sequence.pages_at_end(self.shape.page_size) * self.shape.page_size
    }
}
