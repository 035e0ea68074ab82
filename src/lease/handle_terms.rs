//! The terms on which a handle acquires its keys, checked where they are set.

use std::time::Duration;

use crate::{
    invalid::Invalid,
    lease::lock::LeaseLock,
    retry::{DAY, Retry, within},
    rules::{Rules, Terms},
    store::Database,
    sync::lock,
};

/// Terms of a handle. Each method returns the handle with one term changed. Other handles on the
/// lock, and leases that were acquired before, keep their terms. A term that is out of its range is
/// reported by [`check`](Self::check), and by each call of the handle.
///
/// ```
/// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) {
/// use rowlock::LeaseLock;
/// use std::time::Duration;
///
/// let lock = LeaseLock::new(pool);
/// let nightly = lock.clone().min_interval(Duration::from_secs(12 * 60 * 60));
/// let quick = lock.clone().lease(Duration::from_secs(5)); // no minimum interval
/// # }
/// ```
impl<DB: Database> LeaseLock<DB> {
    /// Sets how long a claim outlives its holder's last renewal: 100 ms to 30 days, 30 s by
    /// default.
    ///
    /// A held lease is renewed after a quarter to a third of this duration. After a crash, another
    /// claim may take over when the lease ends. Leases of equal duration and lock-delay are renewed
    /// together.
    pub fn lease(mut self, lease: Duration) -> Self {
        let rule = "it has to be from 100 ms to 30 days";
        let Some(lease) = self.faults.accept(within("a lease", lease, Duration::from_millis(100), 30 * DAY, rule))
        else {
            return self;
        };
        self.with(|terms| terms.lease = lease + terms.lock_delay)
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
    /// [`attach`](Self::attach) has the delay of the handle that takes it up, and its key opens no
    /// sooner than before.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) {
    /// use rowlock::LeaseLock;
    /// use std::time::Duration;
    ///
    /// // After a crash, the next holder starts at least 5 s after the last one had to stop.
    /// let robot = LeaseLock::new(pool).lock_delay(Duration::from_secs(5));
    /// # }
    /// ```
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        let checked = within("a lock-delay", delay, Duration::ZERO, 30 * DAY, "it has to be at most 30 days");
        let Some(delay) = self.faults.accept(checked) else { return self };
        self.with(|terms| {
            terms.lease += delay - terms.lock_delay;
            terms.lock_delay = delay;
        })
    }

    /// Sets how long a key is held at most: 1 s to ten years; without a limit by default.
    ///
    /// The library renews a lease for as long as its process lives, also while the work blocks its
    /// thread. A limit ends the lease of work that is stuck: it counts as lost when the limit has
    /// passed since the claim, or since a process attached it, and other holders may take the key
    /// once the lease in its row ends.
    /// The claim of a writer begins when it keeps new readers out.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn example<DB: rowlock::Database>(pool: sqlx::Pool<DB>) {
    /// use rowlock::LeaseLock;
    /// use std::time::Duration;
    ///
    /// // A report that has not ended after an hour never will.
    /// let report = LeaseLock::new(pool).max_hold(Duration::from_secs(60 * 60));
    /// # }
    /// ```
    pub fn max_hold(mut self, most: Duration) -> Self {
        let rule = "it has to be from 1 s to ten years";
        let checked = within("a max_hold", most, Duration::from_secs(1), 3653 * DAY, rule);
        if self.faults.accept(checked).is_none() {
            return self;
        }
        self.with(|terms| terms.max_hold = most)
    }

    /// Sets the minimum interval between two starts: zero (no interval) to ten years, zero by
    /// default.
    ///
    /// It is a distance, not a period. Set it to about half of the job's period. An hourly job that
    /// starts a moment early is then granted, and a second instance that starts a moment late is
    /// refused.
    pub fn min_interval(mut self, distance: Duration) -> Self {
        let rule = "it has to be at most ten years";
        let checked = within("a min_interval", distance, Duration::ZERO, 3653 * DAY, rule);
        let Some(distance) = self.faults.accept(checked) else { return self };
        let mut longest = lock(&self.key_terms.longest_interval);
        *longest = distance.max(*longest);
        drop(longest);
        self.with(|terms| terms.min_interval = distance)
    }

    /// Sets what happens after a failure or a crash; [`Rules::Recover`] by default.
    pub fn rules(self, rules: Rules) -> Self {
        self.with(|terms| terms.rules = rules)
    }

    /// Allows a failed run to be repeated within its minimum interval. Has no effect under
    /// [`Rules::Article`].
    pub fn retry_failed_at_once(self) -> Self {
        self.with(|terms| terms.retry_failed = true)
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
        self.with(|terms| terms.fair = fair)
    }

    /// Sets how long a [`transaction`](Self::transaction) of this handle is
    /// retried: 100 attempts within 10 s by default.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = self.faults.accept(retry.checked()).unwrap_or(self.retry);
        self
    }

    /// Checks the terms of the handle. Nothing is sent. Each call of the handle checks them too.
    ///
    /// # Errors
    /// [`Invalid`] with all terms that are out of their range.
    pub fn check(&self) -> Result<(), Invalid> {
        self.faults.check()
    }

    fn with(mut self, change: impl FnOnce(&mut Terms)) -> Self {
        let mut terms = self.key_terms.terms.clone();
        change(&mut terms);
        self.key_terms = self.shared.key_terms(terms);
        self
    }
}
