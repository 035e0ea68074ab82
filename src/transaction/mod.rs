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

use std::{error::Error as StdError, time::Duration};

use sqlx::Connection as _;
use sqlx_core::transaction::TransactionManager as _;
use tokio::sync::oneshot;
use tracing::{Instrument as _, Span, field::display};

use crate::{
    action::{Action, Certainty},
    causes::{DatabaseFault, TransactionFault},
    error::Error,
    grant::Grant,
    invalid::Invalid,
    key::Key,
    lock::{BoxFuture, CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
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
        run(self, key, &|wait| self.acquire(key, wait), work).await
    }
}

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

/// What is to be known of the error of work.
struct WorkFailure {
    is_contention: bool,
    text: String,
}

impl WorkFailure {
    fn of(cause: &(dyn StdError + 'static)) -> Self {
        Self { is_contention: fault::contended(cause), text: cause.to_string() }
    }
}

/// Why an attempt was not committed, other than the work's own error.
enum Stop {
    /// Rolled back, and to be retried.
    Again {
        claim_stands: bool,
    },
    /// The work was not begun.
    NotBegun(Error),
    Failed(Error),
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
        // The transaction is over, regardless of the lease. The lease was dropped with the error and
        // is abandoned.
        if let Err(error) = self.lock.release(grant, status).await {
            tracing::warn!(key = self.key, ?error, "{how}, but not released");
        }
        Ok(true)
    }

    /// Prepares the attempt that follows one that was stopped, or returns why none can follow.
    async fn stopped(&mut self, stop: Stop, grant: Grant<DB>) -> Result<(), Error> {
        match stop {
            Stop::Again { claim_stands } => {
                metrics::conflict();
                tracing::debug!(key = self.key, attempt = self.tries.attempt, "conflict");
                if !self.tries.again().await {
                    let key = grant.key().clone();
                    put_back(grant);
                    return Err(Error::conflict(key, self.tries.attempt));
                }
                // A lease that stands is kept. If it were released, the next claim might be refused
                // within the minimum interval.
                self.kept = claim_stands.then_some(grant);
                Ok(())
            }
            Stop::NotBegun(error) => {
                put_back(grant);
                Err(error)
            }
            Stop::Failed(error) => {
                // A commit that may still arrive has the row locked. The work has returned, so that
                // a lock-delay need not pass.
                if let Some(lease) = grant.into_lease() {
                    lease.handle.abandon_in_background();
                }
                Err(error)
            }
        }
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

/// Ends a lease under which nothing was done: the work was not begun, or each attempt was rolled
/// back. The claim then counts for no rule.
fn put_back<DB: Database>(grant: Grant<DB>) {
    if let Some(lease) = grant.into_lease() {
        lease.handle.undo_in_background();
    }
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> Fenced<'_, DB, L> {
    /// Begins the transaction, and confirms a lease.
    async fn open(&self) -> Result<(Loan<DB>, Option<Confirmation>), Stop> {
        let conn = self.begin().await?;
        if self.terms.confirm_last { Ok((conn, None)) } else { self.confirm(conn).await }
    }

    /// Commits the transaction of work that has succeeded. It has a connection unless the work kept
    /// it.
    async fn finish(&self, conn: Option<Loan<DB>>, mut confirmation: Option<Confirmation>) -> Result<(), Stop> {
        let Some(conn) = conn else { return Err(self.over(Certainty::Unknown, None, None)) };
        let mut conn = self.check(conn, confirmation).await?;
        if self.terms.confirm_last {
            (conn, confirmation) = self.confirm(conn).await?;
        }
        self.commit(conn, confirmation).await
    }

    /// Undoes the transaction of work that failed, and finds out whether it may run again.
    async fn give_up(
        &self,
        failure: WorkFailure,
        conn: Option<Loan<DB>>,
        confirmation: Option<Confirmation>,
    ) -> Result<(), Stop> {
        let undone = match conn {
            Some(conn) => self.undo(conn, confirmation).await,
            // The work kept it.
            None => Undone::No(Certainty::Unknown),
        };
        match undone {
            Undone::Wholly | Undone::Apparently if failure.is_contention => Err(self.again()),
            // Without the server's word for the rollback, the work does not run again.
            Undone::Wholly | Undone::Apparently | Undone::WithConnection => Ok(()),
            Undone::No(outcome) => Err(self.over(outcome, Some(failure.text), None)),
        }
    }

    async fn begin(&self) -> Result<Loan<DB>, Stop> {
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

    async fn confirm(&self, mut conn: Loan<DB>) -> Result<(Loan<DB>, Option<Confirmation>), Stop> {
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
    async fn check(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Result<Loan<DB>, Stop> {
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

    async fn commit(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Result<(), Stop> {
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

    fn again(&self) -> Stop {
        Stop::Again { claim_stands: !self.terms.confirm_last }
    }

    fn over(&self, outcome: Certainty, work: Option<String>, source: Option<sqlx::Error>) -> Stop {
        let key = self.claim.key.clone();
        Stop::Failed(Error::Transaction(TransactionFault::Over { key, outcome, work, source }))
    }

    /// A failure before the commit was sent changed nothing.
    fn failed(&self, action: Action, failure: Failure) -> Stop {
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
