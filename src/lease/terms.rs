//! The terms of a handle, with what its leases and waiting tasks share.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::TimeDelta;

use crate::{
    batch::batcher::Batcher,
    lease::{releases::Releases, renewer::Renewer},
    queue::local::LocalQueues,
    rules::Terms,
    store::Database,
};

/// The terms of a handle, and what its leases and waiting tasks use. Handles of one lock on equal
/// terms share it.
pub(crate) struct KeyTerms<DB: Database> {
    /// Their lease is that of the row: the holder trusts it less the lock-delay.
    pub terms: Terms,
    pub fair: bool,
    /// How long a key stays closed after a holder that has not ended its claim had to stop.
    pub lock_delay: TimeDelta,
    /// How long one statement may take.
    pub time_limit: Duration,
    /// The queues of this process. Tasks on other terms have others, because a refusal of one task
    /// need not apply to them.
    pub queues: Arc<LocalQueues>,
    /// The longest minimum interval of any handle of the lock, so far.
    pub longest_interval: Arc<Mutex<TimeDelta>>,
    pub renewer: Arc<Renewer<DB>>,
    pub releases: Arc<Batcher<DB, Releases>>,
}
