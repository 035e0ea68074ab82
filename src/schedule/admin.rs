//! Operations for operators: pause, resume, trigger, list, history.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::Key,
    retry::{Repeat, age},
    schedule::{
        core::{Core, answered, not_found},
        declared::declared,
        info::{Said, ScheduleInfo},
        schedules::Schedules,
    },
    store::{
        Database,
        admin::{Change, recorded},
        failure::Failure,
        instances::{Order, What},
        run_info::{RunInfo, RunOptions},
        schedule::{ListedSchedule, STEP},
    },
};

const TABLE: &str = "the table t_resource_schedule";
const HISTORY: &str = "the table t_resource_schedule_run";
const CHANGES: &str = "the table t_resource_change";
/// The rows of one statement that lists.
const PAGE: u32 = 500;

/// Sends a trigger, up to the time limit. Returns whether the schedule exists.
///
/// A trigger without a reply is not sent again: it may have been carried out and run since, and
/// another one would run again.
async fn trigger<DB: Database>(core: &Core<DB>, name: &Key) -> Result<bool, Failure> {
    let limit = core.limit();
    let change = Change { who: &core.label, what: "triggered", name: name.as_str() };
    let mut repeat = Repeat::until(limit);
    loop {
        let trigger = async |conn: &mut DB::Connection| Ok(DB::trigger(conn, name).await?.then(String::new));
        let send = async |conn: &mut DB::Connection| recorded::<DB>(conn, &change, trigger).await;
        let reply = core.requests.send_once(limit, send).await;
        if reply.as_ref().is_err_and(Failure::is_unanswered) {
            return reply;
        }
        if let Some(reply) = repeat.final_or_pause(reply).await {
            return reply;
        }
    }
}

/// Unless the schedule was found, says that there is none of this name, and which name it has now.
async fn found<DB: Database>(core: &Core<DB>, name: &Key, is_found: bool) -> Result<(), Error> {
    if is_found { Ok(()) } else { Err(not_found(name, core.row(name).await.ok().flatten().as_ref())) }
}

fn infos(rows: Vec<ListedSchedule>, declared: &HashMap<Key, Said>) -> Vec<ScheduleInfo> {
    let none = Said::default();
    let info = |row: ListedSchedule| {
        let said = declared.get(&row.times.name).unwrap_or(&none);
        ScheduleInfo::new(row, said)
    };
    rows.into_iter().map(info).collect()
}

/// Operations for operators, on all schedules of the database.
impl<DB: Database> Schedules<DB> {
    /// Pauses a schedule: no run begins until it is resumed. A run that is under way goes on.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotFound`], [`Error::Setup`],
    /// [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be paused.
    pub async fn pause(&self, name: &str) -> Result<(), Error> {
        self.set_paused(&Key::new(name)?, None).await
    }

    /// Resumes a schedule, and revokes an order to [skip](Self::skip) its ticks. What happens with
    /// the ticks since the pause is its [catch-up](crate::Schedule::catch_up).
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be resumed.
    pub async fn resume(&self, name: &str) -> Result<(), Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        let resume = async |conn: &mut DB::Connection| {
            let resumed = DB::pause(conn, &name, false).await?;
            for what in [What::Pause, What::Skip] {
                DB::cancel(conn, what, name.as_str(), None).await?;
            }
            Ok(resumed.then(String::new))
        };
        let resumed = core.change(Action::Update, ("resumed", name.as_str()), resume).await?;
        found(&core, &name, resumed).await
    }

    /// Pauses a schedule, until this time if there is one.
    pub(super) async fn set_paused(&self, name: &Key, until: Option<DateTime<Utc>>) -> Result<(), Error> {
        let core = self.core()?;
        let pause = async |conn: &mut DB::Connection| {
            if !DB::pause(conn, name, true).await? {
                return Ok(None);
            }
            let Some(until) = until else {
                DB::cancel(conn, What::Pause, name.as_str(), None).await?;
                return Ok(Some(String::new()));
            };
            DB::order(conn, &Order { what: What::Pause, name: name.as_str(), since: until, until, who: &core.label })
                .await?;
            Ok(Some(format!("until {until}")))
        };
        let paused = core.change(Action::Update, ("paused", name.as_str()), pause).await?;
        found(&core, name, paused).await
    }

    /// Requests a run of a schedule in addition to its ticks, as soon as an instance polls and no
    /// run is under way. The tick that is next keeps its time. Triggers that wait count once, and
    /// those of a paused schedule wait until it is resumed. If a failed tick waits for its next
    /// attempt, that is made at once.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the run may have been asked for.
    pub async fn trigger(&self, name: &str) -> Result<(), Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        let failed = |failure| core.failed(failure, Action::Update, &name.quoted(), Certainty::NothingChanged);
        let triggered = trigger(&core, &name).await.map_err(failed)?;
        found(&core, &name, triggered).await
    }

    /// Lists all schedules of the database in the order of their names.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of its range, [`Error::Setup`], [`Error::Database`].
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn list(&self) -> Result<Vec<ScheduleInfo>, Error> {
        let core = self.core()?;
        let (declared, mut all) = (declared(&core).await?, Vec::<ScheduleInfo>::new());
        loop {
            let after = all.last().map(|last| last.name.clone()).unwrap_or_default();
            let page = answered!(&*core, Action::Inspect, TABLE, conn => DB::list_schedules(conn, &after, PAGE))?;
            let is_last = page.len() < PAGE as usize;
            all.extend(infos(page, &declared));
            if is_last {
                return Ok(all);
            }
        }
    }

    /// Returns a schedule's row, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Invalid`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn inspect(&self, name: &str) -> Result<Option<ScheduleInfo>, Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        let rows = core.row(&name).await?.into_iter().collect();
        Ok(infos(rows, &declared(&core).await?).into_iter().next())
    }

    /// Returns the last runs of a schedule, at most `limit`: the latest slot first.
    ///
    /// # Errors
    /// [`Error::Invalid`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn history(&self, name: &str, limit: u32) -> Result<Vec<RunInfo>, Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        answered!(&*core, Action::Inspect, HISTORY, conn => DB::history(conn, &name, limit))
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
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// use rowlock::{Schedules, admin::RunStatus};
    ///
    /// let runs = Schedules::new(pool).latest_runs(10).await?;
    /// for run in runs.iter().filter(|run| run.status != RunStatus::Succeeded) {
    ///     println!("{} of {}: {:?} {:?}", run.name, run.slot, run.status, run.error);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn latest_runs(&self, each: u32) -> Result<Vec<RunInfo>, Error> {
        let core = self.core()?;
        let mut runs = answered!(&*core, Action::Inspect, HISTORY, conn => DB::latest_runs(conn, each))?;
        runs.sort_by(|one, other| one.order().cmp(&other.order()));
        runs.dedup_by(|one, other| one.order() == other.order());
        Ok(runs)
    }

    /// Returns the runs that are selected, the latest end first.
    ///
    /// # Errors
    /// [`Error::Invalid`], also for an age of more than ten years;
    /// otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn runs(&self, options: &RunOptions) -> Result<Vec<RunInfo>, Error> {
        let core = self.core()?;
        options.faults.check()?;
        answered!(&*core, Action::Inspect, HISTORY, conn => DB::runs(conn, options))
    }

    /// Deletes the runs that ended longer than `older_than` ago, with what they printed, and what
    /// operators changed before that. Returns the number of runs. The last success of each schedule
    /// stays, however old it is, and so do the attempts at a tick that is to be tried again.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than ten years; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If the future is dropped, some of the rows may be deleted. Another call deletes the rest.
    pub async fn forget_history(&self, older_than: Duration) -> Result<u64, Error> {
        let (older_than, core, mut rows) = (age(older_than)?, self.core()?, 0);
        while answered!(&*core, Action::Forget, CHANGES, conn => DB::forget_changes(conn, older_than))? > 0 {}
        loop {
            let step = answered!(&*core, Action::Forget, HISTORY, conn => DB::forget_history(conn, older_than))?;
            rows += step;
            if step < STEP.unsigned_abs() {
                return Ok(rows);
            }
        }
    }
}
