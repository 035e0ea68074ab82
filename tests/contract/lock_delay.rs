//! Lock-delay: a key whose holder has not ended its claim stays closed for a while after that
//! holder had to stop.

use std::{convert::Infallible, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{Attempt, Error, Lease, LeaseLock, Reason, Refusal, RunError, Status, errors::TransactionFault};
use sqlx::pool::PoolConnection;
use tokio::time::{Instant, sleep, timeout};

use crate::grants_without_caller::unheard;

harness::tests!(everywhere(
    the_next_holder_starts_the_delay_after_the_last_one_was_told_of_its_loss,
    a_crash_keeps_the_key_closed_for_lease_and_delay,
    a_release_frees_the_key_at_once,
    an_abandonment_frees_the_key_at_once,
    a_dropped_lease_keeps_the_key_closed_for_the_delay_alone,
    a_run_that_is_cancelled_keeps_the_key_closed,
    an_abandonment_of_a_lost_lease_waits_for_the_row,
    the_order_of_the_settings_does_not_matter,
    a_transaction_that_fails_frees_the_key,
    a_transaction_that_is_dropped_keeps_the_key_closed,
    a_forced_release_keeps_no_delay,
    a_claim_that_is_taken_up_has_the_delay_of_its_handle,
    a_renewal_keeps_the_delay,
    an_attempt_that_is_dropped_midway_keeps_no_delay,
    a_set_keeps_each_key_closed,
    a_set_of_which_one_key_is_lost_keeps_the_rest_closed,
    a_permit_keeps_its_delay
));

const LEASE: Duration = Duration::from_secs(1);
const DELAY: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(60);

fn delayed<DB: TestDatabase>(lock: LeaseLock<DB>, lease: Duration, delay: Duration) -> LeaseLock<DB> {
    lock.lease(lease).lock_delay(delay)
}

/// Returns when the key was granted to another holder.
async fn granted_at<DB: TestDatabase>(db: &TestDb<DB>) -> Instant {
    let lease = acquired(db.lock().acquire("k", PATIENCE).await);
    let at = Instant::now();
    lease.release().await.unwrap();
    at
}

async fn the_next_holder_starts_the_delay_after_the_last_one_was_told_of_its_loss<DB: TestDatabase>(db: TestDb<DB>) {
    let own = db.pool_of(2).await;
    let lease = acquired(delayed(LeaseLock::new(own.clone()), LEASE, DELAY).try_acquire("k").await);
    let told = harness::spawn(async move {
        lease.lost().await;
        Instant::now()
    });
    own.close().await;
    let granted = granted_at(&db).await;
    let told = told.await.unwrap();
    assert!(granted >= told + DELAY, "granted {:?} after the loss was reported", granted - told);
}

async fn a_crash_keeps_the_key_closed_for_lease_and_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(delayed(db.lock(), LEASE, DELAY).try_acquire("k").await);
    let had_to_stop = Instant::now() + lease.time_left();
    assert!(lease.time_left() <= LEASE);
    lease.detach(); // neither renewed nor ended, as after a crash
    let refusal = refused(db.lock().try_acquire("k").await);
    assert_eq!(refusal.reason, Reason::Held);
    let closed = (refusal.until.unwrap() - refusal.since.unwrap()).to_std().unwrap();
    assert!(closed >= LEASE + DELAY / 2, "the refusal counts the delay: {refusal}");
    let granted = granted_at(&db).await;
    assert!(granted >= had_to_stop + DELAY, "granted {:?} after it had to stop", granted - had_to_stop);
}

async fn a_release_frees_the_key_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(delayed(db.lock(), LONG, LONG).try_acquire("k").await).fail().await.unwrap();
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

async fn an_abandonment_frees_the_key_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(delayed(db.lock(), LONG, LONG).try_acquire("k").await).abandon().await.unwrap();
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

/// Tasks of the work may not have stopped yet, but the lease's own time need not pass.
async fn a_dropped_lease_keeps_the_key_closed_for_the_delay_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, DELAY);
    let lease = acquired(lock.try_acquire("k").await);
    let dropped = Instant::now();
    drop(lease);
    assert!(lock.shutdown(PATIENCE).await, "abandoned");
    let granted = granted_at(&db).await;
    assert!(granted >= dropped + DELAY, "granted {:?} after the drop", granted - dropped);
}

async fn a_run_that_is_cancelled_keeps_the_key_closed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let began = tokio::sync::Notify::new();
    let work = async |_held| -> Result<(), std::io::Error> {
        began.notify_one();
        std::future::pending().await
    };
    tokio::select! {
        ran = lock.run("k", Duration::ZERO, work) => panic!("the work does not end: {ran:?}"),
        () = began.notified() => {}
    }
    assert!(lock.shutdown(PATIENCE).await, "abandoned");
    let refusal = refused(db.lock().try_acquire("k").await);
    assert!(refusal.reason == Reason::Held && refusal.retry_after <= Some(LONG), "{refusal:?}");
    lock.run("other", Duration::ZERO, async |_| Ok::<_, std::io::Error>(())).await.unwrap();
    acquired(db.lock().try_acquire("other").await).release().await.unwrap();
}

/// The lease is over, but the row's lease goes on for the delay, and the abandonment is retried.
async fn an_abandonment_of_a_lost_lease_waits_for_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(delayed(db.lock(), LEASE, LONG).try_acquire("k").await);
    let mut other = lost_behind_a_lock(&db, &lease).await;
    let abandoned = harness::spawn(lease.abandon());
    sleep(LEASE).await; // it finds the row locked
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    timeout(PATIENCE, abandoned).await.unwrap().unwrap().unwrap();
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

/// Locks the row until the lease is lost, because no renewal is carried out. A renewal that finds
/// it locked learns how long the row's lease lasts, of which the delay is not the holder's. One
/// that was given up could still be carried out, and would undo an abandonment. So the row stays
/// locked until each of them has ended without effect, on SQLite after a busy timeout of 5 s, which
/// a busy machine draws out.
async fn lost_behind_a_lock<DB: TestDatabase>(db: &TestDb<DB>, lease: &Lease<DB>) -> PoolConnection<DB> {
    let other = db.row_locked().await;
    timeout(PATIENCE, lease.lost()).await.unwrap();
    sleep(if db.server.name == "sqlite" { 15 * LEASE } else { 5 * LEASE }).await;
    other
}

async fn the_order_of_the_settings_does_not_matter<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().lock_delay(LONG).lease(LEASE).lock_delay(DELAY);
    let lease = acquired(lock.try_acquire("k").await);
    assert!(lease.time_left() <= LEASE);
    let until = refused(db.lock().try_acquire("k").await).retry_after.unwrap();
    assert!(until <= LEASE + DELAY && until > LEASE, "{until:?}");
    lease.release().await.unwrap();
}

/// Waits until the key has been abandoned, and takes it: the delay would last for longer.
async fn is_free<DB: TestDatabase>(db: &TestDb<DB>, lock: &LeaseLock<DB>) {
    assert!(lock.shutdown(PATIENCE).await, "abandoned");
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

/// The work has returned, and ended the transaction itself.
async fn a_transaction_that_fails_frees_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let done = lock.transaction("k", async |mut tx| -> Result<(), sqlx::Error> {
        DB::execute_on(&mut tx, "ROLLBACK").await.map(|_| ())
    });
    match timeout(PATIENCE, done).await.unwrap() {
        Err(RunError::Other(Error::Transaction(TransactionFault::Over { .. }))) => {}
        other => panic!("{other:?}"),
    }
    is_free(&db, &lock).await;
}

/// Tasks of the work may still run.
async fn a_transaction_that_is_dropped_keeps_the_key_closed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let began = tokio::sync::Notify::new();
    let done = lock.transaction("k", async |_| -> Result<(), Infallible> {
        began.notify_one();
        std::future::pending().await
    });
    tokio::select! {
        done = done => panic!("the work does not end: {done:?}"),
        () = began.notified() => {}
    }
    assert!(lock.shutdown(PATIENCE).await, "abandoned");
    let refusal = refused(db.lock().try_acquire("k").await);
    assert!(refusal.reason == Reason::Held && refusal.retry_after <= Some(LONG), "{refusal:?}");
}

async fn a_forced_release_keeps_no_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let lease = acquired(lock.try_acquire("k").await);
    assert!(db.lock().force_release("k", Status::Failed).await.unwrap() > Some(lease.token()));
    let next = acquired(db.lock().try_acquire("k").await);
    drop(lease); // its abandonment finds the row without the claim
    assert!(lock.shutdown(PATIENCE).await);
    next.renew().await.unwrap();
    next.release().await.unwrap();
}

/// The refusal that says how long the key is closed to others.
async fn closed<DB: TestDatabase>(db: &TestDb<DB>) -> Refusal {
    let refusal = refused(db.lock().try_acquire("k").await);
    assert_eq!(refusal.reason, Reason::Held);
    refusal
}

/// A shorter delay opens the key no sooner: another handle may count on the lease that was kept.
async fn a_claim_that_is_taken_up_has_the_delay_of_its_handle<DB: TestDatabase>(db: TestDb<DB>) {
    let [plain, with_delay] = [Duration::ZERO, LONG].map(|delay| delayed(db.lock(), LONG, delay));
    let holder = acquired(plain.try_acquire("k").await).detach().holder;
    assert!(closed(&db).await.retry_after <= Some(LONG));
    let lease = with_delay.attach("k", holder).await.unwrap();
    let before = closed(&db).await;
    assert!(lease.time_left() <= LONG && before.retry_after > Some(LONG));
    lease.detach();
    let lease = plain.attach("k", holder).await.unwrap();
    assert!(closed(&db).await.until >= before.until);
    lease.release().await.unwrap();
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

async fn a_renewal_keeps_the_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(delayed(db.lock(), LONG, LONG).try_acquire("k").await);
    let before = closed(&db).await;
    sleep(LEASE / 10).await;
    lease.renew().await.unwrap();
    let (left, after) = (lease.time_left(), closed(&db).await);
    assert!(left <= LONG && after.retry_after > Some(LONG) && after.until > before.until, "{left:?}, {after:?}");
    lease.release().await.unwrap();
}

/// No work was begun under a claim that its caller has not received.
async fn an_attempt_that_is_dropped_midway_keeps_no_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    unheard(&db, &lock, &["k"], async || {}).await;
    is_free(&db, &lock).await;
}

async fn a_set_keeps_each_key_closed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let both = async || lock.try_acquire_all(["j", "k"]).await.unwrap().acquired().expect("both are free");
    both().await.release().await.unwrap();
    both().await.abandon().await.unwrap();
    drop(both().await);
    assert!(lock.shutdown(PATIENCE).await, "abandoned");
    for key in ["j", "k"] {
        let refusal = refused(db.lock().try_acquire(key).await);
        assert!(refusal.reason == Reason::Held && refusal.retry_after <= Some(LONG), "{refusal:?}");
        assert!(refusal.retry_after > Some(LONG / 2), "{refusal:?}");
    }
}

/// The work under the set may not have stopped when the loss is told.
async fn a_set_of_which_one_key_is_lost_keeps_the_rest_closed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = delayed(db.lock(), LONG, LONG);
    let both = lock.try_acquire_all(["j", "k"]).await.unwrap().acquired().expect("both are free");
    db.lock().force_release("k", Status::Failed).await.unwrap();
    assert!(both.renew().await.is_err());
    drop(both);
    assert!(lock.shutdown(PATIENCE).await, "the other key is abandoned");
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let refusal = refused(db.lock().try_acquire("j").await);
    assert!(refusal.reason == Reason::Held && refusal.retry_after <= Some(LONG), "{refusal:?}");
}

async fn a_permit_keeps_its_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let semaphore = delayed(db.lock(), LONG, LONG).semaphore("k", 2);
    let crashed = acquired(semaphore.try_acquire().await);
    let key = crashed.key().clone();
    crashed.detach(); // neither renewed nor ended, as after a crash
    for _ in 0..2 {
        let other = acquired(semaphore.try_acquire().await);
        assert_ne!(*other.key(), key);
        match semaphore.try_acquire().await.unwrap() {
            Attempt::Refused(refusal) => assert_eq!(refusal.reason, Reason::Held),
            Attempt::Acquired(third) => panic!("{third:?}"),
        }
        other.release().await.unwrap();
    }
    let refusal = refused(db.lock().try_acquire(key.as_str()).await);
    assert!(refusal.retry_after > Some(LONG), "the refusal counts the delay: {refusal}");
}
