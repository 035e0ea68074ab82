//! The steps of one attempt: begin, confirm a lease, check that the transaction still lives, confirm
//! a version, commit; or undo, and what is known of it then.

use std::{error::Error as StdError, time::Duration};

use sqlx::Pool;
use sqlx_core::transaction::TransactionManager as _;

use crate::{
    action::{Action, Certainty},
    causes::{DatabaseFault, TransactionFault},
    error::Error,
    key::Claim,
    lock::{CommitOutcome, Confirmation, ResourceLock, TransactionTerms},
    retry::outage_pause,
    session::{
        loan::{IN_TRANSACTION, Loan},
        time::Instant,
        timers::timeout_at,
    },
    store::{
        Database, INTACT, UNDO,
        failure::Failure,
        fault::{self, Fault},
        is_undone,
    },
};

/// How long a rollback may take before the connection is closed instead.
const ROLLBACK: Duration = Duration::from_secs(5);

/// What is known of a transaction that was to be undone.
enum Undone {
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

/// What is to be known of the error of work.
pub(super) struct WorkFailure {
    is_contention: bool,
    text: String,
}

impl WorkFailure {
    pub fn of(cause: &(dyn StdError + 'static)) -> Self {
        Self { is_contention: fault::contended(cause), text: cause.to_string() }
    }
}

/// Why an attempt was not committed, other than the work's own error.
pub(super) enum Stop {
    /// Rolled back, and to be retried.
    Again {
        claim_stands: bool,
    },
    /// The work was not begun.
    NotBegun(Error),
    Failed(Error),
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> Fenced<'_, DB, L> {
    /// Begins the transaction, and confirms a lease.
    pub async fn open(&self) -> Result<(Loan<DB>, Option<Confirmation>), Stop> {
        let conn = self.begin().await?;
        if self.terms.confirm_last { Ok((conn, None)) } else { self.confirm(conn).await }
    }

    /// Commits the transaction of work that has succeeded. It has a connection unless the work kept
    /// it.
    pub async fn finish(&self, conn: Option<Loan<DB>>, mut confirmation: Option<Confirmation>) -> Result<(), Stop> {
        let Some(conn) = conn else { return Err(self.over(Certainty::Unknown, None, None)) };
        let mut conn = self.check(conn, confirmation).await?;
        if self.terms.confirm_last {
            (conn, confirmation) = self.confirm(conn).await?;
        }
        self.commit(conn, confirmation).await
    }

    /// Undoes the transaction of work that failed, and finds out whether it may run again.
    pub async fn give_up(
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

    /// Undoes everything since the begin, and returns what is known then.
    async fn undo(&self, mut conn: Loan<DB>, confirmation: Option<Confirmation>) -> Undone {
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
    async fn outcome(&self, confirmation: Option<Confirmation>) -> CommitOutcome {
        match confirmation {
            Some(confirmation) => self.lock.commit_outcome(self.claim, confirmation).await,
            None => CommitOutcome::Unknown,
        }
    }

    /// Returns what is known of a transaction whose connection is lost. A statement that commits by
    /// itself may have preceded the loss, which only a count of confirmations shows.
    async fn lost(&self, confirmation: Option<Confirmation>) -> Undone {
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

    fn limit(&self) -> Instant {
        Instant::now() + self.terms.time_limit
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

/// Gives the connection back if the transaction is certainly over, and closes it otherwise: the
/// rollback has no reply, the work left a transaction of its own within this one, or the work ended
/// this one itself, so that the driver's count is wrong. Returns whether the transaction is over.
async fn roll_back<DB: Database>(mut conn: Loan<DB>) -> bool {
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
