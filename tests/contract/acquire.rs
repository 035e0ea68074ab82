//! Claims: when a key is granted, and when it is refused.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Attempt, Reason, Rules, Status, errors::DatabaseFault};
use tokio::time::Instant;

harness::tests!(
    everywhere(
        a_wait_that_never_got_a_connection_changed_nothing,
        a_free_key_is_acquired,
        a_held_key_is_refused_with_who_since_and_until,
        a_released_key_is_free_at_once,
        tokens_grow_and_never_fall,
        a_failed_run_may_be_repeated_at_once_on_request,
        an_expired_claim_is_taken_over_and_named,
        an_abandoned_claim_is_taken_over_at_once,
        article_rules_leave_failures_and_crashes_to_an_operator,
        another_programs_lock_is_respected,
        a_try_does_not_wait_for_a_locked_row,
        a_try_ends_at_its_time_limit_behind_an_uncommitted_insert,
        a_lease_that_comes_too_late_is_not_given,
        keys_are_compared_byte_by_byte,
        the_row_says_what_the_article_says,
        a_dropped_try_leaves_no_statement_on_a_pooled_connection
    ),
    everywhere.each(a_min_interval_refuses_until_it_is_over),
    everywhere.alone(a_try_ends_at_its_time_limit_with_the_pool_empty)
);

const MINUTE: Duration = Duration::from_secs(60);

async fn a_free_key_is_acquired<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.builder().label("me").build().unwrap().try_acquire("k").await);
    assert_eq!(lease.key().as_str(), "k");
    assert!(lease.is_held() && lease.taken_over_from().is_none());
    assert!(lease.time_left() > Duration::from_secs(25), "{:?}", lease.time_left());
    assert_eq!(db.column("k", "status").await.as_deref(), Some("P"));
    assert_eq!(db.number("SELECT token FROM t_resource_lock").await, Some(lease.token().get()));
}

async fn a_held_key_is_refused_with_who_since_and_until<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.builder().label("first").build().unwrap().try_acquire("k").await);
    let refusal = refused(db.builder().label("second").build().unwrap().try_acquire("k").await);
    assert_eq!((refusal.reason, refusal.by.as_str(), refusal.key.as_str()), (Reason::Held, "first", "k"));
    let (since, until) = (refusal.since.unwrap(), refusal.until.unwrap());
    assert_eq!((until - since).num_seconds(), 30);
    let retry_after = refusal.retry_after.unwrap();
    assert!(retry_after > Duration::from_secs(20) && retry_after <= Duration::from_secs(30), "{retry_after:?}");
    assert!(refusal.to_string().starts_with("k: held, by first, since "), "{refusal}");
    lease.release().await.unwrap();
}

async fn a_released_key_is_free_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for status in [Status::Succeeded, Status::Failed] {
        acquired(lock.try_acquire("k").await).end(status).await.unwrap();
        assert_eq!(db.column("k", "status").await.as_deref(), Some(status.letter()));
        assert_eq!(db.column("k", "holder").await, None);
        assert_eq!(
            db.number("SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 0 AND end_time >= begin_time").await,
            Some(1)
        );
    }
}

async fn tokens_grow_and_never_fall<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let mut last = 0;
    for _ in 0..20 {
        let lease = acquired(lock.try_acquire("k").await);
        assert!(lease.token().get() > last);
        last = lease.token().get();
        lease.release().await.unwrap();
    }
    let micros = chrono::Utc::now().timestamp_micros();
    assert!((last - micros).abs() < 600_000_000, "{last} is the database's time in microseconds, near {micros}");
    // Neither a clock that is set back nor a deleted row makes the token fall.
    let ahead = last + 3_600_000_000;
    db.set("k", &format!("token = {ahead}")).await;
    assert_eq!(acquired(lock.try_acquire("k").await).token().get(), ahead + 1);
    db.execute("DELETE FROM t_resource_lock").await;
    assert!(acquired(lock.try_acquire("k").await).token().get() > last);
}

async fn a_min_interval_refuses_until_it_is_over<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().min_interval(30 * MINUTE);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    assert_eq!(db.number("SELECT time FROM t_resource_lock").await, Some(60), "the article's default");
    let refusal = refused(lock.try_acquire("k").await);
    assert_eq!(refusal.reason, Reason::WithinMinInterval);
    assert!(refusal.retry_after.unwrap() > 29 * MINUTE);
    // The minimum interval is a setting of the caller, not of the row.
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    db.set("k", &format!("begin_time = {}", DB::ago(30 * 60_000))).await;
    acquired(lock.try_acquire("k").await).release().await.unwrap();

    let long = db.lock().min_interval(90 * MINUTE + Duration::from_millis(1));
    acquired(long.try_acquire("long").await);
    assert_eq!(db.number("SELECT time FROM t_resource_lock WHERE key_resource = 'long'").await, Some(91));
}

async fn a_failed_run_may_be_repeated_at_once_on_request<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().min_interval(MINUTE);
    acquired(lock.try_acquire("k").await).fail().await.unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::WithinMinInterval);
    let lock = lock.retry_failed_at_once();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::WithinMinInterval);
}

async fn an_expired_claim_is_taken_over_and_named<DB: TestDatabase>(db: TestDb<DB>) {
    let first = acquired(db.builder().label("crashed").build().unwrap().try_acquire("k").await);
    db.set("k", &format!("expires_at = {}", DB::ago(1))).await;
    let second = acquired(db.lock().try_acquire("k").await);
    let prior = second.taken_over_from().unwrap();
    assert_eq!((prior.token, prior.label.as_str()), (first.token(), "crashed"));
    assert!(second.token() > first.token());
    second.release().await.unwrap();
    let third = acquired(db.lock().try_acquire("k").await);
    assert_eq!(third.taken_over_from(), None);
}

async fn an_abandoned_claim_is_taken_over_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let lease = acquired(lock.try_acquire("k").await);
    let token = lease.token();
    lease.abandon().await.unwrap();
    assert_eq!(db.number("SELECT lock_flag * 1 FROM t_resource_lock").await.or(Some(1)), Some(1), "still locked");
    let article = db.lock().rules(Rules::Article);
    assert_eq!(refused(article.try_acquire("k").await).reason, Reason::TimedOutUnfinished);
    let next = acquired(lock.try_acquire("k").await);
    assert_eq!(next.taken_over_from().unwrap().token, token);
}

async fn article_rules_leave_failures_and_crashes_to_an_operator<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().rules(Rules::Article).retry_failed_at_once();
    let lease = acquired(lock.try_acquire("k").await);
    lease.fail().await.unwrap();
    let refusal = refused(lock.try_acquire("k").await);
    assert_eq!((refusal.reason, refusal.until, refusal.retry_after), (Reason::LastRunFailed, None, None));
    db.set("k", "status = 'X'").await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::NotSucceeded);
    db.set("k", "status = 'S'").await;
    let _crashed = acquired(lock.try_acquire("k").await);
    db.set("k", &format!("expires_at = {}", DB::ago(1))).await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::TimedOutUnfinished);
}

async fn another_programs_lock_is_respected<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    // The article's statements set `begin_time` and leave this crate's columns unchanged.
    db.set("k", &format!("lock_flag = 1, status = 'P', client_ip = '10.0.0.7', begin_time = {}", DB::ago(7_200_000)))
        .await;
    let refusal = refused(lock.try_acquire("k").await);
    assert_eq!((refusal.reason, refusal.by.as_str(), refusal.until), (Reason::HeldByAnotherProgram, "10.0.0.7", None));
    // The claim is two hours old in UTC. By a clock two hours west of UTC, it has just begun.
    let west = db.builder().article_clients(chrono::FixedOffset::west_opt(7200).unwrap()).build().unwrap();
    assert!(refused(west.try_acquire("k").await).until.is_some());
    let utc = db.builder().article_clients(chrono::FixedOffset::east_opt(0).unwrap()).build().unwrap();
    assert_eq!(acquired(utc.try_acquire("k").await).taken_over_from().unwrap().label, "10.0.0.7");
}

async fn a_try_does_not_wait_for_a_locked_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let mut other = db.row_locked().await;
    let started = Instant::now();
    let refusal = refused(lock.try_acquire("k").await);
    assert_eq!(refusal.reason, Reason::Busy);
    assert!(started.elapsed() >= Duration::from_millis(95), "it tries again for 100 ms: {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    acquired(lock.try_acquire("k").await);
}

async fn a_try_ends_at_its_time_limit_with_the_pool_empty<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock =
        rowlock::LeaseLock::builder(pool.clone()).share_pool().time_limit(Duration::from_millis(200)).build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let only = pool.acquire().await.unwrap();
    let started = Instant::now();
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(3));
    assert!(
        matches!(
            error,
            rowlock::Error::Database(DatabaseFault::NoConnection {
                outcome: rowlock::errors::Certainty::NothingChanged,
                ..
            })
        ),
        "{error:?}"
    );
    assert!(error.is_retryable());
    drop(only);
    acquired(lock.try_acquire("k").await);
}

/// The request waits for a connection when the time is over, so it was not sent.
async fn a_wait_that_never_got_a_connection_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = rowlock::LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let only = pool.acquire().await.unwrap();
    let error = lock.acquire("k", Duration::from_millis(200)).await.unwrap_err();
    assert!(error.to_string().contains("nothing was changed"), "{error}");
    assert!(error.is_retryable());
    drop(only);
    acquired(lock.try_acquire("k").await);
}

/// The pool's connection is available only after the lease would have ended. The request goes on,
/// and the lease that it returns is valid.
async fn a_lease_that_comes_too_late_is_not_given<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock =
        rowlock::LeaseLock::builder(pool.clone()).share_pool().build().unwrap().lease(Duration::from_millis(500));
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let only = pool.acquire().await.unwrap();
    let attempt = harness::spawn({
        let lock = lock.clone();
        async move {
            let lease = acquired(lock.try_acquire("k").await);
            lease.is_held()
        }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    drop(only);
    assert!(attempt.await.unwrap());
}

async fn a_try_ends_at_its_time_limit_behind_an_uncommitted_insert<DB: TestDatabase>(db: TestDb<DB>) {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, "INSERT INTO t_resource_lock (key_resource) VALUES ('k')").await.unwrap();
    let lock = db.builder().time_limit(Duration::from_millis(300)).build().unwrap();
    let started = Instant::now();
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    assert!(error.is_retryable(), "{error:?}");
    // No backend is left waiting for the row: its wait has a limit of its own.
    if db.server.name == "postgres" {
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("no task waits", || async { db.number(waiting).await == Some(0) }).await;
    }
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    eventually("the row can be had", || async { matches!(db.lock().try_acquire("k").await, Ok(Attempt::Acquired(_))) })
        .await;
}

async fn keys_are_compared_byte_by_byte<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let longest = "x".repeat(255);
    let mut leases = Vec::new();
    for key in
        ["a", "A", "á", "a\u{301}", "ａ", "🔒", "a b", "it's", "\"q\"", "back\\slash", "%", "_", "tab\tin", &longest]
    {
        leases.push(acquired(lock.try_acquire(key).await));
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(14));
    for lease in leases {
        lease.renew().await.unwrap();
        lease.release().await.unwrap();
    }
}

async fn the_row_says_what_the_article_says<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("10.1.2.3").build().unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    let ours = "lock_flag = 1 AND status = 'P' AND client_ip = '10.1.2.3' AND end_time IS NULL AND holder IS NOT NULL AND claimed_at = begin_time";
    let recent = format!("begin_time > {} AND begin_time < {}", DB::ago(60_000), DB::ago(-60_000));
    assert_eq!(db.number(&format!("SELECT COUNT(*) FROM t_resource_lock WHERE {ours} AND {recent}")).await, Some(1));
    lease.release().await.unwrap();
    let free = "lock_flag = 0 AND status = 'S' AND end_time IS NOT NULL AND holder IS NULL AND expires_at IS NULL AND claimed_at IS NULL";
    assert_eq!(db.number(&format!("SELECT COUNT(*) FROM t_resource_lock WHERE {free} AND {recent}")).await, Some(1));
}

async fn a_dropped_try_leaves_no_statement_on_a_pooled_connection<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = rowlock::LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    acquired(lock.try_acquire("other").await).release().await.unwrap();
    let mut blocker = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut blocker, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut blocker, "INSERT INTO t_resource_lock (key_resource) VALUES ('k')").await.unwrap();
    let dropped = tokio::time::timeout(Duration::from_millis(200), lock.try_acquire("k")).await;
    assert!(dropped.is_err(), "it waits for the uncommitted insert");
    // The pool's only connection is closed together with its statement, which goes on for a second.
    // A new one answers at once.
    let started = Instant::now();
    assert_eq!(DB::number(&pool, "SELECT COUNT(*) FROM t_resource_lock").await, Some(1));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    DB::execute_on(&mut blocker, "ROLLBACK").await.unwrap();
}
