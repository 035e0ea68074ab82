//! What `shutdown` returns while a claim may stand that no task holds.

use std::{
    task::{Context, Poll, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way};

use crate::line::{Line, SHORT, standing};

harness::tests!(servers(
    a_dropped_claim_without_a_reply_is_left_behind_for_its_lease,
    a_lease_whose_renewal_has_no_reply_is_not_ended_before_its_row,
    a_lost_lease_whose_row_was_renewed_is_ended_when_it_is_dropped,
    a_lease_that_was_taken_up_is_left_behind_for_the_time_of_its_row
));

async fn a_dropped_claim_without_a_reply_is_left_behind_for_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 4 * SHORT, PATIENCE).await;
    line.proxy.hold_after(Way::Replies, 0);
    let mut attempt = Box::pin(line.lock.try_acquire("k"));
    let sent = async {
        loop {
            assert!(matches!(attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = sent => {}
        () = line.proxy.held(Way::Replies) => {}
    }
    drop(attempt);
    assert_eq!(standing(&db).await, 1);
    assert!(!line.lock.shutdown(PATIENCE).await, "the claim stands");
    line.proxy.cut();
    eventually("its lease has ended", || line.lock.shutdown(PATIENCE)).await;
    assert_eq!(standing(&db).await, 0);
    acquired(db.lock().try_acquire("k").await);
}

async fn a_lease_whose_renewal_has_no_reply_is_not_ended_before_its_row<DB: TestDatabase>(db: TestDb<DB>) {
    let Line { proxy, lock, .. } = Line::with_free_row(&db, 4 * SHORT, PATIENCE).await;
    let lease = acquired(lock.try_acquire("k").await);
    // The row shows that it is renewed, in the background.
    proxy.during(Way::Replies, 0, async {}, async |_| {}).await;
    // From now on, connections are refused.
    drop(proxy);
    drop(lease);
    assert!(lock.shutdown(2 * PATIENCE).await, "it has ended by itself");
    assert_eq!(standing(&db).await, 0);
}

async fn a_lost_lease_whose_row_was_renewed_is_ended_when_it_is_dropped<DB: TestDatabase>(db: TestDb<DB>) {
    let Line { proxy, lock, .. } = Line::with_free_row(&db, 8 * SHORT, PATIENCE).await;
    let lease = acquired(lock.try_acquire("k").await);
    // Its renewals are carried out, and have no reply.
    proxy.hold(Way::Replies);
    eventually("it is lost", async || !lease.is_held()).await;
    proxy.open();
    drop(lease);
    assert!(lock.shutdown(PATIENCE).await, "it has ended");
    assert_eq!(standing(&db).await, 0);
}

async fn a_lease_that_was_taken_up_is_left_behind_for_the_time_of_its_row<DB: TestDatabase>(db: TestDb<DB>) {
    let Line { proxy, lock, .. } = Line::with_free_row(&db, SHORT, PATIENCE).await;
    let made = acquired(db.lock_for(Duration::from_secs(3600)).try_acquire("k").await);
    let lease = lock.attach("k", made.claim().holder).await.unwrap();
    made.detach();
    proxy.hold_everything();
    drop(lease);
    assert!(!lock.shutdown(5 * SHORT).await, "it stands");
    proxy.open();
    assert!(lock.shutdown(PATIENCE).await, "it is ended");
    assert_eq!(standing(&db).await, 0);
}
