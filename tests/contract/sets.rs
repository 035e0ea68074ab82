//! Several keys at once: all or nothing, one lease, lost together.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Attempt, Error, LeaseLock, Reason, ResourceLock as _, Status};
use tokio::{task::JoinSet, time::timeout};

use crate::upgrade::all_columns;

harness::tests!(
    everywhere(
        each_key_has_its_row_and_its_token,
        one_that_cannot_be_had_leaves_the_others_as_they_were,
        the_loss_of_one_is_the_loss_of_all,
        an_abandonment_names_the_key_that_is_lost,
        a_dropped_set_is_abandoned,
        a_set_that_is_held_for_too_long_is_lost_and_keeps_its_keys_until_it_is_dropped,
        it_waits_for_all_and_holds_none_until_then,
        sets_do_not_deadlock,
        each_claim_of_a_set_can_be_confirmed,
        bad_sets_are_refused_at_the_door
    ),
    everywhere.alone(a_set_is_renewed_in_the_background)
);

const FOR_EVER: Duration = Duration::MAX;

async fn rows<DB: TestDatabase>(db: &TestDb<DB>, keys: &[&str]) -> Vec<Option<String>> {
    let columns = all_columns(db.server.name);
    let mut rows = Vec::new();
    for key in keys {
        rows.push(db.column(key, &columns).await);
    }
    rows
}

async fn each_key_has_its_row_and_its_token<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("b").await).fail().await.unwrap();
    let set = acquired(lock.try_acquire_all(["c", "b", "a", "b"]).await);
    let keys: Vec<_> = set.claims().iter().map(|claim| claim.key.as_str().to_owned()).collect();
    assert_eq!(keys, ["a", "b", "c"]);
    for key in &keys {
        assert_eq!(db.column(key, "status").await.as_deref(), Some("P"));
        let token = db.number(&format!("SELECT token FROM t_resource_lock WHERE key_resource = '{key}'")).await;
        assert_eq!(set.token(key).map(|token| token.get()), token);
        assert_eq!(lock.try_acquire(key).await.unwrap().refused().unwrap().reason, Reason::Held);
    }
    assert!(set.is_held() && set.taken_over_from().next().is_none() && set.token("d").is_none());
    set.renew().await.unwrap();
    set.fail().await.unwrap();
    for key in &keys {
        assert_eq!(db.column(key, "status").await.as_deref(), Some("F"));
        acquired(lock.try_acquire(key).await).release().await.unwrap();
    }
}

/// The refused attempt leaves no other key newly held, newly expired, or within a new minimum
/// interval: the rows of the other keys are unchanged, to the byte.
async fn one_that_cannot_be_had_leaves_the_others_as_they_were<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for key in ["a", "b", "d"] {
        acquired(lock.try_acquire(key).await).fail().await.unwrap();
    }
    let expired = acquired(lock.try_acquire("e").await).detach();
    db.set("e", &format!("expires_at = {}", DB::ago(1000))).await;
    let held = acquired(lock.try_acquire("c").await);
    let before = rows(&db, &["a", "b", "c", "d", "e"]).await;
    let refusal = lock.try_acquire_all(["e", "d", "c", "b", "a"]).await.unwrap().refused().unwrap();
    assert_eq!((refusal.key.as_str(), refusal.reason), ("c", Reason::Held));
    assert_eq!(rows(&db, &["a", "b", "c", "d", "e"]).await, before);
    held.release().await.unwrap();
    let set = acquired(lock.try_acquire_all(["a", "b", "c", "d", "e"]).await);
    let taken_over: Vec<_> = set.taken_over_from().map(|(claim, prior)| (claim.key.as_str(), prior.token)).collect();
    assert_eq!(taken_over, [("e", expired.token)]);
    set.release().await.unwrap();
}

async fn the_loss_of_one_is_the_loss_of_all<DB: TestDatabase>(db: TestDb<DB>) {
    for lost_by in ["the background", "a renewal", "the release"] {
        let lock = db.lock_for(Duration::from_millis(if lost_by == "the background" { 600 } else { 60_000 }));
        let set = acquired(lock.try_acquire_all(["a", "b", "c"]).await);
        let told = set.cancellation_token();
        db.take_from("b").await;
        let token = set.token("b").unwrap();
        let lost = |result| matches!(&result, Err(Error::Lost { key, token: t }) if key.as_str() == "b" && *t == token);
        match lost_by {
            "the background" => {
                timeout(PATIENCE, set.lost()).await.unwrap();
                assert!(!set.is_held() && set.time_left().is_zero());
                assert!(lost(set.release().await));
            }
            "a renewal" => {
                assert!(lost(set.renew().await));
                assert!(!set.is_held());
                drop(set);
            }
            _ => assert!(lost(set.release().await)),
        }
        assert!(told.is_cancelled());
        // The keys that were still held do not stay claimed until their leases end.
        for key in ["a", "c"] {
            eventually("the rest is given up", || async {
                match lock.try_acquire(key).await.unwrap() {
                    Attempt::Acquired(lease) => lease.release().await.is_ok(),
                    Attempt::Refused(_) => false,
                }
            })
            .await;
        }
        assert_eq!(db.column("b", "client_ip").await.as_deref(), Some("thief"));
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

async fn an_abandonment_names_the_key_that_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let set = acquired(db.lock().try_acquire_all(["a", "b", "c"]).await);
    let token = set.token("b").unwrap();
    db.lock().force_release("b", Status::Failed).await.unwrap();
    let ended = set.abandon().await;
    assert!(matches!(&ended, Err(Error::Lost { key, token: t }) if key.as_str() == "b" && *t == token), "{ended:?}");
}

async fn a_dropped_set_is_abandoned<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let set = acquired(lock.try_acquire_all(["a", "b"]).await);
    let tokens: Vec<_> = set.claims().iter().map(|claim| claim.token).collect();
    drop(set);
    assert!(lock.shutdown(PATIENCE).await);
    let next = acquired(lock.try_acquire_all(["a", "b"]).await);
    assert!(next.taken_over_from().map(|(_, prior)| prior.token).eq(tokens));
    next.abandon().await.unwrap();
}

/// Its work may not have stopped yet.
async fn a_set_that_is_held_for_too_long_is_lost_and_keeps_its_keys_until_it_is_dropped<DB: TestDatabase>(
    db: TestDb<DB>,
) {
    const MOST: Duration = Duration::from_secs(3);
    let (lock, other) = (db.lock_for(Duration::from_secs(60)).max_hold(MOST), db.lock());
    for keys in [&["a", "b"][..], &["c"]] {
        let set = acquired(lock.try_acquire_all(keys).await);
        assert!(set.time_left() <= MOST);
        timeout(PATIENCE, set.lost()).await.unwrap();
        assert!(!set.is_held() && set.time_left().is_zero());
        assert!(matches!(set.renew().await, Err(Error::Lost { .. })));
        assert!(lock.shutdown(PATIENCE).await, "nothing is under way in the background");
        for key in keys {
            assert_eq!(refused(other.try_acquire(key).await).reason, Reason::Held, "{key}");
        }
        drop(set);
        acquired(other.acquire_all(keys, PATIENCE).await).release().await.unwrap();
    }
}

async fn a_set_is_renewed_in_the_background<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(3));
    let set = acquired(lock.try_acquire_all((0..20).map(|key| key.to_string())).await);
    for _ in 0..3 {
        for (what, count) in [("some time goes by", 0), ("all are renewed", 20)] {
            let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1 AND expires_at > ";
            let with_more = format!("{sql}{}", DB::ago(-2400));
            eventually(what, || async { db.number(&with_more).await == Some(count) }).await;
        }
    }
    assert!(set.is_held());
    set.release().await.unwrap();
}

/// No key of the set is held while another is waited for.
async fn it_waits_for_all_and_holds_none_until_then<DB: TestDatabase>(db: TestDb<DB>) {
    let held = acquired(db.lock().try_acquire("b").await);
    let lock = db.lock();
    let waiting = harness::spawn({
        let lock = lock.clone();
        async move { acquired(lock.acquire_all(["a", "b", "c"], FOR_EVER).await) }
    });
    for _ in 0..20 {
        for key in ["a", "c"] {
            // The waiter may be trying the keys at this moment.
            acquired(lock.acquire(key, PATIENCE).await).release().await.unwrap();
        }
    }
    assert!(!waiting.is_finished());
    held.release().await.unwrap();
    timeout(PATIENCE, waiting).await.unwrap().unwrap().release().await.unwrap();
}

/// Overlapping sets in every order, and single keys, from four locks.
async fn sets_do_not_deadlock<DB: TestDatabase>(db: TestDb<DB>) {
    let wishes: [&[&str]; 6] = [&["a", "b"], &["b", "a"], &["c", "b"], &["a", "c"], &["b"], &["c", "b", "a"]];
    let mut tasks = JoinSet::new();
    for object in 0..4 {
        let lock = LeaseLock::new(db.pool_of(2).await).fair(object % 2 == 1);
        for wish in wishes {
            let lock = lock.clone();
            tasks.spawn(harness::task(async move {
                for _ in 0..3 {
                    acquired(lock.acquire_all(wish, FOR_EVER).await).release().await.unwrap();
                }
            }));
        }
    }
    timeout(3 * PATIENCE, tasks.join_all()).await.expect("all of them were served");
    eventually("no ticket is left", || async {
        db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await == Some(0)
    })
    .await;
}

async fn each_claim_of_a_set_can_be_confirmed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let set = acquired(lock.try_acquire_all(["a", "b"]).await);
    let mut tx = db.pool.begin_with(DB::BEGIN).await.unwrap();
    for claim in set.claims() {
        assert_eq!(lock.confirm(claim, &mut tx).await.unwrap().0, 1);
    }
    tx.commit().await.unwrap();
    set.release().await.unwrap();
}

async fn bad_sets_are_refused_at_the_door<DB: TestDatabase>(db: TestDb<DB>) {
    // A hundred keys take long when each needs one or two statements.
    let lock = db.builder().time_limit(3 * PATIENCE).build().unwrap();
    for count in [0, 101] {
        let keys = (0..count).map(|key| key.to_string());
        let error = lock.try_acquire_all(keys).await.unwrap_err();
        assert!(
            matches!(&error, Error::Invalid(_)) && error.to_string().contains(&format!("a set of {count} keys")),
            "{error}"
        );
    }
    assert!(matches!(lock.try_acquire_all(["a", " b"]).await, Err(Error::Invalid(_))));
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
    acquired(lock.try_acquire_all((0..100).map(|key| key.to_string())).await).release().await.unwrap();
}
