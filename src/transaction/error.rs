//! Why a transaction has no result, and the errors of its work.

use std::{error::Error as StdError, fmt};

use crate::{error::Error, rules::Refusal};

/// Why a transaction has no result. Nothing was committed, unless the error is
/// [`Error::CommitUnknown`].
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     lock: rowlock::LeaseLock<DB>,
/// # ) -> Result<(), rowlock::Error> {
/// use rowlock::{AnyError, Error, ResourceLockExt, TransactionError};
///
/// match lock.transaction("alice", |_tx, _claim| async { Ok::<_, AnyError>(()) }).await {
///     Ok(()) => println!("committed"),
///     Err(TransactionError::Work(error)) => println!("rolled back: {error}"),
///     Err(TransactionError::Refused(refusal)) => println!("not begun: {refusal}"),
///     Err(TransactionError::Failed(Error::CommitUnknown { key, .. })) => println!("read {key}"),
///     Err(TransactionError::Failed(error)) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
pub enum TransactionError<E> {
    /// The work's own error.
    #[error("the work failed: {0}")]
    Work(E),
    /// The key was not available in time.
    #[error("{0}")]
    Refused(Refusal),
    /// Any other failure.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// An error of work in a transaction: every [`std::error::Error`], and [`AnyError`] for errors that
/// have no type of their own.
///
/// Its chain of sources is searched for a database error that means contention.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # let sql = "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)";
/// # sqlx::query(sql).execute(&pool).await?;
/// # let sql = "INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)";
/// # sqlx::query(sql).execute(&pool).await?;
/// use rowlock::ResourceLockExt;
///
/// #[derive(Debug, thiserror::Error)]
/// enum PayError {
///     #[error("the payment was not written")]
///     Database(#[from] sqlx::Error), // a source, in which contention is found
/// }
///
/// # let lock = rowlock::VersionLock::new(pool, "account", "id", "version")?;
/// let paid = lock.transaction("alice", |mut tx, _claim| async move {
///     sqlx::query("UPDATE account SET balance = 70 WHERE id = 'alice'").execute(&mut *tx).await?;
///     Ok::<_, PayError>(())
/// });
/// paid.await?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
pub trait WorkError {
    /// Returns the error at which the search begins.
    fn cause(&self) -> &(dyn StdError + 'static);
}

impl<E: StdError + 'static> WorkError for E {
    fn cause(&self) -> &(dyn StdError + 'static) {
        self
    }
}

/// Any error, usable with `?`, for work whose errors are `Box<dyn Error>`, `anyhow::Error` or
/// strings.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # let sql = "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)";
/// # sqlx::query(sql).execute(&pool).await?;
/// # let sql = "INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)";
/// # sqlx::query(sql).execute(&pool).await?;
/// use rowlock::{AnyError, ResourceLockExt};
///
/// # let lock = rowlock::VersionLock::new(pool, "account", "id", "version")?;
/// let paid = lock.transaction("alice", |mut tx, _claim| async move {
///     let amount: i64 = "30".parse()?;
///     let sql = "UPDATE account SET balance = balance - ? WHERE id = 'alice'";
///     match sqlx::query(sql).bind(amount).execute(&mut *tx).await?.rows_affected() {
///         1 => Ok::<_, AnyError>(()),
///         _ => Err("there is no such account".into()),
///     }
/// });
/// paid.await?;
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct AnyError(pub Box<dyn StdError + Send + Sync>);

impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for AnyError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for AnyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl WorkError for AnyError {
    fn cause(&self) -> &(dyn StdError + 'static) {
        &*self.0
    }
}
