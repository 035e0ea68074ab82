//! The optimistic lock: a version that every change of a row raises.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use sqlx::{Connection as _, Pool};
use tokio::time::{Instant, error::Elapsed, timeout_at};

use crate::{
    action::{Action, Certainty},
    error::Error,
    grant::{Attempt, Grant},
    key::{Claim, Holder, Key, Token},
    lock::{BoxFuture, CommitOutcome, ConfirmAt, Confirmation, ResourceLock},
    retry::{Repeat, Retry, TIME_LIMIT, time_limit},
    rules::Status,
    store::{
        Database, Reply,
        connection::PooledConn,
        failure::Failure,
        fault::{Fault, fault},
        pools::{Connections, Purpose},
        version::{Names, Seen, Statements},
    },
    version::identifier::{Name, TableName},
};

/// A table of the application whose rows have versions. The table is inspected once, and the result
/// is kept.
pub(crate) struct Rows<DB: Database> {
    pub pool: Connections<DB>,
    pub names: Arc<Names>,
    pub retry: Retry,
    pub time_limit: Duration,
    statements: Arc<OnceLock<Statements>>,
}

impl<DB: Database> Clone for Rows<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            names: self.names.clone(),
            retry: self.retry,
            time_limit: self.time_limit,
            statements: self.statements.clone(),
        }
    }
}

impl<DB: Database> Rows<DB> {
    pub fn new(pool: Pool<DB>, table: &str, key: &str, version: &str, value: &str) -> Result<Self, Error> {
        let names = Names {
            table: TableName::new(table)?,
            key: Name::column(key)?,
            version: Name::column(version)?,
            value: Name::column(value)?,
        };
        if same_name::<DB>(&names.key, &names.version) || same_name::<DB>(&names.key, &names.value) {
            return Err(duplicate_column(key));
        }
        let pool = Connections::new(pool, Purpose::Values);
        Ok(Self {
            pool,
            names: Arc::new(names),
            retry: Retry::default(),
            time_limit: TIME_LIMIT,
            statements: Arc::default(),
        })
    }

    pub fn share_pool(mut self) -> Self {
        self.pool = Connections::shared(self.pool.application().clone());
        self
    }

    pub fn limit(&self) -> Instant {
        Instant::now() + self.time_limit
    }

    /// Returns the statements. The first call inspects the table.
    pub async fn prepared(&self, limit: Instant) -> Result<&Statements, Failed> {
        if let Some(statements) = self.statements.get() {
            return Ok(statements);
        }
        let mut repeat = Repeat::until(limit);
        loop {
            let inspected = async {
                let mut conn = PooledConn::checkout(&self.pool, limit).await?;
                let reply = timeout_at(limit, DB::table_columns(conn.get(), &self.names.table)).await;
                conn.settle(reply)
            };
            if let Some(seen) = repeat.last(inspected.await).await {
                return self.prepare(&seen?);
            }
        }
    }

    /// As `prepared`, over the connection of a transaction: the pool may have no other connection
    /// to give.
    pub async fn prepared_on(&self, tx: &mut DB::Connection, limit: Instant) -> Result<&Statements, Failed> {
        if let Some(statements) = self.statements.get() {
            return Ok(statements);
        }
        let reply = timeout_at(limit, DB::table_columns(tx, &self.names.table)).await;
        self.prepare(&answered(reply)?)
    }

    fn prepare(&self, seen: &Seen) -> Result<&Statements, Failed> {
        let statements = Statements::new::<DB>(&self.names, seen)?;
        Ok(self.statements.get_or_init(|| statements))
    }

    pub fn not_found(&self, key: &Key) -> Error {
        Error::NotFound { table: self.names.table.to_string(), key: key.clone() }
    }

    /// Returns the version after this one. Beyond 64 bits, SQLite would continue with a rounded
    /// number.
    pub fn next(&self, key: &Key, version: i64) -> Result<i64, Error> {
        let wrong = || format!("the version of key {:?} is {version}, and cannot grow", key.as_str());
        version.checked_add(1).ok_or_else(|| Error::TableUnfit { table: self.names.table.to_string(), wrong: wrong() })
    }

    pub fn error(&self, failed: Failed, action: Action, key: &Key) -> Error {
        match failed {
            Failed::Refused(error) => error,
            // The table or column existed when the table was inspected.
            Failed::Database(Failure::Failed(error))
                if matches!(fault(&error), Fault::MissingTable | Fault::MissingColumn) =>
            {
                Error::TableUnfit { table: self.names.table.to_string(), wrong: error.to_string() }
            }
            Failed::Database(failure) => {
                let subject = format!("{:?}", key.as_str());
                failure.into_error(action, subject, self.time_limit, Certainty::NothingChanged)
            }
        }
    }
}

/// Returns whether two names denote the same column.
pub(crate) fn same_name<DB: Database>(one: &Name, other: &Name) -> bool {
    if DB::EXACT_NAMES { one == other } else { one.as_str().eq_ignore_ascii_case(other.as_str()) }
}

pub(crate) fn duplicate_column(name: &str) -> Error {
    let rule = "key, value and version are columns of their own";
    Error::InvalidName { name: name.into(), what: "column", rule }
}

/// Why a statement about a row has no result.
#[derive(Debug)]
pub(crate) enum Failed {
    Refused(Error),
    Database(Failure),
}

impl Failed {
    /// Returns whether a statement that changes nothing may be sent again.
    pub fn is_connection_failure(&self) -> bool {
        matches!(self, Self::Database(failure) if failure.is_connection_failure())
    }

    pub fn is_contention(&self) -> bool {
        matches!(self, Self::Database(failure) if failure.fault() == Fault::Contention)
    }

    /// Returns whether a statement may still be running on the connection.
    pub fn may_still_run(&self) -> bool {
        match self {
            Self::Refused(_) => false,
            Self::Database(failure) => failure.may_still_run(),
        }
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self::Database(failure)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Returns the reply to a statement in the caller's transaction, whose connection is the caller's
/// to close.
pub(crate) fn answered<T>(reply: Result<Reply<T>, Elapsed>) -> Result<T, Failed> {
    Ok(reply.map_err(|_| Failure::NoReply)?.map_err(Failure::Failed)?)
}

/// An optimistic lock on rows of the application's own table. It excludes no caller: of all
/// transactions that began with the same version, one commits.
///
/// The guarded work reads and writes in the transaction of
/// [`ResourceLockExt::transaction`](crate::ResourceLockExt::transaction), or in a transaction of
/// the caller that confirms the claim last. Every program that changes such a row has to raise its
/// version.
///
/// Its [`run`](crate::ResourceLockExt::run) excludes no caller.
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
/// use rowlock::{ResourceLockExt, VersionLock};
///
/// let lock = VersionLock::new(pool, "account", "id", "version")?;
/// let paid = lock.transaction("alice", |mut tx, claim| async move {
///     let sql = "UPDATE account SET balance = balance - 30 WHERE id = 'alice'";
///     sqlx::query(sql).execute(&mut *tx).await?;
///     Ok::<_, sqlx::Error>(claim.token)
/// });
/// println!("committed; the version was {}", paid.await?);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
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
    /// sends nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for any other name.
    pub fn new(pool: Pool<DB>, table: &str, key: &str, version: &str) -> Result<Self, Error> {
        Ok(Self { rows: Rows::new(pool, table, key, version, version)? })
    }

    /// Sets how long a [`transaction`](crate::ResourceLockExt::transaction) is retried. The default
    /// is 100 attempts within 10 s.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for limits outside the range of [`Retry`].
    pub fn retry(mut self, retry: Retry) -> Result<Self, Error> {
        self.rows.retry = retry.checked()?;
        Ok(self)
    }

    /// Sets how long one statement may take, including the wait for a connection: 1 ms to one hour.
    /// The default is 5 s.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a limit outside that range.
    pub fn time_limit(mut self, limit: Duration) -> Result<Self, Error> {
        self.rows.time_limit = time_limit(limit)?;
        Ok(self)
    }

    /// Reads versions over the application's pool, as
    /// [`LeaseLockBuilder::share_pool`](crate::LeaseLockBuilder::share_pool) does.
    pub fn share_pool(mut self) -> Self {
        self.rows = self.rows.share_pool();
        self
    }

    async fn read(&self, key: &Key, limit: Instant) -> Result<Option<i64>, Failed> {
        let statements = self.rows.prepared(limit).await?;
        let value = statements.key(key)?;
        let mut repeat = Repeat::until(limit);
        loop {
            let read = async {
                let mut conn = PooledConn::checkout(&self.rows.pool, limit).await?;
                let reply = timeout_at(limit, DB::version(conn.get(), &statements.version, &value)).await;
                conn.settle(reply)
            };
            if let Some(version) = repeat.last(read.await).await {
                return Ok(version?);
            }
        }
    }

    /// Returns the version that was written, or `None` if the row no longer has the claim's
    /// version.
    async fn raise(&self, claim: &Claim, tx: &mut DB::Connection) -> Result<Option<i64>, Failed> {
        let limit = self.rows.limit();
        let next = self.rows.next(&claim.key, claim.token.get())?;
        let statements = self.rows.prepared_on(tx, limit).await?;
        let key = statements.key(&claim.key)?;
        let rows = answered(timeout_at(limit, DB::raise(tx, &statements.raise, &key, claim.token.get())).await)?;
        Ok((rows > 0).then_some(next))
    }
}

impl<DB: Database> ResourceLock<DB> for VersionLock<DB> {
    /// Reads the version, which becomes the claim's token.
    fn try_acquire<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        Box::pin(async move {
            let key = Key::new(key)?;
            match self.read(&key, self.rows.limit()).await {
                Ok(Some(version)) => {
                    let claim = Claim { key, holder: Holder::unique(), token: Token::new(version) };
                    Ok(Attempt::Acquired(claim.into()))
                }
                Ok(None) => Err(self.rows.not_found(&key)),
                Err(failed) => Err(self.rows.error(failed, Action::Read, &key)),
            }
        })
    }

    /// Reads the version, as `try_acquire` does. The lock excludes no caller, so that there is
    /// nothing to wait for.
    fn acquire<'a>(&'a self, key: &'a str, _: Duration) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        self.try_acquire(key)
    }

    /// Raises the version if it is still the one that was read.
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(async move {
            let key = claim.key.clone();
            if !tx.is_in_transaction() {
                return Err(Error::NotInTransaction { key });
            }
            match self.raise(claim, tx).await {
                Ok(None) => Err(Error::conflict(key, 1)),
                Ok(Some(version)) => Ok(Confirmation(version)),
                Err(failed) if failed.is_contention() => Err(Error::conflict(key, 1)),
                Err(failed) => Err(self.rows.error(failed, Action::Confirm, &key)),
            }
        })
    }

    fn release(&self, _: Grant<DB>, _: Status) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// A version does not record which claim raised it.
    fn commit_outcome<'a>(&'a self, _: &'a Claim, _: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(std::future::ready(CommitOutcome::Unknown))
    }

    fn confirm_at(&self) -> ConfirmAt {
        ConfirmAt::Last
    }

    fn retry(&self) -> Retry {
        self.rows.retry
    }

    fn time_limit(&self) -> Duration {
        self.rows.time_limit
    }

    fn pool(&self) -> &Pool<DB> {
        self.rows.pool.application()
    }
}
