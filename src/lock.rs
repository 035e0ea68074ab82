//! The one trait over both strategies, and what is written once for them.

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

/// A future in a box, as the methods of a trait that is to be used as `dyn` have to return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The right to change one resource, asked for, made a condition of a commit, and given back.
///
/// [`LeaseLock`](crate::LeaseLock) keeps others out from the start; [`VersionLock`](crate::VersionLock) lets all of them begin,
/// and one of them commit. What is built on it ([`ResourceLockExt`]) does not know which it runs under; `dyn ResourceLock<DB>` lets configuration choose.
///
/// # What an implementation promises
/// If [`confirm`](Self::confirm) returned `Ok` in a transaction and the commit of that transaction succeeded, no other claim on
/// the key was confirmed and committed between the grant of this one and that commit. A claim that is lost cannot be confirmed.
pub trait ResourceLock<DB: Database>: Send + Sync {
    /// May I start? Asks once, and never waits for another holder.
    ///
    /// # Errors
    /// A key that is refused at the door, or a database that fails; never a refusal, which is an answer.
    ///
    /// # Cancel safety
    /// Dropped, a claim that was under way ends by itself, with its lease.
    fn try_acquire<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// May I start? Asks until it is granted, or for `wait` at most; the last refusal tells why not.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// Dropped, it stops waiting; a claim that was under way ends by itself.
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> BoxFuture<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// May I commit? Makes the commit of the caller's transaction depend on the claim; call it where [`order`](Self::order) says.
    ///
    /// It neither commits nor rolls back. A lease that is granted after the transaction has read anything does not vouch for what was read. One transaction at a time under one claim: [`commit_outcome`](Self::commit_outcome) could not tell two apart.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::Conflict`] if the claim does not stand, [`Error::NotInTransaction`], and errors of the database: after any of them
    /// the caller rolls back.
    ///
    /// # Cancel safety
    /// Dropped, the caller rolls back.
    fn confirm<'a>(
        &'a self,
        claim: &'a Claim,
        tx: &'a mut DB::Connection,
    ) -> BoxFuture<'a, Result<Confirmation, Error>>;

    /// I am done: the work came to its end, well or badly.
    ///
    /// # Errors
    /// As [`Lease::release`]; a version has nothing to release.
    ///
    /// # Cancel safety
    /// Dropped, the claim is released or abandoned.
    fn release(&self, grant: Grant<DB>, status: Status) -> BoxFuture<'_, Result<(), Error>>;

    /// What became of a confirmed transaction whose COMMIT brought no answer; waits for it to end, up to a limit.
    ///
    /// # Cancel safety
    /// It only reads.
    fn commit_outcome<'a>(&'a self, claim: &'a Claim, confirmation: Confirmation) -> BoxFuture<'a, CommitOutcome>;

    /// When in a transaction a claim is to be confirmed.
    fn confirm_at(&self) -> ConfirmAt;

    /// How long conflicts are tried again.
    fn retry(&self) -> Retry;

    /// How long one statement may take, COMMIT too.
    fn time_limit(&self) -> Duration;

    /// Where transactions are begun.
    fn pool(&self) -> &Pool<DB>;
}

/// When in a transaction a claim is confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfirmAt {
    /// Before the work: its row stays locked to the end, and nobody can take over.
    First,
    /// After the work, so that the row is locked for as short as can be.
    Last,
}

/// What a confirmation came back with: the row's count of confirmations, or the version it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmation(pub i64);

/// What became of a transaction whose COMMIT brought no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// It is there.
    Committed,
    /// It is not, and will not be.
    RolledBack,
    /// Nobody can tell.
    Unknown,
}

/// The answer to a try.
#[derive(Debug)]
#[must_use = "a lease that is dropped is abandoned"]
pub enum Attempt<G> {
    /// The key was granted.
    Acquired(G),
    /// Somebody or something stands in the way.
    Refused(Refusal),
}

impl<G> Attempt<G> {
    /// What was granted, made into something else.
    pub(crate) fn map<H>(self, make: impl FnOnce(G) -> H) -> Attempt<H> {
        match self {
            Self::Acquired(granted) => Attempt::Acquired(make(granted)),
            Self::Refused(refusal) => Attempt::Refused(refusal),
        }
    }

    /// What was granted, if it was.
    pub fn acquired(self) -> Option<G> {
        match self {
            Self::Acquired(granted) => Some(granted),
            Self::Refused(_) => None,
        }
    }

    /// The refusal, if it is one.
    pub fn refused(self) -> Option<Refusal> {
        match self {
            Self::Acquired(_) => None,
            Self::Refused(refusal) => Some(refusal),
        }
    }
}

/// A claim that was granted, and the lease behind it where there is one. Dropped, the lease is abandoned.
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

/// A claim that nothing has to keep alive.
impl<DB: Database> From<Claim> for Grant<DB> {
    fn from(claim: Claim) -> Self {
        Self { claim, lease: None }
    }
}

impl<DB: Database> Grant<DB> {
    /// Key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.claim.key
    }

    /// The fencing token, or the version that was read.
    pub fn token(&self) -> Token {
        self.claim.token
    }

    /// The lease; a version has none.
    pub fn lease(&self) -> Option<&Lease<DB>> {
        self.lease.as_ref()
    }

    /// As [`Lease::taken_over_from`].
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.lease()?.taken_over_from()
    }

    /// As [`Lease::is_held`]. A version is found out to be lost by [`ResourceLock::confirm`] alone.
    pub fn is_held(&self) -> bool {
        self.lease().is_none_or(Lease::is_held)
    }

    /// As [`Lease::lost`]; for a version it waits for ever.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn lost(&self) {
        match self.lease() {
            Some(lease) => lease.lost().await,
            None => std::future::pending().await,
        }
    }

    /// As [`Lease::cancellation_token`]; for a version it is never cancelled.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.lease().map(Lease::cancellation_token).unwrap_or_default()
    }

    /// As [`Lease::reenter`]; of a version, the same claim again.
    ///
    /// # Errors
    /// [`Error::Lost`] if a lease is lost.
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { claim: self.claim.clone(), lease: self.lease().map(Lease::reenter).transpose()? })
    }

    /// The lease, to renew, detach or end it by hand; a version has none.
    pub fn into_lease(self) -> Option<Lease<DB>> {
        self.lease
    }
}

/// A shared lock is a lock: code that is generic over locks takes an `Arc<dyn ResourceLock<DB>>` too.
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
