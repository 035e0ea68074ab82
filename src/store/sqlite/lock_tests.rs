//! Statements on the rows of locks, and tickets, one by one: what they leave there.

use std::time::Duration;

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, Sqlite, SqliteConnection};
use tokio::time::sleep;

use crate::{
    key::{Claim, Holder, Key},
    rules::{Status, Terms},
    store::{
        Change, ClaimReply, ClaimStore as _, Form, HeldStore as _, Outcome,
        queue::QueueStore as _,
        sqlite::for_tests::{claimed, execute, free, granted, request, tables},
    },
};

const FORMS: [Form; 2] = [Form::Common, Form::IntegerTimes];
/// A token, and a ticket, of the year 2128.
const AHEAD: i64 = 5_000_000_000_000_000;
/// What a claim that is put back restores, and what it clears.
const RUN: [&str; 8] =
    ["lock_flag", "status", "begin_time", "end_time", "client_ip", "holder", "expires_at", "claimed_at"];
/// What stays as it is when a claim is sent again.
const CLAIM: [&str; 13] = [
    "lock_flag",
    "status",
    "begin_time",
    "end_time",
    "client_ip",
    "holder",
    "token",
    "claimed_at",
    "prior_token",
    "prior_client_ip",
    "prior_status",
    "prior_begin_time",
    "prior_end_time",
];

/// Returns columns of the key's row as one text.
async fn columns(conn: &mut SqliteConnection, key: &str, columns: &[&str]) -> String {
    let columns: Vec<String> = columns.iter().map(|column| format!("quote({column})")).collect();
    let sql = format!("SELECT {} FROM t_resource_lock WHERE key_resource = '{key}'", columns.join(" || ' ' || "));
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap()
}

async fn changed(conn: &mut SqliteConnection, claims: &[Claim], change: Change) -> Vec<Outcome> {
    Sqlite::change(conn, claims, change, None, Form::IntegerTimes).await.unwrap()
}

fn release() -> Change {
    Change::release(Status::Succeeded, &Terms::default(), TimeDelta::zero())
}

/// Each form has a statement of its own for a free row. A claim that is sent again must not take
/// itself for the run before it.
#[tokio::test]
async fn what_is_put_back_is_as_it_was_before() {
    for (form, times) in FORMS.into_iter().flat_map(|form| [(form, 1), (form, 2)]) {
        let conn = &mut tables().await;
        free(conn, &["k"]).await;
        let earlier = "UPDATE t_resource_lock SET status = 'F', begin_time = 3, end_time = 4, client_ip = 'earlier',
            prior_status = 'X', prior_begin_time = 1, prior_end_time = 2, prior_client_ip = 'first'";
        execute(conn, earlier).await;
        let before = columns(conn, "k", &RUN).await;
        let one = request("k", Holder::unique());
        let (claim, _) = granted(conn, &one, &Terms::default(), form).await;
        for _ in 1..times {
            assert_eq!(granted(conn, &one, &Terms::default(), form).await, (claim.clone(), None));
        }
        assert_ne!(columns(conn, "k", &RUN).await, before);
        // The reply to the first one may be lost.
        for _ in 0..2 {
            assert_eq!(changed(conn, std::slice::from_ref(&claim), Change::PutBack).await, [Outcome::Done]);
            assert_eq!(columns(conn, "k", &RUN).await, before, "{form:?}, claimed {times} times");
        }
    }
}

/// The row is that of the first claim again, but for its holder, its end and its token.
#[tokio::test]
async fn a_takeover_that_is_put_back_leaves_the_first_claim_to_be_taken_over() {
    for form in FORMS {
        let conn = &mut tables().await;
        let first = claimed(conn, "k", form).await;
        execute(conn, "UPDATE t_resource_lock SET expires_at = begin_time, client_ip = 'first'").await;
        let told = ["lock_flag", "status", "begin_time", "end_time", "client_ip", "claimed_at"];
        let (before, mut last) = (columns(conn, "k", &told).await, first.token);
        for _ in 0..2 {
            let (claim, prior) = granted(conn, &request("k", Holder::unique()), &Terms::default(), form).await;
            let prior = prior.unwrap();
            assert_eq!((prior.token, prior.label.as_str()), (first.token, "first"), "{form:?}");
            assert!(claim.token > last);
            last = claim.token;
            // The reply to the first one may be lost.
            for _ in 0..2 {
                assert_eq!(changed(conn, std::slice::from_ref(&claim), Change::PutBack).await, [Outcome::Done]);
                assert_eq!(columns(conn, "k", &told).await, before);
            }
            let late = Change::Renew(TimeDelta::hours(1));
            assert_eq!(changed(conn, &[claim], late).await, [Outcome::Lost]);
        }
    }
}

/// Only its end may differ. With another begin it would not stand, and its holder would lose it.
#[tokio::test]
async fn a_claim_that_is_sent_again_changes_nothing_but_its_end() {
    for (form, takes_over) in FORMS.into_iter().flat_map(|form| [(form, false), (form, true)]) {
        let conn = &mut tables().await;
        free(conn, &["k"]).await;
        if takes_over {
            claimed(conn, "k", form).await;
            execute(conn, "UPDATE t_resource_lock SET expires_at = begin_time").await;
        }
        let one = request("k", Holder::unique());
        let first = granted(conn, &one, &Terms::default(), form).await;
        assert_eq!(first.1.is_some(), takes_over);
        // As if it had been sent a second before.
        let back = ["begin_time", "claimed_at", "expires_at"].map(|column| format!("{column} = {column} - 1000000"));
        execute(conn, &format!("UPDATE t_resource_lock SET {}", back.join(", "))).await;
        let (before, end) = (columns(conn, "k", &CLAIM).await, columns(conn, "k", &["expires_at"]).await);
        assert_eq!(granted(conn, &one, &Terms::default(), form).await, first);
        assert_eq!(columns(conn, "k", &CLAIM).await, before, "{form:?}, taken over: {takes_over}");
        assert_ne!(columns(conn, "k", &["expires_at"]).await, end);
        assert_eq!(changed(conn, &[first.0], release()).await, [Outcome::Done]);
    }
}

/// Its row is not among those that are returned, unless it comes first.
#[tokio::test]
async fn a_claim_that_is_sent_again_beside_many_rows_of_others_is_extended() {
    let conn = &mut tables().await;
    let mut requests = Vec::new();
    for number in 0..45 {
        let key = format!("held {number}");
        claimed(conn, &key, Form::IntegerTimes).await;
        requests.push(request(&key, Holder::unique()));
    }
    free(conn, &["k"]).await;
    let one = request("k", Holder::unique());
    let (claim, _) = granted(conn, &one, &Terms::default(), Form::IntegerTimes).await;
    execute(conn, "UPDATE t_resource_lock SET expires_at = begin_time WHERE key_resource = 'k'").await;
    requests.push(one);
    let replies = Sqlite::claim(conn, &requests, &Terms::default(), None, Form::IntegerTimes).await.unwrap();
    let Some(ClaimReply::Granted { token, prior: None }) = replies.last() else { panic!("{replies:?}") };
    assert_eq!(*token, claim.token);
    assert_eq!(columns(conn, "k", &["expires_at > begin_time"]).await, "1");
}

/// As after the clock was set back.
#[tokio::test]
async fn a_token_is_above_one_that_is_ahead_of_the_clock() {
    let with_interval = Terms { min_interval: TimeDelta::hours(1), ..Terms::default() };
    let terms = [Terms::default(), with_interval];
    for (form, terms) in FORMS.into_iter().flat_map(|form| terms.iter().map(move |terms| (form, terms))) {
        for takes_over in [false, true] {
            let conn = &mut tables().await;
            free(conn, &["k"]).await;
            if takes_over {
                claimed(conn, "k", form).await;
            }
            execute(conn, &format!("UPDATE t_resource_lock SET token = {AHEAD}, expires_at = begin_time")).await;
            let (claim, prior) = granted(conn, &request("k", Holder::unique()), terms, form).await;
            assert_eq!((claim.token.get(), prior.is_some()), (AHEAD + 1, takes_over), "{form:?} {terms:?}");
        }
    }
}

async fn ticket(conn: &mut SqliteConnection, key: &str, number: i64, alive_until: i64) {
    let insert = "INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES";
    execute(conn, &format!("{insert} ('{key}', {number}, {alive_until})")).await;
}

async fn tickets(conn: &mut SqliteConnection) -> Vec<i64> {
    sqlx::query_scalar("SELECT ticket FROM t_resource_lock_queue ORDER BY ticket").fetch_all(conn).await.unwrap()
}

async fn join(conn: &mut SqliteConnection, key: &str) -> i64 {
    Sqlite::join(conn, &[Key::new(key).unwrap()], None).await.unwrap().unwrap()
}

/// As after the clock was set back, and within one millisecond.
#[tokio::test]
async fn a_ticket_comes_after_all_that_are_there() {
    let conn = &mut tables().await;
    ticket(conn, "other", AHEAD, i64::MAX).await;
    assert_eq!([join(conn, "k").await, join(conn, "k").await], [AHEAD + 1, AHEAD + 2]);
}

/// Its former owner may still give it up, or keep it alive.
#[tokio::test]
async fn a_ticket_that_was_given_up_is_not_issued_again() {
    let conn = &mut tables().await;
    let (first, second) = (join(conn, "k").await, join(conn, "k").await);
    Sqlite::leave(conn, &[second]).await.unwrap();
    sleep(Duration::from_millis(10)).await;
    let third = join(conn, "k").await;
    assert!(first < second && second < third, "{first} {second} {third}");
}

#[tokio::test]
async fn the_front_of_a_queue_has_its_own_tickets_up_to_a_number() {
    let conn = &mut tables().await;
    for (key, number) in [("k", 3), ("k", 9), ("other", 1), ("other", 4)] {
        ticket(conn, key, number, AHEAD).await;
    }
    let front = Sqlite::front(conn, &[Key::new("k").unwrap()], 5).await.unwrap();
    let front: Vec<_> = front.iter().map(|entry| (entry.key.as_str(), entry.number)).collect();
    assert_eq!(front, [("k", 3)]);
}

/// A ticket had a heartbeat since the queue was read.
#[tokio::test]
async fn of_the_tickets_that_were_read_those_that_have_lapsed_are_deleted() {
    let conn = &mut tables().await;
    for (number, alive_until) in [(1, 1), (2, AHEAD), (3, 1)] {
        ticket(conn, "k", number, alive_until).await;
    }
    Sqlite::clear(conn, &[1, 2]).await.unwrap();
    assert_eq!(tickets(conn).await, [2, 3]);
}
