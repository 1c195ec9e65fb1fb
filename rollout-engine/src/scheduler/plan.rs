//! Putting the next step together.

use std::ops::Bound;

use super::Scheduler;
use super::sequence::Sequence;
use crate::Error;
use crate::completion::RequestId;
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
        let mut after: Option<RequestId> = None;
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
            while !self.pages.can_reserve(slot, len) {
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

    fn reserve(&mut self, slot: paged_kv::Slot, len: usize) -> Result<(), Error> {
        let reservation = self.pages.reserve(slot, len)?;
        self.copies.extend(reservation.copy.map(|copy| (slot, copy)));
        Ok(())
    }

    fn preempt(&mut self, request: RequestId) -> Result<(), Error> {
        if let Some(mut sequence) = self.release(request)? {
            tracing::debug!(%request, tokens = sequence.token_ids.len(), "preempted");
            self.statistics.preemptions += 1;
            sequence.restart();
            self.waiting.insert(request, sequence);
        }
        Ok(())
    }

    /// Adds a row for every running sequence that can decode, whose page is reserved. Gives their owners.
    fn plan_decode(&mut self, step: &mut Step) -> Result<Vec<RequestId>, Error> {
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
            self.mixed_prefill_tokens()
        }
    }

    /// Adds chunks of known tokens up to the budget: first of sequences that are under way, then of new ones.
    fn plan_prefill(&mut self, step: &mut Step, owners: &mut Vec<RequestId>) -> Result<(), Error> {
        let mut budget = self.prefill_budget(step.decode.len());
        let under_way: Vec<_> = self
            .running
            .iter()
            .filter(|(_, sequence)| sequence.prefilling)
            .map(|(&id, _)| id)
            .collect();
        for id in under_way {
            self.add_chunk(id, step, owners, &mut budget)?;
        }
        while budget > 0 && self.pages.free_slots() > 0 {
            let Some(id) = self.next_to_admit() else { break };
            let Some(mut sequence) = self.waiting.remove(&id) else {
                break;
            };
            if sequence.preempted {
                self.statistics.resumed_tokens += sequence.token_ids.len() as u64;
            }
            let slot = self.pages.allocate_slot()?;
            sequence.slot = Some(slot);
            let tokens = sequence.token_ids.len();
            step.slot_tokens.extend(sequence.slot_tokens());
            self.running.insert(id, sequence);
            self.reserve(slot, tokens)?;
            self.add_chunk(id, step, owners, &mut budget)?;
        }
        Ok(())
    }

    fn add_chunk(
        &mut self,
        id: RequestId,
        step: &mut Step,
        owners: &mut Vec<RequestId>,
        budget: &mut usize,
    ) -> Result<(), Error> {
        let Some(sequence) = self.running.get_mut(&id) else {
            return Ok(());
        };
        let (Some(slot), start) = (sequence.slot, sequence.computed) else {
            return Ok(());
        };
        let rest = &sequence.token_ids[start..];
        let len = rest.len().min(*budget);
        if len == 0 {
            return Ok(());
        }
        self.pages.advance(slot, len)?;
        step.token_ids.extend_from_slice(&rest[..len]);
        let last = len == rest.len();
        step.prefill.push(PrefillChunk {
            slot,
            start,
            len,
            sample: last.then_some(sequence.sampling),
        });
        *budget -= len;
        sequence.computed += len;
        if last {
            sequence.prefilling = false;
            sequence.in_flight += 1;
            owners.push(id);
        }
        Ok(())
    }

    /// The oldest waiting request whose pages are free, unless one before it has been overtaken often enough.
    fn next_to_admit(&mut self) -> Option<RequestId> {
        let headroom = self.headroom();
        let mut blocked = Vec::new();
        let mut found = None;
        for (&id, sequence) in self.waiting.iter().take(MAX_LOOKED_AT) {
            if self.fits(sequence, headroom) {
                found = Some(id);
                break;
            }
            if sequence.overtaken >= MAX_OVERTAKES {
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
        found
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

    fn fits(&self, sequence: &Sequence, headroom: usize) -> bool {
        let page_size = self.shape.page_size;
        let needed = sequence.token_ids.len().div_ceil(page_size);
        let own_growth = usize::from(needed < sequence.pages_at_end(page_size));
        let spare = if self.running.is_empty() {
            0
        } else {
            headroom + own_growth
        };
        needed + spare <= self.pages.free_pages()
    }
}
