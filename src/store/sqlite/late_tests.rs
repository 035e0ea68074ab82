//! Statements that are carried out after their limit.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Connection as _, Sqlite, SqliteConnection};

use crate::{
    key::{Claim, Holder, Key, Token},
    rules::{Row, Status, Terms},
    store::{
        Change, ClaimReply, ClaimRequest, ClaimStore as _, Form, HeldStore as _, Outcome, Store as _, TooLate,
        instances::{InstanceStore as _, Order, What},
        queue::QueueStore as _,
        schedule::{Extended, Extension, LOST, Pass, ScheduleStore as _},
        sqlite::{
            for_tests::{claimed, create_tables, execute, request, tables},
            schedule_tests::{claim_due, claim_of, due, times},
        },
    },
};

type DB = Sqlite;
type Conn = SqliteConnection;

const LEASE: TimeDelta = TimeDelta::seconds(60);

/// Reads the database's clock.
async fn clock(conn: &mut Conn) -> DateTime<Utc> {
    DB::now(conn).await.unwrap()
}

/// Returns a limit that has passed.
async fn over(conn: &mut Conn) -> Option<DateTime<Utc>> {
    Some(clock(conn).await - TimeDelta::milliseconds(1))
}

/// Returns a limit that has not passed.
async fn soon(conn: &mut Conn) -> Option<DateTime<Utc>> {
    Some(clock(conn).await + TimeDelta::minutes(1))
}

async fn create(conn: &mut Conn, requests: &[ClaimRequest]) {
    let keys: Vec<Key> = requests.iter().map(|request| request.key.clone()).collect();
    DB::create(conn, &keys, 60, std::time::Duration::from_secs(1), Form::Common).await.unwrap();
}

async fn claim(
    conn: &mut Conn,
    requests: &[ClaimRequest],
    not_after: Option<DateTime<Utc>>,
    form: Form,
) -> Vec<ClaimReply> {
    DB::claim(conn, requests, &Terms::default(), not_after, form).await.unwrap()
}

async fn rows(conn: &mut Conn, requests: &[ClaimRequest]) -> Vec<Row> {
    let replies = DB::look(conn, requests, &Terms::default()).await.unwrap();
    let row = |reply| if let ClaimReply::Seen { row: Some(row), .. } = reply { row } else { panic!("{reply:?}") };
    replies.into_iter().map(row).collect()
}

async fn ends_at(conn: &mut Conn, claim: &Claim) -> DateTime<Utc> {
    rows(conn, &[request(claim.key.as_str(), claim.holder)]).await.remove(0).expires_at.unwrap()
}

fn is_too_late(reply: &ClaimReply, not_after: Option<DateTime<Utc>>) -> bool {
    matches!(reply, ClaimReply::Seen { row: Some(_), now } if Some(*now) > not_after)
}

/// One key, keys of several holders, and keys of one holder; rows that are free, and rows whose
/// lease has ended.
#[tokio::test]
async fn a_late_claim_grants_nothing() {
    let (one, other) = (Holder::unique(), Holder::unique());
    let asked = [
        vec![request("a", one)],
        vec![request("a", one), request("b", other)],
        vec![request("a", one), request("b", one)],
    ];
    for form in [Form::Common, Form::IntegerTimes] {
        for requests in &asked {
            for has_ended in [false, true] {
                let conn = &mut tables().await;
                create(conn, requests).await;
                if has_ended {
                    for request in requests {
                        claimed(conn, request.key.as_str(), Form::Common).await;
                    }
                    execute(conn, "UPDATE t_resource_lock SET expires_at = begin_time").await;
                }
                let before = rows(conn, requests).await;
                let limit = over(conn).await;
                let replies = claim(conn, requests, limit, form).await;
                let (late, others): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| is_too_late(reply, limit));
                assert!(!late.is_empty(), "{form:?} {requests:?} {replies:?}");
                assert!(others.iter().all(|reply| matches!(reply, ClaimReply::Withheld)), "{replies:?}");
                let after = rows(conn, requests).await;
                assert_eq!(format!("{after:?}"), format!("{before:?}"), "{form:?} {requests:?}");
                for request in requests {
                    let limit = soon(conn).await;
                    let replies = claim(conn, std::slice::from_ref(request), limit, form).await;
                    assert!(matches!(replies[0], ClaimReply::Granted { .. }), "{replies:?}");
                }
            }
        }
    }
}

/// The first request was carried out in time, and its reply was lost.
#[tokio::test]
async fn a_late_claim_does_not_extend_what_its_holder_has() {
    let conn = &mut tables().await;
    for form in [Form::Common, Form::IntegerTimes] {
        let held = claimed(conn, "a", Form::Common).await;
        let again = [request("a", held.holder)];
        let (ends, limit) = (ends_at(conn, &held).await, over(conn).await);
        let replies = claim(conn, &again, limit, form).await;
        assert!(is_too_late(&replies[0], limit), "{replies:?}");
        let seen = rows(conn, &again).await.remove(0);
        assert_eq!((seen.holder, Token::new(seen.token)), (Some(*held.holder.as_uuid()), held.token));
        assert_eq!(ends_at(conn, &held).await, ends, "{form:?}");
        let limit = soon(conn).await;
        let replies = claim(conn, &again, limit, form).await;
        assert!(matches!(replies[0], ClaimReply::Granted { token, .. } if token == held.token), "{replies:?}");
        execute(conn, "DELETE FROM t_resource_lock").await;
    }
}

#[tokio::test]
async fn a_late_renewal_extends_nothing() {
    let conn = &mut tables().await;
    let held = [claimed(conn, "a", Form::Common).await, claimed(conn, "b", Form::Common).await];
    let ends = ends_at(conn, &held[0]).await;
    let renewal = Change::Renew(LEASE * 2);
    for claims in [&held[..1], &held] {
        let limit = over(conn).await;
        let outcomes = DB::change(conn, claims, renewal, limit, Form::Common).await.unwrap();
        let late = |outcome: &Outcome| matches!(outcome, Outcome::TooLate(TooLate { now }) if Some(*now) > limit);
        assert!(outcomes.iter().all(late), "{outcomes:?}");
        assert_eq!(ends_at(conn, &held[0]).await, ends);
    }
    let limit = soon(conn).await;
    let outcomes = DB::change(conn, &held, renewal, limit, Form::Common).await.unwrap();
    assert_eq!(outcomes, [Outcome::Done, Outcome::Done]);
    assert!(ends_at(conn, &held[0]).await > ends);
    // An ending is carried out at any time, and the claim is then lost, however late a renewal is.
    let release = Change::release(Status::Succeeded, &Terms::default(), TimeDelta::zero());
    let limit = over(conn).await;
    assert_eq!(DB::change(conn, &held, release, limit, Form::Common).await.unwrap(), [Outcome::Done, Outcome::Done]);
    let outcomes = DB::change(conn, &held, renewal, limit, Form::Common).await.unwrap();
    assert_eq!(outcomes, [Outcome::Lost, Outcome::Lost]);
}

#[tokio::test]
async fn a_late_ticket_is_not_added() {
    let conn = &mut tables().await;
    let keys = ["a", "b"].map(|key| Key::new(key).unwrap());
    let limit = over(conn).await;
    let joined = DB::join(conn, &keys, limit).await.unwrap();
    assert!(joined.is_err_and(|late| Some(late.now) > limit), "{joined:?}");
    assert_eq!(DB::queue_lengths(conn).await.unwrap(), []);
    let limit = soon(conn).await;
    DB::join(conn, &keys, limit).await.unwrap().unwrap();
    let mut lengths = DB::queue_lengths(conn).await.unwrap();
    lengths.sort();
    assert_eq!(lengths, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
}

#[tokio::test]
async fn a_late_claim_of_what_is_due_takes_and_records_nothing() {
    let conn = &mut due().await;
    for takes_over in [false, true] {
        if takes_over {
            assert_eq!(claim_due(conn, None).await.unwrap().claimed.len(), 1);
            execute(conn, "UPDATE t_resource_schedule SET due_at = slot").await;
        }
        let limit = over(conn).await;
        let reply = claim_due(conn, limit).await.unwrap();
        assert!(reply.claimed.is_empty(), "{reply:?}");
        assert!(reply.too_late.is_some_and(|late| Some(late.now) > limit), "{reply:?}");
        assert_eq!(DB::history(conn, &times().name, 9).await.unwrap().len(), 0);
        let limit = soon(conn).await;
        let reply = claim_due(conn, limit).await.unwrap();
        assert_eq!((reply.claimed.len(), reply.too_late), (1, None), "{reply:?}");
        let history = DB::history(conn, &times().name, 9).await.unwrap();
        assert_eq!(history.len(), usize::from(takes_over));
        assert!(history.iter().all(|run| run.error.as_deref() == Some(LOST) && run.attempt == 1), "{history:?}");
        let limit = soon(conn).await;
        let reply = claim_due(conn, limit).await.unwrap();
        assert_eq!((reply.claimed.len(), reply.too_late), (0, None), "nothing is due: {reply:?}");
        execute(conn, "UPDATE t_resource_schedule SET due_at = slot, holder = NULL, attempt = 0").await;
    }
}

async fn extend(conn: &mut SqliteConnection, claim: &Claim, not_after: Option<DateTime<Utc>>) -> Extended {
    DB::extend_run(conn, claim, Extension { lease: LEASE * 2, is_stopped: false, not_after }).await.unwrap()
}

#[tokio::test]
async fn a_late_extension_of_a_run_extends_nothing() {
    let conn = &mut due().await;
    let claim = claim_of(conn).await;
    let names = [claim.key.clone()];
    let ends = DB::registered(conn, &names).await.unwrap()[0].due_at;
    let limit = over(conn).await;
    let outcome = extend(conn, &claim, limit).await;
    let Extended::Is(Outcome::TooLate(TooLate { now })) = outcome else { panic!("{outcome:?}") };
    assert!(Some(now) > limit, "{outcome:?}");
    assert_eq!(DB::registered(conn, &names).await.unwrap()[0].due_at, ends);
    let limit = soon(conn).await;
    assert_eq!(extend(conn, &claim, limit).await, Extended::Is(Outcome::Done));
    assert!(DB::registered(conn, &names).await.unwrap()[0].due_at > ends);
    let other = Claim { holder: Holder::unique(), ..claim };
    let limit = over(conn).await;
    assert_eq!(extend(conn, &other, limit).await, Extended::Is(Outcome::Lost));
}

#[tokio::test]
async fn a_hand_back_that_is_sent_again_is_recognized() {
    let conn = &mut due().await;
    let vacant = Holder::unique();
    let claim = claim_of(conn).await;
    for _ in 0..2 {
        assert!(DB::hand_back(conn, &claim, vacant).await.unwrap());
    }
    let next = claim_due(conn, None).await.unwrap().claimed.remove(0);
    assert!(DB::hand_back(conn, &claim, vacant).await.unwrap(), "after the next claim");
    assert!(
        !DB::hand_back(conn, &Claim { token: next.claim.token, ..claim }, vacant).await.unwrap(),
        "another claim's"
    );
    assert_eq!(DB::history(conn, &times().name, 9).await.unwrap().len(), 1);
}

/// A pass that frees the row is recognized by the ticks that the history has as missed.
#[tokio::test]
async fn a_pass_that_is_sent_again_moves_nothing_further() {
    for runs in [true, false] {
        let conn = &mut due().await;
        let row = claim_due(conn, None).await.unwrap().claimed.remove(0);
        let claim = row.claim;
        let to = row.slot + TimeDelta::minutes(7);
        let (name, who) = (claim.key.as_str(), "alice");
        let skip = Order { what: What::Skip, name, since: row.slot, until: row.slot, who };
        DB::order(conn, &skip).await.unwrap();
        let pass =
            Pass { times: &times(), from: row.slot, to, runs, missed: 0, skipped: 7, error: Some("skipped by alice") };
        assert!(DB::skip_ticks(conn, &claim, &pass).await.unwrap());
        let state = async |conn: &mut Conn| {
            let mut row = DB::registered(conn, std::slice::from_ref(&claim.key)).await.unwrap().remove(0);
            row.now = row.slot;
            format!("{row:?} {:?}", DB::history(conn, &claim.key, 9).await.unwrap())
        };
        let before = state(conn).await;
        assert_eq!(DB::skip_ticks(conn, &claim, &pass).await.unwrap(), runs);
        assert_eq!(state(conn).await, before);
        assert!(DB::has_ended(conn, &claim, row.slot, 0, "M").await.unwrap());
    }
}

/// Another connection writes until the limit of the renewal has passed.
#[tokio::test]
async fn a_renewal_that_waits_past_its_limit_extends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.path().join("lock.db"));
    let options = options.create_if_missing(true).busy_timeout(std::time::Duration::from_secs(60));
    let (mut conn, mut other) =
        (Conn::connect_with(&options).await.unwrap(), Conn::connect_with(&options).await.unwrap());
    create_tables(&mut conn).await;
    let held = claimed(&mut conn, "a", Form::Common).await;
    let ends = ends_at(&mut conn, &held).await;
    execute(&mut other, "BEGIN IMMEDIATE").await;
    let limit = clock(&mut other).await + TimeDelta::milliseconds(20);
    let renewal = async {
        DB::change(&mut conn, std::slice::from_ref(&held), Change::Renew(LEASE * 2), Some(limit), Form::Common).await
    };
    let commit = async {
        while clock(&mut other).await <= limit {
            tokio::task::yield_now().await;
        }
        execute(&mut other, "COMMIT").await;
    };
    let (outcomes, ()) = tokio::join!(renewal, commit);
    assert!(matches!(outcomes.unwrap()[..], [Outcome::TooLate(TooLate { now })] if now > limit));
    assert_eq!(ends_at(&mut conn, &held).await, ends);
}
