//! Holding a key: renewal, loss, release and abandonment.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use harness::{TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Attempt, Error, LeaseLock, Reason, Rules, RunError, errors::DatabaseFault};
use tokio::time::{Instant, sleep, timeout};

use crate::line::standing;

harness::tests!(
    everywhere.alone(
        a_lease_is_renewed_in_the_background,
        a_renewal_that_finds_the_row_locked_is_unknown_not_lost,
        a_pool_of_one_is_enough
    ),
    everywhere(
        a_lease_is_lost_when_another_program_takes_the_row,
        loss_is_reported_before_the_next_grant,
        a_claim_that_another_program_overwrites_is_lost,
        releasing_a_lost_lease_changes_nothing,
        a_release_waits_for_a_transaction_at_the_row,
        releasing_twice_over_a_lost_reply_is_done,
        dropping_a_lease_abandons_it,
        run_does_not_begin_work_under_a_key_that_is_held,
        run_cancels_the_work_when_the_lease_is_lost,
        a_panic_in_the_work_abandons_the_key,
        a_runtime_that_ends_during_a_release_does_not_hang,
        tasks_of_the_work_are_told_however_the_lease_ends,
        a_release_on_a_closed_pool_fails_at_once
    ),
    everywhere.each(a_renewal_that_fails_is_unknown_and_tried_again),
    servers(an_abandonment_that_is_held_up_holds_up_no_other),
    everywhere.long(a_thousand_leases_are_renewed_in_few_statements)
);

/// Long enough for a slow disk to write a renewal within a third of it.
const SHORT: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_secs(20);

async fn a_lease_is_renewed_in_the_background<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(SHORT);
    let lease = acquired(lock.try_acquire("k").await);
    let started = Instant::now();
    while started.elapsed() < 4 * SHORT {
        assert!(lease.is_held());
        assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
        sleep(SHORT / 10).await;
    }
    lease.release().await.unwrap();
}

async fn a_lease_is_lost_when_another_program_takes_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(SHORT);
    let lease = acquired(lock.try_acquire("k").await);
    let token = lease.cancellation_token();
    db.take_from("k").await;
    timeout(PATIENCE, lease.lost()).await.unwrap();
    assert!(token.is_cancelled() && !lease.is_held() && lease.time_left().is_zero());
    assert!(matches!(lease.renew().await, Err(Error::Lost { .. })));
}

/// The holder cannot reach the database. It learns of its loss before another caller can claim the
/// key.
async fn loss_is_reported_before_the_next_grant<DB: TestDatabase>(db: TestDb<DB>) {
    let own = db.pool_of(2).await;
    let holder = LeaseLock::new(own.clone()).lease(2 * SHORT);
    let lease = acquired(holder.try_acquire("k").await);
    let lost = Arc::new(AtomicBool::new(false));
    let watch = harness::spawn({
        let (token, lost) = (lease.cancellation_token(), lost.clone());
        async move {
            token.cancelled().await;
            lost.store(true, Ordering::SeqCst);
        }
    });
    own.close().await;
    let other = db.lock();
    let next = loop {
        match other.try_acquire("k").await.unwrap() {
            Attempt::Acquired(lease) => break lease,
            Attempt::Refused(_) => sleep(Duration::from_millis(2)).await,
        }
    };
    assert!(!lease.is_held(), "another got in, and the holder would have gone on");
    assert!(lost.load(Ordering::SeqCst), "another got in, and the holder had not been told");
    assert!(next.token() > lease.token());
    watch.await.unwrap();
}

async fn a_renewal_that_finds_the_row_locked_is_unknown_not_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().time_limit(Duration::from_millis(300)).build().unwrap().lease(3 * SHORT);
    let lease = acquired(lock.try_acquire("k").await);
    let mut other = db.row_locked().await;
    let started = Instant::now();
    let error = lease.renew().await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::TimedOut { .. })), "{error:?}");
    assert!(lease.is_held(), "the deadline stands");
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    while started.elapsed() < 5 * SHORT {
        assert!(lease.is_held(), "renewals go on");
        sleep(SHORT / 10).await;
    }
    lease.renew().await.unwrap();
}

/// The pool is empty for so long that a background renewal fails. The deadline stands, and the next
/// renewal succeeds.
async fn a_renewal_that_fails_is_unknown_and_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lease = Duration::from_secs(6);
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap().lease(lease);
    let lease_held = acquired(lock.try_acquire("k").await);
    let started = Instant::now();
    let only = pool.acquire().await.unwrap();
    // The first renewal is due at a third of the lease, and gives up at two thirds.
    sleep(lease * 17 / 24).await;
    assert!(lease_held.is_held());
    drop(only);
    while started.elapsed() < lease + lease / 4 {
        assert!(lease_held.is_held(), "{:?}", started.elapsed());
        sleep(Duration::from_millis(20)).await;
    }
}

/// Another program, which does not know this crate's columns, claims the key and releases it. The
/// claim is lost, and does not become valid again.
async fn a_claim_that_another_program_overwrites_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let lease = acquired(lock.try_acquire("k").await);
    db.set("k", &format!("lock_flag = 1, status = 'P', begin_time = {}", DB::ago(-50))).await;
    assert!(matches!(lease.renew().await, Err(Error::Lost { .. })));
    let lease = acquired(lock.try_acquire("l").await);
    db.set("l", "lock_flag = 0, status = 'S'").await;
    assert!(matches!(lease.renew().await, Err(Error::Lost { .. })));
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::HeldByAnotherProgram);
}

async fn releasing_a_lost_lease_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("k").await);
    db.take_from("k").await;
    let error = lease.fail().await.unwrap_err();
    assert!(error.to_string().contains("\"k\" was lost"), "{error}");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("P"));
    assert_eq!(db.column("k", "client_ip").await.as_deref(), Some("thief"));
}

async fn a_release_waits_for_a_transaction_at_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("k").await);
    let mut other = db.row_locked().await;
    let release = harness::spawn(lease.fail());
    sleep(Duration::from_millis(200)).await;
    assert!(!release.is_finished());
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    timeout(PATIENCE, release).await.unwrap().unwrap().unwrap();
    assert_eq!(db.column("k", "status").await.as_deref(), Some("F"));
}

/// A release that was executed before, and whose reply was lost, finds a free row with its own
/// token.
async fn releasing_twice_over_a_lost_reply_is_done<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("k").await);
    db.set("k", "lock_flag = 0, status = 'S', holder = NULL, claimed_at = NULL, expires_at = NULL").await;
    lease.release().await.unwrap();
}

async fn dropping_a_lease_abandons_it<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let token = acquired(lock.try_acquire("k").await).token();
    assert!(lock.shutdown(PATIENCE).await);
    let next = acquired(lock.try_acquire("k").await);
    assert_eq!(next.taken_over_from().unwrap().token, token);
    next.release().await.unwrap();
    assert!(lock.shutdown(PATIENCE).await);
}

async fn a_pool_of_one_is_enough<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap().lease(3 * SHORT);
    let (one, two) = (acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await));
    let started = Instant::now();
    while started.elapsed() < 6 * SHORT {
        // The application repeatedly uses the connection for a little less than a third of the
        // lease.
        let conn = pool.acquire().await.unwrap();
        sleep(SHORT * 4 / 5).await;
        drop(conn);
        assert!(one.is_held() && two.is_held());
    }
    one.release().await.unwrap();
    two.release().await.unwrap();
}

async fn a_thousand_leases_are_renewed_in_few_statements<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    // The lease is long enough for a slow machine to claim a thousand keys. The renewals are sent
    // when they are due.
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap().lease(Duration::from_secs(24));
    let mut leases = Vec::new();
    for number in 0..1000 {
        leases.push(acquired(lock.try_acquire(&format!("key {number}")).await));
    }
    let began = Instant::now();
    let ends: Vec<Instant> = leases.iter().map(|lease| began + lease.time_left()).collect();
    let before = DB::statements(&pool).await;
    let moved = |(lease, end): (&rowlock::Lease<DB>, &Instant)| Instant::now() + lease.time_left() > *end + SHORT;
    eventually("every lease is renewed", || async { leases.iter().zip(&ends).all(moved) }).await;
    if let (Some(before), Some(after)) = (before, DB::statements(&pool).await) {
        assert!(after - before - DB::COUNTING <= 10, "{} statements for 1000 renewals", after - before);
    }
    drop(leases);
    assert!(lock.shutdown(PATIENCE).await);
    assert_eq!(
        db.number(&format!("SELECT COUNT(*) FROM t_resource_lock WHERE expires_at <= {}", DB::ago(0))).await,
        Some(1000)
    );
}

async fn run_does_not_begin_work_under_a_key_that_is_held<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let _held = acquired(lock.try_acquire("k").await);
    let ran = lock.run("k", Duration::ZERO, async |_| -> Result<(), ()> { panic!("refused work must not run") }).await;
    assert!(matches!(&ran, Err(RunError::Refused(refusal)) if refusal.reason == Reason::Held), "{ran:?}");
    assert!(matches!(RunError::unless_refused(ran), Ok(None)));
}

async fn run_cancels_the_work_when_the_lease_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    struct Stopped(Arc<AtomicBool>);
    impl Drop for Stopped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let stopped = Arc::new(AtomicBool::new(false));
    let (lock, mut seen) = (db.lock_for(SHORT), None);
    let work = async |held| -> Result<(), ()> {
        let _stopped = Stopped(stopped.clone());
        seen = Some(held);
        db.take_from("k").await;
        std::future::pending().await
    };
    let ran = timeout(PATIENCE, lock.run("k", Duration::ZERO, work)).await.unwrap();
    assert!(matches!(&ran, Err(RunError::Lost { key, .. }) if key.as_str() == "k"), "{ran:?}");
    assert!(stopped.load(Ordering::SeqCst));
    let held = seen.unwrap();
    timeout(PATIENCE, held.lost()).await.unwrap();
    assert!(!held.is_held());
    assert_eq!(db.column("k", "client_ip").await.as_deref(), Some("thief"));
}

async fn a_panic_in_the_work_abandons_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let task = harness::spawn({
        let lock = lock.clone();
        async move {
            let run = lock.run("k", Duration::ZERO, async |_| -> Result<(), ()> {
                std::panic::resume_unwind(Box::new("broken work"))
            });
            run.await
        }
    });
    assert!(task.await.unwrap_err().is_panic());
    assert!(lock.shutdown(PATIENCE).await);
    assert_eq!(refused(db.lock().rules(Rules::Article).try_acquire("k").await).reason, Reason::TimedOutUnfinished);
    assert!(acquired(lock.try_acquire("k").await).taken_over_from().is_some());
}

/// A runtime that ends drops the tasks that release, and does not wait for what they wait for.
async fn a_runtime_that_ends_during_a_release_does_not_hang<DB: TestDatabase>(db: TestDb<DB>) {
    let url = db.url.clone();
    let ended = std::thread::spawn(move || {
        for round in 0..5 {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let pool = harness::pool::<DB>(&url, 2).await;
                let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
                let lease = acquired(lock.try_acquire(&format!("round {round}")).await);
                // Both connections are in use, so that the release waits.
                let away = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
                let releasing = harness::spawn(async move { lease.release().await });
                tokio::task::yield_now().await;
                sleep(Duration::from_millis(20)).await;
                std::mem::forget(away);
                assert!(!releasing.is_finished(), "it waits");
            });
            let since = Instant::now();
            runtime.shutdown_timeout(PATIENCE);
            assert!(since.elapsed() < PATIENCE / 4, "{:?}", since.elapsed());
        }
    });
    eventually("the runtimes have ended", || async { ended.is_finished() }).await;
    ended.join().unwrap();
}

async fn tasks_of_the_work_are_told_however_the_lease_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let released = acquired(lock.try_acquire("k").await);
    let token = released.cancellation_token();
    released.release().await.unwrap();
    assert!(token.is_cancelled());
    let abandoned = acquired(lock.try_acquire("k").await);
    let token = abandoned.cancellation_token();
    abandoned.abandon().await.unwrap();
    assert!(token.is_cancelled());
    let dropped = acquired(lock.try_acquire("k").await);
    let token = dropped.cancellation_token();
    assert!(!token.is_cancelled());
    drop(dropped);
    assert!(token.is_cancelled());
}

/// Another transaction has the row of the first one locked.
async fn an_abandonment_that_is_held_up_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(24 * 3600));
    let (one, two) = (acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await));
    let mut other = db.row_locked().await;
    drop((one, two));
    eventually("the other one is abandoned", || async { standing(&db).await == 1 }).await;
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    assert!(lock.shutdown(PATIENCE).await);
    assert_eq!(standing(&db).await, 0);
}

async fn a_release_on_a_closed_pool_fails_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lease = acquired(LeaseLock::new(pool.clone()).try_acquire("k").await);
    pool.close().await;
    let started = Instant::now();
    assert!(matches!(lease.release().await, Err(Error::Database(DatabaseFault::Failed { .. }))));
    assert!(started.elapsed() < Duration::from_secs(5));
}
