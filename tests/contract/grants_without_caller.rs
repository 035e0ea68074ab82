//! A claim whose grant its caller never received leaves the row unchanged: no minimum interval
//! starts, and no run is recorded. One that its caller receives late may be lost by then.

use std::{
    cell::RefCell,
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Held, LeaseLock, Reason, Rules, RunError, Status, Token};
use tokio::time::{sleep, timeout};

harness::tests!(
    everywhere(
        the_row_is_as_it_was_before,
        a_set_is_as_it_was_before_key_by_key,
        work_begins_under_no_claim_that_was_lost
    ),
    everywhere.each(what_was_taken_over_is_there_to_be_taken_over)
);

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
        let (before, token) = (RefCell::new(Vec::new()), column_number(&db, "token").await);
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
/// done, and not the one that did nothing.
async fn what_was_taken_over_is_there_to_be_taken_over<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let lock = db.lock().min_interval(HOUR);
    let crashed = RefCell::new(None);
    // The second time, what is taken over was put back before.
    for times in 1..=2 {
        unheard(&db, &lock, &["k"], async || {
            if times == 1 || column_number(&db, "lock_flag").await == 0 {
                lock.force_release("k", Status::Succeeded).await.unwrap();
                ran(&db, "S").await;
                *crashed.borrow_mut() = Some(crashes(&db, "k").await);
            }
            // The status shows the new claim: it changes from `X` to `P`.
            db.set("k", "status = 'X'").await;
        })
        .await;
    }
    let (crashed, token) = (crashed.into_inner().unwrap(), column_number(&db, "token").await);
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(lease.taken_over_from().map(|prior| (prior.token, prior.label.as_str())), Some((crashed, "crashed")));
    let worked = lease.token();
    assert!(token > crashed.get() && worked.get() > token);
    lease.abandon().await.unwrap();
    let next = acquired(lock.try_acquire("k").await);
    assert_eq!(next.taken_over_from().map(|prior| prior.token), Some(worked));
    next.release().await.unwrap();
}

/// Leaves an expired claim behind, and returns its token.
async fn crashes<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> Token {
    let lease = acquired(db.lock().try_acquire(key).await);
    let token = lease.token();
    lease.abandon().await.unwrap();
    db.set(key, "client_ip = 'crashed'").await;
    token
}

/// One of its keys was free, and the other one expired.
async fn a_set_is_as_it_was_before_key_by_key<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let (lock, before, crashed) = (db.lock(), RefCell::new(Vec::new()), RefCell::new(None));
    unheard(&db, &lock, &["k", "l"], async || {
        db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'l'").await;
        *crashed.borrow_mut() = Some(crashes(&db, "l").await);
        ran(&db, "S").await;
        *before.borrow_mut() = record(&db).await;
    })
    .await;
    assert_eq!(record(&db).await, before.into_inner());
    let daily = db.lock().min_interval(3 * HOUR);
    assert_eq!(refused(daily.try_acquire("k").await).reason, Reason::WithinMinInterval);
    let lease = acquired(lock.try_acquire("l").await);
    assert_eq!(lease.taken_over_from().map(|prior| prior.token), crashed.into_inner());
}

async fn column_number<DB: TestDatabase>(db: &TestDb<DB>, column: &str) -> i64 {
    db.number(&format!("SELECT {column} FROM t_resource_lock WHERE key_resource = 'k'")).await.unwrap()
}

/// Waits for the key, which is granted and lost while the call is not polled.
async fn is_lost_unpolled<DB: TestDatabase>(db: &TestDb<DB>, mut call: Pin<&mut impl Future>, lease: Duration) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let token = holder.token();
    for _ in 0..100 {
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        sleep(Duration::from_millis(5)).await;
    }
    holder.release().await.unwrap();
    eventually("it is granted the key", async || {
        let entry = db.lock().inspect("k").await.unwrap().unwrap();
        entry.holder.is_some() && entry.token > token
    })
    .await;
    db.take_from("k").await;
    sleep(lease).await;
}

async fn work_begins_under_no_claim_that_was_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = Duration::from_secs(2);
    let (lock, begun) = (db.lock_for(lease), Arc::new(AtomicBool::new(false)));
    let begins = begun.clone();
    let mut run = Box::pin(lock.run("k", HOUR, move |_| {
        begins.store(true, SeqCst);
        async { Ok::<_, Infallible>(()) }
    }));
    is_lost_unpolled(&db, run.as_mut(), lease).await;
    let ran = timeout(PATIENCE, run).await.unwrap();
    assert!(matches!(ran, Err(RunError::Lost { .. })) && !begun.load(SeqCst), "{ran:?}");
    db.lock().force_release("k", Status::Failed).await.unwrap();
    // The next term is held.
    let (election, terms) = (lock.election("k"), Arc::new(Mutex::new(Vec::new())));
    let begins = terms.clone();
    let mut lead = Box::pin(election.lead(move |held: Held| {
        begins.lock().unwrap().push(held.is_held());
        async {}
    }));
    is_lost_unpolled(&db, lead.as_mut(), lease).await;
    timeout(PATIENCE, lead).await.unwrap().unwrap();
    assert_eq!(*terms.lock().unwrap(), [true]);
}
