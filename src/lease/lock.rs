//! The pessimistic lock, which acquires keys as leases.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::Pool;
use tokio::{runtime::Handle, time::Instant};

use crate::{
    error::Error,
    key::{Claim, Holder, Key},
    lease::{
        claims::Granted,
        confirm,
        guard::Lease,
        set::LeaseSet,
        settings::Settings,
        shared::Shared,
        wait::{table_within, wait_for},
    },
    lock::{Attempt, BoxFuture, CommitOutcome, ConfirmAt, Confirmation, Grant, ResourceLock},
    retry::Retry,
    rules::Status,
    store::Database,
};

/// The maximum number of keys in a set. Except on PostgreSQL, each key takes a statement of its
/// own.
const MOST_KEYS: usize = 100;

/// A lock on named resources, kept in the table `t_resource_lock`.
///
/// It is cheap to clone. The clones share one background task that renews their leases. Statements
/// use a few connections that all locks of the same application pool share; see
/// [`share_pool`](Self::share_pool).
pub struct LeaseLock<DB: Database> {
    pub(crate) shared: Arc<Shared<DB>>,
}

impl<DB: Database> Clone for LeaseLock<DB> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<DB: Database> fmt::Debug for LeaseLock<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseLock").field("database", &DB::NAME).field("terms", &self.shared.settings.terms).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Creates a lock on the pool's database with the default settings. Nothing is sent yet.
    pub fn new(pool: Pool<DB>) -> Self {
        Self { shared: Shared::new(Settings::new(pool), Arc::default()) }
    }

    pub(crate) fn rebuild(self, change: impl FnOnce(Settings<DB>) -> Settings<DB>) -> Self {
        // The pool is the same, so what is known of its table remains valid.
        let Shared { settings, table, .. } = &*self.shared;
        Self { shared: Shared::new(change(settings.clone()), table.clone()) }
    }

    /// Attempts to acquire `key` once, without waiting for another holder.
    ///
    /// It takes one round trip if the row exists. The first call of a lock object also reads the
    /// table's shape.
    ///
    /// # Errors
    /// [`Error::InvalidKey`] and [`Error::KeyTooLong`] before anything is sent;
    /// [`Error::TableMissing`] and similar errors, which state what to run;
    /// [`Error::RowNotVisible`] if the row that the call created is not visible;
    /// [`Error::Database`] and [`Error::TimedOut`], which state whether the key may have been
    /// taken. A database failure is never reported as a refusal.
    ///
    /// # Cancel safety
    /// If the future is dropped while a claim is in flight, the key may remain taken until the
    /// lease ends.
    pub async fn try_acquire(&self, key: &str) -> Result<Attempt<Lease<DB>>, Error> {
        self.acquire(key, Duration::ZERO).await
    }

    /// Acquires `key`, retrying until it is granted or `wait` has passed. Zero makes one attempt;
    /// [`Duration::MAX`] waits indefinitely. The last refusal states the reason.
    ///
    /// If the key can only become free by time (the minimum interval), and that is too late, the
    /// refusal is returned at once. Tasks that wait for the same key on the same lock object (or a
    /// clone) are served in order of arrival. Only one of them sends requests, and none does while
    /// one of them holds the key.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire), but transient failures (an outage, contention, a pool
    /// without a spare connection) are retried. Such a failure is returned only if the time ends
    /// without a refusal.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. A claim in flight is finished in the background
    /// and its row put back as it was before; a claim that took over an expired one is abandoned.
    pub async fn acquire(&self, key: &str, wait: Duration) -> Result<Attempt<Lease<DB>>, Error> {
        let lease = |Granted { handle, mut priors }| Lease::new(handle, priors.pop().flatten());
        Ok(self.granted([Key::new(key)?].into(), wait).await?.map(lease))
    }

    /// Attempts to acquire several keys once, all of them or none; see
    /// [`acquire_all`](Self::acquire_all).
    ///
    /// # Errors
    /// As [`acquire_all`](Self::acquire_all).
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire_all(
        &self,
        keys: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<Attempt<LeaseSet<DB>>, Error> {
        self.acquire_all(keys, Duration::ZERO).await
    }

    /// Acquires several keys together, retrying until all of them are granted or `wait` has passed.
    /// No key is held while another is waited for, so callers cannot deadlock.
    ///
    /// A set has one to a hundred keys; a key named twice counts once. The refusal names the first
    /// key, in key order, that was not available. The call takes one round trip on PostgreSQL, and
    /// a transaction with one or two statements per key elsewhere.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`Error::InvalidSetting`] for no keys, or too many.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_all(
        &self,
        keys: impl IntoIterator<Item = impl AsRef<str>>,
        wait: Duration,
    ) -> Result<Attempt<LeaseSet<DB>>, Error> {
        let mut keys = keys.into_iter().map(|key| Key::new(key.as_ref())).collect::<Result<Vec<_>, _>>()?;
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() || keys.len() > MOST_KEYS {
            let (setting, value) = ("a set", format!("{} keys", keys.len()));
            return Err(Error::InvalidSetting { setting, value, rule: "it has to have 1 to 100 keys" });
        }
        let set = |Granted { handle, priors }| LeaseSet::new(handle, priors);
        Ok(self.granted(keys.into(), wait).await?.map(set))
    }

    async fn granted(&self, keys: Arc<[Key]>, wait: Duration) -> Result<Attempt<Granted<DB>>, Error> {
        Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let now = Instant::now();
        let table = table_within(&self.shared, now, wait).await?;
        for key in &*keys {
            table.admits(key, &self.shared.settings.terms.label)?;
        }
        wait_for(&self.shared, keys, now, wait).await
    }

    /// Takes up a claim by the id of its holder: one that another process was granted and
    /// [detached](Lease::detach).
    ///
    /// The claim is renewed if it stands, even if it has expired. Nothing is acquired anew. The
    /// call takes three round trips.
    ///
    /// # Errors
    /// [`Error::NotHeld`] or [`Error::Lost`] if the claim does not stand; otherwise as
    /// [`inspect`](Self::inspect) and [`Lease::renew`].
    ///
    /// # Cancel safety
    /// If the future is dropped, the claim may have been renewed. It is not abandoned.
    pub async fn resume(&self, key: &str, holder: Holder) -> Result<Lease<DB>, Error> {
        let entry = self.inspect(key).await?.filter(|entry| entry.holder == Some(holder));
        let key = Key::new(key)?;
        match entry {
            Some(entry) => {
                let claim = Claim { key, holder, token: entry.token };
                Lease::resume(&self.shared.renewer, claim, self.shared.settings.time_limit).await
            }
            None => Err(Error::NotHeld { key, holder }),
        }
    }

    /// Waits, for at most `limit`, until all dropped leases have been abandoned or have ended, and
    /// all claims and queue tickets of dropped waiters have been ended too. Returns whether none of
    /// them is left.
    ///
    /// Call it before the program ends, so that the next holder need not wait for them to expire.
    /// Leases that are still held stay held. Connections that are idle by then are closed, which
    /// takes up to 400 ms more; another lock on the same pool opens new ones. At the limit the
    /// background work continues with what is left, as long as the runtime exists.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. Nothing else changes.
    pub async fn shutdown(&self, limit: Duration) -> bool {
        self.shared.waiting.tickets.attend();
        let settled = self.shared.renewer.settled(limit).await;
        self.shared.settings.pool.close_idle().await;
        self.shared.settings.renewals.close_idle().await;
        settled
    }
}

impl<DB: Database> ResourceLock<DB> for LeaseLock<DB> {
    fn try_acquire<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        Box::pin(async move { Ok(LeaseLock::try_acquire(self, key).await?.map(Grant::from)) })
    }

    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        Box::pin(async move { Ok(LeaseLock::acquire(self, key, wait).await?.map(Grant::from)) })
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        Box::pin(confirm::confirm::<DB>(claim, tx, self.shared.settings.time_limit))
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let Claim { key, token, .. } = grant.claim().clone();
            match grant.into_lease() {
                Some(lease) => lease.release(status).await,
                None => Err(Error::Lost { key, token }),
            }
        })
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        Box::pin(confirm::commit_outcome(
            &self.shared.settings.pool,
            claim,
            confirmation,
            self.shared.settings.time_limit,
        ))
    }

    fn confirm_at(&self) -> ConfirmAt {
        ConfirmAt::First
    }

    fn retry(&self) -> Retry {
        self.shared.settings.retry
    }

    fn time_limit(&self) -> Duration {
        self.shared.settings.time_limit
    }

    fn pool(&self) -> &Pool<DB> {
        self.shared.settings.pool.application()
    }
}
