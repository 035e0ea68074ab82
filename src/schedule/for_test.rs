//! A tick for the tests of an application.

use std::sync::Arc;

use chrono::{DateTime, SubsecRound as _, TimeDelta, Utc};
use sqlx::Pool;
use tokio::sync::watch;

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::Holder,
    schedule::{
        core::{answered, put_back, refused},
        declarations::Word,
        instances::{Decision, Declared},
        plan::Row,
        schedules::Schedules,
        spec::Schedule,
        tick::Tick,
    },
    store::Database,
};

/// The tick of a test is not renewed.
const LEASE: TimeDelta = TimeDelta::hours(1);
/// The runs that are searched for one of the same tick.
const RUNS: u32 = 10_000;

impl<DB: Database> Tick<DB> {
    /// Claims a tick of a schedule as its first attempt, for a test that calls the work by itself.
    ///
    /// It is a tick as instances claim it, in the tables, for an hour and without renewals:
    /// [`transaction`](Self::transaction) and [`finish_in`](Self::finish_in) end it. The row of the
    /// schedule is created, or moved to this slot, so it is not for a database that is in use. A
    /// tick that is not ended holds the schedule for the hour.
    /// [`Schedules::run_now`] runs the work of a schedule, with its retries and its history.
    ///
    /// # Errors
    /// [`Error::Setup`] for a time that is no tick, or has not come yet, or of which there was a
    /// run, for a schedule that is paused or run, or is exclusive with a key, and if the tables are
    /// missing; [`Error::Invalid`]; [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the tick may be claimed.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use rowlock::{Schedule, Tick};
    ///
    /// async fn day_of_report(tick: Tick<sqlx::Sqlite>) -> Result<String, rowlock::Error> {
    ///     Ok(tick.slot().date_naive().to_string())
    /// }
    ///
    /// let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// rowlock::migrate(&pool).await?;
    /// let report = Schedule::cron("report", "30 2 * * *");
    /// let tick = Tick::for_test(&pool, &report, "2024-02-29T02:30:00Z".parse()?).await?;
    /// assert_eq!(day_of_report(tick).await?, "2024-02-29");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn for_test(pool: &Pool<DB>, schedule: &Schedule, slot: DateTime<Utc>) -> Result<Self, Error> {
        let (core, slot, mut schedule) =
            (Schedules::new(pool.clone()).core()?, slot.trunc_subsecs(3), schedule.clone());
        schedule.lease = Some(LEASE);
        schedule.check()?;
        core.check().await?;
        let (name, subject) = (&schedule.name, schedule.name.quoted());
        let refused = |wrong: &str| refused(name, wrong);
        if schedule.exclusive.is_some() {
            return Err(refused("it needs a key as well: `run_now` takes it"));
        }
        let runs = answered!(&*core, Action::Inspect, &subject, conn => DB::history(conn, name, RUNS))?;
        if runs.iter().any(|run| run.slot == slot) {
            return Err(refused("there was a run of this tick: take another time, or another database"));
        }
        let row = core.row(name).await?;
        let now = match &row {
            Some(row) => row.now,
            None => answered!(&*core, Action::Inspect, &subject, conn => DB::now(conn))?,
        };
        let tick = schedule.upcoming(slot - TimeDelta::milliseconds(1))?.next();
        if let Some(tick) = tick.filter(|tick| *tick != slot) {
            return Err(refused(&format!("no tick is at {slot}: the next one is at {tick}")));
        }
        if row.as_ref().is_some_and(|row| row.paused || row.running) {
            return Err(refused("it is paused, or a run is under way"));
        }
        if slot > now {
            return Err(refused("the tick of a test has to be of a time that has passed"));
        }
        let declared = Declared::new(&schedule);
        let change = declared.change_to(slot, Decision::Fresh, row.as_ref(), &Word::default(), now);
        if !answered!(&*core, Action::Update, &subject, conn => DB::change_times(conn, &change))? {
            return Err(refused("another instance changed its row"));
        }
        let (known, holder) = (core.known(&schedule), Holder::unique());
        let reply = core.claim(std::slice::from_ref(&known), holder, 1).await;
        let (sent, reply) =
            reply.map_err(|failure| core.failed(failure, Action::Acquire, &subject, Certainty::NothingChanged))?;
        let Some(row) = reply.claimed.into_iter().next().filter(|row| row.slot == slot) else {
            put_back(&core, holder, std::slice::from_ref(name)).await;
            return Err(refused("another instance runs it"));
        };
        let (attempt, skip) = (row.attempt, None);
        let tick = Row { slot, own: true, attempt, missed: 0, spent: 0, lost_since: None, skip, stopped: false };
        let (_, recorded) = watch::channel(false);
        Ok(Self::new(core, Arc::new(schedule), (row, sent), tick, None, recorded))
    }
}
