//! Claims of keys, and the changes of claims that stand.
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

use std::{future::Future, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::{
    key::{Claim, Holder, Key, PreviousClaim, Token},
    rules::{Row, Rules, Status, Terms},
    store::{Form, Reply, Store, TooLate},
};

/// The holder of a row whose claim has ended and is to be taken over, after a claim that took it
/// over was put back.
pub const NO_HOLDER: Uuid = Uuid::nil();

/// The most claims or tickets that one statement names.
pub const BATCH: usize = 1000;

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
pub fn is_apart(requests: &[ClaimRequest]) -> bool {
    requests.windows(2).any(|pair| pair[0].holder != pair[1].holder)
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
    /// until the transaction ends. An attempt that skipped the row may be repeated: it has read
    /// nothing as of which the transaction would see all rows.
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
    /// Restores what the row was before the claim. A claim that was taken over is one that has
    /// ended again: the next claim takes it over, as if this one had not been made. No work was
    /// begun under this one, so its token stays used and is reported to no holder. The row then has
    /// [`NO_HOLDER`], and a takeover keeps its `prior_token`.
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

impl RowSnapshot {
    /// Returns whether the claim stands.
    fn is_of(&self, claim: &Claim) -> bool {
        self.stands && (self.token, self.holder) == (claim.token.get(), Some(*claim.holder.as_uuid()))
    }
}

/// Derives the outcome of a change that matched no row.
pub fn unmatched(
    change: Change,
    claim: &Claim,
    seen: Option<RowSnapshot>,
    not_after: Option<DateTime<Utc>>,
) -> Outcome {
    let Some(seen) = seen.filter(|seen| seen.token == claim.token.get()) else { return Outcome::Lost };
    let (ours, left) = (seen.is_of(claim), seen.left);
    let freed = seen.holder.map_or(!seen.locked, |holder| holder == NO_HOLDER);
    match change {
        // A token is never issued twice: an earlier request for this claim freed the row, and its
        // reply was lost. Another program that frees the row does not know the column `holder`, and
        // leaves it set.
        Change::Release { .. } | Change::Abandon(_) | Change::PutBack if freed => Outcome::Done,
        Change::Abandon(delay) if ours && left <= delay => Outcome::Done,
        _ if !ours => Outcome::Lost,
        Change::Renew(_) => not_extended(left, seen.now, not_after),
        _ => Outcome::Skipped { left },
    }
}

/// Derives the outcome of an extension that did not match the row of a claim that stands.
pub fn not_extended(left: TimeDelta, now: DateTime<Utc>, not_after: Option<DateTime<Utc>>) -> Outcome {
    TooLate::at(now, not_after).map_or(Outcome::Skipped { left }, Outcome::TooLate)
}

/// Derives the outcome of a confirmation that matched no row. Tokens never decrease: a token below
/// the claim's is from before the claim.
pub fn unconfirmed(claim: &Claim, seen: Option<RowSnapshot>) -> Confirmed {
    match seen {
        Some(seen) if seen.token < claim.token.get() => Confirmed::TooOld,
        Some(seen) if seen.is_of(claim) => Confirmed::Skipped,
        _ => Confirmed::Lost,
    }
}
