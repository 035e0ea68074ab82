//! A lease on one key.

use std::{fmt, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, PreviousClaim, Token},
    lease::{handle::LeaseHandle, renewer::Renewer},
    rules::Status,
    store::Database,
};

/// A lease on a key, renewed in the background until it is ended.
///
/// Work that has completed calls [`release`](Self::release). Work that was stopped calls
/// [`abandon`](Self::abandon), or drops the lease, which abandons it in the background. In both
/// cases the next holder need not wait for the lease to end. If no runtime is left to abandon it, a
/// dropped lease ends by itself.
pub struct Lease<DB: Database> {
    handle: LeaseHandle<DB>,
    prior: Option<PreviousClaim>,
}

impl<DB: Database> fmt::Debug for Lease<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("claim", self.claim()).field("time_left", &self.time_left()).finish()
    }
}

impl<DB: Database> Lease<DB> {
    pub(crate) fn new(handle: LeaseHandle<DB>, prior: Option<PreviousClaim>) -> Self {
        Self { handle: handle.heard(), prior }
    }

    pub(crate) async fn resume(renewer: &Arc<Renewer<DB>>, claim: Claim, time_limit: Duration) -> Result<Self, Error> {
        Ok(Self { handle: LeaseHandle::resume(renewer, claim, time_limit).await?, prior: None })
    }

    /// Returns another handle on the same claim, for nested code that takes the key again.
    ///
    /// Nothing is sent, and the token is the same. The key is released when the last handle is
    /// released, with that handle's status. A handle that is released, abandoned or dropped earlier
    /// only ends itself.
    ///
    /// A lock object does not identify its callers:
    /// [`LeaseLock::acquire`](crate::LeaseLock::acquire) of a held key waits, even if the caller is
    /// the holder.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim is lost.
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { handle: self.handle.reenter()?, prior: self.prior.clone() })
    }

    /// Stops renewing the claim and returns it without ending it. The claim ends with its lease,
    /// unless [`LeaseLock::resume`](crate::LeaseLock::resume) takes it up, in this process or
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

    /// Returns the claim: key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.handle.claims()[0]
    }

    /// Returns the claim that this one took over from, if its holder did not end it. That holder's
    /// work may be half done.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.prior.as_ref()
    }

    /// Returns whether the key is known to be held at this moment, by this machine's monotonic
    /// clock.
    pub fn is_held(&self) -> bool {
        self.handle.is_held()
    }

    /// Returns how long the key is certain to be held unless the lease is renewed; zero once it is
    /// lost.
    pub fn time_left(&self) -> Duration {
        self.handle.time_left()
    }

    /// Waits until the lease is lost. It completes before the server could grant the key to another
    /// holder, if neither the process nor its runtime is delayed for longer than a twentieth of the
    /// lease.
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        self.handle.lost().await;
    }

    /// Returns a token to pass to the tasks of the work. It is cancelled when the lease is lost,
    /// and when its last handle is released, abandoned or dropped.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.handle.cancellation_token()
    }

    /// Renews the lease now. The background task renews it at every third of its duration.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, or the lease had run out. After any
    /// other error the lease stands until [`time_left`](Self::time_left) is over, and its renewal
    /// continues.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may have been renewed although no reply arrived.
    pub async fn renew(&self) -> Result<(), Error> {
        self.handle.renew().await
    }

    /// Ends the lease of work that has completed, successfully or not.
    ///
    /// The release is retried until it is settled or the lease is over. It takes effect as long as
    /// no other claim has taken the row, even if the lease has run out. On PostgreSQL, under
    /// [`Rules::Recover`](crate::Rules::Recover) without a minimum interval and without
    /// `article_clients`, the release does not wait for the server's disk: if the server crashes
    /// within the next moments, the claim stands again and blocks other claims until its lease
    /// ends.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, so that nothing was written. The
    /// [`Certainty`](crate::Certainty) of any other error states what is known: either the server
    /// refused the release until the end and nothing was changed, or no reply arrived before the
    /// lease was over and the release may have been recorded.
    ///
    /// # Cancel safety
    /// If the future is dropped, the key is released or abandoned.
    pub async fn release(self, status: Status) -> Result<(), Error> {
        self.handle.release(status).await
    }

    /// Ends the lease of work that was stopped. Under [`Rules::Recover`](crate::Rules::Recover) the
    /// next claim takes over at once. Under [`Rules::Article`](crate::Rules::Article) the key waits
    /// for an operator, as after a crash.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim had been lost before; [`Error::TimedOut`] if it is unknown
    /// whether this call ended it.
    ///
    /// # Cancel safety
    /// If the future is dropped, the abandonment continues in the background.
    pub async fn abandon(self) -> Result<(), Error> {
        self.handle.abandon().await
    }
}
