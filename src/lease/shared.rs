//! What the handles of one lock share: sessions and background work.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use chrono::TimeDelta;
use tokio::sync::OnceCell;
use tokio_util::task::TaskTracker;

use crate::{
    action::{Action, Certainty},
    error::Error,
    lease::{
        changes::Release,
        claims::{ClaimSet, Creation, RangeRead},
        readers::AllReaders,
        renewer::Renewer,
        terms::KeyTerms,
    },
    queue::{listener::Listener, tickets::Tickets},
    rules::Terms,
    schema::usable,
    session::{
        queue::Queue,
        sessions::{Purpose, Sessions},
        time::Instant,
        timers::timeout_at,
    },
    store::{
        Database,
        failure::Failure,
        schema::{CHANGES, Schema},
    },
    sync::lock,
};

pub(crate) struct Shared<DB: Database> {
    /// The sessions for claims, releases and reads.
    pub sessions: Sessions<DB>,
    /// The sessions for renewals and abandonments.
    pub renewals: Sessions<DB>,
    pub time_limit: Duration,
    pub table: Arc<OnceCell<Schema>>,
    pub claims: Arc<Queue<DB, ClaimSet<DB>>>,
    pub creates: Arc<Queue<DB, Creation>>,
    releases: Arc<Queue<DB, Release>>,
    pub reads: Arc<Queue<DB, RangeRead<DB>>>,
    pub readers: AllReaders<DB>,
    pub tickets: Arc<Tickets<DB>>,
    /// Kept, so that the next lock of the pool finds it.
    pub listener: Arc<Listener<DB>>,
    renewer: Arc<Renewer<DB>>,
    /// Tracks what runs without its caller. Shutdown waits for it.
    pub tracker: TaskTracker,
    longest_interval: Arc<Mutex<TimeDelta>>,
    /// The terms of the handles that exist.
    terms: Mutex<Vec<Weak<KeyTerms<DB>>>>,
}

impl<DB: Database> Shared<DB> {
    pub fn new(sessions: Sessions<DB>, time_limit: Duration, batching: bool) -> Arc<Self> {
        let (renewals, tracker) = (sessions.with_purpose(Purpose::Renewals), TaskTracker::new());
        // From the start, so that `wait` returns whenever nothing is left.
        tracker.close();
        let listener = Listener::of_pool(sessions.application());
        let tickets = Tickets::new(&sessions, &renewals, tracker.clone());
        let table = Arc::<OnceCell<Schema>>::default();
        let renewer = Renewer::new(renewals.clone(), listener.wakeups.clone(), tracker.clone());
        Arc::new(Self {
            claims: Queue::new(&sessions, &tracker, &table, batching),
            creates: Queue::new(&sessions, &tracker, &table, batching),
            releases: Queue::new(&sessions, &tracker, &table, batching),
            reads: Queue::new(&sessions, &tracker, &table, batching),
            sessions,
            renewals,
            time_limit,
            table,
            readers: AllReaders::default(),
            tickets,
            listener,
            renewer,
            tracker,
            longest_interval: Arc::default(),
            terms: Mutex::default(),
        })
    }

    /// Returns the terms of a handle, the same for handles on equal terms.
    pub fn key_terms(&self, terms: Terms) -> Arc<KeyTerms<DB>> {
        let mut known = lock(&self.terms);
        known.retain(|key_terms| key_terms.strong_count() > 0);
        if let Some(key_terms) = known.iter().filter_map(Weak::upgrade).find(|known| known.terms == terms) {
            return key_terms;
        }
        let key_terms = Arc::new(KeyTerms {
            renewer: self.renewer.clone(),
            releases: self.releases.clone(),
            time_limit: self.time_limit,
            queues: Arc::default(),
            longest_interval: self.longest_interval.clone(),
            terms,
        });
        known.push(Arc::downgrade(&key_terms));
        key_terms
    }

    /// Returns the table's shape, which only the first call reads. Others wait for that, so it is
    /// called within [`threads::run`](crate::session::threads::run), where nothing stops to be
    /// polled.
    pub async fn known_table(&self, limit: Instant) -> Result<&Schema, Error> {
        let Self { sessions, time_limit, .. } = self;
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        // Another caller with a later limit may be reading it.
        let reading = self.table.get_or_try_init(|| usable(sessions, limit, *time_limit));
        timeout_at(limit, reading).await.unwrap_or_else(|_| {
            let failure = Failure::NoConnection(sqlx::Error::PoolTimedOut);
            Err(failure.into_error(Action::Inspect, "the table".to_owned(), *time_limit, Certainty::NothingChanged))
        })
    }

    /// Returns whether there is a table for what operators change, as far as is known.
    pub fn keeps_changes(&self) -> bool {
        self.table.get().is_none_or(|table| table.has(CHANGES))
    }
}
