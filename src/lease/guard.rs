//! A lease on one key, or on several keys together.

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, PreviousClaim, Token},
    lease::{handle::LeaseHandle, held::Held, readers::Entrance},
    rules::Status,
    store::Database,
};

/// A lease on a key, renewed in the background until it is ended.
///
/// Work that has completed calls [`release`](Self::release). Work that was stopped calls
/// [`abandon`](Self::abandon). In both cases the next holder need not wait for the lease to end. A
/// lease that is dropped is abandoned in the background. The next holder then waits only for the
/// [`lock_delay`](crate::LeaseLock::lock_delay) of the handle, because tasks of the work may still
/// run. If the process ends before the abandonment is sent, the lease ends by itself.
///
/// The lease is renewed on threads of the library's own: work that blocks its thread or its runtime
/// keeps it for as long as the process lives.
///
/// `Lease<DB>` is a lease on one key. [`LeaseSet<DB>`](LeaseSet) is a lease on several keys. The
/// parameter `K` says which: [`One`] or [`Several`].
///
/// ```
/// # async fn example<DB: rowlock::Database>(
/// #     lease: rowlock::Lease<DB>,
/// # ) -> Result<(), rowlock::Error> {
/// use rowlock::Status;
///
/// println!("{} under token {}", lease.key(), lease.token());
/// tokio::select! {
///     () = lease.lost() => eprintln!("lost: the work is stopped"),
///     () = work() => lease.release().await?,
/// }
/// # async fn work() {}
/// # Ok(())
/// # }
/// ```
pub struct Lease<DB: Database, K = One> {
    pub(crate) handle: LeaseHandle<DB>,
    /// Set for a reader's lease.
    writer_token: Option<Token>,
    keys: PhantomData<K>,
}

/// Several keys that are held together: one lease, with one token per key. The loss of one key is
/// the loss of all.
///
/// All keys are renewed, released and abandoned in one statement. When one key is lost, the others
/// are no longer renewed, and [`Error::Lost`] names the key that was lost. They stay closed to
/// other holders until the set is dropped or ended, or until their lease ends. If one key was lost
/// before a release, the others may nevertheless have been released.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// use rowlock::{Attempt, ResourceLock};
///
/// if let Attempt::Acquired(both) = lock.try_acquire_all(["alice", "bob"]).await? {
///     let mut tx = lock.pool().begin_with("BEGIN IMMEDIATE").await?;
///     for claim in both.claims() {
///         lock.confirm(claim, &mut tx).await?;
///     }
///     // ... statements of the application ...
///     tx.commit().await?;
///     both.release().await?;
/// }
/// # Ok(())
/// # }
/// ```
pub type LeaseSet<DB> = Lease<DB, Several>;

/// The parameter of a [`Lease`] on one key.
#[derive(Debug)]
pub enum One {}

/// The parameter of a [`Lease`] on several keys, a [`LeaseSet`].
#[derive(Debug)]
pub enum Several {}

impl<DB: Database, K> fmt::Debug for Lease<DB, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (claims, time_left) = (&self.handle.held.claims, self.time_left());
        f.debug_struct("Lease").field("claims", &claims).field("time_left", &time_left).finish()
    }
}

impl<DB: Database, K> Lease<DB, K> {
    /// Delivers what was granted.
    pub(crate) fn new(handle: LeaseHandle<DB>) -> Self {
        Self { handle: handle.delivered(), writer_token: None, keys: PhantomData }
    }

    /// Returns another handle on the same claims, for nested code that takes the keys again.
    ///
    /// Nothing is sent, and the tokens are the same. The keys are released when the last handle is
    /// released, with that handle's status. A handle that is released, abandoned or dropped earlier
    /// only ends itself.
    ///
    /// A lock does not identify its callers: [`LeaseLock::acquire`](crate::LeaseLock::acquire) of a
    /// held key waits, even if the caller is the holder.
    ///
    /// # Errors
    /// [`Error::Lost`] if a claim is lost.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn example<DB: rowlock::Database>(
    /// #     lease: rowlock::Lease<DB>,
    /// # ) -> Result<(), rowlock::Error> {
    /// let inner = lease.reenter()?;
    /// drop(inner); // the key is still held
    /// lease.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { handle: self.handle.reenter()?, writer_token: self.writer_token, keys: PhantomData })
    }

    /// Returns whether the lease is known to be held at this moment, by this machine's clock. The
    /// clock only moves forward, and on Linux, Android and Apple's systems it also counts the time
    /// for which the machine sleeps.
    pub fn is_held(&self) -> bool {
        self.handle.held.stands()
    }

    /// Returns how long the lease is certain to be held unless it is renewed; zero once it is lost.
    pub fn time_left(&self) -> Duration {
        self.handle.held.time_left()
    }

    /// Waits until the lease is lost. A thread of the library's own watches the clock, and waits
    /// for no statement and no code of the application. The loss is reported before the server
    /// could grant a key to another holder, if the process is not delayed for longer than a
    /// twentieth of the lease. A task on a runtime that is blocked learns of it when the runtime
    /// goes on.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        self.handle.lost().await;
    }

    /// Returns a token to pass to the tasks of the work. It is cancelled when the lease is lost,
    /// and when its last handle is released, abandoned or dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn example<DB: rowlock::Database>(
    /// #     lease: rowlock::Lease<DB>,
    /// # ) -> Result<(), rowlock::Error> {
    /// let stop = lease.cancellation_token();
    /// tokio::spawn(async move {
    ///     stop.run_until_cancelled(async { /* a part of the work */ }).await;
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn cancellation_token(&self) -> CancellationToken {
        self.handle.held.over.child_token()
    }

    /// Renews the lease now. The background task renews it after a quarter to a third of its
    /// duration. The key stays closed for the [`lock_delay`](crate::LeaseLock::lock_delay) beyond
    /// the renewed lease.
    ///
    /// # Errors
    /// [`Error::Lost`] if a row was seen without its claim, or the lease had run out. After any
    /// other error the lease stands until [`time_left`](Self::time_left) is over, and its renewal
    /// continues.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may have been renewed although no reply arrived.
    pub async fn renew(&self) -> Result<(), Error> {
        self.handle.renew().await
    }

    /// Ends the lease of work that has succeeded.
    ///
    /// The release is retried until it is settled or the lease is over. It takes effect as long as
    /// no other claim has taken the row, even if the lease has run out. On PostgreSQL, under
    /// [`Rules::Recover`](crate::Rules::Recover) without a minimum interval and without
    /// `article_clients`, the release does not wait for the server's disk: if the server crashes
    /// within the next moments, the claim stands again and blocks other claims until its lease
    /// ends.
    ///
    /// # Errors
    /// [`Error::Lost`] if a row was seen without its claim, so that nothing was written to it. The
    /// [`Certainty`](crate::errors::Certainty) of any other error states what is known: either the
    /// server refused the release until the end and nothing was changed, or no reply arrived before
    /// the lease was over and the release may have been recorded.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease is released or abandoned.
    pub async fn release(self) -> Result<(), Error> {
        self.end(Status::Succeeded).await
    }

    /// Ends the lease of work that has failed, as [`release`](Self::release) does.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub async fn fail(self) -> Result<(), Error> {
        self.end(Status::Failed).await
    }

    /// Ends the lease with this status, as [`release`](Self::release) does.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub async fn end(self, status: Status) -> Result<(), Error> {
        self.handle.release(status).await
    }

    /// Ends the lease of work that was stopped. Under [`Rules::Recover`](crate::Rules::Recover) the
    /// next claim takes over at once: no [`lock_delay`](crate::LeaseLock::lock_delay) is kept.
    /// Under [`Rules::Article`](crate::Rules::Article) the key waits for an operator, as after a
    /// crash.
    ///
    /// The abandonment is sent once no renewal is under way. A renewal without a reply may still be
    /// carried out after it, until the limit that the renewal had: a third of the lease, at most 10
    /// s, after it was sent, and the lock's time limit for [`renew`](Self::renew). It then closes
    /// the key again, until the lease and the lock-delay that it has written are over. A statement
    /// over the application's pool has no such limit.
    ///
    /// # Errors
    /// [`Error::Lost`] if a claim had been lost before; [`Error::Database`] if it is unknown
    /// whether this call ended it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the abandonment continues in the background.
    pub async fn abandon(self) -> Result<(), Error> {
        self.handle.abandon().await
    }
}

/// A reader that was let in, the token of the last writer, and the claim that took over that
/// writer's, if one did. Until the reader is delivered, dropping that claim leaves the writer's to
/// be taken over again, so that another holder is told of it.
pub(crate) type Reader<DB> = (LeaseHandle<DB>, Token, Option<Arc<Entrance<DB>>>);

/// Methods of a lease on one key.
impl<DB: Database> Lease<DB> {
    /// Creates the lease of a reader of a [`ReadWriteLock`](crate::ReadWriteLock).
    pub(crate) fn of_reader((mut reader, writer_token, entrance): Reader<DB>) -> Self {
        // What the claim on the reader's own key took over is no writer.
        reader.priors = vec![entrance.as_ref().and_then(|entrance| entrance.claim.prior().cloned())];
        // Its end is begun by the last reader of the entrance.
        entrance.iter().for_each(|entrance| entrance.claim.told());
        Self { writer_token: Some(writer_token), ..Self::new(reader) }
    }

    /// Returns a view of the lease for the work that runs under it.
    pub fn held(&self) -> Held {
        Held::new(&self.handle.held, self.claim(), self.taken_over_from(), self.writer_token)
    }

    /// Stops renewing the claim and returns it without ending it. The claim ends with its lease,
    /// unless [`LeaseLock::attach`](crate::LeaseLock::attach) takes it up, in this process or
    /// another. While another handle on the claim exists, that handle continues to renew it.
    pub fn detach(self) -> Claim {
        let claim = self.claim().clone();
        self.handle.detach();
        claim
    }

    /// Returns the key.
    pub fn key(&self) -> &Key {
        &self.claim().key
    }

    /// Returns the fencing token, which is higher than that of any earlier claim on this key.
    pub fn token(&self) -> Token {
        self.claim().token
    }

    /// Returns the token by which a reader's work is fenced, or `None` if this is not the lease of
    /// a reader.
    ///
    /// It is the token that the name of the [`ReadWriteLock`](crate::ReadWriteLock) had when the
    /// reader was let in: not lower than that of any writer before it, and lower than that of every
    /// later writer. A system that has seen the token of a later writer refuses the reader.
    /// [`token`](Self::token) is the token of the reader's own key.
    pub fn writer_token(&self) -> Option<Token> {
        self.writer_token
    }

    /// Returns the claim: key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.handle.held.claims[0]
    }

    /// Returns the claim that this one took over from, if its holder did not end it. That holder's
    /// work may be half done. For a reader it is the last claim on the lock's name: that of a
    /// writer, or of a reader that died while it waited for its turn.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.handle.prior()
    }
}

/// Methods of a lease on several keys.
impl<DB: Database> Lease<DB, Several> {
    /// Returns the claims in key order. [Confirm](crate::ResourceLock::confirm) them in this order,
    /// so that no two transactions deadlock.
    pub fn claims(&self) -> &[Claim] {
        &self.handle.held.claims
    }

    /// Returns the fencing token of one key, or `None` if the key is not in the set.
    pub fn token(&self, key: &str) -> Option<Token> {
        self.claims().iter().find(|claim| claim.key.as_str() == key).map(|claim| claim.token)
    }

    /// Returns the claims that were taken over, each with the previous claim on its key, which its
    /// holder did not end.
    pub fn taken_over_from(&self) -> impl Iterator<Item = (&Claim, &PreviousClaim)> {
        self.claims().iter().zip(&self.handle.priors).filter_map(|(claim, prior)| Some((claim, prior.as_ref()?)))
    }
}
