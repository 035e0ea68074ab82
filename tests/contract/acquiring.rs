//! Waiting for a key, and running work under it, by code that does not know the strategy.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{Error, Grant, Reason, ResourceLock, ResourceLockExt, RunOutcome};
use tokio::time::{Instant, sleep, timeout};

use crate::bank::{LEASE, Lock, VERSION, accounts, locks};

harness::tests!(everywhere(
    it_waits_until_the_holder_releases,
    it_waits_until_the_lease_of_a_crashed_holder_ends,
    it_gives_up_at_its_limit,
    it_refuses_at_once_where_only_a_window_helps_and_ends_later,
    it_waits_for_a_window_that_ends_in_time,
    a_version_is_granted_to_everybody,
    work_runs_under_both,
    work_is_cancelled_where_the_lock_can_tell
));

const MINUTE: Duration = Duration::from_secs(60);

fn waiting<DB: TestDatabase>(lock: Lock<DB>, key: &'static str) -> tokio::task::JoinHandle<Grant<DB>> {
    tokio::spawn(async move { acquired(lock.acquire(key, MINUTE).await) })
}

async fn it_waits_until_the_holder_releases<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let [(_, lock), _] = locks(&db.pool);
    let waiting = waiting(lock, "k");
    sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    let token = holder.token();
    holder.release().await.unwrap();
    let grant = timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert!(grant.token() > token && grant.taken_over_from().is_none() && grant.is_held());
}

/// The lease ends long before its next renewal is due.
async fn it_waits_until_the_lease_of_a_crashed_holder_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let crashed = acquired(db.lock().try_acquire("k").await);
    let since = Instant::now();
    db.set("k", &format!("expires_at = {}", DB::ago(-800))).await;
    let [(_, lock), _] = locks(&db.pool);
    let grant = timeout(PATIENCE, waiting(lock, "k")).await.unwrap().unwrap();
    assert!(
        since.elapsed() >= Duration::from_millis(790),
        "SQLite's clock ticks in milliseconds: {:?}",
        since.elapsed()
    );
    assert_eq!(grant.taken_over_from().unwrap().token, crashed.token());
}

async fn it_gives_up_at_its_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let _holder = acquired(db.lock().try_acquire("k").await);
    let [(_, lock), _] = locks(&db.pool);
    for wait in [Duration::ZERO, Duration::from_millis(400)] {
        let since = Instant::now();
        let refusal = refused(lock.acquire("k", wait).await);
        assert_eq!(refusal.reason, Reason::Held);
        assert!(since.elapsed() >= wait && since.elapsed() < wait + PATIENCE / 4, "{:?}", since.elapsed());
    }
}

async fn it_refuses_at_once_where_only_a_window_helps_and_ends_later<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().min_interval(60 * MINUTE);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let refusal = refused(timeout(PATIENCE, lock.acquire("k", MINUTE)).await.unwrap());
    assert_eq!(refusal.reason, Reason::WithinWindow);
}

async fn it_waits_for_a_window_that_ends_in_time<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().min_interval(Duration::from_secs(1));
    let since = Instant::now();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    drop(acquired(timeout(PATIENCE, lock.acquire("k", MINUTE)).await.unwrap()));
    assert!(
        since.elapsed() >= Duration::from_millis(990),
        "SQLite's clock ticks in milliseconds: {:?}",
        since.elapsed()
    );
    assert!(lock.shutdown(PATIENCE).await);
}

/// A version excludes no caller. A missing row has no version.
async fn a_version_is_granted_to_everybody<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let [_, (name, lock)] = locks(&db.pool);
    let grants = [acquired(lock.try_acquire(name).await), acquired(lock.acquire(name, MINUTE).await)];
    assert!(grants.iter().all(|grant| grant.token().get() == 0 && grant.is_held() && grant.lease().is_none()));
    assert_ne!(grants[0].claim().holder, grants[1].claim().holder);
    let error = lock.acquire("no-one's", MINUTE).await.unwrap_err();
    assert!(matches!(&error, Error::NotFound { table, .. } if table == "account"), "{error:?}");
}

async fn work_runs_under_both<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        for (result, status) in [(Ok("done"), "S"), (Err("failed"), "F")] {
            let ran = lock.run(name, async |grant| {
                assert_eq!((grant.key().as_str(), grant.is_held()), (name, true));
                let second = lock.try_acquire(name).await.unwrap();
                assert_eq!(second.acquired().is_some(), name == VERSION, "a lease keeps others out");
                result
            });
            match ran.await.unwrap() {
                RunOutcome::Ended { result: ended, recorded: Ok(()) } => assert_eq!(ended, result),
                other => panic!("{name}: {other:?}"),
            }
            if name == LEASE {
                assert_eq!(db.column(name, "status").await.as_deref(), Some(status));
            }
        }
    }
}

/// The loss of a lease cancels the work. The loss of a version is detected only by its
/// confirmation.
async fn work_is_cancelled_where_the_lock_can_tell<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let lease = db.lock_for(Duration::from_millis(600));
    let [_, (_, version)] = locks(&db.pool);
    let locks: [(_, &dyn ResourceLock<DB>); 2] = [(LEASE, &lease), (VERSION, &*version)];
    for (name, lock) in locks {
        let ran = lock.run(name, async |grant| {
            if name == LEASE {
                db.take_from(name).await;
                return std::future::pending().await;
            }
            db.execute("UPDATE account SET version = version + 1").await;
            timeout(Duration::from_millis(200), grant.lost()).await.map_err(drop)
        });
        match (name, timeout(2 * PATIENCE, ran).await.unwrap().unwrap()) {
            (LEASE, RunOutcome::Lost(claim)) => assert_eq!(claim.key.as_str(), name),
            (VERSION, RunOutcome::Ended { result: Err(()), .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}
