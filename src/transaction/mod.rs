//! A transaction whose commit depends on a claim.
//!
//! This file has the method of every lock, and its attempts: acquire, begin, run the work, commit or
//! roll back, release. It also has the check of a transaction that the application has begun.
//! `steps.rs` begins, confirms, commits and rolls back, `tx.rs` is what the work receives,
//! and `error.rs` has the results.
//!
//! A lease is confirmed before the work: its row stays locked to the end, so that no other instance
//! takes over. The renewer finds the row locked until then, and the deadline of the last renewal
//! that was committed stands. A version is confirmed after the work, so that the application's row
//! is locked for as short a time as possible.

pub(crate) mod error;
mod steps;
pub(crate) mod tx;

use std::time::Duration;

use sqlx::Connection as _;
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span, field::display};

use crate::{
    action::{Action, Certainty},
    causes::TransactionFault,
    error::Error,
    grant::Grant,
    invalid::Invalid,
    key::Key,
    lock::{BoxFuture, Confirmation, ResourceLock, TransactionTerms},
    metrics,
    retry::{Tries, outage_pause},
    rules::Status,
    session::{loan::Loan, time::Instant, timers::timeout_at},
    spans,
    store::{
        Database,
        failure::Failure,
        fault::{self, Fault},
    },
    transaction::{
        error::{RunError, WorkError},
        steps::{Fenced, Stop, WorkFailure},
        tx::Tx,
    },
};

/// The method that every [`ResourceLock`] has, also one that configuration chooses.
///
/// ```
/// use rowlock::{Database, ResourceLock, RunError, strategy::ResourceLockExt};
/// use std::io;
///
/// async fn write<DB: Database>(lock: &dyn ResourceLock<DB>) -> Result<(), RunError<io::Error>> {
///     lock.transaction("report", async |_tx| Ok(())).await
/// }
/// ```
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Runs `work` in a transaction that commits only if the claim on `key` stands until its end,
    /// as [`LeaseLock::transaction`](crate::LeaseLock::transaction) does.
    ///
    /// # Errors
    /// As [`LeaseLock::transaction`](crate::LeaseLock::transaction).
    ///
    /// # Cancel safety
    /// As [`LeaseLock::transaction`](crate::LeaseLock::transaction).
    fn transaction<T, E, W, F>(&self, key: &str, work: W) -> impl Future<Output = Result<T, RunError<E>>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        async move { run(self, key, &|wait| self.acquire(key, wait), work).await }
    }
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {}

/// Waits for a claim, for this long at most.
pub(crate) type Acquire<'a, DB> = dyn Fn(Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> + Send + Sync + 'a;

/// Makes attempts until one is committed, or none can be: see [`ResourceLockExt::transaction`].
/// `acquire` waits for a claim on `key`.
///
/// This function is compiled once for each type of work, and what it calls once for each database
/// and type of lock.
pub(crate) async fn run<'a, DB, L, T, E, W, F>(
    lock: &'a L,
    key: &'a str,
    acquire: &'a Acquire<'a, DB>,
    work: W,
) -> Result<T, RunError<E>>
where
    DB: Database,
    L: ResourceLock<DB> + ?Sized,
    E: WorkError,
    W: FnOnce(Tx<DB>) -> F + Clone,
    F: Future<Output = Result<T, E>>,
{
    let span = spans::transaction(key);
    let made = async {
        let mut attempts = Attempts::of(lock, key, acquire, span.clone());
        loop {
            let (tx, open) = attempts.begin().await?;
            let result = work.clone()(tx).await;
            let failure = if let Err(error) = &result { Some(WorkFailure::of(error.cause())) } else { None };
            if attempts.end(open, failure).await? {
                return result.map_err(RunError::Work);
            }
        }
    };
    let ended: Result<T, RunError<E>> = made.instrument(span.clone()).await;
    spans::ended(&span, &ended, "committed");
    ended
}

/// The attempts of one call.
struct Attempts<'a, DB: Database, L: ?Sized> {
    lock: &'a L,
    key: &'a str,
    acquire: &'a Acquire<'a, DB>,
    span: Span,
    terms: TransactionTerms,
    tries: Tries,
    /// The claim of the last attempt, if it stands.
    kept: Option<Grant<DB>>,
}

/// An attempt whose work runs. If it is dropped, the connection is closed before the claim ends.
struct Open<DB: Database> {
    lent: oneshot::Receiver<Loan<DB>>,
    confirmation: Option<Confirmation>,
    grant: Grant<DB>,
}

impl<'a, DB: Database, L: ResourceLock<DB> + ?Sized> Attempts<'a, DB, L> {
    fn of(lock: &'a L, key: &'a str, acquire: &'a Acquire<'a, DB>, span: Span) -> Self {
        let terms = lock.terms();
        Self { lock, key, acquire, span, terms, tries: terms.retry.begin(), kept: None }
    }

    fn fenced<'b>(&'b self, grant: &'b Grant<DB>) -> Fenced<'b, DB, L> {
        let (claim, until) = (grant.claim(), self.tries.until);
        Fenced { lock: self.lock, terms: self.terms, pool: self.lock.pool(), claim, until }
    }

    /// Makes attempts until the work of one can run.
    async fn begin(&mut self) -> Result<(Tx<DB>, Open<DB>), Error> {
        loop {
            let grant = match self.kept.take() {
                Some(grant) => grant,
                None => acquired(self.acquire, &self.tries).await?,
            };
            self.span.record("token", display(grant.token())).record("attempts", self.tries.attempt);
            match self.fenced(&grant).open().await {
                Ok((conn, confirmation)) => {
                    let (tx, lent) = Tx::lend(conn, grant.claim().clone());
                    return Ok((tx, Open { lent, confirmation, grant }));
                }
                Err(stop) => self.stopped(stop, grant).await?,
            }
        }
    }

    /// Ends an attempt whose work has returned. Returns `false` if the work is to run again.
    async fn end(&mut self, open: Open<DB>, failure: Option<WorkFailure>) -> Result<bool, Error> {
        let Open { mut lent, confirmation, grant } = open;
        let (fenced, conn) = (self.fenced(&grant), lent.try_recv().ok());
        let (ended, status, how) = match failure {
            None => (fenced.finish(conn, confirmation).await, Status::Succeeded, "committed"),
            Some(failure) => (fenced.give_up(failure, conn, confirmation).await, Status::Failed, "rolled back"),
        };
        if let Err(stop) = ended {
            self.stopped(stop, grant).await?;
            return Ok(false);
        }
        self.release(grant, status, how).await;
        Ok(true)
    }

    /// The transaction is over, regardless of an error here. With the error a lease was dropped,
    /// and is abandoned.
    async fn release(&self, grant: Grant<DB>, status: Status, how: &str) {
        if let Err(error) = self.lock.release(grant, status).await {
            tracing::warn!(key = self.key, ?error, "{how}, but not released");
        }
    }

    /// Prepares the attempt that follows one that was stopped, or returns why none can follow.
    async fn stopped(&mut self, stop: Stop, grant: Grant<DB>) -> Result<(), Error> {
        // Nothing is done if the work was not begun, or each attempt was rolled back.
        let (nothing_done, result) = match stop {
            Stop::Again { claim_stands } => {
                metrics::conflict();
                tracing::debug!(key = self.key, attempt = self.tries.attempt, "conflict");
                match self.tries.again().await {
                    // If a lease were released, the next claim might be refused within the minimum
                    // interval.
                    true if claim_stands => {
                        self.kept = Some(grant);
                        return Ok(());
                    }
                    true => (false, Ok(())),
                    false => (true, Err(Error::conflict(grant.key().clone(), self.tries.attempt))),
                }
            }
            Stop::NotBegun(error) => (true, Err(error)),
            Stop::Failed(error) => (false, Err(error)),
        };
        if grant.lease().is_none() {
            self.release(grant, Status::Failed, "not committed").await;
        } else if let Some(lease) = grant.into_lease() {
            // A commit that may still arrive has the row locked. The work has returned, so that a
            // lock-delay need not pass.
            lease.handle.end_in_background(nothing_done);
        }
        result
    }
}

/// Acquires the key within the time that is left.
async fn acquired<DB: Database>(acquire: &Acquire<'_, DB>, tries: &Tries) -> Result<Grant<DB>, Error> {
    loop {
        match acquire(tries.left()).await {
            // All connections are in use, or the server is recovering. There is time left to wait
            // for that.
            Err(ref error @ Error::Database(ref fault))
                if fault.outcome() == Certainty::NothingChanged && error.is_retryable() && !tries.left().is_zero() =>
            {
                outage_pause().await;
            }
            result => return result,
        }
    }
}

/// Fails unless `conn` is inside a transaction, by the driver's count and by the database's. It
/// cannot detect a transaction that has taken the place of the one that the application began.
///
/// # Errors
/// [`Error::Invalid`] by the driver's count, [`Error::Transaction`] by the database's,
/// and [`Error::Conflict`].
pub(crate) async fn in_transaction<DB: Database>(
    conn: &mut DB::Connection,
    key: &Key,
    time_limit: Duration,
) -> Result<(), Error> {
    if !conn.is_in_transaction() {
        let text = format!(
            "key {:?} was not confirmed: the connection is not in a transaction; begin one with sqlx first",
            key.as_str()
        );
        return Err(Invalid::new(text).into());
    }
    let failure = match timeout_at(Instant::now() + time_limit, DB::in_transaction(conn)).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(source)) if fault::denies(&source) => {
            let (key, outcome) = (key.clone(), Certainty::Unknown);
            return Err(TransactionFault::Over { key, outcome, work: None, source: Some(source) }.into());
        }
        Ok(Err(error)) => Failure::Failed(error),
        Err(_) => Failure::NoReply,
    };
    // A cluster may report at the next statement that it has rolled the transaction back.
    if failure.fault() == Fault::Contention {
        return Err(Error::conflict(key.clone(), 1));
    }
    let subject = key.quoted();
    Err(failure.into_error(Action::Confirm, subject, time_limit, Certainty::NothingChanged))
}
