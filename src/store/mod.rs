//! What the lock requires of a database.
//!
//! A store sends statements and reports what it saw; it takes no decision. Unless its documentation
//! says otherwise, an operation takes a slice that is not empty, works on a borrowed connection,
//! leaves no transaction open, and waits for no row that another transaction has locked.
//!
//! This file has the trait of sessions and transactions. The other traits have files of their own,
//! and each database has a folder with a file for each trait.

pub mod admin;
mod claim;
pub mod database;
pub mod failure;
pub mod fault;
#[cfg(feature = "schedule")]
pub mod instances;
pub mod migration;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
pub mod queue;
#[cfg(feature = "schedule")]
pub mod run_info;
#[cfg(feature = "schedule")]
pub mod schedule;
#[cfg(all(feature = "schedule", any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
mod schedule_operations;
#[cfg(all(feature = "schedule", any(feature = "mysql", feature = "sqlite")))]
mod schedule_seen;
pub mod schema;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub mod servers;
#[cfg(feature = "sqlite")]
mod sqlite;
pub mod stored_row;
pub mod version;

#[cfg(feature = "schedule")]
pub use claim::not_extended;
pub use claim::{
    BATCH, Change, ClaimReply, ClaimRequest, ClaimStore, Confirmed, HeldStore, Outcome, RowSnapshot, is_apart,
    late_among, lost_among, skipped, skipped_among, unconfirmed, unmatched,
};
pub use database::Database;
pub use fault::is_undone;

use std::future::Future;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Connection, Pool};
use sqlx_core::transaction::TransactionManager as _;

/// The options with which a pool opens its connections.
pub type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

/// The result of one statement, or the driver's error.
pub type Reply<T> = Result<T, sqlx::Error>;

/// Turns an error into a lost reply: the connection is closed, and the request is sent again.
fn unanswered(error: sqlx::Error) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(error))
}

/// Turns an error of COMMIT into a lost reply, unless it proves that nothing was committed.
pub fn commit_error(error: sqlx::Error) -> sqlx::Error {
    if fault::refuses_commit(&error) { error } else { unanswered(error) }
}

/// Executes statements in a transaction, which is undone if they fail, or return `None`.
async fn transaction<DB: Store, T>(
    conn: &mut DB::Connection,
    statements: impl AsyncFnOnce(&mut DB::Connection) -> Reply<Option<T>>,
) -> Reply<Option<T>> {
    DB::execute_text(conn, DB::BEGIN_TEXT).await?;
    let done = async {
        let Some(value) = statements(conn).await? else { return Ok(None) };
        DB::execute_text(conn, DB::COMMIT_TEXT).await.map_err(commit_error)?;
        Ok(Some(value))
    }
    .await;
    if !matches!(done, Ok(Some(_))) {
        DB::undo(conn).await?;
    }
    done
}

/// The same for statements that return whether they changed anything.
async fn changed<DB: Store>(
    conn: &mut DB::Connection,
    statements: impl AsyncFnOnce(&mut DB::Connection) -> Reply<bool>,
) -> Reply<bool> {
    let changed = transaction::<DB, _>(conn, async |conn| Ok(statements(conn).await?.then_some(()))).await;
    changed.map(|changed| changed.is_some())
}

/// Encodes a text as hex, so that nothing in it needs escaping.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn hex(text: &str) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
    let mut digits = String::with_capacity(2 * text.len());
    digits.extend(text.bytes().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]));
    digits
}

/// A statement that the server carried out after its `not_after`. It changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLate {
    /// The server's clock, which is past `not_after`.
    pub now: DateTime<Utc>,
}

impl TooLate {
    /// Returns the reply to a statement that changed nothing, if `now` is past its limit.
    pub fn at(now: DateTime<Utc>, not_after: Option<DateTime<Utc>>) -> Option<Self> {
        not_after.filter(|limit| now > *limit).map(|_| Self { now })
    }
}

/// Returns a limit in microseconds since 1970.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn limit_micros(not_after: Option<DateTime<Utc>>) -> i64 {
    not_after.map_or(i64::MAX, |limit| limit.timestamp_micros())
}

/// Returns a length of time in microseconds.
fn micros(time: TimeDelta) -> i64 {
    time.num_microseconds().unwrap_or(i64::MAX)
}

/// The form of a store's statements, which the server and the table decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// For any server and table that the store supports.
    #[default]
    Common,
    /// For PostgreSQL itself. The server may be a primary that was replaced and answers reads
    /// still, or a standby.
    Postgres,
    /// For MySQL, where the server may be a member of a group (Group Replication).
    Group,
    /// For MariaDB: at a locked row they fail instead of waiting.
    MariaDb,
    /// For MariaDB, where the server may be a node of a Galera cluster.
    Galera,
    /// For SQLite: a file in WAL mode, and a table that keeps times as integers.
    IntegerTimes,
}

/// The sessions and transactions of a database.
pub trait Store: sqlx::Database {
    /// Whether only one connection writes at a time, and others that want to write sleep.
    const ONE_WRITER: bool = false;

    /// Returns whether sessions of the library's own may be opened beside this pool.
    fn has_own_sessions(_: &Pool<Self>) -> bool {
        true
    }

    /// Returns the options of own sessions. They mark a session as one that no other client uses,
    /// where the server reads such a mark, and set what a hook of the pool may not need.
    fn own_session(options: Options<Self>) -> Options<Self> {
        options
    }

    /// Returns whether a pooler between the client and the server rejected that mark.
    fn refuses_own_session(_: &sqlx::Error) -> bool {
        false
    }

    /// Sets the state of an own session that was just opened, whatever the defaults of the server
    /// and the role are, and whatever a hook of the pool has done. Returns the server's clock, or
    /// `None` if the session cannot be used, and the application's pool is to be used instead.
    fn begin_session(conn: &mut Self::Connection) -> impl Future<Output = Reply<Option<DateTime<Utc>>>> + Send;

    /// Reads the database's clock.
    fn now(conn: &mut Self::Connection) -> impl Future<Output = Reply<DateTime<Utc>>> + Send;

    /// Ensures that the next statement commits by itself: ends a transaction that the application,
    /// or a hook of its pool, has left open. Returns `false` if there was one.
    fn leave_transaction(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;

    /// A text that fails unless the session still has the settings of [`open`](Self::open): it
    /// commits nothing by itself, and does not write after a plain COMMIT or ROLLBACK. After a
    /// rollback by the server it writes until the next end. `None`: there are no such settings.
    const SETTINGS_STAND: Option<&'static str> = None;

    /// Begins a write transaction, with a savepoint by which [`INTACT`] and [`UNDO`] recognize it.
    /// Returns `false` if the connection is inside another transaction and has to be closed.
    fn open(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;

    /// Returns whether the database may live in memory, and be lost with its last connection.
    fn may_be_in_memory(_: &<Self::Connection as Connection>::Options) -> bool {
        false
    }

    /// Waits for the statement in flight on a connection and ends any open transaction, if the
    /// database is in memory. Returns `false` for any other database: as on failure, the connection
    /// has to be closed.
    fn make_idle(_: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send {
        std::future::ready(Ok(false))
    }

    /// Fails unless the connection is inside a transaction that can be committed. The server, or a
    /// statement of the application's, may have ended the one that the driver counts.
    fn in_transaction(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send {
        Self::execute_text(conn, INSIDE)
    }

    /// Begins and ends a transaction that the driver does not count. A connection that is dropped
    /// within it has to be closed.
    const BEGIN_TEXT: &'static str = "BEGIN";
    const COMMIT_TEXT: &'static str = "COMMIT";
    const ROLLBACK_TEXT: &'static str = "ROLLBACK";

    /// Executes a text without results, such as [`INTACT`] or [`UNDO`].
    fn execute_text(conn: &mut Self::Connection, sql: &'static str) -> impl Future<Output = Reply<()>> + Send;

    /// Ends a transaction that `BEGIN_TEXT` began, unless an error has ended it.
    fn undo(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send {
        async { Self::execute_text(conn, Self::ROLLBACK_TEXT).await.map_err(unanswered) }
    }

    /// Commits the transaction that [`open`](Self::open) began. Returns `false` if the connection
    /// has to be closed.
    fn commit(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send {
        async { Self::TransactionManager::commit(conn).await.map(|()| true) }
    }

    /// Rolls back what is open after [`open`](Self::open), which need not be the transaction that
    /// it began. Returns `false` if the connection has to be closed.
    fn roll_back(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send {
        async { Self::TransactionManager::rollback(conn).await.map(|()| true) }
    }
}

/// Fails unless the transaction that [`Store::open`] began is still open and sound, on every
/// database.
///
/// Work that ignores an error can continue after its transaction has ended (MySQL, MariaDB: each
/// statement then commits by itself), or in a transaction that the server silently rolls back on
/// COMMIT (PostgreSQL).
pub const INTACT: &str = "RELEASE SAVEPOINT rowlock";

/// Undoes what the transaction has done since [`Store::open`], also after an error that aborted it.
/// Fails if it is no longer open.
pub const UNDO: &str = "ROLLBACK TO SAVEPOINT rowlock";

/// The statements of [`Store::in_transaction`] on the servers. Without a transaction, one of the
/// two fails. The name is another one than that of [`INTACT`], which a confirmation within
/// `transaction` must not release.
const INSIDE: &str = "SAVEPOINT rowlock_inside; RELEASE SAVEPOINT rowlock_inside";

/// Converts a time of the table to UTC. If the result would lie beyond the calendar's range, the
/// time is returned unchanged.
pub fn to_utc(time: DateTime<Utc>, ahead: TimeDelta) -> DateTime<Utc> {
    time.checked_sub_signed(ahead).unwrap_or(time)
}
