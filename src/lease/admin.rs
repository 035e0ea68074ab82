//! Administrative operations: inspection, forced release, deletion of old rows.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::Connection as _;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    error::{Action, Certainty, Error},
    key::{Holder, Key, Token},
    lease::lock::LeaseLock,
    retry::{DAY, outage_pause, within},
    rules::{State, Status, Terms, state},
    store::{
        Database,
        admin::{Forced, Listed, Page},
        connection::PooledConn,
        failure::Failure,
        fault::Fault,
    },
};

const TABLE: &str = "the table t_resource_lock";
const QUEUE: &str = "the table t_resource_lock_queue";

fn quoted(key: &Key) -> String {
    format!("{:?}", key.as_str())
}

/// Selects the rows that [`LeaseLock::list`] returns: all rows, a hundred per page, by default.
#[derive(Clone, Debug)]
pub struct ListOptions(Page);

impl Default for ListOptions {
    fn default() -> Self {
        Self(Page { after: String::new(), prefix: String::new(), locked_only: false, limit: 100 })
    }
}

impl ListOptions {
    /// Selects only locked rows, including expired ones.
    pub fn held(mut self) -> Self {
        self.0.locked_only = true;
        self
    }

    /// Selects only keys that begin with `prefix`.
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.0.prefix = prefix.to_owned();
        self
    }

    /// Selects only keys that sort after `key`, which is the last key of the previous page.
    pub fn after(mut self, key: &str) -> Self {
        self.0.after = key.to_owned();
        self
    }

    /// Returns at most `rows` rows per page.
    pub fn limit(mut self, rows: u32) -> Self {
        self.0.limit = rows;
        self
    }
}

/// A row of the table, for display. Times are from the database's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// The key.
    pub key: String,
    /// The state of the row when it was read. The minimum interval is this lock's `min_interval`.
    pub state: State,
    /// The end of the lease or of the minimum interval.
    pub until: Option<DateTime<Utc>>,
    /// When the key was last acquired.
    pub since: Option<DateTime<Utc>>,
    /// When the key was last released.
    pub ended: Option<DateTime<Utc>>,
    /// The label of the last holder: the column `client_ip`.
    pub by: String,
    /// The column `status`: `S`, `F`, `P`, or what another program wrote.
    pub status: String,
    /// The highest token assigned so far.
    pub token: Token,
    /// The claim that holds the key.
    pub holder: Option<Holder>,
}

impl LockInfo {
    fn new(listed: Listed, terms: &Terms) -> Self {
        let Listed { key, row, end_time, now } = listed;
        let (state, until) = state(&row, now, terms);
        Self {
            key,
            state,
            until,
            since: row.begin_time,
            ended: end_time,
            by: row.client_ip,
            status: row.status,
            token: Token::new(row.token),
            holder: row.holder.map(Holder::new),
        }
    }
}

/// Operations for operators. None of them waits for a row that another transaction has locked, but
/// `force_release` retries until its time limit.
impl<DB: Database> LeaseLock<DB> {
    /// Lists rows in key order, one page per call.
    ///
    /// # Errors
    /// [`Error::TableMissing`] and similar errors, [`Error::Database`], [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn list(&self, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
        let limit = self.door().await?;
        let terms = &self.shared.settings.terms;
        let mut conn = self.checkout(limit, Action::Inspect, TABLE).await?;
        let reply = timeout_at(limit, DB::list(conn.get(), &filter.0, terms)).await;
        let listed = conn.settle(reply).map_err(|failure| self.failed(failure, Action::Inspect, TABLE))?;
        Ok(listed.into_iter().map(|listed| LockInfo::new(listed, terms)).collect())
    }

    /// Returns the row of `key`, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::TableMissing`] and similar errors, [`Error::Database`],
    /// [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// The method only reads.
    pub async fn inspect(&self, key: &str) -> Result<Option<LockInfo>, Error> {
        let key = Key::new(key)?;
        let limit = self.door().await?;
        let terms = &self.shared.settings.terms;
        let mut conn = self.checkout(limit, Action::Inspect, &quoted(&key)).await?;
        let reply = timeout_at(limit, DB::inspect(conn.get(), &key, terms)).await;
        let listed = conn.settle(reply).map_err(|failure| self.failed(failure, Action::Inspect, &quoted(&key)))?;
        Ok(listed.map(|listed| LockInfo::new(listed, terms)))
    }

    /// Releases `key` regardless of its holder and writes `status`. Returns the key's new token, or
    /// `None` if the key has no row.
    ///
    /// The previous holder detects the loss at its next renewal or release and cannot restore the
    /// claim. Its work may continue until then.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if other transactions had the row locked until the time limit;
    /// [`Error::InvalidKey`], [`Error::TableMissing`] and similar errors, [`Error::Database`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the key may have been released.
    pub async fn force_release(&self, key: &str, status: Status) -> Result<Option<Token>, Error> {
        let key = Key::new(key)?;
        let limit = self.door().await?;
        let busy = || Error::TimedOut {
            action: Action::ForceRelease,
            subject: quoted(&key),
            limit: self.shared.settings.time_limit,
            outcome: Certainty::NothingChanged,
        };
        let mut skipped = false;
        loop {
            let conn = self.checkout(limit, Action::ForceRelease, &quoted(&key)).await;
            let mut conn = match conn {
                Err(Error::NoConnection { .. }) if skipped => return Err(busy()),
                conn => conn?,
            };
            let reply = timeout_at(limit, DB::force(conn.get(), &key, status, &self.shared.settings.terms)).await;
            match conn.settle(reply) {
                Ok(Forced::Freed(token)) => {
                    tracing::warn!(%key, %token, status = status.letter(), "released by force");
                    return Ok(Some(token));
                }
                Ok(Forced::NoRow) => return Ok(None),
                Ok(Forced::Skipped) if Instant::now() >= limit => return Err(busy()),
                Err(failure) if failure.fault() != Fault::Contention || Instant::now() >= limit => {
                    return Err(self.failed(failure, Action::ForceRelease, &quoted(&key)));
                }
                Ok(Forced::Skipped) | Err(_) => {
                    skipped = true;
                    sleep(Duration::from_millis(fastrand::u64(10..40))).await;
                }
            }
        }
    }

    /// Deletes rows that have not been touched for `older_than` and returns their number.
    ///
    /// It never deletes a row that is locked, that is within its minimum interval (its own `time`
    /// or this lock's `min_interval`), or whose status is not `S`:
    /// [`Rules::Article`](crate::Rules::Article) still refuses on that status. It also deletes
    /// queue tickets whose waiters died more than an hour ago, which are not counted.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for more than ten years; [`Error::TableMissing`] and similar
    /// errors, [`Error::Database`], [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// If the future is dropped, some of the rows may be deleted. Another call deletes the rest.
    pub async fn forget(&self, older_than: Duration) -> Result<u64, Error> {
        let older_than = within("an age", older_than, Duration::ZERO, 3653 * DAY, "it has to be at most ten years")?;
        let terms = &self.shared.settings.terms;
        let (mut rows, mut after) = (0, String::new());
        loop {
            let limit = self.door().await?;
            let mut conn = self.checkout(limit, Action::Forget, TABLE).await?;
            let reply = timeout_at(limit, DB::forget(conn.get(), older_than, &after, terms)).await;
            let step = conn.settle(reply).map_err(|failure| self.failed(failure, Action::Forget, TABLE))?;
            rows += step.rows;
            match step.after {
                Some(last) => after = last,
                None => break,
            }
        }
        let limit = self.door().await?;
        let mut conn = self.checkout(limit, Action::Forget, QUEUE).await?;
        let reply = timeout_at(limit, DB::sweep(conn.get())).await;
        conn.settle(reply).map_err(|failure| self.failed(failure, Action::Forget, QUEUE))?;
        Ok(rows)
    }

    /// Checks for a runtime and a usable table, and returns the deadline of the operation.
    async fn door(&self) -> Result<Instant, Error> {
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let limit = Instant::now() + self.shared.settings.time_limit;
        self.shared.known_table(limit).await?;
        Ok(limit)
    }

    /// Returns a connection that has just answered a ping, because an operator's request is not
    /// sent again.
    async fn checkout(&self, limit: Instant, action: Action, subject: &str) -> Result<PooledConn<DB>, Error> {
        let failed = |failure| self.failed(failure, action, subject);
        loop {
            let mut conn = PooledConn::checkout(&self.shared.settings.pool, limit).await.map_err(failed)?;
            match timeout_at(limit, conn.get().ping()).await {
                Ok(Ok(())) => return Ok(conn),
                // The connection was closed while it was idle.
                Ok(Err(_)) if Instant::now() < limit => drop(conn),
                Ok(Err(error)) => return Err(failed(Failure::NoConnection(error))),
                Err(_) => return Err(failed(Failure::NoConnection(sqlx::Error::PoolTimedOut))),
            }
            outage_pause().await;
        }
    }

    fn failed(&self, failure: Failure, action: Action, subject: &str) -> Error {
        failure.into_error(action, subject.to_owned(), self.shared.settings.time_limit, Certainty::NothingChanged)
    }
}
