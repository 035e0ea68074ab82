//! A waiter may be dropped at any await. No ticket outlives its bound, and no claim outlives its
//! lease.

use std::{cell::RefCell, time::Duration};

use harness::{TestDatabase, TestDb, eventually};
use tokio::{
    join,
    time::{Instant, sleep},
};

use crate::cancelled::{Stage, at_every_stop_between};

harness::tests!(
    everywhere(a_waiter),
    everywhere.long(a_waiter_for_several_keys, a_waiter_in_order, a_waiter_for_several_keys_in_order)
);

/// How long the key is held while another caller waits: enough for several claim requests.
const HELD: Duration = Duration::from_millis(50);
/// How long a ticket without heartbeats stays alive.
const KEPT_MILLIS: i64 = 12_000;

async fn a_waiter<DB: TestDatabase>(db: TestDb<DB>) {
    waiters(&db, &[""], false).await;
}

async fn a_waiter_in_order<DB: TestDatabase>(db: TestDb<DB>) {
    waiters(&db, &[""], true).await;
}

async fn a_waiter_for_several_keys<DB: TestDatabase>(db: TestDb<DB>) {
    waiters(&db, &["", " and another"], false).await;
}

async fn a_waiter_for_several_keys_in_order<DB: TestDatabase>(db: TestDb<DB>) {
    waiters(&db, &["", " and another"], true).await;
}

/// Waits for the stage's key with each of these suffixes, while another holder has the keys.
async fn waiters<DB: TestDatabase>(db: &TestDb<DB>, wanted: &[&str], fair: bool) {
    let keys = |stage: &Stage<'_, DB>| wanted.iter().map(|end| format!("{}{end}", stage.key)).collect::<Vec<_>>();
    let prepare = async |stage: &Stage<'_, DB>| {
        if fair || wanted.len() > 1 {
            stage.warm().await;
        }
        db.lock().try_acquire_all(keys(stage)).await.unwrap().acquired().expect("no other holder has them")
    };
    let act = async |stage: &Stage<'_, DB>, holder: rowlock::LeaseSet<DB>| {
        let lock = stage.lock.clone().fair(fair);
        let waiting = async {
            match &*keys(stage) {
                [key] => drop(lock.acquire(key, Duration::MAX).await.unwrap()),
                keys => drop(lock.acquire_all(keys, Duration::MAX).await.unwrap()),
            }
        };
        let holding = async {
            sleep(HELD).await;
            holder.release().await.unwrap();
        };
        join!(waiting, holding);
    };
    let unheard = RefCell::new(Vec::new());
    let after = async |stage: &Stage<'_, DB>| {
        for key in &keys(stage)[1..] {
            stage.can_be_had(key).await;
        }
        if !leaves(db, &stage.key).await {
            unheard.borrow_mut().push(stage.key.clone());
        }
    };
    at_every_stop_between(db, prepare, act, async |stage| stage.pool_serves().await, after).await;
    let unheard = unheard.into_inner();
    // Only the statements that draw a ticket can be executed although their caller was dropped: one
    // request and its reply, or two, each prepared before.
    let most = if db.server.name == "sqlite" || !fair { 0 } else { 8 };
    assert!(unheard.len() <= most, "places that are not left: {unheard:?}");
    let alive = |millis| format!("SELECT COUNT(*) FROM t_resource_lock_queue WHERE alive_until > {}", DB::ago(millis));
    assert_eq!(db.number(&alive(-KEPT_MILLIS)).await, Some(0));
    eventually("a ticket without an owner lapses", || async { db.number(&alive(0)).await == Some(0) }).await;
}

/// Returns whether the tickets of this stage are deleted soon.
async fn leaves<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> bool {
    let started = Instant::now();
    let sql = format!("SELECT COUNT(*) FROM t_resource_lock_queue WHERE key_resource LIKE '{key}%'");
    while db.number(&sql).await != Some(0) {
        if started.elapsed() > Duration::from_secs(2) {
            return false;
        }
        sleep(Duration::from_millis(10)).await;
    }
    true
}
