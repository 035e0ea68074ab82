//! What can go wrong, for whom, and what to do about it.

use std::time::Duration;

use crate::{
    fault::fault,
    key::{Key, Token},
};

/// Everything that is not an answer. A refusal is an answer; a database that failed is never one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key was refused at the door; nothing was sent.
    #[error(
        "key {key:?} {wrong}: use 1 to 255 bytes of UTF-8, without NUL and without white space at the start or end"
    )]
    InvalidKey {
        /// The text, or its first 80 characters.
        key: String,
        /// What is wrong with it.
        wrong: String,
    },

    /// The table's key column cannot hold this key; nothing was changed.
    #[error("key {:?} does not fit: the column t_resource_lock.key_resource is {column}", key.as_str())]
    KeyTooLong {
        /// The key.
        key: Key,
        /// The column's type.
        column: String,
    },

    /// The table's column for the label is too narrow; nothing was changed.
    #[error(
        "the label {label:?} does not fit: the column t_resource_lock.client_ip holds {chars} characters; set a shorter one with label()"
    )]
    LabelTooLong {
        /// The label.
        label: String,
        /// What the column holds.
        chars: usize,
    },

    /// A setting was refused at the door.
    #[error("{setting} of {value} is not possible: {rule}")]
    InvalidSetting {
        /// The setting's name.
        setting: &'static str,
        /// What was asked for.
        value: String,
        /// What is possible.
        rule: &'static str,
    },

    /// The table is not there.
    #[error(
        "the table t_resource_lock does not exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    TableMissing,

    /// The table is there, but not all of it.
    #[error(
        "the table t_resource_lock lacks {columns}: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    ColumnMissing {
        /// The columns that are missing.
        columns: String,
    },

    /// The table cannot be used as it is.
    #[error("the table t_resource_lock cannot be used: {wrong}")]
    Unsuitable {
        /// What is wrong with it, and what would be right.
        wrong: String,
    },

    /// The database takes no writes; nothing was changed.
    #[error("the database is read-only: rowlock needs one that takes writes (the primary, not a standby)")]
    ReadOnly {
        /// The driver's error.
        #[source]
        source: sqlx::Error,
    },

    /// Called outside a tokio runtime.
    #[error("rowlock needs a tokio runtime with its timer enabled: call it from within one")]
    NoRuntime,

    /// Nothing came back in time.
    #[error("{action} {subject}: no answer within {limit:?}; {outcome}")]
    TimedOut {
        /// What was being done.
        action: Action,
        /// To which key.
        subject: String,
        /// The time limit.
        limit: Duration,
        /// What is known of the outcome.
        outcome: Certainty,
    },

    /// The pool gave no connection in time.
    #[error(
        "{action} {subject}: no connection from the pool within {limit:?}, because all are in use or the server is out of reach; {outcome}"
    )]
    NoConnection {
        /// What was to be done.
        action: Action,
        /// To which key.
        subject: String,
        /// The time limit.
        limit: Duration,
        /// What is known of the outcome.
        outcome: Certainty,
    },

    /// The claim is somebody else's by now, or nobody's: it was taken over after its lease ended,
    /// released by an operator, or trampled on by another program.
    #[error("key {:?} was lost: the claim with token {token} no longer holds it; do not act on it any more", key.as_str())]
    Lost {
        /// The key.
        key: Key,
        /// The lost claim's token.
        token: Token,
    },

    /// The database failed.
    #[error("{action} {subject} failed: {source}; {outcome}")]
    Database {
        /// What was being done.
        action: Action,
        /// To which key, or to what.
        subject: String,
        /// What is known of the outcome.
        outcome: Certainty,
        /// The driver's error.
        source: sqlx::Error,
    },
}

/// What was being done when an error came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Taking a key.
    Acquire,
    /// Prolonging a lease.
    Renew,
    /// Ending a claim with a status.
    Release,
    /// Ending a claim so that the next one may take over at once.
    Abandon,
    /// Creating or checking the table.
    Migrate,
    /// Looking at rows.
    Inspect,
    /// Freeing a row whoever holds it.
    ForceRelease,
    /// Deleting old rows.
    Forget,
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquiring",
            Self::Renew => "renewing",
            Self::Release => "releasing",
            Self::Abandon => "abandoning",
            Self::Migrate => "migrating",
            Self::Inspect => "inspecting",
            Self::ForceRelease => "releasing by force",
            Self::Forget => "forgetting old rows of",
        })
    }
}

/// What is known of the outcome when there was no proper reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Certainty {
    /// The request was not carried out.
    NothingChanged,
    /// It may have been carried out; a claim that nobody knows of, or that nobody could end, ends with its lease.
    Unknown,
}

impl std::fmt::Display for Certainty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NothingChanged => "nothing was changed",
            Self::Unknown => "it may have been carried out, and what it left behind ends with the lease",
        })
    }
}

impl Error {
    /// Whether the same call may succeed a little later, with nobody changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TimedOut { .. } | Self::NoConnection { .. } => true,
            Self::Database { source, .. } => fault(source).is_transient(),
            _ => false,
        }
    }
}
