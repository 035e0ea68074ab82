//! The pessimistic lock as a [`ResourceLock`], and its transactions. A commit depends on a lease by
//! the count of confirmations in the lease's row.

use std::{future::pending, pin::pin, time::Duration};

use sqlx::Pool;

use crate::{
    action::{Action, Certainty},
    error::Error,
    grant::Grant,
    key::Claim,
    lease::{claims::RangeRead, lock::LeaseLock},
    lock::{BoxFuture, CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
    retry::{Repeat, pause},
    session::{queue::Limits, time::Instant, timers::timeout_at},
    store::{
        Confirmed, Database,
        admin::{KeyRange, Listed},
        failure::Failure,
        fault::Fault,
    },
    transaction::{
        self,
        error::{RunError, WorkError},
        in_transaction,
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
        transaction::run(self, key, &|wait| ResourceLock::acquire(self, key, wait), work).await
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
        Box::pin(async move {
            in_transaction::<DB>(tx, &claim.key, self.shared.time_limit).await?;
            self.confirm_within(claim, tx).await
        })
    }

    fn pool(&self) -> &Pool<DB> {
        self.shared.sessions.application()
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm_open(self, claim, tx))
    }

    /// The outcome shows in the row's count, which only confirmations under this claim change.
    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(async move {
            let limit = Instant::now() + self.shared.time_limit;
            // The sessions that are idle may have been lost together with that of the commit, which
            // a ping shows. The statement waits for a transaction that is not decided yet.
            let confirms = async |conn: &mut DB::Connection| DB::confirms(conn, claim).await;
            let mut repeat = Repeat::until(limit);
            let count = loop {
                let count = self.shared.sessions.send_once(limit, confirms).await;
                if let Some(count) = repeat.final_or_pause(count).await {
                    break count;
                }
            };
            match count {
                Ok(Some(count)) if count == confirmation.0 => CommitOutcome::Committed,
                Ok(Some(count)) if count == confirmation.0 - 1 => CommitOutcome::RolledBack,
                _ => CommitOutcome::Unknown,
            }
        })
    }

    fn terms(&self) -> TransactionTerms {
        let time_limit = self.shared.time_limit;
        TransactionTerms { retry: self.retry, time_limit, ..TransactionTerms::default() }
    }
}

/// Counts a confirmation in a transaction that is known to be open. While another transaction has
/// the row locked, it retries instead of blocking, so that no statement outlives its limit.
async fn confirm_open<DB: Database>(
    lock: &LeaseLock<DB>,
    claim: &Claim,
    tx: &mut DB::Connection,
) -> Result<Confirmation, Error> {
    let (key, time_limit) = (claim.key.clone(), lock.shared.time_limit);
    let limit = Instant::now() + time_limit;
    let mut lost = pin!(lost_elsewhere(lock, claim, limit));
    loop {
        let failure = match timeout_at(limit, DB::confirm(tx, claim)).await {
            Ok(Ok(Confirmed::Done(count))) => return Ok(Confirmation(count)),
            Ok(Ok(Confirmed::Lost)) => return Err(Error::Lost { key, token: claim.token }),
            Ok(Ok(Confirmed::TooOld)) => return Err(Error::conflict(key, 1)),
            Ok(Ok(Confirmed::Skipped)) if Instant::now() < limit => {
                tokio::select! {
                    () = &mut lost => return Err(Error::Lost { key, token: claim.token }),
                    () = pause(5..20) => continue,
                }
            }
            Ok(Ok(Confirmed::Skipped)) | Err(_) => Failure::NoReply,
            Ok(Err(error)) => Failure::Failed(error),
        };
        if failure.fault() == Fault::Contention {
            return Err(Error::conflict(key, 1));
        }
        let subject = key.quoted();
        return Err(failure.into_error(Action::Confirm, subject, time_limit, Certainty::NothingChanged));
    }
}

/// Waits until another session sees the row without the claim: the transaction may see all rows as
/// of an earlier time, or would from such a read on.
async fn lost_elsewhere<DB: Database>(lock: &LeaseLock<DB>, claim: &Claim, limit: Instant) {
    // Until the table is known, a read may be of a server that is behind.
    while lock.shared.table.get().is_some() {
        let read = RangeRead { keys: KeyRange::one(claim.key.clone()), key_terms: lock.key_terms.clone() };
        let is_lost = |rows: Vec<Listed>| {
            rows.first().is_none_or(|Listed { row, .. }| {
                let stands = row.is_rowlocks() && row.holder == Some(*claim.holder.as_uuid());
                row.token > claim.token.get() || (row.token == claim.token.get() && !stands)
            })
        };
        if lock.shared.reads.send(read, Limits::both(limit), false).await.is_ok_and(is_lost) {
            return;
        }
        pause(100..200).await;
    }
    pending().await
}
