//! The attempts of a change: read, compute, compare and set.

use std::time::Duration;

use sqlx::Connection as _;

use crate::{
    action::Action,
    error::Error,
    invalid::Invalid,
    key::Key,
    metrics,
    retry::outage_pause,
    session::{time::Instant, timers::timeout_at},
    store::{
        Database, commit_error,
        version::{KeyValue, Statements, Value, Write},
    },
    transaction::in_transaction,
    version::{
        amount::{decimals, is_nan},
        rows::{Failed, answered},
        table::{Basis, Known, VersionedTable},
        update::{UpdateError, Updated, Versioned},
    },
};

/// The number of changes after which the row is read again. The read leaves a gap in which other
/// processes can change the row.
const MAX_CHANGES_PER_READ: u32 = 4;

/// How long a change waits for the preceding ones in this process. After that, the version alone
/// decides which change succeeds.
const MAX_QUEUE_WAIT: Duration = Duration::from_secs(1);

impl<DB: Database, V: Value<DB>> VersionedTable<DB, V> {
    /// Makes one attempt in the caller's transaction.
    pub(crate) async fn change_in<E>(
        &self,
        tx: &mut DB::Connection,
        key: &Key,
        mut compute: impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Updated<V>, UpdateError<E>> {
        self.check()?;
        in_transaction::<DB>(tx, key, self.rows.time_limit).await?;
        let mut left = Left::default();
        let attempt = async {
            let limit = Limit { each: self.rows.time_limit, until: None };
            let statements = self.rows.prepared_on(tx, limit.before_write()).await?;
            let row = (statements, key, &statements.key(key)?);
            let start = Start::Read { by: limit.before_write() };
            self.attempt(tx, row, start, limit, &mut left, &mut compute).await
        };
        let conflict = || Error::conflict(key.clone(), 1).into();
        match attempt.await {
            Ok(Some(Versioned { value, version })) => Ok(Updated { value, version, attempts: 1 }),
            Ok(None) => Err(conflict()),
            Err(Ended::Computation(error)) => Err(error),
            Err(Ended::Failed(failed)) if failed.is_contention() => Err(conflict()),
            Err(Ended::Failed(failed)) => Err(self.rows.error(failed, left.action(), key).into()),
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
        let limit = Limit { each: self.rows.time_limit, until: Some(tries.until) };
        let queue = self.queues.queue(&[key.clone()].into(), false);
        let mut left = Left::default();
        let mut turn = timeout_at(Instant::now() + MAX_QUEUE_WAIT.min(tries.left() / 2), queue.acquire()).await.ok();
        loop {
            let known = turn.as_mut().and_then(|turn| turn.note.take());
            let known = known.filter(|known| basis == Basis::Known && known.conn.is_fresh());
            let unread = known.is_some();
            match self.attempt_over_own(key, limit, known, &mut left, &mut compute).await {
                Ok(Some((Versioned { value, version }, known))) => {
                    if let (Some(turn), Basis::Known) = (&mut turn, basis) {
                        turn.note = known;
                    }
                    return Ok(Updated { value, version, attempts: tries.attempt });
                }
                // The known row may be outdated; the next attempt reads it.
                Ok(None) if unread && !limit.is_over() => continue,
                Err(Ended::Computation(_)) if unread => continue,
                Err(Ended::Failed(_)) if unread && !left.sent => continue,
                Ok(None) => {}
                Err(Ended::Computation(error)) => return Err(error),
                Err(Ended::Failed(failed)) if failed.is_contention() => {}
                // Nothing was changed over this connection: it was closed, gave no reply, or could
                // not be obtained.
                Err(Ended::Failed(failed))
                    if !left.sent && failed.is_connection_failure() && !tries.left().is_zero() =>
                {
                    outage_pause().await;
                    continue;
                }
                Err(Ended::Failed(failed)) => return Err(self.rows.error(failed, left.action(), key).into()),
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
        limit: Limit,
        known: Option<Known<DB, V>>,
        left: &mut Left,
        compute: &mut impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Option<(Versioned<V>, Option<Known<DB, V>>)>, Ended<E>> {
        (left.sent, left.open) = (false, false);
        let statements = self.rows.prepared(limit.before_write()).await?;
        let row = (statements, key, &statements.key(key)?);
        let (mut conn, start, age) = match known {
            Some(Known { row, conn, age }) => (conn.lend(), Start::Known(row), age),
            None => {
                let by = limit.before_write();
                (self.rows.pool.take(by).await.map_err(Failed::from)?, Start::Read { by }, 0)
            }
        };
        match self.attempt(conn.get(), row, start, limit, left, compute).await {
            Ok(Some(row)) if age + 1 < MAX_CHANGES_PER_READ => {
                let known = conn.keep().map(|conn| Known { row: row.clone(), conn, age: age + 1 });
                Ok(Some((row, known)))
            }
            result => {
                let may_still_run = matches!(&result, Err(Ended::Failed(failed)) if failed.may_still_run());
                if !left.open && !may_still_run {
                    conn.give_back();
                }
                Ok(result?.map(|row| (row, None)))
            }
        }
    }

    /// Reads the row unless it is known, computes, and writes if the version is unchanged. Returns
    /// `None` if another change came first, or if no time is left for the write.
    async fn attempt<E>(
        &self,
        conn: &mut DB::Connection,
        row: (&Statements, &Key, &KeyValue),
        start: Start<V>,
        limit: Limit,
        left: &mut Left,
        compute: &mut impl FnMut(&V) -> Result<Write<V>, UpdateError<E>>,
    ) -> Result<Option<Versioned<V>>, Ended<E>> {
        let (value, at) = self.read_target(conn, row, start).await?;
        let write = compute(&value).map_err(Ended::Computation)?;
        if limit.is_over() {
            return Ok(None);
        }
        Ok(self.compare_and_set(conn, &at, write, limit, left).await?)
    }

    async fn read_target<'a>(
        &self,
        conn: &mut DB::Connection,
        (statements, key, row): (&'a Statements, &'a Key, &'a KeyValue),
        start: Start<V>,
    ) -> Result<(V, Target<'a>), Failed> {
        let found = match start {
            Start::Known(Versioned { value, version }) => Some((value, version)),
            Start::Read { by } => answered(timeout_at(by, DB::read::<V>(conn, &statements.read, row)).await)?,
        };
        let (value, version) = found.ok_or_else(|| self.rows.not_found(key))?;
        let next = self.rows.next(key, version)?;
        Ok((value, Target { statements, key, row, version, next, inside: conn.is_in_transaction() }))
    }

    async fn compare_and_set(
        &self,
        conn: &mut DB::Connection,
        at: &Target<'_>,
        write: Write<V>,
        limit: Limit,
        left: &mut Left,
    ) -> Result<Option<Versioned<V>>, Failed> {
        self.check_value(at.statements, at.key, &write.value)?;
        let result = if at.statements.triggers || left.unmatched == Some(at.version) {
            self.write_in_transaction(conn, at, write, limit, left).await
        } else {
            self.write(conn, at, write, limit, left).await
        };
        if matches!(result, Ok(None)) {
            left.unmatched = Some(at.version);
        }
        result
    }

    /// Refuses a value that the database would silently change.
    fn check_value(&self, statements: &Statements, key: &Key, value: &V) -> Result<(), Error> {
        let column = self.rows.names.value.as_str();
        let (amount, rule) = match (decimals(value), statements.scale) {
            (Some(decimals), Some(most)) if decimals > most => {
                (format!("{decimals} decimals"), format!("the column {column} keeps {most} decimals"))
            }
            _ if is_nan(value) && !DB::HAS_NAN => ("NaN".into(), format!("the column {column} cannot hold it")),
            _ => return Ok(()),
        };
        Err(Invalid::amount(key.as_str(), amount, &rule).into())
    }

    /// Writes behind a savepoint of the caller's transaction, or in a transaction, so that what
    /// stands after it can be read and refused.
    async fn write_in_transaction(
        &self,
        conn: &mut DB::Connection,
        at: &Target<'_>,
        write: Write<V>,
        limit: Limit,
        left: &mut Left,
    ) -> Result<Option<Versioned<V>>, Failed> {
        if at.inside {
            // A savepoint that is dropped is rolled back.
            let mut savepoint = answered(timeout_at(limit.before_write(), conn.begin()).await)?;
            let written = self.write(&mut savepoint, at, write, limit, left).await?;
            if written.is_some() {
                answered(timeout_at(limit.now(), savepoint.commit()).await)?;
            }
            return Ok(written);
        }
        // The driver's own COMMIT may begin the next transaction.
        answered(timeout_at(limit.before_write(), DB::execute_text(conn, DB::BEGIN_TEXT)).await)?;
        left.open = true;
        let written = self.write(conn, &Target { inside: true, ..*at }, write, limit, left).await;
        let end = match &written {
            Ok(Some(_)) => DB::COMMIT_TEXT,
            Err(failed) if failed.may_still_run() => return written,
            Ok(None) | Err(_) => DB::ROLLBACK_TEXT,
        };
        let ended = timeout_at(limit.now(), DB::execute_text(conn, end)).await;
        left.open = !matches!(ended, Ok(Ok(())));
        // A refused change is undone, by its ROLLBACK or with the connection.
        if matches!(written, Ok(Some(_))) {
            answered(ended.map(|reply| reply.map_err(commit_error)))?;
        }
        written
    }

    /// Writes if the version is unchanged. In a transaction, the row is read again if a trigger may
    /// have altered it, or if no row was changed, which need not be a conflict.
    async fn write(
        &self,
        conn: &mut DB::Connection,
        at: &Target<'_>,
        write: Write<V>,
        limit: Limit,
        left: &mut Left,
    ) -> Result<Option<Versioned<V>>, Failed> {
        left.sent = true;
        let Target { statements, key, row, version, next, inside } = *at;
        let sql = if write.guard.is_some() { &statements.write_guarded } else { &statements.write };
        let rows = answered(timeout_at(limit.now(), DB::write(conn, sql, &write, row, version)).await)?;
        if rows > 0 && !statements.triggers {
            return Ok(Some(Versioned { value: write.value, version: next }));
        }
        if !inside {
            return Ok(None);
        }
        let found = answered(timeout_at(limit.now(), DB::read::<V>(conn, &statements.read_now, row)).await)?;
        let meant = |value: &V| write.guard.as_ref().is_none_or(|guard| (guard.same)(&guard.was, value));
        let found = found.filter(|(value, _)| rows > 0 || meant(value));
        let stands = self.rows.judge(key, version, rows, found.as_ref().map(|(_, version)| *version))?;
        Ok(found.zip(stands).map(|((value, _), version)| Versioned { value, version }))
    }
}

/// How long statements may take, including the wait for a connection.
#[derive(Clone, Copy)]
struct Limit {
    each: Duration,
    /// When no attempt may write any more.
    until: Option<Instant>,
}

impl Limit {
    /// Returns the limit of a statement that is sent now. A write that has been sent is waited for
    /// beyond the time of all attempts: its outcome would be unknown.
    fn now(self) -> Instant {
        Instant::now() + self.each
    }

    /// The same for a statement that precedes the write.
    fn before_write(self) -> Instant {
        self.until.map_or(self.now(), |until| until.min(self.now()))
    }

    fn is_over(self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }
}

/// The row that is written, if it still has this version.
struct Target<'a> {
    statements: &'a Statements,
    key: &'a Key,
    row: &'a KeyValue,
    version: i64,
    next: i64,
    /// Whether the write is undone if it is refused.
    inside: bool,
}

/// What an attempt leaves to the next one.
#[derive(Default)]
struct Left {
    /// The version that it did not match.
    unmatched: Option<i64>,
    /// It has sent a statement that changes something.
    sent: bool,
    /// Its transaction may be open, so that its connection has to be closed.
    open: bool,
}

impl Left {
    /// What the attempt was about when it failed.
    fn action(&self) -> Action {
        if self.sent { Action::Update } else { Action::Read }
    }
}

/// What an attempt starts from.
enum Start<V> {
    Known(Versioned<V>),
    Read { by: Instant },
}

/// Why an attempt ended without a change.
enum Ended<E> {
    /// The computation returned this error.
    Computation(UpdateError<E>),
    Failed(Failed),
}

impl<E, F: Into<Failed>> From<F> for Ended<E> {
    fn from(failed: F) -> Self {
        Self::Failed(failed.into())
    }
}
