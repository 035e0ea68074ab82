//! The operations on the instances of schedules, the times that these declare, the orders that they
//! obey, and the details of their runs.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::{
    key::{Claim, Key},
    store::{
        Reply, changed,
        schedule::{ListedSchedule, ScheduleStore, Times},
        stored_row::StoredRow,
    },
};

/// What an instance says of itself.
#[derive(Clone, Debug)]
pub struct Announcement {
    pub id: Uuid,
    pub label: String,
    pub build: String,
    /// It stands for all processes of one crontab, each of which lives for one tick.
    pub calls: bool,
    /// For how long after a beat it counts as alive.
    pub lives: TimeDelta,
    pub declares_id: i64,
    pub declares: String,
}

/// The instances that declare the same, as numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredSet {
    pub declares_id: i64,
    pub present: i64,
    pub alive: i64,
    /// Those that are alive, and whose declaration counts.
    pub counting: i64,
    /// Those that have not beaten for twice as long as they live.
    pub forgotten: i64,
    /// When the first of them started.
    pub since: DateTime<Utc>,
    /// The longest life of those with a loop.
    pub lives: TimeDelta,
}

impl Beat {
    /// Reads the sets of instances. There is a row even if there is no set.
    pub fn read(rows: &[impl StoredRow]) -> Reply<Self> {
        let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let beats = first.number_or_null("beats")?.map(|beats| u32::try_from(beats).unwrap_or_default());
        let mut sets = Vec::with_capacity(rows.len());
        for row in rows {
            if let Some(declares_id) = row.number_or_null("declares_id")? {
                sets.push(DeclaredSet {
                    declares_id,
                    present: row.number("present")?,
                    alive: row.number("alive")?,
                    counting: row.number("counting")?,
                    forgotten: row.number("forgotten")?,
                    since: row.time("since")?,
                    lives: TimeDelta::microseconds(row.number("lives")?),
                });
            }
        }
        Ok(Self { beats, drained: first.is("drained")?, sets, now: first.time("now")? })
    }
}

/// The reply to a beat.
#[derive(Clone, Debug)]
pub struct Beat {
    /// How often the instance has beaten without a break. `None` if it is not known here.
    pub beats: Option<u32>,
    /// An operator has ordered that the instance ends.
    pub drained: bool,
    pub sets: Vec<DeclaredSet>,
    pub now: DateTime<Utc>,
}

/// A change of the times of a row, or of its slot.
#[derive(Clone, Debug)]
pub struct TimesChange {
    /// The times that the row has from now on.
    pub times: Times,
    /// The row when the change was decided. If it has other times, another slot or attempt by then,
    /// it is left alone. `None`: it does not exist, and is created.
    pub seen: Option<Box<ListedSchedule>>,
    pub slot: DateTime<Utc>,
    /// The attempts and the trigger of the row are forgotten, unless a run is under way. One whose
    /// lease has ended is lost.
    pub afresh: bool,
    /// The last run was at a time that has not come yet, and is no last run any more.
    pub run_ahead: bool,
    /// The history forgets what was run after this time, which was now when the change was decided.
    /// So do orders to stop such runs, and orders to skip only ticks after the slot.
    pub forgets_after: Option<DateTime<Utc>>,
    /// The hashes of the times that the schedule has had since.
    pub known: String,
    /// The times are other ones than before.
    pub new_times: bool,
}

#[cfg(all(test, feature = "sqlite"))]
impl TimesChange {
    pub fn creation(times: Times, slot: DateTime<Utc>) -> Self {
        Self {
            times,
            seen: None,
            slot,
            afresh: false,
            run_ahead: false,
            forgets_after: None,
            known: String::new(),
            new_times: true,
        }
    }
}

/// An instance that runs schedules, for display. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InstanceInfo {
    /// A random id, which no two starts have in common. Calls have that of their times.
    pub id: Uuid,
    /// The [label](crate::Schedules::label) of the instance.
    pub label: String,
    /// The [build](crate::Schedules::build) of the application.
    pub build: String,
    /// It stands for all processes that call [`try_tick`](crate::Schedules::try_tick), or
    /// [`run_now`](crate::Schedules::run_now), with the same times.
    pub calls: bool,
    /// When the instance was started; of calls, the first.
    pub since: DateTime<Utc>,
    /// When it was last heard of.
    pub beat: DateTime<Utc>,
    /// Whether it counts as alive.
    pub alive: bool,
    /// What it declares, in the order of the names.
    pub declares: Vec<DeclaredTimes>,
    /// When the instance was read.
    pub now: DateTime<Utc>,
}

/// The times that an instance declares of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeclaredTimes {
    /// The schedule's name.
    pub name: String,
    /// Its times, as [`ScheduleInfo::times`](crate::admin::ScheduleInfo::times); `none` of a
    /// schedule that was [removed](crate::Schedules::removed).
    pub times: String,
    /// The time zone of a cron pattern.
    pub zone: String,
}

/// Reads an instance, without what it declares, and the id of that.
pub fn instance(row: &impl StoredRow) -> Reply<(i64, InstanceInfo)> {
    let (beat, now) = (row.time("beat_at")?, row.time("now")?);
    let lives = TimeDelta::microseconds(row.number("lives")?);
    let instance = InstanceInfo {
        id: row.uuid("id")?,
        label: row.text("label")?,
        build: row.text("build")?,
        calls: row.is("calls")?,
        since: row.time("since")?,
        beat,
        // A beat far ahead is one of a clock that was wrong.
        alive: beat + lives > now && beat <= now + lives,
        declares: Vec::new(),
        now,
    };
    Ok((row.number("declares_id")?, instance))
}

/// What is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The tick of this slot ends as failed.
    Stop,
    /// Ticks up to this slot are skipped.
    Skip,
    /// The pause ends at this time.
    Pause,
    /// The instance of this id ends.
    Drain,
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Skip => "skip",
            Self::Pause => "pause",
            Self::Drain => "drain",
        }
    }
}

/// An order. A later one takes its place.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    pub what: What,
    pub name: &'a str,
    /// The first slot to skip. Of other orders, the same as `until`.
    pub since: DateTime<Utc>,
    pub until: DateTime<Utc>,
    pub who: &'a str,
}

/// An order that was given.
#[derive(Clone, Debug)]
pub struct Given {
    pub since: DateTime<Utc>,
    pub until: DateTime<Utc>,
    pub who: String,
}

/// Reads an order.
pub fn given(row: &impl StoredRow) -> Reply<Given> {
    Ok(Given { since: row.time("since")?, until: row.time("until")?, who: row.text("who")? })
}

/// The orders that concern a schedule.
pub const OF_SCHEDULES: [What; 3] = [What::Stop, What::Skip, What::Pause];

/// The operations on instances, orders and details of runs of a [`ScheduleStore`].
pub trait InstanceStore: ScheduleStore {
    /// Adds the instance, or records that it is still there.
    fn announce(conn: &mut Self::Connection, instance: &Announcement) -> impl Future<Output = Reply<()>> + Send;

    /// Records that the instance is still there. An outage or a step of the clock is a break, after
    /// which its beats are counted anew. Returns what all instances declare. A beat that is further
    /// ahead than a life is one of a clock that was wrong. Without an instance, it only reads.
    fn beat(conn: &mut Self::Connection, instance: Option<Uuid>) -> impl Future<Output = Reply<Beat>> + Send;

    /// Reads what the instances with these ids declare.
    fn declares(
        conn: &mut Self::Connection,
        declares_ids: &[i64],
    ) -> impl Future<Output = Reply<Vec<(i64, String)>>> + Send;

    /// Creates a row, or changes its times or its slot. A run that is under way goes on, and is in
    /// no history yet. One whose lease has ended is there already if it was handed back. Returns
    /// `false` if the row has changed since it was seen.
    fn change_times(conn: &mut Self::Connection, change: &TimesChange) -> impl Future<Output = Reply<bool>> + Send {
        changed::<Self>(conn, async move |conn| Self::change_within(conn, change).await)
    }

    /// Does the same as a part of a transaction.
    fn change_within(conn: &mut Self::Connection, change: &TimesChange) -> impl Future<Output = Reply<bool>> + Send;

    /// Removes a schedule, and gives its pause, its trigger and its token to another one, whose
    /// times and slot change as well. A pause or a trigger of that one stays. A run of either whose
    /// lease has ended is lost. Returns `false`, and changes nothing, if one of the rows has
    /// changed since it was seen.
    fn rename(
        conn: &mut Self::Connection,
        old: &TimesChange,
        new: &TimesChange,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Marks schedules as gone. A change of the times or the slot ends the mark.
    fn mark_gone(conn: &mut Self::Connection, names: &[Key]) -> impl Future<Output = Reply<()>> + Send;

    /// Deletes an instance. Returns `false` if there is none.
    fn end_instance(conn: &mut Self::Connection, instance: Uuid) -> impl Future<Output = Reply<bool>> + Send;

    /// Deletes the instances that have not beaten for twice as long as they live.
    fn forget_instances(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;

    /// Reads all instances, by their labels, each with the id of what it declares.
    fn instances(conn: &mut Self::Connection) -> impl Future<Output = Reply<Vec<(i64, InstanceInfo)>>> + Send;

    /// Deletes a schedule on which nothing runs, within a transaction. Its history stays. Returns
    /// `false` if there is none, or something runs.
    fn remove_schedule(conn: &mut Self::Connection, name: &Key) -> impl Future<Output = Reply<bool>> + Send;

    /// Gives an order, within a transaction.
    fn order(conn: &mut Self::Connection, order: &Order<'_>) -> impl Future<Output = Reply<()>> + Send;

    /// Reads an order.
    fn ordered(
        conn: &mut Self::Connection,
        what: What,
        name: &str,
    ) -> impl Future<Output = Reply<Option<Given>>> + Send;

    /// Deletes an order; with a time, only one that is until then at most. Returns `false` if there
    /// is none.
    fn cancel(
        conn: &mut Self::Connection,
        what: What,
        name: &str,
        by: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Keeps the row of a schedule from other transactions up to the end of this one. A look at the
    /// row from before it leads to no claim: the token changes, and of the row of a run, which keeps
    /// its token, the time since which it is due. Returns `false` if a run was begun or has ended
    /// since the row was seen.
    fn latch(conn: &mut Self::Connection, seen: &ListedSchedule) -> impl Future<Output = Reply<bool>> + Send;

    /// Makes the next attempt at a tick due at once, if it waits.
    fn wake(conn: &mut Self::Connection, name: &Key) -> impl Future<Output = Reply<()>> + Send;

    /// Sets what a run says of itself, if its claim stands.
    fn set_note(conn: &mut Self::Connection, claim: &Claim, note: &str) -> impl Future<Output = Reply<()>> + Send;

    /// Reads the end of what a run printed.
    fn output(
        conn: &mut Self::Connection,
        name: &Key,
        slot: DateTime<Utc>,
        attempt: u32,
    ) -> impl Future<Output = Reply<Option<Vec<u8>>>> + Send;
}
