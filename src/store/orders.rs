//! The orders of operators that instances obey, and the details of runs.

use std::future::Future;

use chrono::{DateTime, Utc};

use crate::{
    key::{Claim, Key},
    store::{Reply, schedule::ScheduleStore},
};

/// What is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The tick of this slot ends as failed.
    Stop,
    /// Ticks up to this slot are passed over.
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

/// The orders that concern a schedule.
pub const OF_SCHEDULES: [What; 3] = [What::Stop, What::Skip, What::Pause];

/// One attempt at a tick.
#[derive(Clone, Debug)]
pub struct AttemptOf<'a> {
    pub name: &'a Key,
    pub slot: DateTime<Utc>,
    pub attempt: u32,
}

/// The operations on orders and details of a [`ScheduleStore`].
pub trait OrderStore: ScheduleStore {
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

    /// Keeps the row of a schedule, which has this slot and attempt, from other transactions up to
    /// the end of this one. A look at the row from before it leads to no claim. Returns `false` if
    /// the row has others by now.
    fn latch(
        conn: &mut Self::Connection,
        name: &Key,
        slot: DateTime<Utc>,
        attempt: u32,
    ) -> impl Future<Output = Reply<bool>> + Send;

    /// Makes the next attempt at a tick due at once, if it waits.
    fn wake(conn: &mut Self::Connection, name: &Key) -> impl Future<Output = Reply<()>> + Send;

    /// Sets what a run says of itself, if its claim stands.
    fn set_note(conn: &mut Self::Connection, claim: &Claim, note: &str) -> impl Future<Output = Reply<()>> + Send;

    /// Reads the end of what a run printed.
    fn output(conn: &mut Self::Connection, of: &AttemptOf<'_>) -> impl Future<Output = Reply<Option<Vec<u8>>>> + Send;
}

/// Gives the orders for a schedule to another one, within a transaction.
pub async fn pass_orders<DB: OrderStore>(conn: &mut DB::Connection, from: &str, to: &str) -> Reply<()> {
    for what in OF_SCHEDULES {
        if let Some(Given { since, until, who }) = DB::ordered(conn, what, from).await? {
            DB::order(conn, &Order { what, name: to, since, until, who: &who }).await?;
            DB::cancel(conn, what, from, None).await?;
        }
    }
    Ok(())
}
