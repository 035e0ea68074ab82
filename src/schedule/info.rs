//! What is displayed of schedules and of their runs.

use chrono::{DateTime, Utc};

use crate::{
    key::{Key, Token},
    schedule::{
        declarations::{are_removed, renamed_to},
        instances::is_ahead,
        spec::Schedule,
    },
    store::schedule::{ListedSchedule, Times},
};

/// What living instances declare of a schedule: how many of them which times, and the description
/// of the newest of them.
#[derive(Default)]
pub struct Said {
    pub times: Vec<(Times, u32)>,
    pub description: String,
}

/// What the note of a run that waits for a key begins with.
pub const WAITS_FOR: &str = "waits for the key ";

/// A schedule's row, for display. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ScheduleInfo {
    /// The schedule's name.
    pub name: String,
    /// The [description](crate::Schedule::description) that the newest living instance declares.
    pub description: String,
    /// Its times: `cron 30 2 * * *`, `every 30s`, `after 600s`; with a
    /// [jitter](crate::Schedule::jitter), how much later its ticks come: `cron 30 2 * * * +71s`.
    pub times: String,
    /// The time zone of a cron pattern.
    pub zone: String,
    /// The tick that is next, or that is run.
    pub slot: DateTime<Utc>,
    /// When an instance polls the row next: the slot, the next attempt, or the end of the lease.
    pub due: DateTime<Utc>,
    /// Whether the schedule is paused.
    pub paused: bool,
    /// When the pause ends, if it ends by itself.
    pub paused_until: Option<DateTime<Utc>>,
    /// Up to which tick an operator has [skipped](crate::Schedules::skip) the schedule, if it is
    /// still to come.
    pub skipped_until: Option<DateTime<Utc>>,
    /// Whether an operator has [stopped](crate::Schedules::stop) the tick that was begun, which has
    /// not ended yet.
    pub stopping: bool,
    /// The [note](crate::Tick::note) of the run that is under way.
    pub note: Option<String>,
    /// When a run was triggered that has not ended yet.
    pub triggered: Option<DateTime<Utc>>,
    /// Whether a run is under way. The end of its lease is [`due`](Self::due).
    pub running: bool,
    /// When the lease of a run ended that has no recorded end: its instance died, or no longer
    /// reaches the database. The next instance that polls takes the run over.
    pub lost_since: Option<DateTime<Utc>>,
    /// The slot of the run that is under way or that failed and is run again.
    pub run_slot: Option<DateTime<Utc>>,
    /// The number of the attempt at that slot; 0 if the last tick has ended.
    pub attempt: u32,
    /// How many earlier ticks that slot stands for.
    pub missed: u32,
    /// The label of the instance that ran the schedule last.
    pub by: String,
    /// When that run was begun.
    pub since: Option<DateTime<Utc>>,
    /// The highest token assigned so far.
    pub token: Token,
    /// When the times took effect, if that is known.
    pub times_since: Option<DateTime<Utc>>,
    /// Since when no instance has the schedule, although instances live that had others of the same
    /// application: it was removed from the application, or renamed.
    pub gone_since: Option<DateTime<Utc>>,
    /// Whether the slot is so late that only a clock of the database that was ahead can have led to
    /// it. The next instance with these times puts it back, within a minute. `false` while the
    /// clock of the database is more than an hour behind that of this machine.
    pub clock_was_ahead: bool,
    /// How many instances that are alive declare these times, and run the schedule.
    pub instances: u32,
    /// How many instances that are alive declare other times, and do not run it.
    pub instances_with_other_times: u32,
    /// When the row was read.
    pub now: DateTime<Utc>,
}

impl ScheduleInfo {
    /// Returns whether the schedule was removed from the application: by a
    /// [declaration](crate::Schedules::removed), or because no instance has it any more.
    pub fn is_removed(&self) -> bool {
        self.gone_since.is_some() || are_removed(&self.times)
    }

    /// Returns the name under which the schedule goes on, by a
    /// [declaration](crate::Schedule::renamed_from).
    pub fn renamed_to(&self) -> Option<&str> {
        renamed_to(&self.times)
    }

    /// Returns a schedule with the times of the row, for its [ticks](Schedule::upcoming). `None` if
    /// they are of another version of rowlock, or removed.
    pub fn schedule(&self) -> Option<Schedule> {
        let (spec, zone) = (self.times.clone(), self.zone.clone());
        Schedule::of(&Times { name: Key::new(&self.name).ok()?, spec, zone })
    }

    /// Returns the key that the run under way waits for, if it waits for one
    /// ([`Schedule::exclusive_with`](crate::Schedule::exclusive_with)).
    pub fn waits_for(&self) -> Option<&str> {
        self.note.as_deref()?.strip_prefix(WAITS_FOR)
    }

    pub(super) fn new(listed: ListedSchedule, said: &Said) -> Self {
        let count = |same: bool| {
            let of = said.times.iter().filter(|(times, _)| (*times == listed.times) == same);
            of.fold(0, |sum: u32, (_, count)| sum.saturating_add(*count))
        };
        let (instances, instances_with_other_times) = (count(true), count(false));
        // The database's clock decides, as it does for the claim that takes the run over.
        let is_over = listed.due_at <= listed.now;
        let clock_was_ahead =
            Schedule::of(&listed.times).is_some_and(|schedule| is_ahead(&schedule, &listed, listed.now, Utc::now()));
        // An order for one tick may be for a later one than the next, after a deploy. One that was
        // given during a run begins after its slot.
        let skips = |(since, until)| (since <= listed.slot || listed.attempt > 0) && until >= listed.slot;
        Self {
            name: listed.times.name.as_str().to_owned(),
            description: said.description.clone(),
            times: listed.times.spec,
            zone: listed.times.zone,
            slot: listed.slot,
            due: listed.due_at,
            paused: listed.paused,
            paused_until: listed.paused_until.filter(|_| listed.paused),
            skipped_until: listed.skip.filter(|skip| skips(*skip)).map(|(_, until)| until),
            stopping: listed.stopped,
            note: Some(listed.note).filter(|note| listed.running && !note.is_empty()),
            triggered: listed.triggered_at,
            running: listed.running && !is_over,
            lost_since: Some(listed.due_at).filter(|_| listed.running && is_over),
            run_slot: listed.run_slot.filter(|_| listed.attempt > 0),
            attempt: listed.attempt,
            missed: listed.missed,
            by: listed.label,
            since: listed.begin_time,
            token: listed.token,
            times_since: listed.times_at,
            gone_since: listed.gone_at,
            clock_was_ahead,
            instances,
            instances_with_other_times,
            now: listed.now,
        }
    }
}
