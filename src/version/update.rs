//! What is read of a row, and the result of a change.

use std::fmt;

use crate::{error::Error, invalid::Invalid};

/// A value and the version that it was read with, as
/// [`VersionedTable::read`](crate::VersionedTable::read) returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Versioned<V> {
    /// The value.
    pub value: V,
    /// The row's version.
    pub version: i64,
}

/// A completed change, as [`VersionedTable::update`](crate::VersionedTable::update) and the other
/// changes return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Updated<V> {
    /// The value after the change: the one that was computed, or what a trigger of the table made
    /// of it.
    pub value: V,
    /// The row's version after the change.
    pub version: i64,
    /// The number of attempts.
    pub attempts: u32,
}

/// Why a value was not changed.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// # use rowlock::balances::Columns;
/// # let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
/// # let accounts = rowlock::VersionedTable::new(pool, columns);
/// use rowlock::{Error, balances::{Insufficient, UpdateError}, errors::NotFound};
///
/// match accounts.deduct("alice", 130).await {
///     Ok(updated) => println!("{} left", updated.value),
///     Err(UpdateError::Computation(Insufficient { balance, .. })) => println!("only {balance}"),
///     Err(UpdateError::Other(Error::NotFound(NotFound::Row { key, .. }))) => println!("{key} has no account"),
///     Err(UpdateError::Other(error)) => return Err(error.into()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(thiserror::Error)]
pub enum UpdateError<E> {
    /// The computation returned this error; nothing was written.
    #[error("{0}")]
    Computation(E),
    /// Any other error: [`Error::NotFound`], [`Error::Conflict`] when the attempts are used up, an
    /// error of the database.
    #[error(transparent)]
    Other(#[from] Error),
}

/// As that of [`Error`]: for a `main` that returns it.
impl<E: fmt::Debug> fmt::Debug for UpdateError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Computation(error) => error.fmt(f),
            Self::Other(error) => error.fmt(f),
        }
    }
}

impl<E> From<Invalid> for UpdateError<E> {
    fn from(error: Invalid) -> Self {
        Self::Other(error.into())
    }
}
