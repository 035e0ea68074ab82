//! What the lock requires of a database.
//!
//! A store sends statements and reports what it saw; it takes no decision. Unless its documentation
//! says otherwise, an operation takes a slice, works on a borrowed connection, leaves no
//! transaction open, and waits for no row that another transaction has locked.
//!
//! This file has the claims and the changes of claims. `admin.rs`, `queue.rs`, `schema.rs`,
//! `version.rs`, `schedule.rs`, `instances.rs`, `orders.rs` and `changes.rs` have the other traits,
//! and `database.rs` all of them under one name. `stored_row.rs` reads rows. Each database has a
//! folder with a file for each trait. `fault.rs` is the one place that knows the codes of the
//! servers.
//!
//! # The row of a claim
//!
//! A row is that of a claim when
//!
//! ```text
//! lock_flag = 1 AND holder = ? AND token = ? AND claimed_at = begin_time AND end_time IS NULL
//! ```
//!
//! Every renewal, release and abandonment carries the whole condition. A program that knows only
//! the article's columns moves `begin_time` when it locks and sets `end_time` when it unlocks.
//! Where the columns keep whole seconds, the lock of such a program may leave `begin_time` equal to
//! `claimed_at`. The `end_time` of its unlock then shows the change.

pub mod admin;
pub mod changes;
pub mod database;
pub mod failure;
pub mod fault;
#[cfg(feature = "schedule")]
pub mod instances;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "schedule")]
pub mod orders;
#[cfg(feature = "postgres")]
mod postgres;
pub mod queue;
#[cfg(feature = "schedule")]
pub mod schedule;
#[cfg(feature = "schedule")]
mod schedule_row;
#[cfg(all(feature = "schedule", any(feature = "mysql", feature = "sqlite")))]
mod schedule_seen;
pub mod schema;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub mod servers;
#[cfg(feature = "sqlite")]
mod sqlite;
pub mod stored_row;
pub mod version;

pub use database::Database;

use std::{future::Future, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Connection, Pool};
use uuid::Uuid;

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    rules::{Row, Rules, Status, Terms},
};

/// The most claims or tickets that one statement names.
pub const BATCH: usize = 1000;

/// The options with which a pool opens its connections.
pub type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

/// The result of one statement, or the driver's error.
pub type Reply<T> = Result<T, sqlx::Error>;

/// A request to claim one key.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    pub key: Key,
    pub holder: Holder,
    /// The request has waited, and others may wait too: the row stays marked as awaited.
    pub waited: bool,
}

/// The reply of a claim statement to one [`ClaimRequest`].
#[derive(Clone, Debug)]
pub enum ClaimReply {
    /// The row belongs to the request's holder, under this token.
    Granted { token: Token, prior: Option<PreviousClaim> },
    /// The claim is not granted. The rules derive the reason from the row snapshot. Where they
    /// would grant the claim, the server carried the request out too late, which `now` then shows,
    /// another transaction had locked the row, not every key of the holder could be granted, or the
    /// claim requires a statement of its own.
    Seen { row: Option<Row>, now: DateTime<Utc> },
    /// Not kept: another key of the same holder could not be granted.
    Withheld,
}

/// Returns whether the requests are of several holders, which are independent of each other.
fn is_apart(requests: &[ClaimRequest]) -> bool {
    requests.windows(2).any(|pair| pair[0].holder != pair[1].holder)
}

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
#[cfg(feature = "schedule")]
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

/// Returns whether the server refused a statement, and the connection goes on. After any other
/// error it is unknown what was done.
pub fn is_undone(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some() && fault::fault(error) != fault::Fault::Outage
}

/// A change to a claim that stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `expires_at = now + lease`, and never earlier than before: a renewal that was delayed may be
    /// carried out after one with a longer lease, and two handles may hold the claim.
    Renew(TimeDelta),
    /// Frees the row after work that has completed.
    Release {
        status: Status,
        /// How far the table's times are ahead of UTC.
        offset: TimeDelta,
        /// The commit need not wait for the server's disk (PostgreSQL).
        asynchronous: bool,
    },
    /// `expires_at = now + delay`, and never later than before. The row stays locked: the work
    /// stopped without ending.
    Abandon(TimeDelta),
    /// Frees the row and restores what it was before the claim, which took it over from no other
    /// claim.
    PutBack,
}

impl Change {
    /// Returns the release of a claim that was granted on these terms. A run that is over must not
    /// be repeated within the minimum interval of any handle, and must stay over for programs that
    /// know no lease: such a release commits synchronously.
    pub fn release(status: Status, terms: &Terms, longest_interval: TimeDelta) -> Self {
        let ours_alone = terms.rules == Rules::Recover && terms.article_clients.is_none();
        let asynchronous = longest_interval.max(terms.min_interval).is_zero() && ours_alone;
        Self::Release { status, offset: terms.offset(), asynchronous }
    }
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

/// The outcome of a [`Change`] to one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The row was seen without the claim.
    Lost,
    /// The claim stands, but another transaction had locked the row. The lease has this long left.
    Skipped {
        left: TimeDelta,
    },
    /// The claim stands, and was not extended.
    TooLate(TooLate),
}

/// Returns the index of the first claim that is lost.
pub fn lost_among(outcomes: &[Outcome]) -> Option<usize> {
    outcomes.iter().position(|outcome| *outcome == Outcome::Lost)
}

/// Returns the least time left of the skipped claims, if there are any.
pub fn skipped_among(outcomes: &[Outcome]) -> Option<TimeDelta> {
    let left = |outcome: &Outcome| if let Outcome::Skipped { left } = outcome { Some(*left) } else { None };
    outcomes.iter().filter_map(left).min()
}

/// Returns whether a claim was not extended because the request was carried out too late.
pub fn late_among(outcomes: &[Outcome]) -> Option<TooLate> {
    outcomes.iter().find_map(|outcome| if let Outcome::TooLate(late) = outcome { Some(*late) } else { None })
}

/// Returns the claims that were skipped.
pub fn skipped(claims: Vec<Claim>, outcomes: &[Outcome]) -> Vec<Claim> {
    let outcomes = claims.into_iter().zip(outcomes);
    outcomes.filter(|(_, outcome)| matches!(outcome, Outcome::Skipped { .. })).map(|(claim, _)| claim).collect()
}

/// The outcome of a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmed {
    /// Counted. The claim has this many confirmations now.
    Done(i64),
    /// The row was seen without the claim.
    Lost,
    /// The claim stands, but another transaction had locked the row.
    Skipped,
    /// The transaction sees the row as it was before the claim was granted.
    TooOld,
}

/// A snapshot of a claim's row, read after a [`Change`] or a confirmation did not match the row.
#[derive(Clone, Copy, Debug)]
pub struct RowSnapshot {
    pub holder: Option<Uuid>,
    pub token: i64,
    pub locked: bool,
    /// Locked by rowlock, and not overwritten by another program.
    pub stands: bool,
    pub left: TimeDelta,
    pub now: DateTime<Utc>,
}

/// Derives the outcome of a change that matched no row.
pub fn unmatched(
    change: Change,
    claim: &Claim,
    seen: Option<RowSnapshot>,
    not_after: Option<DateTime<Utc>>,
) -> Outcome {
    let Some(seen) = seen.filter(|seen| seen.token == claim.token.get()) else { return Outcome::Lost };
    let ours = seen.stands && seen.holder == Some(*claim.holder.as_uuid());
    match change {
        // A token is never issued twice: an earlier request for this claim freed the row, and its
        // reply was lost. Another program that frees the row does not know the column `holder`, and
        // leaves it set.
        Change::Release { .. } | Change::Abandon(_) | Change::PutBack if !seen.locked && seen.holder.is_none() => {
            Outcome::Done
        }
        Change::Abandon(delay) if ours && seen.left <= delay => Outcome::Done,
        _ if !ours => Outcome::Lost,
        Change::Renew(_) => not_extended(seen.left, seen.now, not_after),
        _ => Outcome::Skipped { left: seen.left },
    }
}

/// Derives the outcome of an extension that did not match the row of a claim that stands.
fn not_extended(left: TimeDelta, now: DateTime<Utc>, not_after: Option<DateTime<Utc>>) -> Outcome {
    TooLate::at(now, not_after).map_or(Outcome::Skipped { left }, Outcome::TooLate)
}

/// Derives the outcome of a confirmation that matched no row. Tokens never decrease: a token below
/// the claim's is from before the claim.
pub fn unconfirmed(claim: &Claim, seen: Option<RowSnapshot>) -> Confirmed {
    match seen {
        Some(seen) if seen.token < claim.token.get() => Confirmed::TooOld,
        Some(seen)
            if seen.token == claim.token.get() && seen.stands && seen.holder == Some(*claim.holder.as_uuid()) =>
        {
            Confirmed::Skipped
        }
        _ => Confirmed::Lost,
    }
}

/// The form of a store's statements, which the server and the table decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// For any server and table that the store supports.
    #[default]
    Common,
    /// On MariaDB: at a locked row they fail instead of waiting.
    NoWait,
    /// On SQLite: for a file in WAL mode, and a table that keeps times as integers.
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

    /// Ensures that the next statement commits by itself: ends a transaction that the application,
    /// or a hook of its pool, has left open. Returns `false` if there was one. A session that has
    /// the mark of own ones begins its transactions at READ COMMITTED from then on.
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
    /// database is in memory. Returns `false` for any other database, and on failure: the
    /// connection has to be closed.
    fn make_idle(_: &mut Self::Connection) -> impl Future<Output = bool> + Send {
        std::future::ready(false)
    }

    /// Fails unless the connection is inside a transaction that can be committed. The server, or a
    /// statement of the application's, may have ended the one that the driver counts.
    fn in_transaction(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;

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
    fn commit(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;

    /// Rolls back what is open after [`open`](Self::open), which need not be the transaction that
    /// it began. Returns `false` if the connection has to be closed.
    fn roll_back(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;
}

/// Claims of rows, and their creation.
///
/// A server may carry a statement out long after its client has given it up. A statement that
/// grants or extends therefore has a limit, `not_after`: a time on the server's clock after which
/// it changes nothing. `None` is no limit. The server reads its clock for the comparison after it
/// has locked the row. A statement that locks the row after `not_after` therefore sees all that the
/// limited one will ever change.
pub trait ClaimStore: Store {
    /// Creates rows: free, `S`, begun at the epoch, so that every rule set grants them. An existing
    /// row is left unchanged. The statement may wait for another transaction's uncommitted insert,
    /// for `lock_timeout` where the server supports such a limit.
    fn create(
        conn: &mut Self::Connection,
        keys: &[Key],
        minutes: i32,
        lock_timeout: Duration,
        form: Form,
    ) -> impl Future<Output = Reply<()>> + Send;

    /// Claims the rows that the rules grant. Returns one reply per request, in order. The requests
    /// are either of one holder, which gets all of them or none, or each of another holder for
    /// another key, and then independent of each other.
    ///
    /// After `not_after` nothing is granted, and a claim that the holder has already is not
    /// extended: the reply is [`ClaimReply::Seen`], with a `now` past `not_after` if there is a
    /// row. Of several keys of one holder, at least one has that reply.
    fn claim(
        conn: &mut Self::Connection,
        requests: &[ClaimRequest],
        terms: &Terms,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> impl Future<Output = Reply<Vec<ClaimReply>>> + Send;

    /// Reads the rows without locking them. A locking read of several rows would keep those that
    /// are not claimed from others. Returns one reply per request, in order.
    fn look(
        conn: &mut Self::Connection,
        requests: &[ClaimRequest],
        terms: &Terms,
    ) -> impl Future<Output = Reply<Vec<ClaimReply>>> + Send;
}

/// Changes of claims that stand, and their confirmations. Limits are as for [`ClaimStore`].
pub trait HeldStore: Store {
    /// Counts a confirmation on the claim's row, in the caller's transaction. The row stays locked
    /// until the transaction ends.
    fn confirm(conn: &mut Self::Connection, claim: &Claim) -> impl Future<Output = Reply<Confirmed>> + Send;

    /// Returns how many transactions have confirmed the claim, after waiting for any transaction
    /// that has locked its row; `None` if the claim does not stand.
    fn confirms(conn: &mut Self::Connection, claim: &Claim) -> impl Future<Output = Reply<Option<i64>>> + Send;

    /// Applies one change to all claims that stand. Returns one outcome per claim, in order.
    ///
    /// After `not_after` nothing is extended. Changes that end a claim have no limit: they are
    /// carried out at any time.
    fn change(
        conn: &mut Self::Connection,
        claims: &[Claim],
        change: Change,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> impl Future<Output = Reply<Vec<Outcome>>> + Send;
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
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const INSIDE: &str = "SAVEPOINT rowlock_inside; RELEASE SAVEPOINT rowlock_inside";

/// Converts a time of the table to UTC. If the result would lie beyond the calendar's range, the
/// time is returned unchanged.
pub fn to_utc(time: DateTime<Utc>, ahead: TimeDelta) -> DateTime<Utc> {
    time.checked_sub_signed(ahead).unwrap_or(time)
}
