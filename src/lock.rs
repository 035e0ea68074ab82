//! The one trait over both strategies, and what is written once for them.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use sqlx::Pool;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, Prior, Token},
    lease::guard::Lease,
    retry::Retry,
    rules::{Refusal, Status},
    store::Database,
    transaction::{self, TransactionError, Tx, WorkError},
};

/// A future in a box, as the methods of a trait that is to be used as `dyn` have to return it.
pub type Answering<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

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
    fn try_acquire<'a>(&'a self, key: &'a str) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// May I start? Asks until it is granted, or for `wait` at most; the last refusal tells why not.
    ///
    /// # Errors
    /// As [`try_acquire`](Self::try_acquire).
    ///
    /// # Cancel safety
    /// Dropped, it stops waiting; a claim that was under way ends by itself.
    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>>;

    /// May I commit? Makes the commit of the caller's transaction depend on the claim; call it where [`order`](Self::order) says.
    ///
    /// It neither commits nor rolls back. A lease that is granted after the transaction has read anything does not vouch for what was read. One transaction at a time under one claim: [`settle`](Self::settle) could not tell two apart.
    ///
    /// # Errors
    /// [`Error::Lost`] or [`Error::Conflict`] if the claim does not stand, [`Error::NotInTransaction`], and errors of the database: after any of them
    /// the caller rolls back.
    ///
    /// # Cancel safety
    /// Dropped, the caller rolls back.
    fn confirm<'a>(&'a self, claim: &'a Claim, tx: &'a mut DB::Connection) -> Answering<'a, Result<Receipt, Error>>;

    /// I am done: the work came to its end, well or badly.
    ///
    /// # Errors
    /// As [`Lease::release`]; a version has nothing to release.
    ///
    /// # Cancel safety
    /// Dropped, the claim is released or abandoned.
    fn release(&self, grant: Grant<DB>, status: Status) -> Answering<'_, Result<(), Error>>;

    /// What became of a confirmed transaction whose COMMIT brought no answer; waits for it to end, up to a limit.
    ///
    /// # Cancel safety
    /// It only reads.
    fn settle<'a>(&'a self, claim: &'a Claim, receipt: Receipt) -> Answering<'a, Settled>;

    /// When in a transaction a claim is to be confirmed.
    fn order(&self) -> Order;

    /// How long conflicts are tried again.
    fn retry(&self) -> Retry;

    /// How long one statement may take, COMMIT too.
    fn time_limit(&self) -> Duration;

    /// Where transactions are begun.
    fn pool(&self) -> &Pool<DB>;
}

/// When in a transaction a claim is confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Before the work: its row stays locked to the end, and nobody can take over.
    First,
    /// After the work, so that the row is locked for as short as can be.
    Last,
}

/// What a confirmation came back with: the row's count of confirmations, or the version it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt(pub i64);

/// What became of a transaction whose COMMIT brought no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
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
    pub fn taken_over_from(&self) -> Option<&Prior> {
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

/// What became of [`ResourceLockExt::run`].
#[derive(Debug)]
#[must_use = "the work may have been refused, cancelled, or have failed"]
pub enum Run<T, E> {
    /// The work did not start.
    Refused(Refusal),
    /// The work came to its end.
    Ended {
        /// Its own result.
        result: Result<T, E>,
        /// Whether the row tells so: `S` or `F`. If not, the next one may not know that it ended.
        /// A handle ([`Grant::reenter`]) that outlives the work holds the key on, and the row tells what that one ends with.
        recorded: Result<(), Error>,
    },
    /// The lease was lost and the work cancelled on the way.
    Lost(Claim),
}

/// What every [`ResourceLock`] can do.
pub trait ResourceLockExt<DB: Database>: ResourceLock<DB> {
    /// Runs `work` under the key, if it can be had now: releases it as succeeded or failed by the work's result.
    ///
    /// The work is cancelled (its future is dropped) when a lease is lost; hand [`Grant::cancellation_token`] to the tasks
    /// that it spawns. Work that blocks its thread cannot be cancelled, and on a runtime of one thread it stops the renewals:
    /// put it into `spawn_blocking`, and let it look at [`Grant::is_held`]. A panic abandons the key.
    /// A version keeps nobody out: work that is to run once only, or that writes, belongs under a lease or into [`transaction`](Self::transaction).
    ///
    /// In a task of its own: `tokio::spawn(async move { lock.run("key", async move |grant| { ... }).await })`.
    ///
    /// # Errors
    /// As [`ResourceLock::try_acquire`]. What happens after the start is told by [`Run`].
    ///
    /// # Cancel safety
    /// Dropped, it drops the work and abandons the key in the background: the next one may take over at once.
    fn run<T, E, W>(&self, key: &str, work: W) -> impl Future<Output = Result<Run<T, E>, Error>>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>;

    /// Runs `work` in a transaction that commits only if the claim on `key` stands to its end: acquire, begin, work, confirm, commit, release.
    ///
    /// Conflicts, losses before the commit, and errors that mean contention, also those that the work itself met, are rolled back and tried again:
    /// the work may run several times, and keeps to the transaction. The isolation level is the connection's: a statement that sets it comes too late. The work lets every database error out, neither commits nor rolls back, and gives
    /// the transaction back by dropping it. A work that ran into contention is known by its error's chain of sources ([`WorkError`]).
    ///
    /// A failure to release after the commit is no failure of the transaction: it goes into the log, and the lease ends by itself.
    ///
    /// # Errors
    /// [`TransactionError::Work`], rolled back, is the work's own; [`TransactionError::Refused`] if the key was not to be had in time;
    /// [`TransactionError::Failed`] with [`Error::Conflict`] when the retries are used up, with [`Error::CommitUnknown`] if nobody can tell
    /// whether it was committed. After every other error nothing was committed.
    ///
    /// # Cancel safety
    /// Dropped before the commit is sent, it leaves nothing behind; later, the commit may stand. The claim is abandoned, the connection closed.
    fn transaction<T, E, W, F>(&self, key: &str, work: W) -> impl Future<Output = Result<T, TransactionError<E>>>
    where
        E: WorkError,
        W: FnMut(Tx<DB>, Claim) -> F,
        F: Future<Output = Result<T, E>>;
}

impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLockExt<DB> for L {
    async fn run<T, E, W>(&self, key: &str, work: W) -> Result<Run<T, E>, Error>
    where
        W: AsyncFnOnce(&Grant<DB>) -> Result<T, E>,
    {
        let grant = match self.try_acquire(key).await? {
            Attempt::Acquired(grant) => grant,
            Attempt::Refused(refusal) => {
                tracing::info!(key, outcome = "refused", reason = %refusal.reason, "run");
                return Ok(Run::Refused(refusal));
            }
        };
        let started = Instant::now();
        let (key, token) = (grant.key().clone(), grant.token());
        let ended = |outcome| tracing::info!(%key, %token, outcome, wall = ?started.elapsed(), "run");
        let result = tokio::select! {
            biased;
            result = work(&grant) => result,
            () = grant.lost() => {
                ended("lost");
                return Ok(Run::Lost(grant.claim().clone()));
            }
        };
        ended(if result.is_ok() { "succeeded" } else { "failed" });
        let status = if result.is_ok() { Status::Succeeded } else { Status::Failed };
        let recorded = self.release(grant, status).await;
        Ok(Run::Ended { result, recorded })
    }

    async fn transaction<T, E, W, F>(&self, key: &str, work: W) -> Result<T, TransactionError<E>>
    where
        E: WorkError,
        W: FnMut(Tx<DB>, Claim) -> F,
        F: Future<Output = Result<T, E>>,
    {
        transaction::run(self, key, work).await
    }
}

/// A shared lock is a lock: code that is generic over locks takes an `Arc<dyn ResourceLock<DB>>` too.
impl<DB: Database, L: ResourceLock<DB> + ?Sized> ResourceLock<DB> for Arc<L> {
    fn try_acquire<'a>(&'a self, key: &'a str) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>> {
        (**self).try_acquire(key)
    }

    fn acquire<'a>(&'a self, key: &'a str, wait: Duration) -> Answering<'a, Result<Attempt<Grant<DB>>, Error>> {
        (**self).acquire(key, wait)
    }

    fn confirm<'a>(&'a self, claim: &'a Claim, tx: &'a mut DB::Connection) -> Answering<'a, Result<Receipt, Error>> {
        (**self).confirm(claim, tx)
    }

    fn release(&self, grant: Grant<DB>, status: Status) -> Answering<'_, Result<(), Error>> {
        (**self).release(grant, status)
    }

    fn settle<'a>(&'a self, claim: &'a Claim, receipt: Receipt) -> Answering<'a, Settled> {
        (**self).settle(claim, receipt)
    }

    fn order(&self) -> Order {
        (**self).order()
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
