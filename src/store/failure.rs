//! Why a statement has no result, and how to proceed.

use std::{fmt, time::Duration};

use crate::{
    action::{Action, Certainty},
    causes::{DatabaseFault, Setup},
    error::Error,
    store::fault::{self, Fault, fault, is_undone, may_be_done, said},
};

/// Why there is no result.
#[derive(Debug)]
pub enum Failure {
    /// The library's threads are missing: nothing was sent.
    NoThreads(Box<Error>),
    /// No connection was available: nothing was sent.
    NoConnection(sqlx::Error),
    /// Sent, and no reply arrived within the limit.
    NoReply,
    /// Sent, and failed.
    Failed(sqlx::Error),
    /// Nothing was changed: contention undid the statement, or the server carried it out too late.
    Undone,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoThreads(error) => write!(f, "{error}"),
            Self::NoConnection(error) => write!(f, "no connection: {}", said(error)),
            Self::NoReply => f.write_str("no reply in time"),
            Self::Failed(error) => f.write_str(&said(error)),
            Self::Undone => f.write_str(
                "the statement was undone: another transaction used the row, or the server executed it after its limit",
            ),
        }
    }
}

impl Failure {
    /// Returns whether a statement may still be running on the connection. A server error means
    /// that its statement ended, and a result that could not be decoded has been read to its end.
    pub fn may_still_run(&self) -> bool {
        !matches!(
            self,
            Self::NoThreads(_)
                | Self::Undone
                | Self::Failed(sqlx::Error::Database(_) | sqlx::Error::ColumnDecode { .. })
        )
    }

    /// Returns whether the statement was sent and may have been carried out. A server error means
    /// that it was undone, unless the session ended with it.
    pub fn is_unanswered(&self) -> bool {
        match self {
            Self::NoThreads(_) | Self::NoConnection(_) | Self::Undone => false,
            Self::NoReply => true,
            Self::Failed(error) => !is_undone(error),
        }
    }

    /// Returns whether the connection was lost, before the statement or during it.
    pub fn is_outage(&self) -> bool {
        self.fault() == Fault::Outage
    }

    /// Returns whether a statement that changes nothing may be sent again: another connection may
    /// work, or be available by then.
    pub fn is_connection_failure(&self) -> bool {
        matches!(self.fault(), Fault::Outage | Fault::NoConnection)
    }

    /// Returns whether the server takes no writes, which another one may do: it may have been the
    /// primary before a fail-over, and a new connection may lead to the next one.
    pub fn is_at_a_standby(&self) -> bool {
        matches!(self, Self::Failed(error) if fault(error) == Fault::ReadOnly && fault::may_take_writes_again(error))
    }

    /// Classifies the failure.
    pub fn fault(&self) -> Fault {
        match self {
            // A closed pool or a wrong password does not recover by itself.
            Self::NoConnection(error) if fault(error).is_transient() => Fault::NoConnection,
            Self::NoThreads(_) | Self::NoConnection(_) => Fault::Other,
            Self::NoReply => Fault::Outage,
            Self::Undone => Fault::Contention,
            // As a reply to a statement, it ends the session.
            Self::Failed(error) if may_be_done(error) => Fault::Outage,
            Self::Failed(error) => fault(error),
        }
    }

    /// Returns the error to report. `before` is what was known of the outcome before this request.
    pub fn into_error(self, action: Action, subject: String, limit: Duration, before: Certainty) -> Error {
        let fault = self.fault();
        match self {
            Self::NoThreads(error) => *error,
            Self::NoConnection(source) if fault == Fault::NoConnection => {
                Error::Database(DatabaseFault::NoConnection { action, subject, limit, outcome: before, source })
            }
            Self::NoConnection(source) => {
                Error::Database(DatabaseFault::Failed { action, subject, outcome: before, source })
            }
            Self::NoReply if !action.leaves_nothing() => Error::timed_out(action, subject, limit, Certainty::Unknown),
            Self::Undone | Self::NoReply => Error::timed_out(action, subject, limit, before),
            Self::Failed(source) => match fault {
                Fault::MissingTable if before == Certainty::NothingChanged => Error::Setup(Setup::TableMissing),
                Fault::MissingColumn if before == Certainty::NothingChanged => Error::Setup(Setup::ColumnMissing {
                    table: "t_resource_lock",
                    columns: format!("a column ({})", said(&source)),
                }),
                Fault::ReadOnly => {
                    Error::Database(DatabaseFault::ReadOnly { action, subject, outcome: before, source })
                }
                Fault::MissingTable
                | Fault::MissingColumn
                | Fault::Contention
                | Fault::Outage
                | Fault::NoConnection
                | Fault::Overload
                | Fault::Denied
                | Fault::Other => {
                    // The server's own error undid its statement. After any other error the effect
                    // is unknown.
                    let is_known = is_undone(&source) || action.leaves_nothing();
                    let outcome = if is_known { before } else { Certainty::Unknown };
                    Error::Database(DatabaseFault::Failed { action, subject, outcome, source })
                }
            },
        }
    }
}

/// How to proceed after a failure: the one policy of renewals, endings, releases and batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// A retry does not help: the pool is closed, the table or a column is missing, or a right is.
    /// A refused password is tried again: a new one may be in effect by then.
    Nothing,
    /// The server refused the statement, perhaps because of one of its rows. Several requests are
    /// sent one by one, and a single one again after a pause.
    Apart,
    /// The statement is sent again after a pause.
    Again,
}

/// Returns the remedy for the failure of a statement that carried this many requests.
pub fn remedy(failure: &Failure, requests: usize) -> Remedy {
    match (failure, failure.fault()) {
        (Failure::NoThreads(_) | Failure::NoConnection(sqlx::Error::PoolClosed), _) => Remedy::Nothing,
        (Failure::NoConnection(_) | Failure::NoReply | Failure::Undone, _) => Remedy::Again,
        (_, Fault::Contention | Fault::Outage | Fault::NoConnection) => Remedy::Again,
        (_, Fault::MissingTable | Fault::MissingColumn) => Remedy::Nothing,
        // A row policy may deny only some of the rows.
        (_, Fault::Denied) if requests == 1 => Remedy::Nothing,
        // It is a matter of no single row.
        (failure, Fault::ReadOnly) => {
            if failure.is_at_a_standby() {
                Remedy::Again
            } else {
                Remedy::Nothing
            }
        }
        (failure, _) if failure.may_still_run() => Remedy::Again,
        _ => Remedy::Apart,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_a_pause_may_mend_is_tried_again() {
        assert_eq!(remedy(&Failure::NoConnection(sqlx::Error::PoolClosed), 1), Remedy::Nothing);
        for failure in [Failure::NoConnection(sqlx::Error::PoolTimedOut), Failure::NoReply, Failure::Undone] {
            assert_eq!(remedy(&failure, 1), Remedy::Again, "{failure:?}");
        }
        // The statement was carried out, and its result was not understood.
        assert_eq!(remedy(&Failure::Failed(sqlx::Error::RowNotFound), 2), Remedy::Again);
    }
}
