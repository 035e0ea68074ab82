//! What the clones of one lock share: settings, connections and background work.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Mutex, OnceCell},
    time::{Instant, timeout_at},
};

use crate::{
    batch::batcher::Batcher,
    detach::tracker,
    error::Error,
    lease::{claims::Claims, renewer::Renewer, settings::Settings},
    queue::Waiting,
    schema::Table,
    store::Database,
};

/// How long a caller waits for another caller that is reading the table's shape.
const LOOK: Duration = Duration::from_millis(50);

pub(crate) struct Shared<DB: Database> {
    pub settings: Settings<DB>,
    pub renewer: Arc<Renewer<DB>>,
    pub table: Arc<OnceCell<Table>>,
    looking: Mutex<()>,
    pub claims: Arc<Batcher<DB, Claims<DB>>>,
    pub waiting: Waiting<DB>,
}

impl<DB: Database> Shared<DB> {
    pub fn new(settings: Settings<DB>, table: Arc<OnceCell<Table>>) -> Arc<Self> {
        let tracker = tracker();
        let waiting = Waiting::new(&settings.pool, &settings.renewals, tracker.clone());
        let renewer = Renewer::new(&settings, table.clone(), waiting.wakeups.clone(), tracker.clone());
        let (terms, time_limit) = (settings.terms.clone(), settings.time_limit);
        let claims = Claims { renewer: renewer.clone(), terms, time_limit, table: table.clone() };
        let claims = Batcher::new(claims, settings.pool.clone(), tracker, settings.batching);
        Arc::new(Self { settings, renewer, table, looking: Mutex::default(), claims, waiting })
    }

    /// Returns the table's shape, which only the first call reads.
    pub async fn known_table(&self, limit: Instant) -> Result<&Table, Error> {
        let Settings { pool, time_limit, .. } = &self.settings;
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        // One caller reads for all, but no caller waits long for another, whose future may not be
        // polled.
        let looking = timeout_at(limit.min(Instant::now() + LOOK), self.looking.lock()).await;
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let table = Table::read(pool, limit, *time_limit).await?;
        drop(looking);
        Ok(self.table.get_or_init(async || table).await)
    }
}
