//! What a database must do for the lock, and nothing more.
//!
//! A store sends statements and reports what it saw; it takes no decision. Every operation takes a
//! slice, works on a connection that it is lent, leaves no transaction open, and waits for no row that
//! another transaction has locked.

pub mod admin;
pub mod connection;
pub mod failure;
pub mod fault;
#[cfg(feature = "mysql")]
mod mysql;
pub mod pools;
#[cfg(feature = "postgres")]
mod postgres;
pub mod queue;
pub mod schema;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub mod servers;
#[cfg(feature = "sqlite")]
mod sqlite;
pub mod version;

use std::{future::Future, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::Connection;
use uuid::Uuid;

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    rules::{Row, Status, Terms},
};

/// The most claims or tickets that one statement names.
pub const BATCH: usize = 1000;

/// One statement's worth of result, or the driver's error.
pub type Reply<T> = Result<T, sqlx::Error>;

/// A request for one key.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    pub key: Key,
    pub holder: Holder,
    /// It has waited, and so may others: the row goes on saying so.
    pub waited: bool,
}

/// What a claim statement came back with, for one [`ClaimRequest`].
#[derive(Clone, Debug)]
pub enum ClaimReply {
    /// The row is the asker's, under this token.
    Granted { token: Token, prior: Option<PreviousClaim> },
    /// It is not. The rules tell why from the row that was seen; where they would grant it,
    /// somebody's transaction was at the row, or its holder asked for more than could be had, or it
    /// takes a statement of its own.
    Seen { row: Option<Row>, now: DateTime<Utc> },
    /// Taken and put back: another key of its holder's could not be had.
    Withheld,
}

/// Whether they are of several holders, who have nothing to do with each other.
fn is_apart(asks: &[ClaimRequest]) -> bool {
    asks.windows(2).any(|pair| pair[0].holder != pair[1].holder)
}

/// Whether the last of these claims was refused: of a holder that gets all or nothing, none is asked for after it.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn is_refused(answers: &[ClaimReply]) -> bool {
    matches!(answers.last(), Some(ClaimReply::Seen { .. }))
}

/// The answers to `count` claims that were rolled back.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn put_back(answers: Vec<ClaimReply>, count: usize) -> Vec<ClaimReply> {
    let seen = |answer| if matches!(answer, ClaimReply::Granted { .. }) { ClaimReply::Withheld } else { answer };
    answers.into_iter().map(seen).chain(std::iter::repeat(ClaimReply::Withheld)).take(count).collect()
}

/// As if the reply had been lost: the connection is closed, and what was sent is asked for again.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn unanswered(error: sqlx::Error) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(error))
}

/// A change to a claim that stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `expires_at = now + lease`.
    Renew(TimeDelta),
    /// Free, with this status.
    Release(Status),
    /// `expires_at = now`, still locked: stopped, not ended.
    Abandon,
    /// Free, and as it was before the claim, which took it from no other.
    PutBack,
}

/// What became of a [`Change`] to one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The row was seen without the claim.
    Lost,
    /// The claim stands, but somebody's transaction was at the row; it has this long left.
    Skipped {
        left: TimeDelta,
    },
}

/// The first of them that is lost.
pub fn lost_among(outcomes: &[Outcome]) -> Option<usize> {
    outcomes.iter().position(|outcome| *outcome == Outcome::Lost)
}

/// How long the first of them still holds that somebody was at, if there is one.
pub fn skipped_among(outcomes: &[Outcome]) -> Option<TimeDelta> {
    let left = |outcome: &Outcome| if let Outcome::Skipped { left } = outcome { Some(*left) } else { None };
    outcomes.iter().filter_map(left).min()
}

/// Those of these claims that somebody was at.
pub fn skipped(claims: Vec<Claim>, outcomes: &[Outcome]) -> Vec<Claim> {
    let outcomes = claims.into_iter().zip(outcomes);
    outcomes.filter(|(_, outcome)| matches!(outcome, Outcome::Skipped { .. })).map(|(claim, _)| claim).collect()
}

/// What a confirmation came back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmed {
    /// Counted: so many by now.
    Done(i64),
    /// The row was seen without the claim.
    Lost,
    /// The claim stands, but somebody's transaction was at the row.
    Skipped,
    /// The transaction sees the row as it was before the claim was granted.
    TooOld,
}

/// What was seen of the row of a claim that a [`Change`] did not match.
#[derive(Clone, Copy, Debug)]
pub struct RowSnapshot {
    pub holder: Option<Uuid>,
    pub token: i64,
    pub locked: bool,
    /// Locked by rowlock, not trampled on.
    pub stands: bool,
    pub left: TimeDelta,
}

/// Reads the outcome of a change that matched nothing.
pub fn unmatched(change: Change, claim: &Claim, seen: Option<RowSnapshot>) -> Outcome {
    let Some(seen) = seen.filter(|seen| seen.token == claim.token.get()) else { return Outcome::Lost };
    let ours = seen.stands && seen.holder == Some(*claim.holder.as_uuid());
    match change {
        // A token is never given twice: the row was freed by an earlier request of ours whose reply was lost.
        // Another program that frees our claim knows nothing of the holder, and leaves it.
        Change::Release(_) | Change::Abandon | Change::PutBack if !seen.locked && seen.holder.is_none() => {
            Outcome::Done
        }
        Change::Abandon if ours && seen.left <= TimeDelta::zero() => Outcome::Done,
        _ if ours => Outcome::Skipped { left: seen.left },
        _ => Outcome::Lost,
    }
}

/// Reads what a confirmation that matched nothing has seen. Tokens never fall: one below the claim's is of a time before it.
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

/// The statements of the lock on a database.
pub trait Store: sqlx::Database {
    /// Whether locks open connections of their own beside the application's pool.
    const OWN_CONNECTIONS: bool;

    /// Makes sure that the next statement commits by itself, on a connection that was used by others.
    /// `false`: it is inside a transaction, and has to be closed.
    fn leave_transaction(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;

    /// Begins a transaction that writes, with a savepoint by which [`intact`](Self::intact) knows it
    /// again. `false`: the connection is inside a transaction of others, and has to be closed.
    fn open(conn: &mut Self::Connection) -> impl Future<Output = Reply<bool>> + Send;

    /// Whether the database may live in memory, and be gone with its last connection.
    fn may_be_in_memory(_: &<Self::Connection as Connection>::Options) -> bool {
        false
    }

    /// Waits for the statement that is under way on a connection and ends whatever transaction is open there, where it is a database in memory.
    /// Otherwise, and where that fails, `false`: it is to be closed.
    fn rest(_: &mut Self::Connection) -> impl Future<Output = bool> + Send {
        std::future::ready(false)
    }

    /// Creates a row: free, `S`, begun at the epoch, so that every rule set may take it. An existing row is left as it is.
    /// It may wait for another's uncommitted insert, for `patience` at most where the server can be told so.
    fn create(
        conn: &mut Self::Connection,
        keys: &[Key],
        minutes: i32,
        patience: Duration,
    ) -> impl Future<Output = Reply<()>> + Send;

    /// Takes the rows that the rules grant; one answer an ask, in order. They are of one holder, who gets all of them or
    /// none, or each of another, for another key, and has nothing to do with the others.
    /// `nowait`: a statement can be told not to wait for a locked row.
    fn claim(
        conn: &mut Self::Connection,
        asks: &[ClaimRequest],
        terms: &Terms,
        nowait: bool,
    ) -> impl Future<Output = Reply<Vec<ClaimReply>>> + Send;

    /// In the caller's transaction: counts a confirmation on the claim's row, which stays locked to the transaction's end.
    fn confirm(conn: &mut Self::Connection, claim: &Claim) -> impl Future<Output = Reply<Confirmed>> + Send;

    /// Fails unless the transaction that [`open`](Self::open) began is still open and sound.
    fn intact(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;

    /// How many transactions have confirmed the claim, once whoever is at its row has gone; `None` if the claim does not stand.
    fn confirms(conn: &mut Self::Connection, claim: &Claim) -> impl Future<Output = Reply<Option<i64>>> + Send;

    /// Applies one change to all claims that stand; one outcome a claim, in order. `nowait` as for [`claim`](Self::claim).
    fn change(
        conn: &mut Self::Connection,
        claims: &[Claim],
        change: Change,
        terms: &Terms,
        nowait: bool,
    ) -> impl Future<Output = Reply<Vec<Outcome>>> + Send;
}

/// What [`Store::intact`] sends, on every database.
///
/// Work that swallows an error can go on in a transaction that is over (MySQL, MariaDB: statements then commit one by one) or that the server
/// will roll back on COMMIT without a word (PostgreSQL).
pub const INTACT: &str = "RELEASE SAVEPOINT rowlock";

/// A time as it stands in the table, brought to UTC; beyond the calendar's ends it stays where it is.
pub fn to_utc(time: DateTime<Utc>, ahead: TimeDelta) -> DateTime<Utc> {
    time.checked_sub_signed(ahead).unwrap_or(time)
}

/// A database that rowlock works on: `sqlx::Postgres`, `sqlx::MySql` (MariaDB too) or `sqlx::Sqlite`.
#[diagnostic::on_unimplemented(
    message = "rowlock was built without its feature for `{Self}`",
    label = "a feature of rowlock is missing",
    note = "add it in Cargo.toml: `rowlock = {{ features = [\"postgres\"] }}`, or \"mysql\" (MariaDB too), or \"sqlite\" (the default)"
)]
pub trait Database: admin::AdminStore + schema::SchemaStore + version::VersionStore + queue::QueueStore {}

// What is missing is the feature, not one of these.
#[diagnostic::do_not_recommend]
impl<DB: admin::AdminStore + schema::SchemaStore + version::VersionStore + queue::QueueStore> Database for DB {}
