//! The operators' side: who holds what, freeing a key by force, forgetting old rows.

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

/// Which rows [`LeaseLock::list`] gives: all, a hundred at a time, unless narrowed.
#[derive(Clone, Debug)]
pub struct ListOptions(Page);

impl Default for ListOptions {
    fn default() -> Self {
        Self(Page { after: String::new(), prefix: String::new(), locked_only: false, limit: 100 })
    }
}

impl ListOptions {
    /// Only rows that somebody holds, expired ones included.
    pub fn held(mut self) -> Self {
        self.0.locked_only = true;
        self
    }

    /// Only keys that begin with this text.
    pub fn prefix(mut self, prefix: &str) -> Self {
        self.0.prefix = prefix.to_owned();
        self
    }

    /// Only keys behind this one: the last of the page before.
    pub fn after(mut self, key: &str) -> Self {
        self.0.after = key.to_owned();
        self
    }

    /// At most so many rows a page.
    pub fn limit(mut self, rows: u32) -> Self {
        self.0.limit = rows;
        self
    }
}

/// A row of the table, for people. Times are the database's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    /// The key.
    pub key: String,
    /// What the row is at this moment; the window is this lock's `min_interval`.
    pub state: State,
    /// The end of the lease or of the window.
    pub until: Option<DateTime<Utc>>,
    /// When it was last taken.
    pub since: Option<DateTime<Utc>>,
    /// When it was last released.
    pub ended: Option<DateTime<Utc>>,
    /// Who took it last: the column `client_ip`.
    pub by: String,
    /// The column `status`: `S`, `F`, `P`, or what another program wrote.
    pub status: String,
    /// The highest token given so far.
    pub token: Token,
    /// The claim that holds it.
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

/// What operators ask for. None of it waits for a row that a transaction has locked, but `force_release` tries until its time limit.
impl<DB: Database> LeaseLock<DB> {
    /// Lists rows in the order of their keys, a page at a time.
    ///
    /// # Errors
    /// [`Error::TableMissing`] and its like, [`Error::Database`], [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn list(&self, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
        let limit = self.door().await?;
        let terms = &self.shared.settings.terms;
        let mut conn = self.checkout(limit, Action::Inspect, TABLE).await?;
        let reply = timeout_at(limit, DB::list(conn.get(), &filter.0, terms)).await;
        let listed = conn.settle(reply).map_err(|failure| self.failed(failure, Action::Inspect, TABLE))?;
        Ok(listed.into_iter().map(|listed| LockInfo::new(listed, terms)).collect())
    }

    /// Looks at one key's row; `None` if it has none.
    ///
    /// # Errors
    /// [`Error::InvalidKey`], [`Error::TableMissing`] and its like, [`Error::Database`], [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn inspect(&self, key: &str) -> Result<Option<LockInfo>, Error> {
        let key = Key::new(key)?;
        let limit = self.door().await?;
        let terms = &self.shared.settings.terms;
        let mut conn = self.checkout(limit, Action::Inspect, &quoted(&key)).await?;
        let reply = timeout_at(limit, DB::inspect(conn.get(), &key, terms)).await;
        let listed = conn.settle(reply).map_err(|failure| self.failed(failure, Action::Inspect, &quoted(&key)))?;
        Ok(listed.map(|listed| LockInfo::new(listed, terms)))
    }

    /// Frees a key, whoever holds it, and leaves `status` behind; gives its new token, or `None` if it has no row.
    ///
    /// The old holder finds out at its next renewal or release, and cannot bring the claim back. Its work may go on until then.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if a transaction was at the row all the while; [`Error::InvalidKey`], [`Error::TableMissing`] and its like, [`Error::Database`].
    ///
    /// # Cancel safety
    /// Dropped, the key may have been freed.
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

    /// Deletes rows that nobody has touched for `older_than`, and says how many.
    ///
    /// Never a row that is locked, within its window (its own `time` or this lock's `min_interval`), or whose status is not `S`:
    /// [`Rules::Article`](crate::Rules::Article) still refuses on that. Places in queues whose waiters died more than an hour ago go as well,
    /// uncounted.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for more than ten years; [`Error::TableMissing`] and its like, [`Error::Database`], [`Error::TimedOut`].
    ///
    /// # Cancel safety
    /// Dropped, some of the rows are gone; call it again.
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

    /// Refuses what cannot be served, and says when the time is up.
    async fn door(&self) -> Result<Instant, Error> {
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let limit = Instant::now() + self.shared.settings.time_limit;
        self.shared.known_table(limit).await?;
        Ok(limit)
    }

    /// A connection that has just answered: what an operator asks for is not sent again.
    async fn checkout(&self, limit: Instant, action: Action, subject: &str) -> Result<PooledConn<DB>, Error> {
        let failed = |failure| self.failed(failure, action, subject);
        loop {
            let mut conn = PooledConn::checkout(&self.shared.settings.pool, limit).await.map_err(failed)?;
            match timeout_at(limit, conn.get().ping()).await {
                Ok(Ok(())) => return Ok(conn),
                // It went away while it was idle.
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
