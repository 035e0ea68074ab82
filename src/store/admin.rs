//! The operators' operations on a database: list rows, free a row, delete old rows. What operators
//! have changed is kept, in the transaction that changes it.

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::store::{
    Form, Reply, Store, changed,
    stored_row::{StoredRow, read},
    to_utc,
};
use crate::{
    key::{Key, Token},
    rules::{Row, Status, Terms},
};

/// A row with its key, whichever program created it, and the database's time.
#[derive(Clone, Debug)]
pub struct Listed {
    pub key: String,
    pub row: Row,
    pub end_time: Option<DateTime<Utc>>,
    pub now: DateTime<Utc>,
}

/// Reads a row with its key.
pub fn listed(row: &impl StoredRow, terms: &Terms) -> Reply<Listed> {
    Ok(Listed {
        key: row.text("key_resource")?,
        row: read(row, terms.offset())?,
        end_time: row.time_or_null("end_time")?.map(|time| to_utc(time, terms.offset())),
        now: row.time("now")?,
    })
}

/// The keys from `first` to `last` in byte order, both included.
#[derive(Clone, Debug)]
pub struct KeyRange {
    pub first: Key,
    pub last: Key,
}

impl KeyRange {
    pub fn one(key: Key) -> Self {
        Self { first: key.clone(), last: key }
    }

    pub fn is_one(&self) -> bool {
        self.first == self.last
    }
}

/// Which rows to list.
#[derive(Clone, Debug)]
pub struct Page {
    pub after: String,
    pub prefix: String,
    pub locked_only: bool,
    pub limit: u32,
}

/// A row as an operator saw it, with its times as the table keeps them. Each claim and each end of
/// one, also by another program, changes one of these; a renewal changes none.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub token: i64,
    pub holder: Option<Uuid>,
    pub begin_time: Option<DateTime<Utc>>,
    pub end_time: Option<DateTime<Utc>>,
}

/// The outcome of a forced release.
#[derive(Clone, Copy, Debug)]
pub enum Forced {
    /// Free, under this new token.
    Freed(Token),
    /// There is no row, or it is not as expected and was left alone.
    Changed,
    /// Another transaction had locked the row.
    Skipped,
}

impl Forced {
    /// Returns why nothing was freed. `is_as_expected` is of the row as it was read then, if there
    /// was one.
    pub fn not(is_as_expected: Option<bool>) -> Self {
        if is_as_expected == Some(true) { Self::Skipped } else { Self::Changed }
    }
}

/// How many rows one step of deletion reads, and deletes at most.
pub const STEP: usize = 500;

/// A step of deletion: how many rows were deleted, and the key after which to continue, if there
/// may be more.
#[derive(Clone, Debug)]
pub struct Forgotten {
    pub rows: u64,
    pub after: Option<String>,
}

/// Splits what a step has read, keys and whether their rows are old, into the keys of old rows and
/// the key after which the next step continues.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub fn old_of(rows: impl Iterator<Item = Reply<(String, i64)>>) -> Reply<(Vec<String>, Option<String>)> {
    let (mut old, mut after) = (Vec::new(), None);
    for row in rows {
        let (key, is_old) = row?;
        after = Some(key.clone());
        old.extend((is_old == 1).then_some(key));
    }
    Ok((old, after))
}

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

/// The operators' operations of a [`Store`].
pub trait AdminStore: Store {
    /// Reads rows in the order of their keys. Locks nothing.
    fn list(conn: &mut Self::Connection, page: &Page, terms: &Terms)
    -> impl Future<Output = Reply<Vec<Listed>>> + Send;

    /// Reads the rows of these keys; of several keys, only the locked rows. Locks nothing. It shows
    /// every claim that was committed before it began, on whichever server of a cluster.
    fn read_range(
        conn: &mut Self::Connection,
        keys: &KeyRange,
        terms: &Terms,
        form: Form,
    ) -> impl Future<Output = Reply<Vec<Listed>>> + Send;

    /// Reads one row. Locks nothing.
    fn inspect(
        conn: &mut Self::Connection,
        key: &Key,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Option<Listed>>> + Send {
        let keys = KeyRange::one(key.clone());
        async move { Ok(Self::read_range(conn, &keys, terms, Form::Common).await?.pop()) }
    }

    /// Frees a row, whichever holder has it, or only if it is as expected. The row is locked first,
    /// then freed with a higher token.
    fn force(
        conn: &mut Self::Connection,
        key: &Key,
        status: Status,
        expected: Option<&Seen>,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forced>> + Send;

    /// Deletes rows that are free, `S`, past their minimum interval (the row's `time` and the
    /// lock's `min_interval`), and unused for `older_than`: one step, after the key `after`. Rows
    /// that another transaction has locked are skipped. Without the row, the next token is the
    /// clock's: a row whose token the clock has not passed is kept.
    fn forget(
        conn: &mut Self::Connection,
        older_than: TimeDelta,
        after: &str,
        terms: &Terms,
    ) -> impl Future<Output = Reply<Forgotten>> + Send;

    /// Adds a change, within the transaction that makes it.
    fn record(conn: &mut Self::Connection, change: &Change<'_>, detail: &str)
    -> impl Future<Output = Reply<()>> + Send;

    /// Reads the last changes, of a name or of all, the newest first.
    fn changes(
        conn: &mut Self::Connection,
        name: Option<&str>,
        limit: u32,
    ) -> impl Future<Output = Reply<Vec<ChangeInfo>>> + Send;

    /// Deletes at most [`STEP`] of the changes that were made before `older_than`, the oldest
    /// first.
    fn forget_changes(conn: &mut Self::Connection, older_than: TimeDelta) -> impl Future<Output = Reply<u64>> + Send;
}

/// Implements those operations that are the same on every database except for the types of its
/// driver, and for statements that are constants beside them.
macro_rules! operations {
    ($connection:ty) => {
        async fn list(conn: &mut $connection, page: &Page, terms: &Terms) -> Reply<Vec<Listed>> {
            let list: &'static str = &LIST;
            let query = sqlx::query(list).bind(&page.after).bind(&page.prefix).bind(page.locked_only);
            let rows = query.bind(i64::from(page.limit)).fetch_all(conn).await?;
            rows.iter().map(|row| listed(row, terms)).collect()
        }

        async fn record(conn: &mut $connection, change: &Change<'_>, detail: &str) -> Reply<()> {
            const RECORD: &str = sql!(
                "INSERT INTO t_resource_change (at, who, what, name, detail)"
                " VALUES (" now ", " [1] ", " [2] ", " [3] ", " [4] ")"
            );
            let query = sqlx::query(RECORD).bind(change.who).bind(change.what).bind(change.name);
            query.bind(detail).execute(conn).await.map(drop)
        }

        async fn changes(conn: &mut $connection, name: Option<&str>, limit: u32) -> Reply<Vec<ChangeInfo>> {
            let rows = sqlx::query(CHANGES).bind(name).bind(name).bind(i64::from(limit)).fetch_all(conn).await?;
            rows.iter().map(listed_change).collect()
        }

        async fn forget_changes(conn: &mut $connection, older_than: TimeDelta) -> Reply<u64> {
            let most = i64::try_from(STEP).unwrap_or(i64::MAX);
            let query = sqlx::query(FORGET_CHANGES).bind(micros(older_than)).bind(most);
            Ok(query.execute(conn).await?.rows_affected())
        }
    };
}

pub(super) use operations;

/// Executes statements in a transaction, which records what they return as the detail of the
/// change. If they return `None`, they are undone. Returns whether they were not.
pub async fn recorded<DB: AdminStore>(
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
