//! Statements that wait before they are executed, behind a metadata lock as `ALTER TABLE` takes it.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::LeaseLock;
use sqlx::pool::PoolOptions;
use tokio::{task::JoinSet, time::sleep};

harness::tests!(
    mysql_and_mariadb(
        a_claim_that_was_held_up_holds_for_a_whole_lease,
        a_sign_of_life_that_was_held_up_keeps_its_place,
        renewals_behind_a_metadata_lock_may_run_in_any_order
    ),
    mysql_and_mariadb.each(a_renewal_that_was_held_up_moves_no_lease_back)
);

const LEASE: Duration = Duration::from_secs(30);

/// Returns a lock whose statements start 20 s before they are executed: `timestamp` moves the start
/// of a statement, and not `SYSDATE`. A session of the lock's own would set `timestamp` back.
async fn held_up<DB: TestDatabase>(db: &TestDb<DB>) -> LeaseLock<DB> {
    let options = PoolOptions::new().max_connections(4).test_before_acquire(false).after_connect(|conn, _| {
        Box::pin(async { DB::execute_on(conn, "SET timestamp = UNIX_TIMESTAMP(SYSDATE(6)) - 20").await.map(drop) })
    });
    LeaseLock::builder(options.connect(&db.url).await.unwrap()).share_pool().build().unwrap()
}

/// Returns how many milliseconds are left until the time in `column`, by the database's clock.
async fn left<DB: TestDatabase>(db: &TestDb<DB>, column: &str, table: &str) -> i64 {
    let micros = format!("SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {column}) FROM {table}");
    db.number(&micros).await.unwrap() / 1000
}

async fn a_renewal_that_was_held_up_moves_no_lease_back<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock_for(LEASE).try_acquire("k").await);
    let late = held_up(&db).await;
    for (seconds, least) in [(30, 25_000), (60, 55_000), (10, 40_000)] {
        let late = late.clone().lease(Duration::from_secs(seconds));
        late.attach("k", lease.claim().holder).await.unwrap().detach();
        let left = left(&db, "expires_at", "t_resource_lock").await;
        assert!(left > least, "{left} ms of {seconds} s");
    }
    lease.detach();
}

/// A claim whose reply was lost is sent again. The first request may be executed after the second.
async fn a_claim_that_was_held_up_holds_for_a_whole_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let late = held_up(&db).await.lease(LEASE);
    for _ in 0..2 {
        acquired(late.try_acquire("k").await).detach();
        let left = left(&db, "expires_at", "t_resource_lock").await;
        assert!(left > 25_000, "{left} ms");
        db.set("k", &format!("expires_at = {}", DB::ago(60_000))).await;
    }
}

async fn a_sign_of_life_that_was_held_up_keeps_its_place<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock_for(LEASE).try_acquire("k").await);
    let late = held_up(&db).await.fair(true);
    let waiter = harness::spawn({
        let late = late.clone();
        async move { late.acquire("k", Duration::from_secs(60)).await }
    });
    let place = async || db.cell("max(alive_until)", "t_resource_lock_queue").await;
    eventually("it has a place", || async { place().await.is_some() }).await;
    for _ in 0..2 {
        let kept = left(&db, "alive_until", "t_resource_lock_queue").await;
        assert!(kept > 4_000, "{kept} ms");
        let before = place().await;
        eventually("a heartbeat", || async { place().await != before }).await;
    }
    waiter.abort();
    lease.abandon().await.unwrap();
    assert!(late.shutdown(PATIENCE).await);
}

/// Whichever renewal is executed last, the row's lease ends no sooner than the holder's deadline.
async fn renewals_behind_a_metadata_lock_may_run_in_any_order<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock_for(Duration::from_secs(9)).try_acquire("k").await);
    let mut ddl = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut ddl, "LOCK TABLES t_resource_lock WRITE").await.unwrap();
    let mut renewals = JoinSet::new();
    // A renewal without an answer is sent on another connection as well, and there are at most
    // four.
    for sent in 1..=3 {
        let handle = lease.reenter().unwrap();
        renewals.spawn(harness::task(async move {
            // Some find the row locked by another transaction.
            let _ = handle.renew().await;
        }));
        eventually("it waits", || async { waiting(&db).await >= sent }).await;
        sleep(Duration::from_millis(300)).await;
    }
    DB::execute_on(&mut ddl, "UNLOCK TABLES").await.unwrap();
    renewals.join_all().await;
    let row = left(&db, "expires_at", "t_resource_lock").await;
    let counted = i64::try_from(lease.time_left().as_millis()).unwrap();
    assert!(counted > 0 && counted <= row, "the holder counts on {counted} ms, the row on {row} ms");
    lease.abandon().await.unwrap();
}

/// Returns how many statements wait for the table.
async fn waiting<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let sql = match db.server.name {
        "postgres" => {
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        }
        "mysql" => {
            "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state LIKE 'Waiting for table%'"
        }
        _ => {
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state LIKE 'Waiting for table%'"
        }
    };
    db.number(sql).await.unwrap()
}
