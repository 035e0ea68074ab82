//! Orders of operators that instances obey, and what operators have changed.

use chrono::{DateTime, SubsecRound as _, TimeDelta, Utc};

use crate::{
    action::Action,
    error::Error,
    key::Key,
    schedule::{
        core::{Core, answered, not_found, refused},
        schedules::Schedules,
        spec::{Schedule, Timing},
    },
    store::{
        Database,
        instances::{Order, What},
        schedule::ListedSchedule,
    },
};

/// Returns the row of a schedule that is not removed.
async fn in_effect<DB: Database>(core: &Core<DB>, name: &Key) -> Result<ListedSchedule, Error> {
    match core.row(name).await? {
        Some(row) if !row.times.are_removed() => Ok(row),
        row => Err(not_found(name, row.as_ref())),
    }
}

/// Returns the next tick, twice. Of a row whose tick is under way, returns the tick after that one,
/// and the first one that is still to come.
fn next_of(row: &ListedSchedule, is_begun: bool) -> Result<[DateTime<Utc>; 2], Error> {
    let name = &row.times.name;
    match Schedule::of(&row.times) {
        _ if !is_begun => Ok([row.slot; 2]),
        Some(Schedule { timing: Timing::After(_), .. }) => {
            Err(refused(name, "a run is under way, after which its next tick is known"))
        }
        Some(schedule) => Ok([row.slot, row.slot.max(row.now)].map(|after| schedule.next(after))),
        None => Err(refused(name, format!("its times {:?} have no next tick", row.times.spec))),
    }
}

/// Returns whether this operator has given an order.
async fn has_ordered<DB: Database>(
    core: &Core<DB>,
    what: What,
    name: &Key,
    until: DateTime<Utc>,
) -> Result<bool, Error> {
    Ok(core.ordered(what, name).await?.is_some_and(|given| given.until == until && given.who == core.label))
}

impl<DB: Database> Schedules<DB> {
    /// Stops the tick of a schedule that was begun, wherever its run is: the instance that has it
    /// drops the work when it renews the lease, within a third of the lease and 20 s at most. The
    /// tick ends as failed, "stopped by" the [label](Self::label) of these schedules, and is not
    /// tried again. A tick that waits for its next attempt ends at once. A tick whose process has
    /// died ends when its lease is over. Returns `false` if no tick was begun.
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
        let (core, name) = (self.core()?, Key::new(name)?);
        let mut tried = None;
        loop {
            let row = core.row(&name).await?.ok_or_else(|| not_found(&name, None))?;
            let Some(until) = row.run_slot.filter(|_| row.attempt > 0) else {
                return match tried {
                    // An order whose reply was lost may have ended the tick.
                    Some(tried) => has_ordered(&core, What::Stop, &name, tried).await,
                    None if row.times.are_removed() => Err(not_found(&name, Some(&row))),
                    None => Ok(false),
                };
            };
            tried = Some(until);
            let stop = async |conn: &mut DB::Connection| {
                if !DB::latch(conn, &row).await? {
                    return Ok(None);
                }
                DB::wake(conn, &name).await?;
                let order = Order { what: What::Stop, name: name.as_str(), since: until, until, who: &core.label };
                DB::order(conn, &order).await?;
                Ok(Some(format!("the tick of {until}, attempt {}", row.attempt)))
            };
            // A run that has just begun or ended has changed the row.
            if core.change(Action::Update, ("stopped", name.as_str()), stop).await? {
                return Ok(true);
            }
        }
    }

    /// Skips the next tick of a schedule and returns it. The call replaces an earlier skip. A run
    /// that is under way goes on, and ticks that came due during it are skipped too. Triggers run.
    /// A deploy that moves the tick to another time, or adds ticks before it, has those run.
    /// The history shows the tick as missed, "skipped by" the [label](Self::label) of these
    /// schedules. [`resume`](Self::resume) takes the order back.
    ///
    /// # Errors
    /// [`Error::Setup`] if the next tick is not known: the times of the row are of
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
    /// println!("the tick of {tick} is skipped");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn skip(&self, name: &str) -> Result<DateTime<Utc>, Error> {
        self.order_skip(&Key::new(name)?, None).await
    }

    /// Has the ticks of a schedule skipped up to this time, as [`skip`](Self::skip) does.
    ///
    /// # Errors
    /// [`Error::Setup`] if no tick comes until then; otherwise as [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the order may be given.
    pub async fn skip_until(&self, name: &str, until: DateTime<Utc>) -> Result<(), Error> {
        self.order_skip(&Key::new(name)?, Some(until)).await.map(drop)
    }

    async fn order_skip(&self, name: &Key, until: Option<DateTime<Utc>>) -> Result<DateTime<Utc>, Error> {
        let core = self.core()?;
        // As the databases keep it.
        let (wanted, mut tried) = (until.map(|until| until.trunc_subsecs(6)), None);
        loop {
            let row = in_effect(&core, name).await?;
            // An order whose reply was lost may stand, and the tick be skipped since.
            if let Some(tried) = tried
                && has_ordered(&core, What::Skip, name, tried).await?
            {
                return Ok(tried);
            }
            let is_begun = row.attempt > 0 && row.run_slot == Some(row.slot);
            let [since, until] = match wanted {
                // Whatever comes until then is passed over. A tick that was begun is finished.
                Some(until) if is_begun => [row.slot + TimeDelta::microseconds(1), until],
                Some(until) => [DateTime::UNIX_EPOCH, until],
                // A deploy may add ticks before it, which run.
                None => next_of(&row, is_begun)?,
            };
            // The tick after a run with a fixed delay is not known yet.
            let next = next_of(&row, is_begun).map_or(row.slot, |[next, _]| next);
            if until < next || (is_begun && until == row.slot) {
                return Err(refused(name, format!("no tick is skipped until {until}: the next one is at {next}")));
            }
            tried = Some(until);
            let skip = async |conn: &mut DB::Connection| {
                if !DB::latch(conn, &row).await? {
                    return Ok(None);
                }
                let order = Order { what: What::Skip, name: name.as_str(), since, until, who: &core.label };
                DB::order(conn, &order).await?;
                Ok(Some(format!("ticks until {until}")))
            };
            // A run that has just begun or ended has changed the row.
            if core.change(Action::Update, ("skipped", name.as_str()), skip).await? {
                return Ok(until);
            }
        }
    }

    /// Pauses a schedule until this time. An instance resumes it then, at most a minute late, but
    /// leaves an order to [skip](Self::skip) as it is. Instances of a version before this method
    /// leave it paused.
    ///
    /// # Errors
    /// [`Error::Setup`] for a time that has passed; otherwise as [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be paused.
    pub async fn pause_until(&self, name: &str, until: DateTime<Utc>) -> Result<(), Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        if until <= in_effect(&core, &name).await?.now {
            return Err(refused(&name, format!("it cannot be paused until {until}, which has passed")));
        }
        self.set_paused(&name, Some(until)).await
    }

    /// Orders the instances of this [label](Self::label) that run now to end: they claim nothing
    /// more, their runs go on, and [`Running::drained`](crate::jobs::Running::drained) tells the
    /// application. They notice it at their next beat, within 20 seconds. Instances that start
    /// later run as usual, also with this label. Returns how many are known, alive or silent.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If the future is dropped, the order may be given.
    pub async fn drain(&self, label: &str) -> Result<usize, Error> {
        let (core, instances) = (self.core()?, self.instances().await?);
        let known = instances.iter().filter(|instance| !instance.calls && instance.label == label);
        let known: Vec<(String, DateTime<Utc>)> =
            known.map(|instance| (instance.id.simple().to_string(), instance.now)).collect();
        if known.is_empty() {
            return Ok(0);
        }
        let drain = async |conn: &mut DB::Connection| {
            for (id, now) in &known {
                let order = Order { what: What::Drain, name: id, since: *now, until: *now, who: &core.label };
                DB::order(conn, &order).await?;
            }
            Ok(Some(String::new()))
        };
        core.change(Action::Update, ("drained", label), drain).await?;
        Ok(known.len())
    }

    /// Returns what a run has printed, of [`Tick::keep_output`](crate::Tick::keep_output). `None`
    /// if nothing is kept.
    ///
    /// # Errors
    /// [`Error::Invalid`]; otherwise as [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn output(&self, name: &str, slot: DateTime<Utc>, attempt: u32) -> Result<Option<Vec<u8>>, Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        answered!(&*core, Action::Inspect, &name.quoted(), conn => DB::output(conn, &name, slot, attempt))
    }
}
