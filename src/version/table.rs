//! Values with versions: read, computed, compared and set.

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

/// The names that a [`VersionedTable`] goes by: ASCII letters, digits and underscores, taken as they are written.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The table: `name` or `schema.name`.
    pub table: &'a str,
    /// The column that tells rows apart: a text, an integer or a UUID, with a unique index of its own.
    pub key: &'a str,
    /// The column with the value.
    pub value: &'a str,
    /// The column with the version: an integer that every change of the row raises.
    pub version: &'a str,
}

/// A table of the application's in which each row has a value and a version; made for balances, as `i64` or a decimal.
///
/// A change reads both, computes, and writes only if the version is still the one that was read; otherwise it begins anew. Every program
/// that changes such a row has to raise its version. Changes of the same row by the same object (or its clones) take turns, for a second at
/// most, and `deduct` and `deposit` go by what the one before wrote, as far as it stands; with those of others, and with
/// [`update_in`](Self::update_in), the version decides.
pub struct VersionedTable<DB: Database, V = i64> {
    rows: Rows<DB>,
    turns: Arc<LocalQueues<Known<DB, V>>>,
}

/// What a change leaves to the next of the same row in this process: what it wrote, and the connection that it was
/// answered over. That one was good a moment ago, so that no write gets lost on one that went away unseen.
struct Known<DB: Database, V> {
    row: Versioned<V>,
    conn: IdleConn<DB>,
    /// How many changes there were since the row was read.
    age: u32,
}

/// After how many changes the row is read again: that leaves a gap in which other processes come in.
const OLD: u32 = 4;

/// What a change is computed from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    Read,
    /// What the change before wrote, where that is known. Only for guarded writes: a trigger may have made another value of it.
    Known,
}

/// How long a change waits for those before it in this process. Beyond that the version alone decides who was faster.
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

/// A change that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Updated<V> {
    /// The value that was written.
    pub value: V,
    /// The version that the row has with it.
    pub version: i64,
    /// How many attempts it took.
    pub attempts: u32,
}

/// Why a value was not changed.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError<E> {
    /// The computation's own error; nothing was written.
    #[error("{0}")]
    Computation(E),
    /// Anything else: [`Error::NotFound`], [`Error::Conflict`] when the attempts are used up, an error of the database.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl<E> From<InvalidKey> for UpdateError<E> {
    fn from(error: InvalidKey) -> Self {
        Self::Failed(error.into())
    }
}

impl<DB: Database> VersionedTable<DB, i64> {
    /// A table whose values are `i64`, in an integer column of any width. Sends nothing yet.
    ///
    /// # Errors
    /// [`Error::InvalidName`] for names that are anything but plain, or one name for two columns.
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
    /// Unless set, up to eight connections of its own are used, which all tables of that pool share.
    pub fn share_pool(mut self) -> Self {
        self.rows = self.rows.share_pool();
        self
    }

    /// How long an update tries again: 100 attempts within 10 s unless set. A read without an answer, and a connection that is not to be had,
    /// are tried again within that time; a write without an answer never is.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for limits that are not possible.
    pub fn retry(mut self, retry: Retry) -> Result<Self, Error> {
        self.rows.retry = retry.checked()?;
        Ok(self)
    }

    /// How long one statement may take, waiting for a connection included: 1 ms to one hour, 5 s unless set.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for anything shorter or longer.
    pub fn time_limit(mut self, limit: Duration) -> Result<Self, Error> {
        self.rows.time_limit = time_limit(limit)?;
        Ok(self)
    }
}

impl<DB: Database, V: Value<DB>> VersionedTable<DB, V> {
    /// The same table, with turns of its own, and values of another type, such as `rust_decimal::Decimal`: any that sqlx reads from and writes to the column.
    /// Integers are read as `i64`, whatever their column's width or sign.
    pub fn of<U: Value<DB>>(self) -> VersionedTable<DB, U> {
        VersionedTable { rows: self.rows, turns: Arc::default() }
    }

    /// Reads a value; `None` if there is no such row. One round trip.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] and [`Error::KeyUnfit`] before anything is sent, [`Error::TableUnfit`], and errors of the database.
    ///
    /// # Cancel safety
    /// It only reads.
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

    /// Changes a value to what `compute` makes of it, and its version with it; tried again when somebody else was faster.
    ///
    /// Two round trips an attempt. `compute` may run several times.
    ///
    /// # Errors
    /// [`UpdateError::Computation`] at once, with nothing written; [`Error::NotFound`], [`Error::Conflict`] when the attempts or the time are used up; after
    /// [`Error::TimedOut`] and [`Error::Database`] it says whether something may have been written. That is never tried again.
    ///
    /// # Cancel safety
    /// Dropped, the change may have been made; value and version go together.
    pub async fn update<E>(
        &self,
        key: &str,
        mut compute: impl FnMut(&V) -> Result<V, E>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        self.change(&Key::new(key)?, Basis::Read, plain(&mut compute)).await
    }

    /// One attempt of [`update`](Self::update) in the caller's transaction, which is neither committed nor rolled back.
    ///
    /// # Errors
    /// As there; after [`Error::Conflict`], which stands for every kind of contention, roll back and begin the whole transaction anew.
    /// [`Error::NotInTransaction`] outside of one.
    ///
    /// # Cancel safety
    /// Dropped, the caller rolls back.
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

    /// Attempts over connections of the pool, until one goes through.
    pub(crate) async fn change<E>(
        &self,
        key: &Key,
        basis: Basis,
        mut compute: impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        let mut tries = self.rows.retry.begin();
        let until = tries.until;
        // Of a statement, waiting for a connection included.
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
                // What is known may be old: a read decides.
                Ok(None) | Err(Stop::Told(_) | Stop::Unread(_)) if unread => continue,
                Ok(None) => {}
                Err(stop) if stop.is_contention() => {}
                // Nothing was changed over this connection, which had gone away or said nothing, or was not to be had.
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

    /// One attempt over a connection of its own; a change comes with what it leaves to the next.
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

    /// Reads what is not known, computes, compares and sets; `None` if somebody else was faster.
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

/// What an attempt begins with.
enum Start<V> {
    Known(Versioned<V>),
    Read { by: Instant },
}

/// How an attempt ended without a change.
enum Stop<E> {
    /// By the computation.
    Told(UpdateError<E>),
    /// Before anything was sent that changes anything.
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

/// A computation of the application's: the version stands guard. Of a decimal with more digits than its type has the driver gives
/// some only, without a word; that is not what stands there.
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
