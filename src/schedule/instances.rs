//! Which times of a schedule are in effect if instances declare different ones: pure functions of
//! the row, of what the instances declare, and of the time.
//!
//! The newest times that a living instance declares are in effect, and only instances that declare
//! them run the schedule. Times are ordered by when they first took effect: the row remembers them.
//! An instance that restarts brings no new times, so it takes nothing back. What was due stays due.
//!
//! | row | instances declare | this one | then |
//! |---|---|---|---|
//! | none | | | it is created, unless it is declared as removed |
//! | gone for more than a week | | declares it | it begins afresh, unless it is removed already |
//! | gone for less | | has its times | it is back, with its slot |
//! | its times | | | nothing, or its slot is corrected if the clock was ahead and is not behind now |
//! | other times | no other times than its own | | its times apply |
//! | other times | other times | has beaten too rarely | it waits |
//! | other times | other times, and its own are the newest that count | judges | its times apply |
//! | other times | newer times | | nothing |

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::Key,
    schedule::{
        declarations::{REMOVED, RENAMED, Word},
        spec::{AFTER, Schedule, Timing},
        times::NEVER,
    },
    store::{
        instances::TimesChange,
        schedule::{ListedSchedule, Times, is_trigger},
    },
};

/// From which beat on an instance takes times from others: after an outage all have beaten by then.
/// Its own declaration counts from its second beat on (see the statements), so that a process that
/// crashes over and over changes nothing.
pub const JUDGES: u32 = 4;
/// How many times a row remembers.
const KNOWN: usize = 16;
/// A schedule that was gone for longer begins afresh. A service that was down for a while and was
/// taken for one that lives on without the schedule catches up on its ticks.
const FRESH: TimeDelta = TimeDelta::days(7);
/// A slot that only a clock that was ahead by more than this can have led to is corrected.
pub const AHEAD: TimeDelta = TimeDelta::hours(1);

/// The instance that decides.
#[derive(Clone, Copy, Debug)]
pub struct Judge {
    /// It has beaten often enough to take times from others.
    pub judges: bool,
    /// It stands for all processes of one crontab, each of which lives for one tick.
    pub calls: bool,
    /// How long an instance counts as alive without a beat.
    pub lives: TimeDelta,
    /// What this machine's clock shows. A database's clock that is far behind was stepped back: a
    /// slot is not ahead then, and what was run is not to be forgotten.
    pub here: DateTime<Utc>,
}

/// What an instance does about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The row is right, or others have newer times.
    Leave,
    /// It may be changed later.
    Wait,
    Create,
    /// The times of the instance apply from now on.
    Apply,
    /// As above, without what was due before.
    Fresh,
    /// The schedule is no longer gone.
    Return,
    /// The clock was ahead: the slot is corrected.
    PutBack,
}

/// Decides what an instance that declares `mine` does about a row.
pub fn decide(
    row: Option<&ListedSchedule>,
    mine: &Declared,
    judge: Judge,
    word: &Word,
    now: DateTime<Utc>,
) -> Decision {
    // A removal that came first would lose to older instances, whose times the row never had.
    let Some(row) = row else { return if mine.schedule.is_none() { Decision::Leave } else { Decision::Create } };
    let is_removed = row.times.are_removed() && mine.schedule.is_none();
    if is_long_gone(row, now) && !is_removed {
        return Decision::Fresh;
    }
    if row.times == mine.times {
        return if row.gone_at.is_some() {
            Decision::Return
        } else if mine.schedule.as_ref().is_some_and(|schedule| is_ahead(schedule, row, now, judge.here)) {
            Decision::PutBack
        } else {
            Decision::Leave
        };
    }
    let (known, mark) = (known(row), mine.times.mark());
    // A row remembers what is declared, so there is no room for more.
    let is_full = known.len() >= KNOWN && known.iter().all(|mark| word.since.contains_key(mark));
    if !word.contests(&mine.times) || (judge.calls && !known.contains(&mark)) {
        return Decision::Apply;
    }
    if !judge.judges && !judge.calls {
        return Decision::Wait;
    }
    // Those that never took effect are newer than all others.
    let rank = |mark: &u64| known.iter().position(|other| other == mark).map_or(0, |place| place + 1);
    // An instance that begins again with the times in effect keeps them.
    let in_effect = row.times.mark();
    let kept = word.alive.get(&in_effect);
    let mut counting = word.counts.iter().chain(kept).chain(judge.calls.then_some(&mark));
    let is_newest = counting.clone().any(|other| *other == mark)
        && counting.all(|other| *other == mark || rank(other) >= rank(&mark));
    if is_newest && !(rank(&mark) == 0 && is_full) { Decision::Apply } else { Decision::Leave }
}

/// Returns whether a schedule that comes back begins afresh.
pub fn is_long_gone(row: &ListedSchedule, now: DateTime<Utc>) -> bool {
    row.gone_at.is_some_and(|gone_at| now - gone_at > FRESH)
}

/// Returns the hashes of the times that a row has had, the newest first.
fn known(row: &ListedSchedule) -> Vec<u64> {
    let known: Vec<u64> = row.known.split(' ').filter_map(|mark| u64::from_str_radix(mark, 16).ok()).collect();
    if known.is_empty() { vec![row.times.mark()] } else { known }
}

/// Returns whether these times have been in effect, as far as the row remembers.
pub fn were_in_effect(times: &Times, row: &ListedSchedule) -> bool {
    known(row).contains(&times.mark())
}

/// Returns what the row knows once these times apply. What an instance declares is not forgotten.
fn known_with(row: Option<&ListedSchedule>, times: &Times, word: &Word) -> String {
    let (mut known, mark) = (row.map(known).unwrap_or_default(), times.mark());
    if !known.contains(&mark) {
        known.insert(0, mark);
    }
    while known.len() > KNOWN
        && let Some(place) = known.iter().rposition(|other| *other != mark && !word.since.contains_key(other))
    {
        known.remove(place);
    }
    known.truncate(KNOWN);
    known.iter().map(|mark| format!("{mark:016x}")).collect::<Vec<_>>().join(" ")
}

/// Returns whether no clock that was right, within [`AHEAD`], could have led to the slot of a row
/// with the times of this schedule, or to the time at which it is due. A clock that is behind that
/// of this machine shows nothing. A tick that ran before its shift was changed is followed by the
/// next one, which may be later by that.
pub fn is_ahead(schedule: &Schedule, row: &ListedSchedule, now: DateTime<Utc>, here: DateTime<Utc>) -> bool {
    let is_due_late = row.attempt == 0 && row.due_at > row.slot.max(now + AHEAD);
    here - now <= AHEAD && !row.running && (is_due_late || row.slot > schedule.next(now + AHEAD + schedule.shift))
}

/// Returns whether a run is under way whose lease has not ended.
pub fn is_live(row: &ListedSchedule, now: DateTime<Utc>) -> bool {
    row.running && row.due_at > now
}

/// What an instance declares: a schedule that it runs, or one that is removed.
#[derive(Clone, Debug)]
pub struct Declared {
    pub times: Times,
    /// `None` for a schedule that is removed.
    pub schedule: Option<Schedule>,
    /// The schedule that takes the place of one that is removed.
    pub heir: Option<Box<Declared>>,
}

impl Declared {
    pub fn new(schedule: &Schedule) -> Self {
        Self { times: schedule.times(), schedule: Some(schedule.clone()), heir: None }
    }

    pub fn removed(name: Key) -> Self {
        Self { times: Times { name, spec: REMOVED.to_owned(), zone: "UTC".to_owned() }, schedule: None, heir: None }
    }

    pub fn description(&self) -> &str {
        self.schedule.as_ref().map_or("", |schedule| schedule.description.as_str())
    }

    /// Returns all that an instance with this schedule declares.
    pub fn all_of(schedule: &Schedule) -> Vec<Self> {
        let new = Self::new(schedule);
        let olds = schedule.renamed_from.iter().map(|old| Self::renamed(old.clone(), &new));
        olds.chain([new.clone()]).collect()
    }

    /// A schedule whose place another one takes.
    pub fn renamed(name: Key, heir: &Self) -> Self {
        let spec = format!("{RENAMED}{}", heir.times.name.as_str());
        let times = Times { name, spec, zone: "UTC".to_owned() };
        Self { times, schedule: None, heir: Some(Box::new(heir.clone())) }
    }

    /// Returns what becomes of the heir of a row that is removed now. `None` if it is in effect,
    /// and ran later than the row: it goes on with what it has. A tick that was begun and has not
    /// ended passes to it beside the slot.
    pub fn inheritance(
        &self,
        row: &ListedSchedule,
        its: Option<&ListedSchedule>,
        (judge, word): (Judge, &Word),
        now: DateTime<Utc>,
    ) -> Option<TimesChange> {
        let heir = self.heir.as_ref()?;
        let in_effect = its.filter(|its| !its.times.are_removed());
        if in_effect.is_some_and(|its| its.begin_time > row.begin_time) {
            return None;
        }
        let has_its_times = (&row.times.spec, &row.times.zone) == (&heir.times.spec, &heir.times.zone);
        let slot = match is_long_gone(row, now) {
            true => heir.first(now),
            false if has_its_times => row.slot,
            false => heir.slot_after(row, judge, word, now),
        };
        // The heir may have run ticks beside the other one.
        let ran = in_effect.and_then(last_begun).filter(|ran| *ran >= slot);
        let slot = ran.zip(heir.schedule.as_ref()).map_or(slot, |(ran, heir)| heir.next(ran));
        let change = heir.change_to(slot, Decision::Apply, its, word, now);
        // The attempts at a trigger of its own end. Another run of it would have their numbers.
        let is_tried = its.is_some_and(|its| its.attempt > 0 && its.triggered_at == its.run_slot);
        Some(TimesChange { afresh: change.afresh || is_tried, ..change })
    }

    fn first(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        self.schedule.as_ref().map_or(NEVER, |schedule| schedule.first(now))
    }

    /// Returns the change that a decision leads to.
    pub fn change(
        &self,
        decision: Decision,
        row: Option<&ListedSchedule>,
        judge: Judge,
        word: &Word,
        now: DateTime<Utc>,
    ) -> Option<TimesChange> {
        let slot = match (decision, row) {
            (Decision::Create | Decision::Fresh, _) => self.first(now),
            (Decision::Apply, Some(row)) => self.slot_after(row, judge, word, now),
            (Decision::Return, Some(row)) => row.slot,
            // A tick that is due is not skipped.
            (Decision::PutBack, Some(row)) => {
                self.schedule.as_ref().map_or(NEVER, |schedule| schedule.next(now).min(row.slot))
            }
            _ => return None,
        };
        Some(self.change_to(slot, decision, row, word, now))
    }

    /// Returns the change that moves a row to a slot, or creates it there.
    pub fn change_to(
        &self,
        slot: DateTime<Utc>,
        decision: Decision,
        row: Option<&ListedSchedule>,
        word: &Word,
        now: DateTime<Utc>,
    ) -> TimesChange {
        let is_ahead = row.and_then(|row| row.run_slot).is_some_and(|run_slot| run_slot > now);
        let run_ahead = is_ahead && matches!(decision, Decision::PutBack | Decision::Fresh);
        // The next attempt at a tick that has not come yet would be as far ahead.
        let is_tried = row.is_some_and(|row| row.attempt > 0);
        // What was left of it when it was removed is over.
        let was_removed = row.is_some_and(|row| row.times.are_removed());
        TimesChange {
            times: self.times.clone(),
            seen: row.cloned().map(Box::new),
            slot,
            afresh: decision == Decision::Fresh || (run_ahead && is_tried) || was_removed,
            run_ahead,
            forgets_after: run_ahead.then_some(now),
            known: known_with(row, &self.times, word),
            new_times: row.is_none_or(|row| row.times != self.times),
        }
    }

    /// Returns the slot of a row that gets these times. What was due stays due; behind a run that
    /// was begun, that is the tick after it.
    fn slot_after(&self, row: &ListedSchedule, judge: Judge, word: &Word, now: DateTime<Utc>) -> DateTime<Utc> {
        let Some(schedule) = &self.schedule else { return NEVER };
        let last = last_begun(row);
        let begun = (row.running || row.attempt > 0) && last == Some(row.slot);
        let old = Schedule::of(&row.times).filter(|old| !matches!(old.timing, Timing::After(_)));
        let due = if begun { old.as_ref().map(|old| old.next(row.slot)) } else { Some(row.slot) };
        let later = old.as_ref().and_then(|old| schedule.later_than(old)).filter(|later| !later.is_zero());
        if let (Some(next), Some(later)) = (due, later) {
            return moved(next, later, (last, now), schedule);
        }
        if let Some(due) = due.filter(|due| *due <= now) {
            return due;
        }
        if let Timing::After(_) = schedule.timing {
            let under_way = !begun && row.times.spec.starts_with(AFTER);
            return match last {
                // A delay that is under way goes on, for the new delay at most.
                _ if under_way => row.slot.clamp(schedule.first(now), schedule.next(now)),
                Some(last) => schedule.next(last).max(schedule.first(now)),
                None => schedule.first(now),
            };
        }
        let floor = now - judge.lives * 2;
        let since = word.since.get(&self.times.mark()).filter(|_| !judge.calls);
        let floor = since.map_or(floor, |since| floor.max((*since).min(now)));
        // The ticks from before a trigger may have run.
        let floor = row.run_slot.map_or(floor, |run| run.max(floor));
        // The slot is still to come. The old ticks before it have ended, also if a triggered run
        // came after them or they were skipped, of which the row knows nothing.
        let tick_after = |tick: &DateTime<Utc>| old.as_ref().map(|old| old.next(*tick));
        let ended = std::iter::successors(Some(floor), tick_after).take_while(|tick| *tick <= now);
        schedule.next(ended.last().unwrap_or(floor))
    }
}

/// Returns the last tick that was begun. A claim that was undone has begun none.
fn last_begun(row: &ListedSchedule) -> Option<DateTime<Utc>> {
    let is_undone = !row.running && row.attempt == 0 && row.run_slot == Some(row.slot);
    row.run_slot.filter(|run| !is_undone && !is_trigger(*run))
}

/// Returns where another jitter moves a tick. One that would be due for longer keeps its time, and
/// none comes before the last run.
fn moved(
    tick: DateTime<Utc>,
    later: TimeDelta,
    (last, now): (Option<DateTime<Utc>>, DateTime<Utc>),
    schedule: &Schedule,
) -> DateTime<Utc> {
    let moved = tick + later;
    let slot = if later < TimeDelta::zero() && moved <= now { tick } else { moved };
    last.filter(|last| slot <= *last).map_or(slot, |last| schedule.next(last))
}

#[cfg(test)]
#[path = "instances_tests.rs"]
mod tests;
