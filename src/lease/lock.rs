//! The pessimistic lock, which acquires keys as leases.

use std::{fmt, sync::Arc, time::Duration};

use tracing::Instrument as _;

use crate::{
    causes::NotFound,
    error::Error,
    grant::Attempt,
    invalid::{Faults, Invalid},
    key::{Claim, Holder, Key},
    lease::{
        attempt::ClaimAttempt,
        guard::{Lease, LeaseSet},
        handle::LeaseHandle,
        info::LockInfo,
        ledger::Pending,
        shared::Shared,
        terms::KeyTerms,
        wait::{table_within, wait_for},
        wanted::Wanted,
    },
    metrics,
    pacing::Backoff,
    retry::Retry,
    session::{threads, time::Instant, timers::timeout},
    spans,
    store::Database,
};

/// The maximum number of keys in a set. Except on PostgreSQL, each key takes a statement of its
/// own.
const MAX_KEYS: usize = 100;
/// The bounds of the pause after an error that is waited out.
pub(crate) const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// A lock on named resources, kept in the table `t_resource_lock`.
///
/// A value of this type is a handle on the lock. An application creates one lock, with
/// [`new`](Self::new), [`builder`](Self::builder) or [`connect`](Self::connect), and clones the
/// handle where it is needed. All handles made from one lock share its renewals, batches and
/// [`shutdown`](Self::shutdown). Locks of the same application pool share sessions, the listener
/// and the wakeups of waiters; see
/// [`LeaseLockBuilder::share_pool`](crate::leases::LeaseLockBuilder::share_pool).
///
/// A handle has terms of its own: [`lease`](Self::lease), [`min_interval`](Self::min_interval),
/// [`rules`](Self::rules), [`retry_failed_at_once`](Self::retry_failed_at_once),
/// [`lock_delay`](Self::lock_delay), [`max_hold`](Self::max_hold), [`fair`](Self::fair) and
/// [`retry`](Self::retry).
/// `lock.clone().min_interval(..)` is another handle on the same lock.
///
/// As a [`ResourceLock`](crate::ResourceLock), it is one of the strategies that configuration may
/// choose.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// use rowlock::{Attempt, LeaseLock};
/// use std::time::Duration;
///
/// let lock = LeaseLock::new(pool);
/// let nightly = lock.clone().min_interval(Duration::from_secs(12 * 60 * 60));
/// match nightly.try_acquire("report").await? {
///     Attempt::Acquired(lease) => lease.release().await?,
///     Attempt::Refused(refusal) => println!("not now: {refusal}"),
/// }
/// lock.shutdown(Duration::from_secs(5)).await;
/// # Ok(())
/// # }
/// ```
pub struct LeaseLock<DB: Database> {
    pub(crate) shared: Arc<Shared<DB>>,
    pub(crate) key_terms: Arc<KeyTerms<DB>>,
    pub(crate) retry: Retry,
    /// What is wrong with the terms of this handle.
    pub(crate) faults: Faults,
}

impl<DB: Database> Clone for LeaseLock<DB> {
    fn clone(&self) -> Self {
        let (shared, key_terms) = (self.shared.clone(), self.key_terms.clone());
        Self { shared, key_terms, retry: self.retry, faults: self.faults.clone() }
    }
}

impl<DB: Database> fmt::Debug for LeaseLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseLock").field("database", &DB::NAME).field("terms", &self.key_terms.terms).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Attempts to acquire `key` once, without waiting for another holder.
    ///
    /// It takes one round trip if the row exists. The first call of a lock also reads the table's
    /// shape.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Setup`], which states what to run, or that the row which the
    /// call created is not visible; [`Error::Database`], which states whether the key may have been
    /// taken. A database failure is never reported as a refusal.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::Attempt;
    ///
    /// match lock.try_acquire("report").await? {
    ///     Attempt::Acquired(lease) => {
    ///         println!("working under token {}", lease.token());
    ///         lease.release().await?;
    ///     }
    ///     Attempt::Refused(refusal) => println!("not now: {refusal}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire(&self, key: &str) -> Result<Attempt<Lease<DB>>, Error> {
        Attempt::of(self.acquire(key, Duration::ZERO).await)
    }

    /// Acquires `key`, retrying until it is granted or `wait` has passed. Zero makes one attempt;
    /// [`Duration::MAX`] waits indefinitely.
    ///
    /// Within the minimum interval of an earlier claim the refusal is returned at once, however
    /// much of `wait` is left: another instance has done the work of this interval. Tasks that wait
    /// for the same key on handles of one lock with equal terms are served in order of arrival.
    /// Only one of them sends requests, and none does while one of them holds the key. Tasks on
    /// other terms wait in a queue of their own.
    ///
    /// # Errors
    /// [`Error::Refused`] with the last refusal, which states the reason; otherwise as
    /// [`try_acquire`](Self::try_acquire), but transient failures (an outage, contention, no
    /// session in time) are retried. Such a failure is returned only if the time ends without a
    /// refusal.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. A claim in flight is completed in the background,
    /// and its row is restored; a claim that took over an expired one is
    /// abandoned. If the database does not answer within a second after the drop, the claim may
    /// stand until its lease ends.
    ///
    /// A wait whose first request was refused runs on a thread of the library's own. If its future
    /// is not polled again, it does not hold up the other tasks that wait for the key. It may be
    /// granted the key: the lease is then renewed until the future is polled, and returns it, or is
    /// dropped. A future that is not polled again after its very first poll keeps its turn. In a
    /// `select!` loop with such a future, no other branch should wait for the same key.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::Error;
    /// use std::time::Duration;
    ///
    /// match lock.acquire("printer", Duration::from_secs(10)).await {
    ///     Ok(lease) => lease.release().await?,
    ///     Err(Error::Refused(refusal)) => println!("not within ten seconds: {refusal}"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire(&self, key: &str, wait: Duration) -> Result<Lease<DB>, Error> {
        let granted = self.granted(&Wanted::all([Key::new(key)?].into()), wait).await?;
        Ok(Lease::new(granted.into_result()?))
    }

    /// Acquires a key however long that takes, and after errors as long as `goes_on` says so.
    pub(crate) async fn acquire_while(&self, key: &Key, goes_on: impl Fn(&Error) -> bool) -> Result<Lease<DB>, Error> {
        let mut pauses = Backoff::between(PAUSES.0, PAUSES.1);
        loop {
            match self.acquire(key.as_str(), Duration::MAX).await {
                Err(error) if goes_on(&error) => pauses.pause(PAUSES.1).await,
                acquired => return acquired,
            }
        }
    }

    /// Attempts to acquire several keys once, all of them or none; see
    /// [`acquire_all`](Self::acquire_all).
    ///
    /// # Errors
    /// As [`acquire_all`](Self::acquire_all).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::Attempt;
    ///
    /// if let Attempt::Acquired(both) = lock.try_acquire_all(["alice", "bob"]).await? {
    ///     both.release().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_acquire_all(
        &self,
        keys: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Attempt<LeaseSet<DB>>, Error> {
        Attempt::of(self.acquire_all(keys, Duration::ZERO).await)
    }

    /// Acquires several keys together, retrying until all of them are granted or `wait` has passed.
    /// No key is held while another is waited for, so callers cannot deadlock.
    ///
    /// A set has one to a hundred keys; a key named twice counts once. The refusal names the first
    /// key, in key order, that was not available. The call takes one round trip on PostgreSQL, and
    /// a transaction with one or two statements per key elsewhere.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`Error::Invalid`] for no keys, or too many.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use std::time::Duration;
    ///
    /// let both = lock.acquire_all(["alice", "bob"], Duration::from_secs(10)).await?;
    /// println!("alice is held under token {:?}", both.token("alice"));
    /// both.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn acquire_all(
        &self,
        keys: impl IntoIterator<Item = impl AsRef<str>>,
        wait: Duration,
    ) -> Result<LeaseSet<DB>, Error> {
        let mut keys = keys.into_iter().map(|key| Key::new(key.as_ref())).collect::<Result<Vec<_>, _>>()?;
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() || keys.len() > MAX_KEYS {
            let value = format!("{} keys", keys.len());
            return Err(Invalid::setting("a set", value, "it has to have 1 to 100 keys").into());
        }
        Ok(LeaseSet::new(self.granted(&Wanted::all(keys.into()), wait).await?.into_result()?))
    }

    pub(crate) async fn granted(&self, wanted: &Wanted, wait: Duration) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        self.granted_or_pending(wanted, wait, &Pending::default()).await
    }

    /// Does the work with its caller or on the thread `rowlock` ([`threads::run`]). If the future
    /// is dropped, the work is dropped, and [`shutdown`](Self::shutdown) waits for what follows
    /// from that.
    pub(crate) fn on_thread<T, W>(&self, work: impl FnOnce(Self) -> W) -> impl Future<Output = Result<T, Error>> + Send
    where
        T: Send + 'static,
        W: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let checked = self.check();
        let running = threads::run(self.shared.tracker.clone(), Box::pin(work(self.clone())));
        async {
            checked?;
            running.await?
        }
    }

    /// Checks that the table can hold the keys.
    pub(crate) async fn check_admits(&self, keys: Vec<Key>) -> Result<(), Error> {
        let since = Instant::now();
        self.on_thread(|lock| async move { lock.check_admits_within(&keys, since, Duration::ZERO).await }).await
    }

    /// Checks that the table can hold the keys, within [`on_thread`](Self::on_thread). The first
    /// call of a lock reads the table's shape. A wait has its whole duration for that.
    pub(crate) async fn check_admits_within(&self, keys: &[Key], since: Instant, wait: Duration) -> Result<(), Error> {
        let table = match wait.is_zero() {
            true => self.shared.known_table(since + self.shared.time_limit).await?,
            false => table_within(&self.shared, since, wait).await?,
        };
        keys.iter().try_for_each(|key| table.admits(key, &self.key_terms.terms.label))
    }

    /// Acquires the keys. If the future is dropped, `pending` tells whether a claim may stand.
    pub(crate) async fn granted_or_pending(
        &self,
        wanted: &Wanted,
        wait: Duration,
        pending: &Pending,
    ) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let span = spans::acquire(&wanted.keys, wanted.any);
        let (asked, pending) = (wanted.clone(), pending.clone());
        let request = |lock: Self| async move { lock.request(&asked, wait, &pending).await };
        let attempt = self.on_thread(request).instrument(span.clone()).await;
        match &attempt {
            Ok(Attempt::Acquired(granted)) => spans::acquired(&span, &granted.held.claims[0], wanted.any),
            Ok(Attempt::Refused(refusal)) => spans::refused(&span, refusal, wanted.any),
            Err(error) => spans::failed(&span, error),
        }
        attempt
    }

    /// Acquires the keys, within [`on_thread`](Self::on_thread).
    async fn request(
        &self,
        wanted: &Wanted,
        wait: Duration,
        pending: &Pending,
    ) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let now = Instant::now();
        self.check_admits_within(&wanted.keys, now, wait).await?;
        let attempt = match wait.is_zero() {
            true => ClaimAttempt::new(&self.shared, &self.key_terms, wanted, None, pending).run().await?,
            false => wait_for(&self.shared, &self.key_terms, wanted, now, wait, pending).await?,
        };
        if let Attempt::Acquired(granted) = &attempt {
            metrics::waited(granted.held.claims[0].key.as_str(), now.elapsed());
        }
        Ok(attempt)
    }

    /// Takes up a claim by the id of its holder: one that another process was granted and
    /// [detached](Lease::detach).
    ///
    /// The call renews the claim if it stands, even if it has expired. It does not acquire the key
    /// again. From then on the claim has the lease and the lock-delay of this handle. A renewal
    /// never shortens a lease: if the earlier lease ends later, the key stays closed until then,
    /// unless the claim is released or abandoned. The call takes three round trips.
    ///
    /// # Errors
    /// [`Error::NotFound`] or [`Error::Lost`] if the claim does not stand; otherwise as
    /// [`inspect`](Self::inspect) and [`Lease::renew`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the claim may have been renewed. It is not abandoned.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use rowlock::Status;
    ///
    /// let lease = lock.try_acquire("upload").await?.acquired().expect("the key is free");
    /// let claim = lease.detach();
    /// // In another process, which was sent the key and the holder:
    /// let lease = lock.attach(claim.key.as_str(), claim.holder).await?;
    /// lease.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn attach(&self, key: &str, holder: Holder) -> Result<Lease<DB>, Error> {
        // A claim whose holder is all zeros has ended.
        let is_of = |entry: &LockInfo| entry.holder == Some(holder) && !holder.as_uuid().is_nil();
        let entry = self.inspect(key).await?.filter(is_of);
        let key = Key::new(key)?;
        match entry {
            Some(LockInfo { token, until, now, .. }) => {
                let left = until.map_or(Duration::ZERO, |until| (until - now).to_std().unwrap_or_default());
                let claim = Claim { key, holder, token };
                Ok(Lease::new(LeaseHandle::attach(&self.key_terms, claim, left).await?))
            }
            None => Err(Error::NotFound(NotFound::Claim { key, holder })),
        }
    }

    /// Waits, for at most `limit`, until all dropped leases of this lock have been abandoned or
    /// have ended, and all claims and queue tickets of dropped waiters have been ended too. Returns
    /// whether none of them is left, and no claim without a reply may stand. It covers all handles
    /// of the lock.
    ///
    /// Call it before the program ends, so that the next holder need not wait for them to expire. A
    /// claim under way is waited for, and undone if it is granted. One that has no reply may
    /// stand until its lease ends. The key of a dropped lease stays closed for its lock-delay, for
    /// which this call does not wait. Leases that are still held stay held. Sessions that are idle
    /// by then are closed in the background; another lock on the same pool opens new ones. At the
    /// limit the background work continues with what is left, as long as the process lives.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. Nothing else changes.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// # let lock = rowlock::LeaseLock::new(pool);
    /// use std::time::Duration;
    ///
    /// drop(lock.try_acquire("report").await?); // abandoned in the background
    /// if !lock.shutdown(Duration::from_secs(10)).await {
    ///     eprintln!("some keys are free only when their leases end");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self, limit: Duration) -> bool {
        let settled = timeout(limit, self.shared.tracker.wait()).await.is_ok() && !self.key_terms.renewer.ledger.any();
        self.shared.sessions.close_idle();
        self.shared.renewals.close_idle();
        settled
    }
}
