//! Waiting within a process: in order, with a known number of statements, and never past the limit.

use std::{
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, Lease, LeaseLock, Reason, errors::DatabaseFault};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

harness::tests!(
    everywhere(
        tasks_are_served_in_the_order_of_their_coming,
        no_request_is_sent_while_the_process_holds_the_key,
        a_thousand_tasks_send_as_many_queries_as_one,
        it_does_not_wait_past_its_limit,
        a_refusal_names_the_holder_of_this_process,
        a_lost_lease_lets_the_next_one_ask,
        a_shutdown_waits_for_a_claim_that_was_dropped,
        a_shutdown_waits_for_a_place_that_was_dropped
    ),
    everywhere.alone(a_waiter_that_gives_up_passes_the_permit_on)
);

const FOR_EVER: Duration = Duration::MAX;
const MILLIS: Duration = Duration::from_millis(1);

type Waiter<DB> = Pin<Box<dyn Future<Output = Result<Lease<DB>, Error>> + Send>>;

/// A waiter that is in the local queue when this function returns.
fn waiter<DB: TestDatabase>(lock: &LeaseLock<DB>, wait: Duration) -> Waiter<DB> {
    let lock = lock.clone();
    let mut waiter: Waiter<DB> = Box::pin(async move { lock.acquire("k", wait).await });
    assert!(pin!(&mut waiter).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    waiter
}

async fn holding<DB: TestDatabase>(lock: &LeaseLock<DB>) -> Lease<DB> {
    acquired(lock.acquire("k", FOR_EVER).await)
}

async fn tasks_are_served_in_the_order_of_their_coming<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let holder = holding(&lock).await;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for number in 0..50 {
        let (waiter, served) = (waiter(&lock, FOR_EVER), served.clone());
        tasks.spawn(harness::task(async move {
            let lease = acquired(waiter.await);
            served.lock().unwrap().push((number, lease.token()));
            lease.release().await.unwrap();
        }));
    }
    holder.release().await.unwrap();
    timeout(PATIENCE, tasks.join_all()).await.unwrap();
    let served = served.lock().unwrap();
    assert!(served.iter().map(|(number, _)| *number).eq(0..50), "{served:?}");
    assert!(served.is_sorted_by_key(|(_, token)| *token), "{served:?}");
}

/// Counted over three seconds. The next holder's claim sends one statement, and so does the
/// release.
async fn no_request_is_sent_while_the_process_holds_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let Some(_) = DB::statements(&pool).await else { return }; // SQLite counts none
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let holder = holding(&lock).await;
    let mut waiters: Vec<_> = (0..1000).map(|_| waiter(&lock, FOR_EVER)).collect();
    let before = DB::statements(&pool).await.unwrap();
    sleep(Duration::from_secs(3)).await;
    let between = DB::statements(&pool).await.unwrap();
    assert_eq!(between - before, DB::COUNTING);
    holder.release().await.unwrap();
    let next = timeout(PATIENCE, waiters.remove(0)).await.unwrap();
    assert_eq!(DB::statements(&pool).await.unwrap() - between - DB::COUNTING, 2);
    drop(waiters);
    acquired(next).release().await.unwrap();
}

/// Another lock represents another process. The polling interval grows to a second.
async fn a_thousand_tasks_send_as_many_queries_as_one<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let Some(_) = DB::statements(&pool).await else { return };
    let holder = holding(&LeaseLock::new(db.pool_of(1).await)).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
    let mut tasks = JoinSet::new();
    let before = DB::statements(&pool).await.unwrap();
    for _ in 0..1000 {
        let lock = lock.clone();
        tasks.spawn(harness::task(async move { refused(lock.acquire("k", Duration::from_secs(10)).await).reason }));
    }
    sleep(Duration::from_secs(4)).await;
    let between = DB::statements(&pool).await.unwrap();
    let reasons = tasks.join_all().await;
    assert!(reasons.iter().all(|reason| *reason == Reason::Held), "{reasons:?}");
    let after = DB::statements(&pool).await.unwrap();
    let (first, later) = (between - before - DB::COUNTING, after - between - DB::COUNTING);
    // Pauses grow more slowly where no release is notified. Each request is preceded by a check of
    // the connection that is borrowed.
    let expected = if db.server.name == "postgres" { 5..=24 } else { 15..=60 };
    assert!(expected.contains(&first), "{first} statements in 4 s");
    assert!(later <= 4 * 6, "{later} statements in 6 s");
    holder.release().await.unwrap();
}

async fn it_does_not_wait_past_its_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let held = pool.acquire().await.unwrap();
    // First there is no connection even for the check of the table, then none for the claim.
    for _ in 0..2 {
        for wait in [MILLIS, 300 * MILLIS] {
            let since = Instant::now();
            let error = lock.acquire("k", wait).await.unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Database(DatabaseFault::NoConnection { .. })
                        | Error::Database(DatabaseFault::TimedOut { .. })
                ),
                "{error}"
            );
            assert!(
                since.elapsed() >= wait && since.elapsed() < wait + PATIENCE / 8,
                "{wait:?}: {:?}",
                since.elapsed()
            );
        }
        let fresh = db.lock();
        acquired(fresh.try_acquire("k").await).release().await.unwrap();
    }
    drop(held);
    let holder = acquired(db.lock().try_acquire("k").await);
    for wait in [1000 * MILLIS, 2500 * MILLIS] {
        let since = Instant::now();
        assert_eq!(refused(lock.acquire("k", wait).await).reason, Reason::Held);
        assert!(since.elapsed() >= wait && since.elapsed() < wait + PATIENCE / 8, "{wait:?}: {:?}", since.elapsed());
    }
    holder.release().await.unwrap();
}

async fn a_waiter_that_gives_up_passes_the_permit_on<DB: TestDatabase>(db: TestDb<DB>) {
    let elsewhere = acquired(db.lock().try_acquire("k").await);
    let lock = db.lock();
    lock.try_acquire("k").await.unwrap().refused().unwrap();
    let (asking, dropped) = (waiter(&lock, 200 * MILLIS), waiter(&lock, FOR_EVER));
    let last = harness::spawn(waiter(&lock, FOR_EVER));
    drop(dropped);
    assert_eq!(refused(asking.await).reason, Reason::Held);
    elsewhere.release().await.unwrap();
    let lease = acquired(timeout(PATIENCE, last).await.unwrap().unwrap());
    lease.release().await.unwrap();
}

/// Waiters that never sent a claim receive what this process knows.
async fn a_refusal_names_the_holder_of_this_process<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("this one").build().unwrap();
    let holder = holding(&lock).await;
    let refusal = refused(lock.acquire("k", 100 * MILLIS).await);
    assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::Held, "this one"));
    assert!(refusal.retry_after.is_some_and(|left| left > Duration::from_secs(20)), "{refusal:?}");
    holder.release().await.unwrap();
}

/// A holder that lost the key may not know it yet, and still has its lease.
async fn a_lost_lease_lets_the_next_one_ask<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(900 * MILLIS);
    let lost = holding(&lock).await;
    let next = harness::spawn(waiter(&lock, FOR_EVER));
    db.take_from("k").await;
    lost.lost().await;
    let lease = acquired(timeout(PATIENCE, next).await.unwrap().unwrap());
    assert!(lease.token() > lost.token() && !lost.is_held());
    lease.release().await.unwrap();
    drop(lost);
}

/// A program that ends after the shutdown leaves no unknown claim behind.
async fn a_shutdown_waits_for_a_claim_that_was_dropped<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, another) = (db.lock(), LeaseLock::new(db.pool_of(1).await));
    for lock in [&lock, &another] {
        acquired(lock.try_acquire("k").await).release().await.unwrap();
    }
    for polls in 0..20 {
        let mut attempt = Box::pin(lock.acquire("k", FOR_EVER));
        for _ in 0..=polls % 4 {
            // A lease that was granted at once is dropped here.
            if attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(attempt);
        assert!(lock.shutdown(PATIENCE).await);
        acquired(another.try_acquire("k").await).release().await.unwrap();
    }
}

/// A program that ends after the shutdown leaves no ticket behind, which would block others until
/// it lapses.
async fn a_shutdown_waits_for_a_place_that_was_dropped<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let lock = db.lock().fair(true);
    let places = "SELECT COUNT(*) FROM t_resource_lock_queue";
    for _ in 0..5 {
        let waiter = harness::spawn(waiter(&lock, FOR_EVER));
        eventually("it has a place", || async { db.number(places).await == Some(1) }).await;
        waiter.abort();
        waiter.await.unwrap_err();
        assert!(lock.shutdown(PATIENCE).await);
        assert_eq!(db.number(places).await, Some(0));
    }
    holder.release().await.unwrap();
}
