//! A transaction whose commit depends on a claim.
//!
//! This file has the method of every lock, and its attempts: acquire, begin, confirm a lease, run
//! the work, check that the transaction still lives, confirm a version, commit, release. It also
//! has the check of a transaction that the application has begun. `tx.rs` is what the work
//! receives, `undo.rs` rolls back, and `error.rs` has the results.
//!
//! A lease is confirmed before the work: its row stays locked to the end, so that no other instance
//! takes over. The renewer finds the row locked until then, and the deadline of the last renewal
//! that was committed stands. A version is confirmed after the work, so that the application's row
//! is locked for as short a time as possible.

pub(crate) mod error;
pub(crate) mod tx;
mod undo;

use std::time::Duration;

use sqlx::Connection as _;
use sqlx_core::transaction::TransactionManager as _;
use tracing::{Instrument as _, field::display};

use crate::{
    action::{Action, Certainty},
    causes::{DatabaseFault, TransactionFault},
    error::Error,
    grant::Grant,
    invalid::Invalid,
    key::{Claim, Key},
    lock::{BoxFuture, CommitOutcome, Confirmation, ResourceLock},
    metrics,
    retry::{Tries, outage_pause},
    rules::Status,
    session::{
        loan::{IN_TRANSACTION, Loan},
        time::Instant,
        timers::timeout_at,
    },
    spans,
    store::{
        Database, INTACT,
        failure::Failure,
        fault::{self, Fault},
    },
    transaction::{
        error::{RunError, WorkError},
        tx::Tx,
        undo::{Fenced, Undone, roll_back},
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
        F: Future<Output = Result<T, E>>;
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {
    async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        run(self, key, |wait| self.acquire(key, wait), work).await
    }
}

/// How an attempt ended without a result.
enum Stop<E> {
    /// Rolled back, and to be retried.
    Again {
        claim_stands: bool,
    },
    /// Rolled back because of the work's own error.
    Work(E),
    /// The work was not begun.
    NotBegun(Error),
    Failed(Error),
}

/// Makes attempts until one is committed, or none can be: see [`ResourceLockExt::transaction`].
/// `acquire` waits for a claim on `key`.
pub(crate) async fn run<'a, DB, L, A, T, E, W, F>(lock: &L, key: &str, acquire: A, work: W) -> Result<T, RunError<E>>
where
    DB: Database,
    L: ResourceLock<DB> + ?Sized,
    A: Fn(Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>>,
    E: WorkError,
    W: FnOnce(Tx<DB>) -> F + Clone,
    F: Future<Output = Result<T, E>>,
{
    let span = spans::transaction(key);
    let attempts = async {
        let terms = lock.terms();
        let mut tries = terms.retry.begin();
        let mut kept = None;
        loop {
            let grant = match kept.take() {
                Some(grant) => grant,
                None => acquired(&acquire, &tries).await?,
            };
            let fenced = Fenced { lock, terms, pool: lock.pool(), claim: grant.claim(), until: tries.until };
            span.record("token", display(grant.token())).record("attempts", tries.attempt);
            match fenced.attempt(&work).await {
                Ok(value) => {
                    // The transaction is committed, regardless of the lease. The lease was dropped
                    // with the error and is abandoned.
                    if let Err(error) = lock.release(grant, Status::Succeeded).await {
                        tracing::warn!(key, ?error, "committed, but not released");
                    }
                    return Ok(value);
                }
                Err(Stop::Again { claim_stands }) => {
                    metrics::conflict();
                    tracing::debug!(key, attempt = tries.attempt, "conflict");
                    if !tries.again().await {
                        let Claim { key, .. } = grant.claim().clone();
                        put_back(grant);
                        return Err(Error::conflict(key, tries.attempt).into());
                    }
                    // A lease that stands is kept. If it were released, the next claim might be
                    // refused within the minimum interval.
                    kept = claim_stands.then_some(grant);
                }
                Err(Stop::Work(error)) => {
                    if let Err(error) = lock.release(grant, Status::Failed).await {
                        tracing::warn!(key, ?error, "rolled back, but not released");
                    }
                    return Err(RunError::Work(error));
                }
                Err(Stop::NotBegun(error)) => {
                    put_back(grant);
                    return Err(error.into());
                }
                Err(Stop::Failed(error)) => {
                    // A commit that may still arrive has the row locked. The work has returned, so
                    // that a lock-delay need not pass.
                    if let Some(lease) = grant.into_lease() {
                        lease.handle.abandon_in_background();
                    }
                    return Err(error.into());
                }
            }
        }
    };
    let ended: Result<T, RunError<E>> = attempts.instrument(span.clone()).await;
    spans::ended(&span, &ended, "committed");
    ended
}

/// Acquires the key within the time that is left.
async fn acquired<'a, DB: Database, E>(
    acquire: &impl Fn(Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>>,
    tries: &Tries,
) -> Result<Grant<DB>, RunError<E>> {
    loop {
        match acquire(tries.left()).await {
            Ok(grant) => return Ok(grant),
            // All connections are in use, or the server is recovering. There is time left to wait
            // for that.
            Err(ref error @ Error::Database(ref fault))
                if fault.outcome() == Certainty::NothingChanged && error.is_retryable() && !tries.left().is_zero() =>
            {
                outage_pause().await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Ends a lease under which nothing was done: the work was not begun, or each attempt was rolled
/// back. The claim then counts for no rule.
fn put_back<DB: Database>(grant: Grant<DB>) {
    if let Some(lease) = grant.into_lease() {
        lease.handle.undo_in_background();
    }
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> Fenced<'_, DB, L> {
    async fn attempt<T, E, W, F>(&self, work: &W) -> Result<T, Stop<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        let mut conn = self.begin().await?;
        let mut confirmation = None;
        if !self.terms.confirm_last {
            (conn, confirmation) = self.confirm(conn).await?;
        }
        let (tx, mut lent) = Tx::lend(conn, self.claim.clone());
        let result = work.clone()(tx).await;
        let (value, conn) = match (result, lent.try_recv().ok()) {
            (Ok(value), Some(conn)) => (value, conn),
            (Ok(_), None) => return Err(self.over(Certainty::Unknown, None, None)),
            (Err(error), conn) => return Err(self.work_failed(error, conn, confirmation).await),
        };
        let mut conn = self.check(conn, confirmation).await?;
        if self.terms.confirm_last {
            (conn, confirmation) = self.confirm(conn).await?;
        }
        self.commit(conn, confirmation).await?;
        Ok(value)
    }

    async fn begin<E>(&self) -> Result<Loan<DB>, Stop<E>> {
        let begin = async || {
            let limit = self.limit().min(self.until);
            let mut conn = Loan::borrow(self.pool, limit).await?;
            // The connection is closed unless the transaction has begun, because its state is
            // unknown.
            match timeout_at(limit, DB::open(conn.get())).await {
                Ok(Ok(alone)) => Ok(alone.then_some(conn)),
                Ok(Err(error)) => {
                    let failure = Failure::Failed(error);
                    if DB::ONE_WRITER && failure.fault() == Fault::Contention {
                        conn.give_back();
                    }
                    Err(failure)
                }
                Err(_) => Err(Failure::NoReply),
            }
        };
        // How many connections, one after the other, were inside a transaction.
        let mut in_transaction = 0;
        loop {
            let failure = match begin().await {
                Ok(Some(conn)) => return Ok(conn),
                Ok(None) => {
                    in_transaction += 1;
                    Failure::NoConnection(sqlx::Error::PoolTimedOut)
                }
                Err(failure) => {
                    in_transaction = 0;
                    failure
                }
            };
            // The application may have left some of them inside a transaction, but not new ones.
            if in_transaction > self.pool.options().get_max_connections() {
                let source = sqlx::Error::Configuration(IN_TRANSACTION.into());
                return Err(self.failed(Action::Begin, Failure::NoConnection(source)));
            }
            // The pool may hold connections that were closed or do not reply, or have none
            // available at the moment.
            if !failure.is_connection_failure() || Instant::now() >= self.until {
                return Err(self.failed(Action::Begin, failure));
            }
            outage_pause().await;
        }
    }

    async fn confirm<E>(&self, mut conn: Loan<DB>) -> Result<(Loan<DB>, Option<Confirmation>), Stop<E>> {
        let error = match self.lock.confirm_within(self.claim, conn.get()).await {
            Ok(confirmation) => return Ok((conn, Some(confirmation))),
            Err(error) => error,
        };
        // After a timeout the statement may still be running, and a standby's connection is of no
        // use, so the connection is closed.
        let close = match &error {
            Error::Database(DatabaseFault::TimedOut { .. }) => true,
            Error::Database(DatabaseFault::ReadOnly { source, .. }) => fault::may_take_writes_again(source),
            _ => false,
        };
        if !close {
            roll_back(conn).await;
        }
        Err(match error {
            Error::Lost { .. } if self.terms.reacquires => Stop::Again { claim_stands: false },
            Error::Conflict { .. } => self.again(),
            error => Stop::Failed(error),
        })
    }

    /// Checks that the transaction is still open, because the work may have ignored an error that
    /// ended it, or may have ended it itself.
    async fn check<E>(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Result<Loan<DB>, Stop<E>> {
        let failure = match timeout_at(self.limit(), DB::execute_text(conn.get(), INTACT)).await {
            // The depth is read after a savepoint that the work dropped has been rolled back, which
            // SQLite's driver does asynchronously.
            Ok(Ok(())) if DB::TransactionManager::get_transaction_depth(conn.peek()) != 1 => {
                return Err(self.over(Certainty::NothingChanged, None, None));
            }
            Ok(Ok(())) => return Ok(conn),
            Ok(Err(error)) if fault::denies(&error) => {
                let outcome = match self.undo(conn, confirmation).await {
                    Undone::Wholly => Certainty::NothingChanged,
                    Undone::Apparently | Undone::WithConnection => Certainty::Unknown,
                    Undone::No(outcome) => outcome,
                };
                return Err(self.over(outcome, None, Some(error)));
            }
            Ok(Err(error)) => Failure::Failed(error),
            Err(_) => Failure::NoReply,
        };
        drop(conn);
        if failure.is_unanswered()
            && let Undone::No(outcome) = self.lost(confirmation).await
        {
            let source = if let Failure::Failed(error) = failure { Some(error) } else { None };
            return Err(self.over(outcome, None, source));
        }
        Err(self.failed(Action::Commit, failure))
    }

    /// Undoes the transaction of work that failed, and finds out whether it may run again.
    async fn work_failed<E: WorkError>(
        &self,
        error: E,
        conn: Option<Loan<DB>>,
        confirmation: Option<Confirmation>,
    ) -> Stop<E> {
        let undone = match conn {
            Some(conn) => self.undo(conn, confirmation).await,
            // The work kept it.
            None => Undone::No(Certainty::Unknown),
        };
        match undone {
            Undone::Wholly | Undone::Apparently if fault::contended(error.cause()) => self.again(),
            // Without the server's word for the rollback, the work does not run again.
            Undone::Wholly | Undone::Apparently | Undone::WithConnection => Stop::Work(error),
            Undone::No(outcome) => self.over(outcome, Some(error.cause().to_string()), None),
        }
    }

    async fn commit<E>(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Result<(), Stop<E>> {
        let source = match timeout_at(self.limit(), DB::commit(conn.get())).await {
            Ok(Ok(reusable)) => {
                if reusable {
                    conn.give_back();
                }
                return Ok(());
            }
            // The server reports that it did not commit.
            Ok(Err(error)) if fault::refuses_commit(&error) => {
                roll_back(conn).await;
                return Err(self.failed(Action::Commit, Failure::Failed(error)));
            }
            Ok(Err(error)) => Some(error),
            Err(_) => None,
        };
        // The connection is closed first, so that the server ends what it has not committed.
        drop(conn);
        match self.outcome(confirmation).await {
            CommitOutcome::Committed => Ok(()),
            CommitOutcome::RolledBack => Err(self.again()),
            CommitOutcome::Unknown => {
                let key = self.claim.key.clone();
                Err(Stop::Failed(Error::Transaction(TransactionFault::CommitUnknown { key, source })))
            }
        }
    }

    fn again<E>(&self) -> Stop<E> {
        Stop::Again { claim_stands: !self.terms.confirm_last }
    }

    fn over<E>(&self, outcome: Certainty, work: Option<String>, source: Option<sqlx::Error>) -> Stop<E> {
        let key = self.claim.key.clone();
        Stop::Failed(Error::Transaction(TransactionFault::Over { key, outcome, work, source }))
    }

    /// A failure before the commit was sent changed nothing.
    fn failed<E>(&self, action: Action, failure: Failure) -> Stop<E> {
        if failure.fault() == Fault::Contention {
            return self.again();
        }
        let subject = self.claim.key.quoted();
        let limit = if action == Action::Begin { self.terms.retry.within } else { self.terms.time_limit };
        let error = failure.into_error(action, subject, limit, Certainty::NothingChanged);
        if action == Action::Begin { Stop::NotBegun(error) } else { Stop::Failed(error) }
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
