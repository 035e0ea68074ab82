//! The runs in the history of schedules, as operators see and select them.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    invalid::Faults,
    key::{Key, Token},
    retry,
    store::{Reply, stored_row::StoredRow},
};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum RunStatus {
    /// The work succeeded: `S`.
    Succeeded,
    /// The work failed: `F`.
    Failed,
    /// The process died, or the run was handed back because its work was stopped: `L`.
    Lost,
    /// Ticks that were skipped: `M`.
    Missed,
}

/// A row of the history: one attempt at one tick. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RunInfo {
    /// The schedule's name.
    pub name: String,
    /// The tick, or the time of a trigger. Of ticks that were skipped, the first.
    pub slot: DateTime<Utc>,
    /// The number of the attempt, from 1; 0 for ticks that were skipped.
    pub attempt: u32,
    /// How the run ended.
    pub status: RunStatus,
    /// How many earlier ticks the run stands for; of [`RunStatus::Missed`], how many were passed
    /// over. Of a cron pattern, 10,000 and more means at least as many.
    pub missed: u32,
    /// The error of the work, or why the run was lost.
    pub error: Option<String>,
    /// The label of the instance.
    pub by: String,
    /// When the run was begun.
    pub began: DateTime<Utc>,
    /// When the run ended; of a lost run, when it was taken over or handed back.
    pub ended: DateTime<Utc>,
    /// The fencing token of the run.
    pub token: Token,
}

impl RunInfo {
    /// What the history is ordered by, and what no two runs have in common.
    pub fn order(&self) -> (&str, DateTime<Utc>, u32) {
        (&self.name, self.slot, self.attempt)
    }
}

/// Reads a row of the history.
pub fn run(row: &impl StoredRow) -> Reply<RunInfo> {
    Ok(RunInfo {
        name: row.text("name")?,
        slot: row.time("slot")?,
        attempt: row.count("attempt")?,
        token: Token::new(row.number("token")?),
        by: row.text("client_ip")?,
        began: row.time("begin_time")?,
        ended: row.time("end_time")?,
        status: match row.text("status")?.as_str() {
            "S" => RunStatus::Succeeded,
            "L" => RunStatus::Lost,
            "M" => RunStatus::Missed,
            _ => RunStatus::Failed,
        },
        missed: row.count("missed")?,
        error: row.text_or_null("error")?,
    })
}

/// Selects the runs that [`Schedules::runs`](crate::Schedules::runs) returns: the last hundred of
/// all schedules, by default.
///
/// ```
/// use std::time::Duration;
///
/// use rowlock::admin::RunOptions;
///
/// let day = Duration::from_secs(24 * 60 * 60);
/// let bad = RunOptions::default().of("nightly-report").unsuccessful().within(day);
/// ```
#[derive(Clone, Debug)]
pub struct RunOptions {
    pub(crate) name: Option<Key>,
    pub(crate) unsuccessful: bool,
    /// How long ago a run ended at most.
    pub(crate) within: Option<TimeDelta>,
    pub(crate) limit: u32,
    pub(crate) faults: Faults,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { name: None, unsuccessful: false, within: None, limit: 100, faults: Faults::default() }
    }
}

impl RunOptions {
    /// Selects only the runs of this schedule.
    pub fn of(mut self, name: &str) -> Self {
        self.name = Some(Key::checked(name, &mut self.faults));
        self
    }

    /// Selects only runs that have not succeeded: failed, lost and missed ones.
    pub fn unsuccessful(mut self) -> Self {
        self.unsuccessful = true;
        self
    }

    /// Selects only runs that ended at most `age` ago, by the database's clock.
    pub fn within(mut self, age: Duration) -> Self {
        self.within = self.faults.accept(retry::age(age));
        self
    }

    /// Returns at most `runs` runs.
    pub fn limit(mut self, runs: u32) -> Self {
        self.limit = runs;
        self
    }
}
