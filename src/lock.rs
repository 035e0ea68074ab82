//! The trait over both lock strategies, and the types that they share.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use sqlx::Pool;
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, PreviousClaim, Token},
    lease::guard::Lease,
    retry::Retry,
    rules::{Refusal, Status},
    store::Database,
};

/// A boxed future, as returned by the methods of a trait that is used as `dyn`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A lock that grants the right to change one resource, makes a commit depend on it, and releases
/// it.
///
/// [`LeaseLock`](crate::LeaseLock) excludes other holders from the start.
/// [`VersionLock`](crate::VersionLock) lets all of them begin, and one of them commit. Code built
/// on this trait ([`ResourceLockExt`](crate::ResourceLockExt)) does not depend on the strategy;
/// `dyn ResourceLock<DB>` lets configuration choose.
///
/// # Contract for implementations
/// If [`confirm`](Self::confirm) returned `Ok` in a transaction and the commit of that transaction
/// succeeded, no other claim on the key was confirmed and committed between the grant of this claim
/// and that commit. A claim that is lost cannot be confirmed.
pub trait ResourceLock<DB: Database>: Send + Sync {
    /// Attempts to acquire `key` once, without waiting for another holder.
    ///
    /// # Errors
    /// A key that is invalid, or a database that fails. A refusal is not an error.
    ///
    /// # Cancel safety
    /// If the future is dropped, a claim in flight ends by itself, with its lease.
    fn try_acquire<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// Acquires `key`, retrying until it is granted or `wait` has passed. The last refusal states
    /// the reason.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait stops. A claim in flight ends by itself.
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// Makes the commit of the caller's transaction depend on the claim. It is called where
    /// [`confirm_at`](Self::confirm_at) says.
    ///
    /// It neither commits nor rolls back. A lease that is granted after the transaction has read
    /// anything does not vouch for what was read. A claim serves one transaction at a time, because
    /// [`commit_outcome`](Self::commit_outcome) could not distinguish two.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::Conflict`] if the claim does not stand,
    /// [`Error::NotInTransaction`], and errors of the database. After any of them the caller rolls
    /// back.
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller rolls back.
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>>;

    /// Ends the claim of work that has completed, successfully or not.
    ///
    /// # Errors
    /// As [`Lease::release`]; a version has nothing to release.
    ///
    /// # Cancel safety
    /// If the future is dropped, the claim is released or abandoned.
    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>>;

    /// Returns the outcome of a confirmed transaction whose COMMIT brought no reply. It waits for
    /// that transaction to end, up to a limit.
    ///
    /// # Cancel safety
    /// The method only reads.
    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome>;

    /// Returns when in a transaction a claim is to be confirmed.
    fn confirm_at(&self) -> ConfirmAt;

    /// Returns how long conflicts are retried.
    fn retry(&self) -> Retry;

    /// Returns how long one statement may take, including COMMIT.
    fn time_limit(&self) -> Duration;

    /// Returns the pool on which transactions are begun.
    fn pool(&self) -> &Pool<DB>;
}

/// When in a transaction a claim is confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfirmAt {
    /// Before the work. The row stays locked until the transaction ends, and no other claim can
    /// take over.
    First,
    /// After the work, so that the row is locked for as short a time as possible.
    Last,
}

/// The result of a confirmation: the row's count of confirmations, or the version that it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation(pub i64);

/// The outcome of a transaction whose COMMIT brought no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The transaction was committed.
    Committed,
    /// The transaction was not committed, and will not be.
    RolledBack,
    /// The outcome cannot be determined.
    Unknown,
}

/// The result of an attempt to acquire a key.
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

    /// As [`Lease::taken_over_from`].
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.lease()?.taken_over_from()
    }

    /// As [`Lease::is_held`]. Only [`ResourceLock::confirm`] detects the loss of a version.
    pub fn is_held(&self) -> bool {
        self.lease().is_none_or(Lease::is_held)
    }

    /// As [`Lease::lost`]; for a version it never completes.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        match self.lease() {
            Some(lease) => lease.lost().await,
            None => std::future::pending().await,
        }
    }

    /// As [`Lease::cancellation_token`]; for a version the token is never cancelled.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.lease().map(Lease::cancellation_token).unwrap_or_default()
    }

    /// As [`Lease::reenter`]; for a version it returns the same claim again.
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

/// A shared lock is a lock: generic code also accepts an `Arc<dyn ResourceLock<DB>>`.
impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLock<DB> for Arc<L> {
    fn try_acquire<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        (**self).try_acquire(key)
    }

    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>> {
        (**self).acquire(key, wait)
    }

    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>> {
        (**self).confirm(claim, tx)
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>> {
        (**self).release(grant, status)
    }

    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome> {
        (**self).commit_outcome(claim, confirmation)
    }

    fn confirm_at(&self) -> ConfirmAt {
        (**self).confirm_at()
    }

    fn retry(&self) -> Retry {
        (**self).retry()
    }

    fn time_limit(&self) -> Duration {
        (**self).time_limit()
    }

    fn pool(&self) -> &Pool<DB> {
        (**self).pool()
    }
}
