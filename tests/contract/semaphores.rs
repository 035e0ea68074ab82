//! The permits of a semaphore: their order, their number, and their keys.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{PATIENCE, SESSION, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Key, LeaseLock, Reason};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::waiters::seconds;

harness::tests!(
    everywhere(
        permits_are_granted_in_the_order_of_arrival,
        fewer_permits_drain_by_themselves_and_more_are_there_at_once,
        a_plain_claim_on_a_permit_takes_it,
        permits_are_shared_out_evenly
    ),
    sqlite(only_the_key_of_a_permit_has_a_number),
    everywhere.alone(a_release_of_any_permit_wakes_a_waiter),
    servers(a_wait_without_answers_is_no_refusal),
    postgres[SESSION](a_waiter_requests_a_notification_of_every_permit)
);

const LONG: Duration = Duration::from_secs(60);

/// Each waiter has a lock of its own, as a process has.
async fn permits_are_granted_in_the_order_of_arrival<DB: TestDatabase>(db: TestDb<DB>) {
    let fair = || db.lock_for(LONG).fair(true).semaphore("k", 2);
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(acquired(fair().try_acquire().await));
    }
    let (tell, mut grants) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..6 {
        let (semaphore, tell) = (fair(), tell.clone());
        harness::spawn(async move {
            let lease = acquired(semaphore.acquire(3 * PATIENCE).await);
            tell.send((number, lease)).unwrap();
        });
        let tickets = "SELECT COUNT(*) FROM t_resource_lock_queue";
        eventually("it waits", || async { db.number(tickets).await == Some(number + 1) }).await;
    }
    let queued = refused(fair().try_acquire().await);
    assert_eq!((queued.reason, queued.key.as_str()), (Reason::Queued, "k"), "it names the semaphore");
    for number in 0..6 {
        held.remove(0).release().await.unwrap();
        let (next, lease) = timeout(PATIENCE, grants.recv()).await.unwrap().unwrap();
        assert_eq!(next, number, "in the order of arrival");
        held.push(lease);
    }
}

async fn fewer_permits_drain_by_themselves_and_more_are_there_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(LONG);
    let [three, two] = [3, 2].map(|permits| lock.semaphore("k", permits));
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(acquired(three.try_acquire().await));
    }
    permits.sort_by_key(|permit| three.number(permit.key()));
    assert_eq!(permits.iter().map(|permit| three.number(permit.key()).unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    permits.pop().unwrap().release().await.unwrap();
    assert_eq!(refused(two.try_acquire().await).reason, Reason::Held, "the third permit is not its own");
    let again = acquired(three.try_acquire().await);
    assert_eq!(three.number(again.key()), Some(3));
    permits.remove(0).release().await.unwrap();
    let first = acquired(two.try_acquire().await);
    assert_eq!(two.number(first.key()), Some(1));
}

async fn only_the_key_of_a_permit_has_a_number<DB: TestDatabase>(db: TestDb<DB>) {
    let semaphore = db.lock().semaphore("k", 2);
    let number = |key: &str| semaphore.number(&Key::new(key).unwrap());
    for (key, expected) in [("k#1", 1), ("k#2", 2), ("k#17", 17), ("k#100", 100)] {
        assert_eq!(number(key), Some(expected), "another instance may have more permits");
    }
    for key in ["k", "k#", "k#0", "k#+3", "k#007", "k#-1", "k#101", "k#4294967297", "j#1", "k#1#1", "kk#1"] {
        assert_eq!(number(key), None, "{key:?}");
    }
}

/// Of the permits, this process holds one and knows that another process had the other.
async fn a_wait_without_answers_is_no_refusal<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let semaphore = LeaseLock::<DB>::new(proxy.pool(4)).lease(LONG).semaphore("k", 2);
    let other = acquired(db.lock().try_acquire("k#2").await);
    let _permit = acquired(semaphore.acquire(PATIENCE).await);
    assert_eq!(refused(semaphore.try_acquire().await).key, *other.key());
    other.release().await.unwrap();
    proxy.hold_everything();
    let error = semaphore.acquire(Duration::from_secs(1)).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

async fn a_plain_claim_on_a_permit_takes_it<DB: TestDatabase>(db: TestDb<DB>) {
    let semaphore = db.lock_for(LONG).semaphore("k", 2);
    let operator = acquired(db.lock().try_acquire("k#1").await);
    let permit = acquired(semaphore.try_acquire().await);
    assert_eq!(semaphore.number(permit.key()), Some(2));
    let refusal = refused(semaphore.try_acquire().await);
    assert!(refusal.key.as_str().starts_with("k#") && refusal.retry_after.is_some(), "{refusal}");
    operator.release().await.unwrap();
    assert_eq!(semaphore.number(acquired(semaphore.try_acquire().await).key()), Some(1));
}

/// Under saturation, the longest waits are not far from the usual one. A wait is measured by the
/// grants to others, which a busy machine does not prolong.
async fn permits_are_shared_out_evenly<DB: TestDatabase>(db: TestDb<DB>) {
    let grants = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    let until = Instant::now() + seconds();
    for _ in 0..4 {
        let semaphore = db.lock_for(LONG).fair(true).semaphore("k", 4);
        for _ in 0..6 {
            let (semaphore, grants) = (semaphore.clone(), grants.clone());
            tasks.spawn(harness::task(async move {
                let mut waits = Vec::new();
                while Instant::now() < until {
                    let called = grants.load(SeqCst);
                    let permit = acquired(semaphore.acquire(3 * PATIENCE).await);
                    waits.push(grants.fetch_add(1, SeqCst) - called);
                    sleep(Duration::from_millis(fastrand::u64(10..30))).await;
                    permit.release().await.unwrap();
                }
                waits
            }));
        }
    }
    let mut waits = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        let own = ended.unwrap();
        assert!(!own.is_empty(), "a task that waits is served");
        waits.extend(own);
    }
    waits.sort();
    let (median, late) = (waits[waits.len() / 2], waits[waits.len() * 99 / 100]);
    assert!(late <= 5 * median, "{} waits, median {median} grants, 99 of 100 within {late}", waits.len());
}

/// By then the waiter's pauses have grown to between half a second and a second, so that it would
/// rarely ask in time by itself. On a busy machine a claim and its release take long too.
async fn a_release_of_any_permit_wakes_a_waiter<DB: TestDatabase>(db: TestDb<DB>) {
    let semaphore = db.lock_for(LONG).semaphore("k", 3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(acquired(semaphore.try_acquire().await));
    }
    let (mut waits, mut at_once) = (Vec::new(), Vec::new());
    for round in 0..6 {
        let began = Instant::now();
        acquired(db.lock_for(LONG).try_acquire("other").await).release().await.unwrap();
        at_once.push(began.elapsed());
        let waiter = harness::spawn({
            let semaphore = semaphore.clone();
            async move { acquired(semaphore.acquire(PATIENCE).await) }
        });
        sleep(Duration::from_millis(1700)).await;
        permits.sort_by_key(|permit| semaphore.number(permit.key()));
        let freed = permits.remove(1 + round % 2);
        let key = freed.key().clone();
        freed.release().await.unwrap();
        let released = Instant::now();
        let permit = timeout(PATIENCE, waiter).await.unwrap().unwrap();
        waits.push(released.elapsed());
        assert_eq!(*permit.key(), key);
        permits.push(permit);
    }
    waits.sort();
    at_once.sort();
    let most = Duration::from_millis(150).max(4 * at_once[3]);
    assert!(waits[3] < most, "{waits:?}, and without a wait {at_once:?}");
}

async fn a_waiter_requests_a_notification_of_every_permit<DB: TestDatabase>(db: TestDb<DB>) {
    let semaphore = db.lock_for(LONG).semaphore("k", 3);
    let mut permits = Vec::new();
    for _ in 0..3 {
        permits.push(acquired(semaphore.try_acquire().await));
    }
    let other = db.lock_for(LONG).semaphore("k", 3);
    let waiter = harness::spawn(async move { acquired(other.acquire(PATIENCE).await) });
    let awaited = "SELECT COUNT(*) FROM t_resource_lock WHERE awaited";
    eventually("every row says that a task waits", || async { db.number(awaited).await == Some(3) }).await;
    permits.pop().unwrap().release().await.unwrap();
    timeout(PATIENCE, waiter).await.unwrap().unwrap();
}
