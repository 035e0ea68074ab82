//! How a transaction that is not committed is undone, and what is known of it then.

use std::time::Duration;

use sqlx::Pool;
use sqlx_core::transaction::TransactionManager as _;

use crate::{
    action::Certainty,
    error::Error,
    key::Claim,
    lock::{CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
    session::{loan::Loan, time::Instant, timers::timeout_at},
    store::{Database, UNDO, is_undone},
};

/// How long a rollback may take before the connection is closed instead.
const ROLLBACK: Duration = Duration::from_secs(5);

/// What is known of a transaction that was to be undone.
pub(super) enum Undone {
    /// Everything since the begin was undone.
    Wholly,
    /// The same, as it seems: no count of confirmations excludes that a transaction of the work's
    /// own, which may write too, has taken its place.
    Apparently,
    /// The connection is lost, so that the server rolls back. Nothing shows a commit.
    WithConnection,
    /// A part of it stands, or may stand.
    No(Certainty),
}

/// One attempt under one claim.
pub(super) struct Fenced<'a, DB: Database, L: ?Sized> {
    pub lock: &'a L,
    pub terms: TransactionTerms,
    pub pool: &'a Pool<DB>,
    pub claim: &'a Claim,
    pub until: Instant,
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> Fenced<'_, DB, L> {
    pub fn limit(&self) -> Instant {
        Instant::now() + self.terms.time_limit
    }

    /// Undoes everything since the begin, and returns what is known then.
    pub async fn undo(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Undone {
        match timeout_at(self.limit(), DB::execute_text(conn.get(), UNDO)).await {
            Ok(Ok(())) => {
                roll_back(conn).await;
                return Undone::Wholly;
            }
            Ok(Err(error)) if is_undone(&error) => {}
            _ => {
                // The server ends what it has not committed.
                drop(conn);
                return self.lost(confirmation).await;
            }
        }
        if !self.was_rolled_back(&mut conn, confirmation).await {
            drop(conn);
        } else if roll_back(conn).await {
            return if confirmation.is_some() { Undone::Wholly } else { Undone::Apparently };
        }
        // The count does not show what followed a rollback by the server.
        let is_committed = self.outcome(confirmation).await == CommitOutcome::Committed;
        Undone::No(if is_committed { Certainty::InPart } else { Certainty::Unknown })
    }

    /// Returns what the count of confirmations shows of a commit.
    pub async fn outcome(&self, confirmation: Option<Confirmation>) -> CommitOutcome {
        match confirmation {
            Some(confirmation) => self.lock.commit_outcome(self.claim, confirmation).await,
            None => CommitOutcome::Unknown,
        }
    }

    /// Returns what is known of a transaction whose connection is lost. A statement that commits by
    /// itself may have preceded the loss, which only a count of confirmations shows.
    pub async fn lost(&self, confirmation: Option<Confirmation>) -> Undone {
        match self.outcome(confirmation).await {
            CommitOutcome::Committed => Undone::No(Certainty::InPart),
            CommitOutcome::Unknown if confirmation.is_some() => Undone::No(Certainty::Unknown),
            CommitOutcome::Unknown | CommitOutcome::RolledBack => Undone::WithConnection,
        }
    }

    /// Returns whether it was the server that ended the transaction, and no commit has followed:
    /// the claim can still be written, with the count that it had.
    async fn was_rolled_back(&self, conn: &mut Loan<DB>, confirmation: Option<Confirmation>) -> bool {
        let Some(settings) = DB::SETTINGS_STAND else { return false };
        // If the work has switched autocommit on, the write would be committed.
        if !matches!(timeout_at(self.limit(), DB::execute_text(conn.get(), settings)).await, Ok(Ok(()))) {
            return false;
        }
        match self.lock.confirm_within(self.claim, conn.get()).await {
            Ok(count) => confirmation.is_none_or(|first| first == count),
            // Another transaction has raised the version since. The write was tried.
            Err(error) => confirmation.is_none() && matches!(error, Error::Conflict { .. }),
        }
    }
}

/// Gives the connection back if the transaction is certainly over, and closes it otherwise: the
/// rollback has no reply, the work left a transaction of its own within this one, or the work ended
/// this one itself, so that the driver's count is wrong. Returns whether the transaction is over.
pub(super) async fn roll_back<DB: Database>(mut conn: Loan<DB>) -> bool {
    if DB::TransactionManager::get_transaction_depth(conn.peek()) != 1 {
        return false;
    }
    let limit = Instant::now() + ROLLBACK;
    match timeout_at(limit, DB::roll_back(conn.get())).await {
        Ok(Ok(reusable)) => {
            if reusable {
                conn.give_back();
            }
            true
        }
        reply => {
            tracing::debug!(?reply, "not rolled back for certain; closing the connection does it");
            false
        }
    }
}
