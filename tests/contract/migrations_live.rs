//! A table that is completed while clients use it.

use std::time::{Duration, Instant};

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::{Error, Status};
use sqlx::Transaction;
use tokio::time::{sleep, timeout};

use crate::child;

harness::tests!(
    servers[DIRECT](
        clients_go_on_while_a_transaction_is_in_the_way,
        a_program_that_is_killed_leaves_nothing_that_waits
    ),
    servers[DIRECT].long(a_transaction_that_stays_in_the_way_is_named)
);

/// How long a client waits at most behind a statement that waits for a lock: a second, and the time
/// of a busy machine.
const BEARABLE: Duration = Duration::from_secs(3);

/// The number of statements that wait for a lock on a table.
async fn waiting<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let count = match db.server.name {
        "postgres" => {
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        }
        "mysql" => {
            "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state LIKE 'Waiting for table%'"
        }
        _ => {
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state LIKE 'Waiting for table%'"
        }
    };
    db.number(count).await.unwrap()
}

/// Takes a column from the table, and begins a transaction that has read a row and does no more.
async fn in_the_way<DB: TestDatabase>(db: &TestDb<DB>) -> Transaction<'static, DB> {
    acquired(db.lock().try_acquire("k").await).release(Status::Succeeded).await.unwrap();
    db.execute("ALTER TABLE t_resource_lock DROP COLUMN confirms").await;
    let mut tx = db.pool_of(1).await.begin().await.unwrap();
    DB::execute_on(&mut tx, "SELECT key_resource FROM t_resource_lock").await.unwrap();
    tx
}

async fn is_complete<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    let columns = "SELECT COUNT(*) FROM information_schema.columns WHERE table_name = 't_resource_lock' AND column_name = 'confirms'";
    let place = if db.server.name == "postgres" { "current_schema()" } else { "DATABASE()" };
    db.number(&format!("{columns} AND table_schema = {place}")).await == Some(1)
}

async fn clients_go_on_while_a_transaction_is_in_the_way<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let pool = db.pool_of(2).await;
    let migrating = tokio::spawn(async move { rowlock::migrate(&pool).await });
    // A client of the article. While an attempt waits, it waits behind that.
    let client = async {
        let (mut conn, mut longest) = (db.pool_of(1).await.acquire().await.unwrap(), Duration::ZERO);
        let update = "UPDATE t_resource_lock SET client_ip = 'another' WHERE key_resource = 'k'";
        loop {
            let began = Instant::now();
            assert_eq!(DB::execute_on(&mut conn, update).await.unwrap(), 1);
            longest = longest.max(began.elapsed());
            assert!(longest < BEARABLE, "a client waited for {longest:?}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let attempts = async {
        for _ in 0..3 {
            eventually("an attempt waits", || async { waiting(&db).await > 0 }).await;
            eventually("it gives up", || async { waiting(&db).await == 0 }).await;
        }
    };
    tokio::select! {
        never = client => never,
        () = attempts => {}
    }
    assert!(!migrating.is_finished() && !is_complete(&db).await);
    tx.rollback().await.unwrap();
    timeout(PATIENCE, migrating).await.unwrap().unwrap().unwrap();
    assert!(is_complete(&db).await);
}

async fn a_program_that_is_killed_leaves_nothing_that_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let mut program = child::start(&db, "migrate", "", std::path::Path::new(""));
    eventually("it waits", || async { waiting(&db).await > 0 }).await;
    program.kill().await.unwrap();
    let began = Instant::now();
    eventually("nothing waits", || async { waiting(&db).await == 0 }).await;
    assert!(began.elapsed() < BEARABLE, "{:?}", began.elapsed());
    tx.rollback().await.unwrap();
    rowlock::migrate(&db.pool).await.unwrap();
    assert!(is_complete(&db).await);
}

async fn a_transaction_that_stays_in_the_way_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let tx = in_the_way(&db).await;
    let error = rowlock::migrate(&db.pool).await.unwrap_err();
    let Error::InUse { by, .. } = &error else { panic!("{error:?}") };
    assert!(by.contains(" of user "), "{by}");
    assert!(db.server.name == "mariadb" || by.contains("SELECT key_resource FROM t_resource_lock"), "{by}");
    tx.rollback().await.unwrap();
    rowlock::migrate(&db.pool).await.unwrap();
}
