//! Several keys under one lease.

use std::{fmt, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    error::Error,
    key::{Claim, PreviousClaim, Token},
    lease::handle::LeaseHandle,
    rules::Status,
    store::Database,
};

/// Several keys that are held together: one lease, with one token per key. The loss of one key is
/// the loss of all.
///
/// The set is renewed, released and abandoned like a [`Lease`](crate::Lease), all keys in one
/// statement. When one key is lost, the others are abandoned in the background.
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

    /// Returns the claims in key order. [Confirm](crate::ResourceLock::confirm) them in this order,
    /// so that no two transactions deadlock.
    pub fn claims(&self) -> &[Claim] {
        self.handle.claims()
    }

    /// Returns the fencing token of one key, or `None` if the key is not in the set.
    pub fn token(&self, key: &str) -> Option<Token> {
        self.claims().iter().find(|claim| claim.key.as_str() == key).map(|claim| claim.token)
    }

    /// Returns the claims that were taken over, each with the previous claim on its key, which its
    /// holder did not end.
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

    /// Returns whether all keys are known to be held at this moment, by this machine's monotonic
    /// clock.
    pub fn is_held(&self) -> bool {
        self.handle.is_held()
    }

    /// Returns how long the keys are certain to be held unless they are renewed; zero once one is
    /// lost.
    pub fn time_left(&self) -> Duration {
        self.handle.time_left()
    }

    /// Waits until one of the keys is lost, as [`Lease::lost`](crate::Lease::lost).
    ///
    /// # Cancel safety
    /// No state is lost if the future is dropped.
    pub async fn lost(&self) {
        self.handle.lost().await;
    }

    /// As [`Lease::cancellation_token`](crate::Lease::cancellation_token).
    pub fn cancellation_token(&self) -> CancellationToken {
        self.handle.cancellation_token()
    }

    /// Renews the lease now. The background task renews it at every third of its duration.
    ///
    /// # Errors
    /// As [`Lease::renew`](crate::Lease::renew); [`Error::Lost`] names the key that was lost.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease may have been renewed although no reply arrived.
    pub async fn renew(&self) -> Result<(), Error> {
        self.handle.renew().await
    }

    /// Ends the lease of work that has completed, successfully or not. All keys get this status.
    ///
    /// # Errors
    /// As [`Lease::release`](crate::Lease::release). If one key was lost, the others may
    /// nevertheless have been released.
    ///
    /// # Cancel safety
    /// If the future is dropped, the keys are released or abandoned.
    pub async fn release(self, status: Status) -> Result<(), Error> {
        self.handle.release(status).await
    }

    /// Ends the lease of work that was stopped, as [`Lease::abandon`](crate::Lease::abandon).
    ///
    /// # Errors
    /// As [`Lease::abandon`](crate::Lease::abandon).
    ///
    /// # Cancel safety
    /// If the future is dropped, the abandonment continues in the background.
    pub async fn abandon(self) -> Result<(), Error> {
        self.handle.abandon().await
    }
}
