//! A lease: one key, held.

use std::{fmt, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, Key, PreviousClaim, Token},
    lease::{handle::LeaseHandle, renewer::Renewer},
    rules::Status,
    store::Database,
};

/// A key that is held, and renewed in the background until it is ended.
///
/// Work that came to its end calls [`release`](Self::release). Work that was stopped calls [`abandon`](Self::abandon),
/// or drops the lease, which abandons it in the background. Either way the next one need not wait for the lease to end.
/// Where no runtime is left to abandon it, a dropped lease ends by itself.
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

    /// Another handle on the same claim, for code further down that takes the key again: nothing is sent, the token is the same,
    /// and the key is released when the last handle is, with that one's status. A handle that is released, abandoned or dropped before only ends itself.
    ///
    /// A lock object does not know who calls it: [`LeaseLock::acquire`](crate::LeaseLock::acquire) of a key that is held waits, whoever holds it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim is lost.
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { handle: self.handle.reenter()?, prior: self.prior.clone() })
    }

    /// Leaves the claim standing, renewed no more: it ends with its lease, unless
    /// [`LeaseLock::resume`](crate::LeaseLock::resume) takes it up, in this process or another.
    /// While another handle of it is held, that one goes on renewing it.
    pub fn detach(self) -> Claim {
        let claim = self.claim().clone();
        self.handle.detach();
        claim
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.claim().key
    }

    /// The fencing token: higher than that of any claim on this key before.
    pub fn token(&self) -> Token {
        self.claim().token
    }

    /// Key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.handle.claims()[0]
    }

    /// The claim that this one took over from, if its holder did not end it: its work may be half done.
    pub fn taken_over_from(&self) -> Option<&PreviousClaim> {
        self.prior.as_ref()
    }

    /// Whether the key is known to be held at this moment, by this machine's monotonic clock.
    pub fn is_held(&self) -> bool {
        self.handle.is_held()
    }

    /// How long it is held for sure, unless it is renewed; zero when it is lost.
    pub fn time_left(&self) -> Duration {
        self.handle.time_left()
    }

    /// Waits until the lease is lost: before the server could let another in, if neither the process nor its runtime is held up
    /// for longer than a twentieth of the lease.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn lost(&self) {
        self.handle.lost().await;
    }

    /// A token to hand to tasks of the work: cancelled when the lease is lost, and when its last handle is released, abandoned or dropped.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.handle.cancellation_token()
    }

    /// Prolongs the lease now; in the background that happens at every third of it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, or the lease had run out. After any other error
    /// the lease stands until [`time_left`](Self::time_left) is over, and goes on being renewed.
    ///
    /// # Cancel safety
    /// Dropped, the lease may have been prolonged without this end knowing.
    pub async fn renew(&self) -> Result<(), Error> {
        self.handle.renew().await
    }

    /// Ends the lease: the work came to its end, well or badly.
    ///
    /// Tried until it is settled or the lease is over. It counts while nobody has taken the row, even if the lease has run out.
    /// On PostgreSQL, under [`Rules::Recover`](crate::Rules::Recover) without a window and without `article_clients`, it does not wait for the server's
    /// disk: should the server crash within the next moments, the claim stands again, and keeps others out until its lease ends.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, so that nothing was written. Any other error says by its
    /// [`Certainty`](crate::Certainty) what is known: the server refused the ending to the last, and nothing was changed; or
    /// no answer came before the lease was over, and it may have been recorded.
    ///
    /// # Cancel safety
    /// Dropped, the key is released or abandoned.
    pub async fn release(self, status: Status) -> Result<(), Error> {
        self.handle.release(status).await
    }

    /// Ends the lease of work that was stopped: under [`Rules::Recover`](crate::Rules::Recover) the next one takes over
    /// at once, under [`Rules::Article`](crate::Rules::Article) the key waits for an operator, as after a crash.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim had been lost before; [`Error::TimedOut`] if it is not known whether this ended it.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub async fn abandon(self) -> Result<(), Error> {
        self.handle.abandon().await
    }
}
