//! Acquiring a key again through the handle that holds it.

use std::time::Duration;

use harness::{COUNTED, PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, LeaseLock, Reason};
use tokio::time::{sleep, timeout};

use crate::own_sessions::renewed;

harness::tests!(
    everywhere[COUNTED](it_sends_nothing_and_the_last_one_releases),
    everywhere(the_order_of_the_ends_does_not_matter, a_loss_is_every_handles_loss, without_the_handle_it_is_refused)
);

async fn it_sends_nothing_and_the_last_one_releases<DB: TestDatabase>(db: TestDb<DB>) {
    // MySQL and MariaDB count the statements of one session.
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let outer = acquired(lock.try_acquire("k").await);
    // A pooler may send a statement of its own when the connection of the claim returns.
    eventually("it is quiet", async || {
        let before = DB::statements(&pool).await;
        sleep(Duration::from_millis(50)).await;
        let after = DB::statements(&pool).await;
        after.zip(before).is_none_or(|(after, before)| after - before == DB::COUNTING)
    })
    .await;
    let before = DB::statements(&pool).await;
    let inner = outer.reenter().unwrap();
    let innermost = inner.reenter().unwrap();
    assert_eq!(inner.claim(), outer.claim());
    inner.fail().await.unwrap();
    innermost.abandon().await.unwrap();
    drop(outer.reenter().unwrap());
    let after = DB::statements(&pool).await;
    assert!(before.is_none() || after.zip(before).is_some_and(|(after, before)| after - before == DB::COUNTING));
    assert!(outer.is_held());
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
    outer.release().await.unwrap();
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}

async fn the_order_of_the_ends_does_not_matter<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(2));
    let outer = acquired(lock.try_acquire("k").await);
    let inner = outer.reenter().unwrap();
    let told = inner.cancellation_token();
    outer.release().await.unwrap();
    // The claim is still renewed.
    renewed(&db, [&inner]).await;
    assert!(inner.is_held() && !told.is_cancelled());
    drop(inner);
    assert!(told.is_cancelled());
    assert!(lock.shutdown(PATIENCE).await);
    let next = acquired(lock.try_acquire("k").await);
    assert!(next.taken_over_from().is_some(), "the last one was dropped");
    // Detaching one handle does not take the claim from the other handles.
    let other = next.reenter().unwrap();
    let claim = next.detach();
    renewed(&db, [&other]).await;
    assert_eq!(*other.claim(), claim);
    other.release().await.unwrap();
}

async fn a_loss_is_every_handles_loss<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(2));
    let outer = acquired(lock.try_acquire("k").await);
    let inner = outer.reenter().unwrap();
    db.take_from("k").await;
    timeout(PATIENCE, outer.lost()).await.unwrap();
    assert!(!inner.is_held());
    assert!(matches!(inner.reenter(), Err(Error::Lost { .. })));
    assert!(matches!(inner.release().await, Err(Error::Lost { .. })));
    assert!(matches!(outer.release().await, Err(Error::Lost { .. })));
}

/// Holders are not identified by thread or task. A request without the handle is treated as one of
/// any other client.
async fn without_the_handle_it_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let outer = acquired(lock.try_acquire("k").await);
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
    let set = lock.try_acquire_all(["a", "b"]).await.unwrap().acquired().unwrap();
    let again = set.reenter().unwrap();
    assert_eq!(again.claims(), set.claims());
    drop(set);
    assert!(again.is_held());
    again.release().await.unwrap();
    outer.release().await.unwrap();
}
