//! Waiting for keys: in order within this process and across processes, with a wakeup when a key is
//! released.

pub(crate) mod listener;
pub(crate) mod local;
mod places;
pub(crate) mod position;
pub(crate) mod tickets;
pub(crate) mod wakeups;

use std::sync::Arc;
use tokio_util::task::TaskTracker;

use crate::{
    queue::{listener::Listener, tickets::Tickets, wakeups::Wakeups},
    store::{Database, pools::Connections},
};

/// The state that the waiting tasks of one lock share.
pub(crate) struct Waiting<DB: Database> {
    pub wakeups: Arc<Wakeups>,
    pub tickets: Arc<Tickets<DB>>,
    pub listener: Arc<Listener<DB>>,
}

impl<DB: Database> Waiting<DB> {
    pub fn new(requests: &Connections<DB>, renewals: &Connections<DB>, tracker: TaskTracker) -> Self {
        let wakeups = Arc::<Wakeups>::default();
        let listener = Listener::new(requests.application().clone(), wakeups.clone());
        Self { tickets: Tickets::new(requests, renewals, tracker), listener, wakeups }
    }
}
