//! At most N holders at a time: a semaphore whose permits are rows of the lock's own table.
//!
//! A waiter needs any one of the permits. The plain claim takes one that no task of this process
//! uses (`queue/places.rs`). If it is refused, a read shows which are free, and the plain claim
//! takes one of them, chosen at random (`lease/wanted.rs`). A claim without a reply is repeated on
//! the same key.

use std::time::Duration;

use sqlx::Pool;

use crate::{
    error::Error,
    grant::{Attempt, Grant},
    invalid::Invalid,
    key::{Claim, Key},
    lease::{guard::Lease, lock::LeaseLock, wanted::Wanted},
    lock::{BoxFuture, CommitOutcome, ConfirmAt, Confirmation, ResourceLock},
    retry::Retry,
    rules::Status,
    store::Database,
};

/// The most permits of a semaphore: as many as a set has keys.
const MAX_PERMITS: u32 = 100;

/// A lock that at most N holders have at a time.
///
/// A permit is a claim on one of the keys `NAME#1` to `NAME#N`, with all that a claim has: a lease
/// that is renewed, a takeover after a crash, a fencing token, and
/// [`confirm`](ResourceLock::confirm). [`LeaseLock::list`] shows each permit with its holder. The
/// token is that of the permit: a resource that is guarded by tokens is guarded for each permit.
///
/// The number of permits may differ between instances, as it does while a change is deployed.
/// Claims on permits above an instance's own number end with their holders, and are not taken anew
/// by that instance.
///
/// As a [`ResourceLock`], it grants a permit of the key that is passed, which is usually its
/// [`name`](Self::name). Another key is another semaphore with as many permits.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use std::time::Duration;
///
/// let exports = lock.semaphore("exports", 3);
/// let permit = exports.acquire(Duration::from_secs(5)).await?;
/// println!("export with permit {:?}", exports.number(permit.key()));
/// permit.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct Semaphore<DB: Database> {
    lock: LeaseLock<DB>,
    name: Key,
    permits: u32,
    /// The permits of the name.
    wanted: Wanted,
}

impl<DB: Database> Clone for Semaphore<DB> {
    fn clone(&self) -> Self {
        Self { lock: self.lock.clone(), name: self.name.clone(), permits: self.permits, wanted: self.wanted.clone() }
    }
}

impl<DB: Database> std::fmt::Debug for Semaphore<DB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Semaphore").field("name", &self.name).field("permits", &self.permits).finish()
    }
}

impl<DB: Database> LeaseLock<DB> {
    /// Returns a semaphore of 1 to 100 permits, on the terms of this handle. Nothing is sent.
    ///
    /// A [`fair`](Self::fair) handle grants permits first come, first served. A minimum interval
    /// applies to each permit. A name that is no key, or too long for the number that is added, and
    /// a number of permits out of its range, are reported by the first call.
    pub fn semaphore(&self, name: &str, permits: u32) -> Semaphore<DB> {
        let mut lock = self.clone();
        if !(1..=MAX_PERMITS).contains(&permits) {
            let value = format!("{permits} permits");
            lock.faults.add(Invalid::setting("a semaphore", value, "it has to have 1 to 100 permits"));
        }
        let known = permits.clamp(1, MAX_PERMITS);
        let wanted = lock.faults.accept(permits_of(name, known)).unwrap_or_else(|| Wanted::all([Key::none()].into()));
        Semaphore { lock, name: Key::new(name).unwrap_or_else(|_| Key::none()), permits, wanted }
    }
}

impl<DB: Database> Semaphore<DB> {
    /// Returns the name.
    pub fn name(&self) -> &Key {
        &self.name
    }

    /// Returns the number of permits.
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// Returns the number of a permit, counted from 1, by its key; `None` for any other key. It may
    /// be above this instance's own number of permits, since other instances may have more.
    pub fn number(&self, permit: &Key) -> Option<u32> {
        Key::number_after(permit.as_str(), &self.name, "#", MAX_PERMITS)
    }

    /// Attempts to acquire a permit once, without waiting for a holder.
    ///
    /// It takes one round trip if the permit that it claims first is free. This process chooses it
    /// among those that it believes to be free. Otherwise it takes two more: a look at all permits,
    /// and the claim on a free one. The refusal names the permit that may be free first, or the
    /// semaphore if other waiters precede the call.
    ///
    /// # Errors
    /// As [`LeaseLock::try_acquire`].
    ///
    /// # Cancel safety
    /// As [`LeaseLock::try_acquire`].
    pub async fn try_acquire(&self) -> Result<Attempt<Lease<DB>>, Error> {
        Attempt::of(self.acquire(Duration::ZERO).await)
    }

    /// Acquires a permit, retrying until one is granted or `wait` has passed. A release of a permit
    /// by this process ends a pause. On PostgreSQL and SQLite a release by another process ends it
    /// too. On MySQL and MariaDB the next request finds it, after at most one second.
    ///
    /// # Errors
    /// As [`LeaseLock::acquire`].
    ///
    /// # Cancel safety
    /// As [`LeaseLock::acquire`].
    pub async fn acquire(&self, wait: Duration) -> Result<Lease<DB>, Error> {
        self.acquire_of(self.name.as_str(), wait).await
    }

    async fn acquire_of(&self, name: &str, wait: Duration) -> Result<Lease<DB>, Error> {
        Ok(Lease::new(self.lock.granted(&self.wanted(name)?, wait, false).await?.into_result()?))
    }

    fn wanted(&self, name: &str) -> Result<Wanted, Error> {
        self.lock.check()?;
        if name == self.name.as_str() { Ok(self.wanted.clone()) } else { Ok(permits_of(name, self.permits)?) }
    }
}

/// Returns the permits of a semaphore. Waiters queue under a key that is no permit's, so that
/// instances with different numbers of permits wait in one queue.
fn permits_of(name: &str, permits: u32) -> Result<Wanted, Invalid> {
    let keys = (1..=permits).map(|number| Key::new(&format!("{name}#{number}"))).collect::<Result<Vec<_>, _>>()?;
    Ok(Wanted::any(keys.into(), Key::new(&format!("{name}#"))?, Key::new(name)?))
}

impl<DB: Database> ResourceLock<DB> for Semaphore<DB> {
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move { Ok(self.acquire_of(key, wait).await?.into()) })
    }

    fn acquire_for_run<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Grant<DB>, Error>> {
        Box::pin(async move { Ok(self.lock.granted_for_run(&self.wanted(key)?, wait).await?.into()) })
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.lock.confirm(claim, tx)
    }

    fn confirm_within<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        self.lock.confirm_within(claim, tx)
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        self.lock.release(grant, status)
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        self.lock.commit_outcome(claim, confirmation)
    }

    fn confirm_at(&self) -> ConfirmAt {
        self.lock.confirm_at()
    }

    fn retry(&self) -> Retry {
        ResourceLock::retry(&self.lock)
    }

    fn time_limit(&self) -> Duration {
        self.lock.time_limit()
    }

    fn pool(&self) -> &Pool<DB> {
        self.lock.pool()
    }
}
