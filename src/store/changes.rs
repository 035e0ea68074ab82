//! What operators have changed: it is kept in the transaction that changes it.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};

use crate::store::{Reply, Store, changed, stored_row::StoredRow};

/// A change that an operator makes.
#[derive(Clone, Debug)]
pub struct Change<'a> {
    /// The label of the operator.
    pub who: &'a str,
    pub what: &'static str,
    /// The key, the schedule, or the label of the instance.
    pub name: &'a str,
}

/// A change that an operator made: a forced release, or an order for schedules and instances.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ChangeInfo {
    /// When it was made, by the database's clock.
    pub at: DateTime<Utc>,
    /// The label of the lock, or of the schedules, with which it was made.
    pub who: String,
    /// What was done: `released`, `paused`, `resumed`, `triggered`, `stopped`, `skipped`,
    /// `removed`, `reset`, `drained`.
    pub what: String,
    /// The key, the schedule, or the label of the instance.
    pub name: String,
    /// More of it, such as the holder from whom a key was taken.
    pub detail: String,
}

/// Reads a change.
pub fn listed_change(row: &impl StoredRow) -> Reply<ChangeInfo> {
    Ok(ChangeInfo {
        at: row.time("at")?,
        who: row.text("who")?,
        what: row.text("what")?,
        name: row.text("name")?,
        detail: row.text("detail")?,
    })
}

/// The operations on changes of a [`Store`].
pub trait ChangeStore: Store {
    /// Adds a change, within the transaction that makes it.
    fn record(conn: &mut Self::Connection, change: &Change<'_>, detail: &str)
    -> impl Future<Output = Reply<()>> + Send;

    /// Reads the last changes, of a name or of all, the newest first.
    fn changes(
        conn: &mut Self::Connection,
        name: Option<&str>,
        limit: u32,
    ) -> impl Future<Output = Reply<Vec<ChangeInfo>>> + Send;

    /// Deletes the changes that were made before `older_than`.
    fn forget_changes(conn: &mut Self::Connection, older_than: TimeDelta) -> impl Future<Output = Reply<u64>> + Send;
}

/// Implements the operations, which are the same on every database except for the statements, which
/// are constants of its file, and the types of its driver.
macro_rules! operations {
    ($connection:ty) => {
        async fn record(conn: &mut $connection, change: &Change<'_>, detail: &str) -> Reply<()> {
            let query = sqlx::query(RECORD_CHANGE).bind(change.who).bind(change.what).bind(change.name);
            query.bind(detail).execute(conn).await.map(drop)
        }

        async fn changes(conn: &mut $connection, name: Option<&str>, limit: u32) -> Reply<Vec<ChangeInfo>> {
            let rows = sqlx::query(LIST_CHANGES).bind(name).bind(name).bind(i64::from(limit)).fetch_all(conn).await?;
            rows.iter().map(listed_change).collect()
        }

        async fn forget_changes(conn: &mut $connection, older_than: TimeDelta) -> Reply<u64> {
            Ok(sqlx::query(FORGET_CHANGES).bind(micros(older_than)).execute(conn).await?.rows_affected())
        }
    };
}

pub(super) use operations;

/// Executes statements in a transaction, which records what they return as the detail of the
/// change. If they return `None`, they are undone. Returns whether they were not.
pub async fn recorded<DB: ChangeStore>(
    conn: &mut DB::Connection,
    change: &Change<'_>,
    statements: impl AsyncFnOnce(&mut DB::Connection) -> Reply<Option<String>>,
) -> Reply<bool> {
    let and_record = async |conn: &mut DB::Connection| {
        let Some(detail) = statements(conn).await? else { return Ok(false) };
        DB::record(conn, change, &detail).await.map(|()| true)
    };
    changed::<DB>(conn, and_record).await
}
