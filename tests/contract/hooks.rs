//! What the hooks of the application's pool leave behind on a connection.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{LeaseLock, Reason, Retry, RunError, VersionedTable};
use sqlx::{Pool, pool::PoolOptions};
use tokio::time::sleep;

use crate::ledger::{COLUMNS, ledger, row};

harness::tests!(
    servers(a_transaction_that_a_hook_began_undoes_nothing),
    postgres[DIRECT](a_hook_that_begins_a_transaction_is_named, a_shared_pool_without_a_usable_connection_is_reported)
);

/// Longer than a connection is kept between statements.
const KEPT: Duration = Duration::from_millis(50);

const HOOKS: &str = "hooks (after_connect, before_acquire)";

pub fn cause(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A pool whose connections are inside a transaction when they are opened, or when they are
/// borrowed again.
async fn begun<DB: TestDatabase>(db: &TestDb<DB>, when_opened: bool) -> Pool<DB> {
    let options = PoolOptions::<DB>::new().max_connections(2);
    let options = match when_opened {
        true => options.after_connect(|conn, _| Box::pin(async { DB::execute_on(conn, "BEGIN").await.map(drop) })),
        false => {
            options.before_acquire(|conn, _| Box::pin(async { DB::execute_on(conn, "BEGIN").await.map(|_| true) }))
        }
    };
    options.connect(&db.url).await.unwrap()
}

async fn a_transaction_that_a_hook_began_undoes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let other = db.lock();
    let mut balance = 100;
    for pool in [begun(&db, true).await, begun(&db, false).await] {
        let (lock, table) = (LeaseLock::new(pool.clone()), VersionedTable::new(pool.clone(), COLUMNS));
        // On PostgreSQL, a connection that is always in a transaction is never lent.
        let shares = (db.server.name != "postgres").then(|| LeaseLock::builder(pool.clone()).share_pool());
        let shared = shares.map(|builder| builder.build().unwrap());
        for _ in 0..3 {
            for lock in [Some(&lock), shared.as_ref()].into_iter().flatten() {
                let lease = acquired(lock.try_acquire("k").await);
                assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Held);
                sleep(KEPT).await;
                lease.renew().await.unwrap();
                lease.release().await.unwrap();
                acquired(other.try_acquire("k").await).release().await.unwrap();
            }
            match table.deduct("a", 1).await {
                Ok(_) => balance -= 1,
                // The transaction may have prepared the connection, and would have to be committed.
                Err(error) => {
                    assert_eq!(db.server.name, "postgres");
                    assert!(cause(&error).contains(HOOKS), "{error}: {}", cause(&error));
                }
            }
            assert_eq!(row(&db).await.0, balance);
            sleep(KEPT).await;
        }
    }
}

/// Each connection of the application's pool is inside a transaction, so that none can begin.
async fn a_hook_that_begins_a_transaction_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let opened = Arc::new(AtomicU32::new(0));
    let counted = opened.clone();
    let options = PoolOptions::<DB>::new().after_connect(move |conn, _| {
        counted.fetch_add(1, SeqCst);
        Box::pin(async { DB::execute_on(conn, "BEGIN").await.map(drop) })
    });
    let lock = LeaseLock::new(options.connect(&db.url).await.unwrap());
    let lock = lock.retry(Retry { within: PATIENCE, ..Retry::default() });
    let done = lock.transaction("k", async |_| -> Result<(), Infallible> { panic!("it does not begin") }).await;
    let Err(RunError::Other(error)) = done else { panic!("{done:?}") };
    assert!(cause(&error).contains(HOOKS), "{error}: {}", cause(&error));
    // It pauses between two connections.
    assert!(opened.load(SeqCst) < 100, "{opened:?}");
}

/// Each connection of a pool that is shared is refused by the server, or in a transaction.
async fn a_shared_pool_without_a_usable_connection_is_reported<DB: TestDatabase>(db: TestDb<DB>) {
    for (hook, told) in [("BEGIN; SELECT 1 / 0", "current transaction is aborted"), ("BEGIN", HOOKS)] {
        let opened = Arc::new(AtomicU32::new(0));
        let counted = opened.clone();
        let options = PoolOptions::<DB>::new().max_connections(2).after_connect(move |conn, _| {
            counted.fetch_add(1, SeqCst);
            Box::pin(async move {
                let _ = DB::execute_on(conn, hook).await; // the server may refuse it
                Ok(())
            })
        });
        let lock = LeaseLock::builder(options.connect_lazy(&db.url).unwrap()).share_pool().build().unwrap();
        let error = lock.try_acquire("k").await.unwrap_err();
        assert!(cause(&error).contains(told), "{error}: {}", cause(&error));
        assert!(opened.load(SeqCst) < 100, "{opened:?}");
    }
}
