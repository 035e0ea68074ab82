//! Waiting for keys: in order within this process and across processes, with a wakeup when a key is
//! released.
//!
//! `local.rs` has the queues within a process, `tickets.rs` and `position.rs` the order across
//! processes, `wakeups.rs` the tasks that a release in this process notifies, and `listener.rs` the
//! releases elsewhere. `places.rs` says which of several keys is claimed first. The loop of a
//! waiter is `lease/wait.rs`.
//!
//! Whatever notifies a waiter is a hint: the waiter polls as it does without it.

pub(crate) mod listener;
pub(crate) mod local;
mod places;
pub(crate) mod position;
pub(crate) mod tickets;
pub(crate) mod wakeups;

use std::{sync::Arc, time::Duration};

use tokio_util::task::TaskTracker;

use crate::{
    key::Key,
    queue::{listener::Listener, tickets::Tickets},
    session::{sessions::Sessions, time::Instant},
    store::Database,
};

/// How long requesting the notification of a release may take.
const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that the waiting tasks of one lock share.
pub(crate) struct Waiting<DB: Database> {
    pub tickets: Arc<Tickets<DB>>,
    /// Kept, so that the next lock of the pool finds it.
    pub listener: Arc<Listener<DB>>,
    requests: Sessions<DB>,
}

impl<DB: Database> Waiting<DB> {
    pub fn new(requests: &Sessions<DB>, renewals: &Sessions<DB>, tracker: TaskTracker) -> Self {
        Self {
            tickets: Tickets::new(requests, renewals, tracker),
            listener: Listener::of_pool(requests.application()),
            requests: requests.clone(),
        }
    }

    /// Marks the rows of these keys, so that their releases are notified. Returns whether one of
    /// the keys is already free. Failures are ignored, because the caller polls in any
    /// case.
    pub async fn request_notification(&self, keys: &[Key], until: Option<Instant>) -> bool {
        let limit = Instant::now() + NOTIFICATION_TIMEOUT;
        let limit = until.map_or(limit, |until| limit.min(until));
        let marked = async |conn: &mut DB::Connection| DB::request_notification(conn, keys).await;
        self.requests.send(limit, marked).await.is_ok_and(|free| free)
    }
}
