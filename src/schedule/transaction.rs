//! The transaction that ends a tick.

use std::time::Duration;

use sqlx::Pool;
use tokio::sync::MutexGuard;

use crate::{
    error::Error,
    grant::Grant,
    key::Claim,
    lock::{BoxFuture, CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
    retry::{Repeat, Retry, outage_pause},
    rules::Status,
    schedule::{
        plan::Row,
        tick::{InTransaction, Inner, Tick},
    },
    session::time::Instant,
    store::{
        Database, Outcome, Reply,
        schedule::{Extended, Extension},
    },
    transaction::{
        self,
        error::{RunError, WorkError},
        tx::Tx,
    },
};

/// How long conflicts are repeated within a run.
const RETRY: Retry = Retry { attempts: 100, within: Duration::from_secs(60) };

impl<DB: Database> Tick<DB> {
    /// Runs `work` in a transaction that ends the tick, as succeeded: begin, work, record the end,
    /// commit. What the work wrote and its tick are then committed together, or not at all: exactly
    /// once. A key that the run holds as well is confirmed by the same commit.
    ///
    /// The transaction is begun on a connection of `pool`, which belongs to the database of the
    /// schedules. Conflicts, and errors that mean contention, including those that the work itself
    /// met, are rolled back and repeated, up to 100 times within a minute. They do not count as
    /// attempts at the tick. The work may run several times, so it does nothing outside the
    /// transaction. It returns every database error, neither commits nor rolls back, and returns
    /// the transaction by dropping it; see
    /// [`LeaseLock::transaction`](crate::LeaseLock::transaction). A statement that
    /// commits implicitly (DDL on MySQL and MariaDB) commits what came before it, which stands, and
    /// is then refused at once (1792). The tick has not ended.
    ///
    /// The tick ends in the last statement of the transaction, so that the lease is renewed while
    /// the work runs. A transaction under REPEATABLE READ or SERIALIZABLE on PostgreSQL, and under
    /// snapshot isolation on MariaDB, has to be shorter than a third of the lease, because each
    /// renewal changes the row. On SQLite, no renewal is possible until the commit.
    ///
    /// One transaction of a tick runs at a time. A second one waits for the first, up to a minute.
    ///
    /// After the commit the work of the run returns. Work that goes on is dropped when the lease is
    /// to be renewed the next time, because the commit has ended the lease.
    ///
    /// # Errors
    /// [`RunError::Work`] is the work's own error, after a rollback. [`RunError::Lost`] if the run
    /// lost its lease or its key, or has ended its tick before. [`RunError::Other`] contains
    /// [`Error::Conflict`] when the repetitions are used up, or another transaction of the tick has
    /// been open for a minute. That is so if the call is made within it. It contains
    /// [`Error::Transaction`] if the transaction ended before the work returned, or if it cannot be
    /// determined whether the transaction was committed, which the history then shows.
    /// [`RunError::Refused`] is never returned.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit is sent, nothing is committed. If it is dropped
    /// later, the commit may stand. The end of the run reads which of them it was.
    ///
    /// # Examples
    /// ```
    /// # fn example(pool: sqlx::SqlitePool, daily: rowlock::Schedule) {
    /// use rowlock::{Schedules, Tick};
    /// use sqlx::Sqlite;
    ///
    /// let accounts = pool.clone();
    /// let jobs = Schedules::new(pool).on(daily, async move |tick: Tick<Sqlite>| {
    ///     let interest = async |mut tx: rowlock::Tx<Sqlite>| {
    ///         sqlx::query("UPDATE account SET balance = balance + 1").execute(&mut *tx).await
    ///     };
    ///     tick.transaction(&accounts, interest).await
    /// });
    /// # }
    /// ```
    pub async fn transaction<T, E, W, F>(&self, pool: &Pool<DB>, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        let tick = &**self.inner();
        let ended = EndedTick { tick, pool, _alone: tick.alone(RETRY.within).await? };
        let done = transaction::run(&ended, self.name(), &|wait| ended.acquire(self.name(), wait), work).await;
        if done.is_ok() {
            tick.set_in_transaction(InTransaction::Committed);
        }
        done
    }
}

/// The claim of a tick as the lock of a transaction whose confirmation is the end of the tick.
struct EndedTick<'a, DB: Database> {
    tick: &'a Inner<DB>,
    pool: &'a Pool<DB>,
    /// What is known of the commit is known of one transaction.
    _alone: MutexGuard<'a, ()>,
}

/// The transaction is over, or given up.
impl<DB: Database> Drop for EndedTick<'_, DB> {
    fn drop(&mut self) {
        self.tick.end_committing();
    }
}

impl<DB: Database> ResourceLock<DB> for EndedTick<'_, DB> {
    fn acquire<'a>(&'a self, _: &'a str, _: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        // The attempt before this one was rolled back.
        self.tick.end_committing();
        Box::pin(std::future::ready(Ok(self.tick.claim.clone().into())))
    }

    fn confirm<'a>(&'a self, _: &'a Claim, tx: &'a mut DB::Connection) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(async move {
            self.tick.end_in(tx).await?;
            // The commit follows at once.
            self.tick.set_in_transaction(InTransaction::Committing);
            Ok(Confirmation(1))
        })
    }

    fn pool(&self) -> &Pool<DB> {
        self.pool
    }

    /// A claim that still stands was not ended, and a renewal finds that out with a write
    /// (`docs/decisions/0013-a-commit-is-asked-about-with-a-write.md`). It finds the row skipped
    /// until the transaction is over.
    fn commit_outcome<'a>(&'a self, _: &'a Claim, _: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(async move {
            let core = &self.tick.core;
            let limit = core.limit();
            let mut repeat = Repeat::until(limit);
            loop {
                let reply = core.requests.send(limit, async |conn| outcome(conn, self.tick).await).await;
                match repeat.final_or_pause(reply).await {
                    Some(Ok(Some(outcome))) => return outcome,
                    Some(Ok(None)) if Instant::now() < limit => outage_pause().await,
                    Some(_) => return CommitOutcome::Unknown,
                    None => {}
                }
            }
        })
    }

    fn terms(&self) -> TransactionTerms {
        let time_limit = self.tick.core.time_limit;
        TransactionTerms { confirm_last: true, reacquires: false, retry: RETRY, time_limit }
    }
}

/// Returns the outcome of the transaction that was to end the tick, or `None` while it is open.
async fn outcome<DB: Database>(conn: &mut DB::Connection, tick: &Inner<DB>) -> Reply<Option<CommitOutcome>> {
    let extension = Extension { lease: tick.core.lease(&tick.schedule), is_stopped: true, not_after: None };
    match DB::extend_run(conn, &tick.claim, extension).await? {
        Extended::Is(Outcome::Done) => Ok(Some(CommitOutcome::RolledBack)),
        Extended::Is(Outcome::Skipped { .. } | Outcome::TooLate(_)) | Extended::Stopped => Ok(None),
        Extended::Is(Outcome::Lost) => {
            let Row { slot, attempt, .. } = tick.row;
            let ended = DB::has_ended(conn, &tick.claim, slot, attempt, Status::Succeeded.letter()).await?;
            Ok(Some(if ended { CommitOutcome::Committed } else { CommitOutcome::Unknown }))
        }
    }
}
