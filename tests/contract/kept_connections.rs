//! Connections are kept between statements that follow each other, and return to their pool soon
//! after.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::{LeaseLock, Status};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    runtime::Builder,
    task::block_in_place,
    time::{sleep, timeout},
};

harness::tests!(
    everywhere(
        a_connection_is_kept_for_the_next_statement,
        a_kept_connection_returns_to_the_applications_pool,
        the_applications_only_connection_is_not_kept
    ),
    servers(a_connection_of_a_runtime_that_stood_still_is_not_used)
);

const CYCLES: usize = 20;

/// Returns a pool, and how often a connection has returned to it or to a pool made like it.
async fn counting<DB: TestDatabase>(db: &TestDb<DB>, connections: u32) -> (Pool<DB>, Arc<AtomicUsize>) {
    let returned = Arc::new(AtomicUsize::new(0));
    let counted = returned.clone();
    let options = PoolOptions::<DB>::new().max_connections(connections).test_before_acquire(false);
    let options = options.after_release(move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(true) })
    });
    (options.connect(&db.url).await.unwrap(), returned)
}

async fn cycles<DB: TestDatabase>(lock: &LeaseLock<DB>) {
    for _ in 0..CYCLES {
        acquired(lock.try_acquire("k").await).release(Status::Succeeded).await.unwrap();
    }
}

/// A busy machine may leave a connection unused for longer than it is kept, so the cycles are
/// repeated.
async fn a_connection_is_kept_for_the_next_statement<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, returned) = counting(&db, 4).await;
    let builder = || LeaseLock::builder(pool.clone());
    for lock in [builder(), builder().share_pool()].map(|lock| lock.build().unwrap()) {
        cycles(&lock).await;
        eventually("few of the statements return their connection", async || {
            let before = returned.load(Ordering::Relaxed);
            cycles(&lock).await;
            returned.load(Ordering::Relaxed) - before < CYCLES
        })
        .await;
    }
}

async fn a_kept_connection_returns_to_the_applications_pool<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, _) = counting(&db, 2).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    cycles(&lock).await;
    eventually("all are idle", async || pool.num_idle() == pool.size() as usize).await;
    cycles(&lock).await;
    timeout(PATIENCE, pool.close()).await.expect("nothing is kept from a pool that is closed");
}

/// The application waits for no more than one statement, though there is always a next one.
async fn the_applications_only_connection_is_not_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, returned) = counting(&db, 1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let application = async {
        for _ in 0..CYCLES {
            drop(pool.acquire().await.unwrap());
        }
    };
    timeout(PATIENCE, async { tokio::join!(cycles(&lock), application) }).await.expect("both go on");
    eventually("every statement returned it", async || returned.load(Ordering::Relaxed) >= 3 * CYCLES).await;
    timeout(PATIENCE, pool.close()).await.expect("nothing is kept from a pool that is closed");
}

/// A runtime that is not driven returns no connection, and the server or a firewall may have
/// dropped the connection without a word by the time it is driven again.
async fn a_connection_of_a_runtime_that_stood_still_is_not_used<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(4)).time_limit(PATIENCE / 4).build().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    block_in_place(|| runtime.block_on(cycles(&lock)));
    sleep(Duration::from_millis(1100)).await;
    proxy.silence();
    let attempt = block_in_place(|| runtime.block_on(lock.try_acquire("k")));
    acquired(attempt).detach();
    runtime.shutdown_background();
}
