//! Versioned values: read, computed, compared and set.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::{Connection as _, Pool};
use tokio::time::{Instant, timeout_at};

use crate::{
    error::{Action, Error},
    key::{InvalidKey, Key},
    metrics,
    queue::local::LocalQueues,
    retry::{Retry, outage_pause, time_limit},
    store::{
        Database,
        connection::{IdleConn, PooledConn},
        version::{Guard, KeyValue, Statements, Value, Write},
    },
    version::{
        amount::decimals,
        lock::{Failed, Rows, answered, same, taken},
    },
};

/// The names that a [`VersionedTable`] uses: ASCII letters, digits and underscores, used as they
/// are written.
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
/// Changes of the same row by the same object (or its clones) are made one at a time. A change
/// waits for the preceding ones for one second at most. `deduct` and `deposit` start from the value
/// that the preceding change wrote, as long as it is current. Between these changes and those of
/// other objects, or of [`update_in`](Self::update_in), the version decides.
pub struct VersionedTable<DB: Database, V = i64> {
    rows: Rows<DB>,
    turns: Arc<LocalQueues<Known<DB, V>>>,
}

/// What a change leaves to the next change of the same row in this process: the row that it wrote,
/// and the connection over which it was answered. That connection worked a moment ago, so that no
/// write is lost on a connection that was closed unnoticed.
struct Known<DB: Database, V> {
    row: Versioned<V>,
    conn: IdleConn<DB>,
    /// The number of changes since the row was read.
    age: u32,
}

/// The number of changes after which the row is read again. The read leaves a gap in which other
/// processes can change the row.
const OLD: u32 = 4;

/// What a change is computed from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    Read,
    /// The value that the preceding change wrote, where it is known. Only for guarded writes: a
    /// trigger may have altered the value.
    Known,
}

/// How long a change waits for the preceding ones in this process. After that, the version alone
/// decides which change succeeds.
const PATIENCE: Duration = Duration::from_secs(1);

impl<DB: Database, V> Clone for VersionedTable<DB, V> {
    fn clone(&self) -> Self {
        Self { rows: self.rows.clone(), turns: self.turns.clone() }
    }
}

impl<DB: Database, V> fmt::Debug for VersionedTable<DB, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VersionedTable").field("database", &DB::NAME).field("names", &self.rows.names).finish()
    }
}

/// A value and the version that it was read with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versioned<V> {
    /// The value.
    pub value: V,
    /// The row's version.
    pub version: i64,
}

/// A completed change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Updated<V> {
    /// The value that was written.
    pub value: V,
    /// The row's version after the change.
    pub version: i64,
    /// The number of attempts.
    pub attempts: u32,
}

/// Why a value was not changed.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError<E> {
    /// The computation returned this error; nothing was written.
    #[error("{0}")]
    Computation(E),
    /// Any other error: [`Error::NotFound`], [`Error::Conflict`] when the attempts are used up, an
    /// error of the database.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl<E> From<InvalidKey> for UpdateError<E> {
    fn from(error: InvalidKey) -> Self {
        Self::Failed(error.into())
    }
}

impl<DB: Database> VersionedTable<DB, i64> {
    /// Creates a table whose values are `i64`, in an integer column of any width. The call sends
    /// nothing.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for a name that is not a plain identifier, or for one name used for
    /// two columns.
    pub fn new(pool: Pool<DB>, columns: Columns<'_>) -> Result<Self, Error> {
        let Columns { table, key, value, version } = columns;
        let rows = Rows::new(pool, table, key, version, value)?;
        if same::<DB>(&rows.names.value, &rows.names.version) {
            return Err(taken(value));
        }
        Ok(Self { rows, turns: Arc::default() })
    }
}

impl<DB: Database, V> VersionedTable<DB, V> {
    /// Reads and writes over the application's pool, as
    /// [`LeaseLock::share_pool`](crate::LeaseLock::share_pool) does.
    ///
    /// By default, all tables of that pool share up to eight connections of their own.
    pub fn share_pool(mut self) -> Self {
        self.rows = self.rows.share_pool();
        self
    }

    /// Sets how long an update is retried. The default is 100 attempts within 10 s.
    ///
    /// Within that time, a read without a reply is repeated, and a failed request for a connection
    /// too. A write without a reply is never repeated.
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
}

impl<DB: Database, V: Value<DB>> VersionedTable<DB, V> {
    /// Converts the table to values of another type, such as `rust_decimal::Decimal`: any type that
    /// sqlx reads from and writes to the column.
    ///
    /// Integers are read as `i64`, regardless of the column's width or sign. The converted table
    /// does not queue its changes with those of clones of the original.
    pub fn of<U: Value<DB>>(self) -> VersionedTable<DB, U> {
        VersionedTable { rows: self.rows, turns: Arc::default() }
    }

    /// Reads a value, or returns `None` if the row does not exist. It takes one round trip.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] and [`Error::KeyUnfit`] before anything is sent,
    /// [`Error::TableUnfit`], and errors of the database.
    ///
    /// # Cancel safety
    /// The call only reads.
    pub async fn read(&self, key: &str) -> Result<Option<Versioned<V>>, Error> {
        let key = Key::new(key)?;
        let limit = self.rows.limit();
        loop {
            let read = async {
                let statements = self.rows.prepared(limit).await?;
                let value = statements.key(&key)?;
                let mut conn = PooledConn::checkout(&self.rows.pool, limit).await?;
                let reply = timeout_at(limit, DB::read(conn.get(), &statements.read, &value)).await;
                Ok(conn.settle(reply)?.map(|(value, version)| Versioned { value, version }))
            };
            match read.await {
                Ok(found) => return Ok(found),
                Err(Failed::Database(failure)) if failure.is_outage() && Instant::now() < limit => outage_pause().await,
                Err(failed) => return Err(self.rows.error(failed, Action::Read, &key)),
            }
        }
    }

    /// Changes a value to the result of `compute` and raises its version. The call retries when
    /// another change came first.
    ///
    /// An attempt takes two round trips. `compute` may run several times.
    ///
    /// # Errors
    /// [`UpdateError::Computation`] at once, with nothing written; [`Error::NotFound`];
    /// [`Error::Conflict`] when the attempts or the time are used up. [`Error::TimedOut`] and
    /// [`Error::Database`] state whether the value may have been written. A write that may have
    /// been carried out is never repeated.
    ///
    /// # Cancel safety
    /// If the future is dropped, the change may have been made. Value and version change together.
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
    /// # Errors
    /// As [`update`](Self::update). [`Error::Conflict`] stands for every kind of contention: the
    /// caller then rolls back and begins the whole transaction again. [`Error::NotInTransaction`]
    /// if the connection is not in a transaction.
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller rolls back.
    pub async fn update_in<E>(
        &self,
        tx: &mut DB::Connection,
        key: &str,
        mut compute: impl FnMut(&V) -> Result<V, E>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        let key = Key::new(key)?;
        if !tx.is_in_transaction() {
            return Err(Error::NotInTransaction { key }.into());
        }
        let attempt = async {
            let statements = self.rows.prepared_on(tx, self.rows.limit()).await?;
            let row = (&key, &statements.key(&key)?);
            let start = Start::Read { by: self.rows.limit() };
            self.attempt(tx, statements, row, start, || self.rows.limit(), &mut plain(&mut compute)).await
        };
        let conflict = || Error::conflict(key.clone(), 1).into();
        match attempt.await {
            Ok(Some(Versioned { value, version })) => Ok(Updated { value, version, attempts: 1 }),
            Ok(None) => Err(conflict()),
            Err(stop) if stop.is_contention() => Err(conflict()),
            Err(stop) => Err(self.stopped(stop, &key)),
        }
    }

    /// Makes attempts over connections of the pool until one succeeds.
    pub(crate) async fn change<E>(
        &self,
        key: &Key,
        basis: Basis,
        mut compute: impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        let mut tries = self.rows.retry.begin();
        let until = tries.until;
        // The limit of a statement, including the wait for a connection.
        let limit = || self.rows.limit().min(until);
        let queue = self.turns.queue(&[key.clone()].into());
        let mut turn = timeout_at(Instant::now() + PATIENCE.min(tries.left() / 2), queue.turn()).await.ok();
        loop {
            let known = turn.as_mut().and_then(|turn| turn.note.take());
            let known = known.filter(|known| basis == Basis::Known && known.conn.is_fresh());
            let unread = known.is_some();
            match self.attempt_over_own(key, limit, known, &mut compute).await {
                Ok(Some((Versioned { value, version }, known))) => {
                    if let (Some(turn), Basis::Known) = (&mut turn, basis) {
                        turn.note = known;
                    }
                    return Ok(Updated { value, version, attempts: tries.attempt });
                }
                // The known row may be outdated; the next attempt reads it.
                Ok(None) | Err(Stop::Told(_) | Stop::Unread(_)) if unread => continue,
                Ok(None) => {}
                Err(stop) if stop.is_contention() => {}
                // Nothing was changed over this connection: it was closed, gave no reply, or could
                // not be obtained.
                Err(Stop::Unread(failed)) if failed.may_pass() && !tries.left().is_zero() => {
                    outage_pause().await;
                    continue;
                }
                Err(stop) => return Err(self.stopped(stop, key)),
            }
            metrics::conflict();
            tracing::debug!(%key, attempt = tries.attempt, "conflict");
            if !tries.again().await {
                return Err(Error::conflict(key.clone(), tries.attempt).into());
            }
        }
    }

    /// Makes one attempt over a connection of its own. A successful change is returned with what it
    /// leaves to the next one.
    async fn attempt_over_own<E>(
        &self,
        key: &Key,
        limit: impl Fn() -> Instant,
        known: Option<Known<DB, V>>,
        compute: &mut impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Option<(Versioned<V>, Option<Known<DB, V>>)>, Stop<E>> {
        let statements = self.rows.prepared(limit()).await?;
        let key = (key, &statements.key(key)?);
        let (mut conn, start, age) = match known {
            Some(Known { row, conn, age }) => (conn.lend(), Start::Known(row), age),
            None => {
                let by = limit();
                (PooledConn::checkout(&self.rows.pool, by).await.map_err(Failed::from)?, Start::Read { by }, 0)
            }
        };
        match self.attempt(conn.get(), statements, key, start, limit, compute).await {
            Ok(Some(row)) if age + 1 < OLD => {
                let known = conn.keep(&self.rows.pool).map(|conn| Known { row: row.clone(), conn, age: age + 1 });
                Ok(Some((row, known)))
            }
            result => {
                if !result.as_ref().is_err_and(Stop::is_in_doubt) {
                    conn.give_back();
                }
                Ok(result?.map(|row| (row, None)))
            }
        }
    }

    /// Reads the row unless it is known, computes, and writes if the version is unchanged. Returns
    /// `None` if another change came first.
    async fn attempt<E>(
        &self,
        conn: &mut DB::Connection,
        statements: &Statements,
        (key, row): (&Key, &KeyValue),
        start: Start<V>,
        limit: impl Fn() -> Instant,
        compute: &mut impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Option<Versioned<V>>, Stop<E>> {
        let found = match start {
            Start::Known(Versioned { value, version }) => Some((value, version)),
            Start::Read { by } => answered(timeout_at(by, DB::read::<V>(conn, &statements.read, row)).await)?,
        };
        let (value, version) = found.ok_or_else(|| self.rows.not_found(key))?;
        let next = self.rows.next(key, version)?;
        let write = compute(&value).map_err(Stop::Told)?;
        if let Some(most) = statements.scale.filter(|most| decimals(&write.value) > Some(*most)) {
            let rule = format!("the column {} keeps {most} decimals", self.rows.names.value.as_str());
            return Err(Error::InvalidAmount { key: key.clone(), amount: "more decimals".into(), rule }.into());
        }
        let sql = if write.guard.is_some() { &statements.write_guarded } else { &statements.write };
        let reply = timeout_at(limit(), DB::write(conn, sql, &write, row, version)).await;
        let rows = answered(reply).map_err(Stop::Unwritten)?;
        Ok((rows > 0).then_some(Versioned { value: write.value, version: next }))
    }

    fn stopped<E>(&self, stop: Stop<E>, key: &Key) -> UpdateError<E> {
        match stop {
            Stop::Told(error) => error,
            Stop::Unread(failed) => self.rows.error(failed, Action::Read, key).into(),
            Stop::Unwritten(failed) => self.rows.error(failed, Action::Update, key).into(),
        }
    }
}

/// What an attempt starts from.
enum Start<V> {
    Known(Versioned<V>),
    Read { by: Instant },
}

/// Why an attempt ended without a change.
enum Stop<E> {
    /// The computation returned this error.
    Told(UpdateError<E>),
    /// The attempt failed before a statement that changes anything was sent.
    Unread(Failed),
    Unwritten(Failed),
}

impl<E> Stop<E> {
    fn failed(&self) -> Option<&Failed> {
        match self {
            Self::Told(_) => None,
            Self::Unread(failed) | Self::Unwritten(failed) => Some(failed),
        }
    }

    fn is_contention(&self) -> bool {
        self.failed().is_some_and(Failed::is_contention)
    }

    fn is_in_doubt(&self) -> bool {
        self.failed().is_some_and(Failed::is_in_doubt)
    }
}

impl<E, F: Into<Failed>> From<F> for Stop<E> {
    fn from(failed: F) -> Self {
        Self::Unread(failed.into())
    }
}

/// Wraps the application's computation, whose write is guarded by the version. A decimal is guarded
/// by the value that was read as well: of a number with more digits than its type holds, the driver
/// silently returns only some, and that value differs from the stored one.
fn plain<V, E>(compute: &mut impl FnMut(&V) -> Result<V, E>) -> impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>
where
    V: Clone + 'static,
{
    |was| {
        let value = compute(was).map_err(UpdateError::Computation)?;
        let guard = decimals(was).map(|_| Guard { was: was.clone(), least: was.clone() });
        Ok(Write { value, guard })
    }
}
