//! The settings of a lock, checked where it is built.

use std::{fmt, time::Duration};

use chrono::{FixedOffset, TimeDelta};
use sqlx::{Connection as _, Pool, pool::PoolOptions};

use crate::{
    action::{Action, Certainty},
    causes::DatabaseFault,
    error::Error,
    invalid::Faults,
    label,
    lease::{lock::LeaseLock, shared::Shared},
    retry::{Retry, TIME_LIMIT, time_limit},
    rules::Terms,
    session::{
        sessions::{Purpose, Sessions},
        timers::timeout,
    },
    store::{Database, Options},
};

/// Builds a [`LeaseLock`] from the settings that all its handles share.
///
/// What applies to single keys (the lease, the minimum interval and others) is set on the handles
/// of the lock that [`build`](Self::build) returns: see [`LeaseLock`].
///
/// ```
/// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) -> Result<(), rowlock::Error> {
/// use rowlock::LeaseLock;
/// use std::time::Duration;
///
/// let lock = LeaseLock::builder(pool).label("node-1").time_limit(Duration::from_secs(2)).build()?;
/// let nightly = lock.clone().min_interval(Duration::from_secs(12 * 60 * 60));
/// # Ok(())
/// # }
/// ```
#[must_use = "a lock is made by `build`"]
pub struct LeaseLockBuilder<DB: Database> {
    sessions: Sessions<DB>,
    label: Option<String>,
    time_limit: Duration,
    batching: bool,
    article_clients: Option<TimeDelta>,
}

impl<DB: Database> LeaseLock<DB> {
    /// Creates a lock on the pool's database with the default settings. Nothing is sent yet.
    pub fn new(pool: Pool<DB>) -> Self {
        LeaseLockBuilder::new(pool).assemble()
    }

    /// Begins to build a lock on the pool's database with settings other than the default.
    pub fn builder(pool: Pool<DB>) -> LeaseLockBuilder<DB> {
        LeaseLockBuilder::new(pool)
    }

    /// Connects to the database at `url` and creates a lock with the default settings, for
    /// applications that have no pool of sqlx 0.9. [`migrate`](crate::migrate) takes the
    /// [`pool`](Self::pool).
    ///
    /// The URL is as for sqlx: `postgres://user@host/database`, `mysql://user@host/database`,
    /// `sqlite:file.db?mode=rwc`. TLS needs the feature `tls`.
    ///
    /// # Errors
    /// [`Error::Database`] with the driver's or the server's error if the URL cannot be read, or
    /// the server does not accept a connection within 5 s.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), rowlock::Error> {
    /// use rowlock::{LeaseLock, sqlx::Sqlite};
    ///
    /// let lock = LeaseLock::<Sqlite>::connect("sqlite::memory:").await?;
    /// rowlock::migrate(lock.pool()).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self, Error> {
        let failed = |source| {
            Error::Database(DatabaseFault::Failed {
                action: Action::Connect,
                subject: format!("to {}", DB::NAME),
                outcome: Certainty::NothingChanged,
                source,
            })
        };
        let options: Options<DB> = url.parse().map_err(failed)?;
        // A pool would try again until its time is over, and hide the server's own error.
        let connected = timeout(TIME_LIMIT, DB::Connection::connect_with(&options)).await;
        let conn = connected.map_err(|_| failed(sqlx::Error::PoolTimedOut))?.map_err(failed)?;
        // The connection has served its purpose, however it is closed.
        let _ = timeout(TIME_LIMIT, conn.close()).await;
        let pool = match DB::may_be_in_memory(&options) {
            // The database is lost with its last connection.
            true => {
                PoolOptions::new().max_connections(1).idle_timeout(None).max_lifetime(None).test_before_acquire(false)
            }
            false => PoolOptions::new(),
        };
        Ok(Self::new(pool.connect_lazy_with(options)))
    }

    /// Returns the application's pool.
    pub fn pool(&self) -> &Pool<DB> {
        self.shared.sessions.application()
    }
}

impl<DB: Database> fmt::Debug for LeaseLockBuilder<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseLockBuilder")
            .field("database", &DB::NAME)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl<DB: Database> LeaseLockBuilder<DB> {
    fn new(pool: Pool<DB>) -> Self {
        let sessions = Sessions::new(pool, Purpose::Requests);
        Self { sessions, label: None, time_limit: TIME_LIMIT, batching: true, article_clients: None }
    }

    /// Sets the holder's label, which refusals report to other holders and which the column
    /// `client_ip` shows: at most 45 characters, none of them a control character. The default is
    /// `host/process id`. The label is for display; no rule reads it.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets how long one attempt may take, including the wait for a connection: 1 ms to one hour, 5
    /// s by default.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// Sets whether claims and releases that arrive at the same moment, or while one is in flight,
    /// are sent together in one statement. On by default.
    ///
    /// Each request has a reply of its own, and a request that arrives alone is sent alone, at
    /// once. A request that arrives while another one is in flight waits 20 ms for it. Then it
    /// takes another session, of which there are eight at most. With batching off, each request
    /// takes a session at once.
    pub fn batching(mut self, batching: bool) -> Self {
        self.batching = batching;
        self
    }

    /// Sends all statements over the application's pool, for servers that allow few connections.
    ///
    /// By default a lock opens sessions of its own, with the options of the application's pool and
    /// its hook `after_connect`: as a rule one for requests and one for renewals, and eight and
    /// four at most. All locks of that pool share them. A session that is not used is closed within
    /// a minute. Nothing that the application does to its connections affects them.
    ///
    /// On a shared pool each statement borrows a connection and returns it. The check of the
    /// connection takes one more round trip, which rolls back or detects a transaction that was
    /// left open there. Session settings (`SET search_path`) apply to the lock, and a lease is lost
    /// if the pool is exhausted for longer than the lease. A claim or a renewal has no limit on the
    /// server's clock: one that the server carries out late may take or extend the key until its
    /// lease ends.
    ///
    /// On SQLite a lock opens one session for requests and one for renewals if the file is in WAL
    /// mode, is not locked exclusively, and the application's pool may have several connections.
    /// Otherwise it shares the application's pool.
    pub fn share_pool(mut self) -> Self {
        self.sessions.share_pool();
        self
    }

    /// Declares that programs which know only the article's columns use the same table and write
    /// their times in local time at `utc_offset`.
    ///
    /// Their locks are then taken over once `begin_time` lies `time` minutes back. Without this
    /// setting, and under [`Rules::Article`](crate::Rules::Article), their locks are never taken
    /// over.
    pub fn article_clients(mut self, utc_offset: FixedOffset) -> Self {
        self.article_clients = Some(TimeDelta::seconds(utc_offset.local_minus_utc().into()));
        self
    }

    /// Builds the lock, and returns the first handle on it. Nothing is sent yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of its range.
    pub fn build(self) -> Result<LeaseLock<DB>, Error> {
        let mut faults = Faults::default();
        faults.accept(self.label.as_deref().map_or(Ok(()), label::check));
        faults.accept(time_limit(self.time_limit));
        faults.check()?;
        Ok(self.assemble())
    }

    /// Builds the lock from settings that are known to be valid.
    fn assemble(self) -> LeaseLock<DB> {
        let label = self.label.unwrap_or_else(label::default);
        let terms = Terms { article_clients: self.article_clients, label, ..Terms::default() };
        let shared = Shared::new(self.sessions, self.time_limit, self.batching);
        let key_terms = shared.key_terms(terms);
        LeaseLock { shared, key_terms, retry: Retry::default(), faults: Faults::default() }
    }
}
