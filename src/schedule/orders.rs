//! Orders of operators that instances obey, and what operators have changed.

use chrono::{DateTime, Utc};

use crate::{
    action::Action,
    error::Error,
    key::Key,
    schedule::{
        admin::unknown,
        core::{Core, answered, quoted},
        declared::refused,
        schedules::Schedules,
        spec::{Schedule, Timing},
    },
    store::{
        Database,
        changes::{Change, recorded},
        orders::{AttemptOf, Order, What},
        schedule::{ListedSchedule, Registered},
    },
};

/// Returns the row of a schedule that is not removed, and the database's time.
async fn found<DB: Database>(core: &Core<DB>, name: &Key) -> Result<(ListedSchedule, DateTime<Utc>), Error> {
    let names = std::slice::from_ref(name);
    let Registered { rows, now } =
        answered!(core, Action::Inspect, &quoted(name), conn => DB::registered(conn, names))?;
    match rows.into_iter().find(|row| !row.times.are_removed()) {
        Some(row) => Ok((row, now)),
        None => Err(unknown(core, name.clone()).await),
    }
}

/// Gives an order, and records it.
async fn give<DB: Database>(
    core: &Core<DB>,
    (what, done): (What, &'static str),
    name: &str,
    until: DateTime<Utc>,
    detail: &str,
) -> Result<(), Error> {
    let change = Change { who: &core.label, what: done, name };
    let order = Order { what, name, until, who: &core.label };
    let subject = format!("{name:?}");
    let give = async |conn: &mut DB::Connection| {
        DB::order(conn, &order).await?;
        Ok(Some(((), detail.to_owned())))
    };
    answered!(core, Action::Update, &subject, conn => recorded::<DB, _>(conn, &change, give)).map(drop)
}

impl<DB: Database> Schedules<DB> {
    /// Stops the tick of a schedule that was begun, wherever its run is: the instance that has it
    /// drops the work when it renews the lease, within a third of the lease and 20 s at most. The tick
    /// ends as failed, "stopped by" the [label](Self::label) of these schedules, and is not tried
    /// again. Nor is one that waits for its next attempt, or whose process has died. Returns
    /// `false` if no tick was begun.
    ///
    /// Work that succeeds before it is dropped has succeeded.
    ///
    /// # Errors
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the tick may be stopped.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn example(jobs: rowlock::Schedules<impl rowlock::Database>) -> Result<(), rowlock::Error> {
    /// if !jobs.stop("report").await? {
    ///     println!("nothing to stop");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn stop(&self, name: &str) -> Result<bool, Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        found(&core, &name).await?;
        let change = Change { who: &core.label, what: "stopped", name: name.as_str() };
        let stop = async |conn: &mut DB::Connection| {
            let found = DB::registered(conn, std::slice::from_ref(&name)).await?;
            let row = found.rows.into_iter().next().filter(|row| row.attempt > 0);
            let Some((row, until)) = row.and_then(|row| Some((row.attempt, row.run_slot?))) else { return Ok(None) };
            DB::wake(conn, &name).await?;
            DB::order(conn, &Order { what: What::Stop, name: name.as_str(), until, who: &core.label }).await?;
            Ok(Some(((), format!("the tick of {until}, attempt {row}"))))
        };
        let stopped: Result<_, Error> =
            answered!(&*core, Action::Update, &quoted(&name), conn => recorded::<DB, _>(conn, &change, stop));
        Ok(stopped?.is_some())
    }

    /// Has the next tick of a schedule passed over, in place of an earlier order to skip, and
    /// returns it. A run that is under way goes on, and so do triggers. The history shows the tick
    /// as missed, "skipped by" the [label](Self::label) of these schedules.
    /// [`resume`](Self::resume) takes the order back.
    ///
    /// # Errors
    /// [`Error::InvalidSchedule`] if the next tick is not known: the times of the row are of
    /// another version of rowlock, or a run with a fixed delay is under way; otherwise as
    /// [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the order may be given.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn example(jobs: rowlock::Schedules<impl rowlock::Database>) -> Result<(), rowlock::Error> {
    /// let tick = jobs.skip("report").await?;
    /// println!("the tick of {tick} is passed over");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn skip(&self, name: &str) -> Result<DateTime<Utc>, Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        let (row, _) = found(&core, &name).await?;
        let is_begun = row.attempt > 0 && row.run_slot == Some(row.slot);
        let until = match Schedule::of(&row.times) {
            _ if !is_begun => row.slot,
            Some(Schedule { timing: Timing::After(_), .. }) => {
                return Err(refused(&name, "a run is under way, after which its next tick is known".to_owned()));
            }
            Some(schedule) => schedule.next(row.slot),
            None => return Err(refused(&name, format!("its times {:?} have no next tick", row.times.spec))),
        };
        self.skip_until(name.as_str(), until).await.map(|()| until)
    }

    /// Has the ticks of a schedule passed over up to this time, as [`skip`](Self::skip) does.
    ///
    /// # Errors
    /// [`Error::InvalidSchedule`] if no tick comes until then; otherwise as [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the order may be given.
    pub async fn skip_until(&self, name: &str, until: DateTime<Utc>) -> Result<(), Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        let (row, _) = found(&core, &name).await?;
        if until < row.slot {
            return Err(refused(&name, format!("no tick is skipped until {until}: the next one is at {}", row.slot)));
        }
        give(&core, (What::Skip, "skipped"), name.as_str(), until, &format!("ticks until {until}")).await
    }

    /// Pauses a schedule until this time. An instance resumes it then, at most a minute late, as
    /// [`resume`](Self::resume) does. Instances of a version before this method leave it paused.
    ///
    /// # Errors
    /// [`Error::InvalidSchedule`] for a time that has passed; otherwise as [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be paused.
    pub async fn pause_until(&self, name: &str, until: DateTime<Utc>) -> Result<(), Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        let (_, now) = found(&core, &name).await?;
        if until <= now {
            return Err(refused(&name, format!("it cannot be paused until {until}, which has passed")));
        }
        self.set_paused(&name, Some(until)).await
    }

    /// Orders the instances of this [label](Self::label) that run now to end: they claim nothing
    /// more, their runs go on, and [`Running::drained`](crate::Running::drained) tells the
    /// application. They notice it at their next beat, within 20 seconds. Instances that start
    /// later run as usual. Returns how many are alive.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If the future is dropped, the order may be given.
    pub async fn drain(&self, label: &str) -> Result<usize, Error> {
        let instances = self.instances().await?;
        let alive = instances.iter().filter(|instance| instance.alive && !instance.calls && instance.label == label);
        let Some(now) = alive.clone().map(|instance| instance.now).next() else { return Ok(0) };
        give(&*self.core(), (What::Drain, "drained"), label, now, "").await.map(|()| alive.count())
    }

    /// Returns what a run has printed, of [`Tick::keep_output`](crate::Tick::keep_output). `None`
    /// if nothing is kept.
    ///
    /// # Errors
    /// [`Error::InvalidKey`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn output(&self, name: &str, slot: DateTime<Utc>, attempt: u32) -> Result<Option<Vec<u8>>, Error> {
        let (core, name) = (self.core(), Key::new(name)?);
        let of = AttemptOf { name: &name, slot, attempt };
        answered!(&*core, Action::Inspect, &quoted(&name), conn => DB::output(conn, &of))
    }
}
