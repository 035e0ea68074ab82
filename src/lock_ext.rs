//! Running work under a key, for every lock.

use tokio::time::Instant;

use crate::{
    error::Error,
    key::Claim,
    lock::{Attempt, Grant, ResourceLock},
    rules::{Refusal, Status},
    store::Database,
    transaction::{self, TransactionError, Tx, WorkError},
};

/// The outcome of [`ResourceLockExt::run`].
#[derive(Debug)]
#[must_use = "the work may have been refused, cancelled, or have failed"]
pub enum RunOutcome<T, E> {
    /// The work did not start.
    Refused(Refusal),
    /// The work completed.
    Ended {
        /// The work's own result.
        result: Result<T, E>,
        /// Whether the row records the result as `S` or `F`. If not, the next holder may not know
        /// that the work ended. A handle ([`Grant::reenter`]) that outlives the work continues to
        /// hold the key, and the row records the status with which that handle ends.
        recorded: Result<(), Error>,
    },
    /// The lease was lost, and the work was cancelled before it completed.
    Lost(Claim),
}

/// Methods that every [`ResourceLock`] has.
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Runs `work` under `key` if the key is available now, and releases the key as succeeded or
    /// failed according to the work's result.
    ///
    /// The work is cancelled (its future is dropped) when a lease is lost. Pass
    /// [`Grant::cancellation_token`] to the tasks that it spawns. Work that blocks its thread
    /// cannot be cancelled, and on a single-threaded runtime it stops the renewals: run it in
    /// `spawn_blocking`, and let it check [`Grant::is_held`]. A panic abandons the key. A version
    /// excludes no other holder: work that is to run only once, or that writes, belongs under a
    /// lease or into [`transaction`](Self::transaction).
    ///
    /// To run the work in a task of its own:
    ///
    /// `tokio::spawn(async move { lock.run("key", async move |grant| { ... }).await })`
    ///
    /// # Errors
    /// As [`ResourceLock::try_acquire`]. [`RunOutcome`] reports what happens after the start.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped and the key is abandoned in the background.
    /// The next claim may take over at once.
    fn run<T, E, W>(&self, key: &str, work: W) -> impl Future<Output = Result<RunOutcome<T, E>, Error>>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>;

    /// Runs `work` in a transaction that commits only if the claim on `key` stands until its end:
    /// acquire, begin, work, confirm, commit, release.
    ///
    /// Conflicts, losses before the commit, and errors that mean contention, including those that
    /// the work itself met, are rolled back and retried. The work may run several times, so it does
    /// nothing outside the transaction. The isolation level is the connection's, because a
    /// statement that sets it comes too late. The work returns every database error, neither
    /// commits nor rolls back, and returns the transaction by dropping it. Contention in the work
    /// is detected through its error's chain of sources ([`WorkError`]).
    ///
    /// A failure to release after the commit is not a failure of the transaction. It is logged, and
    /// the lease ends by itself.
    ///
    /// # Errors
    /// [`TransactionError::Work`] is the work's own error, after a rollback.
    /// [`TransactionError::Refused`] is returned if the key was not available in time.
    /// [`TransactionError::Failed`] contains [`Error::Conflict`] when the retries are used up, and
    /// [`Error::CommitUnknown`] if it cannot be determined whether the transaction was committed.
    /// After every other error nothing was committed.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit is sent, nothing is committed. If it is dropped
    /// later, the commit may stand. The claim is abandoned and the connection closed.
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
