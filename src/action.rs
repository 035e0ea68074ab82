//! What was under way when an error occurred, and what is known of its outcome.

use std::fmt;

/// The action during which an error occurred.
///
/// ```
/// use rowlock::{Error, errors::{Action, Setup}};
///
/// /// Returns whether the error occurred while a lease was ended.
/// fn at_the_end(error: &Error) -> bool {
///     match error {
///         Error::Database(fault) => matches!(fault.action(), Action::Release | Action::Abandon),
///         _ => false,
///     }
/// }
/// # assert!(!at_the_end(&Error::Setup(Setup::TableMissing)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Connecting to the database.
    Connect,
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
    /// Deleting rows.
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
        matches!(self, Self::Connect | Self::Inspect | Self::Read | Self::Begin | Self::Confirm | Self::Commit)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "connecting",
            Self::Acquire => "acquiring",
            Self::Renew => "renewing",
            Self::Release => "releasing",
            Self::Abandon => "abandoning",
            Self::Migrate => "migrating",
            Self::Inspect => "inspecting",
            Self::ForceRelease => "releasing by force",
            Self::Forget => "deleting rows of",
            Self::Begin => "beginning a transaction under",
            Self::Confirm => "confirming",
            Self::Commit => "committing under",
            Self::Read => "reading",
            Self::Update => "updating",
        })
    }
}

/// What is known of the outcome when there was no valid reply.
///
/// ```
/// use rowlock::{Error, errors::{Certainty, Setup, TransactionFault}};
///
/// /// Returns whether the request may have been carried out.
/// fn in_doubt(error: &Error) -> bool {
///     match error {
///         Error::Database(fault) => fault.outcome() == Certainty::Unknown,
///         Error::Transaction(TransactionFault::CommitUnknown { .. }) => true,
///         _ => false,
///     }
/// }
/// # assert!(!in_doubt(&Error::Setup(Setup::TableMissing)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Certainty {
    /// The request was not carried out.
    NothingChanged,
    /// The request may have been carried out. A claim that is left behind ends with its lease.
    Unknown,
    /// A part of a transaction was committed, before the transaction ended. The rest may be.
    InPart,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NothingChanged => "nothing was changed",
            Self::Unknown => "it may have been carried out",
            Self::InPart => "a part of it was committed",
        })
    }
}

/// Returns what is known of the outcome, and what follows from it.
pub(crate) fn describe_outcome(action: Action, outcome: Certainty) -> String {
    let next = match (outcome, action) {
        (Certainty::NothingChanged, _) => "",
        (_, Action::Acquire | Action::Renew | Action::Release | Action::Abandon) => {
            " (a claim that is left behind ends with its lease)"
        }
        (_, Action::Update) => " (read the row before you change it again)",
        (_, Action::ForceRelease) => " (inspect the key before you repeat the call)",
        (_, Action::Migrate | Action::Forget) => " (the call can be repeated)",
        // These leave nothing behind.
        (_, Action::Connect | Action::Inspect | Action::Read | Action::Begin | Action::Confirm | Action::Commit) => "",
    };
    format!("{outcome}{next}")
}
