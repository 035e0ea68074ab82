//! Waiting for a key, and running work under it, by code that does not know the strategy.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{Error, Reason, RunError, errors::NotFound, strategy::Grant};
use tokio::time::{Instant, sleep, timeout};

use crate::bank::{Lock, accounts, locks};

harness::tests!(everywhere(
    it_waits_until_the_holder_releases,
    it_waits_until_the_lease_of_a_crashed_holder_ends,
    it_gives_up_at_its_limit,
    it_refuses_at_once_within_a_min_interval,
    a_version_is_granted_to_every_caller,
    work_runs_under_a_key
));

const MINUTE: Duration = Duration::from_secs(60);

fn waiting<DB: TestDatabase>(lock: Lock<DB>, key: &'static str) -> tokio::task::JoinHandle<Grant<DB>> {
    harness::spawn(async move { acquired(lock.acquire(key, MINUTE).await) })
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
    assert!(
        grant.token() > token && grant.lease().unwrap().taken_over_from().is_none() && grant.lease().unwrap().is_held()
    );
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
    assert_eq!(grant.lease().unwrap().taken_over_from().unwrap().token, crashed.token());
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

/// Only time helps, however soon it comes.
async fn it_refuses_at_once_within_a_min_interval<DB: TestDatabase>(db: TestDb<DB>) {
    for interval in [60 * MINUTE, MINUTE / 2] {
        let lock = db.lock().min_interval(interval);
        acquired(lock.try_acquire("k").await).release().await.unwrap();
        let refusal = refused(timeout(PATIENCE, lock.acquire("k", MINUTE)).await.unwrap());
        assert_eq!(refusal.reason, Reason::WithinMinInterval);
        assert!(refusal.retry_after.is_some_and(|after| after <= interval), "{refusal:?}");
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

/// A version excludes no caller. A missing row has no version.
async fn a_version_is_granted_to_every_caller<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let [_, (name, lock)] = locks(&db.pool);
    let grants = [acquired(lock.acquire(name, Duration::ZERO).await), acquired(lock.acquire(name, MINUTE).await)];
    assert!(grants.iter().all(|grant| grant.token().get() == 0 && grant.lease().is_none()));
    assert_ne!(grants[0].claim().holder, grants[1].claim().holder);
    let error = lock.acquire("no-one's", MINUTE).await.unwrap_err();
    assert!(matches!(&error, Error::NotFound(NotFound::Row { table, .. }) if table == "account"), "{error:?}");
}

async fn work_runs_under_a_key<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for (result, status) in [(Ok("done"), "S"), (Err("failed"), "F")] {
        let ran = lock.run("k", Duration::ZERO, async |held| {
            assert_eq!((held.key().as_str(), held.is_held()), ("k", true));
            assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
            result.map(|value| (value, held))
        });
        match (ran.await, result) {
            (Ok((value, held)), Ok(expected)) => {
                assert_eq!(value, expected);
                assert!(!held.is_held() && held.cancellation_token().is_cancelled(), "it has ended");
            }
            (Err(RunError::Work(error)), Err(expected)) => assert_eq!(error, expected),
            (other, _) => panic!("{other:?}"),
        }
        assert_eq!(db.column("k", "status").await.as_deref(), Some(status));
    }
}
