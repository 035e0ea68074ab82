//! The settings of a lock, checked where they are set.

use std::time::Duration;

use chrono::{FixedOffset, TimeDelta};

use crate::{
    error::Error,
    lease::{lock::LeaseLock, settings::Settings},
    retry::{DAY, Retry, time_limit, within},
    rules::Rules,
    store::{Database, pools::Connections},
};

/// Settings. Each method returns the lock with one setting changed; leases acquired before keep
/// theirs.
impl<DB: Database> LeaseLock<DB> {
    /// Sets how long a claim outlives its holder's last renewal: 100 ms to 30 days, 30 s by
    /// default.
    ///
    /// A held lease is renewed at every third of this duration. After a crash, another claim may
    /// take over when the lease ends.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a shorter or longer duration.
    pub fn lease(self, lease: Duration) -> Result<Self, Error> {
        let lease =
            within("a lease", lease, Duration::from_millis(100), 30 * DAY, "it has to be from 100 ms to 30 days")?;
        Ok(self.rebuild(|settings| settings.with_terms(|terms| terms.lease = lease)))
    }

    /// Sets the minimum interval between two starts: zero (no interval) to ten years, zero by
    /// default.
    ///
    /// It is a distance, not a period. Set it to about half of the job's period, so that an hourly
    /// job that starts a moment early is not refused, and a second instance that starts a moment
    /// late is.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a longer duration.
    pub fn min_interval(self, distance: Duration) -> Result<Self, Error> {
        let distance =
            within("a min_interval", distance, Duration::ZERO, 3653 * DAY, "it has to be at most ten years")?;
        Ok(self.rebuild(|settings| settings.with_terms(|terms| terms.min_interval = distance)))
    }

    /// Sets how long one attempt may take, including the wait for a connection: 1 ms to one hour, 5
    /// s by default.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a shorter or longer duration.
    pub fn time_limit(self, limit: Duration) -> Result<Self, Error> {
        let time_limit = time_limit(limit)?;
        Ok(self.rebuild(|settings| Settings { time_limit, ..settings }))
    }

    /// Sets how long a [`transaction`](crate::ResourceLockExt::transaction) is retried: 100
    /// attempts within 10 s by default.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for limits out of range.
    pub fn retry(self, retry: Retry) -> Result<Self, Error> {
        let retry = retry.checked()?;
        Ok(self.rebuild(|settings| Settings { retry, ..settings }))
    }

    /// Sets the holder's label, which refusals report to other holders and which the column
    /// `client_ip` shows: at most 45 characters, `host/process id` by default. The label is for
    /// display; no rule reads it.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a longer text, or one with control characters.
    pub fn label(self, label: &str) -> Result<Self, Error> {
        if label.chars().count() > 45 || label.chars().any(char::is_control) {
            return Err(Error::InvalidSetting {
                setting: "a label",
                value: format!("{:?}", label.chars().take(60).collect::<String>()),
                rule: "it has to have at most 45 characters, and no control characters",
            });
        }
        Ok(self.rebuild(|settings| settings.with_terms(|terms| terms.label = label.to_owned())))
    }

    /// Sets whether keys are granted first come, first served, also across processes. Off by
    /// default.
    ///
    /// A task that has to wait draws a ticket in the table `t_resource_lock_queue`, and no attempt
    /// of a fair lock object precedes it. Without this setting, the waiters of one process are
    /// served in order, and processes race. A key is fair only if every lock object on it is fair,
    /// because others may overtake.
    ///
    /// A waiter whose process died is skipped after 12 s. A fair claim reads the queue first, which
    /// is one statement more.
    pub fn fair(self, fair: bool) -> Self {
        self.rebuild(|settings| Settings { fair, ..settings })
    }

    /// Sets whether claims and releases that arrive at the same moment, or while one is in flight,
    /// are sent together in one statement. On by default.
    ///
    /// Each request has a reply of its own, and a request that arrives alone is sent alone, at
    /// once. A request that arrives while another one is in flight waits 20 ms for it. Then it
    /// takes a connection of its own, up to the pool's size. With batching off, each request takes
    /// a connection at once.
    pub fn batching(self, on: bool) -> Self {
        self.rebuild(|settings| Settings { batching: on, ..settings })
    }

    /// Sets what happens after a failure or a crash; [`Rules::Recover`] by default.
    pub fn rules(self, rules: Rules) -> Self {
        self.rebuild(|settings| settings.with_terms(|terms| terms.rules = rules))
    }

    /// Allows a failed run to be repeated within its minimum interval. Has no effect under
    /// [`Rules::Article`].
    pub fn retry_failed_at_once(self) -> Self {
        self.rebuild(|settings| settings.with_terms(|terms| terms.retry_failed = true))
    }

    /// Declares that programs which know only the article's columns use the same table and write
    /// their times in local time at `utc_offset`.
    ///
    /// Their locks are then taken over once `begin_time` lies `time` minutes back. Without this
    /// setting, and under [`Rules::Article`], their locks are never taken over.
    pub fn article_clients(self, utc_offset: FixedOffset) -> Self {
        let ahead = TimeDelta::seconds(utc_offset.local_minus_utc().into());
        self.rebuild(|settings| settings.with_terms(|terms| terms.article_clients = Some(ahead)))
    }

    /// Sends all statements over the application's pool, for servers that allow few connections.
    ///
    /// By default a lock opens connections of its own with the options and hooks of the
    /// application's pool: up to eight for requests and four for renewals. All locks of that pool
    /// share them, and each runtime opens them when they are needed. Nothing that the application
    /// does to its connections affects them.
    ///
    /// On a shared pool each statement takes one more round trip, which rolls back or detects a
    /// transaction that was left open there. Session settings (`SET search_path`) apply to the
    /// lock, and a lease is lost if the pool is exhausted for longer than the lease. SQLite always
    /// shares the application's pool.
    pub fn share_pool(self) -> Self {
        self.rebuild(|settings| {
            let shared = Connections::shared(settings.pool.application().clone());
            Settings { pool: shared.clone(), renewals: shared, ..settings }
        })
    }
}
