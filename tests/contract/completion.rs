//! Sessions of MySQL and MariaDB whose COMMIT and ROLLBACK begin the next transaction, or end the
//! session (`completion_type`), and sessions that are read-only.

use std::{convert::Infallible, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{LeaseLock, Reason, ResourceLock, RunError, VersionedTable, strategy::ResourceLockExt};
use sqlx::{Pool, pool::PoolOptions};
use tokio::time::{sleep, timeout};

use crate::{
    bank::{LEASE, OPENING, VERSION, accounts, balance, version, version_lock, write_in},
    ledger::COLUMNS,
};

harness::tests!(mysql_and_mariadb(
    a_claim_is_not_rolled_back_under_any_completion_type,
    a_balance_is_what_was_returned_under_any_completion_type,
    a_transaction_is_committed_under_any_completion_type,
    a_read_only_session_begins_nothing
));

pub const TYPES: [&str; 2] = ["CHAIN", "RELEASE"];

/// Longer than a connection is kept between statements.
const KEPT: Duration = Duration::from_millis(50);

/// A pool whose sessions have this `completion_type`.
pub async fn pool<DB: TestDatabase>(db: &TestDb<DB>, completion: &'static str) -> Pool<DB> {
    let options = PoolOptions::<DB>::new().max_connections(2).after_connect(move |conn, _| {
        Box::pin(async move { DB::execute_on(conn, &format!("SET completion_type = '{completion}'")).await.map(drop) })
    });
    options.connect(&db.url).await.unwrap()
}

/// The connection is checked before each claim. Its check must not begin a transaction, in which
/// the claim would be made and undone by the next check.
async fn a_claim_is_not_rolled_back_under_any_completion_type<DB: TestDatabase>(db: TestDb<DB>) {
    let other = db.lock();
    for completion in TYPES {
        let pool = pool(&db, completion).await;
        for lock in [LeaseLock::new(pool.clone()), LeaseLock::builder(pool.clone()).share_pool().build().unwrap()] {
            let lease = acquired(lock.try_acquire("k").await);
            for _ in 0..3 {
                assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Held, "{completion}");
                sleep(KEPT).await;
                lease.renew().await.unwrap();
            }
            lease.release().await.unwrap();
            let set = lock.try_acquire_all(["a", "b"]).await.unwrap().acquired().unwrap();
            assert_eq!(refused(other.try_acquire("b").await).reason, Reason::Held, "{completion}");
            sleep(KEPT).await;
            set.release().await.unwrap();
            for key in ["k", "a", "b"] {
                acquired(other.try_acquire(key).await).release().await.unwrap();
            }
        }
    }
}

/// Also under a trigger, with which each change is a transaction of several statements.
async fn a_balance_is_what_was_returned_under_any_completion_type<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let mut expected = OPENING;
    for trigger in [None, Some("CREATE TRIGGER seen BEFORE UPDATE ON account FOR EACH ROW SET @seen = 1")] {
        if let Some(trigger) = trigger {
            db.execute(trigger).await;
        }
        for completion in TYPES {
            let table = VersionedTable::<DB>::new(pool(&db, completion).await, COLUMNS);
            for table in [table.clone(), table.share_pool()] {
                for _ in 0..3 {
                    expected += 50;
                    assert_eq!(table.deposit(VERSION, 50).await.unwrap().value, expected, "{completion}, {trigger:?}");
                    assert_eq!(balance(&db, VERSION).await, expected, "{completion}, {trigger:?}");
                    sleep(KEPT).await;
                    assert_eq!(table.read(VERSION).await.unwrap().unwrap().value, expected, "{completion}");
                }
            }
        }
    }
}

/// After the transaction, what another caller writes over the same connection commits by itself.
async fn a_transaction_is_committed_under_any_completion_type<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let mut raised = 0;
    for completion in TYPES {
        let pool = pool(&db, completion).await;
        let lease = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
        let versions = version_lock(&pool).share_pool();
        for (name, lock) in [(LEASE, &lease as &dyn ResourceLock<DB>), (VERSION, &versions)] {
            for fails in [false, true] {
                let done = lock.transaction(name, async |mut tx| {
                    write_in::<DB>(&mut tx, name, 1).await?;
                    if fails { Err(sqlx::Error::RowNotFound) } else { Ok(()) }
                });
                assert_eq!(timeout(PATIENCE, done).await.unwrap().is_err(), fails, "{name}, {completion}");
                assert_eq!(balance(&db, name).await, if fails { 5 } else { 1 }, "{name}, {completion}");
                DB::execute(&pool, &format!("UPDATE account SET balance = 5 WHERE id = '{name}'")).await.unwrap();
                assert_eq!(balance(&db, name).await, 5, "{name}, {completion}");
            }
        }
        raised += 1;
        assert_eq!(version(&db, VERSION).await, raised);
    }
}

/// A read-only session stays one: nothing begins that would have to write in it.
async fn a_read_only_session_begins_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let options = PoolOptions::<DB>::new().max_connections(1).after_connect(|conn, _| {
        Box::pin(async { DB::execute_on(conn, "SET SESSION TRANSACTION READ ONLY").await.map(drop) })
    });
    let lock = version_lock(&options.connect(&db.url).await.unwrap()).share_pool();
    let done = lock.transaction(VERSION, async |_| -> Result<(), Infallible> { panic!("it does not begin") }).await;
    let Err(RunError::Other(error)) = done else { panic!("{done:?}") };
    assert!(format!("{error:?}").contains("its transactions are read-only"), "{error:?}");
}
