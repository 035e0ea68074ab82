//! The tables in memory, and the statements that instances send.

use std::collections::{BTreeMap, HashSet};

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::{Key, Token},
    schedule::spec::Schedule,
    store::{
        instances::{Beat, DeclaredSet, TimesChange},
        schedule::{ListedSchedule, Times},
    },
};

/// How long an instance counts as alive without a beat: four pauses between beats.
pub const LIVES: TimeDelta = TimeDelta::seconds(24);
/// The lease of a run.
pub const LEASE: TimeDelta = TimeDelta::seconds(30);
const RETRY: TimeDelta = TimeDelta::seconds(3);
const MICROSECOND: TimeDelta = TimeDelta::microseconds(1);

/// A row of schedules.
pub struct Row {
    pub listed: ListedSchedule,
    pub holder: Option<u32>,
}

impl Row {
    fn new(times: &Times, slot: DateTime<Utc>, now: DateTime<Utc>) -> Self {
        let listed = ListedSchedule { token: Token::new(0), now, ..ListedSchedule::unrun(times.clone(), slot) };
        Self { listed, holder: None }
    }

    fn hold(&mut self, holder: Option<u32>) {
        self.holder = holder;
        self.listed.running = holder.is_some();
    }
}

/// A row of instances.
struct Instance {
    declares_id: i64,
    since: DateTime<Utc>,
    beat_at: DateTime<Utc>,
    beats: u32,
}

/// A run that was claimed.
pub struct Run {
    pub times: Times,
    pub schedule: Schedule,
    pub slot: DateTime<Utc>,
    pub end_at: DateTime<Utc>,
    pub renew_at: DateTime<Utc>,
    pub fails: bool,
    holder: u32,
}

/// A run of a row's slot that has ended for good.
pub struct Done {
    pub slot: DateTime<Utc>,
    pub at: DateTime<Utc>,
}

#[derive(Default)]
pub struct Tables {
    pub rows: BTreeMap<Key, Row>,
    pub done: BTreeMap<Key, Vec<Done>>,
    instances: BTreeMap<u32, Instance>,
    holders: u32,
    /// A beat returns the sets as they were before it.
    sets_before: bool,
}

impl Tables {
    pub fn new(sets_before: bool) -> Self {
        Self { sets_before, ..Self::default() }
    }

    pub fn announce(&mut self, id: u32, declares_id: i64, now: DateTime<Utc>) {
        let new = Instance { declares_id, since: now, beat_at: now, beats: 1 };
        self.instances.entry(id).and_modify(|instance| instance.beat_at = now).or_insert(new);
    }

    pub fn beat(&mut self, id: Option<u32>, now: DateTime<Utc>) -> Beat {
        let before = self.sets(now);
        let instance = id.and_then(|id| self.instances.get_mut(&id));
        let beats = instance.map(|instance| {
            let is_break = instance.beat_at + LIVES < now || instance.beat_at > now;
            instance.beats = if is_break { 1 } else { instance.beats + 1 };
            instance.beat_at = now;
            instance.beats
        });
        let sets = if self.sets_before { before } else { self.sets(now) };
        Beat { beats, drained: false, sets, now }
    }

    fn sets(&self, now: DateTime<Utc>) -> Vec<DeclaredSet> {
        let mut sets: BTreeMap<i64, DeclaredSet> = BTreeMap::new();
        for Instance { declares_id, since, beat_at, beats } in self.instances.values() {
            let none = DeclaredSet {
                declares_id: *declares_id,
                present: 0,
                alive: 0,
                counting: 0,
                forgotten: 0,
                since: *since,
                lives: LIVES,
            };
            let set = sets.entry(*declares_id).or_insert(none);
            let is_alive = *beat_at + LIVES > now;
            set.present += 1;
            set.alive += i64::from(is_alive);
            set.counting += i64::from(is_alive && *beats >= 2);
            set.forgotten += i64::from(*beat_at + LIVES * 2 < now);
            set.since = set.since.min(*since);
        }
        sets.into_values().collect()
    }

    pub fn end_instance(&mut self, id: u32) {
        self.instances.remove(&id);
    }

    pub fn forget_instances(&mut self, now: DateTime<Utc>) {
        self.instances.retain(|_, instance| instance.beat_at + LIVES * 2 >= now);
    }

    pub fn mark_gone(&mut self, names: &[Key], now: DateTime<Utc>) {
        for name in names {
            if let Some(Row { listed: row, .. }) = self.rows.get_mut(name) {
                row.gone_at = row.gone_at.or(Some(now));
            }
        }
    }

    /// Changes one row, or two of which the second takes the place of the first, unless they are
    /// other ones than were seen.
    pub fn change(&mut self, changes: &[TimesChange], now: DateTime<Utc>) -> bool {
        let are_seen = changes.iter().all(|change| self.is_seen(change));
        if are_seen {
            changes.iter().for_each(|change| self.change_times(change, now));
            if let [old, new] = changes {
                self.inherit(&old.times.name, &new.times.name, now);
            }
        }
        are_seen
    }

    fn is_seen(&self, change: &TimesChange) -> bool {
        match (&change.seen, self.rows.get(&change.times.name)) {
            (None, None) => true,
            (Some(seen), Some(Row { listed: row, .. })) => {
                let parts = |row: &ListedSchedule| (row.times.clone(), row.slot, row.run_slot, row.attempt);
                parts(row) == parts(seen)
            }
            _ => false,
        }
    }

    /// What the row of the old name has passes to that of the new one.
    fn inherit(&mut self, old: &Key, new: &Key, now: DateTime<Utc>) {
        let before = self.rows[old].listed.clone();
        let row = self.rows.get_mut(new).unwrap();
        row.hold(None);
        let row = &mut row.listed;
        (row.run_slot, row.attempt, row.begin_time) = (before.run_slot, before.attempt, before.begin_time);
        row.triggered_at = before.triggered_at.or(row.triggered_at);
        row.due_at = match row.triggered_at {
            _ if before.attempt > 0 => before.due_at,
            Some(_) => now,
            None => row.slot,
        };
        let emptied = self.rows.get_mut(old).unwrap();
        emptied.hold(None);
        let row = &mut emptied.listed;
        (row.attempt, row.triggered_at, row.due_at) = (0, None, row.slot);
    }

    /// Creates a row or changes it.
    fn change_times(&mut self, change: &TimesChange, now: DateTime<Utc>) {
        let times = &change.times;
        match &change.seen {
            None => drop(self.rows.insert(times.name.clone(), Row::new(times, change.slot, now))),
            Some(_) => {
                let afresh = change.afresh;
                let found = self.rows.get_mut(&times.name).unwrap();
                if afresh && found.listed.due_at <= now {
                    found.hold(None);
                }
                let Row { listed: row, holder, .. } = found;
                (row.times, row.slot) = (times.clone(), change.slot);
                row.run_slot = row.run_slot.filter(|_| !change.run_ahead);
                let is_held = holder.is_some();
                row.due_at = match row.triggered_at {
                    _ if is_held || (row.attempt > 0 && !afresh) => row.due_at,
                    Some(_) if !afresh => now,
                    _ => change.slot,
                };
                if afresh && !is_held {
                    (row.attempt, row.triggered_at) = (0, None);
                }
            }
        }
        let row = &mut self.rows.get_mut(&times.name).unwrap().listed;
        row.known.clone_from(&change.known);
        row.gone_at = None;
    }

    pub fn trigger(&mut self, name: &Key, now: DateTime<Utc>) {
        let row = self.rows.get_mut(name).filter(|row| !row.listed.times.are_removed());
        let Some(Row { listed: row, holder, .. }) = row else { return };
        if row.triggered_at.is_none() || (holder.is_some() && row.triggered_at == row.run_slot) {
            row.triggered_at = Some(row.run_slot.map_or(now, |run| run.max(now)) + MICROSECOND);
        }
        if holder.is_none() {
            row.due_at = row.due_at.min(now);
        }
    }

    /// Claims a schedule if it is due, for a run that takes this long.
    pub fn claim(&mut self, times: &Times, takes: TimeDelta, fails: bool, now: DateTime<Utc>) -> Option<Run> {
        let row =
            self.rows.get_mut(&times.name).filter(|row| row.listed.due_at <= now && row.listed.times == *times)?;
        let schedule = Schedule::of(times)?;
        self.holders += 1;
        row.hold(Some(self.holders));
        let row = &mut row.listed;
        if row.attempt == 0 {
            row.run_slot = Some(row.triggered_at.unwrap_or(row.slot));
        }
        row.attempt += 1;
        (row.begin_time, row.due_at) = (Some(now), now + LEASE);
        let (slot, fails) = (row.run_slot?, fails && row.attempt < 3);
        let (end_at, renew_at) = (now + takes, now + LEASE / 3);
        Some(Run { times: times.clone(), schedule, slot, end_at, renew_at, fails, holder: self.holders })
    }

    pub fn renew(&mut self, run: &Run, now: DateTime<Utc>) {
        if let Some(row) = self.rows.get_mut(&run.times.name).filter(|row| row.holder == Some(run.holder)) {
            row.listed.due_at = now + LEASE;
        }
    }

    /// Ends a run. One that fails is made again.
    pub fn end(&mut self, run: &Run, now: DateTime<Utc>) {
        let row = self.rows.get_mut(&run.times.name).filter(|row| row.holder == Some(run.holder));
        let Some(row) = row else { return };
        row.hold(None);
        let row = &mut row.listed;
        if run.fails {
            row.due_at = now + RETRY;
            return;
        }
        let ticks = run.schedule.upcoming(run.slot).unwrap().next().is_some();
        let next = run.schedule.next(if ticks { run.slot } else { now.max(run.slot) });
        let is_own = row.run_slot == Some(row.slot) && row.times == run.times;
        let waits = row.triggered_at.is_some_and(|trigger| Some(trigger) != row.run_slot);
        row.slot = if is_own { next } else { row.slot };
        row.due_at = if waits { now } else { row.slot };
        row.triggered_at = row.triggered_at.filter(|_| waits);
        row.attempt = 0;
        self.done.entry(run.times.name.clone()).or_default().push(Done { slot: run.slot, at: now });
    }

    /// Returns the slots that were run for good more than once.
    pub fn repeated(&self, name: &Key) -> Vec<DateTime<Utc>> {
        let mut slots = HashSet::new();
        let done = self.done.get(name).map_or(&[][..], Vec::as_slice);
        done.iter().map(|done| done.slot).filter(|slot| !slots.insert(*slot)).collect()
    }
}
