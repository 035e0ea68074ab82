//! Waiting for a release of keys: in this process, and where the database notifies of it, elsewhere.

use std::{sync::Arc, time::Duration};

use crate::{
    key::Key,
    queue::{
        listener::{Listener, Listening},
        wakeups::Subscription,
    },
    session::{sessions::Sessions, time::Instant},
    store::Database,
};

/// How long requesting the notification of a release may take.
const LIMIT: Duration = Duration::from_secs(1);

/// A subscription to the releases of some keys, until it is dropped.
pub(crate) struct Releases<DB: Database> {
    listener: Arc<Listener<DB>>,
    subscription: Subscription,
    listening: Option<Listening<DB>>,
}

impl<DB: Database> Releases<DB> {
    /// Subscribes to these keys: no later release in this process is missed. It opens no
    /// connection.
    pub fn of(listener: &Arc<Listener<DB>>, keys: &Arc<[Key]>) -> Self {
        let subscription = listener.wakeups.subscribe(keys);
        Self { listener: listener.clone(), subscription, listening: None }
    }

    /// Listens to releases elsewhere from now on, and marks the rows of `keys`, where releases are
    /// notified of marked rows. Returns whether one of these keys is already free. Failures are
    /// ignored, because the caller polls in any case.
    pub async fn request(&mut self, sessions: &Sessions<DB>, keys: &[Key], until: Option<Instant>) -> bool {
        let listening = self.listening.get_or_insert_with(|| self.listener.register_waiter());
        if keys.is_empty() || !listening.needs_marks() {
            return false;
        }
        let limit = Instant::now() + LIMIT;
        let limit = until.map_or(limit, |until| limit.min(until));
        let marked = async |conn: &mut DB::Connection| DB::request_notification(conn, keys).await;
        sessions.send(limit, marked).await.is_ok_and(|free| free)
    }

    /// Waits for the next release, up to this limit. One that arrived before the call is not lost.
    pub async fn notified_before(&self, limit: Instant) {
        self.subscription.notified_before(limit).await;
    }
}
