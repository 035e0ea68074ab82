//! Claims that are put back, because their callers have left: the row is free, and as it was
//! before, whatever statement claimed it and however often.

use std::{
    cell::RefCell,
    pin::Pin,
    task::{Context, Waker},
    time::Duration,
};

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
};
use rowlock::LeaseLock;
use tokio::{task::yield_now, time::timeout};

use crate::{
    batched::{all_but_one_held, line},
    grants_without_caller::{ran, record, unheard},
    line::standing,
};

harness::tests!(
    everywhere.each(a_claim_without_an_interval_is_put_back),
    servers.each(a_claim_that_was_granted_beside_others_is_put_back, a_claim_that_was_sent_again_is_put_back)
);

/// A tenth of it passes before a request without a reply is sent again.
const TIME_LIMIT: Duration = Duration::from_secs(6);

/// Checks that nothing of the claim is left in the row.
async fn is_without_a_claim<DB: TestDatabase>(db: &TestDb<DB>) {
    let nothing = "lock_flag = 0 AND holder IS NULL AND expires_at IS NULL AND claimed_at IS NULL";
    let sql = format!("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND {nothing}");
    assert_eq!(db.number(&sql).await, Some(1));
}

/// Without an interval, SQLite claims by another statement.
async fn a_claim_without_an_interval_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    for status in ["S", "F"] {
        let before = RefCell::new(Vec::new());
        unheard(&db, &lock, &["k"], async || {
            ran(&db, status).await;
            *before.borrow_mut() = record(&db).await;
        })
        .await;
        assert_eq!(record(&db).await, before.into_inner(), "{status}");
        is_without_a_claim(&db).await;
    }
}

/// One statement has granted several keys, of which one has lost its caller.
async fn a_claim_that_was_granted_beside_others_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let line = line(&db).await;
    ran(&db, "F").await;
    let before = record(&db).await;
    let (first, mut wanted) = all_but_one_held(&line, &["first", "k", "other"]).await;
    assert_eq!(standing(&db).await, 3, "both are granted, and do not know it");
    let in_progress = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1 AND status = 'P'";
    assert_eq!(db.number(in_progress).await, Some(3));
    drop(wanted.remove(0));
    line.proxy.open();
    let other = acquired(timeout(PATIENCE, wanted.remove(0)).await.unwrap());
    assert!(line.lock.shutdown(PATIENCE).await);
    assert_eq!(record(&db).await, before);
    is_without_a_claim(&db).await;
    assert!(first.is_held() && other.is_held());
}

/// The reply to the first request does not arrive, and the second one finds its own claim.
async fn a_claim_that_was_sent_again_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(4)).time_limit(TIME_LIMIT).build().unwrap();
    acquired(lock.acquire("k", PATIENCE).await).release().await.unwrap();
    ran(&db, "F").await;
    let before = record(&db).await;
    let mut attempt = Box::pin(lock.try_acquire("k"));
    proxy.hold(Way::Replies);
    until_held(attempt.as_mut(), &proxy).await;
    let ends = async || db.cell("expires_at", "t_resource_lock WHERE key_resource = 'k'").await;
    let first = ends().await;
    proxy.let_others_pass();
    eventually("it is sent again", async || ends().await != first).await;
    drop(attempt);
    eventually("it is put back", async || standing(&db).await == 0).await;
    assert_eq!(record(&db).await, before);
    is_without_a_claim(&db).await;
}

/// Polls the attempt until a reply to it is held.
async fn until_held<T>(mut attempt: Pin<&mut impl Future<Output = T>>, proxy: &Proxy) {
    let polled = async {
        loop {
            let polled = attempt.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending(), "its reply is held");
            yield_now().await;
        }
    };
    tokio::select! {
        () = polled => {}
        () = proxy.held(Way::Replies) => {}
    }
}
