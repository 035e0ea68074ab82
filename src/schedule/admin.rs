//! Operations for operators: pause, resume, trigger, list, history.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::{Key, Token},
    retry::{DAY, Repeat, within},
    schedule::{
        core::{Core, answered, quoted},
        schedules::Schedules,
        selection::RunOptions,
    },
    session::timers::timeout_at,
    store::{
        Database,
        failure::Failure,
        schedule::{ListedRun, ListedSchedule, RunPage, STEP},
    },
};

const TABLE: &str = "the table t_resource_schedule";
const HISTORY: &str = "the table t_resource_schedule_run";
/// The rows of one statement that lists.
const PAGE: u32 = 500;

/// A schedule's row, for display. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScheduleInfo {
    /// The schedule's name.
    pub name: String,
    /// Its times: `cron 30 2 * * *`, `every 30s`, `after 600s`.
    pub times: String,
    /// The time zone of a cron pattern.
    pub zone: String,
    /// The [version](Schedules::version) of the instances that registered the times.
    pub version: u64,
    /// The tick that is next, or that is run.
    pub slot: DateTime<Utc>,
    /// When an instance looks at the row: the slot, the next attempt, or the end of the lease.
    pub due: DateTime<Utc>,
    /// Whether the schedule is paused.
    pub paused: bool,
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
    /// When the row was read.
    pub now: DateTime<Utc>,
}

impl ScheduleInfo {
    fn new(listed: ListedSchedule) -> Self {
        // The database's clock decides, as it does for the claim that takes the run over.
        let is_over = listed.due_at <= listed.now;
        Self {
            name: listed.times.name.as_str().to_owned(),
            times: listed.times.spec,
            zone: listed.times.zone,
            version: u64::try_from(listed.version).unwrap_or_default(),
            slot: listed.slot,
            due: listed.due_at,
            paused: listed.paused,
            triggered: listed.triggered_at,
            running: listed.running && !is_over,
            lost_since: Some(listed.due_at).filter(|_| listed.running && is_over),
            run_slot: listed.run_slot.filter(|_| listed.attempt > 0),
            attempt: listed.attempt,
            missed: listed.missed,
            by: listed.label,
            since: listed.begin_time,
            token: listed.token,
            now: listed.now,
        }
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunStatus {
    /// The work succeeded: `S`.
    Succeeded,
    /// The work failed: `F`.
    Failed,
    /// The process died, or the run was handed back because its work was stopped: `L`.
    Lost,
    /// Ticks that were passed over: `M`.
    Missed,
}

/// A row of the history: one attempt at one tick. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunInfo {
    /// The schedule's name.
    pub name: String,
    /// The tick, or the time of a trigger. Of ticks that were passed over, the first.
    pub slot: DateTime<Utc>,
    /// The number of the attempt, from 1; 0 for ticks that were passed over.
    pub attempt: u32,
    /// How the run ended.
    pub status: RunStatus,
    /// How many earlier ticks the run stands for; of [`RunStatus::Missed`], how many were passed
    /// over.
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
    fn new(listed: ListedRun) -> Self {
        Self {
            name: listed.name,
            slot: listed.slot,
            attempt: listed.attempt,
            status: match listed.status.as_str() {
                "S" => RunStatus::Succeeded,
                "L" => RunStatus::Lost,
                "M" => RunStatus::Missed,
                _ => RunStatus::Failed,
            },
            missed: listed.missed,
            error: listed.error,
            by: listed.label,
            began: listed.begin_time,
            ended: listed.end_time,
            token: listed.token,
        }
    }

    /// What the history is ordered by, and what no two runs have in common.
    fn order(&self) -> (&str, DateTime<Utc>, u32) {
        (&self.name, self.slot, self.attempt)
    }
}

fn age(age: Duration) -> Result<TimeDelta, Error> {
    within("an age", age, Duration::ZERO, 3653 * DAY, "it has to be at most ten years")
}

/// Sends a trigger, up to the time limit. Returns whether the schedule exists.
///
/// A trigger without a reply is not sent again: it may have been carried out and run since, and
/// another one would run again.
async fn trigger<DB: Database>(core: &Core<DB>, name: &Key) -> Result<bool, Failure> {
    let limit = core.limit();
    let mut repeat = Repeat::until(limit);
    loop {
        let reply = match core.requests.answering(limit).await {
            Ok(mut conn) => {
                let reply = timeout_at(limit, DB::trigger(conn.get(), name)).await;
                conn.settle(reply)
            }
            Err(failure) => Err(failure),
        };
        if reply.as_ref().is_err_and(Failure::is_unanswered) {
            return reply;
        }
        if let Some(reply) = repeat.final_or_pause(reply).await {
            return reply;
        }
    }
}

/// Operations for operators, on all schedules of the database.
impl<DB: Database> Schedules<DB> {
    /// Pauses a schedule: no run begins until it is resumed. A run that is under way goes on.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::UnknownSchedule`], [`Error::ScheduleTablesMissing`],
    /// [`Error::Database`], [`Error::TimedOut`], [`Error::NoConnection`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be paused.
    pub async fn pause(&self, name: &str) -> Result<(), Error> {
        self.set_paused(name, true).await
    }

    /// Resumes a schedule. What happens with the ticks since the pause is its
    /// [catch-up](crate::Schedule::catch_up).
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be resumed.
    pub async fn resume(&self, name: &str) -> Result<(), Error> {
        self.set_paused(name, false).await
    }

    async fn set_paused(&self, name: &str, paused: bool) -> Result<(), Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        match answered!(&*core, Action::Update, &quoted(&name), conn => DB::pause(conn, &name, paused))? {
            true => Ok(()),
            false => Err(Error::UnknownSchedule { name }),
        }
    }

    /// Asks for a run of a schedule beside its ticks, as soon as an instance polls and no run is
    /// under way. The tick that is next keeps its time. Triggers that wait count once, and those of
    /// a paused schedule wait until it is resumed. If a failed tick waits for its next attempt,
    /// that is made at once.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the run may have been asked for.
    pub async fn trigger(&self, name: &str) -> Result<(), Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        match trigger(&core, &name).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::UnknownSchedule { name }),
            Err(failure) => Err(core.failed(failure, Action::Update, &quoted(&name), Certainty::NothingChanged)),
        }
    }

    /// Lists all schedules of the database in the order of their names.
    ///
    /// # Errors
    /// [`Error::ScheduleTablesMissing`], [`Error::Database`], [`Error::TimedOut`],
    /// [`Error::NoConnection`].
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn list(&self) -> Result<Vec<ScheduleInfo>, Error> {
        let core = self.core();
        let mut all: Vec<ScheduleInfo> = Vec::new();
        loop {
            let after = all.last().map(|last| last.name.clone()).unwrap_or_default();
            let page = answered!(&*core, Action::Inspect, TABLE, conn => DB::list_schedules(conn, &after, PAGE))?;
            let is_last = page.len() < PAGE as usize;
            all.extend(page.into_iter().map(ScheduleInfo::new));
            if is_last {
                return Ok(all);
            }
        }
    }

    /// Returns a schedule's row, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn inspect(&self, name: &str) -> Result<Option<ScheduleInfo>, Error> {
        let (core, names) = (self.core(), [Key::new(name)?]);
        let found = answered!(&*core, Action::Inspect, TABLE, conn => DB::registered(conn, &names))?;
        Ok(found.rows.into_iter().next().map(ScheduleInfo::new))
    }

    /// Returns the last runs of a schedule, at most `limit`: the latest slot first.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn history(&self, name: &str, limit: u32) -> Result<Vec<RunInfo>, Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        let runs = answered!(&*core, Action::Inspect, HISTORY, conn => DB::history(conn, &name, limit))?;
        Ok(runs.into_iter().map(RunInfo::new).collect())
    }

    /// Returns the last `each` runs of every schedule, at least one, with all attempts at their
    /// slots, and its last success, in the order of their schedules, slots and attempts.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// use rowlock::{RunStatus, Schedules};
    ///
    /// let runs = Schedules::new(pool).latest_runs(10).await?;
    /// for run in runs.iter().filter(|run| run.status != RunStatus::Succeeded) {
    ///     println!("{} of {}: {:?} {:?}", run.name, run.slot, run.status, run.error);
    /// }
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "sqlite"))]
    /// # fn main() {}
    /// ```
    pub async fn latest_runs(&self, each: u32) -> Result<Vec<RunInfo>, Error> {
        let core = self.core();
        let runs = answered!(&*core, Action::Inspect, HISTORY, conn => DB::latest_runs(conn, each))?;
        let mut runs: Vec<RunInfo> = runs.into_iter().map(RunInfo::new).collect();
        runs.sort_by(|one, other| one.order().cmp(&other.order()));
        runs.dedup_by(|one, other| one.order() == other.order());
        Ok(runs)
    }

    /// Returns the runs of all schedules that ended at `since` or later, the latest end first: at
    /// most `limit`.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// use chrono::{TimeDelta, Utc};
    /// use rowlock::Schedules;
    ///
    /// let day = Utc::now() - TimeDelta::days(1);
    /// for run in Schedules::new(pool).runs_since(day, 1_000).await? {
    ///     println!("{} ran for {} on {}", run.name, run.ended - run.began, run.by);
    /// }
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "sqlite"))]
    /// # fn main() {}
    /// ```
    pub async fn runs_since(&self, since: DateTime<Utc>, limit: u32) -> Result<Vec<RunInfo>, Error> {
        let core = self.core();
        let runs = answered!(&*core, Action::Inspect, HISTORY, conn => DB::runs_since(conn, since, limit))?;
        Ok(runs.into_iter().map(RunInfo::new).collect())
    }

    /// Returns the runs that are selected, the latest end first.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; [`Error::InvalidSetting`] for an age of more than ten years;
    /// otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn runs(&self, options: &RunOptions) -> Result<Vec<RunInfo>, Error> {
        let (core, name) = (self.core(), options.name.as_deref().map(Key::new).transpose()?);
        let within = options.within.map(age).transpose()?;
        let page = RunPage { name, unsuccessful: options.unsuccessful, within, limit: options.limit };
        let runs = answered!(&*core, Action::Inspect, HISTORY, conn => DB::runs(conn, &page))?;
        Ok(runs.into_iter().map(RunInfo::new).collect())
    }

    /// Deletes the runs that ended longer than `older_than` ago, and returns their number. The last
    /// success of each schedule stays, however old it is.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for more than ten years; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If the future is dropped, some of the rows may be deleted. Another call deletes the rest.
    pub async fn forget_history(&self, older_than: Duration) -> Result<u64, Error> {
        let (older_than, core, mut rows) = (age(older_than)?, self.core(), 0);
        loop {
            let step = answered!(&*core, Action::Forget, HISTORY, conn => DB::forget_history(conn, older_than))?;
            rows += step;
            if step < STEP.unsigned_abs() {
                return Ok(rows);
            }
        }
    }
}
