//! The optimistic lock: a version that every change of a row raises.

use std::{fmt, time::Duration};

use sqlx::Pool;

use crate::{
    action::Action,
    error::Error,
    grant::Grant,
    invalid::Invalid,
    key::{Claim, Holder, Key, Token},
    lock::{BoxFuture, Confirmation, ResourceLock, TransactionTerms},
    retry::{Retry, late},
    session::{time::Instant, timers::timeout_at},
    store::Database,
    transaction::{
        self,
        error::{RunError, WorkError},
        in_transaction,
        tx::Tx,
    },
    version::rows::{Failed, Rows, answered},
};

/// An optimistic lock on rows of the application's own table. It excludes no caller: of all
/// transactions that began with the same version, one commits.
///
/// The guarded work reads and writes in the transaction of
/// [`transaction`](Self::transaction), or in a transaction of the caller that confirms the claim
/// last. Every program that changes such a row has to raise its
/// version.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// use rowlock::VersionLock;
///
/// let lock = VersionLock::new(pool, "account", "id", "version");
/// let paid = lock.transaction("alice", async |mut tx| {
///     let sql = "UPDATE account SET balance = balance - 30 WHERE id = 'alice'";
///     sqlx::query(sql).execute(&mut *tx).await?;
///     Ok::<_, sqlx::Error>(tx.claim().token)
/// });
/// println!("committed; the version was {}", paid.await?);
/// # Ok(())
/// # }
/// ```
pub struct VersionLock<DB: Database> {
    rows: Rows<DB>,
}

impl<DB: Database> Clone for VersionLock<DB> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone() }
    }
}

impl<DB: Database> fmt::Debug for VersionLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VersionLock").field("database", &DB::NAME).field("names", &self.rows.names).finish()
    }
}

impl<DB: Database> VersionLock<DB> {
    /// Creates a lock on the rows of `table` (`name` or `schema.name`).
    ///
    /// `key` is a unique column of texts, integers or UUIDs. `version` is an integer column. Names
    /// consist of ASCII letters, digits and underscores, and are used as they are written. The call
    /// sends nothing. Any other name is reported by the first call.
    pub fn new(pool: Pool<DB>, table: &str, key: &str, version: &str) -> Self {
        Self { rows: Rows::new(pool, table, key, version, None) }
    }

    /// Sets how long a [`transaction`](Self::transaction) is retried. The default
    /// is 100 attempts within 10 s.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.rows = self.rows.retry(retry);
        self
    }

    /// Sets how long one statement may take, including the wait for a connection: 1 ms to one hour.
    /// The default is 5 s.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.rows = self.rows.time_limit(limit);
        self
    }

    /// Checks the names and the settings. Nothing is sent. Each call checks them too.
    ///
    /// # Errors
    /// [`Invalid`] with all faults of the names and settings.
    pub fn check(&self) -> Result<(), Invalid> {
        self.rows.faults.check()
    }

    /// Reads versions over the application's pool, as
    /// [`LeaseLockBuilder::share_pool`](crate::leases::LeaseLockBuilder::share_pool) does.
    pub fn share_pool(mut self) -> Self {
        self.rows = self.rows.share_pool();
        self
    }

    /// Runs `work` in a transaction that commits only if the version of `key` is still the one that
    /// was read before, and raises it, as [`LeaseLock::transaction`](crate::LeaseLock::transaction)
    /// does under a lease. The version is raised after the work.
    ///
    /// The work itself does not raise the version of `key`: neither by a statement of its own, such
    /// as [`VersionedTable::deduct_in`](crate::VersionedTable::deduct_in) on the same row, nor by a
    /// trigger. Such a transaction never commits. It is repeated as after a conflict, until the
    /// retries are used up.
    ///
    /// # Errors
    /// As [`LeaseLock::transaction`](crate::LeaseLock::transaction). The key is never refused.
    /// [`RunError::Other`](crate::RunError::Other) contains [`Error::NotFound`] if there is no
    /// row.
    ///
    /// # Cancel safety
    /// If the future is dropped before the commit is sent, nothing is committed. If it is dropped
    /// later, the commit may stand.
    pub async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, RunError<E>>
    where
        E: WorkError,
        W: FnOnce(Tx<DB>) -> F + Clone,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, &|wait| self.acquire(key, wait), work).await
    }

    async fn read(&self, key: &Key, limit: Instant) -> Result<Option<i64>, Failed> {
        let statements = self.rows.prepared(limit).await?;
        let value = statements.key(key)?;
        let read = async |conn: &mut DB::Connection| DB::version(conn, &statements.read, &value).await;
        Ok(self.rows.pool.send_repeatedly(limit, read).await?)
    }

    /// Returns the version that was written, or `None` if the row no longer has the claim's
    /// version.
    async fn raise(&self, claim: &Claim, tx: &mut DB::Connection) -> Result<Option<i64>, Failed> {
        let limit = self.rows.limit();
        let next = self.rows.next(&claim.key, claim.token.get())?;
        let statements = self.rows.prepared_on(tx, limit).await?;
        let key = statements.key(&claim.key)?;
        let rows = answered(timeout_at(limit, DB::raise(tx, &statements.raise, &key, claim.token.get())).await)?;
        if rows > 0 && !statements.triggers {
            return Ok(Some(next));
        }
        let found = answered(timeout_at(limit, DB::version(tx, &statements.read_now, &key)).await)?;
        Ok(self.rows.judge(&claim.key, claim.token.get(), rows, found)?)
    }
}

impl<DB: Database> ResourceLock<DB> for VersionLock<DB> {
    /// Reads the version, which becomes the claim's token. The lock excludes no caller, so that
    /// only a connection and the reply are waited for: for `wait` if it is shorter than the time
    /// limit, and is not zero.
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move {
            let key = Key::new(key)?;
            let limit = if wait.is_zero() { self.rows.time_limit } else { wait.min(self.rows.time_limit) };
            match self.read(&key, Instant::now() + limit).await {
                Ok(Some(version)) => {
                    let claim = Claim { key, holder: Holder::unique(), token: Token::new(version) };
                    Ok(claim.into())
                }
                Ok(None) => Err(self.rows.not_found(&key)),
                Err(failed) => Err(late(self.rows.error(failed, Action::Read, &key), limit, false)),
            }
        })
    }

    /// Raises the version if it is still the one that was read.
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(async move {
            self.check()?;
            in_transaction::<DB>(tx, &claim.key, self.rows.time_limit).await?;
            self.confirm_within(claim, tx).await
        })
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(async move {
            let key = claim.key.clone();
            match self.raise(claim, tx).await {
                Ok(None) => Err(Error::conflict(key, 1)),
                Ok(Some(version)) => Ok(Confirmation(version)),
                Err(failed) if failed.is_contention() => Err(Error::conflict(key, 1)),
                Err(failed) => Err(self.rows.error(failed, Action::Confirm, &key)),
            }
        })
    }

    fn pool(&self) -> &Pool<DB> {
        self.rows.pool.application()
    }

    /// A version does not record which claim raised it, so that the outcome of a commit without a
    /// reply is unknown.
    fn terms(&self) -> TransactionTerms {
        let Rows { retry, time_limit, .. } = self.rows;
        TransactionTerms { confirm_last: true, reacquires: true, retry, time_limit }
    }
}
