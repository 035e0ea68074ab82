//! Errors of the crate.

use std::{error::Error as _, fmt, time::Duration};

use crate::{
    action::{Action, Certainty, describe_outcome},
    invalid::Invalid,
    key::{Holder, Key, Token},
    rules::{Reason, Refusal},
    store::fault::{self, Contention, fault, said},
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
/// use rowlock::{Attempt, Error};
///
/// match lock.try_acquire("report").await {
///     Ok(Attempt::Acquired(lease)) => println!("held under token {}", lease.token()),
///     Ok(Attempt::Refused(refusal)) => println!("not now: {refusal}"),
///     Err(Error::TableMissing) => rowlock::migrate(lock.pool()).await?,
///     Err(error) if error.is_retryable() => println!("try again later: {error}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key, a name, a setting or a schedule is not possible; nothing was sent. It has all faults.
    #[error(transparent)]
    Invalid(#[from] Invalid),

    /// The key was not granted in time: another holder has it, or its minimum interval has not
    /// passed. Nothing was changed.
    #[error("{0}")]
    Refused(Refusal),

    /// The key is not held under this id: its claim was ended, was taken over, or never existed.
    /// Nothing was changed.
    #[non_exhaustive]
    #[error("key {:?} is not held by {holder}: that claim was ended or taken over, or never made", key.as_str())]
    NotHeld {
        /// The key.
        key: Key,
        /// The requested holder.
        holder: Holder,
    },

    /// The table's column for the label is too narrow; nothing was changed.
    #[non_exhaustive]
    #[error(
        "the label {label:?} does not fit: the column t_resource_lock.client_ip holds {chars} characters; set a shorter one (`label`, `--label`)"
    )]
    LabelTooLong {
        /// The label.
        label: String,
        /// How many characters the column holds.
        chars: usize,
    },

    /// The schedule is not in a state for this; nothing was changed.
    #[non_exhaustive]
    #[error("the schedule {:?}: {wrong}", name.as_str())]
    ScheduleUnfit {
        /// The schedule's name.
        name: Key,
        /// What is in the way.
        wrong: String,
    },

    /// The tables of schedules do not exist.
    #[error(
        "the tables of schedules (t_resource_schedule, t_resource_schedule_run, t_resource_schedule_instance, t_resource_schedule_times, t_resource_schedule_detail, t_resource_order, t_resource_change) do not all exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    ScheduleTablesMissing,

    /// The table has no schedule of this name, or this instance knows none.
    #[non_exhaustive]
    #[error("there is no schedule {:?}: {}", name.as_str(), match renamed_to {
        Some(new) => format!("its name is {new:?} now"),
        None => "check the name, or start an instance that defines it".to_owned(),
    })]
    UnknownSchedule {
        /// The schedule's name.
        name: Key,
        /// The name that it has now.
        renamed_to: Option<String>,
    },

    /// The table does not exist.
    #[error(
        "the table t_resource_lock does not exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    TableMissing,

    /// A table exists, but lacks columns.
    #[non_exhaustive]
    #[error(
        "{table} lacks {columns}: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    ColumnMissing {
        /// The table, or those of schedules.
        table: &'static str,
        /// The missing columns, or what the server said of one.
        columns: String,
    },

    /// The key's row was created, but no later statement sees it. The key is not held.
    #[non_exhaustive]
    #[error("key {:?}: its row was created and is not visible; look for a trigger on t_resource_lock that deletes or changes new rows, a row policy that hides them, or a replica that answers reads", key.as_str())]
    RowNotVisible {
        /// The key.
        key: Key,
    },

    /// The server or the database cannot be used for this; nothing was changed.
    #[non_exhaustive]
    #[error("{wrong}")]
    Unsupported {
        /// What is wrong with it, and what to do instead.
        wrong: String,
    },

    /// The database accepts no writes.
    #[non_exhaustive]
    #[error(
        "{action} {subject}: the database accepts no writes: connect to the primary, or make the \
         database's file writable; {}",
        describe_outcome(*action, *outcome)
    )]
    ReadOnly {
        /// The action that was under way.
        action: Action,
        /// The key, or the other object, that it concerned.
        subject: String,
        /// What is known of the outcome. An earlier request of the call may have been carried out,
        /// by a server that was the primary then.
        outcome: Certainty,
        /// The driver's error.
        #[source]
        source: sqlx::Error,
    },

    /// Jobs were started outside a tokio runtime.
    #[error("jobs run on the tokio runtime from which they are started: call it from within one")]
    NoRuntime,

    /// The process was forked from one that used rowlock, and has none of its threads.
    #[error(
        "this process was forked from one that used rowlock: start a program in it (`exec`), or use rowlock only after the fork"
    )]
    Forked,

    /// The library's own threads could not be started.
    #[non_exhaustive]
    #[error("rowlock could not start its threads: {source}; raise the limit of threads, or free memory")]
    NoThreads {
        /// The system's error.
        #[source]
        source: std::io::Error,
    },

    /// No reply arrived within the time limit.
    #[non_exhaustive]
    #[error("{action} {subject}: no reply within {limit:?}; {}", describe_outcome(*action, *outcome))]
    TimedOut {
        /// The action that was under way.
        action: Action,
        /// The key, or the other object, that it concerned.
        subject: String,
        /// The time limit.
        limit: Duration,
        /// What is known of the outcome.
        outcome: Certainty,
    },

    /// Transactions of other clients kept [`migrate`](crate::migrate()) from changing the table.
    #[non_exhaustive]
    #[error(
        "the table t_resource_lock could not be changed within {limit:?}, because it is in use by {by}; end that transaction, and call again"
    )]
    InUse {
        /// The time limit.
        limit: Duration,
        /// The oldest transaction that uses the table.
        by: String,
    },

    /// [`Migration::undo`](crate::migration::Migration::undo) was refused, and nothing was changed.
    #[non_exhaustive]
    #[error("the tables were not taken away, because {by}, and call again")]
    StillUsed {
        /// What uses them, and what to do about it.
        by: String,
    },

    /// No connection was available in time.
    #[non_exhaustive]
    #[error("{action} {subject}: no connection within {limit:?}: {}; {}", no_connection(source), describe_outcome(*action, *outcome))]
    NoConnection {
        /// The action that was to be performed.
        action: Action,
        /// The key, or the other object, that it concerned.
        subject: String,
        /// The time limit.
        limit: Duration,
        /// What is known of the outcome.
        outcome: Certainty,
        /// Why there was none.
        #[source]
        source: sqlx::Error,
    },

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

    /// The table has no row for this key.
    #[non_exhaustive]
    #[error("the table {table} has no row of key {:?}: create it first", key.as_str())]
    NotFound {
        /// The table, as the caller named it.
        table: String,
        /// The key.
        key: Key,
    },

    /// The column of the keys cannot hold this key: it has another type, is too narrow, or lacks a
    /// character. Nothing was changed.
    #[non_exhaustive]
    #[error("key {:?} does not fit: the column {column} holds {holds}; pass a key that fits, or change the column", key.as_str())]
    KeyUnfit {
        /// The key.
        key: Key,
        /// Table and column.
        column: String,
        /// What the column holds.
        holds: String,
    },

    /// What a row holds cannot be read exactly as the type of the call: it is NULL, has more digits
    /// than the type, or is of another type. Nothing was changed.
    #[non_exhaustive]
    #[error("the column {column} of key {:?} does not fit: {wrong}; nothing was changed: correct the row, or use a column and a type that fit each other", key.as_str())]
    ValueUnfit {
        /// The key.
        key: Key,
        /// Table and column.
        column: String,
        /// What the row holds, and why it does not fit.
        wrong: String,
    },

    /// The table cannot be used in its present form, or an application's table differs from its
    /// description; nothing was changed.
    #[non_exhaustive]
    #[error("the table {table} cannot be used: {wrong}")]
    TableUnfit {
        /// The table: `t_resource_lock`, or the application's as the caller named it.
        table: String,
        /// What is wrong with it, and what would be correct.
        wrong: String,
    },

    /// The amount is not valid; nothing was changed.
    #[non_exhaustive]
    #[error("an amount of {amount} is not possible for key {:?}: {rule}", key.as_str())]
    InvalidAmount {
        /// The key.
        key: Key,
        /// The amount.
        amount: String,
        /// The amounts that are possible.
        rule: String,
    },

    /// The claim was to be confirmed outside a transaction, where its row would not stay locked.
    #[error("key {:?} was not confirmed: the connection is not in a transaction; begin one with sqlx first", key.as_str())]
    NotInTransaction {
        /// The key.
        key: Key,
    },

    /// The transaction ended before its commit: the database ended it with an error after which the
    /// work continued, or the work committed, rolled back or kept it, or ran a statement that
    /// commits by itself. Or its connection was lost, and the lease's row does not exclude these.
    #[non_exhaustive]
    #[error(
        "the transaction under key {:?} ended before its commit{}; {}; the work must return every database error, must not commit, roll back or keep the transaction, and must run no statement that commits by itself", key.as_str(), returned(work.as_deref()), of_ended(*outcome)
    )]
    TransactionOver {
        /// The key.
        key: Key,
        /// What is known of the statements of the transaction.
        outcome: Certainty,
        /// The text of the work's own error, if the work returned one.
        work: Option<String>,
        /// The error that the server returned.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// COMMIT was sent, no reply arrived, and the commit outcome cannot be determined.
    #[non_exhaustive]
    #[error("the transaction under key {:?} may or may not have been committed: no reply arrived; read what it writes before you repeat it", key.as_str())]
    CommitUnknown {
        /// The key.
        key: Key,
        /// The driver's error; `None` if the time limit was reached.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// The database failed.
    #[non_exhaustive]
    #[error("{action} {subject} failed{}; {}", because(source), describe_outcome(*action, *outcome))]
    Database {
        /// The action that was under way.
        action: Action,
        /// The key, or the other object, that it concerned.
        subject: String,
        /// What is known of the outcome.
        outcome: Certainty,
        /// The driver's error.
        source: sqlx::Error,
    },
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl fmt::Debug for Error {
    /// Prints the error and all its sources on one line. A text that an error repeats from its
    /// source, as sqlx's errors do, is printed once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.to_string();
        f.write_str(&said)?;
        let mut source = self.source();
        while let Some(error) = source {
            let of_driver = error.downcast_ref::<sqlx::Error>();
            let text = of_driver.map_or_else(|| error.to_string(), fault::said);
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            // The server's own error is a part of the text.
            let is_servers = of_driver.is_some_and(|error| error.as_database_error().is_some());
            (said, source) = (text, error.source().filter(|_| !is_servers));
        }
        Ok(())
    }
}

fn returned(work: Option<&str>) -> String {
    work.map_or_else(String::new, |work| format!(", and the work failed ({work})"))
}

/// Returns what is known of a transaction that ended before its commit.
fn of_ended(outcome: Certainty) -> &'static str {
    match outcome {
        Certainty::NothingChanged => "nothing was changed",
        Certainty::Unknown => {
            "roll back; what it wrote may be committed, in part or as a whole: read it before it is repeated"
        }
        Certainty::InPart => "what it wrote before its end was committed: read it before it is repeated",
    }
}

/// Returns the cause, if the caller can correct it.
fn because(source: &sqlx::Error) -> &'static str {
    match source {
        sqlx::Error::PoolClosed => " because the application's pool is closed",
        _ => "",
    }
}

/// Returns why there was no connection.
fn no_connection(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::PoolTimedOut => "all are in use, or the server does not answer".to_owned(),
        error => said(error),
    }
}

impl Error {
    /// Creates an [`Error::Conflict`], for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn conflict(key: Key, attempts: u32) -> Self {
        Self::Conflict { key, attempts, source: Contention }
    }

    /// Creates an [`Error::Database`], for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn database(action: Action, key: &Key, outcome: Certainty, source: sqlx::Error) -> Self {
        Self::Database { action, subject: format!("{:?}", key.as_str()), outcome, source }
    }

    /// Returns the action and the outcome of an error of the database.
    pub(crate) fn outcome_mut(&mut self) -> Option<(&mut Action, &mut Certainty)> {
        match self {
            Self::TimedOut { action, outcome, .. }
            | Self::NoConnection { action, outcome, .. }
            | Self::Database { action, outcome, .. }
            | Self::ReadOnly { action, outcome, .. } => Some((action, outcome)),
            _ => None,
        }
    }

    /// Returns whether nothing was sent, or only what changes nothing, and the same request may be
    /// answered a little later.
    pub(crate) fn is_harmless(&self) -> bool {
        match self {
            Self::TimedOut { outcome, .. } | Self::NoConnection { outcome, .. } => {
                *outcome == Certainty::NothingChanged
            }
            Self::Database { outcome, source, .. } => {
                *outcome == Certainty::NothingChanged && fault(source).is_transient()
            }
            _ => false,
        }
    }

    /// Returns whether the same call may succeed a little later without any intervention.
    ///
    /// It is `false` for a write that may have been carried out, because such a write must not be
    /// repeated.
    ///
    /// # Examples
    ///
    /// ```
    /// use rowlock::{Error, Key};
    ///
    /// assert!(Error::conflict(Key::new("alice")?, 1).is_retryable());
    /// assert!(!Error::TableMissing.is_retryable());
    /// # Ok::<(), rowlock::errors::Invalid>(())
    /// ```
    pub fn is_retryable(&self) -> bool {
        match self {
            // A write that may have been carried out must not be repeated.
            Self::TimedOut { action: Action::Update | Action::Commit, outcome: Certainty::Unknown, .. }
            | Self::Database { action: Action::Update | Action::Commit, outcome: Certainty::Unknown, .. } => false,
            Self::Refused(refusal) => {
                use Reason::{LastRunFailed, NotSucceeded, TimedOutUnfinished};
                // These wait for an operator.
                !matches!(refusal.reason, TimedOutUnfinished | LastRunFailed | NotSucceeded)
            }
            Self::TimedOut { .. } | Self::NoConnection { .. } | Self::Conflict { .. } | Self::InUse { .. } => true,
            Self::Database { source, .. } => fault(source).is_transient(),
            _ => false,
        }
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
