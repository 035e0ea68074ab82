//! The trait over both lock strategies, and the types that they share.

use std::{pin::Pin, sync::Arc, time::Duration};

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
/// on this trait ([`ResourceLockExt`](crate::ResourceLockExt)) does not depend on the strategy;
/// `dyn ResourceLock<DB>` lets configuration choose.
///
/// # Contract for implementations
/// If [`confirm`](Self::confirm) returned `Ok` in a transaction and the commit of that transaction
/// succeeded, no other claim on the key was confirmed and committed between the grant of this claim
/// and that commit. A claim that is lost cannot be confirmed.
///
/// [`transaction`](crate::ResourceLockExt::transaction) confirms a claim of an application's own
/// lock at the start of the transaction. After [`Error::Lost`] it acquires the key again; after
/// [`Error::Conflict`] it confirms the same claim in another transaction. An implementation maps
/// contention in the database to [`Error::conflict`]. It reports any other failure of the database
/// with [`Error::database`].
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
///     Action, BoxFuture, Certainty, Claim, Confirmation, Error, Grant, Holder, Key,
///     ResourceLock, ResourceLockExt, Status, Token,
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
///     fn release(&self, _: Grant<Sqlite>, _: Status) -> BoxFuture<'_, Result<(), Error>> {
///         Box::pin(std::future::ready(Ok(()))) // nothing is held
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
/// let titled = lock.transaction("report", |mut tx, _claim| async move {
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
    /// [`Error::Lost`] or [`Error::Conflict`] if the claim does not stand,
    /// [`Error::NotInTransaction`], [`Error::TransactionOver`] if the database has ended the
    /// transaction, and errors of the database. After any of them the caller rolls back.
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

    /// Ends the claim of work that has completed, successfully or not.
    ///
    /// # Errors
    /// As [`Lease::release`](crate::Lease::release); a version has nothing to release.
    ///
    /// # Cancel safety
    /// If the future is dropped, the claim is released or abandoned.
    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>>;

    /// Returns the pool on which transactions are begun.
    fn pool(&self) -> &Pool<DB>;

    /// Acquires `key` for work that is to run once in each minimum interval, as
    /// [`ResourceLockExt::run_within`](crate::ResourceLockExt::run_within) does. A lock without
    /// minimum intervals acquires it as [`acquire`](Self::acquire) does.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), and [`Error::Invalid`] for a wait that is not shorter
    /// than the minimum interval.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    fn acquire_for_run<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        self.acquire(key, wait)
    }

    /// Confirms a claim in a transaction of [`transaction`](crate::ResourceLockExt::transaction),
    /// which checks by itself that it is still open.
    #[doc(hidden)]
    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.confirm(claim, tx)
    }

    /// Returns the outcome of a confirmed transaction whose COMMIT brought no reply. It waits for
    /// that transaction to end, up to a limit. If the future is dropped, nothing was changed.
    #[doc(hidden)]
    fn commit_outcome<'a>(&'a self, _claim: &'a Claim, _confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(std::future::ready(CommitOutcome::Unknown))
    }

    /// Learns that COMMIT is about to be sent.
    #[doc(hidden)]
    fn begin_commit(&self) {}

    /// Returns whether a claim that was lost may be followed by another one. Otherwise a
    /// transaction ends with its loss.
    #[doc(hidden)]
    fn can_reacquire(&self) -> bool {
        true
    }

    /// Returns when in a transaction a claim is to be confirmed.
    #[doc(hidden)]
    fn confirm_at(&self) -> ConfirmAt {
        ConfirmAt::First
    }

    /// Returns how long conflicts are retried.
    #[doc(hidden)]
    fn retry(&self) -> Retry {
        Retry::default()
    }

    /// Returns how long one statement may take, including COMMIT.
    #[doc(hidden)]
    fn time_limit(&self) -> Duration {
        TIME_LIMIT
    }
}

/// When in a transaction a claim is confirmed.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfirmAt {
    /// Before the work. The row stays locked until the transaction ends, and no other claim can
    /// take over.
    First,
    /// After the work, so that the row is locked for as short a time as possible.
    Last,
}

/// The result of a confirmation: the row's count of confirmations, or the version that it wrote.
///
/// A caller of [`ResourceLock::confirm`] does not need the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation(pub i64);

/// The outcome of a transaction whose COMMIT brought no reply.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The transaction was committed.
    Committed,
    /// The transaction was not committed, and will not be.
    RolledBack,
    /// The outcome cannot be determined.
    Unknown,
}

/// A shared lock is a lock: generic code also accepts an `Arc<dyn ResourceLock<DB>>`.
impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLock<DB> for Arc<L> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        (**self).acquire(key, wait)
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        (**self).confirm(claim, tx)
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        (**self).confirm_within(claim, tx)
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        (**self).release(grant, status)
    }

    fn acquire_for_run<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        (**self).acquire_for_run(key, wait)
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        (**self).commit_outcome(claim, confirmation)
    }

    fn begin_commit(&self) {
        (**self).begin_commit();
    }

    fn can_reacquire(&self) -> bool {
        (**self).can_reacquire()
    }

    fn confirm_at(&self) -> ConfirmAt {
        (**self).confirm_at()
    }

    fn retry(&self) -> Retry {
        (**self).retry()
    }

    fn time_limit(&self) -> Duration {
        (**self).time_limit()
    }

    fn pool(&self) -> &Pool<DB> {
        (**self).pool()
    }
}
