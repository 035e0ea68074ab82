//! What an attempt to acquire a key returns.

use std::fmt;

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, PreviousClaim, Token},
    lease::guard::Lease,
    rules::Refusal,
    store::Database,
};

/// The result of an attempt to acquire a key.
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
///     Attempt::Acquired(lease) => lease.release().await?,
///     Attempt::Refused(refusal) => println!("not now: {refusal}"),
/// }
/// if let Some(lease) = lock.try_acquire("report").await?.acquired() {
///     lease.abandon().await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a lease that is dropped is abandoned"]
pub enum Attempt<G> {
    /// The key was granted.
    Acquired(G),
    /// The key was refused.
    Refused(Refusal),
}

impl<G> Attempt<G> {
    /// Maps what was granted.
    pub(crate) fn map<H>(self, make: impl FnOnce(G) -> H) -> Attempt<H> {
        match self {
            Self::Acquired(granted) => Attempt::Acquired(make(granted)),
            Self::Refused(refusal) => Attempt::Refused(refusal),
        }
    }

    /// Returns what was granted, or the refusal as an error.
    ///
    /// # Errors
    /// The refusal.
    pub fn into_result(self) -> Result<G, Refusal> {
        match self {
            Self::Acquired(granted) => Ok(granted),
            Self::Refused(refusal) => Err(refusal),
        }
    }

    /// Makes an attempt of the result of a call that does not wait.
    pub(crate) fn of(result: Result<G, Error>) -> Result<Self, Error> {
        match result {
            Ok(granted) => Ok(Self::Acquired(granted)),
            Err(Error::Refused(refusal)) => Ok(Self::Refused(refusal)),
            Err(error) => Err(error),
        }
    }

    /// Returns what was granted, if it was.
    pub fn acquired(self) -> Option<G> {
        match self {
            Self::Acquired(granted) => Some(granted),
            Self::Refused(_) => None,
        }
    }

    /// Returns the refusal, if it is one.
    pub fn refused(self) -> Option<Refusal> {
        match self {
            Self::Acquired(_) => None,
            Self::Refused(refusal) => Some(refusal),
        }
    }
}

/// A claim that was granted, with its lease if it has one. Dropping it abandons the lease.
///
/// [`ResourceLockExt::run`](crate::ResourceLockExt::run) passes it to the work. A lock of the
/// application's own makes it from a [`Claim`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::ResourceLockExt;
///
/// let ran = lock.run("report", async |grant| {
///     println!("{} under token {}", grant.key(), grant.token());
///     let stop = grant.cancellation_token(); // for the tasks that the work spawns
///     tokio::spawn(async move { stop.run_until_cancelled(step()).await }).await
/// });
/// ran.await?;
/// # async fn step() {}
/// # Ok(())
/// # }
/// ```
pub struct Grant<DB: Database> {
    claim: Claim,
    lease: Option<Lease<DB>>,
}

impl<DB: Database> fmt::Debug for Grant<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant").field("claim", &self.claim).field("lease", &self.lease).finish()
    }
}

impl<DB: Database> From<Lease<DB>> for Grant<DB> {
    fn from(lease: Lease<DB>) -> Self {
        Self { claim: lease.claim().clone(), lease: Some(lease) }
    }
}

/// Converts a claim that needs no lease to stay valid.
impl<DB: Database> From<Claim> for Grant<DB> {
    fn from(claim: Claim) -> Self {
        Self { claim, lease: None }
    }
}

impl<DB: Database> Grant<DB> {
    /// Returns the claim: key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }

    /// Returns the key.
    pub fn key(&self) -> &Key {
        &self.claim.key
    }

    /// Returns the fencing token, or the version that was read.
    pub fn token(&self) -> Token {
        self.claim.token
    }

    /// Returns the lease; a version has none.
    pub fn lease(&self) -> Option<&Lease<DB>> {
        self.lease.as_ref()
    }

    /// Returns the claim that this one took over, as [`Lease::taken_over_from`] does; `None` for a
    /// version.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.lease()?.taken_over_from()
    }

    /// Returns whether the lease is held, as [`Lease::is_held`] does; `true` for a version, whose
    /// loss only [`ResourceLock::confirm`](crate::ResourceLock::confirm) detects.
    pub fn is_held(&self) -> bool {
        self.lease().is_none_or(Lease::is_held)
    }

    /// Completes when the lease is lost, as [`Lease::lost`] does; for a version it never completes.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        match self.lease() {
            Some(lease) => lease.lost().await,
            None => std::future::pending().await,
        }
    }

    /// Returns a token that is cancelled when the lease is over, as [`Lease::cancellation_token`]
    /// does; for a version it is never cancelled.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.lease().map(Lease::cancellation_token).unwrap_or_default()
    }

    /// Returns another grant of the same claim, as [`Lease::reenter`] does for a lease.
    ///
    /// # Errors
    /// [`Error::Lost`] if a lease is lost.
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { claim: self.claim.clone(), lease: self.lease().map(Lease::reenter).transpose()? })
    }

    /// Returns the lease, to renew, detach or end it explicitly; a version has none.
    pub fn into_lease(self) -> Option<Lease<DB>> {
        self.lease
    }
}
