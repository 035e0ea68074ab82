//! The possible outcomes of each statement: the table of docs/outcomes.md, cell by cell.
//!
//! "No reply" has three kinds: the reply is lost after the server executed the statement, the
//! request is lost before the server received it, and either arrives after the caller has stopped
//! waiting. `a_late_reply_holds_no_longer…` is about a reply that arrives in time. Tests with a `*`
//! are in other files.
//!
//! | | matched | no match, row seen | row skipped | no reply |
//! |---|---|---|---|---|
//! | claim | *`a_free_key_is_acquired`, *`an_expired_claim_is_taken_over_and_named` | *`every_cell_of_the_rules_table` | *`a_try_does_not_wait_for_a_locked_row`, `a_claim_whose_reply_is_lost_is_never_called_busy` | `a_claim_…`, `a_takeover_whose_reply_is_lost…`, `a_refusal_whose_reply_is_lost…` |
//! | create | *`tokens_grow_and_never_fall` | `a_row_that_another_creates_first…`, *`sixteen_processes_create_the_same_key_once` | *`a_try_ends_at_its_time_limit_behind_an_uncommitted_insert` | `a_create_…` |
//! | renew | *`a_lease_is_renewed_in_the_background` | *`a_lease_is_lost_when_another_program_takes_the_row`, *`a_claim_that_another_program_overwrites_is_lost` | *`a_renewal_that_finds_the_row_locked_is_unknown_not_lost` | `a_renewal_…`, `renewals_that_are_never_answered…` |
//! | release | *`a_released_key_is_free_at_once` | *`releasing_a_lost_lease_changes_nothing`, *`releasing_twice_over_a_lost_reply_is_done`, `a_release_that_was_done_before_another_came_is_unknown` | *`a_release_waits_for_a_transaction_at_the_row`, `a_release_that_never_gets_at_the_row_is_unknown` | `a_release_…` |
//! | abandon | *`an_abandoned_claim_is_taken_over_at_once` | `abandoning_a_lost_lease_changes_nothing`, `an_abandonment_that_was_done_before_another_came_is_unknown` | `an_abandonment_waits_for_a_transaction_at_the_row` | `an_abandonment_…` |
//!
//! SQLite has no network: only the tests that need no proxy run there.

use std::time::Duration;

use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
    refused,
};
use rowlock::{Attempt, Error, Reason};
use tokio::{
    join,
    time::{Instant, sleep, timeout},
};

use crate::line::{
    LIMIT, Line, SHORT, WAYS, had_within_the_lease, has_left, standing, timed_out, token, trips, unknown,
};

harness::tests!(
    everywhere(an_abandonment_waits_for_a_transaction_at_the_row),
    everywhere.each(abandoning_a_lost_lease_changes_nothing),
    servers(
        a_claim_whose_reply_is_lost_is_the_same_claim_again,
        a_takeover_whose_reply_is_lost_still_tells_from_whom,
        a_claim_whose_request_is_lost_is_sent_again,
        a_claim_that_is_answered_too_late_is_unknown,
        a_late_reply_holds_no_longer_than_a_quick_one,
        a_refusal_whose_reply_is_lost_is_asked_for_again,
        a_claim_whose_reply_is_lost_is_never_called_busy,
        a_create_that_is_not_answered_is_claimed_anyway,
        a_row_that_another_creates_first_is_claimed,
        a_renewal_that_is_not_answered_is_unknown,
        a_renewal_that_is_answered_after_the_loss_is_lost,
        a_renewal_in_the_background_that_is_lost_is_tried_again,
        renewals_that_are_never_answered_end_in_a_loss_that_is_told_in_time,
        a_release_that_is_not_answered_is_done_once,
        a_release_that_was_done_before_another_came_is_unknown,
        a_release_that_is_never_answered_is_unknown,
        a_release_that_never_gets_at_the_row_is_unknown,
        an_abandonment_that_is_not_answered_is_done,
        an_abandonment_that_was_done_before_another_came_is_unknown,
        an_abandonment_that_is_never_answered_is_unknown
    ),
    servers[DIRECT](a_claim_that_arrives_too_late_is_unknown, a_create_that_is_too_late_leaves_a_free_row)
);

async fn a_claim_whose_reply_is_lost_is_the_same_claim_again<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let (mut granted, mut begin) = (0, None);
    let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |proxy| {
        granted = token(&db).await;
        begin = db.text("SELECT CAST(begin_time AS CHAR(40)) FROM t_resource_lock WHERE key_resource = 'k'").await;
        proxy.cut();
    });
    let lease = acquired(attempt.await);
    assert_eq!((lease.token().get(), token(&db).await), (granted, granted));
    let now = db.text("SELECT CAST(begin_time AS CHAR(40)) FROM t_resource_lock WHERE key_resource = 'k'").await;
    assert_eq!(begin, now, "it began once");
    assert!(lease.taken_over_from().is_none());
    assert_eq!(standing(&db).await, 1);
    lease.release().await.unwrap();
}

/// At every reply of the claim: MySQL returns the previous holder in a second one.
async fn a_takeover_whose_reply_is_lost_still_tells_from_whom<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    for trip in 0..trips(&db, 1, 2) {
        let crashed = acquired(db.builder().label("crashed").build().unwrap().try_acquire("k").await);
        db.set("k", &format!("expires_at = {}", DB::ago(1))).await;
        let mut granted = 0;
        let attempt = line.held(Way::Replies, trip, line.lock.try_acquire("k"), async |proxy| {
            granted = token(&db).await;
            proxy.cut();
        });
        let lease = acquired(attempt.await);
        assert_eq!((lease.token().get(), token(&db).await), (granted, granted));
        let prior = lease.taken_over_from().unwrap();
        assert_eq!((prior.token, prior.label.as_str()), (crashed.token(), "crashed"));
        assert_eq!(standing(&db).await, 1);
        lease.release().await.unwrap();
    }
}

async fn a_claim_whose_request_is_lost_is_sent_again<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let before = token(&db).await;
    let lease = acquired(line.lost(Way::Requests, 0, line.lock.try_acquire("k")).await);
    assert!(lease.token().get() > before && lease.taken_over_from().is_none());
    assert_eq!((standing(&db).await, token(&db).await), (1, lease.token().get()));
    lease.release().await.unwrap();
}

/// The server executes the claim, and the reply is too late: no caller reads it, and the claim ends
/// with its lease.
async fn a_claim_that_is_answered_too_late_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, SHORT, LIMIT).await;
    let mut granted = Instant::now();
    let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |_| granted = Instant::now());
    timed_out(attempt.await);
    eventually("the connection is closed", async || line.pool.size() == 0).await;
    assert_eq!(db.column("k", "client_ip").await.as_deref(), Some("line"));
    line.proxy.open();
    had_within_the_lease(&db, granted).await;
}

/// The reply is late, but within the time limit. The lease counts from before the request was sent,
/// less a twentieth for the clocks.
async fn a_late_reply_holds_no_longer_than_a_quick_one<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let most = 30 * SHORT * 19 / 20 - LIMIT;
    let late = async |proxy: &Proxy| {
        sleep(LIMIT).await;
        proxy.open();
    };
    let lease = acquired(line.held(Way::Replies, 0, line.lock.try_acquire("k"), late).await);
    assert!(lease.is_held() && lease.time_left() <= most, "{:?}", lease.time_left());
    line.held(Way::Replies, 0, lease.renew(), late).await.unwrap();
    assert!(lease.is_held() && lease.time_left() <= most, "{:?}", lease.time_left());
    line.held(Way::Replies, 0, lease.release(), late).await.unwrap();
}

/// The request reaches the server when no caller waits for it any more.
async fn a_claim_that_arrives_too_late_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, SHORT, LIMIT).await;
    timed_out(line.held(Way::Requests, 0, line.lock.try_acquire("k"), async |_| {}).await);
    eventually("the connection is closed", async || line.pool.size() == 0).await;
    assert_eq!(standing(&db).await, 0);
    line.proxy.open();
    eventually("it arrives", || async { db.column("k", "client_ip").await.as_deref() == Some("line") }).await;
    had_within_the_lease(&db, Instant::now()).await;
}

async fn a_refusal_whose_reply_is_lost_is_asked_for_again<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let holder = acquired(db.lock().try_acquire("k").await);
    for way in WAYS {
        for trip in 0..trips(&db, 1, 2) {
            assert_eq!(refused(line.lost(way, trip, line.lock.try_acquire("k")).await).reason, Reason::Held);
        }
    }
    holder.release().await.unwrap();
}

/// When the claim is sent again, another transaction has the row locked. The first claim may have
/// been granted, so this is not a refusal.
async fn a_claim_whose_reply_is_lost_is_never_called_busy<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, SHORT, 2 * LIMIT).await;
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    let mut granted = Instant::now();
    let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |proxy| {
        granted = Instant::now();
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut other, DB::LOCK_ROW).await.unwrap();
        proxy.cut();
    });
    timed_out(attempt.await);
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    had_within_the_lease(&db, granted).await;
}

/// The next claim shows whether the row exists by now.
async fn a_create_that_is_not_answered_is_claimed_anyway<DB: TestDatabase>(db: TestDb<DB>) {
    for way in WAYS {
        let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
        let lease = acquired(line.lost(way, trips(&db, 1, 2), line.lock.try_acquire("k")).await);
        assert_eq!((token(&db).await, standing(&db).await), (lease.token().get(), 1));
        lease.release().await.unwrap();
        db.execute("DELETE FROM t_resource_lock WHERE key_resource = 'k'").await;
    }
}

async fn a_create_that_is_too_late_leaves_a_free_row<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, SHORT, LIMIT).await;
    timed_out(line.held(Way::Requests, trips(&db, 1, 2), line.lock.try_acquire("k"), async |_| {}).await);
    eventually("the connection is closed", async || line.pool.size() == 0).await;
    line.proxy.open();
    let count = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND lock_flag = 0";
    eventually("it arrives", || async { db.number(count).await == Some(1) }).await;
    let lease = acquired(db.lock().try_acquire("k").await);
    assert!(lease.taken_over_from().is_none());
}

async fn a_row_that_another_creates_first_is_claimed<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
    let mut before = 0;
    let attempt = line.held(Way::Requests, trips(&db, 1, 2), line.lock.try_acquire("k"), async |proxy| {
        let first = acquired(db.lock().try_acquire("k").await);
        before = first.token().get();
        first.release().await.unwrap();
        proxy.open();
    });
    let lease = acquired(attempt.await);
    assert!(lease.token().get() > before);
    assert_eq!((token(&db).await, standing(&db).await), (lease.token().get(), 1));
    lease.release().await.unwrap();
}

/// The holder cannot know whether the lease was renewed: its deadline stays unchanged, and the next
/// renewal moves it.
async fn a_renewal_that_is_not_answered_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 60 * SHORT, LIMIT).await;
    let lease = acquired(line.lock.acquire("k", PATIENCE).await);
    for (way, late) in [(Way::Replies, false), (Way::Requests, false), (Way::Replies, true), (Way::Requests, true)] {
        db.set("k", &format!("expires_at = {}", DB::ago(-5000))).await;
        let deadline = || Instant::now() + lease.time_left();
        let before = deadline();
        if late {
            timed_out(line.held(way, 0, lease.renew(), async |_| {}).await);
            eventually("the connection is closed", async || line.pool.size() == 0).await;
        } else {
            unknown(line.lost(way, 0, lease.renew()).await);
        }
        assert!(lease.is_held() && deadline() < before + LIMIT / 10, "the deadline stands");
        assert_eq!(has_left(&db, 20_000).await, way == Way::Replies, "{way:?} {late}");
        line.proxy.open();
        renewed(&lease).await;
        eventually("the deadline has moved", || async {
            renewed(&lease).await;
            deadline() > before + LIMIT / 10
        })
        .await;
        assert!(has_left(&db, 20_000).await);
        // Prepares the statement on the current connection.
        renewed(&lease).await;
    }
    lease.release().await.unwrap();
}

/// The limit is short, and a connection has to be opened.
async fn renewed<DB: TestDatabase>(lease: &rowlock::Lease<DB>) {
    eventually("it is renewed", || async { lease.renew().await.is_ok() }).await;
}

async fn a_renewal_that_is_answered_after_the_loss_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 2 * SHORT, PATIENCE).await;
    let lease = acquired(line.lock.try_acquire("k").await);
    let lost = async |proxy: &Proxy| {
        lease.lost().await;
        proxy.open();
    };
    let renewed = line.held(Way::Replies, 0, lease.renew(), lost).await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
}

async fn a_renewal_in_the_background_that_is_lost_is_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    for way in WAYS {
        let line = Line::new(&db, 2 * SHORT, PATIENCE).await;
        let lease = acquired(line.lock.try_acquire("k").await);
        line.lost(way, 0, async {}).await;
        let deadline = Instant::now() + lease.time_left();
        // Runs past the deadline at the time of the lost renewal, without a gap.
        while Instant::now() < deadline + SHORT {
            assert!(lease.is_held(), "{way:?}");
            sleep(SHORT / 50).await;
        }
        lease.release().await.unwrap();
    }
}

/// Whether the requests or the replies are lost, the holder is notified before the server grants
/// the key to another client.
async fn renewals_that_are_never_answered_end_in_a_loss_that_is_told_in_time<DB: TestDatabase>(db: TestDb<DB>) {
    for way in WAYS {
        let line = Line::new(&db, SHORT, PATIENCE).await;
        let lease = acquired(line.lock.try_acquire("k").await);
        line.proxy.hold(way);
        let told = async {
            lease.lost().await;
            Instant::now()
        };
        let taken = async {
            loop {
                match db.lock().try_acquire("k").await.unwrap() {
                    Attempt::Acquired(other) => break (Instant::now(), other),
                    Attempt::Refused(_) => sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let (told, (taken, other)) = timeout(PATIENCE, async { join!(told, taken) }).await.unwrap();
        assert!(told <= taken, "{way:?}: another got in, and the holder had not been told");
        assert!(other.token() > lease.token());
        line.proxy.open();
        assert!(matches!(lease.renew().await, Err(Error::Lost { .. })), "a loss is final");
        other.release().await.unwrap();
    }
}

async fn a_release_that_is_not_answered_is_done_once<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
    for way in WAYS {
        let end_time = || db.text("SELECT CAST(end_time AS CHAR(40)) FROM t_resource_lock WHERE key_resource = 'k'");
        let lease = acquired(line.lock.try_acquire("k").await);
        lease.renew().await.unwrap();
        let mut ended = None;
        let released = line.held(way, 0, lease.release(), async |proxy| {
            ended = if way == Way::Replies { end_time().await } else { None };
            proxy.cut();
        });
        released.await.unwrap();
        assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
        assert_eq!(standing(&db).await, 0);
        assert!(ended.is_none() || end_time().await == ended, "it was released once");
        // Prepares the release on the current connection.
        acquired(line.lock.try_acquire("k").await).release().await.unwrap();
    }
}

/// The release is executed, its reply is lost, and another client has acquired the key since. The
/// row no longer shows whether the release was recorded.
async fn a_release_that_was_done_before_another_came_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
    let lease = acquired(line.lock.try_acquire("k").await);
    let mut next = None;
    let released = line.held(Way::Replies, 0, lease.release(), async |proxy| {
        next = Some(acquired(db.lock().try_acquire("k").await));
        proxy.cut();
    });
    unknown(released.await);
    let next = next.unwrap();
    assert!(next.taken_over_from().is_none() && next.renew().await.is_ok());
    next.release().await.unwrap();
}

async fn a_release_that_is_never_answered_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, SHORT, LIMIT).await;
    let lease = acquired(line.lock.acquire("k", PATIENCE).await);
    let since = Instant::now();
    timed_out(line.held(Way::Requests, 0, lease.release(), async |_| {}).await);
    assert!(since.elapsed() >= SHORT / 2, "it is tried while the lease lasts");
    had_within_the_lease(&db, since).await;
}

async fn a_release_that_never_gets_at_the_row_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("line").build().unwrap().lease(SHORT);
    let lease = acquired(lock.try_acquire("k").await);
    let since = Instant::now();
    let mut other = db.row_locked().await;
    timed_out(lease.release().await);
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    had_within_the_lease(&db, since).await;
}

async fn an_abandonment_that_is_not_answered_is_done<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
    for way in WAYS {
        let lease = acquired(line.lock.try_acquire("k").await);
        let token = lease.token();
        line.lost(way, 0, lease.abandon()).await.unwrap();
        let next = acquired(line.lock.try_acquire("k").await);
        assert_eq!(next.taken_over_from().unwrap().token, token);
        // Prepares the abandonment on the current connection.
        next.abandon().await.unwrap();
    }
}

async fn an_abandonment_that_was_done_before_another_came_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, 30 * SHORT, PATIENCE).await;
    let lease = acquired(line.lock.try_acquire("k").await);
    let mut next = None;
    let abandoned = line.held(Way::Replies, 0, lease.abandon(), async |proxy| {
        next = Some(acquired(db.lock().try_acquire("k").await));
        proxy.cut();
    });
    unknown(abandoned.await);
    next.unwrap().release().await.unwrap();
}

async fn an_abandonment_that_is_never_answered_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::new(&db, SHORT, LIMIT).await;
    let lease = acquired(line.lock.acquire("k", PATIENCE).await);
    let since = Instant::now();
    timed_out(line.held(Way::Requests, 0, lease.abandon(), async |_| {}).await);
    had_within_the_lease(&db, since).await;
    assert!(line.lock.shutdown(PATIENCE).await);
}

async fn abandoning_a_lost_lease_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("k").await);
    db.take_from("k").await;
    let error = lease.abandon().await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    assert_eq!(db.column("k", "client_ip").await.as_deref(), Some("thief"));
    assert_eq!(standing(&db).await, 1);
}

async fn an_abandonment_waits_for_a_transaction_at_the_row<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("k").await);
    let token = lease.token();
    let mut other = db.row_locked().await;
    let abandon = harness::spawn(lease.abandon());
    sleep(Duration::from_millis(200)).await;
    assert!(!abandon.is_finished());
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    timeout(PATIENCE, abandon).await.unwrap().unwrap().unwrap();
    assert_eq!(acquired(db.lock().try_acquire("k").await).taken_over_from().unwrap().token, token);
}
