//! A claim whose grant its caller never received leaves the row unchanged: no minimum interval
//! starts, and no run is recorded.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{LeaseLock, Reason, Rules, Status};
use tokio::time::sleep;

harness::tests!(everywhere(the_row_is_as_it_was_before, what_was_taken_over_is_there_to_be_taken_over));

const HOUR: Duration = Duration::from_secs(3600);
const RECORD: &str = "lock_flag, status, begin_time, end_time, client_ip, holder, expires_at, claimed_at";

/// The record of the last run in the row, and whether the row is free.
pub async fn record<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<Option<String>> {
    let mut record = Vec::new();
    for column in RECORD.split(", ").filter(|column| *column != "holder") {
        record.push(
            db.cell(
                &format!("COALESCE(CAST({column} AS char(80)), 'none')"),
                "t_resource_lock WHERE key_resource = 'k'",
            )
            .await,
        );
    }
    record
}

/// A run of two hours ago that ended with this status.
pub async fn ran<DB: TestDatabase>(db: &TestDb<DB>, status: &str) {
    let (begin, end) = (DB::ago(2 * 3_600_000), DB::ago(2 * 3_600_000 - 60_000));
    db.set("k", &format!("lock_flag = 0, status = '{status}', begin_time = {begin}, end_time = {end}, client_ip = 'earlier', holder = NULL, expires_at = NULL, claimed_at = NULL")).await;
}

/// Drops the request after the server has granted the keys, and before the reply is read.
async fn goes_away_unheard<DB: TestDatabase>(db: &TestDb<DB>, lock: &LeaseLock<DB>, keys: &[&str]) -> bool {
    let mut attempt = Box::pin(lock.acquire_all(keys, PATIENCE));
    for _ in 0..400 {
        match attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => {}
            Poll::Ready(heard) => {
                heard.unwrap().release().await.unwrap();
                return false;
            }
        }
        sleep(Duration::from_millis(5)).await;
        if db.column("k", "status").await.as_deref() == Some("P") {
            drop(attempt);
            lock.shutdown(PATIENCE).await;
            return true;
        }
    }
    panic!("it was neither granted nor refused");
}

pub async fn unheard<DB: TestDatabase>(db: &TestDb<DB>, lock: &LeaseLock<DB>, keys: &[&str], prepare: impl AsyncFn()) {
    for _ in 0..50 {
        prepare().await;
        if goes_away_unheard(db, lock, keys).await {
            return;
        }
    }
    panic!("it always heard of its grant");
}

async fn the_row_is_as_it_was_before<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let one: &[&str] = &["k"];
    for (rules, status, keys) in [
        (Rules::Article, "S", one),
        (Rules::Recover, "S", one),
        (Rules::Recover, "F", one),
        (Rules::Recover, "S", &["k", "l"]),
    ] {
        let lock = db.lock().rules(rules).min_interval(HOUR);
        ran(&db, status).await;
        let (before, token) = (std::cell::RefCell::new(Vec::new()), column_number(&db, "token").await);
        unheard(&db, &lock, keys, async || {
            db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'l'").await;
            ran(&db, status).await;
            *before.borrow_mut() = record(&db).await;
        })
        .await;
        assert_eq!(record(&db).await, before.into_inner(), "{rules:?} {status} {keys:?}");
        assert!(column_number(&db, "token").await > token);
        // The minimum interval counts from the earlier run, also for a caller with a longer
        // interval.
        let longer = db.lock().rules(rules).min_interval(3 * HOUR);
        assert_eq!(refused(longer.try_acquire("k").await).reason, Reason::WithinMinInterval);
        let lease = acquired(lock.try_acquire("k").await);
        assert!(lease.taken_over_from().is_none());
        lease.release().await.unwrap();
    }
}

/// A takeover stays a takeover: the next holder receives the prior claim, whose work may be half
/// done.
async fn what_was_taken_over_is_there_to_be_taken_over<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let lock = db.lock().min_interval(HOUR);
    unheard(&db, &lock, &["k"], async || {
        lock.force_release("k", Status::Succeeded).await.unwrap();
        ran(&db, "S").await;
        acquired(db.lock().try_acquire("k").await).abandon().await.unwrap();
        // The status shows the new claim: it changes from `X` to `P`.
        db.set("k", "status = 'X'").await;
    })
    .await;
    let lease = acquired(lock.try_acquire("k").await);
    assert!(lease.taken_over_from().is_some());
    lease.release().await.unwrap();
}

async fn column_number<DB: TestDatabase>(db: &TestDb<DB>, column: &str) -> i64 {
    db.number(&format!("SELECT {column} FROM t_resource_lock WHERE key_resource = 'k'")).await.unwrap()
}
