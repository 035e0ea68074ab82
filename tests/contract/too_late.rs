//! Claims of several keys, and tickets, that the server carries out in part or after their limit.
//! `own_sessions.rs` has the claims of single keys.

use std::time::Duration;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::{LeaseLock, Reason};
use tokio::time::{sleep, timeout};

use crate::{line::trips, neighbours::whole, ticks_replies::held_or_over, waiters::places};

harness::tests!(
    servers.each(a_set_of_which_one_row_is_locked_takes_none),
    servers[DIRECT](
        a_set_that_arrives_after_its_caller_has_given_up_takes_nothing,
        a_ticket_that_arrives_after_its_caller_has_given_up_is_not_added
    )
);

const LIMIT: Duration = Duration::from_millis(500);
/// How often a test begins again that was held up by the machine for so long that it shows nothing.
const ROUNDS: usize = 10;

/// The others are not locked until the end of a lease that no task knows.
async fn a_set_of_which_one_row_is_locked_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire_all(["a", "k", "z"]).await).release().await.unwrap();
    let mut other = db.row_locked().await;
    for free in ["a", "z"] {
        let before = whole(&db, free).await;
        let refusal = refused(lock.try_acquire_all([free, "k"]).await);
        assert_eq!((refusal.reason, refusal.key.as_str()), (Reason::Busy, "k"));
        assert_eq!(whole(&db, free).await, before);
    }
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
}

/// On PostgreSQL, one statement claims all of them. On MySQL and MariaDB, the transaction of a set
/// ends with its connection.
async fn a_set_that_arrives_after_its_caller_has_given_up_takes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["k", "l"];
    let proxy = db.proxy().await;
    let late = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(LIMIT).build().unwrap();
    // Opens the sessions, and prepares the statement.
    acquired(late.acquire_all(keys, PATIENCE).await).release().await.unwrap();
    let rows = async || (whole(&db, "k").await, whole(&db, "l").await);
    let before = rows().await;
    proxy.hold(Way::Requests);
    late.try_acquire_all(keys).await.unwrap_err();
    let replies = proxy.seen(Way::Replies);
    sleep(LIMIT / 5).await;
    proxy.open();
    eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
    for _ in 0..20 {
        assert_eq!(rows().await, before);
        sleep(Duration::from_millis(10)).await;
    }
}

/// No process would keep it alive, and it would hold up the queue.
async fn a_ticket_that_arrives_after_its_caller_has_given_up_is_not_added<DB: TestDatabase>(db: TestDb<DB>) {
    let _holder = acquired(db.lock().try_acquire("k").await);
    for _ in 0..ROUNDS {
        let proxy = db.proxy().await;
        let late = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(PATIENCE).build().unwrap().fair(true);
        // Prepares the statements that come first: the look at the queue, and the claim.
        assert_eq!(refused(late.try_acquire("k").await).reason, Reason::Held);
        // After these, and after the preparation of its own statement.
        proxy.hold_after(Way::Requests, trips(&db, 3, 4));
        let waiter = harness::spawn(async move { late.acquire("k", LIMIT).await.map(drop) });
        let is_held = held_or_over(&proxy, Way::Requests, &waiter).await;
        timeout(PATIENCE, waiter).await.unwrap().unwrap().unwrap_err();
        if !is_held {
            continue;
        }
        let replies = proxy.seen(Way::Replies);
        sleep(LIMIT / 5).await;
        proxy.open();
        eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
        for _ in 0..20 {
            assert_eq!(places(&db).await, 0);
            sleep(Duration::from_millis(10)).await;
        }
        return;
    }
    panic!("no request was held, each time");
}
