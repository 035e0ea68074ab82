//! Versioned values: read, computed, compared and set.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::Pool;

use crate::{
    action::Action,
    error::Error,
    invalid::Invalid,
    key::Key,
    queue::local::LocalQueues,
    retry::Retry,
    session::loan::IdleLoan,
    store::{
        Database,
        version::{Value, Write},
    },
    version::{
        rows::Rows,
        update::{UpdateError, Updated, Versioned},
    },
};

/// The names that a [`VersionedTable`] uses: ASCII letters, digits and underscores, used as they
/// are written.
///
/// ```
/// use rowlock::balances::Columns;
///
/// let balances = Columns { table: "account", key: "id", value: "balance", version: "version" };
/// let limits = Columns { value: "credit_limit", ..balances };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The table: `name` or `schema.name`.
    pub table: &'a str,
    /// The column that identifies a row: a text, an integer or a UUID, with a unique index of its
    /// own.
    pub key: &'a str,
    /// The column of the value.
    pub value: &'a str,
    /// The column of the version: an integer that every change of the row raises.
    pub version: &'a str,
}

/// A table of the application in which each row has a value and a version. It is meant for
/// balances, as `i64` or a decimal.
///
/// A change reads both, computes, and writes only if the version is still the one that was read;
/// otherwise it starts again. Every program that changes such a row has to raise its version.
///
/// An application creates one value of this type for each table, and clones it. Changes of the same
/// row by one value and its clones are made one at a time. A change waits for the preceding ones
/// for one second at most. `deduct` and `deposit` start from the value that the preceding change
/// wrote, as long as it is current. Between these changes and all others, including those of
/// [`update_in`](Self::update_in), the version decides.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// use rowlock::{VersionedTable, balances::Columns};
///
/// // CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)
/// let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
/// let accounts = VersionedTable::new(pool, columns);
/// let updated = accounts.deduct("alice", 30).await?;
/// assert_eq!((updated.value, updated.version), (70, 1));
/// # Ok(())
/// # }
/// ```
pub struct VersionedTable<DB: Database, V = i64> {
    pub(crate) rows: Rows<DB>,
    pub(crate) queues: Arc<LocalQueues<Known<DB, V>>>,
}

/// What a change leaves to the next change of the same row in this process: the row that it wrote,
/// and the connection over which it was answered. That connection worked a moment ago, so that no
/// write is lost on a connection that was closed unnoticed.
pub(crate) struct Known<DB: Database, V> {
    pub row: Versioned<V>,
    pub conn: IdleLoan<DB>,
    /// The number of changes since the row was read.
    pub age: u32,
}

/// What a change is computed from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    Read,
    /// The row that the preceding change left, where it is known. Only for guarded writes: a
    /// program that does not raise the version may have altered the value.
    Known,
}

impl<DB: Database, V> Clone for VersionedTable<DB, V> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), queues: self.queues.clone() }
    }
}

impl<DB: Database, V> fmt::Debug for VersionedTable<DB, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VersionedTable").field("database", &DB::NAME).field("names", &self.rows.names).finish()
    }
}

impl<DB: Database> VersionedTable<DB, i64> {
    /// Creates a table whose values are `i64`, in an integer column of any width. The call sends
    /// nothing. A name that is not a plain identifier, and one name used for two columns, are
    /// reported by the first call.
    pub fn new(pool: Pool<DB>, columns: Columns<'_>) -> Self {
        let Columns { table, key, value, version } = columns;
        Self { rows: Rows::new(pool, table, key, version, Some(value)), queues: Arc::default() }
    }
}

impl<DB: Database, V> VersionedTable<DB, V> {
    /// Reads and writes over the application's pool, as
    /// [`LeaseLockBuilder::share_pool`](crate::leases::LeaseLockBuilder::share_pool) does.
    ///
    /// By default, all tables of that pool share a pool like it, of two to eight connections. On
    /// SQLite they share the application's.
    pub fn share_pool(mut self) -> Self {
        self.rows = self.rows.share_pool();
        self
    }

    /// Sets how long an update is retried. The default is 100 attempts within 10 s.
    ///
    /// Within that time, a read without a reply is repeated, and a failed request for a connection
    /// too. A write without a reply is never repeated.
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
}

impl<DB: Database, V: Value<DB>> VersionedTable<DB, V> {
    /// Converts the table to values of another type, such as `rust_decimal::Decimal`: any type that
    /// sqlx reads from and writes to the column. A value that the column rounds, such as an `f64`
    /// in a `real` column, is written rounded. A `Decimal` is refused instead.
    ///
    /// Integers are read as `i64`, regardless of the column's width or sign. The converted table
    /// does not queue its changes with those of clones of the original.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// use rowlock::{VersionedTable, balances::Columns};
    ///
    /// let columns = Columns { table: "page", key: "id", value: "body", version: "version" };
    /// let pages = VersionedTable::new(pool, columns).of::<String>();
    /// # Ok(())
    /// # }
    /// ```
    pub fn of<U: Value<DB>>(self) -> VersionedTable<DB, U> {
        VersionedTable { rows: self.rows, queues: Arc::default() }
    }

    /// Reads a value, or returns `None` if the row does not exist. It takes one round trip.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Setup`], and errors of the database.
    ///
    /// # Cancel safety
    /// The call only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool, names);
    /// let alice = accounts.read("alice").await?.expect("alice has an account");
    /// assert_eq!((alice.value, alice.version), (100, 0));
    /// assert!(accounts.read("carol").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn read(&self, key: &str) -> Result<Option<Versioned<V>>, Error> {
        let key = Key::new(key)?;
        let limit = self.rows.limit();
        let error = |failed| self.rows.error(failed, Action::Read, &key);
        let statements = self.rows.prepared(limit).await.map_err(error)?;
        let value = statements.key(&key)?;
        let read = async |conn: &mut DB::Connection| DB::read(conn, &statements.read, &value).await;
        let found = self.rows.pool.send_repeatedly(limit, read).await;
        let found = found.map_err(|failure| error(failure.into()))?;
        Ok(found.map(|(value, version)| Versioned { value, version }))
    }

    /// Changes a value to the result of `compute` and raises its version. The call retries when
    /// another change came first.
    ///
    /// An attempt takes two round trips, and five if the table has triggers that may alter the row.
    /// `compute` may run several times.
    ///
    /// # Errors
    /// [`UpdateError::Computation`] at once, with nothing written; [`Error::NotFound`];
    /// [`Error::Setup`] if the value or the version cannot be read exactly, or a trigger, a rule or
    /// a row policy of the table suppresses the change or keeps the version; [`Error::Invalid`] for
    /// a `Decimal` that the column would round, and for NaN where the database has none;
    /// [`Error::Conflict`] when the attempts or the time are used up. [`Error::Database`] states
    /// whether the value may have been written. A write that may have been carried out is never
    /// repeated.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may have been made. Value and version change together.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool, names);
    /// let doubled = accounts.update("alice", |balance| balance.checked_mul(2).ok_or("too much"));
    /// assert_eq!(doubled.await?.value, 200);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn update<E>(
        &self,
        key: &str,
        mut compute: impl FnMut(&V) -> Result<V, E>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        self.change(&Key::new(key)?, Basis::Read, plain(&mut compute)).await
    }

    /// Makes one attempt of [`update`](Self::update) in the caller's transaction, which is neither
    /// committed nor rolled back.
    ///
    /// It does not retry. After a conflict, what the transaction read before may be out of date, at
    /// REPEATABLE READ a second read would return the same version, and on PostgreSQL the conflict
    /// has ended the transaction. The caller begins it again as a whole.
    ///
    /// # Errors
    /// As [`update`](Self::update). [`Error::Conflict`] stands for every kind of contention: the
    /// caller then rolls back and begins the whole transaction again. [`Error::Invalid`]
    /// if the connection is not in a transaction, and [`Error::Transaction`] if the database
    /// has ended it.
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
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool.clone(), names);
    /// use std::convert::Infallible;
    ///
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // `begin()` on a server
    /// let doubled = |balance: &i64| Ok::<_, Infallible>(balance * 2);
    /// assert_eq!(accounts.update_in(&mut tx, "alice", doubled).await?.value, 200);
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn update_in<E>(
        &self,
        tx: &mut DB::Connection,
        key: &str,
        mut compute: impl FnMut(&V) -> Result<V, E>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        self.change_in(tx, &Key::new(key)?, plain(&mut compute)).await
    }
}

/// Wraps the application's computation, whose write is guarded by the version alone.
fn plain<V, E>(compute: &mut impl FnMut(&V) -> Result<V, E>) -> impl FnMut(&V) -> Result<Write<V>, UpdateError<E>> {
    |was| Ok(Write { value: compute(was).map_err(UpdateError::Computation)?, guard: None })
}
