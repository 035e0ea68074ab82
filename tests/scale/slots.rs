//! The table of schedules: what is due, and to which instances it belongs.

use std::collections::BTreeSet;

use chrono::{DateTime, Utc};

use crate::{
    events::{Time, clock, time},
    rules::Status,
    schedule::{
        plan::{self, Row, Start, Then},
        spec::Schedule,
    },
};

pub struct Slot {
    slot: DateTime<Utc>,
    pub due_at: Time,
    /// The claim that stands, if one does.
    holder: Option<u64>,
    attempt: u32,
    begun: DateTime<Utc>,
    pattern: usize,
    /// Instances that know the same schedules share them.
    group: usize,
}

pub struct Slots {
    patterns: Vec<Schedule>,
    slots: Vec<Slot>,
    /// What is due in each group, in order.
    due: Vec<BTreeSet<(Time, usize)>>,
    claims: u64,
}

/// A tick that was claimed.
#[derive(Clone, Debug)]
pub struct Tick {
    pub slot: usize,
    pub claim: u64,
    pub row: Row,
    pub taken_over: bool,
    /// When the tick was due.
    pub time: Time,
}

impl Slots {
    /// Creates schedules, each with a pattern, shared out among groups.
    pub fn new(groups: usize, patterns: &[String], chosen: impl Iterator<Item = usize>) -> Self {
        let patterns: Vec<Schedule> = patterns.iter().map(|pattern| Schedule::cron(pattern)).collect();
        let first: Vec<DateTime<Utc>> = patterns.iter().map(|schedule| schedule.next(clock(0))).collect();
        let mut due = vec![BTreeSet::new(); groups];
        let slots = chosen.enumerate().map(|(index, pattern)| {
            let (slot, group) = (first[pattern], index % groups);
            due[group].insert((time(slot), index));
            Slot { slot, due_at: time(slot), holder: None, attempt: 0, begun: slot, pattern, group }
        });
        let slots = slots.collect();
        Self { patterns, slots, due, claims: 0 }
    }

    pub fn known(&self, group: usize) -> usize {
        self.due[group].len()
    }

    fn set_due(&mut self, index: usize, at: Time) {
        let slot = &mut self.slots[index];
        self.due[slot.group].remove(&(slot.due_at, index));
        slot.due_at = at;
        self.due[slot.group].insert((at, index));
    }

    /// Returns what is due, in order, at most so many.
    pub fn look(&self, group: usize, most: usize, now: Time) -> Vec<usize> {
        self.due[group].iter().take_while(|(at, _)| *at <= now).take(most).map(|(_, index)| *index).collect()
    }

    /// Claims a slot that is due.
    pub fn claim(&mut self, index: usize, lease: Time, now: Time) -> Option<Tick> {
        let slot = &mut self.slots[index];
        if slot.due_at > now {
            return None;
        }
        self.claims += 1;
        slot.attempt += 1;
        let taken_over = slot.holder.replace(self.claims).is_some();
        let lost_since = taken_over.then_some(slot.begun);
        slot.begun = clock(now);
        let (attempt, time) = (slot.attempt, time(slot.slot));
        let row = Row {
            slot: slot.slot,
            triggered: false,
            own: true,
            attempt,
            missed: 0,
            spent: attempt.saturating_sub(1),
            lost_since,
            skip: None,
            stopped: false,
        };
        self.set_due(index, now + lease);
        Some(Tick { slot: index, claim: self.claims, row, taken_over, time })
    }

    /// When another schedule of the group is due.
    pub fn next_due(&self, group: usize) -> Option<Time> {
        self.due[group].first().map(|(at, _)| *at)
    }

    fn stands(&self, tick: &Tick) -> bool {
        self.slots[tick.slot].holder == Some(tick.claim)
    }

    pub fn extend(&mut self, tick: &Tick, until: Time) -> bool {
        let stands = self.stands(tick);
        if stands {
            self.set_due(tick.slot, until);
        }
        stands
    }

    /// What a claimed row is for: the code's own decision.
    pub fn start(&self, tick: &Tick, now: Time) -> Start {
        plan::start(&self.patterns[self.slots[tick.slot].pattern], &tick.row, clock(now))
    }

    /// Moves the slot past ticks that were missed.
    pub fn move_to(&mut self, tick: &Tick, to: DateTime<Utc>) -> bool {
        let stands = self.stands(tick);
        if stands {
            self.slots[tick.slot].slot = to;
        }
        stands
    }

    /// Ends a run that succeeded. Returns when the schedule is due again, if the claim stood.
    pub fn end(&mut self, tick: &Tick, now: Time) -> Option<Time> {
        if !self.stands(tick) {
            return None;
        }
        let slot = &mut self.slots[tick.slot];
        let row = Row { slot: slot.slot, ..tick.row.clone() };
        let next = match plan::end(&self.patterns[slot.pattern], &row, Status::Succeeded, clock(now)) {
            Then::Next(next) => next,
            Then::Again(pause) => clock(now) + pause,
        };
        (slot.slot, slot.holder, slot.attempt) = (next, None, 0);
        self.set_due(tick.slot, time(next));
        Some(time(next))
    }
}
