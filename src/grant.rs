//! What an attempt to acquire a key returns.

use std::fmt;

use crate::{
    error::Error,
    key::{Claim, Key, Token},
    lease::guard::Lease,
    rules::{Refusal, Status},
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
        self.into_result().ok()
    }

    /// Returns the refusal, if it is one.
    pub fn refused(self) -> Option<Refusal> {
        self.into_result().err()
    }
}

/// A claim that was granted, with its lease if it has one: what a
/// [`ResourceLock`](crate::ResourceLock) returns. Dropping it abandons the lease.
///
/// A lock of the application's own creates it from a [`Claim`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// use rowlock::{LeaseLock, ResourceLock, Status};
/// use std::time::Duration;
///
/// let lock: Box<dyn ResourceLock<_>> = Box::new(LeaseLock::new(pool)); // or a VersionLock
/// let grant = lock.acquire("report", Duration::ZERO).await?;
/// println!("{} under token {}", grant.key(), grant.token());
/// lock.release(grant, Status::Succeeded).await?;
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

    /// Returns the lease, to renew, detach or end it explicitly; a version has none.
    pub fn into_lease(self) -> Option<Lease<DB>> {
        self.lease
    }

    /// Ends the lease with this status; a version has nothing to end.
    ///
    /// # Errors
    /// As [`Lease::end`].
    ///
    /// # Cancel safety
    /// As [`Lease::end`].
    pub async fn end(self, status: Status) -> Result<(), Error> {
        match self.lease {
            Some(lease) => lease.end(status).await,
            None => Ok(()),
        }
    }
}
