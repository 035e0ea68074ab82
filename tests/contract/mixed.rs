//! Queueing in unusual cases: fair and plain locks wait for one key, and the ticket of a
//! waiter is deleted.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, events, eventually, refused};
use rowlock::{Lease, LeaseLock, Reason};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::timeout,
};

use crate::waiters::places;

harness::tests!(
    everywhere(no_waiter_is_forgotten_where_some_are_fair, a_waiter_whose_place_is_gone_is_not_the_first_any_more),
    postgres(numbers_that_do_not_grow_hang_no_waiter)
);

async fn rounds<DB: TestDatabase>(lock: LeaseLock<DB>) {
    for _ in 0..3 {
        let lease = acquired(lock.acquire("k", Duration::MAX).await);
        tokio::time::sleep(Duration::from_millis(1)).await;
        lease.release().await.unwrap();
    }
}

/// There is no order between fair and plain locks. Within each lock the waiters are
/// served in the order of their calls.
async fn no_waiter_is_forgotten_where_some_are_fair<DB: TestDatabase>(db: TestDb<DB>) {
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let fair = db.lock().fair(true);
        for _ in 0..2 {
            tasks.spawn(harness::task(rounds(fair.clone())));
        }
    }
    let plain = db.lock();
    for _ in 0..8 {
        tasks.spawn(harness::task(rounds(plain.clone())));
    }
    let mut done = 0;
    let all = async {
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
            done += 1;
        }
    };
    let all = timeout(3 * PATIENCE, all).await;
    assert!(all.is_ok(), "{done} of 16 tasks had all of their turns");
    eventually("no place is left", || async { places(&db).await == 0 }).await;
}

type Waiter<DB> = JoinHandle<Lease<DB>>;

fn waiter<DB: TestDatabase>(lock: LeaseLock<DB>, key: &str) -> Waiter<DB> {
    let key = key.to_owned();
    harness::spawn(async move { acquired(lock.acquire(&key, Duration::MAX).await) })
}

/// The case of a process that sent no heartbeat for too long. Other waiters have deleted its
/// ticket, and are now before it.
async fn a_waiter_whose_place_is_gone_is_not_the_first_any_more<DB: TestDatabase>(db: TestDb<DB>) {
    let key = format!("passed over on {}", db.server.name);
    let holder = acquired(db.lock().try_acquire(&key).await);
    let mut passed_over = waiter(LeaseLock::new(db.pool_of(2).await).fair(true), &key);
    eventually("it has a place", || async { places(&db).await == 1 }).await;
    // The first refusal happened before the waiter had its ticket. The next refusals are those of
    // the first waiter in the queue.
    let asked = || events::about(&key).iter().filter(|line| line.contains(": refused ")).count();
    let before = asked();
    eventually("it asks as the first in line", || async { asked() >= before + 2 }).await;
    let alive = DB::ago(-60_000);
    db.execute(&format!(
        "INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES ('{key}', -1, {alive})"
    ))
    .await;
    db.execute("DELETE FROM t_resource_lock_queue WHERE ticket > 0").await;
    let next = waiter(LeaseLock::new(db.pool_of(2).await).fair(true), &key);
    eventually("another takes a place", || async { places(&db).await == 2 }).await;
    holder.release().await.unwrap();
    assert_eq!(refused(db.lock().fair(true).try_acquire(&key).await).reason, Reason::Queued);
    db.execute("DELETE FROM t_resource_lock_queue WHERE ticket = -1").await;
    let lease = tokio::select! {
        lease = next => lease.unwrap(),
        granted = &mut passed_over => panic!("granted before the one whose turn it is: {granted:?}"),
        () = tokio::time::sleep(PATIENCE) => panic!("no task is granted the key"),
    };
    let token = lease.token();
    lease.release().await.unwrap();
    let lease = timeout(PATIENCE, passed_over).await.expect("its turn has come").unwrap();
    assert!(lease.token() > token);
    lease.release().await.unwrap();
    eventually("no place is left", || async { places(&db).await == 0 }).await;
}

/// Several nodes of a cluster can assign ticket numbers out of order: the first waiter is at the
/// head of the queue, and the second one has the lower number.
async fn numbers_that_do_not_grow_hang_no_waiter<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let lock = db.lock().fair(true);
    let mut tasks = JoinSet::new();
    for (before, number) in [1000, 1].into_iter().enumerate() {
        db.execute(&format!("ALTER TABLE t_resource_lock_queue ALTER COLUMN ticket RESTART WITH {number}")).await;
        tasks.spawn(harness::task(rounds(lock.clone())));
        let before = i64::try_from(before).unwrap();
        eventually("it has a place", || async { places(&db).await == before + 1 }).await;
    }
    holder.release().await.unwrap();
    timeout(PATIENCE, tasks.join_all()).await.expect("both have their turns");
}
