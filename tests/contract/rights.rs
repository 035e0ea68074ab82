//! The rights on the tables that `docs/threats.md` states.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

use harness::{DIRECT, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{
    Error, LeaseLock, Reason, Schedules, Status, Tick, admin::ListOptions, errors::DatabaseFault, jobs::TickOutcome,
};
use sqlx::Pool;
use tokio::{runtime::Handle, task::block_in_place};

use crate::ticks::{LONG, back, due};

harness::tests!(servers[DIRECT](the_rights_that_are_stated_are_enough));

const WAIT: Duration = Duration::from_secs(20);

async fn the_rights_that_are_stated_are_enough<DB: TestDatabase>(db: TestDb<DB>) {
    let (row, place, add) = ("SELECT, INSERT, UPDATE", "SELECT, INSERT, UPDATE, DELETE", "SELECT, INSERT");
    let rights = [
        (row, "t_resource_lock"),
        (place, "t_resource_lock_queue"),
        (row, "t_resource_schedule"),
        (if db.server.name == "postgres" { add } else { row }, "t_resource_schedule_run"),
        (place, "t_resource_schedule_instance"),
        (row, "t_resource_schedule_times"),
        (row, "t_resource_schedule_detail"),
        (place, "t_resource_order"),
        (add, "t_resource_change"),
    ];
    let user = db.user("hunter2", &rights).await;
    let own = pool::<DB>(&user.url, 4).await;
    // A test that fails still removes the user.
    let used = AssertUnwindSafe(|| block_in_place(|| Handle::current().block_on(use_all(&db, own.clone()))));
    let used = catch_unwind(used);
    own.close().await;
    user.remove(&db).await;
    if let Err(panic) = used {
        resume_unwind(panic);
    }
}

async fn use_all<DB: TestDatabase>(db: &TestDb<DB>, pool: Pool<DB>) {
    rowlock::migrate(&pool).await.unwrap(); // the tables exist, and are only checked
    let lock = LeaseLock::new(pool.clone());
    let lease = acquired(lock.try_acquire("k").await);
    lease.renew().await.unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
    // A separate lock, so that the waiter sends a claim and creates a ticket.
    let next = LeaseLock::new(pool.clone()).fair(true);
    let waiting = harness::spawn(async move { acquired(next.acquire("k", WAIT).await) });
    eventually("it stands in line", || async {
        DB::number(&pool, "SELECT COUNT(*) FROM t_resource_lock_queue").await == Some(1)
    })
    .await;
    lease.release().await.unwrap();
    waiting.await.unwrap().abandon().await.unwrap();
    let set = lock.acquire_all(["k", "l"], WAIT).await.unwrap();
    set.release().await.unwrap();
    lock.transaction("k", async |_| Ok::<_, std::convert::Infallible>(())).await.unwrap();
    lock.force_release("l", Status::Succeeded).await.unwrap().unwrap();
    assert_eq!(lock.list(&ListOptions::default()).await.unwrap().len(), 2);
    db.set("l", &format!("begin_time = {0}, end_time = {0}", DB::ago(9 * 3_600_000))).await;
    let error = lock.forget(Duration::ZERO).await.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::Failed { .. })),
        "to forget takes the right to delete: {error}"
    );
    assert!(!format!("{error} {error:?}").contains("hunter2"));
    use_schedules(db, pool).await;
}

/// A tick that is missed, lost, failed and run again.
async fn use_schedules<DB: TestDatabase>(db: &TestDb<DB>, pool: Pool<DB>) {
    let schedule = due(db, "s").await.retry(1, Duration::ZERO).exclusive_with("k");
    back(db, "s", LONG).await;
    let schedules = Schedules::new(pool).on(schedule, async |tick: Tick<DB>| match tick.attempt() {
        1 => Err("no"),
        _ => Ok(()),
    });
    assert!(matches!(schedules.try_tick("s").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    schedules.trigger("s").await.unwrap();
    schedules.pause("s").await.unwrap();
    schedules.resume("s").await.unwrap();
    assert_eq!(schedules.try_tick("s").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(schedules.list().await.unwrap().len(), 1);
    assert_eq!(schedules.history("s", 9).await.unwrap().len(), 2);
    for error in [
        schedules.forget_history(Duration::ZERO).await.map(drop).unwrap_err(),
        schedules.reset("s").await.map(drop).unwrap_err(),
    ] {
        assert!(
            matches!(error, Error::Database(DatabaseFault::Failed { .. })),
            "it takes the right to delete: {error}"
        );
    }
}
