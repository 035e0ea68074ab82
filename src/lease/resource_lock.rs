//! The pessimistic lock as a [`ResourceLock`], and its transactions.

use std::time::Duration;

use sqlx::Pool;

use crate::{
    error::Error,
    grant::Grant,
    key::Claim,
    lease::{confirm, lock::LeaseLock},
    lock::{BoxFuture, CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
    store::Database,
    transaction::{
        self,
        error::{RunError, WorkError},
        tx::Tx,
    },
};

impl<DB: Database> LeaseLock<DB> {
    /// Runs `work` in a transaction that commits only if the claim on `key` stands until its end:
    /// acquire, begin, confirm, work, commit, release.
    ///
    /// Conflicts, losses before the commit, and errors that mean contention, including those that
    /// the work itself met, are rolled back and retried. Each attempt calls a clone of the work, as
    /// it was passed. The work may run several times, so it does nothing outside the transaction.
    /// The isolation level is the connection's, because a
    /// statement that sets it comes too late. The work returns every database error, neither
    /// commits nor rolls back, and returns the transaction by dropping it. Contention in the work
    /// is detected through its error's chain of sources ([`WorkError`]). On MySQL and MariaDB a
    /// statement that commits by itself commits what the work wrote before it, which stands. If the
    /// statement writes (`CREATE`, `TRUNCATE`), it is then refused at once (1792), and so are all
    /// later writes of the work.
    ///
    /// A failure to release after the commit is not a failure of the transaction. It is logged, and
    /// the lease ends by itself.
    ///
    /// # Errors
    /// [`RunError::Work`] is the work's own error, after a rollback. [`RunError::Refused`] is
    /// returned if the key was not available in time. [`RunError::Other`] contains
    /// [`Error::Conflict`] when the retries are used up. It contains [`Error::Transaction`] if it
    /// cannot be determined whether the transaction was committed, or if the transaction ended
    /// before its commit: the work ended it, or continued after an error that ended it. The error
    /// says what may stand. After every other error nothing was committed.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit is sent, nothing is committed. If it is dropped
    /// later, the commit may stand. The claim is abandoned and the connection closed. The key stays
    /// closed for the [`lock_delay`](Self::lock_delay), because tasks of the work may
    /// still run; a transaction that returns keeps no delay.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # rowlock::migrate(&pool).await?;
    /// let lock = rowlock::LeaseLock::new(pool);
    /// let paid = lock.transaction("alice", async |mut tx| {
    ///     let sql = "UPDATE account SET balance = balance - 30 WHERE id = 'alice'";
    ///     sqlx::query(sql).execute(&mut *tx).await?;
    ///     Ok::<_, sqlx::Error>(tx.claim().token)
    /// });
    /// println!("committed under token {}", paid.await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, |wait| ResourceLock::acquire(self, key, wait), work).await
    }
}

impl<DB: Database> ResourceLock<DB> for LeaseLock<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move { Ok(LeaseLock::acquire(self, key, wait).await?.into()) })
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm::confirm::<DB>(claim, tx, self.shared.time_limit))
    }

    fn pool(&self) -> &Pool<DB> {
        self.shared.sessions.application()
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm::confirm_within::<DB>(claim, tx, self.shared.time_limit))
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(confirm::commit_outcome(&self.shared.sessions, claim, confirmation, self.shared.time_limit))
    }

    fn terms(&self) -> TransactionTerms {
        let time_limit = self.shared.time_limit;
        TransactionTerms { retry: self.retry, time_limit, ..TransactionTerms::default() }
    }
}
