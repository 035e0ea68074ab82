//! One look at the database: the rows of locks, the queues, the schedules, their runs,
//! and what operators have changed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use chrono::{DateTime, TimeDelta, Utc};
use rowlock::admin::{ChangeInfo, InstanceInfo, LockInfo, LockState, RunInfo, RunStatus, ScheduleInfo};

use crate::keys::names::{Kind, kind, queue};

/// How long runs are kept, so that a page can show a week of them.
pub const WEEK: TimeDelta = TimeDelta::days(7);
/// How many runs are kept, beside those of [`EACH`].
pub const MAX_RUNS: u32 = 20_000;
/// How many runs of each schedule are kept, however old they are.
pub const EACH: u32 = 30;
/// How many changes of operators are kept.
pub const CHANGES: u32 = 200;

/// What a look reads: each part is a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Locks,
    Queues,
    Schedules,
    Runs,
    Instances,
    Changes,
}

/// A part that could not be read, and why.
#[derive(Clone, Debug)]
pub struct Unread {
    pub part: Part,
    pub why: String,
    /// Whether the cause may pass by itself.
    pub passes: bool,
}

#[derive(Debug, Default)]
pub struct Snapshot {
    /// When it was read, by the database's clock where a row tells it.
    pub now: DateTime<Utc>,
    /// In the order of their keys.
    pub locks: Vec<LockInfo>,
    /// How many tickets each key has.
    pub waiting: HashMap<String, u64>,
    /// In the order of their names.
    pub jobs: Vec<ScheduleInfo>,
    pub runs: Arc<Runs>,
    /// In the order of their labels.
    pub instances: Vec<InstanceInfo>,
    /// The last changes of operators, the newest first.
    pub changes: Vec<ChangeInfo>,
    /// What could not be read. The rest was.
    pub unread: Vec<Unread>,
}

impl Kind<'_> {
    pub fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Permit { .. } => "permit",
            Self::Reader { .. } => "reader",
        }
    }
}

/// How many permits of a name are in use, and how many readers it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    pub permits: usize,
    pub readers: usize,
}

impl Snapshot {
    pub fn lacks(&self, part: Part) -> bool {
        self.unread.iter().any(|unread| unread.part == part)
    }

    pub fn lock(&self, key: &str) -> Option<&LockInfo> {
        self.locks.binary_search_by(|lock| lock.key.as_str().cmp(key)).ok().and_then(|index| self.locks.get(index))
    }

    pub fn job(&self, name: &str) -> Option<&ScheduleInfo> {
        self.jobs.iter().find(|job| job.name == name)
    }

    /// Returns how many wait in the queue of a key, if that is known.
    pub fn waiting(&self, key: &str) -> Option<u64> {
        let waiting = self.waiting.get(&*queue(key)).copied().unwrap_or_default();
        (!self.lacks(Part::Queues)).then_some(waiting)
    }

    /// Returns how many ticks of a job were not run in time in the last week. Each attempt of a
    /// slot names all the ticks that the slot stands for.
    pub fn missed_in_a_week(&self, job: &str) -> u64 {
        let mut by_slot: BTreeMap<DateTime<Utc>, u32> = BTreeMap::new();
        for run in self.runs.of(job).filter(|run| run.ended > self.now - WEEK) {
            let missed = by_slot.entry(run.slot).or_default();
            *missed = run.missed.max(*missed);
        }
        by_slot.into_values().map(u64::from).sum()
    }

    /// Counts the permits and readers of each name that has any.
    pub fn in_use(&self) -> BTreeMap<&str, InUse> {
        let mut names: BTreeMap<&str, InUse> = BTreeMap::new();
        for lock in self.locks.iter().filter(|lock| lock.state == LockState::Held) {
            match kind(&lock.key) {
                Kind::Permit { of } => names.entry(of).or_default().permits += 1,
                Kind::Reader { of } => names.entry(of).or_default().readers += 1,
                Kind::Lock => {}
            }
        }
        names
    }
}

/// The known runs of all schedules: those of a week, and the last ones of each schedule.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    by_job: BTreeMap<String, BTreeMap<(DateTime<Utc>, u32), RunInfo>>,
}

impl Runs {
    /// Returns the runs of a schedule, the latest slot first.
    pub fn of(&self, job: &str) -> impl Iterator<Item = &RunInfo> {
        self.by_job.get(job).into_iter().flat_map(|runs| runs.values().rev())
    }

    /// Returns the run of the latest slot: of a tick that was missed, none was begun.
    pub fn last(&self, job: &str) -> Option<&RunInfo> {
        self.of(job).find(|run| run.status != RunStatus::Missed)
    }

    /// Returns whether the last run failed or was lost.
    pub fn last_failed(&self, job: &str) -> bool {
        self.last(job).is_some_and(|run| run.status != RunStatus::Succeeded)
    }

    pub fn last_success(&self, job: &str) -> Option<DateTime<Utc>> {
        self.of(job).filter(|run| run.status == RunStatus::Succeeded).map(|run| run.ended).max()
    }

    /// Returns when the run that ended last did so.
    pub fn newest(&self) -> Option<DateTime<Utc>> {
        self.by_job.values().flat_map(|runs| runs.values().map(|run| run.ended)).max()
    }

    /// Adds runs. Returns whether one of them is new.
    pub fn add(&mut self, runs: Vec<RunInfo>) -> bool {
        let mut is_new = false;
        for run in runs {
            let of_job = self.by_job.entry(run.name.clone()).or_default();
            is_new |= of_job.insert((run.slot, run.attempt), run).is_none();
        }
        is_new
    }

    /// Drops what is older than a week or beyond [`MAX_RUNS`], except the last [`EACH`] of each
    /// schedule and its last success.
    pub fn prune(&mut self, now: DateTime<Utc>) {
        let mut ends: Vec<_> =
            self.by_job.values().flat_map(|runs| runs.values().map(|run| Reverse(run.ended))).collect();
        ends.sort_unstable();
        let beyond = ends.get(MAX_RUNS as usize).map_or(DateTime::UNIX_EPOCH, |end| end.0);
        let oldest = beyond.max(now - WEEK);
        for runs in self.by_job.values_mut() {
            let success = runs.values().rev().find(|run| run.status == RunStatus::Succeeded).map(|run| run.slot);
            let last = runs.keys().rev().nth(EACH as usize - 1).map(|key| key.0);
            runs.retain(|(slot, _), run| {
                run.ended > oldest || last.is_none_or(|last| *slot >= last) || Some(*slot) == success
            });
        }
        self.by_job.retain(|_, runs| !runs.is_empty());
    }
}
