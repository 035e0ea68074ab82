//! What the handles of one lock share: settings, connections and background work.

use std::{
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use chrono::TimeDelta;
use tokio::{sync::OnceCell, time::Instant};

use crate::{
    batch::batcher::{Batcher, Turn},
    detach::tracker,
    error::Error,
    lease::{
        claims::Claims, creates::Creates, left_behind::LeftBehind, one_reader::OneReader, readers::AllReaders,
        reads::Reads, releases::Releases, renewer::Renewers, terms::KeyTerms,
    },
    queue::Waiting,
    rules::Terms,
    schema::Table,
    store::{Database, pools::Connections},
    sync::lock,
};

/// The settings of a lock.
pub(crate) struct Settings<DB: Database> {
    /// The connections for claims, releases and reads.
    pub pool: Connections<DB>,
    /// The connections for renewals and abandonments.
    pub renewals: Connections<DB>,
    pub time_limit: Duration,
    pub batching: bool,
}

pub(crate) struct Shared<DB: Database> {
    pub settings: Settings<DB>,
    table: Arc<OnceCell<Table>>,
    reading: OneReader,
    pub claims: Arc<Batcher<DB, Claims>>,
    pub creates: Arc<Batcher<DB, Creates>>,
    releases: Arc<Batcher<DB, Releases>>,
    pub reads: Arc<Batcher<DB, Reads>>,
    pub readers: AllReaders<DB>,
    pub waiting: Waiting<DB>,
    renewers: Arc<Renewers<DB>>,
    pub left_behind: Arc<LeftBehind>,
    longest_interval: Arc<Mutex<TimeDelta>>,
    /// The terms of the handles that exist.
    terms: Mutex<Vec<Weak<KeyTerms<DB>>>>,
}

impl<DB: Database> Shared<DB> {
    pub fn new(settings: Settings<DB>) -> Arc<Self> {
        let Settings { pool, renewals, batching, .. } = &settings;
        let tracker = tracker();
        let waiting = Waiting::new(pool, renewals, tracker.clone());
        let turn = (DB::ONE_WRITER && *batching).then(Arc::<Turn>::default);
        let (table, left_behind) = (Arc::<OnceCell<Table>>::default(), Arc::<LeftBehind>::default());
        let claims = Claims { table: table.clone(), left_behind: left_behind.clone() };
        let claims = Batcher::new(claims, pool.clone(), tracker.clone(), *batching, &turn);
        let creates = Batcher::new(Creates { table: table.clone() }, pool.clone(), tracker.clone(), *batching, &turn);
        let releases = Batcher::new(Releases { table: table.clone() }, pool.clone(), tracker.clone(), *batching, &turn);
        let reads = Batcher::new(Reads { table: table.clone() }, pool.clone(), tracker.clone(), *batching, &None);
        let renewers =
            Renewers::new(renewals.clone(), pool.clone(), waiting.wakeups.clone(), tracker, left_behind.clone());
        Arc::new(Self {
            settings,
            table,
            reading: OneReader::default(),
            claims,
            creates,
            releases,
            reads,
            readers: AllReaders::default(),
            waiting,
            renewers,
            left_behind,
            longest_interval: Arc::default(),
            terms: Mutex::default(),
        })
    }

    /// Returns the terms of a handle, the same for handles on equal terms.
    pub fn key_terms(&self, terms: Terms, fair: bool, lock_delay: TimeDelta) -> Arc<KeyTerms<DB>> {
        let mut longest = lock(&self.longest_interval);
        *longest = terms.min_interval.max(*longest);
        drop(longest);
        self.key_terms_of_own_interval(terms, fair, lock_delay)
    }

    /// Returns the terms of a handle whose minimum interval concerns a key of its own, so that it
    /// does not count as an interval of other keys.
    pub fn key_terms_of_own_interval(&self, terms: Terms, fair: bool, lock_delay: TimeDelta) -> Arc<KeyTerms<DB>> {
        let mut known = lock(&self.terms);
        known.retain(|key_terms| key_terms.strong_count() > 0);
        let equal = |key_terms: &Arc<KeyTerms<DB>>| {
            key_terms.terms == terms && key_terms.fair == fair && key_terms.lock_delay == lock_delay
        };
        if let Some(key_terms) = known.iter().filter_map(Weak::upgrade).find(equal) {
            return key_terms;
        }
        let key_terms = Arc::new(KeyTerms {
            renewer: self.renewers.of(terms.lease, lock_delay),
            releases: self.releases.clone(),
            time_limit: self.settings.time_limit,
            queues: Arc::default(),
            longest_interval: self.longest_interval.clone(),
            terms,
            fair,
            lock_delay,
        });
        known.push(Arc::downgrade(&key_terms));
        key_terms
    }

    /// Waits for at most `limit` until no background work is left. Returns whether none is, and no
    /// claim was left behind.
    pub async fn settled(&self, limit: Duration) -> bool {
        self.waiting.tickets.ensure_task();
        self.renewers.settled(limit).await
    }

    /// Returns the table's shape, which only the first call reads.
    pub async fn known_table(&self, limit: Instant) -> Result<&Table, Error> {
        let Settings { pool, time_limit, .. } = &self.settings;
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let reading = self.reading.turn(limit, || self.table.initialized()).await;
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let table = Table::read(pool, limit, *time_limit).await?;
        let table = self.table.get_or_init(async || table).await;
        drop(reading);
        Ok(table)
    }
}
