//! Errors of the crate.

use std::time::Duration;

use crate::{
    action::{Action, Certainty},
    causes::{DatabaseFault, NotFound, Setup, TransactionFault},
    chain::prints_its_chain,
    invalid::Invalid,
    key::{Key, Token},
    rules::{Reason, Refusal},
    store::fault::{Contention, fault},
};

/// An error of a call. A failure of the database is never reported as a refusal.
///
/// `Display` states what happened and what to do, and leaves the driver's error to
/// [`source`](std::error::Error::source). `Debug` prints the same text and all sources, so that a
/// `main` that returns the error prints them.
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     lock: rowlock::LeaseLock<DB>,
/// # ) -> Result<(), rowlock::Error> {
/// use rowlock::{Attempt, Error, errors::Setup};
///
/// match lock.try_acquire("report").await {
///     Ok(Attempt::Acquired(lease)) => println!("held under token {}", lease.token()),
///     Ok(Attempt::Refused(refusal)) => println!("not now: {refusal}"),
///     Err(Error::Setup(Setup::TableMissing)) => rowlock::migrate(lock.pool()).await?,
///     Err(error) if error.is_retryable() => println!("try again later: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument or a setting is invalid: a key, a name, an amount, a schedule, or a connection
    /// outside a transaction. Correct the call. Nothing was changed. The error lists all faults.
    #[error(transparent)]
    Invalid(#[from] Invalid),

    /// The key was not granted in time. The refusal states the reason. Try again later, unless an
    /// operator has to act ([`Error::is_retryable`]). Nothing was changed.
    #[error("{0}")]
    Refused(Refusal),

    /// The claim no longer holds the key: it was taken over after its lease ended, was released by
    /// an operator, or was overwritten by another program.
    #[error("key {:?} was lost: the claim with token {token} no longer holds it; stop the work that needs it", key.as_str())]
    Lost {
        /// The key.
        key: Key,
        /// The lost claim's token.
        token: Token,
    },

    /// Another transaction committed first; nothing of this one was committed.
    #[non_exhaustive]
    #[error("key {:?}: gave up after {attempts} conflicting attempts; nothing was changed: try again, or allow more retries", key.as_str())]
    Conflict {
        /// The key.
        key: Key,
        /// The number of attempts.
        attempts: u32,
        /// The source by which the conflict is recognized, however it is wrapped.
        source: Contention,
    },

    /// The object that the call names does not exist. Create it, or correct the name.
    #[error(transparent)]
    NotFound(#[from] NotFound),

    /// The database, its tables, a schedule or this process are not ready for the call. An operator
    /// has to change that first.
    #[error(transparent)]
    Setup(#[from] Setup),

    /// A transaction did not end by its commit, or it is unknown whether it did. Read what it
    /// writes before it is repeated.
    #[error(transparent)]
    Transaction(#[from] TransactionFault),

    /// The database refused or failed the request, or did not reply. Try again later, if
    /// [`Error::is_retryable`] says so. [`DatabaseFault::outcome`] says what may have been changed.
    #[error(transparent)]
    Database(#[from] DatabaseFault),
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

prints_its_chain!(Error);

impl Error {
    /// Creates an [`Error::Conflict`], for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn conflict(key: Key, attempts: u32) -> Self {
        Self::Conflict { key, attempts, source: Contention }
    }

    /// Creates an [`Error::Database`], for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn database(action: Action, key: &Key, outcome: Certainty, source: sqlx::Error) -> Self {
        DatabaseFault::Failed { action, subject: key.quoted(), outcome, source }.into()
    }

    /// No reply arrived within the time limit.
    pub(crate) fn timed_out(action: Action, subject: String, limit: Duration, outcome: Certainty) -> Self {
        Self::Database(DatabaseFault::TimedOut { action, subject, limit, outcome })
    }

    /// Returns the action and the outcome of an error of the database.
    pub(crate) fn outcome_mut(&mut self) -> Option<(&mut Action, &mut Certainty)> {
        if let Self::Database(fault) = self { fault.outcome_mut() } else { None }
    }

    /// Returns whether a fail-over may be under way: the server takes no writes, or is behind.
    pub(crate) fn is_of_a_failover(&self) -> bool {
        matches!(self, Self::Database(DatabaseFault::ReadOnly { .. }) | Self::Setup(Setup::RowNotVisible { .. }))
    }

    /// Returns whether the same call may succeed a little later without any intervention.
    ///
    /// It is `false` for a change of a value, a commit and a forced release that may have been
    /// carried out, because they must not be repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use rowlock::{Error, Key, errors::Setup};
    ///
    /// assert!(Error::conflict(Key::new("alice")?, 1).is_retryable());
    /// assert!(!Error::from(Setup::TableMissing).is_retryable());
    /// # Ok::<(), rowlock::errors::Invalid>(())
    /// ```
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                use Reason::{LastRunFailed, NotSucceeded, TimedOutUnfinished};
                // These wait for an operator.
                !matches!(refusal.reason, TimedOutUnfinished | LastRunFailed | NotSucceeded)
            }
            Self::Conflict { .. } => true,
            Self::Database(DatabaseFault::TimedOut { action, outcome, .. }) => !is_in_doubt(*action, *outcome),
            Self::Database(DatabaseFault::Failed { action, outcome, source, .. }) => {
                !is_in_doubt(*action, *outcome) && fault(source).is_transient()
            }
            Self::Database(DatabaseFault::NoConnection { .. } | DatabaseFault::InUse { .. }) => true,
            _ => false,
        }
    }
}

/// Returns whether the action is a write that may have been carried out, and must not be repeated.
fn is_in_doubt(action: Action, outcome: Certainty) -> bool {
    matches!(action, Action::Update | Action::Commit | Action::ForceRelease) && outcome == Certainty::Unknown
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
