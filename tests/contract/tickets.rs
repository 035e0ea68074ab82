//! Tickets of waiters in order: whose they are, and which of them are deleted. `fair.rs` has the
//! order of the grants.

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::Reason;
use tokio::time::timeout;

use crate::{
    line::{Line, SHORT},
    waiters::places,
};

harness::tests!(
    everywhere(a_waiter_whose_ticket_is_gone_draws_a_new_one, tickets_of_other_keys_hide_none),
    servers(a_ticket_that_is_kept_alive_after_all_is_not_deleted)
);

/// The tickets of how many waiters are read, and some more.
const MANY: i64 = 20;

/// Its ticket has lapsed, and another waiter has deleted it. Others have come since, whose
/// tickets are alive: it is not behind them without a ticket of its own.
async fn a_waiter_whose_ticket_is_gone_draws_a_new_one<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let lock = db.lock().fair(true);
    let waiter = harness::spawn(async move { lock.acquire("k", 9 * PATIENCE).await });
    eventually("it has a ticket", async || places(&db).await == 1).await;
    let first = db.number("SELECT MAX(ticket) FROM t_resource_lock_queue").await.unwrap();
    // The ticket becomes that of another waiter, which has come later.
    let (later, alive) = (first + 1_000, DB::ago(-600_000));
    let changed = format!("UPDATE t_resource_lock_queue SET ticket = {later}, alive_until = {alive}");
    assert_eq!(db.execute(&changed).await, 1);
    let others = format!("SELECT COUNT(*) FROM t_resource_lock_queue WHERE ticket <> {later}");
    eventually("it has a new ticket", async || db.number(&others).await == Some(1)).await;
    db.execute(&format!("DELETE FROM t_resource_lock_queue WHERE ticket = {later}")).await;
    holder.release().await.unwrap();
    acquired(timeout(PATIENCE, waiter).await.unwrap().unwrap()).release().await.unwrap();
}

/// More tickets than are read at once, all of them older than the one that counts.
async fn tickets_of_other_keys_hide_none<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().fair(true);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let alive = DB::ago(-600_000);
    let mut rows: Vec<_> = (1..=MANY).map(|number| format!("('other', {number}, {alive})")).collect();
    rows.push(format!("('k', {}, {alive})", MANY + 1));
    let insert = "INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES";
    db.execute(&format!("{insert} {}", rows.join(", "))).await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Queued);
}

/// Its heartbeat was late, and arrives between the look at the queue and the deletion.
async fn a_ticket_that_is_kept_alive_after_all_is_not_deleted<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let lock = line.lock.clone().fair(true);
    let insert = "INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES";
    let lapsed = format!("{insert} ('k', 1, {})", DB::ago(1_000));
    // Prepares the statements, and shows that a ticket without a heartbeat is deleted.
    db.execute(&lapsed).await;
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    assert_eq!(places(&db).await, 0);
    eventually("the connection is idle", async || line.pool.num_idle() == 1).await;
    db.execute(&lapsed).await;
    // The first request is the look.
    let attempt = line.held(Way::Requests, 1, lock.try_acquire("k"), async |proxy| {
        db.execute(&format!("UPDATE t_resource_lock_queue SET alive_until = {}", DB::ago(-600_000))).await;
        proxy.open();
    });
    acquired(attempt.await).release().await.unwrap();
    assert_eq!(places(&db).await, 1);
}
