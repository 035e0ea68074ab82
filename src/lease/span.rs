//! How long leases last: in their rows, and for their holders.
//!
//! The lease of a row is the lease of the handle and its lock-delay. The holder relies on the first
//! part alone. A release frees the key at once, and so do a forced release, an abandonment by a
//! caller whose work has stopped, and a transaction that failed. A lease that is dropped keeps the
//! key closed for the lock-delay, because its work may still run.
//!
//! One statement renews the leases of one span, because their holders rely on the same part of it.

use std::time::Duration;

use chrono::TimeDelta;

use crate::{
    pacing::{self, Backoff},
    rules::Terms,
    session::time::Instant,
    store::Change,
};

/// The duration of leases. Those of one span are renewed by one statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    /// How long a holder may trust a lease. The row's lease is longer by the lock-delay.
    pub lease: Duration,
    pub lock_delay: TimeDelta,
}

impl Span {
    pub fn of(&Terms { lease, lock_delay, .. }: &Terms) -> Self {
        Self { lease: (lease - lock_delay).to_std().unwrap_or_default(), lock_delay }
    }

    pub fn renewal(self) -> Change {
        Change::Renew(TimeDelta::from_std(self.of_row()).unwrap_or(TimeDelta::MAX))
    }

    /// Returns the whole lease as the row keeps it.
    pub fn of_row(self) -> Duration {
        self.lease + self.lock_delay.to_std().unwrap_or_default()
    }

    /// Returns when a claim with `left` at `sent` counts as lost. The deadline is a little early,
    /// for clocks that diverge and timers that fire late.
    pub fn deadline(self, sent: Instant, left: Duration) -> Instant {
        sent + pacing::trusted(left, self.lease)
    }

    /// Returns how long a whole lease counts on the client's side.
    pub fn local(self) -> Duration {
        pacing::trusted(self.lease, self.lease)
    }

    /// Returns the pauses between attempts to end a claim.
    pub fn pauses(self) -> Backoff {
        Backoff::up_to(pacing::longest_retry_pause(self.lease))
    }
}
