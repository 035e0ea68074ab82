//! Claims whose rows have been changed since they were granted: by programs that know the article's
//! columns alone, by hand, and by the end of the lease.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, proxy::Way, refused};
use rowlock::{Error, Reason, ResourceLock, strategy::Confirmation};

use crate::{
    line::{Line, SHORT, token},
    neighbours::whole,
};

harness::tests!(
    everywhere(
        a_claim_that_was_overwritten_is_not_confirmed,
        an_abandonment_keeps_no_key_for_longer_than_its_lease,
        a_takeover_has_a_token_above_one_that_is_ahead_of_the_clock
    ),
    servers.each(
        a_claim_that_is_overwritten_before_it_is_sent_again_is_refused,
        a_claim_that_is_ended_before_it_is_sent_again_is_made_anew,
        a_claim_that_is_sent_again_names_no_takeover_that_is_long_over
    )
);

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
/// A token of the year 2128.
const AHEAD: i64 = 5_000_000_000_000_000;

/// The claim is granted, and its reply is lost. Another program unlocks the row and locks it before
/// the claim is sent again: at another time, or within the second of the claim, where the column
/// keeps no more than seconds.
async fn a_claim_that_is_overwritten_before_it_is_sent_again_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    for theirs in [format!("begin_time = {}", DB::ago(-5_000)), format!("end_time = {}", DB::ago(0))] {
        let mut written = None;
        let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |proxy| {
            db.set("k", &theirs).await;
            written = Some(whole(&db, "k").await);
            proxy.cut();
        });
        assert_eq!(refused(attempt.await).reason, Reason::HeldByAnotherProgram, "{theirs}");
        assert_eq!(Some(whole(&db, "k").await), written, "{theirs}");
        db.set("k", "lock_flag = 0, end_time = NULL").await;
    }
}

/// The other program only unlocks the row, and knows nothing of its holder.
async fn a_claim_that_is_ended_before_it_is_sent_again_is_made_anew<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let mut granted = 0;
    let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |proxy| {
        granted = token(&db).await;
        db.set("k", &format!("lock_flag = 0, status = 'S', end_time = {}", DB::ago(0))).await;
        proxy.cut();
    });
    let lease = acquired(attempt.await);
    assert!(lease.token().get() > granted && lease.taken_over_from().is_none());
    lease.renew().await.unwrap();
    lease.release().await.unwrap();
}

/// Another program has ended the claim that took over. It does not know the column `prior_token`.
async fn a_claim_that_is_sent_again_names_no_takeover_that_is_long_over<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    db.set("k", "prior_token = 1, prior_client_ip = 'crashed'").await;
    let lease = acquired(line.lost(Way::Replies, 0, line.lock.try_acquire("k")).await);
    assert_eq!(token(&db).await, lease.token().get());
    assert!(lease.taken_over_from().is_none(), "{:?}", lease.taken_over_from());
    lease.release().await.unwrap();
}

/// A transaction must not commit under a claim that another program has unlocked, or unlocked and
/// locked.
async fn a_claim_that_was_overwritten_is_not_confirmed<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let later = format!("begin_time = {}", DB::ago(-5_000));
    for theirs in ["", later.as_str(), "lock_flag = 0", "end_time = begin_time"] {
        let grant = acquired(ResourceLock::acquire(&lock, "k", Duration::ZERO).await);
        if !theirs.is_empty() {
            db.set("k", theirs).await;
        }
        let mut tx = db.pool.begin_with(DB::BEGIN).await.unwrap();
        match (theirs, lock.confirm(grant.claim(), &mut tx).await) {
            ("", Ok(Confirmation(1))) => {}
            ("", other) => panic!("{other:?}"),
            (_, Err(Error::Lost { key, token })) => assert_eq!((&key, token), (grant.key(), grant.token())),
            (_, other) => panic!("{theirs}: {other:?}"),
        }
        tx.rollback().await.unwrap();
        assert_eq!(db.number("SELECT confirms FROM t_resource_lock").await, Some(0), "{theirs}");
        drop(grant);
        assert!(lock.shutdown(PATIENCE).await, "it is ended in the background");
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

/// The lease of the row may be over when the holder goes away, or an abandonment may be sent twice.
/// The delay does not begin anew.
async fn an_abandonment_keeps_no_key_for_longer_than_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().lease(MINUTE).lock_delay(MINUTE);
    let ends = async || db.cell("expires_at", "t_resource_lock WHERE key_resource = 'k'").await;
    // The first one has ended, and is taken over by the second one, which ends within the delay.
    for left in [-1_000, 30_000] {
        let lease = acquired(lock.try_acquire("k").await);
        db.set("k", &format!("expires_at = {}", DB::ago(-left))).await;
        let before = ends().await;
        drop(lease);
        assert!(lock.shutdown(PATIENCE).await, "abandoned");
        assert_eq!(ends().await, before, "{left}");
    }
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Held);
}

/// As after the clock was set back.
async fn a_takeover_has_a_token_above_one_that_is_ahead_of_the_clock<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).detach();
    db.set("k", &format!("token = {AHEAD}, expires_at = {}", DB::ago(1))).await;
    let lease = acquired(db.lock().try_acquire("k").await);
    assert_eq!((lease.token().get(), lease.taken_over_from().unwrap().token.get()), (AHEAD + 1, AHEAD));
    lease.release().await.unwrap();
    // The same for the statement by which SQLite claims under an interval.
    db.set("k", &format!("begin_time = {}", DB::ago(2 * 3_600_000))).await;
    assert_eq!(acquired(db.lock().min_interval(HOUR).try_acquire("k").await).token().get(), AHEAD + 2);
}
