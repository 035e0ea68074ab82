//! The terms of a handle, with what its leases and waiting tasks share.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::TimeDelta;

use crate::{
    lease::{changes::Release, renewer::Renewer, state::Span},
    queue::local::LocalQueues,
    rules::Terms,
    session::queue::Queue,
    store::Database,
};

/// The terms of a handle, and what its leases and waiting tasks use. Handles of one lock on equal
/// terms share it.
pub(crate) struct KeyTerms<DB: Database> {
    pub terms: Terms,
    /// How long one statement may take.
    pub time_limit: Duration,
    /// The queues of this process. Tasks on other terms have others, because a refusal of one task
    /// need not apply to them.
    pub queues: Arc<LocalQueues>,
    /// The longest minimum interval of any handle of the lock, so far.
    pub longest_interval: Arc<Mutex<TimeDelta>>,
    pub renewer: Arc<Renewer<DB>>,
    pub releases: Arc<Queue<DB, Release>>,
}

impl<DB: Database> KeyTerms<DB> {
    /// Returns how long its leases last.
    pub fn span(&self) -> Span {
        Span::of(&self.terms)
    }
}
