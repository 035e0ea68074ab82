//! The orders of operators that instances obey, and the details of runs.

use std::future::Future;

use chrono::{DateTime, Utc};

use crate::{
    key::{Claim, Key},
    store::{Reply, schedule::ScheduleStore, stored_row::StoredRow},
};

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
    fn output(
        conn: &mut Self::Connection,
        name: &Key,
        slot: DateTime<Utc>,
        attempt: u32,
    ) -> impl Future<Output = Reply<Option<Vec<u8>>>> + Send;
}

/// Implements the operations, which are the same on every database except for the statements, which
/// are constants beside it, and the types of its driver.
macro_rules! operations {
    ($connection:ty) => {
        async fn order(conn: &mut $connection, order: &Order<'_>) -> Reply<()> {
            let query = sqlx::query(ORDER).bind(order.what.name()).bind(order.name);
            let query = query.bind(stored(order.since)).bind(stored(order.until));
            query.bind(order.who).execute(conn).await.map(drop)
        }

        async fn ordered(conn: &mut $connection, what: What, name: &str) -> Reply<Option<Given>> {
            let row = sqlx::query(ORDERED).bind(what.name()).bind(name).fetch_optional(conn).await?;
            row.as_ref().map(given).transpose()
        }

        async fn cancel(conn: &mut $connection, what: What, name: &str, by: Option<DateTime<Utc>>) -> Reply<bool> {
            let query = sqlx::query(CANCEL).bind(what.name()).bind(name).bind(by.map(stored));
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }

        async fn latch(conn: &mut $connection, name: &Key, slot: DateTime<Utc>, attempt: u32) -> Reply<bool> {
            let query = sqlx::query(LATCH).bind(name.as_str()).bind(stored(slot)).bind(to_stored_count(attempt));
            Ok(query.execute(conn).await?.rows_affected() > 0)
        }

        async fn wake(conn: &mut $connection, name: &Key) -> Reply<()> {
            sqlx::query(WAKE).bind(name.as_str()).execute(conn).await.map(drop)
        }

        async fn set_note(conn: &mut $connection, claim: &Claim, note: &str) -> Reply<()> {
            let query = sqlx::query(NOTE).bind(note).bind(claim.key.as_str()).bind(*claim.holder.as_uuid());
            query.bind(claim.token.get()).execute(conn).await.map(drop)
        }

        async fn output(
            conn: &mut $connection,
            name: &Key,
            slot: DateTime<Utc>,
            attempt: u32,
        ) -> Reply<Option<Vec<u8>>> {
            let query = sqlx::query_scalar(OUTPUT).bind(name.as_str()).bind(stored(slot));
            Ok(query.bind(to_stored_count(attempt)).fetch_optional(conn).await?.flatten())
        }
    };
}

pub(super) use operations;

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
