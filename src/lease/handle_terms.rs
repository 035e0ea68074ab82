//! The terms on which a handle acquires its keys, checked where they are set.

use std::time::Duration;

use crate::{
    error::Error,
    lease::{lock::LeaseLock, span::Bounds},
    retry::{DAY, Retry, within},
    rules::{Rules, Terms},
    store::Database,
};

/// Terms of a handle. Each method returns the handle with one term changed. Other handles on the
/// lock, and leases that were acquired before, keep their terms.
///
/// ```
/// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) -> Result<(), rowlock::Error> {
/// use rowlock::LeaseLock;
/// use std::time::Duration;
///
/// let lock = LeaseLock::new(pool);
/// let nightly = lock.clone().min_interval(Duration::from_secs(12 * 60 * 60))?;
/// let quick = lock.clone().lease(Duration::from_secs(5))?; // no minimum interval
/// # Ok(())
/// # }
/// ```
impl<DB: Database> LeaseLock<DB> {
    /// Sets how long a claim outlives its holder's last renewal: 100 ms to 30 days, 30 s by
    /// default.
    ///
    /// A held lease is renewed after a quarter to a third of this duration. After a crash, another
    /// claim may take over when the lease ends. Leases of equal duration and lock-delay are renewed
    /// together.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a shorter or longer duration.
    pub fn lease(self, lease: Duration) -> Result<Self, Error> {
        let lease =
            within("a lease", lease, Duration::from_millis(100), 30 * DAY, "it has to be from 100 ms to 30 days")?;
        let delay = self.key_terms.bounds.lock_delay;
        Ok(self.with(|terms, _| terms.lease = lease + delay))
    }

    /// Sets how long a key stays closed after a holder that has not ended its claim had to stop:
    /// zero to 30 days, zero by default.
    ///
    /// It is for work whose effects cannot be fenced, and which may need a moment to stop once it
    /// learns of the loss. The row's lease is `lease` plus `lock_delay`, and the holder trusts the
    /// first part alone. A release frees the key at once, and so does
    /// [`Lease::abandon`](crate::Lease::abandon), because the work has stopped by then. A lease
    /// that is dropped keeps the key closed for the delay, because tasks of its work may still run.
    /// [`force_release`](Self::force_release) keeps no delay. A claim that is taken up by
    /// [`resume`](Self::resume) has the delay of the handle that takes it up.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a longer duration.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) -> Result<(), rowlock::Error> {
    /// use rowlock::LeaseLock;
    /// use std::time::Duration;
    ///
    /// // After a crash, the next holder starts at least 5 s after the last one had to stop.
    /// let robot = LeaseLock::new(pool).lock_delay(Duration::from_secs(5))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn lock_delay(self, delay: Duration) -> Result<Self, Error> {
        let delay = within("a lock-delay", delay, Duration::ZERO, 30 * DAY, "it has to be at most 30 days")?;
        let (mut terms, fair, bounds) = (self.key_terms.terms.clone(), self.key_terms.fair, self.key_terms.bounds);
        terms.lease += delay - bounds.lock_delay;
        Ok(self.on_terms(terms, fair, Bounds { lock_delay: delay, ..bounds }))
    }

    /// Sets how long a key is held at most: 1 s to ten years; without a limit by default.
    ///
    /// The library renews a lease for as long as its process lives, also while the work blocks its
    /// thread. A limit ends the lease of work that is stuck: it counts as lost when the limit has
    /// passed since the claim, and other holders may take the key once the lease in its row ends.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a duration out of range.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) -> Result<(), rowlock::Error> {
    /// use rowlock::LeaseLock;
    /// use std::time::Duration;
    ///
    /// // A report that has not ended after an hour never will.
    /// let report = LeaseLock::new(pool).max_hold(Duration::from_secs(60 * 60))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn max_hold(self, most: Duration) -> Result<Self, Error> {
        let rule = "it has to be from 1 s to ten years";
        within("a max_hold", most, Duration::from_secs(1), 3653 * DAY, rule)?;
        let (terms, fair, bounds) = (self.key_terms.terms.clone(), self.key_terms.fair, self.key_terms.bounds);
        Ok(self.on_terms(terms, fair, Bounds { max_hold: most, ..bounds }))
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
        Ok(self.with(|terms, _| terms.min_interval = distance))
    }

    /// Sets what happens after a failure or a crash; [`Rules::Recover`] by default.
    pub fn rules(self, rules: Rules) -> Self {
        self.with(|terms, _| terms.rules = rules)
    }

    /// Allows a failed run to be repeated within its minimum interval. Has no effect under
    /// [`Rules::Article`].
    pub fn retry_failed_at_once(self) -> Self {
        self.with(|terms, _| terms.retry_failed = true)
    }

    /// Sets whether keys are granted first come, first served, also across processes. Off by
    /// default.
    ///
    /// A task that has to wait draws a ticket in the table `t_resource_lock_queue`, and no attempt
    /// of a fair handle precedes it. Without this setting, the waiters of one process are served in
    /// order, and processes race. A key is fair only if every handle on it is fair, because others
    /// may overtake.
    ///
    /// A waiter whose process died is skipped after 12 s. A fair claim reads the queue first, which
    /// is one statement more.
    pub fn fair(self, fair: bool) -> Self {
        self.with(|_, is_fair| *is_fair = fair)
    }

    /// Sets how long a [`transaction`](crate::ResourceLockExt::transaction) of this handle is
    /// retried: 100 attempts within 10 s by default.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for limits out of range.
    pub fn retry(mut self, retry: Retry) -> Result<Self, Error> {
        self.retry = retry.checked()?;
        Ok(self)
    }

    fn with(self, change: impl FnOnce(&mut Terms, &mut bool)) -> Self {
        let (mut terms, mut fair, bounds) = (self.key_terms.terms.clone(), self.key_terms.fair, self.key_terms.bounds);
        change(&mut terms, &mut fair);
        self.on_terms(terms, fair, bounds)
    }

    fn on_terms(mut self, terms: Terms, fair: bool, bounds: Bounds) -> Self {
        self.key_terms = self.shared.key_terms(terms, fair, bounds);
        self
    }
}
