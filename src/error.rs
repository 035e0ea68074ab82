//! Errors of the crate, and what is known of the outcome.

use std::{error::Error as _, fmt, time::Duration};

use crate::{
    key::{Holder, InvalidHolder, InvalidKey, Key, Token},
    store::fault::{Contention, fault},
};

/// An error of a call. A refusal is not an error, but a regular result; a failure of the database
/// is never reported as a refusal.
///
/// `Display` states what happened and what to do, and leaves the driver's error to
/// [`source`](std::error::Error::source). `Debug` prints the same text and all sources, so that a
/// `main` that returns the error prints them.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not a key; nothing was sent.
    #[error(transparent)]
    InvalidKey(#[from] InvalidKey),

    /// The table's key column cannot hold this key; nothing was changed.
    #[error("key {:?} does not fit: the column t_resource_lock.key_resource is {column}", key.as_str())]
    KeyTooLong {
        /// The key.
        key: Key,
        /// The column's type.
        column: String,
    },

    /// The text is not the id of a holder; nothing was sent.
    #[error(transparent)]
    InvalidHolder(#[from] InvalidHolder),

    /// The key is not held under this id: its claim was ended, was taken over, or never existed.
    /// Nothing was changed.
    #[error("key {:?} is not held by {holder}: that claim was ended or taken over, or never made", key.as_str())]
    NotHeld {
        /// The key.
        key: Key,
        /// The requested holder.
        holder: Holder,
    },

    /// The table's column for the label is too narrow; nothing was changed.
    #[error(
        "the label {label:?} does not fit: the column t_resource_lock.client_ip holds {chars} characters; set a shorter one with label()"
    )]
    LabelTooLong {
        /// The label.
        label: String,
        /// How many characters the column holds.
        chars: usize,
    },

    /// A setting is out of range.
    #[error("{setting} of {value} is not possible: {rule}")]
    InvalidSetting {
        /// The setting's name.
        setting: &'static str,
        /// The requested value.
        value: String,
        /// The values that are possible.
        rule: &'static str,
    },

    /// The table does not exist.
    #[error(
        "the table t_resource_lock does not exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    TableMissing,

    /// The table exists, but lacks columns.
    #[error(
        "the table t_resource_lock is not complete, it lacks {columns}: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    ColumnMissing {
        /// The missing columns.
        columns: String,
    },

    /// The key's row was created, but no later statement sees it. The key is not held.
    #[error("key {:?}: its row was created and is not visible; look for a trigger on t_resource_lock that deletes or changes new rows, a row policy that hides them, or a replica that answers reads", key.as_str())]
    RowNotVisible {
        /// The key.
        key: Key,
    },

    /// The table cannot be used in its present form.
    #[error("the table t_resource_lock cannot be used: {wrong}")]
    Unsuitable {
        /// What is wrong with it, and what would be correct.
        wrong: String,
    },

    /// The database accepts no writes; nothing was changed.
    #[error("the database is read-only: rowlock needs one that takes writes (the primary, not a standby)")]
    ReadOnly {
        /// The driver's error.
        #[source]
        source: sqlx::Error,
    },

    /// The call was made outside a tokio runtime.
    #[error("rowlock needs a tokio runtime with its timer enabled: call it from within one")]
    NoRuntime,

    /// No reply arrived within the time limit.
    #[error("{action} {subject}: no answer within {limit:?}; {}", told(*action, *outcome))]
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

    /// The pool gave no connection in time.
    #[error(
        "{action} {subject}: no connection from the pool within {limit:?}, because all are in use or the server is out of reach; {}",
        told(*action, *outcome)
    )]
    NoConnection {
        /// The action that was to be performed.
        action: Action,
        /// The key, or the other object, that it concerned.
        subject: String,
        /// The time limit.
        limit: Duration,
        /// What is known of the outcome.
        outcome: Certainty,
    },

    /// The claim no longer holds the key: it was taken over after its lease ended, was released by
    /// an operator, or was overwritten by another program.
    #[error("key {:?} was lost: the claim with token {token} no longer holds it; do not act on it any more", key.as_str())]
    Lost {
        /// The key.
        key: Key,
        /// The lost claim's token.
        token: Token,
    },

    /// Another transaction committed first; nothing of this one was committed.
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
    #[error("the table {table} has no row of key {:?}: create it first", key.as_str())]
    NotFound {
        /// The table, as the caller named it.
        table: String,
        /// The key.
        key: Key,
    },

    /// The key does not fit the type of the column; nothing was sent.
    #[error("key {:?} does not fit: the column {column} holds {holds}", key.as_str())]
    KeyUnfit {
        /// The key.
        key: Key,
        /// Table and column.
        column: String,
        /// What the column holds.
        holds: &'static str,
    },

    /// The name of a table or column is not valid.
    #[error("{name:?} is not taken as the name of a {what}: {rule}")]
    InvalidName {
        /// The name, or its first 80 characters.
        name: String,
        /// `table` or `column`.
        what: &'static str,
        /// The names that are possible.
        rule: &'static str,
    },

    /// The application's table differs from its description; nothing was changed.
    #[error("the table {table} cannot be used: {wrong}")]
    TableUnfit {
        /// The table, as the caller named it.
        table: String,
        /// What is wrong with it.
        wrong: String,
    },

    /// The amount is not valid; nothing was changed.
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

    /// The transaction ended before its commit: the work continued after an error of the database,
    /// ended the transaction itself, or kept it. Nothing that it wrote before that was committed by
    /// rowlock.
    #[error(
        "the transaction under key {:?} was over before its commit: the work has to let every database error out, must not commit, roll back or keep the transaction, and run nothing that commits by itself; what it wrote after that may stand", key.as_str()
    )]
    TransactionOver {
        /// The key.
        key: Key,
        /// The error that the server returned.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// COMMIT was sent, no reply arrived, and the commit outcome cannot be determined.
    #[error("the transaction under key {:?} may or may not have been committed: no answer came; look at what it writes before it is done again", key.as_str())]
    CommitUnknown {
        /// The key.
        key: Key,
        /// The driver's error; `None` if the time limit was reached.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// The database failed.
    #[error("{action} {subject} failed{}; {}", because(source), told(*action, *outcome))]
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

impl fmt::Debug for Error {
    /// Prints the error and all its sources on one line. A text that an error repeats from its
    /// source, as sqlx's errors do, is printed once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.to_string();
        f.write_str(&said)?;
        let mut source = self.source();
        while let Some(error) = source {
            let text = error.to_string();
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            (said, source) = (text, error.source());
        }
        Ok(())
    }
}

/// Returns the cause, if the caller can correct it.
fn because(source: &sqlx::Error) -> &'static str {
    match source {
        sqlx::Error::PoolClosed => " because the application's pool is closed",
        _ => "",
    }
}

/// Returns what is known of the outcome, and what follows from it.
fn told(action: Action, outcome: Certainty) -> String {
    let next = match (outcome, action) {
        (Certainty::NothingChanged, _) => "",
        (_, Action::Acquire | Action::Renew | Action::Release | Action::Abandon) => {
            " (a claim that is left behind ends with its lease)"
        }
        (_, Action::Update) => " (read the row before it is changed again)",
        (_, Action::ForceRelease) => " (look at the key before it is done again)",
        (_, Action::Migrate | Action::Forget) => " (doing it again does no harm)",
        // These leave nothing behind.
        (_, Action::Inspect | Action::Read | Action::Begin | Action::Confirm | Action::Commit) => "",
    };
    format!("{outcome}{next}")
}

/// The action during which an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Acquiring a key.
    Acquire,
    /// Renewing a lease.
    Renew,
    /// Ending a claim with a status.
    Release,
    /// Ending a claim so that the next claim may take over at once.
    Abandon,
    /// Creating or checking the table.
    Migrate,
    /// Reading rows.
    Inspect,
    /// Freeing a row regardless of its holder.
    ForceRelease,
    /// Deleting old rows.
    Forget,
    /// Beginning a transaction.
    Begin,
    /// Making a transaction depend on a claim.
    Confirm,
    /// Committing a transaction.
    Commit,
    /// Reading a value or a version.
    Read,
    /// Writing a value.
    Update,
}

impl Action {
    /// Returns whether the action changes nothing, with or without a reply: it only reads, or it is
    /// part of a transaction whose COMMIT was not sent.
    pub(crate) fn leaves_nothing(self) -> bool {
        matches!(self, Self::Inspect | Self::Read | Self::Begin | Self::Confirm | Self::Commit)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquiring",
            Self::Renew => "renewing",
            Self::Release => "releasing",
            Self::Abandon => "abandoning",
            Self::Migrate => "migrating",
            Self::Inspect => "inspecting",
            Self::ForceRelease => "releasing by force",
            Self::Forget => "forgetting old rows of",
            Self::Begin => "beginning a transaction under",
            Self::Confirm => "confirming",
            Self::Commit => "committing under",
            Self::Read => "reading",
            Self::Update => "updating",
        })
    }
}

/// What is known of the outcome when there was no valid reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Certainty {
    /// The request was not carried out.
    NothingChanged,
    /// The request may have been carried out. A claim that is left behind ends with its lease.
    Unknown,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingChanged => "nothing was changed",
            Self::Unknown => "it may have been carried out",
        })
    }
}

impl Error {
    pub(crate) fn conflict(key: Key, attempts: u32) -> Self {
        Self::Conflict { key, attempts, source: Contention }
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
    pub fn is_retryable(&self) -> bool {
        match self {
            // A write that may have been carried out must not be repeated.
            Self::TimedOut { action: Action::Update | Action::Commit, outcome: Certainty::Unknown, .. }
            | Self::Database { action: Action::Update | Action::Commit, outcome: Certainty::Unknown, .. } => false,
            Self::TimedOut { .. } | Self::NoConnection { .. } | Self::Conflict { .. } => true,
            Self::Database { source, .. } => fault(source).is_transient(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACTIONS: [Action; 13] = [
        Action::Acquire,
        Action::Renew,
        Action::Release,
        Action::Abandon,
        Action::Migrate,
        Action::Inspect,
        Action::ForceRelease,
        Action::Forget,
        Action::Begin,
        Action::Confirm,
        Action::Commit,
        Action::Read,
        Action::Update,
    ];

    fn refused() -> sqlx::Error {
        sqlx::Error::Io(std::io::Error::other("the server hung up"))
    }

    fn failed(action: Action, outcome: Certainty) -> Error {
        Error::Database { action, subject: "\"k\"".into(), outcome, source: refused() }
    }

    #[test]
    fn a_lease_is_spoken_of_where_there_is_one() {
        for action in ACTIONS {
            let (subject, limit) = ("\"k\"".to_owned(), Duration::from_secs(5));
            for outcome in [Certainty::Unknown, Certainty::NothingChanged] {
                let of_a_claim = matches!(action, Action::Acquire | Action::Renew | Action::Release | Action::Abandon);
                let errors = [
                    failed(action, outcome),
                    Error::TimedOut { action, subject: subject.clone(), limit, outcome },
                    Error::NoConnection { action, subject: subject.clone(), limit, outcome },
                ];
                for text in errors.map(|error| error.to_string()) {
                    assert_eq!(text.contains("lease"), of_a_claim && outcome == Certainty::Unknown, "{text}");
                    assert_eq!(text.contains("may have been"), outcome == Certainty::Unknown, "{text}");
                    assert_eq!(text.contains("nothing was changed"), outcome == Certainty::NothingChanged, "{text}");
                }
            }
        }
    }

    #[test]
    fn the_cause_is_told_once_by_what_prints_the_chain() {
        let key = Key::new("k").unwrap();
        let errors = [
            failed(Action::Acquire, Certainty::NothingChanged),
            Error::ReadOnly { source: refused() },
            Error::TransactionOver { key: key.clone(), source: Some(refused()) },
            Error::CommitUnknown { key, source: Some(refused()) },
        ];
        for error in errors {
            assert!(!error.to_string().contains("hung up"), "{error}");
            assert!(error.source().is_some_and(|source| source.to_string().contains("hung up")), "{error}");
            assert_eq!(format!("{error:?}").matches("hung up").count(), 1, "{error:?}");
        }
    }

    /// `fn main() -> Result<(), Box<dyn Error>>` prints this text.
    #[test]
    fn what_a_main_prints_says_what_to_do() {
        let error: Box<dyn std::error::Error> = Error::TableMissing.into();
        assert!(format!("{error:?}").contains("call rowlock::migrate(&pool) once"), "{error:?}");
    }
}
