//! A claim as a condition of the caller's own commit.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{
    Error, LeaseLock, Reason, ResourceLock, Status,
    errors::{Certainty, DatabaseFault},
    strategy::Confirmation,
};
use sqlx::{AssertSqlSafe, Transaction};
use tokio::time::{Instant, sleep, timeout};

use crate::bank::{LEASE, VERSION, accounts, balance, balance_in, locks, version, write_in};

harness::tests!(
    everywhere(
        a_confirmed_claim_keeps_others_out_until_the_commit,
        an_expired_claim_that_was_not_taken_over_may_commit,
        a_forced_release_does_not_pass_a_confirmed_transaction,
        a_renewal_does_not_trip_over_the_transactions_own_row,
        a_confirmation_needs_a_transaction,
        a_claim_that_is_younger_than_the_snapshot_is_a_conflict,
        a_second_transaction_under_a_claim_waits_for_the_first,
        a_lease_confirmed_in_a_transaction_that_is_rolled_back_stands
    ),
    everywhere.each(a_stale_claim_is_lost_or_a_conflict)
);

/// Begins a transaction that writes.
async fn begin<DB: TestDatabase>(db: &TestDb<DB>) -> Transaction<'static, DB> {
    db.pool.begin_with(DB::BEGIN).await.unwrap()
}

/// Sets the end of the lease to this many milliseconds from now, by the database's clock.
async fn ends_in<DB: TestDatabase>(db: &TestDb<DB>, key: &str, millis: i64) {
    db.set(key, &format!("expires_at = {}", DB::ago(-millis))).await;
}

async fn has_ended<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> bool {
    let sql =
        format!("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = '{key}' AND expires_at <= {}", DB::ago(0));
    db.number(&sql).await == Some(1)
}

async fn confirms<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> i64 {
    db.number(&format!("SELECT confirms FROM t_resource_lock WHERE key_resource = '{key}'")).await.unwrap()
}

async fn a_stale_claim_is_lost_or_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let stale = acquired(lock.acquire(name, Duration::ZERO).await);
        if name == LEASE {
            ends_in(&db, name, -1).await;
            acquired(lock.acquire(name, Duration::ZERO).await);
        } else {
            db.execute("UPDATE account SET version = version + 1 WHERE id = 'version'").await;
        }
        let mut tx = begin(&db).await;
        write_in::<DB>(&mut tx, name, 1).await.unwrap();
        match (name, lock.confirm(stale.claim(), &mut tx).await) {
            (LEASE, Err(Error::Lost { key, token })) => assert_eq!((&key, token), (stale.key(), stale.token())),
            (VERSION, Err(Error::Conflict { key, attempts: 1, .. })) => assert_eq!(&key, stale.key()),
            other => panic!("{other:?}"),
        }
        tx.rollback().await.unwrap();
        assert_eq!(balance(&db, name).await, 1000);
    }
    assert_eq!(confirms(&db, LEASE).await, 0);
}

/// The lease ends during the transaction. The row is locked, and other requests are refused as
/// busy.
async fn a_confirmed_claim_keeps_others_out_until_the_commit<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, other) = (db.lock(), db.lock());
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    ends_in(&db, "k", 500).await;
    let mut tx = begin(&db).await;
    assert_eq!(lock.confirm(grant.claim(), &mut tx).await.unwrap(), Confirmation(1));
    let refusal = refused(other.try_acquire("k").await);
    assert!([Reason::Held, Reason::Busy].contains(&refusal.reason), "{refusal}");
    eventually("the lease ends", || has_ended(&db, "k")).await;
    for _ in 0..3 {
        assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Busy);
    }
    tx.commit().await.unwrap();
    let next = acquired(other.try_acquire("k").await);
    assert_eq!(next.taken_over_from().unwrap().token, grant.token());
    assert_eq!(confirms(&db, "k").await, 1);
}

async fn an_expired_claim_that_was_not_taken_over_may_commit<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let lock = db.lock();
    let grant = acquired(ResourceLock::acquire(&lock, LEASE, Duration::ZERO).await);
    ends_in(&db, LEASE, -1000).await;
    let mut tx = begin(&db).await;
    lock.confirm(grant.claim(), &mut tx).await.unwrap();
    write_in::<DB>(&mut tx, LEASE, 999).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!((balance(&db, LEASE).await, confirms(&db, LEASE).await), (999, 1));
    assert_eq!(acquired(db.lock().try_acquire(LEASE).await).taken_over_from().unwrap().token, grant.token());
}

async fn a_forced_release_does_not_pass_a_confirmed_transaction<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    let mut tx = begin(&db).await;
    lock.confirm(grant.claim(), &mut tx).await.unwrap();
    let hurried = LeaseLock::builder(db.pool_of(1).await).time_limit(Duration::from_millis(300)).build().unwrap();
    let error = hurried.force_release("k", Status::Succeeded).await.unwrap_err();
    // On SQLite, a statement that waits for the file may be carried out later.
    let is_unknown = matches!(&error, Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. }));
    assert!(error.is_retryable() || is_unknown, "{error:?}");
    let patient = harness::spawn({
        let lock = db.builder().time_limit(PATIENCE).build().unwrap();
        async move { lock.force_release("k", Status::Succeeded).await }
    });
    sleep(Duration::from_millis(200)).await;
    assert!(!patient.is_finished());
    tx.commit().await.unwrap();
    let token = timeout(PATIENCE, patient).await.unwrap().unwrap().unwrap().unwrap();
    assert!(token > grant.token());
    assert_eq!(confirms(&db, "k").await, 1);
    let mut tx = begin(&db).await;
    let error = lock.confirm(grant.claim(), &mut tx).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
}

/// The row is locked for more than one renewal interval. The deadline stands, and the renewals go
/// on afterwards.
async fn a_renewal_does_not_trip_over_the_transactions_own_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = Duration::from_secs(3);
    let lock = db.lock_for(lease);
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    let since = Instant::now();
    let mut tx = begin(&db).await;
    lock.confirm(grant.claim(), &mut tx).await.unwrap();
    while since.elapsed() < lease / 2 {
        assert!(grant.lease().unwrap().is_held(), "in the transaction");
        sleep(lease / 50).await;
    }
    tx.commit().await.unwrap();
    while since.elapsed() < 2 * lease {
        assert!(grant.lease().unwrap().is_held(), "after it: {:?}", since.elapsed());
        sleep(lease / 50).await;
    }
    lock.release(grant, Status::Succeeded).await.unwrap();
}

async fn a_confirmation_needs_a_transaction<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let grant = acquired(lock.acquire(name, Duration::ZERO).await);
        let mut conn = db.pool.acquire().await.unwrap();
        let error = lock.confirm(grant.claim(), &mut conn).await.unwrap_err();
        assert!(
            matches!(error, Error::Invalid(ref wrong) if wrong.to_string().contains("not in a transaction")),
            "{error:?}"
        );
    }
    assert_eq!((confirms(&db, LEASE).await, version(&db, VERSION).await), (0, 0));
}

/// The transaction reads a snapshot that is older than the claim, so that nothing computed from it
/// may be committed under the claim. MySQL, and MariaDB without `innodb_snapshot_isolation`, lock
/// the current row, whatever the snapshot.
async fn a_claim_that_is_younger_than_the_snapshot_is_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let begin = match db.server.name {
        "postgres" => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        "sqlite" => "BEGIN",
        _ => "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    };
    let mut tx = db.pool.begin_with(AssertSqlSafe(begin)).await.unwrap();
    DB::text_on(&mut tx, "SELECT status FROM t_resource_lock WHERE key_resource = 'k'").await.unwrap();
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    let confirmed = lock.confirm(grant.claim(), &mut tx).await;
    let heeds_snapshots = ["postgres", "sqlite"].contains(&db.server.name) || has_snapshot_isolation(&db).await;
    match confirmed {
        Err(Error::Conflict { attempts: 1, .. }) if heeds_snapshots => {}
        Ok(Confirmation(1)) if !heeds_snapshots => {}
        other => panic!("{other:?}"),
    }
    tx.rollback().await.unwrap();
    lock.release(grant, Status::Succeeded).await.unwrap();
}

/// Snapshot isolation is MariaDB's default from 11.6.2 on.
async fn has_snapshot_isolation<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    db.server.name == "mariadb" && db.number("SELECT @@innodb_snapshot_isolation").await == Some(1)
}

/// It then reads what the first has written. On SQLite, it waits in its `BEGIN`. With snapshot
/// isolation it may have to be restarted.
async fn a_second_transaction_under_a_claim_waits_for_the_first<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let lock = db.lock();
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    let mut first = begin(&db).await;
    assert_eq!(lock.confirm(grant.claim(), &mut first).await.unwrap(), Confirmation(1));
    let begins_anew = has_snapshot_isolation(&db).await;
    let second = harness::spawn({
        let (lock, claim, pool) = (lock.clone(), grant.claim().clone(), db.pool.clone());
        async move {
            loop {
                let mut tx = pool.begin_with(DB::BEGIN).await.unwrap();
                match lock.confirm(&claim, &mut tx).await {
                    Err(Error::Conflict { .. }) if begins_anew => tx.rollback().await.unwrap(),
                    confirmation => {
                        let read = balance_in::<DB>(&mut tx, LEASE).await.unwrap();
                        tx.commit().await.unwrap();
                        break (confirmation.unwrap(), read);
                    }
                }
            }
        }
    });
    sleep(Duration::from_millis(200)).await;
    assert!(!second.is_finished());
    write_in::<DB>(&mut first, LEASE, 999).await.unwrap();
    first.commit().await.unwrap();
    assert_eq!(timeout(PATIENCE, second).await.unwrap().unwrap(), (Confirmation(2), 999));
    assert_eq!(confirms(&db, "k").await, 2);
}

async fn a_lease_confirmed_in_a_transaction_that_is_rolled_back_stands<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
    for _ in 0..2 {
        let mut tx = begin(&db).await;
        assert_eq!(lock.confirm(grant.claim(), &mut tx).await.unwrap(), Confirmation(1));
        tx.rollback().await.unwrap();
    }
    assert_eq!(confirms(&db, "k").await, 0);
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Held);
    lock.release(grant, Status::Succeeded).await.unwrap();
}
