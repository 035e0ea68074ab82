//! Why work under a lock has no result, and the errors of that work.

use std::{error::Error as StdError, fmt};

use crate::{
    chain::print_chain,
    error::Error,
    key::{Key, Token},
    rules::Refusal,
};

/// Why work under a lock has no result: of `run` and of `transaction`.
///
/// After a transaction nothing was committed, unless the error is [`Error::Transaction`]. There is
/// one exception, under a version and in `Tick::transaction`: the work commits, and the connection
/// is then lost before that is noticed. The work does so by `COMMIT` as text, and on MySQL and
/// MariaDB also by a statement that commits by itself. [`Work`](Self::Work) and [`Error::Database`]
/// do not show what was committed.
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     lock: rowlock::LeaseLock<DB>,
/// # ) -> Result<(), rowlock::Error> {
/// use rowlock::{Error, RunError, errors::{AnyError, TransactionFault}};
///
/// match lock.transaction("alice", async |_tx| Ok::<_, AnyError>(())).await {
///     Ok(()) => println!("committed"),
///     Err(RunError::Work(error)) => println!("rolled back: {error}"),
///     Err(RunError::Refused(refusal)) => println!("not begun: {refusal}"),
///     Err(RunError::Lost { key, .. }) => println!("rolled back: {key} was lost"),
///     Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { key, .. }))) => println!("read {key}"),
///     Err(RunError::Other(error)) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
pub enum RunError<E> {
    /// The work's own error.
    Work(E),
    /// The key was not available in time. The work did not begin.
    Refused(Refusal),
    /// The lease was lost. The work was cancelled, or its transaction rolled back.
    Lost {
        /// The key.
        key: Key,
        /// The lost claim's token.
        token: Token,
    },
    /// Any other error.
    Other(Error),
}

impl<E> RunError<E> {
    /// Returns `None` for a refusal, for work that is skipped while another instance does it.
    ///
    /// # Errors
    /// All errors but a refusal.
    pub fn unless_refused<T>(result: Result<T, Self>) -> Result<Option<T>, Self> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Self::Refused(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl<E> From<Error> for RunError<E> {
    fn from(error: Error) -> Self {
        match error {
            Error::Refused(refusal) => Self::Refused(refusal),
            Error::Lost { key, token } => Self::Lost { key, token },
            error => Self::Other(error),
        }
    }
}

/// As that of [`Error`]: for a `main` that returns it.
impl<E: fmt::Debug> fmt::Debug for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => write!(f, "the work failed: {error:?}"),
            Self::Refused(refusal) => fmt::Display::fmt(refusal, f),
            Self::Lost { key, token } => Error::Lost { key: key.clone(), token: *token }.fmt(f),
            Self::Other(error) => error.fmt(f),
        }
    }
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => write!(f, "the work failed: {error}"),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Lost { key, token } => Error::Lost { key: key.clone(), token: *token }.fmt(f),
            Self::Other(error) => error.fmt(f),
        }
    }
}

/// The text has that of the work's error, so the source is the next one in the chain.
impl<E: WorkError + fmt::Debug + fmt::Display> StdError for RunError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Work(error) => error.cause().source(),
            Self::Refused(_) | Self::Lost { .. } => None,
            Self::Other(error) => error.source(),
        }
    }
}

/// An error of work in a transaction: every [`std::error::Error`], and [`AnyError`] for errors that
/// have no type of their own.
///
/// Its chain of sources is searched for a database error that means contention.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// #[derive(Debug, thiserror::Error)]
/// enum PayError {
///     #[error("the payment was not written")]
///     Database(#[from] sqlx::Error), // a source, in which contention is found
/// }
///
/// # let lock = rowlock::VersionLock::new(pool, "account", "id", "version");
/// let paid = lock.transaction("alice", async |mut tx| {
///     sqlx::query("UPDATE account SET balance = 70 WHERE id = 'alice'").execute(&mut *tx).await?;
///     Ok::<_, PayError>(())
/// });
/// paid.await?;
/// # Ok(())
/// # }
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
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// use rowlock::errors::AnyError;
///
/// # let lock = rowlock::VersionLock::new(pool, "account", "id", "version");
/// let paid = lock.transaction("alice", async |mut tx| {
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
/// ```
pub struct AnyError(pub Box<dyn StdError + Send + Sync>);

impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for AnyError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl fmt::Debug for AnyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print_chain(&*self.0, f)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the payment was not written")]
    struct NotWritten(#[source] std::num::ParseIntError);

    #[test]
    fn a_works_error_is_told_once_and_keeps_its_sources() {
        let cause = "x".parse::<i64>().unwrap_err();
        let text = cause.to_string();
        for error in [
            Box::new(RunError::Work(NotWritten(cause.clone()))) as Box<dyn StdError>,
            Box::new(RunError::Work(AnyError::from(NotWritten(cause)))),
        ] {
            assert_eq!(error.to_string(), "the work failed: the payment was not written");
            assert_eq!(error.source().map(ToString::to_string), Some(text.clone()));
        }
    }

    #[test]
    fn what_a_main_prints_is_a_text() {
        let key = Key::new("import").unwrap();
        let lost = RunError::<AnyError>::Lost { key: key.clone(), token: Token::new(3) };
        assert_eq!(format!("{lost:?}"), lost.to_string());
        let failed = RunError::<AnyError>::Other(Error::conflict(key, 2));
        assert!(format!("{failed:?}").starts_with(&failed.to_string()), "{failed:?}");
        let cause = "x".parse::<i64>().unwrap_err();
        let work = RunError::Work(AnyError::from(NotWritten(cause.clone())));
        assert_eq!(format!("{work:?}"), format!("{work}: {cause}"));
    }
}
