//! A pool whose connections lead to different servers, as behind a balancer.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use rowlock::{Database, LeaseLock};
use sqlx::{Connection, Pool, pool::PoolOptions};
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(30);

type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

/// Each statement has a connection of its own, since a pool's only connection is not kept for the
/// next statement. Each connection after the first leads to the server that is chosen then.
pub struct Wandering<DB: Database> {
    pub pool: Pool<DB>,
    next: Arc<OnceLock<Options<DB>>>,
}

impl<DB: Database> Wandering<DB> {
    pub fn new(url: &str) -> Self {
        let (pool, next) = (Arc::new(OnceLock::<Pool<DB>>::new()), Arc::<OnceLock<Options<DB>>>::default());
        let (own, then) = (pool.clone(), next.clone());
        let options = PoolOptions::new().max_connections(1).after_release(|_, _| Box::pin(async { Ok(false) }));
        let options = options.after_connect(move |_, _| {
            if let (Some(pool), Some(options)) = (own.get(), then.get()) {
                pool.set_connect_options(options.clone());
            }
            Box::pin(async { Ok(()) })
        });
        Self { pool: pool.get_or_init(|| options.connect_lazy(url).unwrap()).clone(), next }
    }

    /// A lock on this pool.
    pub fn lock(&self) -> LeaseLock<DB> {
        LeaseLock::builder(self.pool.clone()).share_pool().build().unwrap()
    }

    /// The next statement is sent to one server, and all others to another one.
    pub async fn turn_to(&self, first: &str, then: &str) {
        let since = Instant::now();
        while self.pool.size() > 0 {
            assert!(since.elapsed() < PATIENCE, "a connection stays open");
            sleep(Duration::from_millis(20)).await;
        }
        self.pool.set_connect_options(first.parse().unwrap());
        let then = then.parse().unwrap();
        assert!(self.next.set(then).is_ok(), "it turns once");
    }
}
