//! How the database executes a statement: each runs in one step.

use crate::ticks::{
    design::{Design, Event, Mutant},
    state::*,
};

/// The holder of a row that was handed back.
const VACANT: u8 = u8::MAX;

impl State {
    pub fn execute(&mut self, design: &Design, statement: Statement) -> Reply {
        match statement {
            Statement::Claim { seen, now, holder } => self.claim(design, &seen, now, holder),
            Statement::PutBack(holder) => self.put_back(design, holder),
            Statement::Pass(claim, pass) => self.pass(design, claim, &pass),
            Statement::Renew(claim) => self.extend(design, claim),
            Statement::Abandon(claim) => self.hand_back(design, claim),
            Statement::End(claim, end) => self.end(design, claim, &end),
            Statement::Tell(told) => {
                self.add(told);
                Reply::Done
            }
        }
    }

    /// Returns whether the row was added: the key is the slot and the attempt.
    fn add(&mut self, told: Told) -> bool {
        let free = !self.history.iter().any(|other| (other.slot, other.attempt) == (told.slot, told.attempt));
        if free {
            self.history.push(told);
            self.history.sort_unstable();
        }
        free
    }

    fn is_ours(&self, claim: Claim) -> bool {
        self.row.holder == Some(claim.holder) && self.row.token == claim.token
    }

    fn claim(&mut self, design: &Design, seen: &Row, now: Time, holder: u8) -> Reply {
        let row = &mut self.row;
        let same = design.is(Mutant::CompareTokenAlone)
            || (row.slot, row.attempt, row.due) == (seen.slot, seen.attempt, seen.due);
        if row.token != seen.token || !same {
            design.meet(Event::ClaimMissed);
            return Reply::Not;
        }
        let (slot, lost) = (seen.to_run(), seen.holder.is_some());
        row.holder = Some(holder);
        row.token = (seen.token + 1).max(now * MICROS);
        row.run_slot = Some(slot);
        row.attempt = seen.attempt + 1;
        row.begin = now;
        row.due = self.now + design.lease;
        let triggered = match design.is(Mutant::TriggerByRow) {
            true => seen.triggered == Some(slot),
            false => slot % TICK != 0,
        };
        if design.is(Mutant::AdvanceAtClaim) && !triggered {
            row.slot = next(design, slot);
            (row.due, row.attempt) = (row.slot, 0);
        }
        let token = row.token;
        if lost {
            design.meet(Event::TakenOver);
            self.add(Told { slot, attempt: seen.attempt, status: 'L', token: seen.token });
        }
        if triggered {
            design.meet(Event::TriggeredRun);
        }
        design.meet(Event::Claimed);
        if token <= self.record.highest {
            self.fault(Fault::TokenFell);
        }
        self.record.highest = self.record.highest.max(token);
        self.record.valid = Some(token);
        Reply::Claimed(Run {
            claim: Claim { holder, token },
            slot,
            triggered,
            own: if design.is(Mutant::TriggerByRow) { !triggered } else { slot == seen.slot },
            attempt: seen.attempt + 1,
            missed: seen.missed,
            lost_since: lost.then_some(seen.begin),
            now,
            deadline: 0,
        })
    }

    fn put_back(&mut self, design: &Design, holder: u8) -> Reply {
        if self.row.holder == Some(holder) {
            design.meet(Event::PutBack);
            (self.row.holder, self.row.due) = (None, self.now);
            self.row.attempt -= 1;
            self.record.valid = None;
        }
        Reply::Done
    }

    fn pass(&mut self, design: &Design, claim: Claim, pass: &Pass) -> Reply {
        if !self.is_ours(claim) {
            return Reply::Not;
        }
        self.check_change(claim);
        let row = &mut self.row;
        let own = row.run_slot == Some(row.slot);
        let slot = if own { pass.to } else { row.slot };
        if pass.runs {
            design.meet(Event::Moved);
            (row.run_slot, row.attempt, row.missed) = (Some(pass.to), 1, pass.missed);
        } else {
            design.meet(Event::Skipped);
            (row.attempt, row.missed, row.holder) = (0, 0, None);
            row.due = if row.triggered.is_some() { self.now } else { slot };
            self.record.valid = None;
        }
        self.move_to(slot);
        let told = Told { slot: pass.from, attempt: 0, status: 'M', token: claim.token };
        if pass.skipped > 0 && self.add(told) {
            self.has_ended(pass.from, pass.skipped - 1);
        }
        Reply::Done
    }

    /// The row is due for a takeover, and its holder is one that no run has.
    fn hand_back(&mut self, design: &Design, claim: Claim) -> Reply {
        if !self.is_ours(claim) {
            return Reply::Not;
        }
        self.check_change(claim);
        design.meet(Event::HandedBack);
        let Row { run_slot, attempt, token, .. } = self.row;
        self.add(Told { slot: run_slot.unwrap_or_default(), attempt, status: 'L', token });
        (self.row.holder, self.row.due) = (Some(VACANT), self.now);
        self.record.valid = None;
        Reply::Done
    }

    /// Makes the lease end later.
    fn extend(&mut self, design: &Design, claim: Claim) -> Reply {
        if design.is(Mutant::RenewalRevives) && self.row.token == claim.token {
            self.row.holder = Some(claim.holder);
        }
        if !self.is_ours(claim) {
            return Reply::Not;
        }
        self.check_change(claim);
        design.meet(Event::Renewed);
        self.row.due = self.now + design.lease;
        Reply::Done
    }

    fn end(&mut self, design: &Design, claim: Claim, end: &End) -> Reply {
        let told = end.told(claim.token);
        let by_token = design.is(Mutant::EndWithoutHolder) && self.row.token == claim.token;
        if !self.is_ours(claim) && !by_token {
            let found = self.history.contains(&told);
            design.meet(if found { Event::FoundInHistory } else { Event::EndRefused });
            return if found { Reply::Done } else { Reply::Not };
        }
        if !design.is(Mutant::HistoryOptional) && !self.add(told) {
            return Reply::Failed;
        }
        self.check_change(claim);
        design.meet(if self.row.due <= self.now { Event::EndedLate } else { Event::Ended });
        let row = &mut self.row;
        let (own, triggered) =
            (row.run_slot == Some(row.slot), row.triggered.is_some_and(|_| row.triggered == row.run_slot));
        let slot = end.next.filter(|_| own).unwrap_or(row.slot);
        row.due = match end.next {
            None => self.now,
            _ if row.triggered.is_some() && !triggered => self.now,
            Some(_) => slot,
        };
        row.holder = None;
        if end.next.is_some() {
            (row.attempt, row.missed) = (0, 0);
            row.triggered = row.triggered.filter(|_| !triggered);
        }
        self.move_to(slot);
        self.record.valid = None;
        if end.status == 'S' {
            self.record.succeeded.push(claim.token);
        }
        if end.next.is_some() {
            self.has_ended(end.slot - Time::from(end.missed) * TICK, end.missed);
        }
        Reply::Done
    }

    fn move_to(&mut self, slot: Time) {
        if slot < self.row.slot {
            self.fault(Fault::SlotFell);
        }
        self.row.slot = slot;
    }

    /// Records the end of this slot, and of so many after it.
    fn has_ended(&mut self, slot: Time, more: u32) {
        self.record.ended.extend((0..=Time::from(more)).map(|number| slot + number * TICK));
        self.record.ended.sort_unstable();
    }

    fn check_change(&mut self, claim: Claim) {
        if self.record.valid != Some(claim.token) {
            self.fault(Fault::SupersededChange);
        }
    }

    /// An operator's trigger has a time of its own, later than the last run.
    pub fn trigger(&mut self, design: &Design) {
        let row = &mut self.row;
        let runs = row.holder.is_some() && row.triggered == row.run_slot;
        if row.triggered.is_none() || runs {
            if row.holder.is_some() {
                design.meet(Event::TriggeredDuringRun);
            }
            let time = self.now.max(row.run_slot.unwrap_or_default()) + 1;
            row.triggered = Some(time);
            self.record.asked.push(time);
        }
        if row.holder.is_none() {
            row.due = row.due.min(self.now);
        }
    }
}

pub fn next(design: &Design, slot: Time) -> Time {
    design.schedule.next(at(slot)).timestamp()
}
