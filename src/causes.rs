//! What belongs to the variants of [`Error`](crate::Error).

use std::time::Duration;

use crate::{
    action::{Action, Certainty, describe_outcome},
    chain::prints_its_chain,
    key::{Holder, Key},
    store::fault::said,
};

/// The database, its tables, a schedule or this process is not ready for the call. An operator has
/// to change that first.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Setup {
    /// The table does not exist.
    #[error(
        "the table t_resource_lock does not exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    TableMissing,

    /// The tables of schedules do not exist.
    #[error(
        "the tables of schedules (t_resource_schedule, t_resource_schedule_run, t_resource_schedule_instance, t_resource_schedule_times, t_resource_schedule_detail, t_resource_order, t_resource_change) do not all exist here: call rowlock::migrate(&pool) once, or run `sqlx migrate run` with rowlock's migrations"
    )]
    ScheduleTablesMissing,

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

    /// The key's row was created, but no later statement sees it. The key is not held.
    #[non_exhaustive]
    #[error("key {:?}: its row was created and is not visible; look for a trigger on t_resource_lock that deletes or changes new rows, a row policy that hides them, or a replica that answers reads", key.as_str())]
    RowNotVisible {
        /// The key.
        key: Key,
    },

    /// The server or the database does not support the call; nothing was changed.
    #[non_exhaustive]
    #[error("{wrong}")]
    Unsupported {
        /// What is wrong with it, and what to do instead.
        wrong: String,
    },

    /// The state of the schedule does not permit the call; nothing was changed.
    #[non_exhaustive]
    #[error("the schedule {:?}: {wrong}", name.as_str())]
    ScheduleUnfit {
        /// The schedule's name.
        name: Key,
        /// What is in the way.
        wrong: String,
    },

    /// [`Migration::undo`](crate::migration::Migration::undo) was refused, and nothing was changed.
    #[non_exhaustive]
    #[error("the tables were not dropped: {by}, then call again")]
    StillUsed {
        /// What uses them, and what to do about it.
        by: String,
    },

    /// The runtime on which a tick was run was shut down. The run is taken over when its lease
    /// ends.
    #[error("the runtime was shut down while a tick was run; another call takes it over when its lease ends")]
    RuntimeOver,

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
}

/// The object that the call names does not exist.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum NotFound {
    /// The table has no row for this key.
    #[non_exhaustive]
    #[error("the table {table} has no row of key {:?}: create it first", key.as_str())]
    Row {
        /// The table, as the caller named it.
        table: String,
        /// The key.
        key: Key,
    },

    /// The table has no schedule of this name, or this instance knows none.
    #[non_exhaustive]
    #[error("there is no schedule {:?}: {}", name.as_str(), match renamed_to {
        Some(new) => format!("its name is {new:?} now"),
        None => "check the name, or start an instance that defines it".to_owned(),
    })]
    Schedule {
        /// The schedule's name.
        name: Key,
        /// The name that it has now.
        renamed_to: Option<String>,
    },

    /// The key is not held under this id: its claim was ended, was taken over, or never existed.
    /// Nothing was changed.
    #[non_exhaustive]
    #[error("key {:?} is not held by {holder}: that claim was ended or taken over, or never made", key.as_str())]
    Claim {
        /// The key.
        key: Key,
        /// The requested holder.
        holder: Holder,
    },
}

/// A transaction that did not end by its commit, or whose commit has no reply.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TransactionFault {
    /// The transaction ended before its commit: the database ended it with an error after which the
    /// work continued, or the work committed, rolled back or kept it, or ran a statement that
    /// commits by itself. Or its connection was lost, and the lease's row does not exclude these.
    #[non_exhaustive]
    #[error(
        "the transaction under key {:?} ended before its commit{}; {}; the work must return every database error, must not commit, roll back or keep the transaction, and must run no statement that commits by itself", key.as_str(), returned(work.as_deref()), of_ended(*outcome)
    )]
    Over {
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
}

/// The database refused or failed the request, or did not reply.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DatabaseFault {
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

    /// No connection was available in time.
    #[non_exhaustive]
    #[error("{action} {subject}: no connection within {limit:?}: {}; {}", said(source), describe_outcome(*action, *outcome))]
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

    /// Transactions of other clients kept [`migrate`](crate::migrate()) from changing the table.
    #[non_exhaustive]
    #[error(
        "the table t_resource_lock could not be changed within {limit:?}, because it is in use by {by}; end that transaction, and call again; {}", describe_outcome(Action::Migrate, *outcome)
    )]
    InUse {
        /// The time limit.
        limit: Duration,
        /// The oldest transaction that uses the table.
        by: String,
        /// What is known of the outcome: earlier parts of a migration may stand.
        outcome: Certainty,
    },

    /// The database failed.
    #[non_exhaustive]
    #[error("{action} {subject} failed{}; {}", because(source), describe_outcome(*action, *outcome))]
    Failed {
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

prints_its_chain!(Setup, NotFound, TransactionFault, DatabaseFault);

impl DatabaseFault {
    /// Returns the action that was under way.
    pub fn action(&self) -> Action {
        match self {
            Self::TimedOut { action, .. }
            | Self::NoConnection { action, .. }
            | Self::ReadOnly { action, .. }
            | Self::Failed { action, .. } => *action,
            Self::InUse { .. } => Action::Migrate,
        }
    }

    /// Returns what is known of the outcome.
    pub fn outcome(&self) -> Certainty {
        match self {
            Self::TimedOut { outcome, .. }
            | Self::NoConnection { outcome, .. }
            | Self::ReadOnly { outcome, .. }
            | Self::InUse { outcome, .. }
            | Self::Failed { outcome, .. } => *outcome,
        }
    }

    /// Returns the action and the outcome of a statement.
    pub(crate) fn outcome_mut(&mut self) -> Option<(&mut Action, &mut Certainty)> {
        match self {
            Self::TimedOut { action, outcome, .. }
            | Self::NoConnection { action, outcome, .. }
            | Self::ReadOnly { action, outcome, .. }
            | Self::Failed { action, outcome, .. } => Some((action, outcome)),
            Self::InUse { .. } => None,
        }
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
            "roll back; what it wrote may be committed, in part or as a whole: read it before you repeat the work"
        }
        Certainty::InPart => "what it wrote before its end was committed: read it before you repeat the work",
    }
}

/// Returns the cause, if the caller can correct it.
fn because(source: &sqlx::Error) -> &'static str {
    match source {
        sqlx::Error::PoolClosed => " because the application's pool is closed",
        _ => "",
    }
}
