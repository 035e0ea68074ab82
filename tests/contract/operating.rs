//! Operator actions, and their effects on other clients.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{
    Error, Reason, Rules, Status,
    admin::{ForcedRelease, ListOptions, LockState},
    errors::DatabaseFault,
};
use tokio::time::timeout;

harness::tests!(
    everywhere(
        list_shows_each_state_in_the_order_of_keys,
        list_is_paged_and_filtered,
        inspect_looks_at_one_key,
        a_forced_release_frees_the_key_and_the_old_holder_finds_out,
        a_forced_release_is_what_article_rules_wait_for,
        a_forced_release_of_what_was_seen_frees_nothing_else,
        a_claim_that_is_replaced_while_it_is_forced_stands,
        forget_deletes_unused_rows_and_nothing_else,
        forget_deletes_the_tickets_of_waiters_that_died_long_ago,
        forget_goes_through_more_rows_than_a_page
    ),
    everywhere.alone(a_forced_release_does_not_pass_a_transaction_at_the_row)
);

const HOUR: Duration = Duration::from_secs(3600);

async fn list_shows_each_state_in_the_order_of_keys<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("me").build().unwrap();
    let _held = acquired(lock.try_acquire("1 held").await);
    let _expired = acquired(lock.try_acquire("2 expired").await);
    db.set("2 expired", &format!("expires_at = {}", DB::ago(1000))).await;
    let _foreign = acquired(lock.try_acquire("3 foreign").await);
    db.set("3 foreign", "claimed_at = NULL").await;
    for (key, status) in [("4 window", Status::Succeeded), ("5 failed", Status::Failed), ("6 free", Status::Succeeded)]
    {
        acquired(lock.try_acquire(key).await).end(status).await.unwrap();
    }
    for key in ["5 failed", "6 free"] {
        db.set(key, &format!("begin_time = {}", DB::ago(2 * 3_600_000))).await;
    }
    let lock = db.lock().min_interval(HOUR);
    let entries = lock.list(&ListOptions::default()).await.unwrap();
    let seen: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.state)).collect();
    use LockState::*;
    let expected = [
        ("1 held", Held),
        ("2 expired", Expired),
        ("3 foreign", HeldByAnotherProgram),
        ("4 window", WithinMinInterval),
        ("5 failed", Failed),
        ("6 free", Free),
    ];
    assert_eq!(seen, expected);
    assert!(entries.iter().all(|entry| entry.by == "me" && entry.token.get() > 0 && entry.since.is_some()));
    let took = entries[3].ended.unwrap() - entries[3].since.unwrap();
    assert!((0..600).contains(&took.num_seconds()), "{took}");
    assert!((entries[3].until.unwrap() - entries[3].since.unwrap()).num_seconds() == 3600);
    assert!(entries[0].holder.is_some() && entries[5].holder.is_none() && entries[5].status == "S");
}

async fn list_is_paged_and_filtered<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let mut leases = Vec::new();
    for number in 0..25 {
        leases.push(acquired(lock.try_acquire(&format!("job {number:02}")).await));
    }
    for lease in leases.drain(..20) {
        lease.release().await.unwrap();
    }
    let _other = acquired(lock.try_acquire("other_%").await);
    let (mut filter, mut keys) = (ListOptions::default().limit(10).prefix("job "), Vec::new());
    loop {
        let page = lock.list(&filter).await.unwrap();
        assert!(page.len() <= 10);
        let Some(last) = page.last() else { break };
        filter = filter.after(&last.key);
        keys.extend(page.into_iter().map(|entry| entry.key));
    }
    assert_eq!(keys, (0..25).map(|number| format!("job {number:02}")).collect::<Vec<_>>());
    assert_eq!(lock.list(&ListOptions::default().claimed()).await.unwrap().len(), 6);
    assert_eq!(lock.list(&ListOptions::default().prefix("other_%")).await.unwrap().len(), 1, "no wildcards");
    assert_eq!(lock.list(&ListOptions::default().prefix("_").claimed()).await.unwrap().len(), 0);
}

async fn inspect_looks_at_one_key<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    assert_eq!(lock.inspect("k").await.unwrap(), None);
    let lease = acquired(lock.try_acquire("k").await);
    let entry = lock.inspect("k").await.unwrap().unwrap();
    assert_eq!((entry.state, entry.token, entry.holder), (LockState::Held, lease.token(), Some(lease.claim().holder)));
    assert!(matches!(lock.inspect("").await, Err(Error::Invalid(_))));
}

async fn a_forced_release_frees_the_key_and_the_old_holder_finds_out<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(2));
    let old = acquired(lock.try_acquire("k").await);
    let token = lock.force_release("k", Status::default()).await.unwrap().unwrap();
    assert!(token > old.token());
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
    timeout(Duration::from_secs(20), old.lost()).await.unwrap();
    let next = acquired(lock.try_acquire("k").await);
    assert!(next.token() > token && next.taken_over_from().is_none());
    assert!(matches!(old.fail().await, Err(Error::Lost { .. })));
    next.release().await.unwrap();
    assert_eq!(lock.force_release("absent", Status::Failed).await.unwrap(), None);
}

async fn a_forced_release_is_what_article_rules_wait_for<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().rules(Rules::Article);
    acquired(lock.try_acquire("k").await).fail().await.unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::LastRunFailed);
    lock.force_release("k", Status::Succeeded).await.unwrap().unwrap();
    let crashed = acquired(lock.try_acquire("k").await);
    db.set("k", &format!("expires_at = {}", DB::ago(1))).await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::TimedOutUnfinished);
    lock.force_release("k", Status::Failed).await.unwrap().unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::LastRunFailed);
    assert!(matches!(crashed.renew().await, Err(Error::Lost { .. })));
}

async fn a_forced_release_of_what_was_seen_frees_nothing_else<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let look = async || lock.inspect("k").await.unwrap().unwrap();
    let force = async |seen| lock.force_release_if_unchanged(&seen, Status::Failed).await.unwrap();
    let left_alone = async |seen| match force(seen).await {
        ForcedRelease::Changed(now) => now,
        ForcedRelease::Released(token) => panic!("released under {token}"),
    };

    let first = acquired(lock.try_acquire("k").await);
    let seen = look().await;
    first.release().await.unwrap();
    let now = left_alone(seen.clone()).await.unwrap();
    assert_eq!((now.state, now.status.as_str(), now.token), (LockState::Free, "S", seen.token), "a success stays one");
    let second = acquired(lock.try_acquire("k").await);
    let now = left_alone(seen).await.unwrap();
    assert_eq!((now.state, now.token, now.holder), (LockState::Held, second.token(), Some(second.claim().holder)));
    second.renew().await.unwrap();

    // A program that knows no tokens leaves the token and the holder of the claim before.
    let seen = look().await;
    db.set("k", &format!("begin_time = {}, end_time = {0}", DB::ago(-1000))).await;
    assert_eq!(left_alone(seen).await.unwrap().state, LockState::HeldByAnotherProgram);
    let seen = look().await;
    db.set("k", "lock_flag = 0, status = 'F'").await;
    db.set("k", &format!("end_time = {}", DB::ago(-2000))).await;
    assert_eq!(left_alone(seen).await.unwrap().state, LockState::Failed);
    db.set("k", &format!("lock_flag = 1, begin_time = {}", DB::ago(-3000))).await;
    assert!(matches!(force(look().await).await, ForcedRelease::Released(_)), "of another program");
    let seen = look().await;
    assert!(matches!(force(seen.clone()).await, ForcedRelease::Released(token) if token > seen.token), "of none");

    let third = acquired(lock.try_acquire("k").await);
    let seen = look().await;
    third.renew().await.unwrap();
    let ForcedRelease::Released(token) = force(seen.clone()).await else { panic!("a renewal is no change") };
    assert!(token > third.token());
    assert!(matches!(third.renew().await, Err(Error::Lost { .. })));
    db.execute("DELETE FROM t_resource_lock").await;
    assert_eq!(left_alone(seen).await, None);
}

/// The row is locked while the forced release is under way, and is another claim's when it is free.
async fn a_claim_that_is_replaced_while_it_is_forced_stands<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().time_limit(2 * PATIENCE).build().unwrap();
    let _old = acquired(lock.try_acquire("k").await);
    let seen = lock.inspect("k").await.unwrap().unwrap();
    let mut other = db.row_locked().await;
    let forcing = harness::spawn({
        let (lock, seen) = (lock.clone(), seen.clone());
        async move { lock.force_release_if_unchanged(&seen, Status::Failed).await }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!forcing.is_finished(), "it waits for the row");
    DB::execute_on(&mut other, "UPDATE t_resource_lock SET token = token + 1, client_ip = 'next'").await.unwrap();
    DB::execute_on(&mut other, "COMMIT").await.unwrap();
    let ForcedRelease::Changed(Some(now)) = forcing.await.unwrap().unwrap() else { panic!("it was released") };
    assert_eq!((now.state, now.by.as_str(), now.token.get()), (LockState::Held, "next", seen.token.get() + 1));
    assert_eq!(lock.inspect("k").await.unwrap().unwrap().holder, seen.holder);
}

/// On servers, a forced release waits for a row that a transaction has locked, up to the time
/// limit. It never frees the row while the transaction has it locked.
async fn a_forced_release_does_not_pass_a_transaction_at_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().time_limit(Duration::from_millis(300)).build().unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    let mut other = db.row_locked().await;
    let error = lock.force_release("k", Status::Succeeded).await.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::TimedOut { .. }))
            && error.to_string().contains("releasing by force \"k\""),
        "{error}"
    );
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    drop(other);
    let patient = db.builder().time_limit(Duration::from_secs(20)).build().unwrap();
    patient.force_release("k", Status::Succeeded).await.unwrap().unwrap();
    assert!(matches!(lease.renew().await, Err(Error::Lost { .. })));
}

async fn forget_deletes_unused_rows_and_nothing_else<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for key in ["old", "young", "window", "failed", "strange", "never begun"] {
        acquired(lock.try_acquire(key).await).release().await.unwrap();
    }
    let _held = acquired(lock.try_acquire("held").await);
    let ago = |hours: i64| DB::ago(hours * 3_600_000);
    for key in ["old", "failed", "strange", "held"] {
        db.set(key, &format!("begin_time = {0}, end_time = {0}", ago(9))).await;
    }
    db.set("failed", "status = 'F'").await;
    db.set("strange", "status = 'X'").await;
    db.set("never begun", "begin_time = NULL, end_time = NULL").await;
    db.set("window", &format!("begin_time = {0}, end_time = {0}, time = 600", ago(9))).await;
    db.set("young", &format!("begin_time = {}, end_time = {}", ago(9), ago(1))).await;
    let patient = db.lock().min_interval(10 * HOUR);
    assert_eq!(patient.forget(2 * HOUR).await.unwrap(), 1, "min_interval keeps all but the row that never began");
    assert_eq!(lock.forget(2 * HOUR).await.unwrap(), 1);
    let left = lock.list(&ListOptions::default()).await.unwrap();
    let left: Vec<_> = left.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(left, ["failed", "held", "strange", "window", "young"]);
    assert!(matches!(lock.forget(Duration::MAX).await, Err(Error::Invalid(_))));
}

async fn forget_deletes_the_tickets_of_waiters_that_died_long_ago<DB: TestDatabase>(db: TestDb<DB>) {
    let place = |number: i64, millis: i64| format!("('k', {number}, {})", DB::ago(millis));
    let places = [place(1, 3_660_000), place(2, 3_540_000), place(3, -12_000)].join(", ");
    db.execute(&format!("INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES {places}")).await;
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 0, "they are no rows of keys");
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await, Some(2));
    assert_eq!(db.number("SELECT min(ticket) FROM t_resource_lock_queue").await, Some(2));
}

async fn forget_goes_through_more_rows_than_a_page<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("kept").await).release().await.unwrap();
    let rows: Vec<String> = (0..1203).map(|number| format!("('gone {number:04}')")).collect();
    db.execute(&format!("INSERT INTO t_resource_lock (key_resource) VALUES {}", rows.join(","))).await;
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 1203);
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(1));
}
