//! Whether an instance registers its times over a row: a pure function of the row, the schedule and
//! the time.
//!
//! | row | at the start | while the instance runs |
//! |---|---|---|
//! | none | registered | registered |
//! | of a lower version | replaced | replaced |
//! | of a higher version | left alone | left alone |
//! | the same times | left alone | left alone |
//! | other times, in use | replaced | left alone |
//! | other times, overdue by more than a lease | replaced | replaced |
//! | other times, paused | replaced | left alone |

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    schedule::spec::{AFTER, Schedule, Timing},
    store::schedule::{ListedSchedule, Registration, is_trigger},
};

/// Decides what an instance of this version registers. `overdue`: the instance runs already, and
/// replaces other times of its own version only if they are overdue by more than this.
pub fn registration(
    schedule: &Schedule,
    version: i64,
    row: Option<&ListedSchedule>,
    overdue: Option<TimeDelta>,
    now: DateTime<Utc>,
) -> Option<Registration> {
    let run_slot = row.and_then(|row| row.run_slot);
    let of = |slot| Some(Registration { version, slot, overdue, run_slot });
    let Some(row) = row else { return of(schedule.first(now)) };
    if row.version < version {
        return of(first(schedule, row, now));
    }
    if row.version > version || row.times == schedule.times() {
        return None;
    }
    match overdue {
        None => of(first(schedule, row, now)),
        Some(overdue) if !row.paused && now - row.due_at > overdue => of(pending(schedule, row, now)),
        Some(_) => None,
    }
}

/// Returns the first slot from now on. The server's clock may have been set back since the last
/// run. A fixed delay that is under way goes on, for the new delay at most.
fn first(schedule: &Schedule, row: &ListedSchedule, now: DateTime<Utc>) -> DateTime<Utc> {
    let first = match schedule.timing {
        Timing::After(_) if row.times.spec.starts_with(AFTER) => {
            row.slot.clamp(schedule.first(now), schedule.next(now))
        }
        _ => schedule.first(now),
    };
    last_tick(row).filter(|last| *last >= first).map_or(first, |last| schedule.next(last))
}

/// Returns the last tick that was run, or begun.
fn last_tick(row: &ListedSchedule) -> Option<DateTime<Utc>> {
    row.run_slot.filter(|run| !is_trigger(*run))
}

/// Returns the first slot since nothing ran the schedule, so that no tick is left out. It is later
/// than the last one that was run.
fn pending(schedule: &Schedule, row: &ListedSchedule, now: DateTime<Utc>) -> DateTime<Utc> {
    if let Timing::After(_) = schedule.timing {
        return first(schedule, row, now);
    }
    let before = row.slot - TimeDelta::milliseconds(1);
    schedule.next(last_tick(row).map_or(before, |last| last.max(before)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::key::Token;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn every(seconds: u64) -> Schedule {
        Schedule::every("k", Duration::from_secs(seconds)).unwrap()
    }

    /// The row of a schedule whose slot is at 600 s.
    fn row(schedule: &Schedule, version: i64) -> ListedSchedule {
        ListedSchedule {
            times: schedule.times(),
            version,
            slot: at(600),
            due_at: at(600),
            paused: false,
            triggered_at: None,
            run_slot: None,
            attempt: 0,
            missed: 0,
            running: false,
            token: Token::new(0),
            label: String::new(),
            begin_time: None,
            now: at(0),
        }
    }

    #[test]
    fn every_cell_of_the_table() {
        let (old, new, lease) = (every(600), every(60), Some(TimeDelta::seconds(30)));
        let slot = |version, row: Option<&ListedSchedule>, overdue, now| {
            registration(&new, version, row, overdue, at(now)).map(|registration| registration.slot.timestamp())
        };
        for overdue in [None, lease] {
            assert_eq!(slot(0, None, overdue, 601), Some(660), "no row");
            assert_eq!(slot(2, Some(&row(&old, 1)), overdue, 601), Some(660), "a lower version");
            assert_eq!(slot(2, Some(&row(&new, 1)), overdue, 601), Some(660), "to raise the version");
            assert_eq!(slot(1, Some(&row(&old, 2)), overdue, 9_999), None, "a higher version");
            assert_eq!(slot(1, Some(&row(&new, 1)), overdue, 9_999), None, "the same times");
        }
        assert_eq!(slot(1, Some(&row(&old, 1)), None, 601), Some(660), "at the start");
        assert_eq!(slot(1, Some(&row(&old, 1)), lease, 630), None, "in use");
        assert_eq!(slot(1, Some(&row(&old, 1)), lease, 631), Some(600), "overdue: no tick is left out");
        let paused = ListedSchedule { paused: true, ..row(&old, 1) };
        assert_eq!(slot(1, Some(&paused), lease, 9_999), None, "paused");
        let begun = ListedSchedule { run_slot: Some(at(600)), attempt: 1, ..row(&old, 1) };
        assert_eq!(slot(1, Some(&begun), lease, 9_999), Some(660), "later than what was run");
        let triggered = at(9_000) + TimeDelta::microseconds(1);
        let triggered = ListedSchedule { run_slot: Some(triggered), ..row(&old, 1) };
        assert_eq!(slot(1, Some(&triggered), lease, 9_999), Some(600), "a trigger is no tick");
        for version in [1, 2] {
            assert_eq!(slot(version, Some(&begun), None, 300), Some(660), "the clock was set back");
        }
    }

    #[test]
    fn a_fixed_delay_that_is_under_way_goes_on() {
        let after = |seconds| Schedule::after("k", Duration::from_secs(seconds)).unwrap();
        let slot = |old: &Schedule, new: &Schedule, now| {
            registration(new, 0, Some(&row(old, 0)), None, at(now)).map(|registration| registration.slot.timestamp())
        };
        assert_eq!(slot(&after(500), &after(550), 200), Some(600), "a longer one");
        assert_eq!(slot(&after(500), &after(100), 200), Some(300), "a shorter one");
        assert_eq!(slot(&after(500), &after(550), 700), Some(700), "it was due");
        assert_eq!(slot(&every(500), &after(550), 200), Some(200), "it was no delay");
        let begun = ListedSchedule { run_slot: Some(at(600)), attempt: 1, ..row(&after(500), 0) };
        let next = registration(&after(100), 0, Some(&begun), None, at(600)).unwrap().slot;
        assert_eq!(next, at(700), "later than what was run");
    }
}
