//! What happens with a schedule's row: pure functions of the row, the schedule and the time.
//!
//! | what ended | slot | due | attempt |
//! |---|---|---|---|
//! | a success, or the last attempt failed | the next one | the slot | 0 |
//! | a failed attempt, with attempts left | stays | after the back-off | stays |
//! | nothing: the process died | stays | when the lease ends | one more, at the takeover |
//! | nothing: it was handed back | stays | at once | one more, at the takeover |
//! | a triggered run | stays | the slot | 0 |
//! | an operator stopped it | the next one | the slot | 0 |

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    rules::Status,
    schedule::{
        spec::{Schedule, Timing},
        terms::CatchUp,
    },
};

/// The most ticks that are counted one by one.
const COUNTED: u32 = 10_000;
/// How long after its tick a run may begin without being late: a poll comes a little later.
const PROMPT: TimeDelta = TimeDelta::seconds(1);
/// How often a tick is taken over from processes that died, in addition to its retries.
const TAKEOVERS: u32 = 10;

/// The row of a claimed schedule, as far as decisions need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The slot that was claimed: the schedule's own, or the time of a trigger.
    pub slot: DateTime<Utc>,
    /// The slot is the schedule's own, which may be moved. That of a trigger, or of times that were
    /// replaced while it was run, is run as it is.
    pub own: bool,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// How many earlier ticks the slot stands for already.
    pub missed: u32,
    /// How many earlier attempts have failed, or ended with the death of their process: those that
    /// were not handed back.
    pub spent: u32,
    /// When the previous attempt was begun, if its process died.
    pub lost_since: Option<DateTime<Utc>>,
    /// An operator has ordered that the ticks from the first of these on are skipped, up to the
    /// second.
    pub skip: Option<(DateTime<Utc>, DateTime<Utc>)>,
    /// An operator has stopped the tick.
    pub stopped: bool,
}

impl Row {
    /// Returns whether the ticks that are skipped are so by an order.
    pub fn is_skipped(&self) -> bool {
        self.own && self.skip.is_some_and(|(since, until)| since <= self.slot && self.slot <= until)
    }
}

/// What a claimed row is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The slot that was claimed is run.
    Run,
    /// The slot is moved to a later one, which is run.
    Move {
        to: DateTime<Utc>,
        /// How many earlier ticks it stands for.
        missed: u32,
        /// How many earlier ticks are skipped.
        skipped: u32,
    },
    /// All pending ticks are skipped, and nothing is run.
    Skip { next: DateTime<Utc>, skipped: u32 },
    /// The processes that ran the tick died too often: it ends as failed.
    GiveUp,
    /// An operator has stopped the tick: it ends as failed.
    Stop,
}

/// What follows from the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The tick is over. The slot is moved on to this one; that of a triggered run stays.
    Next(DateTime<Utc>),
    /// The tick is run again after this pause.
    Again(TimeDelta),
}

/// Returns how many earlier attempts there may be that were not handed back.
pub fn most_spent(schedule: &Schedule) -> u32 {
    schedule.retries.times + TAKEOVERS
}

/// Decides what to run of a row that was claimed at `now`.
pub fn start(schedule: &Schedule, row: &Row, now: DateTime<Utc>) -> Start {
    if row.stopped {
        return Start::Stop;
    }
    if row.spent > most_spent(schedule) {
        return Start::GiveUp;
    }
    if !row.own {
        return Start::Run;
    }
    match (row.attempt, row.lost_since) {
        (1, _) => choose(schedule, row, now),
        // The previous process may have died before it moved the slot. What it would have chosen
        // shows whether it had, unless it had another catch-up or grace.
        (2, Some(since)) if choose(schedule, row, since) != Start::Run => choose(schedule, row, now),
        // A tick that was begun is finished, however late it is.
        _ => Start::Run,
    }
}

/// Decides about a tick that was not begun. Those that an operator has skipped are left out
/// first.
fn choose(schedule: &Schedule, row: &Row, now: DateTime<Utc>) -> Start {
    let Some((since, until)) = row.skip else { return choose_due(schedule, row, now, now) };
    if !row.is_skipped() {
        return match choose_due(schedule, row, now, now) {
            // Those before the skipped ones are caught up on as if there were no others.
            Start::Move { to, .. } if (Row { slot: to, ..row.clone() }).is_skipped() => {
                choose_due(schedule, row, since - TimeDelta::microseconds(1), now)
            }
            start => start,
        };
    }
    let is_delay = matches!(schedule.timing, Timing::After(_));
    let end = if is_delay { now } else { until.min(now) };
    let passed = pending(schedule, row.slot, end, 1).before.saturating_add(1);
    let first = schedule.next(end.max(row.slot));
    if first > now || is_delay {
        return Start::Skip { next: first, skipped: passed };
    }
    match choose_due(schedule, &Row { slot: first, ..row.clone() }, now, now) {
        Start::Move { to, missed, skipped } => Start::Move { to, missed, skipped: skipped.saturating_add(passed) },
        Start::Skip { next, skipped } => Start::Skip { next, skipped: skipped.saturating_add(passed) },
        _ => Start::Move { to: first, missed: row.missed, skipped: passed },
    }
}

/// Decides, at `now`, about the ticks that are due until `end`.
fn choose_due(schedule: &Schedule, row: &Row, end: DateTime<Utc>, now: DateTime<Utc>) -> Start {
    let most = if let CatchUp::All(most) = schedule.catch_up { most } else { 1 };
    let Pending { first, last, before } = pending(schedule, row.slot, end, most);
    // The tick of a fixed delay is counted from the end of a run: there is no other one to wait
    // for.
    let skips = schedule.catch_up == CatchUp::Skip && !matches!(schedule.timing, Timing::After(_));
    if skips && now - last > schedule.grace.max(PROMPT) {
        return Start::Skip { next: schedule.next(end.max(last)), skipped: before.saturating_add(1) };
    }
    match (before, skips) {
        (0, _) => Start::Run,
        (skipped, true) => Start::Move { to: first, missed: 0, skipped },
        (missed, false) => Start::Move { to: first, missed: row.missed.saturating_add(missed), skipped: 0 },
    }
}

/// Decides what follows from a run that ended at `now`.
pub fn end(schedule: &Schedule, row: &Row, status: Status, now: DateTime<Utc>) -> Then {
    if status == Status::Failed && row.attempt <= schedule.retries.times && !row.stopped {
        return Then::Again(schedule.retries.pause(row.attempt));
    }
    // A slot is strictly later than the one before, whatever the clocks say.
    match schedule.timing {
        Timing::After(_) => Then::Next(schedule.next(now.max(row.slot))),
        _ => Then::Next(schedule.next(row.slot)),
    }
}

/// The ticks that are due: the last ones, up to a number, and how many there are before those.
#[derive(Debug, PartialEq, Eq)]
struct Pending {
    first: DateTime<Utc>,
    last: DateTime<Utc>,
    before: u32,
}

/// Finds the last `most` ticks in the time from `slot` to `now`. The slot itself is one of them.
fn pending(schedule: &Schedule, slot: DateTime<Utc>, now: DateTime<Utc>, most: u32) -> Pending {
    match schedule.timing {
        Timing::After(_) => Pending { first: slot, last: slot, before: 0 },
        Timing::Every(period) => {
            // The slot may be one of other times, from before they were changed.
            let (next, period) = (schedule.next(slot), period.num_milliseconds());
            let later = if next > now { 0 } else { (now - next).num_milliseconds() / period + 1 };
            let kept = later.min(i64::from(most) - 1);
            let at = |number| if number == 0 { slot } else { next + TimeDelta::milliseconds(period * (number - 1)) };
            let before = u32::try_from(later - kept).unwrap_or(u32::MAX);
            Pending { first: at(later - kept), last: at(later), before }
        }
        Timing::Cron { .. } => pending_of_cron(schedule, slot, now, most),
    }
}

fn pending_of_cron(schedule: &Schedule, slot: DateTime<Utc>, now: DateTime<Utc>, most: u32) -> Pending {
    let all = ticks(schedule, slot, now, COUNTED);
    let last_of = |ticks: &[DateTime<Utc>], before: u32| {
        let kept = ticks.len().min(most as usize);
        let tail = &ticks[ticks.len() - kept..];
        let before = before + u32::try_from(ticks.len() - kept).unwrap_or(u32::MAX);
        Pending { first: tail.first().copied().unwrap_or(slot), last: tail.last().copied().unwrap_or(slot), before }
    };
    if all.len() < COUNTED as usize {
        return last_of(&all, 0);
    }
    // Too many to count: the last ones are found in a time before `now` that has enough of them,
    // and not too many to count. It is longer than `short`, and shorter than `long`. Those among
    // them that were counted from the slot on count once.
    let (mut short, mut back, mut long) = (TimeDelta::zero(), TimeDelta::hours(1), None);
    loop {
        let since = (now - back).max(slot);
        let found = ticks(schedule, schedule.next(since), now, COUNTED);
        if found.len() == COUNTED as usize {
            long = Some(back);
        } else if found.len() >= most as usize || since == slot {
            let counted = found.iter().filter(|tick| Some(*tick) <= all.last()).count();
            return last_of(&found, COUNTED - u32::try_from(counted).unwrap_or(COUNTED));
        } else {
            short = back;
        }
        back = long.map_or(back * 2, |long| short + (long - short) / 2);
    }
}

/// Returns the ticks from `first` to `now`, at most `most`. There are none if `first` is later than
/// `now`.
fn ticks(schedule: &Schedule, first: DateTime<Utc>, now: DateTime<Utc>, most: u32) -> Vec<DateTime<Utc>> {
    let next = |tick: &DateTime<Utc>| Some(schedule.next(*tick));
    std::iter::successors(Some(first), next).take_while(|tick| *tick <= now).take(most as usize).collect()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
