//! Requests to the functions in SQL that are sent again, since their reply was lost or the row was
//! locked.

use std::time::Duration;

use harness::{PATIENCE, TestDb};
use rowlock::leases::Holder;
use tokio::time::timeout;

use crate::{
    bank::{LEASE, accounts, balance_in, write_in},
    functions::{Ask, Functions},
    functions_promises::{ask, change, installed},
};

harness::tests!(
    servers(
        a_claim_that_was_asked_for_again_stands,
        a_takeover_is_told_again,
        a_shorter_lease_does_not_shorten_the_claim,
        a_claim_in_a_locked_row_is_busy_for_its_holder,
        a_confirmation_that_met_a_locked_row_reads_the_newest_rows
    ),
    servers.each(a_takeover_that_is_put_back_is_there_to_be_taken_over)
);

const HOUR: Duration = Duration::from_secs(3600);

/// A request with a holder of its own, which may be sent again.
fn asked(key: &str) -> Ask<'_> {
    Ask { holder: Some(Holder::unique()), ..Ask::of(key) }
}

async fn a_claim_that_was_asked_for_again_stands<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut conn = db.pool.acquire().await.unwrap();
    for end in ["release", "abandon", "put_back"] {
        let asked = asked(end);
        let (one, two) = (ask(&db.pool, &asked).await, ask(&db.pool, &asked).await);
        assert!(two.granted && one.token == two.token && one.holder == two.holder, "{one:?} {two:?}");
        let (holder, token) = (two.holder.unwrap(), two.token.unwrap());
        DB::call_change(&mut conn, "confirm", end, holder, token, None).await.unwrap();
        for what in ["renew", end] {
            assert_eq!(change(&db.pool, what, end, &two, None).await, "done", "{what}");
        }
    }
}

async fn a_takeover_is_told_again<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let over = ask(&db.pool, &Ask { label: Some("crashed"), ..Ask::of("k") }).await;
    db.set("k", &format!("expires_at = {}", DB::ago(1000))).await;
    let again = Ask { label: Some("next"), ..asked("k") };
    for _ in 0..3 {
        let next = ask(&db.pool, &again).await;
        assert_eq!(next.previous, Some((over.token.unwrap(), "crashed".to_owned())));
    }
}

async fn a_takeover_that_is_put_back_is_there_to_be_taken_over<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let crashed = ask(&db.pool, &Ask { label: Some("crashed"), ..Ask::of("k") }).await;
    db.set("k", &format!("expires_at = {}", DB::ago(1000))).await;
    let over = ask(&db.pool, &Ask { label: Some("put back"), ..Ask::of("k") }).await;
    assert!(over.previous.is_some());
    for again in ["put_back", "put_back"] {
        assert_eq!(change(&db.pool, again, "k", &over, None).await, "done");
    }
    let next = ask(&db.pool, &Ask::of("k")).await;
    assert!(next.token > over.token);
    assert_eq!(next.previous, Some((crashed.token.unwrap(), "crashed".to_owned())), "under which work was done");
}

async fn a_shorter_lease_does_not_shorten_the_claim<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let long = Ask { lease: HOUR, ..asked("k") };
    let one = ask(&db.pool, &long).await;
    let two = ask(&db.pool, &Ask { lease: HOUR / 60, ..long.clone() }).await;
    assert!(two.granted && one.token == two.token && one.expires_at <= two.expires_at, "{one:?} {two:?}");
    let refusal = ask(&db.pool, &Ask::of("k")).await;
    assert!(refusal.until >= one.expires_at && refusal.retry_after.unwrap() > HOUR / 2, "{refusal:?}");
}

/// It may be free in a moment, and its lease may be too short.
async fn a_claim_in_a_locked_row_is_busy_for_its_holder<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let again = asked("k");
    let one = ask(&db.pool, &again).await;
    let mut other = db.row_locked().await;
    let two = timeout(PATIENCE, ask(&db.pool, &again)).await.expect("it waits for nothing");
    assert_eq!((two.granted, two.reason.as_deref()), (false, Some("busy")));
    assert!(two.retry_after.is_some_and(|after| after < Duration::from_secs(1)), "{two:?}");
    for what in ["renew", "release", "abandon", "put_back"] {
        let outcome = timeout(PATIENCE, change(&db.pool, what, "k", &one, None)).await;
        assert_eq!(outcome.unwrap_or_else(|_| panic!("{what} waits for nothing")), "busy", "{what}");
    }
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    let three = ask(&db.pool, &again).await;
    assert!(three.granted && three.token == one.token, "{one:?} {three:?}");
}

/// Two transactions under one claim, each of which writes one more than it has read.
async fn a_confirmation_that_met_a_locked_row_reads_the_newest_rows<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    accounts(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let mut confirmed = 0;
    for round in 0..20 {
        let (mut one, mut two) = (db.pool.acquire().await.unwrap(), db.pool.acquire().await.unwrap());
        DB::execute_on(&mut one, DB::BEGIN).await.unwrap();
        DB::call_change(&mut one, "confirm", "k", holder, token, None).await.unwrap();
        let second = harness::spawn(async move {
            DB::execute_on(&mut two, DB::BEGIN).await.unwrap();
            // It gives up after a tenth of a second.
            let confirmed = DB::call_change(&mut two, "confirm", "k", holder, token, None).await.is_ok();
            let read = if confirmed { Some(balance_in::<DB>(&mut two, LEASE).await.unwrap()) } else { None };
            DB::execute_on(&mut two, "ROLLBACK").await.unwrap();
            read
        });
        tokio::time::sleep(Duration::from_millis(30)).await;
        write_in::<DB>(&mut one, LEASE, round).await.unwrap();
        DB::execute_on(&mut one, "COMMIT").await.unwrap();
        if let Some(read) = second.await.unwrap() {
            assert_eq!(read, round);
            confirmed += 1;
        }
    }
    assert!(confirmed > 0);
}
