//! The trait over both lock strategies, and the types that they share.

use std::{pin::Pin, time::Duration};

use sqlx::Pool;

use crate::{
    error::Error,
    grant::Grant,
    key::Claim,
    retry::{Retry, TIME_LIMIT},
    rules::Status,
    store::Database,
};

/// A boxed future, as the methods of [`ResourceLock`] return it: `Box::pin(async move { ... })`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A lock that grants the right to change one resource, makes a commit depend on it, and releases
/// it.
///
/// [`LeaseLock`](crate::LeaseLock) excludes other holders from the start.
/// [`VersionLock`](crate::VersionLock) lets all of them begin, and one of them commit. Code built
/// on this trait ([`ResourceLockExt`](crate::strategy::ResourceLockExt)) does not depend on the
/// strategy; `dyn ResourceLock<DB>` lets configuration choose.
///
/// # Contract for implementations
/// If [`confirm`](Self::confirm) returned `Ok` in a transaction and the commit of that transaction
/// succeeded, no other claim on the key was confirmed and committed between the grant of this claim
/// and that commit. A claim that is lost cannot be confirmed.
///
/// [`transaction`](crate::strategy::ResourceLockExt::transaction) confirms a claim of an
/// application's own lock at the start of the transaction. After [`Error::Lost`] it acquires the
/// key again; after [`Error::Conflict`] it confirms the same claim in another transaction. An
/// implementation maps contention in the database to [`Error::conflict`]. It reports any other
/// failure of the database with [`Error::database`].
///
/// # Examples
///
/// Code for every lock, chosen by configuration:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # let optimistic = false;
/// use rowlock::{LeaseLock, ResourceLock, VersionLock};
/// use std::sync::Arc;
///
/// let lock: Arc<dyn ResourceLock<sqlx::Sqlite>> = match optimistic {
///     true => Arc::new(VersionLock::new(pool, "account", "id", "version")),
///     false => Arc::new(LeaseLock::new(pool)),
/// };
/// # Ok(())
/// # }
/// ```
///
/// A lock of the application's own:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// use rowlock::{
///     Claim, Error, Key, ResourceLock, Token, errors::{Action, Certainty},
///     strategy::{BoxFuture, Confirmation, Grant, ResourceLockExt}, leases::Holder,
/// };
/// use sqlx::{Sqlite, SqliteConnection, SqlitePool};
/// use std::time::Duration;
///
/// /// Guards the rows of the table `document` by their column `version`.
/// struct DocumentLock(SqlitePool);
///
/// impl ResourceLock<Sqlite> for DocumentLock {
///     fn acquire<'a>(
///         &'a self,
///         key: &'a str,
///         _wait: Duration, // no caller is excluded, so there is nothing to wait for
///     ) -> BoxFuture<'a, Result<Grant<Sqlite>, Error>> {
///         Box::pin(async move {
///             let key = Key::new(key)?;
///             let version = sqlx::query_scalar("SELECT version FROM document WHERE id = ?");
///             let version = version.bind(key.as_str()).fetch_one(&self.0).await.map_err(|error| {
///                 Error::database(Action::Read, &key, Certainty::NothingChanged, error)
///             })?;
///             let claim = Claim { key, holder: Holder::unique(), token: Token::new(version) };
///             Ok(claim.into())
///         })
///     }
///
///     fn confirm<'a>(
///         &'a self,
///         claim: &'a Claim,
///         tx: &'a mut SqliteConnection,
///     ) -> BoxFuture<'a, Result<Confirmation, Error>> {
///         Box::pin(async move {
///             let Claim { key, token, .. } = claim.clone();
///             let sql = "UPDATE document SET version = version + 1 WHERE id = ? AND version = ?";
///             match sqlx::query(sql).bind(key.as_str()).bind(token.get()).execute(tx).await {
///                 Ok(done) if done.rows_affected() == 1 => Ok(Confirmation(token.get() + 1)),
///                 Ok(_) => Err(Error::Lost { key, token }), // the version is read again
///                 Err(error) => {
///                     let outcome = Certainty::NothingChanged;
///                     Err(Error::database(Action::Confirm, &key, outcome, error))
///                 }
///             }
///         })
///     }
///
///     fn pool(&self) -> &SqlitePool {
///         &self.0
///     }
/// }
///
/// # let table = "CREATE TABLE document (id TEXT PRIMARY KEY, title TEXT, version INTEGER)";
/// # sqlx::query(table).execute(&pool).await?;
/// # sqlx::query("INSERT INTO document VALUES ('report', '', 7)").execute(&pool).await?;
/// let lock = DocumentLock(pool);
/// let titled = lock.transaction("report", async |mut tx| {
///     let sql = "UPDATE document SET title = 'Results' WHERE id = 'report'";
///     sqlx::query(sql).execute(&mut *tx).await.map(|_| ())
/// });
/// titled.await?;
/// # let version = sqlx::query_scalar::<_, i64>("SELECT version FROM document");
/// # assert_eq!(version.fetch_one(lock.pool()).await?, 8);
/// # Ok(())
/// # }
/// ```
pub trait ResourceLock<DB: Database>: Send + Sync {
    /// Acquires `key`, retrying until it is granted or `wait` has passed. Zero makes one attempt.
    ///
    /// # Errors
    /// [`Error::Refused`] with the last refusal, a key that is invalid, or a database that fails.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. A claim in flight ends by itself.
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>>;

    /// Makes the commit of the caller's transaction depend on the claim. A lease is confirmed
    /// before all other statements of the transaction, a version after them.
    ///
    /// It neither commits nor rolls back. If the transaction read a row before the lease was
    /// granted, another holder may have changed that row since. A claim serves one transaction at a
    /// time, because the outcome of an unanswered COMMIT could otherwise not be determined.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::Conflict`] if the claim does not stand, [`Error::Invalid`] if
    /// the connection is not in a transaction, [`Error::Transaction`] if the database has ended it,
    /// and errors of the database. After any of them the caller rolls back.
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller rolls back.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::ResourceLock;
    ///
    /// let lease = lock.try_acquire("report").await?.acquired().expect("the key is free");
    /// let mut tx = lock.pool().begin_with("BEGIN IMMEDIATE").await?;
    /// lock.confirm(lease.claim(), &mut tx).await?;
    /// // ... statements of the application ...
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>>;

    /// Returns the pool on which transactions are begun.
    fn pool(&self) -> &Pool<DB>;

    /// Confirms a claim in a transaction that is known to be open, as it is in
    /// [`transaction`](crate::strategy::ResourceLockExt::transaction). By default it does what
    /// [`confirm`](Self::confirm) does.
    ///
    /// # Errors
    /// As [`confirm`](Self::confirm), except those of a transaction that is not open.
    ///
    /// # Cancel safety
    /// As [`confirm`](Self::confirm).
    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.confirm(claim, tx)
    }

    /// Ends a claim. By default it ends the grant's lease; a version has nothing to release.
    ///
    /// [`transaction`](crate::strategy::ResourceLockExt::transaction) passes it each grant without
    /// a lease, with [`Status::Succeeded`] after the commit and [`Status::Failed`] after everything
    /// else. That includes a claim that was lost, and a transaction of which it is unknown whether
    /// it was committed: the confirmation guards its commit, and not the claim. If the future is
    /// dropped or the process ends, nothing is released.
    ///
    /// # Errors
    /// As [`Lease::release`](crate::Lease::release).
    ///
    /// # Cancel safety
    /// If the future is dropped, the claim is released or abandoned.
    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(grant.end(status))
    }

    /// Returns the outcome of a confirmed transaction whose COMMIT brought no reply. It waits for
    /// that transaction to end, up to a limit. By default the outcome is unknown.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing was changed.
    fn commit_outcome<'a>(&'a self, _claim: &'a Claim, _confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(std::future::ready(CommitOutcome::Unknown))
    }

    /// Returns how transactions under this lock are made.
    fn terms(&self) -> TransactionTerms {
        TransactionTerms::default()
    }
}

/// How the transactions of a [`ResourceLock`] are made.
///
/// ```
/// use rowlock::{Retry, strategy::TransactionTerms};
///
/// let retry = Retry { attempts: 1, ..Retry::default() };
/// let once = TransactionTerms { retry, ..TransactionTerms::default() };
/// assert!(!once.confirm_last);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TransactionTerms {
    /// Whether the claim is confirmed after the work, so that its row is locked for as short a time
    /// as possible. Otherwise it is confirmed before the work: the row stays locked until the
    /// transaction ends, and no other claim can take over.
    pub confirm_last: bool,
    /// Whether the transaction acquires the key again after it lost the claim before the commit.
    /// Otherwise the transaction ends with [`RunError::Lost`](crate::RunError::Lost).
    pub reacquires: bool,
    /// How long conflicts are retried.
    pub retry: Retry,
    /// How long one statement may take, including COMMIT.
    pub time_limit: Duration,
}

/// The claim is confirmed first, and acquired again when it is lost. Conflicts are retried as
/// [`Retry::default`] says. A statement may take 5 s.
impl Default for TransactionTerms {
    fn default() -> Self {
        Self { confirm_last: false, reacquires: true, retry: Retry::default(), time_limit: TIME_LIMIT }
    }
}

/// The result of a confirmation: the row's count of confirmations, or the version that it wrote.
///
/// A caller of [`ResourceLock::confirm`] does not need the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation(pub i64);

/// The outcome of a transaction whose COMMIT brought no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The transaction was committed.
    Committed,
    /// The transaction was not committed, and will not be.
    RolledBack,
    /// The outcome cannot be determined.
    Unknown,
}
