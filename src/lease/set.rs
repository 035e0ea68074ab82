//! Several keys, held as one.

use std::{fmt, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, PreviousClaim, Token},
    lease::handle::LeaseHandle,
    rules::Status,
    store::Database,
};

/// Several keys that are held together: one lease, one token for each key. The loss of one is the loss of all.
///
/// It is renewed, released and abandoned like a [`Lease`](crate::Lease), all keys in one statement. When one of them is lost,
/// the others are abandoned in the background.
pub struct LeaseSet<DB: Database> {
    handle: LeaseHandle<DB>,
    priors: Vec<Option<PreviousClaim>>,
}

impl<DB: Database> fmt::Debug for LeaseSet<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseSet").field("claims", &self.claims()).field("time_left", &self.time_left()).finish()
    }
}

impl<DB: Database> LeaseSet<DB> {
    pub(crate) fn new(handle: LeaseHandle<DB>, priors: Vec<Option<PreviousClaim>>) -> Self {
        Self { handle: handle.heard(), priors }
    }

    /// The claims, in the order of their keys; [confirm](crate::ResourceLock::confirm) them in this order, so that no two transactions deadlock.
    pub fn claims(&self) -> &[Claim] {
        self.handle.claims()
    }

    /// The fencing token of one key; `None` if it is not in the set.
    pub fn token(&self, key: &str) -> Option<Token> {
        self.claims().iter().find(|claim| claim.key.as_str() == key).map(|claim| claim.token)
    }

    /// The claims that were taken over, with those that held the keys before and did not end.
    pub fn taken_over_from(&self) -> impl Iterator<Item = (&Claim, &PreviousClaim)> {
        self.claims().iter().zip(&self.priors).filter_map(|(claim, prior)| Some((claim, prior.as_ref()?)))
    }

    /// As [`Lease::reenter`](crate::Lease::reenter).
    ///
    /// # Errors
    /// [`Error::Lost`] if a claim is lost.
    pub fn reenter(&self) -> Result<Self, Error> {
        Ok(Self { handle: self.handle.reenter()?, priors: self.priors.clone() })
    }

    /// Whether all keys are known to be held at this moment, by this machine's monotonic clock.
    pub fn is_held(&self) -> bool {
        self.handle.is_held()
    }

    /// How long they are held for sure, unless they are renewed; zero when one is lost.
    pub fn time_left(&self) -> Duration {
        self.handle.time_left()
    }

    /// Waits until one of them is lost, as [`Lease::lost`](crate::Lease::lost).
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn lost(&self) {
        self.handle.lost().await;
    }

    /// As [`Lease::cancellation_token`](crate::Lease::cancellation_token).
    pub fn cancellation_token(&self) -> CancellationToken {
        self.handle.cancellation_token()
    }

    /// Prolongs the lease now; in the background that happens at every third of it.
    ///
    /// # Errors
    /// As [`Lease::renew`](crate::Lease::renew); [`Error::Lost`] names the key that was lost.
    ///
    /// # Cancel safety
    /// Dropped, the lease may have been prolonged without this end knowing.
    pub async fn renew(&self) -> Result<(), Error> {
        self.handle.renew().await
    }

    /// Ends the lease: the work came to its end, well or badly. All keys get this status.
    ///
    /// # Errors
    /// As [`Lease::release`](crate::Lease::release). If one key was lost, the others may have been released all the same.
    ///
    /// # Cancel safety
    /// Dropped, the keys are released or abandoned.
    pub async fn release(self, status: Status) -> Result<(), Error> {
        self.handle.release(status).await
    }

    /// Ends the lease of work that was stopped, as [`Lease::abandon`](crate::Lease::abandon).
    ///
    /// # Errors
    /// As [`Lease::abandon`](crate::Lease::abandon).
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub async fn abandon(self) -> Result<(), Error> {
        self.handle.abandon().await
    }
}
