//! The settings of a lock, checked where they are made.

use std::time::Duration;

use chrono::{FixedOffset, TimeDelta};

use crate::{
    error::Error,
    lease::{lock::LeaseLock, settings::Settings},
    retry::{DAY, Retry, time_limit, within},
    rules::Rules,
    store::{Database, pools::Connections},
};

impl<DB: Database> LeaseLock<DB> {
    /// How long a claim outlives its holder's last sign of life: 100 ms to 30 days, 30 s unless set.
    ///
    /// A held lease is renewed at every third of it; after a crash the next one may take over when it ends.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for anything shorter or longer.
    pub fn lease(self, lease: Duration) -> Result<Self, Error> {
        let lease =
            within("a lease", lease, Duration::from_millis(100), 30 * DAY, "it has to be from 100 ms to 30 days")?;
        Ok(self.rebuild(|settings| settings.with_terms(|terms| terms.lease = lease)))
    }

    /// The least distance between two starts: zero (no window) to ten years, zero unless set.
    ///
    /// It is a distance, not a period: set it to about half of the job's period, so that an hourly job which ticks a
    /// moment early is not refused, and a second instance which ticks a moment late is.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for anything longer.
    pub fn min_interval(self, distance: Duration) -> Result<Self, Error> {
        let distance =
            within("a min_interval", distance, Duration::ZERO, 3653 * DAY, "it has to be at most ten years")?;
        Ok(self.rebuild(|settings| settings.with_terms(|terms| terms.min_interval = distance)))
    }

    /// How long one try may take, waiting for a connection included: 1 ms to one hour, 5 s unless set.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for anything shorter or longer.
    pub fn time_limit(self, limit: Duration) -> Result<Self, Error> {
        let time_limit = time_limit(limit)?;
        Ok(self.rebuild(|settings| Settings { time_limit, ..settings }))
    }

    /// How long a [`transaction`](crate::ResourceLockExt::transaction) tries again: 100 attempts within 10 s unless set.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for limits that are not possible.
    pub fn retry(self, retry: Retry) -> Result<Self, Error> {
        let retry = retry.checked()?;
        Ok(self.rebuild(|settings| Settings { retry, ..settings }))
    }

    /// Who takes the keys, as others are told and as the column `client_ip` shows: at most 45 characters,
    /// `host/process id` unless set. It tells people; no rule looks at it.
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

    /// First come, first served, also among processes: a task that has to wait takes a place in the table
    /// `t_resource_lock_queue`, and no try of a fair lock object gets in before. Off unless set; without it, those who wait in one
    /// process take turns, and processes race. A key is fair if every lock object on it is: others may overtake.
    ///
    /// A waiter whose process died is passed over after 12 s. See the README for what it costs.
    pub fn fair(self, fair: bool) -> Self {
        self.rebuild(|settings| Settings { fair, ..settings })
    }

    /// Whether claims and releases that come at the same moment, or while one is under way, travel together in one statement, as they do unless this is `false`.
    ///
    /// Each is answered on its own, and one that comes alone is sent alone, at once. One that comes while another has no answer yet waits for it for
    /// 20 ms; then it takes a connection of its own, up to the pool's size. Switched off, each takes one at once.
    pub fn batching(self, on: bool) -> Self {
        self.rebuild(|settings| Settings { batching: on, ..settings })
    }

    /// What to do after a failure or a crash; [`Rules::Recover`] unless set.
    pub fn rules(self, rules: Rules) -> Self {
        self.rebuild(|settings| settings.with_terms(|terms| terms.rules = rules))
    }

    /// Lets a failed run be repeated within its window. Under [`Rules::Article`] it changes nothing.
    pub fn retry_failed_at_once(self) -> Self {
        self.rebuild(|settings| settings.with_terms(|terms| terms.retry_failed = true))
    }

    /// Says that programs which know only the article's columns use the same table, and write their times in
    /// local time at `utc_offset`. Their locks are then taken over once `begin_time` lies `time` minutes back;
    /// without it they never are. Under [`Rules::Article`] they never are either.
    pub fn article_clients(self, utc_offset: FixedOffset) -> Self {
        let ahead = TimeDelta::seconds(utc_offset.local_minus_utc().into());
        self.rebuild(|settings| settings.with_terms(|terms| terms.article_clients = Some(ahead)))
    }

    /// Sends everything over the application's pool, for servers that allow few connections.
    ///
    /// Unless set, a lock opens connections of its own with the options and hooks of the
    /// application's pool: up to eight for requests and four for renewals, which all locks of that
    /// pool share, opened when they are needed by each runtime. Nothing that the application does to its connections
    /// reaches those. On a shared pool each statement takes a round trip more, which undoes or finds
    /// a transaction that was left open there; settings of the session (`SET search_path`) apply to
    /// the lock, and a pool that is used up for longer than the lease loses it. SQLite always shares.
    pub fn share_pool(self) -> Self {
        self.rebuild(|settings| {
            let shared = Connections::shared(settings.pool.application().clone());
            Settings { pool: shared.clone(), renewals: shared, ..settings }
        })
    }
}
