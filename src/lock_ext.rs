//! What is written once for every lock: work that runs under a key.

use tokio::time::Instant;

use crate::{
    error::Error,
    key::Claim,
    lock::{Attempt, Grant, ResourceLock},
    rules::{Refusal, Status},
    store::Database,
    transaction::{self, TransactionError, Tx, WorkError},
};

/// What became of [`ResourceLockExt::run`].
#[derive(Debug)]
#[must_use = "the work may have been refused, cancelled, or have failed"]
pub enum RunOutcome<T, E> {
    /// The work did not start.
    Refused(Refusal),
    /// The work came to its end.
    Ended {
        /// Its own result.
        result: Result<T, E>,
        /// Whether the row tells so: `S` or `F`. If not, the next one may not know that it ended.
        /// A handle ([`Grant::reenter`]) that outlives the work holds the key on, and the row tells what that one ends with.
        recorded: Result<(), Error>,
    },
    /// The lease was lost and the work cancelled on the way.
    Lost(Claim),
}

/// What every [`ResourceLock`] can do.
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Runs `work` under the key, if it can be had now: releases it as succeeded or failed by the work's result.
    ///
    /// The work is cancelled (its future is dropped) when a lease is lost; hand [`Grant::cancellation_token`] to the tasks
    /// that it spawns. Work that blocks its thread cannot be cancelled, and on a runtime of one thread it stops the renewals:
    /// put it into `spawn_blocking`, and let it look at [`Grant::is_held`]. A panic abandons the key.
    /// A version keeps nobody out: work that is to run once only, or that writes, belongs under a lease or into [`transaction`](Self::transaction).
    ///
    /// In a task of its own: `tokio::spawn(async move { lock.run("key", async move |grant| { ... }).await })`.
    ///
    /// # Errors
    /// As [`ResourceLock::try_acquire`]. What happens after the start is told by [`Run`].
    ///
    /// # Cancel safety
    /// Dropped, it drops the work and abandons the key in the background: the next one may take over at once.
    fn run<T, E, W>(&self, key: &str, work: W) -> impl Future<Output = Result<RunOutcome<T, E>, Error>>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>;

    /// Runs `work` in a transaction that commits only if the claim on `key` stands to its end: acquire, begin, work, confirm, commit, release.
    ///
    /// Conflicts, losses before the commit, and errors that mean contention, also those that the work itself met, are rolled back and tried again:
    /// the work may run several times, and keeps to the transaction. The isolation level is the connection's: a statement that sets it comes too late. The work lets every database error out, neither commits nor rolls back, and gives
    /// the transaction back by dropping it. A work that ran into contention is known by its error's chain of sources ([`WorkError`]).
    ///
    /// A failure to release after the commit is no failure of the transaction: it goes into the log, and the lease ends by itself.
    ///
    /// # Errors
    /// [`TransactionError::Work`], rolled back, is the work's own; [`TransactionError::Refused`] if the key was not to be had in time;
    /// [`TransactionError::Failed`] with [`Error::Conflict`] when the retries are used up, with [`Error::CommitUnknown`] if nobody can tell
    /// whether it was committed. After every other error nothing was committed.
    ///
    /// # Cancel safety
    /// Dropped before the commit is sent, it leaves nothing behind; later, the commit may stand. The claim is abandoned, the connection closed.
    fn transaction<T, E, W, F>(&self, key: &str, work: W) -> impl Future<Output = Result<T, TransactionError<E>>>
    where
        E: WorkError,
        W: FnMut(Tx<DB>, Claim) -> F,
        F: Future<Output = Result<T, E>>;
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {
    async fn run<T, E, W>(&self, key: &str, work: W) -> Result<RunOutcome<T, E>, Error>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
    {
        let grant = match self.try_acquire(key).await? {
            Attempt::Acquired(grant) => grant,
            Attempt::Refused(refusal) => {
                tracing::info!(key, outcome = "refused", reason = %refusal.reason, "run");
                return Ok(RunOutcome::Refused(refusal));
            }
        };
        let started = Instant::now();
        let (key, token) = (grant.key().clone(), grant.token());
        let ended = |outcome| tracing::info!(%key, %token, outcome, wall = ?started.elapsed(), "run");
        let result = tokio::select! {
            biased;
            result = work(&grant) => result,
            () = grant.lost() => {
                ended("lost");
                return Ok(RunOutcome::Lost(grant.claim().clone()));
            }
        };
        ended(if result.is_ok() { "succeeded" } else { "failed" });
        let status = if result.is_ok() { Status::Succeeded } else { Status::Failed };
        let recorded = self.release(grant, status).await;
        Ok(RunOutcome::Ended { result, recorded })
    }

    async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, TransactionError<E>>
    where
        E: WorkError,
        W: FnMut(Tx<DB>, Claim) -> F,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, work).await
    }
}
