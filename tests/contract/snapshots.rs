//! What a transaction with an old snapshot reports about a claim that was lost since.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{Error, LeaseLock, ResourceLock, Status, strategy::Grant};
use sqlx::{AssertSqlSafe, Pool};
use tokio::time::timeout;

use crate::isolation::pool_at;

harness::tests!(
    everywhere.each(a_claim_that_was_lost_since_the_snapshot_is_told_at_once),
    mysql_and_mariadb.each(a_claim_whose_row_is_locked_by_the_next_holder_is_told_at_once),
    mariadb(snapshot_isolation_tells_it_as_a_conflict)
);

/// How a claim is lost.
#[derive(Clone, Copy, Debug)]
enum Loss {
    TakenOver,
    Freed,
    FreedAndTaken,
}

async fn lose<DB: TestDatabase>(db: &TestDb<DB>, key: &str, loss: Loss) {
    if let Loss::Freed | Loss::FreedAndTaken = loss {
        db.lock().force_release(key, Status::Succeeded).await.unwrap().unwrap();
    } else {
        db.set(key, &format!("expires_at = {}", DB::ago(1))).await;
    }
    if let Loss::TakenOver | Loss::FreedAndTaken = loss {
        acquired(db.lock().try_acquire(key).await).detach();
    }
}

/// The error of `confirm` for a claim that is lost after the transaction has read its row.
async fn confirmed<DB: TestDatabase>(db: &TestDb<DB>, pool: &Pool<DB>, loss: Loss) -> (Grant<DB>, Error) {
    let lock = LeaseLock::builder(pool.clone()).time_limit(2 * PATIENCE).build().unwrap();
    let key = format!("{loss:?}");
    let grant = acquired(ResourceLock::acquire(&lock, &key, Duration::ZERO).await);
    let begin = match db.server.name {
        "postgres" => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        "sqlite" => "BEGIN",
        _ => "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    };
    let mut tx = pool.begin_with(AssertSqlSafe(begin)).await.unwrap();
    let look = format!("SELECT status FROM t_resource_lock WHERE key_resource = '{key}'");
    assert_eq!(DB::text_on(&mut tx, &look).await.unwrap().as_deref(), Some("P"));
    lose(db, &key, loss).await;
    let confirmed = timeout(PATIENCE, lock.confirm(grant.claim(), &mut tx)).await;
    let error = confirmed.expect("it does not go on asking to its limit").unwrap_err();
    tx.rollback().await.unwrap();
    (grant, error)
}

/// PostgreSQL, SQLite, and MariaDB with snapshot isolation refuse to change a row that is newer
/// than the snapshot. The others see the current row.
async fn a_claim_that_was_lost_since_the_snapshot_is_told_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let looks_again = db.server.name == "mysql"
        || (db.server.name == "mariadb" && db.number("SELECT @@innodb_snapshot_isolation").await == Some(0));
    for loss in [Loss::TakenOver, Loss::Freed, Loss::FreedAndTaken] {
        let (grant, error) = confirmed(&db, &db.pool, loss).await;
        match error {
            Error::Lost { token, .. } if looks_again => assert_eq!(token, grant.token(), "{loss:?}"),
            Error::Conflict { attempts: 1, .. } if !looks_again => {}
            other => panic!("{loss:?}: {other:?}"),
        }
    }
}

async fn snapshot_isolation_tells_it_as_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = pool_at(&db, "snapshot isolation").await;
    for loss in [Loss::TakenOver, Loss::Freed, Loss::FreedAndTaken] {
        let (_, error) = confirmed(&db, &pool, loss).await;
        assert!(matches!(error, Error::Conflict { attempts: 1, .. }), "{loss:?}: {error:?}");
    }
}

/// The next holder's transaction has the row locked, or the row is gone.
async fn a_claim_whose_row_is_locked_by_the_next_holder_is_told_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::builder(db.pool.clone()).time_limit(10 * PATIENCE).build().unwrap();
    for gone in [false, true] {
        let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
        let mut other = db.pool.begin().await.unwrap();
        if gone {
            db.execute("DELETE FROM t_resource_lock").await;
        } else {
            lose(&db, "k", Loss::Freed).await;
            let next = acquired(lock.try_acquire("k").await).detach();
            lock.confirm(&next, &mut other).await.unwrap();
        }
        let mut tx = db.pool.begin().await.unwrap();
        let confirmed = timeout(PATIENCE, lock.confirm(grant.claim(), &mut tx)).await.expect("it is told at once");
        assert!(matches!(confirmed, Err(Error::Lost { token, .. }) if token == grant.token()), "{confirmed:?}");
        other.rollback().await.unwrap();
        db.execute("DELETE FROM t_resource_lock").await;
    }
}
